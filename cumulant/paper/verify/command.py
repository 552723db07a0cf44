"""The command `cumulant verify`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cumulant.files import insert, write
from cumulant.paper.verify import CHECKS, STATEMENTS, Outcome, Statement, report, verify

WIDE = 130  # columns from which every figure has its own
DETAILED = 5  # up to so many named statements are printed in full
COLOURS = {"agrees": "green", "disagrees": "red"}


def verify_command(
    ids: Sequence[str], *, as_json: bool, seed: int, sections: Sequence[str], detail: bool, update: Sequence[Path]
) -> None:
    """Run the checks of statements, print what they found, and exit 1 if a number disagrees with a verdict."""
    statements = _select(ids, sections)
    outcomes = _run(statements, seed)
    screen = Console()
    if as_json:
        screen.print_json(json.dumps(report.as_json(outcomes, seed), ensure_ascii=False))
    elif detail or (ids and len(statements) <= DETAILED):
        for outcome in outcomes:
            screen.print(_print_full(outcome))
        screen.print(report.summary(outcomes), highlight=False)
    else:
        screen.print(_table(outcomes, screen.width))
        screen.print(report.summary(outcomes), highlight=False)
        screen.print("One statement in full, with the location of its code: cumulant verify S0-E7", style="dim")
    for path in update:
        _update_page(path, outcomes)
    if any(o.status == "disagrees" for o in outcomes):
        raise typer.Exit(1)


def _select(ids: Sequence[str], sections: Sequence[str]) -> list[Statement]:
    """By id, by name of a check, by document or section; all if nothing is named."""
    known = {statement.id for statement in STATEMENTS}
    upper = {name.upper(): name for name in (*known, *CHECKS)}
    names = []
    for requested in ids:
        name = upper.get(requested.upper().replace("′", "'"))
        if name is None:
            near = difflib.get_close_matches(requested.upper(), upper, n=4, cutoff=0.5)
            advice = f"did you mean {', '.join(upper[n] for n in near)}?" if near else "run `cumulant verify` for all."
            raise typer.BadParameter(f"no statement or check is called {requested!r}; {advice}")
        names.append(name)
    groups = {s.document for s in STATEMENTS} | {str(s.section) for s in STATEMENTS}
    for requested in sections:
        if requested.upper() not in groups:
            raise typer.BadParameter(f"no section is called {requested!r}; there are {', '.join(sorted(groups))}.")
    part = [s for s in STATEMENTS if not sections or {s.document, str(s.section)} & {n.upper() for n in sections}]
    selected = [s for s in part if not names or s.id in names or set(s.checks) & set(names)]
    if not selected:
        raise typer.BadParameter("none of these statements is in that section.")
    return selected


def _run(statements: Sequence[Statement], seed: int) -> list[Outcome]:
    columns = (TextColumn("check {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    names = {name for statement in statements for name in statement.checks if name in CHECKS}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(names))
        done = -1

        def progress(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=f"{name}: {CHECKS[name].words}", completed=done)

        return verify(statements, seed, progress)


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


def _print_full(outcome: Outcome) -> Group:
    """A statement in full."""
    statement = outcome.statement
    lines = [Text.assemble((statement.id, "bold"), "  ", statement.words)]
    fields = {
        "equation": statement.equation,
        "condition": statement.condition,
        "as written": statement.literal,
        "verdict": statement.verdict.value,
        "status": report.status(outcome) if statement.verdict.checked else statement.reason,
    }
    lines += [Text.assemble((f"  {name:<11}", "dim"), text) for name, text in fields.items() if text]
    parts: list = lines
    for result in outcome.results:
        check = CHECKS[result.name]
        parts.append(Text.assemble((f"  {result.name:<11}", "bold"), check.words, (f"  ({check.location})", "dim")))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for e in result.evidence:
            good = {"measured": "measured", "differs": "fails as written", "true": "holds"}.get(e.kind, "agrees")
            mark = Text(good, "green") if e.passed else Text("unexpected", "red")
            table.add_row(Text(e.label), Text(report.bound(e)), mark, Text(e.note))
        if result.skipped:
            table.add_row(Text(f"skipped: {result.skipped}", "yellow"))
        if result.problem:
            table.add_row(Text(result.problem, "red"))
        parts.append(Padding(table, (0, 0, 0, 13)))
    return Group(*parts, Text(""))


def _update_page(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The table of all statements between the marks of a page called verify."""
    try:
        text = insert(path.read_text(encoding="utf-8"), "verify", report.markdown(outcomes))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    write(path, text)
