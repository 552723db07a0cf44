"""h = N(μ, Σ): the measure for which attention is affine (S1-C1)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.measures.base import Measure, per_query
from cumulant.measures.dual import RANK
from cumulant.solve import Solution, Status
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Measure):
    """The normal law; a singular covariance is a normal law on a subspace.

        G(η) = ⟨μ,η⟩ + ½ηᵀΣη,    ∇G = μ + Ση,    ∇²G = Σ,    G*(m) = ½(m−μ)ᵀΣ⁺(m−μ) on μ + range Σ, +inf elsewhere

    loc         (*batch, d)     μ; the field is not called mean because `mean(eta)` is the method
    covariance  (*batch, d, d)  Σ, symmetric and positive semidefinite; broadcasts with loc

    >>> import torch
    >>> h = Gaussian(torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 1.0]]))
    >>> h.log_normalizer(torch.tensor([1.0, 0.0])), h.mean(torch.tensor([1.0, 0.0]))
    (tensor(1.), tensor([2., 1.]))
    """

    loc: Tensor
    covariance: Tensor

    def __post_init__(self):
        self.accept_numpy()
        loc = require_float("Gaussian.loc", self.loc)
        cov = require_float("Gaussian.covariance", self.covariance)
        require_alike("Gaussian.covariance", cov, "loc", loc)
        if loc.ndim < 1:
            raise ValueError(sentence("Gaussian.loc", "shape (*batch, d)", shape(loc), "Use loc[None] for d=1."))
        d = loc.shape[-1]
        if cov.ndim < 2 or cov.shape[-2:] != (d, d):
            advice = "Use torch.diag_embed for variances, scale * torch.eye(d) for a scalar."
            raise ValueError(sentence("Gaussian.covariance", f"shape (*batch, d={d}, d={d})", shape(cov), advice))
        broadcast("Gaussian.covariance", loc.shape[:-1], cov.shape[:-2])
        require_finite("Gaussian.loc", loc)
        require_finite("Gaussian.covariance", cov)
        self._check_covariance(cov)

    def _check_covariance(self, cov: Tensor) -> None:
        where = "Gaussian.covariance"
        scale = cov.abs().amax((-2, -1)).clamp_min(torch.finfo(cov.dtype).tiny)
        asymmetry = (cov - cov.mT).abs().amax((-2, -1)) / scale
        slack = 1e3 * torch.finfo(cov.dtype).eps
        if not holds(asymmetry <= slack):
            got = f"a relative asymmetry of {asymmetry.max().item():.2g}"
            raise ValueError(sentence(where, "a symmetric matrix", got, "Pass (S + S.mT) / 2 if it is rounding."))
        if torch.compiler.is_compiling():
            return
        smallest = torch.linalg.eigvalsh(cov.double())[..., 0] / scale
        if not holds(smallest >= -slack * cov.shape[-1]):
            got = f"a smallest eigenvalue of {smallest.min().item():.2g} relative to its largest entry"
            raise ValueError(sentence(where, "a positive semidefinite matrix", got, "Clip the eigenvalues at 0."))

    @property
    def dim(self) -> int:
        return self.loc.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", self.loc.shape[:-1], self.covariance.shape[:-2])

    def _times(self, eta: Tensor) -> Tensor:
        return eta @ self.covariance  # symmetric, so row vectors may multiply from the left

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return (eta * (self.loc[..., None, :] + self._times(eta) / 2)).sum(-1)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self.loc[..., None, :] + self._times(eta)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return self._times(v)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self.covariance[..., None, :, :].expand(*eta.shape, self.dim)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """η = Σ⁺(m − μ) in closed form; OUTSIDE where m − μ has a component that Σ cannot reach."""
        rank = max(RANK, self.dim * torch.finfo(mean.dtype).eps)
        offset = mean - self.loc[..., None, :]
        eta = offset @ torch.linalg.pinv(self.covariance, rtol=rank, hermitian=True)
        residual = torch.linalg.vector_norm(self._times(eta) - offset, dim=-1)
        size = torch.linalg.vector_norm(offset, dim=-1) + torch.linalg.vector_norm(mean, dim=-1)
        outside = residual > 1e6 * torch.finfo(mean.dtype).eps * size
        status = torch.where(outside, int(Status.OUTSIDE), int(Status.CONVERGED)).to(torch.int8)
        return Solution(eta, status, torch.zeros_like(status, dtype=torch.int64), residual, residual[None])

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        eigenvalues, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * eigenvalues.clamp_min(0).sqrt()[..., None, :]
        noise = torch.randn(*eta.shape[:-1], n, self.dim, dtype=eta.dtype, device=eta.device, generator=generator)
        return self.mean(eta)[..., None, :] + noise @ root[..., None, :, :].mT
