"""Normal laws of many sequences in C++, each operation in one pass: log weights normalised, mixtures collapsed,
observations eliminated.

`cumulant.filters` has the same in torch, for derivatives, for other devices and for what is not served here: layouts
are those of `cumulant.filters.packed_normal`, hypotheses first and sequences last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad

from cumulant.kernels.native.arguments import CollapseCall, EliminationCall, Lanes, NormalizationCall
from cumulant.kernels.native.call import PLAIN, enter
from cumulant.kernels.native.call import entries as entry_points
from cumulant.kernels.operator import recorded

AXES = 3  # of hypotheses, besides one that is collapsed
SOURCES = 16  # hypotheses up to which a loop over them beats a matrix product for every sequence
ALONE = 1 << 15  # numbers up to which threads do not pay


class Eliminated(NamedTuple):
    """What is left of a triangle, (*hypotheses, ·, batch), log p(y) (*hypotheses, batch), and where a variance was
    beyond its bound, (*hypotheses, batch), or None if nowhere."""

    rest: Tensor
    log_likelihood: Tensor
    vague: Tensor | None


def normalize(log_weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """log Σ exp along the first axis, and the terms divided by that sum; None where the kernel does not serve."""
    if not log_weights.numel() or not _serves(log_weights):
        return None
    if not log_weights[0].is_contiguous():
        log_weights = log_weights.contiguous()
    log_total = torch.empty(log_weights.shape[1:], dtype=log_weights.dtype, device="cpu")
    shares = torch.empty(log_weights.shape, dtype=log_weights.dtype, device="cpu")
    call = NormalizationCall(
        *(len(log_weights), log_total.numel(), log_weights.element_size(), 1, log_weights.stride(0)),
        *(log_weights.data_ptr(), log_total.data_ptr(), shares.data_ptr()),
    )
    enter("normalize", call, _threads(log_weights))
    return log_total, shares


def collapse(weights: Tensor, moments: Tensor, axis: int, dim: int) -> Tensor | None:
    """The moments of mixtures along a hypothesis axis; None where the kernel does not serve.

    weights (*hypotheses, batch), moments (*hypotheses, (dim+1)(dim+2)/2, batch), axes of moments and batch shared where
    they have size 1.
    """
    *hypotheses, _ = weights.shape
    *own, entries, batch = moments.shape
    batch = max(batch, weights.shape[-1])
    fits = len(own) == len(hypotheses) and all(b in (1, a) for a, b in zip(hypotheses, own, strict=True))
    small = len(own) <= AXES + 1 and hypotheses[axis] <= SOURCES
    if not (fits and small and weights.numel() and moments.numel() and _serves(weights, moments)):
        return None
    weights, moments = weights.expand(*hypotheses, batch), moments.expand(*hypotheses, entries, batch)
    weights, moments = _side_by_side(weights), _side_by_side(moments)
    sources = hypotheses.pop(axis)
    *first, _ = weights.stride()
    *second, row, _ = moments.stride()
    source = first.pop(axis), second.pop(axis)
    result = torch.empty(*hypotheses, entries, batch, dtype=weights.dtype, device="cpu")
    call = CollapseCall(
        *(_axes(hypotheses, 1), sources, dim, batch, weights.element_size(), 1),
        *(_lanes(weights, first, source[0]), _lanes(moments, second, row), source[1], result.data_ptr()),
    )
    enter("collapse", call, _threads(result))
    return result


def eliminate(
    joint: Tensor, y: Tensor | None, observed: Tensor | None, floors: Tensor, bounds: Tensor, dim: int
) -> Eliminated | None:
    """Eliminate y from the triangle (*hypotheses, ·, batch) of (y, 1, x); None where the kernel does not serve.

    y and observed (m, batch); floors and bounds of variances (*hypotheses, m, batch), hypothesis axes and batch shared
    where they have size 1.
    """
    *hypotheses, _, batch = joint.shape
    m, tensors = floors.shape[-2], [joint, floors, bounds] if y is None else [joint, floors, bounds, y]
    if len(hypotheses) > AXES or not joint.numel() or not _serves(*tensors):
        return None
    floors, bounds = (part.expand(*hypotheses, m, batch) for part in (floors, bounds))
    joint, floors, bounds = (_side_by_side(part) for part in (joint, floors, bounds))
    y, observed = (None if part is None else part.contiguous() for part in (y, observed))
    rest = torch.empty(*hypotheses, (dim + 1) * (dim + 2) // 2, batch, dtype=joint.dtype, device="cpu")
    log_likelihood = torch.empty(*hypotheses, batch, dtype=joint.dtype, device="cpu")
    vague = torch.empty(*hypotheses, batch, dtype=torch.bool, device="cpu")
    call = EliminationCall(
        *(_axes(hypotheses, 1), m, dim, batch, joint.element_size(), 1),
        *(_lanes(part, part.stride()[:-2], part.stride(-2)) for part in (joint, floors, bounds)),
        *(None if part is None else part.data_ptr() for part in (y, observed)),
        *(rest.data_ptr(), log_likelihood.data_ptr(), vague.data_ptr()),
    )
    return Eliminated(rest, log_likelihood, vague if enter("eliminate", call, _threads(joint)) else None)


def _axes(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (*(AXES - len(values)) * (fill,), *values)


def _lanes(tensor: Tensor, axes: Sequence[int], row: int) -> Lanes:
    return Lanes(tensor.data_ptr(), _axes(axes, 0), row, int(tensor.stride(-1) > 0))


def _side_by_side(tensor: Tensor) -> Tensor:
    """With sequences that are neighbours in memory, or all the same. Copied where they are not: a sequence is computed
    in one way whatever the strides, which alone and in a batch are not the same."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) in (0, 1) else tensor.contiguous()


def _threads(tensor: Tensor) -> int | None:
    """1, or None: as many as torch has."""
    return 1 if tensor.numel() <= ALONE else None


def _serves(*tensors: Tensor) -> bool:
    """Whether there is a kernel, and tensors are numbers in memory of which no derivative is wanted."""
    if entry_points() is None or recorded() or peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return False
    dtype, tracked = tensors[0].dtype, torch.is_grad_enabled()
    return dtype in (torch.float32, torch.float64) and not any(
        type(t) not in PLAIN or not t.is_cpu or t.dtype != dtype or t.is_neg() or (tracked and t.requires_grad)
        for t in tensors
    )
