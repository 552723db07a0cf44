"""Switching models whose modes are functions.

    s_t | s_{t−1}      ~ transition[s_{t−1}, s_t]                                       rows "from"
    x_t | x_{t−1}, s_t ~ N(f_{s_t}(x_{t−1}, t), Q_{s_t})                                or f(x, w, t), `NonlinearMode`
    y_t | x_t, s_t     ~ N(h_{s_t}(x_t, t), R_{s_t})                                    or h(x, v, t)

Beliefs are normal, so that the filter is approximate even with one mode: how moments pass through f and h is the rule
of each mode (`moment_rules`). With linear functions it is the filter of `SwitchingLinearGaussian`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.filters.batch_last import semidefinite_root
from cumulant.filters.linear_gaussian import Simulation, stacked_simulation
from cumulant.filters.noisy_map import WrongResult
from cumulant.filters.nonlinear_modes import GaussianMode
from cumulant.filters.nonlinear_propagator import NAME, NonlinearGaussian
from cumulant.filters.packed_normal import initial_law, timed_transition
from cumulant.filters.parameters import at_step, check_covariance, checked_modes, shared_batch
from cumulant.filters.protocol import draw_modes, of_modes, require_batch


@final
@dataclass(frozen=True, eq=False, repr=False, init=False)
class SwitchingNonlinear:
    """A model with M modes that are functions, linear and non-linear ones side by side.

    transition          (M, M), (T, M, M), or (*batch, T, M, M) of every sequence its own; each row sums to 1
    mode_models         M of them: `NonlinearMode`, or your own `GaussianMode`
    initial_mean        (d) or (M, d), with initial_covariance (d, d) or (M, d, d); or (*batch, M, …) of every sequence
    initial_modes       (M); uniform if None
    start               "prior": the initial law is that of (s_1, x_1), and the first step only observes
                        "belief": it is that of (s_0, x_0), and the first step moves, then observes (as filterpy does)
    inputs              (T, k), or (*batch, T, k) with rows of their own for every sequence: functions then get the row
                        of their step in place of its number. Irregular times are inputs = gaps[..., None], the gap
                        before each step.

    >>> import torch
    >>> from cumulant.filters import NonlinearMode, kalman
    >>> def swing(x, t):                                             # a pendulum: angle and speed, 0.1 s a step
    ...     return torch.stack([x[..., 0] + 0.1 * x[..., 1], x[..., 1] - 0.1 * torch.sin(x[..., 0])], -1)
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> mode = NonlinearMode(swing, 1e-4 * eye, lambda x, t: torch.sin(x[..., :1]), 0.01 * eye[:1, :1])
    >>> pendulum = SwitchingNonlinear(eye[:1, :1], [mode], initial_mean=eye[0], initial_covariance=eye)
    >>> pendulum, kalman(pendulum, torch.tensor([[0.8], [0.8]]).double()).mean[-1]
    (SwitchingNonlinear(M=1, d=2, m=1, start='prior'), tensor([ 0.9267, -0.0778], dtype=torch.float64))
    """

    transition: Tensor
    mode_models: tuple[GaussianMode, ...]
    initial_mean: Tensor
    initial_covariance: Tensor
    initial_modes: Tensor
    start: str
    inputs: Tensor | None

    def __init__(
        self,
        transition: Tensor,
        mode_models: Sequence[GaussianMode],
        *,
        initial_mean: Tensor,
        initial_covariance: Tensor,
        initial_modes: Tensor | None = None,
        start: str = "prior",
        inputs: Tensor | None = None,
    ):
        initial_modes = checked_modes(NAME, transition, initial_modes, start, (2, 3))
        modes = _checked_mode_models(mode_models, transition.shape[-1])
        mean, covariance = _checked_initial(transition, initial_mean, initial_covariance)
        _check_inputs(transition, inputs)
        _batch_shape(transition, mean, covariance, inputs)
        values = (transition, modes, mean, covariance, initial_modes, start, inputs)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_observed", self._probe())

    def __repr__(self) -> str:
        steps = "" if self.steps is None else f", T={self.steps}"
        batch = f", batch={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{NAME}(M={self.modes}, d={self.dim}, m={self.observed}{steps}{batch}, start={self.start!r})"

    @property
    def modes(self) -> int:
        """M, the number of modes."""
        return self.transition.shape[-1]

    @property
    def dim(self) -> int:
        """d, the size of the state."""
        return self.initial_mean.shape[-1]

    @property
    def observed(self) -> int:
        """m, the size of an observation."""
        return self.__dict__["_observed"]

    @property
    def steps(self) -> int | None:
        """T where transition or inputs vary in time, else None."""
        if self.transition.ndim > 2:
            return self.transition.shape[-3]
        return None if self.inputs is None else self.inputs.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        """The batch axes of what every sequence has its own of; () where all sequences share everything."""
        return _batch_shape(self.transition, self.initial_mean, self.initial_covariance, self.inputs)

    def propagator(self) -> NonlinearGaussian:
        """The operations of the engine, prepared for one run."""
        begin = initial_law(self.initial_modes, self.initial_mean, self.initial_covariance)
        transition, sizes = timed_transition(self.transition), (self.observed, self.dim)
        return NonlinearGaussian(self.start, begin, transition, self.mode_models, self._rows(), sizes, self.batch_shape)

    def simulate(
        self, steps: int, *, batch_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Simulation:
        """Draw modes, states and observations of ``steps`` time steps for every sequence of a batch.

        >>> import torch
        >>> from cumulant.filters import NonlinearMode
        >>> one = torch.ones(1, 1)
        >>> doubling = NonlinearMode(lambda x, t: 2 * x, 0 * one, one, one)
        >>> model = SwitchingNonlinear(one, [doubling], initial_mean=one[0], initial_covariance=0 * one)
        >>> model.simulate(3, generator=torch.Generator().manual_seed(0)).states[:, 0]
        tensor([1., 2., 4.])
        """
        if steps < 0 or (self.steps is not None and steps > self.steps):
            expected = "a number of steps ≥ 0" + ("" if self.steps is None else f", at most T={self.steps}")
            raise ValueError(sentence(f"{NAME}.simulate", expected, steps, "Inputs must cover every step."))
        require_batch(f"{NAME}.simulate", self.batch_shape, torch.Size(batch_shape))
        count, operations = torch.Size(batch_shape).numel(), self.propagator()
        mode = draw_modes(self.initial_modes.expand(count, -1), generator)
        x = self.draw_initial(mode, generator)
        modes, states, observations = [], [], []
        for t in range(steps):
            u = operations.input_at(t, count)
            if t > 0 or self.start == "belief":
                mode = self.draw_modes(mode, t, generator)
                x = self.draw("sample_next", mode, x, u, t, generator)
            modes.append(mode)
            states.append(x)
            observations.append(self.draw("sample_observation", mode, x, u, t, generator))
        empty = x.new_empty(count, self.observed)
        return stacked_simulation((modes, states, observations), (mode, x, empty), batch_shape)

    def draw_initial(self, mode: Tensor, generator: torch.Generator | None) -> Tensor:
        """States (sequences, …, d) of the initial law for modes (sequences, …)."""
        lead = self.initial_covariance.shape[:-2]
        columns = self.initial_covariance.flatten(0, -3).movedim(0, -1)
        root = semidefinite_root(columns).movedim(-1, 0).unflatten(0, lead)
        draw = torch.randn(*mode.shape, self.dim, 1, dtype=root.dtype, device=root.device, generator=generator)
        return of_modes(self.initial_mean, mode, 1) + (of_modes(root, mode, 2) @ draw)[..., 0]

    def draw_modes(self, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        """The modes at step t after modes (sequences, …)."""
        return draw_modes(of_modes(at_step("transition", self.transition, t), mode, 1), generator)

    def draw(self, method: str, mode: Tensor, x: Tensor, u: Any, t: int, generator: torch.Generator | None) -> Tensor:
        """`sample_next` or `sample_observation` of step t for states (…, d), each by its own mode (…)."""
        return self.by_modes(method, mode, t, lambda each: getattr(each, method)(x, u, generator))

    def by_modes(self, method: str, mode: Tensor, t: int, evaluate: Callable[[GaussianMode], Tensor]) -> Tensor:
        """What each mode says of its own vectors or numbers, mode (…), refused with mode and step if it is NaN."""
        total = None
        for k, each in enumerate(self.mode_models):
            try:
                value = evaluate(each)
            except WrongResult as wrong:
                where = f"{NAME}.mode_models[{k}].{wrong.name}, step {t}"
                raise ValueError(sentence(where, *wrong.parts)) from None
            own = (mode == k).reshape(*mode.shape, *[1] * (value.ndim - mode.ndim))
            if not holds(~(own & value.isnan())):
                where = f"{NAME}.mode_models[{k}].{method}, step {t}"
                raise ValueError(sentence(where, "numbers", "NaN", "Its functions must be defined at every particle."))
            total = value if total is None else torch.where(own, value, total)
        assert total is not None
        return total

    def _rows(self) -> Tensor | None:
        """Inputs as (T, k) or (T, sequences, k)."""
        if self.inputs is None or self.inputs.ndim == 2:
            return self.inputs
        return self.inputs.flatten(0, -3).movedim(1, 0)

    def _probe(self) -> int:
        """The size of an observation, from the first mode at the initial law."""
        rows = self._rows()
        u: Any = 0 if rows is None else rows[0] if len(rows) else None
        if u is None:
            raise ValueError(sentence(f"{NAME}.inputs", "at least one step", "T=0", "Functions need a row of them."))
        lead = len(u) if isinstance(u, Tensor) and u.ndim == 2 else 1
        mean = self.initial_mean.flatten(0, -2)[:1].expand(lead, -1)
        covariance = self.initial_covariance.flatten(0, -3)[:1].expand(lead, -1, -1)
        sizes = []
        for k, mode in enumerate(self.mode_models):
            try:
                sizes.append(mode.observe(mean, covariance, u).mean.shape[-1])
                moved = mode.predict(mean, covariance, u).mean.shape[-1]
            except WrongResult as wrong:
                raise ValueError(sentence(f"{NAME}.mode_models[{k}].{wrong.name}, step 0", *wrong.parts)) from None
            if moved != self.dim:
                where, expected = f"{NAME}.mode_models[{k}].predict", f"a state of d={self.dim} entries"
                raise ValueError(sentence(where, expected, moved, "initial_mean has d entries."))
        if len({*sizes}) > 1:
            got, advice = ", ".join(map(str, sizes)), "Every mode predicts the same entries of y."
            raise ValueError(sentence(f"{NAME}.mode_models", "one size of y in all modes", got, advice))
        _check_angles(self.mode_models, self.dim, sizes[0])
        return sizes[0]


def _checked_mode_models(mode_models: object, count: int) -> tuple[GaussianMode, ...]:
    where = f"{NAME}.mode_models"
    if not isinstance(mode_models, Sequence) or len(mode_models) != count:
        got = f"{len(mode_models)}" if isinstance(mode_models, Sequence) else type(mode_models).__name__
        raise ValueError(sentence(where, f"a sequence of M={count} modes", got, "One for each row of transition."))
    for mode in mode_models:
        if not isinstance(mode, GaussianMode):
            advice = "Use NonlinearMode, or subclass GaussianMode."
            raise TypeError(sentence(where, "modes", type(mode).__name__, advice))
    return tuple(mode_models)


def _checked_initial(transition: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Both with a mode axis."""
    modes = transition.shape[-1]
    for name, value, rank in (("initial_mean", mean, 1), ("initial_covariance", covariance, 2)):
        where = f"{NAME}.{name}"
        require_alike(where, require_float(where, value), "transition", transition)
        require_finite(where, value)
        axes = ("d",) * rank
        if value.ndim < rank or (value.ndim > rank and value.shape[-1 - rank] != modes):
            event = ", ".join(axes)
            expected = f"shape ({event}), (M={modes}, {event}) or (*batch, M={modes}, {event})"
            raise ValueError(sentence(where, expected, shape(value), "d is the size of the state."))
    d = mean.shape[-1]
    if covariance.shape[-2:] != (d, d):
        expected = f"matrices (d={d}, d={d})"
        raise ValueError(sentence(f"{NAME}.initial_covariance", expected, shape(covariance), "Match initial_mean."))
    check_covariance(f"{NAME}.initial_covariance", covariance, definite=False)
    mean = mean.expand(modes, d) if mean.ndim == 1 else mean
    return mean, covariance.expand(modes, d, d) if covariance.ndim == 2 else covariance


def _check_inputs(transition: Tensor, inputs: object) -> None:
    if inputs is None:
        return
    where = f"{NAME}.inputs"
    value = require_float(where, inputs)
    require_alike(where, value, "transition", transition)
    require_finite(where, value)
    if value.ndim < 2:
        advice = "Use gaps[:, None] for one number a step."
        raise ValueError(sentence(where, "shape (T, k) or (*batch, T, k)", shape(value), advice))
    if transition.ndim > 2 and transition.shape[-3] != value.shape[-2]:
        got = f"{value.shape[-2]} and {transition.shape[-3]}"
        raise ValueError(sentence(where, "one T for inputs and transition", got, "Repeat the shorter one."))


def _batch_shape(transition: Tensor, mean: Tensor, covariance: Tensor, inputs: Tensor | None) -> torch.Size:
    """The batch axes that all of them have that have any; inputs of one sequence are those of all."""
    batch = shared_batch(NAME, {"transition": transition, "initial_mean": mean, "initial_covariance": covariance})
    own = torch.Size() if inputs is None else inputs.shape[:-2]
    if batch and own.numel() > 1 and own != batch:
        got = f"{tuple(own)} and {tuple(batch)}"
        expected = "the batch axes of transition and the initial law"
        raise ValueError(sentence(f"{NAME}.inputs", expected, got, "One row a step of every sequence."))
    return batch or own


def _check_angles(modes: tuple[GaussianMode, ...], d: int, m: int) -> None:
    for name, size in (("angles", m), ("state_angles", d)):
        values = [tuple(getattr(mode, name)) for mode in modes]
        if len({*values}) > 1:
            got = " and ".join(map(str, values))
            raise ValueError(sentence(f"{NAME}.mode_models", f"the same {name} in all modes", got, "y is one vector."))
        if any(k >= size for k in values[0]):
            expected = f"{name} below {size}"
            raise ValueError(sentence(f"{NAME}.mode_models", expected, values[0], "They index entries from 0."))
