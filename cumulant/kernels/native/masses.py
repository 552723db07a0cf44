"""The native kernel with more than moments: masses by distance and of marked keys, the largest logit, ragged heads."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import Call
from cumulant.kernels.native.call import PLAIN
from cumulant.kernels.native.direct import Arguments, MomentsSettings, Shapes, make_plan, split_axes

POSITIONS = 1 << 30  # distances are formed in integers of 32 bits


class Masses(NamedTuple):
    """What is wanted beside the moments.

    edges            where bins of the distance begin; the last one is open
    marked           (*batch, n) Boolean, batch axes of the key side
    starts, lengths  (*batch) int64, batch axes of the key side; both or neither
    """

    edges: tuple[int, ...] | None
    marked: Tensor | None
    starts: Tensor | None
    lengths: Tensor | None


def serve(x: Arguments, settings: MomentsSettings, shapes: Shapes, wanted: Masses) -> dict[str, Tensor] | None:
    """The statistics by name, with "max_logit", and "bin_mass" and "marked_mass" where they are wanted; None where the
    kernel does not serve, or where a result is not finite."""
    if wanted.edges is not None and max(abs(shapes.offset), *wanted.edges) + x.eta.shape[-2] >= POSITIONS:
        return None
    key_side = {}
    if wanted.marked is not None:
        if type(wanted.marked) not in PLAIN or not wanted.marked.is_cpu:
            return None
        last = wanted.marked.stride(-1) == 1 or wanted.marked.shape[-1] <= 1
        key_side["marked"] = wanted.marked if last else wanted.marked.contiguous()
    if wanted.starts is not None and wanted.lengths is not None:
        both = torch.broadcast_tensors(wanted.starts, wanted.lengths)
        key_side["starts"] = both[0].contiguous()
    plan = make_plan(x, settings, lambda *_: shapes, key_side)
    if plan is None:
        return None
    rows = plan.outputs["log_normalizer"]
    more = {"max_logit": torch.empty(rows, dtype=plan.dtype, device="cpu")}
    if wanted.edges is not None:
        more["bin_mass"] = torch.empty((*rows, len(wanted.edges)), dtype=plan.dtype, device="cpu")
    if wanted.marked is not None:
        more["marked_mass"] = torch.empty(rows, dtype=plan.dtype, device="cpu")

    def of_groups(tensor: Tensor) -> Tensor:
        shape = split_axes(tensor.shape, len(shapes.lead), shapes.ratio, of_keys=True)
        return tensor.reshape(shape).expand(plan.groups).contiguous()

    def add(c: Call) -> list:
        alive: list = [key_side]
        for name, tensor in more.items():
            setattr(c, name, tensor.data_ptr())
        if wanted.edges is not None:
            edges = (ctypes.c_int64 * len(wanted.edges))(*wanted.edges)
            c.bins, c.edges = len(wanted.edges), ctypes.addressof(edges)
            alive.append(edges)
        if "marked" in key_side:
            c.marked.data, c.marked.dtype, c.marked.row = key_side["marked"].data_ptr(), 4, 1
        if wanted.starts is not None and wanted.lengths is not None:
            starts, lengths = (of_groups(t) for t in torch.broadcast_tensors(wanted.starts, wanted.lengths))
            c.starts, c.lengths = starts.data_ptr(), lengths.data_ptr()
            alive += [starts, lengths]
        return alive

    out, _, irregular = plan.forward(x, add)
    return None if irregular else out | more
