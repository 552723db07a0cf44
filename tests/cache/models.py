"""Decoders of a few thousand random weights, batches with left padding, and caches of them."""

from __future__ import annotations

from typing import Any

import torch

from cumulant.cache import HeadEntries
from tests.observatory.tiny_models import hf, model_config, randomise

# absolute and rotary positions, grouped and single keys, windows, caps, sinks, norms of keys, partial rotation
KINDS = ("gpt2", "gpt_neox", "opt", "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "phi3", "olmo2")
KINDS += ("cohere2", "stablelm", "glm4", "smollm3", "granite")
COMPRESSIBLE = tuple(kind for kind in KINDS if kind != "mistral")  # every layer of it has a window
LENGTH = 14


def decoder(kind: str, dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2) -> Any:
    """A causal model with a full layer where its type has any, on ``attn_implementation="cumulant"``."""
    config = model_config(kind, heads, key_heads, 8, 2)
    if kind in ("gemma3_text", "cohere2"):
        config.layer_types = ["sliding_attention", "full_attention"]
    model = randomise(hf.AutoModelForCausalLM.from_config(config).eval(), seed=1).to(dtype)
    model.set_attn_implementation("cumulant")
    return model


def batch(padded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (2, LENGTH); with padding the second begins at its fifth token."""
    ids = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    return ids, mask


def run(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Logits of tokens begin … end − 1, with the cache of those before."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, begin:end]
    arguments = {"attention_mask": mask[:, :end], "position_ids": positions, "past_key_values": cache}
    with torch.no_grad():
        return model(ids[:, begin:end], **arguments).logits


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn_entries(heads: int, width: int, seed: int, dtype: torch.dtype) -> list[HeadEntries]:
    """Entries of every head, each of another number (one head has none), with masses and positions."""
    drawn = []
    for h in range(heads):
        m = (3 * h + seed) % 7
        mass = None if (h + seed) % 3 == 0 else normal(m, seed=seed + h)
        at = torch.arange(m) % 3 - 1
        keys, values = (normal(m, width, seed=10 * seed + h + k, dtype=dtype) for k in (100, 200))
        drawn.append(HeadEntries(keys, values, mass, at))
    return drawn


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))
