"""What attention the queries of a prefix paid to its tokens, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cumulant.cache.prefix import LayerPrefix

BLOCK = 128  # queries whose weights are held at once


def weight_blocks(layer: LayerPrefix, first: int = 0) -> Iterator[Tensor]:
    """p_ij = exp(⟨η_i, k_j⟩) / Σ_{l ≤ i} exp(⟨η_i, k_l⟩) for queries i ≥ first and tokens j ≤ i, (heads, block, T).

    A sink that the model has besides its tokens takes its part.
    """
    length = layer.keys.shape[1]
    keys = layer.keys.repeat_interleave(layer.groups, 0)
    tokens = torch.arange(length, device=keys.device)
    for start in range(first, length, BLOCK):
        stop = min(start + BLOCK, length)
        scores = layer.queries[:, start:stop] @ keys[:, :stop].mT
        scores = scores.masked_fill(tokens[:stop] > tokens[start:stop, None], -torch.inf)
        if layer.sinks is None:
            weights = scores.softmax(-1)
        else:
            sink = layer.sinks.to(scores)[:, None, None].expand(-1, stop - start, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        yield torch.nn.functional.pad(weights, (0, length - stop))


def of_key_heads(per_head: Tensor, layer: LayerPrefix) -> Tensor:
    """(heads, …) averaged over the heads that share a key head, (key heads, …)."""
    return per_head.unflatten(0, (-1, layer.groups)).mean(1)
