"""Random switching models against sums over all mode paths in NumPy, and against the laws that every filter has.

The oracle writes the states and observations of a mode path as one Gaussian vector and conditions it at once, so that
it shares neither code nor algorithm with the engine. Units are changed afterwards, by numbers that the oracle never
meets: a model in other units must give the same answer in those units.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import special, stats

from cumulant.filters import (
    IMM,
    BetaBernoulli,
    DirichletCategorical,
    GammaPoisson,
    NormalGamma,
    NormalNormal,
    Slots,
    SmootherWarning,
    SwitchingConjugate,
    SwitchingLinearGaussian,
    em,
    exact,
    gpb,
    imm,
    init,
    kim,
    smooth,
    step,
)
from tests.generated.properties import holds_for
from tests.generated.tensors import seeds

NAN = float("nan")
MOST_PATHS = 256


@dataclass(frozen=True)
class Case:
    """A model and a sequence.

    zeros     the share of transitions that cannot happen
    missing   none | entries | rows | all
    ranks     of process noise and initial covariance: full | low | none
    varying   whether the parameters have a time axis
    decades   powers of ten, up and down, by which the units of states and observations differ
    outlier   the power of ten of the last observation
    method    gpb1 | gpb2 | gpb3 | imm, of a filter
    order     of a smoother
    batch     the shape of a batch of such sequences
    masked    whether they have different lengths
    fixed     parameters that are not learnt
    """

    seed: int
    modes: int = 2
    dim: int = 2
    observed: int = 2
    steps: int = 3
    start: str = "prior"
    zeros: float = 0.0
    missing: str = "none"
    ranks: str = "full"
    varying: bool = False
    decades: int = 0
    outlier: int = 0
    method: str = "imm"
    order: int = 2
    batch: tuple[int, ...] = ()
    masked: bool = False
    fixed: tuple[str, ...] = ()


METHODS = {"gpb1": (1, 0), "gpb2": (2, 1), "gpb3": (3, 2), "imm": (1, 1)}
FIXED = (), ("observation", "initial_covariance"), ("dynamics", "state_offset", "transition")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    modes, start = draw(st.integers(1, 4)), draw(st.sampled_from(["prior", "belief"]))
    longest = {1: 6, 2: 5, 3: 4, 4: 3}[modes]
    return Case(
        seed=draw(seeds()),
        modes=modes,
        dim=draw(st.integers(1, 4)),
        observed=draw(st.integers(0, 3)),
        steps=draw(st.integers(1, longest)),
        start=start,
        zeros=draw(st.sampled_from([0.0, 0.5, 0.9])),
        missing=draw(st.sampled_from(["none", "entries", "rows", "all"])),
        ranks=draw(st.sampled_from(["full", "low", "none"])),
        varying=draw(st.booleans()),
        decades=draw(st.sampled_from([0, 3, 8])),
        outlier=draw(st.sampled_from([0, 0, 3, 9])),
        method=draw(st.sampled_from(sorted(METHODS))),
        order=draw(st.integers(2, 4)),
        batch=draw(st.sampled_from([(), (0,), (1,), (3,), (2, 2), (0, 2)])),
        masked=draw(st.booleans()),
        fixed=draw(st.sampled_from(FIXED)),
    )


class Arrays(NamedTuple):
    """Parameters in unit scales, all but the initial law with a time axis."""

    transition: np.ndarray
    dynamics: np.ndarray
    process_noise: np.ndarray
    observation: np.ndarray
    observation_noise: np.ndarray
    state_offset: np.ndarray
    observation_offset: np.ndarray
    initial_mean: np.ndarray
    initial_covariance: np.ndarray
    initial_modes: np.ndarray


class Built(NamedTuple):
    """The arrays and y (T, m) of a case, its units, and the model and observations in those units."""

    arrays: Arrays
    y: np.ndarray
    state_unit: np.ndarray
    observation_unit: np.ndarray
    model: SwitchingLinearGaussian
    observations: torch.Tensor


def build(case: Case) -> Built:
    rng, (modes, d, m) = np.random.default_rng(case.seed), (case.modes, case.dim, case.observed)
    times = case.steps if case.varying else 1

    def rows(*shape):
        free = rng.dirichlet(np.ones(modes), size=shape)
        kept = rng.random(free.shape) >= case.zeros
        np.put_along_axis(kept, rng.integers(modes, size=(*shape, 1)), True, -1)
        free = np.where(kept, free + 1e-3, 0)
        return free / free.sum(-1, keepdims=True)

    def covariances(*shape, n, rank):
        half = rng.normal(size=(*shape, n, rank))
        return half @ half.swapaxes(-1, -2)

    rank = {"full": d, "low": d // 2, "none": 0}[case.ranks]
    noise = covariances(times, modes, n=m, rank=m) + 0.1 * np.eye(m)
    arrays = Arrays(
        rows(times, modes),
        rng.normal(size=(times, modes, d, d)) / np.sqrt(d),
        covariances(times, modes, n=d, rank=rank),
        rng.normal(size=(times, modes, m, d)),
        noise,
        rng.normal(size=(times, modes, d)),
        rng.normal(size=(times, modes, m)),
        rng.normal(size=(modes, d)),
        covariances(modes, n=d, rank=rank),
        rows(1)[0],
    )
    y = 2 * rng.normal(size=(case.steps, m))
    y[-1] *= 10.0**case.outlier
    if case.missing == "entries":
        y[rng.random(y.shape) < 0.4] = NAN
    if case.missing == "rows":
        y[rng.random(len(y)) < 0.4] = NAN
    if case.missing == "all":
        y[:] = NAN
    x, u = (10.0 ** rng.uniform(-case.decades, case.decades, size=n) for n in (d, m))
    model = model_of(arrays, x, u, case.start, case.varying)
    whole = Arrays(*(np.broadcast_to(a, (case.steps, *a.shape[1:])) for a in arrays[:7]), *arrays[7:])
    return Built(whole, y, x, u, model, torch.tensor(y * u))


def model_of(arrays: Arrays, x, u, start: str, varying: bool) -> SwitchingLinearGaussian:
    """The model in units x of the state and u of the observations."""
    scaled = arrays._replace(
        dynamics=arrays.dynamics * x[:, None] / x,
        process_noise=arrays.process_noise * x[:, None] * x,
        observation=arrays.observation * u[:, None] / x,
        observation_noise=arrays.observation_noise * u[:, None] * u,
        state_offset=arrays.state_offset * x,
        observation_offset=arrays.observation_offset * u,
        initial_mean=arrays.initial_mean * x,
        initial_covariance=arrays.initial_covariance * x[:, None] * x,
    )
    timed = {
        name: torch.tensor(a if varying else a[0]) for name, a in scaled._asdict().items() if "initial" not in name
    }
    first = {name: torch.tensor(a) for name, a in scaled._asdict().items() if "initial" in name}
    return SwitchingLinearGaussian(**timed, **first, start=start)


# -------------------------------------------------------------------------------------------------- the sum over paths


class Paths(NamedTuple):
    """Mode paths (P, T) of positive probability given y, their log weights log p(path, y), and the moments of x."""

    modes: np.ndarray
    log_weights: np.ndarray
    mean: np.ndarray  # (P, T, d)
    covariance: np.ndarray  # (P, T, d, d)


class Law(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray
    mode_probabilities: np.ndarray
    mode_means: np.ndarray
    mode_covariances: np.ndarray


def all_paths(p: Arrays, y: np.ndarray, start: str) -> Paths:
    """Every path as one Gaussian vector of all states and observations, conditioned on what was seen."""
    steps, m, d = len(y), y.shape[1], p.initial_mean.shape[1]
    before = int(start == "belief")
    n = steps + before
    paths = np.array(list(itertools.product(range(len(p.initial_modes)), repeat=n)))
    assert len(paths) <= MOST_PATHS * 4
    with np.errstate(divide="ignore"):
        log_weights = np.log(p.initial_modes)[paths[:, 0]]
        for k in range(1, n):
            log_weights = log_weights + np.log(p.transition[k - before])[paths[:, k - 1], paths[:, k]]
    possible = np.isfinite(log_weights)
    paths, log_weights = paths[possible], log_weights[possible]
    count = len(paths)
    mean, cov = np.zeros((count, n, d)), np.zeros((count, n, n, d, d))
    mean[:, 0], cov[:, 0, 0] = p.initial_mean[paths[:, 0]], p.initial_covariance[paths[:, 0]]
    for k in range(1, n):
        s, t = paths[:, k], k - before
        f = p.dynamics[t][s]
        mean[:, k] = np.einsum("pij,pj->pi", f, mean[:, k - 1]) + p.state_offset[t][s]
        for j in range(k):
            cov[:, k, j] = f @ cov[:, k - 1, j]
            cov[:, j, k] = cov[:, k, j].swapaxes(-1, -2)
        cov[:, k, k] = f @ cov[:, k - 1, k - 1] @ f.swapaxes(-1, -2) + p.process_noise[t][s]
    flat = cov.transpose(0, 1, 3, 2, 4).reshape(count, n * d, n * d)
    maps, noise = np.zeros((count, steps * m, n * d)), np.zeros((count, steps * m, steps * m))
    shift = np.zeros((count, steps * m))
    for t in range(steps):
        s, r, c = paths[:, t + before], slice(t * m, (t + 1) * m), slice((t + before) * d, (t + before + 1) * d)
        maps[:, r, c], noise[:, r, r] = p.observation[t][s], p.observation_noise[t][s]
        shift[:, r] = p.observation_offset[t][s]
    seen = ~np.isnan(y.ravel())
    maps, noise = maps[:, seen], noise[:, seen][:, :, seen]
    spread = maps @ flat @ maps.swapaxes(-1, -2) + noise
    error = y.ravel()[seen] - shift[:, seen] - np.einsum("pij,pj->pi", maps, mean.reshape(count, -1))
    gain = np.linalg.solve(spread, maps @ flat).swapaxes(-1, -2)
    distance = np.einsum("pi,pi->p", error, np.linalg.solve(spread, error[..., None])[..., 0])
    log_weights = log_weights - 0.5 * (distance + np.linalg.slogdet(2 * np.pi * spread)[1])
    after = (mean.reshape(count, -1) + np.einsum("pij,pj->pi", gain, error)).reshape(count, n, d)
    # Joseph's form, in which nothing large is subtracted
    keep = np.eye(n * d) - gain @ maps
    whole = keep @ flat @ keep.swapaxes(-1, -2) + gain @ noise @ gain.swapaxes(-1, -2)
    whole = whole.reshape(count, n, d, n, d)
    blocks = np.stack([whole[:, k, :, k] for k in range(before, n)], 1)
    return Paths(paths[:, before:], log_weights, after[:, before:], blocks)


def mixed(log_weights: np.ndarray, means: np.ndarray, covariances: np.ndarray):
    weights = special.softmax(log_weights)
    mean = np.tensordot(weights, means, 1)
    apart = means - mean
    return mean, np.tensordot(weights, covariances, 1) + np.einsum("p,pi,pj->ij", weights, apart, apart)


def law_at(found: Paths, t: int, modes: int) -> Law:
    """The law of (s_t, x_t); NaN for modes that cannot be."""
    d, here = found.mean.shape[-1], found.modes[:, t]
    each = [
        mixed(found.log_weights[here == s], found.mean[here == s, t], found.covariance[here == s, t])
        if (here == s).any()
        else (np.full(d, NAN), np.full((d, d), NAN))
        for s in range(modes)
    ]
    weights = special.softmax(found.log_weights)
    shares = np.array([weights[here == s].sum() for s in range(modes)])
    return Law(
        *mixed(found.log_weights, found.mean[:, t], found.covariance[:, t]),
        shares,
        *map(np.array, zip(*each, strict=True)),
    )


# ----------------------------------------------------------------------------------------------------------- comparing


def agrees(ours, law: Law, built: Built, size: float, slack: float = 1e-8) -> None:
    """Means within a share of their deviations, covariances of theirs, in the units of the oracle.

    ``size`` is that of the largest observation: what an outlier moves is known to its rounding.
    """
    x = built.state_unit
    rounding = slack * size**2
    shares = ours.mode_probabilities.numpy()
    np.testing.assert_allclose(shares, law.mode_probabilities, rtol=1e-7, atol=min(rounding, 1e-4))
    pairs = [(ours.mean.numpy(), ours.covariance.numpy(), law.mean, law.covariance)]
    for s, share in enumerate(law.mode_probabilities):
        if share > 1e-9:
            given = ours.mode_means[s].numpy(), ours.mode_covariances[s].numpy()
            pairs.append((*given, law.mode_means[s], law.mode_covariances[s]))
    for mean, covariance, their_mean, their_covariance in pairs:
        np.testing.assert_allclose(mean / x, their_mean, rtol=slack, atol=slack * size)
        np.testing.assert_allclose(covariance / x / x[:, None], their_covariance, rtol=slack, atol=rounding)


def size_of(case: Case, built: Built) -> float:
    return max(1.0, float(np.nanmax(np.abs(built.y), initial=0.0)))


def at(record, t: int):
    return type(record)(*(None if part is None else part[t] for part in record))


def enough(case: Case) -> int:
    """An order that forgets nothing."""
    return case.steps + (case.start == "belief")


def likelihoods(case: Case, built: Built) -> np.ndarray:
    """log p(y_1 … y_t) in the units of the model, t = 0 … T."""
    found = [0.0]
    units = np.where(np.isnan(built.y), 0, np.log(built.observation_unit)).sum(-1).cumsum()
    for t in range(case.steps):
        paths = all_paths(built.arrays, built.y[: t + 1], case.start)
        found.append(special.logsumexp(paths.log_weights) - units[t])
    return np.array(found)


def quiet_smooth(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmootherWarning)
        return smooth(*arguments, **options)


def test_the_smoother_is_near_the_sum_over_paths_without_process_noise():
    """Laws are then points and mixtures of points: what rounding says of them must not be taken for information."""
    errors = []
    for seed in range(25):
        built = build(Case(seed=seed, dim=3, steps=5, ranks="none"))
        exactly = smooth(built.model, built.observations, method="exact").mean
        found = quiet_smooth(built.model, built.observations).mean, gpb(built.model, built.observations).mean
        errors.append([float((mean - exactly).square().mean().sqrt()) for mean in found])
    smoothed, filtered = np.array(errors).T
    assert np.median(smoothed) < 0.2 * np.median(filtered)
    assert (smoothed > filtered + 1e-6).mean() < 0.2


# -------------------------------------------------------------------------------------------------- cases once found


def test_a_covariance_in_units_far_apart_is_still_definite():
    """Its eigenvalues in its own units are rounding; those of its correlations are not."""
    case = Case(seed=2, modes=3, dim=2, observed=3, steps=1, missing="entries", decades=8)
    test_filters_that_forget_nothing_are_the_sum_over_paths.hypothesis.inner_test(case)  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize("size", [1e12, 1e40, 1e120])
def test_evidence_of_any_size_leaves_probabilities_with_sum_one(size):
    """Two modes that explain an outlier equally badly, with log-likelihoods whose rounding is larger than log 2."""
    eye = torch.eye(1, dtype=torch.float64)
    model = SwitchingLinearGaussian(
        torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=torch.float64),
        eye,
        eye,
        eye,
        eye,
        initial_mean=0 * eye[0],
        initial_covariance=eye,
        initial_modes=torch.tensor([0.6, 0.4], dtype=torch.float64),
    )
    y = torch.tensor([[size], [0.0], [-size]], dtype=torch.float64)
    for method in METHODS:
        found = run(method, model, y).mode_probabilities
        torch.testing.assert_close(found[0], model.initial_modes, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.sum(-1), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- properties


@holds_for(cases(), examples=30)
def test_filters_that_forget_nothing_are_the_sum_over_paths(case: Case) -> None:
    built = build(case)
    size = size_of(case, built)
    expected = likelihoods(case, built)
    for filtered in (gpb(built.model, built.observations, order=enough(case)), exact(built.model, built.observations)):
        total = filtered.log_likelihood.cumsum(-1).numpy()
        np.testing.assert_allclose(total, expected[1:], rtol=1e-8, atol=1e-8)
        for t in range(case.steps):
            after = law_at(all_paths(built.arrays, built.y[: t + 1], case.start), t, case.modes)
            agrees(at(filtered, t), after, built, size)
            unseen = np.concatenate([built.y[:t], np.full((1, case.observed), NAN)])
            prior = law_at(all_paths(built.arrays, unseen, case.start), t, case.modes)
            x = built.state_unit
            np.testing.assert_allclose(filtered.prior_mean[t].numpy() / x, prior.mean, rtol=1e-8, atol=1e-8 * size)
            spread = filtered.prior_covariance[t].numpy() / x / x[:, None]
            np.testing.assert_allclose(spread, prior.covariance, rtol=1e-8, atol=1e-8 * size**2)


@holds_for(cases(), examples=25)
def test_a_smoother_of_an_order_above_the_length_is_the_sum_over_paths(case: Case) -> None:
    built = build(case)
    found = quiet_smooth(built.model, built.observations, order=max(2, enough(case) + 1))
    paths = all_paths(built.arrays, built.y, case.start)
    for t in range(case.steps):
        agrees(at(found, t), law_at(paths, t, case.modes), built, size_of(case, built), 1e-7)


@dataclass(frozen=True)
class Hypothesis:
    log_weight: float
    mean: np.ndarray
    covariance: np.ndarray


def merged(kept: dict[tuple[int, ...], Hypothesis], keep: int) -> dict[tuple[int, ...], Hypothesis]:
    """One normal law for all hypotheses that share their last ``keep`` modes; with 0, one law for all modes."""
    groups: dict[tuple[int, ...], list[Hypothesis]] = {}
    for key, value in kept.items():
        groups.setdefault(key[-max(keep, 1) :], []).append(value)
    out = {key: joined(group) for key, group in groups.items()}
    if keep == 0:
        common = joined(list(kept.values()))
        out = {key: Hypothesis(h.log_weight, common.mean, common.covariance) for key, h in out.items()}
    return out


def joined(group: list[Hypothesis]) -> Hypothesis:
    logs = np.array([h.log_weight for h in group])
    parts = mixed(logs, np.array([h.mean for h in group]), np.array([h.covariance for h in group]))
    return Hypothesis(float(special.logsumexp(logs)), *parts)


def textbook(p: Arrays, y: np.ndarray, start: str, slots: tuple[int, int]):
    """The filter that merges before and after each observation as the slots say: laws and log-likelihoods."""
    modes, laws, evidence = range(len(p.initial_modes)), [], []
    kept = {
        (s,): Hypothesis(np.log(p.initial_modes[s]), p.initial_mean[s], p.initial_covariance[s])
        for s in modes
        if p.initial_modes[s] > 0
    }
    for t, row in enumerate(y):
        if t or start == "belief":
            grown = {
                (*key, s): Hypothesis(h.log_weight + np.log(p.transition[t][key[-1], s]), h.mean, h.covariance)
                for key, h in merged(kept, slots[1]).items()
                for s in modes
                if p.transition[t][key[-1], s] > 0
            }
            kept = {key: moved(p, t, key[-1], h) for key, h in merged(grown, slots[0]).items()}
        kept = {key: seen(p, t, key[-1], h, row) for key, h in kept.items()}
        total = special.logsumexp([h.log_weight for h in kept.values()])
        kept = {key: Hypothesis(h.log_weight - total, h.mean, h.covariance) for key, h in kept.items()}
        evidence.append(total)
        each = merged(kept, 1)
        nothing = Hypothesis(-np.inf, np.full_like(p.initial_mean[0], NAN), np.full_like(p.initial_covariance[0], NAN))
        rows = [each.get((s,), nothing) for s in modes]
        whole = joined(list(kept.values()))
        shares = np.exp([h.log_weight for h in rows])
        laws.append(
            Law(
                whole.mean,
                whole.covariance,
                shares,
                *(np.array([getattr(h, n) for h in rows]) for n in ("mean", "covariance")),
            )
        )
    return laws, np.array(evidence)


def moved(p: Arrays, t: int, s: int, h: Hypothesis) -> Hypothesis:
    f = p.dynamics[t, s]
    return Hypothesis(h.log_weight, f @ h.mean + p.state_offset[t, s], f @ h.covariance @ f.T + p.process_noise[t, s])


def seen(p: Arrays, t: int, s: int, h: Hypothesis, row: np.ndarray) -> Hypothesis:
    there = ~np.isnan(row)
    maps, noise = p.observation[t, s][there], p.observation_noise[t, s][np.ix_(there, there)]
    error = row[there] - maps @ h.mean - p.observation_offset[t, s][there]
    spread = maps @ h.covariance @ maps.T + noise
    gain = np.linalg.solve(spread, maps @ h.covariance).T
    keep = np.eye(len(h.mean)) - gain @ maps
    gained = -0.5 * (error @ np.linalg.solve(spread, error) + np.linalg.slogdet(2 * np.pi * spread)[1])
    return Hypothesis(
        h.log_weight + gained, h.mean + gain @ error, keep @ h.covariance @ keep.T + gain @ noise @ gain.T
    )


def run(name: str, model, y: torch.Tensor, **options):
    return imm(model, y, **options) if name == "imm" else gpb(model, y, order=METHODS[name][0], **options)


@holds_for(cases(), examples=40)
def test_filters_that_forget_are_the_textbook(case: Case) -> None:
    built = build(case)
    size = size_of(case, built)
    laws, evidence = textbook(built.arrays, built.y, case.start, METHODS[case.method])
    filtered = run(case.method, built.model, built.observations)
    units = np.where(np.isnan(built.y), 0, np.log(built.observation_unit)).sum(-1)
    np.testing.assert_allclose(filtered.log_likelihood.numpy(), evidence - units, rtol=1e-8, atol=1e-8)
    for t, law in enumerate(laws):
        agrees(at(filtered, t), law, built, size)


def same(ours, theirs, slack: float = 1e-9) -> None:
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        if a is not None:
            torch.testing.assert_close(
                a,
                b,
                rtol=slack,
                atol=slack * (1 + float(b.abs().max()) if b.numel() else 1),
                msg=lambda m, n=name: f"{n}: {m}",
            )


def nudged(case: Case, built: Built, y: torch.Tensor, rng: np.random.Generator):
    """The model and observations with a few roundings more."""

    def nudge(a: np.ndarray) -> np.ndarray:
        return a * (1 + 4 * np.finfo(float).eps * rng.normal(size=a.shape))

    names = ("dynamics", "observation", "state_offset", "observation_offset", "initial_mean")
    arrays = built.arrays._replace(**{name: nudge(getattr(built.arrays, name)) for name in names})
    if not case.varying:
        arrays = arrays._replace(**{name: getattr(arrays, name)[:1] for name in Arrays._fields[:7]})
    model = model_of(arrays, built.state_unit, built.observation_unit, case.start, case.varying)
    return model, torch.tensor(nudge(y.numpy()))


@holds_for(cases(), examples=25)
def test_a_sequence_has_the_same_answer_alone_and_in_a_batch(case: Case) -> None:
    built = build(case)
    rng = np.random.default_rng(case.seed)
    noise = torch.tensor(rng.normal(size=(*case.batch, case.steps, case.observed)) * built.observation_unit)
    y = built.observations + noise
    lengths = torch.tensor(rng.integers(0, case.steps + 1, size=case.batch)) if case.masked else None
    mask = None if lengths is None else torch.arange(case.steps) < lengths[..., None]
    filtered = run(case.method, built.model, y, mask=mask)
    smoothed = quiet_smooth(built.model, y, mask=mask)
    assert filtered.mean.shape == smoothed.mean.shape == (*case.batch, case.steps, case.dim)
    # without noise a smoother divides by the spread between modes, however small: it is compared at what that does
    # to a few roundings of the model
    near = []
    if case.ranks != "full":
        for _ in range(3):
            model, other = nudged(case, built, y, rng)
            near.append(quiet_smooth(model, other, mask=mask))
    x = torch.tensor(built.state_unit)
    for index in np.ndindex(*case.batch):
        own = case.steps if lengths is None else int(lengths[index])
        for record, alone, others in (
            (filtered, run(case.method, built.model, y[index][:own]), []),
            (smoothed, quiet_smooth(built.model, y[index][:own]), near),
        ):
            for name in ("mode_probabilities", "mean", "covariance"):
                unit = {"mean": x, "covariance": x[:, None] * x}.get(name, 1)
                b = getattr(alone, name) / unit
                a, *c = (getattr(r, name)[index][:own] / unit for r in (record, *others))
                slack = 1e-9 * (1 + float(b.abs().max()) if b.numel() else 1)
                slack += max((float((a - other).abs().max()) for other in c if a.numel()), default=0.0)
                torch.testing.assert_close(a, b, rtol=1e-9, atol=slack)


@holds_for(cases(), examples=25)
def test_modes_have_no_order(case: Case) -> None:
    built = build(case)
    turn = np.random.default_rng(case.seed).permutation(case.modes)
    arrays = built.arrays._replace(
        **{name: getattr(built.arrays, name)[:, turn] for name in Arrays._fields[1:7]},
        **{name: getattr(built.arrays, name)[turn] for name in Arrays._fields[7:]},
        transition=built.arrays.transition[:, turn][:, :, turn],
    )
    model = model_of(arrays, built.state_unit, built.observation_unit, case.start, True)
    x = torch.tensor(built.state_unit)
    pairs = [(run(case.method, model, built.observations), run(case.method, built.model, built.observations))]
    # without noise a smoother divides by the spread between modes, however small, and so by its rounding
    if case.ranks == "full":
        pairs += [(quiet_smooth(model, built.observations), quiet_smooth(built.model, built.observations))]
    for ours, theirs in pairs:
        size = float((theirs.mean / x).abs().max())
        torch.testing.assert_close(ours.mode_probabilities, theirs.mode_probabilities[:, turn], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(ours.mean / x, theirs.mean / x, rtol=1e-8, atol=1e-8 * (1 + size))
        spread = x[:, None] * x
        torch.testing.assert_close(
            ours.covariance / spread, theirs.covariance / spread, rtol=1e-8, atol=1e-8 * (1 + size**2)
        )


@holds_for(cases(), examples=40)
def test_covariances_have_no_negative_variance(case: Case) -> None:
    built = build(case)
    filtered = gpb(built.model, built.observations, order=case.order)
    smoothed = quiet_smooth(built.model, built.observations, order=case.order)
    parts = filtered.prior_covariance, filtered.covariance, filtered.mode_covariances
    wide = torch.cat([filtered.prior_covariance[:, None], filtered.mode_covariances], 1)
    largest = wide.diagonal(dim1=-2, dim2=-1).amax((0, 1)).clamp_min(1e-300)
    for covariance in (*parts, smoothed.covariance, smoothed.mode_covariances):
        assert covariance.isfinite().all()
        assert covariance.equal(covariance.mT)
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        assert (variances >= -1e-12 * largest).all()
        deviation = variances.clamp_min(0).sqrt()
        slack = deviation + 1e-4 * largest.sqrt()
        correlation = covariance / slack[..., :, None] / slack[..., None, :]
        assert torch.linalg.eigvalsh(correlation).amin() >= -1e-5  # which is rounding, as that of the variances


@holds_for(cases(), examples=25)
def test_a_missing_observation_only_predicts(case: Case) -> None:
    built = build(replace(case, varying=False))
    y = torch.cat([built.observations, torch.full((1, case.observed), NAN, dtype=torch.float64)])
    longer, shorter = run(case.method, built.model, y), run(case.method, built.model, built.observations)
    same(type(longer)(*(None if part is None else part[:-1] for part in longer)), shorter)
    assert longer.log_likelihood[-1] == 0
    x = torch.tensor(built.state_unit)
    torch.testing.assert_close(longer.mean[-1] / x, longer.prior_mean[-1] / x, rtol=1e-9, atol=1e-9)
    spread = x[:, None] * x
    torch.testing.assert_close(
        longer.covariance[-1] / spread, longer.prior_covariance[-1] / spread, rtol=1e-9, atol=1e-9
    )
    expected = shorter.mode_probabilities[-1] @ built.model.transition
    torch.testing.assert_close(longer.mode_probabilities[-1], expected, rtol=1e-9, atol=1e-12)


@holds_for(cases(), examples=25)
def test_the_last_step_has_nothing_to_smooth(case: Case) -> None:
    """In one pass; a second one merges modes at earlier steps in hindsight, which reaches the last step too."""
    built = build(case)
    method = ("propagation", "correction", "kim")[case.seed % 3]
    filtered, smoothed = (
        gpb(built.model, built.observations, order=case.order),
        quiet_smooth(built.model, built.observations, order=case.order, method=method, sweeps=1),
    )
    x = torch.tensor(built.state_unit)
    for name, unit in {"mean": x, "covariance": x[:, None] * x, "mode_probabilities": 1}.items():
        a, b = getattr(smoothed, name)[-1] / unit, getattr(filtered, name)[-1] / unit
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * (1 + float(b.abs().max())))
    assert (smoothed.variance_ratio >= 0).all()
    torch.testing.assert_close(
        smoothed.variance_ratio[-1], torch.ones(case.dim, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmootherWarning)
        again = kim(built.model, imm(built.model, built.observations))
    assert all(part.isfinite().all() for part in again[:-1])


@holds_for(cases(), examples=20)
def test_one_step_at_a_time_is_the_whole_sequence(case: Case) -> None:
    built = build(case)
    whole = run(case.method, built.model, built.observations)
    state = init(built.model, slots=IMM if case.method == "imm" else Slots.gpb(METHODS[case.method][0]))
    for t, row in enumerate(built.observations):
        state, record = step(state, row)
        same(record, at(whole, t), 1e-12)


@holds_for(cases(), examples=20)
def test_em_never_returns_a_lower_likelihood_than_it_was_given(case: Case) -> None:
    built = build(replace(case, varying=False))
    rng = np.random.default_rng(case.seed)
    shape = (*case.batch, case.steps, case.observed)
    y = built.observations + torch.tensor(rng.normal(size=shape) * built.observation_unit)
    found = em(built.model, y, order=min(case.order, 3), steps=4, fixed=case.fixed)
    before = gpb(built.model, y, order=min(case.order, 3)).log_likelihood.sum()
    after = gpb(found.model, y, order=min(case.order, 3)).log_likelihood.sum()
    assert after >= before
    assert found.log_likelihoods[0] == before
    assert found.log_likelihood == after == found.log_likelihoods[found.log_likelihoods.isfinite()].max()


# -------------------------------------------------------------------------------------------------- conjugate families


@dataclass(frozen=True)
class Conjugate:
    """A switching model on a conjugate family; ``memory`` is all, none, or part of what was learnt."""

    seed: int
    family: str = "GammaPoisson"
    modes: int = 2
    steps: int = 3
    start: str = "prior"
    zeros: float = 0.0
    missing: bool = False
    memory: str = "all"
    size: float = 1.0


conjugates = st.builds(
    Conjugate,
    seed=seeds(),
    family=st.sampled_from(["GammaPoisson", "BetaBernoulli", "DirichletCategorical", "NormalNormal", "NormalGamma"]),
    modes=st.integers(1, 4),
    steps=st.integers(1, 3),
    start=st.sampled_from(["prior", "belief"]),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
    missing=st.booleans(),
    memory=st.sampled_from(["all", "none", "part"]),
    size=st.sampled_from([1e-4, 1.0, 1e4]),
)


class ConjugateArrays(NamedTuple):
    transition: np.ndarray
    initial_modes: np.ndarray
    prior: np.ndarray  # (M, k)
    known: np.ndarray  # (M,), what a mode knows about an observation
    memory: np.ndarray  # (M,)
    y: np.ndarray  # (T,)


def conjugate_arrays(case: Conjugate) -> ConjugateArrays:
    rng, m = np.random.default_rng(case.seed), case.modes

    def rows(*shape):
        free = rng.dirichlet(np.ones(m), size=shape)
        kept = rng.random(free.shape) >= case.zeros
        np.put_along_axis(kept, rng.integers(m, size=(*shape, 1)), True, -1)
        free = np.where(kept, free + 1e-3, 0)
        return free / free.sum(-1, keepdims=True)

    count = {"GammaPoisson": 2, "BetaBernoulli": 2, "DirichletCategorical": 3, "NormalNormal": 2, "NormalGamma": 4}
    prior = case.size * rng.uniform(0.5, 3, size=(m, count[case.family]))
    if case.family == "NormalGamma":
        prior[:, 2] = rng.uniform(1.5, 4, size=m)  # a shape with which the variance is finite
    if case.family in ("NormalNormal", "NormalGamma"):
        prior[:, 0] = rng.normal(size=m)
    y = {
        "GammaPoisson": rng.poisson(3, size=case.steps),
        "BetaBernoulli": rng.integers(2, size=case.steps),
        "DirichletCategorical": rng.integers(3, size=case.steps),
    }.get(case.family, 2 * rng.normal(size=case.steps))
    y = np.where(case.missing & (rng.random(case.steps) < 0.4), NAN, y)
    memory = {"all": np.ones(m), "none": np.zeros(m), "part": rng.random(m)}[case.memory]
    return ConjugateArrays(rows(m), rows(1)[0], prior, rng.uniform(0.5, 3, size=m), memory, y)


def recalled(family: str, parameters: np.ndarray, prior: np.ndarray, memory: float) -> np.ndarray:
    """Natural parameters memory · θ + (1 − memory) · θ_0, there and back."""
    natural, ordinary = NATURAL.get(family, (lambda p: p, lambda p: p))
    return ordinary(memory * natural(parameters) + (1 - memory) * natural(prior))


NATURAL = {
    "NormalNormal": (lambda p: np.array([p[0] / p[1], 1 / p[1]]), lambda n: np.array([n[0] / n[1], 1 / n[1]])),
    "NormalGamma": (
        lambda p: np.array([p[0] * p[1], p[1], p[2], p[3] + p[1] * p[0] ** 2 / 2]),
        lambda n: np.array([n[0] / n[1], n[1], n[2], n[3] - n[0] ** 2 / n[1] / 2]),
    ),
}


def learnt(family: str, p: np.ndarray, y: float, known: float) -> tuple[np.ndarray, float]:
    """Parameters after y and log p(y), the predictive laws those of SciPy."""
    if family == "GammaPoisson":
        a, b = p
        return np.array([a + y, b + known]), float(stats.nbinom.logpmf(y, a, b / (b + known)))
    if family == "BetaBernoulli":
        a, b = p
        return np.array([a + y, b + 1 - y]), np.log((a if y else b) / (a + b))
    if family == "DirichletCategorical":
        return p + np.eye(len(p))[int(y)], np.log(p[int(y)] / p.sum())
    if family == "NormalNormal":
        m, v = p
        precision = 1 / v + 1 / known
        after = np.array([(m / v + y / known) / precision, 1 / precision])
        return after, float(stats.norm.logpdf(y, m, np.sqrt(v + known)))
    m, k, a, b = p
    weight = 1 / known
    after = np.array(
        [(k * m + weight * y) / (k + weight), k + weight, a + 0.5, b + k * weight * (y - m) ** 2 / (2 * (k + weight))]
    )
    return after, float(stats.t.logpdf(y, 2 * a, m, np.sqrt(b / a * (known + 1 / k))))


def state_moments(family: str, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if family == "GammaPoisson":
        return np.array([p[0] / p[1]]), np.array([[p[0] / p[1] ** 2]])
    if family == "BetaBernoulli":
        total = p.sum()
        return p[:1] / total, np.array([[p[0] * p[1] / total**2 / (total + 1)]])
    if family == "DirichletCategorical":
        mean = p / p.sum()
        return mean, (np.diag(mean) - np.outer(mean, mean)) / (p.sum() + 1)
    if family == "NormalNormal":
        return p[:1], np.array([[p[1]]])
    m, k, a, b = p
    return np.array([m, a / b]), np.diag([b / (k * (a - 1)), a / b**2])


def conjugate_model(case: Conjugate, arrays: ConjugateArrays) -> SwitchingConjugate:
    known = torch.tensor(arrays.known)
    family = {
        "GammaPoisson": lambda: GammaPoisson(known),
        "BetaBernoulli": BetaBernoulli,
        "DirichletCategorical": DirichletCategorical,
        "NormalNormal": lambda: NormalNormal(known),
        "NormalGamma": lambda: NormalGamma(known),
    }[case.family]()
    tensors = (torch.tensor(a) for a in (arrays.transition, arrays.prior, arrays.memory, arrays.initial_modes))
    return SwitchingConjugate(family, *tensors, start=case.start)


@holds_for(conjugates, examples=30)
def test_conjugate_filters_that_forget_nothing_are_the_sum_over_paths(case: Conjugate) -> None:
    arrays = conjugate_arrays(case)
    before = int(case.start == "belief")
    logs, ends, means, spreads = [], [], [], []
    for path in itertools.product(range(case.modes), repeat=case.steps + before):
        log_weight, p = _log(arrays.initial_modes[path[0]]), arrays.prior[path[0]]
        for t, y in enumerate(arrays.y):
            s = path[t + before]
            if t + before:
                log_weight += _log(arrays.transition[path[t + before - 1], s])
                p = recalled(case.family, p, arrays.prior[s], arrays.memory[s])
            if not np.isnan(y):
                p, gained = learnt(case.family, p, y, arrays.known[s])
                log_weight += gained
        if np.isfinite(log_weight):
            mean, spread = state_moments(case.family, p)
            for values, value in ((logs, log_weight), (ends, path[-1]), (means, mean), (spreads, spread)):
                values.append(value)
    total = special.logsumexp(logs)
    mean, covariance = mixed(np.array(logs), np.array(means), np.array(spreads))
    shares = np.array([np.exp(np.array(logs) - total)[np.array(ends) == s].sum() for s in range(case.modes)])
    model, y = conjugate_model(case, arrays), torch.tensor(arrays.y)[:, None]
    for filtered in (exact(model, y), gpb(model, y, order=case.steps + before)):
        np.testing.assert_allclose(filtered.total_log_likelihood.item(), total, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(filtered.mode_probabilities[-1].numpy(), shares, rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(filtered.mean[-1].numpy(), mean, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(filtered.covariance[-1].numpy(), covariance, rtol=1e-7, atol=1e-12)


@holds_for(conjugates, examples=15)
def test_conjugate_filters_that_forget_keep_their_laws(case: Conjugate) -> None:
    """Sequences alone and beside others, modes in another order, what is missing: for every filter that forgets."""
    arrays = conjugate_arrays(case)
    turn = np.random.default_rng(case.seed).permutation(case.modes)
    turned = ConjugateArrays(
        arrays.transition[turn][:, turn],
        arrays.initial_modes[turn],
        arrays.prior[turn],
        arrays.known[turn],
        arrays.memory[turn],
        arrays.y,
    )
    y = torch.tensor(np.append(arrays.y, NAN))[:, None]
    for name in METHODS:
        ours = run(name, conjugate_model(case, arrays), y)
        other = run(name, conjugate_model(case, turned), y)
        batch = run(name, conjugate_model(case, arrays), torch.stack([y, y.flip(0), y]))
        assert ours.log_likelihood[-1] == 0
        torch.testing.assert_close(ours.mean[-1], ours.prior_mean[-1], rtol=1e-9, atol=0)
        scale = ours.covariance[-1].diagonal(dim1=-2, dim2=-1).sqrt()
        scale = scale[..., :, None] * scale[..., None, :]
        after, before = ours.covariance[-1], ours.prior_covariance[-1]  # infinite where few data leave no variance
        assert ((after == before) | ((after - before).abs() <= 1e-9 * scale)).all()
        torch.testing.assert_close(other.mode_probabilities, ours.mode_probabilities[:, turn], rtol=1e-6, atol=1e-10)
        for part in ("mean", "covariance", "log_likelihood"):
            a, b, c = getattr(ours, part), getattr(other, part), getattr(batch, part)
            assert not a.isnan().any() if part == "covariance" else a.isfinite().all()
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-10)
            torch.testing.assert_close(c[2], a, rtol=1e-9, atol=1e-12)


def _log(value: float) -> float:
    return float(np.log(value)) if value > 0 else -np.inf
