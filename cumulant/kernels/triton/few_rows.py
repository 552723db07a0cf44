# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Few queries and many keys, as in decoding: programs share the keys, and their statistics are merged here.

Each part of the keys was swept by `forward_kernel` on its own. With G_s of part s and G = log Σ_s e^{G_s}, means mix
with weights e^{G_s − G}, variances add within and between, Σ e^{2 logit} adds: what `Moments.merge` does, in one pass.
"""

import triton
import triton.language as tl

from cumulant.kernels.triton.tiles import HIDDEN, load_columns, store_columns


@triton.jit
def merge_kernel(
    parts, results, total, splits, value_width, chunks, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Program ``block · chunks + chunk``: rows of ``parts`` (splits, total rows) into rows of ``results``."""
    program = tl.program_id(0)
    column = program % chunks * COLUMNS
    row = program // chunks * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < total
    row = row.to(tl.int64)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for split in range(0, splits):
        g = tl.load(parts.log_normalizer + row + split * total, mask=there, other=HIDDEN)
        ceiling = tl.maximum(top, g)
        level = tl.where(ceiling == HIDDEN, 0.0, ceiling)
        mass = mass * tl.exp(top - level) + tl.exp(g - level)
        top = ceiling
    g = tl.where(mass == 0, HIDDEN, top + tl.log(tl.where(mass == 0, 1.0, mass)))
    nan = tl.where(g == g, 0.0, float("nan"))
    level = tl.where(g == HIDDEN, 0.0, g)
    if results.mean is not None:
        mean = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        for split in range(0, splits):
            at = row + split * total
            share = tl.exp(tl.load(parts.log_normalizer + at, mask=there, other=HIDDEN) - level)
            mean += share[:, None] * load_columns(parts.mean, at * value_width, there, column, value_width, COLUMNS)
        store_columns(results.mean, row * value_width, mean, there, column, value_width, COLUMNS)
    there = there & (row * 0 + column == 0)
    tl.store(results.log_normalizer + row, g, mask=there)
    if results.mean_score is not None:
        score = mixed(parts.log_normalizer, parts.mean_score, level, row, there, total, splits)
        tl.store(results.mean_score + row, score, mask=there)
        if results.score_variance is not None:
            variance = mixed(parts.log_normalizer, parts.score_variance, level, row, there, total, splits)
            for split in range(0, splits):
                at = row + split * total
                share = tl.exp(tl.load(parts.log_normalizer + at, mask=there, other=HIDDEN) - level)
                gap = tl.load(parts.mean_score + at, mask=there, other=0.0) - score
                variance += share * gap * gap
            tl.store(results.score_variance + row, variance, mask=there)
    if results.mean_log_weight is not None:
        weight = mixed(parts.log_normalizer, parts.mean_log_weight, level, row, there, total, splits)
        tl.store(results.mean_log_weight + row, weight, mask=there)
    if results.sink_mass is not None:
        sink = mixed(parts.log_normalizer, parts.sink_mass, level, row, there, total, splits)
        tl.store(results.sink_mass + row, sink, mask=there)
    if results.log_sum_square is not None:
        square = tl.zeros((BLOCK_M,), tl.float32)
        for split in range(0, splits):
            square += tl.exp(
                tl.load(parts.log_sum_square + row + split * total, mask=there, other=HIDDEN) - 2.0 * level
            )
        square = tl.where(g == HIDDEN, HIDDEN, 2.0 * level + tl.log(tl.where(square == 0, 1.0, square)))
        tl.store(results.log_sum_square + row, square, mask=there)
    if results.max_logit is not None:
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for split in range(0, splits):
            peak = tl.maximum(peak, tl.load(parts.max_logit + row + split * total, mask=there, other=HIDDEN))
        tl.store(results.max_logit + row, peak + nan, mask=there)
    if results.max_score is not None:
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        best = tl.zeros((BLOCK_M,), tl.int64)
        for split in range(0, splits):
            most = tl.load(parts.max_score + row + split * total, mask=there, other=HIDDEN)
            if results.best is not None:
                best = tl.where(most > largest, tl.load(parts.best + row + split * total, mask=there, other=0), best)
            largest = tl.maximum(largest, most)
        tl.store(results.max_score + row, largest + nan, mask=there)
        if results.best is not None:
            tl.store(results.best + row, best, mask=there)


@triton.jit
def mixed(log_normalizer, statistic, level, row, there, total, splits):
    """Σ_s e^{G_s − G} T_s; 0 of a query without keys."""
    mean = tl.zeros_like(level)
    for split in range(0, splits):
        at = row + split * total
        share = tl.exp(tl.load(log_normalizer + at, mask=there, other=HIDDEN) - level)
        mean += share * tl.load(statistic + at, mask=there, other=0.0)
    return mean
