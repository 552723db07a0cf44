"""Named parts of a text, as prompt and answer: how a document gives them, and in which of them a token begins.

A document has ``parts``, a list of one of two kinds:

    {"name": "prompt", "start": 0, "end": 12}    characters [start, end) of its text, none over another
    {"name": "prompt", "text": "Why is it so?"}   together they are its text

A name may stand more than once, as in a chat. A list of anything that has no name is not ours, and is left alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

MAX_NAMES = 16  # of a record: its size does not grow with the text
MAX_NAME_LENGTH = 64
COLUMN = "parts"


class TextPart(NamedTuple):
    """The characters [start, end) of a text, by a name."""

    name: str
    start: int
    end: int


class UnreadableParts(ValueError):
    """Parts that cannot be: the message says what there is in their place."""


def gives_parts(value: Any) -> bool:
    """Whether a value is meant as parts: a list of objects with names."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "name" in one for one in value)


def makes_text(value: Any) -> bool:
    """Whether parts have their text in them.

    >>> makes_text([{"name": "prompt", "text": "Why?"}]), makes_text([{"name": "prompt", "start": 0, "end": 4}])
    (True, False)
    """
    # rows of a table have every key, null where there is nothing
    return gives_parts(value) and all(one.get("text") is not None for one in value)


def joined_parts(value: list[dict[str, Any]]) -> tuple[str, tuple[TextPart, ...]]:
    """The text that parts make, and where they are in it.

    >>> joined_parts([{"name": "prompt", "text": "Why? "}, {"name": "answer", "text": "So."}])
    ('Why? So.', (TextPart(name='prompt', start=0, end=5), TextPart(name='answer', start=5, end=8)))
    """
    body, parts = "", []
    for one in value:
        if not isinstance(one["text"], str):
            raise UnreadableParts(f"{type(one['text']).__name__} as the text of a part")
        parts.append(TextPart(_name(one["name"]), len(body), len(body) + len(one["text"])))
        body += one["text"]
    return body, tuple(part for part in parts if part.start < part.end)


def spans(value: list[dict[str, Any]], body: str) -> tuple[TextPart, ...]:
    """Parts that are given by their characters, in the order of the text; empty ones are left out."""
    parts = []
    for one in value:
        name, start, end = _name(one["name"]), one.get("start"), one.get("end")
        if type(start) is not int or type(end) is not int:
            raise UnreadableParts(f"part {name!r} without whole numbers start and end")
        if not 0 <= start <= end <= len(body):
            raise UnreadableParts(f"part {name!r} from {start} to {end} of {len(body)} characters")
        parts.append(TextPart(name, start, end))
    return in_order([part for part in parts if part.start < part.end])


def in_order(parts: Sequence[TextPart]) -> tuple[TextPart, ...]:
    """By where they begin, none over another."""
    ordered = sorted(parts, key=lambda part: part.start)
    for one, other in pairwise(ordered):
        if other.start < one.end:
            raise UnreadableParts(f"parts {one.name!r} and {other.name!r} that overlap at {other.start}")
    return tuple(ordered)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_LENGTH:
        words = f"{len(name)} characters" if isinstance(name, str) else type(name).__name__
        raise UnreadableParts(f"a name of a part of {words} (1 to {MAX_NAME_LENGTH} characters)")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise UnreadableParts("half of a surrogate pair in the name of a part")
    return name


def part_of_tokens(parts: Sequence[TextPart], names: list[str], starts: Sequence[int]) -> list[int]:
    """For tokens that begin at these characters the place of their part in ``names``, −1 for no part; new names are
    appended.

    >>> part_of_tokens([TextPart("prompt", 0, 5), TextPart("answer", 6, 9)], names := ["answer"], [0, 4, 5, 6]), names
    ([1, 1, -1, 0], ['answer', 'prompt'])
    """
    for part in parts:
        if part.name not in names:
            names.append(part.name)
    index, first = [names.index(part.name) for part in parts], [part.start for part in parts]
    found = []
    for start in starts:
        at = bisect_right(first, start) - 1
        found.append(index[at] if at >= 0 and start < parts[at].end else -1)
    return found
