"""Texts, streamed from files: no more than a part of one file is held at a time, however long it is."""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO, final

from cumulant.checks import sentence
from cumulant.observatory.text.locations import walk

PART = 1 << 18  # characters of a file that are read at once
SUFFIXES = {
    *(".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".css", ".csv", ".tsv", ".json", ".jsonl"),
    *(".log", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh", ".sql", ".py", ".pyi", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".js", ".ts", ".jl", ".r", ".rb", ".pl", ".lua", ".hs", ".ml"),
    *(".scala", ".swift", ".lean", ".v"),
}
WORD_END = re.compile(r"(?<=\w)\s")


class Text(NamedTuple):
    """A text, or a part of a long one.

    index  number of the text; parts of one text share it and follow each other
    name   the path it was read from, <stdin>, or topics/<name> for the pages of pydoc
    body   the characters
    start  how many characters of the text come before
    more   whether another part follows
    """

    index: int
    name: str
    body: str
    start: int = 0
    more: bool = False


class Spoiled(NamedTuple):
    """A document that was left out: its name, and what is wrong with it."""

    name: str
    why: str


Sources = str | Path | Iterable[str | Path]


def read_texts(sources: Sources = ()) -> Reading:
    """Texts from files, directories, "-" (standard input); from nothing, the topics of Python's own help.

    A directory gives its files with a suffix in `SUFFIXES`, recursively and sorted; hidden and empty ones are left out.
    Files are UTF-8. What is missing is refused at once, what is empty or no text when it is reached. The lines of JSONL
    are characters here like any other; `corpus.plan` knows documents in a file.

    >>> texts = read_texts()
    >>> next(texts).name, len(texts.sha256)
    ('topics/assert', 64)
    """
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    return Reading([place for source in given for place in _places(source)])


def text_hash(sources: Sources = ()) -> str:
    """sha256 of all that the sources hold: what ``read_texts(sources)`` calls sha256 once it is read to the end."""
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    if any(str(source) == "-" for source in given):
        advice = "Ask read_texts(...) for sha256 when it is read."
        raise ValueError(sentence("text_hash.sources", "files, which can be read twice", "standard input", advice))
    texts = read_texts(given)
    for _ in texts:
        pass
    return texts.sha256


@final
class Reading(Iterator[Text]):
    """Texts one after the other, and the hash of those that were taken.

    sha256  over the UTF-8 bytes of the texts taken so far, with a zero byte between two texts
    """

    def __init__(self, places: list[Path | None]):
        self._texts = _file_texts(places) if places else _topics()
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


def _places(source: str | Path) -> list[Path | None]:
    """The files of a source; None is standard input."""
    if str(source) == "-":
        return [None]
    path = Path(source).expanduser()
    if source == "" or not path.exists():
        advice = "Give the path of a file or directory, or - for standard input."
        raise FileNotFoundError(
            sentence("read_texts.sources", "a file or directory", f"no such path {str(source)!r}", advice)
        )
    if not path.is_dir():
        return [path]
    kept = (file for file in walk(path) if file.suffix.lower() in SUFFIXES)
    found: list[Path | None] = [file for file in kept if file.is_file() and file.stat().st_size]
    if not found:
        expected, got = "a directory with text files", f"{path} with none"
        raise ValueError(
            sentence("read_texts.sources", expected, got, "Name files to read them whatever their suffix.")
        )
    return found


def _topics() -> Iterator[Text]:
    from pydoc_data.topics import topics

    for index, name in enumerate(sorted(topics)):
        yield Text(index, f"topics/{name}", topics[name])


def _file_texts(places: list[Path | None]) -> Iterator[Text]:
    for index, path in enumerate(places):
        name = "<stdin>" if path is None else str(path)
        stream = _open(path)
        try:
            for body, start, more in _parts(stream, name):
                yield Text(index, name, body, start, more)
        finally:
            if path is None:
                stream.detach()  # closing it would close standard input
            else:
                stream.close()


def _open(path: Path | None) -> io.TextIOWrapper:
    raw = sys.stdin.buffer if path is None else path.open("rb")
    return io.TextIOWrapper(raw, encoding="utf-8-sig")


def _parts(stream: TextIO, name: str) -> Iterator[tuple[str, int, bool]]:
    """Parts of a stream, where they start, whether more follow; they end with a word, where tokenizers cut anyway."""
    held, start, read = "", 0, _characters(stream, name)
    while following := _characters(stream, name) if len(read) == PART else "":
        held += read
        ends = [match.start() for match in WORD_END.finditer(held, len(held) // 2)]
        cut = ends[-1] if ends else len(held)
        yield held[:cut], start, True
        held, start, read = held[cut:], start + cut, following
    if not held + read:
        advice = "Give a file with something in it."
        raise ValueError(sentence("read_texts.sources", "text", f"nothing in {name}", advice))
    yield held + read, start, False


def _characters(stream: TextIO, name: str) -> str:
    try:
        read = stream.read(PART)
    except UnicodeDecodeError as error:
        raise ValueError(_no_text(name, "bytes that are not UTF-8")) from error
    if "\0" in read:
        raise ValueError(_no_text(name, "zero bytes"))
    return read


def _no_text(name: str, got: str) -> str:
    return sentence("read_texts.sources", "UTF-8 text", f"{got} in {name}", "Leave the file out, or convert it.")


def require_number(where: str, value: object, least: int, most: int = sys.maxsize) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(sentence(where, "a whole number", repr(value), "Give an int."))
    if not least <= value <= most:
        upper = f" and at most {most}" if most < sys.maxsize else ""
        raise ValueError(sentence(where, f"at least {least}{upper}", value, "Give a number in this range."))
