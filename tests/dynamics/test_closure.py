"""Gaussian laws as states, which is exact; and what a finite number of keys does to them."""

import math

import pytest
import torch
from scipy import integrate
from torch.testing import assert_close

from cumulant import Gaussian, moments
from cumulant.dynamics import Ascend, Halt, NormalizationError, Whiten, run
from cumulant.dynamics.closure import GaussianFlow, blow_up_time, covariance_flow
from cumulant.dynamics.finite_sample import (
    condensation_scale,
    condensed,
    effective_sample_size,
    fluctuation,
    saturation,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(d, seed=0, low=0.3, high=2.0):
    q = torch.linalg.qr(normal(d, d, seed=seed)).Q
    return (q * torch.linspace(low, high, d, dtype=torch.float64)) @ q.T


def eye(d):
    return torch.eye(d, dtype=torch.float64)


def gaussian(d=3, seed=0):
    return Gaussian(normal(d, seed=seed), spd(d, seed=seed + 1))


# ---------------------------------------------------------------------- Gaussians


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_step_is_the_mean_field_of_the_particle_map(sign, fixed):
    law, metric = gaussian(), spd(3, seed=5)
    keys = gaussian(seed=7) if fixed else None
    after, how = GaussianFlow(step_size=0.3, scale=0.6, sign=sign, metric=metric, keys=keys).step(law)
    particles = normal(20, 3, seed=9)
    moved = Ascend(step=0.3, scale=0.6, sign=sign, metric=metric, keys=keys or law)(particles)
    assert_close(particles @ how.matrix.T + how.offset, moved, rtol=0, atol=1e-13)
    assert_close(after.loc, how.matrix @ law.loc + how.offset, rtol=0, atol=1e-13)
    assert_close(after.covariance, how.matrix @ law.covariance @ how.matrix.T, rtol=0, atol=1e-13)
    assert_close(how.log_volume, torch.linalg.slogdet(how.matrix).logabsdet, rtol=0, atol=1e-13)


def test_moments_of_sampled_particles_follow_the_law():
    law, count = gaussian(2), 400_000
    after, _ = GaussianFlow(step_size=0.5, scale=0.4).step(law)
    start = law.sample(torch.zeros(2, dtype=torch.float64), count, generator=torch.Generator().manual_seed(0))
    moved = Ascend(step=0.5, scale=0.4, keys=law)(start)
    error = (after.covariance.diagonal() / count).sqrt()
    assert ((moved.mean(0) - after.loc).abs() / error).max() < 4.5
    spread = moved.T.cov()
    scale = after.covariance.diagonal()
    error = ((after.covariance.square() + scale[:, None] * scale) / count).sqrt()
    assert ((spread - after.covariance).abs() / error).max() < 4.5


def test_theorem_one_is_a_fixed_point():
    sigma, mu = spd(3), normal(3, seed=1)
    inverse = torch.linalg.inv(sigma)
    balance = Gaussian(inverse @ mu, (inverse + inverse.T) / 2)
    free, how = GaussianFlow(key_map=sigma).step(balance)
    assert_close(free.loc, inverse @ mu + 2 * mu, rtol=0, atol=1e-12)
    assert_close(free.covariance, inverse + 2 * eye(3) + sigma, rtol=0, atol=1e-12)
    assert_close(how.log_volume, torch.linalg.slogdet(eye(3) + sigma).logabsdet, rtol=0, atol=1e-12)
    for dynamics in (
        GaussianFlow(key_map=sigma, renormalize=balance),
        GaussianFlow(keys=Gaussian(mu, sigma), renormalize=balance),
    ):
        law, how = dynamics.step(dynamics.init(balance))
        assert law is balance
        assert_close(how.matrix, eye(3), rtol=0, atol=1e-10)  # the identity on every particle
        assert_close(how.offset, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)
        found = run(dynamics, balance, 5, tol=0.0)
        assert found.halt == Halt.CONVERGED


def test_any_gaussian_and_any_linear_keys_are_an_equilibrium():
    law, keys, values = gaussian(), normal(3, 3, seed=3), normal(3, 3, seed=4) / 10
    after, how = GaussianFlow(key_map=keys, metric=values, renormalize=law).step(law)
    assert_close(how.matrix @ law.covariance @ how.matrix.T, law.covariance, rtol=0, atol=1e-10)
    assert_close(how.matrix @ law.loc + how.offset, law.loc, rtol=0, atol=1e-10)
    assert after is law


def test_renormalised_particles_move_as_whitening_moves_them():
    law, target = gaussian(2), gaussian(2, seed=4)
    dynamics = GaussianFlow(step_size=0.7, scale=0.5, renormalize=target)
    _, how = dynamics.step(law)
    moved = Ascend(step=0.7, scale=0.5, keys=law)(normal(9, 2, seed=6))
    free, _ = GaussianFlow(step_size=0.7, scale=0.5).step(law)
    white = Whiten(mean=target.loc, covariance=target.covariance)(moved, (free.loc, free.covariance))
    assert_close(normal(9, 2, seed=6) @ how.matrix.T + how.offset, white, rtol=0, atol=1e-12)
    standard = GaussianFlow(renormalize=True).init(law)
    assert_close(standard.covariance, eye(2), rtol=0, atol=0)


def test_batches_of_laws_step_apart():
    loc, covariance = normal(4, 2), torch.stack([spd(2, seed=k) for k in range(4)])
    dynamics = GaussianFlow(step_size=0.3, renormalize=True)
    after, how = dynamics.step(Gaussian(loc, covariance))
    for k in range(4):
        alone, one = dynamics.step(Gaussian(loc[k], covariance[k]))
        assert_close(how.matrix[k], one.matrix, rtol=0, atol=1e-14)
        assert_close(how.offset[k], one.offset, rtol=0, atol=1e-14)
        assert_close(after.covariance.expand(4, 2, 2)[k], alone.covariance, rtol=0, atol=0)


def test_without_a_norm_a_run_of_laws_diverges_with_a_status():
    found = run(GaussianFlow(), gaussian(2), 50, readouts={"trace": lambda law: law.covariance.diagonal().sum()})
    assert found.halt == Halt.DIVERGED
    assert (found.readings["trace"].diff() > 0).all()
    assert len(found.times) < 20
    beyond = run(GaussianFlow(), gaussian(2), 50, bound=math.inf)
    assert beyond.halt == Halt.DIVERGED
    assert "finite moments" in beyond.reason


def test_a_flat_law_is_refused_by_its_rank():
    flat = Gaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, 0.0])))
    with pytest.raises(NormalizationError, match=r"GaussianFlow: expected a covariance of full rank d=2, got rank 1"):
        GaussianFlow(renormalize=True).init(flat)
    # a descent with γs = 1/λ sends everything along that axis to one point
    found = run(GaussianFlow(sign=-1, renormalize=True), Gaussian(torch.zeros(2), torch.eye(2)), 3)
    assert found.halt == Halt.COLLAPSED
    assert "got rank 0" in found.reason


# ---------------------------------------------------------------------- continuous time


@pytest.mark.parametrize(("scale", "sign"), [(1.0, 1), (0.6, 1), (1.0, -1), (-0.5, 1)])
def test_the_covariance_solves_its_equation(scale, sign):
    law = gaussian()
    end = min(blow_up_time(law.covariance, scale=scale, sign=sign).item(), 2.0)

    def slope(_, y):
        c = y.reshape(3, 3)
        return (2 * sign * scale * c @ c).ravel()

    start = law.covariance.numpy().ravel()
    for share in (0.3, 0.9):
        run_ = integrate.solve_ivp(slope, (0, share * end), start, rtol=1e-12, atol=1e-13, method="DOP853")
        expected = torch.from_numpy(run_.y[:, -1].reshape(3, 3).copy())
        assert_close(
            covariance_flow(law.covariance, share * end, scale=scale, sign=sign), expected, rtol=1e-9, atol=1e-10
        )


def test_the_closure_is_infinite_at_its_time():
    c0 = spd(3)
    end = blow_up_time(c0)
    assert end.item() == pytest.approx(1 / 4)
    times = torch.stack([0 * end, 0.9 * end, 1.1 * end])
    found = covariance_flow(c0, times)
    assert_close(found[0], c0, rtol=0, atol=1e-14)
    assert_close(found[1], torch.linalg.inv(torch.linalg.inv(c0) - 1.8 * end * eye(3)), rtol=1e-10, atol=0)
    assert found[2].isinf().all()
    assert blow_up_time(c0, sign=-1).item() == math.inf
    assert blow_up_time(torch.zeros(2, 1, 1)).tolist() == [math.inf] * 2
    flat = torch.diag(torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert_close(covariance_flow(flat, 0.5), torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)))
    assert covariance_flow(torch.stack([flat, flat / 2]), times).shape == (3, 2, 2, 2)


def test_small_steps_of_the_law_approach_the_flow():
    law, t = Gaussian(normal(2), spd(2)), 0.1
    errors = []
    for steps in (40, 80):
        found = run(GaussianFlow(step_size=t / steps), law, steps).state
        errors.append((found.covariance - covariance_flow(law.covariance, t)).abs().max().item())
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)


# ---------------------------------------------------------------------- finitely many keys


def test_fluctuation_of_attention_over_a_sample():
    query, covariance, n = torch.tensor([0.8, 0.5, -0.3], dtype=torch.float64), eye(3), 2000
    keys = normal(600, n, 3)
    found = moments(query.expand(600, 1, 3), keys, statistics=("mean", "effective_atoms"))
    predicted = fluctuation(query, covariance, n)
    assert ((found.mean[:, 0].T.cov() - predicted).abs().max() / predicted.abs().max()) < 0.25
    ess = effective_sample_size(query, covariance, n).item()
    assert ess == pytest.approx(n * math.exp(-0.98))
    assert found.effective_atoms.mean().item() == pytest.approx(ess, rel=0.1)


def test_fluctuation_of_many_queries_and_laws():
    eta, covariance = normal(2, 5, 3), torch.stack([spd(3), spd(3, seed=1)])
    found = fluctuation(eta, covariance, 100)
    for b in range(2):
        for q in range(5):
            push = covariance[b] @ eta[b, q]
            expected = torch.exp(eta[b, q] @ push) * (covariance[b] + torch.outer(push, push)) / 100
            assert_close(found[b, q], expected, rtol=1e-12, atol=0)
    assert effective_sample_size(eta, covariance, 100).shape == (2, 5)
    far = fluctuation(torch.tensor([100.0, 0.0]), torch.eye(2), 10)
    assert far[0, 0] == far[1, 1] == torch.inf
    assert far[0, 1] == 0


def test_condensation():
    assert condensation_scale(1) == 0
    n = 10_000
    scale = condensation_scale(n)
    assert scale == pytest.approx(math.sqrt(2 * math.log(n)))
    r = torch.tensor([0.25, 0.5, 0.999, 1.001, 2.0, 4.0], dtype=torch.float64)
    eta = (r * scale)[:, None]
    assert condensed(eta, eye(1), n).tolist() == [False] * 3 + [True] * 3
    keys = normal(16, n, 1, seed=3)
    ratio = (moments(eta.expand(16, 6, 1), keys, statistics=("mean",)).mean / eta).mean(0)[:, 0]
    assert_close(saturation(r), torch.tensor([1, 1, 1, 1 / 1.001, 0.5, 0.25], dtype=torch.float64))
    assert ((ratio - saturation(r)).abs()[:2] < 0.1).all()
    assert ((ratio / saturation(r))[4:] > 0.7).all()
    assert ((ratio / saturation(r))[4:] < 1.1).all()
    assert saturation(2).item() == 0.5


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GaussianFlow(step_size=-1.0), ValueError, r"GaussianFlow.step_size: expected a number ≥ 0, got -1.0"),
        (lambda: GaussianFlow(scale=math.nan), ValueError, r"GaussianFlow.scale: expected a finite number"),
        (lambda: GaussianFlow(sign=0), ValueError, r"GaussianFlow.sign: expected \+1 or -1, got 0"),
        (
            lambda: GaussianFlow(renormalize="zca"),
            TypeError,
            r"renormalize: expected True, False or a Gaussian, got str",
        ),
        (lambda: GaussianFlow(keys=torch.eye(2)), TypeError, r"GaussianFlow.keys: expected a Gaussian or None"),
        (
            lambda: GaussianFlow(keys=gaussian(), key_map=eye(3)),
            ValueError,
            r"GaussianFlow.key_map: expected None with fixed keys",
        ),
        (lambda: GaussianFlow(key_map=eye(2)).step(gaussian()), ValueError, r"key_map: expected shape \(d=3, d=3\)"),
        (
            lambda: GaussianFlow(metric=eye(3)).step(gaussian(2)),
            ValueError,
            r"GaussianFlow.metric: expected shape \(d=2, d=2\)",
        ),
        (lambda: GaussianFlow().init(torch.eye(2)), TypeError, r"GaussianFlow.init: expected a Gaussian, got Tensor"),
        (lambda: covariance_flow(eye(2), math.inf), ValueError, r"covariance_flow.t: expected finite values"),
        (lambda: fluctuation(torch.ones(1), torch.eye(1), 0), ValueError, r"fluctuation.n: expected at least one key"),
        (lambda: condensation_scale(0), ValueError, r"condensation_scale.n: expected at least one key"),
        (lambda: saturation(-1.0), ValueError, r"saturation.r: expected lengths ≥ 0"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
