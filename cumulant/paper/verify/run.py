"""Running claims: each check once, its evidence shared by all statements that rest on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.registry import CHECKS, Skipped
from cumulant.paper.statements.statement import Claim, Verdict

STATISTICAL = 0.1  # tolerances from here on are standard errors, not rounding


@dataclass(frozen=True)
class CheckResult:
    """Evidence of one check, the sentence of the error that stopped it, or why it was skipped."""

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
    """A claim with what its checks found.

    ``agrees`` says whether the numbers support the verdict; None where there is nothing to run yet.
    """

    claim: Claim
    results: tuple[CheckResult, ...]

    @property
    def agrees(self) -> bool | None:
        if all(r.skipped for r in self.results):
            return None
        literal = any(e.kind == "differs" for r in self.results for e in r.evidence)
        # a statement called false as written must be seen to fail as written
        return all(r.passed or r.skipped for r in self.results) and (
            literal or self.claim.verdict is not Verdict.CORRECTED
        )

    @property
    def status(self) -> str:
        """agrees · disagrees · skipped · not a claim"""
        if not self.claim.verdict.checked:
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
        telling = [e for e in judged if e.bound < STATISTICAL or not e.passed] or judged
        return max(telling, key=lambda e: e.value / e.bound if e.bound else e.value, default=None)

    @property
    def discrepancy(self) -> Evidence | None:
        """How far the statement as written is from the truth."""
        return max(
            (e for r in self.results for e in r.evidence if e.kind == "differs"), key=lambda e: e.value, default=None
        )


def run_check(name: str, seed: int = 0) -> CheckResult:
    """One check; what it raises becomes a sentence."""
    start = time.perf_counter()
    skipped = ""
    try:
        evidence, problem = tuple(CHECKS[name].run(seed)), ""
    except Skipped as reason:
        evidence, problem, skipped = (), "", str(reason)
    except Exception as error:  # a check that breaks is a finding, and must not hide the others
        evidence, problem = (), f"{type(error).__name__}: {error}"
    return CheckResult(name, evidence, time.perf_counter() - start, problem, skipped)


def verify(claims: Sequence[Claim], seed: int = 0, progress: Callable[[str], None] | None = None) -> list[Outcome]:
    """Run the checks of these claims, each once.

    ``progress`` is called with the name of every check before it runs.
    """
    found: dict[str, CheckResult] = {}
    for claim in claims:
        for name in claim.checks:
            if name in CHECKS and name not in found:
                if progress is not None:
                    progress(name)
                found[name] = run_check(name, seed)
    return [Outcome(c, tuple(found[n] for n in c.checks if n in found)) for c in claims]
