"""torch's attention kernel as an engine for G and means, and its backward made to carry the gradient of G.

A kernel of `torch_attention` returns attention and its log-sum-exp at the pace of the hardware, but the log-sum-exp has
no gradient, a row without keys reports anything, and an empty set may end the process. `refusal` decides when it may
not be used; the rest of this file keeps it inside those bounds. Off the CPU a kernel serves only after
`attention_check` has compared it with the reference on that device.

Values [v ; x] give the mean of the values and that of the atoms in one call, and with them the entropy exactly:

    H_i = G_i − ⟨η_i, Σ_j p_ij x_j⟩ − Σ_j p_ij w_ij

The gradient of G comes free: the backward kernel forms δ_i = ⟨grad_out_i, out_i⟩ and p ∘ (grad_out vᵀ − δ). One more
column with value 0, grad_out 1 and out −g_G turns δ into δ − g_G, which is exactly the missing term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.attention_check import why_wrong
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.torch_attention import MOST_GROUPS, AttentionKernel, Operands, kernel_of

SERVED = frozenset({"log_normalizer", "mean", "atom_mean"})


def refusal(x: Inputs, plan: Plan) -> str | None:
    """Why the fused kernel cannot serve this request; None if it can."""
    groups, queries, dim = x.eta.shape
    more = sorted(plan.statistics - SERVED)
    band, device = plan.band, x.eta.device
    kernel = kernel_of(device)
    if more:
        return f"it returns G and means only, not {', '.join(more)}"
    if kernel is None:
        return f"it runs on the CPU and on CUDA, not on {device.type}"
    if x.eta.dtype not in kernel.dtypes:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return f"it is used in {names} on {device.type}, not {x.eta.dtype}"
    if x.values is not None and x.values.shape[-1] != dim and not kernel.any_width:
        return f"values must be as wide as atoms ({dim}), not {x.values.shape[-1]}"
    if 0 in (groups, queries, x.atoms.shape[1], dim) or (x.values is not None and not x.values.shape[-1]):
        return "it needs at least one query, one atom and one dimension"
    if x.per_atom is not None or x.per_pair is not None:
        return "it gives no gradient to log weights"
    if band.window is not None or (band.causal and (band.offset != 0 or band.period != queries or x.mask is not None)):
        return "its causal order starts at key 0 for query 0 and takes neither window, offset nor mask beside it"
    if device.type == "cpu":
        return None
    if groups > MOST_GROUPS:
        return f"it takes at most {MOST_GROUPS} groups of queries on {device.type}, not {groups}"
    return why_wrong(kernel, device, dim, dim if x.values is None else x.values.shape[-1]) or None


def forward(x: Inputs, plan: Plan) -> list[Tensor]:
    """The outputs of ``plan``, in order."""
    kernel, (bias, empty) = _kernel(x), _bias(x)
    out = {}
    for names, points in _passes(x, plan, kernel):
        means, lse = kernel.forward(Operands(x.eta, x.atoms, points, bias, plan.band.causal))
        for name, mean in zip(names, means.split(_widths(x, names), -1), strict=True):
            out[name] = (mean if empty is None else mean.masked_fill(empty[..., None], 0)).contiguous()
        out["log_normalizer"] = lse if empty is None else lse.masked_fill(empty, -torch.inf)
    return [out[name] for name in plan.outputs]


def backward(x: Inputs, plan: Plan, out: dict[str, Tensor], grad: dict[str, Tensor]) -> list[Tensor | None]:
    """Gradients of eta, atoms and values."""
    kernel, (bias, empty) = _kernel(x), _bias(x)
    g = out["log_normalizer"] if empty is None else out["log_normalizer"].masked_fill(empty, 0)
    incoming = grad.get("log_normalizer")
    if incoming is not None and empty is not None:
        incoming = incoming.masked_fill(empty, 0)
    total: list[Tensor | None] = [None, None, None]
    for names, points in _passes(x, plan, kernel):
        if incoming is None and not any(name in grad for name in names):
            continue
        row = torch.cat(
            [_or_zeros(grad, name, x, width) for name, width in zip(names, _widths(x, names), strict=True)], -1
        )
        # for G alone no mean was stored, and none is needed: its gradient is zero
        mean = torch.cat(
            [_or_zeros(out, name, x, width) for name, width in zip(names, _widths(x, names), strict=True)], -1
        )
        if empty is not None:
            row = row.masked_fill(empty[..., None], 0)
        if incoming is not None:  # one more column carries it
            row, points = torch.nn.functional.pad(row, (0, 1), value=1.0), torch.nn.functional.pad(points, (0, 1))
            mean = torch.cat([mean, -incoming[..., None]], -1)
        slopes = kernel.backward(Operands(x.eta, x.atoms, points, bias, plan.band.causal), row, mean, g)
        parts = slopes[2][..., : sum(_widths(x, names))].split(_widths(x, names), -1)
        slots = (0, 1, *(1 if name == "atom_mean" else 2 for name in names))
        for slot, part in zip(slots, (*slopes[:2], *parts), strict=True):
            before = total[slot]
            total[slot] = part.contiguous() if before is None else before + part
        incoming = None  # the gradient of G goes with the first pass
    pairs = zip(total, (x.eta, x.atoms, x.values), strict=True)
    return [*(torch.zeros_like(t) if part is None and t is not None else part for part, t in pairs), None, None]


def _kernel(x: Inputs) -> AttentionKernel:
    kernel = kernel_of(x.eta.device)
    assert kernel is not None, "refusal comes before"
    return kernel


def _passes(x: Inputs, plan: Plan, kernel: AttentionKernel) -> list[tuple[tuple[str, ...], Tensor]]:
    """Names of means and their points for each call of the kernel; G alone rides on the atoms."""
    values = x.values if "mean" in plan.statistics else None
    if values is None:
        return [(("atom_mean",), x.atoms)]
    if "atom_mean" not in plan.statistics:
        return [(("mean",), values)]
    if kernel.any_width:
        return [(("mean", "atom_mean"), torch.cat([values, x.atoms], -1))]
    return [(("mean",), values), (("atom_mean",), x.atoms)]


def _widths(x: Inputs, names: tuple[str, ...]) -> list[int]:
    return [x.values.shape[-1] if name == "mean" and x.values is not None else x.atoms.shape[-1] for name in names]


def _or_zeros(tensors: dict[str, Tensor], name: str, x: Inputs, width: int) -> Tensor:
    return tensors[name] if name in tensors else x.eta.new_zeros(*x.eta.shape[:2], width)


def _bias(x: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """The Boolean mask as the float mask of the kernel, and the rows it leaves empty."""
    if x.mask is None:
        return None, None
    shape = (x.eta.shape[0], x.eta.shape[1], x.atoms.shape[1])
    bias = torch.zeros(x.mask.shape, dtype=x.eta.dtype, device=x.eta.device).masked_fill(~x.mask, -torch.inf)
    return bias.expand(shape)[None], ~x.mask.any(-1).expand(shape[:2])
