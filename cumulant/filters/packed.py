"""The linear-Gaussian operations of the engine, on packed moments and with the sequences last.

Three facts make a step cheap, of which the last two are those of every packed normal law (`packed_normal`):

    predict   (y, x') = G x + noise with G = [H F; F]: every entry of the triangle of (y, 1, x') is a fixed combination
              of the entries of that of (1, x), so that one matrix product serves all hypotheses and sequences, and
              covariances are symmetric by construction
    update    conditioning on y is Gaussian elimination of its rows
    collapse  no squares are subtracted
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.checks import sentence
from cumulant.filters.batch_last import product
from cumulant.filters.joseph import joseph
from cumulant.filters.linear_laws import LinearLaw
from cumulant.filters.packed_normal import Normal, PackedNormal, pack, positions, unpack
from cumulant.filters.protocol import SHARED, Start, StateMoments, Updated, is_tracked

SQUARED = 8  # state size up to which a step is one matrix product, of about d⁴/4 entries
BLOCK = 256  # time steps whose maps are formed together where they vary
OWN_ROWS = 1 << 14  # steps × sequences whose maps are formed together where every sequence has its own


class Parameters(NamedTuple):
    """The parameters of a step, each (M, …), with a time axis (T, M, …), or (T, sequences, M, …) of its own."""

    dynamics: Tensor  # (d, d)
    process_noise: Tensor  # (d, d)
    observation: Tensor  # (m, d)
    observation_noise: Tensor  # (m, m)
    state_offset: Tensor  # (d, 1)
    observation_offset: Tensor  # (m, 1)


class Maps(NamedTuple):
    """One step of every mode, leading axes (M), (T, M) or (T, sequences, M); of one step (M), and the sequences last.

    gain     (m+d, d)  [H F; F]
    offset   (p, 1)    what 1, noise and offsets add to the moments of (y, 1, x')
    product  (p, q)    the map from the moments of (1, x) to them, all included; None where it would be large
    floors   (m, 1)    for each entry of y its variance given x and the entries before it: none can have less
    bounds   (m, 1)    the variance from which elimination would lose half of the digits
    """

    gain: Tensor
    offset: Tensor
    product: Tensor | None
    floors: Tensor
    bounds: Tensor

    def at(self, index: int) -> Maps:
        product = None if self.product is None else self.product[index]
        return Maps(self.gain[index], self.offset[index], product, self.floors[index], self.bounds[index])


class LinearGaussian(PackedNormal):
    """The propagator of `SwitchingLinearGaussian`; where one parameter is each sequence's own, all are taken so."""

    def __init__(
        self,
        start: str,
        begin: Start,
        log_transition: Tensor,
        parameters: Parameters,
        batch_shape: torch.Size = SHARED,
    ):
        m, d = parameters.observation.shape[-2:]
        super().__init__(start, begin, log_transition, m, d, batch_shape)
        self.parameters = parameters
        self.own = any(p.ndim == 5 for p in parameters)
        self.steps = next((p.shape[0] for p in parameters if p.ndim > 3), None)
        self.block_size = max(1, OWN_ROWS // batch_shape.numel()) if self.own else BLOCK
        self.tracked = is_tracked(log_transition, *begin.belief, begin.log_weights, *parameters)
        self.block, self.maps = -1, None

    def predict(self, belief: Normal, t: int, *, moves: bool = True) -> Normal:
        maps = self.maps_at(t) if moves else self.standing_maps_at(t)
        if maps.product is not None:
            return Normal(_through(maps.product, belief.moments))
        image = _own_joint_moments if self.own else _joint_moments
        return Normal(image(maps.gain, belief.moments) + maps.offset)

    def transition_law(self, belief: Normal, t: int) -> LinearLaw:
        here = self._at(t)
        return LinearLaw(here.dynamics, here.state_offset[..., 0, :], here.process_noise)

    def observation_moments(self, belief: Normal, t: int) -> StateMoments:
        here = self._at(t)
        mean, covariance = (part.movedim(-1, 0) for part in unpack(belief.moments, self.d, self.full))
        older = [1] * (mean.ndim - 3)
        parts = (part.movedim(-1, 0) for part in (here.observation, here.observation_offset, here.observation_noise))
        h, c, r = (part.reshape(len(part), *older, *part.shape[1:]) for part in parts)
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
        updated, vague = self.condition(rest, y, observed, maps.floors, maps.bounds)
        return updated if vague is None else self._update_by_joseph(vague, predicted, y, observed, t, updated)

    def _update_by_joseph(
        self, where: Tensor, predicted: Normal, y: Tensor, observed: Tensor | None, t: int, fast: Updated
    ) -> Updated:
        """The update with those hypotheses and sequences done again in Joseph's form that need it."""
        index = where.nonzero(as_tuple=True)
        mode, batch = index[-2], index[-1]
        moments = self.state(predicted).moments
        moments = moments.expand(*where.shape[:-1], self.size, where.shape[-1])
        mean, covariance = unpack(moments.movedim(-2, -1)[index].mT, self.d, self.full)
        here = self._at(t)
        matrix, noise, offset = (
            p[mode, ..., batch] if self.own else p[mode, ..., 0]
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
        size = self.block_size
        if self.maps is None or t // size != self.block:
            self.block = t // size
            here = self._between(self.block * size, min((self.block + 1) * size, self.steps))
            self.maps = _form(here, squared=not self.own)
        return self._sequences_last(self.maps.at(t % size))

    def standing_maps_at(self, t: int) -> Maps:
        """The maps of a step in which the state stays where it is and is only observed."""
        here = self._between(t, t + 1)
        eye = torch.eye(self.d, dtype=self.like.dtype, device=self.like.device).expand_as(here.dynamics)
        zero = [torch.zeros_like(part) for part in (here.process_noise, here.state_offset)]
        standing = here._replace(dynamics=eye, process_noise=zero[0], state_offset=zero[1])
        maps = _form(standing, squared=not self.own)
        return maps if self.steps is None else self._sequences_last(maps.at(0))

    def _between(self, first: int, last: int) -> Parameters:
        """The parameters of steps first, …, last−1, with a time axis, and one of the sequences, on all if on any."""
        if self.steps is None:
            return self.parameters
        return Parameters(*(self._rows(p, first, last) for p in self.parameters))

    def _rows(self, p: Tensor, first: int, last: int) -> Tensor:
        p = p[first:last] if p.ndim > 3 else p.expand(last - first, *p.shape)
        if self.own and p.ndim == 4:
            p = p[:, None].expand(-1, self.batch_shape.numel(), -1, -1, -1)
        return p

    def _at(self, t: int) -> Parameters:
        """The parameters of step t as (M, …, sequences or 1)."""
        here = self._between(t, t + 1)
        if not self.own:
            return Parameters(*(p[..., None] if self.steps is None else p[0, ..., None] for p in here))
        return Parameters(*(self._of_copies(p[0].movedim(0, -1)) for p in here))

    def _sequences_last(self, maps: Maps) -> Maps:
        """The maps of a step, of sequences with their own as (M, …, sequences)."""
        if not self.own:
            return maps
        gain = self._of_copies(maps.gain.movedim(0, -1))
        columns = (self._of_copies(part[..., 0].movedim(0, -1)) for part in (maps.offset, maps.floors, maps.bounds))
        return Maps(gain, next(columns), None, *columns)


def _form(parameters: Parameters, *, squared: bool = True) -> Maps:
    h, r = parameters.observation, parameters.observation_noise
    d = h.shape[-1]
    lift = torch.cat([h, torch.eye(d, dtype=h.dtype, device=h.device).expand(*h.shape[:-2], d, d)], -2)  # [H; I]
    gain = lift @ parameters.dynamics
    noise = lift @ parameters.process_noise @ lift.mT + pad(r, (0, d, 0, d))
    shift = lift @ parameters.state_offset + pad(parameters.observation_offset, (0, 0, 0, d))
    offset = _joint(shift, (noise + noise.mT)[..., None] / 2, torch.ones_like(shift[..., :1, :]), d)
    joint = None
    if squared and d <= SQUARED:  # the columns of a linear map are the images of the unit vectors
        unit = torch.eye((d + 1) * (d + 2) // 2, dtype=h.dtype, device=h.device)[None]
        joint = _joint_moments(gain.flatten(0, -3), unit).unflatten(0, gain.shape[:-2])
        joint = torch.cat([offset, joint[..., 1:]], -1)
    floor = torch.linalg.cholesky(r.detach()).diagonal(dim1=-2, dim2=-1).square()[..., None]
    return Maps(gain, offset, joint, floor, floor / sqrt(torch.finfo(h.dtype).eps))


def moment_map(dynamics: Tensor, noise: Tensor) -> Tensor | None:
    """The map (q, q) of the packed moments of x to those of F x + N(0, Q); None where it would be large.

    >>> one = torch.ones(1, 1)
    >>> moment_map(2 * one, 5 * one) @ torch.tensor([1.0, 3.0, 7.0])                          # 1, 2 · 3, 4 · 7 + 5
    tensor([ 1.,  6., 33.])
    """
    none = dynamics.new_zeros(0, len(dynamics))
    parts = dynamics, noise, none, none[:, :0], none.new_zeros(len(dynamics), 1), none.new_zeros(0, 1)
    joint = _form(Parameters(*(part[None] for part in parts))).product
    return None if joint is None else joint[0]


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


def _own_joint_moments(gain: Tensor, moments: Tensor) -> Tensor:
    """The same where every sequence has a G of its own: gain (M, m+d, d, sequences)."""
    d = gain.shape[-2]
    older = moments.shape[:-3]
    moments = moments.expand(*older, len(gain), moments.shape[-2], gain.shape[-1])
    mean, matrix = unpack(moments, d, positions(d).flatten().to(moments.device))
    lead = (*older, len(gain), gain.shape[-1])

    def flat(part: Tensor, events: int) -> Tensor:
        """Event axes first, hypotheses and sequences together last."""
        part = part.expand(*lead[:-1], *part.shape[-1 - events : -1], lead[-1])
        return part.movedim(tuple(range(-1 - events, -1)), tuple(range(events))).flatten(events)

    g, p, m = flat(gain, 2), flat(matrix, 2), flat(mean, 1)
    whole = product(product(g, p), g.transpose(0, 1))
    image = product(g, m[:, None])
    whole, image = (part.unflatten(-1, lead).movedim((0, 1), (-3, -2)) for part in (whole, image))
    return _joint(image[..., 0, :], whole, torch.zeros_like(image[..., :1, 0, :]), d)


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
