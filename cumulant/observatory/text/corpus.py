"""A corpus as an ordered list of shards: which parts of which files belong together, never the text itself.

Whoever observes a shard reads its text from the files. What a document is, its number and its name depend on its file
and on the order of the files, not on how they are cut into shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

from cumulant.checks import sentence
from cumulant.observatory.text.formats import (
    PART,
    Document,
    compressed,
    json_lines,
    kind_of,
    line_column,
    parquet_rows,
    plain_parts,
    row_groups,
)
from cumulant.observatory.text.locations import Place, places
from cumulant.observatory.text.texts import SUFFIXES, Sources, Spoiled, Text, require_number

SHARDS = 256  # about so many if there is enough text
LEAST = 1 << 15  # bytes of a shard, unless others are asked for
POSITION = 40  # bits of a text's index that say where it is in its file; the others say which file
NUMBER = 63 - POSITION
EXPECTED = {"text": "UTF-8 text", "jsonl": "lines of JSON with text", "parquet": "rows of text"}


class Piece(NamedTuple):
    """Part of a file.

    number       of the file in the order of the corpus
    path         or URI
    kind         "text", "jsonl", "parquet", or "topic" for a page of Python's own help
    start, stop  bytes of a plain text (multiples of `PART`, or its size), bytes of JSONL (the lines that begin there),
                 row groups of Parquet; 0 and 1 for a topic
    """

    number: int
    path: str
    kind: str
    start: int
    stop: int


class Shard(NamedTuple):
    """What is read and kept as one: pieces in order, and about how many bytes they are.

    >>> shard = Shard(0, (Piece(0, "a.txt", "text", 0, 7),), 7)
    >>> Shard.of(shard.plain()) == shard
    True
    """

    ordinal: int
    pieces: tuple[Piece, ...]
    size: int

    def plain(self) -> dict[str, Any]:
        """The shard for JSON."""
        return {"ordinal": self.ordinal, "pieces": [list(piece) for piece in self.pieces], "size": self.size}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Shard:
        """The shard that `plain` gave."""
        return cls(plain["ordinal"], tuple(Piece(*piece) for piece in plain["pieces"]), plain["size"])


class Corpus(NamedTuple):
    """Shards in order, the files (path and bytes) they refer to, and the column of text that was named, if any."""

    shards: tuple[Shard, ...]
    files: tuple[tuple[str, int], ...]
    column: str | None

    def identity(self) -> str:
        """sha256 over files, their sizes, the column and the borders of the shards."""
        plain = [self.files, self.column, [shard.plain() for shard in self.shards]]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    def texts(self, spoiled: list[Spoiled] | None = None) -> Iterator[Text]:
        """All texts in order; ``spoiled`` gets what was left out."""
        for shard in self.shards:
            yield from texts_of(shard, self.column, spoiled)


def plan(sources: Sources = (), *, column: str | None = None, shard_bytes: int | None = None) -> Corpus:
    """Cut files, directories and URIs into shards; from nothing, the topics of Python's own help.

    column       where JSONL and Parquet have their text; None: their only column of strings, else the first of "text",
                 "content", "body", "document" that holds strings
    shard_bytes  how large shards should be; None: a 256th of all, but at least 32 KiB. Plain text is cut only at
                 multiples of `PART`, Parquet only between row groups, compressed files not at all

    A directory gives its files with a suffix in `SUFFIXES`, its JSONL and its Parquet. Documents that cannot be read
    are skipped and listed where they are met; a file that is named and has no other is refused here.

    >>> corpus = plan(shard_bytes=1 << 16)
    >>> corpus.shards[0].pieces[0]
    Piece(number=0, path='topics/assert', kind='topic', start=0, stop=1)
    """
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    if any(str(source) == "-" for source in given):
        advice = "Write it to a file first."
        raise ValueError(sentence("plan.sources", "files, which can be read twice", "standard input", advice))
    if shard_bytes is not None:
        require_number("plan.shard_bytes", shard_bytes, 1)
    if not isinstance(column, str | None):
        raise TypeError(sentence("plan.column", "the name of a column", repr(column), "Give a string."))
    found = [place for source in given for place in places(source, _wanted)] if given else _topics()
    _require_room(found)
    limit = shard_bytes or max(LEAST, sum(place.size for place in found) // SHARDS)
    kinds = [kind_of(place.path) if given else "topic" for place in found]
    if column is not None and not {"jsonl", "parquet"} & set(kinds):
        got = f"plain text alone ({found[0].path}{', …' if len(found) > 1 else ''})"
        raise ValueError(sentence("plan.column", "JSONL or Parquet that has columns", got, "Leave it out."))
    shards = tuple(_filled(_units(found, kinds, column, limit), limit))
    if not shards:
        raise ValueError(sentence("plan.sources", "text", f"nothing in {len(found)} files", "Give other files."))
    return Corpus(shards, tuple((place.path, place.size) for place in found), column)


def texts_of(shard: Shard, column: str | None = None, spoiled: list[Spoiled] | None = None) -> Documents:
    """The texts of a shard, each complete; ``spoiled`` gets the documents that are skipped, as they are passed.

    A text's index is number << 40 | position: the number of its file, and its first byte there (its row in Parquet).
    Its name is the path, path:BYTE for a later part of a plain text and for a line of JSONL, path:ROW for a row.
    """
    return Documents(shard, column, spoiled)


def hash_of(shard: Shard, column: str | None = None) -> str:
    """sha256 over the texts of a shard and their indices, and over what was skipped, where and why.

    >>> len(hash_of(plan().shards[0]))
    64
    """
    return texts_of(shard, column).sha256()


@final
class Documents(Iterator[Text]):
    """Texts of a shard one after the other, and their hash."""

    def __init__(self, shard: Shard, column: str | None, spoiled: list[Spoiled] | None):
        self._documents = _documents(shard, column)
        self._spoiled = spoiled
        self._hash = hashlib.sha256()

    def __next__(self) -> Text:
        for index, document in self._documents:
            self._update(index, document)
            if document.body is not None:
                return Text(index, document.name, document.body)
            if self._spoiled is not None:
                self._spoiled.append(Spoiled(document.name, document.why))
        raise StopIteration

    def sha256(self) -> str:
        """`hash_of` the shard: what was not taken is read for it, and is no longer there to be taken."""
        for index, document in self._documents:
            self._update(index, document)
        return self._hash.hexdigest()

    def _update(self, index: int, document: Document) -> None:
        kept = (document.why if document.body is None else document.body).encode()
        self._hash.update(b"%d %d %d " % (index, document.body is not None, len(kept)) + kept)


def _documents(shard: Shard, column: str | None) -> Iterator[tuple[int, Document]]:
    for piece in shard.pieces:
        for document in _read(piece, column):
            yield piece.number << POSITION | document.position, document


def _read(piece: Piece, column: str | None) -> Iterator[Document]:
    if piece.kind == "text":
        return plain_parts(piece.path, piece.start, piece.stop)
    if piece.kind == "jsonl":
        return json_lines(piece.path, piece.start, piece.stop, column)
    if piece.kind == "parquet":
        return parquet_rows(piece.path, piece.start, piece.stop, column)
    from pydoc_data.topics import topics

    return iter([Document(0, piece.path, topics[piece.path.removeprefix("topics/")])])


def _wanted(name: str) -> bool:
    return kind_of(name) != "text" or Path(name).suffix.lower() in SUFFIXES


def _topics() -> list[Place]:
    from pydoc_data.topics import topics

    return [Place(f"topics/{name}", len(topics[name].encode()), False) for name in sorted(topics)]


def _require_room(found: list[Place]) -> None:
    """Every text has a number below 2⁶³."""
    if len(found) > 1 << NUMBER:
        expected, got = f"at most {1 << NUMBER} files", str(len(found))
        raise ValueError(sentence("plan.sources", expected, got, "Join small files as lines of JSONL."))
    for place in found:
        if place.size > 1 << POSITION:
            expected, got = f"files of at most {1 << POSITION} bytes", f"{place.size} in {place.path}"
            raise ValueError(sentence("plan.sources", expected, got, "Split the file."))


def _units(found: list[Place], kinds: list[str], column: str | None, limit: int) -> Iterator[tuple[Piece, int]]:
    """What is not cut any further, with its bytes, in order."""
    for number, (place, kind) in enumerate(zip(found, kinds, strict=True)):
        if place.named:
            _require_text(place, kind, column)
        elif kind == "jsonl":
            line_column(place.path, column)
        for start, stop, size in _cuts(place, kind, column, limit):
            yield Piece(number, place.path, kind, start, stop), size


def _cuts(place: Place, kind: str, column: str | None, limit: int) -> Iterator[tuple[int, int, int]]:
    if kind == "topic":
        yield 0, 1, place.size
    elif kind == "parquet":
        sizes = row_groups(place.path, column)
        for group, size in enumerate(sizes):
            yield group, group + 1, place.size * size // max(1, sum(sizes))
    else:
        step = max(PART, limit // PART * PART) if kind == "text" else limit
        step = max(1, place.size) if compressed(place.path) and kind == "jsonl" else step
        for start in range(0, place.size, step):
            stop = min(start + step, place.size)
            yield start, stop, stop - start


def _filled(units: Iterator[tuple[Piece, int]], limit: int) -> Iterator[Shard]:
    """Units in order, as many in a shard as fit; a larger one is a shard of its own."""
    held: list[Piece] = []
    total = ordinal = 0
    for piece, size in units:
        if held and total + size > limit:
            yield Shard(ordinal, tuple(held), total)
            held, total, ordinal = [], 0, ordinal + 1
        if held and held[-1].number == piece.number:
            held[-1] = held[-1]._replace(stop=piece.stop)
        else:
            held.append(piece)
        total += size
    if held:
        yield Shard(ordinal, tuple(held), total)


def _require_text(place: Place, kind: str, column: str | None) -> None:
    """A file that was named has a document that can be read; the first is enough."""
    reasons = []
    for document in _read(Piece(0, place.path, kind, 0, max(1, place.size)), column):
        if document.body is not None:
            return
        reasons.append(document.why)
    expected = EXPECTED[kind] if reasons else "text"
    got = f"{reasons[0] if reasons else 'nothing'} in {place.path}"
    raise ValueError(sentence("plan.sources", expected, got, "Leave the file out, or convert it."))
