"""Outcomes of `cumulant verify` as table rows, JSON and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cumulant.files import markdown_row
from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.registry import CHECKS
from cumulant.paper.verify.run import Outcome

NONE = "–"
HEADER = ("id", "statement", "verdict", "error ≤ tolerance", "as written", "status", "time")


def row(outcome: Outcome) -> tuple[str, ...]:
    """One line of the table."""
    statement = outcome.statement
    seconds = f"{outcome.seconds:.2f} s" if outcome.results else NONE
    return (
        statement.id,
        statement.words,
        statement.verdict.value,
        _worst(outcome),
        _literal(outcome),
        status(outcome),
        seconds,
    )


def status(outcome: Outcome) -> str:
    """The status column: whether the numbers support the verdict."""
    return NONE if outcome.status == "not a claim" else outcome.status


def summary(outcomes: Sequence[Outcome]) -> str:
    """One sentence that counts the outcomes."""
    count = Counter(o.status for o in outcomes)
    checks = {r.name for o in outcomes for r in o.results}
    numbers = sum(len(r.evidence) for r in {r.name: r for o in outcomes for r in o.results}.values())
    parts = [
        _count_text(len(outcomes), "statement"),
        f"{_count_text(len(checks), 'check')} with {_count_text(numbers, 'comparison')}",
    ]
    named = {
        "agrees": "with numbers that agree with the verdict",
        "disagrees": "that disagree",
        "skipped": "skipped",
    }
    parts += [f"{count[key]} {words}" for key, words in named.items() if count[key] or key == "disagrees"]
    if count["not a claim"]:
        parts.append(f"{count['not a claim']} with nothing to check (definitions, wording, motivation)")
    return ", ".join(parts) + "."


def _count_text(number: int, noun: str) -> str:
    """
    >>> _count_text(1, "check"), _count_text(3, "check")
    ('1 check', '3 checks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_json(outcomes: Sequence[Outcome], seed: int) -> dict:
    """All outcomes as plain data."""
    return {
        "seed": seed,
        "summary": summary(outcomes),
        "statements": [
            {
                "id": o.statement.id,
                "section": o.statement.section,
                "statement": o.statement.words,
                "equation": o.statement.equation,
                "condition": o.statement.condition,
                "as_written": o.statement.literal,
                "verdict": o.statement.verdict.value,
                "status": o.status,
                "reason": o.statement.reason,
                "checks": [
                    {
                        "name": r.name,
                        "source": CHECKS[r.name].location,
                        "passed": r.passed,
                        "problem": r.problem,
                        "skipped": r.skipped,
                        "seconds": round(r.seconds, 4),
                        "evidence": [_plain(e) for e in r.evidence],
                    }
                    for r in o.results
                ],
            }
            for o in outcomes
        ],
    }


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table without times, so that it only changes when a number does.

    Each id is an anchor, and links to its statement on the page of the theory beside it.
    """
    lines = [markdown_row(HEADER[:-1]), markdown_row("---" for _ in HEADER[:-1])]
    lines += [markdown_row([_linked(o.statement.id), *row(o)[1:-1]]) for o in outcomes]
    return "\n".join([*lines, "", summary(outcomes)]) + "\n"


def _linked(statement_id: str) -> str:
    """
    >>> _linked("S1-P2'")
    '<a id="s1-p2-prime"></a>[S1-P2\\'](theory.md#s1-p2-prime)'
    """
    anchor = statement_id.lower().replace("'", "-prime")
    return f'<a id="{anchor}"></a>[{statement_id}](theory.md#{anchor})'


def bound(e: Evidence) -> str:
    """A comparison as text.

    >>> bound(Evidence("mean", "agrees", 2e-16, 1e-12)), bound(Evidence("literal", "differs", 0.27, 0.01))
    ('2e-16 ≤ 1e-12', '0.27 > 0.01')
    """
    if e.kind in ("agrees", "differs"):
        sign = ("≤" if e.passed else "≰") if e.kind == "agrees" else (">" if e.passed else "≯")
        return f"{e.value:.2g} {sign} {e.bound:g}".replace("e-0", "e-")
    if e.kind == "measured":
        return f"{e.value:.4g}"
    return "true" if e.passed else "false"


def _worst(outcome: Outcome) -> str:
    if any(r.problem for r in outcome.results):
        return "broken"
    if outcome.worst is not None:
        return bound(outcome.worst)
    return NONE if not outcome.results else "true" if all(r.passed for r in outcome.results) else "false"


def _literal(outcome: Outcome) -> str:
    worst = outcome.discrepancy
    return f"off by {worst.value:.2g}" if worst is not None and outcome.statement.literal else NONE


def _plain(e: Evidence) -> dict:
    bounded = None if e.bound != e.bound else e.bound
    return {"label": e.label, "kind": e.kind, "value": e.value, "bound": bounded, "note": e.note, "passed": e.passed}
