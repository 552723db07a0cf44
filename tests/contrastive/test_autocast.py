"""Losses under torch.autocast: torch's own function in float32 on numbers rounded as autocast rounds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import contrastive, duality, hopfield, regression
from cumulant.contrastive import info_nce, linear_cross_entropy

pytestmark = pytest.mark.usefixtures("kernel")
HALVES = [torch.bfloat16, torch.float16]
N, M, D = 7, 9, 4
TARGETS = torch.tensor([0, 3, -100, 8, 1, 1, 5])
TABLE = torch.randn(N, N, generator=torch.Generator().manual_seed(5)) > 0.5


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A function of several tensors, and the same in float32 by torch's own operations or outside of autocast."""

    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    rounded: bool = True  # what a matrix product takes; False: taken in float32, as losses and distances are
    prepare: Callable[[Tensor], Tensor] = lambda t: t
    half: bool = False  # gives its result in autocast's dtype, as attention does


def same(function: Callable[..., Tensor], *shapes: tuple[int, ...], **options) -> Case:
    return Case(function, function, shapes, **options)


def vocabulary(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b), TARGETS, label_smoothing=0.2)


def supervised(q: Tensor, k: Tensor) -> Tensor:
    sides = []
    for s, table in ((q @ k.T, TABLE), ((q @ k.T).T, TABLE.T)):
        count = table.sum(1)
        loss = torch.logsumexp(s, 1) - torch.where(table, s, 0).sum(1) / count.clamp_min(1)
        sides.append(torch.where(count > 0, loss, 0).sum() / (count > 0).sum())
    return (sides[0] + sides[1]) / 2


def two_views(a: Tensor, b: Tensor) -> Tensor:
    z = torch.cat([a, b])
    own = torch.eye(len(z), dtype=torch.bool)
    return F.cross_entropy((z @ z.T / 0.3).masked_fill(own, -torch.inf), torch.arange(len(z)).roll(len(a)))


def skip_gram(c: Tensor, o: Tensor, n: Tensor) -> Tensor:
    return (-F.logsigmoid((c * o).sum(-1)) - F.logsigmoid(-torch.einsum("bd,bkd->bk", c, n)).sum(-1)).mean()


def law(t: Tensor) -> Tensor:
    return torch.softmax(t, -1)


def unit(t: Tensor) -> Tensor:
    return F.normalize(t, dim=-1)


QUERIES, KEYS = (N, D), (M, D)
CASES = {
    "info_nce": Case(
        lambda q, k: info_nce(q, k, temperature=0.3),
        lambda q, k: F.cross_entropy(q @ k.T / 0.3, torch.arange(N)),
        (QUERIES, KEYS),
    ),
    "info_nce symmetric": Case(
        lambda q, k: info_nce(q, k, symmetric=True, positives=TABLE), supervised, (QUERIES, QUERIES)
    ),
    "nt_xent": Case(lambda a, b: contrastive.nt_xent(a, b, temperature=0.3), two_views, (QUERIES, QUERIES)),
    "alignment_uniformity": Case(
        lambda q, k: sum(contrastive.alignment_uniformity(q, k, temperature=0.3)),  # pyright: ignore[reportArgumentType]
        lambda q, k: F.cross_entropy(q @ k.T / 0.3, torch.arange(N)),
        (QUERIES, KEYS),
    ),
    "linear_cross_entropy": Case(
        lambda h, w, b: linear_cross_entropy(h, w, TARGETS, bias=b, label_smoothing=0.2),
        vocabulary,
        (QUERIES, KEYS, (M,)),
    ),
    "sgns_loss": Case(contrastive.sgns_loss, skip_gram, (QUERIES, QUERIES, (N, 3, D))),
    "nce_loss": same(contrastive.nce_loss, (N,), (N, 3), (N,), (N, 3), rounded=False),
    "vmf_nll": same(lambda e, x: contrastive.vmf_nll(unit(x.float()), e), QUERIES, QUERIES, rounded=False),
    "free_energy": same(lambda e, w: duality.free_energy(e, log_weights=w).value, QUERIES, QUERIES, rounded=False),
    "elbo": same(duality.elbo, QUERIES, QUERIES, rounded=False, prepare=law),
    "generalized_kl": same(duality.generalized_kl, QUERIES, QUERIES, rounded=False, prepare=law),
    "elbo_gap weights": same(
        lambda e, x: duality.elbo_gap(e, x, weights=torch.full((N, M), 1 / M)),
        *(QUERIES, KEYS),
    ),
    "elbo_gap mask": same(
        lambda e, x: duality.elbo_gap(e, x, kept=torch.arange(M).expand(N, M) % 3 > 0), *(QUERIES, KEYS)
    ),
    "elbo_gap index": same(
        lambda e, x: duality.elbo_gap(e, x, kept=torch.tensor([0, 4, -1]).expand(N, 3)), *(QUERIES, KEYS)
    ),
    "nadaraya_watson dot": same(
        lambda q, x, v: regression.nadaraya_watson(q, x, v, kernel="dot").mean, QUERIES, KEYS, (M, 2), half=True
    ),
    "nadaraya_watson gaussian": same(
        lambda q, x, v: regression.nadaraya_watson(q, x, v).mean, *(QUERIES, KEYS, (M, 2)), rounded=False
    ),
    "random_features": same(regression.random_features, QUERIES, KEYS),
    "approximate_attention": same(
        lambda q, k, v, w: regression.approximate_attention(q, k, v, w).output, QUERIES, KEYS, KEYS, (5, D), half=True
    ),
    "energy": same(lambda s, x: hopfield.energy(s, x, beta=2.0), QUERIES, KEYS),
    "retrieve": same(lambda s, x: hopfield.retrieve(s, x, beta=2.0, steps=2).state, QUERIES, KEYS),
    "retrieve to the end": same(lambda s, x: hopfield.retrieve(s, x, beta=0.1).state, QUERIES, KEYS),
}


def inputs(case: Case) -> list[Tensor]:
    return [case.prepare(draw(*shape, seed=seed)) for seed, shape in enumerate(case.shapes)]


def run(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The value and the gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    value = function(*leaves)
    probe = draw(*value.shape, seed=99) if value.ndim else torch.ones(())
    return [value, *torch.autograd.grad((value.float() * probe).sum(), leaves, materialize_grads=True)]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first half", "others half"])
@pytest.mark.parametrize("name", CASES)
def test_mixed_dtypes_under_autocast(name, first, half):
    case = CASES[name]
    given = [t.to(half) if (i == 0) == first else t for i, t in enumerate(inputs(case))]
    exact = [t.to(half).float() if case.rounded else t.float() for t in given]
    expected = run(case.plain, exact)
    with torch.autocast("cpu", dtype=half):
        found = run(case.ours, given)
    assert found[0].dtype == (half if case.half else torch.float32)
    slack = torch.finfo(half).eps if case.half else 2e-6
    assert (found[0].float() - expected[0]).abs().max() <= slack * expected[0].abs().max().clamp_min(1)
    for own, gradient, exactly in zip(given, found[1:], expected[1:], strict=True):
        assert gradient.dtype == own.dtype
        assert (gradient.float() - exactly).abs().max() <= 2 * torch.finfo(half).eps * exactly.abs().max()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"nce_loss", "vmf_nll"}))
def test_mixed_dtypes_are_refused_outside_of_autocast(name):
    given = inputs(CASES[name])
    with pytest.raises(TypeError, match=r"expected dtype torch\.(bfloat16|float32) as"):
        CASES[name].ours(given[0].bfloat16(), *given[1:])


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_second_derivatives_and_backward_inside_of_autocast_are_summed_in_float32(half):
    """Backward passes called inside: nothing of ours is rounded on the way but what autocast hands over."""
    q, k = ((3 * t).to(half).double() for t in (draw(40, 8, seed=0), draw(40, 8, seed=1)))

    def second(function: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        a, b = (t.to(dtype).requires_grad_() for t in (q, k))
        (first,) = torch.autograd.grad(function(a, b), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), b)[0]

    expected = second(lambda a, b: F.cross_entropy(a @ b.T, torch.arange(40)), torch.float64)
    with torch.autocast("cpu", dtype=half):
        found = second(info_nce, torch.float32)
    # gradients pass the casts in half precision, as torch's own do; products in it would be off by 5 to 7 of these
    assert (found - expected).abs().max() <= torch.finfo(half).eps * expected.abs().max()


def test_float64_is_left_alone_by_autocast_and_not_mixed_with_single():
    q, k = draw(N, D, seed=0).double(), draw(M, D, seed=1).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert info_nce(q, k).item() == pytest.approx(F.cross_entropy(q @ k.T, torch.arange(N)).item(), rel=1e-14)
        with pytest.raises(TypeError, match=r"info_nce\.key: expected dtype torch\.float64"):
            info_nce(q, k.float())


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_training_step_under_autocast(half):
    """A linear encoder in float32 whose output autocast rounds, as in any loop with mixed precision."""
    encoder, head = torch.nn.Linear(D, D, bias=False), torch.nn.Linear(D, M)
    data = draw(N, D, seed=3)
    with torch.autocast("cpu", dtype=half):
        hidden = encoder(data).to(half)
        loss = linear_cross_entropy(hidden, head.weight, TARGETS, bias=head.bias)
    loss.backward()
    rounded = [t.detach().to(half).float().requires_grad_() for t in (hidden, head.weight, head.bias)]
    expected = F.cross_entropy(F.linear(*rounded), TARGETS)
    expected.backward()
    assert abs(loss - expected) < 2e-6 * expected
    assert encoder.weight.grad.dtype == torch.float32
    for mine, theirs in zip((head.weight, head.bias), rounded[1:], strict=True):
        assert mine.grad.dtype == torch.float32
        assert (mine.grad - theirs.grad).abs().max() <= torch.finfo(half).eps * theirs.grad.abs().max()
