"""The interface of an exponential family in its usual parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class StateMoments(NamedTuple):
    """mean (…, d, …) and covariance (…, d, d, …) of a variable x, its axes where the parameters have theirs."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class ExponentialFamily(ABC):
    """Laws of x with density e^{⟨θ, u(x)⟩ − A(θ)}; the table of `cumulant.families` has u, θ and A of every family.

        E[u] = ∇A(θ),     posterior θ + Δ,     M-projection: E[u] of the member = E[u] of the mixture

    dim  the axis of parameters, natural parameters and statistics: −1, or −2 where a last axis runs over sequences

    The first ``unbounded`` parameters may be any number, all others must be > 0.
    """

    dim: int = -1

    unbounded: ClassVar[int] = 0

    @abstractmethod
    def natural(self, parameters: Tensor) -> Tensor:
        """θ."""

    @abstractmethod
    def from_natural(self, natural: Tensor) -> Tensor:
        """Parameters of θ; outside the domain they are not `inside`."""

    @abstractmethod
    def log_partition(self, parameters: Tensor) -> Tensor:
        """A(θ)."""

    @abstractmethod
    def statistics(self, x: Tensor) -> Tensor:
        """u(x)."""

    @abstractmethod
    def mean(self, parameters: Tensor) -> Tensor:
        """E[u(x)] = ∇A(θ)."""

    @abstractmethod
    def from_mean(self, mean: Tensor) -> Tensor:
        """Parameters of the member with this E[u(x)]."""

    @abstractmethod
    def moments(self, parameters: Tensor) -> StateMoments:
        """Mean and covariance of x itself."""

    @abstractmethod
    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """The M-projection of mixtures: the member with the expected statistics of Σ_i w_i p_i along an axis.

        weights have the axes of the parameters except for ``dim``, and sum to 1 along ``axis``, counted from the front.
        """

    @abstractmethod
    def sample(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """One x for every member."""

    def sample_statistics(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """u(x) of one x for every member."""
        return self.statistics(self.sample(parameters, generator))

    def inside(self, parameters: Tensor) -> Tensor:
        """Which parameters are those of a law."""
        positive = parameters.narrow(self.dim, self.unbounded, parameters.shape[self.dim] - self.unbounded)
        return (positive > 0).all(self.dim)

    def shift(self, parameters: Tensor, eta: Tensor) -> Tensor:
        """Parameters of θ + η: a tilt by e^{⟨η, u⟩}, or the posterior after evidence η."""
        return self.from_natural(self.natural(parameters) + eta)

    def interpolate(self, parameters: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Parameters of share · θ + (1 − share) · θ_other."""
        return share * parameters + (1 - share) * other

    def stack(self, *parts: Tensor) -> Tensor:
        """Parameters or statistics from their parts, which broadcast."""
        return torch.stack(torch.broadcast_tensors(*parts), self.dim)

    def _scalar_moments(self, mean: Tensor, variance: Tensor) -> StateMoments:
        """Of a variable of size 1."""
        return StateMoments(mean.unsqueeze(self.dim), variance.unsqueeze(self.dim).unsqueeze(self.dim))


def standard_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """N(0, 1) draws in the shape of another tensor."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
