"""The result of an iteration: a value, and for each sample the reason why it stopped there."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from cumulant.display import brief, html_table, span
from cumulant.typing import Codes, Flags, PerQuery


class CodeWithMessage(IntEnum):
    """Codes whose members carry a sentence: ``NAME = code, "what it means"``."""

    sentence: str

    def __new__(cls, code: int, sentence: str):
        member = int.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member


class Status(CodeWithMessage):
    """Why a sample stopped; ``status.sentence`` is the message for a user.

    >>> Status.OUTSIDE.sentence
    'the mean lies outside the convex hull of the support: no natural parameter exists and the conjugate is +inf'
    """

    CONVERGED = 0, "converged within the tolerance"
    MAX_STEPS = 1, "not converged within max_steps: the best iterate is returned; raise max_steps or loosen tol"
    STALLED = (
        2,
        "no step decreases the residual any more: the best iterate is returned; rescale the problem or loosen tol",
    )
    NONFINITE = (
        3,
        "the iteration left the finite numbers: the best finite iterate is returned; use damping or a smaller step",
    )
    BOUNDARY = (
        4,
        "the mean lies on the boundary of the convex hull of the support: the natural parameter is at infinity",
    )
    OUTSIDE = (
        5,
        "the mean lies outside the convex hull of the support: no natural parameter exists and the conjugate is +inf",
    )


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of an iterative solver, one status per sample.

    value     (*samples, *event)  the solution, or the best iterate where none was found
    status    (*samples)          codes of `Status`
    steps     (*samples)          steps this sample took
    residual  (*samples)          norm of what should be zero, at ``value``
    trace     (t, *samples)       residual before each step; a sample that stopped repeats its last entry
    """

    value: Tensor
    status: Codes
    steps: Codes
    residual: PerQuery
    trace: Tensor

    def __repr__(self) -> str:
        value, steps, residual = brief(self.value), span(self.steps), span(self.residual)
        return f"Solution(value={value}, converged={self._count_converged()}, steps={steps}, residual={residual})"

    def _count_converged(self) -> str:
        codes = span(self.converged.sum())  # empty where values cannot be read
        return f"{codes or '?'} of {self.status.numel()}"

    def _repr_html_(self) -> str:
        parts = {name: getattr(self, name) for name in ("value", "steps", "residual", "trace")}
        return html_table("Solution", {"status": self.summary(), **parts})

    @property
    def converged(self) -> Flags:
        return self.status == Status.CONVERGED

    def summary(self) -> str:
        """One line per status that occurs: how many samples, and its sentence."""
        codes, counts = torch.unique(self.status, return_counts=True)
        total = self.status.numel()
        return "\n".join(
            f"{count} of {total}: {Status(code).sentence}"
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
        )

    def names(self) -> list[str]:
        """The status of every sample by name, in row-major order."""
        return [Status(code).name for code in self.status.flatten().tolist()]

    def select(self, axis: int, index: int) -> "Solution":
        """The part of every field at one index of a sample axis."""
        return Solution(
            self.value.select(axis, index),
            self.status.select(axis, index),
            self.steps.select(axis, index),
            self.residual.select(axis, index),
            self.trace.select(axis + 1, index),
        )
