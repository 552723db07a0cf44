"""Options of `cumulant observe`, `cumulant report` and `cumulant compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.observatory.models.packaged import PACKAGED_MODELS
from cumulant.observatory.runs.defaults import (
    DEFAULT_CAUSES_TOKENS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MODEL,
    DEFAULT_STEP_TOKENS,
    DEFAULT_TEXT,
)
from cumulant.terminal import importing, sentences

EXTRAS = "hf,report"
MAX_TOKENS = f"{DEFAULT_MAX_TOKENS:,}, or {DEFAULT_STEP_TOKENS:,} at each step of --checkpoints"


def observe(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file, or owner/name on the hub.",
            autocompletion=lambda: list(PACKAGED_MODELS),
        ),
    ] = DEFAULT_MODEL,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, directory or URI of text, JSONL or Parquet; - for standard input. May be repeated.",
            show_default=DEFAULT_TEXT,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help='A passage to read, instead of --text: --prompt "To be or not to be". May be repeated.',
            show_default="none",
        ),
    ] = None,
    audio: Annotated[
        list[str] | None,
        typer.Option(
            help="A WAV file, or a directory of them, for a model that reads speech (whisper). May be repeated.",
            show_default="none",
        ),
    ] = None,
    transcript: Annotated[
        list[str] | None,
        typer.Option(
            help="What is said in each --audio, in their order.",
            show_default="the model writes it",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The column of JSONL or Parquet that holds the text.", show_default="found"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to put tables and page.", show_default="observed/MODEL")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="A directory of step-N or checkpoint-N: observe a model over its training, step by step.",
            show_default="none",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Stop after so many tokens; 0: all.", show_default=MAX_TOKENS)
    ] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a window; longer texts are cut.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows that run together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, …: compute in it.", show_default="as stored")
    ] = None,
    quantities: Annotated[
        list[str] | None,
        typer.Option(
            help="Names or groups: cheap, full, targets, sampled, depth. May be repeated.", show_default="all"
        ),
    ] = None,
    null: Annotated[
        list[str] | None,
        typer.Option(
            help="What numbers are without learning or content: random, shuffled, or none of them.",
            show_default="random and shuffled",
            autocompletion=lambda: ["random", "shuffled", "none"],
        ),
    ] = None,
    exact_depth: Annotated[
        bool,
        typer.Option(
            "--exact-depth",
            help="Take every token for the logit lens and for what heads add to the stream, not a sample. Slow.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the sample of queries and of the nulls.")] = 0,
    ablation: Annotated[
        str | None,
        typer.Option(
            "--ablate",
            help="gaussian or mixture: replace every head by that, and say which can go.",
            show_default="replace none",
            autocompletion=lambda: ["gaussian", "mixture"],
        ),
    ] = None,
    causes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens on which the ten heads that stand out most are removed, to see what the model loses; 0: none.",
            show_default=f"{DEFAULT_CAUSES_TOKENS}",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run in --out that was stopped or killed.")
    ] = False,
    shard_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Text that is lost at most if a run is killed.", show_default="1/256 of it"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Observe on Ray: local or nothing for this machine, auto, or HOST:PORT of a cluster.",
            show_default="without Ray",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Models that read at once on Ray.", show_default="as many as there is room for"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is already in --out.")] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load weights from pickle, which can run code."),
    ] = False,
) -> None:
    """Look into a transformer: statistics of its heads and of its hidden states while it reads or hears.

    Writes heads.parquet, layers.parquet, tokens.parquet, causes.parquet, moments.safetensors, record.json and
    report.html, a page to look at. Numbers stand beside those of the same architecture at random initialisation and
    with shuffled keys; heads that stand out are removed to see what the model loses. With --checkpoints it writes
    series.parquet, the records of all steps in series/, and a page with a slider of steps.
    """
    with importing("observe", EXTRAS):
        from cumulant.observatory.command import OPTIONS, observe_command
        from cumulant.observatory.runs.settings import ObservationSettings, Settings
    with sentences(options=OPTIONS):
        settings = Settings(
            ObservationSettings(
                *(model, device, dtype, allow_pickle, tuple(quantities or ()) or None, max_length, batch_size, seed),
                exact_depth=exact_depth,
            ),
            sources=tuple(text or ()),
            prompts=tuple(prompt or ()),
            audio=tuple(audio or ()),
            transcripts=tuple(transcript or ()),
            column=column,
            out=out,
            checkpoints=checkpoints,
            max_tokens=max_tokens,
            nulls=tuple(null or ()),
            ablation=ablation,
            causes=causes,
            resume=resume,
            force=force,
            shard_bytes=shard_bytes,
            ray=ray,
            workers=workers,
        )
    observe_command(settings)


def report(
    directory: Annotated[Path, typer.Argument(help="What `cumulant observe`, `render` or `Record.save` wrote.")],
) -> None:
    """Write the tables and the page of a record again, from what its directory holds."""
    with importing("report", EXTRAS):
        from cumulant.observatory.command import report_command
    report_command(directory)


def compare(
    directories: Annotated[list[Path], typer.Argument(help="Two or more directories of `cumulant observe`.")],
) -> None:
    """Put observations side by side: other models, other texts, other checkpoints."""
    with importing("compare", EXTRAS):
        from cumulant.observatory.command import compare_command
    compare_command(directories)
