"""Attention and its statistics: ours, and what else computes them. Each function maps inputs to what is timed."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Prepare, Run, Unavailable, ours, peer
from benchmarks.inputs import Tensors

FULL = ("mean", "entropy", "score_variance")


def statistics(*names: str, keys_only: bool = False) -> Prepare:
    """`cumulant.moments` with these statistics; the values are the keys if ``keys_only``."""

    def prepare(x: Tensors) -> Run:
        moments = ours("cumulant.kernels.operator", "moments")
        values = None if keys_only else x.values

        def run():
            m = moments(x.eta, x.atoms, values, statistics=names)
            return {"log_normalizer": m.log_normalizer} | {name: getattr(m, name) for name in names}

        return run

    return prepare


def full_statistics_of(n: int) -> Prepare:
    """Every statistic of the first ``n`` queries and keys; named sizes differ, so no result is compared."""

    def prepare(x: Tensors) -> Run:
        compute = statistics(*FULL)(x.first(n))

        def run():
            compute()
            return {}

        return run

    return prepare


def fused(keys_only: bool = False) -> Prepare:
    """torch's fused attention: the mean alone."""

    def prepare(x: Tensors) -> Run:
        values = x.atoms if keys_only else x.values
        return lambda: {"mean": scaled_dot_product_attention(x.eta, x.atoms, values, scale=1.0)}

    return prepare


def naive(keys_only: bool = False, thrifty: bool = False) -> Prepare:
    """Every statistic from the matrix of scores by its definition; thrifty: the entropy as G − mean score."""

    def prepare(x: Tensors) -> Run:
        values = x.atoms if keys_only else x.values

        def run():
            score = x.eta @ x.atoms.mT
            g, p = torch.logsumexp(score, -1), torch.softmax(score, -1)
            mean_score = (p * score).sum(-1)
            variance = (p * (score - mean_score[..., None]).square()).sum(-1)
            entropy = g - mean_score if thrifty else torch.special.entr(p).sum(-1)
            return {"log_normalizer": g, "mean": p @ values, "entropy": entropy, "score_variance": variance}

        return run

    return prepare


def keops(x: Tensors) -> Run:
    """KeOps with V=K: one reduction for G, one for the means of the atoms, of the score and of its square."""
    peer("pykeops").set_verbose(False)
    lazy = peer("pykeops.torch").LazyTensor
    eta, atoms = x.eta[0, 0, :, None].contiguous(), x.atoms[0, 0, None].contiguous()
    dim = eta.shape[-1]

    def run():
        y = lazy(atoms)
        score = (lazy(eta) | y).sum(-1)
        g = score.logsumexp(1)[None, None, :, 0]
        means = score.sumsoftmaxweight(y.concat(score).concat(score * score), 1)[None, None]
        mean, mean_score, square = means[..., :dim], means[..., dim], means[..., dim + 1]
        variance = square - mean_score.square()
        return {"log_normalizer": g, "mean": mean, "entropy": g - mean_score, "score_variance": variance}

    return run


def flex(with_normalizer: bool, keys_only: bool = False) -> Prepare:
    """FlexAttention, compiled; with its log-normalizer where this torch can."""

    def prepare(x: Tensors) -> Run:
        module = peer("torch.nn.attention.flex_attention")
        attend = torch.compile(module.flex_attention)
        aux = module.AuxRequest(lse=True) if with_normalizer else None
        values = x.atoms if keys_only else x.values

        def run():
            out = attend(x.eta, x.atoms, values, scale=1.0, return_aux=aux)
            return {"log_normalizer": out[1].lse, "mean": out[0]} if with_normalizer else {"mean": out}

        try:
            run()
        except Exception as error:  # the compiler's own kinds of error, and no C++ compiler
            raise Unavailable(_reason(error)) from None
        return run

    return prepare


def fisher_product(x: Tensors) -> Run:
    """∇²G v in closed form."""
    product = ours("cumulant.kernels.operator", "fisher_product")
    return lambda: {"product": product(x.eta, x.atoms, x.along_mean)}


def double_backward(x: Tensors) -> Run:
    """∇²G v by differentiating logsumexp twice."""
    eta = x.eta.clone().requires_grad_()

    def run():
        g = torch.logsumexp(eta @ x.atoms.mT, -1).sum()
        (mean,) = torch.autograd.grad(g, eta, create_graph=True)
        return {"product": torch.autograd.grad(mean, eta, x.along_mean)[0]}

    return run


def statistics_backward(x: Tensors) -> Run:
    """Attention and G, then the gradient through both."""
    moments = ours("cumulant.kernels.operator", "moments")
    inputs = _leaves(x)

    def run():
        m = moments(*inputs, statistics=("mean",))
        torch.autograd.grad((m.mean, m.log_normalizer), inputs, (x.along_mean, x.along_normalizer))
        return {"mean": m.mean.detach()}

    return run


def fused_backward(x: Tensors) -> Run:
    """torch's fused attention and its gradient."""
    inputs = _leaves(x)

    def run():
        mean = scaled_dot_product_attention(*inputs, scale=1.0)
        torch.autograd.grad(mean, inputs, x.along_mean)
        return {"mean": mean.detach()}

    return run


def _leaves(x: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    eta, atoms, values = (t.clone().requires_grad_() for t in (x.eta, x.atoms, x.values))
    return eta, atoms, values


def _reason(error: Exception) -> str:
    """What a compiler's many lines come down to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rsplit("Error: ", 1)[-1]
