"""Options of `cumulant verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing


def verify(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Statements (S0-E7, X-11) or checks (A4) to run.", show_default="all"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Another seed draws other inputs; every seed must pass.")
    ] = 0,
    section: Annotated[
        list[str] | None,
        typer.Option(help="A document (S0 … S4, X) or a section of the theory (1 … 12).", show_default="all"),
    ] = None,
    detail: Annotated[bool, typer.Option("--detail", help="Show every comparison of every statement.")] = False,
    update: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the paper: every statement, whether it holds, and the numbers behind it.

    Each check has the library on one side and an oracle in NumPy and SciPy on the other. A statement that is false as
    written is evaluated as written too, and its discrepancy shown. Exit code 1 if a number disagrees with a verdict.
    """
    with importing("verify", "cli"):
        from cumulant.paper.verify.command import verify_command
    verify_command(ids or [], as_json=as_json, seed=seed, sections=section or [], detail=detail, update=update or [])
