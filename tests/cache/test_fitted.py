"""Backtest and its parts: laws of queries, atoms, masses, values, budgets, each against what it says it computes."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.prefixes import decoder, ids, made_prefix

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache import Backtest, MeasureCache, compress, compress_prefix, on_cumulant, prefill
from cumulant.cache.budget import budget
from cumulant.cache.fitted.atoms import subset_atoms, tangent_atoms
from cumulant.cache.fitted.backtest import RECENT, SMALLEST, Curves, judges_of, loss, sizes_of
from cumulant.cache.fitted.budgets import LEAST, allocate, interpolated, shared_by_scores
from cumulant.cache.fitted.law import REPEATED_PART, QueryLaw, drawn_parts, queries_after, sample_law
from cumulant.cache.fitted.mass import expected_mass, shared_sigma_mass, tangent_mass
from cumulant.cache.fitted.named import PARTS, method
from cumulant.cache.fitted.query_law import own_context, repeated_queries, sample_queries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output, read
from cumulant.cache.fitted.recipe import EntryRecipe, fit
from cumulant.cache.fitted.values import refitted

T = 128


@pytest.fixture(scope="module")
def model() -> Any:
    with on_cumulant(made := decoder()):
        yield made


@pytest.fixture(scope="module")
def prefix(model: Any) -> Any:
    return prefill(model, ids(T))


def heads(n: int = 40, r: int = 30, *, seed: int = 0, spread: float = 1.0) -> tuple[KeyHeads, LawQueries]:
    """Two key heads and queries, in float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(2, *size, generator=g, dtype=torch.float64)

    tokens = KeyHeads.tokens(draw(n, 4), draw(n, 3))
    return tokens, LawQueries(spread * draw(r, 4) + 1.0, draw(r), draw(r, 3))


# ---------------------------------------------------------------------- laws


def test_queries_after_a_cut_are_those_that_the_model_had(prefix: Any):
    layer, cut = prefix.layers[1], 96
    sample = queries_after(layer, cut, 8)
    at = cut + sample.span
    torch.testing.assert_close(sample.at(cut, layer.rotation), layer.queries[:, at], atol=1e-4, rtol=1e-4)


def test_a_cut_and_its_local_context_together_are_the_full_measure(prefix: Any):
    layer, cut = prefix.layers[0], 90
    sample = queries_after(layer, cut, 16)
    queries = LawQueries.of(sample, cut, layer.rotation, 2)
    tokens = KeyHeads.tokens(layer.keys[:, :cut], layer.values[:, :cut])
    total, p = attention(tokens, queries)
    found = output(tokens, queries, total, p).reshape(4, -1, 8)
    for head, number in itertools.product(range(4), range(len(sample.span))):
        at = cut + int(sample.span[number])
        keys, values = layer.keys[head // 2, : at + 1].double(), layer.values[head // 2, : at + 1].double()
        scores = keys @ layer.queries[head, at].double()
        assert abs(scores.logsumexp(0) - total.reshape(4, -1)[head, number]) < 1e-3
        torch.testing.assert_close(scores.softmax(0) @ values, found[head, number].double(), atol=1e-3, rtol=1e-3)


def test_the_local_context_of_a_token_is_itself_and_those_before_it(prefix: Any):
    layer, at, span = prefix.layers[0], torch.tensor([3, 70]), torch.tensor([3, 5])
    local, out = own_context(layer, at, span)
    for i, head in itertools.product(range(2), range(4)):
        window = slice(int(at[i] - span[i]), int(at[i]) + 1)
        scores = layer.keys[head // 2, window] @ layer.queries[head, at[i]]
        torch.testing.assert_close(local[head, i], scores.logsumexp(0), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(out[head, i], scores.softmax(0) @ layer.values[head // 2, window])


def test_many_tokens_read_what_each_reads_alone(prefix: Any):
    layer = prefix.layers[0]._replace(sinks=torch.full((4,), 0.5))
    at = torch.arange(8, 128)
    span = torch.randint(0, 9, (len(at),), generator=torch.Generator().manual_seed(0))
    together = own_context(layer, at, span)
    alone = [own_context(layer, at[i : i + 1], span[i : i + 1]) for i in range(len(at))]
    for found, parts in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)


def test_parts_to_repeat_are_in_order_and_as_many_as_asked_for():
    for length, share in itertools.product((100, 256, 257, 1024, 4096), (0.1, 0.5, 1.0)):
        parts = drawn_parts(length, share, torch.Generator().manual_seed(0))
        assert all(a < b for a, b in parts)
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(parts))  # neighbours are one part
        held, whole = sum(b - a for a, b in parts), -(-length // REPEATED_PART)
        assert abs(held - REPEATED_PART * max(round(share * whole), 1)) < REPEATED_PART


def test_a_sink_of_the_model_is_part_of_the_local_context(prefix: Any):
    layer = prefix.layers[0]._replace(sinks=torch.full((4,), 2.0))
    at = torch.tensor([5])
    with_sink, out = own_context(layer, at, torch.tensor([0]))
    plain, before = own_context(prefix.layers[0], at, torch.tensor([0]))
    torch.testing.assert_close(with_sink, torch.logaddexp(plain, torch.tensor(2.0)))
    torch.testing.assert_close(out, before * (plain - with_sink).exp()[..., None])


def test_queries_of_a_repetition_are_those_of_the_text_read_twice(prefix: Any, model: Any):
    """Without a tokenizer nothing is asked: the prefix follows itself."""
    twice = prefill(model, torch.cat([prefix.input_ids, prefix.input_ids]))
    at = torch.tensor([2, 50, 127])
    for sample, layer in zip(repeated_queries(prefix, [(0, T)], at), twice.layers, strict=True):
        torch.testing.assert_close(sample.at(T, layer.rotation), layer.queries[:, T + at], atol=1e-3, rtol=1e-3)
        local, out = own_context(layer, T + at, at)
        torch.testing.assert_close(sample.local, local, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(sample.local_output, out, atol=1e-3, rtol=1e-3)


def test_a_query_is_asked_as_if_it_stood_at_a_later_position(prefix: Any):
    """⟨R_s q, R_t k⟩ depends on s − t alone: moved on together, query and keys have the same scores."""
    layer = prefix.layers[0]
    sample = sample_queries(layer, torch.tensor([40]), torch.tensor([7]))
    moved = layer.rotation.turn(layer.keys[:, :40], torch.full((40,), T + 7 - 40))
    own = layer.queries[:, 40] @ layer.keys[0, :40].mT
    torch.testing.assert_close(
        sample.at(T, layer.rotation)[:, 0] @ moved[0].mT, own, atol=1e-3, rtol=1e-3, msg="scores of a turned query"
    )


# ---------------------------------------------------------------------- atoms and masses


def test_an_atom_of_one_cluster_is_the_gradient_of_its_log_normalizer():
    tokens, queries = heads()
    one = LawQueries(*(x[:, :1] for x in queries))
    readings = read(tokens, one)
    atoms = tangent_atoms(tokens, one, readings, 1)
    eta = one.eta[:, 0].clone().requires_grad_(True)
    (tokens.keys @ eta[..., None])[..., 0].logsumexp(1).sum().backward()
    torch.testing.assert_close(atoms.keys[:, 0], eta.grad)
    mass = tangent_mass(atoms, tokens, one, readings)[:, 0]
    at_typical = mass + (atoms.keys[:, 0] * one.eta[:, 0]).sum(-1)
    torch.testing.assert_close(at_typical, (tokens.keys @ one.eta[:, 0, :, None])[..., 0].logsumexp(1))


def test_the_expected_mass_draws_the_attention_that_was_paid():
    tokens, queries = heads()
    readings = read(tokens, queries)
    atoms = tangent_atoms(tokens, queries, readings, 7)
    mass = expected_mass(atoms, tokens, queries, readings)
    drawn = (queries.eta @ atoms.keys.mT + mass[:, None] - readings.log_normalizer[..., None]).exp().mean(1)
    torch.testing.assert_close(drawn, atoms.expected)
    torch.testing.assert_close(atoms.expected.sum(1), readings.mean.sum(1))


def test_one_covariance_brings_the_log_normalizer_nearer():
    """Σ adds the second order that a tangent lacks: on queries spread about the typical one G is less too small."""
    tokens, queries = heads(200, 400, spread=0.5)
    readings = read(tokens, queries)
    atoms = tangent_atoms(tokens, queries, readings, 10)
    gaps = []
    for mass in (tangent_mass, shared_sigma_mass):
        log_mass = mass(atoms, tokens, queries, readings)
        total, _ = attention(KeyHeads(atoms.keys, atoms.values, log_mass), queries)
        gaps.append((total - readings.log_normalizer).mean())
    assert gaps[0] < gaps[1]
    assert abs(gaps[1]) < abs(gaps[0]) / 2


def test_subset_atoms_are_the_tokens_that_the_law_pays_most():
    tokens, queries = heads()
    readings = read(tokens, queries)
    atoms = subset_atoms(tokens, queries, readings, 5)
    assert atoms.chosen is not None
    for head in range(2):
        assert set(atoms.chosen[head].tolist()) == set(readings.rms[head].topk(5).indices.tolist())


def test_values_are_those_of_least_squares():
    tokens, queries = heads(12, 50)
    target = torch.randn(2, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fitted = refitted(tokens, queries, target, ridge=1e-12)
    total, p = attention(tokens, queries)
    local = (queries.local - total).exp()[..., None] * queries.local_output
    for head in range(2):
        own = np.linalg.lstsq(p[head].numpy(), (target - local)[head].numpy(), rcond=None)[0]
        np.testing.assert_allclose(fitted.values[head].numpy(), own, atol=1e-6)


@pytest.mark.parametrize("recipe", [EntryRecipe(), EntryRecipe("subset", "unit", None), EntryRecipe(mass="sigma")])
@pytest.mark.parametrize(("number", "recent"), [(40, 3), (80, 0)])
def test_room_for_all_tokens_holds_them_as_they_are(recipe: EntryRecipe, number: int, recent: int):
    tokens, queries = heads()
    made = fit(recipe, tokens, queries, read(tokens, queries), number, recent)
    assert made.entries is tokens
    assert made.positions.tolist() == [[*range(40)]] * 2


@pytest.mark.parametrize("number", [1, 2, 5, 6, 39])
@pytest.mark.parametrize("recent", [0, 2, 100])
def test_a_fit_has_as_many_entries_as_asked(number: int, recent: int):
    tokens, queries = heads()
    made = fit(EntryRecipe(), tokens, queries, read(tokens, queries), number, recent)
    assert made.entries.keys.shape == (2, number, 4)
    assert all(bool(x.isfinite().all()) for x in made.entries)


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("seed", range(20))
def test_budgets_are_the_best_of_all_on_convex_errors(seed: int):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1, 2, 3, 4, 5])
    errors = torch.rand(3, 5, generator=g, dtype=torch.float64).sort(-1, descending=True).values
    errors = errors.flip(-1).cumsum(-1).flip(-1)  # convex: each step takes less away than the one before
    total = int(torch.randint(3, 16, (1,), generator=g))
    found = allocate(errors, sizes, torch.ones(3), total)
    assert int(found.sum()) == total
    every = [m for m in itertools.product(range(1, 6), repeat=3) if sum(m) <= total]
    best = min(sum(float(errors[h, m - 1]) for h, m in enumerate(ms)) for ms in every)
    assert sum(float(errors[h, m - 1]) for h, m in enumerate(found.tolist())) == pytest.approx(best)


@pytest.mark.parametrize("total", [1, 10, 37, 100, 1000])
def test_bytes_are_spent_and_no_more(total: int):
    errors = torch.rand(6, 4, generator=torch.Generator().manual_seed(total))
    cost = torch.tensor([1, 2, 3, 1, 2, 3])
    found = allocate(errors, torch.tensor([2, 8, 16, 32]), cost, total)
    spent = int((found * cost).sum())
    assert spent <= total
    assert spent > total - 12 or bool((found == 32).all())
    assert bool((found <= 32).all())


def test_errors_between_sizes_fall_and_end_at_zero():
    errors, grid = interpolated(torch.tensor([[9.0, 1.0, 2.0, 0.0]]), torch.tensor([8, 16, 32, 64]))
    assert bool((errors.diff() <= 0).all())
    assert float(errors[0, -1]) == 0
    assert grid[[0, 4, 8, 12]].tolist() == [8, 16, 32, 64]
    assert errors[0, [0, 4]].tolist() == pytest.approx([9, 1])


def test_sizes_grow_and_end_with_all_tokens():
    for length in (2, 8, 9, 64, 100, 4096):
        sizes = sizes_of(length)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == length
        assert sizes[0] == min(length, max(SMALLEST, length // 64))


def test_attention_shares_a_layer_out():
    found = shared_by_scores(torch.rand(3, 50, generator=torch.Generator().manual_seed(0)), 60, 4)
    assert int(found.sum()) == 60
    assert int(found.min()) >= 4


# ---------------------------------------------------------------------- the compressor


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.7, 1.0])
def test_bytes_are_within_the_budget(prefix: Any, keep: float):
    small = compress_prefix(prefix, "backtest", keep)
    allowed = budget(prefix, keep, with_mass=True)
    assert small.held <= allowed.bytes
    assert small.held >= 0.9 * allowed.bytes or small.keep > 0.9


@pytest.mark.parametrize("name", ["backtest", *(f"backtest+{part}" for part in PARTS)])
def test_every_part_makes_entries(prefix: Any, name: str):
    small = compress_prefix(prefix, name, 0.25)
    assert small.keep <= 0.25 + 1e-3
    assert method(name).name == name


def test_all_bytes_are_exact(prefix: Any, model: Any):
    whole = compress_prefix(prefix, "backtest", 1.0)  # masses count: 0.97 of the entries have room
    following = ids(9, seed=4)[None]
    with torch.no_grad():
        full = model(following, past_key_values=prefix.copy_cache()).logits
        found = model(following, past_key_values=whole.cache(prefix)).logits
    assert (full.softmax(-1) - found.softmax(-1)).abs().max() < 0.02


def test_a_head_takes_law_share_and_entries_that_served_it_best(prefix: Any):
    """Head 0 is right with few entries fitted to the repetition, the others want all tokens that they can get."""
    compressor, sizes = Backtest(), len(sizes_of(T))
    evidence = compressor.evidence(prefix)
    errors = torch.ones(2, 2, sizes, len(RECENT))
    errors[1] = torch.linspace(9, 0, sizes)[:, None]
    errors[1, 0, :, 1] -= 0.5  # the first law, with the last tokens alone
    errors[0, 1, :, 0] = 0.0
    curve = Curves(errors, torch.zeros_like(errors))
    plan = compressor.plan(prefix, budget(prefix, 0.3, with_mass=True), evidence._replace(curves=[curve, curve]))
    assert plan.law.tolist() == [1, 0, 1, 0]
    assert plan.entries[0] == plan.entries[2] == sizes_of(T)[0]
    assert plan.recent.tolist() == [int(RECENT[0] * plan.entries[0]), plan.entries[1]] * 2
    assert plan.expected[0] <= LEAST


def test_errors_of_a_backtest_are_those_of_its_entries_on_both_kinds_of_queries(prefix: Any):
    layer, cut = prefix.layers[1], 96
    samples = sample_law(prefix, QueryLaw(repeated=48), 16, torch.Generator().manual_seed(0))
    tokens = KeyHeads.tokens(layer.keys[:, :cut], layer.values[:, :cut])
    judges = judges_of(layer, tokens, samples.judges_of(1, queries_after(layer, cut, 8)))
    made = KeyHeads.tokens(layer.keys[:, 40:cut], layer.values[:, 40:cut])
    metric = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
    metric = metric.mT @ metric
    found = loss(made, judges, metric)
    for kind, sample in enumerate(samples.judges_of(1, queries_after(layer, cut, 8))):
        eta = sample.at(cut, layer.rotation)
        for key_head in range(2):
            total = 0.0
            for head in (2 * key_head, 2 * key_head + 1):
                scores = [eta[head] @ x[key_head].T for x in (tokens.keys, made.keys)]
                outputs = []
                for score, values in zip(scores, (tokens.values, made.values), strict=True):
                    p = torch.cat([score, sample.local[head][:, None]], 1).softmax(1)
                    outputs.append(p[:, :-1] @ values[key_head] + p[:, -1:] * sample.local_output[head])
                error = outputs[1] - outputs[0]
                total += float((error @ metric[head] * error).sum(-1).mean())
            torch.testing.assert_close(float(found[kind, key_head]), total, rtol=1e-3, atol=1e-5)


def test_without_a_repetition_the_text_is_cut_half_way_too():
    assert Backtest().settings.tokens(1024) == [128]
    assert Backtest(repeat=False).settings.tokens(1024) == [128, 512]
    assert Backtest(law=QueryLaw(repeated=0)).settings.tokens(200) == [50, 100]


def test_the_same_seed_gives_the_same_entries(prefix: Any):
    a, b, c = (compress_prefix(prefix, Backtest(seed=seed), 0.3).layers for seed in (1, 1, 2))
    assert all(torch.equal(x.keys, y.keys) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    assert any(x.keys.shape != y.keys.shape or not torch.equal(x.keys, y.keys) for x, y in zip(a[0], c[0], strict=True))


def test_predictions_are_nearer_than_with_the_last_tokens_alone(prefix: Any, model: Any):
    following = ids(32, seed=5)[None]

    def kl(name: str) -> float:
        with torch.no_grad():
            cache = compress_prefix(prefix, name, 0.5).cache(prefix)
            found = model(following, past_key_values=cache).logits.double().log_softmax(-1)
            full = model(following, past_key_values=prefix.copy_cache()).logits.double().log_softmax(-1)
        return float((full.exp() * (full - found)).sum(-1).mean())

    assert kl("backtest") < kl("stream") / 2


def test_positions_say_which_entries_are_tokens(prefix: Any):
    for layer, of_heads in zip(prefix.layers, compress_prefix(prefix, "backtest", 0.5).layers, strict=True):
        for keys, head in zip(layer.keys, of_heads, strict=True):
            assert head.positions is not None
            exact = head.positions >= 0
            torch.testing.assert_close(head.keys[exact], keys[head.positions[exact]])
            assert set(range(4)) <= set(head.positions.tolist())


def test_a_short_prefix_is_shared_evenly_and_says_so(model: Any):
    short = prefill(model, ids(40))
    with pytest.warns(
        UserWarning, match="40 tokens are too few for a backtest, which needs 64: every key head gets as"
    ):
        small = compress_prefix(short, Backtest(), 0.5)
    assert {len(head.keys) for layer in small.layers for head in layer} == {budget(short, 0.5, with_mass=True).per_head}


def test_a_budget_below_sinks_and_window_is_spent_on_first_tokens(prefix: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = compress_prefix(prefix, Backtest(), 0.03)
    assert all(len(head.keys) >= 1 for layer in small.layers for head in layer)
    assert small.keep <= 0.03


def test_models_without_rotation_have_queries_as_they_are():
    with on_cumulant(opt := decoder("OPT", ffn_dim=40, word_embed_proj_dim=32)):
        prefix = prefill(opt, ids(T))
        small = compress_prefix(prefix, "backtest", 0.25)
    assert not prefix.layers[0].rotates
    assert small.keep <= 0.25


def test_a_rotation_that_is_not_known_is_refused(prefix: Any):
    unknown = made_prefix(torch.randn(1, 80, 4))
    unknown = type(unknown)(**(vars(unknown) | {"layers": (unknown.layers[0]._replace(rotates=True),)}))
    with pytest.raises(
        ValueError, match="backtest: expected rotary positions, or none, got Identity, which rotates in"
    ):
        compress_prefix(unknown, "backtest", 0.5)


def test_parts_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"compressor backtest\+fast: expected parts of norepeat, .*, got 'fast'"):
        method("backtest+fast")
    with pytest.raises(ValueError, match="expected backtest or one of adakv"):
        method("h2o+fast")


def test_half_precision_stays_half_precision():
    with on_cumulant(model := decoder(dtype=torch.float16)):
        prefix = prefill(model, ids(T))
        small = compress_prefix(prefix, "backtest+norepeat", 0.5)
    assert {head.keys.dtype for layer in small.layers for head in layer} == {torch.float16}


# ---------------------------------------------------------------------- in one call


def next_logits(model: Any, cache: MeasureCache, token: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    positions = None if mask is None else mask.sum(1, keepdim=True)
    whole = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    with torch.no_grad():
        return model(token, past_key_values=cache, attention_mask=whole, position_ids=positions).logits[:, -1]


def test_one_call_reads_and_compresses(model: Any, prefix: Any):
    cache = compress(model, prefix.input_ids, keep=0.25)
    own = compress_prefix(prefix, "backtest", 0.25).cache(prefix)
    assert cache.get_seq_length() == T
    token = torch.tensor([[7]])
    torch.testing.assert_close(next_logits(model, cache, token), next_logits(model, own, token))


def test_padded_sequences_are_held_as_each_alone(model: Any):
    texts = [ids(T, seed=1), ids(90, seed=2)]
    padded = torch.stack([torch.nn.functional.pad(x, (T - len(x), 0)) for x in texts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones(len(x), dtype=torch.int64), (T - len(x), 0)) for x in texts])
    cache = compress(model, padded, keep=0.3, attention_mask=mask)
    found = next_logits(model, cache, torch.tensor([[7], [9]]), mask)
    for row, (text, token) in enumerate(zip(texts, (7, 9), strict=True)):
        alone = compress(model, text, keep=0.3)
        torch.testing.assert_close(
            found[row], next_logits(model, alone, torch.tensor([[token]]))[0], atol=1e-3, rtol=1e-3
        )


def test_a_number_of_bytes_is_kept(model: Any):
    cache = compress(model, torch.stack([ids(T, seed=1), ids(T, seed=2)]), bytes=20_000, method="h2o")
    assert 18_000 < cache.bytes() <= 20_200  # where heads begin is 200 bytes more
    assert cache.full_bytes() == 2 * 2 * 2 * 2 * T * 8 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "compress: expected keep or bytes, one of them, got keep=None, bytes=None"),
        ({"keep": 0.5, "bytes": 9}, "expected keep or bytes, one of them, got keep=0.5, bytes=9"),
        ({"bytes": 0}, r"compress\.bytes: expected a number of bytes above 0, got 0"),
        ({"keep": 1.5}, r"budget\.keep: expected a share above 0 and at most 1, got 1.5"),
        ({"input_ids": torch.zeros(2, 3, 4, dtype=torch.int64), "keep": 0.5}, r"token ids \(T,\) or \(batch, T\), got"),
        ({"input_ids": torch.zeros(5), "keep": 0.5}, r"compress\.input_ids: expected token ids"),
        ({"attention_mask": torch.ones(1, 3), "keep": 0.5}, r"compress\.attention_mask: expected shape"),
        ({"attention_mask": torch.arange(T)[None] < 9, "keep": 0.5}, "Pad on the left"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(model: Any, changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        compress(**({"model": model, "input_ids": ids(T)} | changes))


def test_a_law_without_queries_of_one_kind_takes_the_others(prefix: Any):
    for law in (QueryLaw(recent=0, spread=32, repeated=0), QueryLaw(recent=32, spread=0, repeated=32)):
        assert compress_prefix(prefix, Backtest(law=law), 0.25).keep <= 0.25
