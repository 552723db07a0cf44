"""The engine of switching filters: hypotheses are the last few modes, two slots set when to collapse (S2-C2, S2-C4).

A step takes every hypothesis (…, i) to (…, i, j) with weight P(j | i), predicts, observes. Exact inference would keep
M^t hypotheses; the engine collapses the oldest mode by the M-projection, either before the observation or after it:

    Slots(before, after)      modes that index the beliefs when they meet the observation / when the next step begins
    GPB-k                     (k, k−1)      M^k updates, M^{k−1} beliefs kept; GPB1 keeps one belief for all modes
    IMM                       (1, 1)        mixing is the same collapse, taken before the observation: M updates
    exact                     (∞, ∞)

Nothing else differs between them. Without an observation the two slots meet and IMM is GPB2 (X-16); with equal rows of
the transition IMM is GPB1; with a transition that never switches all from GPB2 on are exact.

Mode weights live in logarithms, so that evidence of any size is kept. The collapse preserves the mean and covariance of
the mixture, so that what is reported at a step owes nothing to the collapse at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_float, sentence, shape
from cumulant.filters.protocol import Belief, Propagator, SwitchingModel, is_tracked, require_batch
from cumulant.filters.records import Filtered, Hypotheses, RecordBuffer, StepBeliefs, StepRecord, normalize, to_filtered

LIMIT = 1 << 16  # hypotheses at one step beyond which a call is refused
SEGMENT = 1 << 9  # steps × sequences that are turned into records together


class Slots(NamedTuple):
    """How many of the last modes index the beliefs before the observation, and after it.

    >>> Slots.gpb(2), IMM
    (Slots(before=2, after=1), Slots(before=1, after=1))
    """

    before: int
    after: int

    @staticmethod
    def gpb(order: int) -> Slots:
        """GPB-k: update M^k hypotheses, keep M^{k−1} of them."""
        if isinstance(order, bool) or not isinstance(order, int) or order < 1:
            raise ValueError(sentence("gpb.order", "an integer ≥ 1", order, "2 keeps one belief a mode."))
        return Slots(order, order - 1)


IMM = Slots(1, 1)
EXACT = Slots(1 << 30, 1 << 30)


class FilterState(NamedTuple):
    """A filter between two steps; `init` makes it and `step` takes it on.

    ``axes`` counts the hypothesis axes of the belief; GPB1 has none, while its weights still have the last mode.
    """

    propagator: Propagator
    slots: Slots
    batch_shape: torch.Size
    observed: int
    t: int
    hypotheses: Hypotheses
    axes: int

    def __repr__(self) -> str:
        return f"FilterState(t={self.t}, slots={self.slots}, batch_shape={tuple(self.batch_shape)})"


def gpb(model: SwitchingModel, y: Tensor, *, order: int = 2, mask: Tensor | None = None) -> Filtered:
    """Generalised pseudo-Bayes of order k: hypotheses are the last k−1 modes, collapsed after the observation (S2-E5).

    y     (*batch, T, m), NaN where an entry is missing
    mask  (*batch, T) Boolean, for sequences of different lengths in one batch: True up to the end of each. After its
          end a sequence repeats its last belief and has log-likelihood 0.

    Whether the first step predicts before it observes is the model's ``start``: with "prior", the default, the initial
    law is that of the first state and y_1 only updates it; with "belief", as in filterpy, the first step moves first.

    Cost M^k updates a step. Order 1 keeps a single belief; an order above T is exact.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> gpb(walk, torch.tensor([[0.0], [6.0]]).double()).mode_probabilities           # a jump: the second mode
    tensor([[0.5000, 0.5000],
            [0.0084, 0.9916]], dtype=torch.float64)
    """
    return run(model, y, Slots.gpb(order), mask=mask)


def imm(model: SwitchingModel, y: Tensor, *, mask: Tensor | None = None) -> Filtered:
    """The interacting multiple model filter: hypotheses are mixed before the observation, M updates a step (S2-C4).

        p(x_t | z_t = j) ≈ N(m_j, P_j),  mixed over i by p(z_{t−1} = i | z_t = j) before each prediction

    Arguments as in `gpb`, of which this has the cost of order 1 and nearly the accuracy of order 2.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> imm(walk, torch.tensor([[0.0], [6.0]]).double()).mode_probabilities[-1]            # a jump: the second mode
    tensor([0.0084, 0.9916], dtype=torch.float64)
    """
    return run(model, y, IMM, mask=mask)


def exact(model: SwitchingModel, y: Tensor, *, mask: Tensor | None = None, limit: int = LIMIT) -> Filtered:
    """Every mode path on its own, M^T of them: the answer that the others approximate (S2-E4).

        p(x_t | y) = Σ_paths p(z_1 … z_t | y) N(x_t; m_path, P_path)

    Refused where one step would have more than ``limit`` hypotheses. Other arguments as in `gpb`.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> exact(walk, torch.tensor([[0.0], [6.0]]).double()).log_likelihood.sum()           # log p(y_1, y_2)
    tensor(-5.7591, dtype=torch.float64)
    """
    return run(model, y, EXACT, mask=mask, limit=limit)


def kalman(model: SwitchingModel, y: Tensor, *, mask: Tensor | None = None) -> Filtered:
    """The filter of a model with one mode, p(x_t | y_1 … y_t) = N(m_t, P_t): exact, nothing to collapse.

    Arguments as in `gpb`.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye, zero = torch.eye(1), torch.zeros(1)
    >>> still = SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=zero, initial_covariance=eye)
    >>> kalman(still, torch.ones(3, 1)).mean[:, 0]                                        # 1/2, 2/3, 3/4
    tensor([0.5000, 0.6667, 0.7500])
    """
    if isinstance(model, SwitchingModel) and model.modes != 1:
        raise ValueError(sentence("kalman.model", "a model with one mode", f"{model.modes}", "Use imm or gpb."))
    return run(model, y, IMM, mask=mask)


def run(model: SwitchingModel, y: Tensor, slots: Slots, *, mask: Tensor | None = None, limit: int = LIMIT) -> Filtered:
    """The engine over whole sequences y (*batch, T, m), for any pair of collapse slots; arguments as in `gpb`.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> run(walk, torch.tensor([[0.0], [6.0]]).double(), Slots.gpb(3)).mode_probabilities[-1]
    tensor([0.0084, 0.9916], dtype=torch.float64)
    """
    state = init(model, slots=slots, batch_shape=_check_observations(model, y))
    require_alike("filters.y", y, "the model", state.propagator.like)
    propagator, steps, batch = state.propagator, y.shape[-2], state.batch_shape.numel()
    _check_size(model, slots, steps + (propagator.start == "belief"), limit)
    lengths = None if mask is None else _lengths(y, mask)
    tracked = propagator.tracked or is_tracked(y)
    buffer = RecordBuffer(steps, state.batch_shape, tracked=tracked)
    if not steps:
        last = Hypotheses(*propagator.initial())
        buffer.append(_no_steps(to_filtered(propagator, [StepBeliefs(last, last, propagator.like.sum())], batch)))
        return buffer.join()
    columns = y.reshape(batch, steps, model.observed).permute(1, 2, 0)  # (T, m, batch)
    # where no derivative is needed, tensors that cannot have one are a quarter faster
    with nullcontext() if tracked else torch.inference_mode():
        _run_steps(state, columns.contiguous(), lengths, buffer)
    return buffer.join()


def _run_steps(state: FilterState, columns: Tensor, lengths: Tensor | None, buffer: RecordBuffer) -> None:
    """All steps; their records go into the buffer a segment of time at a time."""
    propagator, batch = state.propagator, columns.shape[-1]
    missing = columns.isnan()
    gaps = missing.flatten(1).any(1).tolist()
    columns = torch.where(missing, 0, columns)
    last, pending = Hypotheses(*propagator.initial()), []
    for t, y in enumerate(columns.unbind()):
        before = state
        state, beliefs = advance(state, y, ~missing[t] if gaps[t] else None)
        if lengths is not None:
            beliefs, state = _freeze_beliefs(lengths > t, beliefs, last), freeze_ended(lengths > t, state, before)
            last = beliefs.posterior
        pending.append(beliefs)
        if len(pending) * batch >= SEGMENT or t == len(columns) - 1:
            buffer.append(to_filtered(propagator, pending, batch))
            pending = []


def init(model: SwitchingModel, *, slots: Slots = IMM, batch_shape: Sequence[int] = ()) -> FilterState:
    """A filter before its first observation, for data that come one at a time: IMM, or `Slots.gpb(k)`.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye, zero = torch.eye(1), torch.zeros(1)
    >>> still = SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=zero, initial_covariance=eye)
    >>> state = init(still)
    >>> for y in (1.0, 1.0, 1.0):
    ...     state, record = step(state, torch.tensor([y]))
    >>> record.mean, record.covariance                                                # 3/(3 + 1) and 1/(3 + 1)
    (tensor([0.7500]), tensor([[0.2500]]))
    """
    if not isinstance(model, SwitchingModel):
        advice = "Build a SwitchingLinearGaussian, SwitchingConjugate, or your own with modes, observed, propagator()."
        raise TypeError(sentence("filters.model", "a switching model", type(model).__name__, advice))
    if not 0 <= slots.after <= slots.before or not slots.before:
        advice = "Slots.gpb(k) and IMM are the usual ones."
        raise ValueError(sentence("filters.slots", "0 ≤ after ≤ before and before ≥ 1", slots, advice))
    propagator = model.propagator()
    require_batch("filters.y", propagator.batch_shape, torch.Size(batch_shape))
    start = Hypotheses(*propagator.initial())
    axes = 1
    if propagator.start == "belief" and slots.after < 1:
        start, axes = collapse(propagator, start, 1, 0), 0
    return FilterState(propagator, slots, torch.Size(batch_shape), model.observed, 0, start, axes)


def step(state: FilterState, y: Tensor) -> tuple[FilterState, StepRecord]:
    """Take a filter over one observation y (*batch, m), NaN where an entry is missing.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye, zero = torch.eye(1), torch.zeros(1)
    >>> still = SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=zero, initial_covariance=eye)
    >>> state, record = step(init(still), torch.tensor([1.0]))
    >>> record.mean, record.log_likelihood                                                # log N(1; 0, 2)
    (tensor([0.5000]), tensor(-1.5155))
    """
    _check_step(state, y)
    batch = state.batch_shape.numel()
    column = y.reshape(batch, state.observed).mT
    missing = column.isnan()
    observed = ~missing if bool(missing.any()) else None
    state, current = advance(state, torch.where(missing, 0, column), observed)
    buffer = RecordBuffer(1, state.batch_shape, tracked=True)
    buffer.append(to_filtered(state.propagator, [current], batch))
    joined = buffer.join()
    now = (len(state.batch_shape), 0)
    beliefs = None if joined.beliefs is None else _map_leaves(joined.beliefs, lambda leaf: leaf.select(*now))
    return state, StepRecord(*(field.select(*now) for field in joined[:-1]), beliefs=beliefs)


class Prediction(NamedTuple):
    """A step before its observation.

    prior     hypotheses about the state before, with an axis for the mode at this step
    predicted what `Propagator.predict` made of their belief
    axes      how many hypothesis axes the beliefs have
    """

    prior: Hypotheses
    predicted: Belief
    axes: int


class Observed(NamedTuple):
    """Hypotheses of a step before and after its observation, none of them collapsed since, and log p(y) (batch).

    entering  the belief about the state before, with an axis for the mode at this step
    predicted what `Propagator.predict` made of it
    axes      how many hypothesis axes the beliefs have
    """

    entering: Belief
    predicted: Belief
    prior_log_weights: Tensor
    posterior: Hypotheses
    log_likelihood: Tensor
    axes: int


def predict(state: FilterState) -> Prediction:
    """Extend the hypotheses by the mode of the next step, collapse them to the slots before it, and predict."""
    propagator, before, t = state.propagator, state.slots.before, state.t
    prior, axes = state.hypotheses, state.axes
    moves = t > 0 or propagator.start == "belief"
    if moves:
        weights = prior.log_weights.unsqueeze(-2) + propagator.log_transition(t)  # (…, i, j, batch)
        if axes == 0:
            weights = normalize(weights).log_total
        prior = Hypotheses(weights, _map_leaves(prior.belief, lambda leaf: leaf.unsqueeze(axes)))
        axes += 1
    prior, axes = collapse(propagator, prior, axes, before), min(axes, before)
    return Prediction(prior, propagator.predict(prior.belief, t, moves=moves), axes)


def observe(state: FilterState, y: Tensor, observed: Tensor | None, prediction: Prediction | None = None) -> Observed:
    """Condition what `predict` says of the next step on y (m, batch), 0 where missing.

    ``observed`` (m, batch) is False where an entry is missing, None where nothing is.
    """
    propagator, t = state.propagator, state.t
    prior, predicted, axes = predict(state) if prediction is None else prediction
    belief, log_likelihood = propagator.update(predicted, y, observed, t)
    log_likelihood = log_likelihood.clamp_min(-(torch.finfo(y.dtype).max ** 0.5))  # an overflow is no NaN
    # relative to the best hypothesis that can be, lest evidence of any size rounds the weights away
    possible = prior.log_weights.detach() > -(torch.finfo(y.dtype).max ** 0.625)
    top = torch.where(possible, log_likelihood.detach(), -torch.inf).flatten(0, -2).amax(0)
    joint = prior.log_weights + (log_likelihood - top)
    rest = normalize(joint.flatten(0, -2)).log_total
    evidence = rest + top
    if not len(y):
        evidence = torch.zeros_like(evidence)
    elif observed is not None:
        evidence = torch.where(observed.any(0), evidence, 0)  # not the rounding of the weights
    return Observed(prior.belief, predicted, prior.log_weights, Hypotheses(joint - rest, belief), evidence, axes)


def advance(
    state: FilterState, y: Tensor, observed: Tensor | None, prediction: Prediction | None = None
) -> tuple[FilterState, StepBeliefs]:
    """One step of the filter: `observe`, then collapse to the slots after it."""
    propagator, after = state.propagator, state.slots.after
    _, predicted, prior_log_weights, posterior, evidence, axes = observe(state, y, observed, prediction)
    prior = collapse(propagator, Hypotheses(prior_log_weights, propagator.state(predicted)), axes, 1)
    collapsed = collapse(propagator, posterior, axes, max(after, 1))
    newest = collapse(propagator, collapsed, min(axes, max(after, 1)), 1)
    collapsed = collapse(propagator, collapsed, 1, 0) if after == 0 else collapsed
    state = state._replace(t=state.t + 1, hypotheses=collapsed, axes=min(axes, after))
    return state, StepBeliefs(prior, newest, evidence)


def collapse(propagator: Propagator, hypotheses: Hypotheses, axes: int, keep: int) -> Hypotheses:
    """Collapse the oldest modes until ``keep`` index the belief; the weights keep the newest mode in any case."""
    log_weights, belief = hypotheses
    for _ in range(axes - keep):
        log_total, weights = normalize(log_weights)
        belief = propagator.collapse(weights, belief, 0)
        log_weights = log_total if log_weights.ndim > 2 else log_weights
    return Hypotheses(log_weights, belief)


def _map_leaves(belief: Belief, change) -> Belief:
    return type(belief)(*(change(leaf) for leaf in belief))


def _no_steps(records: Filtered) -> Filtered:
    """No steps at all, in the shapes that steps would have."""
    beliefs = None if records.beliefs is None else _map_leaves(records.beliefs, lambda leaf: leaf[:0])
    return Filtered(*(field[:0] for field in records[:-1]), beliefs=beliefs)


def _where(here: Tensor, new: Hypotheses, old: Hypotheses) -> Hypotheses:
    leaves = (torch.where(here, a, b) for a, b in zip(new.belief, old.belief, strict=True))
    return Hypotheses(torch.where(here, new.log_weights, old.log_weights), type(new.belief)(*leaves))


def _freeze_beliefs(here: Tensor, beliefs: StepBeliefs, last: Hypotheses) -> StepBeliefs:
    """Sequences that have ended repeat their last belief."""
    prior, posterior = _where(here, beliefs.prior, last), _where(here, beliefs.posterior, last)
    return StepBeliefs(prior, posterior, torch.where(here, beliefs.log_likelihood, 0))


def freeze_ended(here: Tensor, state: FilterState, before: FilterState) -> FilterState:
    """Sequences that have ended stop moving, lest an unstable model carries them to infinity."""
    if state.hypotheses.log_weights.ndim != before.hypotheses.log_weights.ndim or state.axes != before.axes:
        return state
    return state._replace(hypotheses=_where(here, state.hypotheses, before.hypotheses))


def _check_observations(model: SwitchingModel, y: object) -> torch.Size:
    values = require_float("filters.y", y)
    if not isinstance(model, SwitchingModel):
        return torch.Size()  # init refuses the model
    if values.ndim < 2 or values.shape[-1] != model.observed:
        expected = f"shape (*batch, T, m={model.observed})"
        raise ValueError(sentence("filters.y", expected, shape(values), "Use y[:, None] where m is 1."))
    _check_values(values)
    return values.shape[:-2]


def _check_values(y: Tensor) -> None:
    """Squares of observations must be numbers."""
    limit = torch.finfo(y.dtype).max ** 0.5
    if not holds(~(y.detach().abs() > limit)):
        expected = f"numbers of size at most {limit:.0e}, or NaN where an entry is missing"
        got = f"{int((y.abs() > limit).sum())} entries beyond"
        raise ValueError(sentence("filters.y", expected, got, "Use NaN for what was not observed."))


def _check_step(state: FilterState, y: object) -> None:
    values = require_float("step.y", y)
    require_alike("step.y", values, "the model", state.propagator.like)
    expected = (*state.batch_shape, state.observed)
    if values.shape != expected:
        advice = "init(..., batch_shape=...) sets the number of sequences."
        raise ValueError(sentence("step.y", f"shape {expected}", shape(values), advice))
    _check_values(values)


def _check_size(model: SwitchingModel, slots: Slots, depth: int, limit: int) -> None:
    hypotheses = model.modes ** min(slots.before, max(depth, 1))
    if hypotheses > limit:
        expected = f"at most {limit} hypotheses at a step"
        advice = "Use imm or a lower order, a shorter sequence, or raise the limit of exact."
        raise ValueError(sentence("filters", expected, f"{model.modes}^{min(slots.before, depth)}", advice))


def _lengths(y: Tensor, mask: object) -> Tensor:
    """The number of steps of each sequence, (batch)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(sentence("filters.mask", "a Boolean tensor", got, "True means the step exists."))
    if mask.shape != y.shape[:-1]:
        raise ValueError(sentence("filters.mask", f"shape {tuple(y.shape[:-1])}", shape(mask), "One flag a step."))
    if not holds(mask[..., 1:] <= mask[..., :-1]):
        advice = "Mark gaps inside a sequence by NaN in y: time passes there."
        raise ValueError(sentence("filters.mask", "True up to the end of each sequence, then False", "gaps", advice))
    return mask.sum(-1).flatten()
