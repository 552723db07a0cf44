"""How commands fail: one sentence for errors that other input mends, a traceback for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from cumulant.extras import install

MENDABLE = (ValueError, TypeError, OSError, ModuleNotFoundError)
INTERRUPTED = 130  # the exit code after Ctrl-C


class Commands(TyperGroup):
    """The commands of a program: in all of them Ctrl-C ends in exit 130, and a full disk in a sentence."""

    def invoke(self, ctx: Any) -> Any:
        with sentences(mendable=OSError):
            return super().invoke(ctx)


@contextmanager
def sentences(
    errors: Console | None = None,
    interrupted: str = "nothing was written",
    options: Mapping[str, str] | None = None,
    mendable: type[Exception] | tuple[type[Exception], ...] = MENDABLE,
) -> Iterator[None]:
    """Exit 2 with the sentence of an error that other input mends; exit 130 after Ctrl-C, saying what was written.

    interrupted  what is on the disk after Ctrl-C
    options      arguments of functions → options of the command line, in sentences and their advice
    mendable     the errors that end in a sentence; a closed pipe is none of them
    """
    errors = errors if errors is not None else Console(stderr=True)
    try:
        yield
    except BrokenPipeError:
        raise
    except mendable as error:
        errors.print(f"[red]{type(error).__name__}[/]: ", end="")
        errors.print(in_options(_message(error), options or {}), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print(f"[yellow]Interrupted: {interrupted}.[/]")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def importing(command: str, extra: str) -> Iterator[None]:
    """Context of the imports of a command: where a package is missing, exit 2 with what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        refuse(f"cumulant {command} needs {error.name or error}: run {install(extra)}.")


def refuse(words: str) -> NoReturn:
    """Exit 2 with one sentence."""
    typer.echo(words, err=True)
    raise typer.Exit(2)


def _message(error: Exception) -> str:
    """The message of an error; of errors of the operating system, as a sentence."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{error.filename or 'the file system'}: {error.strerror}."
    return str(error)


def in_options(text: str, options: Mapping[str, str]) -> str:
    """A sentence with options of the command line in place of arguments.

    >>> in_options("load.name: expected a, got b. Or pass=True.", {"load.name": "MODEL", "pass=True": "--pass"})
    'MODEL: expected a, got b. Or --pass.'
    """
    for function, option in options.items():
        if text.startswith(f"{function}:"):
            text = option + text.removeprefix(function)
        elif "=" in function:
            text = text.replace(function, option)
    return text
