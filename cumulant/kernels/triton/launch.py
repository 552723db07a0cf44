# pyright: reportArgumentType=false, reportCallIssue=false  # constants of kernels are plain numbers here
"""Calls of the Triton kernels: sizes of tiles, grids, and what a call of the native kernel has, as their arguments."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import Call
from cumulant.kernels.triton import forward as passes
from cumulant.kernels.triton.arguments import Inputs, Results, operand, rows_of_results, sizes_of
from cumulant.kernels.triton.library import interpreting

WIDEST = 256  # atoms and values, in one tile
LEAST = 16  # rows, keys and widths that tensor cores take at once


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of loads that run ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The power of two that a width is padded to."""
    return max(LEAST, 1 << (width - 1).bit_length())


def forward_tiles(width: int, dtype: torch.dtype) -> Tiles:
    if width <= 64:
        return Tiles(64, 32, 4, 2)
    return Tiles(64, 32, 8, 2) if width <= 128 else Tiles(32, 32, 8, 1)


def inputs_of(c: Call, tensors: dict[str, Tensor | None]) -> Inputs:
    mask = tensors["mask"]
    tensors = {**tensors, "mask": None if mask is None else mask.view(torch.uint8)}
    given = {name: operand(getattr(c, name), tensors[name]) for name in Inputs._fields[:-1]}
    return Inputs(**given, fine=None)


def forward(c: Call, tensors: dict[str, Tensor | None], out: dict[str, Tensor]) -> None:
    """Fill ``out``: statistics by name, in the order of the plan's results."""
    if not out["log_normalizer"].numel():
        return
    x = checked(c, inputs_of(c, tensors))
    tiles = forward_tiles(max(c.width, c.value_width), x.eta.data.dtype)
    packed = c.fold > 1 and c.period < tiles.queries
    rows = math.ceil(c.fold * c.period / tiles.queries) if packed else c.fold * math.ceil(c.period / tiles.queries)
    passes.forward_kernel[(rows * groups_of(c),)](
        *x, rows_of_results(c), results_of(c, out), sizes_of(c), c.window, c.offset, c.scale,
        CAUSAL=bool(c.causal), WINDOW=bool(c.window), PACKED=packed, **settings(c, x, tiles),
    )  # fmt: skip


def results_of(c: Call, out: dict[str, Tensor]) -> Results:
    """Results as the forward pass writes them; the mean of the atoms is that of the values where there are none."""
    named = {("mean" if name == "atom_mean" else name): tensor for name, tensor in out.items()}
    return Results(**named)


def groups_of(c: Call) -> int:
    return math.prod(c.axes)


def restricted(c: Call, x: Inputs) -> bool:
    """Whether a key may be hidden from a query."""
    return bool(c.causal or c.window) or any(t.data is not None for t in (x.mask, x.per_atom, x.per_pair))


def checked(c: Call, x: Inputs) -> Inputs:
    """With flags of the keys that are finite, where a hidden one may not be: 0 times that is no number."""
    if not c.keys or not restricted(c, x):
        return x
    fine = torch.empty((groups_of(c), c.keys), dtype=torch.uint8, device=x.atoms.data.device)
    block = 64
    passes.finite_kernel[(groups_of(c) * math.ceil(c.keys / block),)](
        x.atoms, x.values, sizes_of(c), fine,
        BLOCK_N=block, BLOCK_D=padded(c.width), BLOCK_E=padded(c.value_width), num_warps=4,
    )  # fmt: skip
    return x._replace(fine=fine)


def settings(c: Call, x: Inputs, tiles: Tiles) -> dict:
    """Constants of a kernel."""
    return {
        "NATIVE": x.eta.data.dtype == torch.float16 or not interpreting(),  # no products of bfloat16 in the interpreter
        "PRECISION": "tf32x3",
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "BLOCK_D": padded(c.width),
        "BLOCK_E": padded(c.value_width),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
