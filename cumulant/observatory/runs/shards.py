"""A corpus observed shard by shard: one shard, in any process, and all of them in turn.

A shard is a reference to parts of files; whoever observes it reads them. Its record depends on its text, the model and
the settings alone, so that it can be stored (`store.Store`), repeated, or made on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.models.load import Loaded, require_text_model
from cumulant.observatory.record.record import Record
from cumulant.observatory.runs.observe import Progress, bypass_notes, observe
from cumulant.observatory.runs.settings import ObservationSettings
from cumulant.observatory.text.corpus import Corpus, Shard, UnreadableDocument, hash_of, texts_of
from cumulant.observatory.text.windows import NoTokens, batches, special_tokens

if TYPE_CHECKING:
    from cumulant.observatory.runs.store import Store


class ShardObservation(NamedTuple):
    """The record of one shard and its counts.

    record      None if no token was in the shard
    text_hash   `corpus.hash_of` the shard
    unreadable  documents that could not be read
    skipped     documents without a token
    """

    record: Record | None
    text_hash: str
    tokens: int
    sequences: int
    unreadable: tuple[UnreadableDocument, ...]
    skipped: int = 0


def observe_shard(
    loaded: Loaded,
    settings: ObservationSettings,
    shard: Shard,
    column: str | None,
    budget: int | None,
    progress: Progress | None = None,
) -> ShardObservation:
    """Let the model of ``settings.load()`` read one shard.

    budget  tokens at most; the last window is cut to fit. None: all

    An interrupt (Ctrl-C) ends the reading as in `observe`: the record then has ``meta.complete`` false.
    """
    unreadable: list[UnreadableDocument] = []
    texts = texts_of(shard, column, unreadable)
    shuffles = settings.null == "shuffled"
    try:
        record = observe(
            loaded,
            texts,
            quantities=settings.quantities,
            max_tokens=budget,
            max_length=settings.max_length,
            batch_size=settings.batch_size,
            seed=settings.seed,
            hidden_states=not shuffles,
            alter=shuffled_keys(settings.seed + shard.ordinal) if shuffles else None,
            progress=progress,
            unreadable=unreadable,
        )
    except NoTokens as error:
        return ShardObservation(None, texts.sha256(), 0, 0, tuple(unreadable), error.skipped)
    meta = record.meta
    plain = replace(meta, created="", notes=(*loaded.notes, *bypass_notes(record)))
    counts = meta.tokens, meta.sequences
    return ShardObservation(replace(record, meta=plain), texts.sha256(), *counts, tuple(unreadable), meta.skipped)


def shuffled_keys(seed: int) -> Callable[[AttentionCall], AttentionCall]:
    """The null "shuffled", for `attach(alter=...)`: keys permuted over all tokens of the batch, alike for all heads.

    The law of single keys stays, their fit to queries is gone. Values stay where they are, and so do masks, biases and
    sinks.
    """
    generator = torch.Generator().manual_seed(seed)

    def alter(call: AttentionCall) -> AttentionCall:
        key = call.key.movedim(1, 2)  # (batch, n, heads, d)
        tokens = torch.ones(key.shape[:2], dtype=torch.bool)
        if call.rows is not None and call.rows.shape == tokens.shape:
            tokens = call.rows.cpu()
        index = tokens.flatten().nonzero()[:, 0]
        order = index[torch.randperm(len(index), generator=generator)]
        flat = key.flatten(0, 1).clone()
        flat[index] = key.flatten(0, 1)[order]
        return replace(call, key=flat.reshape(key.shape).movedim(2, 1))

    return alter


def count_tokens(
    model: Any, settings: ObservationSettings, shard: Shard, column: str | None, budget: int | None
) -> int:
    """The tokens that `observe_shard` would count, without running the model; ``model`` is a Loaded or a tokenizer."""
    tokenizer = model.tokenizer if isinstance(model, Loaded) else model
    stream = batches(
        texts_of(shard, column),
        tokenizer,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
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


def shard_key(
    text_hash: str, fingerprint: str, settings: ObservationSettings, budget: int | None, column: str | None = None
) -> str:
    """sha256 of everything that the record of a shard depends on.

    >>> len(shard_key("", "", ObservationSettings("minilm"), None))
    64
    """
    plain = [text_hash, fingerprint, settings._asdict(), budget, column]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def observe_corpus(
    settings: ObservationSettings,
    corpus: Corpus,
    store: Store,
    *,
    max_tokens: int | None,
    loaded: Loaded | None = None,
    progress: Progress | None = None,
) -> Record:
    """Observe the shards one after the other, put each into the store, and merge their records.

    max_tokens  where to stop, counted over the shards in their order; None reads everything
    loaded      ``settings.load()``, if it is in memory already
    progress    called with numbers of tokens that are done, those of earlier runs among them

    A shard that is in the store is only hashed: a text that has changed is refused. An interrupt (Ctrl-C) gives the
    record so far, with ``meta.complete`` false; the shards that were finished stay for the next run.
    """
    left = max_tokens
    partial: ShardObservation | None = None
    loaded = loaded if loaded is not None else settings.load()
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
                observed = observe_shard(loaded, settings, shard, corpus.column, left, progress)
                tokens = observed.tokens
                if observed.record is not None and not observed.record.meta.complete:
                    partial, complete = observed, False
                    break
                store.put(shard.ordinal, observed, left)
            left = None if left is None else left - tokens
    except KeyboardInterrupt:
        complete = False
        if not store.tokens:
            raise
    return store.merged(complete=complete, partial=partial)
