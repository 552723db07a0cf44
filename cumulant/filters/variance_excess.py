"""A diagnostic of approximate smoothers: the ratio of smoothed to filtered variances, at most 1 on average if exact.

    E[Var(x_t | y_1 … y_T) | y_1 … y_t] = Var(x_t | y_1 … y_t) − Var(E[x_t | y_1 … y_T] | y_1 … y_t)

so that the smoothed variance v_t of an entry of the state divided by the filtered one, u_t, is at most 1 in expectation
at every step. One step may be a surprise; over a sequence

    excess = max( Σ_t v_t / Σ_t u_t,  (1/T) Σ_t v_t/u_t )

should not exceed 1: the second term keeps a vague first step from hiding all later ones.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cumulant.checks import holds, sentence
from cumulant.filters.records import Filtered

TOLERATED = 1 + 1e-4  # more than the rounding of single precision


class SmootherWarning(RuntimeWarning):
    """An approximate smoother is less certain than its own filter, which then may be nearer the truth."""


def variance_ratio(filtered: Filtered, covariance: Tensor) -> Tensor:
    """Smoothed over filtered variance of every entry of the state, (*batch, T, d) from covariances (*batch, T, d, d).

    1 where both are rounding: of the variances before the observations, or of the means whose differences they are.
    """
    here, after = _variances(filtered.covariance), _variances(covariance)
    slack = 1e2 * torch.finfo(covariance.dtype).eps
    rounding = slack * _variances(filtered.prior_covariance) + (slack * filtered.mean).square()
    certain = torch.maximum(here, after) <= rounding.detach().amax(-2, keepdim=True)
    return torch.where(certain, 1, after / torch.where(certain, 1, here))


def variance_excess(filtered: Filtered, covariance: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The excess of every entry of the state (module docstring), (*batch, d); ``lengths`` (*batch) of the sequences.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian, kalman, smooth
    >>> eye, y = torch.eye(1, dtype=torch.float64), torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    >>> variance_excess(kalman(walk, y), smooth(walk, y).covariance)              # (2/5 + 3/5)/(1/2 + 3/5), (4/5 + 1)/2
    tensor([0.9091], dtype=torch.float64)
    """
    ratio, here, after = variance_ratio(filtered, covariance), _variances(filtered.covariance), _variances(covariance)
    steps = ratio.shape[-2]
    if not steps:
        return torch.ones_like(ratio.sum(-2))
    if lengths is None:
        lengths = torch.full(ratio.shape[:-2], steps, device=ratio.device)
    inside = (torch.arange(steps, device=ratio.device) < lengths[..., None])[..., None]
    count = inside.sum(-2)
    total_here, total_after, total = (torch.where(inside, part, 0).sum(-2) for part in (here, after, ratio))
    known = (count > 0) & (total_here > 0)
    variances = torch.where(known, total_after / torch.where(known, total_here, 1), 1)
    ratios = torch.where(count > 0, total / count.clamp_min(1), 1)
    uncertain = torch.where(inside, ratio != 1, False).any(-2)  # else all is rounding
    return torch.where(uncertain, torch.maximum(variances, ratios), 1)


def exceeds(excess: float) -> bool:
    """Whether an excess is above 1 by more than rounding, or no number."""
    return not excess <= TOLERATED


def warn_of_excess(where: str, filtered: Filtered, covariance: Tensor, lengths: Tensor | None, advice: str) -> None:
    """A `SmootherWarning` where a sequence has an excess above 1; attributed to the caller of the smoother."""
    excess = variance_excess(filtered, covariance.detach(), lengths)
    if not excess.numel():
        return
    excess = excess.reshape(-1, excess.shape[-1])
    largest = excess.amax(-1)
    fine = largest <= TOLERATED  # not so where a variance is no number
    if holds(fine):
        return
    worst = int(torch.where(fine, 0, largest).argmax())
    entry = int(excess[worst].argmax())
    got = f"{float(excess[worst, entry]):.3g} times as much for entry {entry} of the state"
    if len(excess) > 1:
        got += f" in sequence {worst}, and more in {int((~fine).sum())} of {len(excess)} sequences"
    expected = "smoothed variances at most the filtered ones, on the average over steps"
    warnings.warn(sentence(where, expected, got, advice), SmootherWarning, stacklevel=3)


def _variances(covariance: Tensor) -> Tensor:
    """Of a state that is certain a variance may be negative by rounding."""
    return covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
