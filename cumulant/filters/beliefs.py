"""Normal beliefs of every hypothesis with the sequences first, the layout of smoothing: matrices are the last axes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.filters.projection import m_projection
from cumulant.filters.protocol import Propagator
from cumulant.filters.records import Filtered, Hypotheses


class Beliefs(NamedTuple):
    """Hypotheses of one step, oldest mode first: log_weights (batch, *modes), mean (…, d), covariance (…, d, d)."""

    log_weights: Tensor
    mean: Tensor
    covariance: Tensor


def sequences_first(propagator: Propagator, hypotheses: Hypotheses, count: int) -> Beliefs:
    """The hypotheses of the engine, in number ``count`` of sequences."""
    weights = hypotheses.log_weights
    mean, covariance = propagator.moments(hypotheses.belief)
    axes = weights.shape[:-1]
    full = weights.expand(*axes, count), mean.expand(*axes, -1, count), covariance.expand(*axes, -1, -1, count)
    return Beliefs(*(part.movedim(-1, 0) for part in full))


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


def marginal(beliefs: Beliefs) -> Beliefs:
    """Given the newest mode alone."""
    log_weights, mean, covariance = beliefs
    while log_weights.ndim > 2:
        shares = torch.softmax(log_weights, 1).movedim(1, -1)
        mean, covariance = m_projection(shares, mean.movedim(1, -2), covariance.movedim(1, -3))
        log_weights = torch.logsumexp(log_weights, 1)
    return Beliefs(log_weights, mean, covariance)


def normalized(beliefs: Beliefs) -> Beliefs:
    """With weights of sum 1 in every sequence."""
    total = torch.logsumexp(beliefs.log_weights.flatten(1), 1)
    return beliefs._replace(log_weights=beliefs.log_weights - total.reshape(-1, *[1] * (beliefs.log_weights.ndim - 1)))


def where(here: Tensor, new: Any, old: Any) -> Any:
    """Sequence by sequence, here (batch), of records of tensors (batch, …)."""
    pairs = zip(new, old, strict=True)
    return type(new)(*(torch.where(here.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))
