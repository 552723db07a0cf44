"""The plain particle filter: modes and states are both drawn, observations weigh them.

    s'_n ~ P(· | s_n),    x'_n ~ p(· | x_n, s'_n),    w_n ← w_n p(y | x'_n, s'_n)

Nothing is linearised and no law is assumed for x, so that with many particles it is the reference for every filter of a
`SwitchingNonlinear`. It needs far more particles than the Rao–Blackwellised one of `particles`, which draws modes alone
and takes the state by the rules of the model. Entries of the state that are angles are averaged as numbers.
Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.filters.nonlinear import SwitchingNonlinear
from cumulant.filters.nonlinear_propagator import NonlinearGaussian
from cumulant.filters.protocol import draw_modes, require_batch
from cumulant.samplers.particles import ParticleRecord, of_mode, record_of
from cumulant.samplers.resampling import Scheme, require_generator, systematic


@dataclass(frozen=True, eq=False)
class BootstrapState:
    """Particles between two steps: modes and log weights (sequences, n), states (n, sequences, d)."""

    model: SwitchingNonlinear
    propagator: NonlinearGaussian
    batch_shape: torch.Size
    t: int
    modes: Tensor
    log_weights: Tensor
    x: Tensor


@torch.no_grad()
def init(
    model: SwitchingNonlinear, particles: int, *, batch_shape: Sequence[int] = (), generator: torch.Generator
) -> BootstrapState:
    """Particles drawn from the initial law, for every sequence of a batch."""
    if not isinstance(model, SwitchingNonlinear):
        advice = 'Use method="rao-blackwellised", which is better where states have closed forms.'
        raise TypeError(sentence("init.model", "a SwitchingNonlinear", type(model).__name__, advice))
    if not isinstance(particles, int) or particles < 1:
        raise ValueError(sentence("init.particles", "a number of particles ≥ 1", particles, "Thousands are usual."))
    require_generator("init", generator)
    sequences = torch.Size(batch_shape).numel()
    modes = draw_modes(model.initial_modes.expand(sequences, particles, -1), generator)
    require_batch("init.batch_shape", model.batch_shape, torch.Size(batch_shape))
    x = model.draw_initial(modes, generator).transpose(0, 1)
    log_weights = x.new_zeros(sequences, particles)
    return BootstrapState(model, model.propagator(), torch.Size(batch_shape), 0, modes, log_weights, x)


@torch.no_grad()
def step(
    state: BootstrapState,
    y: Tensor,
    *,
    threshold: float = 0.5,
    resample: Scheme = systematic,
    generator: torch.Generator,
) -> tuple[BootstrapState, ParticleRecord]:
    """Take the particles over one observation y (*batch, m), NaN where an entry is missing.

    They are resampled where the weights are worth less than ``threshold`` of their number.
    """
    _check_step(state, y, threshold)
    require_generator("step", generator)
    model, sequences = state.model, len(state.modes)
    u = state.propagator.input_at(state.t, sequences)
    modes, x = state.modes, state.x
    if state.t > 0 or model.start == "belief":
        modes = model.draw_modes(modes, state.t, generator)
        x = model.draw("sample_next", modes.mT, x, u, state.t, generator)
        x = x.movedim(-1, 0).contiguous().movedim(0, -1)  # entries one after the other, so that functions run along n
    log_likelihood = _log_likelihood(model, modes, x, y.reshape(sequences, -1), u, state.t)
    weights = state.log_weights + log_likelihood
    evidence = torch.logsumexp(weights, -1) - torch.logsumexp(state.log_weights, -1)
    record = _record(model, modes, x, weights, evidence)
    modes, weights, x = _resampled(modes, weights, x, record.effective, threshold, resample, generator)
    state = replace(state, t=state.t + 1, modes=modes, log_weights=weights, x=x)
    return state, ParticleRecord(*(part.reshape(state.batch_shape + part.shape[1:]) for part in record))


def _log_likelihood(model: SwitchingNonlinear, modes: Tensor, x: Tensor, y: Tensor, u: Any, t: int) -> Tensor:
    """log p(y | x, s) (sequences, n)."""
    missing = y.isnan()
    observed = ~missing.expand(*x.shape[:-1], -1) if bool(missing.any()) else None
    y = torch.where(missing, 0, y).expand(*x.shape[:-1], -1)
    total = model.by_modes("log_likelihood", modes.mT, t, lambda mode: mode.log_likelihood(x, y, observed, u))
    return total.mT.clamp_min(-(torch.finfo(y.dtype).max ** 0.5))


def _record(model: SwitchingNonlinear, modes: Tensor, x: Tensor, log_weights: Tensor, evidence: Tensor):
    w = torch.softmax(log_weights, -1)
    weights = torch.stack([torch.where(modes == k, w, 0) for k in range(model.modes)])  # (M, sequences, n)
    means, covariances, points = [], [], x.permute(1, 2, 0)  # (sequences, d, n)
    for share in of_mode(weights):
        means.append((points @ share[..., None])[..., 0])
        apart = points - means[-1][..., None]
        covariances.append((apart * share[:, None]) @ apart.mT)
    laws = torch.stack(means, 1), torch.stack(covariances, 1)
    return record_of(weights.sum(-1).mT, *laws, log_weights, evidence)


def _resampled(
    modes: Tensor,
    log_weights: Tensor,
    x: Tensor,
    effective: Tensor,
    threshold: float,
    resample: Scheme,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences, n = modes.shape
    resample_row = (effective < threshold * n)[:, None]
    log_weights = log_weights - torch.logsumexp(log_weights, -1, keepdim=True)
    if not bool(resample_row.any()):
        return modes, log_weights, x
    stay = torch.arange(n, device=modes.device).expand(sequences, n)
    ancestors = torch.where(resample_row, resample(log_weights, generator=generator), stay)
    x = torch.take_along_dim(x, ancestors.mT[..., None], 0)
    return modes.gather(-1, ancestors), torch.where(resample_row, 0, log_weights), x


def _check_step(state: BootstrapState, y: Tensor, threshold: float) -> None:
    require_alike("step.y", require_float("step.y", y), "the model", state.x)
    expected = (*state.batch_shape, state.model.observed)
    if tuple(y.shape) != expected:
        raise ValueError(sentence("step.y", f"shape {expected}", shape(y), "One observation for each sequence."))
    if not 0 <= threshold <= 1:
        raise ValueError(sentence("step.threshold", "a part of the particles in [0, 1]", threshold, "Half is usual."))
