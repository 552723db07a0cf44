"""From the settings of `cumulant observe` to the record, its nulls, tables and page on the disk."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cumulant.files import write, write_parquet
from cumulant.observatory.models.load import Loaded, load
from cumulant.observatory.record.manifest import (
    ABLATION,
    CAUSES,
    MOMENTS,
    PAGE,
    RECORD,
    WRITTEN,
    delete_shards,
    remove,
    writing,
)
from cumulant.observatory.record.record import UNREADABLE, Record, claim_directory, null_directories
from cumulant.observatory.record.tables import Tables
from cumulant.observatory.record.weights import with_weights
from cumulant.observatory.report.causes import CAUSES_COLUMNS, judgements, read_causes
from cumulant.observatory.report.directory import read_ablation, render_tables, standing_out, write_report
from cumulant.observatory.report.page.render import plain
from cumulant.observatory.runs.ablate import Ablation, ablate
from cumulant.observatory.runs.causes import HeadEffects, head_effects
from cumulant.observatory.runs.observe import Progress, observe, observe_corpus
from cumulant.observatory.runs.repeated import with_probe
from cumulant.observatory.runs.settings import ObservationSettings, Settings, null_names
from cumulant.observatory.runs.store import Store
from cumulant.observatory.statistics.head_types import Remarkable, heads_to_remove
from cumulant.observatory.text.corpus import Corpus, read_texts

REMOVED_HEADS = 10  # of those that stand out
NULL_SHARE = 4  # nulls read a quarter of the tokens
MIN_NULL_TOKENS = 5120  # a link fit of heads of width 64 needs more than 128 queries of one in 32
BAR_TITLES = {None: "reading", "random": "null, random weights", "shuffled": "null, shuffled keys"}


class Observation(NamedTuple):
    """The records of a run with their tables, and the model and texts that they are of.

    corpus    None for standard input
    complete  whether all of them have read what they were to read
    causes    what causes.json holds; None if no head was removed
    """

    loaded: Loaded
    corpus: Corpus | None
    tables: Tables
    nulls: dict[str, Tables]
    complete: bool
    causes: dict | None = None


def run(settings: Settings, errors: Console) -> Observation:
    """Observe a model and its nulls, and write records, tables and page into ``settings.directory``.

    errors  where progress and notes are printed

    A corpus is observed shard by shard, in this process or on Ray, and the shards are deleted when all is written; an
    interrupt (Ctrl-C) gives the record so far and leaves them for --resume. Standard input is observed at once.
    """
    corpus = None
    if not settings.reads_stdin:
        corpus = settings.corpus()
    if not settings.resume:
        claim_directory(settings.directory, settings.force)
    model = settings.observation.model
    with errors.status(f"loading {escape(model)}"):
        loaded = load(model, **settings.observation.load_options())
    meta = {"text": settings.text_name, "command": command_line()}
    with ExitStack() as stack:
        if corpus is None:
            corpus_run, nulls = None, {}
            record = _observe_stream(settings, errors, loaded, meta)
        else:
            corpus_run = stack.enter_context(_CorpusRun(settings, errors, loaded, corpus))
            record, nulls = corpus_run.records(meta)
        complete = all(r.meta.complete for r in (record, *nulls.values()))
        causes: list[dict] = []
        with errors.status("writing tables and page") as status:

            def remove_heads(tables: Tables, null_tables: dict[str, Tables]) -> None:
                if corpus is not None and complete and settings.causes_tokens:
                    status.stop()  # there is one live line at a time
                    heads = heads_to_remove(standing_out(tables.heads, null_tables), REMOVED_HEADS)
                    causes.extend([_remove(settings, errors, loaded, corpus, heads)] if heads else [])
                    status.start()

            tables, null_tables = write_report(record, settings.directory, nulls, before_page=remove_heads)
        if corpus_run is not None and complete:
            corpus_run.clear()
    return Observation(loaded, corpus, tables, null_tables, complete, causes[0] if causes else None)


def run_ablation(settings: Settings, observed: Observation, errors: Console) -> Ablation:
    """Replace every head, write ablation.parquet and ablation.json, and the page of the record once more."""
    assert settings.ablation is not None
    assert observed.corpus is not None
    with _replacing_bar(errors, f"{observed.loaded.name}: replacing heads") as progress:
        ablation = ablate(
            observed.loaded,
            observed.corpus.texts([]),
            kind=settings.ablation,
            seed=settings.observation.seed,
            progress=progress,
        )
    directory = settings.directory
    marks = {"can_go": ablation.can_go, "together": ablation.together}
    rows = [row._asdict() | {name: row in heads for name, heads in marks.items()} for row in ablation.rows]
    summary = {name: value for name, value in ablation._asdict().items() if name not in ("rows", "together")}
    summary |= {"heads": len(rows), **{name: len(heads) for name, heads in marks.items()}}
    with writing(directory, *ABLATION):
        write_parquet(rows, directory / "ablation.parquet")
        write(directory / "ablation.json", json.dumps(summary | {"rows": rows}, indent=1) + "\n")
    with writing(directory, PAGE):
        others = read_ablation(directory), read_causes(directory)
        render_tables(observed.tables, directory / PAGE, observed.nulls, *others)
    return ablation


def _remove(settings: Settings, errors: Console, loaded: Loaded, corpus: Corpus, heads: list[Remarkable]) -> dict:
    """Remove heads, and write causes.parquet and causes.json; returns what the latter holds.

    A model whose heads cannot be removed is no error: the reason is written.
    """
    effects, reason = HeadEffects((), {}, 0, ""), None
    with _replacing_bar(errors, f"{loaded.name}: removing heads") as progress:
        try:
            effects = head_effects(
                loaded,
                corpus.texts([]),
                [(head.layer, head.head) for head in heads],
                max_tokens=settings.causes_tokens,
                seed=settings.observation.seed,
                progress=progress,
            )
        except ValueError as error:
            reason = str(error)
    kinds = {(head.layer, head.head): head.kind for head in heads}
    rows = [row._asdict() | {"type": None if row.random else kinds[row.layer, row.head]} for row in effects.rows]
    causes: dict = plain(effects._asdict() | {"rows": rows, "reason": reason})  # pyright: ignore[reportAssignmentType]
    verdicts = {(j.layer, j.head, j.replacement, j.measure): j.verdict for j in judgements(causes)}
    marked = [row | {"verdict": _verdict(row, verdicts)} for row in rows]
    directory = settings.directory
    with writing(directory, *CAUSES):
        write_parquet(marked, directory / CAUSES[1], CAUSES_COLUMNS)
        write(directory / CAUSES[0], json.dumps(causes, indent=1, allow_nan=False) + "\n")
    return causes


def _verdict(row: dict, verdicts: dict[tuple, str]) -> str | None:
    """On the row that the type of a head is judged by."""
    key = (row["layer"], row["head"], row["replacement"], row["measure"])
    return None if row["random"] else verdicts.get(key)


@contextmanager
def _replacing_bar(errors: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(escape(title))
        yield lambda done, total: bar.update(task, completed=done, total=total)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["cumulant", *sys.argv[1:]])


def null_tokens(record: Record, max_tokens: int | None) -> int:
    """The tokens a null reads: a part of what the model was to read, or has read if that was everything."""
    whole = record.meta.tokens if max_tokens is None else max_tokens
    return min(whole, max(MIN_NULL_TOKENS, whole // NULL_SHARE))


def _observe_stream(settings: Settings, errors: Console, loaded: Loaded, meta: dict) -> Record:
    """The record of texts that can be read once, as standard input; nothing is stored on the way."""
    observation, texts = settings.observation, read_texts(settings.sources)
    with _bar(errors, loaded.name, None, settings.token_limit) as progress:
        record = observe(
            loaded,
            texts,
            quantities=observation.quantities,
            max_tokens=settings.token_limit,
            max_length=observation.max_length,
            batch_size=observation.batch_size,
            seed=observation.seed,
            exact_depth=observation.exact_depth,
            progress=progress,
        )
    record = replace(record, meta=replace(record.meta, text_hash=texts.sha256, **meta))
    _delete_report(settings.directory, None)
    record.save(settings.directory)
    return record


@dataclass
class _CorpusRun:
    """The record of a model on a corpus and those of its nulls, each in a store of its own.

    loaded  the model; nulls are made of it
    stores  that were opened, the model's first
    """

    settings: Settings
    errors: Console
    loaded: Loaded
    corpus: Corpus
    stores: list[Store] = field(default_factory=list)

    def records(self, meta: dict) -> tuple[Record, dict[str, Record]]:
        """The record of the model, with more ``meta``, and those of the nulls if it is complete."""
        directory, observation = self.settings.directory, self.settings.observation
        record = self._observe(self._open(observation, self.settings.token_limit, directory), meta)
        nulls: dict[str, Record] = {}
        for name in null_names(self.settings.nulls) if record.meta.complete else ():
            tokens = null_tokens(record, self.settings.token_limit)
            store = self._open(observation._replace(null=name), tokens, null_directories(directory)[name])
            nulls[name] = self._observe(store)
        return record, nulls

    def clear(self) -> None:
        """Delete all shards, those of the model last: as long as they are there, the run can be resumed."""
        for store in reversed(self.stores):
            store.clear()

    def __enter__(self) -> _CorpusRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all stores; a run that failed before a shard was finished is deleted."""
        for store in reversed(self.stores):
            store.close() if kind is None else store.abandon()

    def _open(self, observation: ObservationSettings, max_tokens: int | None, directory: Path) -> Store:
        """The store of a record: the one that is there if the run is resumed."""
        description = self.corpus, observation, self.loaded.fingerprint, max_tokens
        store = Store.open(directory, *description, resume=self.settings.resume, force=self.settings.force)
        self.stores.append(store)
        for note in store.notes:
            self.errors.print(f"Note: {note}.", highlight=False, markup=False)
        return store

    def _observe(self, store: Store, meta: dict | None = None) -> Record:
        """The record of a store, with more ``meta``, saved beside its shards."""
        if store.record is not None:
            return store.record
        model = store.settings.with_null(self.loaded)
        with _bar(self.errors, model.name, store.settings.null, store.max_tokens) as progress:
            record = self._read(store, model, progress)
        if store.settings.null != "shuffled":
            special = () if model.tokenizer is None else tuple(model.tokenizer.all_special_ids)
            record = with_probe(with_weights(record, model.model), model.model, special)
        record = replace(record, meta=replace(record.meta, **(meta or {})))
        if store is self.stores[0]:
            _delete_report(store.directory, None if self.settings.force else store.plan)
        record.save(store.directory)
        store.new = False  # from here on there is something to resume
        return record

    def _read(self, store: Store, model: Loaded, progress: Progress) -> Record:
        common = {"max_tokens": store.max_tokens, "loaded": model, "progress": progress}
        if self.settings.ray is None:
            return observe_corpus(store.settings, self.corpus, store, **common)
        from cumulant.observatory.runs.ray import observe_on_ray

        cluster = {"address": self.settings.ray, "workers": self.settings.workers}
        return observe_on_ray(store.settings, self.corpus, store, **common, **cluster)


def _delete_report(directory: Path, plan: str | None) -> None:
    """Delete what an earlier record in a directory has beside it: nulls, ablation, tables and page.

    plan  of the record that takes its place: the files of a run of the same plan belong to it and stay; None: all go
    """
    try:
        before = json.loads((directory / RECORD).read_text(encoding="utf-8"))["meta"].get("plan")
    except FileNotFoundError:
        return
    except UNREADABLE:
        before = None
    if plan is not None and plan == before:
        return
    for null in null_directories(directory).values():
        delete_shards(null)
        with suppress(FileNotFoundError):
            (null / "shards").rmdir()
        remove(null, WRITTEN)
    remove(directory, [name for name in WRITTEN if name not in (MOMENTS, RECORD)])


@contextmanager
def _bar(errors: Console, name: str, null: str | None, total: int | None) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    whole = "" if total is None else f" of {total:,}"
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(f"{escape(name)}: {BAR_TITLES[null]}", total=total, done=f"0{whole} tokens")

        def progress(tokens: int) -> None:
            bar.update(task, advance=tokens)
            speed, done = bar.tasks[task].speed, bar.tasks[task].completed
            rate = f", {speed:,.0f} tokens/s" if speed else ""
            bar.update(task, done=f"{done:,.0f}{whole} tokens{rate}")

        yield progress
