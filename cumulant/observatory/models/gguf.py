"""GGUF files as transformers models. Unpacking every weight takes many seconds, so the result is cached (`copies`)."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cumulant.observatory.models.copies import cache_directory, through_copy


def load_gguf(files: Sequence[Path]) -> tuple[Any, Any, tuple[str, ...]]:
    """Model, tokenizer and notes of a GGUF file, or of the parts of one in order; from the copy on disk if there is."""
    (model, tokenizer), notes = through_copy(files, lambda: _convert(files), _read)
    return model, tokenizer, notes


@contextlib.contextmanager
def _joined(files: Sequence[Path]) -> Iterator[Path]:
    """One file, while inside: the only one, or all parts in a row."""
    if len(files) == 1:
        yield files[0]
        return
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as room:
        whole = Path(room) / "whole.gguf"
        with whole.open("wb") as out:
            for file in files:
                out.write(file.read_bytes())
        yield whole


def _convert(files: Sequence[Path]) -> tuple[Any, Any]:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpack = getattr(transformers, "GgufConfig", None)  # newer versions keep weights packed by default
    options = {} if unpack is None else {"quantization_config": unpack(dequantize=True)}
    # its progress bar knows no switch
    with _joined(files) as file, contextlib.redirect_stderr(io.StringIO()):
        source = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source, **options)
        _add_special_tokens(tokenizer, file)
    return _plain(model), tokenizer


def _add_special_tokens(tokenizer: Any, file: Path) -> None:
    """Let a tokenizer put the beginning and the end around a text that its file asks for: transformers drops both.

    A model that was always trained with a first token is lost without it: Gemma 3 has ten times the perplexity.
    """
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    fields, backend = GGUFReader(str(file)).fields, getattr(tokenizer, "backend_tokenizer", None)
    wanted = {end: fields.get(f"tokenizer.ggml.add_{end}_token") for end in ("bos", "eos")}
    tokens = {end: getattr(tokenizer, f"{end}_token") for end, field in wanted.items() if field and field.contents()}
    tokens = {end: token for end, token in tokens.items() if token is not None}
    if not tokens or backend is None:
        return
    before, after = (f"{tokens[end]} " if end in tokens else "" for end in ("bos", "eos"))
    backend.post_processor = TemplateProcessing(
        single=f"{before}$A {after}".strip(),
        pair=f"{before}$A {after}{before}$B {after}".strip(),
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens.values()],
    )


def _plain(model):
    """The model without the traces of quantisation, with which it cannot be saved."""
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.config.architectures = [type(model).__name__]
    return model


def _read(copy: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(
        copy, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    return model, PreTrainedTokenizerFast.from_pretrained(copy, local_files_only=True)
