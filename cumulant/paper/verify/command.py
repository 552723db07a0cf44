"""`cumulant verify` in the terminal."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cumulant.files import insert, write
from cumulant.paper.verify import CHECKS, CLAIMS, Claim, Outcome, report, verify

WIDE = 130  # columns from which every figure has its own
DETAILED = 5  # up to so many named claims are shown in full
COLOURS = {"agrees": "green", "disagrees": "red"}
EXCERPT = ("S0-E7", "S1-T1", "S1-P2", "S1-E4", "S1-I1", "S2-E12", "X-1", "X-11", "S0-Q2")


def verify_command(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Statements (S0-E7, X-11) or checks (A4) to run; all if none is named.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Another seed draws other inputs; every seed must pass.")
    ] = 0,
    section: Annotated[
        list[str] | None, typer.Option(help="A document (S0 … S4, X) or a section of the theory (1 … 12).")
    ] = None,
    detail: Annotated[bool, typer.Option("--detail", help="Show every comparison of every statement.")] = False,
    update: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the paper: every statement, whether it holds, and the numbers behind it.

    Each check has the library on one side and an oracle in NumPy and SciPy on the other. A statement that is false as
    written is evaluated as written too, and its discrepancy shown. Exit code 1 if a number disagrees with a verdict.
    """
    claims = _chosen(ids or [], section or [])
    outcomes = _run(claims, seed)
    screen = Console()
    if as_json:
        screen.print_json(json.dumps(report.as_json(outcomes, seed), ensure_ascii=False))
    elif detail or (ids and len(claims) <= DETAILED):
        for outcome in outcomes:
            screen.print(_card(outcome))
        screen.print(report.summary(outcomes), highlight=False)
    else:
        screen.print(_table(outcomes, screen.width))
        screen.print(report.summary(outcomes), highlight=False)
        screen.print("One statement in full, with the place of its code: cumulant verify S0-E7", style="dim")
    for path in update or []:
        _renew(path, outcomes)
    if any(o.status == "disagrees" for o in outcomes):
        raise typer.Exit(1)


def _chosen(ids: Sequence[str], sections: Sequence[str]) -> list[Claim]:
    """By id, by name of a check, by document or section; all if nothing is named."""
    known = {claim.id for claim in CLAIMS}
    upper = {name.upper(): name for name in (*known, *CHECKS)}
    wanted = []
    for given in ids:
        name = upper.get(given.upper().replace("′", "'"))
        if name is None:
            near = difflib.get_close_matches(given.upper(), upper, n=4, cutoff=0.5)
            advice = f"did you mean {', '.join(upper[n] for n in near)}?" if near else "run `cumulant verify` for all."
            raise typer.BadParameter(f"no statement or check is called {given!r}; {advice}")
        wanted.append(name)
    groups = {c.document for c in CLAIMS} | {str(c.section) for c in CLAIMS}
    for given in sections:
        if given.upper() not in groups:
            raise typer.BadParameter(f"no section is called {given!r}; there are {', '.join(sorted(groups))}.")
    part = [c for c in CLAIMS if not sections or {c.document, str(c.section)} & {s.upper() for s in sections}]
    chosen = [c for c in part if not wanted or c.id in wanted or set(c.checks) & set(wanted)]
    if not chosen:
        raise typer.BadParameter("none of these statements is in that section.")
    return chosen


def _run(claims: Sequence[Claim], seed: int) -> list[Outcome]:
    columns = (TextColumn("check {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    names = {name for claim in claims for name in claim.checks if name in CHECKS}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(names))
        done = -1

        def progress(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=f"{name}: {CHECKS[name].words}", completed=done)

        return verify(claims, seed, progress)


def _table(outcomes: Sequence[Outcome], width: int) -> Table:
    """One line a statement where there is room, else the verdict below it and the numbers below each other."""
    wide = width >= WIDE
    table = Table(*(report.HEADER if wide else ("id", "statement", "numbers", "status")), row_styles=["", "dim"])
    table.columns[1].ratio = 1
    for column in (0, 3, 4, 6) if wide else (0, 2):
        table.columns[column].no_wrap = True
    for outcome in outcomes:
        cells = [Text(cell) for cell in report.row(outcome)]
        cells[5].stylize(COLOURS.get(outcome.status, ""))
        if not wide:
            name, words, verdict, error, literal, status, _ = cells
            verdict.stylize("italic")
            cells = [name, words + "\n" + verdict, error + "\n" + literal, status]
        table.add_row(*cells)
    return table


def _card(outcome: Outcome) -> Group:
    """A statement in full."""
    claim = outcome.claim
    lines = [Text.assemble((claim.id, "bold"), "  ", claim.words)]
    said = {
        "equation": claim.equation,
        "condition": claim.condition,
        "as written": claim.literal,
        "verdict": claim.verdict.value,
        "status": report.status(outcome) if claim.verdict.checked else claim.reason,
    }
    lines += [Text.assemble((f"  {name:<11}", "dim"), text) for name, text in said.items() if text]
    parts: list = lines
    for result in outcome.results:
        found = CHECKS[result.name]
        parts.append(Text.assemble((f"  {result.name:<11}", "bold"), found.words, (f"  ({found.place})", "dim")))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for e in result.evidence:
            good = {"seen": "seen", "differs": "fails as written", "true": "holds"}.get(e.kind, "agrees")
            mark = Text(good, "green") if e.passed else Text("unexpected", "red")
            table.add_row(Text(e.label), Text(report.bound(e)), mark, Text(e.note))
        if result.skipped:
            table.add_row(Text(f"skipped: {result.skipped}", "yellow"))
        if result.problem:
            table.add_row(Text(result.problem, "red"))
        parts.append(Padding(table, (0, 0, 0, 13)))
    return Group(*parts, Text(""))


def _renew(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The excerpt of a README, or the whole table of a page, between the marks called verify."""
    short = path.name.upper().startswith("README")
    shown = [o for o in outcomes if not short or o.claim.id in EXCERPT]
    table = report.markdown(shown, "docs/theory.md" if short else "theory.md")
    try:
        text = insert(path.read_text(encoding="utf-8"), "verify", table)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    write(path, text)
