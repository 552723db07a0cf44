"""Information geometry against brute force over atoms: the order of divergences, two charts, and the entropy dual."""

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import Tensor

from cumulant import Empirical, Gaussian, Measure, Sphere, Status
from cumulant import geometry as geo
from tests.cases import CASES, COV3, KEYS, LOG_H, MU3, Case, t
from tests.compare import close

RNG = np.random.default_rng(99)
A, B, C = (t(RNG.normal(size=(6, 3))) for _ in range(3))


def keys() -> Empirical:
    return Empirical(t(KEYS), t(LOG_H))


def law(eta: Tensor) -> np.ndarray:
    """p_η over the atoms, one row per query."""
    return special.softmax(eta.numpy() @ KEYS.T + LOG_H, axis=-1)


def brute_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return special.rel_entr(p, q).sum(-1)


# ---------------------------------------------------------------------- divergences and their order


def test_kl_is_the_sum_over_atoms_in_this_order():
    close(geo.kl(keys(), A, B), brute_kl(law(A), law(B)))
    close(keys().kl(B, A), brute_kl(law(B), law(A)))
    assert (np.abs(brute_kl(law(A), law(B)) - brute_kl(law(B), law(A))) > 1e-3).all()  # the order matters here


def test_bregman_swaps_its_arguments():
    h = keys()
    by_hand = h.log_normalizer(A) - h.log_normalizer(B) - (h.mean(B) * (A - B)).sum(-1)
    close(geo.bregman(h, A, B), by_hand)
    close(geo.bregman(h, A, B), brute_kl(law(B), law(A)))


def test_dual_bregman_keeps_the_order():
    h = keys()
    mean_a, mean_b = h.mean(A), h.mean(B)
    by_hand = h.conjugate(mean_a) - h.conjugate(mean_b) - (B * (mean_a - mean_b)).sum(-1)
    close(geo.dual_bregman(h, mean_a, mean_b), by_hand, 1e-9)
    close(geo.dual_bregman(h, mean_a, mean_b), brute_kl(law(A), law(B)), 1e-9)
    close(geo.dual_bregman(h, mean_a, mean_b), geo.bregman(h, B, A), 1e-9)


def test_fenchel_young_gap_is_a_divergence():
    h = keys()
    close(geo.fenchel_young(h, A, h.mean(B)), brute_kl(law(B), law(A)), 1e-9)
    close(geo.fenchel_young(h, A, h.mean(A)), 0.0, 1e-9)
    assert (geo.fenchel_young(h, A, t(KEYS[:6])) >= 0).all()
    assert (geo.fenchel_young(h, A, t(100 * KEYS[:6])) == torch.inf).all()


def test_conjugate_is_the_smallest_divergence_among_laws_of_that_mean():
    h = keys()
    for mean in h.mean(A[:3]).numpy():
        rows = [{"type": "eq", "fun": lambda p, m=mean: p @ KEYS - m}, {"type": "eq", "fun": lambda p: p.sum() - 1}]
        best = optimize.minimize(
            lambda p: special.rel_entr(p, np.exp(LOG_H)).sum(),
            np.full(7, 1 / 7),
            jac=lambda p: np.log(np.maximum(p, 1e-300)) - LOG_H + 1,
            bounds=[(0, 1)] * 7,
            constraints=rows,
            options={"ftol": 1e-14, "maxiter": 500},
        )
        close(h.conjugate(t(mean)), best.fun, 1e-6)


def test_gaussian_divergence_is_the_textbook_one():
    h = Gaussian(t(MU3), t(COV3))
    gap = (A - B).numpy()
    close(geo.kl(h, A, B), np.einsum("qi,ij,qj->q", gap, COV3, gap) / 2)
    close(geo.bregman(h, A, B), geo.bregman(h, B, A))  # the one family where the order does not matter


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_divergences_agree_with_each_other_for_every_measure(case: Case):
    h, eta = case.build(), case.queries(4)
    other = eta.flip(0)
    kl = geo.kl(h, eta, other)
    close(geo.bregman(h, other, eta), kl)
    close(geo.dual_bregman(h, h.mean(eta), h.mean(other)), kl, 1e-7)
    close(geo.fenchel_young(h, other, h.mean(eta)), kl, 1e-7)


def test_kl_of_near_parameters_is_half_the_fisher_metric():
    h, step = keys(), 1e-4 * C
    close(geo.kl(h, A, A + step) / 1e-8, geo.inner(h, A, C, C) / 2, 1e-3)


def test_inner_product_is_the_covariance():
    h = keys()
    expected = torch.einsum("qi,qij,qj->q", B, h.fisher(A), C)
    close(geo.inner(h, A, B, C), expected)
    close(geo.inner(h, A, B, C), geo.inner(h, A, C, B))


# ---------------------------------------------------------------------- two charts


def test_charts_are_inverse_and_their_jacobians_too():
    h = keys()
    found = geo.to_natural(h, geo.to_mean(h, A))
    assert found.converged.all()
    close(found.value, A, 1e-8)
    mean = h.mean(A[0])
    forward = torch.func.jacrev(h.mean)(A[0])
    tracked = mean.clone().requires_grad_()
    eta = geo.to_natural(h, tracked).value
    backward = torch.stack([torch.autograd.grad(e, tracked, retain_graph=True)[0] for e in eta])
    close(backward @ forward, np.eye(3), 1e-8)  # dμ = C dη


@pytest.mark.parametrize("build", [keys, lambda: Gaussian(t(MU3), t(COV3)), lambda: Sphere(3)])
def test_natural_gradient_is_the_gradient_in_mean_coordinates(build):
    h: Measure = build()
    eta = 0.4 * A
    loss = lambda e: (e.sin() + e * e).sum()  # noqa: E731
    gradient = torch.func.grad(loss)(eta)
    mean = h.mean(eta).detach().requires_grad_()
    (expected,) = torch.autograd.grad(loss(h.natural(mean).value), mean)
    close(geo.natural_gradient(h, eta, gradient), expected, 1e-6)


def test_natural_gradient_of_g_is_not_the_attention_step():
    h = keys()
    direction = geo.natural_gradient(h, A, h.mean(A))  # C⁻¹ m
    close(h.fisher_mv(A, direction), h.mean(A), 1e-9)
    assert (direction - h.mean(A)).abs().max() > 0.1


def test_natural_gradient_is_zero_along_directions_without_atoms():
    flat = Empirical(t(KEYS * [1.0, 1.0, 0.0]))
    direction = geo.natural_gradient(flat, A, B)
    assert (direction[:, 2].abs() < 1e-12).all()
    inverse = np.linalg.pinv(flat.fisher(A).numpy(), rcond=1e-10)
    close(direction, np.einsum("qij,qj->qi", inverse, B.numpy()), 1e-8)


# ---------------------------------------------------------------------- geodesics


def test_e_geodesic_is_straight_in_natural_coordinates():
    assert torch.equal(geo.e_geodesic(A, B, 0.0), A)
    close(geo.e_geodesic(A, B, 1.0), B, 1e-15)
    close(geo.e_geodesic(A, B, 0.3), 0.7 * A + 0.3 * B, 1e-15)
    tilted = law(A) ** 0.7 * law(B) ** 0.3
    close(law(geo.e_geodesic(A, B, 0.3)), tilted / tilted.sum(-1, keepdims=True))


def test_m_geodesic_is_straight_in_mean_coordinates():
    h = keys()
    for s, end in ((0.0, A), (1.0, B)):
        found = geo.m_geodesic(h, A, B, s)
        assert found.converged.all()
        close(found.value, end, 1e-7)
    middle = geo.m_geodesic(h, A, B, 0.3)
    close(h.mean(middle.value), 0.7 * h.mean(A) + 0.3 * h.mean(B), 1e-9)


def test_geodesics_take_a_tensor_of_times():
    s = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    path = geo.e_geodesic(A[0], B[0], s)
    assert path.shape == (5, 3)
    found = geo.m_geodesic(keys(), A[0], B[0], s)
    means = keys().mean(found.value)
    close(means[1:] - means[:-1], (means[1] - means[0]).expand(4, 3), 1e-8)


def test_pythagoras_holds_where_an_m_geodesic_meets_an_e_geodesic_at_a_right_angle():
    """KL(P‖R) = KL(P‖Q) + KL(Q‖R) if ⟨μ_P − μ_Q, η_R − η_Q⟩ = 0."""
    h, p, q = keys(), A, B
    leg = h.mean(p) - h.mean(q)
    across = C - (C * leg).sum(-1, keepdim=True) / leg.square().sum(-1, keepdim=True) * leg
    r = q + across
    close(h.kl(p, r), h.kl(p, q) + h.kl(q, r))
    assert (h.kl(p, q + C) - h.kl(p, q) - h.kl(q, q + C)).abs().max() > 1e-3  # not without the angle


def test_three_point_identity():
    h = keys()
    angle = ((h.mean(A) - h.mean(B)) * (C - B)).sum(-1)
    close(h.kl(A, C), h.kl(A, B) + h.kl(B, C) - angle)


# ---------------------------------------------------------------------- the maximum-entropy dual


def entropy_problem(seed: int, n: int = 6, d: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, d))
    return rows - rows.mean(0), rng.normal(size=n)


@pytest.mark.parametrize("seed", range(4))
def test_maximum_entropy_agrees_with_bfgs_and_slsqp(seed: int):
    a, b = entropy_problem(seed)
    found = geo.maximum_entropy(t(a), t(b))
    primal = optimize.minimize(
        lambda x: special.logsumexp(a @ x + b), np.zeros(3), jac=lambda x: special.softmax(a @ x + b) @ a, tol=1e-12
    )
    dual = optimize.minimize(
        lambda v: -(b @ v + special.entr(v).sum()),
        np.full(6, 1 / 6),
        jac=lambda v: -b + np.log(np.maximum(v, 1e-300)) + 1,
        bounds=[(0, 1)] * 6,
        constraints=[{"type": "eq", "fun": lambda v: v.sum() - 1}, {"type": "eq", "fun": lambda v: a.T @ v}],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.status == Status.CONVERGED
    close(found.primal, primal.fun, 1e-10)
    close(found.dual, -dual.fun, 1e-7)
    close(found.primal, found.dual, 1e-11)  # strong duality
    close(found.x, primal.x, 1e-5)
    close(found.weights, dual.x, 1e-4)
    close(found.weights, special.softmax(a @ primal.x + b), 1e-5)
    assert found.kkt_residual < 1e-11


def test_maximum_entropy_without_offsets_or_with_a_wanted_mean():
    a, _ = entropy_problem(7)
    plain = geo.maximum_entropy(t(a))
    close(plain.weights, np.full(6, 1 / 6), 1e-10)  # centred rows: uniform is feasible
    close(plain.dual, np.log(6), 1e-12)
    wanted = t(np.random.default_rng(1).dirichlet(np.ones(6)) @ a)
    found = geo.maximum_entropy(t(a) - wanted)
    close(found.weights @ t(a), wanted, 1e-10)
    close(found.dual, -Empirical(t(a)).conjugate(wanted), 1e-10)


def test_maximum_entropy_at_a_wanted_mean():
    a, b = entropy_problem(7)
    wanted = t(np.random.default_rng(1).dirichlet(np.ones(6), size=3) @ a)
    found = geo.maximum_entropy(t(a), t(b), mean=wanted)  # one set of rows, three means
    assert (found.status == Status.CONVERGED).all()
    assert (found.kkt_residual < 1e-11).all()
    close(found.weights @ t(a), wanted, 1e-10)
    close(found.dual, -Empirical(t(a), t(b)).conjugate(wanted), 1e-10)
    for i in range(3):
        by_hand = geo.maximum_entropy(t(a) - wanted[i], t(b))
        for mine, theirs in zip(found, by_hand, strict=True):
            close(mine[i], theirs, 1e-10)
    stacked = geo.maximum_entropy(t(np.stack([a, a])), mean=wanted[0])
    close(stacked.weights @ t(a), wanted[0].expand(2, 3), 1e-10)
    assert geo.maximum_entropy(t(a), mean=t([50.0, 0.0, 0.0])).status == Status.OUTSIDE


def test_maximum_entropy_refuses_a_mean_of_other_shape():
    a, _ = entropy_problem(7)
    with pytest.raises(ValueError, match=r"maximum_entropy\.mean: expected shape \(\*batch, d=3\), got \(2\)"):
        geo.maximum_entropy(t(a), mean=t([0.0, 0.0]))
    with pytest.raises(TypeError, match=r"maximum_entropy\.mean: expected dtype torch\.float64"):
        geo.maximum_entropy(t(a), mean=torch.zeros(3))


def test_maximum_entropy_without_rows_is_infeasible():
    a, b = entropy_problem(7)
    for found in (geo.maximum_entropy(t(a)[:0]), geo.maximum_entropy(t(a), t(np.full(6, -np.inf)))):
        assert found.status == Status.OUTSIDE
        assert found.primal == found.dual == -torch.inf
        assert (found.weights == 0).all()
        assert (found.x == 0).all()
        assert found.kkt_residual == 1
    offsets = torch.cat([t(b), t([-np.inf])]).requires_grad_()
    dual = geo.maximum_entropy(torch.cat([t(a), t(a[:1])]), offsets).dual
    (gradient,) = torch.autograd.grad(dual, offsets)
    assert gradient.isfinite().all()
    assert gradient[-1] == 0


def test_maximum_entropy_is_batched_and_masks():
    problems = [entropy_problem(s) for s in range(3)]
    a, b = t(np.stack([p[0] for p in problems])), t(np.stack([p[1] for p in problems]))
    found = geo.maximum_entropy(a, b)
    assert found.x.shape == (3, 3)
    assert found.weights.shape == (3, 6)
    for i in range(3):
        single = geo.maximum_entropy(a[i], b[i])
        close(found.x[i], single.x, 1e-10)
        close(found.kkt_residual[i], 0.0, 1e-11)
    extra = torch.cat([a[0], 9 + torch.zeros(1, 3, dtype=a.dtype)])
    masked = geo.maximum_entropy(extra, torch.cat([b[0], t([-np.inf])]))
    close(masked.weights[:6], found.weights[0], 1e-10)
    assert masked.weights[6] == 0
    close(masked.dual, found.dual[0], 1e-10)


def test_zero_outside_or_on_the_hull_is_said():
    a, b = entropy_problem(2)
    assert geo.maximum_entropy(t(a + 10), t(b)).status == Status.OUTSIDE
    square = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    vertex = geo.maximum_entropy(t(square))
    assert vertex.status == Status.BOUNDARY
    close(vertex.weights, [1, 0, 0, 0], 1e-7)
    close(vertex.primal, 0.0, 1e-7)
    edge = geo.maximum_entropy(t(square - [0.25, 0.0]))
    assert edge.status == Status.BOUNDARY
    close(edge.weights, [0.75, 0.25, 0, 0], 1e-7)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, v: (x + 0.1, v),
        lambda x, v: (x, v.roll(1)),
        lambda x, v: (x, 1.01 * v),
        lambda x, v: (x, torch.cat([v[:1] + v[1:2] + 0.1, -torch.full_like(v[:1], 0.1), v[2:]])),
        lambda x, v: (torch.zeros_like(x), torch.full_like(v, 1 / 6)),
    ],
    ids=["x moved", "weights permuted", "sum 1.01", "negative weight", "uniform"],
)
def test_kkt_residual_detects_a_wrong_pair(spoil):
    a, b = entropy_problem(3)
    found = geo.maximum_entropy(t(a), t(b))
    assert geo.kkt_residual(t(a), t(b), found.x, found.weights) < 1e-11
    assert geo.kkt_residual(t(a), t(b), *spoil(found.x, found.weights)) > 5e-3


def test_kkt_residual_bounds_the_duality_gap():
    a, b = entropy_problem(4)
    found = geo.maximum_entropy(t(a), t(b))
    for size in (1e-2, 1e-4, 1e-6):
        x = found.x + size
        weights = torch.softmax(t(a) @ x + t(b), -1)
        gap = torch.logsumexp(t(a) @ x + t(b), -1) - found.dual
        assert 0 <= gap <= 10 * geo.kkt_residual(t(a), t(b), x, weights)


def test_dual_bregman_outside_the_hull_says_so():
    h = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    inside, outside = (torch.tensor([x], dtype=torch.float64) for x in (0.25, 2.0))
    assert geo.dual_bregman(h, outside, inside) == torch.inf
    with pytest.raises(ValueError, match="inside the hull"):
        geo.dual_bregman(h, inside, outside)
