"""Smoothing: the laws of every step given all observations, by Kim's backward pass over the beliefs of a filter.

Given s_t = i and s_{t+1} = j the state x_t is a regression on x_{t+1}, whatever comes later:

    J_ij = P_i F_jᵀ (F_j P_i F_jᵀ + Q_j)⁻¹                                     m_i, P_i of the filter at t
    m_ij = m_i + J_ij (m_j − F_j m_i − b_j)                                    m_j, P_j smoothed at t+1
    P_ij = (I − J_ij F_j) P_i (I − J_ij F_j)ᵀ + J_ij (Q_j + P_j) J_ijᵀ

which for one mode is the smoother of Rauch, Tung and Striebel. With several, two are approximate: the filter, and

    P(s_t = i | s_{t+1} = j, y_1 … y_T) ≈ P(s_t = i | s_{t+1} = j, y_1 … y_t)         the future acts through j alone

Hypotheses are the last k−1 modes, as in the filter of order k; the law of the mode before them is what is approximate.
Regression keeps means and covariances of mixtures, so that the pass is exact where no mode has to be collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, sentence, shape
from cumulant.filters.linear_gaussian import SwitchingLinearGaussian
from cumulant.filters.linear_laws import regression
from cumulant.filters.parameters import varies
from cumulant.filters.projection import m_projection
from cumulant.filters.protocol import log_probabilities
from cumulant.filters.records import Filtered
from cumulant.filters.switching import FilterState, Slots, freeze_ended, gpb, init, step
from cumulant.filters.variance_excess import variance_ratio, warn_of_excess


class Smoothed(NamedTuple):
    """Laws of state and mode at each step given all T observations; d is the size of the state, M the number of modes.

    mean                (*batch, T, d)        E[x_t | y_1 … y_T]
    covariance          (*batch, T, d, d)
    mode_probabilities  (*batch, T, M)        P(s_t | y_1 … y_T)
    mode_means          (*batch, T, M, d)     the moments of x_t given s_t too
    mode_covariances    (*batch, T, M, d, d)
    variance_ratio      (*batch, T, d)        smoothed variance of each entry of x_t, divided by its filtered variance

    Of an exact smoother E[Var(x_t | y_1 … y_T) | y_1 … y_t] ≤ Var(x_t | y_1 … y_t): a ratio above 1 is a surprise, and
    ratios above 1 on the average of a sequence are the mark of an approximation that fails (`SmootherWarning`).
    """

    mean: Tensor
    covariance: Tensor
    mode_probabilities: Tensor
    mode_means: Tensor
    mode_covariances: Tensor
    variance_ratio: Tensor


class Beliefs(NamedTuple):
    """Hypotheses of one step, oldest mode first: log_weights (batch, *modes), mean (…, d), covariance (…, d, d)."""

    log_weights: Tensor
    mean: Tensor
    covariance: Tensor


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
    """The smoothed beliefs of one step, and its joint law with the next (None at the last step)."""

    beliefs: Beliefs
    link: Link | None


def smooth(model: SwitchingLinearGaussian, y: Tensor, *, order: int = 2, mask: Tensor | None = None) -> Smoothed:
    """Smooth sequences: the filter `gpb` of an order, then Kim's backward pass of the same order (module docstring).

    y      (*batch, T, m), NaN where an entry is missing
    order  k ≥ 2: hypotheses are the last k−1 modes, at M^k regressions a step
    mask   (*batch, T) Boolean, True up to the end of each sequence; after it a sequence repeats its last belief

    Exact for one mode, for a mode that never changes, and for k > T (T+1 where the model starts from a belief). Else
    its own approximation is far coarser than that of the filter, and with little process noise, where an error of the
    mode is carried far back, it can be worse than the filter: docs/filters.md has both measured. The stated covariances
    grow with the errors: a `SmootherWarning` is given where the smoothed variances of an entry of the state exceed the
    filtered ones on the average over a sequence (`variance_excess`), and ``variance_ratio`` has every step. Use the
    filter there, or a higher order.

    A singular predicted covariance is no obstacle; where there is none, the answer is differentiable in model and y.

    >>> import torch
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    >>> smooth(walk, torch.tensor([[0.0], [3.0]], dtype=torch.float64)).mean[:, 0]
    tensor([1., 2.], dtype=torch.float64)
    """
    filtered, smoothed = filter_and_smooth(model, y, order=order, mask=mask)
    if not is_exact(model, order, y.shape[-2]):
        lengths = None if mask is None else mask.sum(-1)
        warn_of_excess(f"smooth.order={order}", filtered, smoothed.covariance, lengths)
    return smoothed


def filter_and_smooth(
    model: SwitchingLinearGaussian, y: Tensor, *, order: int = 2, mask: Tensor | None = None
) -> tuple[Filtered, Smoothed]:
    """The filter that `smooth` begins with and what it returns, for callers who compare them themselves: no warning."""
    require_linear("smooth.model", model)
    require_order("smooth.order", order)
    filtered = gpb(model, y, order=order, mask=mask)
    lengths = None if mask is None else mask.sum(-1).flatten()
    beliefs = paths(model, y, order, lengths) if order > 2 and model.modes > 1 else by_mode(filtered)
    return filtered, _smoothed(model, filtered, beliefs, lengths)


def kim(model: SwitchingLinearGaussian, filtered: Filtered, *, mask: Tensor | None = None) -> Smoothed:
    """Kim's backward pass over the record of a filter: `gpb` of order 2, or `imm`, which is cheaper.

        p(z_t = i | y_1 … y_T) = Σ_j p(z_t = i | z_{t+1} = j, y_1 … y_t) p(z_{t+1} = j | y_1 … y_T)

    As coarse as `smooth` of order 2, with the same `SmootherWarning`.

    >>> import torch
    >>> from cumulant.filters import imm
    >>> eye, y = torch.eye(1, dtype=torch.float64), torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    >>> kim(walk, imm(walk, y)).mean.equal(smooth(walk, y).mean)
    True
    """
    require_linear("kim.model", model)
    require_record("kim.filtered", model, filtered)
    lengths = None
    if mask is not None:
        fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == filtered.log_likelihood.shape
        if not fits:
            expected = f"a Boolean tensor of shape {tuple(filtered.log_likelihood.shape)}"
            got = f"{mask.dtype} of shape {shape(mask)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(sentence("kim.mask", expected, got, "Pass the mask that the filter had."))
        lengths = mask.sum(-1).flatten()
    smoothed = _smoothed(model, filtered, by_mode(filtered), lengths)
    if not is_exact(model, 2, filtered.log_likelihood.shape[-1]):
        warn_of_excess("kim", filtered, smoothed.covariance, None if mask is None else mask.sum(-1))
    return smoothed


def backward(
    model: SwitchingLinearGaussian, beliefs: Sequence[Beliefs], lengths: Tensor | None, first: int = 0
) -> Iterator[Level]:
    """The levels of the backward pass from the last step to the first, which has time ``first``.

    ``lengths`` (batch) are the numbers of steps of the sequences: each goes back from its own end.
    """
    later = beliefs[-1]
    yield Level(later, None)
    for k in reversed(range(len(beliefs) - 1)):
        t = first + k + 1
        link = _link(model, t, beliefs[k], later)
        shares = torch.softmax(link.log_weights, -1)
        log_weights = torch.logsumexp(link.log_weights, -1)
        level = Beliefs(log_weights, *m_projection(shares, link.mean, link.covariance))
        later = level if lengths is None else where(lengths > t, level, beliefs[k])
        yield Level(later, link)


def _link(model: SwitchingLinearGaussian, t: int, here: Beliefs, later: Beliefs) -> Link:
    """Steps t−1 and t."""
    log_weights = here.log_weights[..., None] + log_probabilities(at(model, "transition", t))
    if later.log_weights.ndim < log_weights.ndim:  # the later step has collapsed the oldest mode
        later = Beliefs(*(part.unsqueeze(1) for part in later))
        log_weights = torch.log_softmax(log_weights, 1) + later.log_weights
    else:
        log_weights = later.log_weights
    f, q, b = (at(model, name, t) for name in ("dynamics", "process_noise", "state_offset"))
    mean, covariance = here.mean.unsqueeze(-2), here.covariance.unsqueeze(-3)  # (batch, *modes, 1, …)
    cross = f @ covariance
    gain = regression(cross, cross @ f.mT + q)
    surprise = later.mean - (f @ mean[..., None])[..., 0] - b
    rest = torch.eye(model.dim, dtype=f.dtype, device=f.device) - gain @ f
    # positive semidefinite term by term, where P_i + J (P_j − …) Jᵀ would subtract
    spread = rest @ covariance @ rest.mT + gain @ (q + later.covariance) @ gain.mT
    return Link(log_weights, mean + (gain @ surprise[..., None])[..., 0], (spread + spread.mT) / 2, gain, later)


def by_mode(filtered: Filtered) -> list[Beliefs]:
    """The beliefs given the newest mode, one entry a step."""
    *batch, steps, modes, d = filtered.mode_means.shape
    count = torch.Size(batch).numel()
    return [
        Beliefs(*parts)
        for parts in zip(
            filtered.mode_log_probabilities.reshape(count, steps, modes).unbind(1),
            filtered.mode_means.reshape(count, steps, modes, d).unbind(1),
            filtered.mode_covariances.reshape(count, steps, modes, d, d).unbind(1),
            strict=True,
        )
    ]


def paths(model: SwitchingLinearGaussian, y: Tensor, order: int, lengths: Tensor | None) -> list[Beliefs]:
    """The beliefs given the last k−1 modes, one entry a step."""
    count, beliefs = y.shape[:-2].numel(), []
    state = init(model, slots=Slots.gpb(order), batch_shape=(count,))
    for t, column in enumerate(y.reshape(count, *y.shape[-2:]).unbind(1)):
        before = state
        state, _ = step(state, column)
        beliefs.append(_sequences_first(state))
        if lengths is not None:
            state = freeze_ended(lengths > t, state, before)
    return beliefs


def _sequences_first(state: FilterState) -> Beliefs:
    """The hypotheses of the engine with the sequences first."""
    weights, count = state.hypotheses.log_weights, state.batch_shape.numel()
    mean, covariance = state.propagator.moments(state.hypotheses.belief)
    axes = weights.shape[:-1]
    full = weights.expand(*axes, count), mean.expand(*axes, -1, count), covariance.expand(*axes, -1, -1, count)
    return Beliefs(*(part.movedim(-1, 0) for part in full))


def marginal(beliefs: Beliefs) -> Beliefs:
    """Given the newest mode alone."""
    log_weights, mean, covariance = beliefs
    while log_weights.ndim > 2:
        shares = torch.softmax(log_weights, 1).movedim(1, -1)
        mean, covariance = m_projection(shares, mean.movedim(1, -2), covariance.movedim(1, -3))
        log_weights = torch.logsumexp(log_weights, 1)
    return Beliefs(log_weights, mean, covariance)


def where(here: Tensor, new: Beliefs, old: Beliefs) -> Beliefs:
    """Sequence by sequence, here (batch)."""
    pairs = zip(new, old, strict=True)
    return Beliefs(*(torch.where(here.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))


def at(model: SwitchingLinearGaussian, name: str, t: int) -> Tensor:
    """A parameter at step t, with a mode axis."""
    value = getattr(model, name)
    return value[t] if varies(name, value) else value


def _smoothed(
    model: SwitchingLinearGaussian, filtered: Filtered, beliefs: list[Beliefs], lengths: Tensor | None
) -> Smoothed:
    if not beliefs:
        _, _, mean, covariance, means, covariances, probabilities, *_ = filtered
        return Smoothed(mean, covariance, probabilities, means, covariances, torch.ones_like(mean))
    levels = [marginal(level.beliefs) for level in backward(model, beliefs, lengths)][::-1]
    if lengths is not None:  # after the end of a sequence its filtered law is repeated
        levels = [
            where(lengths > t, new, old) for t, (new, old) in enumerate(zip(levels, by_mode(filtered), strict=True))
        ]
    log_weights, means, covariances = (torch.stack(part, 1) for part in zip(*levels, strict=True))
    parts = torch.softmax(log_weights, -1), means, covariances
    weights, means, covariances = (part.reshape(*filtered.mean.shape[:-2], *part.shape[1:]) for part in parts)
    mean, covariance = m_projection(weights, means, covariances)
    return Smoothed(mean, covariance, weights, means, covariances, variance_ratio(filtered, covariance))


def is_exact(model: SwitchingLinearGaussian, order: int, steps: int) -> bool:
    """Whether no mode is ever collapsed: one mode, one that never changes, or an order above the modes of a path."""
    still = model.transition == torch.eye(model.modes, dtype=model.transition.dtype, device=model.transition.device)
    return model.modes == 1 or order > steps + (model.start == "belief") or holds(still)


def require_order(where: str, order: int) -> None:
    if Slots.gpb(order).after < 1:
        advice = "2 is Kim's smoother; order 1 keeps no belief of a mode to go back to."
        raise ValueError(sentence(where, "an integer ≥ 2", order, advice))


def require_linear(where: str, model: object) -> None:
    if not isinstance(model, SwitchingLinearGaussian):
        advice = "Going back needs the regression of one state on the next."
        raise TypeError(sentence(where, "a SwitchingLinearGaussian", type(model).__name__, advice))


def require_record(where: str, model: SwitchingLinearGaussian, filtered: object) -> None:
    """What a filter of this model returns."""
    if not isinstance(filtered, Filtered):
        got, advice = type(filtered).__name__, "Pass what gpb or imm returned."
        raise TypeError(sentence(where, "a Filtered record", got, advice))
    if filtered.mode_means.shape[-2:] != (model.modes, model.dim):
        expected = f"mode_means of shape (*batch, T, M={model.modes}, d={model.dim})"
        raise ValueError(sentence(where, expected, shape(filtered.mode_means), "Pass the model of the filter."))
