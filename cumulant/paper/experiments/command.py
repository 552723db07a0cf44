"""`cumulant experiment NAME` in the terminal."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cumulant.checks import sentence
from cumulant.figures import save
from cumulant.files import versions, write, write_parquet
from cumulant.paper.experiments import EXPERIMENTS, Experiment, Result, Setting, find
from cumulant.terminal import sentences

MARK = "experiment.json"  # what a finished run leaves
BEGUN = "begun.json"  # what a run that has not finished leaves: it can be resumed
CELLS = "cells"


def experiment_command(
    name: Annotated[str | None, typer.Argument(help="What --list shows.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to put tables and figures; experiments/NAME if none.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of every random number.")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="The long version, where there is one; it can be resumed.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Name the experiments and what they ask, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in --out.")] = False,
) -> None:
    """Run an experiment on the dynamics of attention: tables in Parquet, figures, and a verdict in one paragraph.

    Exits with 1 if something that the theory predicts was not seen. An interrupted run goes on where it stopped when it
    is started again with the same settings.
    """
    screen, errors = Console(), Console(stderr=True)
    if show or name is None:
        screen.print(_listing())
        return
    with sentences(errors, "the same command goes on from here"):
        chosen = find(name)
        place = out or Path("experiments") / name
        if full:
            _say_how_long(errors, chosen)
        _claim(place, chosen, force)
        setting = Setting(seed=seed, full=full, cells=place / CELLS)
        result = _run(errors, chosen, setting)
        _write(place, chosen, result, setting)
    _tell(screen, chosen, result, place)
    if not result.holds:
        raise typer.Exit(1)


def _listing() -> Table:
    table = Table("name", "question", "rests on", "takes")
    for found in EXPERIMENTS.values():
        long = f"; --full {found.long}" if found.long else ""
        table.add_row(f"[bold]{found.name}[/]", found.question, found.rests_on, found.takes + long)
    return table


def _claim(place: Path, chosen: Experiment, force: bool) -> None:
    """A new directory, one of an unfinished run of this experiment, or one that may be replaced."""
    if place.is_file():
        raise ValueError(sentence("--out", "a directory", f"the file {place}", "Name another place."))
    entries = {p.name for p in place.iterdir()} if place.is_dir() else set()
    expected = f"a new directory or an unfinished run of {chosen.name}"
    if BEGUN in entries:
        if _begun(place / BEGUN) != chosen.name:
            raise ValueError(sentence("--out", expected, f"{place}, which holds another", "Name a new one."))
        return
    if entries and MARK not in entries:
        raise ValueError(sentence("--out", expected, f"{place}, which holds other files", "Name a new one."))
    if MARK in entries and not force:
        advice = "Name a new one, or pass --force to run again."
        raise ValueError(sentence("--out", "a new directory", f"{place}, which holds a finished run", advice))
    place.mkdir(parents=True, exist_ok=True)
    write(place / BEGUN, json.dumps({"experiment": chosen.name}) + "\n")


def _begun(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["experiment"]
    except (ValueError, KeyError, TypeError):
        return None


def _say_how_long(errors: Console, chosen: Experiment) -> None:
    if not chosen.long:
        raise ValueError(sentence("--full", "an experiment with a long version", chosen.name, "Leave it out."))
    if chosen.estimate is not None:
        errors.print(f"The full run takes at most about {chosen.estimate() / 60:.0f} minutes here.", highlight=False)


def _run(errors: Console, chosen: Experiment, setting: Setting) -> Result:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        task = bar.add_task(chosen.name, total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{chosen.name}: {what}")

        return chosen.run(Setting(setting.seed, setting.full, progress, setting.cells))


def _write(place: Path, chosen: Experiment, result: Result, setting: Setting) -> None:
    for name, rows in result.tables.items():
        write_parquet(rows, place / f"{name}.parquet")
    for name, draw in result.figures.items():
        drawn = draw()
        for ending in ("svg", "png"):
            save(drawn, place / f"{name}.{ending}")
    told = {
        "experiment": chosen.name,
        "question": chosen.question,
        "rests_on": chosen.rests_on,
        "verdict": result.verdict,
        "expectations": [e._asdict() for e in result.expectations],
        "seed": setting.seed,
        "full": setting.full,
        "command": shlex.join(["cumulant", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions("torch", "numpy", "scipy"),
    }
    write(place / MARK, json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    (place / BEGUN).unlink()  # from here on the run is whole
    shutil.rmtree(place / CELLS, ignore_errors=True)


def _tell(screen: Console, chosen: Experiment, result: Result, place: Path) -> None:
    screen.print(f"[bold]{chosen.question}[/]", highlight=False)
    screen.print(result.verdict, highlight=False, markup=False)
    table = Table("the theory says", "measured", "")
    for e in result.expectations:
        table.add_row(e.words, e.measured, "[green]as expected[/]" if e.holds else "[red]not seen[/]")
    screen.print(table)
    figures = ", ".join(str(place / f"{name}.svg") for name in result.figures)
    screen.print(f"Figures: {figures}   Tables: {place}/*.parquet", highlight=False)
