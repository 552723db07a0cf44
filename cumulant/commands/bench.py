"""Options of `cumulant bench`, which runs in a clone of the repository: the benchmarks are not in the wheel."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cumulant.extras import HERE
from cumulant.terminal import importing, refuse

File = partial(typer.Option, dir_okay=False, metavar="FILE", show_default="none")


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Cases or tables to run, as --list shows them.", show_default="all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small inputs, a few minutes: does everything run?")] = False,
    json_file: Annotated[Path | None, File("--json", help="Also write all figures as JSON.")] = None,
    markdown: Annotated[Path | None, File("--markdown", help="Also write the tables as Markdown.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Name the cases and what they are to reach, and stop.")] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Least number of times each method runs.", show_default="7, or 3 if quick")
    ] = None,
    saved: Annotated[Path | None, File("--from", help="Show figures saved with --json instead of measuring.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the cases that the file of --json already has; measure the others.")
    ] = False,
    update: Annotated[list[Path] | None, File(help="Also put the figures between the marks of this page.")] = None,
) -> None:
    """Measure what the kernels cost, as ratios to what else does the same work; in a clone of the repository.

    Each case runs our function and its peers (torch's fused attention, naive torch, and other libraries where they are
    installed) in turns in one fresh process, checks that they agree, and reports the median ratio with its quartiles
    beside the target. One-thread figures are CPU time, all-thread figures are wall time: close other programs.
    The whole set takes about an hour; the file of --json is written after every case.
    """
    if not (HERE / "benchmarks" / "command.py").is_file():
        refuse("cumulant bench runs in a clone of the repository, where its cases are: clone it and run `make bench`.")
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    with importing("bench", "cli"):
        from benchmarks.command import bench_command
    bench_command(
        names or [],
        quick=quick,
        json_file=json_file,
        markdown=markdown,
        show=show,
        repeats=repeats,
        saved=saved,
        resume=resume,
        pages=update or [],
    )
