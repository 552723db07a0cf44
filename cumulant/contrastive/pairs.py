"""Losses with a pair {0, 1} or a whole sphere in the place of the candidates: NCE, word2vec, von Mises–Fisher."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cumulant.checks import broadcast, holds, require_alike, require_device, require_float, sentence, shape
from cumulant.contrastive.arguments import known_reduction, reduce
from cumulant.kernels.autocast import autocast, autocast_float32, without_autocast
from cumulant.kernels.dense import accumulate
from cumulant.measures import Sphere


def nce_loss(
    data_score: Tensor,
    noise_score: Tensor,
    data_log_noise: Tensor,
    noise_log_noise: Tensor,
    *,
    reduction: str = "mean",
) -> Tensor:
    """The loss of noise-contrastive estimation: data against k noise samples, by their unnormalised log-density s.

        ℓ = g(Δ(x)) − Δ(x) + Σ_{noise x'} g(Δ(x')),      Δ = s − log k − log p_noise,      g(Δ) = log(1 + e^Δ)

    g is the log-normalizer of the pair {0, 1}: binary cross-entropy with logit Δ. The minimiser is the normalised
    log-density of the data, whether or not s was normalised.

    data_score       (*batch)     s of one data point each
    noise_score      (*batch, k)  s of its k noise samples
    data_log_noise   (*batch)     log p_noise of the data point
    noise_log_noise  (*batch, k)  log p_noise of the noise samples

    Under torch.autocast all are taken in float32, as binary_cross_entropy_with_logits takes its logits.

    >>> import torch
    >>> zero = torch.zeros(1, 2, dtype=torch.float64)
    >>> nce_loss(zero[:, 0], zero, zero[:, 0], zero)             # log(1 + 2) + 2 log(1 + 1/2)
    tensor(1.9095, dtype=torch.float64)
    """
    known_reduction("nce_loss", reduction)
    scores = {"data_score": data_score, "data_log_noise": data_log_noise}
    scores |= {"noise_score": noise_score, "noise_log_noise": noise_log_noise}
    for name, tensor in scores.items():
        require_device(f"nce_loss.{name}", require_float(f"nce_loss.{name}", tensor), "data_score", data_score)
    if noise_score.ndim != data_score.ndim + 1 or noise_score.shape[-1] == 0:
        expected = f"shape (*batch, k ≥ 1) with batch {shape(data_score)} of data_score"
        raise ValueError(sentence("nce_loss.noise_score", expected, shape(noise_score), "Noise samples go last."))
    broadcast("nce_loss.noise_score", data_score.shape, noise_score.shape[:-1])
    broadcast("nce_loss.data_log_noise", data_score.shape, data_log_noise.shape)
    broadcast("nce_loss.noise_log_noise", noise_score.shape, noise_log_noise.shape)
    log_k = math.log(noise_score.shape[-1])
    data = accumulate(data_score) - accumulate(data_log_noise) - log_k
    noise = accumulate(noise_score) - accumulate(noise_log_noise) - log_k
    return reduce(-logsigmoid(data) - logsigmoid(-noise).sum(-1), reduction)


def sgns_loss(center: Tensor, context: Tensor, negatives: Tensor, *, reduction: str = "mean") -> Tensor:
    """Skip-gram with negative sampling (word2vec): a true context against k drawn ones.

        ℓ = g(⟨c,o⟩) − ⟨c,o⟩ + Σ_{negatives o'} g(⟨c,o'⟩),        g(Δ) = log(1 + e^Δ)

    NCE without its correction: at the optimum ⟨c,o⟩ is the pointwise mutual information minus log k, no log-density.

    center, context (*batch, d), negatives (*batch, k, d). Under torch.autocast they are rounded as for a matrix
    product, sums are formed in float32.

    >>> import torch
    >>> c = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    >>> sgns_loss(c, c, -c[:, None])                             # 2 log(1 + e⁻¹)
    tensor(0.6265, dtype=torch.float64)
    """
    known_reduction("sgns_loss", reduction)
    center, context, negatives = autocast(center, context, negatives)
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
    with without_autocast(c):
        drawn = (accumulate(negatives) @ c[..., None])[..., 0]
    return reduce(-logsigmoid(true) - logsigmoid(-drawn).sum(-1), reduction)


def sgns_optimum(joint: Tensor, negatives: int | float) -> Tensor:
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


def vmf_nll(x: Tensor, eta: Tensor, *, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of directions under von Mises–Fisher, relative to the uniform law on the sphere.

        ℓ = G(η) − ⟨η, x⟩,        G(η) = log ₀F₁(; d/2; κ²/4),      η = κ · mean direction

    For the density with respect to surface area add log(2 π^{d/2} / Γ(d/2)), a constant.

    x    (*batch, d) unit vectors
    eta  (*batch, d) natural parameters; leading axes broadcast

    Under torch.autocast both are taken in float32, as cosine_embedding_loss takes its vectors.

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    >>> vmf_nll(x, 2 * x)                                        # log(sinh 2 / 2) − 2
    tensor(-1.4048, dtype=torch.float64)
    """
    known_reduction("vmf_nll", reduction)
    slack = 8 * torch.finfo(require_float("vmf_nll.x", x).dtype).eps ** 0.5
    x, eta = autocast_float32(x, require_float("vmf_nll.eta", eta))
    require_alike("vmf_nll.eta", eta, "x", x)
    if x.ndim == 0 or eta.ndim == 0 or x.shape[-1] != eta.shape[-1] or x.shape[-1] == 0:
        raise ValueError(sentence("vmf_nll.eta", f"the last axis of x {shape(x)}", shape(eta), "Both are (*batch, d)."))
    broadcast("vmf_nll", x.shape[:-1], eta.shape[:-1])
    point, natural = accumulate(x), accumulate(eta)
    length = torch.linalg.vector_norm(point.detach(), dim=-1)
    if not holds((length - 1).abs() <= slack):
        got = f"lengths from {length.min():.4g} to {length.max():.4g}"
        raise ValueError(sentence("vmf_nll.x", "unit vectors", got, "Call torch.nn.functional.normalize first."))
    return reduce(Sphere(x.shape[-1]).log_normalizer(natural) - (natural * point).sum(-1), reduction)
