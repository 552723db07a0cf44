"""Options of `cumulant experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing


def experiment(
    name: Annotated[str | None, typer.Argument(help="A name of --list.", show_default="show the list")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to put tables and figures.", show_default="experiments/NAME")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of every random number.")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="The long version, where there is one; it can be resumed.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Name the experiments and what they ask, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in --out.")] = False,
) -> None:
    """Run an experiment on the dynamics of attention: tables in Parquet, figures, and a verdict in one paragraph.

    Exits with 1 if a prediction of the theory does not hold. An interrupted run goes on where it stopped when it
    is started again with the same settings.
    """
    with importing("experiment", "lab"):
        from cumulant.paper.experiments.command import experiment_command
    experiment_command(None if show else name, out=out, seed=seed, full=full, force=force)
