"""SnapKV: tokens that the last queries look at, and their neighbours (arXiv 2404.14469)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.attention_weights import of_key_heads, weight_blocks
from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class SnapKV(ScoreCompressor):
    """The last 64 queries vote with their attention; votes are pooled over 5 neighbours, and the window itself stays.

        s_j = pool_5(mean_{i ≥ T − 64} p_ij),    the mean over the heads of a group

    Settings of the authors' code: a window of 64, means of 5 (their text has maxima as well). Where less than twice the
    window fits, half of the room is the window, and the rest of the window competes by its own votes.
    """

    name = "snapkv"

    def __init__(self, window: int = 64, kernel: int = 5):
        self.window, self.kernel, self.recent = window, kernel, window

    def score(self, layer: LayerPrefix) -> Tensor:
        length = layer.keys.shape[1]
        first = max(length - self.window, 1)
        votes = torch.cat([weights.sum(1, keepdim=True) for weights in weight_blocks(layer, first)], 1).sum(1)
        votes = votes / (length - first)
        before = torch.nn.functional.avg_pool1d(votes[:, None, :first], self.kernel, 1, self.kernel // 2)[:, 0]
        return of_key_heads(torch.cat([before, votes[:, first:]], 1), layer)
