"""Options of `cumulant track`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing


def track(
    file: Annotated[
        Path | None, typer.Argument(help="A CSV file of measurements with a header.", show_default="none")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A TOML file: columns, modes, switching, noise.", show_default="none")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to put table and figures.", show_default="tracked/FILE")
    ] = None,
    method: Annotated[str, typer.Option(help="imm, gpb1, gpb2, … or kalman (for one mode).")] = "imm",
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Add what all rows say about each row; with the order of gpb3, gpb4, ….")
    ] = False,
    smoother: Annotated[str, typer.Option(help="How to smooth: propagation, correction or kim.")] = "propagation",
    figures: Annotated[int, typer.Option(min=0, help="Draw so many tracks, the first ones of the file.")] = 12,
    example: Annotated[
        Path | None,
        typer.Option(
            help="A directory: write manoeuvre.csv and manoeuvre.toml, a manoeuvring target, into it, and stop.",
            show_default="none",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in --out.")] = False,
) -> None:
    """Filter a table of measurements: where each track is, how sure that is, and in which mode it moves.

    Several tracks, empty cells, missing rows and irregular times are welcome. Writes estimates.parquet, estimates.csv,
    summary.json and a figure for each track.
    """
    with importing("track", "lab"):
        from cumulant.filters.tracking.command import track_command
    chosen = smoother if smooth else None
    track_command(file, model, out, method=method, smoother=chosen, figures=figures, example=example, force=force)
