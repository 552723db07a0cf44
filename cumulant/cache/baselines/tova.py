"""TOVA: tokens that the last query looks at, the same ones for all heads of a layer (arXiv 2401.06104)."""

from __future__ import annotations

from torch import Tensor

from cumulant.cache.attention_weights import weight_blocks
from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class TOVA(ScoreCompressor):
    """The attention of the last query, the mean over all heads of a layer.

        s_j = mean_h p^h_{T−1, j}

    The paper evicts one token at every step; here all at once by the last query. The last token stays.
    """

    name = "tova"
    recent = 1

    def score(self, layer: LayerPrefix) -> Tensor:
        heads, length = layer.keys.shape[:2]
        (weights,) = weight_blocks(layer, length - 1)
        return weights[:, 0].mean(0).expand(heads, -1)
