"""The command `cumulant train`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from cumulant.checks import device_of, sentence
from cumulant.extras import missing_package
from cumulant.nn.block_types import BLOCK_TYPES, find_block_type, make_block
from cumulant.paper.output import progress_bar, write_record, write_results
from cumulant.paper.trainings.figures import draw_curves
from cumulant.paper.trainings.search import RATES, SEED, best_rate, eligible
from cumulant.paper.trainings.search import search as search_rates
from cumulant.paper.trainings.study import RESULTS, Study, collect_warnings, prepare_directory, study
from cumulant.paper.trainings.tables import cells, curve_rows, headings, remarks, run_rows, summarise
from cumulant.paper.trainings.task import Metric, Task
from cumulant.paper.trainings.tasks import find_task
from cumulant.paper.trainings.train import TrainingRun, TrainingStep
from cumulant.terminal import sentences


def train_command(
    name: str,
    out: Path | None,
    block: list[str] | None,
    *,
    seeds: int,
    steps: int | None,
    device: str,
    resume: bool,
    force: bool,
    search: bool,
) -> None:
    """Train and compare, or search for learning rates; write and print the results."""
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors, "the same command with --resume goes on from here"):
        if resume and force:
            raise ValueError(sentence("--force", "to be alone", "--resume beside it", "Leave one of them out."))
        _require("safetensors", "polars", "matplotlib")
        device_of("--device", device)
        task, blocks = find_task(name), block or list(BLOCK_TYPES)
        for kind in blocks:
            find_block_type(kind)
        if search:
            _search(screen, errors, task, blocks, steps, device)
            return
        directory = out or Path("trained") / name
        with errors.status("reading data"):
            _ = task.fingerprint  # missing data is an error before a directory is made
        prepare_directory(directory, task.name, resume=resume, force=force)
        options = {"seeds": range(seeds), "steps": steps, "device": device, "resume": resume}
        result = _run(errors, task, directory, blocks, options)
        _write(directory, result)
    _print_result(screen, result, directory)


def _require(*packages: str) -> None:
    """Fail at the start if a package that writes the results is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_package("cumulant train", ", ".join(missing), "train")


def _progress(errors: Console) -> Progress:
    return progress_bar(errors, TextColumn("{task.fields[loss]}"))


def _watch(bar: Progress, what: str, total: int):
    """A callback that shows a training on a line of its own."""
    line = bar.add_task(what, total=total, loss="")

    def on_step(step: TrainingStep) -> None:
        bar.update(line, completed=step.step, loss=f"loss {step.loss:.3f}")

    return on_step


def _run(errors: Console, task: Task, directory: Path, blocks: list[str], options: dict[str, Any]) -> Study:
    with _progress(errors) as bar:

        def watch(block: str, seed: int):
            return _watch(bar, f"{task.name}: {block}, seed {seed}", options["steps"] or task.recipe.steps)

        return study(task, directory, blocks=blocks, watch=watch, **options)


def _search(screen: Console, errors: Console, task: Task, blocks: list[str], steps: int | None, device: str) -> None:
    """Print a table of blocks and rates, by the first metric on the validation part."""
    metric, results, notes = task.metrics[0], {}, []
    with _progress(errors) as bar:
        for block in blocks:

            def watch(rate: float, block: str = block):
                return _watch(bar, f"{task.name}: {block}, rate {rate:g}", steps or task.recipe.steps)

            with collect_warnings(block, notes):
                results[block] = search_rates(task, block, steps=steps, device=device, watch=watch)
    table = Table("block", *[f"{rate:g}" for rate in RATES], "best", "in use")
    table.title, table.title_justify = f"{metric.heading} on the validation part, seed {SEED}, by learning rate", "left"
    for block, runs in results.items():
        best = best_rate(task, runs)
        numbers = [_metric_text(metric, run) for run in runs.values()]
        table.add_row(block, *numbers, "–" if best is None else f"{best:g}", f"{task.rates[block]:g}")
    screen.print(table)
    if any(run.diverged is None and not eligible(run) for runs in results.values() for run in runs.values()):
        screen.print("(…) has fixed points that did not converge and is not eligible.")
    _print_notes(screen, notes)


def _metric_text(metric: Metric, run: TrainingRun) -> str:
    """A metric of a search, or why there is none."""
    if run.diverged is not None:
        return "diverged"
    text = f"{run.metrics[metric.key]:{metric.form}}"
    return text if eligible(run) else f"({text})"


def _write(directory: Path, result: Study) -> None:
    tables = {"results": run_rows(result.runs), "curves": curve_rows(result.runs)}
    write_results(directory, tables, {"curves": lambda: draw_curves(result.task, result.runs)})
    blocks = dict.fromkeys(run.block for run in result.runs)
    fields = {
        "task": result.task.name,
        "question": result.task.question,
        "data": result.task.fingerprint,
        "summary": [_as_json(summary) for summary in summarise(result.task, result.runs)],
        "runs": [run._asdict() for run in result.runs],
        "notes": result.notes,
        "guarantees": {block: _guarantees(result.task, block) for block in blocks},
    }
    write_record(directory / RESULTS, fields, "torch", "numpy", "tokenizers", "safetensors", "scikit-learn")


def _guarantees(task: Task, block: str) -> str:
    stack = task.configure(block)
    return str(make_block(block, stack.dim, stack.heads, stack.hidden, causal=stack.causal).guarantees)


def _as_json(value):
    """NamedTuples as dictionaries, all the way down."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    return {key: _as_json(v) for key, v in value.items()} if isinstance(value, dict) else value


def _print_result(screen: Console, result: Study, directory: Path) -> None:
    rows = summarise(result.task, result.runs)
    table = Table(*headings(result.task), title=result.task.question, title_justify="left")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*cells(result.task, row))
    screen.print(table)
    for line in remarks(rows):
        screen.print(line, highlight=False)
    _print_notes(screen, result.notes)
    where = f"Checkpoints: {directory}/BLOCK/seed-N/step-*   Tables: {directory}/*.parquet   "
    screen.print(f"{where}Figure: {directory}/curves.svg", highlight=False, soft_wrap=True)


def _print_notes(screen: Console, notes: Iterable[str]) -> None:
    for note in notes:
        screen.print(f"[yellow]Note[/]: {note}", highlight=False)
