"""The evidence lower bound of a law over atoms, and its gap for approximate attention weights (S3-F3)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.duality.energy import log_weights_of
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast, autocast_float32, without_autocast
from cumulant.kernels.dense import accumulate, normalize
from cumulant.typing import PerQuery

LARGE = 1 << 20  # numbers of gathered atoms held at once


def elbo(weights: Tensor, scores: Tensor, log_weights: Tensor | None = None) -> PerQuery:
    """The evidence lower bound of a law q over atoms: ELBO(q) ≤ G with equality iff q = p (S3-F3).

        ELBO(q) = E_q[s] − KL(q ‖ e^w) = Σ_n q_n (s_n + w_n − log q_n),        G = log Σ_n e^{s_n + w_n}

    weights      (..., n) q: non-negative rows that sum to 1, or to 0: no law, ELBO = −inf
    scores       (..., n) s; for attention ⟨η, x_n⟩
    log_weights  (..., n) or (n,) w; 0 if None

    −inf where q puts mass on an atom of weight 0; there 0 log 0 = 0. Differentiable.

    >>> import torch
    >>> q, s = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    >>> elbo(q, s), torch.logsumexp(s, 0)
    (tensor(1.1931, dtype=torch.float64), tensor(1.3133, dtype=torch.float64))
    """
    q = _law("elbo.weights", weights)
    (weights, scores), (log_weights,) = autocast_float32(weights, scores), autocast_float32(log_weights)
    require_alike("elbo.scores", require_float("elbo.scores", scores), "weights", weights)
    if scores.ndim == 0 or scores.shape[-1] != q.shape[-1] or not holds(scores < torch.inf):
        expected = f"shape (..., n={q.shape[-1]}) with values below +inf"
        raise ValueError(sentence("elbo.scores", expected, shape(scores), "One score per weight."))
    broadcast("elbo", q.shape[:-1], scores.shape[:-1])
    w = log_weights_of("elbo.log_weights", log_weights, weights)
    s = accumulate(scores)
    return _bound(q, s if w is None else s + w)


def elbo_gap(
    eta: Tensor,
    atoms: Tensor,
    *,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    log_weights: Tensor | None = None,
    log_normalizer: Tensor | None = None,
) -> PerQuery:
    """The gap of approximate attention weights q, in nats: G − ELBO(q) = KL(q ‖ p) ≥ 0 (S3-F3).

        weights q            KL(q ‖ p) = Σ_n q_n log(q_n/p_n)
        atoms that are kept  KL(p restricted ‖ p) = G − G_kept = −log Σ_kept p

    eta             (*batch, q, d), or (d,) for one
    atoms           (*batch, n, d); batch axes broadcast
    weights         (*batch, q, n) rows that sum to 1, or to 0 where nothing was kept
    kept            Boolean (*batch, q, n), True = kept; or integers (*batch, q, k), distinct, −1 for none
    log_weights     (*batch, n) or (*batch, q, n), as in `moments`
    log_normalizer  (*batch, q) G, where it is known, such as from `attend` with a causal mask. Then only atoms that
                    carry weight or are kept are used: with indices O(qk) and no sum over all atoms.

    Give one of ``weights`` and ``kept``. +inf where nothing is kept, or q has mass where p has none; 0 where p itself
    is empty (G = −inf). Differentiable in eta, atoms, weights and log_weights; indices hold a few rows of gathered
    atoms at a time, all of them where a gradient is needed.

    >>> import torch
    >>> x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    >>> eta = torch.tensor([1.0], dtype=torch.float64)
    >>> elbo_gap(eta, x, kept=torch.tensor([2, 1]))                        # log(1 + e + e²) − log(e + e²)
    tensor(0.0943, dtype=torch.float64)
    >>> elbo_gap(eta, x, weights=torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    tensor(0.4076, dtype=torch.float64)
    """
    if (weights is None) == (kept is None):
        got = "neither" if weights is None else "both"
        raise ValueError(sentence("elbo_gap", "one of weights and kept", got, "Pass the approximation you use."))
    table, name = (weights, "weights") if kept is None else (kept, "kept")
    if not isinstance(table, Tensor):
        got = type(table).__name__
        raise TypeError(sentence(f"elbo_gap.{name}", "a tensor", got, "Call torch.as_tensor on it."))
    single = isinstance(eta, Tensor) and eta.ndim == 1
    if single:
        eta, table = eta[None], table[..., None, :]
        log_normalizer = None if log_normalizer is None else log_normalizer[..., None]
    (eta, atoms), (log_weights,) = autocast(eta, atoms), autocast(log_weights)
    _queries(eta, atoms, log_weights, log_normalizer)
    with without_autocast(eta):
        if kept is None:
            gap = _gap_of_weights(eta, atoms, table, log_weights, log_normalizer)
        elif table.dtype == torch.bool:
            gap = _gap_of_mask(eta, atoms, table, log_weights, log_normalizer)
        else:
            _indices(table, atoms.shape[-2])
            own = _log_mass_at(eta, atoms, table, log_weights)
            gap = _difference(_total(eta, atoms, log_weights, log_normalizer), own)
    if log_normalizer is not None:
        _large_enough(gap, log_normalizer)
    gap = gap.clamp_min(0)
    return gap[..., 0] if single else gap


def _law(where: str, weights: Tensor) -> Tensor:
    """Non-negative weights whose rows sum to 1 within rounding, or to 0."""
    require_float(where, weights)
    if weights.ndim == 0:
        raise ValueError(sentence(where, "shape (..., n)", shape(weights), "Add the axis of the atoms."))
    q = accumulate(weights)
    total = q.sum(-1)
    slack = min(0.02, 8 * torch.finfo(weights.dtype).eps ** 0.5)
    if not holds(q >= 0) or not holds(((total - 1).abs() <= slack) | (total == 0)):
        got = "negative or NaN" if not holds(q >= 0) else f"sums from {total.min():.6g} to {total.max():.6g}"
        raise ValueError(sentence(where, "non-negative rows that sum to 1 (or 0)", got, "Divide by their sum."))
    return q


def _bound(q: Tensor, logits: Tensor) -> Tensor:
    """Σ q (logits − log q), −inf for a row without weight."""
    q, logits = torch.broadcast_tensors(q, logits)
    inside = q > 0
    log_q = torch.where(inside, q, 1).log()
    value = torch.where(inside, q * (torch.where(inside, logits, 0) - log_q), 0).sum(-1)
    return torch.where(inside.any(-1), value, -torch.inf)


def _queries(eta: Tensor, atoms: Tensor, log_weights: Tensor | None, log_normalizer: Tensor | None) -> None:
    require_float("elbo_gap.eta", eta)
    require_alike("elbo_gap.atoms", require_float("elbo_gap.atoms", atoms), "eta", eta)
    if eta.ndim < 2 or atoms.ndim < 2 or eta.shape[-1] != atoms.shape[-1]:
        expected = "shape (*batch, n, d) with d the last axis of eta " + shape(eta)
        raise ValueError(sentence("elbo_gap.atoms", expected, shape(atoms), "Keys and queries share d."))
    broadcast("elbo_gap", eta.shape[:-2], atoms.shape[:-2])
    if log_weights is not None:
        require_alike("elbo_gap.log_weights", require_float("elbo_gap.log_weights", log_weights), "eta", eta)
        w, n = log_weights, atoms.shape[-2]
        if w.ndim not in (atoms.ndim - 1, atoms.ndim, eta.ndim) or w.shape[-1] != n or not holds(w < torch.inf):
            expected = f"(*batch, n={n}) or (*batch, q={eta.shape[-2]}, n={n}) with values below +inf"
            raise ValueError(sentence("elbo_gap.log_weights", expected, shape(w), "log 0 = -inf removes an atom."))
    if log_normalizer is not None:
        require_float("elbo_gap.log_normalizer", log_normalizer)
        if log_normalizer.shape[-1:] != eta.shape[-2:-1]:
            expected = f"shape (*batch, q={eta.shape[-2]})"
            raise ValueError(sentence("elbo_gap.log_normalizer", expected, shape(log_normalizer), "One G per query."))


def _indices(kept: Tensor, n: int) -> None:
    where = "elbo_gap.kept"
    if kept.is_floating_point() or kept.is_complex():
        raise TypeError(sentence(where, "a Boolean or integer tensor", kept.dtype, "Weights go into weights=."))
    if not holds((kept >= -1) & (kept < n)):
        got = f"values from {kept.min()} to {kept.max()}"
        raise ValueError(sentence(where, f"indices in 0 … {n - 1}, or -1 for none", got, "They number the atoms."))
    order = kept.sort(-1).values
    if not holds((order[..., 1:] != order[..., :-1]) | (order[..., 1:] == -1)):
        raise ValueError(sentence(where, "distinct indices in a row", "repeated ones", "An atom is kept once."))


def _per_pair(log_weights: Tensor, eta: Tensor, atoms: Tensor) -> bool:
    """The rule of `moments`: rank decides."""
    return log_weights.ndim == atoms.ndim or log_weights.ndim == eta.ndim > atoms.ndim - 1


def _total(eta: Tensor, atoms: Tensor, log_weights: Tensor | None, log_normalizer: Tensor | None) -> Tensor:
    if log_normalizer is not None:
        return accumulate(log_normalizer)
    return moments(eta, atoms, log_weights=log_weights, statistics=()).log_normalizer


def _gap_of_weights(eta: Tensor, atoms: Tensor, weights: Tensor, log_weights, log_normalizer) -> Tensor:
    q = _law("elbo_gap.weights", weights)
    if q.shape[-1] != atoms.shape[-2] or q.ndim < 2 or q.shape[-2] not in (1, eta.shape[-2]):
        expected = f"shape (*batch, q={eta.shape[-2]}, n={atoms.shape[-2]})"
        raise ValueError(sentence("elbo_gap.weights", expected, shape(weights), "One row per query."))
    logits = accumulate(eta) @ accumulate(atoms).mT
    if log_weights is not None:
        w = accumulate(log_weights)
        logits = logits + (w if _per_pair(log_weights, eta, atoms) else w[..., None, :])
    g = normalize(logits)[0] if log_normalizer is None else accumulate(log_normalizer)
    empty = g == -torch.inf
    gap = -_bound(q, logits - torch.where(empty, 0, g)[..., None])
    return torch.where(empty, 0, gap)


def _gap_of_mask(eta: Tensor, atoms: Tensor, kept: Tensor, log_weights, log_normalizer) -> Tensor:
    own = moments(eta, atoms, log_weights=log_weights, mask=kept, statistics=()).log_normalizer
    if log_normalizer is not None:
        return _difference(accumulate(log_normalizer), own)
    # log(1 + e^{lost − own}) keeps the digits of a small loss, which the difference of two sums would cancel
    lost = moments(eta, atoms, log_weights=log_weights, mask=~kept, statistics=()).log_normalizer
    both = (own > -torch.inf) & (lost > -torch.inf)
    ratio = torch.where(both, lost, 0) - torch.where(both, own, 0)
    gap = torch.logaddexp(ratio, torch.zeros_like(ratio))
    return torch.where(both, gap, torch.where(lost > -torch.inf, torch.inf, 0))


def _log_mass_at(eta: Tensor, atoms: Tensor, index: Tensor, log_weights: Tensor | None) -> Tensor:
    """log Σ over the atoms at some indices, a few rows at a time."""
    pairs = log_weights is not None and _per_pair(log_weights, eta, atoms)
    q, n, d = eta.shape[-2], *atoms.shape[-2:]
    leads = [eta.shape[:-2], atoms.shape[:-2], index.shape[:-2]]
    if log_weights is not None:
        leads.append(log_weights.shape[: -2 if pairs else -1])
    lead = broadcast("elbo_gap", *leads)
    if index.ndim < 2 or index.shape[-2] not in (1, q):
        expected = f"shape (*batch, q={q}, k)"
        raise ValueError(sentence("elbo_gap.kept", expected, shape(index), "One row of indices per query."))
    index, rows = index.long().expand(*lead, q, -1), accumulate(eta).expand(*lead, q, d)
    if n == 0:
        return rows.sum(-1) - torch.inf
    x = accumulate(atoms).expand(*lead, n, d)
    w = None if log_weights is None else accumulate(log_weights)
    table = None if w is None else (w if pairs else w[..., None, :]).expand(*lead, q, n)
    step = max(1, LARGE // max(1, index.shape[-1] * d * lead.numel()))
    parts = []
    for start in range(0, max(1, q), step):
        block = slice(start, start + step)
        part = index[..., block, :]
        known = part.clamp_min(0)
        flat = known.flatten(-2)[..., None].expand(*lead, -1, d)
        near = x.gather(-2, flat).unflatten(-2, part.shape[-2:])  # (*lead, rows, k, d)
        score = (near @ rows[..., block, :, None])[..., 0]
        if table is not None:
            score = score + table[..., block, :].gather(-1, known)
        parts.append(normalize(torch.where(part < 0, -torch.inf, score))[0])
    return torch.cat(parts, -1)


def _difference(g: Tensor, own: Tensor) -> Tensor:
    """G − G_kept: +inf where nothing is kept, 0 where nothing was there."""
    empty, none = g == -torch.inf, own == -torch.inf
    gap = torch.where(empty, 0, g) - torch.where(none | empty, 0, own)
    return torch.where(empty, 0, torch.where(none, torch.inf, gap))


def _large_enough(gap: Tensor, log_normalizer: Tensor) -> None:
    slack = 8 * torch.finfo(log_normalizer.dtype).eps ** 0.5 * (1 + log_normalizer.abs())
    if not holds((gap >= -slack) | (log_normalizer == -torch.inf)):
        got = f"one that is {-gap.min():.3g} below it"
        advice = "Compute it over all atoms, with the same scale and weights."
        raise ValueError(sentence("elbo_gap.log_normalizer", "G of at least the part that is kept", got, advice))
