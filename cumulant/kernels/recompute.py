"""Derivatives without a closed form, by autograd through the reference kernel on a few rows at a time.

Rows are independent given the atoms, so holding a strip of rows × all atoms is enough for any derivative: memory stays
O(q + n), and autograd through the reference is right by construction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cumulant.kernels.dense import dense_moments
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.moments import STATISTICS
from cumulant.kernels.streaming import ranges
from cumulant.kernels.support import block

SHARED = (1, 2, 3)  # slots that all rows share: atoms, values, per_atom
STRIP = 1 << 17  # scores held at once, in each of some sixty temporaries of a second derivative


def reference(x: Inputs, plan: Plan) -> tuple[Tensor, ...]:
    """The outputs of ``plan`` by the reference kernel, with queries × atoms in memory."""
    wanted = [name for name in plan.outputs if name in STATISTICS]
    if "atom_mean" in plan.outputs:
        wanted.append("mean")  # which brings the mean of the atoms
    m = dense_moments(x.eta, x.atoms, x.values, log_weights=log_weights_of(x, plan), statistics=wanted)
    return tuple(m.log_normalizer if name == "log_normalizer" else m.statistics[name] for name in plan.outputs)


def log_weights_of(x: Inputs, plan: Plan) -> Tensor | None:
    """(g, q, n): everything that is added to scores, or None."""
    every = (slice(0, x.eta.shape[0]), slice(0, x.eta.shape[1]), slice(0, x.atoms.shape[1]))
    zero = x.eta.new_zeros(x.eta.shape[0], x.eta.shape[1], x.atoms.shape[1])
    bias = x.support(plan.band).weigh(zero, *every)
    return None if bias is zero else bias


def push_forward(x: Inputs, plan: Plan, tangents: Inputs) -> list[Tensor]:
    """The Jacobian–vector product of the sweep."""
    results = StripResults(x, len(plan.outputs))
    for heads, rows in strips(x, plan):
        part, small = cut(x, plan, heads, rows)
        primal, function = present(part), _rows_function(part, small)
        vector = tuple(
            or_zeros(t, p) for t, p in zip(present(part_of(tangents, heads, rows), part), primal, strict=True)
        )
        results.add(heads, rows, [], torch.func.jvp(function, primal, vector)[1])
    return results.rowwise()


def second_order(x: Inputs, plan: Plan, grads: list[Tensor], incoming: list[Tensor | None]) -> list[Tensor | None]:
    """The vector–Jacobian product of the pullback, with respect to its five inputs and then its incoming gradients."""
    results = StripResults(x, len(grads))
    for heads, rows in strips(x, plan):
        part, small = cut(x, plan, heads, rows)
        primal, pull = present(part), pull_function(part, small)
        gs = tuple(g[heads, rows].contiguous() for g in grads)
        vectors = present(part_of(Inputs.of(incoming), heads, rows), part)
        back = torch.func.vjp(pull, *primal, *gs)[1]
        slopes = back(tuple(or_zeros(v, p) for v, p in zip(vectors, primal, strict=True)))
        results.add(heads, rows, slopes[: len(primal)], slopes[len(primal) :])
    return [*results.inputs(), *results.rowwise()]


def push_pullback(
    x: Inputs, plan: Plan, grads: list[Tensor], tangents: Inputs, moving: list[Tensor | None]
) -> list[Tensor | None]:
    """The Jacobian–vector product of the pullback: tangents of its inputs and of its incoming gradients."""
    results = StripResults(x, 0)
    for heads, rows in strips(x, plan):
        part, small = cut(x, plan, heads, rows)
        primal, pull = present(part), pull_function(part, small)
        gs = tuple(g[heads, rows].contiguous() for g in grads)
        vectors = list(present(part_of(tangents, heads, rows), part))
        vectors += [None if t is None else t[heads, rows] for t in moving]
        whole = (*primal, *gs)
        vector = tuple(or_zeros(v, p) for v, p in zip(vectors, whole, strict=True))
        results.add(heads, rows, torch.func.jvp(pull, whole, vector)[1], [])
    return results.inputs()


class StripResults:
    """Assembles the results of strips into whole tensors.

    What belongs to rows (eta, per_pair, outputs) is written to its rows; what all rows share (atoms, values, per_atom)
    is summed. Both go into tensors allocated before the first strip: small results among the large temporaries of a
    strip fragment memory, whose use then grows like queries × atoms. Under a transform of torch.func nothing may be
    written in place; there the results of all strips are stored and joined at the end.
    """

    def __init__(self, x: Inputs, outputs: int):
        self.x = x
        self.slots = [i for i in range(5) if x[i] is not None]
        self.outputs = range(5, 5 + outputs)
        self.whole: dict[int, Tensor] = {}  # slot (outputs from 5 on) → the answer, where it can be written
        self.parts: dict[int, list[tuple[int, int, Tensor]]] = {}  # slot → head, first row, result, where it cannot

    def add(self, heads: slice, rows: slice, inputs, outputs) -> None:
        slots = [*(self.slots if len(inputs) else ()), *(self.outputs if len(outputs) else ())]
        for slot, result in zip(slots, (*inputs, *outputs), strict=True):
            if _transformed(result):
                self.parts.setdefault(slot, []).append((heads.start, rows.start, result))
                continue
            if slot not in self.whole:
                self.whole[slot] = self._empty(slot, result)
            whole = self.whole[slot]
            if slot == 4 and whole.shape[0] == 1:  # one table for all heads
                whole[:, rows] += result
            elif slot in SHARED:
                whole[heads] += result
            else:
                whole[heads, rows] = result

    def _empty(self, slot: int, result: Tensor) -> Tensor:
        if slot < 5:
            return result.new_zeros(self.x[slot].shape)  # pyright: ignore[reportOptionalMemberAccess]
        return result.new_zeros(*self.x.eta.shape[:2], *result.shape[2:])

    def _joined(self, slot: int) -> Tensor:
        if slot in self.whole:
            return self.whole[slot]
        heads: dict[int, list[Tensor]] = {}
        for head, _, result in sorted(self.parts[slot], key=lambda part: part[:2]):
            heads.setdefault(head, []).append(result)
        joined = [sum(slopes[1:], slopes[0]) if slot in SHARED else torch.cat(slopes, 1) for slopes in heads.values()]
        whole = torch.cat(joined)
        alone = slot == 4 and self.x[4].shape[0] == 1  # pyright: ignore[reportOptionalMemberAccess]
        return whole.sum(0, keepdim=True) if alone else whole

    def rowwise(self) -> list[Tensor]:
        return [self._joined(slot) for slot in self.outputs]

    def inputs(self) -> list[Tensor | None]:
        return [self._joined(slot) if slot in self.slots else None for slot in range(5)]


def _transformed(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def untracked(tensors) -> list[Any]:
    """Saved tensors without their history. The recomputation turns gradients on for itself; tensors that still
    require one would have every strip recorded once more, which is queries × atoms. Those of a torch.func transform
    stay: their history is the transform's."""
    return [t if t is None or _transformed(t) else t.detach() for t in tensors]


def present(x: Inputs, like: Inputs | None = None) -> tuple[Tensor, ...]:
    """The differentiable tensors of a problem; with ``like``, the entries where that one has a tensor."""
    like = x if like is None else like
    return tuple(t for t, other in zip(x[:5], like[:5], strict=True) if other is not None)  # pyright: ignore[reportReturnType]


def or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A tangent; contiguous, because forward mode refuses expanded tensors."""
    return like.new_zeros(like.shape) if tensor is None else tensor.contiguous()


def _rows_function(part: Inputs, plan: Plan):
    """The reference as a function of the tensors of a problem alone."""
    slots = [i for i in range(5) if part[i] is not None]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        fields = list(part)
        for slot, tensor in zip(slots, tensors, strict=True):
            fields[slot] = tensor
        return reference(Inputs(*fields), plan)  # pyright: ignore[reportArgumentType]

    return function


def pull_function(part: Inputs, plan: Plan):
    """(tensors, incoming gradients) ↦ gradients of the tensors."""
    function = _rows_function(part, plan)
    count = len(present(part))

    def pull(*arguments: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(function, *arguments[:count])[1](arguments[count:])

    return pull


def strips(x: Inputs, plan: Plan) -> list[tuple[slice, slice]]:
    """One head and a few rows at a time; under a band, rows of one period."""
    groups, queries, _ = x.eta.shape
    step = rows_at_once(x, plan)
    period = queries if plan.band.trivial else plan.band.period
    starts = range(0, queries, max(1, period))
    rows = [slice(s + r.start, s + r.stop) for s in starts for r in ranges(min(period, queries - s), step)]
    return [(slice(h, h + 1), r) for h in range(groups) for r in rows]


def rows_at_once(x: Inputs, plan: Plan) -> int:
    """How many rows of one head the reference may hold with all their temporaries."""
    widths = {"value_trace": x.values, "atom_trace": x.atoms}
    tables = max([1, *(t.shape[-1] for name, t in widths.items() if name in plan.statistics and t is not None)])
    return max(1, STRIP // max(1, x.atoms.shape[1] * tables))  # a trace holds (rows, n, d)


def part_of(x: Inputs, heads: slice, rows: slice) -> Inputs:
    """Views of one head and some rows; a mask axis of size 1 serves all."""
    every = slice(None)
    tensors = (
        None if x.eta is None else x.eta[heads, rows],
        *(None if t is None else t[heads] for t in (x.atoms, x.values, x.per_atom)),
        None if x.per_pair is None else block(x.per_pair, heads, rows, every),
    )
    return Inputs.of(tensors, None if x.mask is None else block(x.mask, heads, rows, every))


def cut(x: Inputs, plan: Plan, heads: slice, rows: slice) -> tuple[Inputs, Plan]:
    """The problem of one head and some rows, with its band moved along."""
    band = plan.band
    if not band.trivial:
        band = replace(band, offset=band.offset + rows.start % band.period, period=rows.stop - rows.start)
    return part_of(x, heads, rows), replace(plan, band=band)
