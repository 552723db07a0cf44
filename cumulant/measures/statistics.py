"""Classical laws on the space of their sufficient statistics, where matching expected statistics is matching means.

    h = law of u(X), X ~ p_0(·|θ)   ⇒   G(η) = A(θ + η) − A(θ),   ∇G(η) = E[u(X)] under p_0(·|θ + η)

| law       | u(x)                | θ                   | A(θ)                                   |
|-----------|---------------------|---------------------|----------------------------------------|
| Gamma     | x, log x            | −β, α − 1           | logΓ(θ2+1) − (θ2+1) log(−θ1)           |
| Normal    | x, x²               | μ/σ², −1/(2σ²)      | −θ1²/(4θ2) − ½log(−2θ2)                |
| Beta      | log x, log(1−x)     | a − 1, b − 1        | logΓ(a) + logΓ(b) − logΓ(a+b)          |
| Dirichlet | log x_1, …, log x_k | a_i − 1             | Σ logΓ(a_i) − logΓ(Σ a_i)              |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.measures.base import Measure, per_query
from cumulant.special import standard_gamma
from cumulant.typing import Draws, PerQuery, Queries


class Family(NamedTuple):
    """An exponential family: where θ is legal, a legal θ to stand in elsewhere, A(θ), and draws of u(X)."""

    inside: Callable[[Tensor], Tensor]
    log_partition: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, torch.Generator | None], Tensor]


@final
@dataclass(frozen=True, eq=False, repr=False)
class OnStatistics(Measure):
    """The law of u(X); ``theta`` (*batch, k) is its natural parameter in ``family``."""

    family: Family
    theta: Tensor

    @property
    def dim(self) -> int:
        return self.theta.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.theta.shape[:-1]

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        home = self.theta[..., None, :]
        inside = self.family.inside(home + eta)
        moved = torch.where(inside[..., None], home + eta, home)
        gap = self.family.log_partition(moved) - self.family.log_partition(home)
        return torch.where(inside, gap, torch.inf)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        self._check_domain(eta, self.log_normalizer(eta))
        moved = (self.theta[..., None, :] + eta)[..., None, :]
        return self.family.draw(moved.expand(*eta.shape[:-1], n, self.dim), generator)


def _gamma_draw(theta: Tensor, generator: torch.Generator | None) -> Tensor:
    x = standard_gamma(theta[..., 1] + 1, generator) / -theta[..., 0]
    return torch.stack([x, x.log()], dim=-1)


def _normal_draw(theta: Tensor, generator: torch.Generator | None) -> Tensor:
    variance = -0.5 / theta[..., 1]
    noise = torch.empty_like(variance).normal_(generator=generator)
    x = theta[..., 0] * variance + variance.sqrt() * noise
    return torch.stack([x, x.square()], dim=-1)


def _dirichlet_draw(theta: Tensor, generator: torch.Generator | None) -> Tensor:
    x = standard_gamma(theta + 1, generator)
    return x.log() - x.sum(-1, keepdim=True).log()


GAMMA = Family(
    lambda t: (t[..., 0] < 0) & (t[..., 1] > -1),
    lambda t: torch.lgamma(t[..., 1] + 1) - (t[..., 1] + 1) * torch.log(-t[..., 0]),
    _gamma_draw,
)
NORMAL = Family(
    lambda t: t[..., 1] < 0,
    lambda t: -t[..., 0].square() / (4 * t[..., 1]) - 0.5 * torch.log(-2 * t[..., 1]),
    _normal_draw,
)
DIRICHLET = Family(
    lambda t: (t > -1).all(-1),
    lambda t: torch.lgamma(t + 1).sum(-1) - torch.lgamma((t + 1).sum(-1)),
    _dirichlet_draw,
)

FULL_STATISTICS: dict[type, Callable[..., Measure]] = {
    td.Gamma: lambda d: OnStatistics(GAMMA, torch.stack([-d.rate, d.concentration - 1], dim=-1)),
    td.Normal: lambda d: OnStatistics(
        NORMAL, torch.stack([d.loc, torch.full_like(d.loc, -0.5)], -1) / d.variance[..., None]
    ),
    td.Beta: lambda d: OnStatistics(DIRICHLET, torch.stack([d.concentration1, d.concentration0], dim=-1) - 1),
    td.Dirichlet: lambda d: OnStatistics(DIRICHLET, d.concentration - 1),
}
