"""Attention and its statistics: ours, and what else computes them. Each function maps inputs to what is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Prepare, Run, Unavailable, ours, peer
from benchmarks.inputs import Tensors

FULL = ("mean", "entropy", "score_variance")
EVERY = (*FULL, "mean_score", "value_trace", "atom_trace", "max_score", "log_sum_square")
FORMER = "streaming"  # the backend that served before the native kernel, where neither of the others did


def statistics(*names: str, keys_only: bool = False, backend: str = "auto") -> Prepare:
    """`cumulant.moments` with these statistics; the values are the keys if ``keys_only``."""

    def prepare(x: Tensors) -> Run:
        moments = ours("cumulant.kernels.operator", "moments")
        values = None if keys_only else x.values
        support = {"log_weights": x.log_weights, "mask": x.mask, "causal": x.causal}

        def run():
            m = moments(x.eta, x.atoms, values, statistics=names, backend=backend, **support)
            return {"log_normalizer": m.log_normalizer} | {name: getattr(m, name) for name in names}

        return run

    return prepare


def attended(backend: str = "auto") -> Prepare:
    """`cumulant.attend` as it is called by users."""

    def prepare(x: Tensors) -> Run:
        attend = ours("cumulant.attention", "attend")

        def run():
            a = attend(x.eta, x.atoms, x.values, scale=1.0, causal=x.causal, backend=backend)
            return {
                "log_normalizer": a.log_normalizer,
                "mean": a.output,
                "entropy": a.entropy,
                "value_trace": a.collapse_loss,
            }

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
        shared = x.atoms.shape[1] < x.eta.shape[1]
        options = {"attn_mask": _table(x), "is_causal": x.causal, "scale": 1.0, "enable_gqa": shared}
        return lambda: {"mean": scaled_dot_product_attention(x.eta, x.atoms, values, **options)}

    return prepare


def naive(*names: str, keys_only: bool = False, thrifty: bool = False) -> Prepare:
    """Statistics from the matrix of scores by their definitions; thrifty: the entropy as G − mean score."""

    def prepare(x: Tensors) -> Run:
        bias = _bias(x)

        def run():
            eta, atoms, values = _wide(x, x.atoms if keys_only else x.values)
            return _defined(eta, atoms, values, bias, names or FULL, thrifty)

        return run

    return prepare


def _wide(x: Tensors, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with sums in at least float32, and keys for every head."""
    dtype = torch.promote_types(x.eta.dtype, torch.float32)
    times = x.eta.shape[1] // x.atoms.shape[1]
    atoms, values = (t if times == 1 else t.repeat_interleave(times, 1) for t in (x.atoms, values))
    return x.eta.to(dtype), atoms.to(dtype), values.to(dtype)


def _defined(
    eta: Tensor, atoms: Tensor, values: Tensor, bias: Tensor | None, names: Sequence[str], thrifty: bool
) -> dict[str, Tensor]:
    score = eta @ atoms.mT
    logit = score if bias is None else score + bias
    g, p = torch.logsumexp(logit, -1), torch.softmax(logit, -1)
    mean_score, mean = (p * score).sum(-1), p @ values
    found = {"log_normalizer": g, "mean": mean, "mean_score": mean_score}
    if "score_variance" in names:
        found["score_variance"] = (p * (score - mean_score[..., None]).square()).sum(-1)
    if "entropy" in names:
        found["entropy"] = g - mean_score if thrifty else torch.special.entr(p).sum(-1)
    if "value_trace" in names:
        found["value_trace"] = _trace(p, values, mean)
    if "atom_trace" in names:
        found["atom_trace"] = _trace(p, atoms, p @ atoms)
    if "max_score" in names:
        found["max_score"] = (score if bias is None else score.masked_fill(bias == -torch.inf, -torch.inf)).amax(-1)
    if "log_sum_square" in names:
        found["log_sum_square"] = torch.logsumexp(2 * logit, -1)
    return found


def _trace(p: Tensor, points: Tensor, mean: Tensor) -> Tensor:
    return (p @ points.square().sum(-1, keepdim=True))[..., 0] - mean.square().sum(-1)


def _bias(x: Tensors) -> Tensor | None:
    """What is added to the scores of pairs, or None."""
    if x.causal:
        return x.eta.new_full((x.eta.shape[-2], x.atoms.shape[-2]), -torch.inf, dtype=torch.float32).triu(1)
    table = _table(x)
    if table is not None and table.dtype == torch.bool:
        return torch.zeros(table.shape, device=table.device).masked_fill(~table, -torch.inf)
    return table


def _table(x: Tensors) -> Tensor | None:
    """Mask or weights in the shape that torch's attention takes."""
    if x.mask is not None:
        return x.mask
    return x.log_weights if x.log_weights is None or x.log_weights.ndim > 3 else x.log_weights[..., None, :]


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
        queries, keys = x.eta.shape[-2], x.atoms.shape[-2]
        options = {"enable_gqa": x.atoms.shape[1] < x.eta.shape[1]}
        if x.causal:
            device = str(x.eta.device)
            options["block_mask"] = module.create_block_mask(_in_order, None, None, queries, keys, device=device)

        def run():
            out = attend(x.eta, x.atoms, values, scale=1.0, return_aux=aux, **options)
            return {"log_normalizer": out[1].lse, "mean": out[0]} if with_normalizer else {"mean": out}

        try:
            run()
        except Exception as error:  # the compiler's own kinds of error, and no C++ compiler
            raise Unavailable(_reason(error)) from None
        return run

    return prepare


def _in_order(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The causal order as FlexAttention takes it."""
    return query >= key


def fisher_product(backend: str = "auto") -> Prepare:
    """∇²G v in closed form."""

    def prepare(x: Tensors) -> Run:
        product = ours("cumulant.kernels.operator", "fisher_product")
        return lambda: {"product": product(x.eta, x.atoms, x.along_mean, backend=backend)}

    return prepare


def double_backward(x: Tensors) -> Run:
    """∇²G v by differentiating logsumexp twice."""
    eta = x.eta.clone().requires_grad_()

    def run():
        g = torch.logsumexp(eta @ x.atoms.mT, -1).sum()
        (mean,) = torch.autograd.grad(g, eta, create_graph=True)
        return {"product": torch.autograd.grad(mean, eta, x.along_mean)[0]}

    return run


def statistics_backward(backend: str = "auto") -> Prepare:
    """Attention and G, then the gradient through both."""

    def prepare(x: Tensors) -> Run:
        moments = ours("cumulant.kernels.operator", "moments")
        inputs = _leaves(x)

        def run():
            m = moments(*inputs, statistics=("mean",), backend=backend)
            torch.autograd.grad((m.mean, m.log_normalizer), inputs, (x.along_mean, x.along_normalizer))
            return {"mean": m.mean.detach()}

        return run

    return prepare


def fused_backward(x: Tensors) -> Run:
    """torch's fused attention and its gradient."""
    inputs = _leaves(x)

    def run():
        mean = scaled_dot_product_attention(*inputs, scale=1.0)
        torch.autograd.grad(mean, inputs, x.along_mean)
        return {"mean": mean.detach()}

    return run


def gradient(backend: str = "auto") -> Prepare:
    """The backward pass alone, through mean, G, entropy and score variance."""

    def prepare(x: Tensors) -> Run:
        inputs = _leaves(x)
        m = ours("cumulant.kernels.operator", "moments")(*inputs, statistics=FULL, backend=backend)
        return _pulled(x, inputs, (m.mean, m.log_normalizer, m.entropy, m.score_variance))

    return prepare


def naive_gradient(x: Tensors) -> Run:
    """The same by autograd, through the matrix of scores."""
    inputs = _leaves(x)
    found = _defined(*inputs, None, FULL, thrifty=False)
    return _pulled(x, inputs, tuple(found[name] for name in ("mean", "log_normalizer", "entropy", "score_variance")))


def fused_gradient(x: Tensors) -> Run:
    """The backward pass of torch's fused attention; only the gradient of the values is that of the others."""
    inputs = _leaves(x)
    run = _pulled(x, inputs, (scaled_dot_product_attention(*inputs, scale=1.0),))
    return lambda: {"d_values": run()["d_values"]}


def _pulled(x: Tensors, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of a graph that is kept."""
    along = (x.along_mean, *[x.along_normalizer] * (len(outputs) - 1))
    names = ("d_eta", "d_atoms", "d_values")
    return lambda: dict(zip(names, torch.autograd.grad(outputs, inputs, along, retain_graph=True), strict=True))


def _leaves(x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    eta, atoms, values = (t.clone().requires_grad_() for t in (x.eta, x.atoms, x.values))
    return eta, atoms, values


def _reason(error: Exception) -> str:
    """What a compiler's many lines come down to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rsplit("Error: ", 1)[-1]
