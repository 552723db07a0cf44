"""The operations of the engine for modes that are functions, on packed moments and with the sequences last.

    predict   every mode gives mean and covariance of x'
    update    every mode gives mean and covariance of y and Cov(x, y); the triangle of (y, 1, x) is then conditioned on
              y as for linear modes, differences of angles wrapped. With iterations, the observation is linearised again
              about the posterior,  y ≈ A (x − m_i) + E_i[y],  A = Cov_i(y, x) P_i⁻¹,  and that updates the prediction
    collapse  as for linear modes, angles of the state about their circular mean

Where the prediction is so vague that elimination would lose digits, the update is done in Joseph's form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, sentence, shape
from cumulant.filters.batch_last import semidefinite_root
from cumulant.filters.joseph import joseph
from cumulant.filters.moment_rules import PropagatedMoments, wrap
from cumulant.filters.noisy_map import WrongResult
from cumulant.filters.nonlinear_modes import GaussianMode
from cumulant.filters.packed_normal import Elimination, Normal, PackedNormal, pack, unpack
from cumulant.filters.protocol import Start, Updated, contract
from cumulant.filters.smoother import regression

NAME = "SwitchingNonlinear"


class Observed(NamedTuple):
    """The law of y by every mode, sequences last: mean (…, M, m, batch), covariance (…, M, m, m, batch), cross with x
    (…, M, d, m, batch), and the unexplained part of the covariance, None where a mode does not say."""

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    unexplained: Tensor | None


class NonlinearGaussian(PackedNormal):
    """The propagator of `SwitchingNonlinear`."""

    def __init__(
        self,
        start: str,
        begin: Start,
        log_transition: Tensor,
        modes: Sequence[GaussianMode],
        inputs: Tensor | None,
        observed: int,
    ):
        d = begin.belief.moments.shape[-2]
        d = next(k for k in range(d) if (k + 1) * (k + 2) // 2 == d)
        super().__init__(begin.belief.moments.new_empty(0), observed, d)
        self.start, self.begin, self.transition = start, begin, log_transition
        self.modes, self.inputs = modes, inputs  # inputs (T, k) or (T, sequences, k)
        self.tracked = True  # whether functions capture something with a derivative cannot be known
        self.angles = modes[0].angles
        self.state_angles = modes[0].state_angles
        self.triangle = torch.stack(torch.triu_indices(d, d, device=self.like.device).unbind())
        self.joint_order = _joint_order(observed, d).to(self.like.device)

    def initial(self) -> Start:
        return self.begin

    def log_transition(self, t: int) -> Tensor:
        return self.transition if self.transition.ndim == 3 else self.transition[t]

    def predict(self, belief: Normal, t: int, *, moves: bool = True) -> Normal:
        if not moves:
            return belief
        images = self._by_mode("predict", belief, t)
        packed = [self._pack(image.mean, image.covariance) for image in images]
        moments = torch.stack(torch.broadcast_tensors(*packed), -3)
        self._check("dynamics", moments, t)
        return Normal(moments)

    def update(self, predicted: Normal, y: Tensor, observed: Tensor | None, t: int) -> Updated:
        moments, batch = predicted.moments, y.shape[-1]
        moments = moments.expand(*moments.shape[:-3], len(self.modes), self.size, batch)
        if not self.m:
            return Updated(Normal(moments), torch.zeros_like(moments.select(-2, 0)))
        law = _stacked(self._by_mode("observe", Normal(moments), t), batch)
        result = self._conditioned(moments, law, y, observed, t)
        for again in range(1, max(mode.iterations for mode in self.modes)):
            improved = self._linearised_about(result.updated.belief, moments, law, again, t)
            result, law = self._conditioned(moments, improved, y, observed, t), improved
        vague = result.vague.any(-2)
        if not vague.any():
            return result.updated
        return self._update_by_joseph(vague, moments, law, y, observed, result.updated)

    def collapse(self, weights: Tensor, belief: Normal, axis: int) -> Normal:
        if not self.state_angles:
            return super().collapse(weights, belief, axis)
        moments = belief.moments
        entries = torch.tensor([1 + k for k in self.state_angles], device=moments.device)
        angle = moments.index_select(-2, entries)
        sine, cosine = contract(weights, torch.cat([angle.sin(), angle.cos()], -2), axis).chunk(2, -2)
        centre = torch.atan2(sine, cosine).detach().unsqueeze(axis)  # a direction among them, for every target
        turns = torch.round((angle - centre).detach() / (2 * torch.pi))  # whole turns away from it
        turns = turns - torch.round(contract(weights, turns, axis).detach()).unsqueeze(axis)  # most of them stay
        shift = torch.zeros_like(moments.narrow(-2, 0, 1)).expand(*turns.shape[:-2], self.size, turns.shape[-1])
        return super().collapse(weights, Normal(moments - shift.index_add(-2, entries, 2 * torch.pi * turns)), axis)

    def input_at(self, t: int, batch: int) -> Any:
        """What functions get as their argument t, for beliefs of ``batch`` sequences, or as many particles each."""
        if self.inputs is None:
            return t
        if t >= len(self.inputs):
            advice = "Give a row of inputs for every step."
            raise ValueError(sentence(f"{NAME}.inputs", f"at most T={len(self.inputs)} steps", t + 1, advice))
        row = self.inputs[t]
        if row.ndim == 1 or batch in (1, len(row)):
            return row
        if len(row) == 0 or batch % len(row):
            expected = f"inputs of shape (*batch, T, k) with {batch} sequences"
            raise ValueError(sentence(f"{NAME}.inputs", expected, f"{len(row)} of them", "One a sequence of y."))
        return row.repeat_interleave(batch // len(row), 0)

    def _by_mode(self, method: str, belief: Normal, t: int) -> list[PropagatedMoments]:
        """The moments that every mode gives, (*older, batch, …), from beliefs (*older, M or 1, q, batch)."""
        moments = belief.moments
        u = self.input_at(t, moments.shape[-1])
        if isinstance(u, Tensor) and u.ndim == 2 and moments.shape[-1] == 1:
            moments = moments.expand(*moments.shape[:-1], len(u))
        images = []
        for k, mode in enumerate(self.modes):
            own = moments.select(-3, min(k, moments.shape[-3] - 1)).movedim(-2, 0)  # (q, *older, batch)
            mean = own[1 : self.d + 1].movedim(0, -1)
            matrix = own[self.d + 1 :].index_select(0, self.full).unflatten(0, (self.d, self.d))
            try:
                image = getattr(mode, method)(mean, matrix.movedim((0, 1), (-2, -1)), u)
            except WrongResult as wrong:
                raise ValueError(sentence(f"{NAME}.mode_models[{k}].{wrong.name}, step {t}", *wrong.parts)) from None
            images.append(self._sized(image, mean.shape, method, k, t))
        return images

    def _sized(self, image: PropagatedMoments, lead: torch.Size, method: str, mode: int, t: int) -> PropagatedMoments:
        size = self.d if method == "predict" else self.m
        wanted = (*lead[:-1], size), (*lead[:-1], size, size), (*lead[:-1], self.d, size)
        for name, want, part in zip(PropagatedMoments._fields, wanted, image, strict=False):
            if part is None or part.shape != want:
                got = "None" if part is None else shape(part)
                where = f"{NAME}.mode_models[{mode}].{method}, step {t}"
                raise ValueError(sentence(where, f"{name} of shape {want}", got, "Keep the leading axes of the mean."))
        return image

    def _pack(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """(*older, q, batch) from (*older, batch, d) and (*older, batch, d, d)."""
        mean, matrix = mean.movedim(-1, 0), covariance.movedim((-2, -1), (0, 1))
        first, second = self.triangle
        flat = matrix.flatten(0, 1)
        upper = flat.index_select(0, first * self.d + second) + flat.index_select(0, second * self.d + first)
        return torch.cat([torch.ones_like(mean[:1]), mean, upper / 2]).movedim(0, -2)

    def _conditioned(self, moments: Tensor, law: Observed, y: Tensor, observed: Tensor | None, t: int) -> Elimination:
        """Condition packed moments (*older, M, q, batch) of x on y by a law of y."""
        away = wrap((law.mean - y).movedim(-2, 0), self.angles).movedim(0, -2)  # what was predicted, seen from y
        parts = [law.covariance.flatten(-3, -2), away, law.cross.flatten(-3, -2)]
        rows = torch.cat(parts, -2).index_select(-2, self.joint_order)
        joint = torch.cat([rows, moments], -2)
        self._check("observation", rows, t, away)
        floor = self._floors(law)
        eps = torch.finfo(y.dtype).eps
        bound = torch.where(floor > 0, torch.where(floor > 0, floor, 1).log() - log(eps) / 2, torch.inf)
        least = eps * law.covariance.detach().diagonal(dim1=-3, dim2=-2).movedim(-1, -2).abs()
        floors = torch.maximum(floor, least + torch.finfo(y.dtype).tiny).split(1, -2)
        return self.condition(joint, torch.zeros_like(y), observed, floors, bound)

    def _floors(self, law: Observed) -> Tensor:
        """The variances (…, M, m, batch or 1) of the entries of y given x and the entries before; 0 if not known."""
        rest = law.unexplained
        if rest is None:
            return torch.zeros_like(law.mean[..., :1])
        rest = rest.detach().movedim((-3, -2), (0, 1))
        root = semidefinite_root(rest.flatten(2)).diagonal().mT.unflatten(1, rest.shape[2:])
        return root.square().movedim(0, -2)

    def _linearised_about(self, posterior: Normal, moments: Tensor, before: Observed, again: int, t: int) -> Observed:
        """The law of y with the observation linearised about the posteriors of modes that iterate on."""
        at = _stacked(self._by_mode("observe", posterior, t), moments.shape[-1])
        here, prior = (self._sequences_first(part) for part in (posterior.moments, moments))
        cross = at.cross.movedim(-1, -3)  # (…, M, batch, d, m)
        slope = regression(cross, here[1])  # (…, M, batch, m, d)
        rest = at.covariance.movedim(-1, -3) - slope @ cross
        rest = rest if at.unexplained is None else at.unexplained.movedim(-1, -3)
        mean = at.mean.mT + (slope @ (prior[0] - here[0])[..., None])[..., 0]
        cross = prior[1] @ slope.mT
        covariance = slope @ cross + rest
        new = mean.mT, covariance.movedim(-3, -1), cross.movedim(-3, -1), rest.movedim(-3, -1)
        going = torch.tensor([mode.iterations > again for mode in self.modes], device=mean.device)
        parts = []
        for value, old, rank in zip(new, before, (1, 2, 2, 2), strict=True):
            parts.append(None if old is None else torch.where(going.reshape(-1, *[1] * (rank + 1)), value, old))
        return Observed(*parts)

    def _sequences_first(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = unpack(moments, self.d, self.full)
        return mean.mT, covariance.movedim(-1, -3)

    def _update_by_joseph(
        self, where: Tensor, moments: Tensor, law: Observed, y: Tensor, observed: Tensor | None, fast: Updated
    ) -> Updated:
        """The update with those hypotheses and sequences done again in Joseph's form that need it."""
        index = where.nonzero(as_tuple=True)
        mean, covariance = (part[index] for part in self._sequences_first(moments))
        assert law.unexplained is not None  # nothing is vague beside an unknown
        rest = law.unexplained.expand(*where.shape[:-1], self.m, self.m, where.shape[-1]).movedim(-1, -3)[index]
        slope = regression(law.cross.movedim(-1, -3)[index], covariance)
        residual = wrap((y - law.mean).movedim(-2, 0), self.angles).movedim(0, -1)[index]
        present = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
        offset = -(slope @ mean[..., None])[..., 0]
        exact = joseph(mean, covariance, residual, present.mT[index[-1]], slope, offset, rest)
        packed = fast.belief.moments.movedim(-2, -1).index_put(index, pack(exact.mean, exact.covariance))
        return Updated(Normal(packed.movedim(-1, -2)), fast.log_likelihood.index_put(index, exact.log_likelihood))

    def _check(self, name: str, values: Tensor, t: int, value: Tensor | None = None) -> None:
        """Refuse moments (*older, M, k, batch) that are no numbers, with mode, step and sequence."""
        if holds(values.isfinite()):
            return
        *_, mode, _, sequence = (~values.isfinite()).nonzero()[0].tolist()
        own = values.narrow(-2, 1, self.d) if value is None else value
        what = "a value" if not holds(own.select(-3, mode)[..., sequence].isfinite()) else "a derivative or covariance"
        where = f"{NAME}.mode_models[{mode}].{name}, step {t}, sequence {sequence}"
        advice = "The function must be defined and smooth where the filter evaluates it."
        raise ValueError(sentence(where, "finite numbers", f"{what} that is NaN or infinite", advice))


def _stacked(images: list[PropagatedMoments], batch: int) -> Observed:
    """The laws of all modes, the modes before the event axes and the sequences last."""
    mean = torch.stack([image.mean.movedim(-1, -2) for image in images], -3)
    covariance = torch.stack([image.covariance.movedim(-3, -1) for image in images], -4)
    covariance = (covariance + covariance.transpose(-3, -2)) / 2
    cross = torch.stack([image.cross.movedim(-3, -1) for image in images], -4)
    rests = [image.unexplained for image in images]
    if any(rest is None for rest in rests):
        return Observed(mean, covariance, cross, None)
    if all(rest is not None and rest.ndim == 2 for rest in rests):
        return Observed(mean, covariance, cross, torch.stack(rests)[..., None])  # type: ignore[arg-type]
    full = [r.expand(i.covariance.shape).movedim(-3, -1) for r, i in zip(rests, images, strict=True) if r is not None]
    return Observed(mean, covariance, cross, torch.stack(full, -4))


def _joint_order(m: int, d: int) -> Tensor:
    """Where the rows of y in the triangle of (y, 1, x) are in the covariance, the mean and the cross, flat."""
    order = []
    for k in range(m):
        order += [k * m + other for other in range(k, m)]
        order += [m * m + k]
        order += [m * m + m + entry * m + k for entry in range(d)]
    return torch.tensor(order, dtype=torch.int64)
