"""Output directories of experiments and trainings: tables, figures, and the record of a run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cumulant.checks import sentence
from cumulant.figures import save
from cumulant.files import versions, write, write_parquet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, float | int | str | bool | None]


def entries(directory: Path) -> set[str]:
    """Names of the files in a directory, none if it does not exist; a file is refused."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another directory."))
    return {p.name for p in directory.iterdir()} if directory.is_dir() else set()


def write_results(
    directory: Path, tables: Mapping[str, Sequence[Row]], figures: Mapping[str, Callable[[], Figure]]
) -> None:
    """Tables as NAME.parquet; figures, given as functions that draw them, as NAME.svg and NAME.png."""
    for name, rows in tables.items():
        write_parquet([dict(row) for row in rows], directory / f"{name}.parquet")
    for name, draw in figures.items():
        drawn = draw()
        for extension in ("svg", "png"):
            save(drawn, directory / f"{name}.{extension}")


def write_record(path: Path, fields: Mapping[str, object], *packages: str) -> None:
    """A run as JSON: these fields, the command line, the time, and the versions of these packages."""
    provenance = {
        "command": shlex.join(["cumulant", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(*packages),
    }
    write(path, json.dumps({**fields, **provenance}, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def progress_bar(console: Console, *extra: ProgressColumn, transient: bool = False) -> Progress:
    """A progress bar with times; ``extra`` columns go before them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *extra)
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=transient)
