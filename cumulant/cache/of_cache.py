"""A cache that is there already, compressed once: the queries that read it have to be given with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from cumulant.cache.compressor import Compressor
from cumulant.cache.fitted.compressor import SHORTEST
from cumulant.cache.growing import Growing, heads_of
from cumulant.cache.layer import MeasureLayer
from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.prefix import LayerPrefix, require_decoder
from cumulant.cache.query_sample import KeptQueries, SequenceQueries
from cumulant.checks import sentence, shape


class Room(NamedTuple):
    """A share of the bytes of the full cache, or a number of bytes."""

    keep: float | None
    bytes: int | None


def compress_cache(
    model: nn.Module,
    cache: Cache,
    queries: Mapping[int, Tensor] | None,
    compressor: Compressor,
    room: Room,
    attention_mask: Tensor | None,
) -> MeasureCache:
    """Entries for all tokens of a cache, from the queries (batch, heads, n, d) of its last n tokens in every layer.

    A `MeasureCache` is compressed itself; of a DynamicCache the tokens are taken over.
    """
    if not compressor.while_growing:
        got, advice = f"{compressor.name}, which asks the model for more", 'Use method="backtest+norepeat".'
        raise ValueError(sentence("compress.method", "a method for entries and some queries", got, advice))
    heads = heads_of(model)
    own = cache if isinstance(cache, MeasureCache) else MeasureCache.from_cache(cache, model)
    if any(layer.asked is not None for layer in own.compressible.values()):
        advice = "It does so as it grows; its budget is set where it is made."
        raise ValueError(sentence("compress.cache", "a cache that does not compress itself", "one that does", advice))
    seen = own.get_seq_length()
    if seen < SHORTEST:
        advice = "A cache as short is as well held as it is."
        raise ValueError(sentence("compress.cache", f"at least {SHORTEST} tokens", seen, advice))
    if queries is None or sorted(queries) != sorted(heads):
        got = "none, of a cache that kept none" if queries is None else f"those of {sorted(queries)}"
        advice = "Collect them with cumulant.transformers.on_attention, or read with MeasureCache(model, compress=…)."
        raise ValueError(sentence("compress.queries", f"queries of the layers {sorted(heads)}", got, advice))
    layers = own.compressible
    begins = _begins(attention_mask, seen, next(iter(layers.values())).batch_size)
    try:
        for i, layer in layers.items():
            layer.asked = _asked(i, queries[i], layer, heads[i], begins)
        settings = require_decoder(model), heads, compressor, "", room.keep, room.bytes, SHORTEST
        Growing(*settings).compress(own, begins, tail=0)
    finally:
        for layer in layers.values():
            layer.asked = None
    return own


def _begins(mask: Tensor | None, seen: int, batch: int) -> Tensor:
    """(batch,) the first token of each sequence that is no padding."""
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64)
    mask = mask.bool().cpu()
    hidden = (~mask).sum(-1)
    if mask.shape != (batch, seen) or bool((~mask & (torch.arange(seen) >= hidden[:, None])).any()):
        advice = 'Pass what the model got, padded on the left: tokenizer.padding_side = "left".'
        raise ValueError(sentence("compress.attention_mask", f"shape ({batch}, {seen})", shape(mask), advice))
    return hidden


def _asked(index: int, queries: Tensor, layer: MeasureLayer, heads: LayerPrefix, begins: Tensor) -> KeptQueries:
    """The queries of one layer as a sample that has all of them."""
    seen, d = layer.get_seq_length(), heads.keys.shape[-1]
    expected = f"shape ({len(begins)}, {len(heads.queries)}, n ≤ {seen}, {d})"
    good = queries.ndim == 4 and queries.shape[:2] == (len(begins), len(heads.queries)) and queries.shape[-1] == d
    if not good or queries.shape[2] > seen:
        advice = "They are η = scale · query of all heads, rotated, of the last n tokens."
        raise ValueError(sentence(f"compress.queries[{index}]", expected, shape(queries), advice))
    widths = d, heads.values.shape[-1]
    asked = KeptQueries(None, 0, len(heads.queries), widths)
    at = torch.arange(seen - queries.shape[2], seen)
    asked.begins, asked.end = begins, seen
    for b, begin in enumerate(begins.tolist()):
        which = at >= max(begin, layer.first)
        none = SequenceQueries.none(len(heads.queries), widths, queries)
        asked.rows.append(none.with_new(queries[b, :, which].detach(), at[which] - begin))
    return asked
