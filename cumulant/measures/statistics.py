"""Classical laws on the space of their sufficient statistics, where matching expected statistics is matching means.

    h = law of u(X), X ~ p_0(·|θ)   ⇒   G(η) = A(θ + η) − A(θ),   ∇G(η) = E[u(X)] under p_0(·|θ + η)

| law       | u(x)                | parameters  | θ               | A(θ)                              |
|-----------|---------------------|-------------|-----------------|-----------------------------------|
| Gamma     | x, log x            | α, β        | −β, α           | logΓ(θ2) − θ2 log(−θ1)            |
| Normal    | x, x²               | μ, 1/(2σ²)  | μ/σ², −1/(2σ²)  | −θ1²/(4θ2) − ½log(−2θ2)           |
| Beta      | log x, log(1−x)     | a, b        | a, b            | logΓ(a) + logΓ(b) − logΓ(a+b)     |
| Dirichlet | log x_1, …, log x_k | a_i         | a_i             | Σ logΓ(a_i) − logΓ(Σ a_i)         |

Densities are taken against dx/x for the Gamma law, ∏ dx_i/x_i for Beta and Dirichlet. A(θ + η) − A(θ) is never formed
as that difference, which would lose a small η in the rounding of A; everything is computed in float64.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.measures.base import Measure, per_query
from cumulant.special import (
    digamma,
    digamma_gap,
    log_beta_gap,
    log_gamma_gap,
    log_left,
    standard_gamma,
    trigamma,
    trigamma_gap,
)
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@dataclass(frozen=True, eq=False, repr=False)
class _OnStatistics(Measure):
    """The law of u(X); ``parameters`` (*batch, k) as in the table of this module."""

    parameters: Tensor

    @property
    def dim(self) -> int:
        return self.parameters.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.parameters.shape[:-1]

    @abstractmethod
    def _inside(self, home: Tensor, eta: Tensor) -> Tensor:
        """Where θ + η is legal; like what follows in float64, home (*batch, 1, k), eta (*batch, q, k)."""

    @abstractmethod
    def _g(self, home: Tensor, eta: Tensor) -> Tensor:
        """A(θ + η) − A(θ) inside the domain."""

    @abstractmethod
    def _m(self, home: Tensor, eta: Tensor) -> Tensor:
        """∇A(θ + η) inside the domain."""

    @abstractmethod
    def _v(self, home: Tensor, eta: Tensor) -> Tensor:
        """∇²A(θ + η) inside the domain."""

    @abstractmethod
    def _draw(self, home: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        """One draw of u(X) for every row of eta."""

    def _home(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters with a query axis, η where it is legal and 0 elsewhere, and where."""
        home, wide = self.parameters[..., None, :].double(), eta.double()
        inside = self._inside(home, wide)
        return home, torch.where(inside[..., None], wide, 0), inside

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        home, safe, inside = self._home(eta)
        return torch.where(inside, self._g(home, safe), torch.inf).to(eta.dtype)

    def _checked(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        home, safe, inside = self._home(eta)
        self._check_domain(eta, torch.where(inside, 0, torch.inf))
        return home, safe

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._m(*self._checked(eta)).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self._v(*self._checked(eta)).to(eta.dtype)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return (self._v(*self._checked(eta)) @ v.double()[..., None])[..., 0].to(eta.dtype)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        home, safe = self._checked(eta)
        rows = (*eta.shape[:-1], n, self.dim)
        draws = self._draw(home[..., None, :].expand(rows), safe[..., None, :].expand(rows), generator)
        return draws.to(eta.dtype)


@final
@dataclass(frozen=True, eq=False, repr=False)
class GammaStatistics(_OnStatistics):
    """(x, log x) under Gamma(α, β).

        G = log Γ(α+η₂)/Γ(α) − (α+η₂) log(1 − η₁/β) − η₂ log β,     ∇G = (α′/β′, ψ(α′) − log β′),  α′ = α+η₂, β′ = β−η₁

    >>> import torch
    >>> h = GammaStatistics(torch.tensor([3.0, 2.0], dtype=torch.float64))
    >>> h.mean(torch.tensor([1.0, 0.0], dtype=torch.float64))              # 3/1, ψ(3)
    tensor([3.0000, 0.9228], dtype=torch.float64)
    """

    def _inside(self, home: Tensor, eta: Tensor) -> Tensor:
        return (home[..., 1] - eta[..., 0] > 0) & (home[..., 0] + eta[..., 1] > 0)

    def _g(self, home: Tensor, eta: Tensor) -> Tensor:
        (shape, rate), (tilt, extra) = home.unbind(-1), eta.unbind(-1)
        return log_gamma_gap(shape, extra) - extra * torch.log(rate) - (shape + extra) * log_left(tilt, rate)

    def _moved(self, home: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        return home[..., 0] + eta[..., 1], home[..., 1] - eta[..., 0]

    def _m(self, home: Tensor, eta: Tensor) -> Tensor:
        shape, rate = self._moved(home, eta)
        return torch.stack([shape / rate, digamma(shape) - torch.log(rate)], dim=-1)

    def _v(self, home: Tensor, eta: Tensor) -> Tensor:
        shape, rate = self._moved(home, eta)
        return _symmetric(shape / rate / rate, 1 / rate, trigamma(shape))

    def _draw(self, home: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        shape, rate = self._moved(home, eta)
        x = standard_gamma(shape, generator) / rate
        return torch.stack([x, x.log()], dim=-1)


@final
@dataclass(frozen=True, eq=False, repr=False)
class NormalStatistics(_OnStatistics):
    """(x, x²) under N(μ, σ²), with τ = 1/(2σ²) and τ′ = τ − η₂ > 0:

        G = (η₁/τ′)(τμ + η₁/4) + (η₂/τ′) τμ² − ½log(τ′/τ)
        ∇G = (μ′, μ′² + σ′²),     μ′ = (τμ + η₁/2)/τ′,     σ′² = 1/(2τ′)

    >>> import torch
    >>> h = NormalStatistics(torch.tensor([0.0, 0.5], dtype=torch.float64))          # a standard normal variable
    >>> h.mean(torch.tensor([1.0, -0.5], dtype=torch.float64))
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """

    def _inside(self, home: Tensor, eta: Tensor) -> Tensor:
        return home[..., 1] - eta[..., 1] > 0

    def _g(self, home: Tensor, eta: Tensor) -> Tensor:
        (loc, half), (tilt, extra) = home.unbind(-1), eta.unbind(-1)
        left = half - extra
        moved = (tilt / left) * (half * loc + tilt / 4) + (extra / left) * (half * loc.square())
        return moved - log_left(extra, half) / 2

    def _moved(self, home: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        (loc, half), (tilt, extra) = home.unbind(-1), eta.unbind(-1)
        left = half - extra
        return (half * loc + tilt / 2) / left, 0.5 / left

    def _m(self, home: Tensor, eta: Tensor) -> Tensor:
        loc, variance = self._moved(home, eta)
        return torch.stack([loc, loc.square() + variance], dim=-1)

    def _v(self, home: Tensor, eta: Tensor) -> Tensor:
        loc, variance = self._moved(home, eta)
        return _symmetric(variance, 2 * loc * variance, 2 * variance * (variance + 2 * loc.square()))

    def _draw(self, home: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        loc, variance = self._moved(home, eta)
        x = loc + variance.sqrt() * torch.empty_like(variance).normal_(generator=generator)
        return torch.stack([x, x.square()], dim=-1)


@final
@dataclass(frozen=True, eq=False, repr=False)
class DirichletStatistics(_OnStatistics):
    """log x under Dirichlet(a); with k = 2 Beta(a, b) on (log x, log(1−x)).

        G = log B(a+η) − log B(a) = Σ_i log B(S_i + Σ_{j<i} η_j, a_i + η_i) − log B(S_i, a_i),   S_i = Σ_{j<i} a_j
        ∇G = ψ(a′) − ψ(Σa′),     ∇²G = diag ψ′(a′) − ψ′(Σa′),     a′ = a + η

    >>> import torch
    >>> h = DirichletStatistics(torch.tensor([1.0, 1.0], dtype=torch.float64))       # −log x is exponential
    >>> h.mean(torch.zeros(2, dtype=torch.float64))
    tensor([-1., -1.], dtype=torch.float64)
    """

    def _inside(self, home: Tensor, eta: Tensor) -> Tensor:
        return (home + eta > 0).all(-1)

    def _g(self, home: Tensor, eta: Tensor) -> Tensor:
        home = home.expand_as(eta)
        before, moved = home.cumsum(-1)[..., :-1], eta.cumsum(-1)[..., :-1]
        moved = torch.where(moved + before > 0, moved, (home + eta).cumsum(-1)[..., :-1] - before)
        return log_beta_gap(before, home[..., 1:], moved, eta[..., 1:]).sum(-1)

    def _moved(self, home: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """a′ and what the other coordinates have in sum."""
        a = home + eta
        others = 1 - torch.eye(self.dim, dtype=a.dtype, device=a.device)
        return a, a @ others

    def _m(self, home: Tensor, eta: Tensor) -> Tensor:
        return -digamma_gap(*self._moved(home, eta))

    def _v(self, home: Tensor, eta: Tensor) -> Tensor:
        own, rest = self._moved(home, eta)
        common = trigamma(own.sum(-1))[..., None, None]
        eye = torch.eye(self.dim, dtype=own.dtype, device=own.device)
        return torch.diag_embed(trigamma_gap(own, rest)) - common * (1 - eye)

    def _draw(self, home: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        x = standard_gamma(home + eta, generator)
        return x.log() - x.sum(-1, keepdim=True).log()


def _symmetric(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[[a, b], [b, c]]"""
    return torch.stack([torch.stack([a, b], dim=-1), torch.stack([b, c], dim=-1)], dim=-2)


FULL_STATISTICS: dict[type, Callable[..., Measure]] = {
    td.Gamma: lambda d: GammaStatistics(torch.stack([d.concentration, d.rate], dim=-1)),
    td.Normal: lambda d: NormalStatistics(torch.stack([d.loc, 0.5 / d.variance], dim=-1)),
    td.Beta: lambda d: DirichletStatistics(torch.stack([d.concentration1, d.concentration0], dim=-1)),
    td.Dirichlet: lambda d: DirichletStatistics(d.concentration),
}
