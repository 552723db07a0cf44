"""KVzip: tokens that the model needs to say the prefix again (arXiv 2505.23416)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers, chosen
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.cache.repetition import RepeatedPart, parts_of, repeated_parts

BLOCK = 128  # queries whose weights are held at once


class KVzip(Compressor):
    """The model is asked to repeat the prefix, part by part, and the prefix itself is its answer; a token's score is
    the largest attention that any query of the repetition pays to it.

        s_j = max over heads of the group and queries i of the repetition of p_ij,  over part, sinks and repetition

    Scores are compared over all layers and key heads: the highest stay. Parts of 2048 tokens, asked for by the last 8
    of the part before; the first 4 tokens stay. Without a tokenizer nothing is asked, and the prefix follows itself.
    """

    name = "kvzip"

    def __init__(self, part: int = 2048, sinks: int = 4):
        self.part, self.sinks = part, sinks

    def evidence(self, prefix: Prefix) -> Tensor:
        """(layers · key heads, T)"""
        parts = [
            torch.cat([self._largest(layer, repeated) for layer in prefix.layers])
            for repeated in repeated_parts(prefix, parts_of(len(prefix), self.part))
        ]
        scores = torch.cat(parts, 1)
        scores[:, : self.sinks] = torch.inf
        return scores

    def compress(self, prefix: Prefix, budget: Budget, evidence: Tensor) -> Layers:
        """The highest of all; where layers differ in the bytes of an entry, those of each layer."""
        first = evidence.topk(1).indices  # every head keeps one
        raised = evidence.scatter(1, first, torch.inf)
        stays = torch.zeros_like(raised, dtype=torch.bool)
        heads = [0]
        for count in budget.heads:
            heads.append(heads[-1] + count)
        if len(set(budget.entry_bytes)) == 1:
            most = budget.bytes // budget.entry_bytes[0]
            stays.view(-1)[raised.flatten().topk(min(most, raised.numel())).indices] = True
        else:
            for number in range(len(prefix.layers)):
                rows = raised[heads[number] : heads[number + 1]]
                flat = torch.zeros(rows.numel(), dtype=torch.bool, device=rows.device)
                flat[rows.flatten().topk(budget.of_layer(number)).indices] = True
                stays[heads[number] : heads[number + 1]] = flat.view_as(rows)
        return [
            chosen(layer, [row.nonzero()[:, 0] for row in stays[heads[n] : heads[n + 1]]])
            for n, layer in enumerate(prefix.layers)
        ]

    def _largest(self, layer: LayerPrefix, repeated: RepeatedPart) -> Tensor:
        """(key heads, stop − start): the largest weight of each token of the part."""
        start, stop, own = repeated.start, repeated.stop, repeated.own_layer(layer)
        new, queries = own.keys, own.queries
        sinks = min(self.sinks, start)
        keys = torch.cat([layer.keys[:, :sinks], layer.keys[:, start:stop], new], 1).repeat_interleave(layer.groups, 0)
        seen, count = keys.shape[1] - new.shape[1], queries.shape[1]
        largest = queries.new_zeros(len(queries), stop - start)
        number = torch.arange(count, device=queries.device)
        for first in range(0, count, BLOCK):
            rows = number[first : first + BLOCK]
            scores = queries[:, rows] @ keys.mT
            scores[..., seen:].masked_fill_(number > rows[:, None], -torch.inf)
            largest = torch.maximum(largest, scores.softmax(-1)[..., sinks:seen].amax(1))
        return largest.unflatten(0, (-1, layer.groups)).amax(1)
