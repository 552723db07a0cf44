"""Gibbs sampling between a parameter and an observation that are conjugate (S2-C11, S2-C12, X-18).

    p(x, η) ∝ h(dx) e^{⟨η,x⟩ − (ν+1) G(η) + ⟨χ,η⟩}
    x | η ~ p_η                                      the tilt of h: one draw of attention
    η | x ~ e^{⟨χ+x,η⟩ − (ν+1) G(η)}                the conjugate posterior (χ + x, ν + 1)

The stationary mean of x and of ∇G(η) is χ/ν. Attention passes conditional means on instead of draws,
m⁺ = (χ + m)/(ν + 1), which contracts to the same χ/ν by 1/(ν+1) a step. ν → 0 leaves no contraction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, require_alike, require_float, sentence, shape
from cumulant.samplers.priors import ConjugatePrior
from cumulant.samplers.resampling import require_generator


class GibbsState(NamedTuple):
    """State of the chains: observation x and parameter η, both (*batch, chains, d)."""

    x: Tensor
    eta: Tensor


class GibbsInfo(NamedTuple):
    """Record of a sweep: mean = ∇G(η) = E[x⁺ | η] (*batch, chains, d), x without the noise of its draw."""

    mean: Tensor


class GibbsRun(NamedTuple):
    """Draws of a run after burn-in, all (*batch, chains, steps, d).

    x     the observations
    eta   the parameters
    mean  ∇G(η), the same expectation as x with less variance

    For `diagnose`, which reads (chains, n, *event), move batch axes behind.
    """

    x: Tensor
    eta: Tensor
    mean: Tensor


def init(prior: ConjugatePrior, chains: int = 1, *, generator: torch.Generator) -> GibbsState:
    """Chains started in stationarity: η from the prior, x from p_η."""
    _require_prior("init", prior)
    eta = prior.sample(chains, generator=generator)
    return GibbsState(_draw_x(prior, eta, generator), eta)


def step(state: GibbsState, prior: ConjugatePrior, *, generator: torch.Generator) -> tuple[GibbsState, GibbsInfo]:
    """One sweep: η from its posterior given x, then x from p_η.

    >>> import torch
    >>> from torch.distributions import Poisson
    >>> from cumulant import from_distribution
    >>> h = from_distribution(Poisson(torch.tensor(1.0, dtype=torch.float64)))
    >>> prior = ConjugatePrior(h, torch.tensor([6.0], dtype=torch.float64), 2.0)
    >>> g = torch.Generator().manual_seed(0)
    >>> state, info = step(init(prior, 20_000, generator=g), prior, generator=g)
    >>> bool((info.mean.mean() - 3.0).abs() < 0.05)                                  # χ/ν
    True
    """
    _require_prior("step", prior)
    require_generator("step", generator)
    batch, d = prior.chi.shape[:-1], prior.measure.dim
    if state.x.ndim != len(batch) + 2 or state.x.shape[:-2] != batch or state.x.shape[-1] != d:
        expected, advice = f"x of shape ({', '.join(map(str, [*batch, 'chains', d]))})", "Start with init(prior, ...)."
        raise ValueError(sentence("step.state", expected, shape(state.x), advice))
    nu = torch.as_tensor(prior.nu)[..., None].expand(state.x.shape[:-1])
    eta = prior.draw(prior.chi[..., None, :] + state.x, nu + 1, generator)
    return GibbsState(_draw_x(prior, eta, generator), eta), GibbsInfo(prior.measure.mean(eta))


def run(
    prior: ConjugatePrior, steps: int, *, chains: int = 4, burn_in: int = 0, generator: torch.Generator
) -> GibbsRun:
    """``burn_in + steps`` sweeps of every chain, of which the last ``steps`` are returned."""
    for name, value, least in (("steps", steps, 1), ("burn_in", burn_in, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(sentence(f"run.{name}", f"a number of sweeps ≥ {least}", value, "Count whole sweeps."))
    state = init(prior, chains, generator=generator)
    sweeps = []
    for count in range(burn_in + steps):
        state, info = step(state, prior, generator=generator)
        if count >= burn_in:
            sweeps.append((*state, info.mean))
    return GibbsRun(*(torch.stack(part, dim=-2) for part in zip(*sweeps, strict=True)))


def mean_iteration(prior: ConjugatePrior, start: Tensor, steps: int) -> Tensor:
    """Conditional means passed on in place of draws, m⁺ = (χ + m)/(ν + 1): what attention does (X-18).

    start (*batch, d) → (steps + 1, *batch, d), the path from start towards χ/ν.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.zeros(1), torch.eye(1))
    >>> mean_iteration(ConjugatePrior(h, torch.tensor([3.0]), 1.0), torch.tensor([7.0]), 3)[:, 0]
    tensor([7.0000, 5.0000, 4.0000, 3.5000])
    """
    _require_prior("mean_iteration", prior)
    require_alike("mean_iteration.start", require_float("mean_iteration.start", start), "prior.chi", prior.chi)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(sentence("mean_iteration.steps", "a number of steps ≥ 0", steps, "0 returns the start."))
    path = [start.expand(broadcast("mean_iteration.start", start.shape, prior.chi.shape))]
    for _ in range(steps):
        path.append((prior.chi + path[-1]) / (torch.as_tensor(prior.nu)[..., None] + 1))
    return torch.stack(path)


def _draw_x(prior: ConjugatePrior, eta: Tensor, generator: torch.Generator) -> Tensor:
    return prior.measure.sample(eta, 1, generator=generator)[..., 0, :]


def _require_prior(where: str, prior: object) -> None:
    if not isinstance(prior, ConjugatePrior):
        got, advice = type(prior).__name__, "Build one from a measure, χ and ν."
        raise TypeError(sentence(f"{where}.prior", "a ConjugatePrior", got, advice))
