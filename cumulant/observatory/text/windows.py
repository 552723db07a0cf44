"""Texts as batches: cut into windows of tokens, sorted by length, padded on the right.

No more than sixteen batches of token ids are held at a time, however long the texts are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.text.texts import Spoiled, Text, require_number

BUFFER = 16  # batches whose windows are sorted by length together
WORDS = 200  # characters of a tokenizer's complaint that are kept


class NoTokens(ValueError):
    """Texts in which there is not one token to read; ``skipped`` of them were empty."""

    def __init__(self, words: str, skipped: int = 0):
        super().__init__(words)
        self.skipped = skipped


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
