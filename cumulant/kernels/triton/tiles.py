# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The pieces that all passes share, in Triton: where the numbers of a group lie, what a query sees, the sweep of keys.

A program has a tile of BLOCK_M queries of one group in its rows and takes keys BLOCK_N at a time. Exponents stay in
natural units: exp2 of logits times log₂e would return G in base 2.
"""

import triton
import triton.language as tl

HIDDEN = tl.constexpr(float("-inf"))  # the log weight of what is hidden, and the largest logit of no keys


@triton.jit
def start_of(operand, group, sizes):
    """Where the numbers of a group begin, in elements."""
    rest = group // sizes.n3
    last = rest // sizes.n2
    start = (group % sizes.n3).to(tl.int64) * operand.a3 + (rest % sizes.n2).to(tl.int64) * operand.a2
    return start + (last % sizes.n1).to(tl.int64) * operand.a1 + (last // sizes.n1).to(tl.int64) * operand.a0


@triton.jit
def lines_of(operand, group, sizes, head, query):
    """Where the numbers of queries begin."""
    return start_of(operand, group, sizes) + head.to(tl.int64) * operand.fold + query.to(tl.int64) * operand.row


@triton.jit
def tiles_of(sizes, PACKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles the queries of a group fill."""
    if PACKED:
        return (sizes.fold * sizes.period + BLOCK_M - 1) // BLOCK_M
    return sizes.fold * ((sizes.period + BLOCK_M - 1) // BLOCK_M)


@triton.jit
def rows_of(tile, sizes, PACKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Head and query of each row of a tile, and whether there is one. PACKED: a tile may have rows of several heads."""
    lane = tl.arange(0, BLOCK_M)
    if PACKED:
        row = tile * BLOCK_M + lane
        return row // sizes.period, row % sizes.period, row < sizes.fold * sizes.period
    tiles = (sizes.period + BLOCK_M - 1) // BLOCK_M
    query = (tile % tiles) * BLOCK_M + lane
    return lane * 0 + tile // tiles, query, query < sizes.period


@triton.jit
def reach_of(query, there, keys, window, offset, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that order and window show to each query: the first, and the one after the last."""
    position = query.to(tl.int64) + offset
    first = position * 0
    after = first + keys
    if WINDOW:
        first = position - window + 1
    if CAUSAL:
        after = position + 1
    elif WINDOW:
        after = position + window
    first = tl.minimum(tl.maximum(first, 0), keys)
    after = tl.where(there, tl.minimum(tl.maximum(after, 0), keys), 0)
    return tl.where(there, first, keys).to(tl.int32), after.to(tl.int32)


@triton.jit
def load_columns(pointer, at, there, column, width, BLOCK: tl.constexpr):
    """(rows, BLOCK) numbers from a column on, of rows that begin ``at``; 0 beyond the width and where no row is."""
    columns = column + tl.arange(0, BLOCK)
    return tl.load(
        pointer + at[:, None] + columns[None, :], mask=there[:, None] & (columns < width)[None, :], other=0.0
    )


@triton.jit
def store_columns(pointer, at, numbers, there, column, width, BLOCK: tl.constexpr):
    """The same the other way."""
    columns = column + tl.arange(0, BLOCK)
    tl.store(pointer + at[:, None] + columns[None, :], numbers, mask=there[:, None] & (columns < width)[None, :])


@triton.jit
def inner(
    left, left_at, left_there, right, right_at, right_there, width,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """⟨left_i, right_j⟩ for rows in memory, CHUNK columns at a time: whole rows of float32 would not fit in registers.

    Products of half precision are exact in float32; NATIVE: both sides have the same half precision.
    """
    total = tl.zeros((left_at.shape[0], right_at.shape[0]), tl.float32)
    for column in tl.range(0, width, CHUNK, num_stages=1):
        a = load_columns(left, left_at, left_there, column, width, CHUNK)
        b = load_columns(right, right_at, right_there, column, width, CHUNK)
        if NATIVE:
            total += tl.dot(a, tl.trans(b))
        else:
            total += tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision=PRECISION)
    return total


@triton.jit
def weighted(weight, rows, PRECISION: tl.constexpr):
    """Σ_j weight_ij rows_j in float32, whatever the dtype of the rows: weights are not rounded to it."""
    return tl.dot(weight, rows.to(tl.float32), input_precision=PRECISION)


@triton.jit
def of_queries(numbers, KEYS_FIRST: tl.constexpr):
    """One for each query, beside a tile (queries, keys), or (keys, queries)."""
    return numbers[None, :] if KEYS_FIRST else numbers[:, None]


@triton.jit
def of_keys(numbers, KEYS_FIRST: tl.constexpr):
    """One for each key, the same way."""
    return numbers[:, None] if KEYS_FIRST else numbers[None, :]


@triton.jit
def weigh(
    score, per_atom, per_pair, mask, group, sizes, head, query, there, key, here, first, after,
    BANDED: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Scores (0 where a key is hidden), logits (−inf where it is), what is visible, and finite log weights."""
    position = of_keys(key, KEYS_FIRST)
    visible = of_queries(there, KEYS_FIRST) & of_keys(here, KEYS_FIRST)
    if BANDED:
        visible = visible & (position >= of_queries(first, KEYS_FIRST)) & (position < of_queries(after, KEYS_FIRST))
    if mask.data is not None:
        at = of_queries(lines_of(mask, group, sizes, head, query), KEYS_FIRST)
        visible = visible & (tl.load(mask.data + at + position, mask=visible, other=0) != 0)
    weight = tl.zeros_like(score)
    if per_atom.data is not None:
        at = start_of(per_atom, group, sizes) + position.to(tl.int64) * per_atom.row
        weight += tl.load(per_atom.data + at, mask=visible, other=0.0)
    if per_pair.data is not None:
        at = of_queries(lines_of(per_pair, group, sizes, head, query), KEYS_FIRST)
        weight += tl.load(per_pair.data + at + position, mask=visible, other=0.0)
    visible = visible & (weight > HIDDEN)
    score = tl.where(visible, score, 0.0)
    weight = tl.where(visible, weight, 0.0)
    return score, tl.where(visible, score + weight, HIDDEN), visible, weight


@triton.jit
def sweep(
    eta, atoms, values, per_atom, per_pair, mask, fine, sizes, group, head, query, there, first, after, start, stop,
    column, scale, state,
    SCORE: tl.constexpr, VARIANCE: tl.constexpr, WEIGHT: tl.constexpr, SQUARE: tl.constexpr, LARGEST: tl.constexpr,
    PEAK: tl.constexpr, MEAN: tl.constexpr, BANDED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) to the state of a tile of queries; of means, COLUMNS entries from ``column`` on.

    Sums are relative to e^top; score and spread are the mean and the summed squared deviations of what was added, which
    blocks join centred on their own: (Δ mean)² · old · new / total lies between them.
    """
    top, mass, mean, score, spread, weight, square, largest, best, peak, broken = state
    eta_at = lines_of(eta, group, sizes, head, query)
    atoms_at, values_at = start_of(atoms, group, sizes), start_of(values, group, sizes)
    for block in range(start, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        here = key < stop
        good = here
        if fine is not None:
            good = tl.load(fine + group.to(tl.int64) * sizes.keys + key, mask=here, other=0) != 0
        key_at = atoms_at + key.to(tl.int64) * atoms.row
        s = scale * inner(
            eta.data, eta_at, there, atoms.data, key_at, good, sizes.width, NATIVE, PRECISION, CHUNK
        )  # fmt: skip
        s, logit, visible, w = weigh(
            s, per_atom, per_pair, mask, group, sizes, head, query, there, key, here, first, after, BANDED, False
        )  # fmt: skip
        if fine is not None:
            broken = tl.maximum(broken, tl.max(tl.where(visible & (good == 0)[None, :], 1, 0), 1))
        block_top = tl.max(logit, 1)
        ceiling = tl.maximum(top, block_top)
        level = tl.where(ceiling == HIDDEN, 0.0, ceiling)
        shrink = tl.exp(top - level)
        p = tl.exp(logit - level[:, None])
        new = tl.sum(p, 1)
        old = mass * shrink
        mass = old + new
        top = ceiling
        if SCORE:
            block_score = tl.sum(p * s, 1) / tl.where(new == 0, 1.0, new)
            share = new / tl.where(mass == 0, 1.0, mass)
            gap = block_score - score
            if VARIANCE:
                apart = s - block_score[:, None]
                spread = spread * shrink + tl.sum(p * apart * apart, 1) + gap * gap * old * share
            score += gap * share
        if WEIGHT:
            weight = weight * shrink + tl.sum(p * w, 1)
        if SQUARE:
            square = square * shrink * shrink + tl.sum(p * p, 1)
        if PEAK:
            peak = tl.maximum(peak, block_top)
        if LARGEST:
            most, index = tl.max(tl.where(visible, s, HIDDEN), 1, return_indices=True)
            best = tl.where(most > largest, block + index, best)
            largest = tl.maximum(largest, most)
        if MEAN:
            if values.data is not None:
                at = values_at + key.to(tl.int64) * values.row
                value = load_columns(values.data, at, good, column, sizes.value_width, COLUMNS)
            else:
                value = load_columns(atoms.data, key_at, good, column, sizes.width, COLUMNS)
            mean = mean * shrink[:, None] + weighted(p, value, PRECISION)
    return top, mass, mean, score, spread, weight, square, largest, best, peak, broken


@triton.jit
def fresh(first_weight, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """The state of a tile whose rows have seen only an atom at 0 with value 0 and this log weight (−inf: nothing)."""
    none = tl.zeros((BLOCK_M,), tl.float32)
    there = tl.where(first_weight > HIDDEN, 1.0, 0.0)
    weight = tl.where(first_weight > HIDDEN, first_weight, 0.0)
    mean = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    index = tl.zeros((BLOCK_M,), tl.int32)
    return first_weight, there, mean, none, none, weight, there, none + HIDDEN, index, none + HIDDEN, index
