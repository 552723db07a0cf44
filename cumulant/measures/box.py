"""The uniform law on a box, by expansions about the centre of an edge for small queries, about its end for large ones.

A coordinate of a uniform point on S² is uniform on an interval (Archimedes), so that `natural` of an edge is that of
the sphere in R³.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence
from cumulant.kernels.dense import accumulate
from cumulant.measures.base import Measure, per_query
from cumulant.measures.sphere import inverse_resultant
from cumulant.solve import Solution, Status
from cumulant.special import langevin, langevin_slope, log_sinhc, log_sinhc_gap
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@final
@dataclass(frozen=True, eq=False, repr=False)
class Box(Measure):
    """The uniform probability on the box ∏[low_i, high_i].

        G(η) = Σ_i  c_i η_i + log(sinh y_i / y_i),   c = (low+high)/2,   y_i = η_i (high_i − low_i)/2

    low, high  (*batch, d), low ≤ high; an edge of length 0 is a point mass in that coordinate

    >>> import torch
    >>> Box(torch.tensor([0.0]), torch.tensor([1.0])).mean(torch.tensor([0.0]))
    tensor([0.5000])
    """

    low: Tensor
    high: Tensor

    def __post_init__(self):
        self.accept_numpy()
        low, high = require_float("Box.low", self.low), require_float("Box.high", self.high)
        require_alike("Box.high", high, "low", low)
        require_finite("Box.low", low)
        require_finite("Box.high", high)
        if low.ndim < 1 or high.ndim < 1 or low.shape[-1] != high.shape[-1]:
            got = f"low {tuple(low.shape)} and high {tuple(high.shape)}"
            raise ValueError(sentence("Box.high", "low and high of shape (*batch, d)", got, "Use low[None] for d=1."))
        broadcast("Box.high", low.shape, high.shape)
        if not holds(low <= high):
            raise ValueError(sentence("Box.high", "low ≤ high in every coordinate", "low > high in some", "Swap them."))

    @property
    def dim(self) -> int:
        return self.low.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", self.low.shape, self.high.shape)[:-1]

    def _centre(self) -> Tensor:
        return (accumulate(self.low) / 2 + accumulate(self.high) / 2)[..., None, :]

    def _half(self) -> Tensor:
        return (accumulate(self.high) / 2 - accumulate(self.low) / 2)[..., None, :]

    def _edges(self, eta: Tensor) -> "_Edges":
        wide, half = accumulate(eta), self._half()
        far = (wide * half).abs() > 1
        up = wide > 0
        end = torch.where(up, accumulate(self.high)[..., None, :], accumulate(self.low)[..., None, :])
        size = torch.where(far, torch.where(up, wide, -wide), 1)
        return _Edges(torch.where(far, 0, wide), half, far, up, end, size, torch.where(far, half, 1))

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        e = self._edges(eta)
        near = self._centre() * e.near + log_sinhc(e.near * e.half)
        away = torch.where(e.up, e.size, -e.size) * e.end + e.log_share()
        return torch.where(e.far, away, near).sum(-1).to(eta.dtype)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        e = self._edges(eta)
        near = self._centre() + e.half * langevin(e.near * e.half)
        depth = 1 / e.size - 2 * e.width * torch.exp(-e.t()) / -torch.expm1(-e.t())
        away = torch.where(e.up, e.end - depth, e.end + depth)
        return torch.where(e.far, away, near).to(eta.dtype)

    def _variances(self, eta: Tensor) -> Tensor:
        """half² L′(y) of each coordinate; far out 1/η² − (half/sinh y)²."""
        e = self._edges(eta)
        near = e.half.square() * langevin_slope(e.near * e.half)
        inverse_sinh = 2 * torch.exp(-e.t() / 2) / -torch.expm1(-e.t())
        return torch.where(e.far, (1 / e.size).square() - (e.width * inverse_sinh).square(), near)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return (self._variances(eta) * v).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return torch.diag_embed(self._variances(eta).to(eta.dtype))

    @per_query
    def log_volume(self, eta: Queries) -> PerQuery:
        return torch.log1p(self._variances(eta)).sum(-1).to(eta.dtype)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """One scalar equation coth y − 1/y = (μ−c)/half per coordinate; the worst coordinate gives the status."""
        exact = self.to(torch.float64)
        mu = mean.double()
        half = exact._half().expand(mu.shape)
        offset = mu - exact._centre()
        point = half == 0
        position = torch.where(point, 0, offset / torch.where(point, 1, half))
        radial = inverse_resultant(1.5, position.detach().abs(), max_steps)
        y = radial.value[..., 0] * position.detach().sign()
        eta = torch.where(point, 0, y / torch.where(point, 1, half))
        missed = point & (offset.abs() > 1e-9 * (1 + mu.abs()))
        status = torch.where(missed, int(Status.OUTSIDE), radial.status).amax(-1)
        residual = mu - exact.mean(eta)
        if residual.requires_grad:
            usable = (status == Status.CONVERGED)[..., None] & ~point
            step = torch.where(usable, residual / torch.where(usable, exact._variances(eta), 1), 0)
            eta = eta + step - step.detach()
        norms = torch.linalg.vector_norm(residual.detach(), dim=-1)
        return Solution(eta.to(mean.dtype), status, radial.steps.amax(-1), norms, norms[None])

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        """sup ⟨η,μ⟩ − G: +inf from the faces outwards, because no face carries mass."""
        inside = super().conjugate(mean)
        status = self.natural(mean.detach()).status
        return torch.where(status == Status.BOUNDARY, torch.inf, inside)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        """Inverse distribution function, measured from the favoured end so that nothing overflows."""
        wide = accumulate(eta)[..., None, :].expand(*eta.shape[:-1], n, self.dim)
        u = torch.rand(wide.shape, dtype=wide.dtype, device=wide.device, generator=generator)
        low = accumulate(self.low)[..., None, None, :]
        high = accumulate(self.high)[..., None, None, :]
        t = (wide * (high - low)).abs()
        small = t < 1e-6
        depth = torch.where(small, u, -torch.log1p(u * torch.expm1(-t)) / torch.where(small, 1, t))
        return torch.where(wide > 0, high - depth * (high - low), low + depth * (high - low)).to(eta.dtype)


class _Edges(NamedTuple):
    """Queries by their distance from 0; each of the two groups is held at a harmless value where the other is meant.

    near   η where |y| ≤ 1, y = η · half           up    whether η > 0, so that the upper end is favoured
    far    where |y| > 1                           end   the favoured end, of which the law keeps within about 1/|η|
    size   |η| where far                           width half the edge where far
    """

    near: Tensor
    half: Tensor
    far: Tensor
    up: Tensor
    end: Tensor
    size: Tensor
    width: Tensor

    def t(self) -> Tensor:
        """|η| (high − low), at most the largest finite number, from where e^-t is 0 anyway."""
        return (self.size * self.width).clamp_max(torch.finfo(self.size.dtype).max / 2) * 2

    def log_share(self) -> Tensor:
        """log((1 − e^-t)/t): how the mass falls off from the favoured end; t itself may overflow."""
        y = self.size * self.width
        huge = y.isinf()
        by_parts = -torch.log(self.size) - torch.log(self.width) - math.log(2)
        return torch.where(huge, by_parts, log_sinhc_gap(torch.where(huge, 1, y)))
