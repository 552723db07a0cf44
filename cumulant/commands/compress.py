"""Options of `cumulant compress` and `cumulant generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing

Model = Annotated[
    str, typer.Argument(help="smollm2, gemma3, a directory, a GGUF file, or owner/name on the hub: a decoder.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, …: compute in it.", show_default="as stored")]
Pickle = Annotated[bool, typer.Option("--allow-pickle", help="Load weights from pickle, which can run code.")]


def compress(
    text: Annotated[str, typer.Option(help="A file or URI of text: the first text in it is read.")],
    out: Annotated[Path, typer.Option(help="The file of the cache.")] = Path("cache.safetensors"),
    model: Model = "smollm2",
    keep: Annotated[
        float | None,
        typer.Option(help="Bytes held over bytes of the full cache, all layers together.", show_default="0.25"),
    ] = None,
    bytes: Annotated[
        int | None, typer.Option(help="Bytes that may be held, in place of --keep.", show_default="by --keep")
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="backtest, backtest+norepeat (a pass less, finds less of what is hidden), or a baseline."),
    ] = "backtest",
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Hold the first so many tokens.", show_default="all")
    ] = None,
    device: Device = "cpu",
    dtype: DType = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file that is there.")] = False,
    allow_pickle: Pickle = False,
) -> None:
    """Let a language model read a text, and keep what it read in a quarter of the bytes, or fewer.

    Writes a file that `cumulant generate` and `cumulant.cache.MeasureCache.load` read on from. The backtest gives every
    head the entries that earlier parts of the text asked it for; `cumulant audit` says what it costs.
    """
    with importing("compress", "hf,report"):
        from cumulant.cache.command import CompressRequest, ModelOptions, compress_command
    loading = ModelOptions(model, device, dtype, allow_pickle)
    compress_command(CompressRequest(loading, text, keep, bytes, method, tokens, out, force))


def generate(
    prompt: Annotated[str, typer.Option(help="What is read after the text, as it stands.")],
    cache: Annotated[Path, typer.Option(help="A file of `cumulant compress`.")] = Path("cache.safetensors"),
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to say, at most.")] = 64,
    device: Device = "cpu",
    dtype: DType = None,
    allow_pickle: Pickle = False,
) -> None:
    """Read a prompt after what a compressed cache holds, and print what the model says: the most likely tokens."""
    with importing("generate", "hf,report"):
        from cumulant.cache.command import GenerateRequest, ModelOptions, generate_command
    generate_command(GenerateRequest(ModelOptions(model, device, dtype, allow_pickle), cache, prompt, tokens))
