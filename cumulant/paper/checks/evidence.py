"""The results of checks: numbers with the bounds they must satisfy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike


class Evidence(NamedTuple):
    """One comparison.

    label    what was compared, in words
    kind     "agrees": value ≤ bound.   "true": a condition, value 0 if it holds.
             "differs": the statement as the source has it misses the truth by value > bound.   "measured": not judged
    value    the largest error, or the discrepancy
    bound    tolerance, or the least discrepancy; nan if not judged
    note     a further number for the reader
    """

    label: str
    kind: str
    value: float
    bound: float
    note: str = ""

    @property
    def passed(self) -> bool:
        if self.kind == "measured":
            return True
        return self.value > self.bound if self.kind == "differs" else self.value <= self.bound


def agrees(label: str, ours: ArrayLike | torch.Tensor, oracle: ArrayLike, tol: float, note: str = "") -> Evidence:
    """The library's number and the oracle's are equal up to ``tol``, entry by entry."""
    return Evidence(label, "agrees", _gap(ours, oracle), float(tol), note)


def true(label: str, condition: object, note: str = "") -> Evidence:
    """A condition on the library's numbers holds everywhere."""
    good = bool(array(condition).all()) if isinstance(condition, torch.Tensor | np.ndarray) else bool(condition)
    return Evidence(label, "true", 0.0 if good else 1.0, 0.0, note)


def differs(label: str, literal: ArrayLike | torch.Tensor, truth: ArrayLike, floor: float, note: str = "") -> Evidence:
    """The source's statement, evaluated as it stands, misses the truth by more than ``floor``."""
    return Evidence(label, "differs", _gap(literal, truth), float(floor), note)


def measured(label: str, value: float, note: str = "") -> Evidence:
    """A measurement that is reported and not judged."""
    return Evidence(label, "measured", float(value), float("nan"), note)


def array(value: ArrayLike | torch.Tensor) -> np.ndarray:
    """A NumPy array, in float64 unless Boolean."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    return np.asarray(value, dtype=None if np.asarray(value).dtype == bool else float)


def _gap(a: ArrayLike | torch.Tensor, b: ArrayLike | torch.Tensor) -> float:
    """max|a − b|; NaN anywhere counts as infinite, equal infinities as equal."""
    x, y = np.broadcast_arrays(array(a), array(b))
    if x.size == 0:
        return float("inf")  # an empty comparison proves nothing
    with np.errstate(invalid="ignore"):
        gap = np.where(x == y, 0.0, np.abs(x - y))
    return float(np.nan_to_num(gap, nan=np.inf).max())
