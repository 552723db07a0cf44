"""torch's fused CPU attention as an engine for G and means, and its backward made to carry the gradient of G.

`_scaled_dot_product_flash_attention_for_cpu` returns attention and its log-sum-exp at the pace of the hardware, but
it has limits: values must be as wide as keys, the log-sum-exp has no gradient, a row without keys reports 0, an
empty set ends the process, and rows are read by pointer as if their entries lay side by side. `refusal` decides when
it may not be used; the rest of this file keeps it inside those bounds.

The gradient of G comes free: the backward kernel forms δ_i = ⟨grad_out_i, out_i⟩ and p ∘ (grad_out vᵀ − δ). One more
column with value 0, grad_out 1 and out −g_G turns δ into δ − g_G, which is exactly the missing term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.layout import readable_rows

SERVED = frozenset({"log_normalizer", "mean", "atom_mean"})


def refusal(x: Inputs, plan: Plan) -> str | None:
    """Why the fused kernel cannot serve this request; None if it can."""
    groups, queries, dim = x.eta.shape
    more = sorted(plan.statistics - SERVED)
    band = plan.band
    if more:
        return f"it returns G and means only, not {', '.join(more)}"
    if x.eta.device.type != "cpu":
        return f"it runs on the CPU, not on {x.eta.device.type}"
    if x.eta.dtype not in (torch.float32, torch.float64):
        return f"it is used in float32 and float64 here, not {x.eta.dtype}"
    if x.values is not None and x.values.shape[-1] != dim:
        return f"values must be as wide as atoms ({dim}), not {x.values.shape[-1]}"
    if 0 in (groups, queries, x.atoms.shape[1], dim):
        return "it needs at least one query, one atom and one dimension"
    if x.per_atom is not None or x.per_pair is not None:
        return "it gives no gradient to log weights"
    if band.window is not None or (band.causal and (band.offset != 0 or band.period != queries or x.mask is not None)):
        return "its causal order starts at key 0 for query 0 and takes neither window, offset nor mask beside it"
    return None


def forward(x: Inputs, plan: Plan) -> list[Tensor]:
    """The outputs of ``plan``, in order."""
    bias, empty = _bias(x)
    out = {}
    for name, points in _passes(x, plan):
        mean, lse = _attend(x, plan, points, bias)
        out[name] = mean if empty is None else mean.masked_fill(empty[..., None], 0)
        out["log_normalizer"] = lse if empty is None else lse.masked_fill(empty, -torch.inf)
    return [out[name] for name in plan.outputs]


def backward(x: Inputs, plan: Plan, out: dict[str, Tensor], grad: dict[str, Tensor]) -> list[Tensor | None]:
    """Gradients of eta, atoms and values."""
    bias, empty = _bias(x)
    g = out["log_normalizer"] if empty is None else out["log_normalizer"].masked_fill(empty, 0)
    incoming = grad.get("log_normalizer")
    if incoming is not None and empty is not None:
        incoming = incoming.masked_fill(empty, 0)
    total: list[Tensor | None] = [None, None, None]
    for name, points in _passes(x, plan):
        if name not in grad and incoming is None:
            continue
        # for G alone no mean was stored, and none is needed: its gradient is zero
        mean = out[name] if name in out else torch.zeros_like(x.eta)
        row = grad.get(name, torch.zeros_like(mean))
        if empty is not None:
            row = row.masked_fill(empty[..., None], 0)
        tensors = (row, x.eta, x.atoms, points, mean)
        if incoming is not None:  # one more column carries it
            tensors = (
                _pad(row, 1),
                _pad(x.eta),
                _pad(x.atoms),
                _pad(points),
                torch.cat([mean, -incoming[..., None]], -1),
            )
        slopes = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(readable_rows(tensor)[None] for tensor in tensors),
            g.contiguous()[None],
            0.0,
            plan.band.causal,
            attn_mask=bias,
            scale=1.0,
        )
        for slot, slope in zip((0, 1, 1 if points is x.atoms else 2), slopes, strict=True):
            part = (slope[0] if incoming is None else slope[0, ..., :-1]).contiguous()
            total[slot] = part if total[slot] is None else total[slot] + part
        incoming = None  # the gradient of G goes with the first pass
    pairs = zip(total, (x.eta, x.atoms, x.values), strict=True)
    return [*(torch.zeros_like(t) if part is None and t is not None else part for part, t in pairs), None, None]


def _passes(x: Inputs, plan: Plan) -> list[tuple[str, Tensor]]:
    """One call of the kernel per mean that is wanted; G alone rides on the atoms."""
    passes = [("mean", x.values)] if x.values is not None and "mean" in plan.statistics else []
    if "atom_mean" in plan.statistics or not passes:
        passes.append(("atom_mean", x.atoms))
    return passes


def _attend(x: Inputs, plan: Plan, points: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(readable_rows(tensor)[None] for tensor in (x.eta, x.atoms, points)),
        0.0,
        plan.band.causal,
        attn_mask=bias,
        scale=1.0,
    )
    return out[0].contiguous(), lse[0].contiguous()


def _bias(x: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """The Boolean mask as the float mask of the kernel, and the rows it leaves empty."""
    if x.mask is None:
        return None, None
    shape = (x.eta.shape[0], x.eta.shape[1], x.atoms.shape[1])
    bias = torch.zeros(x.mask.shape, dtype=x.eta.dtype, device=x.eta.device).masked_fill(~x.mask, -torch.inf)
    return bias.expand(shape)[None], ~x.mask.any(-1).expand(shape[:2])


def _pad(tensor: Tensor, value: float = 0.0) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 1), value=value)
