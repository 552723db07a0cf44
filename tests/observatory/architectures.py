"""Every architecture of transformers at a size of a few thousand weights: does `attach` record its attention?

A configuration is shrunk by `RULES`, names of sizes → small numbers, in all of its parts. What is then below 50 MB, can
be built and reads a dozen tokens, an image or half a second of sound is observed: docs/models.md has what became of it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cumulant.observatory import attach
from cumulant.observatory.record.recorder import NOT_RECORDED
from tests.observatory.tiny_models import EXTRA, hf

MAX_BYTES = 50_000_000
SECONDS = 60  # for one architecture
TOKENS = 12
WIDTH, HEADS, KEY_HEADS, LAYERS, VOCABULARY, POSITIONS = 32, 4, 2, 2, 64, 64
HEAD_DIM = WIDTH // HEADS

# names of sizes in configurations, the first pattern that fits decides; None: keep what is there
RULES: tuple[tuple[str, int | None], ...] = (
    (r".*(dropout|epsilon|_eps|_id|_ids|_std|_range|_theta|_factor|_coef|_alpha|_weight|_index)", None),
    (r"num_feat_extract_layers|conv_(stride|kernel|bias)|tdnn_.*|.*_stride|.*_kernel(_size)?", None),
    (r"conv_dim|conv_depthwise_.*|(.*_)?hidden_sizes|embed_dims|neck_.*_sizes", WIDTH),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"vocab_size(_or_config_json_file)?|.*_vocab_size|n_words|vocab_size_per_layer_input", VOCABULARY),
    (r"num_key_value_heads|.*_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|kv_heads", KEY_HEADS),
    (r"(num_|n_|.*_)?(attention_)?(attn_)?heads?|num_.*_heads|n_heads?|.*_attention_heads|.*_num_heads", HEADS),
    (r"head_dim|d_kv|d_head|attention_head_dim|.*_head_dim|kv_channels|head_size|v_head_dim", HEAD_DIM),
    (r"(q|kv)_lora_rank|.*lora_dim|.*_rank", HEAD_DIM),
    (r"(num_|n_)?(hidden_)?layers?|num_.*_layers|.*_layers|.*_num_layers|n_layer|.*_depth|depth|num_blocks", LAYERS),
    (r"(num_|n_)?(routed_|local_|shared_)?experts|.*_num_experts|num_experts_.*group|n_group|num_expert_group", 2),
    (r".*experts_per_tok|moe_topk|top_k_experts|moe_k|.*_top_k|topk_group|num_selected_experts|router_topk", 1),
    (r"max_.*position.*|n_positions|n_ctx|.*_position_embeddings|max_seq_len|.*_seq_length", POSITIONS),
    (r".*(intermediate|ffn|ff|feed_?forward|mlp|inner)(_hidden)?_?(size|dim|width)?(_mlp)?", WIDTH),
    (r"n_inner|d_ff|d_inner|width|d_model|.*_d_model|n_embd|dim|(.*_)?embed_dim|emb_dim|.*embedding_size", WIDTH),
    (r"(.*_)?hidden_size|(.*_)?(projection|hidden|embedding)_dim|.*_proj_dim|.*projection_size|.*output_dim", WIDTH),
    (r"image_size|img_size|input_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_size|num_mels", 16),
    (r"num_queries|num_query_tokens|num_latents|n_codebooks_for_training", 8),
    (r"sliding_window|window_size|attention_window|local_attention", 8),
)  # fmt: skip
# what the rules do not know
OVERRIDES: dict[str, dict[str, Any]] = {
    kind: extra for kind, extra in EXTRA.items() if kind not in ("esm", "gpt_neox", "phi", "stablelm", "nemotron")
}
OVERRIDES |= {
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 1, "pad_token_id": 0, "position_embedding_type": "absolute"},
    "gpt_neo": {"window_size": 4, "num_layers": LAYERS, "attention_types": [[["local"], LAYERS]]},
    "opt": {"word_embed_proj_dim": WIDTH, "ffn_dim": WIDTH},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen2_5_vl_vision": {"window_size": 32},
    "exaone4_5_vision": {"window_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 1, "n_routed_experts": 2},
    "llama4_text": {"attention_chunk_size": 4, "num_local_experts": 2, "use_qk_norm": False},
    "xlnet": {"d_head": HEAD_DIM},
}
KINDS_OF_LAYERS = ("layer_types", "layers_block_type")  # lists of one entry a layer
NOT_PASSED = ("rope_parameters", "rope_scaling", "torch_dtype", "dtype", "architectures", "transformers_version")
NOT_PASSED += ("ignore_keys_at_rope_validation", "per_layer_config")


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # if out of range


class ArchitectureOutcome(NamedTuple):
    """What became of one architecture.

    verdict  "works", "partly" if some of its attention is not recorded, "refused", or "not tried"
    modules, heads  recorded, of a tiny model
    states   whether its hidden states were observed too
    reason   one sentence, of what does not work
    """

    kind: str
    name: str
    verdict: str
    modules: int = 0
    heads: int = 0
    states: bool = False
    reason: str = ""


def architectures() -> dict[str, str]:
    """Model type → name of the class that `AutoModel` builds."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = {kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_MAPPING_NAMES.items()}
    return dict(sorted(names.items()))


def observe_architecture(kind: str) -> ArchitectureOutcome:
    """Build it small, let it read, and say what `attach` recorded; nothing that goes wrong is raised."""
    name = architectures()[kind]
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            with at_most(SECONDS):
                return _observe(kind, name)
        except NotTried as reason:
            return ArchitectureOutcome(kind, name, "not tried", reason=str(reason))
        except TimeUp:
            return ArchitectureOutcome(kind, name, "not tried", reason=f"it takes more than {SECONDS} s")
        except Exception as error:
            return ArchitectureOutcome(kind, name, "not tried", reason=_short(error))


def _observe(kind: str, name: str) -> ArchitectureOutcome:
    torch.manual_seed(0)
    config = _step("its configuration cannot be shrunk", shrunk_config, kind)
    with torch.device("meta"):
        size = _step("it cannot be built small", lambda: _bytes(hf.AutoModel.from_config(config)))
    if size > MAX_BYTES:
        raise NotTried(f"shrunk to {size / 1e6:,.0f} MB, above {MAX_BYTES / 1e6:.0f} MB")
    model = _step("it cannot be built small", lambda: hf.AutoModel.from_config(config).float().eval())
    given = inputs_of(model)
    with torch.no_grad():
        _step("it does not read the inputs that are made for it", lambda: model(**given))
        try:
            with attach(model) as recorder:
                model(**given)
            record = recorder.record()
        except ValueError as error:
            return ArchitectureOutcome(kind, name, "refused", reason=_refusal(str(error)))
    missing = [layer for layer, note in record.meta.layer_notes.items() if note == NOT_RECORDED]
    counts = (len(record.modules), sum(layer.heads for layer in record.modules), bool(record.hidden))
    if missing:
        reason = f"{len(missing)} attention modules do not go through the interface, such as {missing[0]}"
        return ArchitectureOutcome(kind, name, "partly", *counts, reason=reason)
    return ArchitectureOutcome(kind, name, "works", *counts)


def _refusal(sentence: str) -> str:
    """The sentence of `attach`, shorter where it is one of two that many have."""
    if found := re.search(r"which has none: (its layers are \w+)", sentence):
        return f"it has no attention: {found[1]}"
    if "AttentionInterface" in sentence:
        return "its attention is written out in its own code, not behind transformers' AttentionInterface"
    return _short(ValueError(sentence), type_too=False)


class NotTried(Exception):
    """Why an architecture could not be built or run, which says nothing about the observatory."""


class TimeUp(BaseException):
    pass


def _step(words: str, action, *arguments) -> Any:
    try:
        return action(*arguments)
    except Exception as error:
        raise NotTried(f"{words}: {_short(error)}") from error


def _short(error: Exception, *, type_too: bool = True) -> str:
    """The first sentence of an error, without what differs from machine to machine."""
    text = re.sub(r"(/[\w.+-]+){2,}", "…", " ".join(str(error).split()))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    limit = 110 if type_too else 260
    text = text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {text}" if type_too else text


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _bytes(model: torch.nn.Module) -> int:
    return 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))


# ---------------------------------------------------------------------- configurations


def shrunk_config(kind: str) -> Any:
    """The default configuration of a type with small sizes, in all of its parts."""
    default = hf.AutoConfig.for_model(kind)
    return type(default)(**shrunk(default) | OVERRIDES.get(kind, {}))


def shrunk(config: Any) -> dict[str, Any]:
    """Arguments for a configuration of the same type; parts that are configurations are dictionaries.

    >>> sizes = shrunk(hf.BertConfig())
    >>> sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_hidden_layers"]
    (32, 4, 2)
    """
    parts = getattr(type(config), "sub_configs", {})
    out: dict[str, Any] = {}
    depth = getattr(config, "num_hidden_layers", None) or 0
    chosen = _layers(config, depth)
    ungrouped = getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", None)
    for name, value in vars(config).items():
        if name in parts or hasattr(value, "to_dict"):
            if value is not None:
                part = value if hasattr(value, "to_dict") else None
                out[name] = {"model_type": part.model_type, **shrunk(part)} if part is not None else value
        elif not name.startswith("_") and name not in NOT_PASSED:
            by_layer = isinstance(value, list) and len(value) == depth and depth > len(chosen)
            out |= {name: [value[i] for i in chosen]} if by_layer and value else _small(name, value)
    if "head_dim" in out and out["head_dim"] is None:
        out["head_dim"] = HEAD_DIM
    if "num_hidden_layers" in out:
        out["num_hidden_layers"] = len(chosen)
    out |= _rotation(config)
    if ungrouped and "num_key_value_heads" in out:
        out["num_key_value_heads"] = out["num_attention_heads"]
    return out


def _layers(config: Any, depth: int) -> list[int]:
    """Layers to keep: the first of each kind, where a model has several kinds, else the first two."""
    kinds = next((k for name in KINDS_OF_LAYERS if len(k := getattr(config, name, None) or ()) == depth > 0), None)
    first = [] if kinds is None else sorted({kind: i for i, kind in reversed([*enumerate(kinds)])}.values())
    rest = [i for i in range(LAYERS) if i not in first]
    return sorted(first + rest[: max(0, LAYERS - len(first))]) if first else [*range(LAYERS)]


def _rotation(config: Any) -> dict[str, Any]:
    """Of positions: without lists of one entry a frequency, but for the three parts of those of images."""
    rotation = getattr(config, "rope_parameters", None)
    if rotation is None and "rope_parameters" in vars(config):
        rotation = {"rope_type": "default"}
    if not isinstance(rotation, dict) or not rotation or any(isinstance(value, dict) for value in rotation.values()):
        return {}
    code = inspect.getmodule(type(config)).__name__.replace(".configuration_", ".modeling_")
    out = {name: value for name, value in rotation.items() if not isinstance(value, list)}
    out["rope_theta"] = out.get("rope_theta") or 10_000.0
    if "mrope_section" in inspect.getsource(importlib.import_module(code)):
        half = round(HEAD_DIM * (out.get("partial_rotary_factor") or 1.0)) // 2
        out["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_parameters": out}


def _small(name: str, value: Any) -> dict[str, Any]:
    """What is passed for one entry: its rule if it is a size, nothing if it follows from others, else itself."""
    size = next((size for pattern, size in RULES if re.fullmatch(pattern, name)), None)
    if type(value) is int and re.fullmatch(r".*_(token_)?(id|index)", name) and value >= VOCABULARY:
        return {name: SPECIAL.get(name, VOCABULARY - 1)}
    if size is None or isinstance(value, bool) or value is None:
        return {name: value}
    if isinstance(value, int):
        return {name: min(value, size)}
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return {name: type(value)(1 if "depth" in name or "layers" in name else size for _ in value)}
    return {name: value}


# ---------------------------------------------------------------------- inputs

FEATURES = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")


def inputs_of(model: Any) -> dict[str, Any]:
    """What the model reads without an error: of sound, features come before frames or after them."""
    given = _inputs(model)
    if "input_features" in given:
        try:
            with torch.no_grad():
                model(**given)
        except Exception:
            return given | {"input_features": given["input_features"].mT.contiguous()}
    return given


def _inputs(model: Any) -> dict[str, Any]:
    """A dozen tokens, an image or half a second of sound, by what the model reads first."""
    generator = torch.Generator().manual_seed(0)
    parameters = inspect.signature(model.forward).parameters
    main = "input_ids" if "input_ids" in parameters else model.main_input_name
    ids = torch.randint(3, VOCABULARY - 4, (1, TOKENS), generator=generator)
    out: dict[str, Any] = {}
    if "grid_thw" in parameters and _needed(parameters["grid_thw"]):
        return _patches(model.config, next(iter(parameters)), generator)
    if main == "input_ids":
        out["input_ids"] = ids
    if main == "pixel_values" or ("pixel_values" in parameters and _needed(parameters["pixel_values"])) or _clip(model):
        side = _image_size(model.config)
        channels = _find(model.config, "num_channels") or 3
        out["pixel_values"] = torch.randn(1, channels, side, side, generator=generator)
    if main == "input_features":
        bins = next((n for name in FEATURES if (n := _find(model.config, name))), 16)
        frames = 2 * (_find(model.config, "max_source_positions") or 32)
        out["input_features"] = torch.randn(1, bins, frames, generator=generator)
    if main == "input_values":
        out["input_values"] = torch.randn(1, 8000, generator=generator)
    if "decoder_input_ids" in parameters and getattr(model.config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = ids[:, :8]
    if out and "use_cache" in parameters:
        out["use_cache"] = False
    if not out:
        raise NotTried(f"it reads {main}, for which no inputs are made")
    return out


def _patches(config: Any, name: str, generator: torch.Generator) -> dict[str, Any]:
    """An image of 4 × 4 patches, each a row, as the vision part of a model of images and text reads it."""
    channels = next((n for key in ("in_channels", "in_chans", "num_channels") if (n := _find(config, key))), 3)
    width = channels * (_find(config, "temporal_patch_size") or 1) * config.patch_size**2
    return {name: torch.randn(16, width, generator=generator), "grid_thw": torch.tensor([[1, 4, 4]])}


def _needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _clip(model: Any) -> bool:
    """Whether a model compares images with texts, and so needs both."""
    return hasattr(model, "logit_scale") and hasattr(model, "vision_model")


def _image_size(config: Any) -> int:
    size = _find(config, "image_size") or _find(config, "img_size") or 32
    return size[0] if isinstance(size, list | tuple) else int(size)


def _find(config: Any, name: str) -> Any:
    """An entry of a configuration or of its first part that has it."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    parts = [getattr(config, part, None) for part in getattr(type(config), "sub_configs", {})]
    return next((found for part in parts if part is not None and (found := _find(part, name)) is not None), None)
