"""Conjugate priors of a natural parameter η, with the sum χ of the prior observations and their number ν.

    p(η) ∝ e^{⟨χ,η⟩ − νG(η)},     after an observation x: (χ + x, ν + 1)

It is the image of a member of an exponential family (`cumulant.families`):

| h                                     | law of η under (χ, ν)                                     | proper iff      |
|---------------------------------------|-----------------------------------------------------------|-----------------|
| `Empirical`, corners of a simplex     | p(η) ~ Dirichlet(c), Σ c_n x_n = χ, Σ c_n = ν             | χ/ν inside it   |
| `Gaussian(μ, Σ)`                      | N((νΣ)⁻¹(χ − νμ), (νΣ)⁻¹)                                 | Σ regular       |
| Poisson, rate λ                       | λe^η ~ Gamma(χ, ν)                                        | χ > 0           |
| Gamma, concentration α, rate β        | β − η ~ Gamma(αν + 1, χ)                                  | χ > 0           |
| negative binomial, count r, prob p    | p e^η ~ Beta(χ, νr + 1)                                   | χ > 0           |

with ν > 0 in every row. Bernoulli and categorical laws are simplices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.families import DirichletFamily, GammaFamily
from cumulant.kernels.dense import row_weights
from cumulant.measures import Empirical, Gaussian, Measure
from cumulant.measures.classical import GammaLaw, NegativeBinomialLaw, PoissonLaw
from cumulant.samplers.resampling import require_generator

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
    >>> prior = ConjugatePrior(coin, torch.tensor([2.0], dtype=torch.float64), 5.0)   # P(1) is Beta(2, 3)
    >>> prior.mean, prior.posterior(torch.ones(1, dtype=torch.float64)).mean
    (tensor([0.4000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """

    measure: Measure
    chi: Tensor
    nu: Tensor | float

    def __post_init__(self):
        where = "ConjugatePrior"
        if type(self.measure) not in ETA_LAWS:
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
        ETA_LAWS[type(self.measure)].check(self.measure, self.chi[..., None, :], nu.expand(batch)[..., None])

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
        return self.draw(rows, torch.as_tensor(self.nu)[..., None].expand(rows.shape[:-1]), generator)

    def draw(self, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
        """η for every row of χ (*batch, n, d) and ν (*batch, n)."""
        return ETA_LAWS[type(self.measure)].draw(self.measure, chi, nu, generator)


class _EtaLaw(NamedTuple):
    """check(h, χ, ν) raises where the law is improper, draw(h, χ, ν, generator) gives η.

    χ (*batch, rows, d), ν (*batch, rows).
    """

    check: Callable[..., None]
    draw: Callable[..., Tensor]


def _check_positive(h: Measure, chi: Tensor, nu: Tensor) -> None:
    if not holds(chi > 0):
        advice = "χ/ν is a mean of the law and must lie inside its support."
        raise ValueError(sentence("ConjugatePrior.chi", f"values > 0 for {type(h).__name__}", "others", advice))


def _poisson(h: PoissonLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    return GammaFamily().sample_log(torch.stack([chi[..., 0], nu * h.rate[..., None]], -1), generator)


def _gamma(h: GammaLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    shape = h.concentration[..., None] * nu + 1
    return h.rate[..., None, None] - GammaFamily().sample(torch.stack([shape, chi[..., 0]], -1), generator)


def _negative_binomial(h: NegativeBinomialLaw, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    shapes = torch.stack([chi[..., 0], h.total_count[..., None] * nu + 1], -1)
    log_share = DirichletFamily().sample_statistics(shapes, generator)[..., :1]
    # rounding must not put the law on the end of its domain
    return log_share.clamp_max(-4 * torch.finfo(chi.dtype).eps) - h.probs.log()[..., None, None]


def _check_gaussian(h: Gaussian, chi: Tensor, nu: Tensor) -> None:
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


def _centred_inverse(h: Empirical) -> Tensor:
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
    inverse, centre = _centred_inverse(h), h.atoms.mean(-2)
    off = chi - nu[..., None] * centre[..., None, :]
    return off @ inverse + nu[..., None] / h.atoms.shape[-2]


def _check_simplex(h: Empirical, chi: Tensor, nu: Tensor) -> None:
    c = _corners(h, chi, nu)
    ones = torch.ones_like(h.atoms[..., :1])
    off = (c @ torch.cat([h.atoms, ones], -1) - torch.cat([chi, nu[..., None]], -1)).abs().amax(-1)
    size = chi.abs().amax(-1) + (1 + h.atoms.abs().amax((-2, -1))[..., None]) * nu
    eps = torch.finfo(chi.dtype).eps
    if not holds(c > 64 * eps * nu[..., None]) or not holds(off <= 1e3 * eps * size):
        advice = "For a coin 0 < χ < ν; for categories every χ_k > 0 and Σ χ_k = ν."
        raise ValueError(sentence("ConjugatePrior.chi", "χ/ν inside the simplex of the atoms", "others", advice))


def _simplex(h: Empirical, chi: Tensor, nu: Tensor, generator: torch.Generator) -> Tensor:
    log_p = DirichletFamily().sample_statistics(_corners(h, chi, nu), generator)
    w = row_weights(h.log_weights, h.atoms)
    return (log_p if w is None else log_p - w) @ _centred_inverse(h).mT


ETA_LAWS: dict[type, _EtaLaw] = {
    Empirical: _EtaLaw(_check_simplex, _simplex),
    Gaussian: _EtaLaw(_check_gaussian, _gaussian),
    PoissonLaw: _EtaLaw(_check_positive, _poisson),
    GammaLaw: _EtaLaw(_check_positive, _gamma),
    NegativeBinomialLaw: _EtaLaw(_check_positive, _negative_binomial),
}
