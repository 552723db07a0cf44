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
        Path | None,
        typer.Option(help="A TOML file: columns, sensors, modes, switching, noise.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to put table and figures.", show_default="tracked/FILE")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="A CSV file: look at its columns, write a first model beside it (or at --model), and stop.",
            show_default="none",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say how table and model are understood, and run nothing.")
    ] = False,
    method: Annotated[
        str, typer.Option(help="imm, gpb1, gpb2, …, kalman (for one mode), exact (for a few rows) or particles.")
    ] = "imm",
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Add what all rows say about each row; with the order of gpb3, gpb4, ….")
    ] = False,
    smoother: Annotated[
        str | None,
        typer.Option(
            help="How to smooth: propagation, correction, kim, or exact for a few rows. Implies --smooth.",
            show_default="propagation",
        ),
    ] = None,
    order: Annotated[
        int | None,
        typer.Option(
            min=2, help="Order of the smoother. Implies --smooth.", show_default="that of --method, at least 2"
        ),
    ] = None,
    gate: Annotated[
        float | None,
        typer.Option(
            help="Reject what a right sensor would measure with a probability below 1 − GATE: 0.999, say.",
            show_default="that of the model, or none",
        ),
    ] = None,
    particles: Annotated[
        int | None,
        typer.Option(min=1, help="How many, with --method particles: modes are drawn.", show_default="500"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws of particles.", show_default="0")] = None,
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

    Positions, or range, bearing, elevation, Doppler, speed and course of several sensors, in their units; several
    tracks, empty cells, missing rows and irregular times are welcome. Begin with --init FILE.csv, which writes a
    first model.

    Writes estimates.parquet, estimates.csv, summary.json and a figure for each track, and says whether the filter is
    consistent and what to change. docs/tracking.md has every key of the model.
    """
    with importing("track", "lab"):
        from cumulant.filters.tracking.command import TrackOptions, track_command
    chosen = smoother or ("propagation" if smooth or order else None)
    options = TrackOptions(out, method, chosen, order, gate, particles, seed, figures, check, init, example, force)
    track_command(file, model, options)
