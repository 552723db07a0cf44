"""A model as a user would have one: a small decoder with its tokenizer, in a directory."""

from pathlib import Path

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")


def save_own_model(directory: Path) -> None:
    """A Llama of two layers with random weights that reads bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads)).save_pretrained(directory)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
