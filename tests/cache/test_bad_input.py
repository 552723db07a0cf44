"""What a MeasureCache refuses, in a sentence that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="install cumulant[hf]")

from cumulant.cache import HeadEntries, MeasureCache
from cumulant.observatory import attach
from tests.cache.models import LENGTH, batch, decoder, drawn_entries, run
from tests.observatory.tiny_models import hf, model_config, transformer

ONES = torch.ones(2, LENGTH, dtype=torch.int64)


def filled(kind: str = "llama", tokens: int = 9) -> tuple[Any, MeasureCache]:
    model, (ids, mask) = decoder(kind), batch(padded=False)
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, tokens)
    return model, cache


def latent() -> Any:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return hf.AutoConfig.for_model("deepseek_v3", **sizes)


def linear() -> Any:
    return hf.AutoConfig.for_model("qwen3_next", num_hidden_layers=4)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda: nn.Linear(2, 2), TypeError, "expected a decoder of transformers, or its configuration, got a Linear"),
        (lambda: "gpt2", TypeError, "got a str"),
        (lambda: model_config("t5", 4, 2, 8, 2), ValueError, "got the encoder-decoder 't5'"),
        (lambda: model_config("whisper", 4, 2, 8, 2), ValueError, "encoder-decoder 'whisper'"),
        (latent, ValueError, r"'deepseek_v3' with latent attention \(MLA\)"),
        (linear, ValueError, "layers that hold keys and values of tokens, got 'qwen3_next' with Linear"),
        (
            lambda: transformer("bloom", heads=4, key_heads=2, head_dim=8, layers=1, seed=0),
            ValueError,
            "BloomModel, whose attention is written out in its own code",
        ),
    ],
)
def test_models_without_such_a_cache(model, error, words):
    with pytest.raises(error, match=words):
        MeasureCache(model())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_functions_on_a_compressed_cache(implementation):
    model, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    model.set_attn_implementation(implementation)
    ids = batch()[0]
    with pytest.raises(TypeError, match='MeasureCache: expected attn_implementation="cumulant", which reads'):
        model(ids[:, 9:], past_key_values=cache)


def test_the_observatory_says_that_it_cannot_read_compressed_keys():
    model, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    with attach(model), pytest.raises(TypeError, match="which reads compressed entries"):
        model(batch()[0][:, 9:], past_key_values=cache)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (lambda m: hf.StaticCache(config=m.config, max_cache_len=8), "got a StaticCache"),
        (lambda m: hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()), "got a EncoderDecoderCache"),
        (lambda m: (torch.zeros(1), torch.zeros(1)), "got a tuple"),
    ],
)
def test_caches_of_other_classes(cache, words):
    model = decoder("llama")
    with pytest.raises(TypeError, match=f"MeasureCache.from_cache: expected a DynamicCache of the same model, {words}"):
        MeasureCache.from_cache(cache(model), model)


def test_dynamic_caches_of_other_layers():
    with pytest.raises(ValueError, match=r"got one with 2 layers \(DynamicLayer\)\. Make it by DynamicCache\(config="):
        MeasureCache.from_cache(hf.DynamicCache(config=decoder("llama").config), decoder("gemma2"))


def one(keys=(3, 8), values=(3, 8), mass=None, positions=None, dtype=torch.float32) -> HeadEntries:
    return HeadEntries(torch.zeros(keys, dtype=dtype), torch.zeros(values, dtype=dtype), mass, positions)


@pytest.mark.parametrize(
    ("head", "error", "words"),
    [
        (one((3, 7)), ValueError, r"\[1\]\.keys: expected shape \(m=3, 8\), got \(3, 7\)"),
        (one((3, 8), (2, 8)), ValueError, r"\[1\]\.values: expected shape \(m=3, 8\), got \(2, 8\)"),
        (one((1, 3, 8)), ValueError, r"\[1\]\.keys: expected shape \(m=1, 8\)"),
        (one(dtype=torch.float64), TypeError, r"\[1\]\.keys: expected torch.float32 on cpu, got torch.float64 on cpu"),
        (one(mass=torch.zeros(2)), ValueError, r"\[1\]\.log_mass: expected shape \(m=3,\), got \(2\)"),
        (one(mass=torch.zeros(3, dtype=torch.int64)), TypeError, r"\[1\]\.log_mass: expected a floating dtype"),
        (one(mass=torch.tensor([0.0, 0.0, torch.inf])), ValueError, r"\[1\]\.log_mass: expected values below \+inf"),
        (one(mass=torch.tensor([0.0, 0.0, torch.nan])), ValueError, r"\[1\]\.log_mass: expected values below \+inf"),
        (
            one(positions=torch.tensor([0, 1, 9])),
            ValueError,
            r"\[1\]\.positions: expected positions from 0 to 8, or −1",
        ),
        (one(positions=torch.tensor([-2, 1, 3])), ValueError, r"\[1\]\.positions: .*, got from -2 to 3"),
        (one(positions=torch.zeros(3)), TypeError, r"\[1\]\.positions: expected integers"),
        (one()._replace(keys=torch.full((3, 8), torch.nan)), ValueError, r"\[1\]\.keys: expected finite numbers"),
        ((torch.zeros(3, 8), torch.zeros(3, 8), None), TypeError, r"\[1\]: expected HeadEntries, got tuple"),
    ],
)
def test_entries_of_other_shapes_and_dtypes_change_nothing(head, error, words):
    _, cache = filled()
    before = cache.bytes()
    with pytest.raises(error, match=r"MeasureCache\.compress\.entries\[1\]\[0\]" + words):
        cache.compress({1: [[one(), head], None]}, attention_mask=ONES)
    assert (cache.bytes(), cache.compressed_tokens) == (before, 0)


def test_entries_for_other_heads_sequences_and_layers():
    _, cache = filled()
    heads = drawn_entries(2, 8, 1, torch.float32)
    for entries, error, words in (
        ({0: [heads[:1], heads]}, ValueError, r"entries\[0\]\[0\]: expected entries of 2 key heads, got 1"),
        ({0: [heads]}, ValueError, r"entries\[0\]: expected lists of 2 sequences, got 1"),
        ({0: heads}, ValueError, r"entries\[0\]\[0\]: expected entries of 2 key heads, got one"),
        ({2: [heads, heads]}, ValueError, r"MeasureCache\.layer: expected at least 0 and at most 1, got 2"),
    ):
        with pytest.raises(error, match=words):
            cache.compress(entries, attention_mask=ONES)
    _, windows = filled("gemma2")
    with pytest.raises(
        ValueError, match=r"expected a layer with full attention, of \[1\], got 0, DynamicSlidingWindow"
    ):
        windows.replace(0, heads)
    cache.compress(attention_mask=ONES)
    with pytest.raises(ValueError, match=r"MeasureCache\.batch: expected at least 0 and at most 1, got 2"):
        cache.replace(0, heads, batch=2)
    with pytest.raises(ValueError, match=r"kv_head: expected at least 0 and at most 1, got 2"):
        cache.measure(0, 2)


@pytest.mark.long
def test_compiled_models_leave_the_graph_or_say_why_not():
    model, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    ids, mask = batch(padded=False)
    theirs = run(model, copy.deepcopy(cache), ids, mask, 9, LENGTH)
    for fullgraph in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        if fullgraph:
            with pytest.raises(Exception, match=r"MeasureCache: expected a pass that torch.compile may leave"):
                run(compiled, copy.deepcopy(cache), ids, mask, 9, LENGTH)
        else:
            assert torch.equal(run(compiled, copy.deepcopy(cache), ids, mask, 9, LENGTH), theirs)


def test_what_cannot_be_compressed():
    model, cache = filled()
    for tokens, words in ((10, "at most 9, got 10"), (-1, "at least 0 and at most 9, got -1")):
        with pytest.raises(ValueError, match=rf"MeasureCache\.compress\.tokens: expected .*{words}"):
            cache.compress(tokens=tokens)
    cache.compress(tokens=6, attention_mask=ONES)
    with pytest.raises(ValueError, match="expected at least 6 and at most 9, got 5"):
        cache.compress(tokens=5, attention_mask=ONES)
    with pytest.raises(ValueError, match=r"MeasureCache.compress: expected tokens, got an empty cache"):
        MeasureCache(model).compress()
    with pytest.raises(ValueError, match=r"MeasureCache: expected tokens, got an empty cache"):
        MeasureCache(model).entries(0)
    for call in (cache.compress, lambda: cache.entries(0), lambda: cache.measure(0, 0)):
        with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch=2, 9\), got NoneType\. Pass the"):
            call()
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch=2, 9\), got \(2, 8\)"):
        cache.compress(attention_mask=torch.ones(2, 8))
    _, windows = filled("mistral")
    with pytest.raises(ValueError, match="expected a layer with full attention, got a model without"):
        windows.compress()


def test_masks_and_batches_of_other_sizes():
    model, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    ids, _ = batch()
    table = torch.ones(2, 1, 5, LENGTH, dtype=torch.bool)
    with pytest.raises(ValueError, match="expected a mask over the 8 tokens that are not compressed, got one of 14"):
        model(ids[:, 9:], past_key_values=cache, attention_mask=table)
    _, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    bias = torch.zeros(2, 1, 5, 8).fill_(0.5)
    with pytest.raises(ValueError, match="expected no bias of pairs on a compressed cache, got one"):
        model(ids[:, 9:], past_key_values=cache, attention_mask=bias)
    _, cache = filled()
    cache.compress(tokens=6, attention_mask=ONES)
    with pytest.raises(ValueError, match=r"expected 2 sequences in torch\.float32, as are held, got 1"):
        model(ids[:1, 9:], past_key_values=cache)
    with pytest.raises(ValueError, match=r"as are held, got 2 in torch\.float64"):
        decoder("llama", torch.float64)(ids[:, 9:], past_key_values=cache)


def test_positions_beyond_the_range_of_the_model():
    model = decoder("llama")
    ids = torch.randint(3, 50, (1, 65))
    cache = MeasureCache(model)
    words = r"MeasureCache\.update: expected at most 64 tokens \(max_position_embeddings\), got 65"
    with torch.no_grad():
        with pytest.raises(ValueError, match=words):
            model(ids, past_key_values=cache)
        model(ids[:, :64], past_key_values=cache)
        cache.compress()
        with pytest.raises(ValueError, match=words):
            model(ids[:, 64:], past_key_values=cache)


def test_caches_that_cannot_be_added():
    model, cache = filled()
    second = MeasureCache(model, start=9)
    with pytest.raises(ValueError, match="expected two caches with tokens, got an empty one"):
        _ = cache + second
    run(model, second, *batch(padded=False), 0, 3)
    with pytest.raises(ValueError, match="expected sequences of entries, got a batch with 9 tokens as they are"):
        _ = cache + second
    cache.compress(attention_mask=ONES)
    second.compress(attention_mask=ONES)
    assert (cache + second).get_seq_length() == 12
    overlapping = MeasureCache(model, start=5)
    run(model, overlapping, *batch(padded=False), 0, 2)
    with pytest.raises(ValueError, match="expected disjoint positions, got both with positions 5 to 6"):
        _ = cache + overlapping
    one_sequence = MeasureCache(model, start=9)
    run(model, one_sequence, *(t[:1] for t in batch(padded=False)), 0, 3)
    with pytest.raises(ValueError, match=r"expected 2 sequences of .*, got 1 of"):
        _ = cache + one_sequence
    other = decoder("qwen3")
    theirs = MeasureCache(other, start=9)
    run(other, theirs, *batch(padded=False), 0, 3)
    with pytest.raises(ValueError, match=r"__add__: expected a cache of this 'llama', got .*, made by another 'qwen3'"):
        _ = cache + theirs
    windows, cache_of_windows = filled("gemma2")
    with pytest.raises(ValueError, match="expected 0 for a model with sliding windows, got 9"):
        MeasureCache(windows, start=9)
    with pytest.raises(ValueError, match="expected a model with full attention in every layer, got one with windows"):
        _ = cache_of_windows + cache_of_windows
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = cache + 1  # pyright: ignore[reportOperatorIssue]
