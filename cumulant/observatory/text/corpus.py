"""Texts to read, from files, directories, URIs or standard input: in shards of a corpus, or as one stream. Recordings
are texts with their sound.

A corpus is an ordered list of shards, which say what parts of which files belong together and never hold the text:
whoever observes a shard reads its text from the files. What a document is, its number and its name depend on its file
and on the order of the files, not on how they are cut into shards.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from cumulant.checks import require_integer, sentence
from cumulant.observatory.text.documents import (
    PART_BYTES,
    Document,
    json_lines,
    jsonl_column,
    parquet_rows,
    plain_parts,
    recording,
    row_groups,
    stream_parts,
)
from cumulant.observatory.text.files import (
    SUFFIXES,
    FileLocation,
    Sources,
    compressed,
    find_files,
    kind_of,
    open_file,
)
from cumulant.observatory.text.parts import TextPart
from cumulant.observatory.text.wav import Sound

DEFAULT_SHARDS = 256  # about so many if there is enough text
MIN_SHARD_BYTES = 1 << 15  # unless another size is asked for
POSITION_BITS = 40  # of a text's index that say where it is in its file; the others say which file
NUMBER_BITS = 63 - POSITION_BITS
EXPECTED = {"text": "UTF-8 text", "jsonl": "lines of JSON with text", "parquet": "rows of text"}


class Text(NamedTuple):
    """A text, or a part of a long one.

    index  number of the text; parts of one text share it and follow each other
    name   the path it was read from, <stdin>, or topics/<name> for the pages of pydoc
    body   the characters
    start  how many characters of the text come before
    more   whether another part follows
    sound  of a recording, whose body is the transcript that was given, or empty
    parts  named characters of the text, in order, none over another
    """

    index: int
    name: str
    body: str
    start: int = 0
    more: bool = False
    sound: Sound | None = None
    parts: tuple[TextPart, ...] = ()


TextInput = Text | str | dict[str, Any]  # a dictionary as a line of JSONL is: {"text": ..., "parts": [...]}


class UnreadableDocument(NamedTuple):
    """A document that was skipped: its name, and the reason."""

    name: str
    reason: str


class FileRange(NamedTuple):
    """Part of a file.

    number       of the file in the order of the corpus
    path         or URI; of a prompt or a transcript the passage itself
    kind         "text", "jsonl", "parquet", "topic" for a page of Python's own help, "prompt", "audio" for a WAV file,
                 or "transcript" for what is said in the one before
    start, stop  bytes of a plain text (multiples of `PART_BYTES`, or its size), bytes of JSONL (the lines that begin
                 there), row groups of Parquet; 0 and 1 for all others
    """

    number: int
    path: str
    kind: str
    start: int
    stop: int


class Shard(NamedTuple):
    """What is read and stored as one: ranges of files in order, and about how many bytes they are.

    >>> shard = Shard(0, (FileRange(0, "a.txt", "text", 0, 7),), 7)
    >>> Shard.of(shard.plain()) == shard
    True
    """

    ordinal: int
    ranges: tuple[FileRange, ...]
    size: int

    def plain(self) -> dict[str, Any]:
        """The shard for JSON."""
        return {"ordinal": self.ordinal, "ranges": [list(part) for part in self.ranges], "size": self.size}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Shard:
        """The shard that `plain` gave."""
        return cls(plain["ordinal"], tuple(FileRange(*part) for part in plain["ranges"]), plain["size"])


class Corpus(NamedTuple):
    """Shards in order, the files (path and bytes) they refer to, and the column of text that was named, if any."""

    shards: tuple[Shard, ...]
    files: tuple[tuple[str, int], ...]
    column: str | None

    def identity(self) -> str:
        """sha256 over files, their sizes, the column and the borders of the shards; alike in all versions."""
        shards = [{"ordinal": n, "pieces": ranges, "size": size} for n, ranges, size in self.shards]
        return hashlib.sha256(json.dumps([self.files, self.column, shards]).encode()).hexdigest()

    def texts(self, unreadable: list[UnreadableDocument] | None = None) -> Iterator[Text]:
        """All texts in order; the documents that are skipped are appended to ``unreadable``."""
        for shard in self.shards:
            yield from texts_of(shard, self.column, unreadable)


def plan(
    sources: Sources = (),
    *,
    prompts: Sequence[str] = (),
    audio: Sources = (),
    transcripts: Sequence[str] = (),
    column: str | None = None,
    shard_bytes: int | None = None,
) -> Corpus:
    """Cut files, directories and URIs into shards; from nothing, the topics of Python's own help.

    prompts      passages, each a text, in the place of files
    audio        WAV files, directories of them or URIs, in the place of texts: one shard a file
    transcripts  what is said in each file of ``audio``, in their order; none: a model writes it
    column       where JSONL and Parquet have their text; None: their only column of strings, else the first of "text",
                 "content", "body", "document" that holds strings
    shard_bytes  how large shards should be; None: a 256th of all, but at least 32 KiB. Plain text is cut only at
                 multiples of `PART_BYTES`, Parquet only between row groups, compressed files not at all

    A directory gives its files with a suffix in `SUFFIXES`, its JSONL and its Parquet. Documents that cannot be read
    are skipped and listed when they are read; a file that is named and has no other is refused here.

    >>> corpus = plan(shard_bytes=1 << 16)
    >>> corpus.shards[0].ranges[0]
    FileRange(number=0, path='topics/assert', kind='topic', start=0, stop=1)
    """
    names = _listed(sources)
    if any(str(source) == "-" for source in names):
        advice = "Write it to a file first."
        raise ValueError(sentence("plan.sources", "files, which can be read twice", "standard input", advice))
    if shard_bytes is not None:
        require_integer("plan.shard_bytes", shard_bytes, 1)
    if not isinstance(column, str | None):
        raise TypeError(sentence("plan.column", "the name of a column", repr(column), "Give a string."))
    if prompts:
        return _passages(names, prompts)
    if _listed(audio):
        return _recordings(names, _listed(audio), transcripts)
    files = [file for source in names for file in find_files("plan.sources", source, _in_corpus)]
    files = files if names else [FileLocation(name, len(body.encode()), False) for name, body in _topics()]
    _require_indices(files)
    limit = shard_bytes or max(MIN_SHARD_BYTES, sum(file.size for file in files) // DEFAULT_SHARDS)
    kinds = [kind_of(file.path) if names else "topic" for file in files]
    if column is not None and not {"jsonl", "parquet"} & set(kinds):
        got = f"plain text alone ({files[0].path}{', …' if len(files) > 1 else ''})"
        raise ValueError(sentence("plan.column", "JSONL or Parquet that has columns", got, "Leave it out."))
    shards = tuple(_packed(_smallest_ranges(files, kinds, column, limit), limit))
    if not shards:
        raise ValueError(sentence("plan.sources", "text", f"nothing in {len(files)} files", "Give other files."))
    return Corpus(shards, tuple((file.path, file.size) for file in files), column)


def _passages(sources: list[str | Path], prompts: Sequence[str]) -> Corpus:
    """Passages that were typed, in one shard."""
    if sources:
        raise ValueError(sentence("plan.prompts", "no sources beside them", "both", "Leave one of them out."))
    if any(not passage.strip() for passage in prompts):
        raise ValueError(sentence("plan.prompts", "text", "an empty passage", "Give some words."))
    sizes = [len(passage.encode("utf-8", "replace")) for passage in prompts]
    ranges = tuple(FileRange(number, passage, "prompt", 0, 1) for number, passage in enumerate(prompts))
    return Corpus((Shard(0, ranges, sum(sizes)),), tuple(zip(prompts, sizes, strict=True)), None)


def _recordings(sources: list[str | Path], audio: list[str | Path], transcripts: Sequence[str]) -> Corpus:
    """WAV files, each a shard, with the transcripts that were given."""
    if sources:
        raise ValueError(sentence("plan.audio", "no sources beside it", "both", "Leave one of them out."))
    files = [file for source in audio for file in find_files("plan.audio", source, _is_wav)]
    if transcripts and len(transcripts) != len(files):
        expected, got = f"one for each of {len(files)} recordings", str(len(transcripts))
        raise ValueError(sentence("plan.transcripts", expected, got, "Give them in the order of the recordings."))
    _require_indices(files)
    shards = []
    for number, file in enumerate(files):
        ranges = (FileRange(number, file.path, "audio", 0, 1),)
        if transcripts:
            ranges += (FileRange(number, transcripts[number], "transcript", 0, 1),)
        if file.named and (document := recording(file.path, "")).body is None:
            got, advice = f"{document.reason} in {file.path}", "Leave the file out, or convert it to WAV."
            raise ValueError(sentence("plan.audio", "WAV files", got, advice))
        shards.append(Shard(number, ranges, file.size))
    return Corpus(tuple(shards), tuple((file.path, file.size) for file in files), None)


def reads_audio(corpus: Corpus) -> bool:
    """Whether a corpus is of recordings."""
    return any(part.kind == "audio" for shard in corpus.shards for part in shard.ranges)


def _is_wav(name: str) -> bool:
    return name.lower().endswith((".wav", ".wave"))


def texts_of(shard: Shard, column: str | None = None, unreadable: list[UnreadableDocument] | None = None) -> ShardTexts:
    """The texts of a shard, each complete; documents that are skipped are appended to ``unreadable`` on the way.

    A text's index is number << 40 | position: the number of its file, and its first byte there (its row in Parquet).
    Its name is the path, path:BYTE for a later part of a plain text and for a line of JSONL, path:ROW for a row.
    """
    return ShardTexts(shard, column, unreadable)


def hash_of(shard: Shard, column: str | None = None) -> str:
    """sha256 over the texts of a shard and their indices, and over the skipped documents and the reasons.

    >>> len(hash_of(plan().shards[0]))
    64
    """
    return texts_of(shard, column).sha256()


@final
class ShardTexts(Iterator[Text]):
    """Texts of a shard one after the other, and their hash."""

    def __init__(self, shard: Shard, column: str | None, unreadable: list[UnreadableDocument] | None):
        self._documents = _documents(shard, column)
        self._unreadable = unreadable
        self._hash = hashlib.sha256()

    def __next__(self) -> Text:
        for index, document in self._documents:
            self._update(index, document)
            if document.body is not None:
                return Text(index, document.name, document.body, sound=document.sound, parts=document.parts)
            if self._unreadable is not None:
                self._unreadable.append(UnreadableDocument(document.name, document.reason))
        raise StopIteration

    def sha256(self) -> str:
        """`hash_of` the shard; reads the texts that are left."""
        for index, document in self._documents:
            self._update(index, document)
        return self._hash.hexdigest()

    def _update(self, index: int, document: Document) -> None:
        content = document.content()
        self._hash.update(b"%d %d %d " % (index, document.body is not None, len(content)) + content)


def read_texts(sources: Sources = ()) -> StreamTexts:
    """Texts of files, directories, URIs or "-" (standard input), each read once; of Python's own help by default.

    A directory gives its files with a suffix in `SUFFIXES`, recursively and sorted; hidden and empty ones are left out.
    Files are UTF-8, and each is one text. What is missing is refused at once, what is empty or no text when it is
    reached. The lines of JSONL are characters here like any other; `plan` finds the documents in a file.

    >>> texts = read_texts()
    >>> next(texts).name, len(texts.sha256)
    ('topics/assert', 64)
    """
    paths: list[str | None] = []
    for source in _listed(sources):
        files = None if str(source) == "-" else find_files("read_texts.sources", source, _in_stream)
        paths += [None] if files is None else [file.path for file in files]
    return StreamTexts(paths)


@final
class StreamTexts(Iterator[Text]):
    """Texts that are read once, one after the other, and their hash.

    sha256  over the UTF-8 bytes of the texts taken so far, with a zero byte between two texts
    """

    def __init__(self, paths: list[str | None]):
        topics = (Text(index, *topic) for index, topic in enumerate(_topics()))
        self._texts = _stream(paths) if paths else topics
        self._hash = hashlib.sha256()

    def __next__(self) -> Text:
        text = next(self._texts)
        if text.index and not text.start:
            self._hash.update(b"\0")
        self._hash.update(text.body.encode())
        return text

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _stream(paths: list[str | None]) -> Iterator[Text]:
    """Texts of files in parts; None is standard input."""
    for index, path in enumerate(paths):
        name = "<stdin>" if path is None else path
        raw = sys.stdin.buffer if path is None else open_file(path)
        try:
            for part in stream_parts(raw, name):
                yield Text(index, name, *part)
        finally:
            if path is not None:
                raw.close()


def _listed(sources: Sources) -> list[str | Path]:
    """One source or several, as a list."""
    return [sources] if isinstance(sources, str | Path) else list(sources)


def _topics() -> list[tuple[str, str]]:
    """Names and bodies of the topics of Python's own help."""
    from pydoc_data.topics import topics

    return [(f"topics/{name}", topics[name]) for name in sorted(topics)]


def _in_stream(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _in_corpus(name: str) -> bool:
    return kind_of(name) != "text" or _in_stream(name)


def _documents(shard: Shard, column: str | None) -> Iterator[tuple[int, Document]]:
    words = {part.number: part.path for part in shard.ranges if part.kind == "transcript"}
    for part in shard.ranges:
        if part.kind == "audio":
            yield part.number << POSITION_BITS, recording(part.path, words.get(part.number, ""))
            continue
        for document in _read(part, column) if part.kind != "transcript" else ():
            yield part.number << POSITION_BITS | document.position, document


def _read(part: FileRange, column: str | None) -> Iterator[Document]:
    if part.kind == "text":
        return plain_parts(part.path, part.start, part.stop)
    if part.kind == "jsonl":
        return json_lines(part.path, part.start, part.stop, column)
    if part.kind == "parquet":
        return parquet_rows(part.path, part.start, part.stop, column)
    if part.kind == "prompt":
        return iter([Document(0, "prompt" if not part.number else f"prompt {part.number + 1}", part.path)])
    return iter([Document(0, part.path, dict(_topics())[part.path])])


def _require_indices(files: list[FileLocation]) -> None:
    """Every text has an index below 2⁶³, and a file can be read twice."""
    if len(files) > 1 << NUMBER_BITS:
        expected, got = f"at most {1 << NUMBER_BITS} files", str(len(files))
        raise ValueError(sentence("plan.sources", expected, got, "Join small files as lines of JSONL."))
    for file in files:
        if file.size < 0:
            got, advice = f"the pipe {file.path}", "Pipe it in: --text -."
            raise ValueError(sentence("plan.sources", "files, which can be read twice", got, advice))
        if file.size > 1 << POSITION_BITS:
            expected, got = f"files of at most {1 << POSITION_BITS} bytes", f"{file.size} in {file.path}"
            raise ValueError(sentence("plan.sources", expected, got, "Split the file."))


def _smallest_ranges(
    files: list[FileLocation], kinds: list[str], column: str | None, limit: int
) -> Iterator[tuple[FileRange, int]]:
    """Ranges that are not cut any further, with their bytes, in order."""
    for number, (file, kind) in enumerate(zip(files, kinds, strict=True)):
        if file.named:
            _require_text(file, kind, column)
        elif kind == "jsonl":
            jsonl_column(file.path, column)
        for start, stop, size in _cuts(file, kind, column, limit):
            yield FileRange(number, file.path, kind, start, stop), size


def _cuts(file: FileLocation, kind: str, column: str | None, limit: int) -> Iterator[tuple[int, int, int]]:
    if kind == "topic":
        yield 0, 1, file.size
    elif kind == "parquet":
        sizes = row_groups(file.path, column)
        for group, size in enumerate(sizes):
            yield group, group + 1, file.size * size // max(1, sum(sizes))
    else:
        step = max(PART_BYTES, limit // PART_BYTES * PART_BYTES) if kind == "text" else limit
        step = max(1, file.size) if compressed(file.path) and kind == "jsonl" else step
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield start, stop, stop - start


def _packed(ranges: Iterator[tuple[FileRange, int]], limit: int) -> Iterator[Shard]:
    """Shards of ranges in order, as many in each as fit; a larger range is a shard of its own."""
    packed: list[FileRange] = []
    total = ordinal = 0
    for part, size in ranges:
        if packed and total + size > limit:
            yield Shard(ordinal, tuple(packed), total)
            packed, total, ordinal = [], 0, ordinal + 1
        if packed and packed[-1].number == part.number:
            packed[-1] = packed[-1]._replace(stop=part.stop)
        else:
            packed.append(part)
        total += size
    if packed:
        yield Shard(ordinal, tuple(packed), total)


def _require_text(file: FileLocation, kind: str, column: str | None) -> None:
    """A file that was named has a document that can be read; the first is enough."""
    reasons = []
    for document in _read(FileRange(0, file.path, kind, 0, max(1, file.size)), column):
        if document.body is not None:
            return
        reasons.append(document.reason)
    expected = EXPECTED[kind] if reasons else "text"
    got = f"{reasons[0] if reasons else 'nothing'} in {file.path}"
    advice = "Sound is given as audio=..." if _is_wav(file.path) else "Leave the file out, or convert it."
    raise ValueError(sentence("plan.sources", expected, got, advice))
