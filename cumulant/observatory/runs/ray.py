"""A corpus observed on Ray: shards go to actors that hold the model, their records come back and are kept as ever.

What travels is small: to an actor which parts of which files to read, back a record as safetensors and JSON. An actor
does to a shard what `shards.observe_corpus` does to it, with one thread, and the record of the run is merged from the
store in the order of shards; so it is the same whatever the order in which actors finish, and whichever of them die.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cumulant.checks import sentence
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.record.record import Record
from cumulant.observatory.runs.observe import Progress
from cumulant.observatory.runs.ray_cluster import connected
from cumulant.observatory.runs.shards import Job, Observed, added_tokens, count_tokens, observe_shard
from cumulant.observatory.text.corpus import Corpus, Shard, UnreadableDocument, hash_of

if TYPE_CHECKING:
    from cumulant.observatory.runs.store import Store

ATTEMPTS = 10  # workers that may die over one shard before it is given up
COUNTED_HERE = 1_000_000  # up to so many tokens, counting them here is faster than starting actors for it


def observe_on_ray(
    job: Job,
    corpus: Corpus,
    store: Store,
    *,
    max_tokens: int | None,
    address: str = "local",
    workers: int | None = None,
    loaded: Loaded | None = None,
    progress: Progress | None = None,
) -> Record:
    """Observe the shards on the actors of a Ray cluster, keep each in the store, and give the record of all of them.

    max_tokens  where to stop, counted over the shards in their order; None reads everything. A number needs the tokens
                of shards to be counted first, up to it
    address     "local": Ray is started on this machine and stopped afterwards; "auto": the cluster that runs here;
                HOST:PORT. A process that is connected already stays so
    workers     actors, each with a processor (a GPU for a device cuda) and one thread; as many as there are if None
    loaded      ``job.load()``, if it is in memory already
    progress    called with numbers of tokens that are done, those of earlier runs among them

    Files and model must be found by the actors under the same names; relative ones are taken from the working directory
    of this process. A worker that dies is replaced and its shard read again. A shard that fails is named in the error
    at the end; the others are in the store by then, as they are after an interrupt (Ctrl-C), which gives the record so
    far with ``meta["complete"]`` false.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        advice = "Give how many actors read at once."
        raise ValueError(sentence("observe_on_ray.workers", "a whole number of at least 1", repr(workers), advice))
    failed: dict[int, str] = {}
    complete = True
    try:
        with connected(address, workers) as ray:
            crew = _Crew(ray, job, corpus, _size(ray, job, workers))
            budgets = _budgets(crew, store, max_tokens, loaded)
            failed = _observe(crew, store, budgets, progress)
    except KeyboardInterrupt:
        complete = False
        if not store.tokens:
            raise
    if failed:
        raise ValueError(_failure(store, failed))
    return store.merged(complete=complete)


def to_bytes(record: Record) -> tuple[bytes, str]:
    """A record as safetensors and JSON, with full precision."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in record.tensors(exact=True).items()}
    return save(tensors), json.dumps(record.plain())


def from_bytes(tensors: bytes, plain: str) -> Record:
    """What `to_bytes` was given."""
    from safetensors.torch import load

    return Record.assemble(json.loads(plain), load(tensors))


class ShardReader:
    """The actor: it holds the model from its first shard on, and answers every task with a row, failures included.

    A task is a shard with what is to be done: hash its text (``known``), or observe it within its ``budget``. ``begin``
    counts, outside the actor, how often a shard was begun, and says when that was often enough.
    """

    def __init__(self, job: Job, column: str | None, fingerprint: str, home: str, begin: Callable[[int], bool]):
        torch.set_num_threads(1)
        with suppress(OSError):  # a machine without it can still read what has an absolute name or a URI
            os.chdir(home)
        self.job, self.column, self.fingerprint = job, column, fingerprint
        self.begin, self.loaded = begin, None

    def __call__(self, batch: Any) -> Any:
        task = json.loads(batch["task"][0].as_py())
        shard = Shard.of(task["shard"])
        if not self.begin(shard.ordinal):
            return _row(shard, {"error": "workers that died over it, again and again"})
        try:
            return self.answer(shard, task)
        except Exception as error:  # whatever one shard raises is told of that shard; the others are read
            return _row(shard, {"error": _told(error), "model": self.loaded is None and not task["known"]})

    def answer(self, shard: Shard, task: dict) -> Any:
        if task["known"]:
            return _row(shard, {"text_hash": hash_of(shard, self.column)})
        self.loaded = self.loaded or self._load()
        found = observe_shard(self.loaded, self.job, shard, self.column, task["budget"])
        told = found._asdict() | {"record": None, "unreadable": [list(document) for document in found.unreadable]}
        tensors, plain = to_bytes(found.record) if found.record is not None else (b"", "")
        return _row(shard, {"observed": told}, tensors, plain)

    def _load(self) -> Loaded:
        loaded = self.job.load()
        if loaded.fingerprint != self.fingerprint:
            raise ValueError(f"other weights or another configuration under this name on {socket.gethostname()}")
        return loaded


class TokenCounter:
    """The actor of the first pass, which has a tokenizer and no model."""

    def __init__(self, job: Job, column: str | None, tokenizer: Any, home: str):
        with suppress(OSError):
            os.chdir(home)
        self.job, self.column, self.tokenizer = job, column, tokenizer

    def __call__(self, batch: Any) -> Any:
        task = json.loads(batch["task"][0].as_py())
        shard = Shard.of(task["shard"])
        try:
            return _row(shard, {"tokens": count_tokens(self.tokenizer, self.job, shard, self.column, task["budget"])})
        except Exception as error:
            return _row(shard, {"error": _told(error)})


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _row(shard: Shard, told: dict, tensors: bytes = b"", plain: str = "") -> Any:
    """A table of one row; 64-bit offsets, for records of more than two gigabytes."""
    import pyarrow

    columns = {"told": [json.dumps(told | {"ordinal": shard.ordinal})], "plain": [plain]}
    return pyarrow.table(columns | {"tensors": pyarrow.array([tensors], pyarrow.large_binary())})


class _Reply(NamedTuple):
    """What an actor told of a shard, and its record, if there is one, as bytes."""

    told: dict
    plain: str
    tensors: bytes

    def observed(self) -> Observed:
        told = dict(self.told["observed"])
        unreadable = tuple(UnreadableDocument(*document) for document in told["unreadable"])
        record = from_bytes(self.tensors, self.plain) if self.tensors else None
        return Observed(**told | {"unreadable": unreadable, "record": record})


Replies = Generator[_Reply, None, None]


class _Crew(NamedTuple):
    """A connection to Ray, and as many actors as tasks are handed to at once."""

    ray: Any
    job: Job
    corpus: Corpus
    size: int

    def replies(self, actor: type, tasks: list[dict], ordered: bool = False, **given: Any) -> Replies:
        """The answers to the tasks, as they come or in order. Every task is a block, so that none waits for another."""
        from ray.data import ActorPoolStrategy, from_items
        from ray.data.exceptions import SystemException

        if not tasks:
            return
        gpu = actor is ShardReader and _on_gpu(self.job)
        job = self.job._replace(device="cuda") if gpu else self.job  # Ray shows each actor the one that it may use
        data = from_items([{"task": json.dumps(task)} for task in tasks], override_num_blocks=len(tasks)).map_batches(
            actor,
            fn_constructor_kwargs=given | {"job": job, "column": self.corpus.column, "home": os.getcwd()},
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=min(self.size, len(tasks)), max_tasks_in_flight_per_actor=1),
            num_cpus=1,
            num_gpus=1 if gpu else None,
        )
        data.context.enable_progress_bars = False
        data.context.max_consecutive_actor_init_deaths = ATTEMPTS
        data.context.execution_options.preserve_order = ordered
        tables: Any = data.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow")
        try:
            for table in tables:
                for row in table.to_pylist():
                    yield _Reply(json.loads(row["told"]), row["plain"], row["tensors"])
        except (self.ray.exceptions.RayError, SystemException) as error:
            got = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            advice = "Install the same cumulant[hf,ray] on every machine of the cluster, and go on with --resume."
            raise ConnectionError(sentence("observe_on_ray.address", "actors that run", got, advice)) from error


def _budgets(crew: _Crew, store: Store, max_tokens: int | None, loaded: Loaded | None) -> dict[int, int | None]:
    """How many tokens each shard may read; shards that nothing is left for are not in it."""
    if max_tokens is None:
        return {shard.ordinal: None for shard in crew.corpus.shards}
    loaded = loaded if loaded is not None else crew.job.load()
    added = added_tokens(loaded)
    budgets: dict[int, int | None] = {}
    with closing(_counts(crew, store, loaded.tokenizer, max_tokens)) as counts:
        left = max_tokens
        for shard in crew.corpus.shards:
            if left <= added:
                break
            budgets[shard.ordinal] = left
            done = store.done.get(shard.ordinal)
            left -= done.tokens if done is not None else next(counts)
    return budgets


def _counts(crew: _Crew, store: Store, tokenizer: Any, max_tokens: int) -> Generator[int, None, None]:
    """The tokens of the shards that are not done, one after the other."""
    shards = [shard for shard in crew.corpus.shards if shard.ordinal not in store.done]
    if max_tokens <= COUNTED_HERE:
        for shard in shards:
            yield count_tokens(tokenizer, crew.job, shard, crew.corpus.column, max_tokens)
        return
    tasks = [{"shard": shard.plain(), "budget": max_tokens} for shard in shards]
    for reply in crew.replies(TokenCounter, tasks, ordered=True, tokenizer=tokenizer):
        if "error" in reply.told:
            raise ValueError(_failure(store, {reply.told["ordinal"]: reply.told["error"]}))
        yield reply.told["tokens"]


def _observe(crew: _Crew, store: Store, budgets: dict[int, int | None], progress: Progress | None) -> dict[int, str]:
    """Hand out the shards, first those that need only a look; what failed, by ordinal."""
    todo = [
        {"shard": shard.plain(), "known": shard.ordinal in store.done, "budget": budgets[shard.ordinal]}
        for shard in crew.corpus.shards
        if shard.ordinal in budgets
    ]
    todo.sort(key=lambda task: not task["known"])
    given = {"fingerprint": store.fingerprint, "begin": _attempts(crew.ray)}
    failed: dict[int, str] = {}
    with closing(crew.replies(ShardReader, todo, **given)) as replies:
        for reply in replies:
            ordinal = reply.told["ordinal"]
            if "error" in reply.told:
                if reply.told.get("model"):  # it would befall every shard
                    advice = "It must be found by every worker."
                    raise ValueError(
                        sentence("observe_on_ray.job", "the model", reply.told["error"].rstrip("."), advice)
                    )
                failed[ordinal] = reply.told["error"]
                continue
            if "text_hash" in reply.told:
                store.check(ordinal, reply.told["text_hash"])
            else:
                store.keep(ordinal, reply.observed(), budgets[ordinal])
            if progress is not None and store.done[ordinal].tokens:
                progress(store.done[ordinal].tokens)
    return failed


def _attempts(ray: Any) -> Callable[[int], bool]:
    """Says whether a shard may be begun once more: Ray lets one that kills its worker do so for ever."""
    most = ATTEMPTS

    class Attempts:
        def __init__(self) -> None:
            self.begun = Counter()

        def begin(self, ordinal: int) -> bool:
            self.begun[ordinal] += 1
            return self.begun[ordinal] <= most

    counter = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Attempts).remote()
    return lambda ordinal: ray.get(counter.begin.remote(ordinal))


def _failure(store: Store, failed: dict[int, str]) -> str:
    ordinal, why = min(failed.items())
    others = f", and {len(failed) - 1} more failed" if len(failed) > 1 else ""
    where = f"observe_on_ray: shard {store.named(ordinal)}"
    advice = f"Mend that and go on with --resume; {len(store.done)} shards are kept."
    return sentence(where, "a record", f"{why.rstrip('.')}{others}", advice)


def _size(ray: Any, job: Job, workers: int | None) -> int:
    """As many actors as are asked for and there is room for."""
    kind = "GPU" if _on_gpu(job) else "CPU"
    room = int(ray.cluster_resources().get(kind, 0))
    if room < 1:
        raise ValueError(sentence("observe_on_ray.address", f"a cluster with a {kind}", "none", "Add one to it."))
    return room if workers is None else min(workers, room)


def _on_gpu(job: Job) -> bool:
    return job.device.startswith("cuda")
