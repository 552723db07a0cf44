"""The native kernel on flattened inputs: forward, backward, Fisher product and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.columns import AtomColumns
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native.arguments import GRADIENTS_IN, Call
from cumulant.kernels.native.call import PLAIN, enter, point
from cumulant.kernels.streaming import empty_output

Gradients = list[Tensor | None]


def refusal(x: Inputs) -> str | None:
    """Why the native kernel cannot serve these tensors; None if it can."""
    for tensor in x:
        if tensor is not None and type(tensor) not in PLAIN:
            return f"it reads tensors of torch by their addresses, not those of type {type(tensor).__name__}"
    if x.eta.device.type != "cpu":
        return f"it runs on the CPU, not on {x.eta.device.type}"
    if x.eta.dtype not in (torch.float32, torch.float64):
        return f"sums are formed in float32 and float64, not {x.eta.dtype}"
    return None


def _packed(tensor: Tensor) -> Tensor:
    """The tensor with entries of a row side by side; a copy only if they are not."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: Tensor) -> Tensor:
    """The numbers of a tensor one after another in memory."""
    return tensor.detach().contiguous().resolve_neg()


def call_of(x: Inputs, plan: Plan) -> tuple[Call, dict[str, Tensor | None]]:
    """The kernel's arguments but for results, and the tensors by name as it reads them: they must live as long as it
    runs."""
    groups, rows, width = x.eta.shape
    period = max(1, min(rows, plan.band.period)) if not plan.band.trivial else max(1, rows)
    c = Call()
    c.axes[:] = (1, 1, 1, groups)
    c.fold, c.period = rows // period, period
    c.keys, c.width = x.atoms.shape[1], width
    c.value_width = width if x.values is None else x.values.shape[2]
    c.precision = x.eta.element_size()
    c.causal, c.window, c.offset = int(plan.band.causal), plan.band.window or 0, plan.band.offset
    c.scale = 1.0
    read: dict[str, Tensor | None] = dict.fromkeys(Inputs._fields)

    def give(name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        read[name] = tensor = _packed(tensor)
        group = tensor.stride(0) if tensor.shape[0] > 1 else 0
        if name in ("eta", "per_pair", "mask"):
            row = tensor.stride(1) if tensor.shape[1] > 1 else 0
            point(getattr(c, name), tensor, (0, 0, 0, group, period * row), row)
        else:
            point(getattr(c, name), tensor, (0, 0, 0, group, 0), tensor.stride(1) if tensor.ndim > 2 else 1)

    for name, tensor in zip(Inputs._fields, x, strict=True):
        give(name, None if tensor is None else tensor.detach())
    c.output.group[:] = (0, 0, 0, rows)
    c.output.fold = period
    return c, read


def _centres(c: Call, columns: AtomColumns | None) -> list[Tensor]:
    alive = []
    for name, centre in ({} if columns is None else columns.centre).items():
        centre = _contiguous(centre)
        alive.append(centre)
        group = centre.shape[-1] if centre.ndim > 1 and centre.shape[0] > 1 else 0
        point(getattr(c, name.replace("trace", "centre")), centre, (0, 0, 0, group, 0), 0)
    return alive


def forward(
    x: Inputs, plan: Plan, columns: AtomColumns | None
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """The outputs of the plan, the index of the best atom, and which rows (g, q) are not finite (None: all are)."""
    c, read = call_of(x, plan)
    _alive = [*read.values(), *_centres(c, columns)]
    out = {name: empty_output(x, name) for name in plan.outputs}
    for name, tensor in out.items():
        setattr(c, name, tensor.data_ptr())
    best = None
    if "max_score" in out:
        best = x.eta.new_empty(x.eta.shape[:2], dtype=torch.int64)
        c.best = best.data_ptr()
    irregular = x.eta.new_zeros(x.eta.shape[:2], dtype=torch.bool)
    c.irregular_rows = irregular.data_ptr()
    return out, best, irregular if enter("forward", c) else None


def backward(
    x: Inputs,
    plan: Plan,
    columns: AtomColumns | None,
    out: dict[str, Tensor],
    grad: dict[str, Tensor],
    needs: tuple[bool, ...],
) -> tuple[Gradients, bool]:
    """Gradients of eta, atoms, values, per_atom and per_pair, but for max_score, and whether all are finite."""
    if not x.eta.shape[0] * x.eta.shape[1]:  # without queries there are no addresses either
        return [None if t is None or not n else t.new_zeros(t.shape) for t, n in zip(x[:5], needs, strict=True)], True
    c, read = call_of(x, plan)
    alive = [*read.values(), *_centres(c, columns)]
    for name, tensor in out.items():
        tensor = _contiguous(tensor)
        alive.append(tensor)
        setattr(c, name, tensor.data_ptr())
    for name in GRADIENTS_IN:
        if name in grad:
            tensor = _contiguous(grad[name])
            alive.append(tensor)
            setattr(c, f"d_{name}", tensor.data_ptr())
    total: Gradients = [None] * 5
    groups = x.eta.shape[0]
    for slot, name in enumerate(Inputs._fields[:5]):
        tensor = x[slot]
        if tensor is None or not needs[slot]:
            continue
        if name == "per_pair":
            total[slot] = table = tensor.new_zeros(tensor.shape)
            c.d_per_pair = c.per_pair
            point(c.d_per_pair, table, (0, 0, 0, *steps(table, c.period)), table.shape[2] if table.shape[1] > 1 else 0)
            continue
        unmoved = name == "values" and not grad.keys() & {"mean", "value_trace"}
        total[slot] = made = tensor.new_zeros(tensor.shape) if unmoved else tensor.new_empty(tensor.shape)
        setattr(c, f"d_{name}", made.data_ptr())
    shared = total[4] is not None and total[4].shape[0] == 1 < groups  # one table for all groups: one thread adds to it
    return total, not enter("backward", c, 1 if shared else None)


def steps(table: Tensor, period: int) -> tuple[int, int]:
    """Strides of a contiguous table of pairs from group to group and from head to head."""
    group = table.shape[1] * table.shape[2] if table.shape[0] > 1 else 0
    return group, period * table.shape[2] if table.shape[1] > 1 else 0


def fisher(x: Inputs, vector: Tensor, plan: Plan) -> tuple[Tensor, bool]:
    """∇²G(η) v for eta and vector (g, q, d), and whether all of it is finite."""
    c, _read = call_of(x, plan)
    vector = _contiguous(vector)
    out = torch.empty_like(vector)
    c.vector, c.fisher = vector.data_ptr(), out.data_ptr()
    return out, not enter("fisher", c)


def fisher_backward(
    x: Inputs, vector: Tensor, plan: Plan, product: Tensor, grad: Tensor
) -> tuple[Gradients, Tensor, bool]:
    """Gradients of the five inputs and of the vector through ∇²G(η) v, and whether all are finite."""
    needed = Plan(frozenset({"log_normalizer", "atom_mean"}), plan.band)
    out, _, irregular = forward(x, needed, None)
    c, read = call_of(x, plan)
    _alive = [
        *read.values(),
        vector := _contiguous(vector),
        grad := _contiguous(grad),
        product := _contiguous(product),
    ]
    for name, tensor in {**out, "vector": vector, "d_fisher": grad, "fisher": product}.items():
        setattr(c, name, tensor.data_ptr())
    total: Gradients = [None] * 5
    for slot, name in enumerate(("eta", "atoms", None, "per_atom")):
        tensor = x[slot]
        if tensor is not None and name is not None:
            total[slot] = made = tensor.new_empty(tensor.shape)
            setattr(c, f"d_{name}", made.data_ptr())
    if x.per_pair is not None:
        total[4] = table = x.per_pair.new_zeros(x.per_pair.shape)
        point(c.d_per_pair, table, (0, 0, 0, *steps(table, c.period)), table.shape[2] if table.shape[1] > 1 else 0)
    d_vector = torch.empty_like(vector)
    c.d_vector = d_vector.data_ptr()
    shared = x.per_pair is not None and x.per_pair.shape[0] == 1 < x.eta.shape[0]
    fine = irregular is None and not enter("fisher_backward", c, 1 if shared else None)
    return total, d_vector, fine
