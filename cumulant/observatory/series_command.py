"""`cumulant observe --checkpoints DIR` in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Exit

from cumulant.checks import sentence
from cumulant.files import write_parquet
from cumulant.observatory.record.manifest import PAGE, writing
from cumulant.observatory.record.record import Record
from cumulant.observatory.report.series import (
    Steps,
    after_last_block,
    mean_over_heads,
    read_steps,
    render_series,
    series_rows,
)
from cumulant.observatory.runs.observe import Progress as Count
from cumulant.observatory.runs.over_training import (
    OUTPUTS,
    TOKENS,
    CheckpointDirectory,
    SeriesSettings,
    abandon_series,
    agreed_model,
    claim_series,
    find_steps,
    observe_series,
    require_alike,
)
from cumulant.observatory.runs.shards import Job
from cumulant.observatory.text.corpus import plan
from cumulant.terminal import INTERRUPTED

COLUMNS = {  # of the table that is printed
    "entropy": "entropy",
    "log_normalizer": "log-norm.",
    "first_mass": "first",
    "gradientness": "gradient",
    "ascent_index": "ascent",
    "link_r2": "link R²",
}


class Place(NamedTuple):
    """Where a series goes: observed/NAME if None; whether to go on with one that is there, or to replace it."""

    out: Path | None = None
    resume: bool = False
    force: bool = False


def observe_checkpoints(
    directory: Path,
    sources: list[str],
    job: Job,
    column: str | None = None,
    max_tokens: int = TOKENS,
    where: Place = Place(),  # noqa: B008
    alone: dict[str, bool] | None = None,
    words: str = "",
) -> None:
    """Observe every step, write series/, series.parquet and report.html, and say what has changed.

    job    device, dtype, quantities and so on; its model is not used
    alone  options that cannot stand beside this one, and whether they were given
    words  what the text is called
    """
    screen, errors = Console(), Console(stderr=True)
    _check(alone or {}, sources, max_tokens)
    steps = find_steps(directory)
    corpus = plan(sources, column=column)
    chosen = {name: getattr(job, name) for name in ("quantities", "max_length", "batch_size", "seed", "dtype")}
    settings = SeriesSettings(corpus.identity(), agreed_model(steps), max_tokens=max_tokens, **chosen)
    place = where.out or default_place(directory)
    existed = place.exists()
    claim_series(place, settings, resume=where.resume, force=where.force)
    told = {"model": str(directory), "text": words, "command": shlex.join(["cumulant", *sys.argv[1:]])}
    try:
        with _bar(errors) as watch:
            found = observe_series(
                steps, place, corpus, settings, device=job.device, allow_pickle=job.allow_pickle, meta=told, watch=watch
            )
        if not found.records:
            raise KeyboardInterrupt
    except BaseException:
        abandon_series(place, existed=existed)
        raise
    with errors.status("writing table and page"):
        seen = _write(found.records, place)
    _tell(screen, seen, found.complete, place)
    if not found.complete:
        raise Exit(INTERRUPTED)


def rewrite_series(place: Path) -> None:
    """Write the table and the page of a series again, from the records that it holds."""
    found: dict[int, Record] = {}
    for step in find_steps(place / "series"):
        record = Record.load(step.path)
        require_alike(found, record, step)
        found[step.number] = record
    _tell(Console(), _write(found, place), True, place)


def _write(records: dict[int, Record], place: Path) -> Steps:
    seen = read_steps(records)
    with writing(place, *OUTPUTS):
        write_parquet(series_rows(seen), place / "series.parquet")
        render_series(seen, place / PAGE)
    return seen


def default_place(directory: Path) -> Path:
    """
    >>> default_place(Path("trained/language/convex/seed-0")).as_posix()
    'observed/convex-seed-0'
    """
    whole = directory.resolve()
    name = f"{whole.parent.name}-{whole.name}" if whole.name.startswith("seed-") else whole.name
    return Path("observed") / name


def _check(alone: dict[str, bool], sources: list[str], max_tokens: int) -> None:
    for option, given in alone.items():
        if given:
            advice = "Leave it out; a single step can be observed with it."
            raise ValueError(sentence(option, "no --checkpoints beside it", "both", advice))
    if "-" in sources:
        advice = "Give a file."
        raise ValueError(sentence("--checkpoints", "texts that can be read at every step", "standard input", advice))
    if max_tokens == 0:
        advice = "Every step reads the same part of the text; say how much."
        raise ValueError(sentence("--max-tokens", "a number of tokens with --checkpoints", 0, advice))


@contextmanager
def _bar(errors: Console) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("observing", done="")

        @contextmanager
        def watch(step: CheckpointDirectory, which: int, total: int) -> Iterator[Count]:
            read = 0

            def count(tokens: int) -> None:
                nonlocal read
                read += tokens
                bar.update(task, done=f"{which} of {total} steps, {read:,} tokens of this one")

            bar.update(
                task, description=escape(step.path.name), total=total, completed=which, done=f"{which} of {total} steps"
            )
            yield count

        yield watch


def _tell(screen: Console, steps: Steps, complete: bool, place: Path) -> None:
    last = next(reversed(steps.values())).record
    heads = sum(layer.heads for layer in last.layers)
    kind, text = (escape(name or "unknown") for name in (last.meta.model_class, last.meta.text))
    screen.print(
        f"[bold]{kind}[/]: {len(steps)} steps, {len(last.layers)} attention modules, {heads} "
        f"heads, {last.meta.tokens:,} tokens of {text} at each.",
        highlight=False,
    )
    title = "Means over heads; W₂ to a Gaussian after the last block"
    narrow = {"box": SIMPLE, "collapse_padding": True, "pad_edge": False}  # so that it fits a terminal of 80 columns
    table = Table("step", *COLUMNS.values(), "W₂", "its null", title=title, title_justify="left", **narrow)
    courses = [mean_over_heads(steps, name) for name in COLUMNS]
    for step, seen in steps.items():
        numbers = [values[step] for values in courses]
        numbers += after_last_block(seen).sliced_w2[:2]
        table.add_row(f"{step:,}", *map(_short, numbers))
    screen.print(table)
    if not complete:
        screen.print("[yellow]Interrupted: the steps above are finished. The same command with --resume goes on.[/]")
    where = escape(str(place))
    screen.print(f"Page: [bold]{where}/{PAGE}[/]   Table: {where}/series.parquet", highlight=False)


def _short(number: float) -> str:
    """
    >>> _short(-0.00349), _short(98.42), _short(float("nan"))
    ('-0.003', '98.4', '–')
    """
    return "–" if number != number else f"{number:.3f}" if abs(number) < 10 else f"{number:.3g}"
