"""A cache in a file: tensors by layer in safetensors, with what identifies the model in the metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from cumulant.cache.adding import Spans
from cumulant.cache.entry_store import EntryStore
from cumulant.cache.layer import MeasureLayer
from cumulant.checks import sentence
from cumulant.files import replacing

FORMAT = "cumulant.MeasureCache 1"


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """All that a layer holds, by name."""
    if isinstance(layer, MeasureLayer):
        return layer.tensors()
    if layer.keys is None or layer.values is None or layer.keys.ndim < 4:
        return {}
    return {"keys": layer.keys, "values": layer.values}


def save(layers: Sequence[Any], path: Path, metadata: dict[str, str]) -> Path:
    """Write layers to ``path``, in one step."""
    named, states = {}, []
    for i, layer in enumerate(layers):
        state: dict[str, object] = {"seen": int(layer.get_seq_length())}
        if isinstance(layer, MeasureLayer) and layer.keys is not None and layer.keys.ndim == 4:
            assert layer.values is not None
            state |= {"first": layer.first, "keys": [*layer.keys.shape], "values": [*layer.values.shape]}
            state["dtype"] = str(layer.keys.dtype).removeprefix("torch.")
        states.append(state)
        named |= {f"layers.{i}.{name}": t.to("cpu", copy=True).contiguous() for name, t in tensors_of(layer).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        save_file(named, draft, metadata={**metadata, "format": FORMAT, "layers": json.dumps(states)})
    return path


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `save` wrote."""
    where, expected = f"MeasureCache.load({path})", "a file that MeasureCache.save wrote"
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
    except FileNotFoundError:
        raise FileNotFoundError(sentence(where, expected, "no file", "Check the path.")) from None
    except (safetensors.SafetensorError, OSError) as error:
        got = f"one that cannot be read ({error})"
        raise ValueError(sentence(where, expected, got, "Save the cache again.")) from error
    if metadata.get("format") != FORMAT:
        got = metadata.get("format", "tensors of something else")
        raise ValueError(sentence(where, expected, got, "Save the cache again, with this version."))
    return load_file(path), metadata


def fill(layers: list, named: dict[str, Tensor], metadata: dict[str, str], path: str, device: torch.device) -> None:
    """Let empty layers of the same model hold what was saved, on a device."""
    states = json.loads(metadata["layers"])
    if len(states) != len(layers):
        got = f"{len(states)} in {path}"
        raise ValueError(sentence("MeasureCache.load", f"{len(layers)} layers", got, "Use the model that made it."))
    for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): t.to(device) for name, t in named.items() if name.startswith(prefix)}
        if isinstance(layer, MeasureLayer) and "first" in state:
            dtype = getattr(torch, state["dtype"])
            for name in ("keys", "values"):
                own.setdefault(name, torch.empty(state[name], dtype=dtype, device=device))
            stored = {k.removeprefix("store."): t for k, t in own.items() if k.startswith("store.")}
            layer.store = EntryStore.from_tensors(stored) if stored else None
            layer.first = state["first"]
            if layer.asked is not None:
                asked = {k.removeprefix("asked."): t for k, t in own.items() if k.startswith("asked.")}
                layer.asked.fill(asked, state["seen"])
        if "keys" in own:
            layer.lazy_initialization(own["keys"], own["values"])
            layer.keys, layer.values = own["keys"], own["values"]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = state["seen"]


def growing(metadata: dict[str, str], compress: object | None, path: str) -> dict[str, Any]:
    """Arguments of a cache that compresses while it grows, as it was saved; empty where it does not."""
    where = "MeasureCache.load.compress"
    if "growing" not in metadata:
        if compress is not None:
            got, advice = f"{path}, which has none", "Compress it with queries: compress(model, cache=…, queries=…)."
            raise ValueError(sentence(where, "a cache that kept a sample of queries", got, advice))
        return {}
    settings = json.loads(metadata["growing"])
    method = settings.pop("compress") or compress
    if method is None:
        got, advice = f"none for {path}, whose method has no name", "Pass the one that it was made with."
        raise ValueError(sentence(where, "a method", got, advice))
    return settings | {"compress": compress or method}


def spans(text: str) -> Spans:
    """Spans as they are written in the metadata."""
    return tuple((int(first), int(end)) for first, end in json.loads(text))
