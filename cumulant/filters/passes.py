"""Forward and backward passes of smoothing over hypotheses, the last k−1 modes.

Given hypotheses s_t = i and s_{t+1} = j the state x_t is a regression on x_{t+1}, whatever comes later:

    J_ij = P_i A_jᵀ (A_j P_i A_jᵀ + V_j)⁻¹                 m_i, P_i of the filter at t; x_{t+1} ~ N(A_j x_t + b_j, V_j)
    m = m_i + J_ij (m_ij − A_j m_i − b_j)                  m_ij, P_ij of x_{t+1} given both modes and all observations
    P = (I − J_ij A_j) P_i (I − J_ij A_j)ᵀ + J_ij (V_j + P_ij) J_ijᵀ

For one mode this is the smoother of Rauch, Tung and Striebel. With several, methods differ in m_ij, P_ij and the weight
of the pair, which the collapse of the oldest mode at t+1 has lost:

    propagation  the law of x_{t+1} given i, j and y_1 … y_{t+1}, times what later observations say given j: the
                 quotient of the smoothed and the filtered law of j (`cumulant.filters.messages`)
    kim          the smoothed law of j for every i;  P(i | j, y_1 … y_T) ≈ P(i | j, y_1 … y_t)
    correction   the same law; P(i | j, y_1 … y_T) ∝ P(i | j, y_1 … y_t) p(x_{t+1} = m_j | i, j, y_1 … y_t)

Propagation is repeated: the next forward pass collapses modes by what their pasts and their futures say of them, not by
their pasts alone. Nothing is approximate where nothing was collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filters.beliefs import Beliefs, normalized, sequences_first, where
from cumulant.filters.linear_laws import LinearLaw, regression
from cumulant.filters.messages import Message, inverse, product, quotient, silent
from cumulant.filters.projection import m_projection
from cumulant.filters.protocol import Propagator, SwitchingModel
from cumulant.filters.records import Hypotheses
from cumulant.filters.switching import Slots, collapse, freeze_ended, init, observe


class Passes(NamedTuple):
    """The order of the hypotheses, the method, and how often propagation goes forward and back."""

    order: int
    method: str
    sweeps: int


class FilterStep(NamedTuple):
    """Beliefs after a step of the filter, and how they follow from those of the step before.

    beliefs         (batch, *modes), the oldest modes collapsed
    law             of x_t given x_{t−1}, (batch or 1, *modes of the step before, mode at t, …)
    log_transition  (batch or 1, M, M)
    updated         the beliefs before the collapse, (batch, *modes of the step before, mode at t); None if not kept

    Where the first step only observes it has law None.
    """

    beliefs: Beliefs
    law: LinearLaw | None = None
    log_transition: Tensor | None = None
    updated: Beliefs | None = None


class Link(NamedTuple):
    """Joint law of two neighbouring steps given all observations, by hypotheses (batch, *modes up to t, mode at t+1).

    log_weights of the hypotheses, mean and covariance of x_t, the regression J of x_t on x_{t+1}, and the beliefs about
    x_{t+1}, whose axes broadcast with the others.
    """

    log_weights: Tensor
    mean: Tensor
    covariance: Tensor
    gain: Tensor
    later: Beliefs


class Level(NamedTuple):
    """The smoothed beliefs of one step, its joint law with the next (None at the last), and what the future says."""

    beliefs: Beliefs
    link: Link | None
    message: Message | None


def levels(
    model: SwitchingModel, y: Tensor, passes: Passes, lengths: Tensor | None, begin: Beliefs | None = None
) -> Iterator[Level]:
    """The levels of all steps of y (*batch, T, m), the last first; ``begin`` adds a step before the first.

    ``lengths`` (batch) are the numbers of steps of the sequences: each goes back from its own end.
    """
    (order, method, sweeps), messages = passes, None
    for _ in range(sweeps - 1 if method == "propagation" else 0):
        steps = forward(model, y, order, lengths, messages)
        messages = [level.message for level in backward(steps, lengths, method=method)][::-1]
    steps = forward(model, y, order, lengths, messages)
    if begin is not None:
        return backward([FilterStep(begin), *steps], lengths, first=-1, method=method)
    return backward(steps, lengths, method=method)


def forward(
    model: SwitchingModel,
    y: Tensor,
    order: int,
    lengths: Tensor | None,
    messages: Sequence[Message | None] | None = None,
) -> list[FilterStep]:
    """The filter `gpb` of an order, step by step; with messages, modes are collapsed by what comes later too."""
    count, steps = y.shape[:-2].numel(), []
    state = init(model, slots=Slots.gpb(order), batch_shape=(count,))
    propagator = state.propagator
    columns = y.reshape(count, *y.shape[-2:]).permute(1, 2, 0)
    missing = columns.isnan()
    gaps = missing.flatten(1).any(1).tolist()
    for t, column in enumerate(torch.where(missing, 0, columns).unbind()):
        before, seen = state, observe(state, column, ~missing[t] if gaps[t] else None)
        hypotheses = collapse(propagator, seen.posterior, seen.axes, order - 1)
        updated, message = sequences_first(propagator, seen.posterior, count), None
        if messages is not None and seen.axes >= order:
            message = messages[t]
        if message is not None:
            hypotheses = _collapse_by(message, propagator, seen.posterior, updated, count)
        state = state._replace(t=t + 1, hypotheses=hypotheses, axes=min(seen.axes, order - 1))
        beliefs = sequences_first(propagator, hypotheses, count)
        if t > 0 or propagator.start == "belief":
            law = propagator.transition_law(seen.entering, t)
            transition = propagator.log_transition(t).movedim(-1, 0)
            steps.append(FilterStep(beliefs, _aligned(law, seen.axes), transition, updated))
        else:
            steps.append(FilterStep(beliefs))
        if lengths is not None:
            state = freeze_ended(lengths > t, state, before)
    return steps


def _aligned(law: LinearLaw, axes: int) -> LinearLaw:
    """The sequences first and all hypothesis axes present."""

    def align(part: Tensor, event: int) -> Tensor:
        part = part.movedim(-1, 0)
        return part.reshape(len(part), *[1] * (1 + axes + event - part.ndim), *part.shape[1:])

    return LinearLaw(align(law.coefficient, 2), align(law.offset, 1), align(law.noise, 2))


def _collapse_by(
    message: Message, propagator: Propagator, posterior: Hypotheses, updated: Beliefs, count: int
) -> Hypotheses:
    """Collapse the oldest mode by its weight given all observations; the weights after it are the filter's again."""
    tilted = product(updated, message.unsqueeze(1)).log_weights
    shares = torch.softmax(tilted, 1).movedim(0, -1)
    belief = propagator.collapse(shares, posterior.belief, 0)
    total = torch.logsumexp(tilted, 1)
    merged = sequences_first(propagator, Hypotheses(torch.zeros_like(total).movedim(0, -1), belief), count)
    merged = normalized(merged._replace(log_weights=total - product(merged, message).log_weights))
    return Hypotheses(merged.log_weights.movedim(0, -1), belief)


def backward(
    steps: Sequence[FilterStep], lengths: Tensor | None, *, first: int = 0, method: str = "kim"
) -> Iterator[Level]:
    """The levels of the backward pass from the last step to the first, which has time ``first``."""
    later = steps[-1].beliefs
    message = silent(later) if method == "propagation" else None
    rounding = _rounding(steps, lengths, first) if method == "propagation" else None
    yield Level(later, None, message)
    for k in reversed(range(len(steps) - 1)):
        t, here, step = first + k + 1, steps[k].beliefs, steps[k + 1]
        link = _link(here, step, _ahead(here, step, later, message, method))
        shares = torch.softmax(link.log_weights, -1)
        moments = m_projection(shares, link.mean, link.covariance)
        later = normalized(Beliefs(torch.logsumexp(link.log_weights, -1), *moments))
        message = None
        if method == "propagation" and _collapsed(steps[k]):
            between = later.covariance - (shares[..., None, None] * link.covariance).sum(-3)
            message = quotient(later, here, between, rounding)
        if lengths is not None:
            later = where(lengths > t, later, here)
            message = None if message is None else where(lengths > t, message, silent(here))
        yield Level(later, link, message)


def _rounding(steps: Sequence[FilterStep], lengths: Tensor | None, first: int) -> Tensor:
    """The error of means in each entry of the state, from the largest of a sequence, (batch, 1, …, d)."""
    sizes = [step.beliefs.mean.detach().abs().flatten(1, -2).amax(1) for step in steps]
    if lengths is not None:
        sizes = [torch.where((lengths > first + k)[:, None], size, 0) for k, size in enumerate(sizes)]
    size = torch.stack(sizes).amax(0).unflatten(0, (-1, *[1] * (steps[-1].beliefs.mean.ndim - 2)))
    return 3 * torch.finfo(size.dtype).eps * size


def _collapsed(step: FilterStep) -> bool:
    """Whether modes that differ were collapsed after the observation."""
    if step.updated is None or step.updated.log_weights.ndim == step.beliefs.log_weights.ndim:
        return False
    return step.updated.log_weights.shape[1] > 1


def _ahead(here: Beliefs, step: FilterStep, later: Beliefs, message: Message | None, method: str) -> Beliefs:
    """The smoothed beliefs about x_{t+1}, with weights of hypotheses up to t and the mode at t+1."""
    if later.log_weights.ndim > here.log_weights.ndim:  # no mode was collapsed
        return later
    if message is not None and _collapsed(step):
        assert step.updated is not None
        return normalized(product(step.updated, message.unsqueeze(1)))
    assert step.log_transition is not None
    log_weights = here.log_weights[..., None] + step.log_transition
    later = Beliefs(*(part.unsqueeze(1) for part in later))
    if method == "correction":
        log_weights = log_weights + _log_density(here, step, later.mean)
    return later._replace(log_weights=torch.log_softmax(log_weights, 1) + later.log_weights)


def _log_density(here: Beliefs, step: FilterStep, x: Tensor) -> Tensor:
    """log p(x_{t+1} = x | hypotheses up to t, mode at t+1, y_1 … y_t), but for a constant."""
    assert step.law is not None
    a, b, v = step.law
    apart = x - (a @ here.mean[..., None, :, None])[..., 0] - b
    precision, log_det = inverse(a @ here.covariance.unsqueeze(-3) @ a.mT + v)
    return -((apart[..., None, :] @ precision @ apart[..., None])[..., 0, 0] + log_det) / 2


def _link(here: Beliefs, step: FilterStep, ahead: Beliefs) -> Link:
    assert step.law is not None
    a, b, v = step.law
    mean, covariance = here.mean.unsqueeze(-2), here.covariance.unsqueeze(-3)  # (batch, *modes, 1, …)
    cross = a @ covariance
    gain = regression(cross, cross @ a.mT + v)
    surprise = ahead.mean - (a @ mean[..., None])[..., 0] - b
    rest = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - gain @ a
    # positive semidefinite term by term, where P_i + J (P_ij − …) Jᵀ would subtract
    spread = rest @ covariance @ rest.mT + gain @ (v + ahead.covariance) @ gain.mT
    spread = (spread + spread.mT) / 2
    return Link(ahead.log_weights, mean + (gain @ surprise[..., None])[..., 0], spread, gain, ahead)
