"""Conjugate families whose observations are counted: Gamma–Poisson, Beta–Bernoulli, Dirichlet–categorical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, sentence, shape
from cumulant.filters.family import (
    Family,
    Observed,
    check_known,
    known,
    known_of,
    project_gamma,
    scalar_moments,
    stack,
)
from cumulant.filters.gamma_functions import digamma_gap, dirichlet_concentration, gamma_shape, log_rising
from cumulant.filters.protocol import StateMoments, log_probabilities
from cumulant.special import standard_gamma

ROUNDED = 1e-6  # how far chances may be from a sum of 1


@final
@dataclass(frozen=True, eq=False)
class GammaPoisson(Family):
    """Counts y ~ Poisson(e_s x) of an unknown rate x ~ Gamma(a, b).

        a ← a + y,   b ← b + e_s,   y ~ negative binomial

    exposure  e_s ≥ 0 of every mode: a number, (M,) or (T, M). With exposure 0 nothing can be counted.

    >>> import torch
    >>> p = torch.tensor([[2.0], [1.0]], dtype=torch.float64)                          # Gamma(2, 1), k × batch
    >>> found = GammaPoisson().observe(p, torch.tensor([3.0], dtype=torch.float64), 0)
    >>> found.parameters[:, 0].tolist(), round(found.log_likelihood.exp().item(), 12)  # 4 · (1/2)² · (1/2)³
    ([5.0, 2.0], 0.125)
    """

    exposure: Tensor | float = 1.0

    names = ("concentration", "rate")
    values = "counts 0, 1, 2, …"

    def inside(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).all(-1)

    def check(self, modes: int, count: int, like: Tensor) -> None:
        check_known("GammaPoisson.exposure", self.exposure, modes, like, positive=False)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y >= 0) & (y == y.floor()) & (y < torch.inf)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        a, b = parameters.unbind(-2)
        e = known(self.exposure, t, parameters)
        seen = e > 0
        log_share = torch.where(seen, e / (b + e), 1).log()  # of the count that this step contributes
        counted = torch.where(seen | (y == 0), y * log_share, -torch.inf)
        log_likelihood = log_rising(a, y) - torch.lgamma(y + 1) - a * torch.log1p(e / b) + counted
        return Observed(stack(a + y, b + e), log_likelihood)

    def moments(self, parameters: Tensor) -> StateMoments:
        a, b = parameters.unbind(-2)
        return scalar_moments(a / b, a / b.square())

    def expected_statistics(self, parameters: Tensor) -> Tensor:
        a, b = parameters.unbind(-2)
        return stack(a / b, (a / b).log() - digamma_gap(a))

    def from_statistics(self, statistics: Tensor) -> Tensor:
        mean, mean_log = statistics.unbind(-2)
        a = gamma_shape(mean.log() - mean_log)
        return stack(a, a / mean)

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        a, b = parameters.unbind(-2)
        return stack(*project_gamma(weights, a, b, axis))

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        a, b = parameters.unbind(-1)
        return (standard_gamma(a, generator) / b)[:, None]

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(x[:, 0] * known_of(self.exposure, t, mode, x), generator=generator)


@final
@dataclass(frozen=True, eq=False)
class DirichletCategorical(Family):
    """Categories y = 0, …, K−1 with unknown chances x ~ Dirichlet(a).

        a_y ← a_y + 1,   P(y) = a_y/Σa

    clutter  for every mode None, or chances (K,) of categories that are drawn without regard to x: such a mode learns
             nothing about x

    >>> import torch
    >>> p = torch.tensor([[1.0], [2.0], [1.0]], dtype=torch.float64)
    >>> found = DirichletCategorical().observe(p, torch.tensor([1.0], dtype=torch.float64), 0)
    >>> found.parameters[:, 0].tolist(), found.log_likelihood.exp().tolist()
    ([1.0, 3.0, 1.0], [0.5])
    """

    clutter: Sequence[Tensor | None] | None = None

    names = None
    values = "categories 0, …, K−1"

    def inside(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).all(-1)

    def check(self, modes: int, count: int, like: Tensor) -> None:
        _check_clutter("DirichletCategorical.clutter", self.clutter, modes, count)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y >= 0) & (y == y.floor()) & (y < count)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        k = parameters.shape[-2]
        hit = (y == torch.arange(k, dtype=y.dtype, device=y.device)[:, None]).to(y.dtype)  # (k, batch)
        log_likelihood = (parameters * hit).sum(-2).log() - parameters.sum(-2).log()
        if self.clutter is None:
            return Observed(parameters + hit, log_likelihood)
        informative, table = _clutter_table(self.clutter, k, parameters)
        known = log_probabilities((table[..., None] * hit).sum(-2))  # (M, batch)
        return Observed(parameters + informative[..., None] * hit, torch.where(informative, log_likelihood, known))

    def moments(self, parameters: Tensor) -> StateMoments:
        total = parameters.sum(-2, keepdim=True)
        mean = parameters / total
        eye = torch.eye(mean.shape[-2], dtype=mean.dtype, device=mean.device)[..., None]
        spread = mean.unsqueeze(-3) * (eye - mean.unsqueeze(-2))
        return StateMoments(mean, spread / (total + 1).unsqueeze(-2))

    def expected_statistics(self, parameters: Tensor) -> Tensor:
        total = parameters.sum(-2, keepdim=True)
        return (parameters / total).log() - digamma_gap(parameters) + digamma_gap(total)

    def from_statistics(self, statistics: Tensor) -> Tensor:
        return dirichlet_concentration(statistics.movedim(-2, -1)).movedim(-1, -2)

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        # in double precision, because Σa rests on what is left of the logarithms once their leading terms cancel
        logs = (weights.unsqueeze(-2).double() * self.expected_statistics(parameters.double())).sum(axis)
        return self.from_statistics(logs).to(parameters.dtype)

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        x = standard_gamma(parameters, generator).clamp_min(torch.finfo(parameters.dtype).tiny)
        return x / x.sum(-1, keepdim=True)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        chances = x
        if self.clutter is not None:
            informative, table = _clutter_table(self.clutter, x.shape[-1], x)
            chances = torch.where(informative[mode], x, table[mode])
        return torch.multinomial(chances, 1, generator=generator)[:, 0].to(x.dtype) if len(x) else x[:, 0]


@final
@dataclass(frozen=True, eq=False)
class BetaBernoulli(Family):
    """Coins y ∈ {0, 1} with an unknown chance x ~ Beta(a, b) of 1.

        a ← a + y,   b ← b + 1 − y,   P(1) = a/(a + b)

    clutter  for every mode None, or the chance of a 1 that is drawn without regard to x: such a mode learns nothing

    >>> import torch
    >>> p = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    >>> found = BetaBernoulli().observe(p, torch.tensor([1.0], dtype=torch.float64), 0)
    >>> found.parameters[:, 0].tolist(), round(found.log_likelihood.exp().item(), 12)
    ([3.0, 3.0], 0.4)
    """

    clutter: Sequence[float | Tensor | None] | None = None

    names = ("a", "b")
    values = "0 or 1"

    @property
    def _categories(self) -> DirichletCategorical:
        """The same law with the categories 1 and 0 in this order."""
        if self.clutter is None:
            return DirichletCategorical()
        chances = [
            c if c is None or isinstance(c, Tensor) else torch.tensor(float(c), dtype=torch.float64)
            for c in self.clutter
        ]
        return DirichletCategorical([None if c is None else torch.stack([c, 1 - c], -1) for c in chances])

    def inside(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).all(-1)

    def check(self, modes: int, count: int, like: Tensor) -> None:
        if self.clutter is not None:
            flat = all(c is None or isinstance(c, int | float) or c.ndim == 0 for c in self.clutter)
            if not flat or len(self.clutter) != modes:
                got, advice = f"{len(self.clutter)} entries", "A coin has one chance; None means informative."
                expected = f"M={modes} entries, None or the chance of a 1"
                raise ValueError(sentence("BetaBernoulli.clutter", expected, got, advice))
        _check_clutter("BetaBernoulli.clutter", self._categories.clutter, modes, count)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return (y == 0) | (y == 1)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        return self._categories.observe(parameters, 1 - y, t)

    def moments(self, parameters: Tensor) -> StateMoments:
        mean, covariance = self._categories.moments(parameters)
        return StateMoments(mean[..., :1, :], covariance[..., :1, :1, :])

    def expected_statistics(self, parameters: Tensor) -> Tensor:
        return self._categories.expected_statistics(parameters)

    def from_statistics(self, statistics: Tensor) -> Tensor:
        return self._categories.from_statistics(statistics)

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        return self._categories.project(weights, parameters, axis)

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._categories.draw(parameters, generator)[:, :1]

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return 1 - self._categories.emit(torch.cat([x, 1 - x], -1), mode, t, generator)


def _check_clutter(where: str, clutter: Sequence[Tensor | None] | None, modes: int, count: int) -> None:
    if clutter is None:
        return
    if isinstance(clutter, Tensor) or len(clutter) != modes:
        got = "a tensor" if isinstance(clutter, Tensor) else f"{len(clutter)} entries"
        advice = "A mode with None learns from what it sees."
        raise ValueError(sentence(where, f"M={modes} entries, None or chances", got, advice))
    for mode, chances in enumerate(clutter):
        if chances is None:
            continue
        require_float(where, chances)
        fits = chances.shape == (count,) and holds(chances >= 0) and holds((chances.sum() - 1).abs() <= ROUNDED)
        if not fits:
            got = f"{shape(chances)} with sum {chances.sum().item():.6g} for mode {mode}"
            raise ValueError(sentence(where, f"K={count} chances ≥ 0 with sum 1", got, "Divide by the sum."))


def _clutter_table(clutter: Sequence[Tensor | None], count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which modes are informative, (M, 1), and the law of clutter in the others, (M, K)."""
    informative = torch.tensor([[c is None] for c in clutter], device=like.device)
    even = like.new_full((count,), 1 / count)
    rows = [even if c is None else c.to(dtype=like.dtype, device=like.device) for c in clutter]
    return informative, torch.stack(rows)
