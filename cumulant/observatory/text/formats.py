"""How files become documents: plain text in parts, JSONL line by line, Parquet row by row.

A document depends on its file alone and not on the piece of the file it is read with: a piece is given by its borders,
and what begins between them belongs to it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cumulant.checks import sentence
from cumulant.observatory.text.locations import opened

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PART = 1 << 17  # bytes of a plain text that are one document
SLACK = 128  # a part may end up to PART/SLACK bytes later, so that no word is cut
HEAD = 64  # objects of a JSONL file that tell its columns
ROWS = 1024  # rows of a Parquet file that are decoded together
CHUNK = 1 << 20
LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PREFERRED = ("text", "content", "body", "document")
WORD_END = re.compile(rb"(?<=[0-9A-Za-z_\x80-\xff])[ \t\n\r\f\v]")
KINDS = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", list: "array"}
NOT_UTF8, ZEROS, NO_OBJECT = "bytes that are not UTF-8", "zero bytes", "no JSON object"
HALF, BROKEN, NO_PARQUET = "half of a surrogate pair", "data that cannot be decoded", "no Parquet file"
STRINGS = ("string", "large_string", "string_view")
TEXT_CODES = re.compile(r"dictionary<values=(large_)?string,")
MARK = b"\xef\xbb\xbf"  # of UTF-8, at the beginning of a file


class Document(NamedTuple):
    """Where a document is in its file, its name, and its characters, or None and why they cannot be read."""

    position: int
    name: str
    body: str | None
    why: str = ""


def kind_of(path: str) -> str:
    """What a file holds, by its name: "jsonl", "parquet" or "text".

    >>> kind_of("a/B.JSONL.gz"), kind_of("s3://bucket/b.parquet?region=eu"), kind_of("c.json")
    ('jsonl', 'parquet', 'text')
    """
    if _ends(path, LINES):
        return "jsonl"
    return "parquet" if _ends(path, (".parquet",)) else "text"


def compressed(path: str) -> bool:
    """Whether a file can only be read from its beginning."""
    return _ends(path, (".gz",))


def _ends(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a path ends so, or a URI before its options."""
    shorter = path.rpartition("?")[0] if "://" in path else ""
    return path.lower().endswith(suffixes) or shorter.lower().endswith(suffixes)


def plain_parts(path: str, start: int, stop: int) -> Iterator[Document]:
    """Parts of a plain text that begin in [start, stop), multiples of `PART` or the size of the file.

    A border moves to the next end of a word, or to the next character where a word is long. All three ways to end a
    line become a line feed, and a byte order mark is dropped, as when a file is read as text.
    """
    with opened(path) as stream:
        for first in range(start, stop, PART):
            raw = _part(stream, first, min(first + PART, stop))
            body, why = _decoded(raw.removeprefix(MARK) if first == 0 else raw)
            if body != "":
                body = body and body.replace("\r\n", "\n").replace("\r", "\n")
                yield Document(first, f"{path}:{first}" if first else path, body, why)


def _part(stream: io.BufferedReader, start: int, stop: int) -> bytes:
    before = min(start, 1)
    stream.seek(start - before)
    held = stream.read(before + stop - start + PART // SLACK)
    return held[_border(held, before) if start else 0 : _border(held, before + stop - start)]


def _border(held: bytes, place: int) -> int:
    if place >= len(held):
        return len(held)
    if found := WORD_END.search(held, place, place + PART // SLACK):
        return found.start()
    if held[place - 1 : place + 1] == b"\r\n":
        return place + 1
    skipped = next((n for n in range(4) if held[place + n : place + n + 1] == b"" or _begins(held[place + n])), 0)
    return place + skipped


def _begins(byte: int) -> bool:
    """Whether a byte of UTF-8 begins a character."""
    return byte & 0xC0 != 0x80


def _decoded(raw: bytes) -> tuple[str | None, str]:
    """Characters, or None and why there are none."""
    if b"\0" in raw:
        return None, ZEROS
    try:
        return raw.decode(), ""
    except UnicodeDecodeError:
        return None, NOT_UTF8


def json_lines(path: str, start: int, stop: int, column: str | None) -> Iterator[Document]:
    """One document a line: the text in the objects of the lines that begin in the bytes [start, stop) of a file.

    Lines end with a line feed; blank ones are no documents. A compressed file is one piece, and its positions are those
    of the bytes it holds.
    """
    name = line_column(path, column)
    for place, line in _lines(path, start, stop):
        found, why = _object(line)
        body, why = (None, why) if found is None else _text(found, name)
        yield Document(place, f"{path}:{place}", body, why)


def line_column(path: str, column: str | None) -> str:
    """The column of a JSONL file that holds text, by its first `HEAD` objects; an empty name if it has no object."""
    kinds: dict[str, dict[str, None]] = {}
    objects = (found for _, line in _lines(path, 0, sys.maxsize) if (found := _object(line)[0]) is not None)
    for found in itertools.islice(objects, HEAD):
        for name, value in found.items():
            kinds.setdefault(name, {})[KINDS.get(type(value), "object")] = None
    if not kinds:
        return column or ""
    texts = [name for name, seen in kinds.items() if "string" in seen or (name == column and [*seen] == ["null"])]
    return _chosen(path, {name: " or ".join(seen) for name, seen in kinds.items()}, texts, column)


def _chosen(path: str, kinds: dict[str, str], texts: list[str], column: str | None) -> str:
    if column is not None and column in texts:
        return column
    if column is None:
        known = [name for name in PREFERRED if name in texts]
        if len(texts) == 1 or known:
            return texts[0] if len(texts) == 1 else known[0]
    expected = "a column of text" + ("" if column is None else f" named {column!r}")
    got = f"columns {', '.join(f'{name} ({kind})' for name, kind in kinds.items())} in {path}"
    raise ValueError(sentence("plan.column", expected, got, "Name it with --column."))


def _lines(path: str, start: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """Where lines begin, and the lines; None where compressed data break off."""
    with opened(path) as raw:
        if not compressed(path):
            yield from _lines_between(raw, start, stop)
            return
        place = -1
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                for place, line in _lines_between(stream, 0, sys.maxsize):
                    yield place, line
        except (gzip.BadGzipFile, EOFError, zlib.error):
            yield place + 1, None


def _lines_between(stream: io.BufferedReader | gzip.GzipFile, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    place = start
    if start:
        place = start - 1
        stream.seek(place)
        while place < stop:  # in chunks, because the line before may be long
            chunk = stream.readline(CHUNK)
            place += len(chunk)
            if not chunk or chunk.endswith(b"\n"):
                break
    while place < stop and (line := stream.readline()):
        kept = line.removeprefix(MARK) if place == 0 else line
        if kept.strip():
            yield place, kept
        place += len(line)


def _object(line: bytes | None) -> tuple[dict[str, Any] | None, str]:
    if line is None:
        return None, BROKEN
    characters, why = _decoded(line)
    if characters is None:
        return None, why
    try:
        found = json.loads(characters)
    except (ValueError, RecursionError):  # also integers of many digits, and brackets in brackets in brackets
        return None, NO_OBJECT
    return (found, "") if isinstance(found, dict) else (None, NO_OBJECT)


def _text(found: dict[str, Any], column: str) -> tuple[str | None, str]:
    if column not in found:
        return None, f"no column {column!r}"
    value = found[column]
    if not isinstance(value, str):
        return None, f"{KINDS.get(type(value), 'object')} in column {column!r}"
    try:
        return _decoded(value.encode())
    except UnicodeEncodeError:
        return None, HALF


def parquet_rows(path: str, start: int, stop: int, column: str | None) -> Iterator[Document]:
    """One document a row: the text in the row groups [start, stop) of a Parquet file."""
    with opened(path) as stream:
        watched = _Watched(stream)
        file = _parquet(watched)
        if file is None:
            yield Document(0, path, None, NO_PARQUET)
            return
        name = row_column(path, file, column)
        row = 0
        for group in range(min(stop, file.num_row_groups)):
            if group >= start:
                yield from _group(path, file, watched, group, row, name)
            row += file.metadata.row_group(group).num_rows


def _group(path: str, file: ParquetFile, watched: _Watched, group: int, row: int, column: str) -> Iterator[Document]:
    import pyarrow

    try:
        for batch in file.iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False):
            values: Any = batch.column(0)
            values = values.dictionary_decode() if pyarrow.types.is_dictionary(values.type) else values
            for value in values.cast(pyarrow.large_binary()).to_pylist():  # decoded by hand: one bad row spoils itself
                body, why = (None, f"null in column {column!r}") if value is None else _decoded(value)
                yield Document(row, f"{path}:{row}", body, why)
                row += 1
    except (pyarrow.ArrowException, OSError):
        if watched.failed:
            raise
        yield Document(row, f"{path}:{row}", None, BROKEN)


def row_groups(path: str, column: str | None) -> list[int]:
    """Bytes of the row groups of a Parquet file, which must have a column of text; [0] if it is no Parquet file."""
    with opened(path) as stream:
        file = _parquet(_Watched(stream))
        if file is None:
            return [0]
        row_column(path, file, column)
        return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]


def row_column(path: str, file: ParquetFile, column: str | None) -> str:
    """The column of a Parquet file that holds text."""
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    texts = [name for name, kind in kinds.items() if kind in STRINGS or TEXT_CODES.match(kind)]
    return _chosen(path, kinds, texts, column)


def _parquet(watched: _Watched) -> ParquetFile | None:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as missing:
        told = "pyarrow, which reads Parquet", f"no {missing.name}", "Install cumulant[ray]."
        raise ModuleNotFoundError(sentence("plan.sources", *told)) from missing
    try:
        return ParquetFile(watched)
    except (pyarrow.ArrowException, OSError):
        if watched.failed:
            raise
        return None


class _Watched:
    """A stream that remembers whether reading failed: pyarrow has one error for spoiled data and lost connections."""

    def __init__(self, stream: io.BufferedReader):
        self._stream, self.failed, self.closed = stream, False, False

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except OSError:
            self.failed = True
            raise

    def seek(self, place: int, whence: int = 0) -> int:
        return self._stream.seek(place, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
