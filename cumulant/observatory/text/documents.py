"""Documents of files: parts of a plain text, lines of JSONL, rows of Parquet, recordings.

A document depends on its file alone and not on the range it is read with: a range is given by its borders, and the
documents that begin between them belong to it.
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
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from cumulant.checks import sentence
from cumulant.extras import install
from cumulant.observatory.text.files import compressed, open_file
from cumulant.observatory.text.parts import (
    COLUMN,
    TextPart,
    UnreadableParts,
    gives_parts,
    joined_parts,
    makes_text,
    spans,
)
from cumulant.observatory.text.wav import Sound, UnreadableSound, open_wav

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PART_BYTES = 1 << 17  # of a plain text that are one document
PART_CHARACTERS = 1 << 18  # of a stream that are read at once
SLACK = 128  # a part may end up to PART_BYTES/SLACK bytes later, so that no word is cut
SAMPLED_OBJECTS = 64  # of a JSONL file, by which its column of text is found
ROWS = 1024  # of a Parquet file that are decoded together
CHUNK = 1 << 20
PREFERRED_COLUMNS = ("text", "content", "body", "document")
WORD_END = re.compile(rb"(?<=[0-9A-Za-z_\x80-\xff])[ \t\n\r\f\v]")
CHARACTER_WORD_END = re.compile(r"(?<=\w)\s")
JSON_TYPES = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", list: "array"}
NOT_UTF8, ZEROS, NO_OBJECT = "bytes that are not UTF-8", "zero bytes", "no JSON object"
LONE_SURROGATE, BROKEN, NO_PARQUET = "half of a surrogate pair", "data that cannot be decoded", "no Parquet file"
STRING_TYPES = ("string", "large_string", "string_view")
STRING_DICTIONARY = re.compile(r"dictionary<values=(large_)?string,")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """The position of a document in its file, its name, and its characters, or None and why they cannot be read.

    Of a recording there is the sound, and the characters are its transcript, if one was given.
    """

    position: int
    name: str
    body: str | None
    reason: str = ""
    sound: Sound | None = None
    parts: tuple[TextPart, ...] = ()

    def content(self) -> bytes:
        """What the hash of a corpus is taken of."""
        text = (self.reason if self.body is None else self.body).encode()
        text += b"\0" + json.dumps(self.parts).encode() if self.parts else b""
        return text if self.sound is None else text + b"\0" + self.sound.sha256().encode()


def plain_parts(path: str, start: int, stop: int) -> Iterator[Document]:
    """Parts of a plain text that begin in [start, stop), multiples of `PART_BYTES` or the size of the file.

    A border moves to the next end of a word, or to the next character where a word is long. All three ways to end a
    line become a line feed, and a byte order mark is dropped, as when a file is read as text.
    """
    with open_file(path) as stream:
        for first in range(start, stop, PART_BYTES):
            raw = _part(stream, first, min(first + PART_BYTES, stop))
            body, why = _decoded(raw.removeprefix(BYTE_ORDER_MARK) if first == 0 else raw)
            if body != "":
                body = body and body.replace("\r\n", "\n").replace("\r", "\n")
                yield Document(first, f"{path}:{first}" if first else path, body, why)


def _part(stream: io.BufferedReader, start: int, stop: int) -> bytes:
    before = min(start, 1)
    stream.seek(start - before)
    raw = stream.read(before + stop - start + PART_BYTES // SLACK)
    return raw[_border(raw, before) if start else 0 : _border(raw, before + stop - start)]


def _border(raw: bytes, offset: int) -> int:
    """The end of a word, or of a character, at or after an offset."""
    if offset >= len(raw):
        return len(raw)
    if word_end := WORD_END.search(raw, offset, offset + PART_BYTES // SLACK):
        return word_end.start()
    if raw[offset - 1 : offset + 1] == b"\r\n":
        return offset + 1
    skipped = next((n for n in range(4) if raw[offset + n : offset + n + 1] == b"" or _begins(raw[offset + n])), 0)
    return offset + skipped


def _begins(byte: int) -> bool:
    """Whether a byte of UTF-8 begins a character."""
    return byte & 0xC0 != 0x80


def _decoded(raw: bytes) -> tuple[str | None, str]:
    """Characters, or None and the reason."""
    if b"\0" in raw:
        return None, ZEROS
    try:
        return raw.decode(), ""
    except UnicodeDecodeError:
        return None, NOT_UTF8


def stream_parts(raw: BinaryIO, name: str) -> Iterator[tuple[str, int, bool]]:
    """Parts of a stream that is read once, their first character, and whether more follow.

    They end with a word, where tokenizers cut anyway. What is empty or no text is refused.
    """
    stream = io.TextIOWrapper(raw, encoding="utf-8-sig")
    try:
        rest, start, read = "", 0, _characters(stream, name)
        while following := _characters(stream, name) if len(read) == PART_CHARACTERS else "":
            rest += read
            ends = [match.start() for match in CHARACTER_WORD_END.finditer(rest, len(rest) // 2)]
            cut = ends[-1] if ends else len(rest)
            yield rest[:cut], start, True
            rest, start, read = rest[cut:], start + cut, following
        if not rest + read:
            advice = "Give a file with something in it."
            raise ValueError(sentence("read_texts.sources", "text", f"nothing in {name}", advice))
        yield rest + read, start, False
    finally:
        stream.detach()  # whoever opened the stream closes it


def _characters(stream: io.TextIOWrapper, name: str) -> str:
    why = ZEROS
    try:
        read = stream.read(PART_CHARACTERS)
        if "\0" not in read:
            return read
    except UnicodeDecodeError:
        why = NOT_UTF8
    advice = "Leave the file out, or convert it."
    raise ValueError(sentence("read_texts.sources", "UTF-8 text", f"{why} in {name}", advice))


def json_lines(path: str, start: int, stop: int, column: str | None) -> Iterator[Document]:
    """One document a line: the text in the objects of the lines that begin in the bytes [start, stop) of a file.

    Lines end with a line feed; blank ones are no documents. A compressed file is one range, and its positions are those
    of the bytes it holds.
    """
    name = jsonl_column(path, column)
    for position, line in _lines(path, start, stop):
        row, why = _object(line)
        document = Document(position, f"{path}:{position}", None, why)
        yield document if row is None else _with_text(document, row.get(name), row.get(COLUMN), name, name in row)


def jsonl_column(path: str, column: str | None) -> str:
    """The column of a JSONL file that holds text, by its first objects; an empty name if it has no object."""
    kinds: dict[str, dict[str, None]] = {}
    joined = False
    objects = (row for _, line in _lines(path, 0, sys.maxsize) if (row := _object(line)[0]) is not None)
    for row in itertools.islice(objects, SAMPLED_OBJECTS):
        for name, value in row.items():
            kinds.setdefault(name, {})[JSON_TYPES.get(type(value), "object")] = None
        joined = joined or makes_text(row.get(COLUMN))
    if not kinds:
        return column or ""
    if joined and column is None:  # parts have the text in them: no other column is needed
        return PREFERRED_COLUMNS[0]
    texts = [name for name, types in kinds.items() if "string" in types or (name == column and [*types] == ["null"])]
    return _text_column(path, {name: " or ".join(types) for name, types in kinds.items()}, texts, column)


def _text_column(path: str, kinds: dict[str, str], texts: list[str], column: str | None) -> str:
    if column is not None and column in texts:
        return column
    if column is None:
        known = [name for name in PREFERRED_COLUMNS if name in texts]
        if len(texts) == 1 or known:
            return texts[0] if len(texts) == 1 else known[0]
    expected = "a column of text" + ("" if column is None else f" named {column!r}")
    got = f"columns {', '.join(f'{name} ({kind})' for name, kind in kinds.items())} in {path}"
    raise ValueError(sentence("plan.column", expected, got, "Name it with --column."))


def _lines(path: str, start: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """Positions of lines, and the lines; None where compressed data break off."""
    with open_file(path) as raw:
        if not compressed(path):
            yield from _lines_between(raw, start, stop)
            return
        position = -1
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                for position, line in _lines_between(stream, 0, sys.maxsize):
                    yield position, line
        except (gzip.BadGzipFile, EOFError, zlib.error):
            yield position + 1, None


def _lines_between(stream: io.BufferedReader | gzip.GzipFile, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    position = start
    if start:
        position = start - 1
        stream.seek(position)
        while position < stop:  # in chunks, because the line before may be long
            chunk = stream.readline(CHUNK)
            position += len(chunk)
            if not chunk or chunk.endswith(b"\n"):
                break
    while position < stop and (line := stream.readline()):
        content = line.removeprefix(BYTE_ORDER_MARK) if position == 0 else line
        if content.strip():
            yield position, content
        position += len(line)


def _object(line: bytes | None) -> tuple[dict[str, Any] | None, str]:
    if line is None:
        return None, BROKEN
    characters, why = _decoded(line)
    if characters is None:
        return None, why
    try:
        value = json.loads(characters)
    except (ValueError, RecursionError):  # also integers of many digits, and brackets in brackets in brackets
        return None, NO_OBJECT
    return (value, "") if isinstance(value, dict) else (None, NO_OBJECT)


def _with_text(document: Document, value: Any, parts: Any, column: str, there: bool) -> Document:
    """A document with the text in a column, or in its parts, and these parts; or the reason why there is none."""
    try:
        if makes_text(parts):
            value, found = joined_parts(parts)
            body, why = _text(value, COLUMN)
            return document._replace(body=body, reason=why, parts=found if body is not None else ())
        body, why = _text(value, column) if there else (None, f"no column {column!r}")
        found = spans(parts, body) if body is not None and gives_parts(parts) else ()
    except UnreadableParts as error:
        return document._replace(reason=str(error))
    return document._replace(body=body, reason=why, parts=found)


def _text(value: Any, column: str) -> tuple[str | None, str]:
    if not isinstance(value, str):
        return None, f"{JSON_TYPES.get(type(value), 'object')} in column {column!r}"
    try:
        return _decoded(value.encode())
    except UnicodeEncodeError:
        return None, LONE_SURROGATE


def parquet_rows(path: str, start: int, stop: int, column: str | None) -> Iterator[Document]:
    """One document a row: the text in the row groups [start, stop) of a Parquet file."""
    with open_file(path) as stream:
        guarded = _GuardedStream(stream)
        file = _parquet(guarded)
        if file is None:
            yield Document(0, path, None, NO_PARQUET)
            return
        name = parquet_column(path, file, column)
        row = 0
        for group in range(min(stop, file.num_row_groups)):
            if group >= start:
                yield from _group(path, file, guarded, group, row, name)
            row += file.metadata.row_group(group).num_rows


def _group(
    path: str, file: ParquetFile, guarded: _GuardedStream, group: int, row: int, column: str
) -> Iterator[Document]:
    import pyarrow

    try:
        with_parts = [COLUMN] if COLUMN in file.schema_arrow.names and column != COLUMN else []
        wanted = [name for name in (column, *with_parts) if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS, row_groups=[group], columns=wanted, use_threads=False):
            parts = batch.column(COLUMN).to_pylist() if with_parts else [None] * len(batch)
            for value, own in zip(_raw_values(batch, column), parts, strict=True):
                text, why = (None, f"null in column {column!r}") if value is None else _decoded(value)
                document = Document(row, f"{path}:{row}", text, why)
                named = gives_parts(own) and (text is not None or makes_text(own))
                yield _with_text(document._replace(body=None), text, own, column, True) if named else document
                row += 1
    except (pyarrow.ArrowException, OSError):
        if guarded.failed:
            raise
        yield Document(row, f"{path}:{row}", None, BROKEN)


def _raw_values(batch: Any, column: str) -> list[bytes | None]:
    """The bytes of a column, which are decoded one by one: a bad row fails alone."""
    import pyarrow

    if column not in batch.schema.names:
        return [None] * len(batch)
    values = batch.column(column)
    values = values.dictionary_decode() if pyarrow.types.is_dictionary(values.type) else values
    return values.cast(pyarrow.large_binary()).to_pylist()


def recording(path: str, transcript: str) -> Document:
    """The recording in a WAV file, with what is said in it; an empty transcript is for the model to write."""
    try:
        return Document(0, path, transcript, sound=open_wav(path))
    except UnreadableSound as error:
        return Document(0, path, None, str(error))


def row_groups(path: str, column: str | None) -> list[int]:
    """Bytes of the row groups of a Parquet file, which must have a column of text; [0] if it is no Parquet file."""
    with open_file(path) as stream:
        file = _parquet(_GuardedStream(stream))
        if file is None:
            return [0]
        parquet_column(path, file, column)
        return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]


def parquet_column(path: str, file: ParquetFile, column: str | None) -> str:
    """The column of a Parquet file that holds text."""
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    texts = [name for name, kind in kinds.items() if kind in STRING_TYPES or STRING_DICTIONARY.match(kind)]
    if column is None and _parts_with_text(file):
        return PREFERRED_COLUMNS[0]
    return _text_column(path, kinds, texts, column)


def _parts_with_text(file: ParquetFile) -> bool:
    """Whether a file has a column of parts with their text in them."""
    import pyarrow

    if COLUMN not in file.schema_arrow.names:
        return False
    kind = file.schema_arrow.field(COLUMN).type
    if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        return False
    inside = kind.value_type
    return pyarrow.types.is_struct(inside) and {"name", "text"} <= {inside[i].name for i in range(inside.num_fields)}


def _parquet(guarded: _GuardedStream) -> ParquetFile | None:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as missing:
        got, advice = f"no {missing.name}", f"Run {install('ray')}."
        raise ModuleNotFoundError(sentence("plan.sources", "pyarrow, which reads Parquet", got, advice)) from missing
    try:
        return ParquetFile(guarded)
    except (pyarrow.ArrowException, OSError):
        if guarded.failed:
            raise
        return None


class _GuardedStream:
    """A stream that remembers whether reading failed: pyarrow has one error for corrupt data and lost connections."""

    def __init__(self, stream: io.BufferedReader):
        self._stream, self.failed, self.closed = stream, False, False

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except OSError:
            self.failed = True
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
