"""MeasureCache beside DynamicCache: the same numbers uncompressed and compressed without loss; generation; windows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="install cumulant[hf]")

from cumulant.cache import HeadEntries, MeasureCache
from cumulant.transformers import on_attention
from tests.cache.models import COMPRESSIBLE, KINDS, LENGTH, batch, close, decoder, drawn_entries, run
from tests.observatory.tiny_models import hf

CHUNKS = ((0, 9), (9, 13), (13, LENGTH))  # prefill, a chunk, a token


def logits(model: Any, cache: Any, padded: bool, compress_at: int | None = None, **more) -> torch.Tensor:
    """Of all tokens of the batch that are no padding, chunk by chunk; compressed after the first."""
    ids, mask = batch(padded)
    out = []
    for begin, end in CHUNKS:
        out.append(run(model, cache, ids, mask, begin, end))
        if begin == 0 and compress_at is not None:
            cache.compress(tokens=compress_at, attention_mask=mask[:, :end], **more)
    return torch.cat(out, 1)[mask.bool()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_uncompressed_it_is_the_dynamic_cache_on_any_attention(kind, padded):
    model = decoder(kind)
    for implementation in ("cumulant", "eager"):
        model.set_attn_implementation(implementation)
        theirs = logits(model, hf.DynamicCache(config=model.config), padded)
        cache = MeasureCache(model)
        assert torch.equal(logits(model, cache, padded), theirs)
        assert cache.get_seq_length() == LENGTH
        assert cache.keep == 1


@pytest.mark.parametrize("tokens", [9, 5])
@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_entries_that_are_the_tokens_change_nothing(kind, tokens):
    """Left padding is dropped, positions go on, the mask of the model is about later tokens."""
    model = decoder(kind)
    theirs = logits(model, hf.DynamicCache(config=model.config), padded=True)
    cache = MeasureCache(model)
    assert close(logits(model, cache, padded=True, compress_at=tokens), theirs, 1e-5)
    assert (cache.get_seq_length(), cache.compressed_tokens) == (LENGTH, tokens)
    for layer in cache.compressible.values():
        assert layer.store is not None
        assert layer.store.atoms.lengths.tolist() == [[tokens] * layer.shape.heads, [tokens - 4] * layer.shape.heads]


def generated(model: Any, cache: Any, mask: torch.Tensor, ids: torch.Tensor, **more) -> torch.Tensor:
    fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "do_sample": False} | more
    torch.manual_seed(0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **fixed)


@pytest.mark.parametrize(
    "search", [{}, {"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_generation_from_compressed_prompts(kind, search):
    model, (ids, mask) = decoder(kind), batch()
    theirs = generated(model, hf.DynamicCache(config=model.config), mask, ids, **search)
    assert torch.equal(generated(model, MeasureCache(model), mask, ids, **search), theirs)
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, LENGTH - 1)
    cache.compress(attention_mask=mask)
    cache.batch_repeat_interleave(search.get("num_beams", 1))  # as any cache that is filled before the beams begin
    before = copy.deepcopy(cache)
    assert torch.equal(generated(model, cache, mask, ids, **search), theirs)
    assert torch.equal(generated(model, before, mask, ids, **search), theirs)  # a copy is a cache of its own
    assert cache.get_seq_length() == LENGTH + 5


def test_assisted_generation_takes_tokens_back_as_from_a_dynamic_cache():
    model, (ids, mask) = decoder("llama"), batch()
    ids, mask = ids[:1], mask[:1]
    greedy = generated(model, MeasureCache(model), mask, ids)
    assert torch.equal(generated(model, MeasureCache(model), mask, ids, prompt_lookup_num_tokens=3), greedy)
    found = []
    for cache in (hf.DynamicCache(config=model.config), MeasureCache(model)):
        run(model, cache, ids, mask, 0, LENGTH - 1)
        if isinstance(cache, MeasureCache):
            cache.compress(tokens=10)
        found.append(generated(model, cache, mask, ids, prompt_lookup_num_tokens=3))
    assert torch.equal(found[1], found[0])


def test_sequences_of_a_batch_are_chosen_repeated_and_dropped():
    model, (ids, mask) = decoder("llama"), batch()
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, LENGTH - 1)
    cache.compress(tokens=11, attention_mask=mask)
    theirs = run(model, copy.deepcopy(cache), ids, mask, LENGTH - 1, LENGTH)
    held = cache.compressible[0].store
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.compressible[0].store.atoms.atoms is held.atoms.atoms  # beams share the entries of their prompt
    assert torch.equal(run(model, cache, ids, mask, LENGTH - 1, LENGTH), theirs)
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.compressible[0].batch_size == 1


def test_cropping_and_beginning_anew():
    model, (ids, mask) = decoder("llama"), batch(padded=False)
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, 12)
    cache.compress(tokens=8, attention_mask=mask)
    theirs = run(model, copy.deepcopy(cache), ids, mask, 12, LENGTH)
    run(model, cache, ids, mask, 12, 13)
    cache.crop(-1)
    assert torch.equal(run(model, cache, ids, mask, 12, LENGTH), theirs)
    with pytest.raises(ValueError, match=r"MeasureCache\.crop: expected at most the 6 tokens that are not compressed"):
        cache.crop(-7)
    cache.reset()
    assert (cache.get_seq_length(), cache.bytes(), cache.keep) == (0, 0, 1)
    full = run(model, cache, ids, mask, 0, LENGTH)
    assert torch.equal(full, run(model, MeasureCache(model), ids, mask, 0, LENGTH))


def test_compressing_again_replaces_what_was_there():
    model, (ids, mask) = decoder("llama"), batch(padded=False)
    cache = MeasureCache(model)
    theirs = logits(model, MeasureCache(model), padded=False)
    run(model, cache, ids, mask, 0, 6)
    cache.compress(tokens=4, attention_mask=mask)
    run(model, cache, ids, mask, 6, 12)
    cache.compress(tokens=10, attention_mask=mask)
    assert [len(e.keys) for e in cache.entries(1, 0, mask)] == [12, 12]
    assert cache.entries(1, 0, mask)[0].positions.tolist() == list(range(12))
    assert close(run(model, cache, ids, mask, 12, LENGTH)[0], theirs.reshape(2, LENGTH, -1)[0, 12:], 1e-5)


def test_one_layer_one_sequence_is_replaced():
    model, (ids, mask) = decoder("llama"), batch()
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, 9)
    others = drawn_entries(2, 8, 2, torch.float32)
    cache.compress(attention_mask=mask[:, :9]).replace(1, others, batch=1)
    for mine, given in zip(cache.entries(1, 1), others, strict=True):
        assert torch.equal(mine.keys, given.keys)
        assert torch.equal(mine.positions, given.positions)
    assert [len(e.keys) for e in cache.entries(1, 0)] == [9, 9]
    assert [len(e.keys) for e in cache.entries(0, 1)] == [5, 5]


def test_a_batch_of_one_needs_no_list_of_sequences_and_weightless_entries_are_absent():
    model, (ids, mask) = decoder("llama"), batch()
    logits_of = []
    for form in (lambda heads: [heads], lambda heads: heads):
        cache = MeasureCache(model)
        run(model, cache, ids[:1], mask[:1], 0, 9)
        heads = [
            HeadEntries(torch.cat([e.keys, e.keys]), torch.cat([e.values, e.values]), torch.zeros(18), None)
            for e in cache.entries(0)
        ]
        for e in heads:
            e.log_mass[9:] = -torch.inf
        cache.compress([form(heads), None])
        assert [len(e.keys) for e in cache.entries(0)] == [9, 9]
        logits_of.append(run(model, cache, ids[:1], mask[:1], 9, 12))
    theirs = MeasureCache(model)
    run(model, theirs, ids[:1], mask[:1], 0, 9)
    for found in logits_of:
        assert close(found, run(model, copy.deepcopy(theirs), ids[:1], mask[:1], 9, 12), 1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma2"])
def test_statistics_of_a_compressed_cache_are_those_of_the_whole(kind):
    experts = kind == "gpt_oss"  # torch multiplies them in single precision
    model, (ids, mask) = decoder(kind, torch.float32 if experts else torch.float64), batch(padded=False)
    tolerance = 1e-5 if experts else 1e-12
    names = ("entropy", "effective_atoms", "score_variance", "value_trace", "max_score")
    found = []
    for compressed in (False, True):
        cache, calls = MeasureCache(model), []
        run(model, cache, ids, mask, 0, 9)
        if compressed:
            cache.compress(tokens=7, attention_mask=mask)
        with on_attention(model, calls.append, statistics=names):
            run(model, cache, ids, mask, 9, LENGTH)
        found.append(calls)
    for whole, parts in zip(*found, strict=True):
        for name in ("log_normalizer", "mean", *names):
            assert close(getattr(parts.moments, name), getattr(whole.moments, name), tolerance), name
        assert (whole.moments.sink_mass is None) == (parts.moments.sink_mass is None) == (not experts)
        if whole.moments.sink_mass is not None:
            assert close(parts.moments.sink_mass, whole.moments.sink_mass, tolerance)


def test_gradients_reach_queries_through_a_compressed_cache():
    model, (ids, mask) = decoder("llama"), batch(padded=False)
    slopes = []
    for compressed in (False, True):
        cache = MeasureCache(model)
        run(model, cache, ids, mask, 0, 9)
        if compressed:
            cache.compress(tokens=6, attention_mask=mask)
        weight = model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
        model(ids[:, 9:], past_key_values=cache).logits.square().mean().backward()
        slopes.append(weight.grad.clone())
        weight.grad = None
        weight.requires_grad_(False)
    assert slopes[0].abs().max() > 0
    assert close(slopes[1], slopes[0], 1e-5)


def test_half_precision():
    model, (ids, mask) = decoder("llama", torch.bfloat16), batch(padded=False)
    theirs = MeasureCache(model)
    run(model, theirs, ids, mask, 0, 9)
    cache = copy.deepcopy(theirs)
    whole = [[e._replace(log_mass=torch.zeros(9)) for e in cache.entries(0, b, mask)] for b in (0, 1)]
    cache.compress({0: whole}, attention_mask=mask)
    assert cache.compressible[0].store.atoms.log_weights.dtype == torch.float32
    assert close(run(model, cache, ids, mask, 9, LENGTH), run(model, theirs, ids, mask, 9, LENGTH), 0.03)


def test_a_dynamic_cache_is_taken_over():
    for kind in ("llama", "gemma2"):
        model, (ids, mask) = decoder(kind), batch(padded=False)
        theirs = hf.DynamicCache(config=model.config)
        run(model, theirs, ids, mask, 0, 9)
        cache = MeasureCache.from_cache(theirs, model).compress(tokens=8, attention_mask=mask)
        assert close(run(model, cache, ids, mask, 9, LENGTH), run(model, theirs, ids, mask, 9, LENGTH), 1e-5)


def test_bytes_are_those_of_the_tensors():
    model, (ids, mask) = decoder("gemma2"), batch()
    cache = MeasureCache(model)
    assert (cache.bytes(), cache.keep) == (0, 1)
    run(model, cache, ids, mask, 0, 12)
    full = cache.full_bytes()
    assert cache.bytes() == full == 2 * 2 * 8 * 4 * 2 * (12 + 4)  # a full layer, and a window of 5 for the next token
    full_layer, heads = cache.compressible[1], drawn_entries(2, 8, 4, torch.float32)
    cache.compress({1: [heads, heads]}, tokens=10)
    held = [full_layer.keys, full_layer.values, *full_layer.store.tensors().values()]
    window: Any = cache.layers[0]
    held += [window.keys, window.values]
    assert cache.bytes() == sum(t.numel() * t.element_size() for t in held)
    assert sum(t.untyped_storage().nbytes() for t in held[:-2]) == sum(t.nbytes for t in held[:-2])  # nothing besides
    entries = 2 * sum(len(h.keys) for h in heads)
    numbers = entries * 2 * 8 + 2 * 2 * 2 * 2 * 8 + entries  # keys and values of entries and of 2 tokens, and log-mass
    assert (
        cache.bytes() == 4 * (numbers + entries) + 2 * 4 * 8 + 2 * 2 * 8 * 4 * 2 * 4
    )  # int32 positions, where heads are
    assert cache.keep == cache.bytes() / full
    assert "24 entries" in repr(cache).replace(str(entries), "24")
