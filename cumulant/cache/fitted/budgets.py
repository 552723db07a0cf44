"""How many entries each key head gets: equal shares, or where an entry more takes most of a measured error away."""

from __future__ import annotations

import torch
from torch import Tensor


def lower_envelope(errors: Tensor) -> Tensor:
    """Errors (heads, s) at growing sizes, none above the one before."""
    return errors.cummin(-1).values


def allocate(errors: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Entries (heads,) that make Σ_h e_h least, e_h between its measured sizes a straight line on its convex envelope.

        min Σ_h e_h(m_h),    Σ_h m_h = total

    errors  (heads, s) measured with so many entries; +∞ where nothing was measured
    sizes   (s,) or (heads, s) growing; the least of them is what every head gets at least

    Segments of all envelopes in the order of error per entry; the last one is taken in part.

    >>> allocate(torch.tensor([[4.0, 0.0], [1.0, 0.0]]), torch.tensor([2, 6]), 9)
    tensor([6, 3])
    """
    errors = lower_envelope(errors.double())
    sizes = sizes.expand_as(errors).double()
    slopes, lengths = _segments(errors, sizes)
    order = slopes.flatten().argsort(descending=True, stable=True)
    room = total - float(sizes[:, 0].sum())
    taken = lengths.flatten()[order]
    before = taken.cumsum(0) - taken
    part = (room - before).clamp_min(0).minimum(taken)
    got = torch.zeros_like(part).scatter_(0, order, part).view_as(lengths).sum(1)
    return _rounded(sizes[:, 0] + got, sizes[:, -1], total)


def _segments(errors: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes and lengths (heads, s − 1) of the lower convex envelope, 0 long where a size is not on it."""
    slopes, lengths = torch.zeros_like(errors[:, 1:]), torch.zeros_like(errors[:, 1:])
    for head, (e, m) in enumerate(zip(errors.tolist(), sizes.tolist(), strict=True)):
        at = 0
        while at < len(e) - 1:
            gains = [((e[at] - e[k]) / (m[k] - m[at]) if m[k] > m[at] else -1.0, k) for k in range(at + 1, len(e))]
            gain, best = max(gains)
            if gain <= 0:
                break
            slopes[head, best - 1], lengths[head, best - 1] = gain, m[best] - m[at]
            at = best
    return slopes, lengths


def _rounded(sizes: Tensor, most: Tensor, total: int) -> Tensor:
    """Whole numbers with the sum ``total``, where there is room."""
    whole = sizes.floor()
    left = int(total - whole.sum())
    for head in (sizes - whole).argsort(descending=True, stable=True).tolist():
        more = min(max(left, 0), int(most[head] - whole[head]), 1)
        whole[head] += more
        left -= more
    return _spread(whole, most, left).long()


def _spread(sizes: Tensor, most: Tensor, left: int) -> Tensor:
    """What no error asks for goes to all heads alike."""
    while left > 0 and bool((sizes < most).any()):
        open_heads = (sizes < most).nonzero()[:, 0]
        each = max(left // len(open_heads), 1)
        for head in open_heads.tolist():
            more = min(each, int(most[head] - sizes[head]), left)
            sizes[head] += more
            left -= more
    return sizes
