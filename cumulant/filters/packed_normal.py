"""Normal beliefs as packed moments with the sequences last: their collapse, and conditioning by elimination.

The moments of a vector x are kept as the upper triangle, row by row, of the matrix

    [ 1  mᵀ ]        m the mean, P the covariance
    [ m  P  ]

so that covariances are symmetric by construction. Two operations do not depend on where the moments come from:

    condition  on y: Gaussian elimination of its rows in the triangle of (y, 1, x), which takes the squared distance of
               y from its prediction off the 1; a missing entry is a row not used, which is the marginal over it
    collapse   Σ_i w_i P_i + Σ_{i<k} w_i w_k (m_i − m_k)(m_i − m_k)ᵀ: no squares are subtracted, so that coordinates may
               lie far from the origin

On the CPU, where no derivative is wanted, the native kernel does each in one pass (`cumulant.kernels.native.normals`).
"""

from __future__ import annotations

from copy import copy
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filters.protocol import Propagator, Start, StateMoments, Updated, contract, log_probabilities
from cumulant.kernels.native import normals

PAIRED = 8  # modes up to which a collapse goes over pairs of them


class Normal(NamedTuple):
    """moments (*hypotheses, (d+1)(d+2)/2, batch): the triangle of (1, x), that is 1, the mean, the covariance.

    The triangle of (y, 1, x) has (m+d+1)(m+d+2)/2 entries.
    """

    moments: Tensor


class Elimination(NamedTuple):
    """The belief after an observation, its log-likelihood, and where half of the digits were lost, (*hypotheses,
    batch), or None if nowhere."""

    updated: Updated
    vague: Tensor | None


class PackedNormal(Propagator):
    """What propagators with normal beliefs share; m is the size of an observation, d that of the state.

    log_transition  (M, M, 1), (T, M, M, 1), or (T, M, M, sequences)
    """

    def __init__(self, start: str, begin: Start, log_transition: Tensor, m: int, d: int, batch_shape: torch.Size):
        like = begin.belief.moments.new_empty(0)
        self.start, self.begin, self.transition, self.like = start, begin, log_transition, like
        self.batch_shape, self.copies = batch_shape, 1
        self.m, self.d = m, d
        self.orders = {}
        self.full = positions(d).flatten().to(like.device)
        self.size = (d + 1) * (d + 2) // 2

    def initial(self) -> Start:
        if len(self.batch_shape) and self.copies > 1:
            weights, (moments,) = self.begin
            return Start(weights, Normal(self._of_copies(moments)))
        return self.begin

    def log_transition(self, t: int) -> Tensor:
        return self._of_copies(self.transition if self.transition.ndim == 3 else self.transition[t])

    def repeated(self, count: int) -> PackedNormal:
        other = copy(self)
        other.copies = count
        return other

    def _of_copies(self, values: Tensor) -> Tensor:
        """Values (…, sequences) for every copy of a sequence; those that all sequences share, (…, 1), as they are."""
        return values if self.copies == 1 or values.shape[-1] == 1 else values.repeat_interleave(self.copies, -1)

    def moments(self, belief: Normal) -> StateMoments:
        return unpack(belief.moments, self.d, self.full)

    def record(self, belief: Normal) -> None:
        return None

    def collapse(self, weights: Tensor, belief: Normal, axis: int) -> Normal:
        moments = normals.collapse(weights, belief.moments, axis, self.d)
        return Normal(self._collapsed(weights, belief.moments, axis) if moments is None else moments)

    def _collapsed(self, weights: Tensor, moments: Tensor, axis: int) -> Tensor:
        modes, total = weights.shape[axis], contract(weights, moments, axis)
        mean, covariance = moments.narrow(-2, 1, self.d), total.narrow(-2, self.d + 1, self.size - self.d - 1)
        targets = weights.numel() * self.size // max(moments.numel(), 1)
        if modes - 1 > 2 * targets or modes > PAIRED:  # fewer differences to the mean than between modes
            apart = mean - total.narrow(-2, 1, self.d).unsqueeze(axis)
            contract(weights, self._outer(apart), axis, onto=covariance)
            return total
        for lag in range(1, modes):  # all pairs of modes, without copies of the means
            rest = modes - lag
            apart = mean.narrow(axis, lag, rest) - mean.narrow(axis, 0, rest)
            share = weights.narrow(axis, lag, rest) * weights.narrow(axis, 0, rest)
            contract(share, self._outer(apart), axis, onto=covariance)
        return total

    def condition(
        self, joint: Tensor, y: Tensor | None, observed: Tensor | None, floors: Tensor, bounds: Tensor
    ) -> Elimination:
        """Condition the triangle of (y, 1, x) on y (m, batch), entries that were not ``observed`` left out.

        y None is 0: the triangle has what was predicted less what was observed.

        floors  (…, m, 1) for each entry of y its variance given x and the entries before it: none can have less
        bounds  (…, m, 1) the variance from which elimination loses half of the digits
        """
        done = normals.eliminate(joint, y, observed, floors, bounds, self.d)
        moments, log_likelihood, vague = self._eliminated(joint, y, observed, floors, bounds) if done is None else done
        return Elimination(Updated(Normal(moments), log_likelihood), vague)

    def _eliminated(
        self, joint: Tensor, y: Tensor | None, observed: Tensor | None, floors: Tensor, bounds: Tensor
    ) -> normals.Eliminated:
        rest, variances = joint, []
        for entry in range(self.m):
            left = self.m + self.d - entry
            row, rest = rest.narrow(-2, 0, left + 1), rest.narrow(-2, left + 1, left * (left + 1) // 2)
            if y is not None:
                row = row.clone() if entry == 0 else row  # what was predicted stays as it was
                row.select(-2, self.m - entry).sub_(y[entry])
            variance, cross = torch.split_with_sizes(row, (1, left), -2)
            variances.append(torch.maximum(variance, floors.narrow(-2, entry, 1)))
            gain = cross / variances[-1]
            if observed is not None:
                gain = torch.where(observed[entry], gain, 0)
            first, second = self._order(left)
            rest = torch.addcmul(rest, cross.index_select(-2, first), gain.index_select(-2, second), value=-1)
        variance = torch.cat(variances, -2)
        spread, vague, constant = variance.log(), variance > bounds, 1 + self.m * log(2 * pi)
        if observed is not None:
            spread, vague = torch.where(observed, spread, 0), vague & observed
            constant = 1 + observed.to(joint.dtype).sum(0) * log(2 * pi)
        corner = rest.select(-2, 0)
        log_likelihood = (corner - spread.sum(-2) - constant) / 2
        corner.fill_(1)
        return normals.Eliminated(rest, log_likelihood, vague.any(-2) if vague.any() else None)

    def _outer(self, vectors: Tensor) -> Tensor:
        first, second = self._order(self.d)
        return vectors.index_select(-2, first) * vectors.index_select(-2, second)

    def _order(self, n: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of a packed triangle of size n."""
        if n not in self.orders:
            self.orders[n] = tuple(torch.triu_indices(n, n, device=self.like.device))
        return self.orders[n]


def initial_law(modes: Tensor, mean: Tensor, covariance: Tensor) -> Start:
    """Weights and beliefs before the first step from (M), (*batch, M, d) and (*batch, M, d, d)."""
    if mean.ndim > 2 or covariance.ndim > 3:
        batch = torch.broadcast_shapes(mean.shape[:-2], covariance.shape[:-3])
        mean, covariance = mean.expand(*batch, *mean.shape[-2:]), covariance.expand(*batch, *covariance.shape[-3:])
    moments = pack(mean, covariance)  # (*batch, M, q)
    own = moments.flatten(0, -3).movedim(0, -1) if moments.ndim > 2 else moments[..., None]
    return Start(log_probabilities(modes)[:, None], Normal(own))


def timed_transition(transition: Tensor) -> Tensor:
    """log P as (M, M, 1), (T, M, M, 1), or (T, M, M, sequences) from (M, M), (T, M, M) and (*batch, T, M, M)."""
    logarithms = log_probabilities(transition)
    return logarithms.flatten(0, -4).movedim(0, -1) if transition.ndim > 3 else logarithms[..., None]


def pack(mean: Tensor, covariance: Tensor) -> Tensor:
    """The triangle of (1, x) as (…, (d+1)(d+2)/2) from (…, d) and (…, d, d); asymmetric rounding is averaged."""
    first, second = torch.triu_indices(*covariance.shape[-2:], device=covariance.device)
    triangle = (covariance[..., first, second] + covariance[..., second, first]) / 2
    one = torch.ones_like(mean.sum(-1, keepdim=True))
    return torch.cat([one, mean, triangle], -1)


def unpack(moments: Tensor, d: int, where: Tensor) -> StateMoments:
    """Mean and covariance from packed moments; ``where`` is positions(d) flat."""
    _, mean, triangle = torch.split_with_sizes(moments, (1, d, moments.shape[-2] - d - 1), -2)
    return StateMoments(mean, triangle.index_select(-2, where).unflatten(-2, (d, d)))


def positions(n: int) -> Tensor:
    """The index of each entry of an (n, n) matrix in its packed triangle.

    >>> positions(2)
    tensor([[0, 1],
            [1, 2]])
    """
    first, second = torch.triu_indices(n, n)
    where = torch.zeros(n, n, dtype=torch.int64)
    where[first, second] = where[second, first] = torch.arange(len(first))
    return where
