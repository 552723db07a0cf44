"""Contrastive and large-vocabulary losses, each a log-normalizer minus an inner product (THEORY §10).

    loss(η, x⁺) = G(η) − ⟨η, x⁺⟩ = −log p_η(x⁺),        G(η) = log Σ_j exp⟨η, x_j⟩

The negative log-likelihood of the positive x⁺ under the family p_η whose measure counts the candidates x_j. InfoNCE,
NT-Xent, SupCon, CLIP and the softmax over a vocabulary differ in what η, the candidates and x⁺ are; NCE and word2vec
put a pair {0, 1} in the place of the candidates; von Mises–Fisher puts the whole sphere there. Gradients are
∇G − x⁺: the mean of the family minus the data.

The softmax losses never hold queries × candidates, forward or backward, and are twice differentiable. Half precision is
accumulated and returned in float32. Nothing is normalised on the way: for cosine similarity pass unit vectors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.kernels import moments
from cumulant.kernels.dense import accumulate
from cumulant.kernels.losses import Plan, losses
from cumulant.kernels.strips import positives_of
from cumulant.measures import Sphere

REDUCTIONS = ("mean", "sum", "none")


def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    exclude_self: bool = False,
    positives: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """How surely each query finds its key among all keys (InfoNCE; with several positives SupCon, symmetric CLIP).

        ℓ_i = G(q_i/τ) − mean over positives k⁺ of ⟨q_i, k⁺⟩/τ,        G(η) = log Σ_j exp⟨η, k_j⟩

    query         (N, d)
    key           (M, d)
    temperature   τ > 0, a number or a tensor without axes, which may require a gradient
    symmetric     ½ (mean of ℓ over queries + mean of ℓ over keys, each key looking for its queries); needs N = M
    exclude_self  query i and key i are one point: no candidate for itself (log weight −inf), no positive; needs N = M
    positives     None: key i belongs to query i (N ≤ M); integers (N,): key positives[i] does; Boolean (N, M): all
                  that are True, averaged outside the logarithm (L_out of SupCon)
    reduction     "mean" over queries that have positives (0 if none has), "sum", or "none": (N,)

    A query without positives or without candidates has loss 0 and gradient 0.

    >>> import torch
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> info_nce(x, x, temperature=0.5)                          # log(e² + 2) − 2
    tensor(0.2395, dtype=torch.float64)
    >>> info_nce(x, x[:2] + x[1:], positives=torch.tensor([0, 1, 1]), reduction="none")
    tensor([0.3133, 0.6931, 0.3133], dtype=torch.float64)
    """
    where = "info_nce"
    _matrix_pair(where, "query", query, "key", key)
    _known_reduction(where, reduction)
    n, m = query.shape[0], key.shape[0]
    if (symmetric or exclude_self) and n != m:
        name = "symmetric" if symmetric else "exclude_self"
        raise ValueError(
            sentence(f"{where}.{name}", "as many queries as keys", f"{n} and {m}", "Leave it off, or match them.")
        )
    target = _positives(positives, query, m, exclude_self)
    eta = accumulate(query) / _temperature(where, temperature, query)
    counts = positives_of(target, m, exclude_self)
    sides = [counts.row_counts, counts.column_counts] if symmetric else [counts.row_counts]
    weight = None if reduction == "none" else torch.cat([_weights(c, reduction, eta) for c in sides]) / len(sides)
    plan = Plan(exclude_self=exclude_self, two_sided=symmetric)
    value = losses(eta, accumulate(key), target, plan, weight=weight).value
    return (value[:n] + value[n:]) / 2 if symmetric and reduction == "none" else value


def nt_xent(view1: Tensor, view2: Tensor, *, temperature: float | Tensor = 1.0, reduction: str = "mean") -> Tensor:
    """Each of 2N points looks for its other view among the 2N − 1 other points (NT-Xent, SimCLR).

        ℓ_i = G(z_i/τ) − ⟨z_i, z_i'⟩/τ,        G(η) = log Σ_{j≠i} exp⟨η, z_j⟩

    view1, view2 (N, d); row i of both shows the same thing. Unit vectors give the cosine form, others are taken as they
    are. "none" returns (2N,), first view first.

    >>> import torch
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> nt_xent(x, x)                                            # log(e + 2) − 1
    tensor(0.5514, dtype=torch.float64)
    """
    _matrix_pair("nt_xent", "view1", view1, "view2", view2)
    if view1.shape != view2.shape:
        expected = f"shape {shape(view1)} as view1"
        raise ValueError(sentence("nt_xent.view2", expected, shape(view2), "Row i of both views shows the same thing."))
    points = torch.cat([view1, view2])
    other = torch.arange(len(points), device=points.device).roll(len(view1))
    return info_nce(points, points, temperature=temperature, exclude_self=True, positives=other, reduction=reduction)


class VocabularyLoss(NamedTuple):
    """loss, and G(h) of every position in the shape of ``targets``; gradients flow through both."""

    loss: Tensor
    log_normalizer: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_log_normalizer: bool = False,
) -> Tensor | VocabularyLoss:
    """Cross-entropy of a linear classifier over a vocabulary, without its logits.

        ℓ = G(h) − s_y + z G(h)²,      s_v = ⟨h, w_v⟩ + b_v,      G(h) = log Σ_v exp s_v

    hidden           (*batch, d)
    weight           (V, d); the atoms of the family
    targets          (*batch) integers in 0 … V−1, or ``ignore_index``: loss 0, gradient 0, not counted in the mean
    bias             (V,) log base weights; −inf removes a word
    z_loss           z, keeps G near 0
    label_smoothing  ε: s_y becomes (1 − ε) s_y + ε · mean of s over the vocabulary, as in torch
    softcap          c: scores become c tanh(s/c). Bounded scores are not linear in h, so this is no exponential family
                     in h: the gradient is not mean − w_y
    reduction        "mean" over positions that are not ignored (0 if all are, where torch has NaN), "sum", or "none"
    return_log_normalizer   also return G, as `VocabularyLoss`

    >>> import torch
    >>> h, w = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    >>> linear_cross_entropy(h, w, torch.tensor([0, 1]), reduction="none")          # log(1 + e⁻¹), log(1 + e⁻²)
    tensor([0.3133, 0.1269], dtype=torch.float64)
    >>> linear_cross_entropy(h, w, torch.tensor([0, -100]), return_log_normalizer=True).log_normalizer
    tensor([1.3133, 2.1269], dtype=torch.float64)
    """
    where = "linear_cross_entropy"
    _vocabulary(hidden, weight, targets, bias, ignore_index)
    _known_reduction(where, reduction)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(sentence(f"{where}.label_smoothing", "a number in [0, 1]", label_smoothing, "0 is off."))
    if softcap is not None and not softcap > 0:
        raise ValueError(sentence(f"{where}.softcap", "a positive bound or None", softcap, "None is off."))
    rows, flat = accumulate(hidden).reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    index = torch.where(flat == ignore_index, -1, flat)
    counted = None if reduction == "none" else _weights(index >= 0, reduction, rows)
    plan = Plan(softcap=softcap, smoothing=label_smoothing, z_loss=z_loss)
    own = None if bias is None else accumulate(bias)
    value, log_normalizer = losses(rows, accumulate(weight), index, plan, bias=own, weight=counted)
    loss = value.reshape(targets.shape) if reduction == "none" else value
    return VocabularyLoss(loss, log_normalizer.reshape(targets.shape)) if return_log_normalizer else loss


def nce_loss(
    data_score: Tensor,
    noise_score: Tensor,
    data_log_noise: Tensor,
    noise_log_noise: Tensor,
    *,
    reduction: str = "mean",
) -> Tensor:
    """Telling data from k noise samples by their unnormalised log-density s (noise-contrastive estimation).

        ℓ = g(Δ(x)) − Δ(x) + Σ_{noise x'} g(Δ(x')),      Δ = s − log k − log p_noise,      g(Δ) = log(1 + e^Δ)

    g is the log-normalizer of the pair {0, 1}: binary cross-entropy with logit Δ. The minimiser is the normalised
    log-density of the data, whether or not s was normalised.

    data_score       (*batch)     s of one data point each
    noise_score      (*batch, k)  s of its k noise samples
    data_log_noise   (*batch)     log p_noise of the data point
    noise_log_noise  (*batch, k)  log p_noise of the noise samples

    >>> import torch
    >>> zero = torch.zeros(1, 2, dtype=torch.float64)
    >>> nce_loss(zero[:, 0], zero, zero[:, 0], zero)             # log(1 + 2) + 2 log(1 + 1/2)
    tensor(1.9095, dtype=torch.float64)
    """
    _known_reduction("nce_loss", reduction)
    scores = {"data_score": data_score, "data_log_noise": data_log_noise}
    scores |= {"noise_score": noise_score, "noise_log_noise": noise_log_noise}
    for name, tensor in scores.items():
        require_float(f"nce_loss.{name}", tensor)
    if noise_score.ndim != data_score.ndim + 1 or noise_score.shape[-1] == 0:
        expected = f"shape (*batch, k ≥ 1) with batch {shape(data_score)} of data_score"
        raise ValueError(sentence("nce_loss.noise_score", expected, shape(noise_score), "Noise samples go last."))
    broadcast("nce_loss.noise_score", data_score.shape, noise_score.shape[:-1])
    broadcast("nce_loss.data_log_noise", data_score.shape, data_log_noise.shape)
    broadcast("nce_loss.noise_log_noise", noise_score.shape, noise_log_noise.shape)
    log_k = math.log(noise_score.shape[-1])
    data = accumulate(data_score) - accumulate(data_log_noise) - log_k
    noise = accumulate(noise_score) - accumulate(noise_log_noise) - log_k
    return _reduce(-logsigmoid(data) - logsigmoid(-noise).sum(-1), reduction)


def sgns_loss(center: Tensor, context: Tensor, negatives: Tensor, *, reduction: str = "mean") -> Tensor:
    """Skip-gram with negative sampling (word2vec): a true context against k drawn ones.

        ℓ = g(⟨c,o⟩) − ⟨c,o⟩ + Σ_{negatives o'} g(⟨c,o'⟩),        g(Δ) = log(1 + e^Δ)

    NCE without its correction: at the optimum ⟨c,o⟩ is the pointwise mutual information minus log k, no log-density.

    center, context (*batch, d), negatives (*batch, k, d).

    >>> import torch
    >>> c = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    >>> sgns_loss(c, c, -c[:, None])                             # 2 log(1 + e⁻¹)
    tensor(0.6265, dtype=torch.float64)
    """
    _known_reduction("sgns_loss", reduction)
    for name, tensor in {"center": center, "context": context, "negatives": negatives}.items():
        require_float(f"sgns_loss.{name}", tensor)
        require_alike(f"sgns_loss.{name}", tensor, "center", center)
    if context.shape[-1:] != center.shape[-1:]:
        expected = f"shape (*batch, d) as center {shape(center)}"
        raise ValueError(sentence("sgns_loss.context", expected, shape(context), "Both embed into one space."))
    if negatives.ndim < 2 or negatives.shape[-1] != center.shape[-1]:
        expected = f"shape (*batch, k, d={center.shape[-1]})"
        raise ValueError(sentence("sgns_loss.negatives", expected, shape(negatives), "Negatives go last but one."))
    broadcast("sgns_loss", center.shape[:-1], context.shape[:-1], negatives.shape[:-2])
    c = accumulate(center)
    true = (c * accumulate(context)).sum(-1)
    drawn = (accumulate(negatives) @ c[..., None])[..., 0]
    return _reduce(-logsigmoid(true) - logsigmoid(-drawn).sum(-1), reduction)


def vmf_nll(x: Tensor, eta: Tensor, *, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of directions under von Mises–Fisher, relative to the uniform law on the sphere.

        ℓ = G(η) − ⟨η, x⟩,        G(η) = log ₀F₁(; d/2; κ²/4),      η = κ · mean direction

    For the density with respect to surface area add log(2 π^{d/2} / Γ(d/2)), a constant.

    x    (*batch, d) unit vectors
    eta  (*batch, d) natural parameters; leading axes broadcast

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    >>> vmf_nll(x, 2 * x)                                        # log(sinh 2 / 2) − 2
    tensor(-1.4048, dtype=torch.float64)
    """
    _known_reduction("vmf_nll", reduction)
    require_alike("vmf_nll.eta", require_float("vmf_nll.eta", eta), "x", require_float("vmf_nll.x", x))
    if x.ndim == 0 or eta.ndim == 0 or x.shape[-1] != eta.shape[-1] or x.shape[-1] == 0:
        raise ValueError(sentence("vmf_nll.eta", f"the last axis of x {shape(x)}", shape(eta), "Both are (*batch, d)."))
    broadcast("vmf_nll", x.shape[:-1], eta.shape[:-1])
    point, natural = accumulate(x), accumulate(eta)
    length = torch.linalg.vector_norm(point.detach(), dim=-1)
    if not holds((length - 1).abs() <= 8 * torch.finfo(x.dtype).eps ** 0.5):
        got = f"lengths from {length.min():.4g} to {length.max():.4g}"
        raise ValueError(sentence("vmf_nll.x", "unit vectors", got, "Call torch.nn.functional.normalize first."))
    return _reduce(Sphere(x.shape[-1]).log_normalizer(natural) - (natural * point).sum(-1), reduction)


class Parts(NamedTuple):
    """alignment + uniformity = loss; gradients flow through both."""

    alignment: Tensor
    uniformity: Tensor


def alignment_uniformity(query: Tensor, key: Tensor, *, temperature: float | Tensor = 1.0) -> Parts:
    """The two parts of InfoNCE: pairs are pulled together, and queries pushed away from where keys are dense.

        alignment = −mean ⟨q_i, k_i⟩/τ,        uniformity = mean G(q_i/τ),        info_nce = alignment + uniformity

    query (N, d), key (M ≥ N, d), key i belongs to query i; temperature as in `info_nce`. On unit vectors ⟨q,k⟩ = 1 −
    ½|q−k|², so that both are those of Wang and Isola with the Gaussian potential e^{−|q−k|²/2τ}, shifted by ∓1/τ (and
    log M). Linear memory, twice differentiable; both are 0 without queries.

    >>> import torch
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> alignment_uniformity(x, x, temperature=0.5)                              # −2, log(e² + 2)
    Parts(alignment=tensor(-2., dtype=torch.float64), uniformity=tensor(2.2395, dtype=torch.float64))
    """
    where = "alignment_uniformity"
    _matrix_pair(where, "query", query, "key", key)
    n, m = query.shape[0], key.shape[0]
    if n > m:
        raise ValueError(sentence(f"{where}.key", f"at least {n} rows, one per query", m, "Key i belongs to query i."))
    eta, atoms = accumulate(query) / _temperature(where, temperature, query), accumulate(key)
    log_normalizer = moments(eta, atoms, statistics=()).log_normalizer
    return Parts(-_reduce((eta * atoms[:n]).sum(-1), "mean"), _reduce(log_normalizer, "mean"))


def sgns_optimum(joint: Tensor, negatives: float) -> Tensor:
    """The scores at which `sgns_loss` is smallest in expectation: pointwise mutual information minus log k.

        s_ab = log(P_ab / (P_a P_b)) − log k,        negatives drawn from P_b

    joint (a, b): probabilities or counts of word a with context b; only their ratios matter. negatives is k > 0.
    −inf for pairs that never occur.

    >>> import torch
    >>> sgns_optimum(torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64), 1)        # log(3/2), log(1/2)
    tensor([[ 0.4055, -0.6931],
            [-0.6931,  0.4055]], dtype=torch.float64)
    """
    p = accumulate(require_float("sgns_optimum.joint", joint))
    if p.ndim != 2 or not holds((p >= 0) & (p < torch.inf)):
        got = shape(p) if p.ndim != 2 else "a value that is negative, infinite or NaN"
        raise ValueError(sentence("sgns_optimum.joint", "non-negative finite numbers (a, b)", got, "Pass counts."))
    if not 0 < negatives < math.inf:
        raise ValueError(sentence("sgns_optimum.negatives", "a positive number", negatives, "It is k of sgns_loss."))
    seen = p > 0
    rows, columns = p.sum(1, keepdim=True), p.sum(0, keepdim=True)
    logs = [torch.where(seen, t, 1).log() for t in (p, p.sum(), rows, columns)]
    return torch.where(seen, logs[0] + logs[1] - logs[2] - logs[3] - math.log(negatives), -torch.inf)


def mutual_information_bound(loss: float | Tensor, candidates: int) -> Tensor:
    """What an InfoNCE loss proves about the views: I(query; key) ≥ log N − loss, in nats.

    loss is the mean of `info_nce` with one positive among N candidates, itself included, drawn independently. The bound
    never exceeds log N, however much the views share: it saturates, and needs N ≥ e^I.

    >>> mutual_information_bound(0.5, 100)
    tensor(4.1052)
    """
    if candidates < 1:
        got, advice = candidates, "Count the positive too."
        raise ValueError(sentence("mutual_information_bound.candidates", "at least one", got, advice))
    return math.log(candidates) - torch.as_tensor(loss)


# ---------------------------------------------------------------------- arguments


def _known_reduction(where: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        expected = f"one of {', '.join(map(repr, REDUCTIONS))}"
        raise ValueError(sentence(f"{where}.reduction", expected, repr(reduction), "Pick one."))


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / (max(1, loss.numel()) if reduction == "mean" else 1)


def _weights(counts: Tensor, reduction: str, like: Tensor) -> Tensor:
    """1 for every line that has positives, divided by their number for a mean."""
    has = (counts > 0).to(like.dtype)
    return has / has.sum().clamp_min(1) if reduction == "mean" else has


def _matrix_pair(where: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    for name, tensor in ((first, a), (second, b)):
        if require_float(f"{where}.{name}", tensor).ndim != 2:
            raise ValueError(sentence(f"{where}.{name}", "shape (N, d)", shape(tensor), "Flatten the leading axes."))
    if a.shape[1] != b.shape[1]:
        expected = f"dimension d={a.shape[1]} as {first}"
        raise ValueError(sentence(f"{where}.{second}", expected, shape(b), "Project both into one space."))
    require_alike(f"{where}.{second}", b, first, a)


def _temperature(where: str, temperature: float | Tensor, query: Tensor) -> float | Tensor:
    where, advice = f"{where}.temperature", "Smaller is sharper; 0.07 is common for unit vectors."
    if isinstance(temperature, Tensor):
        if temperature.ndim:
            raise ValueError(sentence(where, "a number or a tensor without axes", shape(temperature), advice))
        require_float(where, temperature)
        good = holds((temperature > 0) & temperature.isfinite())
        temperature = accumulate(temperature).to(accumulate(query[:0]).dtype)
    else:
        good = 0 < temperature < float("inf")
    if not good:
        raise ValueError(sentence(where, "a positive finite number", temperature, advice))
    return temperature


def _positives(positives: Tensor | None, query: Tensor, m: int, exclude_self: bool) -> Tensor:
    """(N,) indices or a Boolean (N, M)."""
    n, where = query.shape[0], "info_nce.positives"
    if positives is None:
        if exclude_self:
            advice = "Key i is excluded for query i, so say which keys are positive."
            raise ValueError(sentence(where, "indices or a Boolean matrix with exclude_self", None, advice))
        if n > m:
            raise ValueError(
                sentence(where, f"indices, as key has {m} rows for {n} queries", None, "Say which is whose.")
            )
        return torch.arange(n, device=query.device)
    if not isinstance(positives, Tensor) or positives.is_floating_point() or positives.is_complex():
        got = positives.dtype if isinstance(positives, Tensor) else type(positives).__name__
        raise TypeError(sentence(where, "an integer or Boolean tensor", got, "Indices are (N,), a mask is (N, M)."))
    mask = positives.dtype == torch.bool
    if positives.shape != ((n, m) if mask else (n,)):
        expected = f"shape (N={n}, M={m}) for a Boolean matrix" if mask else f"shape (N={n},) for indices"
        raise ValueError(sentence(where, expected, shape(positives), "Rows are queries, columns are keys."))
    if mask:
        return positives
    _in_range(where, positives, m, None)
    if exclude_self and not holds(positives != torch.arange(n, device=positives.device)):
        raise ValueError(
            sentence(where, "no point as its own positive", "positives[i] == i", "Leave exclude_self off.")
        )
    return positives.long()


def _in_range(where: str, index: Tensor, size: int, ignored: int | None) -> None:
    fine = (index >= 0) & (index < size)
    if not holds(fine if ignored is None else fine | (index == ignored)):
        expected = f"indices in 0 … {size - 1}" + ("" if ignored is None else f", or ignore_index={ignored}")
        raise ValueError(sentence(where, expected, f"values from {index.min()} to {index.max()}", "Check the labels."))


def _vocabulary(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignored: int) -> None:
    where = "linear_cross_entropy"
    require_float(f"{where}.hidden", hidden)
    require_alike(f"{where}.weight", require_float(f"{where}.weight", weight), "hidden", hidden)
    if hidden.ndim == 0 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        expected = f"shape (V, d) with d the last axis of hidden {shape(hidden)}"
        raise ValueError(
            sentence(f"{where}.weight", expected, shape(weight), "Rows are words, as in nn.Linear.weight.")
        )
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(
            sentence(f"{where}.targets", "an integer tensor", got, "Class probabilities are not supported.")
        )
    if targets.shape != hidden.shape[:-1]:
        expected = f"shape {tuple(hidden.shape[:-1])} as the leading axes of hidden"
        raise ValueError(sentence(f"{where}.targets", expected, shape(targets), "One word per position."))
    _in_range(f"{where}.targets", targets, weight.shape[0], ignored)
    if bias is not None:
        require_alike(f"{where}.bias", require_float(f"{where}.bias", bias), "hidden", hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(sentence(f"{where}.bias", f"shape (V={weight.shape[0]},)", shape(bias), "One per word."))
