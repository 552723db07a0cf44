"""A model reads texts, and the record of its heads and hidden states is returned: texts, a shard, a whole corpus.

A shard is a reference to parts of files; whoever observes it reads them. Its record depends on its text, the model and
the settings alone, so that it can be stored (`store.Store`), repeated, or made on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.files import versions
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.hooks.structure import unwrapped
from cumulant.observatory.models.load import Loaded, require_text_model
from cumulant.observatory.record.meta import few_tokens_notes
from cumulant.observatory.record.record import EXCERPTS, Excerpt, Record
from cumulant.observatory.record.recorder import NOT_RECORDED, PERTURBED_SHARE, Recorder, attach, covariance_share
from cumulant.observatory.record.weights import with_weights
from cumulant.observatory.runs.repeated import with_probe
from cumulant.observatory.runs.settings import ObservationSettings
from cumulant.observatory.runs.speech import SpeechBatch, SpeechBatches, require_speech_model, speech_notes
from cumulant.observatory.text.corpus import (
    Corpus,
    Shard,
    TextInput,
    UnreadableDocument,
    hash_of,
    reads_audio,
    texts_of,
)
from cumulant.observatory.text.windows import Batch, NoTokens, batches, delimiters, special_tokens, token_strings

if TYPE_CHECKING:
    from cumulant.observatory.runs.store import Store

EXCERPT_TOKENS = 192  # of an excerpt
Progress = Callable[[int], None]


def observe(
    model: Loaded | nn.Module,
    texts: Iterable[TextInput],
    *,
    tokenizer: Any = None,
    quantities: str | Sequence[str] | None = None,
    max_tokens: int | None = 20_000,
    max_length: int = 256,
    batch_size: int = 16,
    seed: int = 0,
    hidden_states: bool = True,
    exact_depth: bool = False,
    weights: bool = True,
    perturbed_share: float = PERTURBED_SHARE,
    alter: Callable[[AttentionCall], AttentionCall] | None = None,
    progress: Progress | None = None,
    unreadable: list[UnreadableDocument] | None = None,
) -> Record:
    """Let a model read texts and keep statistics of its heads and of its hidden states.

    model       what `models.load` gives, or a transformers model with its ``tokenizer``; one that reads images is for
                `attach`
    texts       strings, or what `read_texts` yields; for a model that reads speech `plan(audio=...).texts()`;
                {"parts": [{"name": "prompt", "text": "Why?"}, …]} for those with named parts, see `Record.parts`
    quantities  names or groups; all if None
    max_tokens  where to stop; None reads everything
    max_length  tokens of a window; longer texts are cut
    exact_depth  take every token for the logit lens and for what is added to the stream, not a sample
    weights     also what follows from the weights: gradient-ness and ascent index of every head
    perturbed_share  of the windows whose states are perturbed, to see whether blocks expand: each costs another pass
    progress    called with the number of tokens of every batch that is done
    unreadable  takes the texts that the tokenizer cannot read, which are then left out; without it they are refused

    Memory does not grow with the length of the texts. An interrupt (Ctrl-C) ends the reading and gives the record so
    far, with ``meta.complete`` false.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "rose": 2, "is": 3}, "[PAD]"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    >>> sizes = {"vocab_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**sizes, intermediate_size=8)).eval()
    >>> record = observe(model, ["a rose is a rose is a rose"], tokenizer=tokenizer)
    >>> record.meta.tokens, record.tally("entropy").mean.shape                 # one number for each head
    (8, torch.Size([2]))
    """
    network, tokenizer = (model.model, model.tokenizer) if isinstance(model, Loaded) else (model, tokenizer)
    network = unwrapped(network)
    limits = {"max_length": max_length, "batch_size": batch_size, "max_tokens": max_tokens}
    if isinstance(model, Loaded) and model.features is not None:
        stream = SpeechBatches(model, texts, **limits)
        longest = stream.positions
    else:
        require_text_model(network)
        if tokenizer is None:
            advice = "Pass tokenizer=..., or attach(model) and call the model yourself."
            raise ValueError(sentence("observe.tokenizer", "the tokenizer of the model", None, advice))
        stream, longest = batches(texts, tokenizer, **limits, unreadable=unreadable), max_length
    device = next(network.parameters()).device
    excerpts: dict[int, Excerpt] = {}  # by twice the number of the text, as batches are sorted by length
    tokens = sequences = 0
    complete = True
    separating = None if tokenizer is None else delimiters(tokenizer)
    known = {"seed": seed, "hidden_states": hidden_states, "exact_depth": exact_depth, "delimiters": separating}
    with attach(network, quantities, **known, alter=alter) as recorder:
        try:
            for batch in stream:
                first = (batch.text_number < EXCERPTS) & (batch.offset == 0)
                recorder.batch(
                    batch.text_index,
                    batch.offset,
                    excerpts=first.nonzero()[:, 0].tolist(),
                    covariance_share=covariance_share(batch_size, longest),
                    perturbed_share=perturbed_share,
                    parts=None if batch.parts is None else (batch.input_ids, batch.parts, batch.part_names),
                )
                with torch.inference_mode():
                    network(**batch.inputs(device), **_decoder(network, batch, device))
                excerpts |= _excerpts(recorder, batch, tokenizer)
                tokens, sequences = tokens + batch.tokens, sequences + len(batch.names)
                if progress is not None:
                    progress(batch.tokens)
        except KeyboardInterrupt:
            complete = False
            if not recorder.parts:
                raise
        record = recorder.record(weights=False)
    loaded = model if isinstance(model, Loaded) else None
    meta = replace(
        record.meta,
        model=loaded.name if loaded else type(network).__name__,
        fingerprint=loaded.fingerprint if loaded else "",
        source=loaded.source if loaded else "",
        notes=(*(loaded_notes(loaded) if loaded else ()), *bypass_notes(record), *few_tokens_notes(tokens)),
        tokens=tokens,
        sequences=sequences,
        skipped=stream.skipped,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
        complete=complete,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions("torch", "transformers", "tokenizers", "safetensors"),
    )
    record = replace(record, excerpts=tuple(excerpts[number] for number in sorted(excerpts)), meta=meta)
    special = () if tokenizer is None else tuple(tokenizer.all_special_ids)
    return with_probe(with_weights(record, network), network, special) if weights else record


def loaded_notes(loaded: Loaded) -> tuple[str, ...]:
    """The notes of a model, and what a token is if it reads sound."""
    return loaded.notes if loaded.features is None else (*loaded.notes, *speech_notes(loaded))


def bypass_notes(record: Record) -> list[str]:
    """A note on attention that is not in a record."""
    names = [name for name, note in record.meta.layer_notes.items() if note == NOT_RECORDED]
    if not names:
        return []
    first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    verb = "does" if len(names) == 1 else "do"
    return [f"{len(names)} attention modules {verb} not go through transformers' interface and are not here: {first}"]


def _decoder(network: nn.Module, batch: Batch, device: torch.device) -> dict:
    """An encoder–decoder writes what it reads: its decoder gets the same tokens, shifted by its start token."""
    config: Any = getattr(network, "config", None)
    if isinstance(batch, SpeechBatch) or not getattr(config, "is_encoder_decoder", False):
        return {}
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    ids = batch.input_ids.roll(1, 1)
    ids[:, 0] = start
    mask = batch.attention_mask.roll(1, 1)
    mask[:, 0] = 1
    return {"decoder_input_ids": ids.to(device), "decoder_attention_mask": mask.to(device)}


def _excerpts(recorder: Recorder, batch: Batch, tokenizer: Any) -> dict[int, Excerpt]:
    out = {}
    for sequence, values in sorted(recorder.token_values.items()):
        length = min(EXCERPT_TOKENS, int(batch.attention_mask[sequence].sum()))
        ids, name = batch.input_ids[sequence, :length].tolist(), batch.names[sequence]
        tokens = tuple(token_strings(tokenizer, ids) if tokenizer is not None else (f"<{i}>" for i in ids))
        number = int(batch.text_number[sequence])
        out[2 * number] = Excerpt(name, tokens, _beginning(values, batch.input_ids.shape[1], length))
        if isinstance(batch, SpeechBatch):
            times = batch.times(sequence)[:EXCERPT_TOKENS]
            cut = _beginning(values, batch.positions, len(times))
            out[2 * number + 1] = Excerpt(f"{name}, seconds of sound", times, cut)
    return out


def _beginning(values: dict[str, dict[str, Tensor]], whole: int, length: int) -> dict[str, dict[str, Tensor]]:
    """The first tokens of a sequence of ``whole``, of the attention that reads it."""
    return {
        quantity: {name: t[:, :length].contiguous() for name, t in by_layer.items() if t.shape[1] == whole}
        for quantity, by_layer in values.items()
    }


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
            exact_depth=settings.exact_depth,
            weights=False,
            alter=shuffled_keys(settings.seed + shard.ordinal) if shuffles else None,
            progress=progress,
            unreadable=unreadable,
        )
    except NoTokens as error:
        return ShardObservation(None, texts.sha256(), 0, 0, tuple(unreadable), error.skipped)
    meta = record.meta
    plain = replace(meta, created="", notes=(*loaded_notes(loaded), *bypass_notes(record)))
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
    if reads_audio(corpus):
        require_speech_model(loaded)
    else:
        require_text_model(loaded.model)
        if loaded.tokenizer is None:
            advice = "Put one beside the model, or attach(model) and call the model yourself."
            raise ValueError(sentence("observe.tokenizer", "the tokenizer of the model", None, advice))
    added, complete = 0 if reads_audio(corpus) else added_tokens(loaded), True
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
