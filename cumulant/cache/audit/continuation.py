"""A continuation read after a prefix: with the full cache, keeping what its heads ask, and with a compressed one."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.prefix import AttentionCalls, Prefix, stream_norms


class LayerQueries(NamedTuple):
    """Some queries of a continuation in one layer, at the same tokens for all heads, and what else they read.

    queries  (heads, q, d) natural parameters η = scale · query, of the pass with the full cache
    at       (q,) tokens of the continuation that they are of
    keys     (key heads, n, d) of the continuation, of which token t sees the first t + 1
    values   (key heads, n, e)
    stream   mean over these tokens of the squared norm of the residual stream in front of the block; None: not known
    """

    queries: Tensor
    at: Tensor
    keys: Tensor
    values: Tensor
    stream: float | None


class FullPass(NamedTuple):
    """A continuation of n tokens read with the full cache.

    logits   (n, vocabulary) of the token after each
    layers   what the heads of every layer of the prefix ask, on ``at`` (q,) of the tokens
    all      (layers) queries of all tokens, (heads, n, d)
    seconds  of the pass
    """

    logits: Tensor
    layers: tuple[LayerQueries, ...]
    all: tuple[Tensor, ...]
    seconds: float


def sampled_tokens(length: int, every: int) -> Tensor:
    """Tokens whose queries are measured: one in so many, the last one of each stretch, and one at least.

    >>> sampled_tokens(8, 2).tolist(), sampled_tokens(3, 4).tolist()
    ([1, 3, 5, 7], [2])
    """
    return torch.arange(min(every, length) - 1, length, every)


@torch.no_grad()
def read_on(prefix: Prefix, input_ids: Tensor, every: int = 1) -> FullPass:
    """Read ``input_ids`` (n,) after a prefix with its full cache, and keep the queries of one in so many."""
    at, streams = sampled_tokens(len(input_ids), every).to(input_ids.device), {}
    cache, names = prefix.copy_cache(), [layer.name for layer in prefix.layers]
    start = time.perf_counter()
    with AttentionCalls(prefix.model) as calls, stream_norms(prefix.model, names, at, streams):
        logits = prefix.model(input_ids=input_ids[None], past_key_values=cache, use_cache=True).logits[0]
    seconds = time.perf_counter() - start
    layers, whole = [], []
    for layer in prefix.layers:
        call = calls.by_name[layer.name]
        queries = call.scale * call.query[0]
        new = slice(len(prefix), len(prefix) + len(input_ids))
        own = call.key[0, :, new], call.value[0, :, new]
        layers.append(LayerQueries(queries[:, at], at, *own, streams.get(layer.name)))
        whole.append(queries)
    return FullPass(logits, tuple(layers), tuple(whole), seconds)


@torch.no_grad()
def logits_after(prefix: Prefix, cache: MeasureCache, input_ids: Tensor) -> tuple[Tensor, float]:
    """(n, vocabulary) logits of a continuation (n,) read with a cache, which is then as it was; and the seconds."""
    start = time.perf_counter()
    logits = prefix.model(input_ids=input_ids[None], past_key_values=cache, use_cache=True).logits[0]
    seconds = time.perf_counter() - start
    cache.crop(-len(input_ids))
    return logits, seconds
