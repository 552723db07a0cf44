"""What every baseline keeps, against what its paper says it keeps, on cases worked out by hand."""

import math

import pytest
import torch

from tests.cache.prefixes import decoder, ids, made_prefix

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache.attention_weights import weight_blocks
from cumulant.cache.baselines import BASELINES, AdaKV, D2OLike, ExpectedAttention, KVzip, SnapKV, StreamingLLM, baseline
from cumulant.cache.budget import budget
from cumulant.cache.compressor import ScoreCompressor, as_compressor, compress_prefix
from cumulant.cache.prefix import on_cumulant, prefill


def held(prefix, compressor, keep: float) -> list[list[int]]:
    """Positions that the key heads of the first layer hold."""
    return [head.positions.tolist() for head in compress_prefix(prefix, compressor, keep).layers[0]]


def one_hot(*columns: int, tokens: int, strength: float = 20.0) -> torch.Tensor:
    """(1, tokens, tokens) queries that look at one key each, where key j is the unit vector j."""
    rows = [torch.nn.functional.one_hot(torch.tensor(j), tokens).float() * strength for j in columns]
    return torch.stack(rows)[None]


def test_stream_keeps_sinks_and_the_last():
    prefix = made_prefix(torch.randn(2, 16, 4))
    assert held(prefix, "stream", 0.5) == [[0, 1, 2, 3, 12, 13, 14, 15]] * 2
    assert held(prefix, StreamingLLM(sinks=1), 0.25) == [[0, 13, 14, 15]] * 2


def test_h2o_keeps_half_recent_and_half_with_the_largest_sum_of_attention():
    # token 5 is looked at by tokens 5, 6, 7 and 9, token 0 by 0 to 4; 8 by itself alone
    prefix = made_prefix(torch.eye(10)[None], one_hot(0, 0, 0, 0, 0, 5, 5, 5, 8, 5, tokens=10))
    assert held(prefix, "h2o", 0.4) == [[0, 5, 8, 9]]


def test_snapkv_keeps_what_the_window_looks_at_and_its_neighbours():
    looks = [*range(20), 10, 10, 10, 10]  # the last four look at token 10
    prefix = made_prefix(torch.eye(24)[None], one_hot(*looks, tokens=24))
    assert held(prefix, SnapKV(window=3, kernel=3), 6 / 24) == [[9, 10, 11, 21, 22, 23]]
    assert held(prefix, SnapKV(window=3, kernel=1), 4 / 24)[0][-2:] == [22, 23]  # half of the room


def test_tova_keeps_the_same_tokens_for_all_heads_by_the_last_query():
    queries = torch.cat([one_hot(*[0] * 5, 2, tokens=6), one_hot(*[1] * 5, 4, tokens=6)])
    prefix = made_prefix(torch.eye(6).expand(2, -1, -1), queries)
    assert held(prefix, "tova", 0.5) == [[2, 4, 5]] * 2


def test_knorm_keeps_keys_of_small_norm():
    prefix = made_prefix(torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])[..., None])
    assert held(prefix, "knorm", 0.5) == [[1, 3], [0, 1]]


def test_keydiff_keeps_keys_unlike_the_mean_direction():
    angles = torch.tensor([[0.0, 0.1, -0.1, 3.0, 0.05, 2.0]])
    keys = torch.stack([angles.cos(), angles.sin()], -1) * torch.tensor([1.0, 5, 2, 1, 9, 3])[None, :, None]
    assert held(made_prefix(keys), "keydiff", 2 / 6) == [[3, 5]]


def test_expected_attention_is_that_of_a_gaussian_of_queries():
    """Without rotation: draws of the Gaussian pay the tokens what their scores say, up to the norm of the value."""
    torch.manual_seed(0)
    keys, queries, values = torch.randn(1, 12, 3) * 0.4, torch.randn(1, 12, 3) * 0.7 + 0.5, torch.randn(1, 12, 3)
    prefix = made_prefix(keys, queries, values)
    score = ExpectedAttention(sinks=2).score(prefix.layers[0])[0]
    assert score[:2].isinf().all()
    seen = queries[0, 2:].double()
    covariance = torch.cov(seen.T, correction=0)
    draws = torch.distributions.MultivariateNormal(seen.mean(0), covariance).sample((400_000,))
    paid = (draws @ keys[0, 2:].double().T).exp().mean(0)
    expected = paid / paid.sum() * values[0, 2:].double().norm(dim=-1)
    torch.testing.assert_close(score[2:].double(), expected, rtol=0.02, atol=1e-4)
    best = 2 + int(score[2:].argmax())
    assert held(prefix, ExpectedAttention(sinks=2), 5 / 12)[0][:2] == [0, 1]
    assert best in held(prefix, ExpectedAttention(sinks=2), 5 / 12)[0]


def test_expected_attention_turns_queries_back_and_on():
    """All queries alike before rotation: their law is one point, turned to the mean of positions to come."""
    with on_cumulant(model := decoder()):
        prefix = prefill(model, ids(20))
    layer = prefix.layers[0]
    assert layer.rotation is not None
    at_zero = torch.randn(4, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = layer.rotation.turn(at_zero.expand(-1, 20, -1), torch.arange(20))
    mean, covariance = ExpectedAttention(future=7)._law(layer._replace(queries=turned))  # pyright: ignore[reportPrivateUsage]
    to_come = torch.stack([layer.rotation.turn(at_zero, torch.tensor([20 + u])) for u in range(7)]).mean(0)[:, 0]
    torch.testing.assert_close(mean, to_come, atol=1e-6, rtol=0)
    assert covariance.abs().amax() < 1e-6


class ByTable(ScoreCompressor):
    """Scores as they are given."""

    name = "table"

    def __init__(self, table: torch.Tensor):
        self.table = table

    def score(self, layer):
        return self.table


def test_adakv_gives_entries_to_the_heads_with_the_highest_scores_and_a_share_to_each():
    table = torch.zeros(2, 20)
    table[0] = torch.arange(100, 120)
    table[1] = torch.arange(20)
    prefix = made_prefix(torch.randn(2, 20, 4))
    found = held(prefix, AdaKV(ByTable(table)), 0.5)
    assert found == [list(range(2, 20)), [18, 19]]  # a fifth of ten is safe
    uniform = held(prefix, ByTable(table), 0.5)
    assert uniform == [list(range(10, 20))] * 2


def test_kvzip_scores_are_the_largest_weights_of_the_repetition():
    """Against attention of a second pass over prefix and repetition together, written out by eager attention."""
    model = decoder(attn_implementation="eager")
    tokens = ids(24)
    with on_cumulant(model):
        prefix = prefill(model, tokens)
        scores = KVzip().evidence(prefix)
        small = compress_prefix(prefix, KVzip(), 0.25)
    weights = model(torch.cat([tokens, tokens])[None], output_attentions=True).attentions
    for number, layer in enumerate(weights):
        largest = layer[0, :, 24:, :24].amax(1).unflatten(0, (2, 2)).amax(1)
        torch.testing.assert_close(scores[2 * number : 2 * number + 2, 4:], largest[:, 4:], atol=1e-5, rtol=1e-4)
    counts = [len(head.keys) for heads in small.layers for head in heads]
    assert sum(counts) == 24  # a quarter of 2 layers × 2 key heads × 24
    assert all({0, 1, 2, 3} <= {*head.positions.tolist()} for heads in small.layers for head in heads)


def test_kvzip_in_parts_reads_the_whole_prefix():
    with on_cumulant(model := decoder()):
        prefix = prefill(model, ids(30))
        scores = KVzip(part=12).evidence(prefix)
    assert scores.shape == (4, 30)
    assert bool((scores[:, 4:] > 0).all())


def test_d2o_like_merges_an_evicted_key_into_the_nearest_that_stays():
    """Token 1 is evicted and points where token 0 points: both become the weighted mean, others stay."""
    keys = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [-1.0, 0.3], [0.0, 1.0]]])
    queries = torch.tensor([[[9.0, 0.0]] * 3 + [[0.0, 9.0]]])
    (head,) = compress_prefix(made_prefix(keys, queries), D2OLike(), 0.5).layers[0]
    weight = math.e / (math.e + math.e)  # cosine 1: as heavy as the key that stays
    torch.testing.assert_close(head.keys, torch.tensor([[2 * weight + 1 - weight, 0.0], [0.0, 1.0]]))
    assert head.positions.tolist() == [-1, 3]
    assert head.log_mass is None


@pytest.mark.parametrize("name", [*BASELINES, "adakv:h2o", "adakv:expected"])
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.1])
def test_every_baseline_holds_what_its_budget_says(name: str, keep: float):
    with on_cumulant(model := decoder()):
        prefix = prefill(model, ids(60))
        small = compress_prefix(prefix, name, keep)
    with_mass = as_compressor(name).with_mass
    allowed = budget(prefix, keep, with_mass=with_mass)
    assert small.keep <= keep + 1e-9
    most = sum(len(head.keys) for heads in small.layers for head in heads)
    assert most >= 0.98 * allowed.per_head * 4 or name == "kvzip"
    if keep == 1 and not with_mass:  # masses are bytes: not all tokens have room beside them
        for layer, heads in zip(prefix.layers, small.layers, strict=True):
            for keys, head in zip(layer.keys, heads, strict=True):
                assert torch.equal(head.keys, keys)


def test_weights_of_a_prefix_are_those_of_eager_attention():
    model = decoder(attn_implementation="eager")
    tokens = ids(150)
    with on_cumulant(model):
        prefix = prefill(model, tokens)
    expected = model(tokens[None], output_attentions=True).attentions
    for layer, weights in zip(prefix.layers, expected, strict=True):
        torch.testing.assert_close(torch.cat([*weight_blocks(layer)], 1), weights[0], atol=1e-5, rtol=1e-4)


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"compressor: expected one of adakv, d2o-like, .*, got 'magic'"):
        baseline("magic")
    with pytest.raises(ValueError, match="adakv:h2o"):
        baseline("adakv:kvzip")
