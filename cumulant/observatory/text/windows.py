"""Texts as batches of token ids, and token ids as strings.

Texts are cut into windows, sorted by length and padded on the right. No more than sixteen batches of token ids are in
memory at a time, however long the texts are.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import require_integer, sentence
from cumulant.observatory.text.corpus import Text, TextInput, UnreadableDocument
from cumulant.observatory.text.parts import (
    COLUMN,
    MAX_NAMES,
    TextPart,
    UnreadableParts,
    gives_parts,
    in_order,
    joined_parts,
    makes_text,
    part_of_tokens,
    spans,
)

SORTED_BATCHES = 16  # batches whose windows are sorted by length together
READ_AHEAD = 16  # times as many tokens are read at most to find windows of different texts
MESSAGE_LENGTH = 200  # characters of a tokenizer's error that are kept
CONTINUED = "⋯"  # the string of a token that only continues the character of the token before
_FIRST, _PRINTED = 256, (*range(33, 127), *range(161, 173), *range(174, 256))
# Byte-level tokenizers write bytes as letters: those that print as themselves, the others from U+0100 on, in order
LETTERS = {chr(byte): byte for byte in _PRINTED}
LETTERS |= {chr(_FIRST + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)}


class NoTokens(ValueError):
    """Texts without a single token; ``skipped`` of them were empty."""

    def __init__(self, message: str, skipped: int = 0):
        super().__init__(message)
        self.skipped = skipped


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of texts, padded on the right.

    input_ids       (b, n)
    attention_mask  (b, n)  1 where there is a token, 0 where there is padding
    text_index      (b,)    the text that each window is from, int64
    text_number     (b,)    which text of this run that is, counted from 0, empty and unreadable ones included
    offset          (b,)    how many tokens of the text come before the window, special ones not counted
    names           the name of each window's text
    tokens          how many tokens the batch has, special ones counted and padding not
    parts           (b, n)  the part of each token as a place in part_names, −1 for none; None where no text has parts
    scored_from     the first token of a window whose prediction says something of the text
    """

    input_ids: Tensor
    attention_mask: Tensor
    text_index: Tensor
    text_number: Tensor
    offset: Tensor
    names: tuple[str, ...]
    tokens: int
    parts: Tensor | None = field(default=None, kw_only=True)
    part_names: tuple[str, ...] = field(default=(), kw_only=True)
    scored_from: int = field(default=1, kw_only=True)

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What a model takes: ``model(**batch.inputs())``."""
        return {"input_ids": self.input_ids.to(device), "attention_mask": self.attention_mask.to(device)}


class Window(NamedTuple):
    """Tokens of a text between the special ones that the tokenizer adds."""

    ids: list[int]
    text: Text
    number: int
    offset: int
    parts: list[int] | None = None


def batches(
    texts: Iterable[TextInput],
    tokenizer: Any,
    *,
    max_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    unreadable: list[UnreadableDocument] | None = None,
    spread: bool = False,
) -> Batches:
    """Batches of windows of at most ``max_length`` tokens, special ones included.

    max_tokens  stop when so many tokens are in batches, special ones counted and padding not; the last window is cut to
                fit, and if only special tokens would fit there is none. None: all texts
    unreadable  a list to which texts that the tokenizer fails on are appended, which are left out from there on; None:
                the error of the tokenizer is raised
    spread      with ``max_tokens``: one window of each text before the second of any, as far as 16 times as many tokens
                hold them

    Each window gets the special tokens that the tokenizer puts around a text. Windows are sorted by length, longest
    first, among those of `SORTED_BATCHES` batches, so little is padding and the order is always the same.
    """
    if isinstance(texts, str | bytes):  # would be taken letter by letter
        raise TypeError(sentence("batches.texts", "several texts", "one string", "Wrap it in a list."))
    start, end = special_tokens(tokenizer)
    added = len(start) + len(end)
    limit = getattr(tokenizer, "model_max_length", sys.maxsize)
    require_integer("batches.max_length", max_length, added + 1, limit)
    require_integer("batches.batch_size", batch_size, 1)
    require_integer("batches.max_tokens", max_tokens if max_tokens is not None else added + 1, added + 1)
    kind = _SpreadWindows if spread and max_tokens is not None else _Windows
    windows = kind(texts, tokenizer, max_length - added, added, max_tokens, unreadable)
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
        buffer: list[Window] = []
        empty = True
        for window in self._windows:
            buffer.append(window)
            empty = False
            if len(buffer) == SORTED_BATCHES * self._size:
                yield from self._sorted(buffer)
                buffer = []
        if empty:
            got, advice = self._windows.without_tokens(), "Give other texts."
            message = sentence("batches.texts", "a text of at least one token", got, advice)
            raise NoTokens(message, self._windows.skipped)
        yield from self._sorted(buffer)

    def _sorted(self, windows: list[Window]) -> Iterator[Batch]:
        windows = sorted(windows, key=lambda window: -len(window.ids))
        for first in range(0, len(windows), self._size):
            yield self._padded(windows[first : first + self._size])

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
        kept = {"parts": self._parts(windows, longest), "part_names": tuple(self._windows.part_names)}
        return Batch(ids, mask, index, number, offset, names, sum(map(len, rows)), **kept)

    def _parts(self, windows: list[Window], longest: int) -> Tensor | None:
        """Of every token, special ones and padding are in none."""
        if not any(window.parts for window in windows):
            return None
        before = [-1] * len(self._special[0])
        rows = [[*before, *(window.parts or [])] for window in windows]
        return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


@dataclass
class _Windows:
    """Windows of texts, in order; parts of one text are joined before they are cut."""

    texts: Iterable[TextInput]
    tokenizer: Any
    room: int
    added: int
    max_tokens: int | None
    unreadable: list[UnreadableDocument] | None = None
    skipped: int = 0
    failed: int = 0
    part_names: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Window]:
        return self._cut(self._all(), self.max_tokens)

    def _cut(self, windows: Iterable[Window], max_tokens: int | None) -> Iterator[Window]:
        """Windows until there are so many tokens."""
        left = sys.maxsize if max_tokens is None else max_tokens
        for window in windows:
            ids = window.ids[: left - self.added]
            yield window._replace(ids=ids, parts=window.parts and window.parts[: len(ids)])
            left -= len(ids) + self.added
            if left <= self.added:  # before the next text is read: what is not used is not hashed
                return

    def without_tokens(self) -> str:
        """How many texts had no token, and why."""
        empty = [f"{self.skipped} texts without one"] if self.skipped else []
        failed = [f"{self.failed} that the tokenizer fails on"] if self.failed else []
        return " and ".join(empty + failed) or "no texts"

    def _all(self) -> Iterator[Window]:
        ids, parts, number, offset, readable = [], [], 0, 0, True
        for position, item in enumerate(self.texts):
            text = _as_text(position, item)
            if readable:
                more = self._tokens(text)
                readable = more is not None
                ids = ids + more[0] if more is not None else []
                parts = parts + more[1] if more is not None else []
            while len(ids) > self.room:
                yield Window(ids[: self.room], text, number, offset, parts[: self.room] or None)
                del ids[: self.room], parts[: self.room]
                offset += self.room
            if text.more:
                continue
            if ids:
                yield Window(ids, text, number, offset, parts or None)
            elif readable:
                self.skipped += 1
            ids, parts, number, offset, readable = [], [], number + 1, 0, True

    def _tokens(self, text: Text) -> tuple[list[int], list[int]] | None:
        """Token ids of a text, or of a part of a long one, and in which of its named parts they begin, if it has some;
        None, and a row of ``unreadable``, where the tokenizer fails."""
        offsets = {"return_offsets_mapping": True} if self._names_parts(text) else {}
        try:
            found = self.tokenizer(text.body, add_special_tokens=False, verbose=False, **offsets)
            starts = [text.start + start for start, _ in found["offset_mapping"]] if offsets else []
            return found["input_ids"], part_of_tokens(text.parts, self.part_names, starts)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if self.unreadable is None:
                raise
            self.failed += 1
            message = f"{type(error).__name__}: {error}".splitlines()[0][:MESSAGE_LENGTH]
            self.unreadable.append(UnreadableDocument(text.name, f"the tokenizer fails: {message}"))
            return None

    def _names_parts(self, text: Text) -> bool:
        """Whether a text has named parts; refused with too many names, or where tokens do not tell where they begin."""
        names = {part.name for part in text.parts} - {*self.part_names}
        if len(names) + len(self.part_names) > MAX_NAMES:
            got, advice = f"also {min(names)!r} in {text.name}", "Name parts by what they are, as prompt and answer."
            raise ValueError(sentence("batches.texts", f"at most {MAX_NAMES} names of parts", got, advice))
        if text.parts and not getattr(self.tokenizer, "is_fast", False):
            expected, advice = "a fast one, which tells where tokens begin", "Leave the parts of the texts out."
            raise ValueError(sentence("batches.tokenizer", expected, type(self.tokenizer).__name__, advice))
        return bool(text.parts)


class _SpreadWindows(_Windows):
    """The first window of every text, then what else was read on the way to them."""

    def __iter__(self) -> Iterator[Window]:
        assert self.max_tokens is not None
        first, more, left = [], [], self.max_tokens
        for window in self._cut(self._all(), READ_AHEAD * self.max_tokens):
            (more if window.offset else first).append(window)
            left -= 0 if window.offset else len(window.ids) + self.added
            if left <= self.added:
                break
        return self._cut([*first, *more], self.max_tokens)


def _as_text(number: int, text: TextInput) -> Text:
    if isinstance(text, Text):
        return text._replace(parts=_with_parts(text)[1]) if text.parts else text
    body, parts = _with_parts(text) if isinstance(text, dict) else (text, ())
    if not isinstance(body, str):
        got = type(body).__name__
        raise TypeError(sentence("batches.texts", "texts or strings", got, "Decode bytes first."))
    try:
        body.encode()
    except UnicodeEncodeError as error:
        got = "half of a surrogate pair"
        raise ValueError(sentence("batches.texts", "characters", got, "Decode with errors='replace'.")) from error
    return Text(number, f"text {number}", body, parts=parts)


def _with_parts(text: Text | dict[str, Any]) -> tuple[Any, tuple[TextPart, ...]]:
    """The text of a dictionary as lines of JSONL are, {"text": …, "parts": […]}, and its parts; or those of a text."""
    try:
        if isinstance(text, Text):
            return text.body, in_order(text.parts)
        parts = text.get(COLUMN)
        if makes_text(parts):
            return joined_parts(parts)  # pyright: ignore[reportArgumentType]
        body = text.get("text")
        if parts and not gives_parts(parts):
            raise UnreadableParts("others")
        return body, spans(parts, body) if parts and isinstance(body, str) else ()
    except UnreadableParts as error:
        expected = "parts with a name and a text, or start and end, none over another"
        raise ValueError(sentence("batches.texts", expected, str(error), "Correct the parts.")) from None


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token ids that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    expected, advice = "special tokens before and after a text", "Use a tokenizer that adds them around."
    raise ValueError(sentence("batches.tokenizer", expected, "others", advice))


def padding(tokenizer: Any) -> int:
    """The id of padding: the tokenizer's own, else its end of text, else 0; the mask hides it."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return getattr(tokenizer, name)
    return 0


def token_strings(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """One string per token: its characters in the text, spaces included.

    Bytes are decoded across tokens: a character belongs to the token that begins it, and tokens that only continue it
    are `CONTINUED`. Bytes of no character are written <0xD7>. The ## of WordPiece stays, special tokens show their
    name, an id without a token is <id>. Strings are text: escape them where they become HTML.
    """
    numbers = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    added = set(getattr(tokenizer, "added_tokens_decoder", {})) | set(tokenizer.all_special_ids)
    raw, byte_level, metaspace = [], *_encoding(tokenizer)
    for number, token in zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True):
        if token is None or number in added:
            raw.append(str(token or f"<{number}>"))
        elif byte_level and all(letter in LETTERS for letter in token):
            raw.append(bytes(LETTERS[letter] for letter in token))
        elif metaspace and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            raw.append(bytes([int(token[3:5], 16)]))
        else:
            raw.append((token.replace("▁", " ") if metaspace else token).encode())
    return _joined(raw)


def delimiters(tokenizer: Any) -> list[int]:
    """Ids of the tokens that separate: special ones, punctuation alone, and whatever ends a line.

    >>> from tokenizers import Tokenizer, models
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"[SEP]": 0, "a": 1, ".": 2, "\\n": 3, "a.": 4}, "a"))
    >>> delimiters(PreTrainedTokenizerFast(tokenizer_object=words, sep_token="[SEP]"))
    [0, 2, 3]
    """
    special, found = set(tokenizer.all_special_ids), []
    vocabulary = tokenizer.get_vocab()
    byte_level, metaspace = _encoding(tokenizer)
    for token, number in vocabulary.items():
        text = token
        if byte_level and all(letter in LETTERS for letter in token):
            text = bytes(LETTERS[letter] for letter in token).decode("utf-8", "replace")
        elif metaspace:
            text = token.replace("▁", " ")
        inside = text.strip().removeprefix("##")
        punctuation = bool(inside) and all(unicodedata.category(letter)[0] == "P" for letter in inside)
        if number in special or punctuation or "\n" in text:
            found.append(number)
    return sorted(found)


def _encoding(tokenizer: Any) -> tuple[bool, bool]:
    """Whether tokens are bytes written as letters, and whether ▁ stands for a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder"), hasattr(tokenizer, "sp_model")
    decoder = backend.decoder
    state = "" if decoder is None else decoder.__getstate__().decode()
    return '"ByteLevel"' in state, "Metaspace" in state or "▁" in state


def _joined(raw: list[bytes | str]) -> list[str]:
    """Bytes of tokens as characters, each with the token that begins it; strings stay and end a character.

    >>> _joined([b"caf", b"\\xc3", b"\\xa9 ", "[SEP]", b"\\xa9"])
    ['caf', 'é', '⋯ ', '[SEP]', '<0xA9>']
    """
    out: list[str] = []
    first = 0
    for i in range(len(raw) + 1):
        if i == len(raw) or isinstance(raw[i], str):
            out += _characters([part for part in raw[first:i] if isinstance(part, bytes)])
            out += [str(part) for part in raw[i : i + 1]]
            first = i + 1
    return out


def _characters(parts: list[bytes]) -> list[str]:
    whole = b"".join(parts)
    owner = [index for index, part in enumerate(parts) for _ in part]
    out = [""] * len(parts)
    position = 0
    while position < len(whole):
        size = _size(whole, position)
        out[owner[position]] += whole[position : position + size].decode() if size else f"<0x{whole[position]:02X}>"
        for index in range(owner[position] + 1, owner[position + max(size, 1) - 1] + 1):
            out[index] += CONTINUED
        position += max(size, 1)
    return out


def _size(whole: bytes, position: int) -> int:
    """How many bytes the character at a position has; 0 if there is none."""
    for size in (1, 2, 3, 4):
        try:
            whole[position : position + size].decode()
        except UnicodeDecodeError:
            continue
        return size if position + size <= len(whole) else 0
    return 0
