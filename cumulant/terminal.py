"""How commands fail: one sentence for what a user can mend, a traceback for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

MENDABLE = (ValueError, TypeError, OSError, ModuleNotFoundError)


@contextmanager
def sentences(errors: Console | None = None, interrupted: str = "nothing was written") -> Iterator[None]:
    """Exit 2 with the sentence of an error that input can mend; exit 130 after Ctrl-C, with what is left of it all."""
    errors = errors if errors is not None else Console(stderr=True)
    try:
        yield
    except MENDABLE as error:
        errors.print(f"[red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print(f"[yellow]Interrupted: {interrupted}.[/]")
        raise typer.Exit(130) from None
