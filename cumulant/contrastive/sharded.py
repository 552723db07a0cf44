"""The softmax losses over a process group: candidates on many ranks, one exact loss, the gradients of one process."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import holds, sentence, shape
from cumulant.contrastive.arguments import (
    counted_rows,
    in_range,
    largest_of,
    positive_temperature,
    target_of,
    without,
)
from cumulant.kernels.collectives import Ranks
from cumulant.kernels.dense import accumulate
from cumulant.kernels.sharded_losses import RowLosses, ring_rows, vocabulary_rows
from cumulant.kernels.strips import positives_of


def sharded_info_nce(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    temperature: float | Tensor,
    symmetric: bool,
    exclude_self: bool,
    positives: Tensor | None,
    reduction: str,
    gradients: str,
) -> Tensor:
    """`info_nce` where each rank has a part of the queries and keys; keys pass along a ring (see `sharded_sums`)."""
    where = "info_nce"
    kind = "own" if positives is None else str(positives.dtype)
    learned = _learned(query, key, temperature)
    words = f"query and key (*, {query.shape[1]}) {query.dtype}, positives {kind}, symmetric {symmetric}"
    options = f"exclude_self {exclude_self}, {reduction}, gradients {learned} as {gradients}"
    numbers = ranks.agree(where, f"{words}, {options}", len(query), len(key))
    lengths = [m for _, m in numbers]
    start = sum(lengths[: ranks.rank])
    target = _target(positives, query, key, exclude_self, start, sum(lengths))
    scale = positive_temperature(where, temperature, query)
    scale = ranks.spread(scale) if isinstance(scale, Tensor) else scale
    if gradients == "mean":
        query, key = ranks.averaged(query), ranks.averaged(key)
    rows = accumulate(query)
    if target.dtype == torch.bool and not symmetric:
        rows = without(rows, positives_of(target, sum(lengths), False).row_counts == 0)
    eta = rows / scale
    sides = [ring_rows(ranks, eta, accumulate(key), target, lengths, exclude_self)]
    if symmetric:
        if positives is not None:
            advice = "Pair rows of one rank, or leave symmetric off."
            raise ValueError(sentence(f"{where}.positives", "None with symmetric over a group", kind, advice))
        own = start + torch.arange(len(key), device=key.device)
        sides.append(ring_rows(ranks, accumulate(key), eta, own, lengths, False))
    if reduction == "none":
        return sum(side.loss for side in sides) / len(sides)  # pyright: ignore[reportReturnType]
    return sum((_reduced(ranks, side, reduction) for side in sides), eta.new_zeros(())) / len(sides)


def sharded_cross_entropy(
    ranks: Ranks,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    ignored: int,
    z_loss: float,
    smoothing: float,
    softcap: float | None,
    reduction: str,
    with_log_normalizer: bool,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` over flat rows where each rank has a part of the words; returns the loss and G."""
    where = "linear_cross_entropy"
    if smoothing and softcap is not None:
        advice = "Smooth or cap, or keep the vocabulary on one rank."
        raise ValueError(sentence(f"{where}.softcap", "None with label_smoothing over a group", softcap, advice))
    options = f"z_loss {z_loss:g}, smoothing {smoothing:g}, softcap {softcap}, bias {bias is not None}, {reduction}"
    options += ", log_normalizer" if with_log_normalizer else ""
    learned = _learned(hidden, weight, bias)
    words = f"hidden {shape(hidden)} {hidden.dtype}, weight (*, {weight.shape[1]}), {options}, gradients {learned}"
    lengths = [n for (n,) in ranks.agree(where, words, len(weight))]
    in_range(f"{where}.targets", target, sum(lengths), ignored)
    index = torch.where(target == ignored, -1, target)
    hidden, lost = counted_rows(hidden, index < 0, ranks.largest(largest_of(weight)) if with_log_normalizer else None)
    row = vocabulary_rows(
        *(ranks, hidden, weight, index, sum(lengths[: ranks.rank]), sum(lengths)),
        bias=bias,
        smoothing=smoothing,
        softcap=softcap,
    )
    loss, log_normalizer = row.loss, torch.where(lost, torch.nan, row.log_normalizer)
    if z_loss:
        loss = loss + torch.where(index >= 0, z_loss * row.log_normalizer.square(), 0)
    if reduction == "none":
        return loss, log_normalizer
    count = (index >= 0).sum().clamp_min(1) if reduction == "mean" else 1
    return loss.sum() / count, log_normalizer


def first_row(where: str, ranks: Ranks, rows: int) -> int:
    """The global number of the first row of this rank."""
    return sum(n for (n,) in ranks.agree(where, "rows", rows)[: ranks.rank])


def _learned(*tensors: object) -> bool:
    """Whether there will be a backward pass, in which all ranks must take part."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _target(positives: Tensor | None, query: Tensor, key: Tensor, exclude_self: bool, start: int, total: int) -> Tensor:
    """Positives as global indices or a Boolean (N, Σ M)."""
    if positives is None:
        return start + target_of(None, query, len(key), exclude_self)
    target = target_of(positives, query, total, False)
    if not exclude_self:
        return target
    own = start + torch.arange(len(query), device=query.device)
    if target.dtype == torch.bool:
        return target & (torch.arange(total, device=query.device) != own[:, None])
    if not holds(target != own):
        got, advice = "positives[i] that is query i", "Leave exclude_self off."
        raise ValueError(sentence("info_nce.positives", "no point as its own positive", got, advice))
    return target


def _reduced(ranks: Ranks, row: RowLosses, reduction: str) -> Tensor:
    total = ranks.total(row.loss.sum())
    return total / ranks.sum((row.count > 0).sum()).clamp_min(1) if reduction == "mean" else total
