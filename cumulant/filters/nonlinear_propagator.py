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
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import holds, known, sentence
from cumulant.filters.batch_last import semidefinite_root
from cumulant.filters.joseph import joseph
from cumulant.filters.linear_laws import LinearLaw, regression
from cumulant.filters.mode_bank import NAME, Method, ModeBank, ModeMoments
from cumulant.filters.moment_rules import wrap
from cumulant.filters.nonlinear_modes import GaussianMode, NonlinearMode
from cumulant.filters.packed import moment_map
from cumulant.filters.packed_normal import Elimination, Normal, PackedNormal, pack, unpack
from cumulant.filters.protocol import Start, StateMoments, Updated, contract, is_tracked


class NotFiniteError(ValueError):
    """A function of a mode, its derivative or a covariance that is NaN or infinite: part of which mode, at which step
    of which sequence of the batch."""

    def __init__(self, part: str, mode: int, step: int, sequence: int, got: str):
        self.part, self.mode, self.step, self.sequence, self.got = part, mode, step, sequence, got
        where = f"{NAME}.mode_models[{mode}].{part}, step {step}, sequence {sequence}"
        advice = "The function must be defined and smooth where the filter evaluates it."
        super().__init__(sentence(where, "finite numbers", got, advice))


class NonlinearGaussian(PackedNormal):
    """The propagator of `SwitchingNonlinear`."""

    def __init__(
        self,
        start: str,
        begin: Start,
        log_transition: Tensor,
        modes: Sequence[GaussianMode],
        inputs: Tensor | None,
        sizes: tuple[int, int],
        batch_shape: torch.Size,
    ):
        m, d = sizes
        super().__init__(start, begin, log_transition, m, d, batch_shape)
        self.modes, self.inputs = modes, inputs  # inputs (T, k) or (T, sequences, k)
        self.bank = ModeBank(modes, m, d, self.full)
        self.steps_of_matrices = self._matrix_steps(modes)
        # whether functions capture something with a derivative cannot be known
        self.tracked = torch.is_grad_enabled() or is_tracked(log_transition, begin.log_weights, *begin.belief)
        self.angles, self.state_angles = modes[0].angles, modes[0].state_angles
        first, second = self._order(d)
        self.upper = first * d + second
        self.bounds = None

    def predict(self, belief: Normal, t: int, *, moves: bool = True) -> Normal:
        if not moves:
            return belief
        moments, u = self._with_inputs(belief.moments, t)
        parts: dict[int, Tensor] = {}  # (*older, 1, q, batch) of each mode
        for k, matrix in self.steps_of_matrices.items():
            parts[k] = matrix @ moments.narrow(-3, min(k, moments.shape[-3] - 1), 1)
        for indices, mean, covariance in self.bank.predictions(moments, u, t, parts):
            triangle = covariance.flatten(0, 1).index_select(0, self.upper)
            packed = torch.cat([torch.ones_like(mean[:1]), mean, triangle]).movedim(0, -2)
            if len(indices) == len(self.modes):
                self._check("dynamics", packed, t)
                return Normal(packed.contiguous())
            parts |= {k: packed.narrow(-3, position, 1) for position, k in enumerate(indices)}
        joined = torch.cat([parts[k] for k in range(len(self.modes))], -3)
        self._check("dynamics", joined, t)
        return Normal(joined)

    def _matrix_steps(self, modes: Sequence[GaussianMode]) -> dict[int, Tensor]:
        """Of modes that are a matrix with constant noise, one map of packed moments, as in `packed`."""
        found = {}
        for k, mode in enumerate(modes):
            if not isinstance(mode, NonlinearMode) or mode.state_angles:
                continue
            if isinstance(mode.dynamics, Tensor) and isinstance(mode.process_noise, Tensor):
                matrix = moment_map(mode.dynamics, mode.process_noise)
                found |= {} if matrix is None else {k: matrix}
        return found

    def transition_law(self, belief: Normal, t: int) -> LinearLaw:
        moments, image = belief.moments, self._moments("predict", belief.moments, t)
        mean, covariance = self._sequences_first(moments)  # (*older, M or 1, batch, …)
        slope = regression(image.cross.movedim((0, 1), (-2, -1)), covariance)
        if image.unexplained is None:
            rest = image.covariance.movedim((0, 1), (-2, -1)) - slope @ image.cross.movedim((0, 1), (-2, -1))
            rest = (rest + rest.mT) / 2
        else:
            rest = image.unexplained.movedim((0, 1), (-2, -1))
        offset = image.mean.movedim(0, -1) - (slope @ mean[..., None])[..., 0]
        return LinearLaw(slope.movedim(-3, -1), offset.mT, rest.movedim(-3, -1))

    def observation_moments(self, belief: Normal, t: int) -> StateMoments:
        image = self._moments("observe", belief.moments, t)
        first = image.mean[..., :1, :]
        mean = first + wrap(image.mean - first, self.angles)  # modes on one side of ±π
        return StateMoments(mean.movedim(0, -2), image.covariance.movedim((0, 1), (-3, -2)))

    def update(self, predicted: Normal, y: Tensor, observed: Tensor | None, t: int) -> Updated:
        moments = predicted.moments
        moments = moments.expand(*moments.shape[:-3], len(self.modes), self.size, y.shape[-1])
        if not self.m:
            return Updated(Normal(moments), torch.zeros_like(moments.select(-2, 0)))
        law = self._moments("observe", moments, t)
        result = self._conditioned(moments, law, y, observed, t)
        for again in range(1, max(mode.iterations for mode in self.modes)):
            law = self._linearised_about(result.updated.belief, moments, law, again, t)
            result = self._conditioned(moments, law, y, observed, t)
        if result.vague is None:
            return result.updated
        return self._update_by_joseph(result.vague, moments, law, y, observed, result.updated)

    def collapse(self, weights: Tensor, belief: Normal, axis: int) -> Normal:
        if not self.state_angles:
            return super().collapse(weights, belief, axis)
        moments = belief.moments
        entries = torch.tensor([1 + k for k in self.state_angles], device=moments.device)
        angle = moments.index_select(-2, entries).detach()
        sine, cosine = contract(weights.detach(), torch.cat([angle.sin(), angle.cos()], -2), axis).chunk(2, -2)
        centre = torch.atan2(sine, cosine).unsqueeze(axis)  # a direction among them, for every target
        turns = torch.round((angle - centre) / (2 * torch.pi))  # whole turns away from it
        turns = turns - torch.round(contract(weights.detach(), turns, axis)).unsqueeze(axis)  # where most are
        shift = torch.zeros_like(moments[..., :1, :]).expand(*turns.shape[:-2], self.size, turns.shape[-1])
        moments = moments - shift.index_add(-2, entries, 2 * torch.pi * turns)
        return super().collapse(weights, Normal(moments), axis)

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

    def _moments(self, method: Method, moments: Tensor, t: int) -> ModeMoments:
        """What every mode gives for beliefs (*older, M or 1, q, batch)."""
        moments, u = self._with_inputs(moments, t)
        return self.bank.moments(method, moments, u, t)

    def _with_inputs(self, moments: Tensor, t: int) -> tuple[Tensor, Any]:
        """Beliefs as many as there are inputs, and what functions get as t."""
        u = self.input_at(t, moments.shape[-1])
        if isinstance(u, Tensor) and u.ndim == 2 and moments.shape[-1] == 1:
            moments = moments.expand(*moments.shape[:-1], len(u))
        return moments, u

    def _conditioned(
        self, moments: Tensor, law: ModeMoments, y: Tensor, observed: Tensor | None, t: int
    ) -> Elimination:
        """Condition packed moments (*older, M, q, batch) of x on y by a law of y."""
        away, rows = self._away(law, y), []
        for k in range(self.m):  # the rows of y in the triangle of (y, 1, x)
            rows += [law.covariance[k, k:], away[k, None], law.cross[:, k]]
        joint = torch.cat([*(row.movedim(0, -2) for row in rows), moments], -2)
        self._check("observation", joint, t, away)
        floor, bounds = self._bounds(law)
        info = torch.finfo(y.dtype)
        least = info.eps * law.covariance.detach().diagonal().movedim(-1, -2).abs() + info.tiny
        return self.condition(joint, None, observed, torch.maximum(floor, least), bounds)

    def _away(self, law: ModeMoments, y: Tensor) -> Tensor:
        """What was predicted, seen from y: (m, *older, M, batch)."""
        entries = y.reshape(self.m, *[1] * (law.mean.ndim - 2), y.shape[-1])
        return wrap(law.mean - entries, self.angles)

    def _bounds(self, law: ModeMoments) -> tuple[Tensor, Tensor]:
        """The variances (…, M, m, batch or 1) of the entries of y given x and the entries before, 0 if not known.

        And the variances from which elimination loses half of the digits.
        """
        rest = law.unexplained
        last = self.bounds
        if rest is not None and last is not None and rest.shape == last[0].shape and known(rest == last[0]):
            return last[1:]  # noise that is the same at every step
        if rest is None:
            floor = torch.zeros_like(law.mean[..., :1]).movedim(0, -2)
        else:
            root = semidefinite_root(rest.detach().flatten(2)).diagonal()  # (n, m)
            floor = root.square().mT.unflatten(1, rest.shape[2:]).movedim(0, -2)
        bounds = torch.where(floor > 0, floor / sqrt(torch.finfo(floor.dtype).eps), torch.inf)
        self.bounds = None if rest is None or rest.shape[-1] > 1 else (rest.detach(), floor, bounds)
        return floor, bounds

    def _linearised_about(
        self, posterior: Normal, moments: Tensor, before: ModeMoments, again: int, t: int
    ) -> ModeMoments:
        """The law of y with the observation linearised about the posteriors, of modes that iterate on."""
        at = self._moments("observe", posterior.moments, t)
        (here, spread), (mean, covariance) = (self._sequences_first(part) for part in (posterior.moments, moments))
        cross = at.cross.movedim((0, 1), (-2, -1))  # (*older, M, batch, d, m)
        slope = regression(cross, spread)  # (*older, M, batch, m, d)
        if at.unexplained is None:
            rest = at.covariance.movedim((0, 1), (-2, -1)) - slope @ cross
        else:
            rest = at.unexplained.movedim((0, 1), (-2, -1))
        expected = at.mean.movedim(0, -1) + (slope @ (mean - here)[..., None])[..., 0]
        cross = covariance @ slope.mT
        whole = slope @ cross + rest
        new = [part.movedim((-2, -1), (0, 1)) for part in (whole, cross, rest)]
        going = torch.tensor([mode.iterations > again for mode in self.modes], device=mean.device)[:, None]
        pairs = zip((expected.movedim(-1, 0), *new), before, strict=True)
        return ModeMoments(*(None if old is None else torch.where(going, value, old) for value, old in pairs))  # type: ignore[arg-type]

    def _update_by_joseph(
        self, where: Tensor, moments: Tensor, law: ModeMoments, y: Tensor, observed: Tensor | None, fast: Updated
    ) -> Updated:
        """The update with those hypotheses and sequences done again in Joseph's form that need it."""
        index = where.nonzero(as_tuple=True)
        mean, covariance = (part[index] for part in self._sequences_first(moments))
        assert law.unexplained is not None  # nothing is vague beside an unknown
        rest = law.unexplained.expand(self.m, self.m, *where.shape).movedim((0, 1), (-2, -1))[index]
        slope = regression(law.cross.movedim((0, 1), (-2, -1))[index], covariance)
        residual = -self._away(law, y).movedim(0, -1)[index]
        present = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
        offset = -(slope @ mean[..., None])[..., 0]
        exact = joseph(mean, covariance, residual, present.mT[index[-1]], slope, offset, rest)
        packed = fast.belief.moments.movedim(-2, -1).index_put(index, pack(exact.mean, exact.covariance))
        return Updated(Normal(packed.movedim(-1, -2)), fast.log_likelihood.index_put(index, exact.log_likelihood))

    def _sequences_first(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (*older, M, batch, d) and covariance (*older, M, batch, d, d)."""
        mean, covariance = unpack(moments, self.d, self.full)
        return mean.mT, covariance.movedim(-1, -3)

    def _check(self, name: str, values: Tensor, t: int, means: Tensor | None = None) -> None:
        """Refuse moments (*older, M, k, batch) that are no numbers, with mode, step and sequence.

        ``means`` (k, *older, M, batch) are among them; if None, those that follow a 1.
        """
        total = values.detach().sum()
        if holds(total - total == 0) or holds(values.isfinite()):  # the sum is the quicker look
            return
        *_, mode, sequence = (~values.isfinite()).movedim(-2, 0).nonzero()[0].tolist()
        means = values.narrow(-2, 1, self.d).movedim(-2, 0) if means is None else means
        what = "a value" if not holds(means[..., mode, sequence].isfinite()) else "a derivative or covariance"
        raise NotFiniteError(name, mode, t, sequence, f"{what} that is NaN or infinite")
