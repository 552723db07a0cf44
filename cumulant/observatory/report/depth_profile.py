"""What the page shows over the depth of a model: predictions of the logit lens, contributions, effective rank; and the
reasons why some of it is not defined."""

from __future__ import annotations

from collections.abc import Sequence

from cumulant.observatory.record.meta import Meta
from cumulant.observatory.record.rows import HeadRow, LayerRow, TokenStatistics, known
from cumulant.observatory.statistics.quantities import ADDED, DEPTH, LENS, WITH_REASONS

SHOWN = (*(q.name for q in LENS), *(q.name for q in ADDED if not q.name.endswith("_cosine")), "effective_rank")
ERRORS = tuple(q.name for q in LENS)  # of few tokens: their standard errors are shown


def depth_rows(
    layers: Sequence[LayerRow], heads: Sequence[HeadRow], null_layers: Sequence[LayerRow] = ()
) -> list[dict]:
    """One row for the state before the first block of each stack, and one after every block.

    stack, block, depth  the list that the block is in, its path, and how many blocks of the list the state has passed
    Q, Q_se, Q_count     of `SHOWN`; Q_null_random: of the same architecture at random initialisation
    heads                contribution of every head of the block's attention: [layer, head, value]
    """
    nulls = {(row.block, row.stage): row for row in null_layers}
    depths: dict[str, int] = {}
    out = []
    for row in layers:
        stack = row.block.rpartition(".")[0]
        if row.role != "state" or row.stage not in ("in", "out") or (row.stage == "in" and stack in depths):
            continue
        depths[stack] = depths.get(stack, -1) + 1
        cells: dict = {"stack": stack, "block": row.block, "stage": row.stage, "depth": depths[stack]}
        for name in SHOWN:
            value, null = getattr(row, name), nulls.get((row.block, row.stage))
            cells[name] = _number(value)
            cells[f"{name}_null_random"] = None if null is None else _number(getattr(null, name))
            if name in ERRORS:
                cells |= {f"{name}_se": value.se, f"{name}_count": value.count}
        inside = [head for head in heads if head.block == row.block and row.stage == "out"]
        added = [(head.layer, head.head, head.value("contribution")) for head in inside]
        out.append(cells | {"heads": [list(cell) for cell in added if known(cell[2:])]})
    return out if any(known([row[name] for name in SHOWN if row[name] is not None]) for row in out) else []


def undefined_rows(meta: Meta) -> list[dict]:
    """The quantities that are not defined, or not everywhere, each with its label and the reason."""
    labels = {q.name: q.label for q in WITH_REASONS}
    depth = {q.name for q in (*LENS, *DEPTH)}
    return [
        {"name": name, "label": labels.get(name, name.replace("_", " ")), "reason": reason, "depth": name in depth}
        for name, reason in meta.undefined.items()
    ]


def _number(value: TokenStatistics | float) -> float:
    return value.value if isinstance(value, TokenStatistics) else value
