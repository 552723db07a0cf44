"""AdaKV: the entries of a layer go to the heads whose scores are highest (arXiv 2407.11550)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.baselines.snapkv import SnapKV
from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers, ScoreCompressor, chosen
from cumulant.cache.prefix import Prefix


class AdaKV(Compressor):
    """Scores of another method, compared over all key heads of a layer; every head has a fifth of an equal share safe.

    stays: the H·m highest s^h_j of a layer, and for every head the 0.2·m highest of its own
    """

    def __init__(self, scorer: ScoreCompressor | None = None, safeguard: float = 0.2):
        self.scorer = SnapKV() if scorer is None else scorer
        self.safeguard = safeguard
        self.name = "adakv" if scorer is None else f"adakv:{scorer.name}"

    def evidence(self, prefix: Prefix) -> list[Tensor]:
        return self.scorer.evidence(prefix)

    def compress(self, prefix: Prefix, budget: Budget, evidence: list[Tensor]) -> Layers:
        entries, safe = budget.per_head, max(1, int(self.safeguard * budget.per_head))
        out = []
        for number, (layer, scores) in enumerate(zip(prefix.layers, evidence, strict=True)):
            raised = self.scorer.scores(scores, entries)
            first = raised.topk(safe).indices
            raised = raised.scatter(1, first, torch.inf)
            stays = torch.zeros_like(raised, dtype=torch.bool).flatten()
            stays[raised.flatten().topk(budget.of_layer(number)).indices] = True
            out.append(chosen(layer, [row.nonzero()[:, 0] for row in stays.view_as(raised)]))
        return out
