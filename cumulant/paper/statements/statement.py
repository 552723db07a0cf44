"""The record of one statement of the theory and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Whether a statement holds; the value is the text of the tables."""

    HOLDS = "holds"
    CONDITION = "holds under condition"
    CORRECTED = "false as written, corrected version holds"
    OPEN = "open, evidence"
    DEFINITION = "definition"
    WORDING = "wording only"
    MOTIVATION = "motivation"
    EMPTY = "empty in the source"

    @property
    def checked(self) -> bool:
        """Whether such a statement has numerical checks."""
        return self in (Verdict.HOLDS, Verdict.CONDITION, Verdict.CORRECTED, Verdict.OPEN)


@dataclass(frozen=True)
class Statement:
    """One statement of the paper, or one added by this library.

    id         anchor in docs/theory.md. S0 … S4: a document of the paper and its drafts; X: added here. E equation,
               P proposition, T theorem, C claim, Q question, R related system, F future work
    section    of docs/theory.md: 1 families, 2 expansion, 3 fixed points, 4 propositions, 5 equilibrium, 6 duality,
               7 Hopfield, 8 blocks, 9 geometry, 10 contrast, 11 messages, 12 future work
    words      the statement that holds, in one sentence
    equation   the same as a formula
    verdict    whether the statement in the source holds
    condition  under which it holds
    literal    what the source says, where that is false or incomplete
    checks     names of its numerical checks
    reason     why nothing is checked, for definitions and the like
    """

    id: str
    section: int
    words: str
    equation: str = ""
    verdict: Verdict = Verdict.HOLDS
    condition: str = ""
    literal: str = ""
    checks: tuple[str, ...] = ()
    reason: str = ""

    @property
    def document(self) -> str:
        return self.id.split("-")[0]
