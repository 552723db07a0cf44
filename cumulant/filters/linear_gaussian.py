"""Linear-Gaussian models whose matrices switch with a hidden mode (S2-E4, S2-E6, S2-E7).

    s_t | s_{t−1}      ~ transition[s_{t−1}, s_t]                                       rows "from"
    x_t | x_{t−1}, s_t ~ N(F_{s_t} x_{t−1} + b_{s_t}, Q_{s_t})
    y_t | x_t, s_t     ~ N(H_{s_t} x_t + c_{s_t}, R_{s_t})

| field              | symbol | shape                                                |
|--------------------|--------|------------------------------------------------------|
| transition         | P      | (M, M) or (T, M, M); each row sums to 1              |
| dynamics           | F      | (d, d), (M, d, d) or (T, M, d, d)                    |
| process_noise      | Q      | as dynamics; positive semidefinite                   |
| observation        | H      | (m, d), (M, m, d) or (T, M, m, d)                    |
| observation_noise  | R      | (m, m), (M, m, m) or (T, M, m, m); positive definite |
| state_offset       | b      | (d), (M, d) or (T, M, d); zero if None               |
| observation_offset | c      | (m), (M, m) or (T, M, m); zero if None               |
| initial_mean       |        | (d) or (M, d)                                        |
| initial_covariance |        | (d, d) or (M, d, d); positive semidefinite           |
| initial_modes      |        | (M); uniform if None                                 |

All but initial_modes may begin with batch axes, (*batch, T, M, …) and (*batch, M, …) of the initial law: then every
sequence has its own, such as the gaps and the start of a track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.packed import LinearGaussian, Parameters
from cumulant.filters.packed_normal import initial_law, timed_transition
from cumulant.filters.parameters import (
    NAME,
    RANKS,
    at_step,
    check_steps,
    checked,
    checked_modes,
    embedded,
    own_batch,
    shared_batch,
    varies,
)
from cumulant.filters.protocol import draw_modes, of_modes, require_batch


class Simulation(NamedTuple):
    """modes (*batch, T) as integers, states (*batch, T, d) and observations (*batch, T, m) of simulated sequences."""

    modes: Tensor
    states: Tensor
    observations: Tensor


@final
@dataclass(frozen=True, eq=False, repr=False, init=False)
class SwitchingLinearGaussian:
    """A linear-Gaussian model with M modes; the table at the top of the module has fields, symbols and shapes.

    start       "prior": the initial law is that of (s_1, x_1), and the first step only observes
                "belief": it is that of (s_0, x_0), and the first step moves, then observes (as filterpy does)
    embeddings  M maps E_k (D, d_k) into one common space, for modes with states of different sizes; the matrices are
                then sequences of M tensors in each mode's own size. The model is built on the common space,
                F = E_k F_k E_k⁺, Q = E_k Q_k E_kᵀ, H = H_k E_k⁺: a state that enters a mode loses what that mode does
                not have, and gains zeros for what it did not have.

    Matrices without a mode axis serve every mode; after construction every field has one. A time axis makes a parameter
    vary: irregular sampling is F and Q of each gap. With batch axes before it every sequence has its own, and y has the
    same batch axes. Differentiable in every parameter.

    >>> import torch
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(0.5 + 0 * torch.ones(2, 2).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> walk, walk.process_noise[:, 0, 0]
    (SwitchingLinearGaussian(M=2, d=1, m=1, start='prior'), tensor([1., 9.], dtype=torch.float64))
    """

    transition: Tensor
    dynamics: Tensor
    process_noise: Tensor
    observation: Tensor
    observation_noise: Tensor
    state_offset: Tensor
    observation_offset: Tensor
    initial_mean: Tensor
    initial_covariance: Tensor
    initial_modes: Tensor
    start: str

    def __init__(
        self,
        transition: Tensor,
        dynamics: Tensor | Sequence[Tensor],
        process_noise: Tensor | Sequence[Tensor],
        observation: Tensor | Sequence[Tensor],
        observation_noise: Tensor | Sequence[Tensor],
        *,
        state_offset: Tensor | Sequence[Tensor] | None = None,
        observation_offset: Tensor | Sequence[Tensor] | None = None,
        initial_mean: Tensor | Sequence[Tensor],
        initial_covariance: Tensor | Sequence[Tensor],
        initial_modes: Tensor | None = None,
        start: str = "prior",
        embeddings: Sequence[Tensor] | None = None,
    ):
        initial_modes = checked_modes(NAME, transition, initial_modes, start, (2, 3))
        parameters = {
            "dynamics": dynamics,
            "process_noise": process_noise,
            "observation": observation,
            "observation_noise": observation_noise,
            "state_offset": state_offset,
            "observation_offset": observation_offset,
            "initial_mean": initial_mean,
            "initial_covariance": initial_covariance,
        }
        if embeddings is not None:
            parameters = embedded(transition, embeddings, parameters)
        checked_values = checked(transition, parameters)
        values = {"transition": transition, **checked_values, "initial_modes": initial_modes, "start": start}
        check_steps({"transition": transition, **checked_values})
        shared_batch(NAME, {"transition": transition, **checked_values})
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
        return self.dynamics.shape[-1]

    @property
    def observed(self) -> int:
        """m, the size of an observation."""
        return self.observation.shape[-2]

    @property
    def steps(self) -> int | None:
        """T where a parameter varies in time, else None."""
        values = ((name, getattr(self, name)) for name in RANKS)
        return next((value.shape[-2 - RANKS[name]] for name, value in values if varies(name, value)), None)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch axes of parameters of which every sequence has its own; () where all sequences share them."""
        return shared_batch(NAME, {name: getattr(self, name) for name in RANKS})

    def to(self, target: torch.dtype | torch.device | str) -> SwitchingLinearGaussian:
        """The same model in another dtype or on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "start"}
        return replace(self, **{name: value.to(target) for name, value in tensors.items()})

    def propagator(self) -> LinearGaussian:
        """The operations of the engine, prepared for one run."""
        parameters = Parameters(
            self._sequences_second("dynamics"),
            self._sequences_second("process_noise"),
            self._sequences_second("observation"),
            self._sequences_second("observation_noise"),
            self._sequences_second("state_offset")[..., None],
            self._sequences_second("observation_offset")[..., None],
        )
        begin = initial_law(self.initial_modes, self.initial_mean, self.initial_covariance)
        return LinearGaussian(self.start, begin, timed_transition(self.transition), parameters, self.batch_shape)

    def _sequences_second(self, name: str) -> Tensor:
        """A parameter as (M, …), (T, M, …), or (T, sequences, M, …) where every sequence has its own."""
        value = getattr(self, name)
        batch = own_batch(name, value)
        return value.flatten(0, len(batch) - 1).movedim(0, 1) if batch else value

    def simulate(
        self, steps: int, *, batch_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Simulation:
        """Draw modes, states and observations of ``steps`` time steps for every sequence of a batch.

        >>> import torch
        >>> eye, one = torch.eye(1), torch.ones(1)
        >>> still = SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=one, initial_covariance=0 * eye)
        >>> still.simulate(3, generator=torch.Generator().manual_seed(0)).states[:, 0]
        tensor([1., 1., 1.])
        """
        if steps < 0 or (self.steps is not None and steps > self.steps):
            expected = "a number of steps ≥ 0" + ("" if self.steps is None else f", at most T={self.steps}")
            raise ValueError(sentence(f"{NAME}.simulate", expected, steps, "Parameters must cover every step."))
        require_batch(f"{NAME}.simulate", self.batch_shape, torch.Size(batch_shape))
        like, count = self.initial_mean, torch.Size(batch_shape).numel()
        roots = {name: _root(getattr(self, name)) for name in ("process_noise", "observation_noise")}

        def noise(root: Tensor) -> Tensor:
            draw = torch.randn(*root.shape[:-1], 1, dtype=like.dtype, device=like.device, generator=generator)
            return (root @ draw)[..., 0]

        def at(name: str, t: int, mode: Tensor) -> Tensor:
            whole = roots[name] if name in roots else getattr(self, name)
            return of_modes(at_step(name, whole, t), mode, RANKS[name])

        mode = draw_modes(self.initial_modes.expand(count, -1), generator)
        x = of_modes(self.initial_mean, mode, 1) + noise(of_modes(_root(self.initial_covariance), mode, 2))
        modes, states, observations = [], [], []
        for t in range(steps):
            if t > 0 or self.start == "belief":
                mode = draw_modes(at("transition", t, mode), generator)
                x = (at("dynamics", t, mode) @ x[..., None])[..., 0]
                x = x + at("state_offset", t, mode) + noise(at("process_noise", t, mode))
            y = (at("observation", t, mode) @ x[..., None])[..., 0]
            modes.append(mode)
            states.append(x)
            observations.append(y + at("observation_offset", t, mode) + noise(at("observation_noise", t, mode)))
        return stacked_simulation(
            (modes, states, observations), (mode, x, x.new_empty(count, self.observed)), batch_shape
        )


def stacked_simulation(drawn: Sequence[list[Tensor]], like: Sequence[Tensor], batch_shape: Sequence[int]) -> Simulation:
    """Draws of every step, (n, …) in the shape of ``like``, as sequences (*batch, T, …)."""
    parts = [torch.stack(d, 1) if d else x.new_empty(len(x), 0, *x.shape[1:]) for d, x in zip(drawn, like, strict=True)]
    return Simulation(*(p.reshape(*batch_shape, *p.shape[1:]) for p in parts))


def _root(covariance: Tensor) -> Tensor:
    """A square root that a singular covariance has too."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    return vectors * eigenvalues.clamp_min(0).sqrt()[..., None, :]
