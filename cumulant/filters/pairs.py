"""Conjugate pairs: a family of laws of the state x, and observations y after which the posterior is in it too.

| pair                 | x            | y given x and mode s     | parameters of x          | family              |
|----------------------|--------------|--------------------------|--------------------------|---------------------|
| GammaPoisson         | rate         | Poisson(e_s x)           | concentration, rate      | `GammaFamily`       |
| BetaBernoulli        | probability  | 1 with probability x     | a, b                     | `DirichletFamily`   |
| DirichletCategorical | K of them    | k with probability x_k   | K concentrations         | `DirichletFamily`   |
| NormalNormal         | mean         | N(x, v_s)                | mean, variance           | `NormalFamily`      |
| NormalGamma          | μ and 1/σ²=τ | N(μ, v_s/τ)              | mean, count, shape, rate | `NormalGammaFamily` |

The mode sets parameters of the observation: the exposure e_s, the variance v_s, or, for binary values and categories,
that y is clutter of a known law, independent of x.

Parameters are (*hypotheses, k, batch) as in `cumulant.filters.protocol`, y is (batch). The predictive law
log p(y) = A(posterior) − A(prior) + log h(y) is written out for every pair, because after much data the difference of
two A cancels; tests/families compares.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.families import DirichletFamily, ExponentialFamily, GammaFamily, NormalFamily, NormalGammaFamily
from cumulant.families.base import standard_normal
from cumulant.families.gamma_functions import log_rising
from cumulant.filters.protocol import StateMoments, log_probabilities

LOG_TWO_PI = math.log(2 * math.pi)
SUM_TOLERANCE = 1e-6  # how far probabilities may be from a sum of 1


class Posterior(NamedTuple):
    """Parameters after an observation, and its predictive log-likelihood (*hypotheses, batch)."""

    parameters: Tensor
    log_likelihood: Tensor


class ConjugatePair(ABC):
    """A family of laws of x and a law of y given x; subclasses are frozen dataclasses and final.

    ``family`` has the parameters on the axis before the last. ``names`` are the parameters in order, None where their
    number is free; ``values`` describes the possible observations.
    """

    family: ClassVar[ExponentialFamily]
    names: ClassVar[tuple[str, ...] | None]
    values: ClassVar[str]

    @abstractmethod
    def check(self, modes: int, count: int, like: Tensor) -> None:
        """Refuse parameters of the observation that do not fit M modes and ``count`` parameters of the state."""

    @abstractmethod
    def allowed(self, y: Tensor, count: int) -> Tensor:
        """Which observations can occur, with ``count`` parameters."""

    @abstractmethod
    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        """The posterior given y (batch) and log p(y)."""

    @abstractmethod
    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        """Observations (n) for states (n, d) and modes (n)."""

    def moments(self, parameters: Tensor) -> StateMoments:
        """Mean and covariance of x."""
        return self.family.moments(parameters)

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """States (n, d) for parameters (n, k)."""
        return replace(self.family, dim=-1).sample(parameters, generator)


@final
@dataclass(frozen=True, eq=False)
class GammaPoisson(ConjugatePair):
    """Counts y ~ Poisson(e_s x) of an unknown rate x ~ Gamma(a, b).

        a ← a + y,   b ← b + e_s,   y ~ negative binomial

    exposure  e_s ≥ 0 of every mode: a number, (M,) or (T, M). With exposure 0 nothing can be counted.

    >>> import torch
    >>> p = torch.tensor([[2.0], [1.0]], dtype=torch.float64)                          # Gamma(2, 1), k × batch
    >>> after = GammaPoisson().observe(p, torch.tensor([3.0], dtype=torch.float64), 0)
    >>> after.parameters[:, 0].tolist(), round(after.log_likelihood.exp().item(), 12)  # 4 · (1/2)² · (1/2)³
    ([5.0, 2.0], 0.125)
    """

    exposure: Tensor | float = 1.0

    family = GammaFamily(dim=-2)
    names = ("concentration", "rate")
    values = "counts 0, 1, 2, …"

    def check(self, modes: int, count: int, like: Tensor) -> None:
        _check_mode_values("GammaPoisson.exposure", self.exposure, modes, like, positive=False)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y >= 0) & (y == y.floor()) & (y < torch.inf)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        a, b = parameters.unbind(-2)
        e = _mode_values(self.exposure, t, parameters)
        counts = e > 0
        log_share = torch.where(counts, e / (b + e), 1).log()  # of the count that this step contributes
        counted = torch.where(counts | (y == 0), y * log_share, -torch.inf)
        log_likelihood = log_rising(a, y) - torch.lgamma(y + 1) - a * torch.log1p(e / b) + counted
        return Posterior(self.family.stack(a + y, b + e), log_likelihood)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(x[:, 0] * _values_of(mode, self.exposure, t, x), generator=generator)


@final
@dataclass(frozen=True, eq=False)
class DirichletCategorical(ConjugatePair):
    """Categories y = 0, …, K−1 with unknown probabilities x ~ Dirichlet(a).

        a_y ← a_y + 1,   P(y) = a_y/Σa

    clutter  for every mode None, or probabilities (K,) of categories that are drawn independently of x: observations
             in such a mode carry no information on x

    >>> import torch
    >>> p = torch.tensor([[1.0], [2.0], [1.0]], dtype=torch.float64)
    >>> after = DirichletCategorical().observe(p, torch.tensor([1.0], dtype=torch.float64), 0)
    >>> after.parameters[:, 0].tolist(), after.log_likelihood.exp().tolist()
    ([1.0, 3.0, 1.0], [0.5])
    """

    clutter: Sequence[Tensor | None] | None = None

    family = DirichletFamily(dim=-2)
    names = None
    values = "categories 0, …, K−1"

    def check(self, modes: int, count: int, like: Tensor) -> None:
        _check_clutter("DirichletCategorical.clutter", self.clutter, modes, count)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y >= 0) & (y == y.floor()) & (y < count)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        k = parameters.shape[-2]
        hit = (y == torch.arange(k, dtype=y.dtype, device=y.device)[:, None]).to(y.dtype)  # (k, batch)
        log_likelihood = (parameters * hit).sum(-2).log() - parameters.sum(-2).log()
        if self.clutter is None:
            return Posterior(parameters + hit, log_likelihood)
        informative, table = _clutter_table(self.clutter, k, parameters)
        by_clutter = log_probabilities((table[..., None] * hit).sum(-2))  # (M, batch)
        log_likelihood = torch.where(informative, log_likelihood, by_clutter)
        return Posterior(parameters + informative[..., None] * hit, log_likelihood)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        probabilities = x
        if self.clutter is not None:
            informative, table = _clutter_table(self.clutter, x.shape[-1], x)
            probabilities = torch.where(informative[mode], x, table[mode])
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(x.dtype) if len(x) else x[:, 0]


@final
@dataclass(frozen=True, eq=False)
class BetaBernoulli(ConjugatePair):
    """Binary y ∈ {0, 1} with an unknown probability x ~ Beta(a, b) of 1.

        a ← a + y,   b ← b + 1 − y,   P(1) = a/(a + b)

    clutter  for every mode None, or the probability of a 1 that is drawn independently of x

    >>> import torch
    >>> p = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    >>> after = BetaBernoulli().observe(p, torch.tensor([1.0], dtype=torch.float64), 0)
    >>> after.parameters[:, 0].tolist(), round(after.log_likelihood.exp().item(), 12)
    ([3.0, 3.0], 0.4)
    """

    clutter: Sequence[float | Tensor | None] | None = None

    family = DirichletFamily(dim=-2)
    names = ("a", "b")
    values = "0 or 1"

    @property
    def _categories(self) -> DirichletCategorical:
        """The same law with the categories 1 and 0 in this order."""
        if self.clutter is None:
            return DirichletCategorical()
        probabilities = [
            c if c is None or isinstance(c, Tensor) else torch.tensor(float(c), dtype=torch.float64)
            for c in self.clutter
        ]
        return DirichletCategorical([None if c is None else torch.stack([c, 1 - c], -1) for c in probabilities])

    def check(self, modes: int, count: int, like: Tensor) -> None:
        if self.clutter is not None:
            flat = all(c is None or isinstance(c, int | float) or c.ndim == 0 for c in self.clutter)
            if not flat or len(self.clutter) != modes:
                got, advice = f"{len(self.clutter)} entries", "A coin has one probability; None means informative."
                expected = f"M={modes} entries, None or the probability of a 1"
                raise ValueError(sentence("BetaBernoulli.clutter", expected, got, advice))
        _check_clutter("BetaBernoulli.clutter", self._categories.clutter, modes, count)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y == 0) | (y == 1)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        return self._categories.observe(parameters, 1 - y, t)

    def moments(self, parameters: Tensor) -> StateMoments:
        mean, covariance = self.family.moments(parameters)
        return StateMoments(mean[..., :1, :], covariance[..., :1, :1, :])

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        return super().draw(parameters, generator)[:, :1]

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return 1 - self._categories.emit(torch.cat([x, 1 - x], -1), mode, t, generator)


@final
@dataclass(frozen=True, eq=False)
class NormalNormal(ConjugatePair):
    """Measurements y ~ N(x, v_s) of an unknown mean x ~ N(m, p), their variance known.

        m ← m + k (y − m),   p ← (1 − k) p,   k = p/(p + v_s),   y ~ N(m, p + v_s)

    variance  v_s > 0 of every mode: a number, (M,) or (T, M). A mode with a large one is an outlier mode.

    >>> import torch
    >>> p = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    >>> NormalNormal(1.0).observe(p, torch.tensor([4.0], dtype=torch.float64), 0).parameters[:, 0].tolist()
    [3.0, 0.75]
    """

    variance: Tensor | float

    family = NormalFamily(dim=-2)
    names = ("mean", "variance")
    values = "finite numbers"

    def check(self, modes: int, count: int, like: Tensor) -> None:
        _check_mode_values("NormalNormal.variance", self.variance, modes, like, positive=True)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return y.isfinite()

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        m, p = parameters.unbind(-2)
        v = _mode_values(self.variance, t, parameters)
        total, off = p + v, y - m
        log_likelihood = -(LOG_TWO_PI + total.log() + off.square() / total) / 2
        return Posterior(self.family.stack(m + p / total * off, p * v / total), log_likelihood)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return x[:, 0] + _values_of(mode, self.variance, t, x).sqrt() * standard_normal(x[:, 0], generator)


@final
@dataclass(frozen=True, eq=False)
class NormalGamma(ConjugatePair):
    """Measurements y ~ N(μ, v_s/τ) whose mean and precision are unknown: τ ~ Gamma(α, β), μ | τ ~ N(m, 1/(κτ)).

        c = 1/v_s,   m ← (κm + cy)/(κ + c),   κ ← κ + c,   α ← α + ½,   β ← β + (y − m)²/(2(v_s + 1/κ))

    and y follows Student's law with 2α degrees of freedom. The state is (μ, τ).

    variance  v_s > 0 of every mode, in units of 1/τ: a number, (M,) or (T, M)

    Parameters are m, κ, α, β. μ has a variance only where α > 1; the covariance is +inf below.

    >>> import torch
    >>> p = torch.tensor([[0.0], [1.0], [2.0], [1.0]], dtype=torch.float64)
    >>> NormalGamma().observe(p, torch.tensor([2.0], dtype=torch.float64), 0).parameters[:, 0].tolist()
    [1.0, 2.0, 2.5, 2.0]
    """

    variance: Tensor | float = 1.0

    family = NormalGammaFamily(dim=-2)
    names = ("mean", "count", "shape", "rate")
    values = "finite numbers"

    def check(self, modes: int, count: int, like: Tensor) -> None:
        _check_mode_values("NormalGamma.variance", self.variance, modes, like, positive=True)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return y.isfinite()

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Posterior:
        m, k, a, b = parameters.unbind(-2)
        v = _mode_values(self.variance, t, parameters)
        off, width = y - m, v + 1 / k
        surprise = off.square() / (2 * width)
        half = torch.full_like(a, 0.5)
        log_likelihood = (
            log_rising(a, half) - (LOG_TWO_PI + (b * width).log()) / 2 - (a + 0.5) * torch.log1p(surprise / b)
        )
        return Posterior(self.family.stack(m + off / (k * width), k + 1 / v, a + 0.5, b + surprise), log_likelihood)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        mean, precision = x.unbind(-1)
        deviation = (_values_of(mode, self.variance, t, x) / precision).sqrt()
        return mean + deviation * standard_normal(mean, generator)


def _mode_values(value: Tensor | float, t: int, like: Tensor) -> Tensor:
    """An exposure or variance at time t, (M, 1) or a number."""
    v = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if v.ndim == 2 and t >= len(v):
        advice = "Give it for every step, or once for all of them."
        raise ValueError(sentence("SwitchingConjugate.family", f"at most T={len(v)} steps", t + 1, advice))
    v = v[t] if v.ndim == 2 else v
    return v[:, None] if v.ndim else v


def _values_of(mode: Tensor, value: Tensor | float, t: int, like: Tensor) -> Tensor:
    """The same for modes (n)."""
    v = _mode_values(value, t, like)
    return v[mode, 0] if v.ndim else v


def _check_mode_values(where: str, value: Tensor | float, modes: int, like: Tensor, *, positive: bool) -> None:
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


def _check_clutter(where: str, clutter: Sequence[Tensor | None] | None, modes: int, count: int) -> None:
    if clutter is None:
        return
    if isinstance(clutter, Tensor) or len(clutter) != modes:
        got = "a tensor" if isinstance(clutter, Tensor) else f"{len(clutter)} entries"
        advice = "None marks a mode whose observations are informative."
        raise ValueError(sentence(where, f"M={modes} entries, None or probabilities", got, advice))
    for mode, law in enumerate(clutter):
        if law is None:
            continue
        require_float(where, law)
        fits = law.shape == (count,) and holds(law >= 0) and holds((law.sum() - 1).abs() <= SUM_TOLERANCE)
        if not fits:
            got = f"{shape(law)} with sum {law.sum().item():.6g} for mode {mode}"
            raise ValueError(sentence(where, f"K={count} probabilities ≥ 0 with sum 1", got, "Divide by the sum."))


def _clutter_table(clutter: Sequence[Tensor | None], count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which modes are informative, (M, 1), and the law of clutter in the others, (M, K)."""
    informative = torch.tensor([[c is None] for c in clutter], device=like.device)
    even = like.new_full((count,), 1 / count)
    rows = [even if c is None else c.to(dtype=like.dtype, device=like.device) for c in clutter]
    return informative, torch.stack(rows)
