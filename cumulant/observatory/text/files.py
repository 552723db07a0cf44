"""Files of text: paths of this machine and URIs of others, how large they are, what they hold, how they are opened.

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
from cumulant.extras import install

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

READ_AHEAD = 1 << 20  # bytes that are asked of another machine at once
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
SUFFIXES = {
    *(".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".css", ".csv", ".tsv", ".json", ".jsonl"),
    *(".log", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh", ".sql", ".py", ".pyi", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".js", ".ts", ".jl", ".r", ".rb", ".pl", ".lua", ".hs", ".ml"),
    *(".scala", ".swift", ".lean", ".v"),
}

Sources = str | Path | Iterable[str | Path]


class FileLocation(NamedTuple):
    """A file: its path or URI, its bytes, and whether it was named or only found in a directory."""

    path: str
    size: int
    named: bool


def find_files(where: str, source: str | Path, wanted: Callable[[str], bool]) -> list[FileLocation]:
    """The file that a path or URI names, or those of a directory whose names are ``wanted``: recursively and sorted.

    where  the argument that an error names

    Hidden and empty files of a directory are left out. A pipe is a file of size -1.
    """
    local = local_path(str(source))
    if local is None:
        files = _remote_files(where, str(source), wanted)
    elif source == "" or not _is_there(local):
        raise FileNotFoundError(_missing(where, str(source)))
    else:
        files = _local_files(local, wanted)
    if not files:
        advice = "Name files to read them whatever their suffix."
        kind = "WAV" if where == "plan.audio" else "text"
        raise ValueError(sentence(where, f"a directory with {kind} files", f"{source} with none", advice))
    return files


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a passage in the place of a path is longer than a name may be
        return False


def kind_of(path: str) -> str:
    """What a file holds, by its name: "jsonl", "parquet" or "text".

    >>> kind_of("a/B.JSONL.gz"), kind_of("s3://bucket/b.parquet?region=eu"), kind_of("c.json")
    ('jsonl', 'parquet', 'text')
    """
    if _ends(path, JSONL):
        return "jsonl"
    return "parquet" if _ends(path, (".parquet",)) else "text"


def compressed(path: str) -> bool:
    """Whether a file can only be read from its beginning."""
    return _ends(path, (".gz",))


def _ends(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a path, or a URI without its options, ends with one of the suffixes."""
    shorter = path.rpartition("?")[0] if "://" in path else ""
    return path.lower().endswith(suffixes) or shorter.lower().endswith(suffixes)


def local_path(source: str) -> Path | None:
    """The path of this machine that a path or a file:// URI stands for; None for other URIs.

    >>> local_path("file:///data/a%20b.txt").name, local_path("notes/a.txt").name, local_path("s3://bucket/a.txt")
    ('a b.txt', 'a.txt', None)
    """
    scheme, marks, _ = source.partition("://")
    if not marks or not scheme.replace("+", "").isalnum():
        return Path(source).expanduser()
    return Path(url2pathname(urlsplit(source).path)) if scheme.lower() == "file" else None


def open_file(path: str) -> io.BufferedReader:
    """The bytes of a file, seekable."""
    local = local_path(path)
    if local is not None:
        return local.open("rb")
    system, inner, _ = _file_system("plan.sources", path)
    stream: Any = system.open_input_file(inner)
    return io.BufferedReader(stream, READ_AHEAD)


def _local_files(path: Path, wanted: Callable[[str], bool]) -> list[FileLocation]:
    if not path.is_dir():
        return [FileLocation(str(path), path.stat().st_size if path.is_file() else -1, True)]
    files = (file for file in _walk(path) if wanted(file.name) and file.is_file())
    return [FileLocation(str(file), size, False) for file in files if (size := file.stat().st_size)]


def _walk(directory: Path) -> Iterator[Path]:
    """The files of a directory that are not hidden: sorted, those of a folder before those of its folders."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(files) if not name.startswith("."))


def _remote_files(where: str, uri: str, wanted: Callable[[str], bool]) -> list[FileLocation]:
    system, inner, quoted = _file_system(where, uri)
    from pyarrow.fs import FileSelector, FileType

    info = system.get_file_info(inner)
    if info.type == FileType.NotFound:
        raise FileNotFoundError(_missing(where, uri))
    if info.type != FileType.Directory:
        return [FileLocation(uri, _size(where, uri, info.size), True)]
    base, mark, rest = uri.partition("?")
    files = []
    for info in system.get_file_info(FileSelector(inner, recursive=True)):
        below = info.path.removeprefix(inner).strip("/")
        if info.type != FileType.File or not wanted(info.base_name) or _hidden(below.split("/")) or info.size == 0:
            continue
        path = f"{base.rstrip('/')}/{quote(below) if quoted else below}{mark}{rest}"
        files.append(FileLocation(path, _size(where, path, info.size), False))
    return sorted(files)


def _hidden(names: Iterable[str]) -> bool:
    return any(name.startswith(".") for name in names)


def _missing(where: str, source: str) -> str:
    passage = ", or a passage itself as prompts=['…']" if where == "plan.sources" else ""
    # of a long path the end names the file; a passage that was meant is known by its beginning
    shown = source if len(source) <= 80 else f"{source[:40]}…{source[-40:]}"
    advice = f"Give the path of a file or directory{passage}."
    return sentence(where, "a file or directory", f"no such path {shown!r}", advice)


def _size(where: str, path: str, size: int | None) -> int:
    if size is None:
        advice = "Fetch it to this machine first."
        raise ValueError(sentence(where, "a file of known size", f"{path} without one", advice))
    return size


def _file_system(where: str, uri: str) -> tuple[FileSystem, str, bool]:
    """The file system of a URI, the path in it, and whether its URIs write odd characters as %XX."""
    try:
        import pyarrow
        from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_install(where, uri, f"no {missing.name}")) from missing
    try:
        system, inner = FileSystem.from_uri(uri)
        return system, inner, not isinstance(system, PyFileSystem)
    except pyarrow.ArrowInvalid as error:  # fsspec takes odd characters as they are
        if not str(error).startswith(("Unrecognized filesystem", "Cannot parse URI")):
            raise ValueError(sentence(where, "a URI", f"{uri}: {error}", "Mend the URI.")) from error
    try:
        from fsspec.core import url_to_fs

        system, inner = url_to_fs(uri)
    except ImportError as missing:
        raise ModuleNotFoundError(_install(where, uri, str(missing))) from missing
    except ValueError as error:
        advice = "Use s3://, gs://, hf://, https:// or another that pyarrow or fsspec reads."
        raise ValueError(sentence(where, "a URI of a known kind", uri, advice)) from error
    return PyFileSystem(FSSpecHandler(system)), inner, False


def _install(where: str, uri: str, got: str) -> str:
    return sentence(where, f"what reads {uri}", got, f"Run {install('ray')}.")
