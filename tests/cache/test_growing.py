"""A MeasureCache that compresses while its text grows: exact before, bounded, the same however the text comes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.cache import models
from tests.cache.prefixes import decoder, ids

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

import cumulant.transformers
from cumulant.cache import Backtest, Compressor, HeadEntries, MeasureCache, compress
from cumulant.cache.budget import bytes_held
from cumulant.cache.fitted.backtest import errors, judges_of
from cumulant.cache.fitted.growing_law import kept_after, kept_queries, numbers, stays
from cumulant.cache.fitted.law import QueryLaw
from cumulant.cache.fitted.query_law import sample_queries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output
from cumulant.cache.fitted.recipe import EntryRecipe
from cumulant.cache.growing import TAIL, Growing, in_front
from cumulant.cache.prefix import prefill
from cumulant.cache.query_sample import PENDING
from tests.observatory.tiny_models import hf

EVERY = 64
SMALL = QueryLaw(recent=48, spread=32, repeated=0)


@pytest.fixture(scope="module")
def model() -> Any:
    made = decoder(max_position_embeddings=4096)
    made.set_attn_implementation("cumulant")
    return made


def growing(model: Any, method: object = None, keep: float | None = 0.25, **more) -> MeasureCache:
    method = Backtest(law=SMALL) if method is None else method
    return MeasureCache(model, compress=method, keep=keep, **({"every": EVERY} | more))


def read(model: Any, cache: Any, tokens: torch.Tensor, chunk: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of tokens (batch, T) that come by chunks."""
    tokens, begin = torch.atleast_2d(tokens), cache.get_seq_length()
    out = []
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        more = {} if mask is None else {"attention_mask": mask[:, : begin + start + part.shape[1]]}
        with torch.no_grad():
            out.append(model(part, past_key_values=cache, **more).logits)
    return torch.cat(out, 1)


def rows(cache: MeasureCache, layer: int = 1) -> list[Any]:
    asked = cache.compressible[layer].asked
    assert asked is not None
    return asked.rows


def stores(cache: MeasureCache) -> list[HeadEntries]:
    found = []
    for layer in cache.compressible.values():
        assert layer.store is not None
        found += [layer.store.head(b, h) for b in range(layer.batch_size) for h in range(layer.shape.heads)]
    return found


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


# ---------------------------------------------------------------------- before anything is compressed


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen3", "gpt_oss", "gemma3_text"])
def test_until_it_compresses_it_is_the_dynamic_cache(kind, padded):
    small, (tokens, mask) = models.decoder(kind), models.batch(padded)
    found = []
    method = "stream" if kind == "gpt_oss" else None  # its rotation is not known
    for cache in (hf.DynamicCache(config=small.config), growing(small, method)):
        parts = [models.run(small, cache, tokens, mask, a, b) for a, b in ((0, 9), (9, 13), (13, models.LENGTH))]
        found.append(torch.cat(parts, 1)[mask.bool()])
    assert torch.equal(*found)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_function_is_refused_from_the_first_token(model, implementation):
    other = decoder()
    cache = growing(other)
    other.set_attn_implementation(implementation)
    with pytest.raises(TypeError, match='attn_implementation="cumulant", which reads compressed entries and hands on'):
        read(other, cache, ids(3), 3)


# ---------------------------------------------------------------------- what is held


@pytest.mark.parametrize("method", ["backtest+norepeat", "backtest+norepeat+uniform", "stream", "knorm", "keydiff"])
def test_what_is_held_stays_within_the_budget_and_a_window(model, method):
    cache, seen = growing(model, method), 0
    for chunk in (40, 1, 50, 30, 90, 1, 1, 60, 45):
        logits = read(model, cache, ids(chunk, seed=seen), chunk)
        seen += chunk
        assert bool(logits.isfinite().all())
        recent, first = cache.compressible[0].recent, cache.compressed_tokens
        assert recent < EVERY + TAIL or recent == TAIL
        held = bytes_held([stores(cache)]) if first else 0
        assert held <= 0.25 * first * 2 * 2 * (8 + 8) * 4 + 68
        assert held >= 0.2 * first * 2 * 2 * (8 + 8) * 4
    assert (cache.get_seq_length(), cache.compressed_tokens) == (318, 318 - TAIL)


def test_a_number_of_bytes_holds_for_good(model):
    room = 12_000
    cache = growing(model, keep=None, bytes=room)
    for n in range(12):
        assert bool(read(model, cache, ids(40, seed=n), 20).isfinite().all())
        if cache.compressed_tokens:
            assert 0.9 * room <= bytes_held([stores(cache)]) <= room + 68
        else:
            assert cache.get_seq_length() < max(EVERY, room / (2 * 2 * 16 * 4)) + TAIL
    assert cache.compressed_tokens > 350


def test_the_sample_of_queries_is_bounded(model):
    cache = growing(model)
    for n in range(10):
        read(model, cache, ids(60, seed=n), 60)
        for layer in cache.compressible.values():
            assert layer.asked is not None
            row = layer.asked.rows[0]
            assert len(row.at) + len(row.earlier_at) <= 2 * SMALL.recent + SMALL.spread
            assert layer.asked.tensors().get("pending", torch.empty(1, 4, 0, 8)).shape[2] <= PENDING
    assert len(rows(cache)[0].earlier_at) >= SMALL.spread // 2
    assert int(rows(cache)[0].earlier_at.min()) < 200  # of all of the text


def test_a_prompt_in_one_pass_is_read_exactly_and_then_compressed(model):
    tokens = ids(300)
    cache = growing(model)
    full = hf.DynamicCache(config=model.config)
    assert torch.equal(read(model, cache, tokens, 300), read(model, full, tokens, 300))
    assert (cache.compressed_tokens, cache.compressible[0].recent) == (300 - TAIL, TAIL)


def test_it_predicts_as_compress_does_and_better_than_the_last_tokens_alone():
    """A model whose heads look at single tokens: what is held matters."""
    sharp = decoder(max_position_embeddings=4096)
    for layer in sharp.model.layers:
        layer.self_attn.q_proj.weight.mul_(2)
    sharp.set_attn_implementation("cumulant")
    tokens, after = ids(448), ids(40, seed=9)
    full = hf.DynamicCache(config=sharp.config)
    read(sharp, full, tokens, 448)
    wanted = read(sharp, full, after, 40)
    found = {}
    for name in ("backtest+norepeat", "stream"):
        cache = growing(sharp, name)
        read(sharp, cache, tokens, 32)
        found[name] = kl(wanted, read(sharp, cache, after, 40))
    once = kl(wanted, read(sharp, compress(sharp, tokens, keep=0.25, method="backtest+norepeat"), after, 40))
    assert found["backtest+norepeat"] < 0.5 * found["stream"], (found, once)
    assert found["backtest+norepeat"] < 3 * once + 1e-3, (found, once)


# ---------------------------------------------------------------------- the same however the text comes


def test_the_same_call_gives_the_same_cache_and_another_seed_another(model):
    tokens, caches = ids(200), []
    for seed in (0, 0, 1):
        cache = growing(model, Backtest(law=SMALL, seed=seed))
        read(model, cache, tokens, 25)
        caches.append(stores(cache))
    for one, two in zip(*caches[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True))
    lengths = [[len(head.keys) for head in cache] for cache in caches]
    assert lengths[0] == lengths[1] != lengths[2]


def test_which_queries_are_kept_depends_on_their_tokens_alone(model):
    tokens, kept = ids(400), []
    for chunk in (1, 7, 64, 400):
        cache = growing(model, every=1000)
        read(model, cache, tokens, chunk)
        asked = cache.compressible[1].asked
        assert asked is not None
        assert asked.begins is not None
        asked.settle(asked.begins)
        kept.append(asked.rows[0])
    for row in kept[1:]:
        assert torch.equal(row.at, kept[0].at)
        torch.testing.assert_close(row.queries, kept[0].queries, atol=2e-2, rtol=2e-2)
    assert torch.equal(kept[0].at, torch.arange(400)[stays(torch.arange(400), 400, SMALL, 0)])


def test_chunks_that_end_where_it_compresses_give_the_same_entries(model):
    tokens, caches = ids(EVERY + TAIL + 30), []
    for chunk in (1, 24, 48):
        cache = growing(model)
        read(model, cache, tokens[: EVERY + TAIL], chunk)
        read(model, cache, tokens[EVERY + TAIL :], chunk)
        caches.append(cache)
    for cache in caches[1:]:
        assert cache.compressed_tokens == EVERY
        for one, two in zip(stores(caches[0]), stores(cache), strict=True):
            torch.testing.assert_close(one.keys, two.keys, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(one.values, two.values, atol=1e-3, rtol=1e-3)


def test_sequences_of_a_padded_batch_are_compressed_as_they_are_alone(model):
    long, pad = 260, 60
    texts = [ids(long), ids(long - pad, seed=4)]
    batch = torch.stack([texts[0], torch.cat([torch.zeros(pad, dtype=torch.int64), texts[1]])])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    together = growing(model)
    read(model, together, batch, long, mask)
    after = torch.stack([ids(90, seed=5), ids(90, seed=6)])
    longer = torch.cat([mask, torch.ones_like(after)], 1)
    logits = read(model, together, after, 15, longer)
    for b, text in enumerate(texts):
        alone = growing(model)
        read(model, alone, text, long)
        assert kl(read(model, alone, after[b], 15), logits[b : b + 1]) < 1e-6
        assert alone.compressed_tokens == together.compressed_tokens - b * pad
        for layer in range(2):
            for one, two in zip(alone.entries(layer), together.entries(layer, b, longer), strict=True):
                assert abs(len(one.keys) - len(two.keys)) <= 1
    asked = together.compressible[0].asked
    assert asked is not None
    assert asked.begins.tolist() == [0, pad]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_text_too_short_to_be_judged_stays_as_it_is_beside_a_long_one(model):
    batch, mask = torch.stack([ids(200), ids(200, seed=1)]), torch.ones(2, 200, dtype=torch.int64)
    mask[1, :120] = 0
    cache = growing(model)
    read(model, cache, batch, 200, mask)
    assert [len(head.keys) for head in stores(cache)[2:4]] == [80 - TAIL] * 2
    assert bool(read(model, cache, ids(4)[:, None].T.expand(2, 4), 1).isfinite().all())


# ---------------------------------------------------------------------- what generation does to a cache


def test_samples_go_with_their_sequences(model):
    batch = torch.stack([ids(150), ids(150, seed=1)])
    one, two = growing(model), growing(model)
    for cache in (one, two):
        read(model, cache, batch, 50)
    two.reorder_cache(torch.tensor([1, 0]))
    after = torch.stack([ids(100, seed=2), ids(100, seed=3)])
    theirs, swapped = read(model, one, after, 20), read(model, two, after.flip(0), 20)
    torch.testing.assert_close(swapped.flip(0), theirs, atol=1e-4, rtol=1e-4)
    two.batch_select_indices(torch.tensor([1]))
    one.batch_repeat_interleave(2)
    assert [len(rows(cache)) for cache in (one, two)] == [4, 1]
    assert torch.equal(rows(two)[0].earlier_at, rows(one)[0].earlier_at)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 4}])
def test_generation_compresses_as_it_goes(model, search):
    cache, prompt = growing(model), ids(20)[None]
    fixed = {"max_new_tokens": 150, "min_new_tokens": 150, "pad_token_id": 0, "do_sample": False} | search
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **fixed)
    assert out.shape[1] == 170
    assert cache.get_seq_length() == 169
    assert cache.compressed_tokens >= EVERY
    assert len(rows(cache)) == search.get("num_beams", 1)


def test_tokens_that_are_taken_back_are_asked_no_more(model):
    tokens = ids(140)
    cache, never = growing(model), growing(model)
    for each in (cache, never):
        read(model, each, tokens[:120], 60)
    read(model, cache, ids(10, seed=8), 10)
    cache.crop(-10)
    assert torch.equal(read(model, cache, tokens[120:], 20), read(model, never, tokens[120:], 20))
    read(model, cache, ids(80, seed=8), 80)
    assert cache.compressible[0].recent == TAIL
    cache.crop(-TAIL)
    with pytest.raises(ValueError, match=r"MeasureCache\.crop: expected at most the 0 tokens"):
        cache.crop(-1)
    cache.reset()
    assert (cache.get_seq_length(), cache.bytes()) == (0, 0)
    assert torch.equal(read(model, cache, tokens, 70), read(model, growing(model), tokens, 70))


def test_copies_and_files_go_on_alike(model, tmp_path):
    tokens, after = ids(230), ids(120, seed=7)
    cache = growing(model, "backtest+norepeat")
    read(model, cache, tokens, 23)
    copied, loaded = copy.deepcopy(cache), MeasureCache.load(cache.save(tmp_path / "a.safetensors"), model)
    assert loaded.bytes() == cache.bytes()
    theirs = read(model, cache, after, 20)
    for other in (copied, loaded):
        assert torch.equal(read(model, other, after, 20), theirs)
        assert other.compressed_tokens == cache.compressed_tokens > tokens.shape[0]


def test_a_sum_is_compressed_no_more(model):
    first, second = growing(model), growing(model, start=120)
    read(model, first, ids(120), 60)
    read(model, second, ids(40, seed=1), 40)
    both = first + second
    assert both.get_seq_length() == 160
    assert bool(read(model, both, ids(150, seed=2), 50).isfinite().all())
    assert (both.compressed_tokens, both.compressible[0].recent) == (160, 150)


def test_what_a_file_says_of_the_method(model, tmp_path):
    path = growing(model, Backtest(law=SMALL)).save(tmp_path / "unnamed.safetensors")
    with pytest.raises(
        ValueError, match=r"load\.compress: expected a method, got none for .* Pass the one that it was"
    ):
        MeasureCache.load(path, model)
    assert MeasureCache.load(path, model, compress=Backtest(law=SMALL)).get_seq_length() == 0
    with pytest.raises(TypeError, match=r"expected the model itself, got LlamaConfig"):
        MeasureCache.load(growing(model, "stream").save(path), model.config)
    with pytest.raises(ValueError, match=r"expected a cache that kept a sample of queries, got .* which has none"):
        MeasureCache.load(MeasureCache(model).save(path), model, compress="stream")


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize(
    "make",
    [
        gpt2,
        lambda: decoder("GPTNeoX", max_position_embeddings=512),
        lambda: decoder("Gemma3", layer_types=["sliding_attention", "full_attention"], sliding_window=16),
    ],
)
def test_models_without_rotation_with_part_of_it_and_with_windows(make):
    other = make()
    other.set_attn_implementation("cumulant")
    cache, full = growing(other), hf.DynamicCache(config=other.config)
    read(other, cache, ids(200), 40)
    read(other, full, ids(200), 200)
    assert cache.compressed_tokens >= EVERY
    after = ids(20, seed=3)
    wanted, found = (read(other, c, after, 20) for c in (full, cache))
    assert kl(wanted, found) < 0.1 * kl(wanted, wanted.flip(-1))


# ---------------------------------------------------------------------- parts


def test_numbers_are_uniform_and_of_their_own_for_every_use():
    at = torch.arange(20_000)
    drawn = torch.stack([numbers(at, seed, use) for seed in (0, 1) for use in range(3)])
    assert float((drawn.mean(1) - 0.5).abs().max()) < 4.5 / (12 * len(at)) ** 0.5
    correlation = torch.corrcoef(torch.cat([drawn, drawn.roll(1, 1)]))  # neither of uses nor of neighbours
    assert float((correlation - torch.eye(12)).abs().max()) < 4.5 / len(at) ** 0.5


def test_a_sample_of_a_sample_is_a_sample_of_the_text():
    at = torch.arange(2000)
    once = at[stays(at, 2000, SMALL, 3)]
    bit = at[:0]
    for stop in range(100, 2001, 100):
        bit = torch.cat([bit, at[stop - 100 : stop]])
        bit = bit[stays(bit, stop, SMALL, 3)]
    assert torch.equal(once, bit)


def test_queries_that_were_kept_are_those_of_the_text(model):
    """With every token held, laws and judges from a sample are those that the whole prefix gives for its tokens."""
    tokens = ids(200)
    prefix = prefill(model, tokens)
    cache = growing(model, every=1000)
    read(model, cache, tokens, 50)
    asked = cache.compressible[1].asked
    assert asked is not None
    asked.settle(torch.tensor([0]))
    assert cache._growing is not None  # pyright: ignore[reportPrivateUsage]
    layer, whole = cache._growing.prefix(cache, 0, 200).layers[1], prefix.layers[1]  # pyright: ignore[reportPrivateUsage]
    assert layer.growth is not None
    law = kept_queries(layer, 200, SMALL)
    assert 60 <= len(law.span) <= SMALL.recent + SMALL.spread
    judges = kept_after(layer, 100, 16)
    at = 100 + judges.span
    for ours, theirs in zip(judges, sample_queries(whole, at, judges.span), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2, check_dtype=False)


def test_rows_of_no_mass_change_no_trial(model):
    layer = prefill(model, ids(120)).layers[0]
    tokens = KeyHeads.of(layer, 90)
    assert torch.equal(tokens.keys, layer.keys[:, :90].float())
    sample = sample_queries(layer, torch.arange(95, 115), torch.arange(95, 115) - 90)
    judges = judges_of(layer, tokens, [sample])
    heads = [HeadEntries(*(x[h, :60] for x in tokens[:2]), None) for h in range(2)]
    wide = [HeadEntries(torch.cat([h.keys, h.keys[:9]]), torch.cat([h.values, h.values[:9]]), None) for h in heads]
    keys, values, mass = in_front([heads[0], wide[1]], tokens.keys[:, 60:], tokens.values[:, 60:])
    padded = KeyHeads(keys, values, mass if mass is not None else keys.new_zeros(keys.shape[:2]))
    assert padded.head(0).keys.shape[1] == 90
    trial = LawQueries.of(sample, 90, layer.rotation, 2)
    arguments = (trial, 1.0, judges, [10, 40, 90], None, 30)
    found = [errors(EntryRecipe(), x, *arguments)[:, 0] for x in (tokens, padded)]
    assert float(found[0][:, :2, 0].min()) > 0
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


def test_entries_with_mass_are_read_as_tokens_so_many_times(model):
    layer = prefill(model, ids(100)).layers[0]
    mass = torch.zeros(2, 100)
    mass[:, 10] = torch.tensor(3.0).log()
    once, thrice = KeyHeads.of(layer._replace(log_mass=mass)), [*range(100), 10, 10]
    repeated = KeyHeads.tokens(once.keys[:, thrice], once.values[:, thrice])
    sample = sample_queries(layer, torch.arange(70, 99), torch.zeros(29, dtype=torch.int64))
    queries = LawQueries.of(sample, 100, layer.rotation, 2)
    a, b = attention(once, queries), attention(repeated, queries)
    torch.testing.assert_close(a[0], b[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(output(once, queries, *a), output(repeated, queries, *b), atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- a cache that is there already


def filled(model: Any, length: int = 200) -> tuple[Any, dict[int, torch.Tensor]]:
    cache, queries = hf.DynamicCache(config=model.config), {}

    def note(call: Any) -> None:
        queries[call.module.layer_idx] = call.scale * call.query

    with cumulant.transformers.on_attention(model, note, statistics=()):
        read(model, cache, ids(length), length)
    return cache, queries


def test_a_cache_and_its_queries_are_compressed(model):
    cache, queries = filled(model)
    full, after = copy.deepcopy(cache), ids(20, seed=2)
    small = compress(model, cache=cache, queries=queries, keep=0.25, method="backtest+norepeat")
    assert small.keep < 0.26
    assert small.compressed_tokens == 200
    assert kl(read(model, full, after, 20), read(model, small, after, 20)) < 1e-3
    more = {i: q[:, :, -30:] for i, q in filled(model)[1].items()}
    again = compress(
        model, cache=small, queries={i: q[:, :, -20:] for i, q in more.items()}, bytes=4000, method="stream"
    )
    assert again is small
    assert bytes_held([stores(again)]) <= 4000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"queries": None},
            r"compress\.queries: expected queries of the layers \[0, 1\], got none, of a cache that kept",
        ),
        ({"queries": {0: torch.zeros(1, 4, 9, 8)}}, r"got those of \[0\]"),
        (
            {"queries": dict.fromkeys((0, 1), torch.zeros(1, 3, 9, 8))},
            r"shape \(1, 4, n ≤ 200, 8\), got \(1, 3, 9, 8\)",
        ),
        ({"method": "backtest"}, r'got backtest, which asks the model for more\. Use method="backtest\+norepeat"'),
        ({"input_ids": torch.tensor([1])}, "expected input_ids or cache, one of them, got both"),
        ({"cache": None}, "expected queries of a cache, got no cache"),
        ({"attention_mask": torch.ones(1, 9)}, r"shape \(1, 200\), got \(1, 9\)"),
    ],
)
def test_caches_that_cannot_be_compressed(model, change, words):
    cache, queries = filled(model)
    options = {"cache": cache, "queries": queries, "keep": 0.5, "method": "backtest+norepeat"} | change
    with pytest.raises(ValueError, match=words):
        compress(model, **options)


def test_a_cache_that_compresses_itself_is_not_compressed_from_outside(model):
    with pytest.raises(ValueError, match="expected a cache that does not compress itself"):
        compress(model, cache=growing(model), queries={}, keep=0.5, method="stream")


# ---------------------------------------------------------------------- bad input


class Whole(Compressor):
    name = "whole"

    def compress(self, prefix, budget, evidence):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "backtest"}, r'got backtest, which needs .* Use compress="backtest\+norepeat", or "stream"'),
        ({"method": "kvzip"}, "got kvzip, which needs the whole text"),
        ({"method": Whole()}, "got whole, which needs the whole text"),
        ({"keep": None}, "expected keep or bytes, one of them, got keep=None, bytes=None"),
        ({"bytes": 9999}, "got keep=0.25, bytes=9999"),
        ({"keep": 1.5}, "MeasureCache.keep: expected a share above 0 and at most 1, got 1.5"),
        ({"every": 10}, r"MeasureCache\.every: expected at least 64, got 10"),
        (
            {"keep": None, "bytes": 500},
            r"MeasureCache\.bytes: expected at least 2176, 8 entries for each of 4 key heads",
        ),
    ],
)
def test_settings_that_are_refused(model, options, words):
    with pytest.raises(ValueError, match=words):
        growing(model, **options)


def test_a_budget_without_a_method_and_models_that_cannot_grow(model):
    with pytest.raises(
        ValueError, match=r'MeasureCache\.compress: expected a method, .* compress="backtest\+norepeat"'
    ):
        MeasureCache(model, keep=0.5)
    with pytest.raises(TypeError, match="expected the model itself, got LlamaConfig"):
        MeasureCache(model.config, compress="stream", keep=0.5)
    with pytest.raises(ValueError, match="got scores that are capped"):
        growing(models.decoder("gemma2"))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="a rotation that stays as the text grows, got rope 'dynamic'"):
        growing(decoder(rope_parameters=scaled))


def test_padding_behind_a_text_other_models_and_other_batches(model):
    cache, mask = growing(model), torch.ones(2, 120, dtype=torch.int64)
    mask[0, 50:60] = 0
    with pytest.raises(ValueError, match="expected padding in front of a text alone"):
        read(model, cache, torch.stack([ids(120)] * 2), 120, mask)
    wide = decoder(num_attention_heads=2, head_dim=16, num_key_value_heads=2)
    wide.set_attn_implementation("cumulant")
    with pytest.raises(ValueError, match="expected those of layer 0 of its own model, got queries of 2 heads"):
        read(wide, growing(model), ids(5), 5)
    cache = growing(model)
    read(model, cache, ids(5), 5)
    with pytest.raises(ValueError, match=r"MeasureCache\.update: expected 1 sequences .* got 2"):
        read(model, cache, torch.stack([ids(5)] * 2), 5)
    with pytest.raises(ValueError, match=r"MeasureCache\.bytes: expected at least 4352, .* and 2 sequences, got 3000"):
        read(model, growing(model, keep=None, bytes=3000), torch.stack([ids(200), ids(200, seed=1)]), 200)


def test_few_bytes_wait_for_a_longer_text(model):
    cache = growing(model, keep=0.05)
    read(model, cache, ids(150), 30)
    assert cache.compressed_tokens == 0  # 7 entries a head
    read(model, cache, ids(80, seed=1), 20)
    assert cache.compressed_tokens > 160


def test_settings_are_shared_by_copies_and_are_no_pickle(model):
    cache = growing(model)
    settings = cache._growing  # pyright: ignore[reportPrivateUsage]
    assert isinstance(settings, Growing)
    assert copy.deepcopy(cache)._growing is settings  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(TypeError, match=r"Use MeasureCache\.save and load"):
        settings.__reduce__()


# ---------------------------------------------------------------------- a model that was trained


@pytest.mark.long
def test_a_trained_model_predicts_as_with_compress_and_better_than_from_its_last_tokens():
    """A text of 1024 tokens that comes by 128, compressed three times, and the 128 tokens after it."""
    from pydoc_data.topics import topics

    from cumulant.observatory import load

    loaded = load("smollm2")
    trained: Any = loaded.model
    trained.set_attn_implementation("cumulant")
    tokens = loaded.tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    text, after = tokens[:1024], tokens[1024:1152]
    full = hf.DynamicCache(config=trained.config)
    read(trained, full, text, 128)
    wanted, found = read(trained, full, after, 128), {}
    for name in ("backtest+norepeat", "stream"):
        cache = MeasureCache(trained, compress=name, keep=0.25, every=256)
        read(trained, cache, text, 128)
        found[name] = kl(wanted, read(trained, cache, after, 128))
        assert cache.compressed_tokens == 1120
    once = compress(trained, text, keep=0.25, method="backtest+norepeat")
    found["once"] = kl(wanted, read(trained, once, after, 128))
    assert found["backtest+norepeat"] < 2 * found["once"], found
    assert found["backtest+norepeat"] < 0.25 * found["stream"], found
