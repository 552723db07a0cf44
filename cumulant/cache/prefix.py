"""A prefix read by a model: what its heads hold of it, and the queries that were seen."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cumulant.cache.rotation import Rotation, read_rotation
from cumulant.checks import sentence, shape
from cumulant.nn.wrappers import attention_configurations, is_transformers, without_wrappers
from cumulant.observatory.hooks.structure import block_of, input_of
from cumulant.transformers import AttentionMoments, on_attention


class Growth(NamedTuple):
    """Of a text that grows, whose beginning is held as entries: which tokens are left, and which queries are known.

    end         tokens read
    first       the first that is held as it is: the last ``end − first`` keys of a layer are tokens, others entries
    at          (m,) the tokens whose queries `LayerPrefix.queries` are, growing, none before ``first``
    earlier     `SampledQueries` of tokens before, with what they read beside the text in front of them
    earlier_at  (m',) these tokens, growing
    seed        by which queries are drawn
    """

    end: int
    first: int
    at: Tensor
    earlier: Any
    earlier_at: Tensor
    seed: int = 0


class LayerPrefix(NamedTuple):
    """What one layer of a model holds of a prefix of T tokens, and the queries that read it.

    index     of the layer in the cache
    name      path of its attention module
    module    that module
    keys      (key heads, T, d) as in the cache: rotated
    values    (key heads, T, e)
    queries   (heads, T, d) natural parameters η = scale · query, rotated: the score of a key is ⟨η, k⟩
    rotation  how queries and keys turn with their positions; None: they do not
    rotates   whether they turn at all; with ``rotation`` None it is not known how
    sinks     (heads,) log weights of a key of value 0 that every query sees; None: there is none
    stream    mean over the later half of its tokens of the squared norm of the residual stream in front of the block;
              None: not known
    log_mass  (key heads, n) of entries in the place of tokens, −∞ where a key head has fewer; None: all have mass 1
    growth    of a text that grows: keys are n entries and tokens then, and queries those of some tokens; None: of T
    """

    index: int
    name: str
    module: nn.Module
    keys: Tensor
    values: Tensor
    queries: Tensor
    rotation: Rotation | None = None
    rotates: bool = False
    sinks: Tensor | None = None
    stream: float | None = None
    log_mass: Tensor | None = None
    growth: Growth | None = None

    @property
    def length(self) -> int:
        """Tokens read, T."""
        return self.keys.shape[1] if self.growth is None else self.growth.end

    @property
    def first_token(self) -> int:
        """The first token that is held as it is."""
        return 0 if self.growth is None else self.growth.first

    def queries_of(self, at: Tensor) -> Tensor:
        """(heads, n, d) the queries of tokens ``at`` (n,), which are known."""
        if self.growth is None:
            return self.queries[:, at]
        return self.queries[:, torch.searchsorted(self.growth.at, at)].float()  # they are kept in half precision

    def tokens(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys (key heads, n, d) and values (key heads, n, e) of tokens ``first`` to ``stop`` − 1, held as they are."""
        behind = self.keys.shape[1] - self.length
        return self.keys[:, first + behind : stop + behind], self.values[:, first + behind : stop + behind]

    @property
    def groups(self) -> int:
        """Heads that share a key head."""
        return self.queries.shape[0] // self.keys.shape[0]

    def first(self, length: int) -> LayerPrefix:
        """The same of the first tokens alone."""
        return self._replace(
            keys=self.keys[:, :length], values=self.values[:, :length], queries=self.queries[:, :length]
        )


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prefix of T tokens that a model has read, with its full cache: what a compressor gets.

    model      as it read, on ``attn_implementation="cumulant"``
    input_ids  (T,)
    layers     those that hold keys and values of all tokens; sliding layers are not among them, and not compressed
    cache      of all layers; `copy_cache` is one to go on from
    logits     (vocabulary,) of what follows
    tokenizer  for compressors that ask the model something; None: there is none
    seconds    that the model read
    """

    model: nn.Module
    input_ids: Tensor
    layers: tuple[LayerPrefix, ...]
    cache: DynamicCache
    logits: Tensor
    tokenizer: Any = None
    seconds: float = 0.0
    evidence: dict[Any, Any] = field(default_factory=dict)  # of compressors, which do not ask twice

    def __len__(self) -> int:
        return len(self.input_ids)

    def copy_cache(self) -> DynamicCache:
        """The full cache, to read on from: what is added to it is not added to this prefix."""
        return copy_of(self.cache)


def copy_of(cache: DynamicCache) -> DynamicCache:
    """A cache of its own over the same tensors."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@contextmanager
def on_cumulant(model: nn.Module) -> Iterator[None]:
    """The model on ``attn_implementation="cumulant"`` while inside, and on what it was on before afterwards."""
    before = [(c, getattr(c, "_attn_implementation_internal", None)) for c in attention_configurations(model)]
    if getattr(model, "set_attn_implementation", None) is None:
        advice = "Load one with AutoModelForCausalLM, or `cumulant.observatory.load`."
        raise TypeError(sentence("on_cumulant.model", "a model of transformers", type(model).__name__, advice))
    try:
        if any(name != "cumulant" for _, name in before):
            model.set_attn_implementation("cumulant")  # pyright: ignore[reportCallIssue]
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@torch.no_grad()
def prefill(model: nn.Module, input_ids: Tensor, tokenizer: Any = None) -> Prefix:
    """Let a decoder read ``input_ids`` (T,), and keep what its heads hold and the queries that they had.

    The measure that a key head has read is Σ_j δ_(k_j, v_j) over tokens j < T; a head reads it with η at position t.

    >>> import transformers
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.LlamaConfig(vocab_size=9, num_key_value_heads=1, **sizes)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with on_cumulant(model):
    ...     prefix = prefill(model, torch.tensor([1, 2, 3]))
    >>> prefix.layers[0].queries.shape, prefix.layers[0].keys.shape
    (torch.Size([2, 3, 4]), torch.Size([1, 3, 4]))
    """
    model = require_decoder(model)
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 1 or len(input_ids) < 2:
        got = shape(input_ids) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        advice = "Give the tokens of one sequence."
        raise ValueError(sentence("prefill.input_ids", "at least two token ids (T,)", got, advice))
    calls, seen, streams = AttentionCalls(model), {}, {}
    later = torch.arange(len(input_ids) // 2, len(input_ids))
    start = time.perf_counter()
    with calls, _position_embeddings(model, seen), stream_norms(model, _attention_paths(model), later, streams):
        cache = DynamicCache(config=getattr(model, "config", None))
        output = model(input_ids=input_ids[None], past_key_values=cache, use_cache=True, **last_logits_only(model))
    seconds = time.perf_counter() - start
    layers = _layers(calls.by_name, output.past_key_values, seen, len(input_ids), rotary_frequencies(model))
    layers = tuple(layer._replace(stream=streams.get(layer.name)) for layer in layers)
    return Prefix(model, input_ids, layers, cache, output.logits[0, -1], tokenizer, seconds)


def rotary_frequencies(model: nn.Module) -> list[Tensor]:
    """Angles a token of the rotary embeddings of a model, each (r,)."""
    found = [getattr(module, "inv_freq", None) for module in model.modules()]
    return [angles for angles in found if isinstance(angles, Tensor) and angles.ndim == 1]


def last_logits_only(model: nn.Module) -> dict[str, int]:
    """What spares a model the logits of all tokens but the last, where it knows of that."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def require_decoder(model: nn.Module) -> nn.Module:
    """The model without its wrappers, if it is a decoder with a cache; else refused in words."""
    inner = without_wrappers(model)
    config = getattr(inner, "config", None)
    kind, where = type(inner).__name__, "prefill.model"
    if getattr(config, "is_encoder_decoder", False):
        advice = "Its cross-attention holds another sequence; use a decoder."
        raise ValueError(sentence(where, "a decoder", f"{kind}, an encoder and a decoder", advice))
    head = inner.get_output_embeddings() if is_transformers(inner) else None  # pyright: ignore[reportCallIssue]
    if head is None:
        advice = "Load it with AutoModelForCausalLM."
        raise ValueError(sentence(where, "a decoder with a language-model head", kind, advice))
    return inner


class AttentionCalls:
    """The attention calls of a model while inside, by the path of the module: one pass is expected."""

    def __init__(self, model: nn.Module):
        self.by_name: dict[str, AttentionMoments] = {}
        self._observer = None
        self._model = model

    def _add(self, call: AttentionMoments) -> None:
        self.by_name[call.name] = call

    def __enter__(self) -> AttentionCalls:
        self._observer = on_attention(self._model, self._add, statistics=())
        return self

    def __exit__(self, *error: object) -> None:
        if self._observer is not None:
            self._observer.close()


@contextmanager
def _position_embeddings(model: nn.Module, seen: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Cosines and sines that attention modules are called with, by the path of the module."""

    def hook_of(name: str):
        def hook(module, args, kwargs) -> None:
            given = kwargs.get("position_embeddings")
            if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(x, Tensor) for x in given):
                seen[name] = given[0], given[1]

        return hook

    with ExitStack() as stack:
        for name in _attention_paths(model):
            handle = model.get_submodule(name).register_forward_pre_hook(hook_of(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _attention_paths(model: nn.Module) -> list[str]:
    """Modules that know the number of their layer."""
    return [name for name, module in model.named_modules() if hasattr(module, "layer_idx")]


@contextmanager
def stream_norms(model: nn.Module, names: Iterable[str], at: Tensor, found: dict[str, float]) -> Iterator[None]:
    """Mean over tokens ``at`` (n,) of the squared norm of what the blocks of attention modules are called with, while
    inside, by the path of the module."""

    def hook_of(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states, _ = input_of(args, kwargs)
            if states is not None and states.ndim == 3:
                found[name] = states[0, at].double().square().sum(-1).mean().item()

        return hook

    with ExitStack() as stack:
        for name in names:
            block = block_of(model, name)
            if block is not None:
                module = model.get_submodule(block)
                stack.callback(module.register_forward_pre_hook(hook_of(name), with_kwargs=True).remove)
        yield


def _layers(
    calls: dict[str, AttentionMoments],
    cache: DynamicCache,
    seen: dict[str, tuple[Tensor, Tensor]],
    length: int,
    frequencies: Sequence[Tensor],
) -> tuple[LayerPrefix, ...]:
    found: list[LayerPrefix] = []
    rotations: dict[tuple[int, type], Rotation | None] = {}
    for name, call in calls.items():
        index = getattr(call.module, "layer_idx", None)
        if index is None or index >= len(cache.layers):
            advice = "Its attention is not that of a decoder with a cache."
            raise ValueError(sentence(f"prefill({name})", "a layer of the cache", repr(index), advice))
        layer = cache.layers[index]
        if getattr(layer, "is_sliding", False):
            continue
        _require_plain(name, call, layer, length)
        cos, sin = seen.get(name, (None, None))
        rotates = cos is not None or _has_rotation(call.module)
        key = id(cos), type(call.module)
        if cos is not None and sin is not None and key not in rotations:
            rotations[key] = read_rotation(call.module, cos, sin, frequencies)
        sinks = call.support.sink
        found.append(
            LayerPrefix(
                *(index, name, call.module, layer.keys[0], layer.values[0], call.scale * call.query[0]),
                rotation=rotations.get(key),
                rotates=rotates,
                sinks=None if sinks is None else torch.as_tensor(sinks).reshape(-1),
            )
        )
    if not found:
        advice = "Only layers that hold all tokens can be compressed."
        raise ValueError(sentence("prefill.model", "a layer that attends to all tokens", "none", advice))
    return tuple(sorted(found, key=lambda layer: layer.index))


def _has_rotation(module: nn.Module) -> bool:
    return any("rotary" in name.lower() for name, _ in module.named_modules() if name)


def _require_plain(name: str, call: AttentionMoments, layer: object, length: int) -> None:
    """Refuse layers whose heads read something else than the keys of their cache with an inner product."""
    where = f"prefill({name})"
    if not isinstance(layer, DynamicLayer):
        advice = "Other layers hold no keys and values of tokens."
        raise ValueError(sentence(where, "a cache of keys and values", type(layer).__name__, advice))
    if call.capped or call.support.log_weights is not None:
        got = "scores that are capped" if call.capped else "scores with a bias of their pairs"
        advice = "A cache of such a model is no measure that its queries read."
        raise ValueError(sentence(where, "scores that are inner products", got, advice))
    if layer.keys is None or layer.keys.shape[2] != length:
        held = 0 if layer.keys is None else layer.keys.shape[2]
        raise ValueError(sentence(where, f"{length} keys in its cache", held, "Use a model with a plain cache."))
