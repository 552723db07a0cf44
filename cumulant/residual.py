"""The residual attention step η + ∇G(η) with fixed keys, its inverse, and the Jacobian with moving keys (§2).

    T(η) = η + M ∇G(η),     JT = I + M ∇²G(η),     log|det JT| = Σ log(1 + λ(M^½ ∇²G M^½)) ≥ 0            (X-1)
    T⁻¹(y) = prox_G(y) = argmin_x G(x) + ½|x − y|²                                                        (X-2)

One step of gradient ascent on a convex function expands distances and volumes and can be undone exactly. When the
keys are the tokens themselves they move with the queries; `self_attention_jacobian` has the whole derivative (X-3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_alike, require_finite, require_float, sentence, shape
from cumulant.measures import Measure
from cumulant.solve import Solution, newton
from cumulant.typing import PerQuery, Queries


class AscentStep(NamedTuple):
    """The result of a step: eta (*batch, q, d), and log|det| of the Jacobian (*batch, q)."""

    eta: Queries
    log_volume: PerQuery


def ascend(measure: Measure, eta: Queries, metric: float | Tensor = 1.0) -> AscentStep:
    """One step of ascent on G in a metric: η + M ∇G(η), and how much it expands volume there (X-1).

    metric  a number (the step length; negative descends) or a symmetric positive definite (d, d) matrix M.
            The map is expansive in the norm |·|_{M⁻¹}; a descent of step −γ is non-expansive iff γ λ_max(∇²G) ≤ 2.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> ascend(Gaussian(torch.zeros(2), torch.eye(2)), torch.tensor([1.0, 0.0]))       # volume doubles twice
    AscentStep(eta=tensor([2., 0.]), log_volume=tensor(1.3863))
    """
    mean, fisher = measure.mean(eta), measure.fisher(eta)
    if isinstance(metric, Tensor) and metric.ndim:
        root = _root("ascend.metric", metric, measure.dim, eta)
        step, curvature = (metric @ mean[..., None])[..., 0], root.mT @ fisher @ root
    else:
        step, curvature = metric * mean, metric * fisher
    return AscentStep(eta + step, torch.log((1 + torch.linalg.eigvalsh(curvature)).abs()).sum(-1))


def prox(measure: Measure, y: Queries, *, step: float = 1.0, max_steps: int = 100) -> Solution:
    """The proximal map of G, which undoes a residual layer with fixed keys (X-2).

        prox(y) = argmin_x G(x) + |x − y|²/(2 step),        x + step ∇G(x) = y

    Newton's method on a strongly convex function: it always converges. First-order differentiable in y and in the
    parameters of the measure.

    >>> import torch
    >>> from cumulant import Empirical
    >>> h, eta = Empirical(torch.eye(3, dtype=torch.float64)), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    >>> prox(h, ascend(h, eta).eta).value
    tensor([ 0.3000, -1.0000,  2.0000], dtype=torch.float64)
    """
    if not step > 0:
        raise ValueError(sentence("prox.step", "a positive number", step, "1 undoes η + ∇G(η)."))
    require_finite("prox.y", require_float("prox.y", y))
    eye = torch.eye(measure.dim, dtype=y.dtype, device=y.device)
    target = y.detach()
    size = 1 + torch.linalg.vector_norm(target, dim=-1)
    with torch.no_grad():
        solution = newton(
            lambda x: step * measure.log_normalizer(x) + (x - target).square().sum(-1) / 2,
            lambda x: step * measure.mean(x) + x - target,
            lambda x: step * measure.fisher(x) + eye,
            target,
            tol=64 * torch.finfo(y.dtype).eps * size,
            max_steps=max_steps,
        )
    if not torch.is_grad_enabled():
        return solution
    residual = y - solution.value - step * measure.mean(solution.value)
    if not residual.requires_grad:
        return solution
    # one Newton step that does not change the value and carries the derivative (I + step ∇²G)⁻¹ (dy − step d∇G)
    carry = torch.linalg.solve(eye + step * measure.fisher(solution.value).detach(), residual)
    return replace(solution, value=solution.value + carry - carry.detach())


def self_attention_jacobian(
    x: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    residual: bool = True,
) -> Tensor:
    """∂T_i/∂x_j of T_i(X) = x_i + Σ_j a_ij W_v x_j, where the keys move with the queries (X-3).

        ∂T_i/∂x_j = δ_ij (I + s W_v C_i W_kᵀ W_q) + a_ij W_v (I + s (x_j − m_i) x_iᵀ W_qᵀ W_k)
        a_ij = softmax_j(s ⟨W_q x_i, W_k x_j⟩),     m_i = Σ_j a_ij x_j,     C_i = Cov_{a_i}(x)

    x (*batch, n, d); weights (out, d) as in nn.Linear, the identity if None, W_v with d rows; mask as in `attend`.
    Returns (*batch, n, d, n, d), entry [i, a, j, b] = ∂T_ia/∂x_jb. Quadratic in n.
    Pairwise distances never shrink without a mask; the whole map may contract, and a causal mask lets distances shrink.

    >>> import torch
    >>> self_attention_jacobian(torch.zeros(1, 2)).reshape(2, 2)              # one token attends to itself: x + x
    tensor([[2., 0.],
            [0., 2.]])
    """
    where = "self_attention_jacobian"
    if require_float(f"{where}.x", x).ndim < 2:
        raise ValueError(sentence(f"{where}.x", "shape (*batch, n, d)", shape(x), "Add the token axis."))
    n, d = x.shape[-2:]
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    weights = {"query_weight": query_weight, "key_weight": key_weight, "value_weight": value_weight}
    wq, wk, wv = (eye if w is None else _weight(f"{where}.{name}", w, x) for name, w in weights.items())
    if wv.shape[0] != d or wq.shape[0] != wk.shape[0]:
        got = f"query {shape(wq)}, key {shape(wk)}, value {shape(wv)}"
        raise ValueError(sentence(where, "W_q and W_k with equal rows, W_v square", got, "Fold W_O into W_v."))
    bilinear = scale * wq.mT @ wk  # s W_qᵀ W_k
    visible = torch.ones(n, n, dtype=torch.bool, device=x.device)
    visible = visible.tril() if causal else visible
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(sentence(f"{where}.mask", "a Boolean tensor", got, "True means attend."))
        if mask.ndim < 2 or mask.shape[-2] not in (1, n) or mask.shape[-1] not in (1, n):
            expected = f"broadcastable to (*batch, n={n}, n={n})"
            raise ValueError(sentence(f"{where}.mask", expected, shape(mask), "Rows are queries, columns are keys."))
        visible = visible & mask
    logits = (x @ bilinear @ x.mT).masked_fill(~visible, -torch.inf)
    a = torch.softmax(logits, -1).nan_to_num(0.0)  # a token without keys does not move
    centred = x[..., None, :, :] - (a @ x)[..., None, :]  # (*batch, i, j, d)
    covariance = centred.mT @ (a[..., None] * centred)
    own = wv @ covariance @ bilinear.mT
    own = own + eye if residual else own
    pull = x @ bilinear  # row i: s W_kᵀ W_q x_i
    moved = eye + centred[..., :, None] * pull[..., :, None, None, :]  # (*batch, i, j, d, d)
    blocks = a[..., None, None] * (wv @ moved)
    blocks = blocks + torch.diag_embed(own.movedim(-3, -1)).movedim((-2, -1), (-4, -3))
    return blocks.transpose(-3, -2)


def gradientness(query_weight: Tensor, key_weight: Tensor, value_weight: Tensor, output_weight: Tensor) -> Tensor:
    """How nearly the update of a head is a gradient: cos(W_O W_V, W_Qᵀ W_K) in the Frobenius inner product (S0-C4).

    The step x + W_O Σ_j a_j W_V h_j is a gradient field in x for every context iff W_O W_V = c W_Qᵀ W_K: 1 ascends G,
    −1 descends it, random weights give 0 ± 1/D.

    query, key, value (*heads, d_head, D), output (*heads, D, d_head). Returns (*heads), 0 where a product vanishes.

    >>> import torch
    >>> w = torch.eye(2, 4)
    >>> gradientness(w, w, w, w.mT), gradientness(w, w, w, -w.mT)
    (tensor(1.), tensor(-1.))
    """
    weights = {"key_weight": key_weight, "value_weight": value_weight, "output_weight": output_weight.mT}
    require_float("gradientness.query_weight", query_weight)
    for name, w in weights.items():
        require_alike(f"gradientness.{name}", require_float(f"gradientness.{name}", w), "query_weight", query_weight)
    if value_weight.shape[-2:] != output_weight.mT.shape[-2:] or query_weight.shape[-2:] != key_weight.shape[-2:]:
        got = ", ".join(shape(w) for w in (query_weight, key_weight, value_weight, output_weight))
        expected = "query, key and value weights (*heads, d_head, D) and output (*heads, D, d_head)"
        raise ValueError(sentence("gradientness", expected, got, "Split the projections by head first."))
    # through d_head × d_head products: the D × D matrices are never formed
    inner = ((query_weight @ output_weight) * (key_weight @ value_weight.mT)).sum((-2, -1))
    output_size = ((output_weight.mT @ output_weight) * (value_weight @ value_weight.mT)).sum((-2, -1))
    query_size = ((query_weight @ query_weight.mT) * (key_weight @ key_weight.mT)).sum((-2, -1))
    size = (output_size * query_size).clamp_min(0).sqrt()
    return torch.where(size == 0, 0, inner / torch.where(size == 0, 1, size))


def _root(where: str, metric: Tensor, dim: int, eta: Tensor) -> Tensor:
    """L with LLᵀ = M."""
    require_alike(where, require_float(where, metric), "eta", eta)
    if metric.shape[-2:] != (dim, dim):
        raise ValueError(sentence(where, f"a number or shape (d={dim}, d={dim})", shape(metric), "Match the measure."))
    factor, failed = torch.linalg.cholesky_ex(metric)
    if bool((failed != 0).any()) or not torch.allclose(metric, metric.mT):
        got = "one that is not"
        raise ValueError(sentence(where, "a symmetric positive definite matrix", got, "A metric must be one."))
    return factor


def _weight(where: str, weight: Tensor, x: Tensor) -> Tensor:
    require_alike(where, require_float(where, weight), "x", x)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        expected = f"shape (out, d={x.shape[-1]}) as nn.Linear.weight"
        raise ValueError(sentence(where, expected, shape(weight), "Columns match the tokens."))
    return weight
