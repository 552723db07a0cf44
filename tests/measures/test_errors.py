"""Bad input is refused in one sentence: ``<Object>.<argument>: expected …, got …. <what to do>``, tested by message."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import distributions as td

from cumulant import (
    Anderson,
    Box,
    Damped,
    Empirical,
    Gaussian,
    Measure,
    Sphere,
    convolve,
    fixed_point,
    from_distribution,
    independent,
    product,
)
from cumulant.geometry import maximum_entropy
from cumulant.kernels import dense_moments
from cumulant.testing import check_measure
from tests.cases import KEYS, LOG_H, t

SENTENCE = re.compile(r"^[\w.* +()'@]+: expected .+, got .+\. .+")
NAN, INF = float("nan"), float("inf")
Bad = tuple[Callable[[], object], type[Exception], list[str]]


def refuses(call: Callable[[], object], error: type[Exception], words: list[str]):
    """The call raises this error, in the one form, and the sentence has these words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert SENTENCE.match(message), message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def each(cases: dict[str, Bad]):
    return pytest.mark.parametrize(("call", "error", "words"), cases.values(), ids=cases.keys())


def zeros(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(*shape, **{"dtype": torch.float64} | options)


def keys() -> Empirical:
    return Empirical(t(KEYS), t(LOG_H))


def pairs() -> Empirical:
    """A batch of three measures on R²."""
    return Empirical(zeros(3, 4, 2))


def rows() -> Empirical:
    """One measure for each of four query rows."""
    return Empirical(t(KEYS), zeros(4, 7))


def gamma() -> Measure:
    return from_distribution(td.Gamma(t(3.0), t(2.0)))


# ---------------------------------------------------------------------- building measures

CONSTRUCTION: dict[str, Bad] = {
    "atoms: list": (lambda: Empirical([[1.0]]), TypeError, ["Empirical.atoms", "torch.Tensor", "list"]),
    "atoms: numpy of words": (
        lambda: Empirical(np.array([["a"]])),
        TypeError,
        ["Empirical.atoms", "ndarray", "torch.as_tensor"],
    ),
    "atoms: integers": (lambda: Empirical(torch.eye(2).long()), TypeError, ["Empirical.atoms", "floating", "int64"]),
    "atoms: no atom axis": (lambda: Empirical(zeros(5)), ValueError, ["Empirical.atoms", "(*batch, n, d)", "(5)"]),
    "atoms: NaN": (lambda: Empirical(t([[1.0, NAN]])), ValueError, ["Empirical.atoms", "finite", "1 entries"]),
    "atoms: infinite": (lambda: Empirical(t([[INF, -INF]])), ValueError, ["Empirical.atoms", "finite", "2 entries"]),
    "log_weights: length": (
        lambda: Empirical(t(KEYS), zeros(6)),
        ValueError,
        ["Empirical.log_weights", "n=7", "(6)", "(7, 3)"],
    ),
    "log_weights: rank": (
        lambda: Empirical(t(KEYS), zeros(1, 1, 1, 7)),
        ValueError,
        ["Empirical.log_weights", "(*batch, q, n=7)", "(1, 1, 1, 7)"],
    ),
    "log_weights: batch": (
        lambda: Empirical(zeros(3, 7, 2), zeros(2, 7)),
        ValueError,
        ["Empirical.log_weights", "broadcast", "(3,) and (2,)"],
    ),
    "log_weights: dtype": (
        lambda: Empirical(t(KEYS), torch.zeros(7)),
        TypeError,
        ["Empirical.log_weights", "torch.float64 as atoms", "torch.float32"],
    ),
    "log_weights: device": (
        lambda: Empirical(t(KEYS), zeros(7, device="meta")),
        ValueError,
        ["Empirical.log_weights", "cpu", "meta"],
    ),
    "log_weights: NaN": (
        lambda: Empirical(t(KEYS[:2]), t([0.0, NAN])),
        ValueError,
        ["Empirical.log_weights", "below +inf", "NaN", "log 0 = -inf is legal"],
    ),
    "log_weights: +inf": (
        lambda: Empirical(t(KEYS[:2]), t([0.0, INF])),
        ValueError,
        ["Empirical.log_weights", "below +inf"],
    ),
    "log_weights: list": (lambda: Empirical(t(KEYS[:1]), [0.0]), TypeError, ["Empirical.log_weights", "list"]),
    "loc: scalar": (lambda: Gaussian(t(0.0), t([[1.0]])), ValueError, ["Gaussian.loc", "(*batch, d)", "loc[None]"]),
    "loc: infinite": (lambda: Gaussian(t([INF]), t([[1.0]])), ValueError, ["Gaussian.loc", "finite"]),
    "covariance: variances": (
        lambda: Gaussian(zeros(2), t([1.0, 2.0])),
        ValueError,
        ["Gaussian.covariance", "(*batch, d=2, d=2)", "(2)", "diag_embed"],
    ),
    "covariance: NaN": (
        lambda: Gaussian(zeros(1), t([[NAN]])),
        ValueError,
        ["Gaussian.covariance", "finite"],
    ),
    "covariance: asymmetric": (
        lambda: Gaussian(zeros(2), t([[1.0, 0.5], [0.0, 1.0]])),
        ValueError,
        ["Gaussian.covariance", "symmetric", "asymmetry of 0.5", "(S + S.mT) / 2"],
    ),
    "covariance: indefinite": (
        lambda: Gaussian(zeros(2), t([[1.0, 2.0], [2.0, 1.0]])),
        ValueError,
        ["Gaussian.covariance", "positive semidefinite", "eigenvalue of -0.5", "Clip"],
    ),
    "covariance: one bad in a batch": (
        lambda: Gaussian(zeros(2), torch.stack([torch.eye(2).double(), -torch.eye(2).double()])),
        ValueError,
        ["Gaussian.covariance", "positive semidefinite", "eigenvalue of -1"],
    ),
    "covariance: dtype": (
        lambda: Gaussian(zeros(2), torch.eye(2)),
        TypeError,
        ["Gaussian.covariance", "torch.float64 as loc", "torch.float32"],
    ),
    "covariance: device": (
        lambda: Gaussian(zeros(2), zeros(2, 2, device="meta")),
        ValueError,
        ["Gaussian.covariance", "cpu as loc", "meta"],
    ),
    "covariance: batch": (
        lambda: Gaussian(zeros(3, 2), torch.eye(2).double().expand(2, 2, 2)),
        ValueError,
        ["Gaussian.covariance", "broadcast", "(3,) and (2,)"],
    ),
    "box: low > high": (lambda: Box(t([0.0, 1.0]), t([1.0, 0.0])), ValueError, ["Box.high", "low ≤ high", "Swap"]),
    "box: shapes": (lambda: Box(zeros(1), zeros(2)), ValueError, ["Box.high", "(*batch, d)", "(1,)", "(2,)"]),
    "box: scalars": (lambda: Box(t(0.0), t(1.0)), ValueError, ["Box.high", "(*batch, d)", "low[None]"]),
    "box: batch": (lambda: Box(zeros(2, 1), zeros(3, 1)), ValueError, ["Box.high", "broadcast", "(2, 1) and (3, 1)"]),
    "box: NaN": (lambda: Box(t([NAN]), t([1.0])), ValueError, ["Box.low", "finite"]),
    "box: dtype": (lambda: Box(torch.zeros(1), zeros(1)), TypeError, ["Box.high", "torch.float32 as low", "float64"]),
    "box: integers": (lambda: Box(torch.zeros(1).int(), zeros(1)), TypeError, ["Box.low", "floating", "int32"]),
    "sphere: dim 0": (lambda: Sphere(0), ValueError, ["Sphere.dim", "positive integer", "0", "circle has dim=2"]),
    "sphere: dim 2.5": (lambda: Sphere(2.5), ValueError, ["Sphere.dim", "positive integer", "2.5"]),
    "sphere: radius -1": (lambda: Sphere(3, -1.0), ValueError, ["Sphere.radius", "positive finite", "-1.0"]),
    "sphere: radius 0": (lambda: Sphere(3, 0.0), ValueError, ["Sphere.radius", "positive finite", "Empirical"]),
    "sphere: radius NaN": (lambda: Sphere(3, NAN), ValueError, ["Sphere.radius", "positive finite", "nan"]),
    "sphere: radii": (lambda: Sphere(3, t([1.0, INF])), ValueError, ["Sphere.radius", "positive finite", "inf"]),
    "sphere: integer radii": (lambda: Sphere(3, torch.tensor([1, 2])), TypeError, ["Sphere.radius", "floating"]),
}


@each(CONSTRUCTION)
def test_construction_refuses(call: Callable[[], object], error: type[Exception], words: list[str]):
    refuses(call, error, words)


# ---------------------------------------------------------------------- distributions

FAMILIES = ["Normal", "MultivariateNormal", "Bernoulli", "Categorical", "OneHotCategorical", "Poisson", "Gamma"]
FAMILIES += ["Exponential", "NegativeBinomial", "Laplace", "Uniform", "Independent"]
DISTRIBUTIONS: dict[str, Bad] = {
    "Cauchy": (lambda: from_distribution(td.Cauchy(t(0.0), t(1.0))), TypeError, [*FAMILIES, "got Cauchy", "Empirical"]),
    "subclass": (lambda: from_distribution(td.Chi2(t(3.0))), TypeError, [*FAMILIES, "got Chi2"]),
    "inside Independent": (
        lambda: from_distribution(td.Independent(td.Cauchy(zeros(2), zeros(2) + 1), 1)),
        TypeError,
        ["from_distribution.distribution", "got Cauchy"],
    ),
    "not a distribution": (lambda: from_distribution("Normal"), TypeError, [*FAMILIES, "got str"]),
    "full statistics": (
        lambda: from_distribution(td.Poisson(t(1.0)), full=True),
        TypeError,
        ["Gamma, Normal, Beta, Dirichlet", "got Poisson"],
    ),
}


@each(DISTRIBUTIONS)
def test_from_distribution_lists_what_is_supported(call: Callable, error: type[Exception], words: list[str]):
    refuses(call, error, words)


# ---------------------------------------------------------------------- queries

QUERIES: dict[str, Bad] = {
    "last axis": (
        lambda: keys().log_normalizer(zeros(5, 2)),
        ValueError,
        ["Empirical.log_normalizer", "(*batch, q, d=3)", "(d=3,)", "(5, 2)"],
    ),
    "scalar": (lambda: keys().mean(t(1.0)), ValueError, ["Empirical.mean", "d=3", "()"]),
    "integers": (lambda: keys().mean(torch.tensor([1, 2, 3])), TypeError, ["Empirical.mean", "floating", "int64"]),
    "list": (lambda: keys().mean([1.0, 2.0, 3.0]), TypeError, ["Empirical.mean", "torch.Tensor", "list"]),
    "dtype": (
        lambda: keys().fisher(torch.zeros(3)),
        TypeError,
        ["Empirical.fisher", "torch.float64 as the measure", "torch.float32", ".to(torch.float32) on the measure"],
    ),
    "device": (lambda: keys().mean(zeros(3, device="meta")), ValueError, ["Empirical.mean", "device cpu", "meta"]),
    "second argument": (lambda: keys().fisher_mv(zeros(3), zeros(2)), ValueError, ["Empirical.fisher_mv", "d=3"]),
    "batch": (
        lambda: pairs().mean(zeros(2, 1, 2)),
        ValueError,
        ["Empirical.mean", "broadcast", "(3, 1, 2) and (2, 1, 2)"],
    ),
    "two queries": (
        lambda: keys().kl(zeros(3, 3), zeros(4, 3)),
        ValueError,
        ["Empirical.kl", "broadcast", "(3, 3) and (4, 3)"],
    ),
    "rows": (
        lambda: rows().mean(zeros(3, 3)),
        ValueError,
        ["Empirical.mean", "q=4 query rows", "(3, 3)", "(*batch, 4, 3)"],
    ),
    "one row of four": (lambda: rows().mean(zeros(3)), ValueError, ["Empirical.mean", "q=4 query rows", "(3)"]),
    "natural": (lambda: Gaussian(zeros(2), torch.eye(2).double()).natural(zeros(3)), ValueError, ["d=2", "(3)"]),
    "conjugate": (lambda: Sphere(3).conjugate(zeros(2)), ValueError, ["Sphere.conjugate", "d=3", "(2)"]),
    "composition": (lambda: (2 * keys()).mean(torch.zeros(3)), TypeError, ["Scaled.mean", "torch.float64"]),
}


@each(QUERIES)
def test_queries_are_refused(call: Callable[[], object], error: type[Exception], words: list[str]):
    refuses(call, error, words)


# ---------------------------------------------------------------------- outside the natural domain

BEYOND: dict[str, tuple[Callable[[], Measure], list[float]]] = {
    "Gamma": (gamma, [2.0]),
    "Exponential": (lambda: from_distribution(td.Exponential(t(1.0))), [1.5]),
    "NegativeBinomial": (lambda: from_distribution(td.NegativeBinomial(t(3.0), t(0.25))), [1.5]),
    "Laplace": (lambda: from_distribution(td.Laplace(t(0.0), t(1.0))), [-1.5]),
    "Gamma on statistics": (lambda: from_distribution(td.Gamma(t(3.0), t(2.0)), full=True), [3.0, 0.0]),
    "Dirichlet on statistics": (lambda: from_distribution(td.Dirichlet(t([1.0, 2.0])), full=True), [-1.5, 0.0]),
    "sum": (lambda: gamma() + from_distribution(td.Poisson(t(1.0))), [2.5]),
    "scaled, shifted": (lambda: 2.0 * gamma().shift(t([1.0])), [2.5]),
    "tilted": (lambda: gamma().tilt(t([1.5])), [1.0]),
    "image": (lambda: t([[2.0]]) @ gamma(), [1.5]),
    "convolution": (lambda: convolve(gamma(), Sphere(1)), [2.5]),
    "product": (lambda: product(Sphere(2), gamma()), [0.0, 0.0, 2.5]),
    "independent": (lambda: independent(from_distribution(td.Gamma(t([3.0, 1.0]), t([2.0, 9.0])))), [2.5, 0.0]),
}


@pytest.mark.parametrize(("build", "eta"), BEYOND.values(), ids=BEYOND.keys())
def test_moments_outside_the_domain_are_refused_but_g_is_plus_inf(build: Callable[[], Measure], eta: list[float]):
    h, queries = build(), torch.stack([zeros(len(eta)), t(eta)])
    assert h.log_normalizer(queries).tolist()[1] == INF
    assert h.log_normalizer(queries)[0].isfinite()
    words = ["eta", "inside the domain", "G = +inf", "log_normalizer itself returns +inf"]
    refuses(lambda: h.mean(queries), ValueError, words)
    refuses(lambda: h.fisher(queries), ValueError, words)
    refuses(lambda: h.fisher_mv(queries, queries), ValueError, words)
    refuses(lambda: h.sample(queries, 2), ValueError, words)
    assert h.kl(queries[0], queries[1]) == INF


# ---------------------------------------------------------------------- the algebra

ALGEBRA: dict[str, Bad] = {
    "h + number": (lambda: keys() + 3, TypeError, ["h + g", "measures", "int", "Empirical"]),
    "number + h": (lambda: 3 + keys(), TypeError, ["h + g", "measures", "int"]),
    "array + h": (lambda: KEYS + keys(), TypeError, ["h + g", "measures", "ndarray"]),
    "h + tensor": (lambda: keys() + t(KEYS), TypeError, ["h + g", "measures", "Tensor"]),
    "convolve number": (lambda: convolve(keys(), 3), TypeError, ["convolve", "measures", "int"]),
    "product string": (lambda: product(keys(), "h"), TypeError, ["product", "measures", "str"]),
    "convolve nothing": (lambda: convolve(), ValueError, ["Convolution.parts", "at least one"]),
    "h · g": (lambda: keys() * keys(), TypeError, ["c * h", "number", "Empirical", "convolve(h, g)"]),
    "c: string": (lambda: keys() * "2", TypeError, ["c * h", "number", "str"]),
    "c < 0": (lambda: -2.0 * keys(), ValueError, ["c * h", "finite mass c ≥ 0", "-2.0", "tilt"]),
    "c: NaN": (lambda: NAN * keys(), ValueError, ["c * h", "finite mass c ≥ 0", "nan"]),
    "c: infinite": (lambda: INF * keys(), ValueError, ["c * h", "finite mass c ≥ 0", "inf"]),
    "c: one negative": (lambda: t([1.0, -1.0, 1.0]) * pairs(), ValueError, ["c * h", "c ≥ 0", "-1"]),
    "c: dtype": (lambda: torch.tensor(2.0) * keys(), TypeError, ["Scaled.log_scale", "float64", "float32"]),
    "c: batch": (lambda: t([1.0, 2.0]) * pairs(), ValueError, ["Scaled.log_scale", "broadcast", "(2,) and (3,)"]),
    "A: columns": (lambda: zeros(2, 2) @ keys(), ValueError, ["Image.matrix", "d=3", "(2, 2)", "Transpose"]),
    "A: vector": (lambda: zeros(3) @ keys(), ValueError, ["Image.matrix", "(*batch, d', d=3)", "(3)"]),
    "A: integers": (lambda: np.eye(3, dtype=int) @ keys(), TypeError, ["Image.matrix", "floating", "int64"]),
    "A: dtype": (lambda: torch.eye(3) @ keys(), TypeError, ["Image.matrix", "float64", "float32"]),
    "A: NaN": (lambda: (zeros(2, 3) + NAN) @ keys(), ValueError, ["Image.matrix", "finite", "6 entries"]),
    "A: batch": (lambda: zeros(2, 1, 2) @ pairs(), ValueError, ["Image.matrix", "broadcast", "(2,) and (3,)"]),
    "shift: length": (lambda: keys().shift(zeros(2)), ValueError, ["Shifted.offset", "(*batch, d=3)", "(2)"]),
    "shift: list": (lambda: keys().shift([0.0] * 3), TypeError, ["Shifted.offset", "torch.Tensor", "list"]),
    "shift: NaN": (lambda: keys().shift(zeros(3) + NAN), ValueError, ["Shifted.offset", "finite"]),
    "shift: batch": (lambda: pairs().shift(zeros(2, 2)), ValueError, ["Shifted.offset", "broadcast"]),
    "tilt: length": (lambda: keys().tilt(zeros(2)), ValueError, ["Tilted.eta0", "(*batch, d=3)", "(2)"]),
    "tilt: dtype": (lambda: keys().tilt(torch.zeros(3)), TypeError, ["Tilted.eta0", "float64", "float32"]),
    "tilt: device": (lambda: keys().tilt(zeros(3, device="meta")), TypeError, ["Tilted.eta0", "cpu", "meta"]),
    "sum: dims": (lambda: keys() + Sphere(2), ValueError, ["Sum.parts", "equal dim", "[3, 2]", "A @ h"]),
    "sum: dtype": (lambda: keys() + keys().to(torch.float32), TypeError, ["Sum.parts", "one dtype", "float32"]),
    "sum: device": (lambda: keys() + Empirical(zeros(2, 3, device="meta")), TypeError, ["Sum.parts", "cpu", "meta"]),
    "sum: batch": (lambda: pairs() + Empirical(zeros(2, 4, 2)), ValueError, ["Sum.parts", "broadcast"]),
    "sum: rows": (
        lambda: rows() + Empirical(t(KEYS), zeros(5, 7)),
        ValueError,
        ["Sum.parts", "query rows", "[4, 5]"],
    ),
    "independent: no batch": (
        lambda: independent(keys()),
        ValueError,
        ["independent(h)", "batch axis", "product(h, g)"],
    ),
    "independent: rows": (
        lambda: independent(Empirical(zeros(2, 7, 3), zeros(2, 4, 7))),
        ValueError,
        ["independent(h)", "4 query rows", "per atom"],
    ),
    "normalize nothing": (lambda: Empirical(zeros(0, 3)).normalized(), ValueError, ["Empirical.normalized", "-inf"]),
    "normalize 0 · Sphere": (lambda: (0 * Sphere(3)).normalized(), ValueError, ["Scaled.normalized", "-inf"]),
    "normalize mass ∞": (lambda: gamma().tilt(t([3.0])).normalized(), ValueError, ["Tilted.normalized", "inf"]),
}


@each(ALGEBRA)
def test_algebra_refuses(call: Callable[[], object], error: type[Exception], words: list[str]):
    refuses(call, error, words)


def test_numpy_defers_to_the_operators_of_measures():
    h, eta = keys(), t(KEYS[0])
    image = np.eye(3)[:2] @ h
    assert image.dim == 2
    torch.testing.assert_close(image.mean(eta[:2]), (torch.eye(3).double()[:2] @ h).mean(eta[:2]))
    for double in (np.float64(2.0) * h, h * np.float64(2.0), np.array(2.0) * h, 2 * h, torch.tensor(2) * h):
        torch.testing.assert_close(double.log_mass, h.log_mass + np.log(2.0), rtol=1e-14, atol=0)
    batch = np.array([1.0, 2.0]) * h
    assert batch.batch_shape == (2,)
    torch.testing.assert_close(batch.log_mass, h.log_mass + t(np.log([1.0, 2.0])))
    three = sum([h, h, h])
    assert isinstance(three, Measure)
    torch.testing.assert_close(three.log_mass, Empirical(t(KEYS), t(LOG_H) + np.log(3)).log_mass, rtol=1e-14, atol=0)


# ---------------------------------------------------------------------- samples, records, solvers

OTHERS: dict[str, Bad] = {
    "sample: empty": (lambda: Empirical(zeros(0, 3)).sample(zeros(3), 2), ValueError, ["Empirical.sample", "Unmask"]),
    "sample: masked row": (
        lambda: Empirical(t(KEYS), torch.stack([t(LOG_H), zeros(7) - INF])).sample(zeros(2, 3), 2),
        ValueError,
        ["Empirical.sample", "positive weight", "empty row"],
    ),
    "sample: sum of nothing": (lambda: (0 * keys() + 0 * keys()).sample(zeros(3), 2), ValueError, ["Sum.sample", "0"]),
    "sample: 0 · h": (lambda: (0 * keys()).sample(zeros(3), 2), ValueError, ["Scaled.sample", "positive mass"]),
    "moments: unknown": (
        lambda: dense_moments(zeros(1, 3), t(KEYS), statistics=["variance"]),
        ValueError,
        ["dense_moments.statistics", "score_variance", "log_sum_square", "'variance'"],
    ),
    "moments: merge": (
        lambda: dense_moments(zeros(1, 3), t(KEYS)).merge(dense_moments(zeros(1, 3), t(KEYS), statistics=["mean"])),
        ValueError,
        ["Moments.merge", "both sides", "Request equal statistics"],
    ),
    "moments: entropy": (
        lambda: dense_moments(zeros(1, 3), t(KEYS), statistics=["mean"]).entropy,
        ValueError,
        ["Moments.entropy", "'mean_score'", "Request"],
    ),
    "moments: effective_atoms": (
        lambda: dense_moments(zeros(1, 3), t(KEYS), statistics=[]).effective_atoms,
        ValueError,
        ["Moments.effective_atoms", "'log_sum_square'"],
    ),
    "maximum_entropy: vector": (lambda: maximum_entropy(zeros(3)), ValueError, ["maximum_entropy.rows", "(3)"]),
    "maximum_entropy: integers": (
        lambda: maximum_entropy(torch.eye(3).int()),
        TypeError,
        ["maximum_entropy.rows", "int32"],
    ),
    "fixed_point: integers": (
        lambda: fixed_point(torch.cos, torch.ones(2).long()),
        TypeError,
        ["fixed_point.x0", "floating", "int64"],
    ),
    "fixed_point: list": (lambda: fixed_point(torch.cos, [1.0]), TypeError, ["fixed_point.x0", "torch.Tensor", "list"]),
    "fixed_point: solver by name": (
        lambda: fixed_point(torch.cos, zeros(2), solver="anderson"),
        TypeError,
        ["fixed_point.solver", "Picard()", "'anderson'", "instance"],
    ),
    "fixed_point: solver class": (
        lambda: fixed_point(torch.cos, zeros(2), solver=Anderson),
        TypeError,
        ["fixed_point.solver", "Anderson(memory)", "instance"],
    ),
    "fixed_point: no steps": (
        lambda: fixed_point(torch.cos, zeros(2), max_steps=0),
        ValueError,
        ["fixed_point.max_steps", "positive integer", "0"],
    ),
    "fixed_point: event_ndim": (
        lambda: fixed_point(torch.cos, zeros(2), event_ndim=2),
        ValueError,
        ["fixed_point.event_ndim", "x0.ndim = 1", "2"],
    ),
    "fixed_point: adjoint": (
        lambda: fixed_point(torch.cos, zeros(2), adjoint="lu"),
        ValueError,
        ["fixed_point.adjoint", "anderson, cg, cholesky, none", "'lu'"],
    ),
    "fixed_point: shape of fn": (
        lambda: fixed_point(lambda x: x[..., :1], zeros(2, 3)),
        ValueError,
        ["fixed_point.fn", "(2, 3)", "(2, 1)"],
    ),
    "fixed_point: dtype of fn": (
        lambda: fixed_point(lambda x: x.float(), zeros(2, 3)),
        ValueError,
        ["fixed_point.fn", "torch.float64", "torch.float32"],
    ),
    "Damped": (lambda: Damped(0.0), ValueError, ["Damped.gate", "0 < gate < 2", "0.0"]),
    "Damped, too far": (lambda: Damped(2.0), ValueError, ["Damped.gate", "0 < gate < 2", "2.0"]),
    "Anderson": (lambda: Anderson(memory=0), ValueError, ["Anderson.memory", "positive integer", "0"]),
    "check_measure: skip": (
        lambda: check_measure(Sphere(2), skip=("G is nice",)),
        ValueError,
        ["check_measure.skip", "G is convex", "'G is nice'"],
    ),
    "check_measure: eta": (lambda: check_measure(gamma(), t([[3.0]])), ValueError, ["check_measure.eta", "domain"]),
}


@each(OTHERS)
def test_uses_refuse(call: Callable[[], object], error: type[Exception], words: list[str]):
    refuses(call, error, words)


def test_a_measure_without_sampler_says_how_to_get_one():
    class Quadratic(Measure):
        dim = 2

        def log_normalizer(self, eta: torch.Tensor) -> torch.Tensor:
            return eta.square().sum(-1) / 2

    refuses(
        lambda: Quadratic().sample(zeros(2), 3), TypeError, ["Quadratic.sample", "log_normalizer only", "Implement"]
    )


def test_a_broken_measure_is_reported_with_every_law_it_breaks():
    class Concave(Measure):
        dim = 1

        def log_normalizer(self, eta: torch.Tensor) -> torch.Tensor:
            return -eta.square().sum(-1)

    with pytest.raises(AssertionError, match=r"Concave breaks \d+ law") as caught:
        check_measure(Concave(), draws=0)
    assert "G is convex" in str(caught.value)
    assert "Fisher is positive semidefinite" in str(caught.value)


@pytest.mark.parametrize("n", [0, -1])
def test_sample_needs_a_positive_number_of_draws(n: int):
    with pytest.raises(
        ValueError, match=r"^Sphere\.sample: expected at least one draw per query, got -?\d\. Pass n ≥ 1"
    ):
        Sphere(3).sample(torch.zeros(3), n)
