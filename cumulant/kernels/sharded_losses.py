"""Losses G − ⟨η, x⁺⟩ whose atoms several processes hold: negatives of a batch, words of a vocabulary.

Both halves add over blocks of atoms, one inside the logarithm and one outside: `sharded_sums` serves them as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.collectives import Ranks
from cumulant.kernels.losses import Plan, losses
from cumulant.kernels.sharded_sums import Block, Fields, all_reduced, round_the_ring
from cumulant.kernels.strips import positives_of


class Row(NamedTuple):
    """Of every row of this rank: log-normalizer, mean score of its positives, and how many it has."""

    log_normalizer: Tensor
    positive: Tensor
    count: Tensor

    @property
    def loss(self) -> Tensor:
        """G − mean positive score; 0 for a row without positives."""
        found = self.count > 0
        return torch.where(found, torch.where(found, self.log_normalizer, 0) - self.positive, 0)


def ring_rows(ranks: Ranks, eta: Tensor, atoms: Tensor, target: Tensor, lengths: list[int], exclude_self: bool) -> Row:
    """Rows (n, d) of this rank against the atoms of all ranks; target (n,) global indices, −1 for none, or (n, Σm)."""

    def share(owner: int) -> tuple[Tensor, bool, Tensor]:
        """The targets among one rank's atoms, whether row i is atom i there, and how many targets each row has."""
        own = exclude_self and owner == ranks.rank
        local = part_of(target, sum(lengths[:owner]), lengths[owner])
        return local, own, positives_of(local, lengths[owner], own).row_counts

    def part(rows: Tensor, block: Block, owner: int) -> Fields:
        local, own, _ = share(owner)
        keys = block[0]
        assert keys is not None
        found = losses(rows, keys, local, Plan(exclude_self=own))
        return {"log_normalizer": found.log_normalizer, "positive": _positive(rows, keys, local, own)}

    found = round_the_ring(ranks, part, eta, (atoms, None, None), lengths)
    count = sum((share(owner)[2] for owner in range(ranks.size)), torch.zeros(len(eta), device=eta.device))
    return Row(found["log_normalizer"], found["positive"] / count.clamp_min(1), count)


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
) -> Row:
    """Rows (n, d) that all ranks hold against words ``start``… of this rank; target (n,) global, −1 for none."""
    local = part_of(target, start, len(weight))

    def part(rows: Tensor, block: Block, owner: int) -> Fields:
        found = losses(rows, weight, local, Plan(softcap=softcap), bias=bias)
        score = _positive(rows, weight, local, False, bias, softcap)
        if smoothing:
            every = rows @ weight.sum(0) + (0 if bias is None else bias.sum())
            score = (1 - smoothing) * score + smoothing / words * every
        return {"log_normalizer": found.log_normalizer, "positive": score}

    found = all_reduced(ranks, part, hidden, (weight, None, bias))
    return Row(found["log_normalizer"], found["positive"], (target >= 0).to(hidden.dtype))


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
    exclude_self: bool,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Σ of the scores of each row's positives, straight from the vectors: G − ℓ would lose digits."""
    if target.dtype == torch.bool:
        table = target.to(rows.dtype)
        if exclude_self:
            table = table - torch.diag_embed(table.diagonal())
        return (rows * (table @ atoms)).sum(-1)
    found, index = target >= 0, target.clamp_min(0)
    if len(atoms) == 0:
        return torch.zeros_like(rows[:, 0])
    score = (rows * atoms[index]).sum(-1)
    score = score if bias is None else score + bias[index]
    return torch.where(found, score if cap is None else cap * torch.tanh(score / cap), 0)
