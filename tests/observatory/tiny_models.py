"""Transformers of a few thousand random weights, one of each kind, for the tests of the observatory."""

from typing import Any

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


def make(kind: str, *, biases: bool = True, std: float = 0.3) -> Any:
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


def hooks_of(model: torch.nn.Module) -> int:
    """How many forward hooks the modules of a model have."""
    modules = model.modules()
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)  # pyright: ignore[reportPrivateUsage]


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


# Random transformers of any size, by the model type of transformers' configurations. What a family calls its sizes:

ENCODERS = ("bert", "roberta", "electra", "distilbert", "albert", "ernie", "esm", "nomic_bert", "modernbert")
DECODERS = ("gpt2", "gpt_neox", "opt", "biogpt")  # without grouped keys
GROUPED_DECODERS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3"),
    *("cohere", "cohere2", "starcoder2", "stablelm", "smollm3", "granite", "gpt_oss", "mixtral", "qwen3_moe", "olmoe"),
    *("glm", "glm4", "helium", "nemotron", "exaone4", "arcee", "apertus", "seed_oss", "doge", "vaultgemma", "eurobert"),
)
TWO_SIDED = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot")
VISION_MODELS = ("vit", "deit", "dinov2", "clip", "siglip")
AUDIO_MODELS = ("whisper",)
ON_THE_INTERFACE = (*ENCODERS, *DECODERS, *GROUPED_DECODERS, *TWO_SIDED, *VISION_MODELS, *AUDIO_MODELS)

OFF_THE_INTERFACE = (
    *("mpnet", "deberta", "deberta-v2", "gpt_neo", "gptj", "bloom", "falcon", "mpt", "xlm", "codegen", "roformer"),
    *("rembert", "megatron-bert", "xglm", "ibert", "rwkv"),
)
WITHOUT_ATTENTION = ("mamba", "fnet", "falcon_mamba")
PARTLY_ON_THE_INTERFACE = ("longt5", "minimax")

# what a type needs besides, or has under another name
EXTRA = {
    "electra": {"embedding_size": 12},
    "albert": {"embedding_size": 12},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 1},
    "gpt_neox": {"rotary_pct": 1.0},
    "phi": {"partial_rotary_factor": 1.0},
    "stablelm": {"partial_rotary_factor": 1.0},
    "nemotron": {"partial_rotary_factor": 1.0},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 2, "num_experts_per_tok": 1},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "olmo3": {"sliding_window": 5},
    "cohere2": {"sliding_window": 5},
    "mistral": {"sliding_window": 5},
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "gpt_neo": {"window_size": 4},
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1},
}
POSITIONS = 64


def transformer(kind: str, *, heads: int, key_heads: int, head_dim: int, layers: int, seed: int) -> Any:
    """A model of a type of transformers in evaluation mode, with weights that differ everywhere."""
    return randomise(hf.AutoModel.from_config(model_config(kind, heads, key_heads, head_dim, layers)).eval(), seed)


def randomise(model: Any, seed: int) -> Any:
    """The model with weights that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3, generator=generator)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data.abs_().add_(0.5)
    return model.requires_grad_(False)


def model_config(kind: str, heads: int, key_heads: int, head_dim: int, layers: int) -> Any:
    """The configuration of a type of transformers."""
    width = heads * head_dim
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = special | {"vocab_size": 50, "max_position_embeddings": POSITIONS}
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 32}
    image = sizes | {"image_size": 8, "patch_size": 4}
    each = {"layers": layers, "ffn_dim": 32, "attention_heads": heads}
    sides = {"d_model": width} | {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in each.items()}
    given = text | sizes | EXTRA.get(kind, {})
    if kind in (*GROUPED_DECODERS, "minimax"):
        given |= {"num_key_value_heads": key_heads, "head_dim": head_dim}
    elif kind == "distilbert":
        given = text | {"dim": width, "n_heads": heads, "n_layers": layers, "hidden_dim": 32}
    elif kind in ("gpt2", "gptj", "codegen"):
        given = special | {
            "vocab_size": 50,
            "n_positions": POSITIONS,
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
        }
        given |= {} if kind == "gpt2" else {"rotary_dim": head_dim}
    elif kind == "opt":
        given |= {"ffn_dim": 32, "word_embed_proj_dim": width}
    elif kind in ("t5", "mt5", "umt5", "longt5"):
        given = {
            "vocab_size": 50,
            "d_model": width,
            "d_kv": head_dim,
            "num_heads": heads,
            "num_layers": layers,
            "d_ff": 32,
        }
    elif kind in TWO_SIDED:
        given = text | sides | {"decoder_start_token_id": 1, "scale_embedding": False}
    elif kind == "whisper":
        audio = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": POSITIONS}
        given = special | {"vocab_size": 50, "decoder_start_token_id": 1} | sides | audio
    elif kind in ("clip", "siglip"):
        given = {"text_config": text | sizes, "vision_config": image}
        given |= {"projection_dim": 8} if kind == "clip" else {}
    elif kind in VISION_MODELS:
        given = image
    elif kind in ("mpt", "xlm"):
        names = {"mpt": ("d_model", "n_heads", "n_layers"), "xlm": ("emb_dim", "n_heads", "n_layers")}[kind]
        given = {"vocab_size": 50, "n_words": 50} | dict(zip(names, (width, heads, layers), strict=True))
    elif kind == "gpt_neo":
        given |= {"num_layers": layers, "num_heads": heads, "attention_types": [[["local"], layers]]}
    elif kind == "rwkv":
        given |= {"attention_hidden_size": width}
    elif kind == "bloom":
        given = {"vocab_size": 50, "hidden_size": width, "n_head": heads, "n_layer": layers}
    elif kind == "xglm":
        given = text | {"d_model": width, "ffn_dim": 32, "num_layers": layers, "attention_heads": heads}
    return hf.AutoConfig.for_model(kind, **given)


def letter_tokenizer() -> Any:
    """Every letter and digit is a token; the others are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<pad>", "<end>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789,"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def language_model() -> Any:
    """A decoder with its language-model head, two queries to a key."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    return model.requires_grad_(False)
