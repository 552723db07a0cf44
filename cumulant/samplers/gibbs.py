"""Gibbs sampling between a parameter and an observation that are conjugate (S2-C11, S2-C12, X-18).

    p(x, η) ∝ h(dx) e^{⟨η,x⟩ − (ν+1) G(η) + ⟨χ,η⟩}
    x | η ~ p_η                                      the tilt of h: one draw of attention
    η | x ~ e^{⟨χ+x,η⟩ − (ν+1) G(η)}                the conjugate posterior (χ + x, ν + 1)

The stationary mean of x and of ∇G(η) is χ/ν. Attention passes conditional means on instead of draws,
m⁺ = (χ + m)/(ν + 1), which contracts to the same χ/ν by 1/(ν+1) a step. ν → 0 leaves no contraction.

| h                                     | law of η under (χ, ν)                                     | proper iff      |
|---------------------------------------|-----------------------------------------------------------|-----------------|
| `Empirical`, corners of a simplex     | p(η) ~ Dirichlet(c), Σ c_n x_n = χ, Σ c_n = ν             | χ/ν inside it   |
| `Gaussian(μ, Σ)`                      | N((νΣ)⁻¹(χ − νμ), (νΣ)⁻¹)                                 | Σ regular       |
| Poisson, rate λ                       | λe^η ~ Gamma(χ, ν)                                        | χ > 0           |
| Gamma, concentration α, rate β        | β − η ~ Gamma(αν + 1, χ)                                  | χ > 0           |
| negative binomial, count r, chance p  | p e^η ~ Beta(χ, νr + 1)                                   | χ > 0           |

with ν > 0 in every row. Bernoulli and categorical laws are simplices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.kernels.dense import row_weights
from cumulant.measures import Empirical, Gaussian, Measure
from cumulant.measures.classical import GammaLaw, NegativeBinomialLaw, PoissonLaw
from cumulant.samplers.resampling import require_generator
from cumulant.special import standard_gamma

FLAT = 1e-10  # singular value of the atoms, relative to the largest, below which they span no simplex


@final
@dataclass(frozen=True, eq=False)
class ConjugatePrior:
    """The law of η with density e^{⟨χ,η⟩ − νG(η)}, for the measures of the table above (S2-C3).

    measure  h; its batch is (*batch)
    chi      (*batch, d)  χ, what has been observed, summed
    nu       a number or (*batch): ν, how many observations that was

    E[∇G(η)] = χ/ν is `mean`. Where η is determined up to directions in which all atoms agree, draws have none of them.

    >>> import torch
    >>> from torch.distributions import Bernoulli
    >>> from cumulant import from_distribution
    >>> coin = from_distribution(Bernoulli(torch.tensor(0.5, dtype=torch.float64)))
    >>> prior = ConjugatePrior(coin, torch.tensor([2.0], dtype=torch.float64), 5.0)   # the chance is Beta(2, 3)
    >>> prior.mean, prior.posterior(torch.ones(1, dtype=torch.float64)).mean
    (tensor([0.4000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """

    measure: Measure
    chi: Tensor
    nu: Tensor | float

    def __post_init__(self):
        where = "ConjugatePrior"
        if type(self.measure) not in POSTERIORS:
            known = "Empirical, Gaussian or a Poisson, Gamma, Bernoulli, categorical or negative binomial law"
            advice = "Build it with from_distribution, or tilt and sample the measure yourself."
            raise TypeError(sentence(f"{where}.measure", known, type(self.measure).__name__, advice))
        chi, like, d = require_float(f"{where}.chi", self.chi), self.measure.empty_tensor(), self.measure.dim
        require_alike(f"{where}.chi", chi, "measure", like)
        if chi.ndim == 0 or chi.shape[-1] != d:
            raise ValueError(sentence(f"{where}.chi", f"shape (*batch, d={d})", shape(chi), "Check the last axis."))
        require_finite(f"{where}.chi", chi)
        nu = torch.as_tensor(self.nu, dtype=chi.dtype, device=chi.device)
        if not holds((nu > 0) & (nu < torch.inf)):
            advice = "Without prior observations (ν = 0) the law of η is not one."
            raise ValueError(sentence(f"{where}.nu", "numbers > 0", nu.tolist(), advice))
        batch = broadcast(where, chi.shape[:-1], nu.shape, self.measure.batch_shape)
        object.__setattr__(self, "chi", chi.expand(*batch, d))
        object.__setattr__(self, "nu", nu.expand(batch))
        POSTERIORS[type(self.measure)].check(self.measure, self.chi[..., None, :], nu.expand(batch)[..., None])

    @property
    def mean(self) -> Tensor:
        """E[∇G(η)] = χ/ν:  (*batch, d)."""
        return self.chi / torch.as_tensor(self.nu)[..., None]

    def posterior(self, x: Tensor) -> ConjugatePrior:
        """After one more observation x (*batch, d): (χ + x, ν + 1)."""
        where = "ConjugatePrior.posterior"
        require_alike(where, require_float(where, x), "chi", self.chi)
        broadcast(where, x.shape, self.chi.shape)
        return replace(self, chi=self.chi + x, nu=torch.as_tensor(self.nu) + 1)

    def sample(self, n: int, *, generator: torch.Generator) -> Tensor:
        """n independent η:  (*batch, n, d)."""
        if not isinstance(n, int) or n < 1:
            raise ValueError(sentence("ConjugatePrior.sample", "at least one draw", n, "Pass n ≥ 1."))
        require_generator("ConjugatePrior.sample", generator)
        rows = self.chi[..., None, :].expand(*self.chi.shape[:-1], n, -1)
        return self._draw(rows, torch.as_tensor(self.nu)[..., None].expand(rows.shape[:-1]), generator)

    def _draw(self, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
        """η for every row of χ (*batch, n, d) and ν (*batch, n)."""
        return POSTERIORS[type(self.measure)].draw(self.measure, chi, nu, generator)


class GibbsState(NamedTuple):
    """Where the chains are: observation x and parameter η, both (*batch, chains, d)."""

    x: Tensor
    eta: Tensor


class GibbsInfo(NamedTuple):
    """What a step learned besides: mean = ∇G(η) = E[x⁺ | η] (*batch, chains, d), x without the noise of its draw."""

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
    _prior("init", prior)
    eta = prior.sample(chains, generator=generator)
    return GibbsState(_observe(prior, eta, generator), eta)


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
    _prior("step", prior)
    require_generator("step", generator)
    batch, d = prior.chi.shape[:-1], prior.measure.dim
    if state.x.ndim != len(batch) + 2 or state.x.shape[:-2] != batch or state.x.shape[-1] != d:
        expected, advice = f"x of shape ({', '.join(map(str, [*batch, 'chains', d]))})", "Start with init(prior, ...)."
        raise ValueError(sentence("step.state", expected, shape(state.x), advice))
    nu = torch.as_tensor(prior.nu)[..., None].expand(state.x.shape[:-1])
    eta = prior._draw(prior.chi[..., None, :] + state.x, nu + 1, generator)  # pyright: ignore[reportPrivateUsage]
    return GibbsState(_observe(prior, eta, generator), eta), GibbsInfo(prior.measure.mean(eta))


def run(
    prior: ConjugatePrior, steps: int, *, chains: int = 4, burn_in: int = 0, generator: torch.Generator
) -> GibbsRun:
    """``burn_in + steps`` sweeps of every chain, the last ``steps`` of them kept."""
    for name, value, least in (("steps", steps, 1), ("burn_in", burn_in, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(sentence(f"run.{name}", f"a number of sweeps ≥ {least}", value, "Count whole sweeps."))
    state = init(prior, chains, generator=generator)
    kept = []
    for count in range(burn_in + steps):
        state, info = step(state, prior, generator=generator)
        if count >= burn_in:
            kept.append((*state, info.mean))
    return GibbsRun(*(torch.stack(part, dim=-2) for part in zip(*kept, strict=True)))


def mean_iteration(prior: ConjugatePrior, start: Tensor, steps: int) -> Tensor:
    """Conditional means passed on in place of draws, m⁺ = (χ + m)/(ν + 1): what attention does (X-18).

    start (*batch, d) → (steps + 1, *batch, d), the path from start towards χ/ν.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.zeros(1), torch.eye(1))
    >>> mean_iteration(ConjugatePrior(h, torch.tensor([3.0]), 1.0), torch.tensor([7.0]), 3)[:, 0]
    tensor([7.0000, 5.0000, 4.0000, 3.5000])
    """
    _prior("mean_iteration", prior)
    require_alike("mean_iteration.start", require_float("mean_iteration.start", start), "prior.chi", prior.chi)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(sentence("mean_iteration.steps", "a number of steps ≥ 0", steps, "0 returns the start."))
    path = [start.expand(broadcast("mean_iteration.start", start.shape, prior.chi.shape))]
    for _ in range(steps):
        path.append((prior.chi + path[-1]) / (torch.as_tensor(prior.nu)[..., None] + 1))
    return torch.stack(path)


def _observe(prior: ConjugatePrior, eta: Tensor, generator: torch.Generator) -> Tensor:
    return prior.measure.sample(eta, 1, generator=generator)[..., 0, :]


def _prior(where: str, prior: object) -> None:
    if not isinstance(prior, ConjugatePrior):
        got, advice = type(prior).__name__, "Build one from a measure, χ and ν."
        raise TypeError(sentence(f"{where}.prior", "a ConjugatePrior", got, advice))


class _Posterior(NamedTuple):
    """check(h, χ, ν) raises where the law is improper, draw(h, χ, ν, generator) gives η.

    χ (*batch, rows, d), ν (*batch, rows).
    """

    check: Callable[..., None]
    draw: Callable[..., Tensor]


def _log_gamma(concentration: Tensor, generator: torch.Generator) -> Tensor:
    """log of Gamma(c, 1) draws, exact where the draws themselves underflow: Gamma(c) = Gamma(c+1) U^{1/c}."""
    uniform = 1 - torch.rand(
        concentration.shape, dtype=concentration.dtype, device=concentration.device, generator=generator
    )
    return standard_gamma(concentration + 1, generator).log() + uniform.log() / concentration


def _positive(measure: Measure, chi: Tensor, nu: Tensor) -> None:
    if not holds(chi > 0):
        advice = "χ/ν is a mean of the law and must lie inside its support."
        raise ValueError(sentence("ConjugatePrior.chi", f"values > 0 for {type(measure).__name__}", "others", advice))


def _poisson(h: PoissonLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    return _log_gamma(chi, generator) - (nu * h.rate[..., None]).log()[..., None]


def _gamma(h: GammaLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    left = standard_gamma((h.concentration[..., None] * nu + 1)[..., None], generator) / chi
    return h.rate[..., None, None] - left


def _negative_binomial(h: NegativeBinomialLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    ours = _log_gamma(chi, generator)
    theirs = _log_gamma((h.total_count[..., None] * nu + 1)[..., None], generator)
    log_odds = ours - torch.logaddexp(ours, theirs)
    # rounding must not put the law on the end of its domain
    return log_odds.clamp_max(-4 * torch.finfo(chi.dtype).eps) - h.probs.log()[..., None, None]


def _gaussian_check(h: Gaussian, chi: Tensor, nu: Tensor) -> None:
    eigenvalues = torch.linalg.eigvalsh(h.covariance)
    if not holds(eigenvalues[..., 0] > eigenvalues[..., -1] * torch.finfo(chi.dtype).eps):
        advice = "Along a direction without variance η has no law; project it away."
        raise ValueError(sentence("ConjugatePrior.measure", "a regular covariance", "a singular one", advice))


def _gaussian(h: Gaussian, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    factor = torch.linalg.cholesky(h.covariance)[..., None, :, :]
    offset = (chi - nu[..., None] * h.loc[..., None, :])[..., None]
    location = torch.cholesky_solve(offset, factor.expand(*offset.shape[:-1], -1)) / nu[..., None, None]
    noise = torch.randn(offset.shape, dtype=chi.dtype, device=chi.device, generator=generator)
    noise = torch.linalg.solve_triangular(factor.mT, noise, upper=True)
    return (location + noise / nu.sqrt()[..., None, None])[..., 0]


def _simplex(h: Empirical) -> Tensor:
    """The pseudo-inverse (*batch, d, n) of the atoms less their mean."""
    if h.log_weights is not None and (h.query_rows is not None or not holds(h.log_weights > -torch.inf)):
        advice = "Drop absent atoms; one measure per query row is a batch here."
        raise ValueError(sentence("ConjugatePrior.measure", "one finite weight per atom", "others", advice))
    centred = h.atoms - h.atoms.mean(-2, keepdim=True)
    singular = torch.linalg.svdvals(centred)
    n = h.atoms.shape[-2]
    if n < 2 or n > h.dim + 1 or not holds(singular[..., n - 2] > FLAT * singular[..., 0]):
        expected = "atoms that are the corners of a simplex (affinely independent, at least two)"
        advice = "Only then has η a Dirichlet law; sample other measures with smc."
        raise ValueError(sentence("ConjugatePrior.measure", expected, f"atoms {shape(h.atoms)}", advice))
    return torch.linalg.pinv(centred)


def _corners(h: Empirical, chi: Tensor, nu: Tensor) -> Tensor:
    """c with Σ c_n x_n = χ and Σ c_n = ν, the concentrations at the corners: (*batch, rows, n)."""
    inverse, centre = _simplex(h), h.atoms.mean(-2)
    off = chi - nu[..., None] * centre[..., None, :]
    return off @ inverse + nu[..., None] / h.atoms.shape[-2]


def _simplex_check(h: Empirical, chi: Tensor, nu: Tensor) -> None:
    c = _corners(h, chi, nu)
    ones = torch.ones_like(h.atoms[..., :1])
    off = (c @ torch.cat([h.atoms, ones], -1) - torch.cat([chi, nu[..., None]], -1)).abs().amax(-1)
    size = chi.abs().amax(-1) + (1 + h.atoms.abs().amax((-2, -1))[..., None]) * nu
    eps = torch.finfo(chi.dtype).eps
    if not holds(c > 64 * eps * nu[..., None]) or not holds(off <= 1e3 * eps * size):
        advice = "For a coin 0 < χ < ν; for categories every χ_k > 0 and Σ χ_k = ν."
        raise ValueError(sentence("ConjugatePrior.chi", "χ/ν inside the simplex of the atoms", "others", advice))


def _simplex_draw(h: Empirical, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    log_p = _log_gamma(_corners(h, chi, nu), generator)  # up to a constant, which centred atoms do not see
    w = row_weights(h.log_weights, h.atoms)
    return (log_p if w is None else log_p - w) @ _simplex(h).mT


POSTERIORS: dict[type, _Posterior] = {
    Empirical: _Posterior(_simplex_check, _simplex_draw),
    Gaussian: _Posterior(_gaussian_check, _gaussian),
    PoissonLaw: _Posterior(_positive, _poisson),
    GammaLaw: _Posterior(_positive, _gamma),
    NegativeBinomialLaw: _Posterior(_positive, _negative_binomial),
}
