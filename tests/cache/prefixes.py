"""Small decoders, and prefixes made by hand, whose scores can be worked out on paper."""

from typing import Any

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers", reason="install cumulant[hf] for caches")
hf.logging.set_verbosity_error()

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}

CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig"}


def decoder(kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A decoder of random weights, as large that its heads differ."""
    torch.manual_seed(3)
    config = getattr(hf, CONFIGURATIONS.get(kind, f"{kind}Config"))(
        **(GROUPED | {"pad_token_id": 0, "eos_token_id": 2} | changes)
    )
    model = getattr(hf, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    return model.to(dtype)


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 50, (length,), generator=torch.Generator().manual_seed(seed))


def made_prefix(keys: torch.Tensor, queries: torch.Tensor | None = None, values: torch.Tensor | None = None) -> Any:
    """A prefix of one layer from keys (key heads, T, d) and queries (heads, T, d)."""
    from cumulant.cache.prefix import LayerPrefix, Prefix

    values = keys if values is None else values
    queries = torch.zeros_like(keys) if queries is None else queries
    cache = hf.DynamicCache()
    cache.update(keys[None], values[None], 0)
    layer = LayerPrefix(0, "layer", nn.Identity(), keys, values, queries)
    return Prefix(nn.Identity(), torch.zeros(keys.shape[1], dtype=torch.int64), (layer,), cache, torch.zeros(1))


def characters() -> Any:
    """A tokenizer with a token for every character of ASCII."""
    tokenizers = pytest.importorskip("tokenizers")
    kinds = tokenizers.models.WordLevel({chr(i): i for i in range(128)}, "?")
    made = tokenizers.Tokenizer(kinds)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


def read_by(model: Any, tokenizer: Any = None) -> Any:
    """What `cumulant.observatory.load` would return."""
    from cumulant.observatory.models.load import Loaded

    return Loaded(model, characters() if tokenizer is None else tokenizer, "tiny", "made", "0")
