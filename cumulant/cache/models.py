"""Which models a `MeasureCache` is for, the layers it has for one, and by what a saved cache recognises its model."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from cumulant.cache.layer import MeasureLayer
from cumulant.checks import sentence
from cumulant.nn.wrappers import without_wrappers

# what a configuration says besides the shape of the model
IRRELEVANT = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict", "id2label"}
IRRELEVANT |= {"label2id", "problem_type", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"}
IRRELEVANT |= {"pad_token_id", "bos_token_id", "eos_token_id", "attn_implementation", "tie_word_embeddings"}
SAMPLED = 16  # numbers of each weight that are compared
WHERE, EXPECTED = "MeasureCache.model", "a decoder of transformers, or its configuration"


def decoder_config(model: object) -> PreTrainedConfig:
    """The configuration of the decoder of a model, or of a configuration; a sentence where it cannot be cached."""
    inner: Any = without_wrappers(model) if isinstance(model, nn.Module) else model
    config = getattr(inner, "config", inner)
    if not isinstance(config, PreTrainedConfig):
        advice = "Pass the model that will use the cache, or model.config."
        raise TypeError(sentence(WHERE, EXPECTED, f"a {type(model).__name__}", advice))
    kind = config.model_type
    if config.is_encoder_decoder:
        advice = "Its cross-attention reads another sequence; use transformers' EncoderDecoderCache."
        raise ValueError(sentence(WHERE, EXPECTED, f"the encoder-decoder {kind!r}", advice))
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        got = f"{kind!r} with latent attention (MLA), whose cache has latents in place of keys and values"
        raise ValueError(sentence(WHERE, EXPECTED, got, "Use transformers' DynamicCache."))
    can_set = getattr(inner, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        got = f"{type(inner).__name__}, whose attention is written out in its own code"
        advice = "Use a model that calls attention through transformers' AttentionInterface."
        raise ValueError(sentence(WHERE, EXPECTED, got, advice))
    return config


def layers_for(model: object, start: int) -> list[Any]:
    """The layers that transformers' DynamicCache has for a model, those with full attention as `MeasureLayer`."""
    config = decoder_config(model)
    limit, layers = position_limit(config), []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            got = f"{config.model_type!r} with {type(layer).__name__}"
            advice = "It holds states that are no measure of keys; use transformers' DynamicCache."
            raise ValueError(sentence(WHERE, "layers that hold keys and values of tokens", got, advice))
        if start and type(layer) is DynamicSlidingWindowLayer:
            advice = "A window at a later start would lack its tokens."
            raise ValueError(sentence("MeasureCache.start", "0 for a model with sliding windows", start, advice))
        layers.append(MeasureLayer(start, limit) if type(layer) is DynamicLayer else layer)
    return layers


def taken_over(cache: object, layers: list) -> None:
    """Let layers hold the tensors of a DynamicCache of the same model."""
    where, expected = "MeasureCache.from_cache", "a DynamicCache of the same model"
    if type(cache) is not DynamicCache:
        got = f"a {type(cache).__name__}"
        known = "Static, quantized and encoder-decoder caches hold something else than the keys of the tokens seen"
        advice = f"{known}; run the model with past_key_values=MeasureCache(model)."
        raise TypeError(sentence(where, expected, got, advice))
    assert isinstance(cache, Cache)
    kinds = [DynamicLayer if isinstance(layer, MeasureLayer) else type(layer) for layer in layers]
    if [type(layer) for layer in cache.layers] != kinds:
        got = f"one with {len(cache.layers)} layers ({', '.join(sorted({type(x).__name__ for x in cache.layers}))})"
        advice = "Make it by DynamicCache(config=model.config), or let the model make it."
        raise ValueError(sentence(where, expected, got, advice))
    given: list[Any] = cache.layers
    for own, theirs in zip(layers, given, strict=True):
        if theirs.is_initialized:
            own.lazy_initialization(theirs.keys, theirs.values)
            own.keys, own.values = theirs.keys, theirs.values
            if isinstance(own, DynamicSlidingWindowLayer):
                own.cumulative_length = theirs.cumulative_length


def position_limit(config: PreTrainedConfig) -> int | None:
    """How many tokens the positions of a model reach; None: any number, or not known."""
    if "dynamic" in json.dumps(getattr(config, "rope_parameters", None) or {}, default=str):
        return None  # the rotation adapts itself to the length
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


class ModelIdentity(NamedTuple):
    """By what a model is recognised.

    dtype    of its weights, as text; empty where it is not known
    config   hash of what its configuration says of its shape and positions
    weights  hash of some numbers of every weight; empty where only the configuration is known
    kind     its type, for messages
    """

    dtype: str
    config: str
    weights: str
    kind: str

    @classmethod
    def of(cls, model: object) -> ModelIdentity:
        config = decoder_config(model)
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None)
        return cls("" if dtype is None else str(dtype), _config_hash(config), _weights_hash(model), config.model_type)

    def metadata(self) -> dict[str, str]:
        return dict(self._asdict())

    def require_equal(self, other: dict[str, str], source: str, where: str = "MeasureCache.load") -> None:
        """Refuse what another model or dtype made; what one side does not know is not compared."""
        advice = "A cache is of use to the model that made it, in the same dtype."
        for name, mine in self._asdict().items():
            theirs = other[name]
            if mine and theirs and mine != theirs:
                expected, got = f"a cache of this {self.kind!r}", f"{source}, made by another {other['kind']!r}"
                if name == "dtype":
                    expected, got = f"a cache in {mine}", f"{source} in {theirs}"
                raise ValueError(sentence(where, expected, got, advice))


def _config_hash(config: PreTrainedConfig) -> str:
    relevant = {k: v for k, v in config.to_dict().items() if k not in IRRELEVANT and not k.startswith("_")}
    text = json.dumps(relevant, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_hash(model: object) -> str:
    if not isinstance(model, nn.Module):
        return ""
    inner = without_wrappers(model)
    backbone = getattr(inner, "base_model", inner)  # the same with and without a head
    digest = hashlib.sha256()
    for parameter in backbone.parameters():
        flat = parameter.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLED)
        digest.update(flat[::step][:SAMPLED].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:16]
