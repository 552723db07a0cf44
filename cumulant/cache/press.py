"""Presses, as the library kvpress has them, read as compressors: by what they have, not by where they come from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers
from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.checks import sentence, shape


class PressCompressor(Compressor):
    """A press with ``compression_ratio`` = 1 − keep, while the model reads the prefix again.

        with press(model): model(prefix)            what it leaves in the cache is what is held

    press  an object that has ``compression_ratio`` and is a context manager of the model when called (its hooks
           compress the cache of a layer as soon as it has been read), or has only ``compress(module, hidden_states,
           keys, values, attentions, kwargs) → keys, values`` with (batch, key heads, n, d), or only ``score(…)`` →
           (batch, key heads, n), whose highest stay

    Keys that a press hides from heads one by one, in ``module.masked_key_indices``, are left out for real. There is no
    place for masses in a press. The press is copied: its own ratio stays what it is.
    """

    def __init__(self, press: Any):
        self.press = press
        self.name = type(press).__name__
        if not (callable(press) or hasattr(press, "compress") or hasattr(press, "score")):
            advice = "Its documentation says `with press(model): ...`."
            raise TypeError(sentence(f"press {self.name}", "compress, score or a context manager", "none", advice))

    def compress(self, prefix: Prefix, budget: Budget, evidence: None) -> Layers:
        press = copy.deepcopy(self.press)
        press.compression_ratio = 1 - budget.per_head / budget.length
        cache = DynamicCache(config=getattr(prefix.model, "config", None))
        with _masks_removed(prefix.model), _positions(prefix), _pressing(press, prefix.model):
            prefix.model(input_ids=prefix.input_ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            hidden = {layer.index: _hidden(layer.module) for layer in prefix.layers}
        return [self._entries(layer, cache, hidden[layer.index]) for layer in prefix.layers]

    def _entries(self, layer: LayerPrefix, cache: DynamicCache, hidden: Tensor | None) -> list[HeadEntries]:
        keys, values = (getattr(cache.layers[layer.index], name, None) for name in ("keys", "values"))
        heads, d, e = len(layer.keys), layer.keys.shape[-1], layer.values.shape[-1]
        advice = "A press returns keys and values of as many heads and of the same width, and fewer of them."
        expected = f"keys (1, {heads}, m, {d}) and values (1, {heads}, m, {e})"
        where = f"press {self.name}, layer {layer.index}"
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4:
            raise ValueError(sentence(where, expected, "something else", advice))
        if keys.shape[:2] != (1, heads) or keys.shape[-1] != d or values.shape != (*keys.shape[:3], e):
            raise ValueError(sentence(where, expected, f"{shape(keys)} and {shape(values)}", advice))
        stays = torch.ones(keys.shape[1:3], dtype=torch.bool, device=keys.device)
        if hidden is not None:
            stays[hidden[0], hidden[1]] = False
        entries = []
        for head, row in enumerate(stays):
            k, v = keys[0, head][row], values[0, head][row]
            entries.append(HeadEntries(k, v, None, tokens_of(k, v, layer.keys[head], layer.values[head])))
        return entries


def tokens_of(keys: Tensor, values: Tensor, all_keys: Tensor, all_values: Tensor) -> Tensor:
    """(m,) which token each entry is, by its key and value, bit by bit; −1 where it is none of them.

    >>> keys = torch.eye(3)
    >>> tokens_of(keys[[2, 0]], keys[[2, 1]], keys, keys)
    tensor([ 2, -1])
    """
    rows = torch.cat([all_keys, all_values.to(all_keys.dtype)], -1).cpu().contiguous().view(torch.uint8).numpy()
    numbers = {row.tobytes(): i for i, row in reversed([*enumerate(rows)])}
    asked = torch.cat([keys, values.to(keys.dtype)], -1).cpu().contiguous().view(torch.uint8).numpy()
    return torch.tensor([numbers.get(row.tobytes(), -1) for row in asked], device=keys.device)


@contextmanager
def _pressing(press: Any, model: nn.Module) -> Iterator[None]:
    """The press at work on the model: by its own hooks, or by ours where it has none."""
    if callable(press):
        with cast(AbstractContextManager, press(model)):
            yield
        return
    with ExitStack() as stack:
        for module in _attention(model):
            handle = module.register_forward_hook(_hook(press), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _hook(press: Any):
    """A forward hook of an attention module that puts what the press returns into its layer of the cache."""

    def hook(module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if getattr(layer, "is_sliding", False):
            return
        given = (module, _states(args, kwargs), layer.keys, layer.values, output[1], kwargs)
        if hasattr(press, "compress"):
            layer.keys, layer.values = _pair(press, press.compress(*given))
            return
        scores = press.score(*given)
        if not isinstance(scores, Tensor) or scores.shape != layer.keys.shape[:3]:
            got = shape(scores) if isinstance(scores, Tensor) else type(scores).__name__
            advice = "A press scores every token for every key head."
            expected = f"scores {shape(layer.keys[..., 0])}"
            raise ValueError(sentence(f"press {type(press).__name__}", expected, got, advice))
        stays = round(layer.keys.shape[2] * (1 - press.compression_ratio))
        index = scores.topk(stays, -1).indices.sort(-1).values[..., None]
        layer.keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.shape[-1]))
        layer.values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.shape[-1]))

    return hook


def _states(args: tuple, kwargs: dict) -> Tensor:
    """The hidden states that an attention module is called with."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _pair(press: Any, made: object) -> tuple[Any, Any]:
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1]
    got = f"{len(made)} results" if isinstance(made, tuple | list) else type(made).__name__
    raise ValueError(sentence(f"press {type(press).__name__}.compress", "keys and values", got, "Return a pair."))


@contextmanager
def _positions(prefix: Prefix) -> Iterator[None]:
    """Pass attention modules their ``cache_position`` while inside: transformers no longer does, presses ask for it."""

    def hook(module, args, kwargs):
        cache, index = kwargs.get("past_key_values"), module.layer_idx
        before = cache.get_seq_length(index) if cache is not None else 0
        count = _states(args, kwargs).shape[1]
        numbers = torch.arange(before, before + count, device=prefix.input_ids.device)
        return args, {"cache_position": numbers, **kwargs}

    with ExitStack() as stack:
        for module in _attention(prefix.model):
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def _masks_removed(model: nn.Module) -> Iterator[None]:
    """Modules without ``masked_key_indices`` on leaving, so that the next pass is as if there had been no press."""
    try:
        yield
    finally:
        for module in _attention(model):
            if "masked_key_indices" in vars(module):
                del module.masked_key_indices


def _hidden(module: nn.Module) -> Tensor | None:
    """(2, n) key heads and tokens that a press hides."""
    masked = getattr(module, "masked_key_indices", None)
    return None if masked is None else torch.stack([torch.as_tensor(part) for part in masked[1:]])


def _attention(model: nn.Module) -> list[nn.Module]:
    """Modules that are a layer of the cache."""
    return [
        module for module in model.modules() if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    ]
