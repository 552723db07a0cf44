"""Classical laws as measures: h itself a member of an exponential family (S1-P1b).

    h = p_0(·|θ)  ⇒  G(η) = A(θ + η) − A(θ),   ∇G(η) = E[x] under p_0(·|θ + η)

with A the log-normalizer of the family: attention over a parametric memory is a shift of its natural parameter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import final

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.checks import sentence
from cumulant.measures.base import Measure, per_query
from cumulant.measures.box import Box
from cumulant.measures.empirical import Empirical
from cumulant.measures.gaussian import Gaussian
from cumulant.measures.independent import independent
from cumulant.measures.statistics import FULL_STATISTICS
from cumulant.solve import Solution, Status
from cumulant.special import log_left, standard_gamma, times_exp, times_expm1
from cumulant.typing import Draws, Matrices, PerQuery, Queries


def from_distribution(distribution: td.Distribution, *, full: bool = False) -> Measure:
    """A torch distribution as a measure of mass 1 on its values (or, with ``full``, on its sufficient statistics).

    The distribution's batch is the measure's batch, its event is the dimension (1 for scalars). Categorical and
    OneHotCategorical live on one-hot vectors; Independent makes a product. ``full=True`` gives Gamma on (x, log x),
    Normal on (x, x²), Beta on (log x, log(1−x)) and Dirichlet on log x: the spaces in which filters match moments.

    >>> import torch
    >>> from torch.distributions import Gamma, Poisson
    >>> h = from_distribution(Gamma(torch.tensor(3.0), torch.tensor(2.0)))
    >>> h.mean(torch.tensor([0.5])), h.log_normalizer(torch.tensor([2.0]))       # 3/(2 − ½); +inf from η = 2 on
    (tensor([2.]), tensor(inf))
    """
    table = FULL_STATISTICS if full else FAMILIES
    for kind, build in table.items():
        if type(distribution) is kind:
            return build(distribution)
    name = type(distribution).__name__
    supported = ", ".join(kind.__name__ for kind in table)
    advice = "Subclass Measure with its log_normalizer (docs/extend.md), or draw samples into Empirical."
    raise TypeError(sentence("from_distribution.distribution", f"one of {supported}", name, advice))


class _Line(Measure):
    """A law on the real line with G, ∇G, ∇²G and the link in closed form; t = η (*batch, q), parameters (*batch)."""

    dim = 1

    @abstractmethod
    def _g(self, t: Tensor) -> Tensor:
        """G(t), +inf outside the domain."""

    @abstractmethod
    def _m(self, t: Tensor) -> Tensor:
        """G′(t) inside the domain."""

    @abstractmethod
    def _v(self, t: Tensor) -> Tensor:
        """G″(t) inside the domain."""

    @abstractmethod
    def _link(self, m: Tensor) -> Tensor:
        """t with G′(t) = m, for m inside the support's interval."""

    @abstractmethod
    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor: ...

    def _edge(self) -> tuple[float, Tensor]:
        """The lower end of the support and G* there; −inf if there is none."""
        return -torch.inf, torch.tensor(torch.inf)

    @property
    def batch_shape(self) -> torch.Size:
        return getattr(self, fields(self)[0].name).shape  # pyright: ignore[reportArgumentType]

    def _inside(self, eta: Tensor) -> Tensor:
        """t, refused outside the domain."""
        self._check_domain(eta, self._g(eta[..., 0]))
        return eta[..., 0]

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return self._g(eta[..., 0])

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._m(self._inside(eta))[..., None]

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return self._v(self._inside(eta))[..., None] * v

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self._v(self._inside(eta))[..., None, None]

    @per_query
    def log_volume(self, eta: Queries) -> PerQuery:
        return torch.log1p(self._v(self._inside(eta)))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        self._inside(eta)
        return self._draw(eta.expand(*eta.shape[:-1], n), generator)[..., None]

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """In closed form; at the lower end of the support η is −inf."""
        m, low = mean[..., 0], self._edge()[0]
        inside = m > low
        value = torch.where(inside, self._link(torch.where(inside, m, low + 1)), -torch.inf)
        status = torch.where(m == low, int(Status.BOUNDARY), int(Status.OUTSIDE))
        status = torch.where(inside, int(Status.CONVERGED), status).to(torch.int8)
        zero = torch.zeros_like(m)
        return Solution(value[..., None], status, zero.to(torch.int64), zero, zero[None])

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        m, (low, at_low) = mean[..., 0], self._edge()
        inside = m > low
        safe = torch.where(inside, m, low + 1)
        t = self._link(safe)
        outside = torch.where(m == low, at_low.to(m)[..., None], torch.inf)
        return torch.where(inside, t * safe - self._g(t), outside)


@final
@dataclass(frozen=True, eq=False, repr=False)
class PoissonLaw(_Line):
    """G(η) = λ(e^η − 1), finite everywhere."""

    rate: Tensor

    def _g(self, t: Tensor) -> Tensor:
        return times_expm1(self.rate[..., None], t)

    def _m(self, t: Tensor) -> Tensor:
        return times_exp(self.rate[..., None], t)

    _v = _m

    def _link(self, m: Tensor) -> Tensor:
        return torch.log(m / self.rate[..., None])

    def _edge(self) -> tuple[float, Tensor]:
        return 0.0, self.rate

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(self.rate[..., None, None] * torch.exp(t), generator=generator)


@final
@dataclass(frozen=True, eq=False, repr=False)
class GammaLaw(_Line):
    """G(η) = −α log(1 − η/β) for η < β, +inf from there on."""

    concentration: Tensor
    rate: Tensor

    def _left(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """β − η where positive, 1 elsewhere; and where."""
        left = self.rate[..., None] - t
        return torch.where(left > 0, left, 1), left > 0

    def _g(self, t: Tensor) -> Tensor:
        _, inside = self._left(t)
        share = log_left(torch.where(inside, t, 0), self.rate[..., None])
        return torch.where(inside, -self.concentration[..., None] * share, torch.inf)

    def _m(self, t: Tensor) -> Tensor:
        return self.concentration[..., None] / self._left(t)[0]

    def _v(self, t: Tensor) -> Tensor:
        left = self._left(t)[0]
        return self.concentration[..., None] / left / left

    def _link(self, m: Tensor) -> Tensor:
        return self.rate[..., None] - self.concentration[..., None] / m

    def _edge(self) -> tuple[float, Tensor]:
        return 0.0, torch.full_like(self.rate, torch.inf)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        left = self.rate[..., None, None] - t
        return standard_gamma(self.concentration[..., None, None].expand_as(t), generator) / left


@final
@dataclass(frozen=True, eq=False, repr=False)
class NegativeBinomialLaw(_Line):
    """G(η) = r log((1−p)/(1−p e^η)) for η < −log p, +inf from there on; counts successes before the r-th failure."""

    total_count: Tensor
    probs: Tensor

    def _odds(self) -> Tensor:
        """p/(1−p), with which e^G = (1 − odds (e^η − 1))^−r: no difference of logarithms."""
        return (self.probs / (1 - self.probs))[..., None]

    def _left(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1 − p e^η)/(1 − p) − 1 and η where the first is above −1, both 0 elsewhere; and where."""
        below = torch.log(self.probs)[..., None] + t < 0
        spent = -times_expm1(self._odds(), torch.where(below, t, 0))
        inside = below & (spent > -1)
        return torch.where(inside, spent, 0), torch.where(inside, t, 0), inside

    def _g(self, t: Tensor) -> Tensor:
        spent, _, inside = self._left(t)
        return torch.where(inside, -self.total_count[..., None] * torch.log1p(spent), torch.inf)

    def _m(self, t: Tensor) -> Tensor:
        spent, t, _ = self._left(t)
        return times_exp(self.total_count[..., None] * self._odds(), t) / (1 + spent)

    def _v(self, t: Tensor) -> Tensor:
        spent, t, _ = self._left(t)
        odds = self._odds()
        return times_exp(self.total_count[..., None] * odds, t) / (1 + spent) * ((1 + odds) / (1 + spent))

    def _link(self, m: Tensor) -> Tensor:
        return torch.log(m / (self.total_count[..., None] + m)) - torch.log(self.probs)[..., None]

    def _edge(self) -> tuple[float, Tensor]:
        return 0.0, -self.total_count * torch.log1p(-self.probs)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        p = self.probs[..., None, None] * torch.exp(t)
        rate = standard_gamma(self.total_count[..., None, None].expand_as(t), generator) * p / (1 - p)
        return torch.poisson(rate, generator=generator)


@final
@dataclass(frozen=True, eq=False, repr=False)
class LaplaceLaw(_Line):
    """G(η) = ⟨a,η⟩ − log(1 − b²η²) for |η| < 1/b, +inf from there on: the difference of two exponential variables."""

    loc: Tensor
    scale: Tensor

    def _square(self, t: Tensor) -> tuple[Tensor, Tensor]:
        s = (self.scale[..., None] * t).square()
        return torch.where(s < 1, s, 0), s < 1

    def _g(self, t: Tensor) -> Tensor:
        s, inside = self._square(t)
        return torch.where(inside, self.loc[..., None] * t - torch.log1p(-s), torch.inf)

    def _m(self, t: Tensor) -> Tensor:
        s, _ = self._square(t)
        return self.loc[..., None] + 2 * self.scale[..., None] * (self.scale[..., None] * t) / (1 - s)

    def _v(self, t: Tensor) -> Tensor:
        s, _ = self._square(t)
        return 2 * self.scale[..., None].square() * (1 + s) / (1 - s).square()

    def _link(self, m: Tensor) -> Tensor:
        y = m - self.loc[..., None]
        return y / (self.scale[..., None] * (self.scale[..., None] + torch.hypot(self.scale[..., None], y)))

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        def exponential() -> Tensor:
            return torch.empty_like(t).exponential_(generator=generator)

        rate = 1 / self.scale[..., None, None]
        return self.loc[..., None, None] + exponential() / (rate - t) - exponential() / (rate + t)


def _bernoulli(d: td.Bernoulli) -> Measure:
    atoms = torch.tensor([[0.0], [1.0]], dtype=d.logits.dtype, device=d.logits.device)
    if _given_by_probs(d):
        log_p = _log(torch.stack([1 - d.probs, d.probs], dim=-1))
    else:
        log_p = torch.nn.functional.logsigmoid(torch.stack([-d.logits, d.logits], dim=-1))
    return Empirical(atoms.expand(*d.batch_shape, 2, 1), log_p)


def _one_hot(d: td.Categorical | td.OneHotCategorical) -> Measure:
    atoms = torch.eye(d.logits.shape[-1], dtype=d.logits.dtype, device=d.logits.device)
    law = d._categorical if isinstance(d, td.OneHotCategorical) else d  # pyright: ignore[reportPrivateUsage]
    log_p = _log(d.probs) if _given_by_probs(law) else torch.log_softmax(d.logits, -1)
    return Empirical(atoms.expand(*d.batch_shape, -1, -1), log_p)


def _given_by_probs(d: td.Bernoulli | td.Categorical) -> bool:
    """Whether probabilities are what the law was made of: logits that torch derives from them are cut off at ε."""
    return d._param is d.__dict__.get("probs")  # pyright: ignore[reportPrivateUsage]


def _log(p: Tensor) -> Tensor:
    """log p; −inf with gradient 0 at p = 0, where an atom is not there."""
    return torch.where(p > 0, torch.log(torch.where(p > 0, p, 1)), -torch.inf)


def _independent(d: td.Independent) -> Measure:
    measure = from_distribution(d.base_dist)
    for _ in range(d.reinterpreted_batch_ndims):
        measure = independent(measure)
    return measure


FAMILIES: dict[type, Callable[..., Measure]] = {
    td.Normal: lambda d: Gaussian(d.loc[..., None], d.scale.square()[..., None, None]),
    td.MultivariateNormal: lambda d: Gaussian(d.loc, d.covariance_matrix),
    td.Bernoulli: _bernoulli,
    td.Categorical: _one_hot,
    td.OneHotCategorical: _one_hot,
    td.Poisson: lambda d: PoissonLaw(d.rate),
    td.Gamma: lambda d: GammaLaw(d.concentration, d.rate),
    td.Exponential: lambda d: GammaLaw(torch.ones_like(d.rate), d.rate),
    td.NegativeBinomial: lambda d: NegativeBinomialLaw(d.total_count.expand(d.batch_shape).to(d.probs), d.probs),
    td.Laplace: lambda d: LaplaceLaw(d.loc, d.scale),
    td.Uniform: lambda d: Box(d.low[..., None], d.high[..., None]),
    td.Independent: _independent,
}
