"""KeyDiff: keys unlike the mean of all stay (arXiv 2504.15364)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class KeyDiff(ScoreCompressor):
    """Keys that point away from the mean direction of all keys.

        s_j = −cos(k_j, mean_l k_l / |k_l|)

    The paper evicts block by block while it reads; here once.
    """

    name = "keydiff"
    while_growing = True

    def score(self, layer: LayerPrefix) -> Tensor:
        keys = layer.keys.float()
        anchor = torch.nn.functional.normalize(keys, dim=-1).mean(1, keepdim=True)
        return -torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)
