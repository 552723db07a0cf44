"""The convex duals of the log-normalizer: free energy, evidence bound, generalised divergence, boosting (§6).

    G(η)   = max_q { E_q⟨η,x⟩ − KL(q ‖ h) }                     the evidence bound is tight at q = p_η       (S3-F3)
    F      = −T log Σ e^{−E/T} = ⟨E⟩ − T S                       G with the sign and the unit of an energy   (S3-F1)
    Σq₀ − min_λ Σ q₀ e^{−Mλ} = min{D(p ‖ q₀): p ≥ 0, Mᵀp = 0}    the same without Σp = 1: boosting           (S3-F4)

The dual with a normalised law, maximum entropy, is `cumulant.geometry.maximum_entropy`. Under torch.autocast tables are
taken in float32, queries and atoms rounded as for a matrix product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.geometry import maximum_entropy
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast, autocast_float32, without_autocast
from cumulant.kernels.dense import accumulate, normalize
from cumulant.measures import Empirical
from cumulant.residual import prox
from cumulant.solve import Status
from cumulant.typing import PerQuery

LARGE = 1 << 20  # numbers of gathered atoms held at once


class FreeEnergy(NamedTuple):
    """value F, mean_energy ⟨E⟩ and entropy S, each (...), with F = ⟨E⟩ − T S."""

    value: PerQuery
    mean_energy: PerQuery
    entropy: PerQuery


def free_energy(
    energies: Tensor, *, temperature: float | Tensor = 1.0, log_weights: Tensor | None = None
) -> FreeEnergy:
    """The free energy of states at a temperature, and its two parts (S3-F1).

        F = −T log Σ_n e^{w_n − E_n/T} = ⟨E⟩ − T S,      S = −Σ p log(p/e^w),      p_n ∝ e^{w_n − E_n/T}

    energies     (..., n); +inf forbids a state
    temperature  T > 0, a number or a tensor that broadcasts to (...)
    log_weights  (..., n) or (n,): degeneracies of the states; S is then the entropy relative to them, at most log Σe^w

    With E_n = −⟨q,k_n⟩ and T = 1/β it is −G(βq)/β: attention that ascends G descends F. Differentiable;
    ∂F/∂E = p and ∂F/∂T = −S. Without states F = +inf, ⟨E⟩ = S = 0 and the gradient is 0.

    >>> import torch
    >>> found = free_energy(torch.tensor([0.0, 1.0], dtype=torch.float64), temperature=2.0)
    >>> [round(x.item(), 12) for x in found]
    [-0.94815396836, 0.377540668798, 0.662847318579]
    """
    (energies,), (log_weights,) = autocast_float32(energies), autocast_float32(log_weights)
    e = accumulate(require_float("free_energy.energies", energies))
    if e.ndim == 0 or not holds(e > -torch.inf):  # also false for NaN
        got = shape(e) if e.ndim == 0 else "NaN or -inf"
        raise ValueError(sentence("free_energy.energies", "(..., n) values above -inf", got, "+inf forbids a state."))
    t = _temperature(temperature, e)
    w = _log_weights("free_energy.log_weights", log_weights, energies)
    absent = (e == torch.inf) if w is None else (e == torch.inf) | (w == -torch.inf)
    e = torch.where(absent, 0, e)
    floor = (
        torch.where(absent, torch.inf, e).amin(-1, keepdim=True).detach() if e.shape[-1] else e.sum(-1, keepdim=True)
    )
    floor = torch.where(floor.isfinite(), floor, 0)
    score = (floor - e) / t[..., None]  # ≤ 0, so that small temperatures cost no digits
    g, p = normalize(torch.where(absent, -torch.inf, score if w is None else score + torch.where(absent, 0, w)))
    empty = g == -torch.inf
    g = torch.where(empty, 0, g)
    surprise = torch.where(p > 0, score, 0) - g[..., None]
    value = torch.where(empty, torch.inf, floor[..., 0] - t * g)
    return FreeEnergy(value, (p * e).sum(-1), -(p * surprise).sum(-1))


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
    w = _log_weights("elbo.log_weights", log_weights, weights)
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
    """What cheaper attention weights lose, in nats: G − ELBO(q) = KL(q ‖ p) ≥ 0, for any weights q (S3-F3).

        weights q            KL(q ‖ p) = Σ_n q_n log(q_n/p_n)
        atoms that are kept  KL(p restricted ‖ p) = G − G_kept = −log Σ_kept p

    eta             (*batch, q, d), or (d,) for one
    atoms           (*batch, n, d); batch axes broadcast
    weights         (*batch, q, n) rows that sum to 1, or to 0 where nothing was kept
    kept            Boolean (*batch, q, n), True = kept; or integers (*batch, q, k), distinct, −1 for none
    log_weights     (*batch, n) or (*batch, q, n), as in `moments`
    log_normalizer  (*batch, q) G, where it is known, such as from `attend` with a causal mask. Then only atoms that
                    carry weight or are kept are looked at: with indices O(qk) and no sum over all atoms.

    Give one of ``weights`` and ``kept``. +inf where nothing is kept, or q has mass where p has none; 0 where p itself
    is empty (G = −inf). Differentiable in eta, atoms, weights and log_weights; indices hold a few rows of gathered
    atoms at a time, all of them where a gradient is asked for.

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


def generalized_kl(p: Tensor, q: Tensor) -> PerQuery:
    """The Bregman divergence of Σ x log x between masses that need not sum to 1 (S3-F4).

        D(p ‖ q) = Σ_n p_n log(p_n/q_n) − p_n + q_n ≥ 0,       0 iff p = q

    p, q (..., n) non-negative and finite; leading axes broadcast. 0 log 0 = 0, and +inf where p has mass and q has
    none. KL(p ‖ q) where both sum to 1. Differentiable; masses of 0 get the gradient 0.

    >>> import torch
    >>> generalized_kl(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0]))            # 2 log 2 − 1 + 3
    tensor(3.3863)
    """
    p, q = autocast_float32(p, q)
    for name, mass in (("p", p), ("q", q)):
        where = f"generalized_kl.{name}"
        require_alike(where, require_float(where, mass), "p", p)
        if mass.ndim == 0 or not holds((mass >= 0) & (mass < torch.inf)):
            got = shape(mass) if mass.ndim == 0 else "a value that is negative, infinite or NaN"
            raise ValueError(
                sentence(where, "non-negative finite masses (..., n)", got, "Pass masses, not logarithms.")
            )
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(sentence("generalized_kl.q", f"last axis n={p.shape[-1]} as p", shape(q), "Match the atoms."))
    broadcast("generalized_kl", p.shape[:-1], q.shape[:-1])
    p, q = torch.broadcast_tensors(accumulate(p), accumulate(q))
    both = (p > 0) & (q > 0)
    ratio = torch.where(both, p, 1).log() - torch.where(both, q, 1).log()
    terms = torch.where(both, p * ratio - p + q, torch.where(p > 0, torch.inf, q))
    return terms.sum(-1)


class Boosting(NamedTuple):
    """Both sides of boosting.

    coefficients  (d,)  λ; where the data are separable a vector with Mλ > 0, as the minimiser is at infinity
    weights       (n,)  p = q₀ e^{−Mλ}, the unnormalised weights of the examples; 0 if separable
    loss          ()    inf_λ Σ q₀ e^{−Mλ} = Σ p
    divergence    ()    D(p ‖ q₀) = Σq₀ − loss, the dual value
    separable     ()    some λ makes every margin positive
    status        ()    `Status`; BOUNDARY: the infimum is positive but not attained, because some examples can be got
                        right at no cost: their weights tend to 0, and all but 1e-9 of the way is gone
    """

    coefficients: Tensor
    weights: Tensor
    loss: Tensor
    divergence: Tensor
    separable: Tensor
    status: Tensor


def boosting(margins: Tensor, weights: Tensor | None = None) -> Boosting:
    """AdaBoost's problem solved to the end: exponential loss and its maximum-entropy dual (S3-F4).

        inf_λ Σ_i q₀ᵢ e^{−(Mλ)ᵢ}     and     Σq₀ − that = min{D(p ‖ q₀): p ≥ 0, Mᵀp = 0}

    margins (n, d) is M: y_i f_j(x_i) for label y = ±1 and feature f_j. weights (n,) is q₀ ≥ 0, ones if None. Solved
    through `maximum_entropy` of the rows −M, which differs only in that its weights sum to 1. Without examples of
    positive weight the loss is 0 and λ = 0.

    >>> import torch
    >>> found = boosting(torch.tensor([[1.0], [1.0], [-1.0]], dtype=torch.float64))
    >>> found.coefficients, found.loss                                    # λ = ½ log 2, loss 2 √2
    (tensor([0.3466], dtype=torch.float64), tensor(2.8284, dtype=torch.float64))
    """
    m = accumulate(require_float("boosting.margins", margins))
    if m.ndim != 2:
        raise ValueError(sentence("boosting.margins", "shape (n, d)", shape(m), "Rows are examples."))
    require_finite("boosting.margins", m)
    q = torch.ones_like(m[:, 0]) if weights is None else accumulate(require_float("boosting.weights", weights))
    require_alike("boosting.weights", q, "margins", m)
    if q.shape != m.shape[:1] or not holds((q >= 0) & (q < torch.inf)):
        expected = f"{len(m)} non-negative finite weights"
        raise ValueError(sentence("boosting.weights", expected, shape(q), "One per example."))
    used = q > 0
    if not used.any():
        zero, code = q.sum(), torch.tensor(int(Status.CONVERGED), dtype=torch.int8, device=m.device)
        return Boosting(m.new_zeros(m.shape[1]), q, zero, zero, torch.ones_like(zero, dtype=torch.bool), code)
    with without_autocast(m):
        found = maximum_entropy(-m, q.log())
    separable = found.status == Status.OUTSIDE
    if separable:
        p, coefficients = torch.zeros_like(q), _separating(m[used], found.x)
    else:
        p, coefficients = found.primal.exp() * found.weights, found.x
    return Boosting(coefficients, p, p.sum(), generalized_kl(p, q), separable, found.status)


def _separating(m: Tensor, guess: Tensor) -> Tensor:
    """λ with Mλ > 0, known to exist: equal margins, the solver's last iterate, or the loss with a vanishing penalty."""
    size = torch.linalg.vector_norm(m, dim=-1).amax()
    unit = (m / size).double()
    candidates = [torch.linalg.pinv(unit).sum(-1), guess.double() * size]
    rows, origin = Empirical(-unit), torch.zeros_like(unit[0])
    for step in 10.0 ** torch.arange(0, 20, 2):
        for x in candidates:
            if (unit @ x).min() > 0:
                return (x / size).to(m.dtype)
        candidates = [prox(rows, origin, step=float(step)).value]
    return guess


# ---------------------------------------------------------------------- arguments and parts


def _temperature(temperature: float | Tensor, energies: Tensor) -> Tensor:
    t = torch.as_tensor(temperature, dtype=energies.dtype, device=energies.device)
    if not holds((t > 0) & t.isfinite()):
        got = temperature if t.ndim == 0 else f"values from {t.min()} to {t.max()}"
        advice = "The limit T → 0 is energies.min(-1)."
        raise ValueError(sentence("free_energy.temperature", "positive finite numbers", got, advice))
    broadcast("free_energy.temperature", t.shape, energies.shape[:-1])
    return t


def _log_weights(where: str, log_weights: Tensor | None, table: Tensor) -> Tensor | None:
    """Log weights that broadcast with a table (..., n)."""
    if log_weights is None:
        return None
    require_alike(where, require_float(where, log_weights), "the table they weigh", table)
    if log_weights.ndim == 0 or log_weights.shape[-1] != table.shape[-1] or not holds(log_weights < torch.inf):
        expected = f"shape (..., n={table.shape[-1]}) with values below +inf"
        raise ValueError(sentence(where, expected, shape(log_weights), "log 0 = -inf removes an atom."))
    broadcast(where, log_weights.shape[:-1], table.shape[:-1])
    return accumulate(log_weights)


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
    some = (own > -torch.inf) & (lost > -torch.inf)
    ratio = torch.where(some, lost, 0) - torch.where(some, own, 0)
    gap = torch.logaddexp(ratio, torch.zeros_like(ratio))
    return torch.where(some, gap, torch.where(lost > -torch.inf, torch.inf, 0))


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
        chosen = index[..., block, :]
        known = chosen.clamp_min(0)
        flat = known.flatten(-2)[..., None].expand(*lead, -1, d)
        near = x.gather(-2, flat).unflatten(-2, chosen.shape[-2:])  # (*lead, rows, k, d)
        score = (near @ rows[..., block, :, None])[..., 0]
        if table is not None:
            score = score + table[..., block, :].gather(-1, known)
        parts.append(normalize(torch.where(chosen < 0, -torch.inf, score))[0])
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
