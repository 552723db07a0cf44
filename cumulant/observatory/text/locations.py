"""Where files are: paths of this machine and URIs of others, how large they are, and how they are opened.

URIs go through pyarrow's file systems, and through fsspec where pyarrow knows none.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from cumulant.checks import sentence

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

BUFFER = 1 << 20  # bytes that are asked of another machine at once


class Place(NamedTuple):
    """A file: its path or URI, its bytes, and whether it was named or only found in a directory."""

    path: str
    size: int
    named: bool


def places(source: str | Path, wanted: Callable[[str], bool]) -> list[Place]:
    """The file that a path or URI names, or those of a directory whose names are ``wanted``: recursively and sorted.

    Hidden and empty files of a directory are left out.
    """
    local = local_path(str(source))
    found = _here(local, str(source), wanted) if local is not None else _elsewhere(str(source), wanted)
    if not found:
        advice = "Name files to read them whatever their suffix."
        raise ValueError(sentence("plan.sources", "a directory with text files", f"{source} with none", advice))
    return found


def local_path(source: str) -> Path | None:
    """The path of this machine that a path or a file:// URI stands for; None for other URIs.

    >>> local_path("file:///data/a%20b.txt").name, local_path("notes/a.txt").name, local_path("s3://bucket/a.txt")
    ('a b.txt', 'a.txt', None)
    """
    scheme, marks, _ = source.partition("://")
    if not marks or not scheme.replace("+", "").isalnum():
        return Path(source).expanduser()
    return Path(url2pathname(urlsplit(source).path)) if scheme.lower() == "file" else None


def opened(path: str) -> io.BufferedReader:
    """The bytes of a file, to be read from any place in it."""
    local = local_path(path)
    if local is not None:
        return local.open("rb")
    system, inner, _ = _system(path)
    stream: Any = system.open_input_file(inner)
    return io.BufferedReader(stream, BUFFER)


def _here(path: Path, source: str, wanted: Callable[[str], bool]) -> list[Place]:
    if source == "" or not path.exists():
        raise FileNotFoundError(_missing(source))
    if path.is_file():
        return [Place(str(path), path.stat().st_size, True)]
    if not path.is_dir():
        advice = "Pipe it in: --text -."
        raise ValueError(sentence("plan.sources", "files, which can be read twice", f"the pipe {source}", advice))
    inside = (file for file in walk(path) if wanted(file.name) and file.is_file())
    sized = [Place(str(file), file.stat().st_size, False) for file in inside]
    return [place for place in sized if place.size]


def walk(directory: Path) -> Iterator[Path]:
    """What is in a directory and not hidden: sorted, files before the directories beside them."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(files) if not name.startswith("."))


def _elsewhere(uri: str, wanted: Callable[[str], bool]) -> list[Place]:
    system, inner, quoted = _system(uri)
    from pyarrow.fs import FileSelector, FileType

    info = system.get_file_info(inner)
    if info.type == FileType.NotFound:
        raise FileNotFoundError(_missing(uri))
    if info.type != FileType.Directory:
        return [Place(uri, _size(uri, info.size), True)]
    base, mark, rest = uri.partition("?")
    found = []
    for info in system.get_file_info(FileSelector(inner, recursive=True)):
        below = info.path.removeprefix(inner).strip("/")
        if info.type != FileType.File or not wanted(info.base_name) or _hidden(below.split("/")) or info.size == 0:
            continue
        path = f"{base.rstrip('/')}/{quote(below) if quoted else below}{mark}{rest}"
        found.append(Place(path, _size(path, info.size), False))
    return sorted(found)


def _hidden(names: Iterable[str]) -> bool:
    return any(name.startswith(".") for name in names)


def _missing(source: str) -> str:
    advice = "Give the path of a file or directory."
    return sentence("plan.sources", "a file or directory", f"no such path {source!r}", advice)


def _size(path: str, size: int | None) -> int:
    if size is None:
        advice = "Fetch it to this machine first."
        raise ValueError(sentence("plan.sources", "a file of known size", f"{path} without one", advice))
    return size


def _system(uri: str) -> tuple[FileSystem, str, bool]:
    """The file system of a URI, the path in it, and whether its URIs write odd characters as %XX."""
    try:
        import pyarrow
        from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_install(uri, f"no {missing.name}")) from missing
    try:
        system, inner = FileSystem.from_uri(uri)
        return system, inner, not isinstance(system, PyFileSystem)
    except pyarrow.ArrowInvalid as error:  # fsspec takes odd characters as they are
        if not str(error).startswith(("Unrecognized filesystem", "Cannot parse URI")):
            raise ValueError(sentence("plan.sources", "a URI", f"{uri}: {error}", "Mend the URI.")) from error
    try:
        from fsspec.core import url_to_fs

        system, inner = url_to_fs(uri)
    except ImportError as missing:
        raise ModuleNotFoundError(_install(uri, str(missing))) from missing
    except ValueError as error:
        advice = "Use s3://, gs://, hf://, https:// or another that pyarrow or fsspec reads."
        raise ValueError(sentence("plan.sources", "a URI of a known kind", uri, advice)) from error
    return PyFileSystem(FSSpecHandler(system)), inner, False


def _install(uri: str, got: str) -> str:
    return sentence("plan.sources", f"what reads {uri}", got, "Install cumulant[ray].")
