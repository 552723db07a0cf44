"""Every family against mpmath: G, mean, Fisher information and log-volume over the whole range of floating numbers.

The oracle evaluates textbook formulas with as many digits as they cancel. An answer may be off by the tolerance
(1e-12 in float64, 1e-5 in float32) or, where that is more, by what a few roundings of the inputs do to the exact
answer: Σ |input · ∂answer/∂input| · ε over η and parameters. Below the smallest normal number everything counts as 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import pytest
import torch
from hypothesis import strategies as st
from torch import distributions as td

from cumulant import Box, Empirical, Gaussian, Measure, Sphere, from_distribution
from tests.generated.properties import holds_for
from tests.generated.tensors import DTYPES, normal, seeds

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
ROUNDINGS = 16  # of every input, that an answer may show


@dataclass(frozen=True)
class Answer:
    """Exact values, flat: g, the entries of mean and fisher, log det(I + fisher)."""

    g: Any  # mpf
    mean: tuple
    fisher: tuple

    def values(self) -> list:
        return [self.g, *self.mean, *self.fisher, self._volume()]

    def _volume(self):
        """log(1 + Σ of all principal minors), which needs no digits for the 1."""
        d = len(self.mean)
        if not all(mp.isfinite(f) for f in self.fisher):
            return mp.inf
        minors = mp.mpf(0)
        for size in range(1, d + 1):
            for rows in itertools.combinations(range(d), size):
                minors += mp.det(mp.matrix([[self.fisher[i * d + j] for j in rows] for i in rows]))
        return mp.log1p(minors)

    def volume_conditioning(self):
        """Σ |F_ij · ∂ log det(I + F)/∂F_ij|: the log-volume is that of a matrix whose entries are rounded."""
        d = len(self.mean)
        if d == 1 or not all(mp.isfinite(f) for f in self.fisher):
            return mp.mpf(0)
        inverse = (mp.eye(d) + mp.matrix([self.fisher[i * d : i * d + d] for i in range(d)])) ** -1
        return mp.fsum(abs(f * inverse[k // d, k % d]) for k, f in enumerate(self.fisher))


@dataclass(frozen=True)
class Query:
    """A family, its parameters and one η; numbers are rounded to the dtype before either side sees them."""

    family: str
    parameters: tuple[float, ...]
    eta: tuple[float, ...]
    dtype: str

    def rounded(self) -> tuple[list[float], list[float]]:
        dtype = DTYPES[self.dtype]
        parameters, eta = (torch.tensor(x, dtype=torch.float64).to(dtype) for x in (self.parameters, self.eta))
        return parameters.tolist(), eta.tolist()


@dataclass(frozen=True)
class Family:
    """How a family is built from a row of parameters, its exact answer, and the numbers that make sense for it."""

    build: Callable[[torch.Tensor], Measure]
    exact: Callable[[list, list], Answer | None]  # None outside the natural domain
    parameters: tuple[st.SearchStrategy[float], ...]
    dim: int = 1
    edge: Callable[[tuple[float, ...]], tuple[float, ...]] | None = None  # where the natural domain ends
    inputs: Callable[[list], list] = list  # what may be rounded: a parameter used twice may be so twice
    determined: Callable[[list, list, float], bool] = lambda p, e, eps: (
        True
    )  # whether roundings leave the law what it is
    g_floor: float = 0.0  # absolute error of G, in ε
    slope_floor: float = 0.0  # of its gradient by autograd
    product_floor: Callable[[list, float], float] = lambda p, eps: 0.0  # absolute error of fisher_mv


def sizes(low: float, high: float) -> st.SearchStrategy[float]:
    """Log-uniform positive numbers."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda e: float(f"{10**e:.3g}"))


def signed(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), sizes(low, high), sizes(low, high).map(lambda x: -x))


# ---------------------------------------------------------------------- exact answers


def interval(p: list, e: list) -> Answer:
    (low, high), (eta,) = p, e
    half, centre = (high - low) / 2, (high + low) / 2
    y = eta * half
    if y == 0:
        return Answer(centre * eta, (centre,), (half**2 / 3,))
    sinh = mp.sinh(y)
    return Answer(
        centre * eta + mp.log(sinh / y),
        (centre + half * (mp.cosh(y) / sinh - 1 / y),),
        (half**2 * (1 / y**2 - 1 / sinh**2),),
    )


def poisson(p: list, e: list) -> Answer:
    tilted = p[0] * mp.exp(e[0])
    return Answer(tilted - p[0], (tilted,), (tilted,))


def gamma(p: list, e: list) -> Answer | None:
    shape, left = p[0], p[1] - e[0]
    return Answer(-shape * mp.log(left / p[1]), (shape / left,), (shape / left**2,)) if left > 0 else None


def negative_binomial(p: list, e: list) -> Answer | None:
    count, odds = p[0], p[1] * mp.exp(e[0])
    if odds >= 1:
        return None
    return Answer(
        count * mp.log((1 - p[1]) / (1 - odds)), (count * odds / (1 - odds),), (count * odds / (1 - odds) ** 2,)
    )


def laplace(p: list, e: list) -> Answer | None:
    (loc, scale), eta = p, e[0]
    s = (scale * eta) ** 2
    if s >= 1:
        return None
    return Answer(
        loc * eta - mp.log(1 - s), (loc + 2 * scale**2 * eta / (1 - s),), (2 * scale**2 * (1 + s) / (1 - s) ** 2,)
    )


def coin(p: list, e: list) -> Answer:
    p1 = p[0] * mp.exp(e[0])
    total = 1 - p[0] + p1
    return Answer(mp.log(total), (p1 / total,), (p1 * (1 - p[0]) / total**2,))


def one_hot(p: list, e: list) -> Answer:
    tilted = [q * mp.exp(x) for q, x in zip(p, e, strict=True)]
    total = mp.fsum(tilted)
    m = [x / total for x in tilted]
    fisher = [x * (mp.fsum(m) - x) if i == j else -x * y for i, x in enumerate(m) for j, y in enumerate(m)]
    return Answer(mp.log(total / mp.fsum(p)), tuple(m), tuple(fisher))


def gaussian(p: list, e: list) -> Answer:
    loc, (a, b, c) = p[:2], p[2:]
    covariance = (a, b, b, c)
    moved = (a * e[0] + b * e[1], b * e[0] + c * e[1])
    g = sum(x * (m + s / 2) for x, m, s in zip(e, loc, moved, strict=True))
    return Answer(g, tuple(m + s for m, s in zip(loc, moved, strict=True)), covariance)


def gamma_statistics(p: list, e: list) -> Answer | None:
    shape, rate = p[0] + e[1], p[1] - e[0]
    if shape <= 0 or rate <= 0:
        return None
    g = mp.loggamma(shape) - mp.loggamma(p[0]) - shape * mp.log(rate) + p[0] * mp.log(p[1])
    return Answer(
        g,
        (shape / rate, mp.digamma(shape) - mp.log(rate)),
        (shape / rate**2, 1 / rate, 1 / rate, mp.polygamma(1, shape)),
    )


def normal_statistics(p: list, e: list) -> Answer | None:
    loc, variance = p[0], p[1] ** 2
    s = 1 - 2 * variance * e[1]
    if s <= 0:
        return None
    mean, left = (loc + variance * e[0]) / s, variance / s
    g = (loc * e[0] + variance * e[0] ** 2 / 2 + loc**2 * e[1]) / s - mp.log(s) / 2
    cross = 2 * mean * left
    return Answer(g, (mean, mean**2 + left), (left, cross, cross, 2 * left**2 + 4 * mean**2 * left))


def dirichlet(p: list, e: list) -> Answer | None:
    a = [x + y for x, y in zip(p, e, strict=True)]
    if min(a) <= 0:
        return None
    total, before = mp.fsum(a), mp.fsum(p)
    g = mp.fsum(mp.loggamma(x) - mp.loggamma(y) for x, y in zip(a, p, strict=True))
    common = mp.polygamma(1, total)
    fisher = [(mp.polygamma(1, x) if i == j else 0) - common for i, x in enumerate(a) for j in range(len(a))]
    return Answer(
        g - mp.loggamma(total) + mp.loggamma(before), tuple(mp.digamma(x) - mp.digamma(total) for x in a), tuple(fisher)
    )


def atoms(p: list, e: list) -> Answer:
    """Three weighted atoms in the plane; keys of their own, if p holds them, have the scores ⟨η, key⟩."""
    points, weights = [p[0:2], p[2:4], p[4:6]], p[6:9]
    keys = [p[9:11], p[11:13], p[13:15]] if len(p) > 9 else points
    scores = [x[0] * e[0] + x[1] * e[1] + w for x, w in zip(keys, weights, strict=True)]
    top = max(scores)
    shares = [mp.exp(s - top) for s in scores]
    total = mp.fsum(shares)
    mean = [mp.fsum(q * x[i] for q, x in zip(shares, points, strict=True)) / total for i in (0, 1)]
    fisher = [
        mp.fsum(q * (x[i] - mean[i]) * (x[j] - mean[j]) for q, x in zip(shares, points, strict=True)) / total
        for i in (0, 1)
        for j in (0, 1)
    ]
    return Answer(top + mp.log(total), tuple(mean), tuple(fisher))


def apart(scores: list, rounding: float) -> bool:
    """Whether the rounding of scores cannot change which atoms have mass: else the law itself is a matter of chance."""
    *_, second, first = sorted(scores)
    return rounding < 0.1 or first - second > rounding + 200


def scores_apart(p: list, e: list, eps: float) -> bool:
    points = p[0:2], p[2:4], p[4:6]
    scores = [x * e[0] + y * e[1] + w for (x, y), w in zip(points, p[6:9], strict=True)]
    return apart(scores, 4 * eps * max(abs(x * e[0]) + abs(y * e[1]) for x, y in points))


# ---------------------------------------------------------------------- families

SCALE = sizes(1e-6, 1e6)
FAMILIES = {
    "Box": Family(lambda p: Box(p[:1], p[1:]), interval, (signed(1e-6, 1e6), SCALE)),
    "Box, from 0": Family(lambda p: Box(p[:1], p[1:]), interval, (st.just(0.0), SCALE)),
    "Uniform": Family(lambda p: from_distribution(td.Uniform(*p)), interval, (st.just(-1.0), sizes(1e-3, 1e3))),
    "Poisson": Family(lambda p: from_distribution(td.Poisson(p[0])), poisson, (sizes(1e-30, 1e30),)),
    "Gamma": Family(lambda p: from_distribution(td.Gamma(*p)), gamma, (SCALE, SCALE), edge=lambda p: (p[1],)),
    "Exponential": Family(
        lambda p: from_distribution(td.Exponential(p[1])), gamma, (st.just(1.0), SCALE), edge=lambda p: (p[1],)
    ),
    "NegativeBinomial": Family(
        lambda p: from_distribution(td.NegativeBinomial(p[0], probs=p[1])),
        negative_binomial,
        (SCALE, st.one_of(sizes(1e-20, 0.5), sizes(1e-4, 0.5).map(lambda x: 1 - x))),
        edge=lambda p: (-math.log(p[1]),),
    ),
    "Laplace": Family(
        lambda p: from_distribution(td.Laplace(*p)), laplace, (signed(1e-3, 1e3), SCALE), edge=lambda p: (1 / p[1],)
    ),
    # two and three atoms with logarithms of probabilities, whose sum is 1 up to rounding
    "Bernoulli": Family(
        lambda p: from_distribution(td.Bernoulli(probs=p[0])),
        coin,
        (st.one_of(sizes(1e-30, 0.5), sizes(1e-4, 0.5).map(lambda x: 1 - x)),),
        g_floor=1.0,
    ),
    "Categorical": Family(
        lambda p: from_distribution(td.Categorical(probs=p)),
        one_hot,
        (sizes(1e-20, 1),) * 3,
        dim=3,
        g_floor=1.0,
        determined=lambda p, e, eps: apart(e, 4 * eps * max(map(abs, e))),
    ),
    "Gaussian": Family(
        lambda p: Gaussian(p[:2], p[2:][[0, 1, 1, 2]].reshape(2, 2)),
        gaussian,
        (signed(1e-6, 1e6), signed(1e-6, 1e6), sizes(1, 1e6), signed(1e-6, 0.9), sizes(1, 1e6)),
        dim=2,
    ),
    "Empirical": Family(
        lambda p: Empirical(p[:6].reshape(3, 2), p[6:]),
        atoms,
        (*[signed(1e-3, 1e3)] * 6, *[st.floats(-5, 5)] * 3),
        dim=2,
        inputs=lambda p: [*p, *p[:6]],  # a score is rounded as a sum of products, whatever it shares with others
        determined=scores_apart,
        g_floor=1.0,  # the logarithm of a sum of exponentials of which one is 1
        # the streaming kernel centres by a rounded mean
        product_floor=lambda p, eps: (4 * eps * max(abs(x) for x in p[:6])) ** 2,
    ),
}
STATISTICS = {
    "Gamma": Family(
        lambda p: from_distribution(td.Gamma(*p), full=True),
        gamma_statistics,
        (sizes(1e-3, 1e6), sizes(1e-3, 1e3)),
        dim=2,
        slope_floor=1.0,
        edge=lambda p: (p[1], -p[0]),
    ),
    "Normal": Family(
        lambda p: from_distribution(td.Normal(*p), full=True),
        normal_statistics,
        (signed(1e-3, 1e3), sizes(1e-3, 1e3)),
        dim=2,
        slope_floor=1.0,
        edge=lambda p: (1 / p[1], 0.5 / p[1] ** 2),
    ),
    "Beta": Family(
        lambda p: from_distribution(td.Beta(*p), full=True),
        dirichlet,
        (sizes(1e-3, 1e6), sizes(1e-3, 1e6)),
        dim=2,
        slope_floor=1.0,
        edge=lambda p: (-p[0], -p[1]),
    ),
    "Dirichlet": Family(
        lambda p: from_distribution(td.Dirichlet(p), full=True),
        dirichlet,
        (sizes(1e-3, 1e3),) * 3,
        dim=3,
        slope_floor=1.0,
        edge=lambda p: tuple(-x for x in p),
    ),
}


def magnitudes(dtype: str, reach: float = 1.0) -> st.SearchStrategy[float]:
    """|η|: 0, the subnormal and the largest number, and log-uniform between them (to a power ``reach`` of them)."""
    info = torch.finfo(DTYPES[dtype])
    low, high = math.log10(info.tiny) * reach, (math.log10(info.max) - 1e-9) * reach
    spread = st.floats(low, high).map(lambda e: 10**e)
    if reach < 1:
        return st.one_of(st.just(0.0), spread, st.floats(-3, 3).map(lambda e: 10**e))
    ends = [0.0, info.tiny * info.eps, info.tiny, info.max]
    return st.one_of(st.sampled_from(ends), spread, spread, st.floats(-3, 3).map(lambda e: 10**e))


@st.composite
def queries(draw, families: dict[str, Family], reach: float = 1.0) -> Query:
    name, dtype = draw(st.sampled_from(sorted(families))), draw(st.sampled_from(["float64", "float32"]))
    family = families[name]
    parameters = tuple(draw(p) for p in family.parameters)
    if name.startswith("Box") and parameters[1] <= parameters[0]:
        parameters = (parameters[0], parameters[0] + parameters[1])  # an edge of that length
    eta = tuple(draw(st.sampled_from([-1.0, 1.0])) * draw(magnitudes(dtype, reach)) for _ in range(family.dim))
    if family.edge is not None and draw(st.booleans()):  # some of the way to the end of the domain
        share = draw(st.sampled_from([0.3, 0.5, 0.9, 0.999, -0.5, -3.0]))
        eta = tuple(share * x for x in family.edge(parameters))
    return Query(name, parameters, eta, dtype)


# ---------------------------------------------------------------------- comparing


def check(where: str, got: float, exact, conditioning, dtype: str) -> None:
    info = torch.finfo(DTYPES[dtype])
    if max(abs(exact), conditioning) >= info.max * (1 - 1e-3):  # terms of the answer, if not it itself, overflow
        return
    assert not math.isnan(got), where
    slack = max(TOLERANCE[dtype] * abs(exact), ROUNDINGS * info.eps * conditioning) + mp.mpf(info.tiny)
    error = abs(mp.mpf(got) - exact) if math.isfinite(got) else mp.inf
    assert error <= slack, f"{where}: {got} in place of {mp.nstr(exact, 20)}, off by {mp.nstr(error / slack, 3)} slacks"


def conditionings(exact: Callable[[list, list], Answer | None], parameters: list, eta: list, base: list, nudge) -> list:
    """What a rounding of every input does to every answer, in units of the rounding: Σ |input · ∂answer/∂input|."""
    total = [mp.mpf(0)] * len(base)
    inputs = [*parameters, *eta]
    for i, x in enumerate(inputs):
        if x != 0:
            moved = [*inputs[:i], x * (1 - nudge), *inputs[i + 1 :]]
            near = exact(moved[: len(parameters)], moved[len(parameters) :])
            if near is None:  # on the very edge of the domain
                return [mp.inf] * len(base)
            total = [t + abs(a - b) / nudge for t, a, b in zip(total, near.values(), base, strict=True)]
    return total


def check_family(case: Query, family: Family) -> None:
    parameters, eta = case.rounded()
    info = torch.finfo(DTYPES[case.dtype])
    largest = max((abs(math.log10(abs(x))) for x in [*eta, *parameters] if x), default=0)
    with mp.workdps(int(100 + 3 * largest)):
        p, e = [mp.mpf(x) for x in parameters], [mp.mpf(x) for x in eta]
        want = family.exact(p, e)
        h = family.build(torch.tensor(parameters, dtype=DTYPES[case.dtype]))
        query = torch.tensor(eta, dtype=DTYPES[case.dtype], requires_grad=True)
        g = h.log_normalizer(query)
        if want is None:
            assert g == torch.inf
            return
        base = want.values()
        slacks = conditionings(family.exact, family.inputs(p), e, base, mp.mpf(info.eps))
        slacks[-1] += want.volume_conditioning()
        d = h.dim
        (slope,) = torch.autograd.grad(g, query)
        check("G", g.item(), base[0], slacks[0] + family.g_floor, case.dtype)
        if max(abs(base[0]), slacks[0]) >= info.max * (1 - 1e-3) or not family.determined(p, e, info.eps):
            return
        floor = family.product_floor(p, info.eps) / (ROUNDINGS * info.eps)
        with torch.no_grad():
            mean, fisher, volume = h.mean(query), h.fisher(query), h.log_volume(query)
            columns = [h.fisher_mv(query, v) for v in torch.eye(d, dtype=query.dtype)]
        assert (fisher.diagonal() >= 0).all()
        for i in range(d):
            check(f"mean[{i}]", mean[i].item(), base[1 + i], slacks[1 + i], case.dtype)
            # autograd takes the difference of two functions where `mean` has it in one piece
            check(f"gradient of G[{i}]", slope[i].item(), base[1 + i], slacks[1 + i] + family.slope_floor, case.dtype)
            for j in range(d):
                k = 1 + d + i * d + j
                check(f"fisher[{i}, {j}]", fisher[i, j].item(), base[k], slacks[k], case.dtype)
                check(f"fisher_mv[{i}, {j}]", columns[j][i].item(), base[k], slacks[k] + floor, case.dtype)
        check("log_volume", volume.item(), base[-1], slacks[-1], case.dtype)


@holds_for(queries(FAMILIES), examples=120)
def test_families_are_exact_over_the_whole_range(case: Query) -> None:
    check_family(case, FAMILIES[case.family])


@holds_for(queries(STATISTICS, reach=0.04), examples=25)
def test_laws_of_statistics_are_exact(case: Query) -> None:
    check_family(case, STATISTICS[case.family])


# ---------------------------------------------------------------------- the sphere


@dataclass(frozen=True)
class OnSphere:
    """A query of a given length in a random direction, along an axis if the seed is None."""

    dim: int
    radius: float
    length: float
    seed: int | None
    dtype: str

    def query(self) -> torch.Tensor:
        if self.seed is None:
            direction = torch.zeros(self.dim, dtype=torch.float64)
            direction[-1] = -1
        else:
            direction = normal(self.seed, self.dim)
        return (direction / direction.norm() * self.length).to(DTYPES[self.dtype])


def spheres() -> st.SearchStrategy[OnSphere]:
    dims = st.one_of(st.integers(1, 100), st.sampled_from([1, 2, 3, 768, 1024, 4096]))
    return st.sampled_from(["float64", "float32"]).flatmap(
        lambda dtype: st.builds(
            OnSphere, dims, sizes(1e-3, 1e3), magnitudes(dtype), st.one_of(st.none(), seeds()), st.just(dtype)
        )
    )


def bessel_series(nu, k, sign: int):
    """Hankel's expansion of I_ν(κ) e^-κ √(2πκ), for κ so large that e^-2κ is nothing."""
    total = term = mp.mpf(1)
    for n in range(1, 400):
        term *= sign * (4 * nu**2 - (2 * n - 1) ** 2) / (n * 8 * k)
        total += term
        if abs(term) < mp.eps:
            return total
    raise AssertionError("the expansion did not reach its precision")


def radial(dim: int, kappa) -> tuple:
    """G, A = G′, A′ and A″ of the unit sphere at κ."""
    nu, k = mp.mpf(dim) / 2 - 1, kappa
    if k == 0:
        return mp.mpf(0), mp.mpf(0), mp.mpf(1) / dim, mp.mpf(0)
    if k < 1e-8:  # two terms of the series of log F suffice for 30 digits
        d = mp.mpf(dim)
        return (
            k**2 / (2 * d) - k**4 / (4 * d**2 * (d + 2)),
            k / d - k**3 / (d**2 * (d + 2)),
            1 / d - 3 * k**2 / (d**2 * (d + 2)),
            -6 * k / (d**2 * (d + 2)),
        )
    if k > 1e9:
        low, high = bessel_series(nu, k, -1), bessel_series(nu + 1, k, -1)
        g = mp.loggamma(nu + 1) + nu * mp.log(2 / k) + k - mp.log(2 * mp.pi * k) / 2 + mp.log(low)
    else:
        low, high = mp.besseli(nu, k), mp.besseli(nu + 1, k)
        g = mp.loggamma(nu + 1) + nu * mp.log(2 / k) + mp.log(low)
    a = high / low
    slope = 1 - a**2 - (dim - 1) * a / k
    if dim == 1:
        slope = 1 / mp.cosh(k) ** 2
    return g, a, slope, -2 * a * slope - (dim - 1) * (slope / k - a / k**2)


@holds_for(spheres(), examples=50)
def test_spheres_are_exact_over_the_whole_range(case: OnSphere) -> None:
    dtype = DTYPES[case.dtype]
    query = case.query().requires_grad_()
    entries = query.tolist()
    radius = torch.tensor(case.radius, dtype=dtype)
    h = Sphere(case.dim, radius)
    with mp.workdps(120):
        r, length = mp.mpf(radius.item()), mp.sqrt(mp.fsum(mp.mpf(x) ** 2 for x in entries))
        kappa = r * length
        with mp.workdps(int(120 + 3 * max(0, mp.log10(kappa) if kappa else 0))):
            g, a, slope, bend = radial(case.dim, kappa)
        unit = [mp.mpf(x) / length if length else mp.mpf(0) for x in entries]
        across = r**2 * (a / kappa if kappa else mp.mpf(1) / case.dim)
        along = r**2 * slope
        out = h.log_normalizer(query)
        (gradient,) = torch.autograd.grad(out, query)
        check("G", out.item(), g, 2 * kappa * a, case.dtype)
        with torch.no_grad():
            mean, direction = h.mean(query), torch.tensor([float(u) for u in unit], dtype=dtype)
            product, volume = h.fisher_mv(query, direction), h.log_volume(query)
        change = 2 * kappa * slope + a  # of A, by κ and r
        for i in {0, case.dim // 2, case.dim - 1}:
            check(f"mean[{i}]", mean[i].item(), r * a * unit[i], r * change, case.dtype)
            check(f"gradient of G[{i}]", gradient[i].item(), r * a * unit[i], r * change, case.dtype)  # G may be inf
            # turning η by a rounding mixes what is across into what is along
            check(f"fisher_mv[{i}]", product[i].item(), along * unit[i], across, case.dtype)
        size = (
            2 * along / (1 + along)
            + kappa * abs(bend) * r**2 / (1 + along)
            + 2 * (case.dim - 1) * across / (1 + across)
        )
        exact = (case.dim - 1) * mp.log1p(across) + mp.log1p(along)
        check("log_volume", volume.item(), exact, size, case.dtype)
        if case.dim <= 100:
            with torch.no_grad():
                fisher = h.fisher(query)
            assert (fisher.diagonal() >= 0).all()
            if case.seed is None:  # along an axis the two variances stand alone, and no rounding mixes them
                last = case.dim - 1
                check("variance along", fisher[last, last].item(), along, r**2 * kappa * abs(bend), case.dtype)
                if case.dim > 1:
                    check("variance across", fisher[0, 0].item(), across, across, case.dtype)


# ---------------------------------------------------------------------- the numbers that were wrong


@pytest.mark.parametrize(
    ("case", "variance"),
    [
        (Query("Box, from 0", (0.0, 1.0), (1e4,), "float32"), 1e-8),
        (Query("Box, from 0", (0.0, 100.0), (10.0,), "float32"), 1e-2),
        (Query("Box, from 0", (0.0, 1.0), (1e9,), "float64"), 1e-18),
        (Query("Box, from 0", (0.0, 1.0), (1e200,), "float64"), 0.0),
    ],
)
def test_variances_of_boxes_far_out(case: Query, variance: float) -> None:
    check_family(case, FAMILIES[case.family])
    parameters, eta = (torch.tensor(x, dtype=DTYPES[case.dtype]) for x in case.rounded())
    assert FAMILIES[case.family].build(parameters).fisher(eta).item() == pytest.approx(variance, rel=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3, 768, 4096])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_mean_on_a_sphere_reaches_the_surface(dim: int, dtype: str) -> None:
    largest = torch.finfo(DTYPES[dtype]).max
    for length in (largest, largest**0.6):
        eta = OnSphere(dim, 1.0, length, None, dtype).query()
        assert Sphere(dim).mean(eta)[-1].item() == pytest.approx(-1, abs=1e-6)
        assert Sphere(dim).log_normalizer(eta).item() == pytest.approx(length, rel=1e-6)
