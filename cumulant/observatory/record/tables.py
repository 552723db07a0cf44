"""The tables of a record: one row per head, from its tokens, sampled queries and weights; one per block and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.hopfield import CLASSES, head_class
from cumulant.observatory.hooks.hidden_states import StageKey
from cumulant.observatory.record.record import AttentionLayer, Record
from cumulant.observatory.record.rows import Cell, HeadRow, LayerRow, NullComparison, TokenStatistics, finite
from cumulant.observatory.statistics.gaussianity import (
    Comparison,
    ShapeStatistics,
    compare_with_gaussian,
    participation_ratio,
    principal_axes,
    reconstructed_vectors,
)
from cumulant.observatory.statistics.quantities import ADDED, LENS, TOP_KEY_NAMES, distance_names
from cumulant.observatory.statistics.states import MeanScatter, StateSample, Statistic, WithinScatter, unflatten
from cumulant.observatory.statistics.tally import Tally, bin_edges, first_positions
from cumulant.observatory.statistics.text_parts import SUMS as PART_SUMS
from cumulant.special import effective_rank

LINK_SUMS = (
    *("link/count", "link/eta", "link/mean", "link/eta_eta", "link/mean_mean", "link/eta_mean"),
    *("keys/count", "keys/sum", "keys/square"),
)
STATES = {"size": "rms", "cosine": "cosine_to_mean", "pairwise": "pairwise_cosine"}  # under the cell of a stage
STATES |= {q.name: q.name for q in LENS}
PERTURBATIONS = ("growth", "step", "inverse", "contraction")  # under the block and stage themselves
SUBLAYERS = tuple(q.name for q in ADDED)  # under the block and its end
TOKEN_COLUMNS = {  # of tokens.parquet
    **{"excerpt": int, "text": str, "position": int, "token": str, "layer": int, "head": int},
    **{"entropy": float, "log_normalizer": float},
    **{name: float if name.endswith("_mass") else int for name in TOP_KEY_NAMES},
}
DISTANCES = ShapeStatistics._fields


PART_COLUMNS = {  # of parts.parquet
    **{"layer": int, "head": int, "name": str, "source": str, "part": str},
    **{"mass": float, "chance": float, "queries": int, "mass_null_random": float, "mass_null_shuffled": float},
}


class Tables(NamedTuple):
    """A record with its rows; those of the layers take a moment to compute."""

    record: Record
    heads: list[HeadRow]
    layers: list[LayerRow]

    @classmethod
    def of(cls, record: Record) -> Tables:
        return cls(record, head_rows(record), layer_table(record))


def head_rows(record: Record) -> list[HeadRow]:
    """One row a head, layer by layer."""
    blocks = [stage.block for stage in record.meta.stages]
    rows = []
    for index, layer in enumerate(record.modules):
        tallies = {quantity: record.tallies.get(f"{layer.name}/{quantity}") for quantity in record.quantities}
        statistics = {name: TokenStatistics.of(tally) for name, tally in tallies.items() if tally is not None}
        numbers = {name: values.tolist() for name, values in layer_fits(record, layer).items()}
        classes = hopfield_classes(tallies.get("k90_share"))
        queries = record.sums.get(f"{layer.name}/link/count")
        for head in range(layer.heads):
            rows.append(
                HeadRow(
                    layer=index,
                    head=head,
                    name=layer.name,
                    block=block_of_layer(layer.name, blocks),
                    kind=layer.kind,
                    hopfield_class=None if classes is None else classes[head],
                    quantities={name: cells[head] for name, cells in statistics.items()},
                    numbers={name: finite(values[head]) for name, values in numbers.items()},
                    link_queries=None if queries is None else int(queries[head]),
                    link_needed=None if queries is None else needed_queries(layer.dim),
                )
            )
    return rows


def head_columns(heads: list[HeadRow], nulls: dict[str, list[HeadRow]]) -> list[dict[str, Cell]]:
    """The rows of heads.parquet: every head with the means of the same head in the nulls."""
    return [row.columns(others) for row, others in zip(heads, counterparts(heads, nulls), strict=True)]


def counterparts(heads: list[HeadRow], nulls: dict[str, list[HeadRow]]) -> list[dict[str, HeadRow]]:
    """Of every head, the same head in the nulls that have it."""
    by_head = {name: {(row.layer, row.head): row for row in rows} for name, rows in nulls.items()}
    keys = [(row.layer, row.head) for row in heads]
    return [{name: rows[key] for name, rows in by_head.items() if key in rows} for key in keys]


def token_rows(record: Record) -> list[dict]:
    """One row for every token of the excerpts, layer and head."""
    rows = []
    for number, excerpt in enumerate(record.excerpts):
        for index, layer in enumerate(record.modules):
            names = ("entropy", "log_normalizer")
            values = {n: excerpt.values[n][layer.name] for n in names if layer.name in excerpt.values.get(n, {})}
            top = {n: excerpt.values[n][layer.name] for n in TOP_KEY_NAMES if layer.name in excerpt.values.get(n, {})}
            for head in range(layer.heads if len(values) == len(names) else 0):
                looks = {name: _cells(name, table[head].tolist()) for name, table in top.items()}
                for position, token in enumerate(excerpt.tokens):
                    row = {"excerpt": number, "text": excerpt.name, "position": position, "token": token}
                    row |= {"layer": index, "head": head}
                    row |= {name: float(table[head, position]) for name, table in values.items()}
                    rows.append(row | {name: cells[position] for name, cells in looks.items()})
    return rows


def part_rows(record: Record, nulls: Mapping[str, Record] | None = None) -> list[dict]:
    """Of every head, what all queries and those of each part give to each part that any of them sees."""
    own, others = _part_means(record), {name: _part_means(null) for name, null in (nulls or {}).items()}
    names = {layer.name: index for index, layer in enumerate(record.modules)}
    rows = []
    for key, (mass, chance, count) in own.items():
        module, head, source, part = key
        row = {"layer": names[module], "head": head, "name": module, "source": source, "part": part}
        row |= {"mass": mass, "chance": chance, "queries": count}
        beside = {f"mass_null_{name}": others.get(name, {}).get(key, (nan,))[0] for name in ("random", "shuffled")}
        rows.append(row | beside)
    return rows


def _part_means(record: Record) -> dict[tuple[str, int, str | None, str], tuple[float, float, int]]:
    """(module, head, from, to) → mean mass, mean chance, queries; from None: all queries."""
    out = {}
    for layer in record.modules:
        if f"{layer.name}/{PART_SUMS[0]}" not in record.sums:
            continue
        sums = (record.sums[f"{layer.name}/{name}"] for name in PART_SUMS)
        mass, chance, count = (torch.cat([t.sum(1, keepdim=True), t[:, 1:]], 1).tolist() for t in sums)
        for head in range(layer.heads):
            for i, source in enumerate((None, *record.meta.parts)):
                for j, part in enumerate(record.meta.parts):
                    if n := int(count[head][i][j]):
                        means = mass[head][i][j] / n, chance[head][i][j] / n, n
                        out[layer.name, head, source, part] = means
    return out


def _cells(name: str, numbers: list[float]) -> list[float | int | None]:
    """Shares as they are, positions as integers; None where a query sees no such key."""
    kind = float if name.endswith("_mass") else int
    return [kind(x) if x == x else None for x in numbers]


def by_position(tally: Tally, cell: int) -> list[list[float]]:
    """[position, mean] where something was seen."""
    means = tally.by_position[cell]
    return [[first, float(m)] for first, m in zip(first_positions(), means.tolist(), strict=True) if m == m]


def histogram(tally: Tally, cell: int) -> list[list[float]]:
    """[low, high, count] of the bins that hold something."""
    counts = tally.histogram[cell]
    return [[*bin_edges(i), int(counts[i])] for i in counts.nonzero()[:, 0].tolist()]


def hopfield_classes(tally: Tally | None) -> list[str] | None:
    """Class I–IV of every head, from the median share of the visible keys that have 90 % of the mass."""
    return None if tally is None else [CLASSES[int(c)] for c in head_class(tally.quantile(0.5), 1)]


def layer_fits(record: Record, layer: AttentionLayer) -> dict[str, Tensor]:
    """Link and Gaussian fits of every head, from sums over sampled queries; numbers of the weights as they are."""
    own = f"{layer.name}/"
    sums = {key.removeprefix(own): value for key, value in record.sums.items() if key.startswith(own)}
    out = {key.removeprefix(own): value for key, value in record.weights.items() if key.startswith(own)}
    for name, chance in ((key.removesuffix("/chance"), sums[key]) for key in sums if key.endswith("/chance")):
        out[f"{name}_chance"] = chance / record.tallies[f"{own}{name}"].count.clamp_min(1)
    if "distance/mass" in sums:
        shares = sums["distance/mass"] / sums["distance/count"].clamp_min(1)[:, None]
        out |= dict(zip(distance_names(), shares.unbind(1), strict=True))
    if "distance/before" in sums:
        shares = sums["distance/before"] / sums["distance/count"].clamp_min(1)[:, None]
        out |= {f"{name}_before": share for name, share in zip(distance_names()[1:], shares.unbind(1)[1:], strict=True)}
    if "gauss/left" in sums:
        whole = sums["gauss/whole"]
        out["gaussian_r2"] = 1 - sums["gauss/left"] / whole.clamp_min(torch.finfo(whole.dtype).tiny)
    if "link/count" in sums:
        out |= link_from_sums(*(sums[name] for name in LINK_SUMS))
        out["link_r2"] = adjusted(out["link_r2"], sums["link/count"], layer.dim)
    return out


def adjusted(r_squared: Tensor, count: Tensor, slopes: int) -> Tensor:
    """R² less what so many slopes explain by chance: 1 − (1 − R²)(n − 1)/(n − slopes − 1).

    Without it a fit to fewer queries looks better: that of a null, which reads less, than that of the model.

    >>> adjusted(torch.tensor([0.5]), torch.tensor([129]), 64)              # 64 of 129 directions are explained anyway
    tensor([0.])
    """
    freedom = (count - slopes - 1).clamp_min(1).to(r_squared.dtype)
    return 1 - (1 - r_squared) * (count - 1).to(r_squared.dtype) / freedom


def needed_queries(dim: int) -> int:
    """Of a link fit in ``dim`` channels: fewer queries fit anything.

    >>> needed_queries(64)
    129
    """
    return 2 * dim + 1


def link_from_sums(
    link_count, link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_count, keys_sum, keys_square
) -> dict[str, Tensor]:
    """R² of the affine fit η ≈ A m + b along the directions of the keys, and |A − Cov(K)⁺| / |Cov(K)⁺| (S2-E15).

    NaN for a head whose sums are not finite, as of scores that overflow.
    """
    sums = (link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_sum, keys_square)
    finite = torch.stack([t.isfinite().flatten(1).all(1) for t in sums]).all(0)
    link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_sum, keys_square = (
        t.nan_to_num(0.0, 0.0, 0.0) for t in sums
    )
    link_count = torch.where(finite, link_count, 0.0)
    n = link_count.clamp_min(1)[:, None]
    eta, mean = link_eta / n, link_mean / n
    c_ee = link_eta_eta / n[..., None] - eta[..., None] * eta[:, None]
    c_mm = link_mean_mean / n[..., None] - mean[..., None] * mean[:, None]
    c_em = link_eta_mean / n[..., None] - eta[..., None] * mean[:, None]
    k = keys_count.clamp_min(1)[:, None]
    centre = keys_sum / k
    spread = keys_square / k[..., None] - centre[..., None] * centre[:, None]
    inverse = torch.linalg.pinv(spread, rtol=1e-10, hermitian=True)
    onto = inverse @ spread  # the projector on what the keys span
    slope = onto @ c_em @ torch.linalg.pinv(c_mm, rtol=1e-10, hermitian=True)
    explained = torch.einsum("hij,hij->h", slope, onto @ c_em)
    whole = torch.einsum("hij,hij->h", onto @ c_ee, onto)
    size = torch.linalg.matrix_norm(inverse)
    enough = link_count >= needed_queries(c_mm.shape[-1])
    r2 = torch.where(enough & (whole > 0), explained / torch.where(whole > 0, whole, 1), torch.nan)
    error = torch.linalg.matrix_norm(slope - inverse) / torch.where(size > 0, size, 1)
    return {"link_r2": r2.clamp(max=1.0), "link_slope_error": torch.where(enough, error, torch.nan)}


def layer_table(record: Record) -> list[LayerRow]:
    """The rows of a record."""
    return layer_rows(record.hidden, record.meta.stages, [layer.name for layer in record.modules])


def layer_rows(
    state: dict[str, Tensor], stages: Sequence[StageKey], layers: Sequence[str] = (), *, seed: int = 0
) -> list[LayerRow]:
    """One row per stage, in their order.

    state, stages  what `HiddenStateObserver.state` and `HiddenStateObserver.names` return
    layers         paths of the attention modules: the layer of a row is the first of them in its block
    """
    statistics, cells, drawn, rows = unflatten(state), {}, {}, []
    blocks = list(dict.fromkeys(stage.block for stage in stages))
    first = {block_of_layer(name, blocks): layer for layer, name in reversed([*enumerate(layers)])}
    for block, stage, cell, role in stages:
        if cell not in cells:
            cells[cell] = _cell_columns(statistics, cell, seed, drawn)
        own = {name: statistics.get(f"{block}/{stage}/{name}") for name in (*PERTURBATIONS, *SUBLAYERS)}
        perturbed = own["growth"] if isinstance(own["growth"], Tally) else own["contraction"]
        row = cells[cell] | {quantity: _token_statistics(tally) for quantity, tally in own.items()}
        row["perturbed"] = int(perturbed.count) if isinstance(perturbed, Tally) else 0
        if isinstance(own["inverse"], Tally):
            row["tokens"] = int(own["inverse"].count)
        rows.append(LayerRow(block, stage, role, first.get(block), **row))
    return rows


def block_of_layer(name: str, blocks: Sequence[str]) -> str | None:
    """The block that an attention module is in, by their paths.

    >>> block_of_layer("h.1.attn", ["h.0", "h.1", "h.10"])
    'h.1'
    """
    inside = [block for block in blocks if f"{name}.".startswith(f"{block}.")]
    return max(inside, key=len, default=None)


def layer_spectra(state: dict[str, Tensor], stages: Sequence[StageKey]) -> dict[str, list[float]]:
    """Eigenvalues of the covariance, descending, under `block/stage`, wherever there is one."""
    statistics = unflatten(state)
    spreads = {f"{s.block}/{s.stage}": _finite(statistics.get(f"{s.cell}/spread")) for s in stages}
    return {name: _spectrum(spread).tolist() for name, spread in spreads.items() if isinstance(spread, MeanScatter)}


def read_covariance(state: dict[str, Tensor], stages: Sequence[StageKey], block: str) -> Tensor | None:
    """(D, D) covariance of the states that the attention of a block reads, as `ascent_index` needs it.

    Behind a norm these are the normed states without gain, for the gain is in the weights of the head; otherwise the
    input of the block. None where no covariance was kept.
    """
    spreads = unflatten({k: v for k, v in state.items() if ":spread." in k})
    for stage in sorted((s for s in stages if s.block == block), key=lambda s: s.role != "front"):
        spread = spreads.get(f"{stage.cell}/spread")
        if isinstance(spread, MeanScatter) and (stage.role == "front" or stage.stage == "in"):
            return spread.covariance
    return None


def _finite(statistic: Statistic | None) -> Statistic | None:
    """None for what overflowed, of which nothing can be said."""
    tensors = [getattr(statistic, f.name) for f in fields(statistic)] if statistic is not None else []
    return statistic if all(bool(tensor.isfinite().all()) for tensor in tensors) else None


def _cell_columns(statistics: dict[str, Statistic], cell: str, seed: int, drawn: dict) -> dict:
    row: dict = {name: _token_statistics(statistics.get(f"{cell}/{key}")) for key, name in STATES.items()}
    row["tokens"] = row["rms"].count
    spread, sample = _finite(statistics.get(f"{cell}/spread")), _finite(statistics.get(f"{cell}/sample"))
    within = _finite(statistics.get(f"{cell}/within"))
    if isinstance(spread, MeanScatter):
        row |= _spread_columns(spread)
    if isinstance(sample, StateSample):
        row |= {"channels": sample.state.shape[1], "sampled": len(sample.priority)}
    if isinstance(within, WithinScatter) and isinstance(sample, StateSample):
        row |= {"whitened": int(within.tokens), "freedom": int(within.tokens - within.sequences)}
        row |= _distance_columns(_compared(within, sample, seed, drawn), row["sampled"])
    return row


def _compared(within: WithinScatter, sample: StateSample, seed: int, drawn: dict) -> Comparison:
    count, sequences = int(within.tokens), int(within.sequences)
    mean = torch.zeros(sample.state.shape[1], dtype=torch.float64)
    along = principal_axes(mean, within.covariance, count - sequences + 1)
    names = {"sequences": sequences, "sequence": sample.sequence, "length": sample.length}
    return compare_with_gaussian(sample.state, along, count, **names, seed=seed, drawn=drawn)


def _token_statistics(tally: Statistic | None) -> TokenStatistics:
    return TokenStatistics.of(tally)[0] if isinstance(tally, Tally) else TokenStatistics()


def _spread_columns(spread: MeanScatter) -> dict[str, float]:
    if not float(spread.scatter.trace()) > 0:
        return {}
    value = _spectrum(spread)
    total = float(value.sum())
    rank = float(effective_rank(value, int(spread.count)))
    ratio = min(rank, participation_ratio(value, int(spread.count)))
    top = float(value[0]) / total
    return {"variance": total, "effective_rank": rank, "participation_ratio": ratio, "top_share": top}


def _spectrum(spread: MeanScatter) -> Tensor:
    return torch.linalg.eigvalsh(spread.covariance).flip(0).clamp_min(0)


def _distance_columns(compared: Comparison, sampled: int) -> dict:
    laws = (compared.observed, compared.null_mean, compared.null_low, compared.null_high)
    row = {name: NullComparison(*(finite(getattr(law, name)) for law in laws)) for name in DISTANCES}
    return row | {
        "gaussian_rank": compared.rank,
        "mardia_dim": compared.principal,
        "reconstructed": reconstructed_vectors(sampled, compared.rank),
    }
