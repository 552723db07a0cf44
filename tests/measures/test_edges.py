"""The edge cases of §13, row by row: what every measure and kernel answers where formulas stop being obvious.

Left out because nothing in the library does it yet: causal mask functions, RoPE, dropout, LayerNorm, whitening and
batch normalisation. The table's Sphere row has a file of its own, tests/measures/test_sphere.py.
"""

import math
from collections.abc import Callable
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from torch import Tensor
from torch import distributions as td

from cumulant import (
    Box,
    Empirical,
    Gaussian,
    Measure,
    Moments,
    Sphere,
    Status,
    convolve,
    from_distribution,
    independent,
    product,
)
from cumulant.geometry import natural_gradient
from cumulant.kernels import dense_moments
from tests.cases import KEYS, LOG_H, SQUARE, SQUARE_H, atoms_oracle, t
from tests.compare import close

HALF = [torch.float16, torch.bfloat16]
ETA = t(np.random.default_rng(13).normal(size=(4, 3)))
NONE = torch.empty(0, 3, dtype=torch.float64)
HIDDEN = torch.full((7,), -torch.inf, dtype=torch.float64)


def keys() -> Empirical:
    return Empirical(t(KEYS), t(LOG_H))


def held(found: Moments) -> dict[str, Tensor]:
    """The fields of a record that were computed."""
    return {"log_normalizer": found.log_normalizer, **found.statistics}


def softmax_oracle(x: np.ndarray, w: np.ndarray, eta: np.ndarray):
    """G, m and C of one query by the formulas of §15."""
    logits = x @ eta + w
    p = special.softmax(logits)
    z = x - p @ x
    return special.logsumexp(logits), p @ x, z.T @ (p[:, None] * z)


# ---------------------------------------------------------------------- golden values of §15


def test_golden_values():
    h, eta = Empirical(t(SQUARE), t(SQUARE_H)), t([0.5, -0.25])
    close(h.log_normalizer(eta).exp(), 1.176994655737, 1e-11)
    close(h.log_normalizer(eta), 0.162964287687, 1e-11)
    close(h.mean(eta), [0.716532073196, 0.634880029365], 1e-11)
    close(h.fisher(eta), [[0.203113861278, -0.018537648128], [-0.018537648128, 0.231807377678]], 1e-11)
    close(h.kl_to_base(eta), 0.036581741569, 1e-11)
    close(h.log_volume(eta), 0.393163678903, 1e-11)
    z = 0.1 + 0.2 * math.exp(0.5) + 0.3 * math.exp(-0.25) + 0.4 * math.exp(0.25)
    close(h.log_normalizer(eta), math.log(z), 1e-15)


# ---------------------------------------------------------------------- logits up to ±1e4, large norms


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_ten_thousand_pick_the_largest_atom(sign: float, dtype: torch.dtype):
    x = 100 * torch.eye(3, dtype=dtype)
    x = torch.cat([x, x[:1]])  # the first atom twice
    h, eta = Empirical(x), sign * torch.tensor([100.0, 50.0, 20.0], dtype=dtype)
    best, copies = (x[0], 2) if sign > 0 else (x[2], 1)
    close(h.log_normalizer(eta), float(eta @ best) + math.log(copies), 1e-15 if dtype == torch.float64 else 1e-6)
    assert torch.equal(h.mean(eta), best)
    assert torch.equal(h.fisher(eta), torch.zeros(3, 3, dtype=dtype))
    assert torch.equal(h.fisher_mv(eta, eta), torch.zeros(3, dtype=dtype))
    found = dense_moments(eta[None], x)
    close(found.effective_atoms, [copies], 1e-11 if dtype == torch.float64 else 1e-2)
    assert all(v.isfinite().all() for v in held(found).values())


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_large_norms_agree_with_scipy_and_stay_finite(scale: float):
    rng = np.random.default_rng(int(scale))
    x, eta = scale * rng.normal(size=(9, 3)), rng.normal(size=3)
    h, q = Empirical(t(x).requires_grad_()), t(eta).requires_grad_()
    g, m, c = softmax_oracle(x, 0.0, eta)
    close(h.log_normalizer(q).item(), g, 1e-14)
    np.testing.assert_allclose(h.mean(q).detach(), m, rtol=1e-13 * scale)
    np.testing.assert_allclose(h.fisher(q).detach(), c, rtol=1e-12 * scale, atol=1e-12 * scale**2)
    slope = torch.autograd.grad(h.mean(q).sum(), [q, h.atoms])
    assert all(s.isfinite().all() for s in slope)


def test_shifting_all_logits_by_ten_thousand_shifts_g_only():
    h, big = keys(), Empirical(t(KEYS), t(LOG_H) + 1e4)
    close(big.log_normalizer(ETA), h.log_normalizer(ETA) + 1e4, 1e-15)
    close(big.mean(ETA), h.mean(ETA), 1e-11)
    close(big.fisher(ETA), h.fisher(ETA), 1e-11)


# ---------------------------------------------------------------------- float16 and bfloat16


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_accumulates_in_float32(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(5000, 4, generator=generator) + 0.5).to(dtype)
    eta = torch.randn(3, 4, generator=generator).to(dtype)
    h, exact = Empirical(x), Empirical(x.double())
    eps = torch.finfo(dtype).eps
    for name in ("log_normalizer", "mean", "fisher"):
        got, expected = getattr(h, name)(eta), getattr(exact, name)(eta.double())
        assert got.dtype == dtype
        assert (got.double() - expected).abs().max() <= eps * expected.abs().max()
    found, reference = dense_moments(eta, x), dense_moments(eta.double(), x.double())
    for name, value in held(found).items():
        assert value.dtype == torch.float32
        close(value.double(), getattr(reference, name), 2e-4)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_covariance_survives_a_common_offset(dtype: torch.dtype):
    steps = torch.arange(8.0)[:, None] / 8 + 8  # spacing that both formats hold exactly
    h = Empirical(steps.to(dtype))
    variance = steps.double().var(correction=0)
    assert abs(h.fisher(torch.zeros(1, dtype=dtype)).double() - variance) <= torch.finfo(dtype).eps * variance


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_sum_weighs_its_parts_before_rounding_g(dtype: torch.dtype):
    x = torch.tensor([[40.0, 1.0], [40.0, -1.0], [39.75, 3.0], [40.25, 0.5]]).to(dtype)
    eta = torch.tensor([[16.0, 0.25]]).to(dtype)  # G ≈ 644, where bfloat16 steps by 4
    split, whole = Empirical(x[:2]) + Empirical(x[2:]), Empirical(x)
    close(split.mean(eta).double(), whole.mean(eta).double(), torch.finfo(dtype).eps)
    close(split.log_normalizer(eta).double(), whole.log_normalizer(eta).double(), torch.finfo(dtype).eps)


# ---------------------------------------------------------------------- N = 1


def test_one_atom_is_a_point():
    x, w = KEYS[:1], LOG_H[:1]
    h = Empirical(t(x), t(w))
    close(h.log_normalizer(ETA), ETA.numpy() @ x[0] + w[0])
    assert torch.equal(h.mean(ETA), t(x).expand(4, 3))
    assert torch.equal(h.fisher(ETA), torch.zeros(4, 3, 3, dtype=ETA.dtype))
    assert torch.equal(h.fisher_mv(ETA, ETA), torch.zeros_like(ETA))
    assert torch.equal(h.log_volume(ETA), torch.zeros(4, dtype=ETA.dtype))
    found = h.natural(t(x[0]))
    assert found.converged
    assert torch.equal(found.value, torch.zeros(3, dtype=ETA.dtype))  # every η will do; the smallest is returned
    close(h.conjugate(t(x[0])), -w[0])
    assert h.conjugate(t(x[0] + 1e-3)) == torch.inf
    assert h.natural(t(x[0] + 1e-3)).status == Status.OUTSIDE
    assert torch.equal(h.sample(ETA, 2), t(x).expand(4, 2, 3))


# ---------------------------------------------------------------------- empty support and fully masked rows

MAP = t(np.random.default_rng(5).normal(size=(2, 3)))
ZERO_MEASURES: dict[str, Callable[[], Measure]] = {
    "no atoms": lambda: Empirical(NONE),
    "all masked": lambda: Empirical(t(KEYS), HIDDEN),
    "all rows masked": lambda: Empirical(t(KEYS), HIDDEN.expand(4, 7)),
    "empty + empty": lambda: Empirical(NONE) + Empirical(t(KEYS), HIDDEN),
    "0 · h": lambda: 0 * keys(),
    "0 · Gaussian": lambda: torch.tensor(0.0, dtype=torch.float64) * Gaussian(t(KEYS[0]), torch.eye(3).double()),
    "0 · Sphere": lambda: 0.0 * Sphere(3),
    "3 · empty": lambda: 3.0 * Empirical(NONE),
    "image": lambda: MAP.mT @ (MAP @ Empirical(t(KEYS), HIDDEN)),
    "shift": lambda: Empirical(NONE).shift(t(KEYS[0])),
    "tilt": lambda: Empirical(t(KEYS), HIDDEN).tilt(t(KEYS[0])),
    "convolve(h, no atoms)": lambda: convolve(keys(), Empirical(NONE)),
    "convolve(masked, Gaussian)": lambda: convolve(
        Empirical(t(KEYS), HIDDEN), Gaussian(t(KEYS[0]), torch.eye(3).double())
    ),
    "product": lambda: product(Empirical(t(KEYS[:, :2])), Empirical(t(KEYS[:, 2:]), HIDDEN)),
    "independent": lambda: independent(Empirical(t(KEYS.T[:, :, None]), torch.stack([t(LOG_H), t(LOG_H), HIDDEN]))),
    "nested": lambda: (2 * (Empirical(NONE) + 0 * keys())).shift(t(KEYS[0])).tilt(t(KEYS[1])),
}
zero_measures = pytest.mark.parametrize("build", ZERO_MEASURES.values(), ids=ZERO_MEASURES.keys())


@zero_measures
def test_zero_measure_has_g_minus_inf_and_no_moments(build: Callable[[], Measure]):
    h = build()
    assert torch.equal(h.log_normalizer(ETA), torch.full((4,), -torch.inf, dtype=ETA.dtype))
    assert (h.log_mass == -torch.inf).all()
    for moment in (h.mean(ETA), h.fisher(ETA), h.fisher_mv(ETA, ETA), h.log_volume(ETA), h.kl_to_base(ETA)):
        assert torch.equal(moment, torch.zeros_like(moment))
    assert torch.equal(h.kl(ETA, ETA.flip(0)), torch.zeros(4, dtype=ETA.dtype))
    assert (h.natural(ETA).status == Status.OUTSIDE).all()
    assert torch.equal(h.conjugate(ETA), torch.full((4,), torch.inf, dtype=ETA.dtype))


@zero_measures
def test_zero_measure_has_zero_first_and_second_derivatives(build: Callable[[], Measure]):
    h, eta = build(), ETA.clone().requires_grad_()
    for function in (h.log_normalizer, h.mean, h.log_volume):
        first = torch.func.grad(lambda e, f=function: f(e).sum())
        assert torch.equal(first(eta), torch.zeros_like(ETA))
        second = torch.func.grad(lambda e, f=first: (f(e) * ETA).sum())
        assert torch.equal(second(eta), torch.zeros_like(ETA))
    for answer in (h.log_normalizer(eta), h.mean(eta)):
        (slope,) = torch.autograd.grad(answer.sum(), eta, allow_unused=True, materialize_grads=True)
        assert torch.equal(slope, torch.zeros_like(ETA))


@pytest.mark.parametrize("empty", [lambda: Empirical(NONE), lambda: Empirical(t(KEYS), HIDDEN), lambda: 0 * keys()])
def test_adding_an_empty_measure_changes_nothing(empty: Callable[[], Measure]):
    for both in (keys() + empty(), empty() + keys()):
        for name in ("log_normalizer", "mean", "fisher", "log_volume", "kl_to_base"):
            close(getattr(both, name)(ETA), getattr(keys(), name)(ETA), 1e-14)
        for name in ("log_normalizer", "mean"):
            function, reference = getattr(both, name), getattr(keys(), name)
            first, expected = (torch.func.jacrev(f)(ETA) for f in (function, reference))
            close(first, expected, 1e-13)
            second, expected = (torch.func.jacfwd(torch.func.jacrev(f))(ETA) for f in (function, reference))
            close(second, expected, 1e-12)
        mean = keys().mean(ETA)
        close(both.mean(both.natural(mean).value), mean, 1e-9)
        assert both.sample(ETA, 3).isfinite().all()


def test_a_masked_row_does_not_touch_its_neighbours():
    weights = t(np.random.default_rng(6).normal(size=(4, 7)))
    weights[2] = -torch.inf
    parts = [t(KEYS).requires_grad_(), weights.requires_grad_(), ETA.clone().requires_grad_()]
    h = Empirical(parts[0], parts[1])
    g, m = h.log_normalizer(parts[2]), h.mean(parts[2])
    assert g[2] == -torch.inf
    assert torch.equal(m[2], torch.zeros(3, dtype=m.dtype))
    for total in (g.sum(), (m * m).sum(), h.fisher(parts[2]).square().sum()):
        slopes = torch.autograd.grad(total, parts, create_graph=True)
        assert all(s.isfinite().all() for s in slopes)
        assert torch.equal(slopes[1][2], torch.zeros(7, dtype=g.dtype))
        assert torch.equal(slopes[2][2], torch.zeros(3, dtype=g.dtype))
        curvatures = torch.autograd.grad(sum((s * s).sum() for s in slopes), parts)
        assert all(s.isfinite().all() for s in curvatures)
    keep = torch.tensor([0, 1, 3])
    rest = Empirical(t(KEYS), weights.detach()[keep])
    close(m.detach()[keep], rest.mean(ETA[keep]), 1e-15)


@pytest.mark.parametrize("atoms", [NONE, t(KEYS)], ids=["no atoms", "all masked"])
def test_moments_of_nothing_have_mass_zero_and_gradient_zero(atoms: Tensor):
    eta, x = ETA.clone().requires_grad_(), atoms.clone().requires_grad_()
    w = torch.full(atoms.shape[:1], -torch.inf, dtype=torch.float64, requires_grad=True)
    found = dense_moments(eta, x, log_weights=w)
    for name in ("log_normalizer", "max_score", "log_sum_square"):
        assert (getattr(found, name) == -torch.inf).all()
    for name in ("mass", "mean", "mean_score", "score_variance", "mean_log_weight", "value_trace", "atom_trace"):
        assert (getattr(found, name) == 0).all()
    assert (found.entropy == 0).all()
    assert (found.effective_atoms == 0).all()
    for value in [*held(found).values(), found.entropy, found.effective_atoms, found.perplexity]:
        slopes = torch.autograd.grad(
            value.sum(), [eta, x, w], create_graph=True, allow_unused=True, materialize_grads=True
        )
        for slope in slopes:
            assert torch.equal(slope, torch.zeros_like(slope))


def test_moments_record_says_mass_zero_per_row():
    w = torch.stack([t(LOG_H), HIDDEN])
    found = dense_moments(ETA[:2], t(KEYS), log_weights=w)
    assert (found.mass == 0).tolist() == [False, True]


# ---------------------------------------------------------------------- zero-weight atoms


def masked_and_kept() -> tuple[Tensor, Tensor, Tensor]:
    """Keys with two masked ones, and which are kept."""
    w = t(LOG_H).clone()  # t shares memory with the registry
    w[[1, 4]] = -torch.inf
    return t(KEYS).clone(), w, w > -torch.inf


def test_zero_weight_atoms_are_not_there():
    x, w, kept = masked_and_kept()
    h, rest = Empirical(x, w), Empirical(x[kept], w[kept])
    for name in ("log_normalizer", "mean", "fisher", "log_volume", "kl_to_base"):
        close(getattr(h, name)(ETA), getattr(rest, name)(ETA), 1e-14)
    mean = rest.mean(ETA)
    close(h.natural(mean).value, rest.natural(mean).value, 1e-8)
    close(h.conjugate(mean), rest.conjugate(mean), 1e-12)
    assert (h.conjugate(x[~kept] * 3) == torch.inf).all()
    draws = h.sample(ETA, 500, generator=torch.Generator().manual_seed(0)).reshape(-1, 3)
    assert not any((draws == gone).all(-1).any() for gone in x[~kept])


def test_zero_weight_atoms_get_gradient_exactly_zero_to_second_order():
    x, w, kept = masked_and_kept()
    x, w, eta = x.requires_grad_(), w.requires_grad_(), ETA.clone().requires_grad_()
    h = Empirical(x, w)
    for answer in (h.log_normalizer(eta), h.mean(eta), h.fisher(eta), h.fisher_mv(eta, eta)):
        slopes = torch.autograd.grad(answer.square().sum(), [x, w, eta], create_graph=True)
        assert torch.equal(slopes[0][~kept], torch.zeros(2, 3, dtype=x.dtype))
        assert torch.equal(slopes[1][~kept], torch.zeros(2, dtype=x.dtype))
        curvatures = torch.autograd.grad(sum(s.square().sum() for s in slopes), [x, w, eta])
        assert all(s.isfinite().all() for s in curvatures)
        assert torch.equal(curvatures[0][~kept], torch.zeros(2, 3, dtype=x.dtype))


@pytest.mark.parametrize("junk", [0.0, 1e30], ids=["zeros", "1e30"])
def test_moments_ignore_masked_atoms_and_values_whatever_they_hold(junk: float):
    x, w, kept = (a.float() if a.is_floating_point() else a for a in masked_and_kept())
    v, eta = x.sin(), ETA.float()
    x[~kept], v[~kept] = junk, junk
    x, v, w = x.requires_grad_(), v.requires_grad_(), w.requires_grad_()
    found = dense_moments(eta, x, v, log_weights=w)
    rest = dense_moments(eta, x[kept], v[kept], log_weights=w[kept])
    for name, value in held(found).items():
        torch.testing.assert_close(value, getattr(rest, name), rtol=1e-5, atol=1e-6)
        slopes = torch.autograd.grad(
            value.sum(), [x, v, w], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for slope in slopes:
            assert slope.isfinite().all()
            assert (slope[~kept] == 0).all()


# ---------------------------------------------------------------------- equal weights, repeated atoms


@pytest.mark.parametrize("c", [-700.0, 0.3, 700.0])
def test_equal_log_weights_shift_g_and_nothing_else(c: float):
    plain, weighted = Empirical(t(KEYS)), Empirical(t(KEYS), torch.full((7,), c, dtype=torch.float64))
    close(weighted.log_normalizer(ETA), plain.log_normalizer(ETA) + c, 1e-14)
    close(weighted.mean(ETA), plain.mean(ETA))
    close(weighted.fisher(ETA), plain.fisher(ETA))
    close(weighted.conjugate(plain.mean(ETA)), plain.conjugate(plain.mean(ETA)) - c)


def test_repeated_atoms_are_one_atom_with_the_sum_of_weights():
    copies = Empirical(t(KEYS[[0, 0, 0, 1, 2]]))
    one = Empirical(t(KEYS[:3]), t(np.log([3, 1, 1])))
    for name in ("log_normalizer", "mean", "fisher"):
        close(getattr(copies, name)(ETA), getattr(one, name)(ETA), 1e-14)
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    (p,) = torch.autograd.grad(Empirical(copies.atoms, w).log_normalizer(ETA[0]), w)  # ∂G/∂w_n = p_n
    close(p[:3], p[:1].expand(3), 1e-15)
    uneven = Empirical(t(KEYS[[0, 0, 1]]), t(np.log([0.1, 0.3, 0.6])))
    close(uneven.fisher(ETA), Empirical(t(KEYS[:2]), t(np.log([0.4, 0.6]))).fisher(ETA), 1e-14)


@pytest.mark.parametrize("copies", [2, 7, 49])
def test_copies_of_a_single_atom_are_a_point(copies: int):
    x = t(KEYS[3])
    h = Empirical(x.expand(copies, 3))
    assert h.natural(x).converged
    close(h.conjugate(x), -math.log(copies))
    assert h.conjugate(x + 0.01) == torch.inf


# ---------------------------------------------------------------------- singular covariance

PLANE = np.vstack([KEYS[0], KEYS[1], KEYS[2], 0.5 * KEYS[0] + 0.2 * KEYS[1] + 0.3 * KEYS[2]])  # four keys in a plane
NORMAL = np.cross(PLANE[1] - PLANE[0], PLANE[2] - PLANE[0])
NORMAL /= np.linalg.norm(NORMAL)


def test_along_null_directions_mean_stays_and_g_is_affine():
    h, n = Empirical(t(PLANE)), t(NORMAL)
    for s in (-5.0, 0.3, 40.0):
        moved = ETA + s * n
        close(h.mean(moved), h.mean(ETA))
        close(h.log_normalizer(moved), h.log_normalizer(ETA) + s * float(PLANE[0] @ NORMAL), 1e-13)
        close(h.fisher(moved), h.fisher(ETA))
        assert h.fisher_mv(ETA, n.expand(4, 3)).abs().max() < 1e-15


@pytest.mark.parametrize(
    "build",
    [
        lambda: Empirical(t(PLANE)),
        lambda: Empirical(t(PLANE[:2]), t(LOG_H[:2])),
        lambda: Gaussian(t(PLANE[0]), t(np.eye(3) - np.outer(NORMAL, NORMAL))),
        lambda: t(np.eye(3) - np.outer(NORMAL, NORMAL)) @ Sphere(3),
    ],
    ids=["coplanar keys", "two keys in R³", "singular Gaussian", "projected sphere"],
)
def test_singular_covariance_link_has_minimum_norm(build: Callable[[], Measure]):
    h = build()
    fisher = h.fisher(ETA)
    mean = h.mean(ETA)
    found = h.natural(mean)
    assert found.converged.all()
    close(h.mean(found.value), mean, 1e-9)
    values, vectors = torch.linalg.eigh(fisher)
    null = vectors * (values[:, None, :] < 1e-12)
    close((null.mT @ found.value[..., None]).abs().max(), 0.0, 1e-9)
    assert (found.value.norm(dim=-1) <= ETA.norm(dim=-1) + 1e-9).all()
    expected = torch.linalg.slogdet(torch.eye(3, dtype=ETA.dtype) + fisher)[1]
    close(h.log_volume(ETA), expected)
    target = fisher @ ETA.flip(0)[..., None]
    close(natural_gradient(h, ETA, target[..., 0])[..., None], torch.linalg.pinv(fisher, rtol=1e-9) @ target, 1e-8)


def test_a_mean_off_a_flat_support_is_outside():
    h = Empirical(t(PLANE))
    mean = h.mean(ETA)
    assert (h.natural(mean + 0.01 * t(NORMAL)).status == Status.OUTSIDE).all()
    assert (h.conjugate(mean + 0.01 * t(NORMAL)) == torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_the_mean_does_not_leave_a_flat_support(dtype: torch.dtype):
    rng = np.random.default_rng(8)
    h = Empirical(torch.from_numpy(rng.normal(size=(4, 16)) + 3).to(dtype))  # N ≤ d
    eta = torch.from_numpy(0.3 * rng.normal(size=(20, 16))).to(dtype)
    mean = h.mean(eta)
    found = h.natural(mean)
    assert found.converged.all()
    assert found.value.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    close(h.mean(found.value), mean, tolerance)
    close(h.conjugate(mean), (eta * mean).sum(-1) - h.log_normalizer(eta), tolerance)


# ---------------------------------------------------------------------- vertices, faces, outside


def test_vertices_have_conjugate_minus_log_weight():
    h = Empirical(t(SQUARE), t(SQUARE_H))
    found = h.natural(t(SQUARE))
    assert (found.status == Status.BOUNDARY).all()
    assert found.value.isfinite().all()
    close(h.conjugate(t(SQUARE)), -SQUARE_H, 1e-8)


def test_a_repeated_vertex_has_conjugate_minus_log_of_its_summed_weight():
    x = np.vstack([SQUARE, SQUARE[3:], SQUARE[3:]])
    h = Empirical(t(x), t(np.log([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])))
    assert h.natural(t(x[3])).status == Status.BOUNDARY
    close(h.conjugate(t(x[3])), -math.log(1.5), 1e-8)


def test_a_point_on_an_edge_has_the_conjugate_of_the_edge():
    h = Empirical(t(SQUARE), t(SQUARE_H))
    edge = Empirical(t(SQUARE[2:]), t(SQUARE_H[2:]))  # from (0,1) to (1,1)
    points = t([[s, 1.0] for s in (0.1, 0.5, 0.9)])
    assert (h.natural(points).status == Status.BOUNDARY).all()
    assert edge.natural(points).converged.all()
    close(h.conjugate(points), edge.conjugate(points), 1e-8)


@pytest.mark.long
@pytest.mark.parametrize("weights", [0.0, 1.0, 10.0, 30.0])
def test_vertices_of_random_polytopes(weights: float):
    rng = np.random.default_rng(int(weights))
    for _ in range(15):
        d = int(rng.integers(1, 7))
        n = int(rng.integers(d + 1, 4 * d + 3))
        x, w = rng.normal(size=(n, d)), weights * rng.normal(size=n)
        vertex = (x @ rng.normal(size=(d, 5))).argmax(0)
        h = Empirical(t(x), t(w))
        assert (h.natural(t(x[vertex])).status == Status.BOUNDARY).all()
        close(h.conjugate(t(x[vertex])), -w[vertex], 1e-7)


@pytest.mark.parametrize("weights", [0.0, 1.0, 10.0, 30.0])
@pytest.mark.parametrize("margin", [0.01, 0.3, 20.0])
def test_one_percent_of_the_diameter_outside_is_outside(weights: float, margin: float):
    rng = np.random.default_rng(int(100 * margin + weights))
    for _ in range(10):
        d = int(rng.integers(1, 7))
        n = int(rng.integers(d + 1, 4 * d + 3))
        x = 10 ** rng.uniform(-2, 2) * rng.normal(size=(n, d))
        direction = rng.normal(size=(10, d))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        diameter = np.linalg.norm(x[:, None] - x, axis=-1).max()
        point = x[(x @ direction.T).argmax(0)] + margin * diameter * direction  # beyond a supporting plane
        h = Empirical(t(x), t(weights * rng.normal(size=n)))
        assert (h.natural(t(point)).status == Status.OUTSIDE).all()
        assert (h.conjugate(t(point)) == torch.inf).all()


def lp_says_inside(x: np.ndarray, mu: np.ndarray) -> bool:
    constraints = np.vstack([x.T, np.ones(len(x))])
    return optimize.linprog(np.zeros(len(x)), A_eq=constraints, b_eq=np.r_[mu, 1], bounds=(0, None)).status == 0


def test_status_agrees_with_linear_programming():
    rng = np.random.default_rng(9)
    for _ in range(8):
        x = rng.normal(size=(6, 2))
        mu = 1.5 * rng.normal(size=(10, 2))
        status = Empirical(t(x), t(rng.normal(size=6))).natural(t(mu)).status
        assert [lp_says_inside(x, m) for m in mu] == (status == Status.CONVERGED).tolist()
        assert ((status == Status.CONVERGED) | (status == Status.OUTSIDE)).all()


OUTSIDE_COMPOSITIONS = {
    "image": (lambda: MAP @ keys(), [50.0, 50.0]),
    "sum": (lambda: keys() + Empirical(t(2 * KEYS)), [50.0, 0.0, 0.0]),
    "convolution": (lambda: convolve(keys(), Empirical(t(KEYS))), [50.0, 0.0, 0.0]),
    "scaled": (lambda: 3 * keys(), [50.0, 0.0, 0.0]),
    "shifted": (lambda: keys().shift(t([0.0, 9.0, 0.0])), [50.0, 0.0, 0.0]),
    "tilted": (lambda: keys().tilt(t([1.0, 0.0, 0.0])), [50.0, 0.0, 0.0]),
    "product": (lambda: product(keys(), Sphere(2)), [0.0, 0.0, 0.0, 3.0, 0.0]),
    "convolution with a sphere": (lambda: convolve(keys(), Sphere(3)), [50.0, 0.0, 0.0]),
    "sum with a box": (lambda: keys() + Box(t([0.0, 0, 0]), t([1.0, 1, 1])), [50.0, 0.0, 0.0]),
    "image of a sphere": (lambda: MAP @ Sphere(3), [50.0, 50.0]),
}


@pytest.mark.parametrize(("build", "point"), OUTSIDE_COMPOSITIONS.values(), ids=OUTSIDE_COMPOSITIONS.keys())
def test_compositions_know_their_outside(build: Callable[[], Measure], point: list[float]):
    assert build().natural(t(point)).status == Status.OUTSIDE
    assert build().conjugate(t(point)) == torch.inf


# ---------------------------------------------------------------------- what attention adds: scale, bias, sink, values


def test_scale_one_over_root_d():
    h, d = keys(), 3
    q = ETA.clone().requires_grad_()
    potential = d**0.5 * h.log_normalizer(q / d**0.5)
    (attention,) = torch.autograd.grad(potential.sum(), q)
    close(attention, h.mean(ETA / d**0.5))
    expected = torch.stack([torch.func.hessian(lambda e: h.log_normalizer(e / d**0.5))(e) for e in ETA])
    close(h.fisher(ETA / d**0.5) / d, expected)


def test_bias_is_a_row_of_log_weights_and_tilts_add():
    bias = -0.5 * np.abs(np.arange(4)[:, None] - np.arange(7))  # ALiBi
    h = Empirical(t(KEYS), t(bias))
    close(h.log_normalizer(ETA), [atoms_oracle(KEYS, b)(e) for b, e in zip(bias, ETA.numpy(), strict=True)])
    both = Empirical(t(KEYS), t(bias + LOG_H))
    twice = Empirical(t(KEYS), t(bias)).log_normalizer(ETA)
    assert (both.log_normalizer(ETA) < twice).all()  # LOG_H is negative
    a, b = t(KEYS[0]), t(KEYS[1])
    close(keys().tilt(a).tilt(b).mean(ETA), keys().tilt(a + b).mean(ETA))


def test_sink_is_one_more_atom_at_zero():
    x = np.vstack([KEYS, np.zeros(3)])
    h, sink = Empirical(t(KEYS)), Empirical(t(x))
    weight = torch.sigmoid(-h.log_normalizer(ETA))  # 1/(1 + e^G)
    close(sink.log_normalizer(ETA), torch.nn.functional.softplus(h.log_normalizer(ETA)))
    m, c = h.mean(ETA), h.fisher(ETA)
    close(sink.mean(ETA), (1 - weight)[:, None] * m)
    outer = m[:, :, None] * m[:, None, :]
    close(sink.fisher(ETA), (1 - weight)[:, None, None] * c + (weight * (1 - weight))[:, None, None] * outer)
    values = t(np.random.default_rng(2).normal(size=(7, 2)))
    found = dense_moments(ETA, t(x), torch.cat([values, torch.zeros(1, 2, dtype=values.dtype)]))
    e = np.exp(ETA.numpy() @ KEYS.T)
    close(found.mean, e @ values.numpy() / (1 + e.sum(1, keepdims=True)))  # "softmax one"


def test_values_other_than_keys_are_a_second_block_of_atoms():
    values = np.random.default_rng(3).normal(size=(7, 2))
    joint = Empirical(t(np.hstack([KEYS, values])), t(LOG_H))
    eta = torch.cat([ETA, torch.zeros(4, 2, dtype=ETA.dtype)], dim=-1)
    attention = lambda e: dense_moments(e, t(KEYS), t(values), log_weights=t(LOG_H)).mean  # noqa: E731
    close(joint.mean(eta)[:, 3:], attention(ETA))
    for i in range(4):
        slope = torch.func.jacrev(lambda e: attention(e[None])[0])(ETA[i])
        close(joint.fisher(eta)[i, 3:, :3], slope)


def test_queries_that_share_keys_add_their_gradients():
    x = t(KEYS).requires_grad_()
    shared = torch.autograd.grad(Empirical(x).log_normalizer(ETA).sum(), x)[0]
    single = sum(torch.autograd.grad(Empirical(x).log_normalizer(e), x)[0] for e in ETA)
    close(shared, single)


def test_keys_of_equal_norm_make_attention_gaussian_kernel_regression():
    x = KEYS / np.linalg.norm(KEYS, axis=1, keepdims=True)
    kernel = np.exp(-((ETA.numpy()[:, None] - x) ** 2).sum(-1) / 2)
    close(Empirical(t(x)).mean(ETA), kernel @ x / kernel.sum(1, keepdims=True))


def test_restricting_the_support_costs_minus_log_of_the_kept_mass():
    eta = ETA.numpy()
    for q in eta:
        p = special.softmax(KEYS @ q + LOG_H)
        kept = np.argsort(p)[-3:]
        gap = keys().log_normalizer(t(q)) - Empirical(t(KEYS[kept]), t(LOG_H[kept])).log_normalizer(t(q))
        restricted = p[kept] / p[kept].sum()
        close(gap, -np.log(p[kept].sum()))
        close(gap, np.sum(restricted * np.log(restricted / p[kept])))


# ---------------------------------------------------------------------- the monoid of moments

CHUNKS = [slice(0, 2), slice(2, 3), slice(3, 7)]


def chunk(part: slice, *, eta: Tensor = ETA, x: Tensor | None = None) -> Moments:
    x = t(KEYS) if x is None else x
    values = torch.stack([x.sin().sum(-1), x.cos().sum(-1)], dim=-1)
    return dense_moments(eta, x[part], values[part], log_weights=t(LOG_H)[part])


def same(a: Moments, b: Moments, tolerance: float):
    assert held(a).keys() == held(b).keys()
    for name, value in held(a).items():
        torch.testing.assert_close(value, getattr(b, name), rtol=tolerance, atol=tolerance)


def test_merge_equals_the_whole_commutes_and_associates():
    a, b, c = map(chunk, CHUNKS)
    same(a.merge(b).merge(c), chunk(slice(None)), 1e-13)
    same(a.merge(b), b.merge(a), 0.0)
    same(a.merge(b).merge(c), a.merge(b.merge(c)), 1e-13)


def test_merge_has_mass_zero_as_identity_with_gradients():
    def probe(m: Moments) -> Tensor:
        return sum(((v * (1 + v.detach().cos())).sum() for v in held(m).values()), torch.zeros(()))

    eta, x = ETA.clone().requires_grad_(), t(KEYS).requires_grad_()
    whole = chunk(slice(None), eta=eta, x=x)
    nothing = [
        chunk(slice(0, 0), eta=eta, x=x),
        dense_moments(eta, x, x[:, :2], log_weights=HIDDEN),
    ]
    expected = torch.autograd.grad(probe(whole), [eta, x], retain_graph=True)
    for zero in nothing:
        for merged in (whole.merge(zero), zero.merge(whole)):
            same(merged, whole, 1e-15)
            for got, slope in zip(
                torch.autograd.grad(probe(merged), [eta, x], retain_graph=True), expected, strict=True
            ):
                close(got, slope)
        empty = zero.merge(nothing[0])
        assert (empty.mass == 0).all()
        assert not any(v.isnan().any() for v in held(empty).values())
        slopes = torch.autograd.grad(empty.mean.sum() + empty.atom_trace.sum(), [eta, x], retain_graph=True)
        assert all(torch.equal(s, torch.zeros_like(s)) for s in slopes)


def test_merge_is_exact_where_masses_differ_by_e_to_the_thousand():
    far = dense_moments(ETA, t(KEYS), log_weights=t(LOG_H) - 1000)
    near = dense_moments(ETA, t(KEYS), log_weights=t(LOG_H))
    merged = far.merge(near)
    close(merged.log_normalizer, near.log_normalizer, 1e-15)
    close(merged.mean, near.mean, 1e-15)
    close(merged.atom_trace, near.atom_trace, 1e-15)


def test_merge_batches_of_rows_some_of_them_empty():
    w = t(np.random.default_rng(4).normal(size=(4, 7)))
    w[0, :3], w[1, 3:], w[2] = -torch.inf, -torch.inf, -torch.inf
    parts = [dense_moments(ETA, t(KEYS[s]), log_weights=w[:, s]) for s in (slice(0, 3), slice(3, 7))]
    same(parts[0].merge(parts[1]), dense_moments(ETA, t(KEYS), log_weights=w), 1e-13)


# ---------------------------------------------------------------------- domains of infinite families

DOMAINS = {
    "Gamma": (lambda: from_distribution(td.Gamma(t(3.0), t(2.0))), 2.0),
    "Exponential": (lambda: from_distribution(td.Exponential(t(0.7))), 0.7),
    "NegativeBinomial": (lambda: from_distribution(td.NegativeBinomial(t(3.0), t(0.25))), -math.log(0.25)),
    "Laplace": (lambda: from_distribution(td.Laplace(t(0.4), t(0.5))), 2.0),
    "Laplace below": (lambda: t([[-1.0]]) @ from_distribution(td.Laplace(t(0.4), t(0.5))), 2.0),
    "Gamma + Gamma": (lambda: sum(from_distribution(td.Gamma(t(3.0), t(r))) for r in (2.0, 5.0)), 2.0),
    "convolution": (lambda: convolve(from_distribution(td.Gamma(t(3.0), t(2.0))), Sphere(1)), 2.0),
    "shifted, scaled": (lambda: 2.0 * from_distribution(td.Gamma(t(3.0), t(2.0))).shift(t([-4.0])), 2.0),
}


@pytest.mark.parametrize(("build", "edge"), DOMAINS.values(), ids=DOMAINS.keys())
def test_outside_the_natural_domain_g_is_plus_inf(build: Callable[[], Measure], edge: float):
    h = build()
    beyond = t([[edge], [edge + 1e-9], [edge + 1.0], [edge + 1e4]])
    inside = t([[edge - 1e-3], [0.0], [edge / 2]])
    assert (h.log_normalizer(beyond) == torch.inf).all()
    assert h.log_normalizer(inside).isfinite().all()
    mixed = torch.cat([inside, beyond]).requires_grad_()
    (slope,) = torch.autograd.grad(torch.where(mixed[:, 0] < edge, h.log_normalizer(mixed), 0).sum(), mixed)
    assert not slope.isnan().any()
    close(slope[:3], h.mean(inside))


def test_poisson_has_no_edge_and_statistics_have_one():
    assert from_distribution(td.Poisson(t(2.0))).log_normalizer(t([[-50.0], [5.0], [600.0]])).isfinite().all()
    full = from_distribution(td.Gamma(t(3.0), t(2.0)), full=True)
    assert (full.log_normalizer(t([[2.0, 0.0], [0.0, -3.0], [3.0, -5.0]])) == torch.inf).all()


# ---------------------------------------------------------------------- Gaussian mixtures


def test_widest_gaussian_wins_at_large_queries():
    narrow, wide = Gaussian(t([5.0, 0.0]), 0.1 * torch.eye(2).double()), Gaussian(t([0.0, 0.0]), torch.eye(2).double())
    h = 0.999 * narrow + 0.001 * wide
    small, large = t([0.1, 0.0]), t([40.0, 0.0])
    close(h.mean(small), narrow.mean(small), 1e-1)
    close(h.mean(large), wide.mean(large))
    close(h.log_normalizer(large), wide.log_normalizer(large) + math.log(0.001))
    huge = t([1e4, -1e4])
    close(h.log_normalizer(huge), 1e8 + math.log(0.001))
    assert h.fisher(huge).isfinite().all()


def test_mixture_weights_include_half_eta_sigma_eta():
    rng = np.random.default_rng(7)
    mu, a = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2))
    sigma, log_pi, eta = a @ a.transpose(0, 2, 1), np.log([0.2, 0.5, 0.3]), rng.normal(size=2)
    h = reduce(add, (float(np.exp(p)) * Gaussian(t(m), t(s)) for p, m, s in zip(log_pi, mu, sigma, strict=True)))
    w = special.softmax(log_pi + mu @ eta + np.einsum("i,nij,j->n", eta, sigma, eta) / 2)
    centres = mu + sigma @ eta
    close(h.mean(t(eta)), w @ centres)
    centred = centres - w @ centres
    close(h.fisher(t(eta)), np.einsum("n,nij->ij", w, sigma) + centred.T @ (w[:, None] * centred))


# ---------------------------------------------------------------------- any shape, any value


@st.composite
def atoms_and_query(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    d, n = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e3]))
    numbers = st.floats(-1, 1, allow_subnormal=False)
    weight = st.one_of(st.just(-np.inf), st.floats(-30, 30, allow_subnormal=False))
    x = scale * np.array(draw(st.lists(numbers, min_size=n * d, max_size=n * d))).reshape(n, d)
    w = np.array(draw(st.lists(weight, min_size=n, max_size=n)))
    eta = draw(st.sampled_from([0.0, 1.0, 1e3])) * np.array(draw(st.lists(numbers, min_size=d, max_size=d)))
    return x, w, eta


@settings(max_examples=150, deadline=None)
@given(atoms_and_query())
def test_empirical_agrees_with_scipy_for_any_atoms(case: tuple[np.ndarray, np.ndarray, np.ndarray]):
    x, w, eta = case
    atoms, weights, query = t(x).requires_grad_(), t(w).requires_grad_(), t(eta).requires_grad_()
    h = Empirical(atoms, weights)
    present = w > -np.inf
    logits = x @ eta + w
    g = special.logsumexp(logits[present]) if present.any() else -np.inf
    p = np.exp(logits - g) if present.any() else np.zeros(len(w))
    size = np.abs(x).max(initial=0)
    rounding = 1e-14 * (1 + np.abs(logits[present]).max(initial=0))  # of the logits, hence relative of p

    np.testing.assert_allclose(h.log_normalizer(query).item(), g, rtol=1e-14, atol=rounding)
    np.testing.assert_allclose(h.mean(query).detach(), p @ x, rtol=0, atol=10 * rounding * size)
    centred = x - p @ x
    fisher = h.fisher(query)
    np.testing.assert_allclose(
        fisher.detach(), centred.T @ (p[:, None] * centred), rtol=0, atol=40 * rounding * size**2
    )
    close(
        h.fisher_mv(query, query).detach(), (fisher @ query).detach(), max(1e-12, 1e-12 * size**2 * np.abs(eta).max())
    )
    assert (torch.linalg.eigvalsh(fisher.detach()) >= -1e-12 * (1 + size**2)).all()

    slopes = torch.autograd.grad(h.log_normalizer(query), [atoms, weights, query], create_graph=True)
    np.testing.assert_allclose(slopes[1].detach(), p, rtol=0, atol=10 * rounding)
    np.testing.assert_allclose(slopes[2].detach(), h.mean(query).detach(), rtol=0, atol=10 * rounding * size)
    mean_slopes = torch.autograd.grad(h.mean(query).sum(), [atoms, weights, query], create_graph=True)
    total = sum(s.sum() for s in [*slopes, *mean_slopes])
    curvatures = torch.autograd.grad(total, [atoms, weights, query], allow_unused=True, materialize_grads=True)
    assert all(s.isfinite().all() for s in [*slopes, *mean_slopes, *curvatures])
    for atom_slope in (slopes[0], mean_slopes[0], curvatures[0]):
        assert (atom_slope[~present] == 0).all()
