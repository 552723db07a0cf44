"""Switching models and filters where it gets difficult: time, sizes, precision, other families, refusals."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch.distributions import Gamma

from cumulant import attention, from_distribution
from cumulant.filters import (
    Propagator,
    Slots,
    SwitchingLinearGaussian,
    exact,
    gpb,
    imm,
    init,
    m_projection,
    m_projection_in,
    run,
    step,
)
from cumulant.filters.joseph import joseph
from cumulant.filters.protocol import Start, StateMoments, Updated, contract, log_probabilities
from tests.compare import close
from tests.filters.oracle import (
    FIELDS,
    NAN,
    condition,
    mixture,
    model_of,
    oracle,
    parameters,
    rows,
    same,
    series,
    t,
)

# ---------------------------------------------------------------------- time-varying parameters and embeddings


def test_parameters_that_vary_in_time():
    p, steps = parameters(2, 2, 1), 300  # more than one block of maps
    rng = np.random.default_rng(5)
    gaps = rng.uniform(0.2, 1.5, size=steps)
    f = np.stack([np.stack([[[1, g], [0, 1]], [[1, g], [0, np.exp(-g)]]]) for g in gaps])
    q = p[2] * gaps[:, None, None, None]
    switch = np.stack([[[1 - 0.1 * g, 0.1 * g], [0.2 * g, 1 - 0.2 * g]] for g in gaps])
    y = series(steps, 1)
    for start in ("prior", "belief"):
        found = imm(model_of((switch, f, q, *p[3:]), start), y)
        state = [(p[9][s], p[7][s], p[8][s]) for s in range(2)]
        for k in range(40):
            now = (
                switch[k],
                f[k],
                q[k],
                *p[3:7],
                np.array([s[1] for s in state]),
                np.array([s[2] for s in state]),
                np.array([s[0] for s in state]),
            )
            once = oracle(now, y[k : k + 1].numpy(), "prior" if k == 0 and start == "prior" else "belief", 1, 1)
            close(found.mean[k], once.mean[0], 1e-9)
            close(found.mode_probabilities[k], once.mode_probabilities[0], 1e-9)
            state = list(zip(once.mode_probabilities[0], once.mode_means[0], once.mode_covariances[0], strict=True))
    constant = model_of(p)
    stretched = replace(constant, process_noise=constant.process_noise.expand(steps, 2, 2, 2))
    assert stretched.steps == steps
    assert "T=300" in repr(stretched)
    same(imm(stretched, y), imm(constant, y))


def test_everything_may_vary():
    p = parameters(2)
    whole = [t(a).expand(4, *np.shape(a)) for a in p[:7]]
    names = ("state_offset", "observation_offset")
    model = SwitchingLinearGaussian(
        *whole[:5],
        **dict(zip(names, whole[5:], strict=True)),
        initial_mean=t(p[7]),
        initial_covariance=t(p[8]),
        initial_modes=t(p[9]),
    )
    same(gpb(model, series(4)), gpb(model_of(p), series(4)))
    torch.manual_seed(0)
    assert model.simulate(4).observations.shape == (4, 2)


def test_modes_with_states_of_different_sizes():
    """Constant velocity (2) and constant acceleration (3) on one line."""
    slow, fast = t([[1, 0.1], [0, 1]]), t([[1, 0.1, 0.005], [0, 1, 0.1], [0, 0, 1]])
    embeddings = [torch.eye(3, 2).double(), torch.eye(3).double()]
    noise = [0.01 * torch.eye(2).double(), torch.eye(3).double()]
    switch, r = t([[0.9, 0.1], [0.2, 0.8]]), t([[0.1]])
    ours = SwitchingLinearGaussian(
        switch,
        [slow, fast],
        noise,
        [t([[1, 0]]), t([[1, 0, 0]])],
        r,
        state_offset=[t([0, 1]), t([0, 0, 0])],
        initial_mean=[t([0, 1]), t([0, 1, 0])],
        initial_covariance=noise,
        embeddings=embeddings,
    )
    padded = torch.zeros(2, 3, 3).double()
    padded[0, :2, :2], padded[1] = slow, fast
    spread = torch.zeros(2, 3, 3).double()
    spread[0, :2, :2], spread[1] = noise[0], noise[1]
    offset = t([[0, 1, 0], [0, 0, 0]])
    plain = SwitchingLinearGaussian(
        switch,
        padded,
        spread,
        t([[1, 0, 0]]),
        r,
        state_offset=offset,
        initial_mean=t([0, 1, 0]),
        initial_covariance=spread,
    )
    y = series(20, 1)
    same(imm(ours, y), imm(plain, y))
    assert (imm(ours, y).mode_covariances[:, 0, 2].abs() == 0).all()
    assert torch.linalg.eigvalsh(gpb(ours, y).covariance).min() > -1e-15
    again = replace(ours, observation_noise=t([[0.2]]))
    assert again.dim == 3


# ---------------------------------------------------------------------- robustness


def far(modes=2):
    """Walks that differ in their noise."""
    scale = t([0.01, 1.0, 4.0][:modes])[:, None, None]
    eye = torch.eye(1).double()
    switch = torch.full((modes, modes), 0.1 / (modes - 1)).double().fill_diagonal_(0.9)
    return SwitchingLinearGaussian(switch, eye, scale * eye, eye, eye, initial_mean=t([0.0]), initial_covariance=eye)


def test_an_outlier_of_a_thousand_sigma():
    """Evidence of −10⁵ and more is kept: it decides between modes as the logarithms say, also when it comes back."""
    model = replace(far(), transition=torch.eye(2).double())
    y = t([[0.0], [1e3], [0.0], [0.0], [1e3]])
    log_weights, means = np.log([0.5, 0.5]), []
    for s, q in enumerate((0.01, 1.0)):
        x, v, path = 0.0, 1.0, []
        for k, value in enumerate(y[:, 0].numpy()):
            x, v = (x, v + q) if k else (x, v)
            log_weights[s] += -0.5 * ((value - x) ** 2 / (v + 1) + np.log(2 * np.pi * (v + 1)))
            x, v = x + v / (v + 1) * (value - x), v / (v + 1)
            path.append(x)
        means.append(path)
    for filter in (imm, gpb, exact):
        found = filter(model, y)
        assert found.total_log_likelihood < -1e5
        difference = found.mode_log_probabilities[-1, 0] - found.mode_log_probabilities[-1, 1]
        close(difference, log_weights[0] - log_weights[1], 1e-9)
        close(found.mode_means[:, :, 0], np.array(means).T)
        assert found.mean.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_observation_at_the_end_of_all_numbers_is_no_nan(dtype):
    limit = torch.finfo(dtype).max ** 0.5
    found = imm(far().to(dtype), torch.tensor([[0.0], [limit / 2], [0.0]], dtype=dtype))
    assert all(getattr(found, name).isfinite().all() for name in (*FIELDS, "log_likelihood"))
    with pytest.raises(ValueError, match="numbers of size at most"):
        imm(far().to(dtype), torch.tensor([[2 * limit]], dtype=dtype))


@pytest.mark.parametrize("filter", [imm, gpb, exact, lambda m, y: gpb(m, y, order=1)])
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_modes_that_cannot_be(filter, start):
    p = list(parameters(3))
    p[0], p[9] = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.3, 0.3, 0.4]]), np.array([1.0, 0.0, 0.0])
    leaves = [t(a).requires_grad_() for a in p]
    found = filter(model_of(leaves, start), series(5))
    assert (found.mode_probabilities[:, 2] == 0).all()
    without = model_of([p[0][:2, :2], *(a[:2] for a in p[1:])], start)
    same(
        found,
        filter(without, series(5)),
        fields=("mean", "covariance", "prior_mean", "prior_covariance", "log_likelihood"),
    )
    assert found.mode_means.isfinite().all()
    found.total_log_likelihood.backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_single_precision_far_from_the_origin():
    f = torch.eye(4).double()
    f[0, 2] = f[1, 3] = 1.0
    q = torch.diag(t([0.01, 0.01, 0.01, 0.01]))
    h, r, switch = torch.eye(2, 4).double(), torch.eye(2).double(), t([[0.95, 0.05], [0.1, 0.9]])
    start = {"initial_mean": t([1e4, -1e4, 1, 1]), "initial_covariance": torch.eye(4).double()}
    model = SwitchingLinearGaussian(switch, f, torch.stack([q, 20 * q]), h, r, **start)
    y = model.simulate(100, batch_shape=(20,), generator=torch.Generator().manual_seed(0)).observations.float()
    for filter in (imm, gpb):
        single, double = filter(model.to(torch.float32), y), filter(model, y.double())
        assert (single.mean.double() - double.mean).abs().max() < 1e-2
        assert (single.covariance.double() - double.covariance).abs().max() < 1e-2
        assert torch.linalg.eigvalsh(single.covariance).min() > 0
        assert torch.linalg.eigvalsh(single.mode_covariances).min() > 0


@pytest.mark.long
def test_a_hundred_thousand_steps():
    model = model_of(parameters(2, 2, 1))
    y = model.simulate(100_000, generator=torch.Generator().manual_seed(0)).observations
    with torch.no_grad():
        found = imm(model, y)
    for name in FIELDS:
        assert getattr(found, name).isfinite().all()
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.linalg.eigvalsh(found.covariance).min() > 0
    close(found.mode_probabilities.sum(-1), np.ones(100_000))


def vague(scale, y, seen, h, r):
    """Exact rational arithmetic for x ~ N(0, scale·I) observed once, two entries."""
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 60
    kept = [k for k in range(len(y)) if seen[k]]
    matrix = mp.matrix([[mp.mpf(h[k][j]) for j in range(2)] for k in kept])
    noise = mp.matrix([[mp.mpf(r[k][j]) for j in kept] for k in kept])
    s = scale * matrix * matrix.T + noise
    inverse, told = s**-1, mp.matrix([mp.mpf(y[k]) for k in kept])
    gain = scale * matrix.T * inverse
    covariance = scale * mp.eye(2) - scale * gain * matrix
    surprise = (told.T * inverse * told)[0] + mp.log(mp.det(s)) + len(kept) * mp.log(2 * mp.pi)
    return (
        [float(v) for v in gain * told],
        [[float(covariance[i, j]) for j in range(2)] for i in range(2)],
        -float(surprise) / 2,
    )


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e12, 1e20])
@pytest.mark.parametrize("y", [[1.0, 1.01], [NAN, 1.01]])
def test_a_vague_prior_and_sharp_sensors(scale, y):
    """Two sensors of one coordinate, a ratio of variances up to 1e24: subtraction would leave nothing."""
    h, r = [[1.0, 0.0], [1.0, 0.0]], [[1e-4, 3e-5], [3e-5, 2e-4]]
    start = {"initial_mean": t([0.0, 0.0]), "initial_covariance": scale * torch.eye(2).double()}
    one, two = torch.eye(1).double(), torch.full((2, 2), 0.5).double()
    mean, covariance, log_likelihood = vague(scale, y, ~np.isnan(y), h, r)
    for switch in (one, two):
        model = SwitchingLinearGaussian(switch, torch.eye(2).double(), torch.eye(2).double(), t(h), t(r), **start)
        found = imm(model, t([y, [NAN, NAN]]))
        close(found.mean[0], mean, 1e-9)
        close(found.covariance[0], covariance, 1e-9)
        close(found.log_likelihood[0], log_likelihood, 1e-9)
        assert torch.linalg.eigvalsh(found.covariance[0]).min() > 0


def test_the_careful_update_is_the_fast_one():
    p, y = parameters(2, 3, 2), series(1, 2)[0]
    for s in range(2):
        arrays = [t(p[k][s])[None] for k in (7, 8, 3, 6, 4)]
        seen = torch.tensor([[True, bool(s)]])
        found = joseph(arrays[0], arrays[1], y[None], seen, *arrays[2:])
        x, v, log_likelihood = condition(p[7][s], p[8][s], np.where(seen[0], y, NAN), p[3][s], p[6][s], p[4][s])
        close(found.mean[0], x)
        close(found.covariance[0], v)
        close(found.log_likelihood[0], log_likelihood)


def test_the_careful_update_has_gradients():
    def value(root, h, y):
        start = {"initial_mean": t([0.0, 0.0]), "initial_covariance": 1e10 * (root @ root.mT)}
        eye = torch.eye(2).double()
        model = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, eye, h, t([[1e-2]]), **start)
        found = imm(model, y)
        return found.mean, found.covariance[:, 0, 0], found.log_likelihood

    leaves = [
        torch.eye(2).double().requires_grad_(),
        t([[1.0, 0.0]]).requires_grad_(),
        t([[1.0], [2.0]]).requires_grad_(),
    ]
    assert torch.autograd.gradcheck(value, leaves, eps=1e-5, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- M-projection and other families


def test_m_projection_matches_moments():
    rng = np.random.default_rng(0)
    w, m, root = rows(rng, 5, 4), rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 3, 3))
    c = root @ root.swapaxes(-1, -2)
    found = m_projection(t(w), t(m), t(c))
    for k in range(5):
        mean, covariance = mixture(w[k], m[k], c[k])
        close(found.mean[k], mean)
        close(found.covariance[k], covariance)
    assert torch.autograd.gradcheck(
        lambda m, c: tuple(m_projection(t(w), m, c)), [t(m).requires_grad_(), t(c).requires_grad_()]
    )
    shifted = m_projection(t(w).float(), t(m).float() + 1e4, t(c).float())
    assert (shifted.covariance - found.covariance).abs().max() < 1e-2


def test_m_projection_of_gamma_laws_matches_mean_and_mean_logarithm():
    shape, rate, w = np.array([2.0, 5.0, 0.7]), np.array([1.0, 3.0, 0.2]), np.array([0.5, 0.3, 0.2])
    base = from_distribution(Gamma(t(1.0), t(1.0)), full=True)  # η = θ − θ_0 with θ = (−rate, shape − 1), θ_0 = (−1, 0)
    found = m_projection_in(base, t(w), t(np.stack([1 - rate, shape - 1], -1)))
    assert found.converged.all()
    mean, log_mean = w @ (shape / rate), w @ (special.digamma(shape) - np.log(rate))
    a = optimize.brentq(lambda a: np.log(a) - special.digamma(a) - np.log(mean) + log_mean, 1e-3, 1e3, xtol=1e-14)
    close(found.value, [1 - a / mean, a - 1], 1e-9)
    batch = m_projection_in(base, t(np.stack([w, w[::-1]])), t(np.stack([1 - rate, shape - 1], -1)))
    close(batch.value[0], [1 - a / mean, a - 1], 1e-9)


class Value(NamedTuple):
    value: torch.Tensor


class Values(Propagator):
    """Beliefs that are a mean only, nothing observed: what a head of attention passes on."""

    def __init__(self, sources, transition, values):
        self.start, self.like = "belief", values.new_empty(0)
        self.sources, self.transition, self.values = sources, transition, values

    def initial(self):
        return Start(log_probabilities(self.sources)[:, None], Value(self.values[..., None]))

    def log_transition(self, t):
        return log_probabilities(self.transition)[..., None]

    def predict(self, belief, t, *, moves=True):
        return belief

    def update(self, predicted, y, observed, t):
        return Updated(predicted, torch.zeros_like(predicted.value[..., 0, :]))

    def moments(self, belief):
        return StateMoments(belief.value, torch.diag_embed(0 * belief.value.movedim(-2, -1)).movedim(-3, -1))

    def expected_statistics(self, belief):
        return belief.value

    def from_statistics(self, statistics):
        return Value(statistics)


class Head(NamedTuple):
    sources: torch.Tensor
    transition: torch.Tensor
    values: torch.Tensor

    @property
    def modes(self):
        return self.transition.shape[-1]

    @property
    def observed(self):
        return 0

    def propagator(self):
        return Values(*self)


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (2, 5), (20, 30)])
def test_a_head_of_attention_is_one_step_of_the_engine(queries, keys):
    rng = np.random.default_rng(3)
    q, k, v = (t(rng.normal(size=(n, 4))) for n in (queries, keys, keys))
    weights = torch.softmax(q @ k.mT / 2, -1)  # (query, key): P(A = i | A' = j) with i the key
    prior = t(rows(rng, 1, queries)[0])
    sources = weights.mT @ prior
    transition = (weights * prior[:, None]).mT / sources[:, None]
    for filter in (imm, gpb):
        found = filter(Head(sources, transition, v), torch.zeros(1, 0).double())
        torch.testing.assert_close(found.mode_means[0], attention(q, k, v), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.mode_probabilities[0], prior, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.beliefs.value[0], attention(q, k, v), rtol=1e-12, atol=1e-12)
    common = run(Head(sources, transition, v), torch.zeros(1, 0).double(), Slots.gpb(1))
    torch.testing.assert_close(common.mode_means[0], (sources @ v).expand(queries, 4), rtol=1e-12, atol=1e-12)
    state, record = step(init(Head(sources, transition, v)), torch.zeros(0).double())
    torch.testing.assert_close(record.beliefs.value, attention(q, k, v), rtol=1e-12, atol=1e-12)
    assert state.t == 1
    assert imm(Head(sources, transition, v), torch.zeros(0, 0).double()).beliefs.value.shape[0] == 0


@pytest.mark.parametrize("size", [(3, 4, 2, 5), (40, 30, 6, 1), (40, 30, 6, 7), (4, 4, 15, 1000)])
def test_contract_is_a_weighted_sum(size):
    i, j, k, batch = size
    rng = np.random.default_rng(0)
    w, v, u = (t(rng.normal(size=s)) for s in ((i, j, batch), (i, 1, k, batch), (i, j, k, batch)))
    torch.testing.assert_close(contract(w, v, 0), torch.einsum("ijb,ikb->jkb", w, v[:, 0]))
    torch.testing.assert_close(contract(w, u, 1), torch.einsum("ijb,ijkb->ikb", w, u))
    onto = torch.ones(j, k, batch).double()
    torch.testing.assert_close(contract(w, v, 0, onto=onto), 1 + contract(w, v, 0))


def test_a_propagator_without_statistics_says_so():
    class Bare(Values):
        expected_statistics = Propagator.expected_statistics
        from_statistics = Propagator.from_statistics

    bare = Bare(t([1.0]), t([[1.0]]), t([[0.0]]))
    for call in (lambda: bare.collapse(t([[1.0]]), Value(t([[[0.0]]])), 0), lambda: bare.from_statistics(t([[0.0]]))):
        with pytest.raises(NotImplementedError, match="sufficient statistic"):
            call()


# ---------------------------------------------------------------------- simulation


def test_simulation_has_the_law_of_the_model():
    p = parameters(2, 2, 1)
    for start in ("prior", "belief"):
        drawn = model_of(p, start).simulate(2, batch_shape=(200, 200), generator=torch.Generator().manual_seed(0))
        assert drawn.modes.shape == (200, 200, 2)
        assert drawn.observations.shape == (200, 200, 2, 1)
        modes = p[9] @ p[0] if start == "belief" else p[9]
        counts = np.array([(drawn.modes[..., 0] == s).sum().item() for s in range(2)])
        assert (np.abs(counts - 40_000 * modes) < 4.5 * np.sqrt(40_000 * modes * (1 - modes))).all()
        unseen = imm(model_of(p, start), torch.full((1, 1), NAN).double())
        error = drawn.states[..., 0, :].reshape(-1, 2).mean(0) - unseen.mean[0]
        assert (error.abs() < 4.5 * (unseen.covariance[0].diagonal() / 40_000).sqrt()).all()
    again = model_of(p).simulate(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again.states, model_of(p).simulate(3, generator=torch.Generator().manual_seed(1)).states)
    assert model_of(p).simulate(0).states.shape == (0, 2)
    assert model_of(p).simulate(0, batch_shape=(3,)).modes.shape == (3, 0)
    assert model_of(p).simulate(2, batch_shape=(0,)).states.shape == (0, 2, 2)


def test_filtering_what_was_simulated_is_calibrated():
    model = model_of(parameters(2, 2, 2), "belief")
    drawn = model.simulate(20, batch_shape=(500,), generator=torch.Generator().manual_seed(0))
    found = gpb(model, drawn.observations)
    gap = (drawn.states - found.mean)[..., None]
    distance = (gap.mT @ torch.linalg.solve(found.covariance, gap))[..., 0, 0].mean(-1)
    assert abs(distance.mean() - 2) < 4.5 * distance.std() / 500**0.5
