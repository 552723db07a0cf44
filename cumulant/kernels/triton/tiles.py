# pyright: reportArgumentType=false, reportOperatorIssue=false  # in Triton, not Python
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
def load_rows(operand, at, there, width, BLOCK: tl.constexpr):
    """(rows, BLOCK) numbers from the addresses ``at`` of rows on; 0 beyond the width and where there is no row."""
    column = tl.arange(0, BLOCK)
    return tl.load(
        operand.data + at[:, None] + column[None, :], mask=there[:, None] & (column < width)[None, :], other=0.0
    )


@triton.jit
def only_finite(rows, fine):
    """The rows with those put to 0 that are not finite, and ``fine`` without them."""
    fine = fine & (tl.min(tl.where(tl.abs(rows) < float("inf"), 1, 0), 1) > 0)
    return tl.where(fine[:, None], rows, 0.0), fine


@triton.jit
def inner(left, right, NATIVE: tl.constexpr, PRECISION: tl.constexpr):
    """⟨left_i, right_j⟩ for rows of one dtype. Products of half precision are exact in float32."""
    if left.dtype == tl.float32 or not NATIVE:
        return tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), input_precision=PRECISION)
    return tl.dot(left, tl.trans(right))


@triton.jit
def weighted(weight, rows, PRECISION: tl.constexpr):
    """Σ_j weight_ij rows_j in float32, whatever the dtype of the rows: weights are not rounded to it."""
    return tl.dot(weight, rows.to(tl.float32), input_precision=PRECISION)


@triton.jit
def weigh(score, per_atom, per_pair, mask, group, sizes, head, query, key, visible):
    """Scores (0 where a key is hidden), logits (−inf where it is), what is visible, and finite log weights."""
    if mask.data is not None:
        at = lines_of(mask, group, sizes, head, query)
        shown = tl.load(mask.data + at[:, None] + key[None, :], mask=visible, other=0)
        visible = visible & (shown != 0)
    weight = tl.zeros_like(score)
    if per_atom.data is not None:
        at = start_of(per_atom, group, sizes) + key.to(tl.int64) * per_atom.row
        weight += tl.load(per_atom.data + at[None, :], mask=visible, other=0.0)
    if per_pair.data is not None:
        at = lines_of(per_pair, group, sizes, head, query)
        weight += tl.load(per_pair.data + at[:, None] + key[None, :], mask=visible, other=0.0)
    visible = visible & (weight > HIDDEN)
    score = tl.where(visible, score, 0.0)
    weight = tl.where(visible, weight, 0.0)
    return score, tl.where(visible, score + weight, HIDDEN), visible, weight


@triton.jit
def sweep(
    left, atoms, values, per_atom, per_pair, mask, fine, sizes, group, head, query, there, first, after, start, stop,
    scale, state,
    SCORE: tl.constexpr, VARIANCE: tl.constexpr, WEIGHT: tl.constexpr, SQUARE: tl.constexpr, LARGEST: tl.constexpr,
    PEAK: tl.constexpr, MEAN: tl.constexpr, BANDED: tl.constexpr, CHECKED: tl.constexpr, NATIVE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) to the state of a tile of queries ``left``, block by block.

    Sums are relative to e^top; score and spread are the mean and the summed squared deviations of what was added, which
    blocks join centred on their own: (Δ mean)² · old · new / total lies between them.
    """
    top, mass, mean, score, spread, weight, square, largest, best, peak, spoiled = state
    atoms_at, values_at = start_of(atoms, group, sizes), start_of(values, group, sizes)
    for block in range(start, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        here = key < stop
        good = here
        if fine is not None:
            good = tl.load(fine + group.to(tl.int64) * sizes.keys + key, mask=here, other=0) != 0
        right = load_rows(atoms, atoms_at + key.to(tl.int64) * atoms.row, good, sizes.width, BLOCK_D)
        value = right
        if values.data is not None:
            value = load_rows(values, values_at + key.to(tl.int64) * values.row, good, sizes.value_width, BLOCK_E)
        if CHECKED:
            right, good = only_finite(right, good)
            if values.data is not None:
                value, good = only_finite(value, good)
            else:
                value = right
        s = inner(left, right, NATIVE, PRECISION) * scale
        visible = there[:, None] & here[None, :]
        if BANDED:
            visible = visible & (key[None, :] >= first[:, None]) & (key[None, :] < after[:, None])
        s, logit, visible, w = weigh(s, per_atom, per_pair, mask, group, sizes, head, query, key, visible)
        if CHECKED or fine is not None:
            spoiled = tl.maximum(spoiled, tl.max(tl.where(visible & (good == 0)[None, :], 1, 0), 1))
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
            mean = mean * shrink[:, None] + weighted(p, value, PRECISION)
    return top, mass, mean, score, spread, weight, square, largest, best, peak, spoiled


@triton.jit
def fresh(first_weight, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """The state of a tile whose rows have seen only an atom at 0 with value 0 and this log weight (−inf: nothing)."""
    none = tl.zeros((BLOCK_M,), tl.float32)
    there = tl.where(first_weight > HIDDEN, 1.0, 0.0)
    weight = tl.where(first_weight > HIDDEN, first_weight, 0.0)
    mean = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    index = tl.zeros((BLOCK_M,), tl.int32)
    return first_weight, there, mean, none, none, weight, there, none + HIDDEN, index, none + HIDDEN, index
