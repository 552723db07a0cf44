"""Like D2O: what H2O would evict is merged into what stays, where it is like it (after arXiv 2406.13035)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from cumulant.cache.baselines.h2o import H2O
from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Layers
from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import Prefix


class D2OLike(H2O):
    """Tokens stay as for H2O; an evicted one is merged into the key that is most like it, if it is more like it than
    evicted ones are on average; key and value are weighted means, and the mass stays 1.

        k̂_c = (e k_c + Σ_i e^{u_i} k_i) / (e + Σ_i e^{u_i}),    u_i = cos(k_i, k_c) over evicted i whose nearest is c

    Like the paper in its merging, not in all: no allocation over layers, one threshold for the prefix in place of a
    moving mean, and everything once.
    """

    name = "d2o-like"

    def compress(self, prefix: Prefix, budget: Budget, evidence: list[Tensor]) -> Layers:
        stays = super().compress(prefix, budget, evidence)
        return [
            [_merged(k, v, head) for k, v, head in zip(layer.keys, layer.values, heads, strict=True)]
            for layer, heads in zip(prefix.layers, stays, strict=True)
        ]


def _merged(keys: Tensor, values: Tensor, head: HeadEntries) -> HeadEntries:
    positions = cast(Tensor, head.positions)
    free = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    free[positions] = False
    lost = free.nonzero()[:, 0]
    if not len(lost):
        return head
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    likeness, nearest = (unit[lost] @ unit[positions].mT).max(-1)
    near = likeness >= likeness.mean()
    lost, weight, target = lost[near], likeness[near].exp(), nearest[near]
    own = torch.full((len(head.keys),), torch.e, device=keys.device)
    whole = own.index_add(0, target, weight)

    def mean(of: Tensor, staying: Tensor) -> Tensor:
        total = (own[:, None] * staying.float()).index_add(0, target, weight[:, None] * of[lost].float())
        return (total / whole[:, None]).to(of.dtype)

    merged = torch.zeros_like(own, dtype=torch.bool)
    merged[target] = True
    where = torch.where(merged, -1, positions)
    return HeadEntries(mean(keys, head.keys), mean(values, head.values), None, where)
