"""Motions that are linear in the state: chains of integrators, Singer's acceleration, any drift, fixed steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import factorial
from typing import NamedTuple, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cumulant.special.elementary import polynomial

DERIVATIVES = ("", "_velocity", "_acceleration", "_jerk")
TERMS = 20  # of (e^{−x} − 1 + x)/x² on 0 ≤ x ≤ 1, to the last bit
NODES = 12  # of Gauss and Legendre: exact for what Singer integrates over a time constant, to the last bit


class Discretized(NamedTuple):
    """F and Q (T, d, d): the state after each of T gaps is N(F x, Q)."""

    dynamics: Tensor
    process_noise: Tensor


class Halved(NamedTuple):
    """Gaps (T,) halved so often, (T,), that a matrix has a norm of at most 1 over each.

    Each has its own count: halving a short gap as often as a long one would round it away.
    """

    gaps: Tensor
    times: Tensor

    def doublings(self) -> Iterator[Tensor]:
        """Which gaps are to be doubled, (T, 1, 1), until all are whole again."""
        for k in range(int(self.times.max()) if len(self.times) else 0):
            yield (self.times > k)[:, None, None]


def halve(matrix: Tensor, gaps: Tensor) -> Halved:
    """
    >>> halve(torch.tensor([[-3.0]]), torch.tensor([0.1, 8.0]))
    Halved(gaps=tensor([0.1000, 0.2500]), times=tensor([0, 5]))
    """
    times = (torch.linalg.matrix_norm(matrix, 1) * gaps).log2().ceil().clamp_min(0).long()
    return Halved(gaps * torch.exp2(-times.to(gaps.dtype)), times)


@runtime_checkable
class Motion(Protocol):
    """A linear motion between two samples, x → F x + N(0, Q); ``timed`` is False where it only knows steps.

    >>> import torch
    >>> isinstance(Chain(1, torch.ones(1)), Motion)
    True
    """

    @property
    def timed(self) -> bool: ...

    def over(self, gaps: Tensor) -> Discretized:
        """Over T gaps of time (T,)."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """n integrators for each axis, driven by white noise of spectral density (axes,); all positions come first.

        F_ij = Δ^{j−i} / (j−i)!,    Q_ij = q Δ^{a+b+1} / (a! b! (a+b+1)),    a = n−1−i, b = n−1−j

    >>> import torch
    >>> moved = Chain(2, torch.tensor([3.0])).over(torch.tensor([2.0]))      # constant velocity: Δ³/3, Δ²/2, Δ times q
    >>> moved.dynamics[0], moved.process_noise[0]
    (tensor([[1., 2.],
            [0., 1.]]), tensor([[8., 6.],
            [6., 6.]]))
    """

    order: int
    density: Tensor
    timed = True

    def over(self, gaps: Tensor) -> Discretized:
        n, zero = self.order, torch.zeros_like(gaps)
        rows = range(n)
        transitions = [[gaps ** (j - i) / factorial(j - i) if j >= i else zero for j in rows] for i in rows]
        noises = [[_noise(gaps, n - 1 - i, n - 1 - j) for j in rows] for i in rows]
        dynamics, noise = _blocks(transitions), _blocks(noises)
        return Discretized(
            by_axis(dynamics[..., None].expand(*dynamics.shape, len(self.density))),
            by_axis(noise[..., None] * self.density),
        )

    @staticmethod
    def states(order: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the state.

        >>> Chain.states(2, ("x", "y"))
        ('x', 'y', 'x_velocity', 'y_velocity')
        """
        return tuple(axis + ending for ending in DERIVATIVES[:order] for axis in axes)


@final
@dataclass(frozen=True, eq=False)
class Singer:
    """Position, velocity, acceleration of each axis; the acceleration decays and is driven by white noise.

        da = −a/τ dt + noise of spectral density 2σ²/τ,    stationary variance σ²

    deviation (axes,) is σ, in length per time²; time_constant (axes,) is τ. For τ ≫ Δ it is a constant acceleration,
    for τ ≪ Δ a constant velocity with q = 2σ²τ. Over a gap
    Q = 2σ²/τ ∫₀^Δ g gᵀ ds with g the response to an impulse, all of
    whose entries are positive: nothing cancels at any Δ/τ.

    >>> import torch
    >>> slow = Singer(torch.tensor([3.0]).double(), torch.tensor([5.0]).double())
    >>> slow.over(torch.tensor([1e4]).double()).process_noise[0, 2, 2]              # σ², long after
    tensor(9.0000, dtype=torch.float64)
    """

    deviation: Tensor
    time_constant: Tensor
    timed = True

    def over(self, gaps: Tensor) -> Discretized:
        axes = [_singer(s, tau, gaps) for s, tau in zip(self.deviation, self.time_constant, strict=True)]
        return Discretized(*(by_axis(torch.stack(part, -1)) for part in zip(*axes, strict=True)))

    @staticmethod
    def states(axes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the state."""
        return Chain.states(3, axes)


@final
@dataclass(frozen=True, eq=False)
class Drift:
    """dx = A x dt + noise of spectral density L, both (d, d):  F = e^{AΔ},  Q = ∫₀^Δ e^{As} L e^{Aᵀs} ds.

    >>> import torch
    >>> decay = Drift(torch.tensor([[-1.0]]), torch.tensor([[2.0]]))         # stationary variance 1
    >>> decay.over(torch.tensor([50.0])).process_noise
    tensor([[[1.]]])
    """

    drift: Tensor
    diffusion: Tensor
    timed = True

    def over(self, gaps: Tensor) -> Discretized:
        a, d = self.drift, len(self.drift)
        halved = halve(a, gaps)
        # e^{−AΔ} of a drift that damps is huge: Van Loan's block on a short gap, then doubled
        block = torch.cat([torch.cat([-a, self.diffusion], 1), torch.cat([torch.zeros_like(a), a.mT], 1)])
        whole = torch.matrix_exp(block * halved.gaps[:, None, None])
        f = whole[:, d:, d:].mT
        q = f @ whole[:, :d, d:]
        for again in halved.doublings():
            f, q = torch.where(again, f @ f, f), torch.where(again, q + f @ q @ f.mT, q)
        return Discretized(f, (q + q.mT) / 2)


@final
@dataclass(frozen=True, eq=False)
class Fixed:
    """F and Q (d, d) of one step, whatever it lasts.

    >>> import torch
    >>> Fixed(torch.tensor([[2.0]]), torch.tensor([[3.0]])).over(torch.tensor([0.1, 5.0])).dynamics.flatten()
    tensor([2., 2.])
    """

    dynamics: Tensor
    process_noise: Tensor
    timed = False

    def over(self, gaps: Tensor) -> Discretized:
        return Discretized(self.dynamics.expand(len(gaps), -1, -1), self.process_noise.expand(len(gaps), -1, -1))


def _singer(deviation: Tensor, time_constant: Tensor, gaps: Tensor) -> Discretized:
    """F and Q (T, 3, 3) of one axis: quadrature over at most one time constant, then doubled."""
    halved = halve(1 / time_constant[None, None].detach(), gaps)
    nodes, weights = (torch.as_tensor(part, dtype=gaps.dtype) for part in np.polynomial.legendre.leggauss(NODES))
    times = halved.gaps[:, None] * (nodes + 1) / 2
    g = torch.stack(_impulse(times, time_constant), -1)  # (T, nodes, 3)
    q = torch.einsum("tni,tnj,n->tij", g, g, weights) * (halved.gaps * deviation**2 / time_constant)[:, None, None]
    (far, near, kept), zero = _impulse(halved.gaps, time_constant), torch.zeros_like(gaps)
    one = torch.ones_like(gaps)
    f = _blocks([[one, halved.gaps, far], [zero, one, near], [zero, zero, kept]])
    for again in halved.doublings():
        f, q = torch.where(again, f @ f, f), torch.where(again, q + f @ q @ f.mT, q)
    return Discretized(f, q)


def _impulse(times: Tensor, time_constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an acceleration of 1 has made of position, velocity and itself after a time of at most τ."""
    x = times / time_constant
    far = times**2 * polynomial([(-1) ** k / factorial(k + 2) for k in range(TERMS)], x)
    near = times * polynomial([(-1) ** k / factorial(k + 1) for k in range(TERMS)], x)
    return far, near, torch.exp(-x)


def _noise(gaps: Tensor, a: int, b: int) -> Tensor:
    return gaps ** (a + b + 1) / (factorial(a) * factorial(b) * (a + b + 1))


def _blocks(entries: list[list[Tensor]]) -> Tensor:
    """(T, n, n) from n × n series (T,)."""
    return torch.stack([torch.stack(row, -1) for row in entries], -2)


def by_axis(blocks: Tensor) -> Tensor:
    """(T, n·k, n·k), all positions first, from the blocks (T, n, n, k) of k axes that do not mix.

    >>> by_axis(torch.tensor([[[[1, 2]]]]))
    tensor([[[1, 0],
             [0, 2]]])
    """
    steps, n, _, k = blocks.shape
    return torch.diag_embed(blocks).permute(0, 1, 3, 2, 4).reshape(steps, n * k, n * k)
