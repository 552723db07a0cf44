"""Extras of the package: what to say where one is missing, and how to install it from where the user is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]  # of a clone, its root


def missing_package(what: str, package: str, extra: str) -> ModuleNotFoundError:
    """The error of something that needs a package which is not installed.

    >>> print(missing_package("A table", "polars", "report"))                                       # doctest: +ELLIPSIS
    A table needs polars: run pip install ...[report]'.
    """
    return ModuleNotFoundError(f"{what} needs {package}: run {install(extra)}.", name=package)


def install(extra: str) -> str:
    """The command that installs an extra: of this clone, if the package was imported from one, else of the wheel."""
    return f"pip install -e '{_relative(HERE)}[{extra}]'" if in_clone() else f"pip install 'cumulant[{extra}]'"


def in_clone() -> bool:
    """Whether the package lies in a clone of its repository."""
    return (HERE / "pyproject.toml").is_file() and (HERE / "setup.py").is_file()


def _relative(directory: Path) -> str:
    """A dot for the directory that the user is in, else the whole path."""
    with suppress(OSError):  # of a directory that was deleted
        if Path.cwd() == directory:
            return "."
    return str(directory)
