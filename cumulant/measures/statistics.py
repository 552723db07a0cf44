"""Classical laws on the space of their sufficient statistics, where matching expected statistics is matching means.

    h = law of u(X), X ~ p(·|θ)   ⇒   G(η) = A(θ + η) − A(θ),   ∇G(η) = E[u(X)] under p(·|θ + η)

The families, with u, θ and A, are those of `cumulant.families`. Everything is computed in float64, and A(θ + η) − A(θ)
without that difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.families import DirichletFamily, GammaFamily, NormalFamily
from cumulant.measures.base import Measure, per_query
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@final
@dataclass(frozen=True, eq=False, repr=False)
class SufficientStatistics(Measure):
    """The law of u(X) for X in an exponential family; ``parameters`` (*batch, k) of the family.

    >>> import torch
    >>> h = SufficientStatistics(GammaFamily(), torch.tensor([3.0, 2.0], dtype=torch.float64))
    >>> h.mean(torch.tensor([1.0, 0.0], dtype=torch.float64))              # 3/1, ψ(3)
    tensor([3.0000, 0.9228], dtype=torch.float64)
    """

    family: GammaFamily | NormalFamily | DirichletFamily
    parameters: Tensor

    @property
    def dim(self) -> int:
        return self.parameters.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.parameters.shape[:-1]

    def _inside(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters (*batch, 1, k), η where θ + η is that of a law and 0 elsewhere, and where."""
        home, wide = self.parameters[..., None, :].double(), eta.double()
        inside = self.family.inside(self.family.shift(home, wide))
        return home, torch.where(inside[..., None], wide, 0), inside

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        home, safe, inside = self._inside(eta)
        return torch.where(inside, self.family.log_partition_gap(home, safe), torch.inf).to(eta.dtype)

    def _shifted(self, eta: Tensor) -> Tensor:
        """Parameters of θ + η, (*batch, q, k)."""
        home, safe, inside = self._inside(eta)
        self._check_domain(eta, torch.where(inside, 0, torch.inf))
        return self.family.shift(home, safe)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self.family.mean(self._shifted(eta)).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self.family.fisher(self._shifted(eta)).to(eta.dtype)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return (self.family.fisher(self._shifted(eta)) @ v.double()[..., None])[..., 0].to(eta.dtype)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        shifted = self._shifted(eta)[..., None, :].expand(*eta.shape[:-1], n, -1)
        return self.family.sample_statistics(shifted, generator).to(eta.dtype)


FULL_STATISTICS: dict[type, Callable[..., Measure]] = {
    td.Gamma: lambda d: _of(GammaFamily(), d.concentration, d.rate),
    td.Normal: lambda d: _of(NormalFamily(), d.loc, d.variance),
    td.Beta: lambda d: _of(DirichletFamily(), d.concentration1, d.concentration0),
    td.Dirichlet: lambda d: SufficientStatistics(DirichletFamily(), d.concentration),
}


def _of(family: GammaFamily | NormalFamily | DirichletFamily, *parameters: Tensor) -> SufficientStatistics:
    return SufficientStatistics(family, torch.stack(parameters, dim=-1))
