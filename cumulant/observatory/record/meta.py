"""What a record says of itself: the model, the text, the settings and counts of an observation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cumulant.observatory.hooks.hidden_states import StageKey

MIN_TOKENS_FOR_VERDICT = 1000  # below this a record has a note


@dataclass(frozen=True)
class Meta:
    """What was observed and how; empty strings and None where nobody said.

    model, model_class, source, fingerprint  the model as it was named, its class, where it came from, and the sha256
                          of its weights
    text, text_hash       the text as it was named, and the sha256 of what was read
    command, created      how and when the record was written
    versions              package → version
    plan                  sha256 of all that the run depends on, by which --resume knows it
    complete              whether all was read that was to be read
    tokens, sequences     that were read
    skipped, unreadable   documents without a token, and documents that could not be read
    unreadable_documents  the first of them: {"name": ..., "reason": ...}
    max_length, batch_size, seed, shards     settings of the run
    step                  of the training, for a checkpoint
    dimension             channels of the residual stream
    notes                 sentences for the reader
    layer_notes           module path → what is not observed there, and why
    unknown_weights       attention module → why its weights are not known
    undefined             quantity → why it is not defined here, or where it is not
    stages                of the residual stream, in the order of depth
    parts                 names of parts of the texts, sorted
    """

    model: str = ""
    model_class: str = ""
    source: str = ""
    fingerprint: str = ""
    text: str = ""
    text_hash: str = ""
    command: str = ""
    created: str = ""
    plan: str = ""
    complete: bool = True
    tokens: int = 0
    sequences: int = 0
    skipped: int = 0
    unreadable: int = 0
    unreadable_documents: tuple[dict[str, str], ...] = ()
    max_length: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    shards: int | None = None
    step: int | None = None
    dimension: int | None = None
    notes: tuple[str, ...] = ()
    layer_notes: dict[str, str] = field(default_factory=dict)
    unknown_weights: dict[str, str] = field(default_factory=dict)
    undefined: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    stages: tuple[StageKey, ...] = ()
    parts: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, plain: object) -> Meta:
        """The inverse of `to_json`; ValueError with the first entry of another type. Unknown entries are left out.

        >>> Meta.from_json({"tokens": "many"})
        Traceback (most recent call last):
        ValueError: meta.tokens is 'many' and no count
        """
        if not isinstance(plain, dict):
            raise ValueError(f"meta is a {type(plain).__name__} and no dictionary")
        values: dict[str, Any] = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
        for f in fields(cls):
            fits, words = _TYPES[str(f.type)]
            if f.name in values and not fits(values[f.name]):
                raise ValueError(f"meta.{f.name} is {abbreviated(values[f.name])} and {words}")
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        values["stages"] = tuple(StageKey(**stage) for stage in values.get("stages", ()))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Everything, as what JSON can say."""
        return asdict(self) | {"stages": [stage._asdict() for stage in self.stages]}

    def merge(self, other: Meta) -> Meta:
        """Counts and notes on layers add, and what either defines is defined; of all else the first that says
        something."""
        empty = Meta()
        both = {f.name: [getattr(meta, f.name) for meta in (self, other, empty)] for f in fields(self)}
        values = {name: other if own == default else own for name, (own, other, default) in both.items()}
        values |= {name: both[name][0] + both[name][1] for name in ("tokens", "sequences", "skipped")}
        undefined = {name: reason for name, reason in self.undefined.items() if name in other.undefined}
        values |= {"layer_notes": other.layer_notes | self.layer_notes, "undefined": undefined}
        values["complete"] = self.complete and other.complete
        values["parts"] = tuple(sorted({*self.parts, *other.parts}))
        return Meta(**values)


def few_tokens_notes(tokens: int) -> list[str]:
    """A note on a record of few tokens."""
    if tokens >= MIN_TOKENS_FOR_VERDICT:
        return []
    return [f"only {tokens} tokens were read: take no verdict from them, they need some thousands"]


def notes_of(meta: Meta) -> list[str]:
    """The notes of a record, and one on few tokens where `attach` or a merge has left none."""
    few = few_tokens_notes(meta.tokens)
    return [*meta.notes, *(note for note in few if note not in meta.notes)]


def abbreviated(value: object) -> str:
    """At most forty characters of what a value looks like in Python."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def is_string(value: object) -> bool:
    return isinstance(value, str)


def is_count(value: object) -> bool:
    """A whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_dictionary(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_string, value.values()))


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


def _with_strings(*names: str) -> Callable[[object], bool]:
    return lambda value: _is_dictionary(value) and isinstance(value, dict) and value.keys() == {*names}


_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {  # by the annotation of a field
    "str": (is_string, "no string"),
    "bool": (lambda value: isinstance(value, bool), "neither true nor false"),
    "int": (is_count, "no count"),
    "int | None": (lambda value: value is None or is_count(value), "no count"),
    "dict[str, str]": (_is_dictionary, "no dictionary of strings"),
    "tuple[str, ...]": (_list_of(is_string), "no list of sentences"),
    "tuple[dict[str, str], ...]": (_list_of(_with_strings("name", "reason")), "no list of documents"),
    "tuple[StageKey, ...]": (_list_of(_with_strings(*StageKey._fields)), "no list of stages"),
}
