"""The reference: every statistic by its definition, with the queries × atoms matrix in memory.

Slow and obvious on purpose. Faster kernels are compared with this one.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from cumulant.checks import known, sentence
from cumulant.kernels.moments import STATISTICS, Moments


def dense_moments(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None = None,
    *,
    log_weights: Tensor | None = None,
    statistics: Collection[str] = STATISTICS,
) -> Moments:
    """`Moments` of p_n ∝ exp(⟨η,x_n⟩ + w_n).

    eta (*batch, q, d), atoms (*batch, n, d), values (*batch, n, e), log_weights (*batch, n) or (*batch, q, n).
    Half precision is computed and returned in float32. An atom of log weight −inf is absent, whatever it holds; a query
    to which a NaN or an infinity is visible, in an atom or in its value, has NaN for every statistic.

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    >>> m = dense_moments(torch.tensor([[0.5, -0.25]], dtype=torch.float64), x, log_weights=w)
    >>> round(m.log_normalizer.item(), 12), round(m.atom_trace.item(), 12)
    (0.162964287687, 0.434921238956)
    """
    for name in set(statistics) - set(STATISTICS):
        expected = f"names among {', '.join(STATISTICS)}"
        raise ValueError(sentence("dense_moments.statistics", expected, repr(name), "Copy one exactly."))
    eta, atoms = accumulate(eta), accumulate(atoms)
    values = atoms if values is None else accumulate(values)
    w = row_weights(log_weights, atoms)
    if w is None:
        score = logits = eta @ atoms.mT  # (*batch, q, n)
        g, p = normalize(logits)
    else:
        absent = w == -torch.inf
        eta, atoms, values = without_nonfinite(eta, atoms, values, ~absent)
        score = torch.where(absent, 0, eta @ atoms.mT)
        logits = torch.where(absent, -torch.inf, score + w)
        g, p = normalize(logits)
        p = torch.where(absent, 0, p)  # they are 0; so is now what comes back to them, an infinity included
    mean = p @ values
    atom_mean = mean if values is atoms else p @ atoms
    mean_score = (p * score).sum(-1)
    known = {
        "mean": lambda: mean,
        "mean_score": lambda: mean_score,
        "score_variance": lambda: _average(p, (score - mean_score[..., None]).square()),
        "mean_log_weight": lambda: torch.zeros_like(g) if w is None else _mean_log_weight(p, w),
        "value_trace": lambda: _trace(p, values, mean),
        "atom_trace": lambda: _trace(p, atoms, atom_mean),
        "max_score": lambda: _max_score(score, logits),
        "log_sum_square": lambda: normalize(2 * logits)[0],
    }
    wanted = {name: known[name]() for name in statistics}
    if "mean" in wanted or "atom_trace" in wanted or "value_trace" in wanted:
        wanted |= {"mean": mean, "atom_mean": atom_mean}
    if "score_variance" in wanted:
        wanted["mean_score"] = mean_score
    return Moments(g, wanted)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in the precision that sums are formed in: float32 for half precision, its own otherwise."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def row_weights(log_weights: Tensor | None, atoms: Tensor) -> Tensor | None:
    """Log weights with a query axis: per atom (*batch, n) → (*batch, 1, n), per query and atom unchanged."""
    if log_weights is None:
        return None
    log_weights = accumulate(log_weights)
    return log_weights[..., None, :] if log_weights.ndim == atoms.ndim - 1 else log_weights


def without_nonfinite(eta: Tensor, atoms: Tensor, values: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NaN and infinite atoms (or values) put to 0, and NaN in the statistics of the queries to which they are visible.

    Then a product of an absent atom and its weight 0 is 0, and what is wrong shows where it is seen, nowhere else.
    """
    most = largest(atoms) if values is atoms else torch.maximum(largest(atoms), largest(values))  # NaN if either is
    if known(most.isfinite()):
        return eta, atoms, values
    bad = ~atoms.isfinite().all(-1)
    if values is not atoms:
        bad = bad | ~values.isfinite().all(-1)
    seen = (present & bad[..., None, :]).any(-1, keepdim=True)
    good = torch.where(bad[..., None], 0, atoms)
    return torch.where(seen, torch.nan, eta), good, good if values is atoms else torch.where(bad[..., None], 0, values)


def largest(tensor: Tensor) -> Tensor:
    """max |x|, NaN if any is; several times faster than a norm."""
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high)


def normalize(logits: Tensor) -> tuple[Tensor, Tensor]:
    """G = logsumexp and p = softmax over the last axis; an empty row has G = −inf, p = 0 and gradient 0."""
    if logits.shape[-1] == 0:
        return logits.sum(-1) - torch.inf, logits
    top = logits.amax(-1, keepdim=True).detach()
    top = torch.where(top.isfinite(), top, 0)
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    g = torch.where(empty, -torch.inf, top + torch.log(total))
    return g.squeeze(-1), e / total


def _mean_log_weight(p: Tensor, w: Tensor) -> Tensor:
    return (p * torch.where(w == -torch.inf, 0, w)).sum(-1)  # 0 · (−inf) is 0 here


def _trace(p: Tensor, points: Tensor, mean: Tensor) -> Tensor:
    """Σ_n p_n |x_n − m|², centred before squaring so that a common offset costs nothing."""
    apart = points[..., None, :, :] - mean[..., :, None, :]  # (*batch, q, n, d)
    return _average(p, torch.where(p[..., None] == 0, 0, apart).square().sum(-1))


def _average(p: Tensor, square: Tensor) -> Tensor:
    """Σ_n p_n s_n; what an absent atom holds is not looked at, because its square may be infinite."""
    return (p * torch.where(p == 0, 0, square)).sum(-1)


def _max_score(score: Tensor, logits: Tensor) -> Tensor:
    if score.shape[-1] == 0:
        return score.sum(-1) - torch.inf
    return torch.where(logits == -torch.inf, -torch.inf, score).amax(-1)
