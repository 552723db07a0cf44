"""Switching models on conjugate families: counts, binary values, categories and measurements (S2-C3).

    s_t | s_{t−1}   ~ transition[s_{t−1}, s_t]                       rows "from"
    x_t             ~ e^{⟨λθ + (1−λ)θ_0, u(x)⟩}                      λ = memory[s_t], x_{t−1} ~ e^{⟨θ, u(x)⟩}
    y_t | x_t, s_t  ~ the family, with the parameters of the observation in mode s_t

A mode acts in two ways. It sets parameters of the observation (an exposure, a variance, the law of clutter; see
`cumulant.filters.pairs`), and it has a memory λ of the hidden quantity:

    λ = 1      x stays what it was, the default
    λ = 0      x is drawn afresh from the mode's prior θ_0: a change point, or a regime with a law of its own
    between    natural parameters are discounted towards the prior: old evidence counts λ as much at every step

With λ ∈ {0, 1} the model is a Markov chain and `exact` is exact inference in it. With λ in between the discount acts on
beliefs, not on x: there is no such chain to simulate, and `exact` is exact in the modes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.filters.linear_gaussian import Simulation, stacked_simulation
from cumulant.filters.pairs import ConjugatePair
from cumulant.filters.parameters import checked_modes
from cumulant.filters.protocol import Propagator, Start, StateMoments, Updated, draw_modes, log_probabilities


class ConjugateBelief(NamedTuple):
    """A law of x, (*hypotheses, …, batch) in the engine and (*batch, T, M, …) in a `Filtered`.

    parameters  (…, k)     of the family, in the order of its table
    mean        (…, d)     of x; where the law stands for a mixture, that of the mixture itself
    covariance  (…, d, d)  likewise

    The M-projection matches expected sufficient statistics. They contain x for counts and measurements but not for
    probabilities, so that the mean of the mixture is kept beside the parameters.
    """

    parameters: Tensor
    mean: Tensor
    covariance: Tensor


@final
@dataclass(frozen=True, eq=False, repr=False)
class SwitchingConjugate:
    """A conjugate family whose observations and memory switch with a hidden mode (module docstring).

    family         `GammaPoisson`, `BetaBernoulli`, `DirichletCategorical`, `NormalNormal`, `NormalGamma`
    transition     (M, M), each row sums to 1
    prior          (k) or (M, k), parameters of the law of x in each mode
    memory         a number or (M,) in [0, 1]; 1 if None
    initial_modes  (M); uniform if None
    start          "prior": the initial law is that of (s_1, x_1), and the first step only observes
                   "belief": it is that of (s_0, x_0), and the first step moves, then observes

    Observations are (*batch, T, 1), NaN where missing. Differentiable in every tensor.

    >>> import torch
    >>> from cumulant.filters import GammaPoisson, exact
    >>> stay = torch.tensor([[0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    >>> bursts = GammaPoisson(torch.tensor([1.0, 5.0], dtype=torch.float64))       # exposure 5 in the second mode
    >>> model = SwitchingConjugate(bursts, stay, torch.tensor([2.0, 1.0], dtype=torch.float64))
    >>> y = torch.tensor([[2.0], [9.0], [1.0]], dtype=torch.float64)
    >>> exact(model, y).mode_probabilities[:, 1]
    tensor([0.2358, 0.8283, 0.0341], dtype=torch.float64)
    """

    family: ConjugatePair
    transition: Tensor
    prior: Tensor
    memory: Tensor | float | None = None
    initial_modes: Tensor | None = None
    start: str = "prior"

    def __post_init__(self):
        if not isinstance(self.family, ConjugatePair):
            got, advice = type(self.family).__name__, "Pass an instance such as GammaPoisson(exposure)."
            raise TypeError(sentence("SwitchingConjugate.family", "a conjugate family", got, advice))
        initial_modes = checked_modes("SwitchingConjugate", self.transition, self.initial_modes, self.start)
        modes = self.transition.shape[-1]
        prior = self._checked_prior(modes)
        self.family.check(modes, prior.shape[-1], self.transition)
        values = {"initial_modes": initial_modes, "prior": prior, "memory": self._checked_memory(modes)}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _checked_prior(self, modes: int) -> Tensor:
        where, names = "SwitchingConjugate.prior", self.family.names
        prior = require_float(where, self.prior)
        require_alike(where, prior, "transition", self.transition)
        count = max(2, prior.shape[-1] if prior.ndim else 0) if names is None else len(names)
        if prior.ndim not in (1, 2) or prior.shape[-1] != count or (prior.ndim == 2 and len(prior) != modes):
            listed = "K ≥ 2 concentrations" if names is None else ", ".join(names)
            expected = f"shape (k={count}) or (M={modes}, k={count}): {listed}"
            raise ValueError(sentence(where, expected, shape(prior), "Check the last axis."))
        require_finite(where, prior)
        inside = self.family.family.inside(prior[..., None])[..., 0]
        if not holds(inside):
            got = f"{prior.detach().reshape(-1, count)[~inside.reshape(-1)][0].tolist()}"
            advice = "All but a mean must be > 0."
            raise ValueError(sentence(where, f"parameters of a law for {type(self.family).__name__}", got, advice))
        return prior.expand(modes, count)

    def _checked_memory(self, modes: int) -> Tensor | None:
        where = "SwitchingConjugate.memory"
        if self.memory is None:
            return None
        like = self.transition
        memory = self.memory
        memory = memory if isinstance(memory, Tensor) else torch.tensor(memory, dtype=like.dtype, device=like.device)
        require_alike(where, require_float(where, memory), "transition", like)
        if memory.shape not in ((), (modes,)):
            raise ValueError(sentence(where, f"a number or shape (M={modes})", shape(memory), "One for each mode."))
        if not holds((memory >= 0) & (memory <= 1)):
            raise ValueError(sentence(where, "values in [0, 1]", memory.tolist(), "1 keeps all, 0 starts afresh."))
        return memory.expand(modes)

    def __repr__(self) -> str:
        name = type(self.family).__name__
        return f"SwitchingConjugate({name}, M={self.modes}, k={self.prior.shape[-1]}, start={self.start!r})"

    @property
    def modes(self) -> int:
        """M, the number of modes."""
        return self.transition.shape[-1]

    @property
    def observed(self) -> int:
        """1, the size of an observation."""
        return 1

    def propagator(self) -> Conjugate:
        """The operations of the engine, prepared for one run."""
        return Conjugate(self)

    def simulate(
        self, steps: int, *, batch_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Simulation:
        """Draw modes, states and observations of ``steps`` time steps for every sequence of a batch.

        >>> import torch
        >>> from cumulant.filters import GammaPoisson
        >>> one = torch.ones(1, 1)
        >>> model = SwitchingConjugate(GammaPoisson(), one, torch.tensor([5.0, 1.0]))
        >>> model.simulate(4, generator=torch.Generator().manual_seed(0)).observations.shape
        torch.Size([4, 1])
        """
        where = "SwitchingConjugate.simulate"
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(sentence(where, "a number of steps ≥ 0", steps, "0 draws nothing."))
        memory = self.memory if isinstance(self.memory, Tensor) else torch.ones_like(self.transition[0])
        if not holds((memory == 0) | (memory == 1)):
            advice = "A discount in between acts on beliefs; no law of x_t given x_{t−1} belongs to it."
            raise ValueError(sentence(where, "a memory of 0 or 1 in every mode", memory.tolist(), advice))
        count, prior = torch.Size(batch_shape).numel(), self.prior.detach()
        initial = self.initial_modes if isinstance(self.initial_modes, Tensor) else self.transition[0]
        mode = draw_modes(initial.expand(count, -1), generator)
        x = self.family.draw(prior[mode], generator)
        modes, states, observations = [], [], []
        for t in range(steps):
            if t > 0 or self.start == "belief":
                mode = draw_modes(self.transition[mode], generator)
                x = torch.where(memory[mode, None] == 1, x, self.family.draw(prior[mode], generator))
            modes.append(mode)
            states.append(x)
            observations.append(self.family.emit(x, mode, t, generator)[:, None])
        return stacked_simulation((modes, states, observations), (mode, x, x[:, :1]), batch_shape)


class Conjugate(Propagator):
    """The operations of a `SwitchingConjugate`."""

    def __init__(self, model: SwitchingConjugate):
        self.model, self.pair, self.family = model, model.family, model.family.family
        self.start = model.start
        self.like = model.transition.detach().new_empty(0)
        self._log_transition = log_probabilities(model.transition)[..., None]
        self._prior = model.prior[..., None]  # (M, k, 1)
        memory = model.memory
        self._memory = memory[:, None, None] if isinstance(memory, Tensor) else None

    def initial(self) -> Start:
        modes = self.model.initial_modes
        return Start(log_probabilities(modes)[:, None], self._belief(self._prior))  # pyright: ignore[reportArgumentType]

    def log_transition(self, t: int) -> Tensor:
        return self._log_transition

    def predict(self, belief: ConjugateBelief, t: int, *, moves: bool = True) -> ConjugateBelief:
        if not moves or self._memory is None:
            return belief
        return self._belief(self.family.interpolate(belief.parameters, self._prior, self._memory))

    def update(self, predicted: ConjugateBelief, y: Tensor, observed: Tensor | None, t: int) -> Updated:
        value, present = y[0], None if observed is None else observed[0]
        allowed = self.pair.allowed(value, self._prior.shape[-2])
        if not holds(allowed if present is None else allowed | ~present):
            got = f"{value[~allowed if present is None else ~allowed & present][0].item():g} at step {t}"
            where, advice = "SwitchingConjugate observations", "Use NaN where an observation is missing."
            raise ValueError(sentence(where, f"{self.pair.values} for {type(self.pair).__name__}", got, advice))
        parameters, log_likelihood = self.pair.observe(predicted.parameters, value, t)
        belief = self._belief(parameters)
        if present is None:
            return Updated(belief, log_likelihood)
        merged = (torch.where(present, new, old) for new, old in zip(belief, predicted, strict=True))
        return Updated(ConjugateBelief(*merged), torch.where(present, log_likelihood, 0))

    def moments(self, belief: ConjugateBelief) -> StateMoments:
        return StateMoments(belief.mean, belief.covariance)

    def expected_statistics(self, belief: ConjugateBelief) -> Tensor:
        return self.family.mean(belief.parameters)

    def from_statistics(self, statistics: Tensor) -> ConjugateBelief:
        return self._belief(self.family.from_mean(statistics))

    def collapse(self, weights: Tensor, belief: ConjugateBelief, axis: int) -> ConjugateBelief:
        parameters = self.family.project(weights, belief.parameters, axis)
        mean = (weights.unsqueeze(-2) * belief.mean).sum(axis)
        apart = belief.mean - mean.unsqueeze(axis)
        spread = belief.covariance + apart.unsqueeze(-2) * apart.unsqueeze(-3)
        wide = weights.unsqueeze(-2).unsqueeze(-2)
        # a hypothesis without weight may have an infinite variance
        covariance = (wide * torch.where(wide > 0, spread, 0)).sum(axis)
        return ConjugateBelief(parameters, mean, covariance)

    def _belief(self, parameters: Tensor) -> ConjugateBelief:
        return ConjugateBelief(parameters, *self.pair.moments(parameters))
