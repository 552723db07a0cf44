"""Of what run the shards in a directory are: texts, model and settings; and what has changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from cumulant.checks import sentence
from cumulant.files import versions
from cumulant.observatory.record.manifest import PLAN, own_shards
from cumulant.observatory.record.record import UNREADABLE, Record
from cumulant.observatory.runs.shards import Job
from cumulant.observatory.text.corpus import Corpus, hash_of

FORMAT = "cumulant shards 2"
AGAIN = "Undo the change, name a new --out, or pass --force to start anew."


def plan_of(corpus: Corpus, job: Job, fingerprint: str, max_tokens: int | None) -> dict:
    """All that a run depends on, but for the contents of its files, as what JSON can say."""
    told = versions("torch", "transformers", "tokenizers")
    return {
        "format": FORMAT,
        "column": corpus.column,
        "files": [[str(path), size] for path, size in corpus.files],
        "shards": len(corpus.shards),
        "corpus": corpus.identity(),
        "fingerprint": fingerprint,
        "settings": json.loads(json.dumps(job._asdict() | {"max_tokens": max_tokens})),
        "versions": {name: version for name, version in told.items() if name != "python"},
    }


def identity(plan: dict) -> str:
    """sha256 of a plan."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def hash_of_all(hashes: Iterable[str]) -> str:
    """One hash for those of shards, in their order."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def require_same(directory: Path, plan: dict) -> None:
    """Refuse to go on with the run in a directory if it is not the planned one, and say what differs."""
    try:
        before = json.loads((directory / "shards" / "plan.json").read_text(encoding="utf-8"))
        what = changed(before, plan)
    except UNREADABLE:
        what = "one whose plan.json cannot be read"
    if what is not None:
        raise ValueError(sentence("--resume", f"the run that was begun in {directory}", what, AGAIN))


def changed(before: dict, now: dict) -> str | None:
    """The first difference of two plans in words, with both values; None if they agree.

    >>> base = {"format": FORMAT, "column": None, "files": [["a.txt", 3]], "shards": 1, "corpus": "", "fingerprint": ""}
    >>> changed(base, base | {"files": [["a.txt", 4]]})
    'another size of a.txt (3 bytes before, 4 now)'
    """
    if before["format"] != now["format"]:
        return f"another format ({before['format']} before, {now['format']} now)"
    if before["column"] != now["column"]:
        return _both("another --column", before["column"], now["column"])
    if before["files"] != now["files"]:
        return _files(before["files"], now["files"])
    if before["corpus"] != now["corpus"]:
        return _both("other borders of shards, as of another --shard-bytes", before["shards"], now["shards"])
    if before["fingerprint"] != now["fingerprint"]:
        return _both("other weights", f"sha256 {before['fingerprint'][:12]}…", f"sha256 {now['fingerprint'][:12]}…")
    for part, words in (("settings", "another --"), ("versions", "another version of ")):
        ours, theirs = before.get(part, {}), now.get(part, {})
        for name in dict.fromkeys((*theirs, *ours)):
            if ours.get(name) != theirs.get(name):
                shown = name.replace("_", "-") if part == "settings" else name
                return _both(words + shown, ours.get(name), theirs.get(name))
    return None


def finished_record(directory: Path, corpus: Corpus, plan: str) -> Record | None:
    """The record of a run of this plan that has ended in a directory; None if the directory is empty.

    Anything else is refused: a record of another run, another text under the same names, other files.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another place."))
    held = [path for path in directory.iterdir() if not _left_over(path)] if directory.is_dir() else []
    if not held:
        return None
    expected = "a directory with a run to go on with, or an empty one"
    if not (directory / "record.json").is_file():
        raise ValueError(sentence("--resume", expected, f"{directory}, one that holds other files", "Name another."))
    record = Record.load(directory)
    if record.meta.plan != plan or not record.meta.complete:
        got = f"{directory}, which holds the record of another run"
        raise ValueError(sentence("--resume", expected, got, AGAIN))
    hashes = (hash_of(shard, corpus.column) for shard in corpus.shards[: record.meta.shards])
    if hash_of_all(hashes) != record.meta.text_hash:
        raise ValueError(sentence("--resume", f"the text that {directory} was made of", "another", AGAIN))
    return record


def _left_over(path: Path) -> bool:
    """Whether it is of a run that was killed when it had begun to make or to delete its shards."""
    return path.name == "shards" and own_shards(path.parent) and not (path / PLAN).exists()


def _both(what: str, before: object, now: object) -> str:
    shown = ["none" if value is None else value for value in (before, now)]
    return f"{what} ({shown[0]} before, {shown[1]} now)"


def _files(before: list, now: list) -> str:
    old, new = dict(map(tuple, before)), dict(map(tuple, now))
    for path, size in new.items():
        if path not in old:
            return f"one more file, {path} ({len(old)} before, {len(new)} now)"
        if old[path] != size:
            return f"another size of {path} ({old[path]} bytes before, {size} now)"
    for path in old:
        if path not in new:
            return f"one file less, {path} ({len(old)} before, {len(new)} now)"
    return "the same files in another order"
