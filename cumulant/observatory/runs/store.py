"""Shards that are finished, on disk: what a run that was stopped goes on from.

A directory holds them under shards/: plan.json says of what run they are; ORDINAL-KEY holds one shard, named by what
its record depends on; until-N holds the first N merged, so that a long run needs no more room than a short one. Each of
these appears in one step, when all of it is on the disk: a process may be killed at any moment. When the run has ended
plan.json becomes ended.json, and what carries these names is deleted; other files are neither read nor deleted.
"""

from __future__ import annotations

import json
import os
import shutil
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
    own_shards,
    shard_place,
    sweep_shards,
)
from cumulant.observatory.record.record import UNREADABLE, Record, claim_directory, require_replaceable
from cumulant.observatory.runs.observe import small
from cumulant.observatory.runs.plan import AGAIN, FORMAT, finished_record, hash_of_all, identity, plan_of, require_same
from cumulant.observatory.runs.shards import Job, Observed, key_of
from cumulant.observatory.text.corpus import Corpus, UnreadableDocument

LOOSE = 4  # shards in a row that are merged into one place; the record of a large model has hundreds of megabytes
LISTED = 100  # spoiled documents that are listed; all are counted


class Finished(NamedTuple):
    """A shard that is done: its key, the hash of its text, its counts, and the first spoiled documents in it."""

    ordinal: int
    key: str
    text_hash: str
    tokens: int
    sequences: int
    skipped: int
    spoiled: int
    documents: tuple[UnreadableDocument, ...]

    @classmethod
    def of(cls, plain: dict) -> Finished:
        """What `_asdict` gave, from JSON; ValueError if it is something else."""
        known = cls(**{name: plain[name] for name in cls._fields})
        counts = (known.ordinal, known.tokens, known.sequences, known.skipped, known.spoiled)
        if not all(type(n) is int and n >= 0 for n in counts) or not isinstance(known.key + known.text_hash, str):
            raise ValueError(plain)
        return known._replace(documents=tuple(UnreadableDocument(*d) for d in plain["documents"]))

    @property
    def place(self) -> str:
        return f"{self.ordinal:06d}-{self.key[:16]}"


@dataclass
class Store:
    """The finished shards of one run. Made by `Store.open`.

    done    ordinal → `Finished`
    notes   sentences to show: shards that could not be read and have to be observed again
    record  of a run that was finished before, else None
    """

    directory: Path
    corpus: Corpus
    job: Job
    fingerprint: str
    max_tokens: int | None
    plan: str
    done: dict[int, Finished] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    record: Record | None = None
    merged_until: int = 0
    lock: int | None = None
    new: bool = False  # begun here, and not by an earlier process
    created: list[Path] = field(default_factory=list)  # directories that were not there before

    @classmethod
    def open(
        cls,
        directory: str | Path,
        corpus: Corpus,
        job: Job,
        fingerprint: str,
        max_tokens: int | None,
        *,
        resume: bool = False,
        force: bool = False,
    ) -> Store:
        """Begin a run in a directory, or go on with the one that is there.

        resume  go on: a run of other texts, of another model or with other settings is refused, by what differs. In a
                new or empty directory this is a beginning
        force   begin although there is something in the directory; shards in it are deleted
        """
        directory = Path(directory)
        plan = plan_of(corpus, job, fingerprint, max_tokens)
        store = cls(directory, corpus, job, fingerprint, max_tokens, identity(plan))
        begun = (store.shards / PLAN).is_file()
        if not resume:
            claim_directory(directory, force)
        elif not begun:
            store.record = finished_record(directory, corpus, store.plan)
            if store.record is not None:
                sweep_shards(directory)
                return store
        if resume:
            require_replaceable(directory)
        store.created = [path for path in (*store.shards.parents, store.shards) if not path.exists()]
        store.shards.mkdir(parents=True, exist_ok=True)
        store._take()
        try:
            store._begin(plan, anew=not (resume and begun))
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
        return sum(finished.tokens for finished in self.done.values())

    def keep(self, ordinal: int, observed: Observed, budget: int | None) -> None:
        """Put what a shard gave on the disk; it is there as a whole or not at all. A second time changes nothing."""
        if ordinal in self.done:
            return
        key = key_of(observed.text_hash, self.fingerprint, self.job, budget, self.corpus.column)
        finished = _of(ordinal, key, observed)
        self._put(finished.place, observed.record, finished._asdict())
        self.done[ordinal] = finished
        row = self._row()
        if len(row) >= LOOSE:
            self._fold(row)

    def check(self, ordinal: int, text_hash: str) -> None:
        """Refuse a finished shard whose text has another hash now."""
        before = self.done[ordinal].text_hash
        if text_hash != before:
            got = f"another (sha256 {before[:12]}… before, {text_hash[:12]}… now)"
            raise ValueError(sentence("--resume", f"the text that shard {self.named(ordinal)} had", got, AGAIN))

    def named(self, ordinal: int) -> str:
        """A shard and the files that it is from."""
        paths = list(dict.fromkeys(part.path for part in self.corpus.shards[ordinal].ranges))
        return f"{ordinal} ({paths[0]}{f' … {paths[-1]}' if len(paths) > 1 else ''})"

    def merged(self, *, complete: bool = True, begun: Observed | None = None) -> Record:
        """The record of all finished shards, merged in their order, so that it is the same however they were come by.

        complete  whether this is all that was to be read
        begun     a shard that was interrupted, whose record goes in at the end
        """
        done = [self.done[ordinal] for ordinal in sorted(self.done)]
        record = _folded(self._places([finished.ordinal for finished in done]))
        if begun is not None:
            done.append(_of(len(done), "", begun))
            record = begun.record if record is None or begun.record is None else record.merge(begun.record)
        documents = [document for finished in done for document in finished.documents]
        spoiled, skipped = sum(finished.spoiled for finished in done), sum(finished.skipped for finished in done)
        if record is None:
            raise ValueError(_nothing(spoiled, documents, skipped))
        told = {
            "model": self.job.model,
            "notes": [*record.meta.get("notes", []), *small(record.meta["tokens"])],
            "skipped": skipped,
            "spoiled": spoiled,
            "spoiled_documents": [document._asdict() for document in documents[:LISTED]],
            "shards": len(done),
            "text_hash": hash_of_all(finished.text_hash for finished in done),
            "plan": self.plan,
            "complete": complete,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return replace(record, meta=record.meta | told)

    def clear(self) -> None:
        """Delete the shards, when the record of the run is on the disk: first say that it has ended, then delete."""
        if (self.shards / PLAN).is_file():
            os.replace(self.shards / PLAN, self.shards / ENDED)
            sweep_shards(self.directory)
        self.close()

    def abandon(self) -> None:
        """Leave nothing of a run that failed before anything was finished: the corrected command may begin anew."""
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
        """Let go of the directory; what is kept in it stays."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    # ------------------------------------------------------------------ files

    def _begin(self, plan: dict, *, anew: bool) -> None:
        if anew:
            delete_shards(self.directory)
            self.new = True
            write(self.shards / PLAN, json.dumps(plan, indent=1) + "\n")
            sync(self.shards / PLAN)
        else:
            require_same(self.directory, plan)
        self._find()

    def _places(self, ordinals: list[int]) -> list[Path]:
        """Where these and all shards that are merged already lie, in their order."""
        first = [self.shards / f"until-{self.merged_until:06d}"] if self.merged_until else []
        loose = [self.done[ordinal] for ordinal in ordinals if ordinal >= self.merged_until]
        return first + [self.shards / finished.place for finished in loose]

    def _row(self) -> list[int]:
        """The finished shards that follow those that are merged, without a gap."""
        row = []
        while self.merged_until + len(row) in self.done:
            row.append(self.merged_until + len(row))
        return row

    def _fold(self, row: list[int]) -> None:
        until, places = row[-1] + 1, self._places(row)
        record = _folded(places)
        self._put(f"until-{until:06d}", record, {"shards": [self.done[i]._asdict() for i in range(until)]})
        self.merged_until = until
        for place in places:
            shutil.rmtree(place)

    def _put(self, name: str, record: Record | None, told: dict) -> None:
        with new_directory(self.shards / name, durable=True, prefix=".new-") as place:
            if record is not None:
                record.save(place, exact=True, listed=False)
            write(place / "shard.json", json.dumps({"format": FORMAT, **told}) + "\n")

    def _find(self) -> None:
        """Read what is there; remove what was not finished or cannot be read."""
        sweep_shards(self.directory)
        places = [place for place in sorted(self.shards.iterdir()) if shard_place(place)]
        for place in reversed([place for place in places if place.name.startswith("until-")]):
            told = self._read(place)
            if told is not None and not self.merged_until:
                found = [Finished.of(plain) for plain in told["shards"]]
                self.done, self.merged_until = {f.ordinal: f for f in found}, len(found)
            else:
                shutil.rmtree(place)
        for place in (place for place in places if not place.name.startswith("until-")):
            told = self._read(place)
            if told is None or told["ordinal"] < self.merged_until:
                shutil.rmtree(place)
            else:
                self.done[told["ordinal"]] = Finished.of(told)

    def _read(self, place: Path) -> dict | None:
        """What a place says of itself; None, and a note, if it cannot be read."""
        try:
            told = json.loads((place / "shard.json").read_text(encoding="utf-8"))
            if told.pop("format") != FORMAT:
                raise ValueError(FORMAT)
            shards = [Finished.of(plain) for plain in told.get("shards", [told])]
            ordinals = [finished.ordinal for finished in shards]
            name = f"until-{len(shards):06d}" if "shards" in told else shards[0].place
            if place.name != name or ("shards" in told and ordinals != [*range(len(shards))]):
                raise ValueError(name)
            if max(ordinals) >= len(self.corpus.shards):
                raise ValueError(ordinals)
            if any(finished.tokens for finished in shards):
                Record.load(place)
            return told
        except UNREADABLE:
            which = place.name.split("-")[1 if place.name.startswith("until") else 0].lstrip("0") or "0"
            what = f"the shards before {which}" if place.name.startswith("until") else f"shard {which}"
            self.notes.append(f"{what} could not be read from {place}: observed again")
            return None

    def _take(self) -> None:
        """Keep other processes out while this one runs; the system gives the lock back when it ends, however."""
        try:
            import fcntl
        except ModuleNotFoundError:  # not on Windows
            return
        self.lock = os.open(self.shards, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            got = f"{self.directory}, in which another is at work"
            raise ValueError(
                sentence("--out", "a directory with no running observation", got, "Wait for it to end.")
            ) from None


def _folded(places: list[Path]) -> Record | None:
    """The records of some places merged in their order, one in memory at a time; None of nothing."""
    record = None
    for place in places:
        if (place / "record.json").is_file():
            part = Record.load(place)
            record = part if record is None else record.merge(part)
    return record


def _of(ordinal: int, key: str, observed: Observed) -> Finished:
    counts = observed.tokens, observed.sequences, observed.skipped, len(observed.unreadable)
    return Finished(ordinal, key, observed.text_hash, *counts, observed.unreadable[:LISTED])


def _nothing(spoiled: int, listed: list[UnreadableDocument], skipped: int) -> str:
    parts = [f"{spoiled} spoiled ({listed[0].name}: {listed[0].why})"] if listed else []
    parts += [f"{skipped} without one"] if skipped or not listed else []
    return sentence("observe.texts", "a text of at least one token", " and ".join(parts), "Give other texts.")
