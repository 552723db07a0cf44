# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The backward pass in Triton: gradients through every statistic in closed form, in two sweeps that recompute weights.

With y = s − mean score, and gradients g that come in of G, mean, mean score, variance, mean weight, log Σ e^{2 logit},

    X_j      = constant + ⟨g_mean, v_j⟩ + y (g_s + g_var y) + 2 g_q (Σp²)⁻¹ p_j + g_w w_j
    d logit  = p_j X_j          d score = p_j (X_j + g_s + 2 g_var y)          d weight = p_j (X_j + g_w)

`queries_kernel` has a tile of queries and takes keys in turn: d eta, and gradients of weights of pairs. `keys_kernel`
has a block of keys of a group and takes all queries that see any of them: d atoms, d values, d weights of keys. So
every sum is formed by one program, and heads that share keys add nothing to memory.
"""

import triton
import triton.language as tl

from cumulant.kernels.triton.tiles import (
    HIDDEN,
    inner,
    lines_of,
    load_columns,
    of_queries,
    reach_of,
    rows_of,
    start_of,
    store_columns,
    tiles_of,
    weigh,
    weighted,
)


@triton.jit
def product(
    rows, rows_at, there, keys, keys_at, good, width,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Inner products of queries and keys; the side that a kernel keeps is loaded again in every turn."""
    if KEYS_FIRST:
        found = inner(
            keys, keys_at, good, rows, rows_at, there, width, NATIVE, PRECISION, CHUNK
        )  # fmt: skip
    else:
        found = inner(
            rows, rows_at, there, keys, keys_at, good, width, NATIVE, PRECISION, CHUNK
        )  # fmt: skip
    return found


@triton.jit
def factor(pointer, row, there, KEYS_FIRST: tl.constexpr):
    """A number of each query, beside a tile."""
    return of_queries(tl.load(pointer + row, mask=there, other=0.0), KEYS_FIRST)


@triton.jit
def slopes_of(
    eta, atoms, values, per_atom, per_pair, mask, statistics, row, there, query, head, key, here, good, first, after,
    group, sizes, scale, BANDED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """p, d score and d weight of a tile (queries, keys), or (keys, queries); 0 where a key is hidden."""
    eta_at = lines_of(eta, group, sizes, head, query)
    key_at = start_of(atoms, group, sizes) + key.to(tl.int64) * atoms.row
    s = scale * product(
        eta.data, eta_at, there, atoms.data, key_at, good, sizes.width, NATIVE, PRECISION, CHUNK, KEYS_FIRST
    )  # fmt: skip
    s, logit, visible, w = weigh(
        s, per_atom, per_pair, mask, group, sizes, head, query, there, key, here, first, after, BANDED, KEYS_FIRST
    )  # fmt: skip
    p = tl.where(visible, tl.exp(logit - factor(statistics.log_normalizer, row, there, KEYS_FIRST)), 0.0)
    d_weight = factor(statistics.constant, row, there, KEYS_FIRST) + tl.zeros_like(s)
    if statistics.d_mean is not None:
        mean_at = row * sizes.value_width
        if values.data is not None:
            at = start_of(values, group, sizes) + key.to(tl.int64) * values.row
            d_weight += product(
                statistics.d_mean, mean_at, there, values.data, at, good, sizes.value_width, False, PRECISION,
                CHUNK, KEYS_FIRST,
            )  # fmt: skip
        else:
            d_weight += product(
                statistics.d_mean, mean_at, there, atoms.data, key_at, good, sizes.width, False, PRECISION, CHUNK,
                KEYS_FIRST,
            )  # fmt: skip
    if statistics.d_log_sum_square is not None:
        d_weight += factor(statistics.d_log_sum_square, row, there, KEYS_FIRST) * p
    d_score = tl.zeros_like(s)
    if statistics.mean_score is not None:
        y = s - factor(statistics.mean_score, row, there, KEYS_FIRST)
        slope = tl.zeros_like(s)
        if statistics.d_mean_score is not None:
            linear = factor(statistics.d_mean_score, row, there, KEYS_FIRST)
            slope += linear
            d_score += linear
        if statistics.d_score_variance is not None:
            quadratic = factor(statistics.d_score_variance, row, there, KEYS_FIRST) * y
            slope += quadratic
            d_score += 2.0 * quadratic
        d_weight += slope * y
    d_score += d_weight
    if statistics.d_mean_log_weight is not None:
        incoming = factor(statistics.d_mean_log_weight, row, there, KEYS_FIRST)
        d_score += incoming * w
        d_weight += incoming * w + incoming
    return p, tl.where(visible, p * d_score, 0.0), tl.where(visible, p * d_weight, 0.0)


@triton.jit
def queries_kernel(
    eta, atoms, values, per_atom, per_pair, mask, fine, rows, statistics, d_eta, d_per_pair, sizes, window, offset,
    scale, chunks,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, SHARED: tl.constexpr, NATIVE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``(group · tiles + tile) · chunks + chunk`` has COLUMNS entries of d eta.

    SHARED: several pairs have one weight, to whose gradient all add.
    """
    program = tl.program_id(0)
    chunk = program % chunks
    column = chunk * COLUMNS
    tiles = tiles_of(sizes, PACKED, BLOCK_M)
    tile = program // chunks % tiles
    group = program // chunks // tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    head, query, there = rows_of(tile, sizes, PACKED, BLOCK_M)
    first, after = reach_of(query, there, sizes.keys, window, offset, CAUSAL, WINDOW)
    start, stop = 0, sizes.keys
    if CAUSAL or WINDOW:
        start = tl.min(first, 0) // BLOCK_N * BLOCK_N
        stop = tl.max(after, 0)
    row = lines_of(rows, group, sizes, head, query)
    alive = there & (tl.load(statistics.log_normalizer + row, mask=there, other=0.0) != HIDDEN)
    total = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for block in tl.range(start, stop, BLOCK_N, disable_licm=True):
        key = block + tl.arange(0, BLOCK_N)
        here = key < stop
        good = here
        if fine is not None:
            good = tl.load(fine + group.to(tl.int64) * sizes.keys + key, mask=here, other=0) != 0
        _, d_score, d_weight = slopes_of(
            eta, atoms, values, per_atom, per_pair, mask, statistics, row, alive, query, head, key, here, good, first,
            after, group, sizes, scale, CAUSAL or WINDOW, NATIVE, PRECISION, CHUNK,
            KEYS_FIRST=False,
        )  # fmt: skip
        if d_eta is not None:
            at = start_of(atoms, group, sizes) + key.to(tl.int64) * atoms.row
            right = load_columns(atoms.data, at, good, column, sizes.width, COLUMNS)
            total += weighted(d_score, right, PRECISION)
        if d_per_pair.data is not None:
            to = d_per_pair.data + lines_of(d_per_pair, group, sizes, head, query)[:, None] + key[None, :]
            both = alive[:, None] & (here & (key * 0 + chunk == 0))[None, :]
            if SHARED:
                tl.atomic_add(to, d_weight, mask=both, sem="relaxed")
            else:
                tl.store(to, d_weight, mask=both)
    if d_eta is not None:
        store_columns(d_eta, row * sizes.width, total * scale, there, column, sizes.width, COLUMNS)


@triton.jit
def keys_kernel(
    eta, atoms, values, per_atom, per_pair, mask, fine, rows, statistics, d_atoms, d_values, d_per_atom, sizes,
    window, offset, scale, chunks,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``(group · blocks + block) · chunks + chunk`` has COLUMNS entries of d atoms and d values."""
    program = tl.program_id(0)
    chunk = program % chunks
    column = chunk * COLUMNS
    blocks = (sizes.keys + BLOCK_N - 1) // BLOCK_N
    block = program // chunks % blocks * BLOCK_N
    group = program // chunks // blocks
    key = block + tl.arange(0, BLOCK_N)
    here = key < sizes.keys
    good = here
    if fine is not None:
        good = tl.load(fine + group.to(tl.int64) * sizes.keys + key, mask=here, other=0) != 0
    of_atoms = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    of_values = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    of_weights = tl.zeros((BLOCK_N,), tl.float32)
    from_tile, per_head = tiles_that_see(block, sizes, window, offset, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    of_head = (sizes.period + BLOCK_M - 1) // BLOCK_M
    count = sizes.fold * per_head
    if PACKED:
        count = tiles_of(sizes, PACKED, BLOCK_M)
    for i in tl.range(0, count, disable_licm=True):
        tile = program * 0 + i
        if not PACKED:
            tile = tile // per_head * of_head + from_tile + tile % per_head
        head, query, there = rows_of(tile, sizes, PACKED, BLOCK_M)
        first, after = reach_of(query, there, sizes.keys, window, offset, CAUSAL, WINDOW)
        row = lines_of(rows, group, sizes, head, query)
        alive = there & (tl.load(statistics.log_normalizer + row, mask=there, other=0.0) != HIDDEN)
        p, d_score, d_weight = slopes_of(
            eta, atoms, values, per_atom, per_pair, mask, statistics, row, alive, query, head, key, here, good, first,
            after, group, sizes, scale, CAUSAL or WINDOW, NATIVE, PRECISION, CHUNK,
            KEYS_FIRST=True,
        )  # fmt: skip
        if d_atoms is not None:
            at = lines_of(eta, group, sizes, head, query)
            left = load_columns(eta.data, at, alive, column, sizes.width, COLUMNS)
            of_atoms += weighted(d_score, left, PRECISION) * scale
            if values.data is None and statistics.d_mean is not None:
                upstream = load_columns(statistics.d_mean, row * sizes.width, alive, column, sizes.width, COLUMNS)
                of_atoms += weighted(p, upstream, PRECISION)
        if d_values is not None:
            at = row * sizes.value_width
            upstream = load_columns(statistics.d_mean, at, alive, column, sizes.value_width, COLUMNS)
            of_values += weighted(p, upstream, PRECISION)
        if d_per_atom is not None:
            of_weights += tl.sum(d_weight, 1)
    to = group.to(tl.int64) * sizes.keys + key
    if d_atoms is not None:
        store_columns(d_atoms, to * sizes.width, of_atoms, here, column, sizes.width, COLUMNS)
    if d_values is not None:
        store_columns(d_values, to * sizes.value_width, of_values, here, column, sizes.value_width, COLUMNS)
    if d_per_atom is not None:
        tl.store(d_per_atom + to, of_weights, mask=here & (key * 0 + chunk == 0))


@triton.jit
def tiles_that_see(
    block, sizes, window, offset,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of the tiles of a head, the first with a query that sees a key of the block, and how many from it on may."""
    low = block.to(tl.int64) * 0
    high = low + sizes.period
    if CAUSAL:
        low = block - offset
    elif WINDOW:
        low = block - window + 1 - offset
    if WINDOW:
        high = block + BLOCK_N - 1 + window - offset
    low = tl.minimum(tl.maximum(low, 0), sizes.period)
    high = tl.minimum(tl.maximum(high, low), sizes.period)
    first = (low // BLOCK_M).to(tl.int32)
    return first, tl.where(high > low, (high + BLOCK_M - 1) // BLOCK_M - first, 0).to(tl.int32)
