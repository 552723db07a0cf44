"""H2O: tokens that have drawn the most attention, and the last ones (arXiv 2306.14048)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.attention_weights import of_key_heads, weight_blocks
from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class H2O(ScoreCompressor):
    """Half of the room for the last tokens, half for those with the largest sum of attention ("heavy hitters").

        s_j = Σ_{i ≥ j} p_ij,    the mean over the heads of a group

    The paper evicts greedily at every step; here once, from the attention of the whole prefix.
    """

    name = "h2o"

    def score(self, layer: LayerPrefix) -> Tensor:
        drawn = torch.zeros(layer.queries.shape[:2], device=layer.keys.device)
        for weights in weight_blocks(layer):
            drawn += weights.sum(1)
        return of_key_heads(drawn, layer)

    def scores(self, scores: Tensor, entries: int) -> Tensor:
        out = scores.clone()
        out[:, scores.shape[1] - entries // 2 :] = torch.inf
        return out
