"""The record of an observation: plain data that can be saved, loaded and merged.

A directory holds it as moments.safetensors (every tensor) and record.json (everything else), and manifest.json lists
both. Nothing in them is executed on loading. Records of older formats are converted while they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.display import html_table
from cumulant.files import cannot_write, data_frame, replacing, write
from cumulant.observatory.hooks.hidden_states import merge_layers
from cumulant.observatory.record.consistency import inconsistency
from cumulant.observatory.record.manifest import (
    MOMENTS,
    RECORD,
    WRITTEN,
    is_record,
    own_shards,
    require_ours,
    sha256,
    writing,
)
from cumulant.observatory.record.meta import Meta, notes_of
from cumulant.observatory.statistics.tally import Tally
from cumulant.observatory.statistics.text_parts import aligned
from cumulant.observatory.text.parts import MAX_NAMES

if TYPE_CHECKING:
    from polars import DataFrame

FORMAT = "cumulant record 4"
NO_SAMPLE = "of a record of format 2 distances of hidden states to a Gaussian are not known: observe again for them"
RENAMED_META = {  # names of format 3 → names of format 4
    "places": "stages",
    "spoiled": "unreadable",
    "spoiled_documents": "unreadable_documents",
    "weights_unknown": "unknown_weights",
}
RENAMED_TALLY = {"place_count": "position_count", "place_sum": "position_sum"}
Stored = tuple[dict, dict[str, Tensor]]  # what record.json and moments.safetensors hold
BEFORE = "/distance/before"
EXCERPTS = 4  # texts whose beginning is kept token by token


class AttentionLayer(NamedTuple):
    """One attention module: its path, "self" or "cross", its heads and their sizes, and the scale of its scores."""

    name: str
    kind: str
    heads: int
    key_heads: int
    dim: int
    width: int
    scale: float

    @property
    def side(self) -> str:
        """Of a model with an encoder and a decoder: "encoder", "decoder", or "cross-attention" from one to the other.

        >>> AttentionLayer("model.decoder.layers.0.self_attn", "self", 6, 6, 64, 64, 0.125).side
        'decoder'
        """
        parts = self.name.split(".")
        sides = [side for side in ("encoder", "decoder") if side in parts]
        return "cross-attention" if self.kind == "cross" else (sides[0] if len(sides) == 1 else "")


class Excerpt(NamedTuple):
    """The beginning of a text, token by token: values[quantity][layer name] is (heads, tokens)."""

    name: str
    tokens: tuple[str, ...]
    values: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Record:
    """Statistics of an observation.

    modules   the attention modules, in the order of the model
    tallies   "<layer>/<quantity>" → `Tally` with a cell for every head
    sums      "<layer>/<name>" → sums over sampled queries, from `statistics.heads.sampled_statistics`
    hidden    the state of `hidden_states.HiddenStateObserver`
    weights   "<layer>/<name>" → (heads,) numbers that follow from the weights, such as gradient-ness; not merged
    excerpts  the beginnings of a few texts with the numbers of every token
    meta      what was observed and how
    """

    modules: tuple[AttentionLayer, ...]
    tallies: dict[str, Tally]
    sums: dict[str, Tensor]
    hidden: dict[str, Tensor]
    weights: dict[str, Tensor]
    excerpts: tuple[Excerpt, ...]
    meta: Meta

    def merge(self, other: Record) -> Record:
        """The record of both observations of the same model; order does not matter but for rounding."""
        if self.modules != other.modules:
            advice = "Merge records of one model; `cumulant compare` puts different ones side by side."
            raise ValueError(sentence("Record.merge", "the same layers on both sides", "different ones", advice))
        meta = self.meta.merge(other.meta)
        if len(meta.parts) > MAX_NAMES:
            got, advice = f"{len(meta.parts)} on both sides", "Name parts alike, or keep the records apart."
            raise ValueError(sentence("Record.merge", f"at most {MAX_NAMES} names of parts", got, advice))
        own, others = (aligned(one.sums, one.meta.parts, meta.parts) for one in (self, other))
        own, others = _with_order(own, others), _with_order(others, own)
        return Record(
            self.modules,
            _joined(self.tallies, other.tallies, Tally.merge),
            _joined(own, others, torch.add),
            merge_layers(self.hidden, other.hidden),
            {**other.weights, **self.weights},
            (*self.excerpts, *other.excerpts)[:EXCERPTS],
            meta,
        )

    def tally(self, quantity: str) -> Tally | None:
        """The cells of all heads of all layers, layer by layer; None if it was not observed everywhere."""
        parts = [self.tallies.get(f"{layer.name}/{quantity}") for layer in self.modules]
        if any(p is None for p in parts):
            return None
        return Tally(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Tally)})

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.rsplit("/", 1)[1] for key in self.tallies))

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        tables = ".heads(), .layers() and .tokens() are tables, render(record, directory) is a page"
        notes = {"note": "; ".join(notes_of(self.meta))} if notes_of(self.meta) else {}
        return html_table("Record of an observation", {**self._facts(), **notes, "next": tables})

    def _facts(self) -> dict[str, str]:
        """What a record is of, in a few words."""
        meta, heads = self.meta, sum(module.heads for module in self.modules)
        own = {} if meta.model == meta.model_class else {"class": meta.model_class}
        facts = {"model": meta.model, **own, "text": meta.text, "tokens": f"{meta.tokens:,}"}
        modules = f"{len(self.modules)} module{'' if len(self.modules) == 1 else 's'}"
        facts |= {"heads": f"{heads} in {modules}", "quantities": str(len(self.quantities))}
        return {name: value for name, value in facts.items() if value}

    # ------------------------------------------------------------------ tables

    def heads(self, nulls: Mapping[str, Record] | None = None, *, library: str = "polars") -> Any:
        """One row a head: the columns of heads.parquet.

        nulls    "random" or "shuffled" → the record of that null, for the columns Q_null_random, Q_null_shuffled
        library  "polars" or "pandas": whose DataFrame is returned

        Q is the mean of a quantity over tokens, Q_std, Q_se, Q_p05 … Q_p95, Q_count its law; what is not known is null.

        >>> import polars as pl
        >>> from cumulant.nn import MultiheadAttention
        >>> from cumulant.observatory import attach
        >>> model, x = MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 5, 8)
        >>> with attach(model) as recorder:
        ...     _ = model(x, x, x)
        >>> recorder.record().heads()["head", "entropy"].with_columns(pl.col("entropy").round(4)).rows()   # log 5
        [(0, 1.6094), (1, 1.6094)]
        """
        from cumulant.observatory.record.tables import head_columns, head_rows

        others = {name: head_rows(null) for name, null in (nulls or {}).items()}
        return _frame(data_frame(head_columns(head_rows(self), others)), library)

    def layers(self, *, library: str = "polars") -> Any:
        """One row for each block and stage of the residual stream: the columns of layers.parquet.

        Distances to a Gaussian are computed here, which takes a moment.
        """
        from cumulant.observatory.record.rows import LayerRow
        from cumulant.observatory.record.tables import layer_table

        rows = [row.columns() for row in layer_table(self)]
        empty = {name: type(value) for name, value in LayerRow("", "", layer=0).columns().items()}
        return _frame(data_frame(rows, None if rows else empty), library)

    def parts(self, nulls: Mapping[str, Record] | None = None, *, library: str = "polars") -> Any:
        """One row for each head and two named parts of the texts, and for all queries and each part: the columns of
        parts.parquet. Without named parts the table has no rows.

        nulls  as in `heads`
        """
        from cumulant.observatory.record.tables import PART_COLUMNS, part_rows

        return _frame(data_frame(part_rows(self, nulls or {}), PART_COLUMNS), library)

    def tokens(self, *, library: str = "polars") -> Any:
        """One row for every token of the excerpts, layer and head: the columns of tokens.parquet.

        `observe` keeps excerpts; a record of `attach` has none, and its table no rows.
        """
        from cumulant.observatory.record.tables import TOKEN_COLUMNS, token_rows

        return _frame(data_frame(token_rows(self), TOKEN_COLUMNS), library)

    # ------------------------------------------------------------------ files

    def tensors(self, *, exact: bool = False) -> dict[str, Tensor]:
        """Every tensor under a name; unless ``exact``, scatters in single precision, which halves them."""
        out = {f"tally/{key}/{name}": t for key, tally in self.tallies.items() for name, t in tally.tensors().items()}
        out |= {f"sum/{key}": t for key, t in self.sums.items()}
        out |= {f"hidden/{key}": t if exact else _packed(key, t) for key, t in self.hidden.items()}
        out |= {f"weights/{key}": t for key, t in self.weights.items()}
        for i, excerpt in enumerate(self.excerpts):
            for quantity, by_layer in excerpt.values.items():
                out |= {f"excerpt/{i}/{quantity}/{name}": t for name, t in by_layer.items()}
        return {k: t.contiguous() for k, t in out.items()}

    def plain(self) -> dict:
        """Everything else, as what JSON can say."""
        return {
            "format": FORMAT,
            "meta": self.meta.to_json(),
            "layers": [layer._asdict() for layer in self.modules],
            "excerpts": [{"name": e.name, "tokens": list(e.tokens)} for e in self.excerpts],
        }

    @classmethod
    def assemble(cls, plain: dict, tensors: dict[str, Tensor]) -> Record:
        """The inverse of `plain` and `tensors`, of this format or an older one; ValueError if they are of another."""
        return _assemble(*_converted(plain, tensors))

    def save(self, directory: str | Path, *, exact: bool = False, listed: bool = True) -> None:
        """Write moments.safetensors and record.json into a directory, each in one step.

        exact   keep double precision everywhere, for records that are merged later; `load` reads both
        listed  also say in manifest.json that these files are ours; what is not ours is then not replaced

        record.json has the sha256 of the other file, so that the two are always of one record.
        """
        directory = Path(directory)
        if listed:
            with writing(directory, MOMENTS, RECORD):
                self._write(directory, exact)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            self._write(directory, exact)

    def _write(self, directory: Path, exact: bool) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with replacing(directory / MOMENTS) as room:
            try:
                save_file(self.tensors(exact=exact), room, metadata={"format": FORMAT})
            except SafetensorError as error:  # what a full disk becomes in its writer
                raise OSError(cannot_write(directory / MOMENTS, error)) from error
            plain = self.plain() | {"moments": sha256(room)}
        write(directory / RECORD, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Record:
        """The record a directory holds, or a sentence that says why it holds none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        directory = Path(directory)
        where = f"record {str(directory)!r}"
        if not (directory / RECORD).is_file():
            got = "a directory without record.json" if directory.is_dir() else "no such directory"
            raise ValueError(sentence(where, "a directory that `cumulant observe` wrote", got, "Check the path."))
        try:
            plain = json.loads((directory / RECORD).read_text(encoding="utf-8"))
            if plain.get("moments", None) not in (None, sha256(directory / MOMENTS)):
                raise ValueError("moments.safetensors is not the one that record.json was written with")
            record = cls.assemble(plain, load_file(directory / MOMENTS))
            if (amiss := inconsistency(record)) is not None:
                raise ValueError(amiss)
        except UNREADABLE + (SafetensorError,) as error:
            words = " ".join(str(error).split()).rstrip(".")
            got = f"one that cannot be read ({type(error).__name__}: {words})"
            raise ValueError(sentence(where, f"a directory with a {FORMAT}", got, "Observe again.")) from None
        return record


# what reading files that are not what they should be may raise
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError)


def _assemble(plain: dict, tensors: dict[str, Tensor]) -> Record:
    tallies: dict[str, dict[str, Tensor]] = {}
    values: dict[int, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        kind, rest = key.split("/", 1)
        if kind == "tally":
            name, part = rest.rsplit("/", 1)
            tallies.setdefault(name, {})[part] = tensor
        elif kind == "excerpt":
            index, quantity, name = rest.split("/", 2)
            values.setdefault(int(index), {}).setdefault(quantity, {})[name] = tensor
    return Record(
        tuple(AttentionLayer(**layer) for layer in plain["layers"]),
        {name: Tally(**parts) for name, parts in tallies.items()},
        {k.removeprefix("sum/"): t for k, t in tensors.items() if k.startswith("sum/")},
        {k.removeprefix("hidden/"): _unpacked(k, t) for k, t in tensors.items() if k.startswith("hidden/")},
        {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")},
        tuple(Excerpt(e["name"], tuple(e["tokens"]), values.get(i, {})) for i, e in enumerate(plain["excerpts"])),
        Meta.from_json(plain["meta"]),
    )


SCATTER = (":spread.triangle", ":within.triangle")  # halves of symmetric matrices, which are most of a record


def _packed(key: str, tensor: Tensor) -> Tensor:
    """In the file they have single precision."""
    return tensor.float() if key.endswith(SCATTER) else tensor


def _unpacked(key: str, tensor: Tensor) -> Tensor:
    return tensor.double() if key.endswith(SCATTER) else tensor


def _frame(table: DataFrame, library: str) -> Any:
    """A table as a DataFrame of this library."""
    if library not in ("polars", "pandas"):
        raise ValueError(sentence("Record.library", "'polars' or 'pandas'", repr(library), "Choose one of them."))
    if library == "polars":
        return table
    try:
        import pandas
    except ModuleNotFoundError:
        advice = "pip install pandas, or take the polars DataFrame."
        raise ModuleNotFoundError(sentence("Record.library", "pandas", "no such package", advice)) from None
    return pandas.DataFrame(table.to_dict(as_series=False))


def claim_directory(directory: Path, force: bool = False) -> None:
    """Refuse a directory that holds something else; with ``force`` one that holds no record, or others' files in it.

    Nothing is deleted here, and nothing that manifest.json does not list is deleted later.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another directory."))
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not force:
        got, advice = "one that holds other files", "Name a new one."
        if (directory / "shards" / "plan.json").is_file():
            got, advice = (
                "one with a run that has not ended",
                "Pass --resume to go on with it, or --force to start anew.",
            )
        elif (directory / RECORD).is_file():
            got = "one that already holds a record"
            advice = "Name a new one, or pass --force to replace the record."
        raise ValueError(sentence("--out", "a new or empty directory", f"{directory}, {got}", advice))
    if not is_record(directory):
        got, advice = f"{directory}, one that holds other files", "Name a new one; nothing there is deleted."
        raise ValueError(sentence("--force", "a directory with a record", got, advice))
    require_replaceable(directory)


def require_replaceable(directory: Path) -> None:
    """Refuse a directory where a record, its tables, its page, its nulls or its shards would replace others' files."""
    require_ours(directory, WRITTEN)
    for null in null_directories(directory).values():
        if null.is_symlink() or (null.exists() and not null.is_dir()):
            got, advice = f"{null}, something else", "Move it away, or name another directory."
            raise ValueError(sentence("--out", "a directory free for a null", got, advice))
        if null.is_dir() and any(null.iterdir()):
            claim_directory(null, force=True)
    if not own_shards(directory):
        got = f"{directory / 'shards'}, which holds other files"
        raise ValueError(sentence("--out", "a directory whose shards/ is free", got, "Name another directory."))


NULLS = ("random", "shuffled")  # `models.load.random_twin`, `runs.observe.shuffled_keys`


def null_directories(directory: Path) -> dict[str, Path]:
    """Where the records of the nulls of a record lie, whether they are there or not."""
    return {name: directory / f"null-{name}" for name in NULLS}


def without_order(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the mass before the query where it is all the mass: that of a causal order is not kept twice."""
    causal = {key for key, value in sums.items() if key.endswith(BEFORE) and _is_all(value, sums, key)}
    return {key: value for key, value in sums.items() if key not in causal}


def _is_all(before: Tensor, sums: dict[str, Tensor], key: str) -> bool:
    """To the rounding of two sweeps of the kernel in single precision."""
    own = key.removesuffix(BEFORE)
    count = sums[f"{own}/distance/count"].clamp_min(1)[:, None]
    return bool(((before - sums[f"{own}/distance/mass"]) / count).abs().max() <= 1e-5)


def _with_order(sums: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the mass before the query where only the other record says that there is some after it."""
    absent = [key for key in other if key.endswith(BEFORE) and key not in sums]
    masses = {key: sums.get(key.removesuffix(BEFORE) + "/distance/mass") for key in absent}
    return sums | {key: mass for key, mass in masses.items() if mass is not None}


def _joined(a: dict, b: dict, add) -> dict:
    return {
        k: add(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in (*a, *(k for k in b if k not in a))
    }


def _converted(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    """A stored record in the present format; ValueError with the name of the format if it is not known.

    2 → 3  hidden states were sampled as they are; since format 3 each is taken about the mean of its sequence, and the
           scatter of those residuals is kept with them. Neither can be had from the other, so the old samples are
           dropped: every number of heads, sizes, growth and covariances stays, and distances to a Gaussian are unknown
    3 → 4  names: entries of meta, excerpts (were passages), sums by position in a tally
    """
    if plain["format"] == "cumulant record 2":
        plain, tensors = _from_2(plain, tensors)
    if plain["format"] == "cumulant record 3":
        plain, tensors = _from_3(plain, tensors)
    if plain["format"] != FORMAT:
        raise ValueError(plain["format"])
    return plain, tensors


def _from_2(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    left = {key: tensor for key, tensor in tensors.items() if ":sample." not in key}
    meta = plain["meta"]
    if len(left) < len(tensors):
        meta = meta | {"notes": [*meta.get("notes", []), NO_SAMPLE]}
    return plain | {"format": "cumulant record 3", "meta": meta}, left


def _from_3(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    meta = {RENAMED_META.get(key, key): value for key, value in plain["meta"].items()}
    documents = meta.get("unreadable_documents", [])
    meta["unreadable_documents"] = [{"name": one["name"], "reason": one["why"]} for one in documents]
    renamed = plain | {"format": FORMAT, "meta": meta, "excerpts": plain["passages"]}
    return renamed, {_tensor_name(key): tensor for key, tensor in tensors.items()}


def _tensor_name(key: str) -> str:
    if key.startswith("passage/"):
        return f"excerpt/{key.removeprefix('passage/')}"
    for old, new in RENAMED_TALLY.items():
        if key.endswith((f"/{old}", f":tally.{old}")):
            return key.removesuffix(old) + new
    return key
