"""Finished shards on disk, from which a run that was stopped is resumed.

A directory holds them under shards/: plan.json describes the run; ORDINAL-KEY holds one shard, named by what its record
depends on; until-N holds the first N merged, so that a long run needs no more room than a short one. Each of these
appears in one step, when all of it is on the disk: a process may be killed at any moment. When the run has ended
plan.json becomes ended.json, and what carries these names is deleted; other files are neither read nor deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cumulant.checks import sentence
from cumulant.files import new_directory, sync, write
from cumulant.observatory.record.manifest import (
    ENDED,
    PLAN,
    delete_shards,
    is_shard,
    own_shards,
    sweep_shards,
)
from cumulant.observatory.record.meta import few_tokens_notes
from cumulant.observatory.record.record import UNREADABLE, Record, claim_directory, require_replaceable
from cumulant.observatory.runs.observe import ShardObservation, shard_key
from cumulant.observatory.runs.settings import (
    FORMAT,
    ObservationSettings,
    describe_run,
    description_hash,
    difference,
)
from cumulant.observatory.text.corpus import Corpus, UnreadableDocument, hash_of

MERGED_SHARDS = 4  # in a row become one directory; the record of a large model has hundreds of megabytes
LISTED_DOCUMENTS = 100  # unreadable documents that are listed; all are counted
START_ANEW = "Undo the change, name a new --out, or pass --force to start anew."


class FinishedShard(NamedTuple):
    """A shard that is done: its key, the hash of its text, its counts, and the first unreadable documents in it."""

    ordinal: int
    key: str
    text_hash: str
    tokens: int
    sequences: int
    skipped: int
    unreadable: int
    documents: tuple[UnreadableDocument, ...]

    @classmethod
    def of(cls, plain: dict) -> FinishedShard:
        """The shard that `_asdict` gave, from JSON; ValueError if it is something else."""
        shard = cls(**{name: plain[name] for name in cls._fields})
        counts = (shard.ordinal, shard.tokens, shard.sequences, shard.skipped, shard.unreadable)
        if not all(type(n) is int and n >= 0 for n in counts) or not isinstance(shard.key + shard.text_hash, str):
            raise ValueError(plain)
        return shard._replace(documents=tuple(UnreadableDocument(*d) for d in plain["documents"]))

    @property
    def directory_name(self) -> str:
        return f"{self.ordinal:06d}-{self.key[:16]}"


@dataclass
class Store:
    """The finished shards of one run. Made by `Store.open`.

    done    ordinal → `FinishedShard`
    notes   sentences to print: shards that could not be read and have to be observed again
    record  of a run that was finished before, else None
    plan    sha256 of the description of the run
    """

    directory: Path
    corpus: Corpus
    settings: ObservationSettings
    fingerprint: str
    max_tokens: int | None
    plan: str
    done: dict[int, FinishedShard] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    record: Record | None = None
    merged_until: int = 0
    lock_handle: int | None = None
    new: bool = False  # begun here, and not by an earlier process
    created: list[Path] = field(default_factory=list)  # directories that were not there before

    @classmethod
    def open(
        cls,
        directory: str | Path,
        corpus: Corpus,
        settings: ObservationSettings,
        fingerprint: str,
        max_tokens: int | None,
        *,
        resume: bool = False,
        force: bool = False,
    ) -> Store:
        """Begin a run in a directory, or resume the one that is there.

        resume  a run of other texts, of another model or with other settings is refused, by what differs; in a new or
                empty directory a run begins
        force   begin although there is something in the directory; shards in it are deleted
        """
        directory = Path(directory)
        description = describe_run(corpus, settings, fingerprint, max_tokens)
        store = cls(directory, corpus, settings, fingerprint, max_tokens, description_hash(description))
        begun = (store.shards / PLAN).is_file()
        if not resume:
            claim_directory(directory, force)
        elif not begun:
            store.record = _finished_record(directory, corpus, store.plan)
            if store.record is not None:
                sweep_shards(directory)
                return store
        if resume:
            require_replaceable(directory)
        store.created = [path for path in (*store.shards.parents, store.shards) if not path.exists()]
        store.shards.mkdir(parents=True, exist_ok=True)
        store._lock()
        try:
            store._begin(description, anew=not (resume and begun))
        except BaseException:
            store.abandon()
            raise
        return store

    @property
    def shards(self) -> Path:
        return self.directory / "shards"

    @property
    def tokens(self) -> int:
        """Of all finished shards."""
        return sum(shard.tokens for shard in self.done.values())

    def put(self, ordinal: int, observed: ShardObservation, budget: int | None) -> None:
        """Write a shard to the disk, as a whole or not at all. A second time changes nothing."""
        if ordinal in self.done:
            return
        key = shard_key(observed.text_hash, self.fingerprint, self.settings, budget, self.corpus.column)
        shard = _finished(ordinal, key, observed)
        self._write(shard.directory_name, observed.record, shard._asdict())
        self.done[ordinal] = shard
        following = self._following()
        if len(following) >= MERGED_SHARDS:
            self._merge_first(following)

    def check(self, ordinal: int, text_hash: str) -> None:
        """Refuse a finished shard whose text has another hash now."""
        before = self.done[ordinal].text_hash
        if text_hash != before:
            got = f"another (sha256 {before[:12]}… before, {text_hash[:12]}… now)"
            raise ValueError(
                sentence("--resume", f"the text that shard {self.shard_name(ordinal)} had", got, START_ANEW)
            )

    def shard_name(self, ordinal: int) -> str:
        """The ordinal of a shard and its files."""
        paths = list(dict.fromkeys(part.path for part in self.corpus.shards[ordinal].ranges))
        return f"{ordinal} ({paths[0]}{f' … {paths[-1]}' if len(paths) > 1 else ''})"

    def merged(self, *, complete: bool = True, partial: ShardObservation | None = None) -> Record:
        """The record of all finished shards, merged in their order: the same whatever the order they were observed in.

        complete  whether this is all that was to be read
        partial   a shard that was interrupted, whose record goes in at the end
        """
        done = [self.done[ordinal] for ordinal in sorted(self.done)]
        record = _merged_record(self._directories([shard.ordinal for shard in done]))
        if partial is not None:
            done.append(_finished(len(done), "", partial))
            record = partial.record if record is None or partial.record is None else record.merge(partial.record)
        documents = [document for shard in done for document in shard.documents]
        unreadable, skipped = sum(shard.unreadable for shard in done), sum(shard.skipped for shard in done)
        if record is None:
            raise ValueError(_no_tokens(unreadable, documents, skipped))
        meta = replace(
            record.meta,
            model=self.settings.model,
            notes=(*record.meta.notes, *few_tokens_notes(record.meta.tokens)),
            skipped=skipped,
            unreadable=unreadable,
            unreadable_documents=tuple(d._asdict() for d in documents[:LISTED_DOCUMENTS]),
            shards=len(done),
            text_hash=_hash_of_all(shard.text_hash for shard in done),
            plan=self.plan,
            complete=complete,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return replace(record, meta=meta)

    def clear(self) -> None:
        """Delete the shards when the record of the run is on the disk: first mark the run as ended, then delete."""
        if (self.shards / PLAN).is_file():
            os.replace(self.shards / PLAN, self.shards / ENDED)
            sweep_shards(self.directory)
        self.close()

    def abandon(self) -> None:
        """Delete a run that failed before a shard was finished, so that the corrected command can begin."""
        if self.new and not self.done and own_shards(self.directory):
            delete_shards(self.directory)
            with suppress(OSError):  # what was there before stays
                self.shards.rmdir()
                for path in sorted(self.created, key=lambda path: -len(path.parts)):
                    if path != self.shards:
                        path.rmdir()
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory; the shards in it stay."""
        if self.lock_handle is not None:
            os.close(self.lock_handle)
            self.lock_handle = None

    def _begin(self, description: dict, *, anew: bool) -> None:
        if anew:
            delete_shards(self.directory)
            self.new = True
            write(self.shards / PLAN, json.dumps(description, indent=1) + "\n")
            sync(self.shards / PLAN)
        else:
            _require_same_run(self.directory, description)
        self._read_all()

    def _directories(self, ordinals: list[int]) -> list[Path]:
        """The directories of these shards, after that of the shards that are merged."""
        first = [self.shards / f"until-{self.merged_until:06d}"] if self.merged_until else []
        single = [self.done[ordinal] for ordinal in ordinals if ordinal >= self.merged_until]
        return first + [self.shards / shard.directory_name for shard in single]

    def _following(self) -> list[int]:
        """The finished shards that follow the merged ones without a gap."""
        following = []
        while self.merged_until + len(following) in self.done:
            following.append(self.merged_until + len(following))
        return following

    def _merge_first(self, following: list[int]) -> None:
        until, directories = following[-1] + 1, self._directories(following)
        record = _merged_record(directories)
        self._write(f"until-{until:06d}", record, {"shards": [self.done[i]._asdict() for i in range(until)]})
        self.merged_until = until
        for directory in directories:
            shutil.rmtree(directory)

    def _write(self, name: str, record: Record | None, contents: dict) -> None:
        with new_directory(self.shards / name, durable=True, prefix=".new-") as draft:
            if record is not None:
                record.save(draft, exact=True, listed=False)
            write(draft / "shard.json", json.dumps({"format": FORMAT, **contents}) + "\n")

    def _read_all(self) -> None:
        """Read the shards on the disk; delete those that were not finished or cannot be read."""
        sweep_shards(self.directory)
        directories = [path for path in sorted(self.shards.iterdir()) if is_shard(path)]
        for directory in reversed([path for path in directories if path.name.startswith("until-")]):
            contents = self._read(directory)
            if contents is not None and not self.merged_until:
                shards = [FinishedShard.of(plain) for plain in contents["shards"]]
                self.done, self.merged_until = {shard.ordinal: shard for shard in shards}, len(shards)
            else:
                shutil.rmtree(directory)
        for directory in (path for path in directories if not path.name.startswith("until-")):
            contents = self._read(directory)
            if contents is None or contents["ordinal"] < self.merged_until:
                shutil.rmtree(directory)
            else:
                self.done[contents["ordinal"]] = FinishedShard.of(contents)

    def _read(self, directory: Path) -> dict | None:
        """The shard.json of a directory; None, and a note, if the shard cannot be read."""
        try:
            contents = json.loads((directory / "shard.json").read_text(encoding="utf-8"))
            if contents.pop("format") != FORMAT:
                raise ValueError(FORMAT)
            shards = [FinishedShard.of(plain) for plain in contents.get("shards", [contents])]
            ordinals = [shard.ordinal for shard in shards]
            name = f"until-{len(shards):06d}" if "shards" in contents else shards[0].directory_name
            if directory.name != name or ("shards" in contents and ordinals != [*range(len(shards))]):
                raise ValueError(name)
            if max(ordinals) >= len(self.corpus.shards):
                raise ValueError(ordinals)
            if any(shard.tokens for shard in shards):
                Record.load(directory)
            return contents
        except UNREADABLE:
            several = directory.name.startswith("until")
            ordinal = directory.name.split("-")[1 if several else 0].lstrip("0") or "0"
            what = f"the shards before {ordinal}" if several else f"shard {ordinal}"
            self.notes.append(f"{what} could not be read from {directory}: observed again")
            return None

    def _lock(self) -> None:
        """Keep other processes out; the system releases the lock when this one ends, in whatever way."""
        try:
            import fcntl
        except ModuleNotFoundError:  # not on Windows
            return
        self.lock_handle = os.open(self.shards, os.O_RDONLY)
        try:
            fcntl.flock(self.lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            got = f"{self.directory}, in which another is at work"
            raise ValueError(
                sentence("--out", "a directory with no running observation", got, "Wait for it to end.")
            ) from None


def _require_same_run(directory: Path, description: dict) -> None:
    """Refuse to resume the run in a directory if it is not the described one, and say what differs."""
    try:
        before = json.loads((directory / "shards" / PLAN).read_text(encoding="utf-8"))
        what = difference(before, description)
    except UNREADABLE:
        what = f"one whose {PLAN} cannot be read"
    if what is not None:
        raise ValueError(sentence("--resume", f"the run that was begun in {directory}", what, START_ANEW))


def _finished_record(directory: Path, corpus: Corpus, plan: str) -> Record | None:
    """The record of a run of this plan that has ended in a directory; None if the directory is empty.

    Anything else is refused: a record of another run, another text under the same names, other files.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another place."))
    contents = [path for path in directory.iterdir() if not _unfinished_shards(path)] if directory.is_dir() else []
    if not contents:
        return None
    expected = "a directory with a run to go on with, or an empty one"
    if not (directory / "record.json").is_file():
        raise ValueError(sentence("--resume", expected, f"{directory}, one that holds other files", "Name another."))
    record = Record.load(directory)
    if record.meta.plan != plan or not record.meta.complete:
        got = f"{directory}, which holds the record of another run"
        raise ValueError(sentence("--resume", expected, got, START_ANEW))
    hashes = (hash_of(shard, corpus.column) for shard in corpus.shards[: record.meta.shards])
    if _hash_of_all(hashes) != record.meta.text_hash:
        raise ValueError(sentence("--resume", f"the text that {directory} was made of", "another", START_ANEW))
    return record


def _unfinished_shards(path: Path) -> bool:
    """Whether a path is the shards/ of a run that was killed while it made or deleted them."""
    return path.name == "shards" and own_shards(path.parent) and not (path / PLAN).exists()


def _hash_of_all(hashes: Iterable[str]) -> str:
    """sha256 over the hashes of shards, in their order."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _merged_record(directories: list[Path]) -> Record | None:
    """The records of directories merged in their order, two in memory at a time; None if there is none."""
    record = None
    for directory in directories:
        if (directory / "record.json").is_file():
            part = Record.load(directory)
            record = part if record is None else record.merge(part)
    return record


def _finished(ordinal: int, key: str, observed: ShardObservation) -> FinishedShard:
    counts = observed.tokens, observed.sequences, observed.skipped, len(observed.unreadable)
    return FinishedShard(ordinal, key, observed.text_hash, *counts, observed.unreadable[:LISTED_DOCUMENTS])


def _no_tokens(unreadable: int, documents: list[UnreadableDocument], skipped: int) -> str:
    parts = [f"{unreadable} unreadable ({documents[0].name}: {documents[0].reason})"] if documents else []
    parts += [f"{skipped} without one"] if skipped or not documents else []
    return sentence("observe.texts", "a text of at least one token", " and ".join(parts), "Give other texts.")
