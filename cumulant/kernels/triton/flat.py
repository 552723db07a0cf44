"""The kernels in Triton on flattened inputs: forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native.arguments import GRADIENTS_IN
from cumulant.kernels.native.call import PLAIN, point
from cumulant.kernels.native.direct import TRACES
from cumulant.kernels.native.flat import call_of, steps
from cumulant.kernels.streaming import empty_output
from cumulant.kernels.triton import library
from cumulant.kernels.triton.direct import WIDEST

Gradients = list[Tensor | None]


def refusal(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels cannot serve this request; None if they can."""
    device = library.refusal(x.eta.device.type, x.eta.device.index)
    if device:
        return device
    for tensor in x:
        if tensor is not None and type(tensor) not in PLAIN:
            return f"it reads tensors of torch by their addresses, not those of type {type(tensor).__name__}"
    if x.eta.dtype != torch.float32:
        return f"sums are formed in float32, not {x.eta.dtype}"
    traces = sorted(plan.statistics & set(TRACES))
    if traces:
        return f"it forms no traces, here {', '.join(traces)}"
    if x.values is not None and "atom_mean" in plan.statistics:
        return "it forms the mean of the values or that of the atoms, not both"
    width = max(x.eta.shape[-1], 0 if x.values is None else x.values.shape[-1])
    return f"atoms and values have at most {WIDEST} entries, not {width}" if width > WIDEST else None


def forward(x: Inputs, plan: Plan) -> tuple[list[Tensor], Tensor | None]:
    """The outputs of the plan, and the index of the best atom where ``max_score`` is among them."""
    from cumulant.kernels.triton import launch

    c, read = call_of(x, plan)
    out = {name: empty_output(x, name) for name in plan.outputs}
    best = x.eta.new_zeros(x.eta.shape[:2], dtype=torch.int64) if "max_score" in out else None
    launch.forward(c, {**read, "sink": None}, out if best is None else {**out, "best": best})
    return [out[name] for name in plan.outputs], best


def backward(
    x: Inputs, plan: Plan, out: dict[str, Tensor], grad: dict[str, Tensor], needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of eta, atoms, values, per_atom and per_pair, but for max_score."""
    from cumulant.kernels.triton import launch

    c, read = call_of(x, plan)
    made: dict[str, Tensor | None] = dict.fromkeys(x._fields[:5])
    for name, tensor, need in zip(x._fields[:5], x, needs, strict=False):
        if tensor is not None and need:
            made[name] = tensor.new_zeros(tensor.shape)
    if made["per_pair"] is not None:
        c.d_per_pair = c.per_pair
        table = made["per_pair"]
        point(c.d_per_pair, table, (0, 0, 0, *steps(table, c.period)), table.shape[2] if table.shape[1] > 1 else 0)
    if x.eta.shape[0] * x.eta.shape[1]:
        through = {name: grad[name] for name in GRADIENTS_IN if name in grad}
        launch.backward(c, {**read, "sink": None}, out, through, made)
    return list(made.values())
