"""GGUF files as transformers models, cached on disk once converted.

Reading a GGUF file unpacks each weight and takes many seconds, so the result is cached as safetensors under
$CUMULANT_CACHE, or ~/.cache/cumulant, keyed by the file's sha256. A copy appears in one step; one whose files do not
have the sizes that contents.json lists is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from cumulant.files import new_directory

CONTENTS = "contents.json"  # names and sizes of the files of a copy, written last


def cache_directory() -> Path:
    """The directory of converted models."""
    return Path(os.environ.get("CUMULANT_CACHE") or "~/.cache/cumulant").expanduser()


def load_gguf(file: Path) -> tuple[Any, Any, tuple[str, ...]]:
    """Model, tokenizer and notes of a GGUF file, from the copy on disk if there is one."""
    from safetensors import SafetensorError

    with file.open("rb") as stream:
        key = f"{file.stem}-{hashlib.file_digest(stream, 'sha256').hexdigest()[:16]}"
    copy = cache_directory() / "models" / key
    if not is_complete(copy):
        model, tokenizer = _convert(file)
        try:
            _keep(copy, model, tokenizer)
        except (OSError, SafetensorError) as error:  # a full disk costs time on the next load, nothing else
            reason = getattr(error, "strerror", None) or str(error)
            return model, tokenizer, (f"the converted model could not be kept in {copy.parent} ({reason})",)
    return *_read(copy), ()


def is_complete(copy: Path) -> bool:
    """Whether a directory has the files that its contents name, in full."""
    try:
        sizes = json.loads((copy / CONTENTS).read_bytes())
        return bool(sizes) and all((copy / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _convert(file: Path) -> tuple[Any, Any]:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    unpack = getattr(transformers, "GgufConfig", None)  # newer versions keep weights packed by default
    options = {} if unpack is None else {"quantization_config": unpack(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar knows no switch
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source, **options)
    return _plain(model), tokenizer


def _plain(model):
    """The model without the traces of quantisation, with which it cannot be saved."""
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.config.architectures = [type(model).__name__]
    return model


def _keep(copy: Path, model, tokenizer) -> None:
    shutil.rmtree(copy, ignore_errors=True)  # incomplete
    try:
        with new_directory(copy) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
            (draft / CONTENTS).write_text(json.dumps(sizes, indent=1, sort_keys=True))
    except OSError:
        if not is_complete(copy):  # another process may have been faster
            raise


def _read(copy: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(copy, dtype="auto", use_safetensors=True, **options)
    return model, AutoTokenizer.from_pretrained(copy, **options)
