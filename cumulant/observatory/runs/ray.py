"""A corpus observed on Ray: shards go to actors that hold the model, their records come back into the store.

A task says which parts of which files to read; the answer is a record as safetensors and JSON. An actor observes a
shard as `shards.observe_corpus` does, with one thread, and the record of the run is merged from the store in the order
of shards: it is the same whatever the order in which actors finish, and whichever of them die.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.record.record import Record
from cumulant.observatory.runs.observe import Progress, ShardObservation, added_tokens, count_tokens, observe_shard
from cumulant.observatory.runs.settings import ObservationSettings
from cumulant.observatory.text.corpus import Corpus, Shard, UnreadableDocument, hash_of

if TYPE_CHECKING:
    from cumulant.observatory.runs.store import Store

ATTEMPTS = 10  # workers that may die over one shard before it is abandoned
COUNTED_HERE = 1_000_000  # up to so many tokens, counting them here is faster than starting actors for it
TIMEOUT = 5  # seconds within which a cluster answers
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # its greeting, with no settings
SETTINGS_FRAME = 4  # the kind of the frame that answers it
# messages of no use here: `.` skips every line about workers, which are replaced when they die
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


def observe_on_ray(
    settings: ObservationSettings,
    corpus: Corpus,
    store: Store,
    *,
    max_tokens: int | None,
    address: str = "local",
    workers: int | None = None,
    loaded: Loaded | None = None,
    progress: Progress | None = None,
) -> Record:
    """Observe the shards on the actors of a Ray cluster, put each into the store, and merge their records.

    max_tokens  where to stop, counted over the shards in their order; None reads everything. A number needs the tokens
                of shards to be counted first, up to it
    address     "local": Ray is started on this machine and stopped afterwards; "auto": the cluster that runs here;
                HOST:PORT. A process that is connected already stays so
    workers     actors, each with a processor (a GPU for a device cuda) and one thread; as many as there are if None
    loaded      ``settings.load()``, if it is in memory already
    progress    called with numbers of tokens that are done, those of earlier runs among them

    Files and model must be found by the actors under the same names; relative ones are taken from the working directory
    of this process. A worker that dies is replaced and its shard read again. A shard that fails is named in the error
    at the end; the others are in the store by then, as they are after an interrupt (Ctrl-C), which gives the record so
    far with ``meta.complete`` false.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        advice = "Give how many actors read at once."
        raise ValueError(sentence("observe_on_ray.workers", "a whole number of at least 1", repr(workers), advice))
    failed: dict[int, str] = {}
    complete = True
    try:
        with connected(address, workers) as ray:
            pool = _WorkerPool(ray, settings, corpus, _pool_size(ray, settings, workers))
            budgets = _budgets(pool, store, max_tokens, loaded)
            failed = _observe(pool, store, budgets, progress)
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
    """The record that `to_bytes` was given."""
    from safetensors.torch import load

    return Record.assemble(json.loads(plain), load(tensors))


class ShardReader:
    """The actor that observes: it holds the model from its first shard on, and answers every task with one row.

    A task is a shard whose text is hashed (``known``), or that is observed within its ``budget``. ``begin`` counts,
    outside the actor, how often a shard was begun, and is false when that was too often.
    """

    def __init__(
        self,
        settings: ObservationSettings,
        column: str | None,
        fingerprint: str,
        home: str,
        begin: Callable[[int], bool],
    ):
        torch.set_num_threads(1)
        with suppress(OSError):  # a machine without it can still read absolute names and URIs
            os.chdir(home)
        self.settings, self.column, self.fingerprint = settings, column, fingerprint
        self.begin, self.loaded = begin, None

    def __call__(self, batch: Any) -> Any:
        task = json.loads(batch["task"][0].as_py())
        shard = Shard.of(task["shard"])
        if not self.begin(shard.ordinal):
            return _row(shard, {"error": "workers that died over it, again and again"})
        try:
            return self.answer(shard, task)
        except Exception as error:  # an error of one shard is reported for that shard; the others are read
            return _row(shard, {"error": _message(error), "model": self.loaded is None and not task["known"]})

    def answer(self, shard: Shard, task: dict) -> Any:
        if task["known"]:
            return _row(shard, {"text_hash": hash_of(shard, self.column)})
        self.loaded = self.loaded or self._load()
        observed = observe_shard(self.loaded, self.settings, shard, self.column, task["budget"])
        counts = observed._asdict() | {"record": None, "unreadable": [list(item) for item in observed.unreadable]}
        tensors, plain = to_bytes(observed.record) if observed.record is not None else (b"", "")
        return _row(shard, {"observed": counts}, tensors, plain)

    def _load(self) -> Loaded:
        loaded = self.settings.load()
        if loaded.fingerprint != self.fingerprint:
            raise ValueError(f"other weights or another configuration under this name on {socket.gethostname()}")
        return loaded


class TokenCounter:
    """The actor that counts tokens: it has a tokenizer and no model."""

    def __init__(self, settings: ObservationSettings, column: str | None, tokenizer: Any, home: str):
        with suppress(OSError):
            os.chdir(home)
        self.settings, self.column, self.tokenizer = settings, column, tokenizer

    def __call__(self, batch: Any) -> Any:
        task = json.loads(batch["task"][0].as_py())
        shard = Shard.of(task["shard"])
        try:
            tokens = count_tokens(self.tokenizer, self.settings, shard, self.column, task["budget"])
            return _row(shard, {"tokens": tokens})
        except Exception as error:
            return _row(shard, {"error": _message(error)})


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _row(shard: Shard, answer: dict, tensors: bytes = b"", plain: str = "") -> Any:
    """A table of one row; 64-bit offsets, for records of more than two gigabytes."""
    import pyarrow

    columns = {"answer": [json.dumps(answer | {"ordinal": shard.ordinal})], "plain": [plain]}
    return pyarrow.table(columns | {"tensors": pyarrow.array([tensors], pyarrow.large_binary())})


class _Reply(NamedTuple):
    """The answer of an actor about a shard, and its record as bytes, if there is one."""

    answer: dict
    plain: str
    tensors: bytes

    def observed(self) -> ShardObservation:
        counts = dict(self.answer["observed"])
        unreadable = tuple(UnreadableDocument(*item) for item in counts["unreadable"])
        record = from_bytes(self.tensors, self.plain) if self.tensors else None
        return ShardObservation(**counts | {"unreadable": unreadable, "record": record})


Replies = Generator[_Reply, None, None]


class _WorkerPool(NamedTuple):
    """A connection to Ray, and how many actors read at once."""

    ray: Any
    settings: ObservationSettings
    corpus: Corpus
    size: int

    def replies(self, actor: type, tasks: list[dict], ordered: bool = False, **arguments: Any) -> Replies:
        """The answers to tasks, as they come or in order. Every task is a block, so that none waits for another."""
        from ray.data import ActorPoolStrategy, from_items
        from ray.data.exceptions import SystemException

        if not tasks:
            return
        gpu = actor is ShardReader and _on_gpu(self.settings)
        settings = self.settings._replace(device="cuda") if gpu else self.settings  # Ray shows an actor only its own
        common = {"settings": settings, "column": self.corpus.column, "home": os.getcwd()}
        data = from_items([{"task": json.dumps(task)} for task in tasks], override_num_blocks=len(tasks)).map_batches(
            actor,
            fn_constructor_kwargs=arguments | common,
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
                    yield _Reply(json.loads(row["answer"]), row["plain"], row["tensors"])
        except (self.ray.exceptions.RayError, SystemException) as error:
            got = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            advice = "Install the same cumulant[hf,ray] on every machine of the cluster, and go on with --resume."
            raise ConnectionError(sentence("observe_on_ray.address", "actors that run", got, advice)) from error


def _budgets(pool: _WorkerPool, store: Store, max_tokens: int | None, loaded: Loaded | None) -> dict[int, int | None]:
    """How many tokens each shard may read; shards for which none are left are not in it."""
    if max_tokens is None:
        return {shard.ordinal: None for shard in pool.corpus.shards}
    loaded = loaded if loaded is not None else pool.settings.load()
    added = added_tokens(loaded)
    budgets: dict[int, int | None] = {}
    with closing(_counts(pool, store, loaded.tokenizer, max_tokens)) as counts:
        left = max_tokens
        for shard in pool.corpus.shards:
            if left <= added:
                break
            budgets[shard.ordinal] = left
            done = store.done.get(shard.ordinal)
            left -= done.tokens if done is not None else next(counts)
    return budgets


def _counts(pool: _WorkerPool, store: Store, tokenizer: Any, max_tokens: int) -> Generator[int, None, None]:
    """The tokens of the shards that are not done, one after the other."""
    shards = [shard for shard in pool.corpus.shards if shard.ordinal not in store.done]
    if max_tokens <= COUNTED_HERE:
        for shard in shards:
            yield count_tokens(tokenizer, pool.settings, shard, pool.corpus.column, max_tokens)
        return
    tasks = [{"shard": shard.plain(), "budget": max_tokens} for shard in shards]
    for reply in pool.replies(TokenCounter, tasks, ordered=True, tokenizer=tokenizer):
        if "error" in reply.answer:
            raise ValueError(_failure(store, {reply.answer["ordinal"]: reply.answer["error"]}))
        yield reply.answer["tokens"]


def _observe(
    pool: _WorkerPool, store: Store, budgets: dict[int, int | None], progress: Progress | None
) -> dict[int, str]:
    """Hand out the shards, first those that are only hashed; errors by ordinal."""
    tasks = [
        {"shard": shard.plain(), "known": shard.ordinal in store.done, "budget": budgets[shard.ordinal]}
        for shard in pool.corpus.shards
        if shard.ordinal in budgets
    ]
    tasks.sort(key=lambda task: not task["known"])
    arguments = {"fingerprint": store.fingerprint, "begin": _attempts(pool.ray)}
    failed: dict[int, str] = {}
    with closing(pool.replies(ShardReader, tasks, **arguments)) as replies:
        for reply in replies:
            ordinal = reply.answer["ordinal"]
            if "error" in reply.answer:
                if reply.answer.get("model"):  # every shard would fail
                    advice = "It must be found by every worker."
                    raise ValueError(
                        sentence("observe_on_ray.settings", "the model", reply.answer["error"].rstrip("."), advice)
                    )
                failed[ordinal] = reply.answer["error"]
                continue
            if "text_hash" in reply.answer:
                store.check(ordinal, reply.answer["text_hash"])
            else:
                store.put(ordinal, reply.observed(), budgets[ordinal])
            if progress is not None and store.done[ordinal].tokens:
                progress(store.done[ordinal].tokens)
    return failed


def _attempts(ray: Any) -> Callable[[int], bool]:
    """Whether a shard may be begun once more: Ray would repeat one that kills its worker for ever."""
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
    where = f"observe_on_ray: shard {store.shard_name(ordinal)}"
    advice = f"Mend that and go on with --resume; {len(store.done)} shards are kept."
    return sentence(where, "a record", f"{why.rstrip('.')}{others}", advice)


def _pool_size(ray: Any, settings: ObservationSettings, workers: int | None) -> int:
    """As many actors as are asked for and the cluster has processors for."""
    kind = "GPU" if _on_gpu(settings) else "CPU"
    room = int(ray.cluster_resources().get(kind, 0))
    if room < 1:
        raise ValueError(sentence("observe_on_ray.address", f"a cluster with a {kind}", "none", "Add one to it."))
    return room if workers is None else min(workers, room)


def _on_gpu(settings: ObservationSettings) -> bool:
    return settings.device.startswith("cuda")


@contextmanager
def connected(address: str = "local", workers: int | None = None) -> Iterator[Any]:
    """The module ray, connected to an address as in `observe_on_ray`; what is started here is stopped at the end.

    workers  processors that a "local" cluster offers, as many as there are if None
    """
    if address not in ("local", "auto"):
        _require_reachable(address)
    with _environment():
        ray = _ray()  # imported here: it reads the environment
        with _critical_only():
            if ray.is_initialized():
                yield ray
                return
            _connect(ray, address, workers)
            try:
                yield ray
            finally:
                ray.shutdown()


def _connect(ray: Any, address: str, workers: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        options |= {"num_cpus": workers or os.cpu_count(), "include_dashboard": False}
    try:
        with _without_stderr():
            ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise ConnectionError(_unconnected(address, error)) from error


def _unconnected(address: str, error: BaseException) -> str:
    if address == "auto":
        got = "none that this process may use"
    else:
        got = f"{address} ({type(error).__name__}: {str(error).rstrip('.')})"
    advice = "Start one with `ray start --head`, or give no address for one that lasts as long as the run."
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "AuthenticationError":
            advice = "It asks for a token: give yours to this process as Ray's token authentication documents."
        cause = cause.__cause__ or cause.__context__
    return sentence("--ray", "a running cluster", got, advice)


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise missing_package("--ray", error.name or "ray", "ray") from None
    return ray


def _require_reachable(address: str) -> None:
    """Refuse a port of no cluster at once: Ray would try for minutes, whatever listens there."""
    if address.startswith("ray://"):
        advice = "Ray Data does not run through Ray's client: start the command on a machine of the cluster, with auto."
        raise ValueError(sentence("--ray", "local, auto or HOST:PORT", address, advice))
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(sentence("--ray", "local, auto or HOST:PORT", repr(address), "Give one of these."))
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            line.sendall(HTTP2)
            frame = line.recv(9)
            if frame[3:4] != bytes([SETTINGS_FRAME]):
                raise ConnectionError("what listens there is no Ray")
    except (OSError, OverflowError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        advice = "Check host and port, and that the cluster runs: `ray status` says so on its machine."
        raise ConnectionError(sentence("--ray", "a cluster that answers", f"{address} ({why})", advice)) from None


@contextmanager
def _environment() -> Iterator[None]:
    """Variables that Ray reads from the environment, where they are not set."""
    added = [name for name in ENVIRONMENT if name not in os.environ]
    os.environ.update({name: ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _critical_only() -> Iterator[None]:
    """Only critical lines are logged."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Standard error discarded: Ray's core announces its log level there."""
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
