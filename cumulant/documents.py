"""Files that commands write: replaced in one step, or renewed between two marks; and what they depended on."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cumulant.checks import sentence


def write(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, and a failure leaves the old."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, name)
        else:
            Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_parquet(rows: Sequence[dict], path: Path) -> None:
    """A table, replaced in one step; an empty one has no columns."""
    try:
        import polars
    except ModuleNotFoundError:
        advice = "install cumulant[report]"
        raise ModuleNotFoundError(sentence("write_parquet", "polars", "no such package", advice)) from None
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        polars.DataFrame(rows, infer_schema_length=None).fill_nan(None).write_parquet(name)
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def versions(*packages: str) -> dict[str, str]:
    """What a result depends on: the versions of Python, cumulant and these packages."""
    found = {"python": platform.python_version()}
    for name in ("cumulant", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def insert(text: str, mark: str, part: str) -> str:
    """``text`` with ``part`` between the marks that carry this name.

    >>> insert("a <!-- bench:start --> old <!-- bench:end --> b", "bench", "new")
    'a <!-- bench:start -->\\nnew\\n<!-- bench:end --> b'
    """
    start, end = f"<!-- {mark}:start -->", f"<!-- {mark}:end -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(
            f"expected the marks {start} and {end}, in this order, got none. Add them where the text goes."
        )
    return f"{before}{start}\n{part.strip()}\n{end}{after}"


def markdown_row(cells) -> str:
    """
    >>> markdown_row(["a", "b|c"])
    '| a | b\\\\|c |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
