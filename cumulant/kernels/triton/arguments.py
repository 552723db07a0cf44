"""What a Triton kernel is given: tensors with the strides of `native.arguments.Call`, and pointers to results.

Absent tensors are None, and a kernel is compiled anew for each choice of what is absent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cumulant.kernels.native.arguments import Call, Operand


class TritonOperand(NamedTuple):
    """A tensor, its strides along the four batch axes, from head to head of a group, and from row to row."""

    data: Any
    a0: Any
    a1: Any
    a2: Any
    a3: Any
    fold: Any
    row: Any


class Sizes(NamedTuple):
    """Sizes of the batch axes; heads in a group, queries of a head, keys of a group; widths of atoms and values."""

    n0: Any
    n1: Any
    n2: Any
    n3: Any
    fold: Any
    period: Any
    keys: Any
    width: Any
    value_width: Any


class TritonInputs(NamedTuple):
    """The operands of a call; ``fine`` (groups, keys): whether atom and value of a key are finite, or None."""

    eta: TritonOperand
    atoms: TritonOperand
    values: TritonOperand
    per_atom: TritonOperand
    per_pair: TritonOperand
    mask: TritonOperand
    sink: TritonOperand
    fine: Any


class Results(NamedTuple):
    """Statistics of queries, None where they are not wanted."""

    log_normalizer: Any
    mean: Any = None
    mean_score: Any = None
    score_variance: Any = None
    mean_log_weight: Any = None
    max_score: Any = None
    best: Any = None
    log_sum_square: Any = None
    sink_mass: Any = None
    max_logit: Any = None


class Statistics(NamedTuple):
    """What the backward pass reads of a query: results, and factors made of incoming gradients (see `backward`).

    constant          g_G − ⟨g_mean, mean⟩ − g_var · variance − g_w · mean log weight
    d_log_sum_square  2 g_q (Σp²)⁻¹
    """

    log_normalizer: Any
    constant: Any
    mean_score: Any = None
    d_mean: Any = None
    d_mean_score: Any = None
    d_score_variance: Any = None
    d_mean_log_weight: Any = None
    d_log_sum_square: Any = None


def operand(layout: Operand, tensor: Tensor | None) -> TritonOperand:
    """The tensor where the plan of the native kernel says it lies."""
    if tensor is None:
        return TritonOperand(None, 0, 0, 0, 0, 0, 0)
    return TritonOperand(tensor.detach(), *strides_of(layout), layout.row)


def rows_of_results(call: Call) -> TritonOperand:
    """Where the results of a query lie: strides count queries."""
    return TritonOperand(None, *strides_of(call.output), 1)


def sizes_of(call: Call) -> Sizes:
    n0, n1, n2, n3 = call.axes
    return Sizes(n0, n1, n2, n3, call.fold, call.period, call.keys, call.width, call.value_width)


def strides_of(layout: Operand) -> tuple[int, int, int, int, int]:
    """Along the four batch axes and from head to head."""
    a0, a1, a2, a3 = layout.group
    return a0, a1, a2, a3, layout.fold
