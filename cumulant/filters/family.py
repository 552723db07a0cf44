"""Conjugate pairs: a law of the state x that stays in its family when an observation y arrives.

| family               | x            | y given x and mode s | parameters               | statistics u(x)     |
|----------------------|--------------|----------------------|--------------------------|---------------------|
| GammaPoisson         | rate         | Poisson(e_s x)       | concentration, rate      | x, log x            |
| BetaBernoulli        | chance       | 1 with chance x      | a, b                     | log x, log(1−x)     |
| DirichletCategorical | K chances    | k with chance x_k    | K concentrations         | log x_1, …, log x_K |
| NormalNormal         | mean         | N(x, v_s)            | mean, variance           | x, x²               |
| NormalGamma          | μ and 1/σ²=τ | N(μ, v_s/τ)          | mean, count, shape, rate | log τ, τ, τμ, τμ²   |

The mode decides what is known about the observation: the exposure e_s, the variance v_s, or, for coins and categories,
that y is clutter of a known law which says nothing about x.

Parameters are (*hypotheses, k, batch) as in `cumulant.filters.protocol`, y is (batch).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.filters.gamma_functions import digamma_gap, gamma_shape
from cumulant.filters.protocol import StateMoments


class Observed(NamedTuple):
    """Parameters after an observation, and its predictive log-likelihood (*hypotheses, batch)."""

    parameters: Tensor
    log_likelihood: Tensor


class Family(ABC):
    """A conjugate pair; subclasses are frozen dataclasses and final.

    ``names`` are the parameters in order, None where their number is free; ``values`` says what can be observed.
    """

    names: ClassVar[tuple[str, ...] | None]
    values: ClassVar[str]

    @abstractmethod
    def inside(self, parameters: Tensor) -> Tensor:
        """Which parameters are those of a law:  (…, k) → (…)."""

    @abstractmethod
    def check(self, modes: int, count: int, like: Tensor) -> None:
        """Refuse what the modes know about observations if it does not fit M modes and ``count`` parameters."""

    @abstractmethod
    def allowed(self, y: Tensor, count: int) -> Tensor:
        """Which observations can occur, with ``count`` parameters."""

    def recall(self, parameters: Tensor, prior: Tensor, memory: Tensor) -> Tensor:
        """Natural parameters memory · θ + (1 − memory) · θ_prior, memory (M, 1, 1)."""
        return memory * parameters + (1 - memory) * prior

    @abstractmethod
    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        """The posterior given y (batch) and log p(y)."""

    @abstractmethod
    def moments(self, parameters: Tensor) -> StateMoments:
        """Mean and covariance of x."""

    @abstractmethod
    def expected_statistics(self, parameters: Tensor) -> Tensor:
        """E[u(x)], (…, k, batch)."""

    @abstractmethod
    def from_statistics(self, statistics: Tensor) -> Tensor:
        """Parameters with the given E[u(x)]."""

    @abstractmethod
    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """The M-projection of mixtures along a hypothesis axis, centred where u contains squares or large means."""

    @abstractmethod
    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """States (n, d) for parameters (n, k)."""

    @abstractmethod
    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        """Observations (n) for states (n, d) and modes (n)."""


def stack(*parts: Tensor) -> Tensor:
    """Parameters from their parts (*hypotheses, batch), which broadcast."""
    return torch.stack(torch.broadcast_tensors(*parts), -2)


def scalar_moments(mean: Tensor, variance: Tensor) -> StateMoments:
    """The moments of a state of size 1."""
    return StateMoments(mean.unsqueeze(-2), variance.unsqueeze(-2).unsqueeze(-2))


def project_gamma(weights: Tensor, shapes: Tensor, rates: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Shape and rate of the Gamma law with the E[x] and E[log x] of a mixture along a hypothesis axis.

    log E[x] − E[log x] is summed from terms of one sign: what the means differ by, and what each law has itself.
    """
    means = shapes / rates
    mean = (weights * means).sum(axis, keepdim=True)
    apart = means / mean - 1
    near = apart.abs() < 0.5
    between = torch.where(near, apart - torch.log1p(torch.where(near, apart, 0)), apart - (means / mean).log())
    a = gamma_shape((weights * (between + digamma_gap(shapes))).sum(axis))
    return a, a / mean.squeeze(axis)


def noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def known(value: Tensor | float, t: int, like: Tensor) -> Tensor:
    """What the modes know at time t, (M, 1) or a number."""
    v = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if v.ndim == 2 and t >= len(v):
        advice = "Give it for every step, or once for all of them."
        raise ValueError(sentence("SwitchingConjugate.family", f"at most T={len(v)} steps", t + 1, advice))
    v = v[t] if v.ndim == 2 else v
    return v[:, None] if v.ndim else v


def known_of(value: Tensor | float, t: int, mode: Tensor, like: Tensor) -> Tensor:
    """The same for given modes (n)."""
    v = known(value, t, like)
    return v[mode, 0] if v.ndim else v


def check_known(where: str, value: Tensor | float, modes: int, like: Tensor, *, positive: bool) -> None:
    if isinstance(value, Tensor):
        require_alike(where, require_float(where, value), "transition", like)
    elif not isinstance(value, int | float):
        expected, advice = "a number or a tensor", "Wrap it with torch.as_tensor(..., dtype=...)."
        raise TypeError(sentence(where, expected, type(value).__name__, advice))
    v = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    fits = v.ndim == 0 or (v.ndim <= 2 and v.shape[-1] == modes)
    if not fits:
        expected = f"a number, shape (M={modes}) or (T, M={modes})"
        raise ValueError(sentence(where, expected, shape(v), "One entry for each row of transition."))
    require_finite(where, v)
    if not holds(v > 0 if positive else v >= 0):
        expected = "values > 0" if positive else "values ≥ 0"
        raise ValueError(sentence(where, expected, f"a smallest of {v.min().item():.3g}", "Check its sign."))
