"""How many entries each key head gets: equal shares, or where an entry more takes most of a measured error away."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

BETWEEN = 4  # sizes that are looked at between one measured size and the next
LEAST = 1e-12  # error below which a head is right


def allocate(errors: Tensor, sizes: Tensor, cost: Tensor, total: int) -> Tensor:
    """Entries (heads,) that make Σ_h e_h least, e_h between its sizes a straight line on its convex envelope.

        min Σ_h e_h(m_h),    Σ_h cost_h m_h ≤ total

    errors  (heads, s) measured with so many entries
    sizes   (s,) growing; every head gets the least of them, or all the same where there is no room for that
    cost    (heads,) bytes of an entry

    Segments of all envelopes in the order of error per byte; the last one is taken in part.

    >>> allocate(torch.tensor([[4.0, 0.0], [1.0, 0.0]]), torch.tensor([2, 6]), torch.tensor([1, 1]), 9)
    tensor([6, 3])
    """
    sizes, cost = sizes.double(), cost.double()
    if float(cost.sum() * sizes[0]) >= total:
        return (total / cost.sum()).floor().long().expand(len(cost)).clone()
    slopes, lengths = _segments(errors.double().cummin(-1).values, sizes)
    slopes, lengths = slopes / cost[:, None], lengths * cost[:, None]
    order = slopes.flatten().argsort(descending=True, stable=True)
    taken = lengths.flatten()[order]
    room = total - float(cost.sum() * sizes[0])
    part = (room - (taken.cumsum(0) - taken)).clamp_min(0).minimum(taken)
    bytes_more = torch.zeros_like(part).scatter_(0, order, part).view_as(lengths).sum(1)
    return _filled((sizes[0] + bytes_more / cost + 1e-6).floor(), sizes[-1], cost, total)


def _segments(errors: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes and lengths (heads, s − 1) of the lower convex envelope, 0 long where a size is not on it."""
    slopes, lengths = torch.zeros_like(errors[:, 1:]), torch.zeros_like(errors[:, 1:])
    m = sizes.tolist()
    for head, e in enumerate(errors.tolist()):
        at = 0
        while at < len(e) - 1:
            gain, best = max(((e[at] - e[k]) / (m[k] - m[at]), k) for k in range(at + 1, len(e)))
            if gain <= 0:
                break
            slopes[head, best - 1], lengths[head, best - 1] = gain, m[best] - m[at]
            at = best
    return slopes, lengths


def _filled(entries: Tensor, most: Tensor, cost: Tensor, total: int) -> Tensor:
    """What no error asks for goes to all heads alike, as far as it is whole entries."""
    while True:
        left = total - float((entries * cost).sum())
        open_heads = entries + 1 <= most
        if not bool(open_heads.any()) or left < float(cost[open_heads].min()):
            return entries.long()
        each = max(int(left // float(cost[open_heads].sum())), 1)
        for head in open_heads.nonzero()[:, 0].tolist():
            more = min(each, int(most - entries[head]), int(left // float(cost[head])))
            entries[head] += more
            left -= more * float(cost[head])


def interpolated(errors: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Errors (heads, s') at sizes (s',) between those measured, by powers of the size; towards all tokens, where the
    error is 0, as the square of what is missing.

    >>> interpolated(torch.tensor([[4.0, 1.0, 0.0]]), torch.tensor([1, 4, 16]))[0][0, [0, 2, 4]]
    tensor([4., 2., 1.])
    """
    sizes = sizes.to(errors.dtype)
    logs = errors.cummin(-1).values.clamp_min(LEAST).log()
    grid, columns = [sizes[:1]], [logs[:, :1].exp()]
    for i, (a, b) in enumerate(pairwise(sizes)):
        part = torch.arange(1, BETWEEN + 1, dtype=errors.dtype) / BETWEEN
        at = a * (b / a) ** part
        if i == len(sizes) - 2:
            columns.append(logs[:, i : i + 1].exp() * ((b - at) / (b - a)).clamp_min(0).square())
        else:
            columns.append((logs[:, i : i + 1] * (1 - part) + logs[:, i + 1 : i + 2] * part).exp())
        grid.append(at)
    return torch.cat(columns, 1), torch.cat(grid)


def shared_by_scores(scores: Tensor, total: int, safe: int) -> Tensor:
    """Entries (heads,) by where the ``total`` highest of scores (heads, n) are, ``safe`` of them in every head.

    >>> shared_by_scores(torch.tensor([[9.0, 8.0, 7.0], [1.0, 0.0, 0.0]]), 4, 1)
    tensor([3, 1])
    """
    raised = scores.scatter(1, scores.topk(min(safe, scores.shape[1])).indices, torch.inf)
    stays = torch.zeros(raised.numel(), dtype=torch.bool, device=scores.device)
    stays[raised.flatten().topk(min(total, raised.numel())).indices] = True
    return stays.view_as(raised).sum(1).cpu()
