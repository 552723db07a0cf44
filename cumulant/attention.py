"""Attention: the mean of the values under the measure of the keys, tilted by the query (S0-E7, S1-E1).

    h_i = Σ_j e^{w_ij} δ_{(k_j, v_j)},     η_i = scale · q_i,     G_i(η, θ) = log Σ_j exp(⟨η,k_j⟩ + ⟨θ,v_j⟩ + w_ij)
    output_i = ∇_θ G_i(η_i, 0) = Σ_j p_ij v_j

What transformers add to the formula are edits of the measure, and of nothing else:

    padding, causal mask, window   w_ij = −∞: the atom is absent
    ALiBi, T5 and other biases     w_ij, a log base weight
    sink, softmax-plus-one         one more atom at k = 0, v = 0 with its own log weight
    grouped heads (GQA, MQA)       several natural parameters share one measure
    RoPE                           atoms R_j k_j, parameter R_i q_i: rotate both before the call; the values stay
    cache                          measures add: offset is the index of the first query among the keys
    temperature                    scale: 1/√d by default; ∇ of G/scale in q is exactly attention

A query to which no key is visible has output 0, G = −∞, entropy 0 and gradient 0.
"""

from __future__ import annotations

from inspect import signature
from math import isfinite, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cumulant.checks import broadcast, from_numpy, require_alike, require_float, sentence, shape
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast
from cumulant.kernels.dense import accumulate
from cumulant.kernels.moments import safe_logaddexp
from cumulant.kernels.native.direct import Arguments, MomentsSettings
from cumulant.kernels.operator import scaled_moments
from cumulant.kernels.support import Band
from cumulant.typing import PerQuery, Queries

# what the kernel must form for `Attended`
OWN_VALUES = frozenset({"mean", "mean_score", "mean_log_weight", "log_sum_square", "value_trace"})
KEYS_AS_VALUES = frozenset({"atom_mean", "mean_score", "mean_log_weight", "log_sum_square", "atom_trace"})


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention, argument for argument, in linear memory and twice differentiable.

        output_i = Σ_j softmax_j(scale · ⟨q_i,k_j⟩ + bias_ij) v_j

    query (*batch, q, d), key (*batch, n, d), value (*batch, n, e). ``attn_mask`` is Boolean (True = attend) or a bias
    of query's dtype, broadcastable to (*batch, q, n); ``is_causal`` aligns the first query with the first key. Unlike
    in torch a value width other than d stays linear in memory. With dropout the weights are no probability, so that
    torch's own function is called. Under torch.autocast arguments and output have its dtype; sums are formed in
    float32.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    query, key, value, attn_mask = from_numpy(query, key, value, attn_mask)
    query, key, value = autocast(query, key, value)
    attn_mask = autocast(attn_mask)[0]
    _check_heads(query, key, value, enable_gqa)
    if is_causal and attn_mask is not None:
        advice = "Use attend(..., mask=..., causal=True)."
        raise ValueError(sentence("attention.attn_mask", "None with is_causal, as torch", shape(attn_mask), advice))
    if not 0 <= dropout_p < 1:
        raise ValueError(sentence("attention.dropout_p", "a probability in [0, 1)", dropout_p, "0 is off."))
    if dropout_p > 0:
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return scaled_dot_product_attention(query, key, value, **options, enable_gqa=enable_gqa)
    mask, bias = _mask_or_bias(attn_mask, query, key)
    settings = MomentsSettings(frozenset({"mean"}), _scale("attention", query, scale), is_causal, None, 0, "attention")
    _require_one_dtype("attention", query, key, value)
    mean = scaled_moments(Arguments(query, key, value, bias, mask, None), None, settings, "auto").mean
    return mean.to(query.dtype)


class Attended(NamedTuple):
    """Attention and the statistics of its family, per query; i runs over queries, j over keys.

    output           (*batch, q, e)  Σ_j p_ij v_j
    log_normalizer   (*batch, q)     G
    entropy          (*batch, q)     −Σ p log p, in nats, the sink included
    effective_atoms  (*batch, q)     1/Σp²
    kl_to_base       (*batch, q)     KL(p ‖ h/|h|): how far the query moved the measure; at most log N if all w are
                                     equal, and above log N − 1 the softmax has condensed on a few keys (X-9)
    collapse_loss    (*batch, q)     tr Cov_p(v): the spread that averaging the values discards (S2-C9)
    sink_mass        (*batch, q)     probability of the sink, 0 without one
    source_marginal  (*batch, n)     Σ_i π_i p_ij, attention received by each key (S2-C8), or None if not asked for
    """

    output: Queries
    log_normalizer: PerQuery
    entropy: PerQuery
    effective_atoms: PerQuery
    kl_to_base: PerQuery
    collapse_loss: PerQuery
    sink_mass: PerQuery
    source_marginal: Tensor | None = None

    @property
    def perplexity(self) -> PerQuery:
        """exp of the entropy."""
        return self.entropy.exp()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    log_weights: Tensor | None = None,
    sink: float | Tensor | None = None,
    source_marginal: bool | Tensor = False,
    backend: str = "auto",
    **others: object,
) -> Attended:
    """Attention with its log-normalizer, entropy, divergence and collapse loss, in linear memory and differentiable.

    query            (*batch, q, d); or (d,) for one
    key              (*batch, n, d); fewer heads than query on the last batch axis are shared by groups of heads
    value            (*batch, n, e); the keys themselves if None
    scale            1/√d if None, as in SDPA; η = scale · query
    mask             Boolean, broadcastable to (*batch, q, n); True = attend
    causal, offset   key j is visible to query i iff j ≤ offset + i. offset is where the queries start among the keys: 0
                     for a whole sequence, the number of cached keys, n − q, for the next tokens of a decoder; it is
                     required where q ≠ n
    window           only the last ``window`` visible keys (causal), or |offset + i − j| < window
    log_weights      (*batch, n) or (*batch, q, n) by rank, batch axes of size 1 allowed: biases, priors; −inf removes a
                     key. A bias (heads, q, n) is passed as bias[None]
    sink             log weight of one more atom with key 0 and value 0, a number or one per batch entry (*batch)
    source_marginal  True: also Σ_i p_ij / q; a tensor (*batch, q): Σ_i π_i p_ij for these weights of the queries
    backend          as in `moments`
    others           nothing: arguments that only scaled_dot_product_attention has are refused with ours in their place

    NumPy arrays are taken as tensors over the same memory, and results are tensors.
    A key that is not visible to a query has no influence on it, whatever it holds. Half precision is accumulated and
    returned in float32; under torch.autocast query, key and value are rounded as for a matrix product.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> attended = attend(x, x, causal=True, scale=1.0)
    >>> attended.output
    tensor([[1.0000, 0.0000],
            [0.2689, 0.7311]])
    >>> attended.entropy, attended.perplexity
    (tensor([0.0000, 0.5822]), tensor([1.0000, 1.7900]))
    """
    if others:
        _refuse(next(iter(others)))
    query, key, value, log_weights, mask = from_numpy(query, key, value, log_weights, mask)
    query, key = autocast(query, key)
    value, log_weights = autocast(value, log_weights)
    if log_weights is not None:
        require_alike("attend.log_weights", require_float("attend.log_weights", log_weights), "query", query)
    factor = _scale("attend", query, scale)
    _require_one_dtype("attend", query, key, value)
    statistics = OWN_VALUES if value is not None else KEYS_AS_VALUES
    settings = MomentsSettings(statistics, factor, bool(causal), window, offset, "attend")
    x = Arguments(query, key, value, log_weights, mask, None)
    m = scaled_moments(x, sink, settings, backend)
    g = m.log_normalizer
    kl = m.mean_score + (_log_base_mass(x, sink, settings, g) - g)
    return Attended(
        output=m.mean,
        log_normalizer=g,
        entropy=m.entropy,
        effective_atoms=m.effective_atoms,
        kl_to_base=kl if m.nonempty else torch.where(g == -torch.inf, 0, kl),
        collapse_loss=m.value_trace,
        sink_mass=torch.zeros_like(g) if m.sink_mass is None else m.sink_mass,
        source_marginal=None if source_marginal is False else _received(x, factor, g, source_marginal, settings),
    )


SDPA_ARGUMENTS = {  # of torch's scaled_dot_product_attention, or of similar functions → what to pass here
    "is_causal": "causal=True, and offset=n - q where there are more keys than queries",
    "attn_mask": "mask= for a Boolean mask, True = attend, or log_weights= for a bias that is added to the scores",
    "dropout_p": "nothing, as weights with dropout are no probabilities; cumulant.attention has dropout_p",
    "enable_gqa": "nothing, as fewer heads of key and value than of query are always shared by groups",
    "start": "offset=, the number of keys before the first query",
    "temperature": "scale=, one over it",
    "softmax_scale": "scale=",
    "bias": "log_weights=",
    **dict.fromkeys(("key_padding_mask", "attention_mask"), "mask=, True = attend, with an axis of queries"),
    **{short: f"{name}=" for short, name in (("q", "query"), ("k", "key"), ("v", "value"), ("values", "value"))},
}


def _refuse(name: str) -> None:
    """An argument that `attend` does not have."""
    if name not in SDPA_ARGUMENTS:
        known = [parameter for parameter in signature(attend).parameters if parameter != "others"]
        raise TypeError(sentence(f"attend.{name}", f"one of {', '.join(known)}", name, "Leave it out."))
    raise TypeError(sentence("attend", SDPA_ARGUMENTS[name], f"{name}=", "See help(cumulant.attend)."))


def _log_base_mass(x: Arguments, sink: float | Tensor | None, settings: MomentsSettings, g: Tensor) -> Tensor | float:
    """G(0): the log of the mass that is visible to each query; 0 where there is none."""
    if x.mask is not None or x.log_weights is not None:  # by the same sum over scores that are 0
        zeros = x._replace(eta=torch.zeros_like(x.eta[..., :1]), atoms=torch.zeros_like(x.atoms[..., :1]), values=None)
        base = scaled_moments(zeros, sink, settings._replace(wanted=frozenset(), scale=1.0), "auto").log_normalizer
        return torch.where(base == -torch.inf, 0, base)
    keys, queries = x.atoms.shape[-2], 1 if x.eta.ndim == 1 else x.eta.shape[-2]
    first = settings.offset or 0
    if settings.window is not None:
        band = Band(settings.causal, settings.window, first, max(1, queries))
        low, high = band.reached(torch.arange(queries, device=g.device), keys)
        count = (high - low).to(g.dtype)
    elif settings.causal and queries > 1:
        count = torch.arange(first + 1, first + queries + 1, dtype=g.dtype, device=g.device).clamp_(0, keys)
    else:
        alone = min(max(first + 1, 0), keys) if settings.causal else keys
        if sink is None:
            return log(alone) if alone else 0.0
        count = torch.full((1,), float(alone), dtype=g.dtype, device=g.device)
    count = count[0] if x.eta.ndim == 1 else count
    if sink is None:
        return count.clamp_min_(1).log_()
    s = sink.to(g.device, g.dtype) if isinstance(sink, Tensor) else torch.full((), sink, dtype=g.dtype, device=g.device)
    base = safe_logaddexp(count.log(), (s if s.ndim == 0 or x.eta.ndim == 1 else s[..., None]).expand(g.shape))
    return torch.where(base == -torch.inf, 0, base)


def _received(x: Arguments, scale: float, g: Tensor, weights: bool | Tensor, settings: MomentsSettings) -> Tensor:
    """Σ_i π_i p_ij, as attention of the keys over the queries, which have the log weights log π_i − G_i.

    Both axes are reversed, which turns "key j ≤ offset + i" into "query i' ≤ offset' + key j'" with j' = n−1−j.
    """
    eta, key = accumulate(x.eta) * scale, accumulate(x.atoms)
    rows = eta[None] if eta.ndim == 1 else eta
    g = g[..., None] if eta.ndim == 1 else g
    q, n = rows.shape[-2], key.shape[-2]
    if isinstance(weights, Tensor):
        require_alike("attend.source_marginal", require_float("attend.source_marginal", weights), "query", x.eta)
        if weights.shape[-1] != q:
            expected = f"weights of shape (*batch, q={q})"
            raise ValueError(sentence("attend.source_marginal", expected, shape(weights), "One per query."))
        log_share = weights.to(g.dtype).log() - g
    else:
        log_share = -g - (log(q) if q else -torch.inf)
    log_share = torch.where(g == -torch.inf, -torch.inf, log_share).flip(-1)
    heads = g.shape[-2] if g.ndim > 1 else 1
    keys = key.to(g.dtype).flip(-2)
    if key.ndim > 2 and 1 < key.shape[-3] < heads:
        keys = keys.repeat_interleave(heads // key.shape[-3], dim=-3)
    keys = keys.expand(*g.shape[:-1], n, -1)
    mask, w = x.mask, x.log_weights
    if mask is not None:
        mask = (mask if mask.ndim > 1 else mask[None]).expand(*mask.shape[:-2], q, n).flip(-1, -2).mT
    per_key = None
    if w is not None and w.ndim == key.ndim - 1:
        per_key = w.to(g.dtype).flip(-1)
        if key.ndim > 2 and 1 < w.shape[-2] < heads:
            per_key = per_key.repeat_interleave(heads // w.shape[-2], dim=-2)
    elif w is not None:
        log_share = log_share[..., None, :] + w.to(g.dtype).expand(*w.shape[:-2], q, n).flip(-1, -2).mT
    g_of_keys = moments(
        keys,
        rows.to(g.dtype).flip(-2).expand(*g.shape[:-1], q, -1),
        log_weights=log_share,
        mask=mask,
        causal=settings.causal,
        window=settings.window,
        offset=(settings.offset or 0) + q - n,
        statistics=(),
    ).log_normalizer
    return (g_of_keys if per_key is None else g_of_keys + per_key).exp().flip(-1)


def _scale(caller: str, query: Tensor, scale: float | None) -> float:
    """The factor in η = scale · q, 1/√d by default (S1-E1)."""
    require_float(f"{caller}.query", query)
    if query.ndim == 0:
        raise ValueError(sentence(f"{caller}.query", "shape (*batch, q, d) or (d,)", shape(query), "Add the axes."))
    if scale is None:
        return max(1, query.shape[-1]) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not isfinite(scale):
        advice = "For one scale per head multiply the queries before the call."
        raise ValueError(sentence(f"{caller}.scale", "a finite number or None", scale, advice))
    return float(scale)


def _require_one_dtype(caller: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None:
            require_alike(f"{caller}.{name}", require_float(f"{caller}.{name}", tensor), "query", query)


def _mask_or_bias(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """SDPA's mask as our mask or our log weights; one bias for all queries is a weight per atom."""
    if attn_mask is None:
        return None, None
    if not isinstance(attn_mask, Tensor) or (attn_mask.dtype != torch.bool and not attn_mask.is_floating_point()):
        got = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        advice = "True means attend; for 0/1 integers call .bool()."
        raise TypeError(sentence("attention.attn_mask", "a Boolean mask or a floating bias", got, advice))
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    require_alike("attention.attn_mask", attn_mask, "query", query)
    wide = attn_mask.reshape((1,) * (query.ndim - attn_mask.ndim) + attn_mask.shape)
    if wide.shape[-1] == 1:
        wide = wide.expand(*wide.shape[:-1], key.shape[-2])
    return None, wide[..., 0, :] if wide.shape[-2] == 1 else wide


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if require_float(f"attention.{name}", tensor).ndim < 2:
            raise ValueError(sentence(f"attention.{name}", "at least 2 axes", shape(tensor), "Add the sequence axis."))
    if enable_gqa or query.ndim < 3:
        return
    broadcast("attention (without enable_gqa=True)", query.shape[:-2], key.shape[:-2], value.shape[:-2])
