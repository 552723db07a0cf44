"""Options of `cumulant train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing

TASKS = ("language", "contrastive", "recall")
BLOCKS = ("standard", "energy", "convex", "equilibrium")


def train(
    name: Annotated[str, typer.Argument(help=", ".join(TASKS) + ".", autocompletion=lambda: list(TASKS))],
    out: Annotated[
        Path | None, typer.Option(help="Where checkpoints and tables go.", show_default="trained/NAME")
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(BLOCKS)}. May be repeated.",
            show_default="all of them",
            autocompletion=lambda: list(BLOCKS),
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train with seeds 0 … N − 1; several show the spread.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of each training.", show_default="the task's own")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trainings in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the trainings in --out.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Try learning rates on the validation part instead.")
    ] = False,
) -> None:
    """Train small models that differ in their blocks alone, at equal parameter count, and compare them.

    Writes checkpoints in safetensors, results.json, results.parquet, curves.parquet and a figure. An interrupted run
    goes on with --resume exactly as if it had not been interrupted.

    Each block has the learning rate that was best on a validation part; the table is of the test part.
    --search tries the rates again and writes nothing.
    """
    with importing("train", "train"):
        from cumulant.paper.trainings.command import train_command
    training = {"seeds": seeds, "steps": steps, "device": device}
    train_command(name, out, block, **training, resume=resume, force=force, search=search)
