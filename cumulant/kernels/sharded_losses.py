"""Losses G − ⟨η, x⁺⟩ whose atoms several processes hold: negatives of a batch, words of a vocabulary.

Both halves add over blocks of atoms, one inside the logarithm and one outside: `sharded_sums` serves them as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.collectives import Ranks
from cumulant.kernels.losses import LossPlan, losses
from cumulant.kernels.sharded_sums import Block, Fields, all_reduced, round_the_ring
from cumulant.kernels.strips import positives_of


class RowLosses(NamedTuple):
    """Per row of this rank: log-normalizer, mean score of its positives, and their number."""

    log_normalizer: Tensor
    positive: Tensor
    count: Tensor

    @property
    def loss(self) -> Tensor:
        """G − mean positive score; 0 for a row without positives."""
        labelled = self.count > 0
        return torch.where(labelled, torch.where(labelled, self.log_normalizer, 0) - self.positive, 0)


def ring_rows(
    ranks: Ranks, eta: Tensor, atoms: Tensor, target: Tensor, lengths: list[int], exclude_self: bool
) -> RowLosses:
    """Rows (n, d) of this rank against the atoms of all ranks; target (n,) global indices, −1 for none, or (n, Σm).

    With exclude_self row i is atom i of this rank, and must not be a target.
    """

    def part(rows: Tensor, block: Block, owner: int) -> Fields:
        own = exclude_self and owner == ranks.rank
        local = part_of(target, sum(lengths[:owner]), lengths[owner])
        keys = block[0]
        assert keys is not None
        with without_autocast(rows):
            log_normalizer = losses(rows, keys, local, LossPlan(exclude_self=own)).log_normalizer
            return {"log_normalizer": log_normalizer, "positive": _positive(rows, keys, local, count)}

    count = positives_of(target, sum(lengths), False).row_counts
    total = round_the_ring(ranks, part, eta, (atoms, None, None), lengths)
    return RowLosses(total["log_normalizer"], total["positive"], count)


def vocabulary_rows(
    ranks: Ranks,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    words: int,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> RowLosses:
    """Rows (n, d) that all ranks hold against words ``start``… of this rank; target (n,) global, −1 for none."""
    local = part_of(target, start, len(weight))

    def part(rows: Tensor, block: Block, owner: int) -> Fields:
        with without_autocast(rows):
            log_normalizer = losses(rows, weight, local, LossPlan(softcap=softcap), bias=bias).log_normalizer
            score = _positive(rows, weight, local, (local >= 0).long(), bias, softcap)
            if smoothing:
                mean = rows @ (weight.T @ weight.new_full((len(weight),), 1 / words))
                mean = mean if bias is None else mean + (bias / words).sum()
                score = (1 - smoothing) * score + smoothing * mean
        return {"log_normalizer": log_normalizer, "positive": score}

    total = all_reduced(ranks, part, hidden, (weight, None, bias))
    return RowLosses(total["log_normalizer"], total["positive"], (target >= 0).to(hidden.dtype))


def part_of(target: Tensor, start: int, length: int) -> Tensor:
    """Targets among atoms start … start + length − 1, counted from there; −1 for those elsewhere."""
    if target.dtype == torch.bool:
        return target[:, start : start + length]
    inside = (target >= start) & (target < start + length)
    return torch.where(inside, target - start, -1)


def _positive(
    rows: Tensor,
    atoms: Tensor,
    target: Tensor,
    count: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Each row's positives here: the sum of their scores / ``count``, straight from the vectors.

    G − ℓ would lose digits.
    """
    if target.dtype == torch.bool:
        share = target.to(rows.dtype) / count.clamp_min(1)[:, None]
        return (rows * (share @ atoms)).sum(-1)
    labelled, index = target >= 0, target.clamp_min(0)
    if len(atoms) == 0:
        return torch.zeros_like(rows[:, 0])
    score = (rows * atoms[index]).sum(-1)
    score = score if bias is None else score + bias[index]
    score = score if cap is None else cap * torch.tanh(score / cap)
    if bias is not None:
        score = torch.where(bias[index] == -torch.inf, -torch.inf, score)
    return torch.where(labelled, score, 0)
