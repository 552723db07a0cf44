"""What a monitor sees of one call of attention: a few numbers per head, from a sample of queries of bounded size."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels import moments
from cumulant.kernels.arguments import Support
from cumulant.nn.calls import AttentionCall

TOKENS = 1024  # of a block's states, from which its expansion is taken


class Sight(NamedTuple):
    """Means over the queries that were looked at, per head (heads,), float64; p_ij is what query i gives to key j.

    entropy         −Σ_j p log p, in nats
    evenness        entropy / log N: 1 if all N visible keys are attended to alike, 0 if one is
    log_normalizer  G = log Σ_j exp(score)
    max_score       the largest score of any of these queries; NaN where scores are capped
    first_mass      p of the first token, where attention goes that has nowhere to go
    sink_mass       p of the sink that a model has learned; NaN without one
    output_size     |output|/√e
    queries         how many were looked at; those that see fewer than two keys cannot choose, and do not count

    Everything is NaN where no query counts.
    """

    entropy: Tensor
    evenness: Tensor
    log_normalizer: Tensor
    max_score: Tensor
    first_mass: Tensor
    sink_mass: Tensor
    output_size: Tensor
    queries: int

    @property
    def finite(self) -> bool:
        """Whether the numbers of attention are numbers; True also if no query counted."""
        return self.queries == 0 or bool((self.entropy + self.output_size).isfinite().all())


QUANTITIES = Sight._fields[:-1]


class Sample(NamedTuple):
    """Some queries of some sequences of a call.

    eta (b, heads, s, d), key (b, key heads, n, d), output (b, heads, s, e), support without a band,
    counted (b, s) False where a query is padding, first (b,) the index of the first key that is a token
    """

    eta: Tensor
    key: Tensor
    output: Tensor
    support: Support
    counted: Tensor
    first: Tensor


@torch.no_grad()
def see(call: AttentionCall, *, sequences: int = 4, queries: int = 32) -> Sight:
    """The sight of up to ``queries`` tokens in each of up to ``sequences`` sequences of a call, evenly spread.

    The same places are looked at in every call of the same shape, so that numbers of different steps compare.

    >>> import torch
    >>> from cumulant.nn import AttentionCall, Support
    >>> x = torch.zeros(1, 2, 4, 3)                        # four tokens that look alike, two heads
    >>> sight = see(AttentionCall(torch.nn.Identity(), x, x, x, Support(), x))
    >>> sight.entropy, sight.first_mass                    # log 4, 1/4
    (tensor([1.3863, 1.3863], dtype=torch.float64), tensor([0.2500, 0.2500], dtype=torch.float64))
    """
    sample = take(call, sequences, queries)
    heads = call.eta.shape[1]
    if 0 in sample.eta.shape or sample.key.shape[-2] == 0:
        return _blank(heads, 0)
    weights = sample.support.log_weights
    usable = sample.eta.isfinite().all() & sample.key.isfinite().all()
    if weights is not None:
        usable = usable & (weights < torch.inf).all()  # also false for NaN
    if not bool(usable):
        return _blank(heads, int(sample.counted.sum()))
    return _means(sample, capped=call.capped)


def _means(sample: Sample, *, capped: bool) -> Sight:
    n = sample.key.shape[-2]
    is_first = torch.zeros(len(sample.first), n, dtype=sample.key.dtype, device=sample.key.device)
    is_first.scatter_(1, sample.first[:, None], 1)
    is_first = is_first[:, None, :, None].expand(-1, sample.key.shape[1], -1, -1)  # its mean is p of the first key
    found = moments(
        sample.eta, sample.key, is_first, statistics=("mean", "entropy", "max_score"), **sample.support.arguments()
    )
    log_n = sample.support.visible_keys(sample.eta, n)[0].to(found.entropy.dtype).log()
    counted = sample.counted[:, None] & (log_n > log(1.5))
    assert found.mean is not None
    values = {
        "entropy": found.entropy,
        "evenness": found.entropy / log_n.clamp_min(log(2)),
        "log_normalizer": found.log_normalizer,
        "max_score": found.max_score,
        "first_mass": found.mean[..., 0],
        "sink_mass": found.sink_mass,
        "output_size": sample.output.to(found.entropy.dtype).square().mean(-1).sqrt(),
    }
    nothing = torch.full_like(found.entropy, torch.nan)
    table = torch.stack([nothing if v is None else v.expand_as(nothing) for v in values.values()]).double()
    table, counted = table.movedim(2, 1).flatten(2), counted.movedim(1, 0).flatten(1)  # (quantities, heads, b · s)
    number = counted.sum(1)
    mean = torch.where(counted, table, 0).sum(2) / number
    top = QUANTITIES.index("max_score")
    mean[top] = torch.nan if capped else torch.where(counted, table[top], -torch.inf).amax(1)
    mean = torch.where(number > 0, mean, torch.nan).cpu()
    return Sight(*mean, queries=int(number.max()))


def take(call: AttentionCall, sequences: int, queries: int) -> Sample:
    """Some queries of some sequences, with a mask in the place of what was said by bands."""
    batch, _, q, _ = call.eta.shape
    device = call.eta.device
    kept = min(batch, sequences)
    chosen = torch.arange(kept, device=device) * batch // max(1, kept)
    rows = torch.ones(batch, q, dtype=torch.bool, device=device) if call.rows is None else call.rows.to(device)
    rows = rows[chosen]
    picked, counted = _spread(rows, min(q, queries))
    n = call.key.shape[-2]
    first = rows.int().argmax(1) if n == q and q else torch.zeros(kept, dtype=torch.int64, device=device)
    some = _Some(chosen, picked, batch, q)
    return Sample(
        eta=some.queries(call.eta),
        key=some.sequences(call.key),
        output=some.queries(call.output),
        support=call.support.of_sequences(chosen).of_queries(picked, n),
        counted=counted,
        first=first,
    )


def _spread(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (b, count) of tokens of rows (b, q), evenly spread, the last among them; and which of them are new."""
    total = rows.sum(1, keepdim=True)
    rank = (torch.arange(1, count + 1, device=rows.device) * total).div(max(1, count), rounding_mode="floor") - 1
    counted = torch.cat([rank[:, :1] >= 0, rank[:, 1:] > rank[:, :-1]], 1)
    order = (~rows).to(torch.uint8).argsort(dim=1, stable=True)  # the tokens first
    return order.take_along_dim(rank.clamp_min(0), 1), counted


class _Some(NamedTuple):
    """Which sequences (b,) and which of their queries (b, s) were chosen, out of batch and q."""

    chosen: Tensor
    picked: Tensor
    batch: int
    q: int

    def sequences(self, tensor: Tensor) -> Tensor:
        return tensor[self.chosen] if tensor.ndim and len(tensor) == self.batch else tensor

    def queries(self, tensor: Tensor) -> Tensor:
        """Of (b, ·, q, ·), where axes may have size 1."""
        tensor = self.sequences(tensor)
        if tensor.shape[2] == 1 < self.q:
            return tensor
        return tensor.take_along_dim(self.picked[:, None, :, None], 2)


def _blank(heads: int, queries: int) -> Sight:
    nothing = torch.full((heads,), torch.nan, dtype=torch.float64)
    return Sight(*(nothing for _ in QUANTITIES), queries=queries)


@torch.no_grad()
def expansion(before: Tensor, after: Tensor) -> float:
    """|after| / |before| over some tokens of a block's states (*, D); NaN if there are none or all of them are 0.

    >>> import torch
    >>> expansion(torch.ones(2, 5, 3), torch.full((2, 5, 3), 2.0))
    2.0
    """
    rows = before.numel() // max(1, before.shape[-1])
    if rows == 0:
        return float("nan")
    stride = -(-rows // TOKENS)
    sizes = [
        torch.linalg.vector_norm(x.reshape(rows, -1)[::stride].to(torch.float32)).double() for x in (after, before)
    ]
    return float((sizes[0] / sizes[1]).cpu()) if float(sizes[1]) > 0 else float("nan")


def merged(one: Sight, other: Sight) -> Sight:
    """Two calls of the same layer in one pass, as one: means by the number of queries, the larger of the scores."""
    if not one.queries or not other.queries:
        return one if one.queries else other
    share = one.queries / (one.queries + other.queries)
    mean = [share * a + (1 - share) * b for a, b in zip(one[:-1], other[:-1], strict=True)]
    mean[QUANTITIES.index("max_score")] = torch.maximum(one.max_score, other.max_score)
    return Sight(*mean, queries=one.queries + other.queries)
