"""A corpus observed shard by shard: what is done to one shard, wherever that happens, and to all of them in turn.

A shard is a reference to parts of files; who observes it reads them. What it leaves depends on its text, the model and
the settings alone, so that it may be kept (`store.Store`), repeated, or done on another machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cumulant.checks import sentence
from cumulant.observatory.models.load import Loaded, load, random_twin, require_text_model
from cumulant.observatory.record.record import Record
from cumulant.observatory.runs.nulls import shuffled
from cumulant.observatory.runs.observe import Progress, observe, unrecorded
from cumulant.observatory.text.corpus import Corpus, Shard, UnreadableDocument, hash_of, texts_of
from cumulant.observatory.text.windows import NoTokens, batches, special_tokens

if TYPE_CHECKING:
    from cumulant.observatory.runs.store import Store


class Job(NamedTuple):
    """Everything but the text that an observation depends on, as plain data.

    model, device, dtype, allow_pickle        as in `models.load`; dtype by name
    quantities, max_length, batch_size, seed  as in `observe`
    null                                      None, "random" (weights) or "shuffled" (keys)

    >>> Job("minilm").null is None
    True
    """

    model: str
    device: str = "cpu"
    dtype: str | None = None
    allow_pickle: bool = False
    quantities: tuple[str, ...] | None = None
    max_length: int = 256
    batch_size: int = 16
    seed: int = 0
    null: str | None = None

    def load(self) -> Loaded:
        """The model that is to be observed: for the null "random" its twin with other weights."""
        return self.prepared(load(self.model, device=self.device, dtype=self.dtype, allow_pickle=self.allow_pickle))

    def prepared(self, loaded: Loaded) -> Loaded:
        """The same from a model that is already in memory."""
        return replace(loaded, model=random_twin(loaded, self.seed)) if self.null == "random" else loaded


class Observed(NamedTuple):
    """What one shard gave.

    record     None if no token was in it
    text_hash  `corpus.hash_of` the shard
    unreadable  documents that could not be read
    skipped    documents without a token
    """

    record: Record | None
    text_hash: str
    tokens: int
    sequences: int
    unreadable: tuple[UnreadableDocument, ...]
    skipped: int = 0


def observe_shard(
    loaded: Loaded,
    job: Job,
    shard: Shard,
    column: str | None,
    budget: int | None,
    progress: Progress | None = None,
) -> Observed:
    """Let the model of ``job.load()`` read one shard.

    budget  tokens at most; the last window is cut to fit. None: all

    An interrupt (Ctrl-C) ends the reading as in `observe`: the record then has ``meta["complete"]`` false.
    """
    unreadable: list[UnreadableDocument] = []
    texts = texts_of(shard, column, unreadable)
    shuffles = job.null == "shuffled"
    try:
        record = observe(
            loaded,
            texts,
            quantities=job.quantities,
            max_tokens=budget,
            max_length=job.max_length,
            batch_size=job.batch_size,
            seed=job.seed,
            hidden_states=not shuffles,
            alter=shuffled(job.seed + shard.ordinal) if shuffles else None,
            progress=progress,
            unreadable=unreadable,
        )
    except NoTokens as nothing:
        return Observed(None, texts.sha256(), 0, 0, tuple(unreadable), nothing.skipped)
    meta = record.meta
    notes = [*loaded.notes, *unrecorded(record)]
    kept = {k: v for k, v in meta.items() if k not in ("created", "notes")} | {"notes": notes}
    counts = meta["tokens"], meta["sequences"]
    return Observed(replace(record, meta=kept), texts.sha256(), *counts, tuple(unreadable), meta["skipped"])


def count_tokens(model: Any, job: Job, shard: Shard, column: str | None, budget: int | None) -> int:
    """How many tokens `observe_shard` would count, without running the model; ``model`` is a Loaded or a tokenizer."""
    tokenizer = model.tokenizer if isinstance(model, Loaded) else model
    stream = batches(
        texts_of(shard, column),
        tokenizer,
        max_length=job.max_length,
        batch_size=job.batch_size,
        max_tokens=budget,
        unreadable=[],
    )
    try:
        return sum(batch.tokens for batch in stream)
    except NoTokens:
        return 0


def added_tokens(model: Any) -> int:
    """Special tokens of every window: a budget that is no larger than this is used up."""
    start, end = special_tokens(model.tokenizer if isinstance(model, Loaded) else model)
    return len(start) + len(end)


def key_of(text_hash: str, fingerprint: str, job: Job, budget: int | None, column: str | None = None) -> str:
    """sha256 of all that the record of a shard depends on.

    >>> len(key_of("", "", Job("minilm"), None))
    64
    """
    plain = [text_hash, fingerprint, job._asdict(), budget, column]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def observe_corpus(
    job: Job,
    corpus: Corpus,
    store: Store,
    *,
    max_tokens: int | None,
    loaded: Loaded | None = None,
    progress: Progress | None = None,
) -> Record:
    """Observe the shards one after the other, keep each in the store, and give the record of all of them.

    max_tokens  where to stop, counted over the shards in their order; None reads everything
    loaded      ``job.load()``, if it is in memory already
    progress    called with numbers of tokens that are done, those of earlier runs among them

    A shard that is kept already is only hashed: a text that has changed is refused. An interrupt (Ctrl-C) gives the
    record so far, with ``meta["complete"]`` false; the shards that were finished stay for the next run.
    """
    left = max_tokens
    begun: Observed | None = None
    loaded = loaded if loaded is not None else job.load()
    require_text_model(loaded.model)
    if loaded.tokenizer is None:
        advice = "Put one beside the model, or attach(model) and call the model yourself."
        raise ValueError(sentence("observe.tokenizer", "the tokenizer of the model", None, advice))
    added, complete = added_tokens(loaded), True
    if max_tokens is not None and max_tokens <= added:
        raise ValueError(sentence("observe_corpus.max_tokens", f"at least {added + 1}", max_tokens, "Raise it."))
    try:
        for shard in corpus.shards:
            if left is not None and left <= added:
                break
            if shard.ordinal in store.done:
                store.check(shard.ordinal, hash_of(shard, corpus.column))
                tokens = store.done[shard.ordinal].tokens
                if progress is not None and tokens:
                    progress(tokens)
            else:
                found = observe_shard(loaded, job, shard, corpus.column, left, progress)
                tokens = found.tokens
                if found.record is not None and not found.record.meta["complete"]:
                    begun, complete = found, False
                    break
                store.keep(shard.ordinal, found, left)
            left = None if left is None else left - tokens
    except KeyboardInterrupt:
        complete = False
        if not store.tokens:
            raise
    return store.merged(complete=complete, begun=begun)
