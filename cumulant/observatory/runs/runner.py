"""How the command comes by a record: from standard input at once, from a corpus shard by shard, here or on Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cumulant.checks import sentence
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.record.manifest import MOMENTS, RECORD, WRITTEN, delete_shards, remove
from cumulant.observatory.record.record import UNREADABLE, Record, null_places
from cumulant.observatory.runs.observe import Progress, observe
from cumulant.observatory.runs.shards import Job, observe_corpus
from cumulant.observatory.runs.store import Store
from cumulant.observatory.runs.weight_statistics import with_weights
from cumulant.observatory.text.corpus import Corpus, read_texts

NULL_SHARE = 4  # nulls read a quarter of the tokens
LEAST = 5120  # but not fewer than this: a link fit of heads of width 64 needs more than 128 queries of one in 32
WORDS = {None: "reading", "random": "null, random weights", "shuffled": "null, shuffled keys"}


class Cluster(NamedTuple):
    """Where the shards are observed if not in this process: an address for Ray, and how many models at once."""

    address: str
    workers: int | None = None


def from_stream(errors: Console, loaded: Loaded, job: Job, sources: list[str], max_tokens: int | None) -> Record:
    """The record of texts that can be read once, as standard input: nothing is kept on the way."""
    texts = read_texts(sources)
    with _bar(errors, loaded.name, job, max_tokens) as progress:
        record = observe(
            loaded,
            texts,
            quantities=job.quantities,
            max_tokens=max_tokens,
            max_length=job.max_length,
            batch_size=job.batch_size,
            seed=job.seed,
            progress=progress,
        )
    return replace(with_weights(record, loaded.model), meta=record.meta | {"text_hash": texts.sha256})


@dataclass
class Run:
    """One call of the command on a corpus: the record of the model and those of its nulls, each in a store of its own.

    loaded   the model as it is; nulls are made of it
    cluster  None: this process
    stores   that were opened, the model's first
    """

    errors: Console
    loaded: Loaded
    corpus: Corpus
    cluster: Cluster | None
    resume: bool
    force: bool
    stores: list[Store] = field(default_factory=list)

    def open(self, job: Job, max_tokens: int | None, place: Path) -> Store:
        """The store of a record: an old one if the run is resumed and there is one."""
        given = self.corpus, job, self.loaded.fingerprint, max_tokens
        store = Store.open(place, *given, resume=self.resume, force=self.force)
        self.stores.append(store)
        for note in store.notes:
            self.errors.print(f"Note: {note}.", highlight=False, markup=False)
        return store

    def observed(self, store: Store, told: dict | None = None) -> Record:
        """The record of a store, saved beside its shards, with what else is ``told`` of it."""
        if store.record is not None:
            return store.record
        model = store.job.prepared(self.loaded)
        with _bar(self.errors, model.name, store.job, store.max_tokens) as progress:
            record = self._read(store, model, progress)
        record = record if store.job.null == "shuffled" else with_weights(record, model.model)
        record = replace(record, meta=record.meta | (told or {}))
        if store is self.stores[0]:
            forget(store.directory, None if self.force else store.plan)
        record.save(store.directory)
        store.new = False  # from here on there is something to go on with
        return record

    def _read(self, store: Store, model: Loaded, progress: Progress) -> Record:
        given = {"max_tokens": store.max_tokens, "loaded": model, "progress": progress}
        if self.cluster is None:
            return observe_corpus(store.job, self.corpus, store, **given)
        from cumulant.observatory.runs.ray import observe_on_ray

        return observe_on_ray(store.job, self.corpus, store, **given, **self.cluster._asdict())

    def clear(self) -> None:
        """Delete all shards, those of the model last: as long as they are there, the run can be resumed."""
        for store in reversed(self.stores):
            store.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let go of all stores; what failed before anything was finished leaves nothing behind."""
        for store in reversed(self.stores):
            store.close() if kind is None else store.abandon()


def forget(directory: Path, plan: str | None) -> None:
    """Delete what an earlier record in a directory has beside it: nulls, ablation, tables and page.

    plan  of the record that takes its place: what a run of the same plan left belongs to it and stays; None: all goes
    """
    try:
        before = json.loads((directory / RECORD).read_text(encoding="utf-8"))["meta"].get("plan")
    except FileNotFoundError:
        return
    except UNREADABLE:
        before = None
    if plan is not None and plan == before:
        return
    for place in null_places(directory).values():
        delete_shards(place)
        with suppress(FileNotFoundError):
            (place / "shards").rmdir()
        remove(place, WRITTEN)
    remove(directory, [name for name in WRITTEN if name not in (MOMENTS, RECORD)])


def null_tokens(record: Record, max_tokens: int | None) -> int:
    """How much a null reads: a part of what the model was to read, or has read if that was everything."""
    whole = record.meta["tokens"] if max_tokens is None else max_tokens
    return min(whole, max(LEAST, whole // NULL_SHARE))


def check_stream(sources: list[str], given: dict[str, bool]) -> None:
    """Refuse with standard input what needs texts that can be read again."""
    for option, here in given.items():
        if here and "-" in sources:
            raise ValueError(sentence(option, "texts that can be read twice", "standard input", "Give a file."))


@contextmanager
def _bar(errors: Console, name: str, job: Job, total: int | None) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    whole = "" if total is None else f" of {total:,}"
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(f"{escape(name)}: {WORDS[job.null]}", total=total, done=f"0{whole} tokens")

        def progress(tokens: int) -> None:
            bar.update(task, advance=tokens)
            speed, done = bar.tasks[task].speed, bar.tasks[task].completed
            rate = f", {speed:,.0f} tokens/s" if speed else ""
            bar.update(task, done=f"{done:,.0f}{whole} tokens{rate}")

        yield progress
