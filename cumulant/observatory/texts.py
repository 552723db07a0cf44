"""Texts and how they become batches: streamed from files, cut into windows of tokens, padded to equal length.

No more than a part of one file and sixteen batches of token ids is held at a time, however long the texts are.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, final

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.pieces import pieces as pieces
from cumulant.observatory.places import walk

PART = 1 << 18  # characters of a file that are read at once
BUFFER = 16  # batches whose windows are sorted by length together
WORDS = 200  # characters of a tokenizer's complaint that are kept
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


class NoTokens(ValueError):
    """Texts in which there is not one token to read; ``skipped`` of them were empty."""

    def __init__(self, words: str, skipped: int = 0):
        super().__init__(words)
        self.skipped = skipped


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


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of texts, padded on the right.

    input_ids       (b, n)
    attention_mask  (b, n)  1 where there is a token, 0 where there is padding
    text_index      (b,)    the text that each window is from, int64
    text_number     (b,)    which text of this reading that is, counted from 0, empty and spoiled ones included
    offset          (b,)    how many tokens of the text come before the window, special ones not counted
    names           the name of each window's text
    tokens          how many tokens the batch has, special ones counted and padding not
    """

    input_ids: Tensor
    attention_mask: Tensor
    text_index: Tensor
    text_number: Tensor
    offset: Tensor
    names: tuple[str, ...]
    tokens: int

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What a model takes: ``model(**batch.inputs())``."""
        return {"input_ids": self.input_ids.to(device), "attention_mask": self.attention_mask.to(device)}


class Window(NamedTuple):
    """Tokens of a text between the special ones that the tokenizer adds."""

    ids: list[int]
    text: Text
    number: int
    offset: int


def batches(
    texts: Iterable[Text | str],
    tokenizer: Any,
    *,
    max_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    stride: int | None = None,
    spoiled: list[Spoiled] | None = None,
) -> Batches:
    """Batches of windows of at most ``max_length`` tokens, special ones included.

    max_tokens  stop when so many tokens are in batches, special ones counted and padding not; the last window is cut to
                fit, and if only special tokens would fit there is none. None: all texts
    stride      tokens of the text from the start of a window to the start of the next; None: windows do not overlap
    spoiled     gets the texts that the tokenizer fails on, which are left out from there on; None: its error is raised

    Each window gets the special tokens that the tokenizer puts around a text. Windows are sorted by length, longest
    first, among those of `BUFFER` batches, so little is padding and the order is always the same.
    """
    if isinstance(texts, str | bytes):  # would be taken letter by letter
        raise TypeError(sentence("batches.texts", "several texts", "one string", "Wrap it in a list."))
    start, end = special_tokens(tokenizer)
    added = len(start) + len(end)
    limit = getattr(tokenizer, "model_max_length", sys.maxsize)
    require_number("batches.max_length", max_length, added + 1, limit)
    require_number("batches.batch_size", batch_size, 1)
    require_number("batches.max_tokens", max_tokens if max_tokens is not None else added + 1, added + 1)
    room = max_length - added
    step = room if stride is None else stride
    require_number("batches.stride", step, 1, room)
    windows = _Windows(texts, tokenizer, room, step, added, max_tokens, spoiled)
    return Batches(windows, batch_size, (start, end), padding(tokenizer))


@final
class Batches(Iterator[Batch]):
    """Batches one after the other.

    skipped  texts so far that had no token

    `NoTokens` is raised if no text has one.
    """

    def __init__(self, windows: _Windows, batch_size: int, special: tuple[list[int], list[int]], pad: int):
        self._windows, self._size, self._special, self._pad = windows, batch_size, special, pad
        self._batches = self._run()

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def skipped(self) -> int:
        return self._windows.skipped

    def _run(self) -> Iterator[Batch]:
        held: list[Window] = []
        found = False
        for window in self._windows:
            held.append(window)
            found = True
            if len(held) == BUFFER * self._size:
                yield from self._sorted(held)
                held = []
        if not found:
            told = "a text of at least one token", self._windows.fruitless(), "Give other texts."
            raise NoTokens(sentence("batches.texts", *told), self._windows.skipped)
        yield from self._sorted(held)

    def _sorted(self, held: list[Window]) -> Iterator[Batch]:
        held = sorted(held, key=lambda window: -len(window.ids))
        for first in range(0, len(held), self._size):
            yield self._padded(held[first : first + self._size])

    def _padded(self, windows: list[Window]) -> Batch:
        start, end = self._special
        rows = [[*start, *window.ids, *end] for window in windows]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        index = torch.tensor([window.text.index for window in windows])
        number = torch.tensor([window.number for window in windows])
        offset = torch.tensor([window.offset for window in windows])
        names = tuple(window.text.name for window in windows)
        return Batch(ids, mask, index, number, offset, names, sum(map(len, rows)))


@dataclass
class _Windows:
    """Windows of texts, in order; parts of one text are joined before they are cut."""

    texts: Iterable[Text | str]
    tokenizer: Any
    room: int
    step: int
    added: int
    max_tokens: int | None
    spoiled: list[Spoiled] | None = None
    skipped: int = 0
    failed: int = 0

    def __iter__(self) -> Iterator[Window]:
        left = sys.maxsize if self.max_tokens is None else self.max_tokens
        for window in self._all():
            ids = window.ids[: left - self.added]
            yield window._replace(ids=ids)
            left -= len(ids) + self.added
            if left <= self.added:  # before the next text is read: what is not used is not hashed
                return

    def fruitless(self) -> str:
        """What there was if there was no window."""
        empty = [f"{self.skipped} texts without one"] if self.skipped else []
        failed = [f"{self.failed} that the tokenizer fails on"] if self.failed else []
        return " and ".join(empty + failed) or "no texts"

    def _all(self) -> Iterator[Window]:
        held, number, offset, whole = [], 0, 0, True
        for place, given in enumerate(self.texts):
            text = _as_text(place, given)
            if whole:
                found = self._tokens(text)
                whole = found is not None
                held = held + found if found is not None else []
            while len(held) > self.room:
                yield Window(held[: self.room], text, number, offset)
                del held[: self.step]
                offset += self.step
            if text.more:
                continue
            if held:
                yield Window(held, text, number, offset)
            elif whole:
                self.skipped += 1
            held, number, offset, whole = [], number + 1, 0, True

    def _tokens(self, text: Text) -> list[int] | None:
        """Token ids of a text, or of its part; None, and a line in ``spoiled``, where the tokenizer fails."""
        try:
            return self.tokenizer(text.body, add_special_tokens=False, verbose=False)["input_ids"]
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if self.spoiled is None:
                raise
            self.failed += 1
            told = f"{type(error).__name__}: {error}".splitlines()[0][:WORDS]
            self.spoiled.append(Spoiled(text.name, f"the tokenizer fails: {told}"))
            return None


def _as_text(number: int, given: Text | str) -> Text:
    if isinstance(given, Text):
        return given
    if not isinstance(given, str):
        got = type(given).__name__
        raise TypeError(sentence("batches.texts", "texts or strings", got, "Decode bytes first."))
    try:
        given.encode()
    except UnicodeEncodeError as error:
        got = "half of a surrogate pair"
        raise ValueError(sentence("batches.texts", "characters", got, "Decode with errors='replace'.")) from error
    return Text(number, f"text {number}", given)


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token ids that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError(
        sentence(
            "batches.tokenizer",
            "special tokens before and after a text",
            "others",
            "Use a tokenizer that adds them around.",
        )
    )


def padding(tokenizer: Any) -> int:
    """The id that fills up rows: the tokenizer's own, else its end of text, else 0; the mask hides it in any case."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return getattr(tokenizer, name)
    return 0


def require_number(where: str, value: object, least: int, most: int = sys.maxsize) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(sentence(where, "a whole number", repr(value), "Give an int."))
    if not least <= value <= most:
        upper = f" and at most {most}" if most < sys.maxsize else ""
        raise ValueError(sentence(where, f"at least {least}{upper}", value, "Give a number in this range."))
