"""Smoothing: the laws of every step given all observations, by passes over the beliefs of a filter.

    propagation   forward and backward passes that merge modes by what past and future say of them; the default
    correction    expectation correction (Barber 2006); fails with little process noise
    kim           Kim's smoother (1994); fails with little process noise
    exact         all M^T mode paths, for short sequences

Propagation is expectation propagation for switching linear dynamics (Heskes and Zoeter 2002; Zoeter and Heskes 2005)
with factors kept positive semidefinite. One sweep is a two-filter smoother like that of Helmick, Blair and Hoffman
(1995), its backward mixing done by the M-projection. `cumulant.filters.passes` has the equations, docs/filters.md what
was measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, sentence, shape
from cumulant.filters.beliefs import Beliefs, by_mode, marginal, where
from cumulant.filters.linear_gaussian import SwitchingLinearGaussian
from cumulant.filters.linear_laws import LinearLaw
from cumulant.filters.parameters import at_step, own_batch
from cumulant.filters.passes import FilterStep, Passes, backward, levels
from cumulant.filters.projection import m_projection
from cumulant.filters.protocol import Propagator, SwitchingModel, log_probabilities
from cumulant.filters.records import Filtered
from cumulant.filters.switching import LIMIT, Slots, gpb
from cumulant.filters.variance_excess import variance_ratio, warn_of_excess

METHODS = ("propagation", "correction", "kim", "exact")


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


def smooth(
    model: SwitchingModel,
    y: Tensor,
    *,
    order: int = 2,
    method: str = "propagation",
    sweeps: int = 3,
    mask: Tensor | None = None,
) -> Smoothed:
    """Smooth sequences: forward and backward passes over hypotheses, by one of four methods (module docstring).

        p(x_t, s_t | y_1 … y_T) ∝ p(x_t, s_t | y_1 … y_t) p(y_{t+1} … y_T | x_t, s_t)

    model   linear-Gaussian, or any whose propagator has a `transition_law`
    y       (*batch, T, m), NaN where an entry is missing
    order   k ≥ 2: hypotheses are the last k−1 modes, at M^k regressions a step
    method  "propagation", "correction" (expectation correction), "kim", or "exact" (all mode paths; order is not used)
    sweeps  of propagation: how often to go forward and back; from the second on, modes are merged in hindsight
    mask    (*batch, T) Boolean, True up to the end of each sequence; after it a sequence repeats its last belief

    All are exact for one mode, for a mode that never changes, and for k > T (T+1 where the model starts from a belief).
    Else they are approximate; docs/filters.md has the errors of all of them measured. Those of Kim's smoother and of
    expectation correction can be many times the filter's with little process noise, where an error of the mode is
    carried far back. The stated covariances grow with the errors: a `SmootherWarning` is given where the smoothed
    variances of an entry of the state exceed the filtered ones on the average over a sequence (`variance_excess`), and
    ``variance_ratio`` has every step.

    A singular predicted covariance is no obstacle; where there is none, the answer is differentiable in model and y.

    >>> import torch
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    >>> smooth(walk, torch.tensor([[0.0], [3.0]], dtype=torch.float64)).mean[:, 0]
    tensor([1., 2.], dtype=torch.float64)
    """
    filtered, smoothed = filter_and_smooth(model, y, order=order, method=method, sweeps=sweeps, mask=mask)
    if method != "exact" and not is_exact(model, order, y.shape[-2]):
        lengths = None if mask is None else mask.sum(-1)
        warn_of_excess(f"smooth.method={method}", filtered, smoothed.covariance, lengths, advice_for(method))
    return smoothed


def filter_and_smooth(
    model: SwitchingModel,
    y: Tensor,
    *,
    order: int = 2,
    method: str = "propagation",
    sweeps: int = 3,
    mask: Tensor | None = None,
) -> tuple[Filtered, Smoothed]:
    """The filter `gpb` and the smoother of an order, without a warning; arguments as in `smooth`."""
    require_transition_law("smooth.model", model)
    passes = choose_passes("smooth", model, y, order, method, sweeps)
    filtered = gpb(model, y, order=passes.order, mask=mask)
    lengths = None if mask is None else mask.sum(-1).flatten()
    found = levels(model, y, passes, lengths) if y.shape[-2] else ()
    return filtered, _smoothed(filtered, [marginal(level.beliefs) for level in found], lengths)


def kim(model: SwitchingLinearGaussian, filtered: Filtered, *, mask: Tensor | None = None) -> Smoothed:
    """Kim's backward pass over the record of a filter: `gpb` of order 2, or `imm`, which is cheaper.

        p(z_t = i | y_1 … y_T) = Σ_j p(z_t = i | z_{t+1} = j, y_1 … y_t) p(z_{t+1} = j | y_1 … y_T)

    As coarse as `smooth` of order 2 with method "kim", with the same `SmootherWarning`; `smooth` has better ones.

    >>> import torch
    >>> from cumulant.filters import imm
    >>> eye, y = torch.eye(1, dtype=torch.float64), torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    >>> kim(walk, imm(walk, y)).mean.equal(smooth(walk, y, method="kim").mean)
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
    steps = [FilterStep(beliefs, *_transition(model, t)) for t, beliefs in enumerate(by_mode(filtered))]
    found = [marginal(level.beliefs) for level in backward(steps, lengths)] if steps else []
    smoothed = _smoothed(filtered, found, lengths)
    if not is_exact(model, 2, filtered.log_likelihood.shape[-1]):
        lengths = None if mask is None else mask.sum(-1)
        warn_of_excess("kim", filtered, smoothed.covariance, lengths, advice_for("kim"))
    return smoothed


def at(model: SwitchingLinearGaussian, name: str, t: int) -> Tensor:
    """A parameter at step t, with a mode axis."""
    return at_step(name, getattr(model, name), t)


def _transition(model: SwitchingLinearGaussian, t: int) -> tuple[LinearLaw, Tensor]:
    """The law of the state and the log probabilities of the mode at step t, for every sequence."""

    def sequences_first(name: str) -> Tensor:
        value, batch = at(model, name, t), own_batch(name, getattr(model, name))
        return value.flatten(0, len(batch) - 1) if batch else value[None]

    law = (sequences_first(name).unsqueeze(1) for name in ("dynamics", "state_offset", "process_noise"))
    return LinearLaw(*law), log_probabilities(sequences_first("transition"))


def _smoothed(filtered: Filtered, last_first: list[Beliefs], lengths: Tensor | None) -> Smoothed:
    """The record of beliefs by mode, one entry a step, the last step first."""
    if not last_first:
        _, _, mean, covariance, means, covariances, probabilities, *_ = filtered
        return Smoothed(mean, covariance, probabilities, means, covariances, torch.ones_like(mean))
    beliefs = last_first[::-1]
    if lengths is not None:  # after the end of a sequence its filtered law is repeated
        pairs = enumerate(zip(beliefs, by_mode(filtered), strict=True))
        beliefs = [where(lengths > t, new, old) for t, (new, old) in pairs]
    log_weights, means, covariances = (torch.stack(part, 1) for part in zip(*beliefs, strict=True))
    parts = torch.softmax(log_weights, -1), means, covariances
    weights, means, covariances = (part.reshape(*filtered.mean.shape[:-2], *part.shape[1:]) for part in parts)
    mean, covariance = m_projection(weights, means, covariances)
    return Smoothed(mean, covariance, weights, means, covariances, variance_ratio(filtered, covariance))


def is_exact(model: SwitchingModel, order: int, steps: int) -> bool:
    """Whether no mode is ever collapsed: one mode, one that never changes, or an order above the modes of a path."""
    propagator = model.propagator()
    if model.modes == 1 or order > steps + (propagator.start == "belief"):
        return True
    moves = range(0 if propagator.start == "belief" else 1, steps)
    if isinstance(model, SwitchingLinearGaussian) and model.transition.ndim == 2:
        moves = moves[:1]
    eye = torch.eye(model.modes, dtype=propagator.like.dtype, device=propagator.like.device)[..., None]
    return all(holds(propagator.log_transition(t).exp() == eye) for t in moves)


def require_order(where: str, order: int) -> None:
    if Slots.gpb(order).after < 1:
        advice = "2 is the default; order 1 keeps no belief of a mode to go back to."
        raise ValueError(sentence(where, "an integer ≥ 2", order, advice))


def choose_passes(where: str, model: SwitchingModel, y: Tensor, order: int, method: str, sweeps: int) -> Passes:
    """The passes that arguments of `smooth` ask for."""
    require_order(f"{where}.order", order)
    if method not in METHODS:
        raise ValueError(sentence(f"{where}.method", f"one of {', '.join(METHODS)}", repr(method), "Choose one."))
    if isinstance(sweeps, bool) or not isinstance(sweeps, int) or sweeps < 1:
        raise ValueError(sentence(f"{where}.sweeps", "an integer ≥ 1", sweeps, "3 is the default."))
    if not isinstance(y, Tensor) or y.ndim < 2:
        return Passes(order, method, sweeps)  # the filter refuses y
    if method == "exact":
        order = max(2, y.shape[-2] + 1 + (model.propagator().start == "belief"))
        if model.modes ** (order - 1) > LIMIT:
            expected, got = f"at most {LIMIT} mode paths", f"{model.modes}^{order - 1}"
            advice = 'Use a shorter sequence, or method="propagation".'
            raise ValueError(sentence(f"{where}.method=exact", expected, got, advice))
    once = method == "exact" or is_exact(model, order, y.shape[-2])
    return Passes(order, "propagation" if method == "exact" else method, 1 if once else sweeps)


def require_transition_law(where: str, model: object) -> None:
    if not isinstance(model, SwitchingModel):
        advice = "Build a SwitchingLinearGaussian."
        raise TypeError(sentence(where, "a switching model", type(model).__name__, advice))
    if type(model.propagator()).transition_law is Propagator.transition_law:
        advice = "Going back needs the regression of one state on the next: Propagator.transition_law."
        raise TypeError(sentence(where, "a model with normal beliefs", type(model).__name__, advice))


def advice_for(method: str) -> str:
    """What to do where a smoother is less certain than its filter."""
    better = "a higher order or more sweeps" if method == "propagation" else 'method="propagation"'
    return f"The filter may be nearer the truth: use it or {better}, and see Smoothed.variance_ratio."


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
