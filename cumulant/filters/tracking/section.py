"""Tables of a TOML file: every key is known and every value of its kind, or one sentence says what is not."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import sentence, shape

LARGEST = 1e50  # q Δ⁵, the highest power that a motion takes of what is read, is a number up to here
SMALLEST = 1e-50  # of what must be positive, because it divides
SLACK = 1e-9  # asymmetry and negative eigenvalues, relative to the largest entry, that count as rounding
ROUNDING = 4e-16  # of an eigenvalue of a matrix of correlations


@dataclass(frozen=True)
class Section:
    """A table of a TOML file, with its position for error messages."""

    where: str
    values: dict[str, Any]

    def at(self, key: str) -> str:
        return f"{self.where} {key}"

    def has(self, key: str) -> bool:
        return key in self.values

    def need(self, key: str, advice: str) -> Any:
        if key not in self.values:
            raise ValueError(sentence(self.at(key), "a value", "none", advice))
        return self.values[key]

    def text(self, key: str, advice: str = "Write it in quotes.") -> str:
        value = self.need(key, advice)
        if not isinstance(value, str) or not value:
            raise TypeError(sentence(self.at(key), "a text", repr(value), advice))
        return value

    def texts(self, key: str, advice: str) -> tuple[str, ...]:
        """A list of different texts, at least one."""
        value = self.need(key, advice)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise TypeError(sentence(self.at(key), "a list of texts", repr(value), advice))
        if len(set(value)) < len(value):
            raise ValueError(sentence(self.at(key), "different names", repr(value), "Name each once."))
        return tuple(value)

    def number(self, key: str, advice: str, *, positive: bool = False) -> float:
        raw = self.need(key, advice)
        if not _is_number(raw):
            raise TypeError(sentence(self.at(key), "a number", repr(raw), advice))
        value = _float(raw)
        if not isfinite(value) or (positive and value <= 0):
            expected = "a finite number > 0" if positive else "a finite number"
            raise ValueError(sentence(self.at(key), expected, f"{value:g}", advice))
        self._check_size(key, value, at_least=SMALLEST if positive else 0.0)
        return value

    def _check_size(self, key: str, *sizes: float, at_least: float = 0.0) -> None:
        for size in map(abs, sizes):
            if not at_least <= size <= LARGEST:
                bound = f"at most {LARGEST:g}" if size > LARGEST else f"at least {at_least:g}"
                raise ValueError(sentence(self.at(key), f"a size of {bound}", f"{size:.3g}", "Use other units."))

    def array(self, key: str, size: Sequence[int], advice: str) -> Tensor:
        """Numbers in nested lists of this size, float64."""
        value = self.need(key, advice)
        numbers = _tensor(value)
        expected = "a number" if prod(size) == 1 else " × ".join(map(str, size)) + " numbers"
        if numbers is None:
            raise TypeError(sentence(self.at(key), expected, repr(value), advice))
        if not bool(numbers.isfinite().all()):
            raise ValueError(sentence(self.at(key), "finite numbers", repr(value), advice))
        if numbers.shape != torch.Size(size):
            raise ValueError(sentence(self.at(key), expected, shape(numbers), advice))
        self._check_size(key, *numbers.flatten().tolist())
        return numbers

    def diagonal(self, key: str, size: int, advice: str) -> Tensor:
        """One number for all, or one for each: (size,)."""
        if _is_number(self.need(key, advice)):
            return self.array(key, (), advice).expand(size)
        return self.array(key, (size,), advice)

    def covariance(self, key: str, size: int, advice: str, *, definite: bool = False) -> Tensor:
        """A variance for all, one for each, or a matrix: (size, size)."""
        value = self.need(key, advice)
        nested = isinstance(value, list) and any(isinstance(v, list) for v in value)
        matrix = self.array(key, (size, size), advice) if nested else torch.diag(self.diagonal(key, size, advice))
        scale = float(matrix.abs().max())
        if float((matrix - matrix.mT).abs().max()) > SLACK * scale:
            raise ValueError(sentence(self.at(key), "a symmetric matrix", "another", "Entries i, j and j, i agree."))
        smallest = float(torch.linalg.eigvalsh(matrix)[0])
        variances = matrix.diagonal()
        unit = torch.where(variances > 0, variances, 1).sqrt()
        inside = float(torch.linalg.eigvalsh(matrix / unit / unit[:, None])[0])  # columns may have units far apart
        if (smallest < -SLACK * scale and inside < -SLACK) or (definite and inside <= ROUNDING * size):
            expected = "variances > 0" if definite else "variances ≥ 0"
            kind = "an indefinite matrix" if inside < -SLACK else "a singular matrix"
            got = f"{kind}, smallest eigenvalue {smallest:.3g}" if nested else f"{smallest:.3g}"
            raise ValueError(sentence(self.at(key), expected, got, advice))
        if definite:
            self._check_size(key, float(variances.min()), at_least=SMALLEST)
        return (matrix + matrix.mT) / 2


def section(where: str, values: object, known: Sequence[str]) -> Section:
    """A table with these keys and no others.

    >>> section("model.toml, [table]", {"tiem": "t"}, ("time", "track"))
    Traceback (most recent call last):
    ValueError: model.toml, [table] tiem: expected one of time, track, got an unknown key. Did you mean time?
    """
    if not isinstance(values, dict):
        raise TypeError(sentence(where, "a table of keys", type(values).__name__, f"It has {', '.join(known)}."))
    for key in values:
        if key not in known:
            advice = suggestion(key, known)
            raise ValueError(sentence(f"{where} {key}", f"one of {', '.join(known)}", "an unknown key", advice))
    return Section(where, values)


def suggestion(word: str, known: Sequence[str], otherwise: str = "Remove it.") -> str:
    """
    >>> suggestion("constant-velocty", ["random-walk", "constant-velocity"])
    'Did you mean constant-velocity?'
    """
    near = get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]}?" if near else otherwise


def load_toml(path: Path) -> dict[str, Any]:
    """The whole file, or a sentence with the line that is not TOML."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(sentence(str(path), "TOML", f"“{error}”", "Mend that line.")) from None


def read_text(path: Path) -> str:
    """A file in UTF-8, or a sentence with the row that is not."""
    if not path.is_file():
        got = "a directory" if path.is_dir() else "nothing there"
        raise ValueError(sentence(str(path), "a file", got, "Look at the path."))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            sentence(f"{path}, row {row}", "UTF-8", "bytes that are not", "Save the file as UTF-8.")
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(value: float) -> float:
    """An integer may be too large for one: it becomes the largest."""
    return float(max(min(value, sys.float_info.max), -sys.float_info.max)) if isinstance(value, int) else value


def _tensor(value: object) -> Tensor | None:
    """Nested lists of numbers as a tensor; None where they are not that, or ragged."""
    if _is_number(value):
        return torch.tensor(_float(value), dtype=torch.float64)  # pyright: ignore[reportArgumentType]
    if not isinstance(value, list) or not value:
        return None
    parts = [_tensor(v) for v in value]
    numbers = [p for p in parts if p is not None]
    if len(numbers) < len(parts) or any(p.shape != numbers[0].shape for p in numbers):
        return None
    return torch.stack(numbers)
