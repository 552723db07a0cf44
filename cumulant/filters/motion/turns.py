"""Turns: velocities that rotate at a rate that is known (linear in the state) or part of the state (not linear).

With W the matrix of the rotation, W v = ω × v, and Stumpff's functions C_k of z = |ω|²Δ²,

    v(Δ) = R v,      R = I + Δ C₁ W + Δ² C₂ W²
    p(Δ) = p + A v,  A = Δ I + Δ² C₂ W + Δ³ C₃ W²

the same in the plane and in space, at any rate: no division by ω, so that ω → 0 is the constant velocity to the last
bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.filters.motion.linear import Chain, Discretized
from cumulant.special import stumpff

RATES = ("turn_rate",)
FREE_RATES = ("x_turn_rate", "y_turn_rate", "z_turn_rate")


@final
@dataclass(frozen=True, eq=False)
class Turn:
    """A coordinated turn at a known rate: dp = v dt, dv = ω × v dt + noise of spectral density q, linear and exact.

        F = [I A; 0 R],   Q = q [Δ³/3 I + 2Δ⁵C₅W²    Δ²/2 I − Δ³C₃W + Δ⁴C₄W²;   ·   Δ I]

    rate     (), in radians per unit of time, counter-clockwise seen from above: of 2 axes, or about z of 3; or (3), the
             vector about which velocities in space turn
    density  (), of the white acceleration, in length² per time³, the same in all directions
    axes     2 or 3

    >>> import torch
    >>> quarter = Turn(torch.tensor(torch.pi / 2), torch.tensor(0.0)).over(torch.ones(1))
    >>> quarter.dynamics[0, :2, 2], quarter.dynamics[0, 3, 2]      # (1, 0) for a time 1: by 2/π each way, now (0, 1)
    (tensor([0.6366, 0.6366]), tensor(1.0000))
    """

    rate: Tensor
    density: Tensor
    axes: int = 2
    timed = True

    def __post_init__(self) -> None:
        if self.axes not in (2, 3) or self.rate.shape not in ((), (3,)) or (self.rate.ndim and self.axes == 2):
            expected = "a rate () for 2 axes, () or (3) for 3"
            raise ValueError(sentence("Turn.rate", expected, f"{shape(self.rate)} for {self.axes}", "Look at both."))

    def over(self, gaps: Tensor) -> Discretized:
        k, t = self.axes, gaps[:, None, None]
        eye = torch.eye(k, dtype=gaps.dtype)
        w = _matrix(self.rate, k)
        ww, z = w @ w, self.rate.square().sum() * t**2
        c1, c2, c3, c4, c5 = (stumpff(n, z) for n in (1, 2, 3, 4, 5))
        turned = eye + t * c1 * w + t**2 * c2 * ww
        moved = t * eye + t**2 * c2 * w + t**3 * c3 * ww
        zero = torch.zeros_like(turned)
        pp = self.density * (t**3 / 3 * eye + 2 * t**5 * c5 * ww)
        pv = self.density * (t**2 / 2 * eye - t**3 * c3 * w + t**4 * c4 * ww)
        vv = self.density * (t * eye).expand_as(pp)
        dynamics = torch.cat([torch.cat([eye.expand_as(turned), moved], -1), torch.cat([zero, turned], -1)], -2)
        noise = torch.cat([torch.cat([pp, pv], -1), torch.cat([pv.mT, vv], -1)], -2)
        return Discretized(dynamics, noise)

    @staticmethod
    def states(axes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the state: positions and velocities."""
        return Chain.states(2, axes)


@final
@dataclass(frozen=True, eq=False)
class EstimatedTurn:
    """A coordinated turn whose rate is part of the state, x = (p, v, ω): a motion that is not linear in x.

        f(x, Δ) = (p + A(ω) v, R(ω) v, ω)          exact for the state without noise: f(·, Δ+Δ') = f(f(·, Δ), Δ')
        Q(Δ)    = that of a constant velocity with density q, and rate_density Δ for the rate

    The noise is added after the motion. That is exact in the noise of the rate alone; that of the velocity is turned by
    less than |ω|Δ, and what a random rate does to the velocity within one gap, of the order |v|²Δ³ rate_density, is
    left to the next one: keep gaps short against 1/|ω|.

    density       (axes,) or (), of the white acceleration, length² / time³
    rate_density  (), of the white noise that drives the rate, radians² / time³
    axes          2 or 3
    free_axis     of 3 axes: False turns about z with one rate, True about a vector of rates (3) in the state

    >>> import torch
    >>> turn = EstimatedTurn(torch.tensor(0.1), torch.tensor(0.01))
    >>> turn.flow(torch.tensor([0.0, 0.0, 1.0, 0.0, torch.pi]), 1.0)[:3]                     # half a turn
    tensor([ 0.0000,  0.6366, -1.0000])
    """

    density: Tensor
    rate_density: Tensor
    axes: int = 2
    free_axis: bool = False
    timed = True

    def __post_init__(self) -> None:
        if self.axes not in (2, 3) or (self.free_axis and self.axes == 2):
            expected = "2 or 3 axes, 3 with free_axis"
            raise ValueError(sentence("EstimatedTurn.axes", expected, self.axes, "One rate turns a plane."))

    @property
    def size(self) -> int:
        """d, the entries of the state."""
        return 2 * self.axes + (3 if self.free_axis else 1)

    def flow(self, x: Tensor, gap: Tensor | float) -> Tensor:
        """The state (…, d) after a gap (…) without noise."""
        k = self.axes
        p, v, rate = x[..., :k], x[..., k : 2 * k], x[..., 2 * k :]
        t = torch.as_tensor(gap, dtype=x.dtype)[..., None]
        z = rate.square().sum(-1, keepdim=True) * t**2
        c1, c2, c3 = (stumpff(n, z) for n in (1, 2, 3))
        w = _cross(rate, v)
        ww = _cross(rate, w)
        return torch.cat([p + t * v + t**2 * c2 * w + t**3 * c3 * ww, v + t * c1 * w + t**2 * c2 * ww, rate], -1)

    def noise(self, gaps: Tensor) -> Tensor:
        """Q (T, d, d) over T gaps."""
        chain = Chain(2, self.density.expand(self.axes)).over(gaps).process_noise
        rates = self.size - 2 * self.axes
        rate = gaps[:, None, None] * self.rate_density * torch.eye(rates, dtype=gaps.dtype)
        return torch.stack([torch.block_diag(a, b) for a, b in zip(chain, rate, strict=True)])

    def states(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the state: positions, velocities, then the rate or rates."""
        return (*Chain.states(2, axes), *(FREE_RATES if self.free_axis else RATES))


def _matrix(rate: Tensor, axes: int) -> Tensor:
    """W (axes, axes) of a rate () or (3)."""
    eye = torch.eye(axes, dtype=rate.dtype)
    return torch.stack([_cross(rate.reshape(-1), column) for column in eye], -1)


def _cross(rate: Tensor, v: Tensor) -> Tensor:
    """ω × v with a rate (…, 1) about z, or (…, 3): v (…, 2) or (…, 3)."""
    if rate.shape[-1] == 3:
        return torch.linalg.cross(*torch.broadcast_tensors(rate, v))
    turned = [-rate[..., 0] * v[..., 1], rate[..., 0] * v[..., 0]]
    return torch.stack([*turned, *([torch.zeros_like(turned[0])] if v.shape[-1] == 3 else [])], -1)
