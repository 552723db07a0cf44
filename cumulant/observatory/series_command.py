"""`cumulant observe --checkpoints DIR` in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Exit

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
from cumulant.observatory.runs.observe import Progress as TokenCount
from cumulant.observatory.runs.over_training import (
    OUTPUTS,
    CheckpointDirectory,
    SeriesSettings,
    abandon_series,
    agreed_model,
    claim_series,
    find_steps,
    observe_series,
    require_alike,
)
from cumulant.observatory.runs.run import command_line
from cumulant.observatory.runs.settings import Settings
from cumulant.terminal import INTERRUPTED

COLUMNS = {  # of the table that is printed
    "entropy": "entropy",
    "log_normalizer": "log-norm.",
    "first_mass": "first",
    "gradientness": "gradient",
    "ascent_index": "ascent",
    "link_r2": "link R²",
}


def observe_checkpoints(settings: Settings) -> None:
    """Observe every step, write series/, series.parquet and report.html, and print what has changed."""
    screen, errors = Console(), Console(stderr=True)
    assert settings.checkpoints is not None
    assert settings.token_limit is not None
    observation, directory = settings.observation, settings.directory
    steps = find_steps(settings.checkpoints)
    corpus = settings.corpus()
    common = {name: getattr(observation, name) for name in ("quantities", "max_length", "batch_size", "seed", "dtype")}
    series = SeriesSettings(corpus.identity(), agreed_model(steps), max_tokens=settings.token_limit, **common)
    existed = directory.exists()
    claim_series(directory, series, resume=settings.resume, force=settings.force)
    meta = {"model": str(settings.checkpoints), "text": settings.text_name, "command": command_line()}
    options = {"device": observation.device, "allow_pickle": observation.allow_pickle}
    try:
        with _bar(errors) as watch:
            observed = observe_series(steps, directory, corpus, series, **options, meta=meta, watch=watch)
        if not observed.records:
            raise KeyboardInterrupt
    except BaseException:
        abandon_series(directory, existed=existed)
        raise
    with errors.status("writing table and page"):
        table = _write(observed.records, directory)
    _print_series(screen, table, observed.complete, directory)
    if not observed.complete:
        raise Exit(INTERRUPTED)


def rewrite_series(directory: Path) -> None:
    """Write the table and the page of a series again, from the records that it holds."""
    records: dict[int, Record] = {}
    for step in find_steps(directory / "series"):
        record = Record.load(step.path)
        require_alike(records, record, step)
        records[step.number] = record
    _print_series(Console(), _write(records, directory), True, directory)


def _write(records: dict[int, Record], directory: Path) -> Steps:
    steps = read_steps(records)
    with writing(directory, *OUTPUTS):
        write_parquet(series_rows(steps), directory / "series.parquet")
        render_series(steps, directory / PAGE)
    return steps


@contextmanager
def _bar(errors: Console) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("observing", done="")

        @contextmanager
        def watch(step: CheckpointDirectory, which: int, total: int) -> Iterator[TokenCount]:
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


def _print_series(screen: Console, steps: Steps, complete: bool, directory: Path) -> None:
    last = next(reversed(steps.values())).record
    heads = sum(layer.heads for layer in last.modules)
    kind, text = (escape(name or "unknown") for name in (last.meta.model_class, last.meta.text))
    screen.print(
        f"[bold]{kind}[/]: {len(steps)} steps, {len(last.modules)} attention modules, {heads} "
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
    path = escape(str(directory))
    screen.print(f"Page: [bold]{path}/{PAGE}[/]   Table: {path}/series.parquet", highlight=False)


def _short(number: float) -> str:
    """
    >>> _short(-0.00349), _short(98.42), _short(float("nan"))
    ('-0.003', '98.4', '–')
    """
    return "–" if number != number else f"{number:.3f}" if abs(number) < 10 else f"{number:.3g}"
