"""EM: the likelihood climbs where it is exact, parameters come back from simulated data, the M-step against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cumulant.filters import GammaPoisson, SwitchingConjugate, SwitchingLinearGaussian, gpb
from cumulant.filters.fitting import Joint, completed, fit
from cumulant.filters.learning import PARAMETERS, em
from cumulant.filters.linear_laws import LinearLaw
from cumulant.solve import Status
from tests.compare import close
from tests.generated.test_switching import Case, build

NAN = float("nan")
FIELDS = ("state_offset", "observation_offset", "initial_mean", "initial_covariance", "initial_modes")


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def covariances(rng, n, *shape):
    half = rng.normal(size=(*shape, n, n))
    return half @ half.swapaxes(-1, -2) / n + 0.2 * np.eye(n)


def model(modes=2, d=2, m=2, seed=0, start="prior") -> SwitchingLinearGaussian:
    rng = np.random.default_rng(seed)
    matrices = (
        rng.dirichlet(np.ones(modes), size=modes),
        0.5 * rng.normal(size=(modes, d, d)),
        covariances(rng, d, modes),
        rng.normal(size=(modes, m, d)),
        covariances(rng, m, modes),
    )
    rest = (
        rng.normal(size=(modes, d)),
        rng.normal(size=(modes, m)),
        rng.normal(size=(modes, d)),
        covariances(rng, d, modes),
        rng.dirichlet(np.ones(modes)),
    )
    return SwitchingLinearGaussian(*map(t, matrices), **dict(zip(FIELDS, map(t, rest), strict=True)), start=start)


def data(source: SwitchingLinearGaussian, steps=5, count=12, seed=0):
    """Observations with gaps, and a mask with sequences that end early."""
    y = source.simulate(steps, batch_shape=(count,), generator=torch.Generator().manual_seed(seed)).observations
    y[0, 1], y[1, 2, 0], y[2, :, 1] = NAN, NAN, NAN
    mask = torch.ones(count, steps, dtype=torch.bool)
    mask[3, 2:] = mask[4, 1:] = mask[5, :] = False
    return y, mask


def likelihood(model, y, mask=None):
    return gpb(model, y, mask=mask).log_likelihood.sum()


# ---------------------------------------------------------------------- where EM is exact


SUBSETS = [
    (),
    ("dynamics", "observation"),
    ("state_offset", "observation_noise", "initial_covariance"),
    ("process_noise", "transition", "initial_modes"),
    ("initial_mean", "observation_offset"),
    tuple(name for name in PARAMETERS if name != "dynamics"),
    PARAMETERS,
]


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("fixed", SUBSETS, ids=lambda names: "+".join(names) if 0 < len(names) < 4 else str(len(names)))
def test_one_mode_never_loses_likelihood(start, fixed):
    source, begin = model(1, seed=0, start=start), model(1, seed=1, start=start)
    y, mask = data(source)
    found = em(begin, y, fixed=fixed, steps=6, tol=0, mask=mask)
    close(found.log_likelihoods[0], likelihood(begin, y, mask), 1e-12)
    close(found.log_likelihoods[-1], likelihood(found.model, y, mask), 1e-12)
    gains = found.log_likelihoods.diff()
    assert (gains >= -1e-10).all()
    assert gains.sum() > 1 or fixed == PARAMETERS
    for name in PARAMETERS:
        moved = not getattr(found.model, name).equal(getattr(begin, name))
        assert moved == (name not in fixed and name not in ("transition", "initial_modes")), name


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize(
    "shared",
    [
        (),
        ("dynamics",),
        ("dynamics", "state_offset", "process_noise"),
        ("observation", "initial_mean", "observation_noise"),
        ("observation_offset", "initial_covariance"),
    ],
    ids="+".join,
)
def test_an_order_above_the_length_never_loses_likelihood(start, shared):
    source, begin = model(seed=0, start=start), model(seed=1, start=start)
    begin = replace(begin, **{name: getattr(begin, name)[:1].expand_as(getattr(begin, name)) for name in shared})
    y, mask = data(source, steps=3)
    found = em(begin, y, shared=shared, steps=4, tol=0, order=5, mask=mask)
    gains = found.log_likelihoods.diff()
    assert (gains >= -1e-10).all()
    assert gains.sum() > 1
    for name in PARAMETERS[:-2]:
        same = bool((getattr(found.model, name)[0] == getattr(found.model, name)[1]).all())
        assert same == (name in shared), name


@pytest.mark.long
def test_at_the_end_the_gradient_vanishes():
    source = model(1, d=1, m=1, seed=3)
    y = source.simulate(20, batch_shape=(10,), generator=torch.Generator().manual_seed(0)).observations
    y[0, 3:6] = NAN
    learnt = ("dynamics", "process_noise", "observation_noise", "initial_mean")
    found = em(source, y, fixed=set(PARAMETERS) - set(learnt), steps=400, tol=1e-13)
    assert found.status is Status.CONVERGED
    leaves = {name: getattr(found.model, name).clone().requires_grad_() for name in learnt}
    gradients = torch.autograd.grad(likelihood(replace(found.model, **leaves), y), list(leaves.values()))
    begin = {name: getattr(source, name).clone().requires_grad_() for name in learnt}
    before = torch.autograd.grad(likelihood(replace(source, **begin), y), list(begin.values()))
    assert max(g.abs().max() for g in gradients) < 1e-3 < 1 < max(g.abs().max() for g in before)


def test_parameters_that_vary_in_time_are_kept_and_used():
    """Irregular sampling: F and Q of each gap are given; and a regression whose noise differs from case to case."""
    source = model(1, d=2, m=2, seed=0)
    y = source.simulate(6, batch_shape=(8,), generator=torch.Generator().manual_seed(0)).observations
    gaps = torch.linspace(0.5, 2, 6).double()[:, None, None, None]
    irregular = replace(source, process_noise=gaps * source.process_noise)
    found = em(irregular, y, fixed=("process_noise",), steps=5, tol=0)
    assert (found.log_likelihoods.diff() > 0).all()
    assert found.model.process_noise.equal(irregular.process_noise)
    moving = replace(source, dynamics=gaps * source.dynamics, observation=gaps * source.observation)
    found = em(moving, y, fixed=("dynamics", "observation"), steps=5, tol=0)
    assert (found.log_likelihoods.diff() > 0).all()
    steady = replace(source, dynamics=source.dynamics.expand(6, 1, 2, 2))
    close(
        em(steady, y, fixed=("dynamics",), steps=3, tol=0).log_likelihoods,
        em(source, y, fixed=("dynamics",), steps=3, tol=0).log_likelihoods,
    )


# ---------------------------------------------------------------------- several modes, approximately


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "order", "reached", "noise"),
    [
        pytest.param("propagation", 2, -4470.9, 0.055, marks=pytest.mark.long),
        pytest.param("propagation", 3, -4470.9, 0.055, marks=pytest.mark.long),
        pytest.param("kim", 2, -4474.5, 0.068, marks=pytest.mark.long),
        pytest.param("kim", 3, -4471.3, 0.059, marks=pytest.mark.long),
        pytest.param("kim", 4, -4471.0, 0.056, marks=pytest.mark.long),
    ],
)
def test_two_modes_come_back_from_simulated_data(method, order, reached, noise):
    one = t([[1.0]])

    def walk(stay, f, q, r, b):
        transition = t([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]])
        start = {"initial_mean": 0 * one[0], "initial_covariance": one, "state_offset": t(b)[:, None]}
        return SwitchingLinearGaussian(transition, t(f)[:, None, None], t(q)[:, None, None], one, r * one, **start)

    truth = walk((0.95, 0.9), (0.95, 0.5), (0.05, 2.0), 0.1, (0.0, 1.0))
    begin = walk((0.8, 0.8), (0.7, 0.7), (0.3, 1.0), 0.5, (0.0, 0.0))
    y = truth.simulate(50, batch_shape=(80,), generator=torch.Generator().manual_seed(1)).observations
    keep = ("observation", "observation_offset", "initial_mean", "initial_covariance")
    found = em(begin, y, fixed=keep, shared=("observation_noise",), order=order, method=method)
    assert found.status is Status.CONVERGED
    assert (found.log_likelihoods.diff() > 0).all()
    assert likelihood(truth, y).item() == pytest.approx(-4478.4, abs=0.1)
    assert found.log_likelihoods[-1].item() == pytest.approx(reached, abs=0.1)
    learnt = found.model
    assert learnt.process_noise[0].item() == pytest.approx(noise, abs=0.001)
    close(learnt.transition, truth.transition, 0.03)
    close(learnt.dynamics, truth.dynamics, 0.05)
    close(learnt.state_offset, truth.state_offset, 0.1)
    assert (learnt.observation_noise / truth.observation_noise).log().abs().max() < 0.2


def test_a_step_that_would_lose_likelihood_is_not_taken():
    """Data that are not the model's, until the approximate EM steps down."""
    begin, rng = model(2, 1, 1, seed=4), np.random.default_rng(0)
    for _ in range(20):
        y = begin.simulate(8, batch_shape=(10,), generator=torch.Generator().manual_seed(0)).observations
        y = y + t(rng.normal(size=y.shape))
        found = em(begin, y, steps=25, tol=1e-7, method="kim")
        if found.status is Status.STALLED:
            break
    else:
        pytest.fail("no step lost likelihood")
    assert found.status is Status.STALLED
    assert found.log_likelihoods[-1] < found.log_likelihoods[-2]
    close(likelihood(found.model, y), found.log_likelihoods[-2], 1e-12)


def turning() -> SwitchingLinearGaussian:
    """The target of the docstrings of `smooth` and `em`: straight, or a turn of 0.1 rad a step."""
    sin, cos, rate = np.sin(0.1), np.cos(0.1), 0.1
    turn = np.eye(4)
    turn[:2, 2:] = np.array([[sin, cos - 1], [1 - cos, sin]]) / rate
    turn[2:, 2:] = [[cos, -sin], [sin, cos]]
    return SwitchingLinearGaussian(
        t([[0.9, 0.1], [0.1, 0.9]]),
        t(np.array([np.eye(4) + np.eye(4, k=2), turn])),
        t(1e-2 * np.kron([[1 / 3, 1 / 2], [1 / 2, 1]], np.eye(2))),
        t(np.eye(2, 4)),
        t(25 * np.eye(2)),
        initial_mean=t([0, 0, 10, 0]),
        initial_covariance=torch.diag(t([25, 25, 1, 1])),
    )


def test_a_first_step_down_returns_the_given_model_and_says_so():
    begin = turning()
    y = begin.simulate(100, generator=torch.Generator().manual_seed(0)).observations
    found = em(begin, y, method="kim")
    assert found.log_likelihoods.tolist() == pytest.approx([-643.4, -798.5], abs=0.1)
    assert (found.status, found.step, found.model) == (Status.STALLED, 0, begin)
    close(found.log_likelihood, likelihood(begin, y), 1e-12)


def test_propagation_climbs_where_kim_steps_down():
    begin = turning()
    y = begin.simulate(100, generator=torch.Generator().manual_seed(0)).observations
    found = em(begin, y, steps=5)
    assert found.log_likelihoods.tolist() == pytest.approx([-643.4, -623.7, -615.2, -611.5, -609.6, -608.4], abs=0.1)
    close(found.log_likelihood, likelihood(found.model, y), 1e-12)


@pytest.mark.parametrize("steps", [0, 1, 4, 30])
def test_the_step_is_that_of_the_best_model(steps):
    begin = model(2, 1, 1, seed=4)
    y = begin.simulate(8, batch_shape=(10,), generator=torch.Generator().manual_seed(0)).observations
    found = em(begin, y + t(np.random.default_rng(0).normal(size=y.shape)), steps=steps)
    assert found.log_likelihood == found.log_likelihoods.max() == found.log_likelihoods[found.step]
    assert (found.model is begin) == (found.step == 0)
    close(likelihood(found.model, y + t(np.random.default_rng(0).normal(size=y.shape))), found.log_likelihood, 1e-12)


def test_a_model_without_a_likelihood_ends_it():
    """Squares of the data are numbers, those of what they make of the state are not."""
    begin = model(1, 1, 1, seed=0)
    begin = replace(begin, dynamics=t([[[1e60]]]))
    y = t([[1.0]] * 8)
    found = em(begin, y)
    assert (found.status, found.step, found.model) == (Status.NONFINITE, 0, begin)
    assert found.log_likelihoods.isfinite().tolist() == [True, False]


def test_when_it_stops():
    source, begin = model(1, seed=0), model(1, seed=1)
    y, _ = data(source)
    none = em(begin, y, steps=0)
    assert none.model is begin
    assert (none.status, none.log_likelihoods.shape) == (Status.MAX_STEPS, (1,))
    some = em(begin, y, steps=3, tol=0)
    assert (some.status, some.log_likelihoods.shape) == (Status.MAX_STEPS, (4,))
    loose = em(begin, y, tol=0.5)
    assert loose.status is Status.CONVERGED
    assert len(loose.log_likelihoods) < 10
    assert em(begin, y, fixed=PARAMETERS).status is Status.CONVERGED


# ---------------------------------------------------------------------- edges


def test_what_is_never_visited_stays():
    begin = model(3, seed=1)
    stuck = replace(
        begin, transition=t([[0.5, 0.5, 0], [0.4, 0.6, 0], [0.2, 0.3, 0.5]]), initial_modes=t([0.5, 0.5, 0])
    )
    y, mask = data(model(3, seed=0))
    found = em(stuck, y, steps=3, mask=mask).model
    assert (found.transition[:2, 2] == 0).all()
    assert found.initial_modes[2] == 0
    for name in ("transition", *PARAMETERS[:-2]):
        torch.testing.assert_close(getattr(found, name)[2], getattr(stuck, name)[2], rtol=1e-12, atol=1e-12)
        assert not getattr(found, name)[0].equal(getattr(stuck, name)[0])


def test_nothing_observed_changes_nothing_of_what_is_observed():
    begin = model(2, seed=1)
    found = em(begin, torch.full((3, 4, 2), NAN).double(), steps=2, tol=0).model
    for name in ("observation", "observation_offset"):
        torch.testing.assert_close(getattr(found, name), getattr(begin, name), rtol=1e-12, atol=1e-12)
    assert all(getattr(found, name).isfinite().all() for name in PARAMETERS)


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("order", [2, 3])
def test_what_comes_after_the_end_is_not_learnt_from(start, order):
    begin, y = model(2, seed=1, start=start), data(model(2, seed=0))[0][:, :3]
    longer = torch.cat([y, 100 * torch.ones(12, 2, 2).double()], 1)
    mask = (torch.arange(5) < 3).expand(12, 5)
    short, long = em(begin, y, steps=3, order=order), em(begin, longer, steps=3, order=order, mask=mask)
    close(long.log_likelihoods, short.log_likelihoods)
    for name in PARAMETERS:
        torch.testing.assert_close(getattr(long.model, name), getattr(short.model, name), rtol=1e-10, atol=1e-10)


def test_no_sequences_change_nothing():
    begin = model(2, seed=1)
    found = em(begin, torch.zeros(0, 4, 2).double(), steps=2)
    assert found.log_likelihoods[0] == 0
    for name in PARAMETERS:
        assert getattr(found.model, name).equal(getattr(begin, name))


def test_observations_without_noise_leave_it_positive():
    one = t([[1.0]])
    begin = SwitchingLinearGaussian(one, one, one, one, one, initial_mean=t([0.0]), initial_covariance=one)
    y = torch.linspace(1, 2, 10).double()[:, None]
    keep = ("dynamics", "state_offset", "observation", "observation_offset", "initial_mean", "initial_covariance")
    found = em(replace(begin, process_noise=0 * one[None]), 0 * y + 1, fixed=keep, steps=30, tol=0)
    assert (found.model.observation_noise > 0).all()
    assert found.log_likelihoods.isfinite().all()
    exactly = em(replace(begin, initial_mean=t([[1.0]]), initial_covariance=0 * one[None]), 0 * y + 1, steps=40, tol=0)
    assert (exactly.model.observation_noise > 0).all()
    assert exactly.log_likelihoods.isfinite().all()


@pytest.mark.parametrize("fixed", [(), ("observation", "initial_covariance")])
def test_rounding_of_a_mode_without_noise_is_no_negative_variance(fixed):
    """A generated case: em was ended by the refusal of its own process noise of −1e-17."""
    case = Case(seed=0, modes=2, dim=1, observed=1, steps=2, ranks="none")
    built = build(case)
    y = built.observations + t(np.random.default_rng(0).normal(size=(3, 2, 1)))
    found = em(built.model, y, steps=4, fixed=fixed)
    assert (found.model.process_noise >= 0).all()
    assert found.log_likelihood >= found.log_likelihoods[0]


def test_models_that_observe_nothing_learn_nothing():
    begin = model(2, 2, 0)
    found = em(begin, torch.zeros(3, 4, 0, dtype=torch.float64), steps=2)
    assert found.log_likelihoods.tolist() == [0.0, 0.0]
    assert found.status is Status.CONVERGED


def test_single_precision():
    source, begin = model(2, seed=0), model(2, seed=1)
    y, mask = data(source)
    double, single = em(begin, y, steps=3, mask=mask), em(begin.to(torch.float32), y.float(), steps=3, mask=mask)
    assert single.model.dynamics.dtype == torch.float32
    torch.testing.assert_close(single.log_likelihoods.double(), double.log_likelihoods, rtol=1e-4, atol=1e-2)


# ---------------------------------------------------------------------- the M-step alone


def points(joint: Joint):
    """Cases that have the same first two moments: 2k of them, weight w/2k, at m ± √k times the columns of a root."""
    k = joint.mean.shape[-1]
    root = torch.linalg.cholesky(joint.covariance).mT * k**0.5  # (n, M, k, k)
    where = torch.cat([joint.mean[..., None, :] + root, joint.mean[..., None, :] - root], -2)
    weights = (joint.weights[..., None] / (2 * k)).expand(where.shape[:-1])
    return weights.numpy(), where.numpy()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("free", [("coefficient",), ("offset",), ("coefficient", "offset")])
def test_regression_is_least_squares_on_points(together, varies, free):
    rng = np.random.default_rng(0)
    n, modes, p, r = 7, 2, 2, 2
    joint = Joint(
        t(rng.random((n, modes))), t(rng.normal(size=(n, modes, p + r))), t(covariances(rng, p + r, n, modes))
    )
    shape = (n, modes) if varies else (modes,)
    law = LinearLaw(t(rng.normal(size=(modes, r, p))), t(rng.normal(size=(modes, r))), t(covariances(rng, r, *shape)))
    if together:
        law = law._replace(coefficient=law.coefficient[:1].expand(2, r, p), offset=law.offset[:1].expand(2, r))
    found = fit(joint, law, free, ("coefficient", "offset") if together else ())
    weights, where = points(joint)
    noise = np.broadcast_to(law.noise.numpy(), (n, modes, r, r))
    for modes_of in [[0, 1]] if together else [[0], [1]]:
        rows, targets = [], []
        for i, s in [(i, s) for i in range(n) for s in modes_of]:
            half = np.linalg.inv(np.linalg.cholesky(noise[i, s]))
            for w, point in zip(weights[i, s], where[i, s], strict=True):
                z, u = point[:p], point[p:]
                columns, rest = [], u
                if "coefficient" in free:
                    columns.append(np.kron(np.eye(r), z))
                else:
                    rest = rest - law.coefficient[s].numpy() @ z
                if "offset" in free:
                    columns.append(np.eye(r))
                else:
                    rest = rest - law.offset[s].numpy()
                rows.append(np.sqrt(w) * half @ np.concatenate(columns, 1))
                targets.append(np.sqrt(w) * half @ rest)
        best = np.linalg.lstsq(np.concatenate(rows), np.concatenate(targets), rcond=None)[0]
        for s in modes_of:
            parts = [found.coefficient[s].flatten()] if "coefficient" in free else []
            parts += [found.offset[s]] if "offset" in free else []
            close(torch.cat(parts), best, 1e-9)
    assert found.noise.equal(law.noise)


@pytest.mark.parametrize("together", [False, True])
def test_noise_is_the_mean_square_of_what_is_left(together):
    rng = np.random.default_rng(1)
    joint = Joint(t(rng.random((5, 2))), t(rng.normal(size=(5, 2, 3))), t(covariances(rng, 3, 5, 2)))
    law = LinearLaw(t(rng.normal(size=(2, 1, 2))), t(rng.normal(size=(2, 1))), torch.ones(2, 1, 1).double())
    found = fit(joint, law, ("noise",), ("noise",) if together else ())
    weights, where = points(joint)
    left = where[..., 2] - np.einsum("ms,nmks->nmk", law.coefficient[:, 0].numpy(), where[..., :2])
    square = weights * (left - law.offset.numpy()[None, :]) ** 2
    axes = (0, 1, 2) if together else (0, 2)
    close(found.noise.flatten(), square.sum(axes) / weights.sum(axes) * np.ones(2), 1e-10)


def test_regression_changes_nothing_where_the_data_are_silent():
    """z never leaves a line: the coefficient across it stays."""
    z = t([[1.0, 0], [2.0, 0], [3.0, 0]])
    u = 5 * z[:, :1]
    joint = Joint(torch.ones(3, 1).double(), torch.cat([z, u], 1)[:, None], torch.zeros(3, 1, 3, 3).double())
    law = LinearLaw(t([[[0.0, 7.0]]]), t([[0.0]]), t([[[1.0]]]))
    close(fit(joint, law, ("coefficient",)).coefficient, [[[5.0, 7.0]]])
    empty = Joint(torch.zeros(3, 1).double(), joint.mean, joint.covariance)
    for part, before in zip(fit(empty, law, LinearLaw._fields), law, strict=True):
        assert part.equal(before)


def test_entries_that_were_not_seen_follow_the_law():
    rng = np.random.default_rng(2)
    n, d, m = 4, 2, 3
    states = Joint(t(rng.random((n, 1))), t(rng.normal(size=(n, 1, d))), t(covariances(rng, d, n, 1)))
    law = LinearLaw(t(rng.normal(size=(1, m, d))), t(rng.normal(size=(1, m))), t(covariances(rng, m, 1)))
    y = rng.normal(size=(n, m))
    y[1, 0] = y[2, 1] = y[2, 2] = NAN
    y[3] = NAN
    found = completed(states, t(y), law)
    h, c, v = (part[0].numpy() for part in law)
    for i in range(n):
        seen = ~np.isnan(y[i])
        x, p = states.mean[i, 0].numpy(), states.covariance[i, 0].numpy()
        slope, constant, noise = np.zeros((m, d)), np.where(seen, y[i], 0), np.zeros((m, m))
        pull = v[np.ix_(~seen, seen)] @ np.linalg.inv(v[np.ix_(seen, seen)])
        slope[~seen] = h[~seen] - pull @ h[seen]
        constant[~seen] = c[~seen] + pull @ (y[i][seen] - c[seen])
        noise[np.ix_(~seen, ~seen)] = v[np.ix_(~seen, ~seen)] - pull @ v[np.ix_(seen, ~seen)]
        close(found.mean[i, 0], np.concatenate([x, slope @ x + constant]))
        upper = np.concatenate([p, p @ slope.T], 1)
        close(
            found.covariance[i, 0], np.concatenate([upper, np.concatenate([slope @ p, slope @ p @ slope.T + noise], 1)])
        )
    close(found.weights[:3], states.weights[:3])
    assert found.weights[3] == 0


# ---------------------------------------------------------------------- errors


def test_calls_that_cannot_be_answered():
    begin = model()
    y, _ = data(begin)
    counts = SwitchingConjugate(GammaPoisson(t([1.0, 2.0])), t([[0.5, 0.5], [0.5, 0.5]]), t([1.0, 1.0]))
    with pytest.raises(TypeError, match=r"em.model: expected a SwitchingLinearGaussian"):
        em(counts, y)
    with pytest.raises(TypeError, match=r"em.y: expected a torch.Tensor"):
        em(begin, [1.0])
    for fixed, got in ((("speed",), "speed"), ("dynamics", "'dynamics'")):
        with pytest.raises(ValueError, match=rf"em.fixed: expected names among dynamics, .*got {got}"):
            em(begin, y, fixed=fixed)
    with pytest.raises(ValueError, match=r"em.shared: expected names among .*got transition"):
        em(begin, y, shared=("transition",))
    with pytest.raises(ValueError, match=r"em.shared: expected dynamics equal in every mode"):
        em(begin, y, shared=("dynamics",))
    varying = replace(begin, dynamics=begin.dynamics.expand(5, 2, 2, 2))
    with pytest.raises(ValueError, match=r'dynamics with T=5. Add "dynamics" to fixed'):
        em(varying, y)
    for change in ({"steps": -1}, {"tol": -1.0}, {"tol": NAN}):
        with pytest.raises(ValueError, match=r"em: expected steps ≥ 0, tol ≥ 0 and y with T ≥ 1"):
            em(begin, y, **change)
    with pytest.raises(ValueError, match=r"em: expected steps ≥ 0"):
        em(begin, y[:, :0])
    with pytest.raises(ValueError, match=r"em.order: expected an integer ≥ 2"):
        em(begin, y, order=1)
