"""Smoothing by sampled mode paths: given the modes everything is linear and Gaussian, so only modes are sampled.

    forward    N histories of modes with weights, each with the exact law of x_t given it; of their N·M continuations N
               are kept, the large ones for certain and the others by systematic sampling (Fearnhead, Clifford 2003)
    backward   futures s_{t+1} … s_T, drawn one mode at a time; given a future, the weight of history k is

                   w_k P(s_{t+1} | s_t^k) ∫ N(x; m_k, P_k) p(y_{t+1} … y_T | x, s_{t+1} … s_T) dx

    record     every history times every sampled future, smoothed exactly

(Whiteley, Andrieu, Doucet 2010; Lindsten et al. 2015.) Exact in the limit of many histories and futures; the reference
for `cumulant.filters.smooth`, which it costs a hundred times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_float, sentence, shape
from cumulant.filters import SwitchingLinearGaussian, m_projection
from cumulant.filters.beliefs import Beliefs
from cumulant.filters.messages import Message, product
from cumulant.filters.parameters import require_shared
from cumulant.filters.protocol import Belief, Propagator, draw_modes, log_probabilities
from cumulant.filters.smoother import at, require_linear
from cumulant.samplers.resampling import require_generator


class SampledSmoothed(NamedTuple):
    """Laws of state and mode at each step given all T observations, averages over sampled futures.

    mean                (*batch, T, d)       E[x_t | y_1 … y_T]
    covariance          (*batch, T, d, d)
    mode_probabilities  (*batch, T, M)       P(s_t | y_1 … y_T)
    """

    mean: Tensor
    covariance: Tensor
    mode_probabilities: Tensor


class Histories(NamedTuple):
    """Sampled mode histories of a step: log_weights and newest modes (batch, n), mean (…, d), covariance (…, d, d)."""

    log_weights: Tensor
    modes: Tensor
    mean: Tensor
    covariance: Tensor


@torch.no_grad()
def sample_smooth(
    model: SwitchingLinearGaussian, y: Tensor, *, histories: int = 200, futures: int = 20, generator: torch.Generator
) -> SampledSmoothed:
    """Smooth y (*batch, T, m), NaN where an entry is missing, by sampled mode paths (module docstring).

        p(x_t, s_t | y_1 … y_T) ≈ 1/F Σ_f Σ_k w_kf N(x_t; m_kf, P_kf) [s_t = s_t^k]

    >>> import torch
    >>> from cumulant.filters import smooth
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(torch.full((2, 2), 0.5).double(), eye, torch.stack([eye, 9 * eye]), eye, eye,
    ...                                initial_mean=torch.zeros(1).double(), initial_covariance=eye)
    >>> y = torch.tensor([[0.0], [6.0], [5.0]]).double()
    >>> found = sample_smooth(walk, y, futures=500, generator=torch.Generator().manual_seed(0))
    >>> bool((found.mean - smooth(walk, y, method="exact").mean).abs().max() < 0.05)
    True
    """
    where = "sample_smooth"
    require_linear(f"{where}.model", model)
    require_shared(f"{where}.model", model)
    require_generator(where, generator)
    for name, count in {"histories": histories, "futures": futures}.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(sentence(f"{where}.{name}", "an integer ≥ 1", count, "Hundreds of histories are usual."))
    require_float(f"{where}.y", y)
    if y.ndim < 2 or y.shape[-1] != model.observed or not y.shape[-2]:
        expected = f"shape (*batch, T, m={model.observed}) with T ≥ 1"
        raise ValueError(sentence(f"{where}.y", expected, shape(y), "Time is the axis before the last."))
    rows = y.reshape(-1, *y.shape[-2:])
    forward = _forward(model, rows, histories, generator)
    laws = _backward(model, rows, forward, futures, generator)
    parts = (torch.stack(part, 1) for part in zip(*laws[::-1], strict=True))
    return SampledSmoothed(*(part.reshape(*y.shape[:-2], *part.shape[1:]) for part in parts))


def _forward(model: SwitchingLinearGaussian, y: Tensor, limit: int, generator: torch.Generator) -> list[Histories]:
    propagator, count = model.propagator(), len(y)
    start = propagator.initial()
    modes = torch.arange(model.modes, device=y.device)
    log_weights, belief = start.log_weights.mT.expand(count, -1), start.belief
    newest = modes.expand(count, -1)
    kept = []
    for t in range(y.shape[1]):
        moves = t > 0 or propagator.start == "belief"
        if moves:  # (batch, n, M) continuations
            log_weights = log_weights[..., None] + log_probabilities(at(model, "transition", t))[newest]
            belief = belief if t else _as_histories(belief, count)
        else:
            log_weights = log_weights[:, None]
        missing = y[:, t].isnan()
        n = log_weights.shape[1]
        column = torch.where(missing, 0, y[:, t]).mT.repeat_interleave(n, 1)
        observed = (~missing).mT.repeat_interleave(n, 1) if bool(missing.any()) else None
        predicted = propagator.predict(belief, t, moves=moves)
        belief, gain = propagator.update(predicted, column, observed, t)  # (M, …, batch · n)
        log_weights = log_weights + gain.expand(-1, count * n).reshape(-1, count, n).permute(1, 2, 0)
        log_weights = torch.log_softmax(log_weights.flatten(1), -1)
        chosen, log_weights = _choose(log_weights, limit, generator)
        belief = _pick(belief, chosen, n, model.modes)
        newest = chosen % model.modes
        kept.append(_record(propagator, belief, log_weights, newest))
    return kept


def _as_histories(belief: Belief, count: int) -> Belief:
    """One history for every initial mode: (M, …, 1) → (1, …, batch · M)."""
    return type(belief)(
        *(leaf.movedim(0, -1).flatten(-2).repeat(*[1] * (leaf.ndim - 2), count)[None] for leaf in belief)
    )


def _pick(belief: Belief, chosen: Tensor, n: int, modes: int) -> Belief:
    """The beliefs (1, …, batch · kept) of continuations ``chosen`` (batch, kept), numbered history · M + mode."""
    count = len(chosen)
    history = chosen // modes + n * torch.arange(count, device=chosen.device)[:, None]

    def pick(leaf: Tensor) -> Tensor:
        whole = leaf.expand(modes, *leaf.shape[1:-1], count * n).movedim((0, -1), (1, 0))  # (batch · n, M, …)
        return whole[history.flatten(), (chosen % modes).flatten()].movedim(0, -1)[None]

    return type(belief)(*(pick(leaf) for leaf in belief))


def _record(propagator: Propagator, belief: Belief, log_weights: Tensor, modes: Tensor) -> Histories:
    mean, covariance = (part[0].movedim(-1, 0) for part in propagator.moments(belief))
    shapes = modes.shape
    return Histories(log_weights, modes, mean.reshape(*shapes, -1), covariance.reshape(*shapes, *covariance.shape[-2:]))


def _choose(log_weights: Tensor, limit: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most ``limit`` of the continuations (batch, n) and their new log weights; weights stay unbiased.

    Those above c are kept as they are, of the others so many are drawn that each gets weight c, where
    Σ min(w/c, 1) = limit.
    """
    count, n = log_weights.shape
    if n <= limit:
        return torch.arange(n, device=log_weights.device).expand(count, n), log_weights
    sorted_weights, order = log_weights.exp().sort(-1, descending=True)
    rest = sorted_weights.flip(-1).cumsum(-1).flip(-1)[:, :limit]  # what is left after the k largest
    slots = torch.arange(limit, device=log_weights.device)
    threshold = rest / (limit - slots)
    large = (sorted_weights[:, :limit] > threshold).long().cumprod(-1).sum(-1, keepdim=True).clamp_max(limit - 1)
    c = threshold.gather(-1, large).clamp_min(torch.finfo(log_weights.dtype).tiny)
    position = torch.arange(n, device=log_weights.device)
    shares = torch.where(position < large, 1, sorted_weights / c).cumsum(-1)
    u = torch.rand(count, 1, dtype=shares.dtype, device=shares.device, generator=generator)
    points = slots + torch.where(slots < large, 0.5, u)
    drawn = torch.searchsorted(shares.contiguous(), points.contiguous()).clamp_max(n - 1)
    chosen = order.gather(-1, drawn)
    weights = torch.where(slots < large, log_weights.gather(-1, chosen), c.log())
    return chosen, torch.log_softmax(weights, -1)


def _backward(
    model: SwitchingLinearGaussian, y: Tensor, forward: list[Histories], futures: int, generator: torch.Generator
) -> list[SampledSmoothed]:
    """The laws of the steps, the last first."""
    count, d = len(y), model.dim
    zero = y.new_zeros(count, futures, d)
    message, following, laws = Message(zero, zero, zero.new_zeros(*zero.shape, d), zero[..., 0]), None, []
    for t in reversed(range(y.shape[1])):
        log_weights, modes, mean, covariance = (part[:, None] for part in forward[t])
        if following is not None:
            rows = log_probabilities(at(model, "transition", t + 1)).mT[following]  # (batch, futures, M), from s_t
            log_weights = log_weights + rows.gather(-1, modes.expand(-1, futures, -1))
        histories = product(Beliefs(log_weights, mean, covariance), message.unsqueeze(2))
        weights = torch.softmax(histories.log_weights, -1)  # (batch, futures, n)
        flat = weights.flatten(1) / futures
        law = m_projection(flat, histories.mean.flatten(1, 2), histories.covariance.flatten(1, 2))
        shares = torch.zeros(count, model.modes, dtype=y.dtype, device=y.device)
        shares = shares.scatter_add(1, modes[:, 0], weights.mean(1))
        laws.append(SampledSmoothed(*law, shares))
        following = modes.expand(-1, futures, -1).gather(-1, draw_modes(weights, generator)[..., None])[..., 0]
        center = (forward[t - 1].log_weights.exp()[..., None] * forward[t - 1].mean).sum(1)[:, None] if t else zero
        message = _before(model, t, y[:, t], message, following, center)
    return laws


def _before(
    model: SwitchingLinearGaussian, t: int, y: Tensor, message: Message, modes: Tensor, center: Tensor
) -> Message:
    """What y_t, y_{t+1} … say about x_{t−1} given modes (batch, futures) at t, from what y_{t+1} … say about x_t."""
    names = "observation", "observation_noise", "observation_offset", "dynamics", "process_noise", "state_offset"
    h, r, c, f, q, b = (at(model, name, t)[modes] for name in names)
    seen = ~y.isnan()[:, None]
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    h = torch.where(seen[..., None], h, 0)
    r = torch.where(seen[..., None] & seen[..., None, :], r, eye)
    error = torch.where(seen, torch.where(seen, y[:, None], 0) - c, 0) - _times(h, message.center)
    weighted = torch.linalg.solve(r, h)
    precision = message.precision + h.mT @ weighted
    slope = message.slope + _times(weighted.mT, error)
    center = center.expand_as(slope)
    slope = slope - _times(precision, _times(f, center) + b - message.center)
    rest = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device) + precision @ q
    both = torch.linalg.solve(rest, torch.cat([precision, slope[..., None]], -1))
    precision = f.mT @ both[..., :-1] @ f
    slope = _times(f.mT, both[..., -1])
    return Message(center, slope, (precision + precision.mT) / 2, message.log_scale)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
