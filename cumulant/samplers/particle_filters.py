"""Particle filters over whole sequences, by the name of their method."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import require_float, sentence, shape
from cumulant.filters.protocol import SwitchingModel
from cumulant.samplers import bootstrap
from cumulant.samplers import particles as rao_blackwellised
from cumulant.samplers.particles import ParticleFiltered
from cumulant.samplers.resampling import Scheme, systematic

METHODS = {"rao-blackwellised": rao_blackwellised, "bootstrap": bootstrap}


def particle_filter(
    model: SwitchingModel,
    y: Tensor,
    *,
    method: str = "rao-blackwellised",
    particles: int = 500,
    threshold: float = 0.5,
    resample: Scheme = systematic,
    generator: torch.Generator,
) -> ParticleFiltered:
    """Filter y (*batch, T, m), NaN where an entry is missing, by sampled particles.

        p(x_t, s_t | y_1 … y_t) ≈ Σ_n w_n p_n(x_t) [s_t = s_n]        p_n a belief of the model, or a point

    method     "rao-blackwellised": modes are drawn, states are beliefs of the model (`particles`)
               "bootstrap": states are drawn too, for a `SwitchingNonlinear`; nothing is linearised (`bootstrap`)
    particles  how many; "bootstrap" needs thousands

    Other arguments as in `step` of both.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian, exact
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> y = torch.tensor([[0.0], [6.0], [5.0]]).double()
    >>> filtered = particle_filter(walk, y, generator=torch.Generator().manual_seed(0))
    >>> bool((filtered.mean - exact(walk, y).mean).abs().max() < 0.05)
    True
    """
    require_float("particle_filter.y", y)
    if y.ndim < 2 or y.shape[-1] != model.observed:
        expected = f"shape (*batch, T, m={model.observed})"
        raise ValueError(sentence("particle_filter.y", expected, shape(y), "Time is the axis before the last."))
    if not y.shape[-2]:
        raise ValueError(sentence("particle_filter.y", "at least one step", shape(y), "There is nothing to filter."))
    if method not in METHODS:
        advice = "The first draws modes alone, the second states too."
        raise ValueError(sentence("particle_filter.method", " or ".join(map(repr, METHODS)), repr(method), advice))
    stepper = METHODS[method]
    state = stepper.init(model, particles, batch_shape=y.shape[:-2], generator=generator)
    records = []
    for t in range(y.shape[-2]):
        state, record = stepper.step(state, y[..., t, :], threshold=threshold, resample=resample, generator=generator)
        records.append(record)
    axis = y.ndim - 2
    return ParticleFiltered(*(torch.stack(part, dim=axis) for part in zip(*records, strict=True)))
