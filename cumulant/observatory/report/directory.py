"""The directory that an observation leaves: tables in Parquet, the record, and the page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import torch

from cumulant.checks import sentence
from cumulant.files import write_parquet
from cumulant.observatory.record import tables as tables_of_records
from cumulant.observatory.record.manifest import PAGE, PARTS, RECORD, TABLES, require_ours, sha256, writing
from cumulant.observatory.record.meta import notes_of
from cumulant.observatory.record.record import NULLS, UNREADABLE, Excerpt, Record, null_directories
from cumulant.observatory.record.recorder import SAMPLE, covariance_share
from cumulant.observatory.record.rows import HeadRow, LayerRow, TokenStatistics, columns, known
from cumulant.observatory.record.tables import (
    DISTANCES,
    PART_COLUMNS,
    TOKEN_COLUMNS,
    Tables,
    by_position,
    counterparts,
    head_columns,
    histogram,
    layer_spectra,
    part_rows,
    token_rows,
)
from cumulant.observatory.report import verdicts as rules_of_verdicts
from cumulant.observatory.report.causes import Judgement, causes_part, judgement_by_head, read_causes
from cumulant.observatory.report.depth_profile import depth_rows, undefined_rows
from cumulant.observatory.report.page import render_page
from cumulant.observatory.report.verdicts import Answer, Number, verdicts
from cumulant.observatory.statistics import gaussianity
from cumulant.observatory.statistics.head_types import (
    HEAD_TYPES,
    Remarkable,
    TypeMember,
    describe,
    head_types,
    heads_by_type,
    remarkable_heads,
)
from cumulant.observatory.statistics.quantities import (
    ABLATION,
    ADDED,
    BEFORE_SHARES,
    CHANCES,
    COVARIANCES,
    DISTANCE_SHARES,
    FITS,
    LENS,
    PERTURBATIONS,
    PROBES,
    QUANTITIES,
    TOP_KEY_NAMES,
    WEIGHT_NUMBERS,
    Quantity,
)
from cumulant.observatory.statistics.quantities import DISTANCES as DISTANCE_QUANTITIES
from cumulant.observatory.statistics.quantities import STATES as STATE_QUANTITIES
from cumulant.observatory.statistics.targets import TARGETS

VERDICTS = "cumulant verdicts"  # in the metadata of heads.parquet
PAGE_SUFFIXES = (".html", ".htm")
STATES = ("rms", "pairwise_cosine", "effective_rank", "participation_ratio", *DISTANCES)  # of a layer, on the page
SHOWN_STATES = [q for q in (*STATE_QUANTITIES, *COVARIANCES, *DISTANCE_QUANTITIES) if q.name in STATES]
NUMBERS = {
    q.name: q for q in (*WEIGHT_NUMBERS, *FITS, *PROBES, *CHANCES, *DISTANCE_SHARES, *BEFORE_SHARES, ABLATION)
}  # of a head, beside its quantities


def write_tables(tables: Tables, directory: Path, nulls: dict[str, Tables]) -> None:
    """heads.parquet, layers.parquet, tokens.parquet, and parts.parquet where texts have named parts, each in one step;
    heads and parts with the means of their nulls."""
    others = {name: null.heads for name, null in nulls.items()}
    stored = {VERDICTS: json.dumps([source_of_verdicts(directory), answers(tables, nulls)])}
    write_parquet(head_columns(tables.heads, others), directory / "heads.parquet", metadata=stored)
    write_parquet([row.columns() for row in tables.layers], directory / "layers.parquet")
    write_parquet(token_rows(tables.record), directory / "tokens.parquet", TOKEN_COLUMNS)
    if tables.record.meta.parts:
        records = {name: null.record for name, null in nulls.items()}
        write_parquet(part_rows(tables.record, records), directory / PARTS, PART_COLUMNS)


def read_nulls(directory: Path, record: Record) -> dict[str, Record]:
    """The records of the nulls beside a record; a killed run may have none yet."""
    nulls = {}
    for name, place in null_directories(directory).items():
        if (place / RECORD).is_file():
            nulls[name] = Record.load(place)
            if [layer[:3] for layer in nulls[name].modules] != [layer[:3] for layer in record.modules]:
                got, advice = f"others in {place}", "Move it away, or observe again."
                raise ValueError(sentence(str(directory), "the layers of the record in its nulls", got, advice))
    return nulls


def read_answers(directory: Path, record: Record) -> list[Answer]:
    """The verdicts of a record in a directory: as heads.parquet has them if that is of these files, else computed.

    To compute them takes up to a minute, as distances to a Gaussian do.
    """
    stored = _stored_answers(directory)
    if stored is not None:
        return stored
    nulls = {name: Tables.of(null) for name, null in read_nulls(directory, record).items() if name == "random"}
    return answers(Tables.of(record), nulls)


def _stored_answers(directory: Path) -> list[Answer] | None:
    """What the metadata of heads.parquet hold, if it was written from these records by the same rules."""
    try:
        import polars

        source, found = json.loads(polars.read_parquet_metadata(directory / "heads.parquet")[VERDICTS])
        if source == source_of_verdicts(directory):
            return [Answer(q, a, words, tuple(Number(*n) for n in numbers)) for q, a, words, numbers in found]
    except Exception:  # no table, one without verdicts, or one that somebody else wrote
        pass
    return None


def source_of_verdicts(directory: Path) -> str:
    """sha256 over what verdicts follow from: the records of a directory and the files with the rules."""
    records = [directory / RECORD, *(null / RECORD for null in null_directories(directory).values())]
    rules = [Path(module.__file__ or "") for module in (tables_of_records, rules_of_verdicts, gaussianity)]
    return hashlib.sha256("".join(sha256(path) for path in (*records, *rules) if path.is_file()).encode()).hexdigest()


def read_ablation(directory: Path) -> dict | None:
    """What ablation.json of a directory holds; None if there is none."""
    path = directory / "ablation.json"
    if not path.exists():
        return None
    try:
        ablation = json.loads(path.read_text(encoding="utf-8"))
        words = all(isinstance(ablation[name], str) for name in ("kind", "measure"))
        numbers = [ablation[name] for name in ("all_at_once", "control", "baseline", "threshold")]
        numbers += [row["damage"] for row in ablation["rows"]]
        counts = [ablation[name] for name in ("heads", "can_go", "together", "tokens")]
        counts += [row[name] for row in ablation["rows"] for name in ("layer", "head")]
        whole = words and ablation["heads"] == len(ablation["rows"]) > 0
        if whole and all(type(n) in (int, float) for n in numbers) and all(type(n) is int for n in counts):
            return ablation
    except UNREADABLE:
        pass
    raise ValueError(sentence(str(path), "what --ablate wrote", "something else", "Delete it, or observe again."))


def render(
    record: Record,
    path: str | Path,
    nulls: dict[str, Record] | None = None,
    ablation: dict | None = None,
    causes: dict | None = None,
) -> Path:
    """The page of any record, from `observe`, `attach` or `Record.load`, beside the records of its nulls.

    path      a directory: the record, its nulls, the tables heads, layers and tokens.parquet and report.html, as
              `cumulant observe --out` leaves them, for `cumulant report` and `cumulant compare`. Or a file that ends
              in .html: the page alone, which needs nothing beside it
    nulls     name, "random" or "shuffled" → the record of that null
    ablation  what ablation.json holds
    causes    what causes.json holds

    Returns the path of the page. A file of a directory that was not written by this library is not replaced.

    >>> import tempfile, torch
    >>> from cumulant.nn import MultiheadAttention
    >>> from cumulant.observatory import attach
    >>> model, x = MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 5, 8)
    >>> with attach(model) as recorder:
    ...     _ = model(x, x, x)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     page = render(recorder.record(), directory)
    ...     sorted(file.name for file in page.parent.glob("*.parquet"))
    ['heads.parquet', 'layers.parquet', 'tokens.parquet']
    """
    path, nulls = Path(path), nulls or {}
    require_null_names(nulls)
    if path.suffix.lower() in PAGE_SUFFIXES and not path.is_dir():
        null_tables = {name: Tables.of(null) for name, null in nulls.items()}
        render_tables(Tables.of(record), path, null_tables, ablation, causes)
        return path
    if path.exists() and not path.is_dir():
        advice = "Give a directory, or a path that ends in .html."
        raise ValueError(sentence("render.path", "a directory or a page", f"the file {path}", advice))
    record.save(path)
    for name, null in nulls.items():
        null.save(null_directories(path)[name])
    write_report(record, path, nulls, ablation, causes)
    return path / PAGE


def require_null_names(nulls: dict[str, Record]) -> None:
    """The nulls of a page are those that it has words for."""
    unknown = [name for name in nulls if name not in NULLS]
    if unknown:
        raise ValueError(sentence("render.nulls", " or ".join(NULLS), repr(unknown[0]), "Name them so."))


def write_report(
    record: Record,
    directory: Path,
    nulls: dict[str, Record],
    ablation: dict | None = None,
    causes: dict | None = None,
    *,
    before_page: Callable[[Tables, dict[str, Tables]], None] | None = None,
) -> tuple[Tables, dict[str, Tables]]:
    """Write the tables and the page of a record; returns its tables and those of its nulls.

    ablation     what ablation.json holds; read from the directory if None
    causes       what causes.json holds; in the same way
    before_page  called with the tables of the record and its nulls when they are written: it may write causes.json. The
                 page is written even if it is interrupted
    """
    ablation = read_ablation(directory) if ablation is None else ablation
    tables, null_tables = Tables.of(record), {name: Tables.of(null) for name, null in nulls.items()}
    require_ours(directory, (PAGE,))
    with writing(directory, *TABLES, *([PARTS] if record.meta.parts else [])):
        write_tables(tables, directory, null_tables)
    try:
        if before_page is not None:
            before_page(tables, null_tables)
    finally:
        causes = read_causes(directory) if causes is None else causes
        with writing(directory, PAGE):
            render_tables(tables, directory / PAGE, null_tables, ablation, causes)
    return tables, null_tables


def render_tables(
    tables: Tables,
    path: Path,
    nulls: dict[str, Tables],
    ablation: dict | None = None,
    causes: dict | None = None,
) -> None:
    """`render` with tables that are at hand."""
    render_page(page_data(tables, nulls, ablation, causes), path)


def answers(tables: Tables, nulls: dict[str, Tables], ablation: dict | None = None) -> list[Answer]:
    """What the numbers say to the questions of the page."""
    meta = tables.record.meta
    _, null_heads, null_layers = nulls.get("random", (None, [], []))
    share = covariance_share(meta.batch_size or 1, meta.max_length or 1)
    return verdicts(tables.heads, tables.layers, null_heads, meta.dimension or 1, null_layers, ablation, share)


def page_data(
    tables: Tables, nulls: dict[str, Tables], ablation: dict | None = None, causes: dict | None = None
) -> dict:
    """Everything the page shows, as plain data."""
    record, heads, _ = tables
    damage = {(row["layer"], row["head"]): row["damage"] for row in (ablation or {}).get("rows", [])}
    if damage:
        losses = [{"ablation_damage": damage.get((row.layer, row.head), nan)} for row in heads]
        heads = [replace(row, numbers=row.numbers | loss) for row, loss in zip(heads, losses, strict=True)]
    tables = tables._replace(heads=heads)
    without = judgement_by_head(causes)
    looked = any(name in record.quantities for name in TARGETS)
    return {
        "meta": record.meta.to_json() | {"sample_fraction": 1 / SAMPLE, "notes": notes_of(record.meta)},
        "remarkable": [
            head._asdict() | {"side": record.modules[head.layer].side} | _cause(without.get((head.layer, head.head)))
            for head in standing_out(heads, nulls)
        ],
        "types": [
            kind._asdict() | {"heads": [h._asdict() | _mark(h, kind.name, without) for h in kind.heads]}
            for kind in heads_by_type(heads)
        ],
        "causes": causes_part(causes),
        "parts": _parts(record, {name: null.record for name, null in nulls.items()}) if record.meta.parts else {},
        "rules": [{"name": kind.name, "rule": kind.rule, "looks": kind.looks} for kind in HEAD_TYPES if looked],
        "verdicts": [
            a._asdict() | {"numbers": [n._asdict() for n in a.numbers]} for a in answers(tables, nulls, ablation)
        ],
        "quantities": _definitions(record, heads),
        "definitions": [_definition(q) for q in _shown_states(tables)],
        "undefined": undefined_rows(record.meta),
        "layers": [
            {"index": i, "name": layer.name, "kind": layer.kind, "heads": layer.heads, "side": layer.side}
            for i, layer in enumerate(record.modules)
        ],
        **page_parts(tables, nulls),
    }


def _parts(record: Record, nulls: dict[str, Record]) -> dict[str, list[list]]:
    """Of every head, what all queries give to each named part of the texts, beside chance and nulls."""
    out: dict[str, list[list]] = {}
    for row in part_rows(record, nulls):
        if row["source"] is None:
            numbers = [row[name] for name in ("mass", "chance", "mass_null_random", "mass_null_shuffled")]
            out.setdefault(f"{row['layer']}.{row['head']}", []).append([row["part"], *numbers])
    return out


def _cause(judged: Judgement | None) -> dict:
    return {} if judged is None else {"cause": judged.words, "verdict": judged.verdict}


def _mark(head: TypeMember, kind: str, without: dict[tuple[int, int], Judgement]) -> dict:
    """The verdict on a head in the list of the type that it was judged as, that type in the lists of others."""
    judged = without.get((head.layer, head.head))
    if judged is None:
        return {}
    return {"verdict": judged.verdict} if judged.kind == kind else {"judged_as": judged.kind}


def standing_out(heads: list[HeadRow], nulls: dict[str, Tables]) -> list[Remarkable]:
    """The heads that the page names first."""
    return remarkable_heads(heads, counterparts(heads, {name: null.heads for name, null in nulls.items()}))


def page_parts(tables: Tables, nulls: dict[str, Tables]) -> dict:
    """The parts of the page that differ between steps of a training."""
    record, heads, layers = tables
    others = counterparts(heads, {name: null.heads for name, null in nulls.items()})
    random = nulls["random"].layers if "random" in nulls else ()
    spectra = layer_spectra(record.hidden, record.meta.stages)
    return {
        "heads": [_head(record, row, beside) for row, beside in zip(heads, others, strict=True)],
        "states": _states(layers),
        "depth": depth_rows(layers, heads, random),
        "spectra": [
            {"block": name.removesuffix("/out"), "eigenvalues": values}
            for name, values in spectra.items()
            if name.endswith("/out")
        ],
        "texts": _texts(record),
    }


def _definitions(record: Record, heads: list[HeadRow]) -> list[dict]:
    """Of the quantities of heads, as the figures of the page name them."""
    measured = [q for q in QUANTITIES if q.name in record.quantities]
    numbers = [q for q in NUMBERS.values() if any(known([row.value(q.name)]) for row in heads)]
    return [_definition(q) for q in (*measured, *PERTURBATIONS, *numbers)]


def _shown_states(tables: Tables) -> list[Quantity]:
    """Quantities of hidden states that the page shows: those that were measured."""
    if not tables.layers:
        return []
    cells = {name for row in tables.layers for name, value in row.columns().items() if value == value}
    depth = [q for q in (*LENS, *ADDED) if q.name in cells]
    return [*SHOWN_STATES, *depth]


def _definition(quantity: Quantity) -> dict:
    names = ("name", "label", "equation", "words", "unit", "sampled")
    return {name: getattr(quantity, name) for name in names} | {"good_range": None}


def _head(record: Record, row: HeadRow, nulls: dict[str, HeadRow]) -> dict:
    values: dict[str, dict[str, Any]] = {}
    for name, statistics in row.quantities.items():
        if statistics.count:
            tally = record.tallies[f"{row.name}/{name}"]
            drawn = {"by_position": by_position(tally, row.head), "histogram": histogram(tally, row.head)}
            values[name] = statistics._asdict() | drawn
    values |= {name: {"value": row.value(name), "count": 1} for name in NUMBERS if known([row.value(name)])}
    for name, cell in values.items():
        cell |= {f"null_{null}": other.value(name) for null, other in nulls.items()}
    types = [{"kind": kind.name, "words": describe(row, kind, nulls)} for kind in head_types(row)]
    names = {"layer": row.layer, "head": row.head, "hopfield_class": row.hopfield_class}
    return names | {"types": types, "values": values}


def _states(rows: list[LayerRow]) -> list[dict]:
    """Rows of the residual stream, each with the logarithm of the growth by a sublayer or the contraction by a norm.

    In a post-norm block norms stand on the stream, so that a step to "attention normed" or to the end is a contraction;
    in a pre-norm block they stand on branches, and the contraction is put where the norm reads.
    """
    out: list[dict] = []
    for block in dict.fromkeys(row.block for row in rows):
        mine = [row for row in rows if row.block == block]
        stream = [row for row in mine if row.role == "state"]
        norms = [row.contraction.value for row in mine if row.role != "state"]
        post = any(row.stage.endswith("normed") for row in stream)
        for index, row in enumerate(stream):
            normed = post and (row.stage.endswith("normed") or row.stage == "out")
            beside = norms[index] if not post and index < len(norms) and row.stage != "out" else nan
            cells: dict = {"layer": row.layer, "block": block, "stage": row.stage}
            for name in STATES:
                value = getattr(row, name)
                cells |= columns(name, value.value if isinstance(value, TokenStatistics) else value)
            cells["expansion"] = nan if normed else row.step.value
            cells["contraction"] = row.step.value if normed else beside
            out.append(cells)
    return out


def _texts(record: Record) -> list[dict]:
    out = []
    for excerpt in record.excerpts:
        values: dict[str, dict[str, list[float]]] = {}
        for quantity, by_layer in excerpt.values.items():
            if quantity in TOP_KEY_NAMES:
                continue
            for index, layer in enumerate(record.modules):
                table = by_layer.get(layer.name)
                if table is not None:
                    for head in range(layer.heads):
                        values.setdefault(quantity, {})[f"{index}.{head}"] = table[head].tolist()
        out.append(
            {"name": excerpt.name, "tokens": list(excerpt.tokens), "values": values, "looks": _looks(record, excerpt)}
        )
    return out


def _looks(record: Record, excerpt: Excerpt) -> dict[str, list[list[int]]]:
    """ "layer.head" → for every token [key, percent, key, percent, …], the most attention first."""
    out: dict[str, list[list[int]]] = {}
    for index, layer in enumerate(record.modules):
        parts = [excerpt.values[n][layer.name] for n in TOP_KEY_NAMES if layer.name in excerpt.values.get(n, {})]
        for head in range(layer.heads if parts else 0):
            table = torch.stack([part[head] for part in parts], -1)  # (tokens, 2 · keys)
            table[:, 1::2] = (100 * table[:, 1::2]).round()
            rows = table.nan_to_num(0).long().tolist()
            out[f"{index}.{head}"] = [[x for pair in _pairs(row) if pair[1] for x in pair] for row in rows]
    return out


def _pairs(row: list[int]) -> list[tuple[int, int]]:
    return list(zip(row[::2], row[1::2], strict=True))
