"""Where heads look: masses of kinds of keys beside sums over tables of weights, and the weights of eager models."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from cumulant.nn import AttentionCall, Support
from cumulant.nn.attention_interface import TokenMasks
from cumulant.observatory import attach, observe
from cumulant.observatory.hooks.attention import ModelHooks, observe_attention
from cumulant.observatory.statistics.quantities import DISTANCE_EDGES
from cumulant.observatory.statistics.targets import TARGETS, SequenceTokens, target_masses
from tests.generated.test_transformers import EXPERTS, Reading
from tests.observatory.tiny_models import (
    AUDIO_MODELS,
    DECODERS,
    GROUPED_DECODERS,
    ON_THE_INTERFACE,
    TWO_SIDED,
    VISION_MODELS,
    hf,
    letter_tokenizer,
    transformer,
)

B, H, N, D = 3, 4, 37, 8
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def some(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) < 0.7


SUPPORTS = {
    "all": Support(),
    "causal": Support(causal=True),
    "sink": Support(causal=True, sink=normal(H)),
    "padding": Support(mask=some(B, 1, 1, N)),
    "pairs": Support(mask=some(B, 1, N, N), log_weights=normal(1, H, N, N)),
    "keys": Support(log_weights=torch.where(some(B, 1, N), normal(B, 1, N), -torch.inf)),
    "window": Support(causal=True, window=6),
}


def kinds_of_keys(ids: np.ndarray, separates: np.ndarray, q: int) -> dict[str, np.ndarray]:
    """name → (batch, q, n) whether a key is of the kind, for the last q tokens as queries."""
    batch, n = ids.shape
    i, j = np.arange(n - q, n)[:, None], np.arange(n)
    own, before = ids[:, n - q :, None], np.concatenate([np.full((batch, 1), -1), ids[:, :-1]], 1)
    everywhere = np.ones((batch, q, n), dtype=bool)
    return {
        "self_mass": everywhere & (i == j),
        "previous_mass": everywhere & (j == i - 1),
        "next_mass": everywhere & (j == i + 1),
        "same_token_mass": (own == ids[:, None]) & (i != j),
        "induction_mass": (own == before[:, None]) & (j - 1 < i),
        "delimiter_mass": everywhere & separates[:, None],
    }


def mean_distance(weights: np.ndarray) -> np.ndarray:
    """(batch, heads, q) of the last q tokens, NaN without weights."""
    q, n = weights.shape[2:]
    gap = np.abs(np.arange(n - q, n)[:, None] - np.arange(n))
    whole = weights.sum(-1)
    return (weights * gap).sum(-1) / np.where(whole > 0, whole, np.nan)


def by_definition(weights: np.ndarray, visible: np.ndarray, kinds: dict[str, np.ndarray]) -> dict:
    """name → (mass, chance), (batch, heads, q), NaN where no key of the kind is visible."""
    out = {}
    for name, kind in kinds.items():
        mine = visible & kind[:, None]
        nothing = ~mine.any(-1)
        mass = np.where(mine, weights, 0).sum(-1)
        chance = mine.sum(-1) / np.maximum(visible.sum(-1), 1)
        out[name] = tuple(np.where(nothing, np.nan, x) for x in np.broadcast_arrays(mass, chance))
    return out


def table(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """Weights and visible keys of a call, as tables."""
    key = call.key.repeat_interleave(call.eta.shape[1] // call.key.shape[1], 1)
    logits = replace(call.support, sink=None).weigh(call.eta @ key.mT)
    visible = (logits > -torch.inf).numpy()
    if call.support.sink is not None:
        sink = torch.as_tensor(call.support.sink).reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    return torch.softmax(logits, -1)[..., : visible.shape[-1]].nan_to_num().numpy(), visible


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("name", SUPPORTS)
def test_masses_are_sums_over_the_weights(name, heads):
    eta, key, ids = normal(B, H, N, D), normal(B, heads, N, D), torch.randint(0, 7, (B, N), generator=GENERATOR)
    tokens = SequenceTokens(ids, None, torch.tensor([0, 3]))
    call = AttentionCall(torch.nn.Identity(), eta, key, key, SUPPORTS[name], eta)
    found = target_masses(call, tokens=tokens)
    weights, visible = table(call)
    kinds = kinds_of_keys(ids.numpy(), np.isin(ids.numpy(), [0, 3]), N)
    expected = by_definition(weights, visible, kinds)
    assert set(found.masses) == {*TARGETS} - ({"next_mass"} if SUPPORTS[name].causal else set())
    for quantity, chance in found.baseline.items():
        np.testing.assert_allclose(found.masses[quantity], expected[quantity][0], atol=1e-12)
        np.testing.assert_allclose(chance, expected[quantity][1] + np.zeros((B, H, N)), atol=1e-12)
    gap = np.arange(N)[:, None] - np.arange(N)
    looks = weights.sum(-1) > 0
    np.testing.assert_allclose(found.masses["mean_distance"], mean_distance(weights), atol=1e-11)
    assert found.queries.tolist() == looks.sum((0, 2)).tolist()
    for index, (low, high) in enumerate(zip(DISTANCE_EDGES, [*DISTANCE_EDGES[1:], 10**9], strict=True)):
        inside = weights * ((np.abs(gap) >= low) & (np.abs(gap) < high))
        np.testing.assert_allclose(found.by_distance[:, index], inside.sum((0, 2, 3)), atol=1e-11)
        if found.before is not None:
            np.testing.assert_allclose(found.before[:, index], (inside * (gap >= 0)).sum((0, 2, 3)), atol=1e-11)
    assert (found.before is None) == SUPPORTS[name].causal


@pytest.mark.parametrize("name", ["causal", "pairs", "sink"])
def test_a_few_sequences_at_a_time_have_the_same_masses(name, monkeypatch):
    eta, key, ids = normal(B, H, N, D), normal(B, 2, N, D), torch.randint(0, 7, (B, N), generator=GENERATOR)
    call = AttentionCall(torch.nn.Identity(), eta, key, key, SUPPORTS[name], eta)
    whole = target_masses(call, tokens=SequenceTokens(ids, None, torch.tensor([0, 3])))
    monkeypatch.setattr("cumulant.observatory.statistics.targets.ROWS", 1)
    parts = target_masses(call, tokens=SequenceTokens(ids, None, torch.tensor([0, 3])))
    for part in ("masses", "baseline"):
        for quantity, values in getattr(whole, part).items():
            np.testing.assert_allclose(getattr(parts, part)[quantity], values, atol=1e-13)
    np.testing.assert_allclose(parts.by_distance, whole.by_distance, atol=1e-12)
    assert parts.queries.tolist() == whole.queries.tolist()


def test_padding_is_neither_a_query_nor_a_token_that_is_alike():
    rows = torch.arange(6) < torch.tensor([[6], [3]])
    ids = torch.tensor([[5, 6, 5, 6, 5, 0], [5, 6, 5, 0, 0, 0]])
    x = torch.zeros(2, 1, 6, 2)
    call = AttentionCall(torch.nn.Identity(), x, x, x, Support(mask=rows[:, None, None]), x, rows=rows)
    found = target_masses(call, tokens=SequenceTokens(ids, rows))
    assert found.masses["same_token_mass"][1, 0].isnan().tolist() == [False, True, False, True, True, True]
    torch.testing.assert_close(found.masses["same_token_mass"][1, 0, 0], torch.tensor(1 / 3))
    assert found.queries.tolist() == [9]
    torch.testing.assert_close(found.by_distance.sum(), torch.tensor(9.0, dtype=torch.float64))


@pytest.mark.parametrize("name", SUPPORTS)
def test_like_tokens_of_a_long_sequence_are_done_in_parts(name, monkeypatch):
    eta, key, ids = normal(B, H, N, D), normal(B, 2, N, D), torch.randint(0, 3, (B, N), generator=GENERATOR)
    call = AttentionCall(torch.nn.Identity(), eta, key, key, SUPPORTS[name], eta)
    whole = target_masses(call, tokens=SequenceTokens(ids))
    monkeypatch.setattr("cumulant.observatory.statistics.like_tokens.NUMBERS", 99)
    monkeypatch.setattr("cumulant.observatory.statistics.targets.KEPT_PAIRS", 0)
    parts = target_masses(call, tokens=SequenceTokens(ids))
    for quantity in ("same_token_mass", "induction_mass"):
        np.testing.assert_allclose(parts.masses[quantity], whole.masses[quantity], atol=1e-13)
        np.testing.assert_allclose(parts.baseline[quantity], whole.baseline[quantity], atol=1e-13)


def test_layers_of_one_pass_with_different_masks_have_each_its_own_masses():
    ids = torch.randint(0, 5, (B, N), generator=GENERATOR)
    shared = SequenceTokens(ids, None, torch.tensor([0, 3]))
    windows = [Support(causal=True, window=width) for width in (3, 6, 30)]
    masks = [Support(mask=some(B, 1, size, N)) for size in (1, N, 1, N, 1)]  # more than are kept
    for support in (*SUPPORTS.values(), *windows, *masks, *SUPPORTS.values(), *masks):
        eta, key = normal(B, H, N, D), normal(B, 2, N, D)
        call = AttentionCall(torch.nn.Identity(), eta, key, key, support, eta)
        alone = target_masses(call, tokens=SequenceTokens(ids, None, torch.tensor([0, 3])))
        together = target_masses(call, tokens=shared)
        for part in ("masses", "baseline"):
            for quantity, values in getattr(alone, part).items():
                assert torch.equal(getattr(together, part)[quantity].nan_to_num(-1), values.nan_to_num(-1)), quantity


# ---------------------------------------------------------------------- models of transformers


@contextmanager
def eager_weights(model: torch.nn.Module):
    """(name, weights, visible) of every call of the plain attention of a model's own file."""
    names, found = {module: name for name, module in model.named_modules()}, []

    def attend(module, query, key, value, attention_mask, **options):
        own = (getattr(sys.modules[k.__module__], "eager_attention_forward", None) for k in type(module).__mro__)
        plain = next(function for function in own if function)
        out, weights = plain(module, query, key, value, attention_mask, **options)
        visible = torch.ones(1, 1, *weights.shape[2:], dtype=torch.bool)
        if attention_mask is not None:
            mask = attention_mask[..., : weights.shape[-1]]
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        found.append((names[module], weights.double().numpy(), visible.expand(*weights.shape).numpy()))
        return out, weights

    hf.AttentionInterface.register("weights", attend)
    hf.AttentionMaskInterface.register("weights", hf.masking_utils.eager_mask)
    model.set_attn_implementation("weights")
    yield found


TEXT = tuple(kind for kind in ON_THE_INTERFACE if kind not in (*AUDIO_MODELS, *VISION_MODELS))
CACHED = tuple(kind for kind in (*DECODERS, *GROUPED_DECODERS) if kind != "eurobert")  # an encoder: it has no cache
CROSS = ("encoder_attn", "EncDecAttention", "crossattention")


def test_masses_are_compared_on_twenty_architectures_or_more():
    assert len(set(TEXT)) >= 20
    assert len(set(CACHED)) >= 20


def distances_agree(record, layer: str, calls: list, rows: np.ndarray, tolerance: float) -> None:
    """Mean shares by distance of a record, all and before the query, are those of the weights."""
    n = rows.shape[1]
    gap, queries = np.arange(n)[:, None] - np.arange(n), len(calls) * rows.sum()
    sums = {key: record.sums.get(f"{layer}/distance/{key}") for key in ("mass", "before", "count")}
    assert (sums["count"] == queries).all()
    for index, (low, high) in enumerate(zip(DISTANCE_EDGES, [*DISTANCE_EDGES[1:], 10**9], strict=True)):
        inside = (np.abs(gap) >= low) & (np.abs(gap) < high)
        for key, part in (("mass", inside), ("before", inside & (gap >= 0))):
            if sums[key] is not None:
                mass = sum(np.where(v & part & rows[:, None, :, None], w, 0).sum((0, 2, 3)) for _, w, v in calls)
                np.testing.assert_allclose(sums[key][:, index] / queries, mass / queries, atol=tolerance)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "llama", "opt"])
def test_padding_beside_an_order_is_one_row_of_keys(kind, padding):
    case = Reading(kind, heads=4, group=2, length=17, padding=padding, seed=1)
    model, other, inputs = case.model(), case.model(), case.inputs()
    calls: list[AttentionCall] = []
    with observe_attention(model, calls.append), eager_weights(other) as expected, torch.no_grad():
        model(**inputs)
        other(**inputs)
    for call, (name, _, visible) in zip(calls, expected, strict=True):
        scores = call.support.weigh(torch.zeros(visible.shape))
        assert (call.name, call.support.causal) == (name, kind != "bert")
        assert call.support.mask is not None
        assert call.support.mask.shape[2] == 1
        np.testing.assert_array_equal((scores > -torch.inf).numpy(), visible)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_capped_scores_of_padding_may_be_nan(padding):
    """Plain attention in double precision leaves NaN where a query sees no key."""
    found = []
    for dtype in ("float32", "float64"):
        case = Reading("gemma2", heads=4, group=2, length=17, padding=padding, dtype=dtype, seed=1)
        with attach(case.model(), ["entropy", "targets"]) as recorder, torch.no_grad():
            recorder.model(**case.inputs())
        found.append(recorder.record(weights=False))
    single, double = found
    assert set(single.tallies) == set(double.tallies)
    for name, tally in single.tallies.items():
        assert tally.count.tolist() == double.tallies[name].count.tolist(), name
        torch.testing.assert_close(tally.mean, double.tallies[name].mean, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_mask_that_is_no_row_of_keys_stays_a_table():
    order = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    hooks = ModelHooks(lambda call: None, {}, TokenMasks({}))
    for mask in (some(B, 1, N, N), order & ~order.tril(-4), order.tril(-1), order[:, :, 1:]):
        queries = mask.shape[2]
        support = hooks.without_tables(Support(mask), queries, N)
        assert not support.causal
        assert torch.equal(support.mask, mask)
    every = hooks.without_tables(Support(order), N, N)
    assert (every.mask, every.causal, every.offset) == (None, True, 0)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", TEXT)
def test_a_record_has_the_masses_of_the_weights_that_eager_attention_returns(kind, padding):
    case = Reading(kind, heads=4, group=2, length=17, padding=padding, seed=1)
    case_ids = case.inputs()
    case_ids = {name: x % 5 + 3 if name.endswith("input_ids") else x for name, x in case_ids.items()}  # many alike
    model = case.model()
    other = case.model()
    with eager_weights(other) as calls, torch.no_grad():
        other(**case_ids)
    quantities = ["targets", "first_mass"]
    with attach(model, quantities, hidden_states=False, delimiters=[4]) as recorder, torch.no_grad():
        model(**case_ids)
    record, compared = recorder.record(weights=False), 0
    for layer in record.modules:
        mine = [call for call in calls if call[0] == layer.name]
        if any(word in layer.name for word in CROSS):
            assert f"{layer.name}/same_token_mass" not in record.tallies
            continue
        side = "decoder_" if kind in TWO_SIDED and "decoder" in layer.name.split(".") else ""
        ids, rows = case_ids[f"{side}input_ids"].numpy(), case_ids.get(f"{side}attention_mask")
        rows = np.ones(ids.shape, bool) if rows is None else rows.numpy().astype(bool)
        kinds = kinds_of_keys(np.where(rows, ids, -1 - np.arange(ids.shape[1])), np.isin(ids, [4]), ids.shape[1])
        tolerance = 2e-5 if kind in EXPERTS else 1e-6
        distances_agree(record, layer.name, mine, rows, tolerance)
        for name in (*TARGETS, "first_mass"):
            tally = record.tallies.get(f"{layer.name}/{name}")
            if name == "first_mass":
                start = rows.argmax(1)[:, None, None, None]  # of a sequence padded on the left not key 0
                parts = [(np.take_along_axis(np.where(v, w, 0), start, 3)[..., 0],) * 2 for _, w, v in mine]
            elif name == "mean_distance":
                parts = [(mean_distance(np.where(v, w, 0)),) * 2 for _, w, v in mine]
            else:
                parts = [by_definition(w, v, {name: kinds[name]})[name] for _, w, v in mine]
            mass, chance = (
                np.concatenate([np.where(rows[:, None], part[k], np.nan) for part in parts], 0).transpose(1, 0, 2)
                for k in (0, 1)
            )
            count = np.isfinite(mass).sum((1, 2))
            if tally is None:
                assert name == "next_mass" or not count.any(), name
                continue
            assert tally.count.tolist() == count.tolist(), (layer.name, name)
            close = tolerance * (17 if name == "mean_distance" else 1)
            for head in range(layer.heads):
                if count[head]:
                    assert abs(float(tally.mean[head]) - np.nanmean(mass[head])) < close, (layer.name, name)
                    if name in ("mean_distance", "first_mass"):
                        continue
                    share = record.sums[f"{layer.name}/{name}/chance"][head] / count[head]
                    assert abs(float(share) - np.nanmean(chance[head])) < 1e-6, (layer.name, name)
            compared += 1
    assert compared >= 4


def test_padding_does_not_give_a_causal_model_attention_ahead():
    """Of some batches the mask is a table, of others an order: what lies before is all in both."""
    tokenizer, texts = letter_tokenizer(), ["abcdef", "ab", "cdabcde", "ba"]
    model, both_ways = (
        transformer(kind, heads=4, key_heads=4, head_dim=4, layers=2, seed=0) for kind in ("llama", "bert")
    )
    record = observe(model, texts, tokenizer=tokenizer, batch_size=2, weights=False)
    alone = [observe(model, [text], tokenizer=tokenizer, weights=False) for text in texts]
    for one in (record, alone[0].merge(alone[1]), record.merge(alone[0])):
        assert not any(key.endswith("distance/before") for key in one.sums)
    records = [observe(both_ways, [text], tokenizer=tokenizer, weights=False) for text in ("abcd", "b")]
    for one in (records[0].merge(records[1]), records[1].merge(records[0])):
        before, mass, count = (one.sums[f"{one.modules[0].name}/distance/{x}"] for x in ("before", "mass", "count"))
        assert count.tolist() == [5] * 4
        assert (before.sum(1) < mass.sum(1) - 1e-3).all()
        torch.testing.assert_close(mass.sum(1), count, rtol=1e-5, atol=0)
        torch.testing.assert_close(before[:, 0], mass[:, 0], rtol=1e-5, atol=1e-6)


def test_with_a_cache_the_places_are_those_of_the_whole_sequence():
    model = transformer("llama", heads=4, key_heads=2, head_dim=4, layers=2, seed=0)
    ids = torch.arange(3, 15)[None]
    with attach(model, "targets", hidden_states=False) as whole, torch.no_grad():
        model(ids)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
    with attach(model, "targets", hidden_states=False) as last, torch.no_grad():
        model(ids[:, -1:], past_key_values=cache)
    name = whole.record(weights=False).modules[1].name
    one = last.record(weights=False)
    for quantity in ("self_mass", "previous_mass"):
        every = whole.record(weights=False).tallies[f"{name}/{quantity}"]
        assert every.count.tolist() == [12 - (quantity == "previous_mass")] * 4
        position = int(one.tallies[f"{name}/{quantity}"].position_count[0].argmax())
        torch.testing.assert_close(
            one.tallies[f"{name}/{quantity}"].mean, every.by_position[:, position], rtol=0, atol=1e-6
        )
    assert f"{name}/same_token_mass" not in one.tallies  # the tokens of the cache are not known


@pytest.mark.parametrize("kind", CACHED)
def test_decoding_in_steps_has_the_masses_of_eager_weights(kind):
    case = Reading(kind, heads=4, group=2, length=12, padding="none", dtype="float64", seed=1)
    ids = case.inputs()["input_ids"]
    model, other = case.model(), case.model()
    with eager_weights(other) as calls, torch.no_grad():
        other(ids)
    with attach(model, "targets", hidden_states=False) as recorder, torch.no_grad():
        cache = None
        for some in ids.split([5, 4, 1, 1, 1], 1):
            cache = model(some, past_key_values=cache, use_cache=True).past_key_values
    record = recorder.record(weights=False)
    for layer in record.modules:
        ((_, weights, visible),) = [call for call in calls if call[0] == layer.name]
        kinds = kinds_of_keys(ids.numpy(), np.zeros(ids.shape, bool), ids.shape[1])
        expected = by_definition(weights, visible, {name: kinds[name] for name in ("self_mass", "previous_mass")})
        masses = {name: mass for name, (mass, _) in expected.items()} | {"mean_distance": mean_distance(weights)}
        for name, mass in masses.items():
            mean = np.nanmean(mass, (0, 2))
            np.testing.assert_allclose(record.tallies[f"{layer.name}/{name}"].mean, mean, atol=1e-6)
    assert len(record.modules) >= 2
