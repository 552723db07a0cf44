"""Forecasts: the predictive laws of the steps after the last observation of a filter.

Without observations the means and covariances given each mode follow equations of their own,

    w'_j = Σ_i w_i P(j | i),    m'_j = F_j m̄_j + b_j,    P'_j = F_j P̄_j F_jᵀ + Q_j      m̄_j, P̄_j mixed by w_i P(j | i)

which is a step of the engine without an observation. The collapse keeps means and covariances, so that the forecast of
a linear model has exactly those of the mixture over all mode paths to come; it adds no approximation to that of the
filter. Modes that are functions take means and covariances on by their rules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.linear_gaussian import SwitchingLinearGaussian
from cumulant.filters.nonlinear import SwitchingNonlinear
from cumulant.filters.packed_normal import Normal, pack
from cumulant.filters.projection import m_projection
from cumulant.filters.records import Filtered, Hypotheses, StepRecord
from cumulant.filters.smoother import require_record
from cumulant.filters.switching import FilterState, Slots, init, step

NormalModel = SwitchingLinearGaussian | SwitchingNonlinear


class Forecast(NamedTuple):
    """The laws of the next steps k = 1, 2, … after the last observation; d is the size of the state, m that of y.

    mean                    (*batch, steps, d)       E[x_{T+k} | y_1 … y_T]
    covariance              (*batch, steps, d, d)
    mode_probabilities      (*batch, steps, M)       P(s_{T+k} | y_1 … y_T)
    observation_mean        (*batch, steps, m)       of y_{T+k}
    observation_covariance  (*batch, steps, m, m)
    """

    mean: Tensor
    covariance: Tensor
    mode_probabilities: Tensor
    observation_mean: Tensor
    observation_covariance: Tensor


def forecast(model: NormalModel, filtered: Filtered, steps: int, *, order: int = 2) -> Forecast:
    """The next steps after those of a filter, p(x_{T+k} | y_1 … y_T), observations missing (module docstring).

    filtered  what `gpb`, `imm`, `kalman` or `exact` returned for this model; with a mask, each sequence goes on from
              its own end
    steps     how many; a model with parameters that vary in time must have them for T + steps
    order     1 goes on as `gpb` of order 1 does, which drops how the state depends on the mode; all others agree

    Differentiable in the model and in the record.

    >>> import torch
    >>> from cumulant.filters import kalman
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=0 * eye[0], initial_covariance=eye)
    >>> filtered = kalman(walk, torch.tensor([[2.0]], dtype=torch.float64))              # N(1, ½) after one observation
    >>> ahead = forecast(walk, filtered, 2)
    >>> [part.flatten().tolist() for part in (ahead.mean, ahead.covariance, ahead.observation_covariance)]
    [[1.0, 1.0], [1.5, 2.5], [2.5, 3.5]]
    """
    if not isinstance(model, SwitchingLinearGaussian | SwitchingNonlinear):
        expected, advice = "a SwitchingLinearGaussian or SwitchingNonlinear", "Beliefs must be normal."
        raise TypeError(sentence("forecast.model", expected, type(model).__name__, advice))
    require_record("forecast.filtered", model, filtered)  # pyright: ignore[reportArgumentType]
    done = filtered.log_likelihood.shape[-1]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(sentence("forecast.steps", "an integer ≥ 0", steps, "It counts time steps."))
    if model.steps is not None and done + steps > model.steps:
        got, advice = f"{done} + {steps}", "Give parameters for the steps to come."
        raise ValueError(sentence("forecast.steps", f"at most T={model.steps} filtered and future steps", got, advice))
    state, records = _resume(model, filtered, Slots.gpb(min(order, 2))), []
    missing = filtered.mean.new_full((*state.batch_shape, model.observed), torch.nan)
    for _ in range(steps):
        state, record = step(state, missing)
        records.append(record)
    laws = [_law(state, record, done + k) for k, record in enumerate(records)]
    if not laws:
        return _no_steps(model, filtered)
    return Forecast(*(torch.stack(part, len(state.batch_shape)) for part in zip(*laws, strict=True)))


def _resume(model: NormalModel, filtered: Filtered, slots: Slots) -> FilterState:
    """A filter after the last step of a record."""
    state = init(model, slots=slots, batch_shape=filtered.log_likelihood.shape[:-1])
    done = filtered.log_likelihood.shape[-1]
    if not done:
        return state
    last = filtered.mode_log_probabilities, filtered.mode_means, filtered.mode_covariances
    axis, count = len(state.batch_shape), state.batch_shape.numel()
    weights, mean, covariance = (part.select(axis, -1).reshape(count, *part.shape[axis + 1 :]) for part in last)
    belief = Normal(pack(mean, covariance).movedim(0, -1))  # (M, moments, batch)
    hypotheses = Hypotheses(weights.mT, belief)
    if slots.after == 0:
        hypotheses = Hypotheses(weights.mT, state.propagator.collapse(hypotheses.log_weights.exp(), belief, 0))
    return state._replace(t=done, hypotheses=hypotheses, axes=min(slots.after, 1))


def _law(state: FilterState, record: StepRecord, t: int) -> Forecast:
    batch, count = state.batch_shape, state.batch_shape.numel()
    parts = record.mode_means, record.mode_covariances
    law = pack(*(part.reshape(count, *part.shape[len(batch) :]) for part in parts))
    image = state.propagator.observation_moments(Normal(law.movedim(0, -1)), t)
    mean, covariance = (part.movedim(-1, 0).reshape(*batch, *part.shape[:-1]) for part in image)
    observation = m_projection(record.mode_probabilities, mean, covariance)
    return Forecast(record.mean, record.covariance, record.mode_probabilities, *observation)


def _no_steps(model: NormalModel, filtered: Filtered) -> Forecast:
    batch, m = filtered.log_likelihood.shape[:-1], model.observed
    sizes = (model.dim,), (model.dim, model.dim), (model.modes,), (m,), (m, m)
    return Forecast(*(filtered.mean.new_zeros(*batch, 0, *size) for size in sizes))
