"""The uniform law on a sphere: von Mises–Fisher when tilted, the measure behind cosine similarity (§10)."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, sentence
from cumulant.kernels.dense import accumulate
from cumulant.measures.base import Measure, per_query
from cumulant.solve import Solution, Status, newton
from cumulant.special import Radial, bessel_radial, far_from, standard_gamma
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sphere(Measure):
    """The uniform probability on the sphere of a radius r in R^d; tilted by η it is von Mises–Fisher.

        G(η) = log ₀F₁(; d/2; κ²/4),   κ = r|η|,    ∇G = r A_d(κ) η/|η|,   A_d = I_{d/2} / I_{d/2−1}

    dim     d ≥ 1 (d = 1 is the pair {−r, r})
    radius  a positive number, or a tensor (*batch) of them

    >>> import torch
    >>> h = Sphere(3)
    >>> h.mean(torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))       # coth 2 − 1/2
    tensor([0.0000, 0.0000, 0.5373], dtype=torch.float64)
    """

    dim: int
    radius: int | float | Tensor = 1.0

    def __post_init__(self):
        if not isinstance(self.dim, int) or self.dim < 1:
            raise ValueError(sentence("Sphere.dim", "a positive integer", repr(self.dim), "The circle has dim=2."))
        radius = self.radius if isinstance(self.radius, Tensor) else torch.tensor(float(self.radius))
        require_float("Sphere.radius", radius)
        if not holds((radius > 0) & radius.isfinite()):
            advice = "A point is Empirical(x[None])."
            raise ValueError(sentence("Sphere.radius", "positive finite numbers", self.radius, advice))

    @property
    def batch_shape(self) -> torch.Size:
        return self.radius.shape if isinstance(self.radius, Tensor) else torch.Size()

    def _radius(self, eta: Tensor) -> Tensor:
        """The radius with a query axis, in the precision sums are formed in."""
        if isinstance(self.radius, Tensor):
            return accumulate(self.radius.to(eta.device, eta.dtype))[..., None]
        return accumulate(eta.new_full((1,), float(self.radius)))

    def _polar(self, eta: Tensor) -> "_Polar":
        wide, radius = accumulate(eta), self._radius(eta)
        top = torch.finfo(wide.dtype).max
        largest = wide.detach().abs().amax(-1)
        zero = largest == 0
        scaled = wide / torch.where(zero, 1, largest)[..., None]
        length = torch.where(zero[..., None], 1, scaled).square().sum(-1).sqrt()  # from 1 to √d
        kappa = ((radius * largest).clamp_max(top) * length).clamp_max(top)
        far = kappa >= far_from(wide.dtype)
        near = torch.where(far[..., None], 0, wide)
        quarter = (radius[..., None] * near).square().sum(-1) / 4
        radial = bessel_radial(self.dim / 2, quarter, kappa, far)
        infinite = (radius * largest * length).isinf()
        # G is κ there, rounded or not; as a scalar product it keeps its gradient r η/|η| where its value overflows
        unit = (scaled / length[..., None]).detach()
        beyond = radius * (torch.where(infinite[..., None], wide, 0) * unit).sum(-1)
        radial = radial._replace(log=torch.where(infinite, beyond, radial.log))
        return _Polar(near, far, scaled, length, largest, radial)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return self._polar(eta).radial.log.to(eta.dtype)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        """∇G = r A_d(κ) η/|η|; near 0 it is r² (A_d/κ) η, smooth in η."""
        polar, radius = self._polar(eta), self._radius(eta)
        away = (radius * polar.radial.slope)[..., None] * polar.unit()
        across = polar.radial.across
        near = (radius[..., None] * polar.near) * (radius * across)[..., None]
        # r η may underflow where r² η does not
        large = (radius > 1) & (radius < torch.finfo(radius.dtype).max ** 0.5)
        lifted = polar.near * (torch.where(large, radius, 1).square() * across)[..., None]
        return torch.where(polar.far[..., None], away, torch.where(large[..., None], lifted, near)).to(eta.dtype)

    def _spread(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """∇²G = a(I − uuᵀ) + b uuᵀ: the variances a across and b along the direction u of η, which is 0 at η = 0."""
        polar, radius = self._polar(eta), self._radius(eta)
        radial = polar.radial
        across = torch.where(polar.far, polar.over_length(radius * radial.slope), radius * (radius * radial.across))
        along = torch.where(
            polar.far, polar.over_length(polar.over_length(radial.scaled)), radius * (radius * radial.along)
        )
        return across[..., None], along[..., None], polar.unit()

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        across, along, unit = self._spread(eta)
        wide = accumulate(v)
        shadow = unit * (unit * wide).sum(-1, keepdim=True)
        return (across * (wide - shadow) + along * shadow).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        across, along, unit = (x[..., None] for x in self._spread(eta))
        outer = unit * unit.mT
        eye = torch.eye(self.dim, dtype=outer.dtype, device=outer.device)
        return (across * (eye - outer) + along * outer).to(eta.dtype)

    @per_query
    def log_volume(self, eta: Queries) -> PerQuery:
        across, along, _ = self._spread(eta)
        return ((self.dim - 1) * torch.log1p(across) + torch.log1p(along))[..., 0].to(eta.dtype)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """One scalar equation A_d(κ) = |μ|/r per query, in the direction of μ."""
        exact = self.to(torch.float64)
        mu = mean.double()
        radius = exact._radius(mu)
        length = torch.linalg.vector_norm(mu, dim=-1)
        resultant = length / radius
        radial = inverse_resultant(self.dim / 2, resultant.detach(), max_steps)
        # κ ↦ η = κ μ/(r|μ|); near 0 the ratio κ/|μ| tends to d/r
        safe = torch.where(length > 0, length, 1)
        slope = torch.where(resultant > 0, radial.value[..., 0] / safe, self.dim / radius)
        eta = exact._attach(mu, (slope / radius)[..., None] * mu.detach(), radial.status)
        return replace(radial, value=eta.to(mean.dtype), residual=radial.residual * radius, trace=radial.trace * radius)

    def _attach(self, mu: Tensor, eta: Tensor, status: Tensor) -> Tensor:
        """The implicit gradient dη = ∇²G⁻¹(dμ − d∇G), across and along η."""
        residual = mu - self.mean(eta)
        if not residual.requires_grad:
            return eta
        across, along, unit = self._spread(eta)
        shadow = unit * (unit * residual).sum(-1, keepdim=True)
        converged = (status == Status.CONVERGED)[..., None]
        inverse = (residual - shadow) / across + shadow / torch.where(along > 0, along, 1)
        step = torch.where(converged, inverse, 0)
        return eta + step - step.detach()

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        """sup ⟨η,μ⟩ − G: +inf from the sphere itself outwards (for d = 1 the two atoms have G* = log 2)."""
        inside = super().conjugate(mean)
        status = self.natural(mean.detach()).status
        edge = math.log(2) if self.dim == 1 else torch.inf
        return torch.where(status == Status.BOUNDARY, edge, inside)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        """Wood's rejection sampler for the height along η, then a uniform direction around it."""
        wide, radius = accumulate(eta), self._radius(eta)
        norm = torch.linalg.vector_norm(wide, dim=-1)
        north = torch.zeros_like(wide)
        north[..., 0] = 1
        axis = torch.where((norm > 0)[..., None], wide / torch.where(norm > 0, norm, 1)[..., None], north)
        kappa = (radius * norm)[..., None].expand(*norm.shape, n)
        height = _heights(self.dim, kappa, generator)
        around = torch.randn(*height.shape, self.dim, dtype=height.dtype, device=height.device, generator=generator)
        axis = axis[..., None, :]
        around = around - (around * axis).sum(-1, keepdim=True) * axis
        width = torch.linalg.vector_norm(around, dim=-1, keepdim=True).clamp_min(torch.finfo(height.dtype).tiny)
        side = (1 - height.square()).clamp_min(0).sqrt()[..., None] * around / width
        return (radius[..., None, None] * (height[..., None] * axis + side)).to(eta.dtype)


class _Polar(NamedTuple):
    """Queries by length and direction: η = largest · scaled, |scaled| = length, so that no square over- or underflows.

    near  η where κ = r|η| is below `far_from`, 0 elsewhere; far  where it is not
    """

    near: Tensor
    far: Tensor
    scaled: Tensor
    length: Tensor
    largest: Tensor
    radial: Radial

    def unit(self) -> Tensor:
        """η/|η|, 0 at η = 0."""
        return self.scaled / self.length[..., None]

    def over_length(self, x: Tensor) -> Tensor:
        """x/|η| where far, x elsewhere."""
        return x / torch.where(self.far, self.length, 1) / torch.where(self.far, self.largest, 1)


def inverse_resultant(b: float, resultant: Tensor, max_steps: int) -> Solution:
    """κ ≥ 0 with κ/(2b) · ρ_b(κ²/4) = R, elementwise; BOUNDARY from R = 1 − 1e-9 on, OUTSIDE beyond 1 + 1e-9."""
    edge = 1e-9
    target = resultant.clamp(max=1 - edge)
    start = target * (2 * b - target.square()) / (1 - target.square())  # Banerjee et al. 2005

    def radial(k: Tensor) -> Radial:
        return bessel_radial(b, k.square() / 4, k, k >= far_from(k.dtype))

    def potential(k: Tensor) -> Tensor:
        return radial(k[..., 0]).log - k[..., 0] * target

    def gradient(k: Tensor) -> Tensor:
        return radial(k).slope - target[..., None]

    def hessian(k: Tensor) -> Tensor:
        return radial(k[..., None]).along

    def verdict(local) -> Tensor:
        on_edge = torch.where(resultant >= 1 - edge, int(Status.BOUNDARY), -1)
        return torch.where(resultant > 1 + edge, int(Status.OUTSIDE), on_edge)

    tol = 64 * torch.finfo(target.dtype).eps
    return newton(potential, gradient, hessian, start[..., None], tol=tol, max_steps=max_steps, verdict=verdict)


def _heights(dim: int, kappa: Tensor, generator: torch.Generator | None) -> Tensor:
    """cos of the angle to η under von Mises–Fisher (Wood 1994); (*batch, q, n) draws."""
    if dim == 1:
        u = torch.rand(kappa.shape, dtype=kappa.dtype, device=kappa.device, generator=generator)
        return torch.where(u < torch.sigmoid(2 * kappa), 1.0, -1.0).to(kappa.dtype)
    m = dim - 1
    b = m / (2 * kappa + torch.sqrt(4 * kappa.square() + m * m))
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + m * torch.log(4 * b / (1 + b).square())  # log(1 − x0²)
    height, pending = torch.zeros_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
    while pending.any():
        shape = torch.full_like(kappa, m / 2)
        left = standard_gamma(shape, generator)
        z = left / (left + standard_gamma(shape, generator))  # Beta(m/2, m/2)
        w = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        u = torch.rand(kappa.shape, dtype=kappa.dtype, device=kappa.device, generator=generator)
        good = kappa * w + m * torch.log1p(-x0 * w) - c >= torch.log(u)
        height = torch.where(pending & good, w, height)
        pending = pending & ~good
    return height
