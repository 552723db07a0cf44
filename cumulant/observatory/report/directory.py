"""The directory that an observation leaves: tables in Parquet, the record, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cumulant.checks import sentence
from cumulant.files import write_parquet
from cumulant.observatory.record.manifest import RECORD
from cumulant.observatory.record.record import UNREADABLE, Record, null_places
from cumulant.observatory.record.recorder import SAMPLE, looked_share
from cumulant.observatory.report.layer_table import Row, layer_rows, layer_spectra
from cumulant.observatory.report.page import render_page
from cumulant.observatory.report.tables import by_position, figures, head_rows, histogram, hopfield_classes
from cumulant.observatory.report.verdicts import verdicts
from cumulant.observatory.statistics.quantities import BY_NAME

DEPTH = {  # names on the page → columns of the table of layers
    "rms": "size_mean",
    "mean_cosine": "pairwise_mean",
    "effective_rank": "effective_rank",
    "participation": "participation_ratio",
}
BANDED = ("sliced_w2", "skewness", "kurtosis", "lle_error")  # each with its null and the band of it


STREAM = {  # of the hidden states
    "expansion": ("expansion", "log |δ after| / |δ before|", "Growth of a small random perturbation of all tokens by a sublayer with its residual."),
    "contraction": ("contraction", "log |δ after| / |δ before|", "The same for a norm: below 0 it contracts."),
}  # fmt: skip
NUMBERS = {  # of a head, beside its quantities
    "gradientness": ("gradient-ness", "cos(W_O W_V, W_Qᵀ W_K)", "1 if the head climbs its log-normalizer, −1 if it descends it, 0 ± 1/D for random weights."),
    "ascent_index": ("ascent index", "tr(VBᵀ)/(|V||B|)", "The same where the states are white: above 0 the head clusters, below 0 it makes the law more Gaussian (§12)."),
    "link_r2": ("link fit R²", "R² of η ≈ A·∇G(η) + b", "How linear the canonical link of the head is (S2-E15)."),
    "link_slope_error": ("link slope error", "|A − Cov(K)⁻¹| / |Cov(K)⁻¹|", "0 if the keys are Gaussian for the head's queries."),
    "ablation_damage": ("damage if replaced", "1 − cos, or relative change of perplexity", "What the model loses if this head alone becomes its Gaussian approximation (S1-C1)."),
    "gaussian_r2": ("Gaussian fit R²", "R² of v̄ + Cov(v,k)η", "How much of the output one Gaussian in the place of the keys explains (S1-C1)."),
}  # fmt: skip


def write_tables(record: Record, directory: Path, nulls: dict[str, Record] | None = None) -> None:
    """heads.parquet, layers.parquet and tokens.parquet, each in one step; heads with the means of their nulls."""
    heads = head_rows(record)
    for name, null in (nulls or {}).items():
        for row, other in zip(heads, head_rows(null), strict=False):
            row |= {
                f"{key}_null_{name}": value for key, value in other.items() if key.endswith("_mean") or key in NUMBERS
            }
    write_parquet(heads, directory / "heads.parquet")
    write_parquet(layer_rows(record.hidden, record.meta.get("places", [])), directory / "layers.parquet")
    write_parquet(token_rows(record), directory / "tokens.parquet")


def token_rows(record: Record) -> list[dict]:
    """One row for every token of the passages, layer and head."""
    rows = []
    for number, passage in enumerate(record.passages):
        for index, layer in enumerate(record.layers):
            entropy = passage.values.get("entropy", {}).get(layer.name)
            log_normalizer = passage.values.get("log_normalizer", {}).get(layer.name)
            if entropy is None or log_normalizer is None:
                continue
            for head in range(layer.heads):
                for position, token in enumerate(passage.tokens):
                    rows.append(
                        {
                            "passage": number,
                            "text": passage.name,
                            "position": position,
                            "token": token,
                            "layer": index,
                            "head": head,
                            "entropy": float(entropy[head, position]),
                            "log_normalizer": float(log_normalizer[head, position]),
                        }
                    )
    return rows


def read_nulls(directory: Path, record: Record) -> dict[str, Record]:
    """The records of the nulls beside a record; a killed run may have none yet."""
    found = {}
    for name, place in null_places(directory).items():
        if (place / RECORD).is_file():
            found[name] = Record.load(place)
            if [layer[:3] for layer in found[name].layers] != [layer[:3] for layer in record.layers]:
                got, advice = f"others in {place}", "Move it away, or observe again."
                raise ValueError(sentence(str(directory), "the layers of the record in its nulls", got, advice))
    return found


def read_ablation(directory: Path) -> dict | None:
    """What ablation.json of a directory holds; None if there is none."""
    path = directory / "ablation.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        words = all(isinstance(found[name], str) for name in ("kind", "measure"))
        numbers = [found[name] for name in ("all_at_once", "control", "baseline", "threshold")]
        numbers += [row["damage"] for row in found["rows"]]
        counts = [found[name] for name in ("heads", "can_go", "together", "tokens")]
        counts += [row[name] for row in found["rows"] for name in ("layer", "head")]
        whole = words and found["heads"] == len(found["rows"]) > 0
        if whole and all(type(n) in (int, float) for n in numbers) and all(type(n) is int for n in counts):
            return found
    except UNREADABLE:
        pass
    raise ValueError(sentence(str(path), "what --ablate wrote", "something else", "Delete it, or observe again."))


def render(
    record: Record, path: str | Path, nulls: dict[str, Record] | None = None, ablation: dict | None = None
) -> None:
    """One self-contained HTML page of a record, beside the records of its nulls and what ablation.json holds."""
    render_page(page_data(record, nulls or {}, ablation), Path(path))


def page_data(
    record: Record, nulls: dict[str, Record], ablation: dict | None = None, depth: list[Row] | None = None
) -> dict:
    """Everything the page shows, as plain data; ``depth`` is the table of layers, if it is at hand."""
    depth = layer_rows(record.hidden, record.meta.get("places", [])) if depth is None else depth
    heads = head_rows(record)
    damage = {(row["layer"], row["head"]): row["damage"] for row in (ablation or {}).get("rows", [])}
    for row in heads:
        if (row["layer"], row["head"]) in damage:
            row["ablation_damage"] = damage[row["layer"], row["head"]]
    null_heads = {name: head_rows(null) for name, null in nulls.items()}
    dimension = record.meta.get("dimension") or 1
    untrained = nulls.get("random")
    null_depth = [] if untrained is None else layer_rows(untrained.hidden, untrained.meta.get("places", []))
    share = looked_share(record.meta.get("batch_size", 1), record.meta.get("max_length", 1))
    answers = verdicts(heads, depth, null_heads.get("random", []), dimension, null_depth, ablation, share)
    return {
        "meta": record.meta | {"text": record.meta.get("text", ""), "sample_fraction": 1 / SAMPLE},
        "verdicts": [a._asdict() | {"numbers": [n._asdict() for n in a.numbers]} for a in answers],
        "quantities": _definitions(record, heads),
        "layers": [
            {"index": i, "name": layer.name, "kind": layer.kind, "heads": layer.heads}
            for i, layer in enumerate(record.layers)
        ],
        "heads": _heads(record, heads, null_heads),
        "depth": _depth(depth),
        "spectra": [
            {"block": place.rpartition("/")[0], "eigenvalues": values}
            for place, values in layer_spectra(record.hidden, record.meta.get("places", [])).items()
            if place.endswith("/out")
        ],
        "texts": _texts(record),
    }


def _definitions(record: Record, heads: list[dict]) -> list[dict]:
    known = [BY_NAME[name] for name in BY_NAME if name in record.quantities]
    out: list[dict] = [
        {"name": q.name, "label": q.label, "equation": q.equation, "words": q.words, "unit": q.unit, "good_range": None}
        for q in known
    ]
    for name, (label, equation, words) in STREAM.items():
        out.append(
            {"name": name, "label": label, "equation": equation, "words": words, "unit": "nats", "good_range": None}
        )
    for name, (label, equation, words) in NUMBERS.items():
        if any(row.get(name) is not None for row in heads):
            out.append(
                {"name": name, "label": label, "equation": equation, "words": words, "unit": "", "good_range": None}
            )
    return out


def _heads(record: Record, rows: list[dict], null_rows: dict[str, list[dict]]) -> list[dict]:
    out, cell = [], 0
    for index, layer in enumerate(record.layers):
        classes = hopfield_classes(record, layer)
        for head in range(layer.heads):
            values: dict[str, Any] = {}
            for quantity in record.quantities:
                tally = record.tallies.get(f"{layer.name}/{quantity}")
                if tally is None or not int(tally.count[head]):
                    continue
                values[quantity] = figures(tally, head) | {
                    "by_position": by_position(tally, head),
                    "histogram": histogram(tally, head),
                }
                for null, other in null_rows.items():
                    seen = other[cell] if cell < len(other) else {}
                    values[quantity][f"null_{null}"] = seen.get(f"{quantity}_mean")
            for name in NUMBERS:
                if rows[cell].get(name) is not None:
                    values[name] = {"mean": rows[cell][name], "count": 1}
                    for null, other in null_rows.items():
                        values[name][f"null_{null}"] = other[cell].get(name) if cell < len(other) else None
            kind = None if classes is None else classes[head]
            out.append({"layer": index, "head": head, "hopfield_class": kind, "values": values})
            cell += 1
    return out


def _depth(rows: list[Row]) -> list[dict]:
    """Rows of the stream, each with what made it: growth by a sublayer, or contraction by a norm (both logarithms).

    In a post-norm block norms stand on the stream, so that a step to "attention normed" or to the end is a contraction;
    in a pre-norm block they stand on branches, and the contraction is put where the norm reads.
    """
    out: list[dict] = []
    for block in dict.fromkeys(str(row["block"]) for row in rows):
        mine = [row for row in rows if row["block"] == block]
        stream = [row for row in mine if row["role"] == "state"]
        norms = [row["contraction_mean"] for row in mine if row["role"] != "state"]
        post = any(str(row["stage"]).endswith("normed") for row in stream)
        for index, row in enumerate(stream):
            name = str(row["stage"])
            normed = post and (name.endswith("normed") or name == "out")
            beside = norms[index] if not post and index < len(norms) and name != "out" else None
            known: dict = {"block": block, "stage": name}
            known |= {k: _json(row.get(column)) for k, column in DEPTH.items()}
            known["expansion"] = None if normed else _json(row.get("step_mean"))
            known["contraction"] = _json(row.get("step_mean")) if normed else _json(beside)
            for quantity in BANDED:
                for part in ("", "_null", "_null_low", "_null_high"):
                    known[quantity + part] = _json(row.get(quantity + part))
            out.append(known)
    return out


def _texts(record: Record) -> list[dict]:
    out = []
    for passage in record.passages:
        values: dict[str, dict[str, list[float]]] = {}
        for quantity, by_layer in passage.values.items():
            for index, layer in enumerate(record.layers):
                table = by_layer.get(layer.name)
                if table is not None:
                    for head in range(layer.heads):
                        values.setdefault(quantity, {})[f"{index}.{head}"] = [_json(x) for x in table[head].tolist()]
        out.append({"name": passage.name, "tokens": list(passage.tokens), "values": values})
    return out


def _json(value: object) -> Any:
    return value if not isinstance(value, float) or (value == value and abs(value) != float("inf")) else None
