"""Samples: random numbers from a hash, the same for any order and batching; evenly spread queries of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.nn.calls import AttentionCall


def priorities(seed: int, *identifiers: Tensor) -> Tensor:
    """Integers below 2⁶³ that look random and depend on nothing but a seed and integer identifiers.

    The identifiers broadcast together.

    >>> import torch
    >>> both, alone = (priorities(0, torch.tensor(text), torch.tensor(7)) for text in ([3, 4], 4))
    >>> bool(both[1] == alone)
    True
    """
    state = _mix(torch.full((), seed, dtype=torch.int64))
    for identifier in identifiers:
        state = _mix(state ^ identifier.to("cpu", torch.int64))
    return state & 0x7FFFFFFFFFFFFFFF


def uniform(seed: int, *identifiers: Tensor) -> Tensor:
    """The same as numbers in [0, 1).

    >>> import torch
    >>> uniform(0, torch.arange(3)[:, None], torch.arange(4)).shape
    torch.Size([3, 4])
    """
    return (priorities(seed, *identifiers) >> 10).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea and Flood 2014): an invertible scrambling of 64 bits; int64 arithmetic wraps around."""
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15 modulo 2⁶⁴
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, filling with zeros, as for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class QuerySample(NamedTuple):
    """Some queries of some sequences of a call.

    call    the same call with these queries alone, at least in single precision, its support without a band
    tokens  (b, s) False where a query is padding, or stands twice in the sample
    first   (b,) the index of the first key that is a token
    """

    call: AttentionCall
    tokens: Tensor
    first: Tensor


def sample_queries(call: AttentionCall, sequences: int, queries: int) -> QuerySample:
    """Up to ``queries`` tokens in each of up to ``sequences`` sequences, evenly spread, the last token among them."""
    batch, _, q, _ = call.eta.shape
    device, n = call.eta.device, call.key.shape[-2]
    count = min(batch, sequences)
    index = torch.arange(count, device=device) * batch // max(1, count)
    rows = torch.ones(batch, q, dtype=torch.bool, device=device) if call.rows is None else call.rows.to(device)
    rows = rows[index]
    queried, tokens = _evenly_spread(rows, min(q, queries))
    first = first_keys(call)[index]
    wide = torch.promote_types(call.eta.dtype, torch.float32)
    eta, output = (x[index].take_along_dim(queried[:, None, :, None], 2).to(wide) for x in (call.eta, call.output))
    key, value = (x[index].to(wide) for x in (call.key, call.value))
    support = call.support.of_sequences(index).of_queries(queried, n)
    return QuerySample(
        replace(call, eta=eta, key=key, value=value, support=support, output=output, rows=None), tokens, first
    )


def first_keys(call: AttentionCall) -> Tensor:
    """(batch,) the key of the first token of each sequence: with padding on the left it is not the first key."""
    q, n = call.eta.shape[2], call.key.shape[2]
    if call.rows is None or n != q or not q:
        return torch.zeros(len(call.eta), dtype=torch.int64, device=call.eta.device)
    return call.rows.to(call.eta.device).int().argmax(1)


def _evenly_spread(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (b, count) of tokens of rows (b, q), evenly spread, the last among them; and which of them are new."""
    total = rows.sum(1, keepdim=True)
    rank = (torch.arange(1, count + 1, device=rows.device) * total).div(max(1, count), rounding_mode="floor") - 1
    new = torch.cat([rank[:, :1] >= 0, rank[:, 1:] > rank[:, :-1]], 1)
    order = (~rows).to(torch.uint8).argsort(dim=1, stable=True)  # the tokens first
    return order.take_along_dim(rank.clamp_min(0), 1), new
