# pyright: reportArgumentType=false, reportOperatorIssue=false  # in Triton, not Python
"""The forward pass in Triton: every statistic of a tile of queries in one sweep over their keys."""

import triton
import triton.language as tl

from cumulant.kernels.triton.tiles import HIDDEN, fresh, lines_of, load_rows, only_finite, reach_of, rows_of, start_of, sweep, tiles_of


@triton.jit
def forward_kernel(
    eta, atoms, values, per_atom, per_pair, mask, sink, fine, rows, results, sizes, window, offset, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program ``tile + tiles · group``; under causal order the tiles with most keys come first."""
    tiles = tiles_of(sizes, PACKED, BLOCK_M)
    program = tl.program_id(0)
    group = program // tiles
    tile = program % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    head, query, there = rows_of(tile, sizes, PACKED, BLOCK_M)
    first, after = reach_of(query, there, sizes.keys, window, offset, CAUSAL, WINDOW)
    start, stop = 0, sizes.keys
    if CAUSAL or WINDOW:
        start = tl.min(first, 0) // BLOCK_N * BLOCK_N
        stop = tl.max(after, 0)
    alone = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if sink.data is not None:
        alone = tl.load(sink.data + start_of(sink, group, sizes) + head.to(tl.int64) * sink.fold, mask=there, other=0.0)
    left = load_rows(eta, lines_of(eta, group, sizes, head, query), there, sizes.width, BLOCK_D)
    state = fresh(alone, BLOCK_M, BLOCK_E)
    state = sweep(
        left, atoms, values, per_atom, per_pair, mask, fine, sizes, group, head, query, there, first, after, start,
        stop, scale, state,
        SCORE=results.mean_score is not None or results.score_variance is not None,
        VARIANCE=results.score_variance is not None, WEIGHT=results.mean_log_weight is not None,
        SQUARE=results.log_sum_square is not None, LARGEST=results.max_score is not None,
        PEAK=results.max_logit is not None, MEAN=results.mean is not None, BANDED=CAUSAL or WINDOW, CHECKED=False,
        NATIVE=NATIVE, PRECISION=PRECISION, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E,
    )  # fmt: skip
    row = lines_of(rows, group, sizes, head, query)
    finish(state, results, sizes, row, there, alone, BLOCK_E)


@triton.jit
def finish(state, results, sizes, row, there, sink, BLOCK_E: tl.constexpr):
    """Sums become statistics; NaN where a query saw what is not finite."""
    top, mass, mean, score, spread, weight, square, largest, best, peak, spoiled = state
    nan = tl.where(spoiled > 0, float("nan"), 0.0)
    empty = mass == 0
    per = 1.0 / tl.where(empty, 1.0, mass)
    g = tl.where(empty, HIDDEN, top + tl.log(tl.where(empty, 1.0, mass))) + nan
    tl.store(results.log_normalizer + row, g, mask=there)
    if results.mean is not None:
        column = tl.arange(0, BLOCK_E)
        at = row[:, None] * sizes.value_width + column[None, :]
        tl.store(
            results.mean + at,
            mean * per[:, None] + nan[:, None],
            mask=there[:, None] & (column < sizes.value_width)[None, :],
        )
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
        tl.store(results.sink_mass + row, tl.where(sink > HIDDEN, tl.exp(sink - g), 0.0) + nan, mask=there)
    if results.max_logit is not None:
        tl.store(results.max_logit + row, peak + nan, mask=there)


@triton.jit
def finite_kernel(atoms, values, sizes, fine, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """fine (groups, keys): 1 where atom and value of a key are finite."""
    blocks = (sizes.keys + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    group = program // blocks
    key = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = key < sizes.keys
    own = load_rows(atoms, start_of(atoms, group, sizes) + key.to(tl.int64) * atoms.row, here, sizes.width, BLOCK_D)
    _, good = only_finite(own, here)
    if values.data is not None:
        own = load_rows(values, start_of(values, group, sizes) + key.to(tl.int64) * values.row, here, sizes.value_width, BLOCK_E)
        _, good = only_finite(own, good)
    tl.store(fine + group.to(tl.int64) * sizes.keys + key, good.to(tl.uint8), mask=here)
