"""A model that is asked to repeat a prefix, part by part, and is given the prefix itself as its answer: as in KVzip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.prefix import AttentionCalls, LayerPrefix, Prefix, last_logits_only
from cumulant.transformers import AttentionMoments

REPEAT = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens before a part by which it is asked for


class RepeatedPart(NamedTuple):
    """Attention calls of a pass over a question of ``asked`` tokens and tokens ``start`` to ``stop`` of the prefix."""

    start: int
    stop: int
    asked: int
    calls: dict[str, AttentionMoments]

    def own_layer(self, layer: LayerPrefix) -> LayerPrefix:
        """What one layer holds of question and answer alone, and their queries."""
        call = self.calls[layer.name]
        new = slice(call.key.shape[2] - self.asked - (self.stop - self.start), None)
        return layer._replace(
            keys=call.key[0, :, new], values=call.value[0, :, new], queries=call.scale * call.query[0]
        )


def parts_of(length: int, part: int) -> list[tuple[int, int]]:
    """Where parts of at most ``part`` of ``length`` tokens start and stop.

    >>> parts_of(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(start, min(start + part, length)) for start in range(0, length, part)]


def repeated_parts(prefix: Prefix, parts: Sequence[tuple[int, int]]) -> Iterator[RepeatedPart]:
    """The model repeats one part at a time after the whole prefix. Without a tokenizer nothing is asked, and the part
    follows the prefix."""
    for start, stop in parts:
        asked = _question(prefix, start)
        ids = torch.cat([asked, prefix.input_ids[start:stop]])
        with AttentionCalls(prefix.model) as calls:
            options = last_logits_only(prefix.model)
            prefix.model(input_ids=ids[None], past_key_values=prefix.copy_cache(), use_cache=True, **options)
        yield RepeatedPart(start, stop, len(asked), calls.by_name)


def _question(prefix: Prefix, start: int) -> Tensor:
    if prefix.tokenizer is None:
        return prefix.input_ids[:0]
    words = prefix.tokenizer(GO_ON if start else REPEAT, add_special_tokens=False)["input_ids"]
    before = prefix.input_ids[max(start - LEAD, 0) : start]
    ending = prefix.tokenizer("\n", add_special_tokens=False)["input_ids"]
    as_ids = prefix.input_ids.new_tensor
    return torch.cat([as_ids(words), before, as_ids(ending)])
