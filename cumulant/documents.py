"""Files that commands write: replaced in one step, or renewed between two marks."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


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
