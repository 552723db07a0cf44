"""`cumulant compress` and `cumulant generate` in the terminal: a text becomes a small cache in a file, to read on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor
from transformers import TextStreamer

from cumulant.cache.fitted.named import method
from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.one_call import compress
from cumulant.checks import sentence
from cumulant.observatory.models.load import Loaded, load
from cumulant.observatory.text.corpus import plan
from cumulant.terminal import sentences

OPTIONS = {  # arguments of functions → options of the command line
    "load.name": "MODEL",
    "load.device": "--device",
    "load.dtype": "--dtype",
    "prefill.model": "MODEL",
    "compressor": "--method",
    "budget.keep": "--keep",
    "compress.keep": "--keep",
    "compress.bytes": "--bytes",
    "plan.sources": "--text",
    "allow pickle (allow_pickle=True)": "pass --allow-pickle",
}


class ModelOptions(NamedTuple):
    """How a model is loaded."""

    name: str
    device: str
    dtype: str | None
    allow_pickle: bool

    def load(self) -> Loaded:
        loaded = load(self.name, device=self.device, dtype=self.dtype, allow_pickle=self.allow_pickle)
        MeasureCache(loaded.model)  # refuses what has no such cache before anything is read
        loaded.model.set_attn_implementation("cumulant")  # pyright: ignore[reportCallIssue]
        return loaded


class CompressRequest(NamedTuple):
    """Options of `cumulant compress`."""

    model: ModelOptions
    text: str
    keep: float | None
    bytes: int | None
    method: str
    tokens: int | None
    out: Path
    force: bool


def compress_command(request: CompressRequest) -> None:
    """Read a text, hold it in few bytes, write the cache, and say what was done."""
    screen = Console()
    with sentences(Console(stderr=True), "nothing was written", OPTIONS):
        compressor = method(request.method)
        if request.out.exists() and not request.force:
            advice = "Pass --force to replace it, or give another --out."
            raise ValueError(sentence("--out", "a file that does not exist", str(request.out), advice))
        text = _text(request.text)
        loaded = request.model.load()
        ids = _tokens(loaded, text, request.tokens)
        start = time.perf_counter()
        keep = 0.25 if request.keep is None and request.bytes is None else request.keep
        options = {"keep": keep, "bytes": request.bytes, "method": compressor, "tokenizer": loaded.tokenizer}
        cache = compress(loaded.model, ids, **options)
        cache.save(request.out)
    seconds = time.perf_counter() - start
    held, full = cache.bytes(), cache.full_bytes()
    words = f"{len(ids)} tokens, {held / 1e6:.1f} of {full / 1e6:.1f} MB ({held / full:.3f}), by {compressor.name}"
    screen.print(f"{words}, in {seconds:.0f} s: [bold]{request.out}[/]", highlight=False, soft_wrap=True)
    on = f'cumulant generate {request.model.name} --cache {request.out} --prompt "…"'
    screen.print(f"Read on: {on}", highlight=False, markup=False, soft_wrap=True)
    audit = (
        f"cumulant audit {request.model.name} --method {compressor.name} --keep {held / full:.3g} --text {request.text}"
    )
    screen.print(f"How wrong is it: {audit}", highlight=False, markup=False, soft_wrap=True)


class GenerateRequest(NamedTuple):
    """Options of `cumulant generate`."""

    model: ModelOptions
    cache: Path
    prompt: str
    tokens: int


@torch.no_grad()
def generate_command(request: GenerateRequest) -> None:
    """Read a prompt after what a cache holds, and print what the model says then, the most likely token each time."""
    with sentences(Console(stderr=True), "nothing was written", OPTIONS):
        loaded = request.model.load()
        cache = MeasureCache.load(request.cache, loaded.model)
        prompt = loaded.tokenizer(request.prompt, add_special_tokens=False, return_tensors="pt").input_ids
        if not prompt.numel():
            raise ValueError(sentence("--prompt", "at least one token", repr(request.prompt), "Ask something."))
        seen = prompt.new_zeros(1, cache.get_seq_length())  # tokens that the cache stands for are not read again
        ids = torch.cat([seen, prompt], 1)
        model: Any = loaded.model
        ids = ids.to(model.device)
        streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        options = {"max_new_tokens": request.tokens, "do_sample": False, "streamer": streamer}
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)


def _text(source: str) -> str:
    """The whole of the first text of a source."""
    parts: list[str] = []
    for text in plan([source]).texts():
        parts.append(text.body)
        if not text.more:
            break
    return "".join(parts)


def _tokens(loaded: Loaded, text: str, most: int | None) -> Tensor:
    """(T,) the tokens of a text, or the first of them; refused where the model has no positions for so many."""
    ids = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0, :most]
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and len(ids) >= limit:
        advice = f"Hold the first of them: --tokens {limit - 256} leaves room to read on."
        raise ValueError(sentence("--text", f"fewer than {limit} tokens, the positions of the model", len(ids), advice))
    return ids.to(cast(torch.device, loaded.model.device))
