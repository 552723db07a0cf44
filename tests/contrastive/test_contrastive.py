"""Losses against full logits in float64: values, first and second derivatives, edges, memory and messages."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize, stats
from torch import Tensor

from cumulant.contrastive import (
    VocabularyLoss,
    alignment_uniformity,
    info_nce,
    linear_cross_entropy,
    mutual_information_bound,
    nce_loss,
    nt_xent,
    sgns_loss,
    sgns_optimum,
    vmf_nll,
)
from cumulant.kernels import moments
from tests.compare import close

pytestmark = pytest.mark.usefixtures("kernel")
SIZES = [(1, 1, 3), (1, 63, 2), (63, 63, 5), (100, 163, 4), (385, 900, 8)]  # 384 rows and 896 columns are one block


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def same(ours, plain, *tensors: Tensor, tolerance: float = 1e-11):
    """Equal values, gradients, and gradients of a random combination of those gradients."""
    results = []
    for function in (ours, plain):
        inputs = leaves(*tensors)
        value = function(*inputs)
        probe = draw(*value.shape, seed=7)
        first = torch.autograd.grad((value * probe).sum(), inputs, retain_graph=True)
        lazy = torch.autograd.grad((value * probe).sum(), inputs, create_graph=True)
        mixed = sum((g * draw(*g.shape, seed=8)).sum() for g in lazy)
        results.append([value, *first, *lazy, *torch.autograd.grad(mixed, inputs, materialize_grads=True)])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, tolerance)


# ---------------------------------------------------------------------- InfoNCE


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_info_nce_is_cross_entropy_of_all_scores(size, reduction):
    n, m, d = size
    same(
        lambda q, k, t: info_nce(q, k, temperature=t, reduction=reduction),
        lambda q, k, t: F.cross_entropy(q @ k.T / t, torch.arange(n), reduction=reduction),
        draw(n, d),
        draw(m, d, seed=1),
        torch.tensor(0.7, dtype=torch.float64),
    )


def test_gradient_is_attention_minus_the_positive():
    q, k = leaves(draw(5, 3), draw(9, 3, seed=1))
    info_nce(q, k, temperature=0.5, reduction="sum").backward()
    close(q.grad, (moments(q.detach() / 0.5, k.detach()).mean - k[:5]) / 0.5, 1e-11)


def sup_con(q: Tensor, k: Tensor, table: Tensor, temperature: float) -> Tensor:
    """L_out, pair by pair; (N,) with 0 where there is no positive."""
    scores = q @ k.T / temperature
    rows = []
    for i in range(len(q)):
        terms = [torch.logsumexp(scores[i], 0) - scores[i, j] for j in range(len(k)) if table[i, j]]
        rows.append(torch.stack(terms).mean() if terms else scores[i].sum() * 0)
    return torch.stack(rows)


def table_of(n: int, m: int) -> Tensor:
    table = draw(n, m, seed=5) > 0.8
    table[n // 2] = False
    table[:, m // 3] = False
    return table


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_positives(reduction, small_blocks):
    n, m = 37, 70
    table = table_of(n, m)
    counted = int(table.any(1).sum())
    divide = {"mean": lambda rows: rows.sum() / counted, "sum": torch.sum, "none": lambda rows: rows}[reduction]
    same(
        lambda q, k: info_nce(q, k, temperature=0.5, positives=table, reduction=reduction),
        lambda q, k: divide(sup_con(q, k, table, 0.5)),
        draw(n, 3),
        draw(m, 3, seed=1),
    )


def test_rows_without_positives_get_nothing():
    q, k = leaves(draw(4, 3), draw(6, 3, seed=1))
    loss = info_nce(q, k, positives=torch.zeros(4, 6, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert not q.grad.any()
    assert not k.grad.any()


def test_index_positives_choose_keys(small_blocks):
    index = torch.tensor([5, 0, 69, 64, 5] * 8)
    same(
        lambda q, k: info_nce(q, k, positives=index),
        lambda q, k: F.cross_entropy(q @ k.T, index),
        draw(40, 3),
        draw(70, 3, seed=1),
    )
    small = index.to(torch.int32)
    query, key = draw(40, 3), draw(70, 3)
    close(info_nce(query, key, positives=small), info_nce(query, key, positives=index), 1e-11)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["own", "index", "table"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_symmetric_is_the_mean_of_both_directions(kind, reduction, small_blocks):
    n = 70
    index = torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(3))
    table = {"own": torch.eye(n, dtype=torch.bool), "index": F.one_hot(index, n).bool(), "table": table_of(n, n)}[kind]
    positives = {"own": None, "index": index, "table": table}[kind]
    ways = {
        "mean": lambda a, b: (a.sum() / table.any(1).sum() + b.sum() / table.any(0).sum()) / 2,
        "sum": lambda a, b: (a.sum() + b.sum()) / 2,
        "none": lambda a, b: (a + b) / 2,
    }
    same(
        lambda q, k: info_nce(q, k, temperature=0.3, symmetric=True, positives=positives, reduction=reduction),
        lambda q, k: ways[reduction](sup_con(q, k, table, 0.3), sup_con(k, q, table.T, 0.3)),
        draw(n, 3),
        draw(n, 3, seed=1),
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_excluding_oneself_is_masking_the_diagonal(symmetric, small_blocks):
    n = 66
    index = torch.arange(n).roll(5)

    def plain(q, k):
        s = (q @ k.T / 0.4).masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
        rows = F.cross_entropy(s, index)
        return (rows + F.cross_entropy(s.T, index.argsort())) / 2 if symmetric else rows

    def ours(q, k):
        return info_nce(q, k, temperature=0.4, symmetric=symmetric, exclude_self=True, positives=index)

    same(ours, plain, draw(n, 3), draw(n, 3, seed=1))
    table = F.one_hot(index, n).bool() | torch.eye(n, dtype=torch.bool)  # a point is not its own positive
    q, k = draw(n, 3), draw(n, 3, seed=1)
    close(info_nce(q, k, temperature=0.4, symmetric=symmetric, exclude_self=True, positives=table), ours(q, k), 1e-11)


def test_nobody_else_to_compare_with():
    (q,) = leaves(draw(1, 3))
    loss = info_nce(q, q, exclude_self=True, positives=torch.ones(1, 1, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert not q.grad.any()


def test_no_queries_and_no_keys():
    q, k = leaves(draw(0, 3), draw(4, 3))
    loss = info_nce(q, k)
    loss.backward()
    assert loss == 0
    assert not k.grad.any()
    assert info_nce(draw(3, 2), draw(0, 2), positives=torch.zeros(3, 0, dtype=torch.bool)) == 0


def test_nt_xent(small_blocks):
    n = 35
    other = torch.arange(2 * n).roll(n)

    def plain(a, b):
        z = F.normalize(torch.cat([a, b]), dim=-1)
        return F.cross_entropy((z @ z.T / 0.2).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf), other)

    def ours(a, b):
        return nt_xent(F.normalize(a, dim=-1), F.normalize(b, dim=-1), temperature=0.2)

    same(ours, plain, draw(n, 4), draw(n, 4, seed=1), tolerance=1e-10)
    assert nt_xent(draw(n, 4), draw(n, 4), reduction="none").shape == (2 * n,)


# ---------------------------------------------------------------------- derivatives by finite differences

PLANS = {
    "own": {},
    "none": {"reduction": "none"},
    "symmetric": {"symmetric": True},
    "symmetric none": {"symmetric": True, "reduction": "none"},
    "others": {"exclude_self": True, "positives": torch.arange(35).roll(1)},
    "table": {"positives": table_of(35, 35), "symmetric": True},
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_info_nce_by_finite_differences(name, small_blocks):
    n = 35
    inputs = leaves(draw(n, 2), draw(n, 2, seed=1), torch.tensor(0.8, dtype=torch.float64))

    def function(q, k, t):
        return info_nce(q, k, temperature=t, **PLANS[name])

    fast = name.endswith("none")
    torch.autograd.gradcheck(function, inputs, fast_mode=fast)
    torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_vocabulary_by_finite_differences(small_blocks):
    targets = torch.randint(0, 70, (35,), generator=torch.Generator().manual_seed(2))
    targets[3] = -100

    def function(h, w, b):
        options = {"bias": b, "z_loss": 0.1, "label_smoothing": 0.2, "softcap": 3.0}
        return linear_cross_entropy(h, w, targets, return_log_normalizer=True, **options)

    inputs = leaves(draw(35, 2), draw(70, 2, seed=1), draw(70, seed=2))
    torch.autograd.gradcheck(function, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_a_third_derivative_is_refused():
    (q,) = leaves(draw(3, 2))
    first = torch.autograd.grad(info_nce(q, q), q, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="expected first or second derivatives, got a third"):
        second.sum().backward()


def test_backward_twice_and_only_where_needed():
    q, k = leaves(draw(6, 3), draw(6, 3, seed=1))
    loss = info_nce(q, k)
    once = torch.autograd.grad(loss, (q, k), retain_graph=True)
    again = torch.autograd.grad(3 * loss, (q, k))
    for a, b in zip(once, again, strict=True):
        close(3 * a, b, 1e-11)
    info_nce(q.detach(), k).backward()
    close(k.grad, once[1], 1e-11)
    assert q.grad is None
    with torch.no_grad():
        assert not info_nce(q, k).requires_grad


def test_function_transforms():
    q, k = draw(4, 6, 3), draw(4, 6, 3, seed=1)

    def plain(a, b):
        return F.cross_entropy(a @ b.T, torch.arange(6))

    close(torch.vmap(torch.func.grad(info_nce))(q, k), torch.vmap(torch.func.grad(plain))(q, k), 1e-11)
    close(torch.func.hessian(plain)(q[0], k[0]), torch.func.jacrev(torch.func.grad(info_nce))(q[0], k[0]), 1e-11)


# ---------------------------------------------------------------------- numbers that are hard


@pytest.mark.parametrize("symmetric", [False, True])
def test_sharp_scores(symmetric):
    """Unit vectors at τ = 0.01 in float32, against float64: as near as full logits in float32 come."""
    q = F.normalize(draw(500, 16), dim=-1).float()
    k = F.normalize(q + 0.2 * draw(500, 16, seed=1), dim=-1).float()

    def plain(a, b):
        s, own = a @ b.T / 0.01, torch.arange(len(a))
        return (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2 if symmetric else F.cross_entropy(s, own)

    def with_gradients(function, *tensors):
        inputs = leaves(*tensors)
        value = function(*inputs)
        return [value, *torch.autograd.grad(value, inputs)]

    exact, peer = with_gradients(plain, q.double(), k.double()), with_gradients(plain, q, k)
    found = with_gradients(lambda a, b: info_nce(a, b, temperature=0.01, symmetric=symmetric), q, k)
    assert exact[0] > 0.1
    for e, p, f in zip(exact, peer, found, strict=True):
        assert (f - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6 * e.abs().max()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_small_loss_is_not_rounded_like_its_scores(symmetric):
    """Scores 1024 and 1016: float32 can only tell multiples of 1.2e-4 apart there, the loss is log(1 + e⁻⁸)."""
    q, k = torch.tensor([[1024.0, 0.0], [0.0, 1024.0]]), torch.tensor([[1.0, 127 / 128], [127 / 128, 1.0]])
    assert info_nce(q, k, symmetric=symmetric).item() == pytest.approx(math.log1p(math.exp(-8)), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_huge_scores_stay_finite(dtype, symmetric):
    q, k = leaves(100 * draw(50, 8, dtype=dtype), 100 * draw(50, 8, seed=1, dtype=dtype))
    assert (q @ k.T).abs().max() > 1e4
    loss = info_nce(q, k, symmetric=symmetric)
    loss.backward()
    expected = F.cross_entropy(q @ k.T, torch.arange(50))
    if symmetric:
        expected = (expected + F.cross_entropy(k @ q.T, torch.arange(50))) / 2
    assert torch.isfinite(q.grad).all()
    assert torch.isfinite(k.grad).all()
    assert abs(loss - expected) < 1e-5 * expected


def test_not_a_number_is_not_hidden():
    q = draw(4, 3)
    q[1, 1] = torch.nan
    assert info_nce(q, q).isnan()
    assert info_nce(q, q, reduction="none").isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    q, k = leaves(draw(60, 16, dtype=dtype), draw(60, 16, seed=1, dtype=dtype))
    loss = info_nce(q, k, temperature=torch.tensor(0.5, dtype=dtype))
    loss.backward()
    exact = leaves(q.detach().double(), k.detach().double())
    expected = F.cross_entropy(exact[0] @ exact[1].T / 0.5, torch.arange(60))
    expected.backward()
    assert loss.dtype == torch.float32
    assert q.grad.dtype == dtype
    assert abs(loss.double() - expected) < 1e-5 * expected
    assert (q.grad - exact[0].grad).abs().max() < torch.finfo(dtype).eps * exact[0].grad.abs().max()


# ---------------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_cross_entropy_is_torchs(reduction, smoothing, with_bias, small_blocks):
    targets = torch.randint(0, 130, (3, 13), generator=torch.Generator().manual_seed(2))
    targets[0, :4] = -1
    tensors = [draw(3, 13, 4), draw(130, 4, seed=1)] + ([draw(130, seed=2)] if with_bias else [])
    options = {"ignore_index": -1, "label_smoothing": smoothing, "reduction": reduction}

    def plain(h, w, b=None):
        logits = F.linear(h, w, b)
        return F.cross_entropy(logits.movedim(-1, 1), targets, **options)

    same(lambda h, w, b=None: linear_cross_entropy(h, w, targets, bias=b, **options), plain, *tensors)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_z_loss_cap_and_log_normalizer(size, softcap):
    n, v, d = size
    targets = torch.arange(n) * 7 % v

    def plain(h, w, b):
        s = F.linear(h, w, b)
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        g = torch.logsumexp(s, -1)
        loss = (g - s.gather(1, targets[:, None])[:, 0] + 0.3 * g.square()).mean()
        return loss + (g * draw(n, seed=4)).sum()

    def ours(h, w, b):
        options = {"bias": b, "z_loss": 0.3, "softcap": softcap}
        found = linear_cross_entropy(h, w, targets, return_log_normalizer=True, **options)
        assert isinstance(found, VocabularyLoss)
        return found.loss + (found.log_normalizer * draw(n, seed=4)).sum()

    same(ours, plain, draw(n, d), draw(v, d, seed=1), draw(v, seed=2))


def test_log_normalizer_alone_has_a_gradient():
    h, w = leaves(draw(5, 3), draw(9, 3, seed=1))
    found = linear_cross_entropy(h, w, torch.arange(5), return_log_normalizer=True)
    grads = torch.autograd.grad(found.log_normalizer.sum(), (h, w))
    expected = torch.autograd.grad(torch.logsumexp(h @ w.T, -1).sum(), (h, w))
    for a, b in zip(grads, expected, strict=True):
        close(a, b, 1e-11)


def test_everything_ignored():
    h, w = leaves(draw(4, 3), draw(5, 3, seed=1))
    found = linear_cross_entropy(h, w, torch.full((4,), -100), z_loss=0.1, return_log_normalizer=True)
    found.loss.backward()
    assert found.loss == 0
    close(found.log_normalizer, torch.logsumexp(h @ w.T, -1), 1e-11)
    assert not h.grad.any()
    assert not w.grad.any()


def test_words_that_are_removed():
    bias = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64)
    h, w, b = leaves(draw(2, 3), draw(3, 3, seed=1), bias)
    targets = torch.tensor([0, 2])
    linear_cross_entropy(h, w, targets, bias=b).backward()
    kept = torch.tensor([0, 2])
    close(
        linear_cross_entropy(h, w, targets, bias=b),
        F.cross_entropy(h @ w[kept].T, torch.tensor([0, 1])),
        1e-11,
    )
    assert not w.grad[1].any()
    assert b.grad[1] == 0
    none = linear_cross_entropy(h, w, targets, bias=bias - torch.inf, reduction="none", return_log_normalizer=True)
    assert not none.loss.any()  # no word left at all
    assert (none.log_normalizer == -torch.inf).all()
    none.loss.sum().backward()
    assert torch.isfinite(h.grad).all()


# ---------------------------------------------------------------------- what is absent

ANYTHING = [math.nan, math.inf, -math.inf, 1e200]


def with_slopes(function, *tensors: Tensor) -> list[Tensor]:
    inputs = leaves(*tensors)
    value = function(*inputs)
    return [value, *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", ANYTHING, ids=str)
def test_an_ignored_position_reaches_nothing(garbage, dtype, small_blocks):
    """torch's cross_entropy keeps the loss clean, but not the gradients."""
    h, w, b = (t.to(dtype) for t in (draw(40, 3), draw(70, 3, seed=1), draw(70, seed=2)))
    targets = torch.arange(40)
    targets[5:9] = -100
    odd, kept = h.clone(), targets >= 0
    odd[5:9] = torch.finfo(dtype).max if garbage == 1e200 else garbage  # finite, but not its scores

    def loss(h, w, b, targets=targets, **options):
        return linear_cross_entropy(h, w, targets, bias=b, z_loss=0.1, label_smoothing=0.1, **options)

    found = with_slopes(loss, odd, w, b)
    expected = with_slopes(lambda h, w, b: loss(h, w, b, targets[kept]), h[kept], w, b)
    close(found[0], expected[0], 1e-6 if dtype == torch.float32 else 1e-12)
    close(found[1][kept], expected[1], 1e-6)
    assert not found[1][~kept].any()
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        close(mine, theirs, 1e-6)
    with_g = with_slopes(lambda *t: loss(*t, return_log_normalizer=True).loss, odd, w, b)
    for mine, theirs in zip(with_g, found, strict=True):
        close(mine, theirs, 1e-6)
    given = loss(odd, w, b, return_log_normalizer=True).log_normalizer
    assert given[kept].isfinite().all()


def test_a_finite_ignored_position_still_has_its_log_normalizer_and_second_derivatives():
    targets = torch.tensor([0, -100, 3])

    def ours(h, w):
        found = linear_cross_entropy(h, w, targets, return_log_normalizer=True)
        return found.loss + found.log_normalizer.square().sum()

    def plain(h, w):
        s = h @ w.T
        return F.cross_entropy(s, targets) + torch.logsumexp(s, -1).square().sum()

    same(ours, plain, draw(3, 2), draw(5, 2, seed=1))


@pytest.mark.parametrize("garbage", ANYTHING, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_removed_word_reaches_nothing(garbage, softcap, small_blocks):
    """Nor under a softcap, which bounds scores, not log weights."""
    h, w, b = draw(40, 3), draw(70, 3, seed=1), draw(70, seed=2)
    kept = torch.arange(70) % 7 != 2
    odd, fewer = w.clone(), b.clone()
    odd[~kept], fewer[~kept] = garbage, -torch.inf
    words = kept.nonzero()[:, 0]
    index = torch.arange(40) % len(words)

    def loss(h, w, b, targets):
        return linear_cross_entropy(h, w, targets, bias=b, softcap=softcap, z_loss=0.1)

    found = with_slopes(lambda *t: loss(*t, words[index]), h, odd, fewer)
    expected = with_slopes(lambda *t: loss(*t, index), h, w[kept], b[kept])
    close(found[0], expected[0], 1e-11)
    close(found[1], expected[1], 1e-11)
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        close(mine[kept], theirs, 1e-11)
        assert not mine[~kept].any()
    first = torch.autograd.grad(loss(*(inputs := leaves(h, odd, fewer)), words[index]), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize("garbage", ANYTHING, ids=str)
def test_a_query_without_positives_reaches_nothing(garbage, small_blocks):
    q, k, t = draw(37, 3), draw(70, 3, seed=1), torch.tensor(0.5, dtype=torch.float64)
    table = table_of(37, 70)
    kept = table.any(1)
    assert not kept.all()
    odd = q.clone()
    odd[~kept] = garbage
    found = with_slopes(lambda q, k, t: info_nce(q, k, temperature=t, positives=table), odd, k, t)
    expected = with_slopes(lambda q, k, t: info_nce(q, k, temperature=t, positives=table[kept]), q[kept], k, t)
    close(found[0], expected[0], 1e-11)
    close(found[1][kept], expected[1], 1e-11)
    assert not found[1][~kept].any()
    close(found[2], expected[2], 1e-11)
    close(found[3], expected[3], 1e-11)


def test_a_point_alone_with_itself_reaches_nothing():
    (z,) = leaves(torch.full((1, 3), torch.nan))
    loss = info_nce(z, z, exclude_self=True, positives=torch.ones(1, 1, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert not z.grad.any()


@pytest.mark.long
def test_absent_rows_when_compiled_and_under_vmap():
    h, w, targets = draw(6, 3), draw(9, 3, seed=1), torch.tensor([0, 1, -100, 3, 4, 5])
    expected = with_slopes(lambda h, w: linear_cross_entropy(h, w, targets), h, w)
    h[2] = torch.nan
    compiled = torch.compile(lambda h, w: linear_cross_entropy(h, w, targets), backend="eager")
    mapped = torch.vmap(torch.func.grad(lambda h, w: linear_cross_entropy(h, w, targets), argnums=(0, 1)))
    for found in (with_slopes(compiled, h, w)[1:], [g[0] for g in mapped(h[None], w[None])]):
        for mine, theirs in zip(found, expected[1:], strict=True):
            close(mine, theirs, 1e-11)


# ---------------------------------------------------------------------- the edge of the dtype


def test_means_of_huge_scores_do_not_overflow():
    """Two positives of 2e38 in float32, a vocabulary of scores 1e36: their sums are not finite, their means are."""
    q, k = torch.full((1, 1), 1e19), torch.full((3, 1), 2e19)
    assert info_nce(q, k, positives=torch.ones(1, 3, dtype=torch.bool)).item() == pytest.approx(math.log(3))
    assert info_nce(k, q.expand(3, 1), positives=torch.ones(3, 3, dtype=torch.bool), symmetric=True).item() == (
        pytest.approx(math.log(3))
    )
    h, w = torch.full((1, 1), 1e18), torch.full((1000, 1), 1e18)
    loss = linear_cross_entropy(h, w, torch.tensor([0]), label_smoothing=0.5)
    assert abs(loss.item() - math.log(1000)) < 1e-6 * 1e36  # as near as scores of that size are known
    assert loss.isfinite()


def test_two_gradients_of_a_view_meet_in_float32():
    """A point is query and key at once; in bfloat16 the two halves of its gradient nearly cancel."""
    views = leaves(draw(100, 1).bfloat16(), draw(100, 1, seed=1).bfloat16())
    exact = leaves(*(v.detach().double() for v in views))
    found = torch.autograd.grad(nt_xent(*views, temperature=0.5), views)
    for mine, theirs in zip(found, torch.autograd.grad(nt_xent(*exact, temperature=0.5), exact), strict=True):
        assert ((mine - theirs).abs() <= torch.finfo(torch.bfloat16).eps * theirs.abs() + 1e-8).all()


def test_one_position():
    h, w = draw(3), draw(5, 3, seed=1)
    close(linear_cross_entropy(h, w, torch.tensor(2)), F.cross_entropy(w @ h, torch.tensor(2)), 1e-11)


# ---------------------------------------------------------------------- the pair {0, 1} and the sphere


def test_nce_is_binary_cross_entropy():
    def plain(s, noise):
        logits = torch.cat([s[:, None] - a[:, None], noise - b], -1) - math.log(5)
        labels = torch.tensor([1.0] + [0.0] * 5, dtype=torch.float64).expand(4, 6)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1).mean()

    a, b = draw(4, seed=2), draw(4, 5, seed=3)
    same(lambda s, noise: nce_loss(s, noise, a, b), plain, draw(4), draw(4, 5, seed=1))
    big = torch.full((1,), 1e4, dtype=torch.float64)
    assert nce_loss(-big, big[:, None], 0 * big, 0 * big[:, None]) == pytest.approx(2e4)
    assert nce_loss(big, -big[:, None], 0 * big, 0 * big[:, None]) == 0


def test_nce_finds_the_normalised_density():
    """The gradient of the expected loss vanishes at s = log p_data, and not at a shifted s."""
    data, noise = torch.softmax(draw(6), 0), torch.softmax(draw(6, seed=1), 0)

    def slope(shift: float) -> Tensor:
        s = (data.log() + shift).requires_grad_()
        pairs = s[:, None].expand(6, 6), s[:, None].expand(6, 6, 3)  # every point against three copies of every other
        density = noise.log()[:, None].expand(6, 6), noise.log()[:, None].expand(6, 6, 3)
        loss = nce_loss(*pairs, *density, reduction="none")
        return torch.autograd.grad((data[:, None] * noise * loss).sum(), s)[0]

    assert slope(0.0).abs().max() < 1e-15
    assert slope(0.5).abs().max() > 1e-2


def test_sgns():
    def plain(c, o, n):
        return -F.logsigmoid((c * o).sum(-1)) - F.logsigmoid(-torch.einsum("bd,bkd->bk", c, n)).sum(-1)

    tensors = draw(4, 3), draw(4, 3, seed=1), draw(4, 6, 3, seed=2)
    for reduction, end in (("mean", torch.mean), ("sum", torch.sum), ("none", lambda loss: loss)):
        same(lambda *a, r=reduction: sgns_loss(*a, reduction=r), lambda *a, e=end: e(plain(*a)), *tensors)


@pytest.mark.parametrize("dim", [2, 3, 50])
def test_vmf_is_scipys(dim):
    x, mean = F.normalize(draw(7, dim), dim=-1), F.normalize(draw(dim, seed=1), dim=-1)
    area = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    for kappa in (0.5, 10.0, 400.0):
        expected = torch.as_tensor(-stats.vonmises_fisher(mean.numpy(), kappa).logpdf(x.numpy()))
        close(vmf_nll(x, kappa * mean, reduction="none") + area, expected, 1e-9)
    (eta,) = leaves(0 * mean)
    torch.autograd.gradgradcheck(lambda e: vmf_nll(x, e), [eta])
    assert vmf_nll(x, eta) == 0  # the uniform law


# ---------------------------------------------------------------------- what the losses are made of and what they prove


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_alignment_and_uniformity_add_up_to_info_nce(size):
    n, m, d = size
    query, key, temperature = draw(n, d), draw(m, d, seed=1), torch.tensor(0.7, dtype=torch.float64)
    parts = alignment_uniformity(query, key, temperature=temperature)
    close(parts.alignment, -(query * key[:n]).sum(-1).mean() / 0.7, 1e-11)
    close(parts.uniformity, torch.logsumexp(query @ key.T / 0.7, -1).mean(), 1e-11)
    same(
        lambda q, k, t: sum(alignment_uniformity(q, k, temperature=t)),
        lambda q, k, t: info_nce(q, k, temperature=t),
        query,
        key,
        temperature,
    )


def test_on_the_sphere_the_parts_are_those_of_the_gaussian_potential():
    query, key = F.normalize(draw(6, 3), dim=-1), F.normalize(draw(6, 3, seed=1), dim=-1)
    parts = alignment_uniformity(query, key, temperature=0.5)
    square = torch.cdist(query, key).square()
    close(parts.alignment, square.diagonal().mean() - 2, 1e-11)
    close(parts.uniformity, torch.logsumexp(-square, -1).mean() + 2, 1e-11)


def test_no_queries_have_no_parts_and_half_precision_is_single():
    assert alignment_uniformity(draw(0, 3), draw(4, 3)) == (0, 0)
    assert alignment_uniformity(draw(0, 3), draw(0, 3)) == (0, 0)
    half = alignment_uniformity(draw(3, 2).half(), draw(4, 2).half())
    assert half.alignment.dtype == half.uniformity.dtype == torch.float32


@pytest.mark.parametrize("k", [1, 3, 0.5])
def test_sgns_optimum_minimises_the_expected_loss_of_every_pair(k):
    joint = torch.softmax(draw(20), 0).reshape(4, 5)
    found = sgns_optimum(joint, k)
    p = joint.numpy()
    apart = np.outer(p.sum(1), p.sum(0))
    for i, j in np.ndindex(4, 5):
        best: Any = optimize.minimize_scalar(
            lambda s, i=i, j=j: p[i, j] * np.logaddexp(0, -s) + k * apart[i, j] * np.logaddexp(0, s),
            bounds=(-20, 20),
            method="bounded",
            options={"xatol": 1e-12},
        )
        assert abs(found[i, j] - best.x) < 1e-5
    close(found, torch.tensor(np.log(p / apart) - np.log(k)), 1e-11)
    close(sgns_optimum(1000 * joint, k), found, 1e-11)


def test_sgns_optimum_is_where_the_gradient_of_the_loss_vanishes():
    joint = torch.softmax(draw(6), 0).reshape(2, 3)
    score = sgns_optimum(joint, 2).requires_grad_()
    noise = joint.sum(1, keepdim=True) * joint.sum(0)
    loss = -(joint * F.logsigmoid(score) + 2 * noise * F.logsigmoid(-score)).sum()
    (gradient,) = torch.autograd.grad(loss, score)
    assert gradient.abs().max() < 1e-15


def test_pairs_that_never_occur_have_no_score():
    joint = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    found = sgns_optimum(joint, 1)
    assert torch.equal(found == -torch.inf, joint == 0)
    close(found[0, 0], torch.tensor(4 / 3, dtype=torch.float64).log(), 1e-11)
    (gradient,) = torch.autograd.grad(found[joint > 0].sum(), joint)
    assert gradient.isfinite().all()
    assert sgns_optimum(joint[:0], 1).shape == (0, 3)


def test_information_bound_holds_for_correlated_gaussians_and_saturates():
    """The score of the true density ratio on pairs with correlation r; I = −½ log(1 − r²) per coordinate."""
    r, n, d = 0.9, 256, 2
    x = draw(n, d)
    y = r * x + math.sqrt(1 - r * r) * draw(n, d, seed=1)
    scale = r / (1 - r * r)
    # log p(y|x) up to a function of x: ⟨x,y⟩ r/(1−r²) − |y|²/(2(1−r²)) + |y|²/2
    query = torch.cat([scale * x, torch.ones(n, 1).double()], -1)
    key = torch.cat([y, -(r * r / (1 - r * r) / 2) * y.square().sum(-1, keepdim=True)], -1)
    bound = mutual_information_bound(info_nce(query, key), n)
    information = -d / 2 * math.log(1 - r * r)
    assert information - 0.35 < bound < information + 0.1
    assert mutual_information_bound(info_nce(100 * x, x), n) <= math.log(n)
    assert mutual_information_bound(0.0, 1) == 0


# ---------------------------------------------------------------------- memory

MEMORY = """
import re, torch
from cumulant.contrastive import info_nce, nt_xent
torch.set_num_threads(1)
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
warm = torch.randn(64, 64, requires_grad=True)
torch.autograd.grad(info_nce(warm, warm), warm, create_graph=True)[0].sum().backward()
before = peak()
{work}
print((peak() - before) / (4 * n * n))
"""
# not resource.getrusage: its maximum survives fork and exec, so a large parent hides everything the child does


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "work",
    [
        "n = 8192; q, k = torch.randn(2, n, 64).requires_grad_(); info_nce(q, k).backward()",
        pytest.param(
            "n = 8192; q, k = torch.randn(2, n, 64).requires_grad_(); info_nce(q, k, symmetric=True).backward()",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "n = 8192; q = torch.randn(n // 2, 64).requires_grad_(); nt_xent(q, q, reduction='none').sum().backward()",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "n = 8192; q = torch.randn(n, 16).requires_grad_();"
            "g, = torch.autograd.grad(info_nce(q, q), q, create_graph=True); g.square().sum().backward()",
            marks=pytest.mark.long,
        ),
    ],
    ids=["one side", "two sides", "no reduction", "second order"],
)
def test_no_path_holds_all_pairs(work):
    code = MEMORY.format(work=work)
    share = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.001 < share < 0.25


# ---------------------------------------------------------------------- messages

X, Y = draw(3, 2), draw(4, 2)
INDEX = torch.tensor([0, 1, 2])
BAD = {
    "query rank": (lambda: info_nce(X[0], Y), "info_nce.query: expected shape (N, d), got (2)"),
    "key dimension": (lambda: info_nce(X, draw(4, 3)), "info_nce.key: expected dimension d=2 as query, got (4, 3)"),
    "key dtype": (lambda: info_nce(X, Y.float()), "info_nce.key: expected dtype torch.float64 as query"),
    "integer query": (
        lambda: info_nce(INDEX[:, None], Y),
        "info_nce.query: expected a floating dtype, got torch.int64",
    ),
    "temperature": (lambda: info_nce(X, Y, temperature=0.0), "info_nce.temperature: expected a positive finite number"),
    "tensor temperature": (
        lambda: info_nce(X, Y, temperature=torch.tensor(-1.0)),
        "info_nce.temperature: expected a positive finite number",
    ),
    "temperature axes": (
        lambda: info_nce(X, Y, temperature=torch.ones(3)),
        "info_nce.temperature: expected a number or a tensor without axes, got (3)",
    ),
    "symmetric": (
        lambda: info_nce(X, Y, symmetric=True),
        "info_nce.symmetric: expected as many queries as keys, got 3",
    ),
    "exclude_self": (
        lambda: info_nce(X, Y, exclude_self=True, positives=INDEX),
        "info_nce.exclude_self: expected as many queries as keys, got 3 and 4",
    ),
    "exclude_self without positives": (
        lambda: info_nce(X, X, exclude_self=True),
        "info_nce.positives: expected indices or a Boolean matrix with exclude_self, got None",
    ),
    "own positive": (
        lambda: info_nce(X, X, exclude_self=True, positives=INDEX),
        "info_nce.positives: expected no point as its own positive",
    ),
    "too few keys": (lambda: info_nce(Y, X), "info_nce.positives: expected indices, as key has 3 rows for 4 queries"),
    "table shape": (
        lambda: info_nce(X, Y, positives=torch.ones(3, 3, dtype=torch.bool)),
        "info_nce.positives: expected shape (N=3, M=4) for a Boolean matrix, got (3, 3)",
    ),
    "index shape": (lambda: info_nce(X, Y, positives=INDEX[:2]), "expected shape (N=3,) for indices, got (2)"),
    "index range": (
        lambda: info_nce(X, Y, positives=INDEX + 2),
        "info_nce.positives: expected indices in 0 … 3, got values from 2 to 4",
    ),
    "index dtype": (
        lambda: info_nce(X, Y, positives=INDEX.double()),
        "expected an integer or Boolean tensor, got torch",
    ),
    "reduction": (
        lambda: info_nce(X, Y, reduction="average"),
        "info_nce.reduction: expected one of 'mean', 'sum', 'none', got 'average'",
    ),
    "views": (lambda: nt_xent(X, Y), "nt_xent.view2: expected shape (3, 2) as view1, got (4, 2)"),
    "weight": (
        lambda: linear_cross_entropy(X, draw(5, 3), INDEX),
        "linear_cross_entropy.weight: expected shape (V, d) with d the last axis of hidden (3, 2), got (5, 3)",
    ),
    "targets range": (
        lambda: linear_cross_entropy(X, Y, INDEX + 2),
        "linear_cross_entropy.targets: expected indices in 0 … 3, or ignore_index=-100, got values from 2 to 4",
    ),
    "targets shape": (
        lambda: linear_cross_entropy(X, Y, INDEX[:2]),
        "linear_cross_entropy.targets: expected shape (3,) as the leading axes of hidden, got (2)",
    ),
    "targets dtype": (
        lambda: linear_cross_entropy(X, Y, INDEX.double()),
        "linear_cross_entropy.targets: expected an integer tensor, got torch.float64",
    ),
    "bias": (
        lambda: linear_cross_entropy(X, Y, INDEX, bias=draw(3)),
        "linear_cross_entropy.bias: expected shape (V=4,)",
    ),
    "smoothing": (
        lambda: linear_cross_entropy(X, Y, INDEX, label_smoothing=2.0),
        "linear_cross_entropy.label_smoothing: expected a number in [0, 1], got 2.0",
    ),
    "softcap": (
        lambda: linear_cross_entropy(X, Y, INDEX, softcap=0.0),
        "linear_cross_entropy.softcap: expected a positive bound or None, got 0.0",
    ),
    "noise": (
        lambda: nce_loss(X[:, 0], X[:, 0], X[:, 0], X[:, 0]),
        "nce_loss.noise_score: expected shape (*batch, k ≥ 1) with batch (3) of data_score, got (3)",
    ),
    "negatives": (
        lambda: sgns_loss(X, X, draw(3, 5, 3)),
        "sgns_loss.negatives: expected shape (*batch, k, d=2), got (3, 5, 3)",
    ),
    "context": (
        lambda: sgns_loss(X, draw(3, 3), X[:, None]),
        "sgns_loss.context: expected shape (*batch, d) as center",
    ),
    "directions": (
        lambda: vmf_nll(3 * F.normalize(X, dim=-1), X),
        "vmf_nll.x: expected unit vectors, got lengths from 3",
    ),
    "more queries": (
        lambda: alignment_uniformity(Y, X),
        "alignment_uniformity.key: expected at least 4 rows, one per query, got 3",
    ),
    "table": (lambda: sgns_optimum(X, 1), "sgns_optimum.joint: expected non-negative finite numbers (a, b)"),
    "no negatives": (lambda: sgns_optimum(X.abs(), 0), "sgns_optimum.negatives: expected a positive number, got 0"),
    "candidates": (
        lambda: mutual_information_bound(0.5, 0),
        "mutual_information_bound.candidates: expected at least one, got 0",
    ),
    "parameters": (
        lambda: vmf_nll(F.normalize(X, dim=-1), draw(3, 3)),
        "vmf_nll.eta: expected the last axis of x (3, 2)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_nce_log_noise_of_another_shape_gets_a_sentence():
    zero = torch.zeros(5)
    with pytest.raises(ValueError, match="noise_log_noise"):
        nce_loss(zero, torch.zeros(5, 3), zero, torch.zeros(5, 2))
