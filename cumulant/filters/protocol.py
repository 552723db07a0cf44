"""The interface between the switching engine and its models, of any family.

A switching model has a discrete mode s_t, a continuous state x_t and an observation y_t. A hypothesis is a tuple of the
last few modes; for each hypothesis the engine keeps a log weight and a *belief* about x_t, whose fields it never uses.
Six operations are enough, and a model provides them as a `Propagator`, prepared once for a run:

    initial            weights and beliefs before the first step, one belief a mode
    log_transition     log P(s' = j | s = i), rows "from"
    predict            p(x' | s' = j, past) from the belief about x; may carry y' along, jointly
    update             p(x' | y', s' = j, past) and log p(y' | s' = j, past)
    collapse           the M-projection Σ_i w_i p_i ↦ argmin_q KL(Σ_i w_i p_i ‖ q), matching expected statistics
    moments            mean and covariance of x under a belief, for the record

Layout. A belief is a NamedTuple of tensors shaped (*hypotheses, *event, batch): hypothesis axes first (oldest mode
first, newest last), what the family needs in the middle, the sequences last, so that every operation runs over
contiguous batches. Axes may have size 1 where values do not differ. Weights are shaped (*hypotheses, batch).

A family with a sufficient statistic writes `expected_statistics` and `from_statistics` and inherits `collapse`

    collapse(w, belief) = from_statistics(Σ_i w_i expected_statistics(belief_i))                               (S2-E5)

which is exact; one that can do better (Gaussians: centred, without subtracting squares) overrides it.

A new family is a subclass of `Propagator` and a model with `modes`, `observed` and `propagator()`; then `gpb`, `imm`,
`exact`, `init` and `step` of `cumulant.filters.switching` work on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from cumulant.checks import sentence
from cumulant.families import StateMoments
from cumulant.filters.linear_laws import LinearLaw

SHARED = torch.Size()  # the batch axes of parameters that all sequences share
Belief = Any  # a NamedTuple of tensors (*hypotheses, *event, batch); only its own propagator uses the fields


class Start(NamedTuple):
    """`log_probabilities` of the modes (modes, batch or 1), and a belief with one hypothesis axis."""

    log_weights: Tensor
    belief: Belief


class Updated(NamedTuple):
    """The belief after an observation, and log p(y | hypothesis) (*hypotheses, batch)."""

    belief: Belief
    log_likelihood: Tensor


@runtime_checkable
class SwitchingModel(Protocol):
    """The parameters of a switching model, from which `gpb`, `imm` and `exact` get its operations."""

    @property
    def modes(self) -> int:
        """M, the number of modes."""
        ...

    @property
    def observed(self) -> int:
        """m, the number of entries of one observation; 0 where nothing is ever observed."""
        ...

    def propagator(self) -> Propagator: ...


class Propagator(ABC):
    """The operations of one model in the layout of the engine; prepared once a run, never shared between runs.

    start    "belief": the initial law is that of (s_0, x_0), so that the first step moves before it observes
             "prior": it is that of (s_1, x_1), so that the first step only observes
    like     an empty tensor of the dtype and on the device of the model
    tracked  False where no parameter needs a derivative (see `is_tracked`); the engine then runs without autograd
    angles   which entries of y are angles in radians: their differences are taken around the circle
    batch_shape  of the sequences of which each has parameters of its own; () or one element: any sequences share them
    """

    start: str
    like: Tensor
    tracked: bool = True
    angles: tuple[int, ...] = ()
    batch_shape: torch.Size = SHARED

    @abstractmethod
    def initial(self) -> Start:
        """The law before the first step."""

    @abstractmethod
    def log_transition(self, t: int) -> Tensor:
        """`log_probabilities` of P(s_t = j | s_{t−1} = i) as (from, to, batch or 1); ``t`` counts from 0."""

    @abstractmethod
    def predict(self, belief: Belief, t: int, *, moves: bool = True) -> Belief:
        """The law of x_t, or of (x_t, y_t), from beliefs about x_{t−1}.

        The newest hypothesis axis is the mode at t: it has size 1 (one belief for every mode to come) or M, and M in
        the result unless the dynamics are the same in every mode. ``moves`` is False at the first step of a model whose
        start is "prior": x_t = x_{t−1} there.
        """

    @abstractmethod
    def update(self, predicted: Belief, y: Tensor, observed: Tensor | None, t: int) -> Updated:
        """Condition on y (m, batch).

        ``observed`` (m, batch) is False where an entry is missing (y is 0 there), and None where nothing is. The result
        with entries missing is the marginal over them: a sequence without an observation keeps its prediction and has
        log-likelihood 0.
        """

    @abstractmethod
    def moments(self, belief: Belief) -> StateMoments:
        """Mean (*hypotheses, d, batch) and covariance (*hypotheses, d, d, batch) of the state under each belief."""

    def repeated(self, count: int) -> Propagator:
        """The operations for ``count`` copies of every sequence next to one another, as particles are.

        The same where sequences have nothing of their own.
        """
        return self

    def state(self, predicted: Belief) -> Belief:
        """The belief about x_t alone in what `predict` returned."""
        return predicted

    def transition_law(self, belief: Belief, t: int) -> LinearLaw:
        """x_t | x_{t−1} ~ N(A x_{t−1} + b, V) given the mode at t: exact, or the best linear law at these beliefs.

        Takes what `predict` takes at a step that moves. coefficient and noise (*hypotheses, d, d, batch), offset
        (*hypotheses, d, batch), axes of size 1 where nothing differs. This is all that `smooth` needs of a family with
        normal beliefs beyond the operations of a filter; `linear_law` makes it from Cov(x_t, x_{t−1}).
        """
        raise NotImplementedError(
            self._missing("transition_law", "a family with normal beliefs", "Smoothing needs it.")
        )

    def observation_moments(self, belief: Belief, t: int) -> StateMoments:
        """Mean (*hypotheses, m, batch) and covariance (*hypotheses, m, m, batch) of y_t given each mode, for forecasts
        and innovations.

        ``belief`` is about x_t; its newest hypothesis axis is the mode at t.
        """
        expected, advice = "a family that predicts observations", "Forecasts and innovations need it."
        raise NotImplementedError(self._missing("observation_moments", expected, advice))

    def record(self, belief: Belief) -> Belief | None:
        """The entry `Filtered.beliefs` for beliefs (T, M, *event, batch); None where the moments determine them."""
        return belief

    def expected_statistics(self, belief: Belief) -> Tensor:
        """E[u(x)] as (*hypotheses, k, batch), u the sufficient statistic of the family of beliefs."""
        raise NotImplementedError(self._missing("expected_statistics"))

    def from_statistics(self, statistics: Tensor) -> Belief:
        """The belief whose expected statistics are (*hypotheses, k, batch)."""
        raise NotImplementedError(self._missing("from_statistics"))

    def collapse(self, weights: Tensor, belief: Belief, axis: int) -> Belief:
        """The M-projection of mixtures along one hypothesis axis.

        weights (*hypotheses, batch), non-negative with sum 1 along ``axis``; the hypothesis axes of the belief
        broadcast with those of the weights (size 1: the same belief for all). The result does not have this axis.
        """
        return self.from_statistics(contract(weights, self.expected_statistics(belief), axis))

    def _missing(
        self,
        method: str,
        expected: str = "a family with a sufficient statistic",
        advice: str = "Write it, or override collapse.",
    ) -> str:
        return sentence(f"{type(self).__name__}.{method}", expected, "none", advice)


def is_tracked(*tensors: Tensor) -> bool:
    """Whether any of the tensors needs a derivative, in backward or forward mode."""
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return backward or any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def log_probabilities(probabilities: Tensor) -> Tensor:
    """log p, with a finite stand-in for log 0 so that no sum, difference or gradient of weights is NaN.

    The stand-in is far below any log-likelihood, and its exponential is exactly 0; zeros stay zeros, with gradient 0.

    >>> import torch
    >>> log_probabilities(torch.tensor([1.0, 0.0])).exp()
    tensor([1., 0.])
    """
    possible = probabilities > 0
    impossible = -(torch.finfo(probabilities.dtype).max ** 0.75)  # room for 1e9 of them in a sum
    return torch.where(possible, torch.log(torch.where(possible, probabilities, 1)), impossible)


def of_modes(values: Tensor, mode: Tensor, rank: int) -> Tensor:
    """The values (M, …) of modes (…), or (*batch, M, …) with every sequence its own, (sequences, …) → (sequences, …).

    ``rank`` is how many axes the values of one mode have.

    >>> import torch
    >>> of_modes(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1]), 0)             # two sequences, two modes
    tensor([1., 4.])
    """
    if values.ndim == rank + 1:
        return values[mode]
    own = values.flatten(0, -2 - rank)
    where = torch.arange(len(own), device=mode.device).reshape(-1, *[1] * (mode.ndim - 1))
    return own[where if len(own) > 1 else 0, mode]


def require_batch(where: str, own: torch.Size, batch_shape: torch.Size) -> None:
    """Refuse sequences of which a model with parameters for each has more or fewer."""
    if own.numel() != 1 and own != batch_shape:
        expected = f"batch axes {tuple(own)}, for which the model has parameters or inputs"
        raise ValueError(sentence(where, expected, f"{tuple(batch_shape)}", "One sequence for each of the model's."))


def draw_modes(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One mode for each row of probabilities (…, M) → (…)."""
    rows = probabilities.detach().reshape(-1, probabilities.shape[-1])
    if not len(rows):
        return rows.new_zeros(probabilities.shape[:-1], dtype=torch.int64)
    return torch.multinomial(rows, 1, generator=generator).reshape(probabilities.shape[:-1])


def contract(weights: Tensor, values: Tensor, axis: int, onto: Tensor | None = None) -> Tensor:
    """Σ_i w_i v_i along a hypothesis axis, added in place to ``onto`` if given.

    weights (*hypotheses, batch), values (*hypotheses, k, batch), hypothesis axes broadcasting. Where many sources meet
    many targets, as in attention, there is no array over their pairs.

    >>> import torch
    >>> contract(torch.tensor([[0.25], [0.75]]), torch.tensor([[[4.0]], [[8.0]]]), 0)
    tensor([[7.]])
    """
    if weights.ndim == 3 and axis == 0 and values.shape[1] == 1 and min(weights.shape[:2]) > MATRIX_PRODUCT_FROM:
        batch = max(weights.shape[-1], values.shape[-1])
        targets = weights.expand(-1, -1, batch).permute(2, 1, 0)
        sources = values.squeeze(1).expand(-1, -1, batch).permute(2, 0, 1)
        total = (targets @ sources).permute(1, 2, 0)  # a matrix product for every sequence
        return total if onto is None else onto.add_(total)
    weights = weights.unsqueeze(-2)
    if values.shape[axis] == 1 < weights.shape[axis]:
        weights = weights.sum(axis, keepdim=True)
    if weights.shape[axis] * values.numel() <= SMALL:
        total = (weights * values).sum(axis)
        return total if onto is None else onto.add_(total)
    for w, v in zip(weights.unbind(axis), values.unbind(axis), strict=True):
        onto = w * v if onto is None else onto.addcmul_(w, v)
    assert onto is not None
    return onto


MATRIX_PRODUCT_FROM = 16  # hypotheses from which a sum over them is a matrix product
SMALL = 1 << 13  # entries up to which one large product beats a loop over small ones
