"""A sample of the queries of an attention call, of bounded size."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.nn.calls import AttentionCall


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
    first = rows.int().argmax(1) if n == q and q else torch.zeros(count, dtype=torch.int64, device=device)
    wide = torch.promote_types(call.eta.dtype, torch.float32)
    eta, output = (x[index].take_along_dim(queried[:, None, :, None], 2).to(wide) for x in (call.eta, call.output))
    key, value = (x[index].to(wide) for x in (call.key, call.value))
    support = call.support.of_sequences(index).of_queries(queried, n)
    return QuerySample(
        replace(call, eta=eta, key=key, value=value, support=support, output=output, rows=None), tokens, first
    )


def _evenly_spread(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (b, count) of tokens of rows (b, q), evenly spread, the last among them; and which of them are new."""
    total = rows.sum(1, keepdim=True)
    rank = (torch.arange(1, count + 1, device=rows.device) * total).div(max(1, count), rounding_mode="floor") - 1
    new = torch.cat([rank[:, :1] >= 0, rank[:, 1:] > rank[:, :-1]], 1)
    order = (~rows).to(torch.uint8).argsort(dim=1, stable=True)  # the tokens first
    return order.take_along_dim(rank.clamp_min(0), 1), new
