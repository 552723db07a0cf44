"""Continuous time: known answers, monotone energy, stiffness, and what happens where no solution goes on."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy import integrate
from scipy.linalg import expm
from scipy.special import exp1
from torch.testing import assert_close

from cumulant import Empirical, Gaussian
from cumulant.dynamics.flow import flow, orthogonal_cosine, velocity

flow_module = sys.modules["cumulant.dynamics.flow"]

# n, β, SA: the cosine at t = 1 and t = 2 from an orthogonal start
KNOWN = {
    (2, 0.0, True): (0.7615941560, 0.9640275801),
    (4, 1.0, True): (0.4794867822, 0.8771311725),
    (4, 1.0, False): (0.8320878765, 0.9989927924),
    (8, 4.0, True): (0.0383792759, 0.0936521340),
    (16, 9.0, True): (0.0002470631, 0.0004955337),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape, seed=0):
    x = normal(*shape, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def orthogonal(n):
    return torch.eye(n, dtype=torch.float64)


def cosine(states):
    return (states[..., 0, :] * states[..., 1, :]).sum(-1)


# ---------------------------------------------------------------------- known answers


@pytest.mark.parametrize("case", KNOWN)
def test_orthogonal_starts(case):
    n, beta, normalized = case
    expected = torch.tensor(KNOWN[case], dtype=torch.float64)
    assert_close(orthogonal_cosine([1.0, 2.0], n, beta, normalized), expected, rtol=0, atol=1e-10)
    found = flow(orthogonal(n), [1.0, 2.0], beta=beta, normalized=normalized)
    assert found.reason == ""
    assert_close(cosine(found.states), expected, rtol=0, atol=1e-8)


def test_two_particles_without_temperature_follow_tanh():
    times = torch.linspace(0, 3, 7, dtype=torch.float64)
    assert_close(cosine(flow(orthogonal(2), times, beta=0.0).states), times.tanh(), rtol=0, atol=1e-9)
    assert_close(cosine(flow(orthogonal(2), times, beta=0.0, sign=-1).states), -times.tanh(), rtol=0, atol=1e-9)
    for normalized in (True, False):  # the first of two causal particles stands still
        found = flow(orthogonal(2), times, beta=0.0, causal=True, normalized=normalized).states
        assert_close(found[:, 0], orthogonal(2)[0].expand(7, 2), rtol=0, atol=0)
        assert_close(cosine(found), (times / 2).tanh(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("n", "beta"), [(2, 0.0), (5, 3.0), (4, 30.0), (3, -2.0), (100, 12.0), (10_000, 1.0)])
def test_the_cosine_solves_its_equation(n, beta, normalized):
    def slowness(g):
        rest = (1 - g) * ((n - 1) * g + 1)
        if normalized:
            return (math.exp(beta * (1 - g)) + n - 1) / (2 * rest)
        return n * math.exp(-beta * g) / (2 * rest)

    def clock(cosine):
        nodes = [1 - (1 - cosine) ** k for k in (0.25, 0.5, 0.75)]
        return integrate.quad(slowness, 0, cosine, points=nodes, epsabs=0, epsrel=1e-13, limit=500)[0]

    for target in (0.01, 0.3, 0.9, 1 - 1e-6):
        found = orthogonal_cosine(clock(target), n, beta, normalized).item()
        assert clock(found) == pytest.approx(clock(target), rel=1e-11)
        if target < 0.5:  # later on, time may hardly pass between one cosine and another
            assert found == pytest.approx(target, abs=1e-9)


def test_the_cosine_at_its_ends():
    assert orthogonal_cosine(0.0, 5, 3.0).item() == 0
    assert orthogonal_cosine(1e6, 5, 3.0).item() == 1
    assert orthogonal_cosine(1.0, 4, 2000.0).item() < 1e-300  # slower than any clock
    assert orthogonal_cosine(1.0, 4, 2000.0, normalized=False).item() == 1
    assert orthogonal_cosine(torch.zeros(2, 3), 2, 1.0).shape == (2, 3)


# ---------------------------------------------------------------------- stiffness


@pytest.mark.long
def test_usa_at_beta_30_reaches_time_one():
    times = [0.01, 0.03, 0.06, 1.0]
    found = flow(orthogonal(4), times, beta=30.0, normalized=False)
    assert found.reason == ""
    assert found.reached.item() == 1
    assert_close(cosine(found.states), orthogonal_cosine(times, 4, 30.0, normalized=False), rtol=0, atol=1e-9)
    assert_close(found.states.norm(dim=-1), torch.ones(4, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (found.states[-1] == found.states[-1, 0]).all()  # one place, exactly
    assert found.steps.item() < 1000


@pytest.mark.long
def test_merging_agrees_with_a_stiff_integrator():
    x = unit(5, 3)
    times = [1e-4, 0.01, 1.0]
    merged = flow(x, times, beta=10.0, normalized=False, method="explicit")
    stiff = flow(x, times, beta=10.0, normalized=False, method="implicit")
    assert_close(merged.states, stiff.states, rtol=0, atol=2e-8)
    distinct = [len(torch.unique(s.round(decimals=9), dim=0)) for s in merged.states]
    assert distinct[-1] < distinct[0] == 5


@pytest.mark.parametrize("arguments", [{"causal": True}, {"keys": unit(4, 3, seed=1)}, {"sign": -1}])
def test_what_cannot_merge_turns_stiff(arguments):
    x = unit(5, 3)
    plain = flow(x, [0.5, 1.0], beta=4.0, normalized=False, method="explicit", **arguments)
    stiff = flow(x, [0.5, 1.0], beta=4.0, normalized=False, method="implicit", **arguments)
    assert plain.reason == stiff.reason == ""
    assert_close(plain.states, stiff.states, rtol=0, atol=2e-8)


@pytest.mark.parametrize("beta", [4.0, 30.0])
def test_fixed_keys_have_a_clock_for_each_particle(beta):
    x, keys, times = unit(20, 3), unit(4, 3, seed=1), [0.0, 1e-12, 1e-3, 1e-3, 1.0]
    found = flow(x, times, beta=beta, normalized=False, keys=keys)
    assert found.reason == ""
    assert found.steps.item() < 1500
    early = flow(x, times[:2], beta=beta, normalized=False, keys=keys, method="explicit")
    assert_close(found.states[:2], early.states, rtol=0, atol=1e-10)
    assert_close(found.states[2], found.states[3], rtol=0, atol=0)
    for k in (0, 7):  # alone as in the cloud
        alone = flow(x[k : k + 1], times, beta=beta, normalized=False, keys=keys)
        assert_close(found.states[:, k : k + 1], alone.states, rtol=0, atol=1e-7)
    if beta == 30.0:  # all have arrived
        assert velocity(found.states[-1], beta=beta, keys=keys).norm(dim=-1).max() < 1e-3
    assert (found.energy.diff() >= -1e-12 * found.energy[1:]).all()


@pytest.mark.parametrize("arguments", [{"causal": True}, {"causal": True, "sign": -1}])
def test_auto_switches_where_explicit_steps_are_many(arguments, monkeypatch):
    monkeypatch.setattr("cumulant.dynamics.integrate.EXPLICIT_STEPS", 30)
    found = flow(unit(4, 3), [0.0, 1e-4, 1e-4, 0.5, 1.0], beta=12.0, normalized=False, **arguments)
    assert found.reason == ""
    assert found.steps.item() > 30
    assert_close(found.states[1], found.states[2], rtol=0, atol=0)
    expected = flow(unit(4, 3), [0.5, 1.0], beta=12.0, normalized=False, method="implicit", **arguments)
    assert_close(found.states[3:], expected.states, rtol=0, atol=2e-8)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"sign": -1}])
def test_usa_at_beta_30_for_random_clouds(arguments):
    found = flow(unit(8, 3), [1e-9, 1e-3, 1.0], beta=30.0, normalized=False, **arguments)
    assert found.reason == ""
    stiff = flow(unit(8, 3), [1e-9, 1e-3, 1.0], beta=30.0, normalized=False, method="implicit", **arguments)
    assert_close(found.states, stiff.states, rtol=0, atol=1e-7)


def test_caps_stay_apart_when_cold_and_merge_when_warm():
    offsets = torch.tensor([-0.9, 0.0, 0.7], dtype=torch.float64) * math.acos(1 - 0.005)
    angle = torch.cat([offsets, offsets + math.pi / 2])
    caps = torch.stack([angle.cos(), angle.sin()], -1)
    cold = flow(caps, [30.0, 300.0, 1e9], beta=40.0)
    assert cold.reason == ""
    for state in cold.states:
        assert (state[:3] - state[0]).square().sum(-1).max() < 1e-15
        assert (state[3:] - state[3]).square().sum(-1).max() < 1e-15
        assert abs((state[0] @ state[3]).item()) < 1e-4
    warm = flow(caps, [30.0], beta=1.0).states[0]
    assert (warm @ warm.T).min() > 1 - 1e-10


# ---------------------------------------------------------------------- energy


@pytest.mark.long
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("beta", [-2.0, 0.0, 0.5, 6.0])
def test_energy_never_decreases(beta, normalized):
    found = flow(unit(2, 5, 3), torch.linspace(0, 1, 6), beta=beta, normalized=normalized)
    assert found.energy.shape == (6, 2)
    assert (found.energy.diff(dim=0) >= -1e-12 * found.energy[1:].abs()).all()
    down = flow(unit(5, 3), torch.linspace(0, 0.5, 4), beta=beta, normalized=normalized, sign=-1)
    assert (down.energy.diff() <= 1e-12 * down.energy[1:].abs()).all()


def test_energy_never_decreases_when_cold():
    found = flow(unit(7, 3), [0.0, 0.1, 1.0, 10.0, 100.0], beta=30.0)
    assert (found.energy.diff() >= -1e-12 * found.energy[1:]).all()


@pytest.mark.parametrize("keys", [normal(4, 3, seed=1), Empirical(normal(4, 3, seed=1))])
@pytest.mark.parametrize("beta", [0.0, 1.5])
def test_energy_over_fixed_keys(keys, beta):
    found = flow(unit(6, 3), [0.0, 0.5, 1.0], beta=beta, keys=keys)
    scores = (found.states @ normal(4, 3, seed=1).T).numpy()
    expected = np.exp(beta * scores).mean((1, 2)) / beta if beta else scores.mean((1, 2))
    assert_close(found.energy, torch.from_numpy(expected), rtol=1e-12, atol=0)
    assert (found.energy.diff() > 0).all()


def test_rate_of_the_energy():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 3)))
    x = x / x.norm(dim=-1, keepdim=True)
    beta, h = 2.0, 2e-3
    speed = velocity(x, beta=beta).square().sum(-1)
    z = torch.exp(beta * x @ x.T).mean(-1)
    formula = (speed * z).mean().item()
    e = flow(x, [0, h, 2 * h, 3 * h, 4 * h], beta=beta).energy.tolist()
    numeric = (-25 * e[0] + 48 * e[1] - 36 * e[2] + 16 * e[3] - 3 * e[4]) / (12 * h)
    assert formula == pytest.approx(0.1169897498, abs=1e-10)
    assert numeric == pytest.approx(0.1169897498, abs=1e-9)


def test_energy_of_one_point_is_the_largest():
    at_once = flow(unit(1, 3).expand(4, 3), [0.0, 1.0], beta=2.0).energy
    assert_close(at_once, torch.full((2,), math.exp(2) / 4, dtype=torch.float64), rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- in R^d


def test_volume_grows_at_the_rate_of_the_trace():
    keys, x, beta = normal(6, 3), normal(4, 3, seed=1), 0.7
    for row in x:
        jacobian = torch.func.jacrev(lambda p: velocity(p[None], beta=beta, sphere=False, keys=keys)[0])(row)
        rate = beta * Empirical(keys).fisher(beta * row).diagonal().sum()
        assert_close(jacobian.diagonal().sum(), rate, rtol=1e-12, atol=0)
    small = 1e-4
    simplex = torch.cat([x[:1], x[:1] + small * torch.eye(3, dtype=torch.float64)])
    times = torch.linspace(0, 0.4, 9, dtype=torch.float64)
    states = flow(simplex, times, beta=beta, sphere=False, keys=keys).states
    volume = torch.linalg.slogdet((states[:, 1:] - states[:, :1]) / small).logabsdet
    rates = beta * Empirical(keys).fisher(beta * states[:, 0]).diagonal(dim1=-2, dim2=-1).sum(-1)
    expected = integrate.simpson(rates.numpy(), x=times.numpy())
    assert volume[-1].item() == pytest.approx(expected, abs=1e-3)


def test_a_cloud_grows_at_most_exponentially():
    x, times = normal(30, 2), torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    found = flow(x, times, sphere=False)
    assert found.reason == ""
    assert (found.states.norm(dim=-1).amax(-1) <= times.exp() * x.norm(dim=-1).max() * (1 + 1e-9)).all()


def test_a_gaussian_key_law_has_a_linear_flow():
    mu, root = normal(2), normal(2, 2, seed=1)
    sigma, x, beta, t = root @ root.T, normal(5, 2, seed=2), 0.3, 0.8
    found = flow(x, [t], beta=beta, sphere=False, keys=Gaussian(mu, sigma)).states[0]
    whole = np.zeros((3, 3))
    whole[:2, :2], whole[:2, 2] = beta * sigma.numpy(), mu.numpy()
    expected = np.c_[x.numpy(), np.ones(5)] @ expm(t * whole).T
    assert_close(found, torch.from_numpy(expected[:, :2]), rtol=0, atol=1e-8)
    # USA divides by the mass, which a Gaussian has not
    eta = beta * x
    z = torch.exp(Gaussian(mu, sigma).log_normalizer(eta))[:, None]
    usa = velocity(x, beta=beta, sphere=False, normalized=False, keys=3 * Gaussian(mu, sigma))
    assert_close(usa, z * Gaussian(mu, sigma).mean(eta), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["auto", "implicit"])
def test_usa_in_space_runs_away_in_finite_time(method):
    x0, beta = 0.8, 1.3  # ẋ = x e^{βx²}
    found = flow(
        torch.tensor([[x0]], dtype=torch.float64), [0.01, 1.0], beta=beta, sphere=False, normalized=False, method=method
    )
    assert found.reached.item() == pytest.approx(exp1(beta * x0**2) / 2, rel=1e-6)
    assert "stopped at t = 0.146625 of 1: it runs away to infinity" in found.reason
    assert found.states.isfinite().all()
    left = exp1(beta * found.states[0].item() ** 2) / 2  # what is left of the time at t = 0.01
    assert left == pytest.approx(exp1(beta * x0**2) / 2 - 0.01, abs=1e-9)


@pytest.mark.parametrize("method", ["auto", "explicit"])
def test_usa_over_one_fixed_key_runs_away_too(method):
    x0, beta = 0.8, 1.3  # ẋ = e^{βx}
    one = torch.ones(1, 1, dtype=torch.float64)
    found = flow(x0 * one, [0.1, 5.0], beta=beta, sphere=False, normalized=False, keys=one, method=method)
    assert found.reached.item() == pytest.approx(math.exp(-beta * x0) / beta, rel=1e-6)
    assert "runs away to infinity in finite time" in found.reason
    assert found.states[0].item() == pytest.approx(-math.log(math.exp(-beta * x0) - beta * 0.1) / beta, abs=1e-9)
    assert found.states.isfinite().all()


# ---------------------------------------------------------------------- edges


def test_speeds_beyond_the_floating_numbers_are_said():
    found = flow(unit(3, 2), [0.0, 1.0], beta=800.0, normalized=False)
    assert "the velocity leaves the floating numbers" in found.reason
    assert found.reached.item() == 0
    assert_close(found.states[1], found.states[0], rtol=0, atol=0)
    assert (found.energy == torch.inf).all()


def test_too_few_steps_are_said_and_what_was_reached_is_kept():
    x = torch.stack([unit(5, 3), unit(1, 3).expand(5, 3)])
    found = flow(x, [1e-6, 1.0], beta=20.0, normalized=False, max_steps=40)
    assert found.steps.tolist() == [40, found.steps[1].item()]
    assert "cloud (0,) stopped" in found.reason
    assert "40 steps were not enough" in found.reason
    assert "cloud (1,)" not in found.reason
    assert found.reached[0] < 1 == found.reached[1]
    for arguments in ({"causal": True}, {"keys": unit(4, 3, seed=1)}):
        few = flow(x[0], [1.0], beta=12.0, normalized=False, method="implicit", max_steps=20, **arguments)
        assert "20 steps were not enough" in few.reason
        assert 0 < few.reached.item() < 1
        assert (few.states[0] != x[0]).any()


def test_lone_and_opposite_particles_stand_still():
    alone = flow(unit(1, 3), [0.0, 1e6], beta=30.0, normalized=False)
    assert_close(alone.states[1], unit(1, 3), rtol=0, atol=1e-12)
    pair = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert_close(flow(pair, [3.0], beta=1.0).states[0], pair, rtol=0, atol=1e-12)


def test_each_cloud_is_integrated_alone():
    x = unit(2, 2, 4, 3)
    whole = flow(x, [0.0, 1.0], beta=3.0)
    assert whole.states.shape == (2, 2, 2, 4, 3)
    assert whole.steps.shape == whole.reached.shape == (2, 2)
    for i, j in ((0, 0), (1, 0)):
        alone = flow(x[i, j], [0.0, 1.0], beta=3.0)
        assert torch.equal(whole.states[:, i, j], alone.states)
        assert torch.equal(whole.energy[:, i, j], alone.energy)


def test_precision_of_the_input_is_kept():
    x = unit(4, 3).float()
    found = flow(x, [0.0, 1.0])
    assert found.states.dtype == found.energy.dtype == torch.float32
    assert_close(found.states[1], flow(unit(4, 3), [1.0]).states[0].float(), rtol=0, atol=1e-6)
    assert velocity(x).dtype == torch.float32


@pytest.mark.long
def test_permuted_particles_flow_alike():
    x, order = unit(6, 3), torch.tensor([3, 1, 5, 0, 2, 4])
    merged = flow(x, [2.0], beta=6.0, normalized=False).states[0]
    assert_close(flow(x[order], [2.0], beta=6.0, normalized=False).states[0], merged[order], rtol=0, atol=1e-8)


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"sphere": False}, {"keys": normal(5, 3, seed=1)}])
@pytest.mark.parametrize("normalized", [True, False])
def test_velocity_by_its_definition(arguments, normalized, monkeypatch):
    x, beta = unit(6, 3), 1.7
    keys = arguments.get("keys", x)
    seen = np.tri(6) if arguments.get("causal") else np.ones((6, len(keys)))
    weights = np.exp(beta * (x @ keys.T).numpy()) * seen
    weights /= weights.sum(1, keepdims=True) if normalized else seen.sum(1, keepdims=True)
    expected = torch.from_numpy(weights) @ keys
    if arguments.get("sphere", True):
        expected = expected - (expected * x).sum(-1, keepdim=True) * x
    found = velocity(x, beta=beta, normalized=normalized, **arguments)
    assert_close(found, expected, rtol=0, atol=1e-14)
    assert_close(velocity(x, beta=beta, normalized=normalized, sign=-1, **arguments), -expected, rtol=0, atol=1e-14)
    monkeypatch.setattr(flow_module, "PAIRS", 0)  # as for large clouds
    assert_close(velocity(x, beta=beta, normalized=normalized, **arguments), expected, rtol=0, atol=1e-13)


def test_velocity_is_differentiable():
    x, keys = unit(3, 2).requires_grad_(), normal(4, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: velocity(x.detach(), beta=2.0, normalized=False, keys=k), keys)
    assert torch.autograd.gradcheck(lambda p: velocity(p / p.norm(dim=-1, keepdim=True), beta=2.0), x)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x0": [[1.0]]}, r"flow.x0: expected a torch.Tensor, got list"),
        ({"x0": torch.ones(3)}, r"flow.x0: expected a cloud \(\*batch, n, d\) of at least one particle, got \(3\)"),
        ({"x0": torch.ones(0, 3)}, r"flow.x0: expected a cloud .* got \(0, 3\)"),
        ({"x0": torch.full((1, 1), torch.nan)}, r"flow.x0: expected finite values"),
        ({"x0": 2 * torch.eye(2)}, r"flow.x0: expected unit vectors, got lengths from 2 to 2"),
        ({"times": [[1.0]]}, r"flow.times: expected shape \(t,\), t ≥ 1, got \(1, 1\)"),
        ({"times": [1.0, 0.5]}, r"flow.times: expected times from 0 on, in order"),
        ({"times": [-1.0]}, r"flow.times: expected times from 0 on, in order"),
        ({"beta": math.inf}, r"flow.beta: expected a finite number, got inf"),
        ({"sign": 2}, r"flow.sign: expected \+1 or -1, got 2"),
        ({"method": "rk4"}, r"flow.method: expected one of auto, explicit, implicit, got 'rk4'"),
        ({"rtol": 0.0}, r"flow.rtol: expected a positive number, got 0.0"),
        ({"x0": torch.eye(25), "method": "implicit"}, r"flow.method: expected 'implicit' for n·d ≤ 600, got n·d = 625"),
        ({"keys": torch.eye(2), "causal": True}, r"flow.causal: expected False with fixed keys"),
        ({"keys": torch.ones(2)}, r"flow.keys: expected shape \(m, d\), m ≥ 1, got \(2\)"),
        ({"keys": torch.eye(3)}, r"flow.keys: expected dimension d=2 as the particles, got 3"),
        ({"keys": torch.ones(4, 2, 2)}, r"flow.keys: expected one set of keys for all clouds, got batch axes \(4,\)"),
    ],
)
def test_bad_input(arguments, message):
    arguments = {"x0": torch.eye(2), "times": [1.0], **arguments}
    error = TypeError if "torch.Tensor" in message else ValueError
    with pytest.raises(error, match=message):
        flow(arguments.pop("x0"), arguments.pop("times"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], 2, 1.0), r"orthogonal_cosine.times: expected times from 0 on"),
        ((1.0, 1, 1.0), r"orthogonal_cosine.n: expected at least 2 particles, got 1"),
        ((1.0, 2, math.nan), r"orthogonal_cosine.beta: expected a finite number, got nan"),
    ],
)
def test_bad_cosines(arguments, message):
    with pytest.raises(ValueError, match=message):
        orthogonal_cosine(*arguments)


def test_the_integrators_are_an_extra(monkeypatch):
    for package, method in (("torchdiffeq", "auto"), ("scipy.integrate", "implicit")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ImportError, match=r"flow needs \w+: run pip install .*\[ode\]"):
                flow(torch.eye(2), [1.0], method=method)
