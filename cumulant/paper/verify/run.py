"""Runs the checks of statements, each once, and judges the statements by their evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.registry import CHECKS, Skipped
from cumulant.paper.statements.statement import Statement, Verdict

STATISTICAL = 0.1  # tolerances from here on are standard errors, not rounding


@dataclass(frozen=True)
class CheckResult:
    """The evidence of one check, its error message, or why it was skipped."""

    name: str
    evidence: tuple[Evidence, ...]
    seconds: float
    problem: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem and bool(self.evidence) and all(e.passed for e in self.evidence)


@dataclass(frozen=True)
class Outcome:
    """A statement with the results of its checks.

    ``agrees`` says whether the numbers support the verdict; None if all checks were skipped.
    """

    statement: Statement
    results: tuple[CheckResult, ...]

    @property
    def agrees(self) -> bool | None:
        if all(r.skipped for r in self.results):
            return None
        literal = any(e.kind == "differs" for r in self.results for e in r.evidence)
        # a statement called false as written must fail as written
        return all(r.passed or r.skipped for r in self.results) and (
            literal or self.statement.verdict is not Verdict.CORRECTED
        )

    @property
    def status(self) -> str:
        """agrees · disagrees · skipped · not a claim"""
        if not self.statement.verdict.checked:
            return "not a claim"
        if self.agrees is None:
            return "skipped"
        return "agrees" if self.agrees else "disagrees"

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.results)

    @property
    def worst(self) -> Evidence | None:
        """The comparison nearest to its bound, or beyond it; exact ones before statistical ones."""
        judged = [e for r in self.results for e in r.evidence if e.kind == "agrees"]
        exact = [e for e in judged if e.bound < STATISTICAL or not e.passed] or judged
        return max(exact, key=lambda e: e.value / e.bound if e.bound else e.value, default=None)

    @property
    def discrepancy(self) -> Evidence | None:
        """The largest error of the statement as written."""
        return max(
            (e for r in self.results for e in r.evidence if e.kind == "differs"), key=lambda e: e.value, default=None
        )


def run_check(name: str, seed: int = 0) -> CheckResult:
    """Run one check; an exception becomes its ``problem``."""
    start = time.perf_counter()
    skipped = ""
    try:
        evidence, problem = tuple(CHECKS[name].run(seed)), ""
    except Skipped as reason:
        evidence, problem, skipped = (), "", str(reason)
    except Exception as error:  # a broken check is reported and must not hide the others
        evidence, problem = (), f"{type(error).__name__}: {error}"
    return CheckResult(name, evidence, time.perf_counter() - start, problem, skipped)


def verify(
    statements: Sequence[Statement], seed: int = 0, progress: Callable[[str], None] | None = None
) -> list[Outcome]:
    """Run the checks of these statements, each once.

    ``progress`` is called with the name of every check before it runs.
    """
    results: dict[str, CheckResult] = {}
    for statement in statements:
        for name in statement.checks:
            if name in CHECKS and name not in results:
                if progress is not None:
                    progress(name)
                results[name] = run_check(name, seed)
    return [Outcome(s, tuple(results[n] for n in s.checks if n in results)) for s in statements]
