"""How wrong each head is with a compressed cache: exact sums over queries that came after the compressed part.

All heads get the queries of the pass with the full cache, so that an error is a head's own, and what earlier layers
already did wrong is not in it; what all of it does to the model is in the logits. A head reads the prefix, full or
compressed, together with the tokens of the continuation before it, which no one compressed:

    ΔG = Ĝ(η) − G(η),    G = log(Σ_{j<T} e^⟨η,k_j⟩ + Σ_{local} e^⟨η,k⟩),    Ĝ the same with Σ_c e^{⟨η,k̂_c⟩ + w_c}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cumulant.cache.audit.continuation import LayerQueries
from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import LayerPrefix

PRECISION = torch.float64


@dataclass(frozen=True, eq=False)
class FullReading:
    """What the heads of one layer read with the full cache, for q queries of each.

    queries         (heads, q, d) η
    log_normalizer  (heads, q) G over prefix and continuation
    local           (heads, q) G of the continuation, and of a sink of the model, alone
    local_output    (heads, q, e) what it adds to the output: Σ_{local} p_j v_j · e^G, in units of e^local
    output          (heads, q, e) of full attention
    attention       (heads, T) Σ_i p_ij: what all these queries together paid to each token of the prefix
    on_prefix       (heads, q) attention that the prefix draws: Σ_{j<T} p_ij
    """

    queries: Tensor
    log_normalizer: Tensor
    local: Tensor
    local_output: Tensor
    output: Tensor
    attention: Tensor
    on_prefix: Tensor


@dataclass(frozen=True, eq=False)
class HeadErrors:
    """Sums over queries, a number for every head (heads,); in a record of several layers (layers, heads).

    queries    how many
    gap        Σ ΔG, the gap of the log-normalizer
    size       Σ |ΔG|
    missed     Σ of the attention of the full cache on tokens that are not held as they were
    on_prefix  Σ of the attention of the full cache on the prefix
    error      Σ |ô − o|²: the output of the head
    output     Σ |o|²
    written    Σ |W_O^h (ô_h − o_h)|²: what the head writes to the residual stream
    joint      Σ |Σ_h W_O^h (ô_h − o_h)|², of all heads of the layer together, the same for each; errors that cancel
               between heads are not in it
    stream     Σ |x|² of the residual stream in front of the block, or of Σ_h W_O^h o_h where it is not known
    """

    queries: Tensor
    gap: Tensor
    size: Tensor
    missed: Tensor
    on_prefix: Tensor
    error: Tensor
    output: Tensor
    written: Tensor
    joint: Tensor
    stream: Tensor

    def plus(self, other: HeadErrors) -> HeadErrors:
        """The sums over the queries of both."""
        return HeadErrors(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def read_full(layer: LayerPrefix, asked: LayerQueries) -> FullReading:
    """What the heads of a layer read with the full cache, in float64."""
    heads, count = asked.queries.shape[:2]
    queries = asked.queries.to(PRECISION)
    grouped = queries.reshape(len(layer.keys), -1, queries.shape[-1])  # (key heads, group · q, d)
    later = torch.arange(asked.keys.shape[1], device=queries.device) > asked.at[:, None]
    scores = (grouped @ asked.keys.to(PRECISION).mT).unflatten(1, (-1, count)).masked_fill(later, -torch.inf)
    local = scores.logsumexp(-1).reshape(heads, count)
    if layer.sinks is not None:
        local = torch.logaddexp(local, layer.sinks.to(PRECISION)[:, None].expand(heads, -1))
    weights = (scores.flatten(1, 2) - local.reshape(len(layer.keys), -1, 1)).exp()
    local_output = (weights @ asked.values.to(PRECISION)).reshape(heads, count, -1)
    scores = grouped @ layer.keys.to(PRECISION).mT
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()  # one exponential for each pair: the normaliser comes after the sums
    mass, highest = weights.sum(-1).reshape(heads, count), highest.reshape(heads, count)
    total = torch.logaddexp(mass.log() + highest, local)
    factor = (highest - total).exp()
    output = (weights @ layer.values.to(PRECISION)).reshape(heads, count, -1) * factor[..., None]
    output += (local - total).exp()[..., None] * local_output
    attention = (factor[:, None] @ weights.reshape(heads, count, -1))[:, 0]
    return FullReading(queries, total, local, local_output, output, attention, mass * factor)


def head_errors(
    layer: LayerPrefix,
    entries: Sequence[HeadEntries],
    full: FullReading,
    outputs: Tensor | None = None,
    stream: float | None = None,
) -> HeadErrors:
    """Errors of the heads of a layer whose key heads hold ``entries`` in the place of the prefix.

    outputs  (heads, D, e) W_O by head; None: the identity, every head on its own
    stream   mean |x|² of the residual stream; None: that of what attention writes
    """
    count = full.queries.shape[1]
    groups = [_group(layer, full, head, number) for number, head in enumerate(entries)]
    gap, held, difference = (torch.cat(parts) for parts in zip(*groups, strict=True))
    if stream is None:
        stream = float(_to_stream(full.output, outputs).sum(0).square().sum(-1).mean())
    projected = _to_stream(difference, outputs)
    written, joint = projected.square().sum(-1), projected.sum(0).square().sum(-1)
    per_head = torch.ones(len(gap), dtype=PRECISION, device=gap.device)
    return HeadErrors(
        queries=per_head * count,
        gap=gap.sum(-1),
        size=gap.abs().sum(-1),
        missed=(full.on_prefix - held).clamp_min(0).sum(-1),
        on_prefix=full.on_prefix.sum(-1),
        error=difference.square().sum((-2, -1)),
        output=full.output.square().sum((-2, -1)),
        written=written.sum(-1),
        joint=per_head * joint.sum(),
        stream=per_head * stream * count,
    )


def _to_stream(x: Tensor, outputs: Tensor | None) -> Tensor:
    """(heads, q, D) what heads write to the stream; with no W_O every head has coordinates of its own."""
    if outputs is not None:
        return x @ outputs.to(x).mT
    heads, queries, e = x.shape
    return torch.einsum("hqe,hg->hqge", x, torch.eye(heads).to(x)).reshape(heads, queries, heads * e)


def _group(layer: LayerPrefix, full: FullReading, head: HeadEntries, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the heads that share a key head: ΔG (group, q), attention on tokens that are held, ô − o (group, q, e)."""
    of = slice(number * layer.groups, (number + 1) * layer.groups)
    scores = full.queries[of] @ head.keys.to(PRECISION).mT
    plain = scores if head.log_mass is None else scores + head.log_mass.to(PRECISION)
    total = torch.logaddexp(plain.logsumexp(-1), full.local[of])
    output = (plain - total[..., None]).exp() @ head.values.to(PRECISION)
    output = output + (full.local[of] - total).exp()[..., None] * full.local_output[of]
    weights = (scores - full.log_normalizer[of][..., None]).exp()
    if head.positions is not None:
        weights = weights[..., head.positions >= 0]
    return total - full.log_normalizer[of], weights.sum(-1), output - full.output[of]


def held_tokens(layer: LayerPrefix, entries: Sequence[HeadEntries]) -> Tensor:
    """(key heads, T) True where a key head holds a token as it was."""
    out = torch.zeros(layer.keys.shape[:2], dtype=torch.bool, device=layer.keys.device)
    for row, head in zip(out, entries, strict=True):
        positions = torch.arange(len(row), device=row.device) if head.positions is None else head.positions
        row[positions[positions >= 0]] = True
    return out


def lost_attention(layer: LayerPrefix, entries: Sequence[HeadEntries], attention: Tensor) -> Tensor:
    """(T,) of ``attention`` (heads, T), what heads whose key head does not hold a token paid to it."""
    lost = ~held_tokens(layer, entries).repeat_interleave(layer.groups, 0)
    return (attention * lost).sum(0)
