"""Forward and backward pass of a plan: by a fast kernel where it is exact, by the reference on the other rows.

All fast kernels multiply what is hidden from a query by its weight 0. That is right as long as every product is
finite; traces of the kernels in torch are right as long as rows are near their common centre (see `columns`).
Neither need hold: padding may hold any bits, and hidden atoms may be 10¹² times larger than all visible ones. The
native kernel says which of its results are not finite, and only those are computed again by these rules: where
something is hidden,

    atoms that are visible to no query of their group are put to 0 if any number is near the edge of the dtype;
    what is still near it, or not finite, goes to the reference, whose rule holds for every kernel: a query to which a
    NaN or an infinity is visible has NaN for every statistic, and for all others it is absent;
    traces of rows far from the centre are those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cumulant.checks import holds, known
from cumulant.kernels import fused
from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.columns import AtomColumns
from cumulant.kernels.dense import largest
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native import flat as native
from cumulant.kernels.pullback import TRACES, add_best, pull_back
from cumulant.kernels.recompute import present, pull_function, reference, rows_at_once
from cumulant.kernels.streaming import empty_output, sweep
from cumulant.kernels.support import Band
from cumulant.kernels.triton import flat as triton

Gradients = list[Tensor | None]


def evaluate(x: Inputs, plan: Plan) -> tuple[list[Tensor], Tensor | None]:
    """The outputs of the plan in order, and the index of the best atom where ``max_score`` is among them."""
    if plan.engine == "native":
        return _evaluate_native(x, plan)
    if plan.engine == "triton":
        return triton.forward(x, plan)
    x, ordinary = ordinary_inputs(x, plan, 2)
    if not ordinary:
        out = {name: empty_output(x, name) for name in plan.outputs}
        _by_reference(x, plan, None, out)
        index = x.eta.new_zeros(x.eta.shape[:2], dtype=torch.int64) if "max_score" in plan.statistics else None
        return list(out.values()), index
    if plan.engine == "fused":
        return fused.forward(x, plan), None
    columns = AtomColumns.of(x, plan)
    out, best = sweep(x, plan, columns)
    _far_traces(x, plan, columns, dict(zip(plan.outputs, out, strict=True)))
    return out, best


def _far_traces(x: Inputs, plan: Plan, columns: AtomColumns, out: dict[str, Tensor]) -> None:
    if columns.far is not None:
        traces = replace(plan, statistics=frozenset(columns.names) & frozenset(TRACES))
        _by_reference(x, traces, columns.far, out)


def _evaluate_native(x: Inputs, plan: Plan) -> tuple[list[Tensor], Tensor | None]:
    columns = None
    if traces_need_centre(x, plan):
        x, _ = ordinary_inputs(x, plan, 2)
        columns = AtomColumns.of(x, plan)
    out, best, irregular = _native_forward(x, plan, columns)
    if irregular is not None:
        without = without_unseen(x, plan)
        if without is not x:
            x = without
            out, best, irregular = _native_forward(x, plan, columns)
        if irregular is not None:
            _by_reference(x, plan, irregular, out)
    if columns is not None:
        if columns.single is not None:
            for name in frozenset(columns.names) & frozenset(TRACES):
                out[name].masked_fill_(columns.single, 0)
        _far_traces(x, plan, columns, out)
    return [out[name] for name in plan.outputs], best


def _native_forward(x: Inputs, plan: Plan, columns: AtomColumns | None):
    """As `native.forward`; where no statistic reads the values, every row is irregular unless all are finite."""
    out, best, irregular = native.forward(x, plan, columns)
    if x.values is not None and "mean" not in plan.statistics and not known(largest(x.values).isfinite()):
        irregular = x.eta.new_ones(x.eta.shape[:2], dtype=torch.bool)
    return out, best, irregular


def traces_need_centre(x: Inputs, plan: Plan) -> bool:
    """Whether queries that see any key of a block may have no visible key in common, about which the native kernel
    forms traces: then they are formed about one centre, and rows far from it are found beforehand."""
    if not plan.statistics & set(TRACES):
        return False
    per_query = x.per_pair is not None or (x.mask is not None and x.mask.shape[1] > 1)
    return plan.band.window is not None or per_query


def gradients(
    x: Inputs, plan: Plan, out: dict[str, Tensor], best: Tensor | None, grad: dict[str, Tensor], needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of eta, atoms, values, per_atom and per_pair (None where not needed)."""
    with without_autocast(x.eta):  # in which a backward pass may stand
        return _gradients(x, plan, out, best, grad, needs)


def _gradients(x, plan, out, best, grad, needs) -> Gradients:
    if plan.engine == "native":
        return _gradients_native(x, plan, out, best, grad, needs)
    if plan.engine == "triton":
        return _with_best(x, out, best, grad, triton.backward(x, plan, out, grad, needs))
    x, ordinary = ordinary_inputs(x, plan, 3, *grad.values())
    total: Gradients
    if not ordinary:
        return _all_by_reference(x, plan, grad, needs)
    if plan.engine == "fused":
        total = fused.backward(x, plan, out, grad)
        return [g if need else None for g, need in zip(total, needs, strict=True)]
    columns = AtomColumns.of(x, plan)
    total = pull_back(x, plan, columns, out, best, grad, needs)
    if columns.far is not None:
        _add_by_reference(x, plan, columns.far, {name: grad[name] for name in TRACES if name in grad}, total)
    return total


def _gradients_native(x, plan, out, best, grad, needs) -> Gradients:
    columns = None
    if frozenset(grad) & frozenset(TRACES) and traces_need_centre(x, plan):
        x, _ = ordinary_inputs(x, plan, 3, *grad.values())
        columns = AtomColumns.of(x, plan)
    near = grad
    if columns is not None and columns.without_trace is not None:
        near = grad | {name: grad[name].masked_fill(columns.without_trace, 0) for name in TRACES if name in grad}
    total, finite = native.backward(x, plan, columns, out, near, needs)
    if not finite:
        without = without_unseen(x, plan)
        if without is not x:
            x = without
            total, finite = native.backward(x, plan, columns, out, near, needs)
        if not finite:
            return _all_by_reference(x, plan, grad, needs)
    _with_best(x, out, best, grad, total)
    if columns is not None and columns.far is not None:
        _add_by_reference(x, plan, columns.far, {name: grad[name] for name in TRACES if name in grad}, total)
    return total


def _with_best(
    x: Inputs, out: dict[str, Tensor], best: Tensor | None, grad: dict[str, Tensor], total: Gradients
) -> Gradients:
    """With the gradient through the largest score."""
    if "max_score" in grad and best is not None:
        alive = out["log_normalizer"] > -torch.inf
        add_best(x, torch.where(alive, grad["max_score"], 0), best, total)
    return total


def _all_by_reference(x: Inputs, plan: Plan, grad: dict[str, Tensor], needs: tuple[bool, ...]) -> Gradients:
    total: Gradients = [
        t.new_zeros(t.shape) if t is not None and need else None for t, need in zip(x[:5], needs, strict=True)
    ]
    _add_by_reference(x, plan, None, grad, total)
    return total


# ---------------------------------------------------------------------- numbers near the edge of the dtype


def ordinary_inputs(x: Inputs, plan: Plan, power: int, *more: Tensor) -> tuple[Inputs, bool]:
    """The inputs with hidden atoms put to 0, and whether all products of ``power`` of their numbers are finite.

    Where every atom is visible to every query they are returned unchanged."""
    support = x.support(plan.band)
    if (support.everything and x.eta.shape[1]) or _finite_products(x, power, more):
        return x, True
    x = without_unseen(x, plan)
    return x, _finite_products(x, power, more)


def without_unseen(x: Inputs, plan: Plan) -> Inputs:
    """The inputs with atoms that no query of their group sees put to 0; the same inputs where there are none."""
    support = x.support(plan.band)
    if support.everything and x.eta.shape[1]:
        return x
    unseen = ~support.seen_atoms(x.eta.shape[1], x.atoms.shape[1], x.eta.device)[..., None]
    return x._replace(
        atoms=x.atoms.masked_fill(unseen, 0), values=None if x.values is None else x.values.masked_fill(unseen, 0)
    )


def _finite_products(x: Inputs, power: int, more: tuple[Tensor, ...]) -> bool:
    tensors = [t for t in (x.eta, x.atoms, x.values, *more) if t is not None and t.numel()]
    width = max((t.shape[-1] for t in tensors if t.ndim > 2), default=1)
    limit = torch.finfo(x.eta.dtype).max ** (1 / power) / (8 * width)
    if not tensors:
        return True
    return holds(torch.stack([largest(t) for t in tensors]) <= limit)  # one look at values; false for NaN


# ---------------------------------------------------------------------- some rows by the reference


def _by_reference(x: Inputs, plan: Plan, selected: Tensor | None, out: dict[str, Tensor]) -> None:
    """Write the outputs of the plan for the selected rows (g, q), or for all."""
    for head, rows in _row_batches(x, plan, selected):
        part, small = _rows(x, plan, head, rows)
        for name, value in zip(small.outputs, reference(part, small), strict=True):
            out[name][head, rows] = value[0]


def _add_by_reference(
    x: Inputs, plan: Plan, selected: Tensor | None, grad: dict[str, Tensor], total: Gradients
) -> None:
    """Add the gradients of the selected rows (g, q), or of all."""
    plan = replace(plan, statistics=frozenset(grad))
    for head, rows in _row_batches(x, plan, selected):
        part, small = _rows(x, plan, head, rows)
        incoming = [grad[name][head, rows][None] for name in small.outputs]
        slopes = iter(pull_function(part, small)(*present(part), *incoming))
        for slot, (tensor, whole) in enumerate(zip(part[:5], total, strict=True)):
            slope = None if tensor is None else next(slopes)
            if slope is not None and whole is not None:
                at = (head if whole.shape[0] > 1 else 0, rows) if slot in (0, 4) else (head,)
                whole[at] += slope[0]


def _row_batches(x: Inputs, plan: Plan, selected: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The selected rows, head by head, as many as the reference may hold at once."""
    every = torch.arange(x.eta.shape[1], device=x.eta.device)
    for head in range(x.eta.shape[0]):
        rows = every if selected is None else every[selected[head]]
        if len(rows):
            yield from ((head, batch) for batch in rows.split(rows_at_once(x, plan)))


def _rows(x: Inputs, plan: Plan, head: int, rows: Tensor) -> tuple[Inputs, Plan]:
    """The problem of some rows of one head; the band becomes a mask."""
    one = slice(head, head + 1)
    everything = x.support(plan.band).everything
    mask = x._replace(per_atom=None, per_pair=None).support(plan.band)
    pair = x.per_pair if x.per_pair is None or x.per_pair.shape[0] == 1 else x.per_pair[one]
    part = Inputs(
        x.eta[one, rows],
        x.atoms[one],
        None if x.values is None else x.values[one],
        None if x.per_atom is None else x.per_atom[one],
        None if pair is None else pair[:, rows],
        None if everything else mask.visible(one, rows, x.atoms.shape[1]),
    )
    return part, replace(plan, band=Band())
