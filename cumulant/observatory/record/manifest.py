"""Which files of a directory are ours: manifest.json lists each that was written there, with the sha256 of its bytes.

Nothing else is replaced or deleted. A name is listed before its file is written, with null, and once more with its hash
afterwards, so that a process may be killed at any moment. What no manifest lists, or lists with null, is ours if its
contents say so: records from before there were manifests are known by the formats they name, tables by their columns,
and pages by their title. A file that has another hash than the listed one was changed by somebody and is theirs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from cumulant.checks import sentence
from cumulant.files import TEMPORARY, write

MANIFEST, FORMAT = "manifest.json", "cumulant manifest 1"
MOMENTS, RECORD = "moments.safetensors", "record.json"
TABLES, PAGE = ("heads.parquet", "layers.parquet", "tokens.parquet"), "report.html"
PARTS = "parts.parquet"  # only where texts have named parts
ABLATION = ("ablation.json", "ablation.parquet")
CAUSES = ("causes.json", "causes.parquet")
WRITTEN = (MOMENTS, RECORD, *TABLES, PARTS, PAGE, *ABLATION, *CAUSES)  # into the directory of a record
COLUMNS = {  # by which a table is known
    "heads.parquet": {"layer", "head", "name", "kind"},
    "layers.parquet": {"block", "stage", "role"},
    "tokens.parquet": {"position", "token", "layer", "head"},
    "parts.parquet": {"layer", "head", "source", "part", "mass"},
    "ablation.parquet": {"layer", "head", "damage", "can_go", "together"},
    "causes.parquet": {"layer", "head", "replacement", "measure", "effect"},
    "series.parquet": {"step", "layer", "stage", "quantity", "value"},
}
JSON_KEYS = {
    "ablation.json": {"rows", "heads", "threshold", "all_at_once"},
    "causes.json": {"rows", "baseline", "clustered_by", "reason"},
    "settings.json": {"text", "model", "max_tokens", "seed"},
}
SHARD = re.compile(r"\d{6,}-[0-9a-f]{16}|until-\d{6,}|\.new-\w+")
SHARD_FILES = {MOMENTS, RECORD, "shard.json"}
PLAN, ENDED = "plan.json", "ended.json"  # of the shards of a run that goes on, and of one that has ended

Listed = dict[str, str | None]


def listed(directory: Path) -> Listed:
    """The names that a manifest lists with the hashes of their files; {} if there is no manifest."""
    path = directory / MANIFEST
    if not _exists(path):
        return {}
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] == FORMAT and all(map(_entry, plain["files"], plain["files"].values())):
            return dict(plain["files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    got, advice = f"another file in {path}", "Move it away, or name another directory."
    raise ValueError(sentence("--out", f"a {FORMAT}", got, advice))


@contextmanager
def writing(directory: str | Path, *names: str) -> Iterator[None]:
    """Context of writing files into a directory: what is not ours is not replaced, and what is written is listed."""
    directory = Path(directory)
    require_ours(directory, names)
    files = listed(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        _sweep(directory / name)
    _write(directory, files | dict.fromkeys(names))
    yield
    _write(directory, files | {name: sha256(directory / name) for name in names if (directory / name).is_file()})


def require_ours(directory: Path, names: Iterable[str]) -> None:
    """Refuse a directory where one of these names stands for something that nobody but its owner may replace."""
    files = listed(directory)
    for name in names:
        if not is_ours(directory / name, files.get(name)):
            changed = "which has changed since it was written" if files.get(name) else "which cumulant did not write"
            advice = "Move it away, or name another directory."
            raise ValueError(
                sentence("--out", "a directory where nothing is lost", f"{directory / name}, {changed}", advice)
            )


def is_ours(path: Path, digest: str | None = None) -> bool:
    """Whether a file may be replaced: there is none, it has the listed hash, or without one its contents say so."""
    if not _exists(path):
        return True
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return sha256(path) == digest if digest else _has_our_contents(path)
    except OSError:
        return False


def is_record(directory: Path) -> bool:
    """Whether a directory holds a record of ours, a part of one, or the shards of a run."""
    try:
        known = bool(listed(directory))
    except ValueError:
        return False
    path, shards = directory / RECORD, directory / "shards"
    if known or (path.is_file() and is_ours(path)):
        return True
    # an empty shards/ is the beginning of a run only where nothing else is
    alone = all(entry == shards for entry in directory.iterdir())
    return _exists(shards) and own_shards(directory) and (alone or any(shards.iterdir()))


def remove(directory: Path, names: Iterable[str]) -> None:
    """Delete files that are ours, and the directory if nothing else is in it."""
    names = tuple(names)
    require_ours(directory, names)
    if not directory.is_dir():
        return
    left = {name: digest for name, digest in listed(directory).items() if name not in names}
    for name in names:
        (directory / name).unlink(missing_ok=True)
        _sweep(directory / name)
    if left:
        _write(directory, left)
    else:
        (directory / MANIFEST).unlink(missing_ok=True)
        _sweep(directory / MANIFEST)
    with suppress(OSError):  # others have files in it
        directory.rmdir()


# ---------------------------------------------------------------------- shards


def own_shards(directory: Path) -> bool:
    """Whether all that shards/ holds was put there by a run of ours; true if there is none.

    It is known by plan.json or ended.json, or, where plan.json is broken, by what the shards say of themselves.
    """
    shards = directory / "shards"
    if not _exists(shards):
        return True
    if shards.is_symlink() or not shards.is_dir():
        return False
    entries = list(shards.iterdir())
    marks = [path for path in entries if path.name in (PLAN, ENDED) and _plain_file(path)]
    marked = [path for path in marks if _format(path).startswith("cumulant shards ")]
    known = bool(marked) or any(_format(path / "shard.json").startswith("cumulant shards ") for path in entries)
    ours = {*marked, *(path for path in marks if path.name == PLAN)}
    rest = [path for path in entries if path not in ours and not is_shard(path) and not _is_unfinished(path)]
    return not rest and (known or all(path.name.startswith(".") for path in entries))


def is_shard(path: Path) -> bool:
    """Whether a path is the directory of a shard: by its name, and by the names of all that is in it."""
    if path.is_symlink() or not path.is_dir() or not SHARD.fullmatch(path.name):
        return False
    return all((_plain_file(p) and p.name in SHARD_FILES) or _temporary(p) for p in path.iterdir())


def delete_shards(directory: Path) -> None:
    """Delete the shards of a run, the file that says of which run they are last; others' files are refused."""
    shards = directory / "shards"
    if not own_shards(directory):
        got = f"{shards}, which holds other files"
        raise ValueError(sentence("--out", "a directory whose shards/ is free", got, "Name another directory."))
    for path in sorted(shards.iterdir(), key=lambda path: path.name in (PLAN, ENDED)) if shards.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sweep_shards(directory: Path) -> None:
    """Delete what a killed process had begun to write, and shards that it had begun to delete."""
    shards = directory / "shards"
    if not shards.is_dir() or shards.is_symlink():
        return
    for path in [*shards.iterdir()]:
        if (path.name.startswith(".new-") and is_shard(path)) or _is_unfinished(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (shards / ENDED).is_file() and not (shards / PLAN).exists() and own_shards(directory):
        delete_shards(directory)
        shards.rmdir()


def _is_unfinished(path: Path) -> bool:
    """Whether something in shards/ is a file that a killed process had begun to write."""
    return path.name.startswith((f".{PLAN}.", f".{ENDED}.")) and (_plain_file(path) or _temporary(path))


# ---------------------------------------------------------------------- files


def _write(directory: Path, files: Listed) -> None:
    plain = {"format": FORMAT, "files": dict(sorted(files.items()))}
    if not _exists(directory / MANIFEST) or listed(directory) != files:
        write(directory / MANIFEST, json.dumps(plain, indent=1) + "\n")


def _entry(name: object, digest: object) -> bool:
    """A relative path that stays in the directory, and a hash or null."""
    path = PurePosixPath(str(name))
    inside = isinstance(name, str) and bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and (digest is None or isinstance(digest, str))


def sha256(path: Path) -> str:
    """Of the bytes of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _exists(path: Path) -> bool:
    """Also true of a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def _plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _temporary(path: Path) -> bool:
    """Whether a path is a directory in which a file was being written."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY) and path.is_dir() and not path.is_symlink()


def _sweep(path: Path) -> None:
    """Delete what a killed process left of a file that it was writing."""
    for left in path.parent.glob(f".{path.name}.*{TEMPORARY}"):
        if _temporary(left):
            shutil.rmtree(left)


def _has_our_contents(path: Path) -> bool:
    """Whether the contents of a file are what we write under its name."""
    test = CONTENTS.get(path.name)
    try:
        return test is not None and test(path)
    except Exception:  # every format has its own ways to be something else
        return False


def _format(path: Path) -> str:
    """What the JSON of a file calls its format; empty if it does not."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["format"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _is_record_json(path: Path) -> bool:
    return _format(path).startswith("cumulant record ")


def _is_moments(path: Path) -> bool:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("format", "").startswith("cumulant record ")


def _is_table(path: Path) -> bool:
    import polars

    columns = set(polars.read_parquet_schema(path))
    return not columns or columns >= COLUMNS[path.name]


def _is_page(path: Path) -> bool:
    return b"cumulant observatory</title>" in path.read_bytes()[: 1 << 16]


def _has_keys(path: Path) -> bool:
    return json.loads(path.read_text(encoding="utf-8")).keys() >= JSON_KEYS[path.name]


CONTENTS: dict[str, Callable[[Path], bool]] = {
    RECORD: _is_record_json,
    MOMENTS: _is_moments,
    PAGE: _is_page,
    **dict.fromkeys(JSON_KEYS, _has_keys),
    **dict.fromkeys(COLUMNS, _is_table),
}
