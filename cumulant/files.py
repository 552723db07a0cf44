"""Files that commands write: replaced in one step, or renewed between two marks; and what they depended on."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cumulant.checks import sentence

TEMPORARY = ".cumulant-tmp"  # how directories end in which a file is still being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new place for a file that takes the name ``path`` in the end: readers see the old bytes or the new ones.

    A failure leaves the old file and nothing beside it. The place is in a directory of its own, because some writers
    have temporary files too. A link is followed.
    """
    path = path.resolve()
    room = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY))
    try:
        yield room / path.name
        if path.exists():
            shutil.copymode(path, room / path.name)
        else:
            (room / path.name).chmod(0o644)
        os.replace(room / path.name, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(cannot_write(path, error)) from error
        raise
    finally:
        shutil.rmtree(room, ignore_errors=True)


def write(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, and a failure leaves the old."""
    with replacing(path) as room:
        room.write_text(text, encoding="utf-8")


def write_parquet(rows: Sequence[dict], path: Path) -> None:
    """A table, replaced in one step; an empty one has no columns."""
    try:
        import polars
    except ModuleNotFoundError:
        advice = "install cumulant[report]"
        raise ModuleNotFoundError(sentence("write_parquet", "polars", "no such package", advice)) from None
    table = polars.DataFrame(rows, infer_schema_length=None).fill_nan(None)
    with replacing(path) as room:
        try:
            table.write_parquet(room)
        except polars.exceptions.PolarsError as error:  # what a full disk becomes in its writer
            raise OSError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: Exception) -> str:
    """That a file could not be written, in one sentence: libraries have their own words and classes for a full disk."""
    got = " ".join(str(error).split()) or type(error).__name__
    return sentence(str(path), "room on the disk to write it", got.rstrip("."), "Make room, and run the command again.")


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
