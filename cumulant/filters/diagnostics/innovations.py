"""What each observation was against what was predicted of it: normalised innovations, NIS, and a gate for outliers.

Before y_t comes, a switching filter predicts a mixture of normal laws, one for each hypothesis. Under the right model
the transform of Rosenblatt

    u_i = F(y_i | y_1 … y_{i−1}, past),    z_i = Φ⁻¹(u_i)

with F the distribution function of that mixture, makes independent standard normal numbers z of all entries of all
rows, however many modes there are: the *normalised innovations*, named ``scores`` in code. With one mode z is the
innovation times the inverse Cholesky factor of its covariance. So NIS is defined here as Σ_i z_i² over the entries of
a row: a χ² variable with as many degrees of freedom as entries were measured, where the moment-matched νᵀS⁻¹ν of a
mixture would only have the right mean.

z depends on the order of the entries. To say which entry is at fault each has a number of its own besides, given the
past alone: w_i = Φ⁻¹(F(y_i | past)). The w of one entry are independent standard normal numbers too, from row to row;
those of one row are not independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.diagnostics.chi_square import chi_square_quantile
from cumulant.filters.protocol import SwitchingModel
from cumulant.filters.records import Hypotheses, normalize
from cumulant.filters.switching import IMM, Prediction, Slots, advance, init, predict

FAR = -30.0  # log of a tail beyond which its quantile is found by Newton's method
NEWTON = 6


class Innovations(NamedTuple):
    """Normalised innovations of the observations of a filter.

    scores            (*batch, T, m)  z, standard normal under the right model; NaN where nothing was measured
    nis               (*batch, T)     Σ z² of a row
    measured          (*batch, T)     how many entries of the row were measured: the degrees of freedom of nis
    mode_predictions  (*batch, T, M)  P(s_t | y_1 … y_{t−1})
    mode_probabilities (*batch, T, M) P(s_t | y_1 … y_t)
    observations      (*batch, T, m)  y with rejected entries as NaN: what was used
    rejected          (*batch, T, m)  True where the gate rejected an entry
    marginal          (*batch, T, m)  w, of each entry by itself, rejected ones too; None stands for scores
    """

    scores: Tensor
    nis: Tensor
    measured: Tensor
    mode_predictions: Tensor
    mode_probabilities: Tensor
    observations: Tensor
    rejected: Tensor
    marginal: Tensor | None = None


def innovations(
    model: SwitchingModel,
    y: Tensor,
    *,
    slots: Slots = IMM,
    gate: float | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Innovations:
    """Run a filter and score every observation before it is used:  NIS_t = Σ_i z_i²,  z_i = Φ⁻¹(F(y_i | y_{<i}, past)).

    y       (*batch, T, m), NaN where an entry is missing
    slots   `IMM`, or `Slots.gpb(k)`
    gate    a probability such as 0.999: a group of entries whose Σ z² exceeds this quantile of its χ² is treated as
            missing, and so never moves the estimate; None uses everything
    groups  indices of entries that are accepted or rejected together, those of a sensor; all of them if None

    Of models with normal observations under each hypothesis. Without derivatives.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian
    >>> eye, zero = torch.eye(1).double(), torch.zeros(1).double()
    >>> still = SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=zero, initial_covariance=3 * eye)
    >>> found = innovations(still, torch.tensor([[2.0], [1.5], [40.0]]).double(), gate=0.999)
    >>> found.nis, found.rejected[:, 0]                                             # (2/√4)², 0², and an outlier
    (tensor([1.0000, 0.0000, 0.0000], dtype=torch.float64), tensor([False, False,  True]))
    """
    state = init(model, slots=slots, batch_shape=y.shape[:-2])
    steps, m = y.shape[-2:]
    rows = y.reshape(-1, steps, m).permute(1, 2, 0)  # (T, m, batch)
    groups = [range(m)] if groups is None else groups
    if gate is not None and not 0 < gate < 1:
        raise ValueError(sentence("innovations.gate", "a probability between 0 and 1", gate, "0.999, say."))
    limits = None if gate is None else torch.tensor([chi_square_quantile(gate, n) for n in range(1, m + 1)])
    records = []
    with torch.inference_mode():
        for row in rows:
            prediction = predict(state)
            law = _observed_law(state, prediction, row.shape[-1])
            rejected = torch.zeros_like(row, dtype=torch.bool)
            if limits is not None:
                rejected = _reject(law, row, groups, limits, state.propagator.angles)
            used = torch.where(rejected, torch.nan, row)
            z = _scores(law, used, state.propagator.angles)
            own = _marginal_scores(law, row, state.propagator.angles)
            before = _newest(prediction.prior, prediction.axes)
            state, beliefs = advance(state, used.nan_to_num(0.0), ~used.isnan(), prediction)
            after = beliefs.posterior.log_weights.exp()
            records.append((z, before.expand_as(after), after, used, rejected, own))
    parts = [torch.stack(part).movedim(-1, 0).reshape(*y.shape[:-2], steps, -1) for part in zip(*records, strict=True)]
    z, before, after, used, rejected, own = (part.clone() for part in parts)
    return Innovations(z, z.square().nansum(-1), (~z.isnan()).sum(-1), before, after, used, rejected, own)


class ObservedLaw(NamedTuple):
    """The mixture of normal laws of y: log_weights (K, batch), mean (K, m, batch), covariance (K, m, m, batch)."""

    log_weights: Tensor
    mean: Tensor
    covariance: Tensor


def _observed_law(state, prediction: Prediction, batch: int) -> ObservedLaw:
    mean, covariance = state.propagator.observation_moments(state.propagator.state(prediction.predicted), state.t)
    log_weights = prediction.prior.log_weights
    hypotheses = log_weights.shape[:-1]
    mean = mean.expand(*hypotheses, -1, batch).reshape(-1, mean.shape[-2], batch)
    covariance = covariance.expand(*hypotheses, -1, -1, batch).reshape(len(mean), *covariance.shape[-3:-1], batch)
    return ObservedLaw(log_weights.expand(*hypotheses, batch).reshape(-1, batch), mean, covariance)


def _newest(prior: Hypotheses, axes: int) -> Tensor:
    """Probabilities (M, batch) of the newest mode."""
    weights = prior.log_weights
    weights = weights.flatten(0, -3) if weights.ndim > 2 else weights[None]
    total = normalize(weights).log_total if len(weights) > 1 else weights[0]
    return normalize(total).weights


def _reject(law: ObservedLaw, row: Tensor, groups: Sequence[Sequence[int]], limits: Tensor, angles) -> Tensor:
    rejected = torch.zeros_like(row, dtype=torch.bool)
    for group in groups:
        inside = torch.zeros(len(row), 1, dtype=torch.bool)
        inside[list(group)] = True
        z = _scores(law, torch.where(inside, row, torch.nan), angles)
        count = (~z.isnan()).sum(0)
        beyond = z.square().nansum(0) > limits.to(row.dtype)[count.clamp_min(1) - 1]
        rejected |= inside & ~row.isnan() & beyond
    return rejected


def _scores(law: ObservedLaw, row: Tensor, angles: tuple[int, ...]) -> Tensor:
    """z (m, batch) of y (m, batch), NaN where that is."""
    missing = row.isnan()
    unit = law.covariance.diagonal(dim1=-3, dim2=-2).mT.sqrt()  # (K, m, batch)
    present = ~missing.T[:, :, None] & ~missing.T[:, None, :]  # (batch, m, m)
    correlation = (law.covariance / unit[:, :, None] / unit[:, None]).permute(0, 3, 1, 2)
    eye = torch.eye(len(row), dtype=row.dtype)
    factor = torch.linalg.cholesky_ex(torch.where(present, correlation, eye))[0]  # (K, batch, m, m)
    values = torch.where(missing, 0, _apart(law, row, angles) / unit).transpose(-2, -1)[..., None]
    e = torch.linalg.solve_triangular(factor, values, upper=False)[..., 0]  # (K, batch, m)
    spread = factor.diagonal(dim1=-2, dim2=-1).log() + torch.where(missing, 0, unit.log()).transpose(-2, -1)
    density = -e.square() / 2 - spread
    weights = law.log_weights[..., None] + density.cumsum(-1) - density  # given the entries before
    return torch.where(missing, torch.nan, _mixture_score(weights, e).T)


def _marginal_scores(law: ObservedLaw, row: Tensor, angles: tuple[int, ...]) -> Tensor:
    """w (m, batch) of y (m, batch), each entry by itself, NaN where that is."""
    unit = law.covariance.diagonal(dim1=-3, dim2=-2).mT.sqrt()  # (K, m, batch)
    e = torch.where(row.isnan(), 0, _apart(law, row, angles) / unit)
    return torch.where(row.isnan(), torch.nan, _mixture_score(law.log_weights[:, None].expand_as(e), e))


def _apart(law: ObservedLaw, row: Tensor, angles: tuple[int, ...]) -> Tensor:
    """y less its mean (K, m, batch), angles by the shorter way."""
    apart = row - law.mean
    if not angles:
        return apart
    where = torch.zeros(len(row), 1, dtype=torch.bool)
    where[list(angles)] = True
    return torch.where(where, torch.remainder(apart + pi, 2 * pi) - pi, apart)


def _mixture_score(log_weights: Tensor, e: Tensor) -> Tensor:
    """Φ⁻¹ of the mixture over the first axis of Φ(e), from whichever tail is smaller."""
    weights = log_weights - torch.logsumexp(log_weights, 0)
    below = torch.logsumexp(weights + torch.special.log_ndtr(e), 0)
    above = torch.logsumexp(weights + torch.special.log_ndtr(-e), 0)
    return torch.where(below < above, -_upper_quantile(below), _upper_quantile(above))


def _upper_quantile(log_tail: Tensor) -> Tensor:
    """a with log P(N(0, 1) > a) = log_tail, for tails of at most a half and of any size.

    >>> _upper_quantile(torch.special.log_ndtr(torch.tensor([-1.0, -40.0], dtype=torch.float64)))
    tensor([ 1.0000, 40.0000], dtype=torch.float64)
    """
    near = -torch.special.ndtri(log_tail.clamp_min(FAR).exp())
    far = log_tail.clamp_max(FAR)
    a = (-2 * far - (-2 * far * 2 * pi).log()).sqrt()
    for _ in range(NEWTON):
        a = a + (torch.special.log_ndtr(-a) - far) / (a + 1 / a)  # the slope of log P(N > a), nearly, this far out
    return torch.where(log_tail > FAR, near, a)
