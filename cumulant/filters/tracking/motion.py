"""How the state of one mode moves over a gap of time.

| motion                | what is noise                           | state for each measured column              |
|-----------------------|-----------------------------------------|---------------------------------------------|
| random-walk           | the velocity, spectral density q        | position                                    |
| constant-velocity     | the acceleration, spectral density q    | position, velocity                          |
| constant-acceleration | the jerk, spectral density q            | position, velocity, acceleration            |
| matrices              | as given: per unit of time (drift, diffusion) or per step (dynamics, process_noise) |

The first three are chains of n integrators driven by white noise. Over a gap Δ

    F_ij = Δ^{j−i} / (j−i)!            j ≥ i
    Q_ij = q Δ^{a+b+1} / (a! b! (a+b+1))       a = n−1−i, b = n−1−j

so that two gaps in a row are one gap of their sum, F(Δ+Δ') = F(Δ')F(Δ): samples may come at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import factorial
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor

ORDERS = {"random-walk": 1, "constant-velocity": 2, "constant-acceleration": 3}
DERIVATIVES = ("", "_velocity", "_acceleration")


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
    """What a mode does between two samples; ``timed`` is False where it only knows steps of one length."""

    @property
    def timed(self) -> bool: ...

    def over(self, gaps: Tensor) -> Discretized:
        """Over T gaps of time (T,)."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """n integrators for each axis, driven by white noise of spectral density (axes,); all positions come first.

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
        axes = torch.eye(len(self.density), dtype=gaps.dtype)
        return Discretized(_kronecker(transitions, axes), _kronecker(noises, torch.diag(self.density)))

    @staticmethod
    def states(order: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """
        >>> Chain.states(2, ("x", "y"))
        ('x', 'y', 'x_velocity', 'y_velocity')
        """
        return tuple(axis + ending for ending in DERIVATIVES[:order] for axis in axes)


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
    """F and Q (d, d) of one step, whatever it lasts."""

    dynamics: Tensor
    process_noise: Tensor
    timed = False

    def over(self, gaps: Tensor) -> Discretized:
        return Discretized(self.dynamics.expand(len(gaps), -1, -1), self.process_noise.expand(len(gaps), -1, -1))


def _noise(gaps: Tensor, a: int, b: int) -> Tensor:
    return gaps ** (a + b + 1) / (factorial(a) * factorial(b) * (a + b + 1))


def _kronecker(blocks: list[list[Tensor]], axes: Tensor) -> Tensor:
    """(T, n·k, n·k) from n × n series (T,) and a matrix (k, k)."""
    grid = torch.stack([torch.stack(row, -1) for row in blocks], -2)
    return torch.einsum("tij,ab->tiajb", grid, axes).reshape(len(grid), *[grid.shape[-1] * len(axes)] * 2)
