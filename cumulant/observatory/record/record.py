"""What is left of an observation: plain data that can be saved, loaded and merged.

A directory holds it as moments.safetensors (every tensor) and record.json (everything else), and manifest.json lists
both. Nothing in them is executed on loading.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.files import cannot_write, replacing, write
from cumulant.observatory.hooks.hidden_states import merge_layers
from cumulant.observatory.record.consistency import inconsistency
from cumulant.observatory.record.manifest import MOMENTS, RECORD, WRITTEN, is_record, own_shards, require_ours, writing
from cumulant.observatory.statistics.tally import Tally

FORMAT = "cumulant record 3"
TEXTS = 4  # passages whose tokens are kept for the page


class Layer(NamedTuple):
    """One attention module: its path, "self" or "cross", its heads and their sizes, and the scale of its scores."""

    name: str
    kind: str
    heads: int
    key_heads: int
    dim: int
    width: int
    scale: float


class Passage(NamedTuple):
    """A text shown token by token: values[quantity][layer name] is (heads, tokens)."""

    name: str
    tokens: tuple[str, ...]
    values: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Record:
    """Statistics of an observation.

    layers    the attention modules, in the order of the model
    tallies   "<layer>/<quantity>" → `Tally` with a cell for every head
    sums      "<layer>/<name>" → sums over sampled queries, from `sampled.fit_sums`
    hidden    the state of `layers.HiddenStateObserver`
    weights   "<layer>/<name>" → (heads,) numbers that follow from the weights, such as gradient-ness; not merged
    passages  a few texts with the numbers of every token
    meta      what was observed and how: counts, hashes, versions, settings
    """

    layers: tuple[Layer, ...]
    tallies: dict[str, Tally]
    sums: dict[str, Tensor]
    hidden: dict[str, Tensor]
    weights: dict[str, Tensor]
    passages: tuple[Passage, ...]
    meta: dict

    def merge(self, other: Record) -> Record:
        """The record of both observations of the same model; order does not matter but for rounding."""
        if self.layers != other.layers:
            advice = "Merge records of one model; `cumulant compare` puts different ones side by side."
            raise ValueError(sentence("Record.merge", "the same layers on both sides", "different ones", advice))
        return Record(
            self.layers,
            _joined(self.tallies, other.tallies, Tally.merge),
            _joined(self.sums, other.sums, torch.add),
            merge_layers(self.hidden, other.hidden),
            {**other.weights, **self.weights},
            (*self.passages, *other.passages)[:TEXTS],
            _merged_meta(self.meta, other.meta),
        )

    def tally(self, quantity: str) -> Tally | None:
        """The cells of all heads of all layers, layer by layer; None if it was not observed everywhere."""
        parts = [self.tallies.get(f"{layer.name}/{quantity}") for layer in self.layers]
        if any(p is None for p in parts):
            return None
        return Tally(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Tally)})

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.rsplit("/", 1)[1] for key in self.tallies))

    # ------------------------------------------------------------------ files

    def tensors(self, *, exact: bool = False) -> dict[str, Tensor]:
        """Every tensor under a name; unless ``exact``, scatters in single precision, which halves them."""
        found = {f"tally/{key}/{name}": t for key, tally in self.tallies.items() for name, t in tally.tensors().items()}
        found |= {f"sum/{key}": t for key, t in self.sums.items()}
        found |= {f"hidden/{key}": t if exact else _packed(key, t) for key, t in self.hidden.items()}
        found |= {f"weights/{key}": t for key, t in self.weights.items()}
        for i, passage in enumerate(self.passages):
            for quantity, by_layer in passage.values.items():
                found |= {f"passage/{i}/{quantity}/{name}": t for name, t in by_layer.items()}
        return {k: t.contiguous() for k, t in found.items()}

    def plain(self) -> dict:
        """Everything else, as what JSON can say."""
        return {
            "format": FORMAT,
            "meta": self.meta,
            "layers": [layer._asdict() for layer in self.layers],
            "passages": [{"name": p.name, "tokens": list(p.tokens)} for p in self.passages],
        }

    @classmethod
    def assemble(cls, plain: dict, tensors: dict[str, Tensor]) -> Record:
        """The inverse of `plain` and `tensors`; ValueError if they are of another format."""
        if plain["format"] != FORMAT:
            raise ValueError(plain["format"])
        return _assemble(plain, tensors)

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
            plain = self.plain() | {"moments": _sha256(room)}
        write(directory / RECORD, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Record:
        """The record a directory holds, or a sentence that says why it holds none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        directory = Path(directory)
        where = f"Record.load({str(directory)!r})"
        if not (directory / RECORD).is_file():
            got = "a directory without record.json" if directory.is_dir() else "no such directory"
            raise ValueError(sentence(where, "what `cumulant observe --out` wrote", got, "Check the path."))
        try:
            plain = json.loads((directory / RECORD).read_text(encoding="utf-8"))
            if plain.get("moments", None) not in (None, _sha256(directory / MOMENTS)):
                raise ValueError("moments.safetensors is not the one that record.json was written with")
            record = cls.assemble(plain, load_file(directory / MOMENTS))
            if (amiss := inconsistency(record)) is not None:
                raise ValueError(amiss)
        except UNREADABLE + (SafetensorError,) as error:
            told = " ".join(str(error).split()).rstrip(".")
            got = f"one that cannot be read ({type(error).__name__}: {told})"
            raise ValueError(sentence(where, f"a directory with a {FORMAT}", got, "Observe again.")) from None
        return record


# what reading files that are not what they should be may raise
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _assemble(plain: dict, tensors: dict[str, Tensor]) -> Record:
    tallies: dict[str, dict[str, Tensor]] = {}
    passages: dict[int, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        kind, rest = key.split("/", 1)
        if kind == "tally":
            name, part = rest.rsplit("/", 1)
            tallies.setdefault(name, {})[part] = tensor
        elif kind == "passage":
            index, quantity, name = rest.split("/", 2)
            passages.setdefault(int(index), {}).setdefault(quantity, {})[name] = tensor
    shown = [Passage(p["name"], tuple(p["tokens"]), passages.get(i, {})) for i, p in enumerate(plain["passages"])]
    return Record(
        tuple(Layer(**layer) for layer in plain["layers"]),
        {name: Tally(**parts) for name, parts in tallies.items()},
        {k.removeprefix("sum/"): t for k, t in tensors.items() if k.startswith("sum/")},
        {k.removeprefix("hidden/"): _unpacked(k, t) for k, t in tensors.items() if k.startswith("hidden/")},
        {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")},
        tuple(shown),
        plain["meta"],
    )


SCATTER = (":spread.triangle", ":within.triangle")  # halves of symmetric matrices, which are most of a record


def _packed(key: str, tensor: Tensor) -> Tensor:
    """In the file they have single precision."""
    return tensor.float() if key.endswith(SCATTER) else tensor


def _unpacked(key: str, tensor: Tensor) -> Tensor:
    return tensor.double() if key.endswith(SCATTER) else tensor


def claim_directory(directory: Path, force: bool = False) -> None:
    """Refuse a directory that holds something else; with ``force`` one that holds no record, or others' files in it.

    Nothing is deleted here, and nothing that manifest.json does not list is deleted later.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another place."))
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
    for place in null_places(directory).values():
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            got, advice = f"{place}, something else", "Move it away, or name another directory."
            raise ValueError(sentence("--out", "a free place for a null", got, advice))
        if place.is_dir() and any(place.iterdir()):
            claim_directory(place, force=True)
    if not own_shards(directory):
        got = f"{directory / 'shards'}, which holds other files"
        raise ValueError(sentence("--out", "a directory whose shards/ is free", got, "Name another place."))


NULLS = ("random", "shuffled")  # what stands beside a record, as `nulls` describes it


def null_places(directory: Path) -> dict[str, Path]:
    """Where the records of the nulls of a record lie, whether they are there or not."""
    return {name: directory / f"null-{name}" for name in NULLS}


def _joined(a: dict, b: dict, add) -> dict:
    return {
        k: add(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in (*a, *(k for k in b if k not in a))
    }


def _merged_meta(a: dict, b: dict) -> dict:
    """Counts and notes add, equal entries stay, the rest is the first's."""
    notes = {"layer_notes": b["layer_notes"] | a["layer_notes"]} if "layer_notes" in a and "layer_notes" in b else {}
    counts = {k: a.get(k, 0) + b.get(k, 0) for k in ("tokens", "sequences", "skipped") if k in a or k in b}
    return {**b, **a, **counts, **notes, "complete": bool(a.get("complete", True) and b.get("complete", True))}
