"""`compress`: from a model and tokens, or a cache of them, to a compressed cache, to read on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from cumulant.cache.compressor import Compressed, as_compressor, compress_prefix
from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.of_cache import Room, compress_cache
from cumulant.cache.prefix import Prefix, on_cumulant, prefill
from cumulant.checks import sentence, shape


@torch.no_grad()
def compress(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    cache: Cache | None = None,
    queries: Mapping[int, Tensor] | None = None,
    keep: float | None = None,
    bytes: int | None = None,
    method: object = "backtest",
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
) -> MeasureCache:
    """Let a decoder read tokens and hold them in a share of the bytes: a cache to generate from.

        Σ_{j<T} δ_(k_j, v_j)  →  Σ_{j<m} e^{w_j} δ_(k̂_j, v̂_j)  in every head,    bytes held ≤ keep · full bytes

    model           a decoder of transformers; what reads the cache needs ``attn_implementation="cumulant"``
    input_ids       (T,) or (batch, T): all that is to be held; or
    cache           a cache that has it, and
    queries         of every layer that holds all tokens, by its number, (batch, heads, n, d) η = scale · query of the
                    last n tokens, rotated: what `cumulant.transformers.on_attention` hands on
    keep            bytes held over bytes of the full cache, or
    bytes           how many bytes may be held, of all sequences together
    method          "backtest", a baseline or another compressor (see `as_compressor`)
    attention_mask  (batch, T), 0 where a token is padding: each sequence is read without it
    tokenizer       for methods that ask the model to repeat the text; without one it repeats without being asked

    A `MeasureCache` is compressed itself, of a DynamicCache the tokens are taken over. A cache that shall be compressed
    as it grows is ``MeasureCache(model, compress=…)``. The positions of new tokens go on from T. Queries are drawn by a
    seed: the same call gives the same cache.

    >>> import transformers
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.LlamaConfig(vocab_size=9, attn_implementation="cumulant", **sizes)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> cache = compress(model, torch.arange(128) % 9, keep=0.25)
    >>> cache.get_seq_length(), cache.keep < 0.26
    (128, True)
    >>> model(torch.tensor([[3]]), past_key_values=cache).logits.shape          # the token after them
    torch.Size([1, 1, 9])
    """
    if (keep is None) == (bytes is None):
        advice = "A quarter of the bytes is keep=0.25."
        raise ValueError(sentence("compress", "keep or bytes, one of them", f"keep={keep}, bytes={bytes}", advice))
    compressor = as_compressor(method)
    if cache is not None:
        if input_ids is not None:
            advice = "Let it read them into the cache, or leave the cache out."
            raise ValueError(sentence("compress", "input_ids or cache, one of them", "both", advice))
        return compress_cache(model, cache, queries, compressor, Room(keep, bytes), attention_mask)
    if queries is not None:
        raise ValueError(sentence("compress.queries", "queries of a cache", "no cache", "Pass cache=, too."))
    ids, mask = _rows(input_ids, attention_mask)
    found: list[tuple[Prefix, Compressed]] = []
    with on_cumulant(model):
        for row, visible in zip(ids, mask, strict=True):
            prefix = prefill(model, row[visible], tokenizer)
            share = keep if keep is not None else _share(prefix, bytes or 0, len(row[visible]) / int(mask.sum()))
            found.append((prefix, compress_prefix(prefix, compressor, share)))
    return found[0][1].cache(found[0][0]) if len(found) == 1 and bool(mask.all()) else _joined(found, ids.shape[1])


def _rows(input_ids: Tensor | None, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens (batch, T), and which of them are text."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim not in (1, 2) or input_ids.is_floating_point():
        got = shape(input_ids) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        advice = 'Give tokenizer(text, return_tensors="pt").input_ids.'
        raise ValueError(sentence("compress.input_ids", "token ids (T,) or (batch, T)", got, advice))
    ids = torch.atleast_2d(input_ids)
    mask = torch.ones_like(ids) if attention_mask is None else torch.atleast_2d(attention_mask)
    if mask.shape != ids.shape:
        advice = "Give what the tokenizer returned with the tokens."
        raise ValueError(sentence("compress.attention_mask", f"shape {shape(ids)}", shape(mask), advice))
    mask = mask.bool()
    if not bool(mask[:, -1].all()):
        advice = 'Pad on the left: tokenizer.padding_side = "left".'
        raise ValueError(sentence("compress.attention_mask", "text at the end of every sequence", "padding", advice))
    return ids, mask


def _share(prefix: Prefix, bytes: int, part: float) -> float:
    """``bytes`` as a share of the full cache of one sequence, which gets a ``part`` of them."""
    full = sum(keys.nbytes + values.nbytes for keys, values in _held(prefix))
    if bytes < 1:
        advice = f"The full cache has {full} bytes."
        raise ValueError(sentence("compress.bytes", "a number of bytes above 0", bytes, advice))
    return min(bytes * part / full, 1.0)


def _held(prefix: Prefix) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (1, key heads, T, d) of every layer of the full cache, those with windows among them."""
    return [
        (layer.keys, layer.values)
        for layer in prefix.cache.layers
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]


def _joined(found: Sequence[tuple[Prefix, Compressed]], length: int) -> MeasureCache:
    """One cache of several sequences, whose last tokens have the same place; nothing is held of padding."""
    first = found[0][0]
    cache = DynamicCache(config=getattr(first.model, "config", None))
    for index, pairs in enumerate(zip(*(_held(prefix) for prefix, _ in found), strict=True)):
        most = max(keys.shape[2] for keys, _ in pairs)
        if any(layer.index == index for layer in first.layers):
            most = length
        keys, values = (torch.cat([_left_padded(pair[part], most) for pair in pairs]) for part in (0, 1))
        cache.update(keys, values, index)
    entries = {
        layer.index: [[head._replace(positions=None) for head in made.layers[n]] for _, made in found]
        for n, layer in enumerate(first.layers)
    }
    return MeasureCache.from_cache(cache, first.model).compress(entries)


def _left_padded(x: Tensor, length: int) -> Tensor:
    """(1, key heads, length, d) with zeros in front: what padding holds, and no entry has."""
    return torch.nn.functional.pad(x, (0, 0, length - x.shape[2], 0))
