"""Attention Matching and its parts: least squares against scipy, pursuit against one written out, what a fit holds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from tests.cache.prefixes import decoder, ids, made_prefix

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache import compress_prefix, on_cumulant, prefill
from cumulant.cache.baselines import Matching
from cumulant.cache.budget import budget
from cumulant.cache.fitted.atoms import Atoms
from cumulant.cache.fitted.named import MATCHING_PARTS, method
from cumulant.cache.fitted.nonnegative import bounded_least_squares, mass_target, matched_mass, nnls_mass
from cumulant.cache.fitted.pursuit import omp_atoms, pursuit_order
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output, read
from cumulant.cache.fitted.reference import Reference

T = 128


@pytest.fixture(scope="module")
def model() -> Any:
    with on_cumulant(made := decoder()):
        yield made


@pytest.fixture(scope="module")
def prefix(model: Any) -> Any:
    return prefill(model, ids(T))


def heads(n: int = 40, r: int = 60, *, seed: int = 0) -> tuple[KeyHeads, LawQueries]:
    """Two key heads and queries, in float64, with local context."""
    g = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(2, *size, generator=g, dtype=torch.float64)

    return KeyHeads.tokens(draw(n, 4), draw(n, 3)), LawQueries(draw(r, 4) + 0.5, draw(r), draw(r, 3))


def repeated_tokens(times: list[int]) -> KeyHeads:
    """Tokens of one key head, each so many times, in an order drawn at random."""
    g = torch.Generator().manual_seed(1)
    which = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
    which = which[torch.randperm(len(which), generator=g)]
    keys = torch.randn(len(times), 4, generator=g, dtype=torch.float64)
    values = torch.randn(len(times), 3, generator=g, dtype=torch.float64)
    return KeyHeads.tokens(keys[None, which], values[None, which])


# ---------------------------------------------------------------------- masses


@pytest.mark.parametrize("seed", range(10))
def test_non_negative_least_squares_are_those_of_scipy(seed: int):
    g = np.random.default_rng(seed)
    matrix, y = np.abs(g.standard_normal((3, 40, 8))), g.standard_normal((3, 40)) + 0.3
    gram, right = np.einsum("hij,hik->hjk", matrix, matrix), np.einsum("hij,hi->hj", matrix, y)
    found = bounded_least_squares(torch.tensor(gram), torch.tensor(right), 0.0, math.inf, 2000)
    expected = [optimize.nnls(m, target)[0] for m, target in zip(matrix, y, strict=True)]
    assert any((x == 0).any() for x in expected)
    np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_least_squares_with_two_bounds_are_those_of_scipy(seed: int):
    g = np.random.default_rng(seed)
    matrix, y = np.abs(g.standard_normal((30, 6))), 4 * g.standard_normal(30)
    found = bounded_least_squares(torch.tensor(matrix.T @ matrix), torch.tensor(matrix.T @ y), 0.05, 0.4, 2000)
    expected = optimize.lsq_linear(matrix, y, (0.05, 0.4), tol=1e-14).x
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_masses_of_attention_satisfy_the_conditions_of_a_minimum():
    """The gradient is 0 where a mass is free, and points out of the bounds where it is at one."""
    tokens, queries = heads(60, 300)
    keys, bounds = tokens.keys[:, :12], (-3.0, 2.5)
    target = mass_target(tokens, queries)
    mass = matched_mass(keys, queries, target, bounds, 3000).exp()
    terms = (queries.eta @ keys.mT - target.highest[..., None]).exp()
    gradient = (terms.mT @ (terms @ mass[..., None] - target.mass[..., None]))[..., 0] / terms.square().sum(1)
    at_lower, at_upper = mass < math.exp(-3) + 1e-9, mass > math.exp(2.5) - 1e-9
    assert bool(at_lower.any() | at_upper.any())
    assert bool((~at_lower & ~at_upper).any())
    assert gradient[~at_lower & ~at_upper].abs().max() < 1e-5
    assert bool((gradient[at_lower] > -1e-5).all())
    assert bool((gradient[at_upper] < 1e-5).all())


def test_the_mass_of_a_token_that_was_there_three_times_is_three():
    tokens = repeated_tokens([1, 3, 4])
    _, queries = heads(1, 40)
    queries = LawQueries(*(x[:1] for x in queries))
    distinct = tokens.keys[0].unique(dim=0)[None]
    times = (tokens.keys[0][:, None] == distinct[0]).all(-1).sum(0)
    atoms = Atoms(distinct, torch.zeros(1, 3, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64))
    found = nnls_mass(atoms, tokens, queries, read(tokens, queries))
    torch.testing.assert_close(found[0].exp(), times.double(), atol=1e-4, rtol=1e-4)


def test_the_mass_is_that_of_the_prefix_alone_and_not_of_what_is_read_beside_it():
    tokens, queries = heads()
    target = mass_target(tokens, queries)
    scores = queries.eta @ tokens.keys.mT
    torch.testing.assert_close(target.highest + target.mass.log(), scores.logsumexp(-1))


# ---------------------------------------------------------------------- pursuit


def pursuit_written_out(terms: np.ndarray, number: int, each: int) -> list[int]:
    """Choose, refit with all that are chosen, choose again."""
    target = terms.sum(1)
    chosen: list[int] = []
    residual = target
    while len(chosen) < number:
        scores = terms.T @ residual
        scores[chosen] = -np.inf
        chosen += [*np.argsort(-scores)[: min(each, number - len(chosen))]]
        masses = np.linalg.lstsq(terms[:, chosen], target, rcond=None)[0].clip(1e-12, math.exp(7))
        residual = target - terms[:, chosen] @ masses
    return [int(c) for c in chosen]


@pytest.mark.parametrize("each", [1, 3, 4])
def test_a_pursuit_chooses_what_one_written_out_chooses(each: int):
    tokens, queries = heads(30, 200, seed=each)
    target = mass_target(tokens, queries)
    found = pursuit_order(tokens, queries, target, 10, each)
    terms = (queries.eta @ tokens.keys.mT - target.highest[..., None]).exp().numpy()
    assert found.tolist() == [pursuit_written_out(of_head, 10, each) for of_head in terms]


def test_a_pursuit_chooses_none_of_several_equal_tokens_twice():
    """What is left of the mass is orthogonal to what is chosen: equal tokens are no longer wanted."""
    tokens = repeated_tokens([1, 2, 6, 6, 9])
    queries = LawQueries(*(x[:1] for x in heads(1, 80)[1]))
    order = pursuit_order(tokens, queries, mass_target(tokens, queries), 5, 1)
    assert len(tokens.keys[0, order[0]].unique(dim=0)) == 5


def test_pursuit_and_masses_together_are_exact_where_tokens_repeat():
    tokens = repeated_tokens([1, 2, 6, 6, 9])
    queries = LawQueries(*(x[:1] for x in heads(1, 80)[1]))
    target = mass_target(tokens, queries)
    order = pursuit_order(tokens, queries, target, 5, 1)[0]
    keys, values = tokens.keys[:, order], tokens.values[:, order]
    entries = KeyHeads(keys, values, matched_mass(keys, queries, target, (-3.0, 3.0), 3000))
    others = LawQueries(*(x[:1] for x in heads(1, 50, seed=7)[1]))
    total, p = attention(tokens, others)
    found, weights = attention(entries, others)
    torch.testing.assert_close(found, total, atol=1e-4, rtol=1e-4)
    out, wanted = output(entries, others, found, weights), output(tokens, others, total, p)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def test_atoms_of_a_pursuit_are_tokens():
    tokens, queries = heads()
    readings = read(tokens, queries)
    atoms = omp_atoms(tokens, queries, readings, 7)
    assert atoms.chosen is not None
    for head in range(2):
        assert len(set(atoms.chosen[head].tolist())) == 7
        torch.testing.assert_close(atoms.keys[head], tokens.keys[head, atoms.chosen[head]])
        torch.testing.assert_close(atoms.expected[head], readings.mean[head, atoms.chosen[head]])


# ---------------------------------------------------------------------- the compressor


def test_tokens_that_no_query_reads_are_dropped_for_nothing():
    """Most keys have scores of −40: keys, masses and values of the others are what they were."""
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(1, 200, 9, generator=g), torch.randn(1, 200, 2, generator=g)
    queries = torch.cat([torch.randn(1, 200, 8, generator=g), torch.ones(1, 200, 1)], -1)
    unread = torch.arange(200) % 20 > 0
    unread[:4] = False
    keys[..., 8] = torch.where(unread, -40.0, 0.0)
    prefix = made_prefix(keys, queries, values)
    keep = 13 * (9 + 2 + 1) / (200 * 11)  # room for the 13 that are read
    (head,) = compress_prefix(prefix, Matching(repeat=False, budgets="uniform"), keep).layers[0]
    assert head.positions.tolist() == (~unread).nonzero()[:, 0].tolist()
    torch.testing.assert_close(head.values, values[0, ~unread], atol=1e-3, rtol=1e-3)
    assert head.log_mass.abs().max() < 1e-3


def test_reference_queries_that_are_fewer_than_entries_get_their_outputs(prefix: Any):
    few = Matching(queries=24, budgets="uniform", ridge=1e-6)
    evidence = few.evidence(prefix)
    made = few.compress(prefix, budget(prefix, 0.5, with_mass=True), evidence)
    layer, queries = prefix.layers[0], evidence.references[0].asked.alone()
    tokens = KeyHeads.tokens(layer.keys[:, 4:], layer.values[:, 4:])
    wanted = output(tokens, queries, *attention(tokens, queries))
    for h, head in enumerate(made[0]):
        entries = KeyHeads(head.keys[None, 4:], head.values[None, 4:], head.log_mass[None, 4:])
        asked = LawQueries(*(x[h : h + 1] for x in queries))
        found = output(entries, asked, *attention(entries, asked))
        assert (found - wanted[h]).norm() < 0.02 * wanted[h].norm()


def test_what_reference_queries_read_of_all_tokens_is_what_the_model_read(prefix: Any, model: Any):
    """Without a tokenizer the prefix follows itself: the outputs are those of the text read twice."""
    twice = prefill(model, torch.cat([prefix.input_ids, prefix.input_ids]))
    every = torch.ones(T, dtype=torch.bool)
    for layer, sample, whole in zip(prefix.layers, Matching().samples(prefix), twice.layers, strict=True):
        reference, again = Reference.of(layer, sample, every)
        torch.testing.assert_close(reference.rms, again.rms)
        judging = sample.local[0].isfinite()
        assert int(judging.sum()) == T // 4
        found = reference.whole_output().reshape(4, T, 8)[:, judging]
        scores = whole.queries[:, T:] @ whole.keys.repeat_interleave(2, 0).mT
        scores.masked_fill_(torch.arange(2 * T) > torch.arange(T, 2 * T)[:, None], -torch.inf)
        wanted = scores.softmax(-1) @ whole.values.repeat_interleave(2, 0)
        torch.testing.assert_close(found, wanted[:, judging], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["matching", *(f"matching+{part}" for part in MATCHING_PARTS), "matching+omp+uniform"])
@pytest.mark.parametrize("keep", [0.06, 0.25, 0.8, 1.0])
def test_bytes_are_within_the_budget_and_spent(prefix: Any, name: str, keep: float):
    small = compress_prefix(prefix, name, keep)
    allowed = budget(prefix, keep, with_mass=True)
    assert method(name).name == name
    assert small.held <= allowed.bytes
    assert small.held >= 0.9 * allowed.bytes
    rows = sum(head.keys.nbytes + head.values.nbytes + head.log_mass.nbytes for of in small.layers for head in of)
    assert small.held == rows


def test_log_masses_are_within_the_bounds_of_the_paper(prefix: Any):
    for name, most in (("matching", 3.0), ("matching+omp", 7.0)):
        masses = torch.cat([head.log_mass for of in compress_prefix(prefix, name, 0.1).layers for head in of])
        assert masses.max() <= most + 1e-5
    by_attention = compress_prefix(prefix, "matching", 0.1)
    assert min(float(head.log_mass.min()) for of in by_attention.layers for head in of) >= -3 - 1e-5


def test_keys_are_those_of_tokens_and_first_tokens_stay_as_they_are(prefix: Any):
    for name in ("matching", "matching+omp"):
        for layer, of_heads in zip(prefix.layers, compress_prefix(prefix, name, 0.3).layers, strict=True):
            for keys, values, head in zip(layer.keys, layer.values, of_heads, strict=True):
                assert head.positions[:4].tolist() == [0, 1, 2, 3]
                assert head.positions.diff().min() > 0
                torch.testing.assert_close(head.keys, keys[head.positions])
                torch.testing.assert_close(head.values[:4], values[:4])
                assert not torch.allclose(head.values[4:], values[head.positions[4:]])


def test_head_budgets_differ_and_hold_three_quarters_at_most(prefix: Any):
    compressor = Matching()
    counts = compressor.plan(prefix, budget(prefix, 0.4, with_mass=True), compressor.evidence(prefix))
    assert len(counts.unique()) > 1
    assert int(counts.max()) <= 0.75 * T
    even = compress_prefix(prefix, "matching+uniform", 0.4)
    assert len({len(head.keys) for of in even.layers for head in of}) == 1


def test_budgets_are_from_queries_that_entries_were_not_fitted_to(prefix: Any):
    """A head whose outputs are read by chance alone is not fitted better on others by more entries than queries."""
    compressor = Matching(queries=32, ridge=1e-6)
    errors = compressor.evidence(prefix).errors
    assert errors is not None
    assert errors[:, -2].min() > 1e-6  # with half of all tokens, and more entries than queries: not 0
    assert errors[:, -1].abs().max() == 0


def test_the_same_seed_gives_the_same_entries(prefix: Any):
    a, b, c = (compress_prefix(prefix, Matching(queries=64, seed=seed), 0.3).layers for seed in (1, 1, 2))
    assert all(torch.equal(x.values, y.values) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    assert any(x.keys.shape != y.keys.shape or not torch.equal(x.keys, y.keys) for x, y in zip(a[0], c[0], strict=True))


@pytest.mark.parametrize("name", ["matching", "matching+omp", "matching+norepeat"])
def test_predictions_are_nearer_than_with_the_last_tokens_alone(prefix: Any, model: Any, name: str):
    following = ids(32, seed=5)[None]

    def kl(compressor: str) -> float:
        with torch.no_grad():
            cache = compress_prefix(prefix, compressor, 0.5).cache(prefix)
            found = model(following, past_key_values=cache).logits.double().log_softmax(-1)
            full = model(following, past_key_values=prefix.copy_cache()).logits.double().log_softmax(-1)
        return float((full.exp() * (full - found)).sum(-1).mean())

    assert kl(name) < kl("stream") / 2


@pytest.mark.parametrize("length", [2, 5, 9, 20])
def test_short_prefixes_are_held_too(model: Any, length: int):
    short = prefill(model, ids(length))
    for name in ("matching", "matching+omp+norepeat"):
        assert compress_prefix(short, name, 0.8).keep <= 0.8


def test_half_precision_stays_half_precision():
    with on_cumulant(model := decoder(dtype=torch.float16)):
        small = compress_prefix(prefill(model, ids(T)), "matching", 0.5)
    assert {head.keys.dtype for layer in small.layers for head in layer} == {torch.float16}


def test_a_rotation_that_is_not_known_is_refused():
    unknown = made_prefix(torch.randn(1, 80, 4))
    unknown = type(unknown)(**(vars(unknown) | {"layers": (unknown.layers[0]._replace(rotates=True),)}))
    with pytest.raises(ValueError, match="matching: expected rotary positions, or none, got Identity"):
        compress_prefix(unknown, "matching", 0.5)


def test_parts_that_do_not_exist_are_named():
    with pytest.raises(
        ValueError, match=r"compressor matching\+fast: expected parts of omp, norepeat, uniform, got 'f"
    ):
        method("matching+fast")
