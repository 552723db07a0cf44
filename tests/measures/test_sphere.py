"""Sphere and Box against mpmath over the whole range of sizes and dimensions, at their edges, and through the link."""

import functools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import integrate

from cumulant import Box, Sphere, Status
from tests.cases import t

mp.mp.dps = 40
DIMS = [2, 3, 16, 384, 4096]
KAPPAS = [1e-8, 1e-5, 1e-3, 0.1, 1.0, 3.0, 30.0, 100.0, 1e3, 1e4, 1e5, 1e6]
each_dim = pytest.mark.parametrize("dim", DIMS)


@functools.cache
def oracle(dim: int, kappa: float) -> tuple[float, float]:
    """G = log ₀F₁(; d/2; κ²/4) and A_d = I_{d/2}(κ)/I_{d/2−1}(κ) to 40 digits, by their definitions."""
    k, nu = mp.mpf(kappa), mp.mpf(dim) / 2 - 1
    if k * k < nu + 1:  # the series, whose first terms a logarithm of Bessel functions would cancel
        terms = [mp.mpf(1)]
        while terms[-1] > mp.eps:
            n = len(terms)
            terms.append(terms[-1] * (k * k / 4) / (n * (nu + n)))
        f = mp.fsum(terms[1:])
        above = [mp.mpf(1)]
        while above[-1] > mp.eps:
            n = len(above)
            above.append(above[-1] * (k * k / 4) / (n * (nu + 1 + n)))
        return float(mp.log1p(f)), float(k / dim * mp.fsum(above) / (1 + f))
    low, high = mp.besseli(nu, k), mp.besseli(nu + 1, k)
    return float(mp.loggamma(nu + 1) + nu * mp.log(2 / k) + mp.log(low)), float(high / low)


def along(dim: int, lengths, dtype=torch.float64) -> torch.Tensor:
    """Vectors of given lengths in one fixed direction."""
    direction = torch.from_numpy(np.random.default_rng(dim).normal(size=dim))
    return (torch.as_tensor(lengths, dtype=torch.float64)[:, None] * direction / direction.norm()).to(dtype)


@each_dim
def test_log_normalizer_within_1e_10_of_mpmath(dim: int):
    expected = [oracle(dim, k)[0] for k in KAPPAS]
    np.testing.assert_allclose(Sphere(dim).log_normalizer(along(dim, KAPPAS)), expected, rtol=1e-10)


@each_dim
def test_mean_resultant_within_1e_10_of_mpmath(dim: int):
    eta, expected = along(dim, KAPPAS), [oracle(dim, k)[1] for k in KAPPAS]
    mean = Sphere(dim).mean(eta)
    np.testing.assert_allclose(mean.norm(dim=-1), expected, rtol=1e-10)
    np.testing.assert_allclose((mean * eta).sum(-1) / mean.norm(dim=-1), KAPPAS, rtol=1e-12)  # along η


@each_dim
def test_mean_is_the_gradient_of_g_at_every_size(dim: int):
    eta = along(dim, [0.0, *KAPPAS]).requires_grad_()
    (slope,) = torch.autograd.grad(Sphere(dim).log_normalizer(eta).sum(), eta)
    torch.testing.assert_close(slope, Sphere(dim).mean(eta).detach(), rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("dim", [2, 3, 16, 384])
def test_fisher_is_the_known_covariance_at_every_size(dim: int):
    """Across η the variance is A/κ, along η it is 1 − A² − (d−1)A/κ."""
    eta = along(dim, KAPPAS)
    fisher = Sphere(dim).fisher(eta)
    unit = eta / eta.norm(dim=-1, keepdim=True)
    across = torch.linalg.qr(torch.stack([unit[0], torch.eye(dim, dtype=eta.dtype)[0]], dim=-1))[0][:, 1]
    for f, kappa in zip(fisher, KAPPAS, strict=True):
        k, nu = mp.mpf(kappa), mp.mpf(dim) / 2 - 1
        a = mp.besseli(nu + 1, k) / mp.besseli(nu, k)
        np.testing.assert_allclose(across @ f @ across, float(a / k), rtol=1e-9)
        np.testing.assert_allclose(
            unit[0] @ f @ unit[0], float(1 - a * a - (dim - 1) * a / k), rtol=1e-11 + 4e-15 * kappa**2
        )
        np.testing.assert_allclose(Sphere(dim).fisher_mv(unit[0] * kappa, across), f @ across, rtol=1e-9, atol=1e-15)


@each_dim
@pytest.mark.parametrize("radius", [1.0, 0.25, 30.0])
def test_origin_is_exact(dim: int, radius: float):
    h, zero = Sphere(dim, radius), torch.zeros(dim, dtype=torch.float64, requires_grad=True)
    g = h.log_normalizer(zero)
    (slope,) = torch.autograd.grad(g, zero)
    assert g.item() == 0
    assert torch.equal(slope, torch.zeros(dim, dtype=slope.dtype))
    assert torch.equal(h.mean(zero).detach(), torch.zeros(dim, dtype=slope.dtype))
    v = torch.ones(dim, dtype=slope.dtype)
    torch.testing.assert_close(h.fisher_mv(zero.detach(), v), v * radius**2 / dim, rtol=1e-14, atol=0)
    if dim <= 16:
        expected = torch.eye(dim, dtype=slope.dtype) * radius**2 / dim
        torch.testing.assert_close(h.fisher(zero.detach()), expected, rtol=1e-14, atol=0)
        hessian = torch.func.hessian(h.log_normalizer)(zero.detach())
        torch.testing.assert_close(hessian, expected, rtol=1e-13, atol=1e-16)


@each_dim
def test_limits_of_small_and_large_concentration(dim: int):
    small = Sphere(dim).mean(along(dim, [1e-8])).norm()
    np.testing.assert_allclose(small, 1e-8 / dim, rtol=1e-14)
    kappa = 1e6 * dim
    large = Sphere(dim).mean(along(dim, [kappa])).norm()
    np.testing.assert_allclose(1 - large, (dim - 1) / (2 * kappa), rtol=1e-4)


@each_dim
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_overflows(dim: int, dtype: torch.dtype):
    eta = along(dim, [0.0, 1e-30, *KAPPAS, 1e8, 1e12], dtype)
    h = Sphere(dim)
    answers = [h.log_normalizer(eta), h.mean(eta), h.fisher_mv(eta, eta)]
    assert all(a.isfinite().all() and a.dtype == dtype for a in answers)
    assert (h.mean(eta).norm(dim=-1) <= 1 + 1e-6).all()


@each_dim
def test_float32_is_float64_rounded(dim: int):
    eta = along(dim, KAPPAS, torch.float32)
    for name in ("log_normalizer", "mean"):
        single, double = getattr(Sphere(dim), name)(eta), getattr(Sphere(dim), name)(eta.double())
        np.testing.assert_allclose(single, double, rtol=1e-4 if name == "log_normalizer" else 2e-6, atol=1e-30)


def test_radius_and_batches_of_radii_rescale():
    eta = along(3, [0.5, 2.0])
    radii = t([0.5, 1.0, 4.0])
    h = Sphere(3, radii)
    assert h.batch_shape == (3,)
    for r, g, m in zip(radii, h.log_normalizer(eta), h.mean(eta), strict=True):
        torch.testing.assert_close(g, Sphere(3).log_normalizer(r * eta), rtol=1e-14, atol=0)
        torch.testing.assert_close(m, r * Sphere(3).mean(r * eta), rtol=1e-14, atol=0)


# ---------------------------------------------------------------------- the link of the sphere

RESULTANTS = [1e-6, 1e-4, 1e-2, 0.1, 0.3, 0.5, 0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-5, 1 - 1e-6]


@each_dim
@pytest.mark.parametrize("radius", [1.0, 3.0])
def test_natural_round_trip_from_1e_6_to_1_minus_1e_6(dim: int, radius: float):
    h, mean = Sphere(dim, radius), radius * along(dim, RESULTANTS)
    found = h.natural(mean)
    assert found.converged.all()
    assert (found.steps <= 30).all()
    back = h.mean(found.value).norm(dim=-1) / radius
    np.testing.assert_allclose(back, RESULTANTS, rtol=1e-8)
    np.testing.assert_allclose(1 - back, 1 - np.array(RESULTANTS), rtol=1e-7)  # seen from the surface too


@each_dim
def test_natural_inverts_mean_in_kappa(dim: int):
    kappa = [1e-6, 1e-3, 1.0, 10.0, 100.0, 1e3]
    eta = along(dim, kappa)
    np.testing.assert_allclose(Sphere(dim).natural(Sphere(dim).mean(eta)).value, eta, rtol=1e-6)


def test_natural_of_the_centre_is_zero():
    found = Sphere(5).natural(torch.zeros(5, dtype=torch.float64))
    assert found.converged
    assert torch.equal(found.value, torch.zeros(5, dtype=torch.float64))
    assert Sphere(5).conjugate(torch.zeros(5, dtype=torch.float64)) == 0


@pytest.mark.parametrize("dim", [2, 3, 16, 384])
def test_on_the_sphere_is_boundary_and_beyond_is_outside(dim: int):
    lengths = [2.0, 2.0 * (1 + 1e-3), 2.02, 20.0]
    h, mean = Sphere(dim, 2.0), along(dim, lengths)
    assert h.natural(mean).status.tolist() == [Status.BOUNDARY, *[Status.OUTSIDE] * 3]
    assert (h.conjugate(mean) == torch.inf).all()  # a point of a continuous sphere carries no mass


def test_pair_of_points_has_log_two_at_its_ends():
    h = Sphere(1, 2.0)
    ends = t([[-2.0], [2.0]])
    assert (h.natural(ends).status == Status.BOUNDARY).all()
    np.testing.assert_allclose(h.conjugate(ends), math.log(2), rtol=1e-12)
    assert (h.conjugate(t([[-2.1], [2.1]])) == torch.inf).all()


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_conjugate_is_the_supremum(dim: int):
    h, lengths = Sphere(dim), [0.0, 0.2, 0.7, 0.95]
    for r, g_star in zip(lengths, h.conjugate(along(dim, lengths)), strict=True):
        grid = np.concatenate([[0.0], np.geomspace(1e-3, 200 * dim, 4000)])
        values = r * grid - h.log_normalizer(along(dim, grid)).numpy()
        assert values.max() <= g_star + 1e-12
        np.testing.assert_allclose(g_star, values.max(), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- boxes

WIDTHS = [1e-9, 1e-6, 1e-3, 0.1, 1.0, 5.0, 30.0, 700.0, 1e4, 1e5]


def interval_oracle(low: float, high: float, eta: float) -> tuple[float, float, float]:
    """G, mean and variance of the tilted uniform law on an interval, by the integral in closed form at 60 digits."""
    with mp.workdps(60):
        a, b, e = mp.mpf(low), mp.mpf(high), mp.mpf(eta)
        y = e * (b - a) / 2
        g = e * (a + b) / 2 + mp.log(mp.sinh(y) / y)
        mean = (a + b) / 2 + (b - a) / 2 * (mp.coth(y) - 1 / y)
        variance = ((b - a) / 2) ** 2 * (1 / y**2 - 1 / mp.sinh(y) ** 2)
        return float(g), float(mean), float(variance)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (-3.0, 0.5), (2.0, 2.25)])
def test_box_within_1e_10_of_mpmath(low: float, high: float, sign: float):
    eta = sign * np.array(WIDTHS) / (high - low)
    expected = np.array([interval_oracle(low, high, e) for e in eta])
    h, q = Box(t([low]), t([high])), t(eta)[:, None]
    np.testing.assert_allclose(h.log_normalizer(q), expected[:, 0], rtol=1e-10)
    np.testing.assert_allclose(h.mean(q)[:, 0], expected[:, 1], rtol=1e-10, atol=1e-12)
    for got, variance, width in zip(h.fisher(q)[:, 0, 0], expected[:, 2], WIDTHS, strict=True):
        np.testing.assert_allclose(got, variance, rtol=1e-12 + 1e-15 * width**2)  # two terms of size 1/y leave 1/y²


def test_box_mean_near_zero_keeps_relative_accuracy():
    eta = np.array([1e-9, 1e-7, 1e-5])
    mean = Box(t([-1.0]), t([1.0])).mean(t(eta)[:, None])[:, 0]
    np.testing.assert_allclose(mean, eta / 3, rtol=1e-10)


def test_interval_oracle_is_the_integral():
    for eta in (-3.0, 0.4, 12.0):
        z = integrate.quad(lambda x, e=eta: math.exp(e * x), -1, 2, epsabs=1e-14)[0] / 3
        np.testing.assert_allclose(interval_oracle(-1.0, 2.0, eta)[0], math.log(z), rtol=1e-12)


def test_box_at_the_origin_is_the_uniform_law():
    h = Box(t([-1.0, 2.0]), t([3.0, 2.5]))
    zero = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(h.log_normalizer(zero), zero)
    assert h.log_normalizer(zero) == 0
    np.testing.assert_allclose(slope, [1.0, 2.25], rtol=1e-15)
    np.testing.assert_allclose(h.mean(zero).detach(), [1.0, 2.25], rtol=1e-15)
    np.testing.assert_allclose(h.fisher(zero).detach(), np.diag([16 / 12, 0.25 / 12]), rtol=1e-14)


def test_box_coordinates_are_independent():
    low, high, eta = [-1.0, 0.0, 2.0], [1.0, 3.0, 2.0], [0.3, -20.0, 5.0]
    parts = [interval_oracle(*v)[0] for v in zip(low[:2], high[:2], eta[:2], strict=True)]
    h = Box(t(low), t(high))
    np.testing.assert_allclose(h.log_normalizer(t(eta)), sum(parts) + 2.0 * 5.0, rtol=1e-12)
    assert h.mean(t(eta))[2] == 2  # an edge of length 0 is a point
    assert h.fisher(t(eta))[2, 2] == 0


@pytest.mark.parametrize("width", [1.0, 1e-3, 1e3])
def test_box_natural_round_trip(width: float):
    h = Box(t([2.0]), t([2.0 + width]))
    fraction = np.array([1e-6, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.99, 1 - 1e-6])
    mean = t(2 + width * fraction)[:, None]
    found = h.natural(mean)
    assert found.converged.all()
    assert (found.steps <= 30).all()
    np.testing.assert_allclose(h.mean(found.value), mean, rtol=1e-8 * min(1, width))
    assert found.value[4].abs() * width < 1e-7


def test_box_faces_are_boundary_and_beyond_is_outside():
    h = Box(t([0.0, 0.0, 1.0]), t([1.0, 2.0, 1.0]))
    points = t(
        [[0.5, 1.0, 1.0], [0.5, 2.0, 1.0], [0.0, 0.0, 1.0], [0.5, 2.02, 1.0], [-0.01, 1.0, 1.0], [0.5, 1.0, 1.1]]
    )
    expected = [Status.CONVERGED, Status.BOUNDARY, Status.BOUNDARY, Status.OUTSIDE, Status.OUTSIDE, Status.OUTSIDE]
    assert h.natural(points).status.tolist() == expected
    conjugate = h.conjugate(points)
    assert conjugate[0].abs() < 1e-12
    assert (conjugate[1:] == torch.inf).all()


def test_box_float32_and_huge_queries_stay_finite():
    h = Box(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 1.0]))
    eta = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1e5, -1e5], [-1e12, 1e12]])
    for answer in (h.log_normalizer(eta), h.mean(eta), h.fisher(eta)):
        assert answer.isfinite().all()
        assert answer.dtype == torch.float32
