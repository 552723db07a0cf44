# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The forward pass in Triton: every statistic of a tile of queries in one sweep over their keys."""

import triton
import triton.language as tl

from cumulant.kernels.triton.tiles import (
    HIDDEN,
    fresh,
    lines_of,
    load_columns,
    reach_of,
    rows_of,
    start_of,
    store_columns,
    sweep,
    tiles_of,
)


@triton.jit
def forward_kernel(
    eta, atoms, values, per_atom, per_pair, mask, sink, fine, rows, results, sizes, window, offset, scale, chunks,
    length, total,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``((split · groups + group) · tiles + tile) · chunks + chunk``; in causal order tiles with most
    keys come first.

    Split s has the keys from s · length on, and writes its results ``total`` rows further (see `few_rows`). A program
    writes COLUMNS entries of means; where they are wider, the first chunk of columns has the other statistics.
    """
    program = tl.program_id(0)
    chunk = program % chunks
    tiles = tiles_of(sizes, PACKED, BLOCK_M)
    tile = program // chunks % tiles
    rest = program // chunks // tiles
    groups = sizes.n0 * sizes.n1 * sizes.n2 * sizes.n3
    split = rest // groups
    group = rest % groups
    if CAUSAL:
        tile = tiles - 1 - tile
    head, query, there = rows_of(tile, sizes, PACKED, BLOCK_M)
    first, after = reach_of(query, there, sizes.keys, window, offset, CAUSAL, WINDOW)
    start = split * length
    stop = tl.minimum(start + length, sizes.keys)
    if CAUSAL or WINDOW:
        start = tl.maximum(start, tl.min(first, 0) // BLOCK_N * BLOCK_N)
        stop = tl.minimum(stop, tl.max(after, 0))
    alone = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if sink.data is not None:
        alone = tl.load(sink.data + start_of(sink, group, sizes) + head.to(tl.int64) * sink.fold, mask=there, other=0.0)
        alone = tl.where(split == 0, alone, HIDDEN)
    column = chunk * COLUMNS
    state = sweep(
        eta, atoms, values, per_atom, per_pair, mask, fine, sizes, group, head, query, there, first, after, start, stop,
        column, scale, fresh(alone, BLOCK_M, COLUMNS),
        SCORE=results.mean_score is not None or results.score_variance is not None,
        VARIANCE=results.score_variance is not None, WEIGHT=results.mean_log_weight is not None,
        SQUARE=results.log_sum_square is not None, LARGEST=results.max_score is not None,
        PEAK=results.max_logit is not None, MEAN=results.mean is not None, BANDED=CAUSAL or WINDOW,
        NATIVE=NATIVE, PRECISION=PRECISION, BLOCK_N=BLOCK_N, CHUNK=CHUNK, COLUMNS=COLUMNS,
    )  # fmt: skip
    row = lines_of(rows, group, sizes, head, query) + split.to(tl.int64) * total
    finish(state, results, sizes, row, there, alone, column, COLUMNS)


@triton.jit
def finish(state, results, sizes, row, there, sink, column, COLUMNS: tl.constexpr):
    """Sums become statistics; NaN where a query saw what is not finite."""
    top, mass, mean, score, spread, weight, square, largest, best, peak, broken = state
    nan = tl.where(broken > 0, float("nan"), 0.0)
    empty = mass == 0
    per = 1.0 / tl.where(empty, 1.0, mass)
    g = tl.where(empty, HIDDEN, top + tl.log(tl.where(empty, 1.0, mass))) + nan
    if results.mean is not None:
        mean = mean * per[:, None] + nan[:, None]
        store_columns(results.mean, row * sizes.value_width, mean, there, column, sizes.value_width, COLUMNS)
    there = there & (row * 0 + column == 0)
    tl.store(results.log_normalizer + row, g, mask=there)
    if results.mean_score is not None:
        tl.store(results.mean_score + row, score + nan, mask=there)
    if results.score_variance is not None:
        tl.store(results.score_variance + row, spread * per + nan, mask=there)
    if results.mean_log_weight is not None:
        tl.store(results.mean_log_weight + row, weight * per + nan, mask=there)
    if results.log_sum_square is not None:
        total = 2.0 * top + tl.log(tl.where(square == 0, 1.0, square))
        tl.store(results.log_sum_square + row, tl.where(empty, HIDDEN, total) + nan, mask=there)
    if results.max_score is not None:
        tl.store(results.max_score + row, largest + nan, mask=there)
    if results.best is not None:
        tl.store(results.best + row, best.to(tl.int64), mask=there)
    if results.sink_mass is not None:
        tl.store(results.sink_mass + row, tl.exp(sink - tl.where(empty, 0.0, g)) + nan, mask=there)
    if results.max_logit is not None:
        tl.store(results.max_logit + row, peak + nan, mask=there)


@triton.jit
def finite_kernel(atoms, values, sizes, fine, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """fine (groups, keys): 1 where atom and value of a key are finite."""
    blocks = (sizes.keys + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    group = program // blocks
    key = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = key < sizes.keys
    bad = not_finite(atoms, group, key, here, sizes, sizes.width, BLOCK_N, CHUNK)
    if values.data is not None:
        bad = tl.maximum(bad, not_finite(values, group, key, here, sizes, sizes.value_width, BLOCK_N, CHUNK))
    tl.store(fine + group.to(tl.int64) * sizes.keys + key, (bad == 0).to(tl.uint8), mask=here)


@triton.jit
def not_finite(operand, group, key, here, sizes, width, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """1 for rows with a number that is not finite."""
    bad = tl.zeros((BLOCK_N,), tl.int32)
    at = start_of(operand, group, sizes) + key.to(tl.int64) * operand.row
    for column in tl.range(0, width, CHUNK):
        own = load_columns(operand.data, at, here, column, width, CHUNK).to(tl.float32)
        bad = tl.maximum(bad, tl.max(tl.where(tl.abs(own) < float("inf"), 0, 1), 1))
    return bad
