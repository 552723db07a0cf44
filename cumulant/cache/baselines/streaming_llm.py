"""StreamingLLM: the first tokens and the last ones (arXiv 2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix


class StreamingLLM(ScoreCompressor):
    """The first 4 tokens, to which heads attend that have nothing to say, and as many of the last as there is room for.

        stays: j < sinks or j ≥ T − (m − sinks)

    The paper moves the positions of what stays together; here tokens stay at their positions, as for all methods.

    >>> from cumulant.cache.baselines import baseline
    >>> baseline("stream").sinks
    4
    """

    name = "stream"
    while_growing = True

    def __init__(self, sinks: int = 4):
        self.sinks = sinks

    def score(self, layer: LayerPrefix) -> Tensor:
        heads, length = layer.keys.shape[:2]
        return torch.arange(length, dtype=torch.float32, device=layer.keys.device).expand(heads, -1)
