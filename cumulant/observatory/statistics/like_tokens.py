"""Attention between occurrences of one token, and to what followed an earlier one.

    same_token_mass  Σ_j p_ij [t_j = t_i, j ≠ i]
    induction_mass   Σ_j p_ij [t_{j−1} = t_i, j − 1 < i]

The m occurrences of a token in a sequence give a block of m × m scores ⟨η_i,k_j⟩; blocks of tokens that occur about as
often are one product. Where they are depends on the ids alone, so it is found once for all layers of a pass. Which of
their keys are visible depends on the mask too: whoever has the layers may keep that for those with the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.arguments import Support
from cumulant.nn.calls import AttentionCall

STEPS = {"same_token_mass": 0, "induction_mass": 1}  # from an occurrence to the key that is looked at
NUMBERS = 1 << 18  # scores, or numbers of queries and keys, held at once: what stays in cache


class OccurrenceBlock(NamedTuple):
    """Occurrences of some tokens: places sequence · n + position of queries (tokens, r) and of keys (tokens, m), and
    where both are occurrences, (tokens, r, m): tokens that occur less often are filled up."""

    query: Tensor
    key: Tensor
    real: Tensor


class VisibleKeys(NamedTuple):
    """Of one block: which keys a query looks for and sees, (tokens, r, m, heads | 1), and how many, (tokens, r, ·)."""

    keys: Tensor
    count: Tensor


def find_blocks(ids: Tensor, is_token: Tensor | None, heads: int, dim: int) -> list[OccurrenceBlock]:
    """The blocks of the sequences ids (batch, n), each few enough numbers for heads of a dimension.

    >>> [block.query.tolist() for block in find_blocks(torch.tensor([[5, 6, 5, 7]]), None, 1, 1)]
    [[[0, 2]]]
    """
    batch, n = ids.shape
    order = ids.argsort(dim=1, stable=True)
    sequence = torch.arange(batch, device=ids.device)[:, None]
    places, sequences, sorted_ids = order + n * sequence, sequence.expand_as(ids), ids.gather(1, order)
    here = torch.ones_like(ids, dtype=torch.bool) if is_token is None else is_token.gather(1, order)
    places, names = places[here], torch.stack([sequences[here], sorted_ids[here]], 1)
    new = torch.ones(len(places), dtype=torch.bool, device=ids.device)
    new[1:] = (names[1:] != names[:-1]).any(1)
    first = new.nonzero()[:, 0]
    times = torch.diff(first, append=first.new_tensor([len(places)]))
    blocks, below = [], 1
    for width in _widths(int(times.max()) if len(times) else 0):
        some = ((times > below) & (times <= width)).nonzero()[:, 0]
        below = width
        for part in some.split(max(1, NUMBERS // (heads * width * max(width, dim)))) if len(some) else ():
            column = torch.arange(width, device=ids.device)
            real = column < times[part][:, None]
            at = places[first[part][:, None] + torch.where(real, column, 0)]
            for rows in column.split(max(1, NUMBERS // (heads * width))):
                blocks.append(OccurrenceBlock(at[:, rows], at, real[:, rows, None] & real[:, None]))
    return blocks


def _widths(most: int) -> Iterator[int]:
    """2, 3, 4, 6, 8, 12, … as far as is needed."""
    width = 2
    while most > 1:
        yield width
        if width >= most:
            return
        width = width * 3 // 2 if width & (width - 1) == 0 else width // 3 * 4


def visible_keys(support: Support, heads: int, n: int, block: OccurrenceBlock) -> dict[str, VisibleKeys]:
    """What the queries of a block look for and see, by the names in `STEPS`."""
    b, i, j = (block.query // n)[..., None], (block.query % n)[..., None], (block.key % n)[:, None]
    weights, mask = support.pair_weights(heads), support.pair_mask()
    found = {}
    for name, step in STEPS.items():
        # what follows an earlier occurrence exists, as the query itself is later
        there = (block.real & (j < i if step else j != i))[..., None]
        at = (j + step).clamp_max(n - 1)
        band = support.in_band(i, at)
        if band is not None:
            there = there & band[..., None]
        if mask is not None:
            there = there & _entries(mask, b, i, at)
        if weights is not None:
            there = there & (_entries(weights, b, i, at) > -torch.inf)
        found[name] = VisibleKeys(there, there.sum(2))
    return found


def masses(
    call: AttentionCall,
    g: Tensor,
    blocks: list[OccurrenceBlock],
    visible: Iterable[dict[str, VisibleKeys]],
    names: set[str],
) -> dict[str, tuple[Tensor, Tensor]]:
    """name → Σ p over the keys that each query looks for, and how many it sees; both (batch, heads, q)."""
    (batch, heads, n, _), key_heads = call.eta.shape, call.key.shape[1]
    queries, keys, of_queries = (_by_token(t) for t in (call.eta, call.key, g[..., None]))  # rows are quick to gather
    weights = call.support.pair_weights(heads)
    out = {name: (g.new_zeros(batch * n, heads), g.new_zeros(batch * n, heads)) for name in names}
    for block, seen in zip(blocks, visible, strict=True):
        size, r = block.query.shape
        eta = _heads(queries, block.query, heads)
        log = _heads(of_queries, block.query, heads)
        eta = eta.reshape(size * key_heads, -1, eta.shape[-1])  # heads that share keys follow one another
        occurs = block.real.any(2)
        for name in names:
            at = (block.key + STEPS[name]).clamp_max(batch * n - 1)
            key = _heads(keys, at, key_heads)
            logit = (eta @ key.flatten(0, 1).mT).view(size, heads, r, -1).sub_(log)
            if weights is not None:
                b, i, j = (block.query // n)[..., None], (block.query % n)[..., None], (at % n)[:, None]
                logit = logit + _entries(weights, b, i, j).movedim(-1, 1)
            p = logit.exp_().masked_fill_(~seen[name].keys.movedim(-1, 1), 0)
            mass, count = out[name]
            rows = block.query[occurs]
            mass[rows] = p.sum(-1).transpose(1, 2)[occurs]
            count[rows] = seen[name].count.to(g.dtype).expand(-1, -1, heads)[occurs]
    return {name: tuple(t.view(batch, n, heads).mT for t in pair) for name, pair in out.items()}  # pyright: ignore[reportReturnType]


def _by_token(x: Tensor) -> Tensor:
    """(batch, heads, tokens, d) as (batch · tokens, heads · d)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def _heads(rows: Tensor, at: Tensor, heads: int) -> Tensor:
    """Rows (·, heads · d) at places (tokens, m), as (tokens, heads, m, d)."""
    return rows.index_select(0, at.flatten()).view(*at.shape, heads, -1).transpose(1, 2)


def _entries(table: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Entries (…, heads or 1) of a table (batch or 1, heads or 1, q or 1, n or 1), indices broadcast."""
    zero = torch.zeros_like(b)
    at = [index if size > 1 else zero for index, size in zip((b, i, j), (len(table), *table.shape[2:]), strict=True)]
    return table[at[0], :, at[1], at[2]]
