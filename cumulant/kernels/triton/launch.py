# pyright: reportArgumentType=false, reportCallIssue=false
"""Calls of the Triton kernels: sizes of tiles, grids, and what a call of the native kernel has, as their arguments."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import Call
from cumulant.kernels.triton import backward as pulls
from cumulant.kernels.triton import few_rows
from cumulant.kernels.triton import forward as passes
from cumulant.kernels.triton.arguments import (
    Results,
    Statistics,
    TritonInputs,
    TritonOperand,
    operand,
    rows_of_results,
    sizes_of,
)
from cumulant.kernels.triton.library import interpreting

FUSION = {"enable_fp_fusion": True}  # a product and a sum are rounded once; unset, Triton warns of a change to come
SPLIT = 256  # keys that are worth a program of their own
MOST_SPLITS = 64
LEAST = 16  # rows, keys and widths that tensor cores take at once


class Tiles(NamedTuple):
    """Queries and keys of a tile, columns of a product, columns of a result, warps of a program, stages of loads that
    run ahead."""

    queries: int
    keys: int
    chunk: int
    columns: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The power of two that a width is padded to."""
    return max(LEAST, 1 << (width - 1).bit_length())


def forward_tiles(dtype: torch.dtype) -> Tiles:
    """These sizes, and those below, compile to code without spilled registers (tests/kernels/triton/test_code.py).
    Which are fastest was not measured."""
    return Tiles(64, 16, 32, 64, 4, 1) if dtype == torch.float32 else Tiles(64, 16, 64, 64, 4, 2)


def few_rows_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(LEAST, 32, 32, 64, 2, 2)


def queries_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(64, 16, 32, 64, 4, 1)


def keys_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(16, 64, 32, 64, 4, 1)


def inputs_of(c: Call, tensors: dict[str, Tensor | None]) -> TritonInputs:
    mask = tensors["mask"]
    tensors = {**tensors, "mask": None if mask is None else mask.view(torch.uint8)}
    given = {name: operand(getattr(c, name), tensors[name]) for name in TritonInputs._fields[:-1]}
    return TritonInputs(**given, fine=None)


def on(device: torch.device) -> AbstractContextManager:
    """Where Triton launches: on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def without_needless_order(c: Call) -> None:
    """Causal order that shows every key to every query, as for a decoded token, is none."""
    if c.causal and not c.window and c.offset >= c.keys - 1:
        c.causal = 0


def forward(c: Call, tensors: dict[str, Tensor | None], out: dict[str, Tensor]) -> None:
    """Fill ``out``: statistics by name, in the order of the plan's results."""
    if out["log_normalizer"].numel():
        without_needless_order(c)
        with on(out["log_normalizer"].device):
            _forward(c, tensors, out)


def _forward(c: Call, tensors: dict[str, Tensor | None], out: dict[str, Tensor]) -> None:
    x = checked(c, inputs_of(c, tensors))
    results = results_of(c, out)
    few = c.fold * c.period <= LEAST
    tiles = few_rows_tiles(x.eta.data.dtype) if few else forward_tiles(x.eta.data.dtype)
    chunks = 1 if results.mean is None else chunks_of(c.value_width, tiles)
    programs = row_tiles(c, tiles) * groups_of(c) * chunks
    length, splits = split_of(c, tiles, programs, x.eta.data.device)
    total = out["log_normalizer"].numel()
    parts = (
        results if splits == 1 else Results(*(None if t is None else t.new_empty((splits, *t.shape)) for t in results))
    )
    passes.forward_kernel[(programs * splits,)](
        *x, rows_of_results(c), parts, sizes_of(c), c.window, c.offset, c.scale, chunks, length, total,
        **settings(c, x, tiles),
    )  # fmt: skip
    if splits > 1:
        columns = min(tiles.columns, padded(c.value_width))
        few_rows.merge_kernel[(math.ceil(total / LEAST) * chunks,)](
            parts, results, total, splits, c.value_width, chunks, BLOCK_M=LEAST, COLUMNS=columns, num_warps=4, **FUSION
        )


def split_of(c: Call, tiles: Tiles, programs: int, device: torch.device) -> tuple[int, int]:
    """Keys in a part, and how many parts, so that there are programs for every multiprocessor."""
    wanted = math.ceil(2 * multiprocessors(device) / programs)
    splits = min(wanted, c.keys // SPLIT, MOST_SPLITS)
    if splits < 2:
        return max(1, c.keys), 1
    length = math.ceil(c.keys / splits / tiles.keys) * tiles.keys
    return length, math.ceil(c.keys / length)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 108


def backward(
    c: Call,
    tensors: dict[str, Tensor | None],
    out: dict[str, Tensor],
    grad: dict[str, Tensor],
    made: dict[str, Tensor | None],
) -> None:
    """Fill ``made``: d_eta (rows, width), d_atoms, d_values (groups, keys, ·), d_per_atom (groups, keys), d_per_pair,
    which holds zeros and lies as `c.d_per_pair` says; None where not wanted."""
    without_needless_order(c)
    with on(out["log_normalizer"].device):
        _backward(c, tensors, out, grad, made)


def _backward(
    c: Call, tensors, out: dict[str, Tensor], grad: dict[str, Tensor], made: dict[str, Tensor | None]
) -> None:
    x = checked(c, inputs_of(c, tensors))
    shared = (
        x.eta,
        x.atoms,
        x.values,
        x.per_atom,
        x.per_pair,
        x.mask,
        x.fine,
        rows_of_results(c),
        statistics_of(out, grad),
    )
    geometry = (sizes_of(c), c.window, c.offset, c.scale)
    of_pairs = operand(c.d_per_pair, made["per_pair"])
    if made["eta"] is not None or of_pairs.data is not None:
        tiles = queries_tiles(x.eta.data.dtype)
        chunks = 1 if made["eta"] is None else chunks_of(c.width, tiles)
        pulls.queries_kernel[(row_tiles(c, tiles) * groups_of(c) * chunks,)](
            *shared, made["eta"], of_pairs, *geometry, chunks, SHARED=_shared(c, of_pairs), **settings(c, x, tiles)
        )
    d_values = made["values"] if grad.keys() & {"mean"} else None
    of_keys = (made["atoms"], d_values, made["per_atom"])
    if c.keys and any(t is not None for t in of_keys):
        tiles = keys_tiles(x.eta.data.dtype)
        widths = (1, 0 if made["atoms"] is None else c.width, 0 if d_values is None else c.value_width)
        chunks = chunks_of(max(widths), tiles)
        pulls.keys_kernel[(math.ceil(c.keys / tiles.keys) * groups_of(c) * chunks,)](
            *shared, *of_keys, *geometry, chunks, **settings(c, x, tiles)
        )


def chunks_of(width: int, tiles: Tiles) -> int:
    """How many programs share the columns of a result."""
    return max(1, math.ceil(width / tiles.columns))


def statistics_of(out: dict[str, Tensor], grad: dict[str, Tensor]) -> Statistics:
    """Factors of the slopes. A query without keys (G = −∞) has no gradient, whatever comes in."""
    g = out["log_normalizer"]
    alive = g != -torch.inf
    grad = {name: torch.where(alive if t.ndim == g.ndim else alive[..., None], t, 0) for name, t in grad.items()}
    constant = grad.get("log_normalizer", torch.zeros_like(g))
    for name in ("mean", "atom_mean"):
        if name in grad:
            constant = constant - (grad[name] * out[name]).sum(-1)
    for name in ("score_variance", "mean_log_weight"):
        if name in grad:
            constant = constant - grad[name] * out[name]
    of_square = None
    if "log_sum_square" in grad:
        exponent = torch.where(alive, 2 * g - out["log_sum_square"], 0)
        of_square = (2 * grad["log_sum_square"] * exponent.exp()).contiguous()
    scored = grad.keys() & {"mean_score", "score_variance"}
    return Statistics(
        g.contiguous(), constant.contiguous(), out["mean_score"].contiguous() if scored else None,
        contiguous(grad.get("mean", grad.get("atom_mean"))), contiguous(grad.get("mean_score")),
        contiguous(grad.get("score_variance")), contiguous(grad.get("mean_log_weight")), of_square,
    )  # fmt: skip


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _shared(c: Call, pairs: TritonOperand) -> bool:
    """Whether weights of pairs belong to several queries."""
    steps = zip((*c.axes, c.fold, c.period), (*pairs[1:6], pairs.row), strict=True)
    return any(size > 1 and step == 0 for size, step in steps)


def row_tiles(c: Call, tiles: Tiles) -> int:
    """How many tiles the queries of a group fill."""
    if packed(c, tiles):
        return math.ceil(c.fold * c.period / tiles.queries)
    return c.fold * math.ceil(c.period / tiles.queries)


def packed(c: Call, tiles: Tiles) -> bool:
    """Whether a tile has queries of several heads that share keys."""
    return c.fold > 1 and c.period < tiles.queries


def results_of(c: Call, out: dict[str, Tensor]) -> Results:
    """Results as the forward pass writes them; the mean of the atoms is that of the values where there are none."""
    named = {("mean" if name == "atom_mean" else name): tensor for name, tensor in out.items()}
    return Results(**named)


def groups_of(c: Call) -> int:
    return math.prod(c.axes)


def restricted(c: Call, x: TritonInputs) -> bool:
    """Whether a key may be hidden from a query."""
    return bool(c.causal or c.window) or any(t.data is not None for t in (x.mask, x.per_atom, x.per_pair))


def checked(c: Call, x: TritonInputs) -> TritonInputs:
    """With flags of the keys that are finite, where a hidden one may not be: 0 times that is no number."""
    if not c.keys or not restricted(c, x):
        return x
    fine = torch.empty((groups_of(c), c.keys), dtype=torch.uint8, device=x.atoms.data.device)
    block = 64
    passes.finite_kernel[(groups_of(c) * math.ceil(c.keys / block),)](
        x.atoms, x.values, sizes_of(c), fine,
        BLOCK_N=block, CHUNK=min(block, padded(max(c.width, c.value_width))), num_warps=4, **FUSION,
    )  # fmt: skip
    return x._replace(fine=fine)


def settings(c: Call, x: TritonInputs, tiles: Tiles) -> dict:
    """Constants of a kernel."""
    half = x.eta.data.dtype != torch.float32
    return {
        "CAUSAL": bool(c.causal),
        "WINDOW": bool(c.window),
        "PACKED": packed(c, tiles),
        "NATIVE": half and (x.eta.data.dtype == torch.float16 or not interpreting()),  # it has no products of bfloat16
        "PRECISION": "tf32x3",
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "CHUNK": min(tiles.chunk, padded(max(c.width, c.value_width))),
        "COLUMNS": min(tiles.columns, padded(max(c.width, c.value_width))),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **FUSION,
    }
