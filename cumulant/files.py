"""Files and directories that commands write: replaced in one step, or renewed between two marks; and versions."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from cumulant.checks import sentence
from cumulant.extras import missing_package

if TYPE_CHECKING:
    from polars import DataFrame

TEMPORARY = ".cumulant-tmp"  # how directories end in which a file is still being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write that is renamed to ``path`` at the end: readers see the old bytes or the new ones.

    A failure leaves the old file and nothing beside it. The path is in a temporary directory of its own, because some
    writers have temporary files too. A link is followed.
    """
    path = path.resolve()
    directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY))
    draft = directory / path.name
    try:
        yield draft
        if path.exists():
            shutil.copymode(path, draft)
        else:
            draft.chmod(0o644)
        os.replace(draft, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(cannot_write(path, error)) from error
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def new_directory(
    path: Path, *, overwrite: bool = False, durable: bool = False, prefix: str | None = None
) -> Iterator[Path]:
    """A directory to fill that is renamed to ``path`` at the end: it is there with all its files or not at all.

    overwrite  replace a directory that is there, which comes back if the renaming fails; without it one that is not
               empty is an OSError
    durable    wait until files and names are on the disk
    prefix     how the temporary name beside ``path`` begins; ".NAME." if None

    A failure leaves no temporary directory.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix or f".{path.name}."))
    try:
        draft.chmod(0o755)
        yield draft
        for file in (*draft.iterdir(), draft) if durable else ():
            sync(file)
        if overwrite and path.exists():
            _swap(draft, path)
        else:
            draft.replace(path)
        if durable:
            sync(path.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _swap(draft: Path, path: Path) -> None:
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    path.replace(old)
    try:
        draft.replace(path)
    except BaseException:
        old.replace(path)
        raise
    shutil.rmtree(old)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, and a failure leaves the old."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def data_frame(rows: Sequence[dict], columns: Mapping[str, type] | None = None) -> DataFrame:
    """Rows as a polars DataFrame, what is not known (NaN) as null.

    columns  name → type, for a table that may be empty; else an empty one has no columns
    """
    try:
        import polars
    except ModuleNotFoundError:
        raise missing_package("A table", "polars", "report") from None
    return polars.DataFrame(rows, schema=columns, infer_schema_length=None).fill_nan(None)


def write_parquet(
    rows: Sequence[dict],
    path: Path,
    columns: Mapping[str, type] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """`data_frame` in a file, with strings by name in its metadata, replaced in one step."""
    table = data_frame(rows, columns)
    import polars

    with replacing(path) as draft:
        try:
            table.write_parquet(draft, metadata=metadata)
        except polars.exceptions.PolarsError as error:  # what a full disk becomes in its writer
            raise OSError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: Exception) -> str:
    """The sentence for a file that could not be written; libraries have words and classes of their own for it."""
    got = " ".join(str(error).split()) or type(error).__name__
    return sentence(str(path), "room on the disk to write it", got.rstrip("."), "Make room, and run the command again.")


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python, cumulant and these packages, on which a result depends."""
    by_name = {"python": platform.python_version()}
    for name in ("cumulant", *packages):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def insert(text: str, mark: str, part: str) -> str:
    """``text`` with ``part`` between the marks that carry this name.

    >>> insert("a <!-- bench:start --> old <!-- bench:end --> b", "bench", "new")
    'a <!-- bench:start -->\\nnew\\n<!-- bench:end --> b'
    """
    start, end = f"<!-- {mark}:start -->", f"<!-- {mark}:end -->"
    before, opening, rest = text.partition(start)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(
            f"expected the marks {start} and {end}, in this order, got none. Add them where the text goes."
        )
    return f"{before}{start}\n{part.strip()}\n{end}{after}"


def markdown_row(cells) -> str:
    """A row of a Markdown table.

    >>> markdown_row(["a", "b|c"])
    '| a | b\\\\|c |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
