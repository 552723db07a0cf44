"""Keys of small norm stay (arXiv 2406.11430)."""

from __future__ import annotations

from torch import Tensor

from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class Knorm(ScoreCompressor):
    """A key of small norm tends to draw much attention: those stay, in every layer.

    s_j = −|k_j|
    """

    name = "knorm"
    while_growing = True

    def score(self, layer: LayerPrefix) -> Tensor:
        return -layer.keys.float().norm(dim=-1)
