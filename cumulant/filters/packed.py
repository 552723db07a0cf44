"""The linear-Gaussian operations of the engine, on packed moments and with the sequences last.

Three facts make a step cheap, of which the last two are those of every packed normal law (`packed_normal`):

    predict   (y, x') = G x + noise with G = [H F; F]: every entry of the triangle of (y, 1, x') is a fixed combination
              of the entries of that of (1, x), so that one matrix product serves all hypotheses and sequences, and
              covariances are symmetric by construction
    update    conditioning on y is Gaussian elimination of its rows
    collapse  no squares are subtracted
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.checks import sentence
from cumulant.filters.joseph import joseph
from cumulant.filters.linear_laws import LinearLaw
from cumulant.filters.packed_normal import Normal, PackedNormal, pack, positions, unpack
from cumulant.filters.protocol import Start, StateMoments, Updated, is_tracked

SQUARED = 8  # state size up to which a step is one matrix product, of about d⁴/4 entries
BLOCK = 256  # time steps whose maps are formed together where they vary


class Parameters(NamedTuple):
    """The parameters of a step, each (M, …) or, with a leading time axis, (T, M, …)."""

    dynamics: Tensor  # (d, d)
    process_noise: Tensor  # (d, d)
    observation: Tensor  # (m, d)
    observation_noise: Tensor  # (m, m)
    state_offset: Tensor  # (d, 1)
    observation_offset: Tensor  # (m, 1)


class Maps(NamedTuple):
    """One step of every mode, leading axes (M) or (T, M).

    gain     (m+d, d)  [H F; F]
    offset   (p, 1)    what 1, noise and offsets add to the moments of (y, 1, x')
    product  (p, q)    the map from the moments of (1, x) to them, all included; None where it would be large
    floors   (1, 1)    for each entry of y its variance given x and the entries before it: none can have less
    bound    (m, 1)    log of the variance from which elimination would lose half of the digits
    """

    gain: Tensor
    offset: Tensor
    product: Tensor | None
    floors: tuple[Tensor, ...]
    bound: Tensor

    def at(self, index: int) -> Maps:
        product = None if self.product is None else self.product[index]
        floors = tuple(floor[index] for floor in self.floors)
        return Maps(self.gain[index], self.offset[index], product, floors, self.bound[index])


class LinearGaussian(PackedNormal):
    """The propagator of `SwitchingLinearGaussian`."""

    def __init__(self, start: str, begin: Start, log_transition: Tensor, parameters: Parameters):
        super().__init__(parameters.dynamics.new_empty(0), *parameters.observation.shape[-2:])
        self.start = start
        self.begin = begin
        self.transition = log_transition  # (M, M, 1) or (T, M, M, 1)
        self.parameters = parameters
        self.steps = min((p.shape[0] for p in parameters if p.ndim == 4), default=None)
        self.tracked = is_tracked(log_transition, *begin.belief, begin.log_weights, *parameters)
        self.block, self.maps = -1, None

    def initial(self) -> Start:
        return self.begin

    def log_transition(self, t: int) -> Tensor:
        return self.transition if self.transition.ndim == 3 else self.transition[t]

    def predict(self, belief: Normal, t: int, *, moves: bool = True) -> Normal:
        maps = self.maps_at(t) if moves else self.standing_maps_at(t)
        if maps.product is not None:
            return Normal(_through(maps.product, belief.moments))
        return Normal(_joint_moments(maps.gain, belief.moments) + maps.offset)

    def transition_law(self, belief: Normal, t: int) -> LinearLaw:
        here = self._between(t, t + 1)
        parts = here.dynamics, here.state_offset[..., 0], here.process_noise
        if self.steps is not None:
            parts = [part[0] for part in parts]
        return LinearLaw(*(part[..., None] for part in parts))

    def observation_moments(self, belief: Normal, t: int) -> StateMoments:
        here = self._between(t, t + 1)
        parts = here.observation, here.observation_offset, here.observation_noise
        h, c, r = parts if self.steps is None else (part[0] for part in parts)
        mean, covariance = (part.movedim(-1, 0) for part in unpack(belief.moments, self.d, self.full))
        image = (h @ mean[..., None])[..., 0] + c[..., 0], h @ covariance @ h.mT + r
        return StateMoments(*(part.movedim(0, -1) for part in image))

    def state(self, predicted: Normal) -> Normal:
        return Normal(predicted.moments.narrow(-2, predicted.moments.shape[-2] - self.size, self.size))

    def update(self, predicted: Normal, y: Tensor, observed: Tensor | None, t: int) -> Updated:
        rest, maps = predicted.moments, self.maps_at(t)
        if rest.shape[-1] != y.shape[-1]:
            rest = rest.expand(*rest.shape[:-1], y.shape[-1])
        if not self.m:
            return Updated(Normal(rest), torch.zeros_like(rest.select(-2, 0)))
        updated, vague = self.condition(rest, y, observed, maps.floors, maps.bound)
        return self._update_by_joseph(vague.any(-2), predicted, y, observed, t, updated) if vague.any() else updated

    def _update_by_joseph(
        self, where: Tensor, predicted: Normal, y: Tensor, observed: Tensor | None, t: int, fast: Updated
    ) -> Updated:
        """The update with those hypotheses and sequences done again in Joseph's form that need it."""
        index = where.nonzero(as_tuple=True)
        mode, batch = index[-2], index[-1]
        moments = self.state(predicted).moments
        moments = moments.expand(*where.shape[:-1], self.size, where.shape[-1])
        mean, covariance = unpack(moments.movedim(-2, -1)[index].mT, self.d, self.full)
        here = self._between(t, t + 1)
        matrix, noise, offset = (
            p[(0, mode) if p.ndim == 4 else mode]
            for p in (here.observation, here.observation_noise, here.observation_offset)
        )
        present = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
        law, values = (mean.mT, covariance.movedim(-1, 0)), (y.mT[batch], present.mT[batch])
        exact = joseph(*law, *values, matrix, offset[..., 0], noise)
        moments = fast.belief.moments.movedim(-2, -1).index_put(index, pack(exact.mean, exact.covariance))
        return Updated(Normal(moments.movedim(-1, -2)), fast.log_likelihood.index_put(index, exact.log_likelihood))

    def maps_at(self, t: int) -> Maps:
        """The maps of step t, formed once where nothing varies and in blocks of time where something does."""
        if self.steps is None:
            self.maps = self.maps or _form(self.parameters)
            return self.maps
        if t >= self.steps:
            advice = "Give parameters for every step, or constant ones."
            raise ValueError(sentence("SwitchingLinearGaussian", f"at most T={self.steps} steps", t + 1, advice))
        if self.maps is None or t // BLOCK != self.block:
            self.block = t // BLOCK
            self.maps = _form(self._between(self.block * BLOCK, min((self.block + 1) * BLOCK, self.steps)))
        return self.maps.at(t % BLOCK)

    def standing_maps_at(self, t: int) -> Maps:
        """The maps of a step in which the state stays where it is and is only observed."""
        here = self._between(t, t + 1)
        eye = torch.eye(self.d, dtype=self.like.dtype, device=self.like.device).expand_as(here.dynamics)
        zero = [torch.zeros_like(part) for part in (here.process_noise, here.state_offset)]
        maps = _form(here._replace(dynamics=eye, process_noise=zero[0], state_offset=zero[1]))
        return maps if self.steps is None else maps.at(0)

    def _between(self, first: int, last: int) -> Parameters:
        """The parameters of steps first, …, last−1, with a time axis on all of them if on any."""
        if self.steps is None:
            return self.parameters
        return Parameters(
            *(p[first:last] if p.ndim == 4 else p.expand(last - first, *p.shape) for p in self.parameters)
        )


def _form(parameters: Parameters) -> Maps:
    h, r = parameters.observation, parameters.observation_noise
    d = h.shape[-1]
    lift = torch.cat([h, torch.eye(d, dtype=h.dtype, device=h.device).expand(*h.shape[:-2], d, d)], -2)  # [H; I]
    gain = lift @ parameters.dynamics
    noise = lift @ parameters.process_noise @ lift.mT + pad(r, (0, d, 0, d))
    shift = lift @ parameters.state_offset + pad(parameters.observation_offset, (0, 0, 0, d))
    offset = _joint(shift, (noise + noise.mT)[..., None] / 2, torch.ones_like(shift[..., :1, :]), d)
    product = None
    if d <= SQUARED:  # the columns of a linear map are the images of the unit vectors
        unit = torch.eye((d + 1) * (d + 2) // 2, dtype=h.dtype, device=h.device)[None]
        product = _joint_moments(gain.flatten(0, -3), unit).unflatten(0, gain.shape[:-2])
        product = torch.cat([offset, product[..., 1:]], -1)
    floor = torch.linalg.cholesky(r.detach()).diagonal(dim1=-2, dim2=-1).square()[..., None]
    return Maps(gain, offset, product, floor.split(1, -2), floor.log() - log(torch.finfo(h.dtype).eps) / 2)


def _joint_moments(gain: Tensor, moments: Tensor) -> Tensor:
    """The triangle of (y, 1, x') with (y, x') = G x, less its 1, from that of (1, x).

    gain (M, m+d, d), moments (*older, M or 1, q, batch).
    """
    d = gain.shape[-1]
    mean, matrix = unpack(moments, d, positions(d).flatten().to(moments.device))
    half = _through(gain, matrix.flatten(-2)).unflatten(-1, matrix.shape[-2:]).transpose(-3, -2)
    whole = _through(gain, half.flatten(-2)).unflatten(-1, half.shape[-2:])
    image = _through(gain, mean)
    return _joint(image, whole, torch.zeros_like(image[..., :1, :]), d)


def _joint(mean: Tensor, covariance: Tensor, one: Tensor, d: int) -> Tensor:
    """The triangle of (y, 1, x), row by row, from (…, m+d, batch), (…, m+d, m+d, batch) and (…, 1, batch)."""
    n = mean.shape[-2]
    corner = n - d
    first, second = torch.triu_indices(n + 1, n + 1, device=mean.device)
    a, b = first - (first > corner).long(), second - (second > corner).long()
    order = torch.where(first == corner, n * n + b, torch.where(second == corner, n * n + a, a * n + b))
    order = torch.where((first == corner) & (second == corner), n * n + n, order)
    return torch.cat([covariance.flatten(-3, -2), mean, one], -2).index_select(-2, order)


def _through(matrices: Tensor, values: Tensor) -> Tensor:
    """A_j v for the mode j on the newest hypothesis axis: (M, p, q) and (*older, M or 1, q, batch)."""
    if values.shape[-3] == 1 < matrices.shape[0]:
        # one belief for every mode to come: all modes in one matrix, no copies of the belief
        return (matrices.flatten(0, 1) @ values.squeeze(-3)).unflatten(-2, matrices.shape[:2])
    return torch.bmm(matrices, values) if values.ndim == 3 else matrices @ values
