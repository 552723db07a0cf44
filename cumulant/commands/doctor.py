"""Options of `cumulant doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Show what is installed, which kernel serves on this processor and why, and what to do about what is missing."""
    from cumulant.doctor import doctor_command

    doctor_command(as_json)
