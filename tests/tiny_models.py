"""Transformers of a few thousand random weights, one of each kind, for the tests of the observatory."""

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
hf.logging.set_verbosity_error()

BASE = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40}
GROUPED = BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
VISION = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
VISION |= {"image_size": 8, "patch_size": 4}
SIDES = {"vocab_size": 50, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
SIDES |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
OPT = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 40}
OPT |= {"max_position_embeddings": 40, "word_embed_proj_dim": 24, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
GPT2 = {
    "vocab_size": 50,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHISPER = SIDES | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

MAKERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**BASE, num_attention_heads=3)),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(**GPT2)),
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)),
    "t5": lambda: hf.T5Model(hf.T5Config(vocab_size=50, d_model=24, d_kv=6, num_layers=2, num_heads=4, d_ff=40)),
    "gemma2": lambda: hf.Gemma2Model(hf.Gemma2Config(**GROUPED, attn_logit_softcapping=None)),
    "gemma2_capped": lambda: hf.Gemma2Model(hf.Gemma2Config(**GROUPED, attn_logit_softcapping=5.0)),
    "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**GROUPED)),
    "olmo2": lambda: hf.Olmo2Model(hf.Olmo2Config(**GROUPED, pad_token_id=0, eos_token_id=2)),
    "gptoss": lambda: hf.GptOssModel(hf.GptOssConfig(**GROUPED, **EXPERTS)),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**VISION)),
    "whisper": lambda: hf.WhisperModel(hf.WhisperConfig(**WHISPER)),
    "opt": lambda: hf.OPTModel(hf.OPTConfig(**OPT, do_layer_norm_before=True)),
    "opt_post": lambda: hf.OPTModel(hf.OPTConfig(**OPT, do_layer_norm_before=False)),
    "bart": lambda: hf.BartModel(hf.BartConfig(**SIDES, max_position_embeddings=40)),
    "mbart": lambda: hf.MBartModel(hf.MBartConfig(**SIDES, max_position_embeddings=40)),
    "neox": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**BASE, num_attention_heads=3)),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**BASE, num_attention_heads=3, embedding_size=12)),
}


def make(kind: str, *, biases: bool = True, std: float = 0.3) -> torch.nn.Module:
    """A model in evaluation mode with weights that differ everywhere, norm gains included."""
    torch.manual_seed(sum(map(ord, kind)))
    model = MAKERS[kind]().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, std=std)
        if not biases and name.endswith("bias"):
            parameter.data.zero_()
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data.abs_().add_(0.5)
    return model.requires_grad_(False)


def inputs(kind: str, *, batch: int = 3, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (batch, length), generator=generator)
    if kind == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    if kind == "whisper":
        return {"input_features": torch.randn(batch, 8, 20, generator=generator), "decoder_input_ids": ids}
    if kind in ("t5", "bart", "mbart"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, : length - 2]}
    return {"input_ids": ids}
