"""Queries of a model that is asked to repeat parts of the prefix: those that look things up from far back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulant.cache.fitted.query_law import QuerySample, own_context
from cumulant.cache.prefix import AttentionCalls, Prefix

REPEAT = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens before a part by which it is asked for


def repeated_queries(prefix: Prefix, part: tuple[int, int], at: Tensor) -> list[QuerySample]:
    """For every layer, the queries of the model while it repeats tokens ``part[0]`` to ``part[1]`` of the prefix, at
    ``at`` (n,) of these tokens.

    The model is asked to repeat and is given the prefix itself as its answer. What a query reads of question and answer
    is its local context.
    """
    start, stop = part
    asked = _question(prefix, start)
    ids = torch.cat([asked, prefix.input_ids[start:stop]])
    with AttentionCalls(prefix.model) as calls:
        prefix.model(input_ids=ids[None], past_key_values=prefix.copy_cache(), use_cache=True, logits_to_keep=1)
    which = len(asked) + at
    found = []
    for layer in prefix.layers:
        call = calls.by_name[layer.name]
        new = slice(len(prefix), len(prefix) + len(ids))
        own = layer._replace(
            keys=call.key[0, :, new], values=call.value[0, :, new], queries=call.scale * call.query[0]
        )
        local, output = own_context(own, which, which)
        queries = own.queries[:, which]
        turned = queries if layer.rotation is None else layer.rotation.turn(queries, -(len(prefix) + which))
        found.append(QuerySample(turned, which, local, output))
    return found


def _question(prefix: Prefix, start: int) -> Tensor:
    if prefix.tokenizer is None:
        return prefix.input_ids[:0]
    words = prefix.tokenizer(GO_ON if start else REPEAT, add_special_tokens=False)["input_ids"]
    before = prefix.input_ids[max(start - LEAD, 0) : start]
    ending = prefix.tokenizer("\n", add_special_tokens=False)["input_ids"]
    as_ids = prefix.input_ids.new_tensor
    return torch.cat([as_ids(words), before, as_ids(ending)])
