"""The queries of a text that grows: which are kept, and those of them that stand for the queries to come.

A query is kept by its token alone, by pseudo-random numbers of seed and token: what is kept after T tokens is the same
however they came, in one pass or token by token, and the tokens drawn from a text are drawn from its beginning, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cumulant.cache.fitted.query_law import FIRST, RECENT_WINDOW, SampledQueries, sample_queries
from cumulant.cache.prefix import LayerPrefix

if TYPE_CHECKING:
    from cumulant.cache.fitted.law import QueryLaw

SPREAD, RECENT, SPAN = range(3)  # what numbers are drawn for


def numbers(at: Tensor, seed: int, use: int) -> Tensor:
    """(n,) numbers in [0, 1) of tokens ``at`` (n,), uniform and independent, the same wherever a token stands.

    >>> a, b = numbers(torch.arange(4), 0, SPREAD), numbers(torch.tensor([2]), 0, SPREAD)
    >>> bool(a[2] == b[0]), a.round(decimals=2)
    (True, tensor([0.5700, 0.5900, 0.1100, 0.4300], dtype=torch.float64))
    """
    with np.errstate(over="ignore"):  # splitmix64
        x = at.numpy().astype(np.uint64) + np.uint64(1) + np.uint64((3 * seed + use + 1) * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) / 2**53)


def stays(at: Tensor, end: int, law: QueryLaw, seed: int) -> Tensor:
    """(n,) whether the query of each token ``at`` (n,) is kept after ``end`` tokens: of the last 256 as many as the law
    has recent ones on average, and those with the lowest numbers of all, as many as it has spread ones.

    What does not stay after ``end`` tokens does not stay after more: a sample of a sample is a sample of the text.

    >>> from cumulant.cache.fitted.law import QueryLaw
    >>> law, at = QueryLaw(recent=128, spread=16), torch.arange(1000)
    >>> int(stays(at, 1000, law, 0)[:744].sum()) <= 16, 100 < int(stays(at, 1000, law, 0)[744:].sum()) < 160
    (True, True)
    """
    recent = (at >= end - RECENT_WINDOW) & (numbers(at, seed, RECENT) < law.recent / RECENT_WINDOW)
    return recent.index_fill(0, _lowest(at, at >= FIRST, law.spread, seed, SPREAD), True)


def _lowest(at: Tensor, of: Tensor, number: int, seed: int, use: int) -> Tensor:
    """(m,) indices of the ``number`` tokens with the lowest numbers, where ``of`` (n,) is true."""
    drawn = torch.where(of, numbers(at, seed, use), 2.0)
    return drawn.argsort(stable=True)[: min(number, int(of.sum()))]


def spans_of(at: Tensor, first: int, span: int, seed: int) -> Tensor:
    """(n,) how far after a text each token ``at`` (n,) is asked: no further than its own context of tokens reaches."""
    return torch.minimum((span * numbers(at, seed, SPAN)).long(), at - first)


def kept_queries(layer: LayerPrefix, length: int, law: QueryLaw) -> SampledQueries:
    """Recent and spread queries of the first ``length`` tokens of a layer, of those that were kept."""
    growth = layer.growth
    assert growth is not None
    at = torch.cat([growth.earlier_at, growth.at[growth.at < length]])
    recent = _lowest(at, at >= length - RECENT_WINDOW, law.recent, growth.seed, RECENT)
    spread = _lowest(at, at >= min(FIRST, length // 2), law.spread, growth.seed, SPREAD)
    which = torch.cat([spread, recent]).sort().values
    before = len(growth.earlier_at)
    new = at[which[which >= before]]
    asked = sample_queries(layer, new, spans_of(new, growth.first, law.span, growth.seed))
    known = SampledQueries(*(x.float() if x.is_floating_point() else x for x in growth.earlier))
    return SampledQueries.joined([known.part(which[which < before]), asked])


def kept_after(layer: LayerPrefix, cut: int, number: int) -> SampledQueries:
    """Kept queries of the tokens after the first ``cut``, ``number`` at most, with the tokens between them."""
    growth = layer.growth
    assert growth is not None
    later = growth.at[growth.at > cut]
    at = later[torch.linspace(0, max(len(later) - 1, 0), min(number, len(later))).round().long()]
    return sample_queries(layer, at, at - cut)
