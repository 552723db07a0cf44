"""`cumulant train NAME` in the terminal."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable
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
from cumulant.nn.block_types import BLOCK_TYPES, find_block_type, make_block
from cumulant.paper.trainings.figures import draw_curves
from cumulant.paper.trainings.search import RATES, SEED, best_rate, counts
from cumulant.paper.trainings.search import search as search_rates
from cumulant.paper.trainings.study import RESULTS, Study, claim, noted, study
from cumulant.paper.trainings.tables import cells, curve_rows, headings, remarks, run_rows, summarise
from cumulant.paper.trainings.task import Measure, Task
from cumulant.paper.trainings.tasks import TASKS, find_task
from cumulant.paper.trainings.train import Run, Step
from cumulant.terminal import sentences


def train_command(
    name: Annotated[str, typer.Argument(help=", ".join(TASKS) + ".")],
    out: Annotated[Path | None, typer.Option(help="Where checkpoints and tables go; trained/NAME if none.")] = None,
    block: Annotated[list[str] | None, typer.Option(help=f"{', '.join(BLOCK_TYPES)}; all of them if none.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train with seeds 0 … N − 1; several show the spread.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates of each training; the task's own if none.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --out holds.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the trainings that --out holds.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Try learning rates on the validation part instead.")
    ] = False,
) -> None:
    """Train small models that differ in their blocks alone, at equal parameter count, and compare them.

    Leaves checkpoints in safetensors, results.json, results.parquet, curves.parquet and a figure. An interrupted run
    goes on with --resume exactly as if it had not been interrupted.

    Each block has the learning rate that was best on a validation part; the table is of a test part that chose nothing.
    --search tries the rates again and writes nothing.
    """
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors, "the same command with --resume goes on from here"):
        if resume and force:
            raise ValueError(sentence("--force", "to be alone", "--resume beside it", "Leave one of them out."))
        _require("safetensors", "polars", "matplotlib")
        task, chosen = find_task(name), block or list(BLOCK_TYPES)
        for kind in chosen:
            find_block_type(kind)
        if search:
            _search(screen, errors, task, chosen, steps)
            return
        place = out or Path("trained") / name
        with errors.status("reading data"):
            _ = task.fingerprint  # data that is missing is told before anything is claimed
        claim(place, task.name, resume=resume, force=force)
        found = _run(errors, task, place, chosen, seeds, steps, resume)
        _write(place, found)
    _tell(screen, found, place)


def _require(*packages: str) -> None:
    """Tables and figures are written in the end: what they need is asked for at the start."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(sentence("train", ", ".join(missing), "no such package", "install cumulant[train]"))


def _progress(errors: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=errors)


def _watch(bar: Progress, what: str, total: int):
    """A line of its own for a training."""
    mine = bar.add_task(what, total=total, loss="")

    def after(step: Step) -> None:
        bar.update(mine, completed=step.step, loss=f"loss {step.loss:.3f}")

    return after


def _run(errors: Console, task: Task, place: Path, blocks: list[str], seeds: int, steps: int | None, resume: bool):
    with _progress(errors) as bar:

        def watch(block: str, seed: int):
            return _watch(bar, f"{task.name}: {block}, seed {seed}", steps or task.recipe.steps)

        return study(task, place, blocks=blocks, seeds=range(seeds), steps=steps, resume=resume, watch=watch)


def _search(screen: Console, errors: Console, task: Task, blocks: list[str], steps: int | None) -> None:
    """A table of blocks and rates, by the measure that judges, on the validation part."""
    judge, found, notes = task.measures[0], {}, []
    with _progress(errors) as bar:
        for block in blocks:

            def watch(rate: float, block: str = block):
                return _watch(bar, f"{task.name}: {block}, rate {rate:g}", steps or task.recipe.steps)

            with noted(block, notes):
                found[block] = search_rates(task, block, steps=steps, watch=watch)
    table = Table("block", *[f"{rate:g}" for rate in RATES], "best", "in use")
    table.title, table.title_justify = f"{judge.heading} on the validation part, seed {SEED}, by learning rate", "left"
    for block, runs in found.items():
        best = best_rate(task, runs)
        numbers = [_tried(judge, run) for run in runs.values()]
        table.add_row(block, *numbers, "–" if best is None else f"{best:g}", f"{task.rates[block]:g}")
    screen.print(table)
    if any(run.diverged is None and not counts(run) for runs in found.values() for run in runs.values()):
        screen.print("(…) has fixed points that were not found and does not count.")
    _say(screen, notes)


def _tried(judge: Measure, run: Run) -> str:
    """A measure of a search, or why there is none."""
    if run.diverged is not None:
        return "diverged"
    told = f"{run.measures[judge.key]:{judge.form}}"
    return told if counts(run) else f"({told})"


def _write(place: Path, found: Study) -> None:
    write_parquet(run_rows(found.runs), place / "results.parquet")
    write_parquet(curve_rows(found.runs), place / "curves.parquet")
    drawn = draw_curves(found.task, found.runs)
    for ending in ("svg", "png"):
        save(drawn, place / f"curves.{ending}")
    told = {
        "task": found.task.name,
        "question": found.task.question,
        "data": found.task.fingerprint,
        "summary": [_plain(summary) for summary in summarise(found.task, found.runs)],
        "runs": [run._asdict() for run in found.runs],
        "notes": found.notes,
        "guarantees": {block: _guaranteed(found.task, block) for block in dict.fromkeys(r.block for r in found.runs)},
        "command": shlex.join(["cumulant", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions("torch", "numpy", "tokenizers", "safetensors", "scikit-learn"),
    }
    write(place / RESULTS, json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _guaranteed(task: Task, block: str) -> str:
    stack = task.configure(block)
    return str(make_block(block, stack.dim, stack.heads, stack.hidden, causal=stack.causal).guarantees)


def _plain(found):
    """Records as JSON has them: by the names of their fields."""
    if hasattr(found, "_asdict"):
        return {key: _plain(value) for key, value in found._asdict().items()}
    return {key: _plain(value) for key, value in found.items()} if isinstance(found, dict) else found


def _tell(screen: Console, found: Study, place: Path) -> None:
    rows = summarise(found.task, found.runs)
    table = Table(*headings(found.task), title=found.task.question, title_justify="left")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*cells(found.task, row))
    screen.print(table)
    for line in remarks(rows):
        screen.print(line, highlight=False)
    _say(screen, found.notes)
    where = f"Checkpoints: {place}/BLOCK/seed-N/step-*   Tables: {place}/*.parquet   Figure: {place}/curves.svg"
    screen.print(where, highlight=False, soft_wrap=True)


def _say(screen: Console, notes: Iterable[str]) -> None:
    for note in notes:
        screen.print(f"[yellow]Note[/]: {note}", highlight=False)
