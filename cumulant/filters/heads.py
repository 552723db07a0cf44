"""A head of attention as one step of the switching engine: tokens are modes, nothing is observed (S2-E11 … S2-E15).

Read key i as the old mode and query j as the new one. The softmax weights are then the law of the old mode given the
new, A_ji = P(s = i | s' = j), and a filter needs the other direction. Any law π′ of the new modes gives it by Bayes:

    σ_i = Σ_j A_ji π′_j                the implied law of the old mode: attention received by each key        (S2-C8)
    P(j | i) = A_ji π′_j / σ_i         the transition; its rows sum to one
    x | s = i  is certain: value_i     a belief with covariance 0, and x' = x

A step of IMM, or of GPB2, which without an observation is the same (X-16), mixes the beliefs by P(i | j) = A_ji:

    mean_j = Σ_i A_ji value_i          attention                                                              (S2-E14)
    covariance_j = Cov_{A_j}(value)    what a head drops by returning the mean; its trace is the loss       (S2-C9)

The transition depends on the beliefs, so that a stack of heads is inference in no fixed model (S2-C7). The mode weights
are consistent over a layer, σ = π′ uniform, only where the matrix is doubly stochastic: `sinkhorn_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from cumulant.attention import Attended, attend
from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.filters.packed import LinearGaussian, Normal, Parameters, pack
from cumulant.filters.protocol import Start, log_probabilities
from cumulant.filters.switching import imm
from cumulant.solve import Solution, newton

LARGE = 1 << 27  # numbers that one head may hold: its mixture has a covariance for every query and key
GROUP = 1 << 23  # numbers up to which heads go through the engine together
REACH = 100.0  # how far a step of Newton's method may go in log weights


class AttentionFilter(NamedTuple):
    """A head as a filter; j runs over queries, i over keys.

    output           (*batch, q, e)     the filter's mean given the new mode j: attention
    covariance       (*batch, q, e, e)  its covariance given j
    collapse_loss    (*batch, q)        the trace of that
    source_marginal  (*batch, n)        σ, what the filter must believe about the old modes
    transition       (*batch, n, q)     P(j | i), rows "from"
    weights          (*batch, q, n)     A, the softmax
    """

    output: Tensor
    covariance: Tensor
    collapse_loss: Tensor
    source_marginal: Tensor
    transition: Tensor
    weights: Tensor


@final
@dataclass(frozen=True, eq=False)
class Head:
    """The switching model of heads: batch entries are sequences, each with its own start and transition.

    source_marginal (batch, n), transition (batch, n, q), value (batch, n, e)
    """

    source_marginal: Tensor
    transition: Tensor
    value: Tensor

    @property
    def modes(self) -> int:
        return self.transition.shape[-1]

    @property
    def observed(self) -> int:
        return 0

    def propagator(self) -> LinearGaussian:
        """The linear-Gaussian operations with x' = x, and an observation of size 0."""
        e, q = self.value.shape[-1], self.modes
        certain = pack(self.value, self.value.new_zeros(*self.value.shape, e)).permute(1, 2, 0)  # (n, moments, batch)
        begin = Start(log_probabilities(self.source_marginal).mT, Normal(certain))
        eye, none = torch.eye(e, dtype=self.value.dtype, device=self.value.device), self.value.new_zeros
        still = Parameters(
            eye.expand(q, e, e), none(q, e, e), none(q, 0, e), none(q, 0, 0), none(q, e, 1), none(q, 0, 1)
        )
        return LinearGaussian("belief", begin, log_probabilities(self.transition).permute(1, 2, 0), still)


def attention_as_filter(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    log_weights: Tensor | None = None,
    query_weights: Tensor | None = None,
) -> AttentionFilter:
    """A head through `imm`: its output and collapse loss as the moments of a filter (module docstring).

    query, key, value  (*batch, q, d), (*batch, n, d), (*batch, n, e); leading axes broadcast, heads among them
    scale, mask, causal, log_weights  as in `cumulant.attend`; causal needs q = n
    query_weights      (*batch, q) π′, positive with sum 1; uniform if None. The output does not depend on it.

    The output is that of `cumulant.attention`, collapse_loss that of `cumulant.attend`. The filter holds a covariance
    for every pair of a query and a key, n·q·e²/2 numbers, and refuses a head with more than 1.3e8 of them: `attend` has
    output and loss in linear memory. A key that no query attends to has σ_i = 0 and, as any row would do, the row π′.
    A query without a visible key is an impossible mode, with output 0. Differentiable.

    >>> import torch
    >>> from cumulant import attention
    >>> q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> head = attention_as_filter(q, k, v)
    >>> torch.allclose(head.output, attention(q, k, v), rtol=1e-12, atol=1e-12)
    True
    >>> head.source_marginal                                       # attention received: uniform it is not
    tensor([0.1355, 0.2280, 0.1659, 0.1285, 0.3421], dtype=torch.float64)
    """
    where = "attention_as_filter"
    batch = _check_head(where, query, key, value)
    q, n, e = query.shape[-2], key.shape[-2], value.shape[-1]
    if causal and q != n:
        raise ValueError(sentence(f"{where}.causal", "as many queries as keys", f"{q} and {n}", "Pass a mask."))
    size = n * q * (e + 1) * (e + 2) // 2
    if size > LARGE:
        got, advice = f"n={n}, q={q}, e={e}", "attend(...) has output and collapse loss in linear memory."
        raise ValueError(sentence(where, f"n·q·e²/2 up to {LARGE}", got, advice))
    weights = _one_hot(query, key, batch, scale=scale, mask=mask, causal=causal, log_weights=log_weights).output
    prior = _check_prior(where, query_weights, weights)
    source = implied_source(weights, prior)[..., None]
    attended = source > 0
    joint = (weights * prior[..., None]).mT  # (*batch, n, q)
    transition = torch.where(attended, joint / torch.where(attended, source, 1), prior[..., None, :])
    values = value.expand(*batch, n, e)
    heads = source.reshape(-1, n), transition.reshape(-1, n, q), values.reshape(-1, n, e)
    mean, covariance = _run_heads(heads, max(1, GROUP // size))
    attends = weights.sum(-1, keepdim=True) > 0
    output = torch.where(attends, mean.reshape(*batch, q, e), 0)
    covariance = torch.where(attends[..., None], covariance.reshape(*batch, q, e, e), 0)
    loss = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return AttentionFilter(output, covariance, loss, source.squeeze(-1), transition, weights)


def _run_heads(heads: tuple[Tensor, ...], together: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance given each new mode after one step without observation, some heads at a time."""
    empty = heads[0].new_zeros(len(heads[0]), 1, 0)
    parts = zip(*(part.split(together) for part in (empty, *heads)), strict=True)
    records = [imm(Head(*model), y) for y, *model in parts]
    return torch.cat([r.mode_means for r in records]), torch.cat([r.mode_covariances for r in records])


def implied_source(weights: Tensor, query_weights: Tensor | None = None) -> Tensor:
    """σ = Aᵀπ′: the law of the old mode that an attention matrix implies, attention received by each key (S2-C8).

    weights (*batch, q, n), query_weights π′ (*batch, q), uniform if None. Returns (*batch, n). With uniform π′ it is
    uniform iff the columns have equal sums; a sink shows as a large entry.

    >>> import torch
    >>> implied_source(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.7500, 0.2500])
    """
    where = "implied_source.weights"
    if require_float(where, weights).ndim < 2:
        raise ValueError(sentence(where, "shape (*batch, q, n)", shape(weights), "Rows are queries."))
    prior = _check_prior("implied_source", query_weights, weights)
    return (prior[..., None, :] @ weights).squeeze(-2)


class SinkhornAttention(NamedTuple):
    """Attention with a doubly stochastic matrix.

    output       (*batch, q, e)
    weights      (*batch, q, n)  rows with sum 1, columns with sum q/n
    log_weights  (*batch, n)     weights of the keys that make it so, with mean 0
    solution     `Solution` for log_weights, one sample a batch entry; its residual is |σ − 1/n|
    """

    output: Tensor
    weights: Tensor
    log_weights: Tensor
    solution: Solution


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    steps: int = 200,
    tol: float | None = None,
) -> SinkhornAttention:
    """Attention in which every key receives the same, so that uniform mode weights survive the layer (S2-C8).

        A_ji ∝_i exp(scale ⟨q_j,k_i⟩ + w_i),      w = argmin Σ_j G_j(w)/q − Σ_i w_i/n

    It is attention with a measure e^{w_i} on the keys. The gradient of what is minimised, a sum of log-normalizers, is
    σ − 1/n: where it vanishes every column of A has the sum q/n. Sinkhorn's iteration is one way to get there; Newton's
    method is used here, which stays quick where the scores are sharp.

    query, key, value  (*batch, q, d), (*batch, n, d), (*batch, n, e); leading axes broadcast
    steps, tol         of Newton's method; tol bounds |σ − 1/n| and is 1e-12, or 32 units of rounding

    With these log_weights σ is uniform in `attention_as_filter`. Differentiable once.

    >>> import torch
    >>> q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> implied_source(sinkhorn_attention(q, k, v).weights)
    tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000], dtype=torch.float64)
    """
    batch = _check_head("sinkhorn_attention", query, key, value)
    n = key.shape[-2]

    def attended(w: Tensor) -> Attended:
        return _one_hot(query, key, batch, scale=scale, log_weights=w)

    def potential(w: Tensor) -> Tensor:
        return attended(w).log_normalizer.mean(-1) - w.mean(-1)

    def excess(w: Tensor) -> Tensor:
        return implied_source(attended(w).output) - 1 / n

    def curvature(w: Tensor) -> Tensor:
        a = attended(w).output
        # a constant in w changes nothing; with 1/n² the matrix is regular there too
        return torch.diag_embed(implied_source(a)) - a.mT @ a / a.shape[-2] + 1 / n**2

    tol = max(1e-12, 32 * torch.finfo(query.dtype).eps) if tol is None else tol
    solution = newton(potential, excess, curvature, query.new_zeros(*batch, n), tol=tol, max_steps=steps, reach=REACH)
    w = solution.value
    residual = excess(w)
    if residual.requires_grad:  # a Newton step that moves nothing and carries the derivative
        carry = torch.linalg.solve(curvature(w).detach(), residual)
        w = w - carry + carry.detach()
    weights = attended(w).output
    return SinkhornAttention(weights @ value, weights, w, solution)


def _one_hot(query: Tensor, key: Tensor, batch: torch.Size, **options) -> Attended:
    """Attention to values that are one-hot, whose output is the attention matrix."""
    n = key.shape[-2]
    one_hot = torch.eye(n, dtype=key.dtype, device=key.device).expand(*batch, n, n)
    both = query.expand(*batch, *query.shape[-2:]), key.expand(*batch, *key.shape[-2:])
    return attend(*both, one_hot, **options)


def _check_head(where: str, query: object, key: object, value: object) -> torch.Size:
    """The common batch shape."""
    tensors = {"query": query, "key": key, "value": value}
    checked = [require_float(f"{where}.{name}", tensor) for name, tensor in tensors.items()]
    for name, tensor in zip(tensors, checked, strict=True):
        require_alike(f"{where}.{name}", tensor, "query", checked[0])
        if tensor.dtype not in (torch.float32, torch.float64):
            advice = "Covariances are formed: call .float() first."
            raise TypeError(sentence(f"{where}.{name}", "float32 or float64", tensor.dtype, advice))
        require_finite(f"{where}.{name}", tensor)
        if tensor.ndim < 2 or not tensor.shape[-2:].numel():
            expected, advice = "shape (*batch, tokens ≥ 1, width ≥ 1)", "A filter needs modes and a state."
            raise ValueError(sentence(f"{where}.{name}", expected, shape(tensor), advice))
    q, k, v = checked
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        got = ", ".join(shape(tensor) for tensor in checked)
        raise ValueError(sentence(where, "(*batch, q, d), (*batch, n, d), (*batch, n, e)", got, "Match d and n."))
    return broadcast(where, *(tensor.shape[:-2] for tensor in checked))


def _check_prior(where: str, query_weights: Tensor | None, weights: Tensor) -> Tensor:
    """π′ (*batch, q), uniform if None."""
    q = weights.shape[-2]
    if query_weights is None:
        return weights.new_full(weights.shape[:-1], 1 / max(q, 1))
    prior = require_float(f"{where}.query_weights", query_weights)
    require_alike(f"{where}.query_weights", prior, "weights", weights)
    rows = weights.shape[:-1]
    if not prior.ndim or prior.shape[-1] != q or broadcast(where, prior.shape[:-1], rows[:-1]) != rows[:-1]:
        expected = f"shape (*batch, q={q}) that broadcasts to {tuple(rows)}"
        raise ValueError(sentence(f"{where}.query_weights", expected, shape(prior), "One a query."))
    slack = 1e3 * torch.finfo(prior.dtype).eps
    if not holds((prior > 0).all(-1) & ((prior.sum(-1) - 1).abs() <= slack)):
        got = f"a smallest of {prior.min().item():.3g} and sums from {prior.sum(-1).min().item():.6g}"
        advice = "A new mode of weight 0 has no belief; drop that query."
        raise ValueError(sentence(f"{where}.query_weights", "positive weights with sum 1", got, advice))
    return prior.expand(rows)
