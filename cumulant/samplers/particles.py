"""The Rao–Blackwellised particle filter: sampled modes, everything else in closed form (S1-F1).

A particle is a mode path with its belief about x, which the model's own `predict` and `update` carry along. Each
particle weighs every mode by its likelihood before one is drawn:

    L_nj = p(y | path n, s' = j),     q_nj = P(j | s_n) L_nj / Σ_j P(j | s_n) L_nj
    weight  w_n ← w_n Σ_j P(j | s_n) L_nj,    then  s'_n ~ q_n

Records are taken over all pairs (n, j) with weight w_n q_nj, before the choice, so that the first step of a model whose
start is "prior" is exact. Where GPB keeps all recent paths and projects their past, this keeps some paths, each with
all of its past. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.filters.protocol import Propagator, SwitchingModel, draw_modes, require_batch
from cumulant.samplers.resampling import Scheme, effective_size, require_generator, systematic


@dataclass(frozen=True, eq=False)
class ParticleState:
    """Particles between two steps: modes and log weights (sequences, n), and a belief of sequences · n paths.

    Before the first step of a model whose start is "prior" no mode has been drawn yet.
    """

    propagator: Propagator
    observed: int
    batch_shape: torch.Size
    t: int
    modes: Tensor
    log_weights: Tensor
    belief: Any


class ParticleRecord(NamedTuple):
    """Filtered laws after one step, (*batch, …).

    mean                (*batch, d)     E[x_t | y_1 … y_t]
    covariance          (*batch, d, d)
    mode_probabilities  (*batch, M)     P(s_t | y_1 … y_t)
    log_likelihood      (*batch)        log p(y_t | y_1 … y_{t−1}); its sum over steps is unbiased in the exponential
    effective           (*batch)        1/Σw² before resampling
    mode_means          (*batch, M, d)  the moments of x_t given s_t too; 0 where no particle has the mode
    mode_covariances    (*batch, M, d, d)
    """

    mean: Tensor
    covariance: Tensor
    mode_probabilities: Tensor
    log_likelihood: Tensor
    effective: Tensor
    mode_means: Tensor
    mode_covariances: Tensor


class ParticleFiltered(NamedTuple):
    """The records of all steps, with a time axis after the batch axes: (*batch, T, …)."""

    mean: Tensor
    covariance: Tensor
    mode_probabilities: Tensor
    log_likelihood: Tensor
    effective: Tensor
    mode_means: Tensor
    mode_covariances: Tensor


@torch.no_grad()
def init(
    model: SwitchingModel, particles: int, *, batch_shape: Sequence[int] = (), generator: torch.Generator
) -> ParticleState:
    """Particles with modes drawn from the initial law, for every sequence of a batch."""
    if not isinstance(model, SwitchingModel):
        advice = "Build a SwitchingLinearGaussian or SwitchingConjugate."
        raise TypeError(sentence("init.model", "a switching model", type(model).__name__, advice))
    if not isinstance(particles, int) or particles < 1:
        raise ValueError(sentence("init.particles", "a number of particles ≥ 1", particles, "Hundreds are usual."))
    require_generator("init", generator)
    propagator = model.propagator()
    require_batch("init.batch_shape", propagator.batch_shape, torch.Size(batch_shape))
    propagator = propagator.repeated(particles)
    log_weights, belief = propagator.initial()
    sequences, modes = torch.Size(batch_shape).numel(), log_weights.shape[0]
    flat = log_weights.new_zeros(sequences, particles)
    drawn = torch.zeros_like(flat, dtype=torch.int64)
    if propagator.start == "belief":  # otherwise the first mode is drawn given the first observation
        probabilities = torch.softmax(log_weights, 0).mT[:, None]
        drawn = draw_modes(probabilities.expand(sequences, particles, modes), generator)
        belief = _select(belief, drawn.reshape(1, -1), modes)
    else:
        belief = type(belief)(*(leaf.expand(*leaf.shape[:-1], flat.numel()).contiguous() for leaf in belief))
    return ParticleState(propagator, model.observed, torch.Size(batch_shape), 0, drawn, flat, belief)


@torch.no_grad()
def step(
    state: ParticleState,
    y: Tensor,
    *,
    threshold: float = 0.5,
    resample: Scheme = systematic,
    generator: torch.Generator,
) -> tuple[ParticleState, ParticleRecord]:
    """Take the particles over one observation y (*batch, m), NaN where an entry is missing.

    They are resampled where the weights are worth less than ``threshold`` of their number.
    """
    _check_step(state, y, threshold)
    require_generator("step", generator)
    propagator, (sequences, n) = state.propagator, state.modes.shape
    moves = state.t > 0 or propagator.start == "belief"
    column = y.reshape(sequences, state.observed).mT.repeat_interleave(n, 1)  # (m, sequences · n)
    missing = column.isnan()
    if moves:
        rows = propagator.log_transition(state.t).expand(-1, -1, column.shape[-1])  # (from, to, sequences · n)
        log_probabilities = rows[state.modes.flatten(), :, torch.arange(column.shape[-1], device=y.device)].mT
    else:
        log_probabilities = propagator.initial().log_weights.expand(-1, column.shape[-1])
    predicted = propagator.predict(state.belief, state.t, moves=moves)
    observed = ~missing if bool(missing.any()) else None
    belief, log_likelihood = propagator.update(predicted, torch.where(missing, 0, column), observed, state.t)
    lowest = -(torch.finfo(y.dtype).max ** 0.5)
    joint = log_probabilities.clamp_min(lowest) + log_likelihood.clamp_min(lowest)  # (M, sequences · n)
    gain = torch.logsumexp(joint, 0)
    weights = state.log_weights + gain.reshape(sequences, n)
    evidence = torch.logsumexp(weights, -1) - torch.logsumexp(state.log_weights, -1)
    record = _record(propagator, belief, torch.softmax(joint, 0), weights, evidence)
    modes = draw_modes(torch.softmax(joint, 0).mT.reshape(sequences, n, -1), generator)
    belief = _select(belief, modes.reshape(1, -1), len(joint))
    modes, weights, belief = _resampled(modes, weights, belief, record.effective, threshold, resample, generator)
    state = replace(state, t=state.t + 1, modes=modes, log_weights=weights, belief=belief)
    return state, ParticleRecord(*(part.reshape(state.batch_shape + part.shape[1:]) for part in record))


def _record(propagator: Propagator, belief: Any, q: Tensor, log_weights: Tensor, evidence: Tensor) -> ParticleRecord:
    """Over all pairs of a particle and a mode; q (M, sequences · n)."""
    sequences, n = log_weights.shape
    w = torch.softmax(log_weights, -1)
    pairs = q.reshape(-1, sequences, n) * w  # (M, sequences, n)
    mean, covariance = propagator.moments(belief)
    modes, d = len(q), mean.shape[-2]
    mean = mean.expand(modes, d, sequences * n).reshape(modes, d, sequences, n)
    covariance = covariance.expand(modes, d, d, sequences * n).reshape(modes, d, d, sequences, n)
    shares = of_mode(pairs)
    by_mode = torch.einsum("jbn,jdbn->jdb", shares, mean)
    apart = mean - by_mode[..., None]
    spread = covariance + apart[:, :, None] * apart[:, None]
    wide = shares[:, None, None]
    # a pair without weight may have an infinite variance
    spread = (wide * torch.where(wide > 0, spread, 0)).sum(-1)  # (M, d, d, sequences)
    return record_of(pairs.sum(-1).mT, by_mode.movedim(-1, 0), spread.movedim(-1, 0), log_weights, evidence)


def of_mode(weights: Tensor) -> Tensor:
    """The weights (M, sequences, n) of particles within each mode, with sum 1, or 0 where no particle has the mode."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1), 0)


def record_of(
    probabilities: Tensor, means: Tensor, covariances: Tensor, log_weights: Tensor, evidence: Tensor
) -> ParticleRecord:
    """From probabilities (sequences, M) of the modes and the moments of x given each."""
    mean = (probabilities[..., None] * means).sum(-2)
    apart = means - mean[..., None, :]
    wide = probabilities[..., None, None]
    covariance = (wide * (torch.where(wide > 0, covariances, 0) + apart[..., None] * apart[..., None, :])).sum(-3)
    effective = effective_size(log_weights)
    return ParticleRecord(mean, covariance, probabilities, evidence, effective, means, covariances)


def _select(belief: Any, mode: Tensor, modes: int) -> Any:
    """The belief of one mode for every path, its hypothesis axis kept with size 1; mode (1, paths)."""

    def pick(leaf: Tensor) -> Tensor:
        whole = leaf.expand(modes, *leaf.shape[1:-1], mode.shape[-1])
        index = mode.reshape(1, *[1] * (leaf.ndim - 2), -1)
        return torch.take_along_dim(whole, index.expand(1, *whole.shape[1:]), 0)

    return type(belief)(*(pick(leaf) for leaf in belief))


def _resampled(
    modes: Tensor,
    log_weights: Tensor,
    belief: Any,
    effective: Tensor,
    threshold: float,
    resample: Scheme,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Any]:
    sequences, n = modes.shape
    resample_row = (effective < threshold * n)[:, None]
    log_weights = log_weights - torch.logsumexp(log_weights, -1, keepdim=True)
    if not bool(resample_row.any()):
        return modes, log_weights, belief
    stay = torch.arange(n, device=modes.device).expand(sequences, n)
    ancestors = torch.where(resample_row, resample(log_weights, generator=generator), stay)
    flat = (ancestors + n * torch.arange(sequences, device=modes.device)[:, None]).flatten()
    belief = type(belief)(*(leaf[..., flat] for leaf in belief))
    return modes.gather(-1, ancestors), torch.where(resample_row, 0, log_weights), belief


def _check_step(state: ParticleState, y: Tensor, threshold: float) -> None:
    require_alike("step.y", require_float("step.y", y), "the model", state.propagator.like)
    expected = (*state.batch_shape, state.observed)
    if tuple(y.shape) != expected:
        got, advice = shape(y), "One observation for each sequence."
        raise ValueError(sentence("step.y", f"shape {expected}", got, advice))
    if not 0 <= threshold <= 1:
        raise ValueError(sentence("step.threshold", "a part of the particles in [0, 1]", threshold, "Half is usual."))
