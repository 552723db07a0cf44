"""The command `cumulant experiment`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from cumulant.checks import sentence
from cumulant.files import write
from cumulant.paper.experiments import EXPERIMENTS, Experiment, Result, Setting, find
from cumulant.paper.output import entries, progress_bar, write_record, write_results
from cumulant.terminal import sentences

RECORD = "experiment.json"  # written by a finished run
BEGUN = "begun.json"  # written by a run that has not finished: it can be resumed
CACHE = "cache"


def experiment_command(name: str | None, *, out: Path | None, seed: int, full: bool, force: bool) -> None:
    """Run an experiment, write and print what was found; without a name, list them."""
    screen, errors = Console(), Console(stderr=True)
    if name is None:
        screen.print(_listing())
        return
    with sentences(errors, "the same command goes on from here"):
        experiment = find(name)
        directory = out or Path("experiments") / name
        if full:
            _print_estimate(errors, experiment)
        _prepare(directory, experiment, force)
        setting = Setting(seed=seed, full=full, cache_dir=directory / CACHE)
        result = _run(errors, experiment, setting)
        _write(directory, experiment, result, setting)
    _print_result(screen, experiment, result, directory)
    if not result.holds:
        raise typer.Exit(1)


def _listing() -> Table:
    table = Table("name", "question", "rests on", "takes")
    for e in EXPERIMENTS.values():
        long = f"; --full {e.long}" if e.long else ""
        table.add_row(f"[bold]{e.name}[/]", e.question, e.rests_on, e.takes + long)
    return table


def _prepare(directory: Path, experiment: Experiment, force: bool) -> None:
    """Accept a new directory, that of an unfinished run of this experiment, or one that may be replaced."""
    files = entries(directory)
    expected = f"a new directory or an unfinished run of {experiment.name}"
    if BEGUN in files:
        if _unfinished(directory / BEGUN) != experiment.name:
            raise ValueError(sentence("--out", expected, f"{directory}, which holds another", "Name a new one."))
        return
    if files and RECORD not in files:
        raise ValueError(sentence("--out", expected, f"{directory}, which holds other files", "Name a new one."))
    if RECORD in files and not force:
        advice = "Name a new one, or pass --force to run again."
        raise ValueError(sentence("--out", "a new directory", f"{directory}, which holds a finished run", advice))
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / BEGUN, json.dumps({"experiment": experiment.name}) + "\n")


def _unfinished(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["experiment"]
    except (ValueError, KeyError, TypeError):
        return None


def _print_estimate(errors: Console, experiment: Experiment) -> None:
    if not experiment.long:
        raise ValueError(sentence("--full", "an experiment with a long version", experiment.name, "Leave it out."))
    if experiment.estimate is not None:
        minutes = experiment.estimate() / 60
        errors.print(f"The full run takes at most about {minutes:.0f} minutes here.", highlight=False)


def _run(errors: Console, experiment: Experiment, setting: Setting) -> Result:
    with progress_bar(errors, transient=True) as bar:
        task = bar.add_task(experiment.name, total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{experiment.name}: {what}")

        return experiment.run(Setting(setting.seed, setting.full, progress, setting.cache_dir))


def _write(directory: Path, experiment: Experiment, result: Result, setting: Setting) -> None:
    write_results(directory, result.tables, result.figures)
    fields = {
        "experiment": experiment.name,
        "question": experiment.question,
        "rests_on": experiment.rests_on,
        "verdict": result.verdict,
        "expectations": [e._asdict() for e in result.expectations],
        "seed": setting.seed,
        "full": setting.full,
    }
    write_record(directory / RECORD, fields, "torch", "numpy", "scipy")
    (directory / BEGUN).unlink()  # from here on the run is complete
    shutil.rmtree(directory / CACHE, ignore_errors=True)


def _print_result(screen: Console, experiment: Experiment, result: Result, directory: Path) -> None:
    screen.print(f"[bold]{experiment.question}[/]", highlight=False)
    screen.print(result.verdict, highlight=False, markup=False)
    table = Table("prediction", "measured", "")
    for e in result.expectations:
        table.add_row(e.words, e.measured, "[green]as expected[/]" if e.holds else "[red]not confirmed[/]")
    screen.print(table)
    figures = ", ".join(str(directory / f"{name}.svg") for name in result.figures)
    screen.print(f"Figures: {figures}   Tables: {directory}/*.parquet", highlight=False)
