"""Compressed caches beside attention written out in float64: entries of every head, masses, windows, caps, sinks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="install cumulant[hf]")
from transformers import AttentionInterface

from cumulant.cache import MeasureCache
from cumulant.transformers import on_attention
from tests.cache.models import LENGTH, batch, close, decoder, drawn_entries, run
from tests.observatory.tiny_models import hf

PREFIX, COMPRESSED = 9, 7


def dense(module, query, key, value, entries, tokens, scaling, softcap, s_aux):
    """One call by its definition. Keys (batch, key heads, n, d) are those of the last n tokens.

    entries  of each sequence and key head, before these tokens; None in a layer with a window
    tokens   (batch, seen) True where a token is none of the padding
    """
    seen, n, group = tokens.shape[1], key.shape[2], query.shape[1] // key.shape[1]
    position = torch.arange(seen)
    rows, columns = position[-query.shape[2] :, None], position[-n:]
    window = getattr(module, "sliding_window", None) if entries is None else None
    visible = (columns <= rows) & (rows - columns < (window or seen + 1))
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b in range(len(query)):
        for h in range(query.shape[1]):
            keys, values, mass = key[b, h // group], value[b, h // group], torch.zeros(n, dtype=query.dtype)
            shown = visible & tokens[b, -n:]
            if entries is not None:
                own = entries[b][h // group]
                log_mass = torch.zeros(len(own.keys)) if own.log_mass is None else own.log_mass
                keys, values = torch.cat([own.keys, keys]), torch.cat([own.values, values])
                mass = torch.cat([log_mass.to(mass.dtype), mass])
                shown = torch.cat([torch.ones(len(rows), len(own.keys), dtype=torch.bool), shown], 1)
            score = query[b, h] @ keys.T * scaling
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            weight = (score + mass).masked_fill(~shown, -torch.inf).exp()
            total = weight.sum(1, keepdim=True) + (0 if s_aux is None else s_aux[h].exp())
            out[b, h] = torch.where(total > 0, weight @ values / total, 0)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("kind", "heads", "key_heads"),
    [
        ("llama", 4, 2),
        ("llama", 4, 1),
        ("llama", 10, 2),
        ("gpt2", 4, 4),
        ("gemma2", 4, 2),
        ("gpt_oss", 4, 2),
        ("phi3", 4, 4),
    ],
)
def test_logits_are_those_of_attention_written_out(kind, heads, key_heads, padded):
    dtype = torch.float32 if kind == "gpt_oss" else torch.float64  # torch multiplies experts in single precision
    model, (ids, mask) = decoder(kind, dtype, heads, key_heads), batch(padded)
    cache, theirs = MeasureCache(model), hf.DynamicCache(config=model.config)
    for each in (cache, theirs):
        run(model, each, ids, mask, 0, PREFIX)
    entries = {
        i: [drawn_entries(layer.shape.heads, 8, 3 * i + b, dtype) for b in range(2)]
        for i, layer in cache.compressible.items()
    }
    assert entries
    cache.compress(entries, tokens=COMPRESSED)
    for i in entries:  # the oracle has the tokens since, and the entries from here
        layer = theirs.layers[i]
        layer.keys, layer.values = layer.keys[:, :, COMPRESSED:], layer.values[:, :, COMPRESSED:]
    mine = [run(model, cache, ids, mask, a, b) for a, b in ((PREFIX, 13), (13, LENGTH))]
    expected = []
    for a, b in ((PREFIX, 13), (13, LENGTH)):

        def oracle(module, query, key, value, attention_mask, *, seen=b, **more):
            own, shown = entries.get(module.layer_idx), mask[:, :seen].bool()
            return dense(module, query, key, value, own, shown, more["scaling"], more.get("softcap"), more.get("s_aux"))

        AttentionInterface.register("cache_oracle", oracle)
        model.config._attn_implementation_internal = "cache_oracle"
        expected.append(run(model, theirs, ids, mask, a, b))
    for found, wanted in zip(mine, expected, strict=True):
        assert close(found, wanted, 1e-9 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_measure_of_a_head_is_what_attention_computes(kind):
    """G and output of a decoding step from `measure`, at the queries that the model had."""
    model, (ids, mask) = decoder(kind, torch.float64), batch(padded=False)
    cache, calls, queries = MeasureCache(model), [], []
    run(model, cache, ids, mask, 0, PREFIX)
    heads = cache.compressible[0].shape.heads
    cache.compress(
        {i: [drawn_entries(heads, 8, i + b, torch.float64) for b in (3, 5)] for i in (0, 1)}, tokens=COMPRESSED
    )
    own = AttentionInterface()["cumulant"]

    def remember(module, query, *rest, **more):
        queries.append(query * (8**-0.5 if more.get("scaling") is None else more["scaling"]))
        return own(module, query, *rest, **more)

    AttentionInterface.register("cumulant", remember)
    try:
        with on_attention(model, calls.append):
            run(model, cache, ids, mask, PREFIX, PREFIX + 1)
    finally:
        AttentionInterface.register("cumulant", own)
    for layer, (call, eta) in enumerate(zip(calls, queries, strict=True)):
        for b, h in ((0, 0), (1, 3)):
            key_head = h * heads // 4
            g = cache.measure(layer, key_head, b, attention_mask=mask).log_normalizer(eta[b, h])
            assert close(call.moments.log_normalizer[b, h], g, 1e-12)
            pairs = cache.measure(layer, key_head, b, values=True, attention_mask=mask)
            both = pairs.mean(torch.cat([eta[b, h], torch.zeros(1, 8, dtype=torch.float64)], -1))
            assert close(call.moments.mean[b, h], both[:, 8:], 1e-12)


def test_the_sum_of_two_caches_is_attention_to_both_texts():
    """Texts that did not see each other, then tokens that see both: one pass with that mask."""
    ones = torch.ones(2, LENGTH, dtype=torch.int64)
    model, (ids, _) = decoder("llama", torch.float64), batch(padded=False)
    first, second = MeasureCache(model), MeasureCache(model, start=5)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=first)
        model(ids[:, 5:11], past_key_values=second)
        assert (first.spans, second.spans) == (((0, 5),), ((5, 11),))
        both = second.compress(attention_mask=ones) + first.compress(attention_mask=ones)
        assert (both.spans, both.get_seq_length(), both.start) == (((0, 11),), 11, 0)
        assert both.entries(0)[0].positions.sort().values.tolist() == list(range(11))
        found = run(model, both, ids, ones, 11, LENGTH)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask[5:11, :5] = False
        expected = model(ids, attention_mask=mask[None, None].expand(2, 1, -1, -1)).logits[:, 11:]
    assert close(found, expected, 1e-12)
    assert both.full_bytes() == 2 * 2 * 2 * LENGTH * 16 * 8
