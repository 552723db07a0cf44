"""`cumulant bench` in the terminal."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import report
from benchmarks.case import Case
from benchmarks.cases import catalogue
from benchmarks.results import CaseResult, Results, machine
from benchmarks.run import Effort, jobs, run
from cumulant.files import write

QUICK = Effort(quick=True, repeats=3, budget=1.0, launches=1)
BUSY = 0.5  # load average from which figures suffer
COLOURS = {"met": "green", "missed": "red"}


def bench_command(
    names: list[str],
    *,
    quick: bool,
    json_file: Path | None,
    markdown: Path | None,
    show: bool,
    repeats: int | None,
    saved: Path | None,
    resume: bool,
    pages: list[Path],
) -> None:
    """Measure, or read what was measured; print the tables and write the files that were asked for."""
    screen = Console()
    if show:
        screen.print(_overview(catalogue().values()))
        return
    _check_files(json_file, markdown, pages)
    if resume and json_file is None:
        raise typer.BadParameter("--resume goes on with the figures of a file: name it with --json.")
    results = _new(names, quick, repeats, json_file, resume) if saved is None else _old(saved)
    for table in report.tables(results):
        screen.print(_rich(table))
    for line in report.remarks(results):
        screen.print(line, highlight=False)
    if json_file is not None:
        _write_json(json_file, results)
    if markdown is not None:
        write(markdown, report.markdown(results))
    for page in pages:
        write(page, report.updated(page.read_text(encoding="utf-8"), results))


def _new(names: list[str], quick: bool, repeats: int | None, json_file: Path | None, resume: bool) -> Results:
    """Measured now; the file is written after every case, so that a run that is cut off can be resumed."""
    settings = QUICK if quick else Effort()
    settings = settings if repeats is None else replace(settings, repeats=repeats)
    known = catalogue(quick)
    cases = _chosen(names, known)
    results = Results(machine=machine(), quick=quick, cases=[])
    if resume and json_file is not None and json_file.exists():
        kept = _kept(json_file, results)
        results["cases"] = [case for case in kept if case["name"] in known]
        measured = {case["name"] for case in kept}
        cases = [case for case in cases if case.name not in measured]
    load = os.getloadavg()[0]
    if load > BUSY and not quick:
        note = f"Other programs are running (load {load:.1f}): expect wide quartiles and long wall times."
        Console(stderr=True).print(note, highlight=False)
    order = list(known)
    for result in _measure(cases, settings):
        results["cases"] = sorted([*results["cases"], result], key=lambda case: order.index(case["name"]))
        if json_file is not None:
            _write_json(json_file, results)
    return results


def _kept(json_file: Path, now: Results) -> list[CaseResult]:
    """What an earlier run measured, if it did so where and as this one does."""
    then = _old(json_file)
    same = ("cpu", "instruction_set", "cores", "torch", "cumulant")
    differ = [key for key in same if then["machine"].get(key) != now["machine"].get(key)]
    differ += ["quick"] if then["quick"] != now["quick"] else []
    if differ:
        raise typer.BadParameter(f"{json_file} was measured with another {differ[0]}; measure again without --resume.")
    return then["cases"]


def _write_json(path: Path, results: Results) -> None:
    write(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _old(saved: Path) -> Results:
    """Measured before."""
    try:
        results: Results = json.loads(saved.read_text(encoding="utf-8"))
        report.tables(results)
    except (OSError, ValueError, LookupError, TypeError):
        raise typer.BadParameter(f"{saved} is not a file that `cumulant bench --json` has written.") from None
    return results


def _chosen(names: list[str], cases: dict[str, Case]) -> list[Case]:
    """The named cases, all of a named table, or all."""
    table = {case.table for case in cases.values()}
    unknown = [name for name in names if name not in cases and name not in table]
    for name in unknown:
        near = difflib.get_close_matches(name, [*cases, *table], n=3, cutoff=0.4)
        advice = f"did you mean {', '.join(near)}? " if near else ""
        raise typer.BadParameter(f"no case is called {name!r}; {advice}`cumulant bench --list` shows all.")
    return [case for case in cases.values() if not names or case.name in names or case.table in names]


def _check_files(json_file: Path | None, markdown: Path | None, pages: list[Path]) -> None:
    """Better now than after an hour."""
    for path in (json_file, markdown):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"the directory of {path} does not exist; create it first.")
    for page in pages:
        try:
            report.updated(page.read_text(encoding="utf-8"), Results(machine=machine(), quick=True, cases=[]))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{page}: {error}") from None


def _measure(cases: list[Case], settings: Effort) -> Iterator[CaseResult]:
    """Results as they come, under a bar; where there is no terminal, with a line for each case that is done."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=sum(jobs(case, settings) for case in cases))
        done = 0

        def progress(label: str, part: float) -> None:
            left = len(cases) - done - 1
            bar.update(task, description=f"{label}, {left} more cases" if left else label, advance=part)

        begun = perf_counter()
        for result in run(cases, settings, progress):
            done += 1
            if not screen.is_terminal:
                seconds = perf_counter() - begun
                screen.print(f"{done} of {len(cases)}: {result['name']}, {seconds:.0f} s so far", highlight=False)
            yield result


def _overview(cases: Iterable[Case]) -> Table:
    table = Table("case", "table", "work", "to reach")
    for case in cases:
        reach = [
            f"{t.text} {t.peer or 'extra'}" + (" memory" if t.quantity == "memory" else "")
            for t in case.targets
            if t.text
        ]
        table.add_row(case.name, case.table, case.work, "\n".join(reach))
    return table


def _rich(table: report.Table) -> Table:
    printed = Table(*table.header, title=table.title, title_justify="left")
    for row in table.rows:
        colour = COLOURS.get(row[-1])
        printed.add_row(*row[:-1], f"[{colour}]{row[-1]}[/]" if colour else row[-1])
    return printed
