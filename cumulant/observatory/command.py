"""`cumulant observe`, `cumulant report` and `cumulant compare` in the terminal, and the tables that they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.observatory.models.load import PACKAGED_MODELS
from cumulant.observatory.record.manifest import PAGE
from cumulant.observatory.record.record import Record
from cumulant.observatory.report.directory import answers, read_nulls
from cumulant.observatory.report.tables import Tables
from cumulant.observatory.report.verdicts import Answer, Number
from cumulant.observatory.runs.ablate import AblatedHead, Ablation
from cumulant.observatory.runs.over_training import SETTINGS
from cumulant.observatory.runs.run import run, run_ablation, write_report
from cumulant.observatory.runs.settings import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MODEL,
    DEFAULT_STEP_TOKENS,
    ObservationSettings,
    Settings,
)
from cumulant.observatory.series_command import observe_checkpoints, rewrite_series
from cumulant.terminal import INTERRUPTED, sentences

TOKENS_HELP = f"Stop after so many tokens; 0: all; {DEFAULT_MAX_TOKENS:,}, or {DEFAULT_STEP_TOKENS:,} a step, if none."
OPTIONS = {  # arguments of functions → options of the command line
    "load.name": "MODEL",
    "load.device": "--device",
    "load.dtype": "--dtype",
    "plan.sources": "--text",
    "plan.column": "--column",
    "quantities": "--quantities",
    "allow pickle (allow_pickle=True)": "pass --allow-pickle",
}


def observe_command(
    model: Annotated[
        str, typer.Argument(help=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file, or owner/name on the hub.")
    ] = DEFAULT_MODEL,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, directory or URI of text, JSONL or Parquet; - for standard input; Python's own help if none."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of JSONL or Parquet that holds the text; found if none.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to put tables and page; observed/MODEL if none.")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="A directory of step-N or checkpoint-N: observe a model over its training, step by step."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=0, help=TOKENS_HELP),
    ] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a window; longer texts are cut.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows that run together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, …; as stored if none.")] = None,
    quantities: Annotated[
        list[str] | None, typer.Option(help="Names or groups (cheap, full, sampled); all if none.")
    ] = None,
    null: Annotated[list[str] | None, typer.Option(help="random, shuffled or none; both if none is named.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the sample of queries and of the nulls.")] = 0,
    ablation: Annotated[
        str | None,
        typer.Option("--ablate", help="gaussian or mixture: replace every head by that, and say which can go."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run in --out that was stopped or killed.")
    ] = False,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help="Text that is lost at most if a run is killed; 1/256 of it if none.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Observe on Ray: local or nothing for this machine, auto, or HOST:PORT of a cluster."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Models that read at once on Ray.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is already in --out.")] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load weights from pickle, which can run code."),
    ] = False,
) -> None:
    """Look into a transformer: the law of its heads and of its hidden states while it reads a text.

    Writes heads.parquet, layers.parquet, tokens.parquet, moments.safetensors, record.json and report.html, a page to
    look at. Numbers stand beside those of the same architecture at random initialisation and with shuffled keys.
    With --checkpoints it writes series.parquet, the records of all steps in series/, and a page with a slider of steps.
    """
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors, "what is finished is kept, and --resume goes on from it", OPTIONS):
        settings = Settings(
            ObservationSettings(
                model, device, dtype, allow_pickle, tuple(quantities or ()) or None, max_length, batch_size, seed
            ),
            sources=tuple(text or ()),
            column=column,
            out=out,
            checkpoints=checkpoints,
            max_tokens=max_tokens,
            nulls=tuple(null or ()),
            ablation=ablation,
            resume=resume,
            force=force,
            shard_bytes=shard_bytes,
            ray=ray,
            workers=workers,
        )
        if settings.checkpoints is not None:
            return observe_checkpoints(settings)
        observed = run(settings, errors)
    resumable = observed.corpus is not None and not observed.complete
    print_summary(screen, observed.tables, observed.nulls, settings.directory, resumable=resumable)
    if not observed.complete:
        raise typer.Exit(INTERRUPTED)
    if settings.ablation is not None:
        with sentences(errors, "no head was judged; the record is complete"):
            print_ablation(screen, run_ablation(settings, observed, errors))


def report_command(
    directory: Annotated[Path, typer.Argument(help="What `cumulant observe --out` wrote.")],
) -> None:
    """Write the tables and the page of a record again, from what its directory holds."""
    with sentences():
        if (directory / "series" / SETTINGS).is_file():
            return rewrite_series(directory)
        record = Record.load(directory)
        tables, nulls = write_report(record, directory, read_nulls(directory, record))
    print_summary(Console(), tables, nulls, directory)


def compare_command(
    directories: Annotated[list[Path], typer.Argument(help="Two or more directories of `cumulant observe`.")],
) -> None:
    """Put observations side by side: other models, other texts, other checkpoints."""
    with sentences():
        if len(directories) < 2:
            raise ValueError("compare: expected at least two directories, got one. Name another.")
        records = {str(d): Record.load(d) for d in directories}
        verdicts = {}
        for name, record in records.items():
            nulls = {null: Tables.of(other) for null, other in read_nulls(Path(name), record).items()}
            verdicts[name] = answers(Tables.of(record), nulls)
    print_comparison(Console(), verdicts)


def print_summary(
    screen: Console, tables: Tables, nulls: dict[str, Tables], directory: Path, *, resumable: bool = False
) -> None:
    """What was observed, what could not be read, and the verdicts."""
    meta, layers = tables.record.meta, tables.record.layers
    name, kind = escape(meta.model or "A model"), escape(meta.model_class or "of unknown class")
    tokens, windows, text = meta.tokens, meta.sequences, escape(meta.text or "text")
    screen.print(
        f"[bold]{name}[/] ({kind}): {len(layers)} attention modules, {len(tables.heads)} heads, "
        f"{tokens:,} tokens of {text} in {windows:,} windows.",
        highlight=False,
    )
    for note in meta.notes:
        screen.print(f"Note: {note}.", highlight=False, markup=False)
    if meta.unreadable:
        examples = "; ".join(f"{d['name']} ({d['reason']})" for d in meta.unreadable_documents[:3])
        more = ", …" if meta.unreadable > 3 else ""
        documents = "document" if meta.unreadable == 1 else "documents"
        screen.print(
            f"{meta.unreadable:,} {documents} could not be read: {examples}{more}.", highlight=False, markup=False
        )
    if resumable or not meta.complete:
        hint = " The same command with --resume goes on." if resumable else ""
        screen.print(f"[yellow]Interrupted: the record holds what was read until then.{hint}[/]")
    table = Table("question", "", "what was seen", show_lines=True)
    for verdict in answers(tables, nulls):
        table.add_row(verdict.question, f"[bold]{verdict.answer}[/]", verdict.words)
    screen.print(table)
    path = escape(str(directory))
    screen.print(f"Page: [bold]{path}/{PAGE}[/]   Tables: {path}/*.parquet", highlight=False)


def print_comparison(screen: Console, directories: dict[str, list[Answer]]) -> None:
    """The verdicts of several directories side by side.

    directories  name → its verdicts
    """
    table = Table("", *[escape(Path(name).name) for name in directories], title="The questions", title_justify="left")
    questions = dict.fromkeys(verdict.question for verdicts in directories.values() for verdict in verdicts)
    for question in questions:
        row = [next((v for v in verdicts if v.question == question), None) for verdicts in directories.values()]
        table.add_row(f"[bold]{question}[/]", *[verdict.answer if verdict else "–" for verdict in row])
        labels = dict.fromkeys(number.label for verdict in row if verdict for number in verdict.numbers)
        for label in labels:
            numbers = [
                next((number for number in verdict.numbers if number.label == label), None) if verdict else None
                for verdict in row
            ]
            table.add_row(f"  {label}", *map(_with_null, numbers))
    screen.print(table)


def _with_null(number: Number | None) -> str:
    if number is None or number.value is None:
        return "–"
    null = "" if number.null is None else f" (null {number.null:.3g})"
    return f"{number.value:.3g}{null}"


def print_ablation(screen: Console, ablation: Ablation) -> None:
    """Which heads can be replaced, by layer and together."""
    what = "relative change of perplexity" if ablation.measure == "perplexity" else "1 − cosine of embeddings"
    table = Table("layer", "can go", "least damage", "most damage", title=f"Heads replaced ({ablation.kind}): {what}")
    for layer in dict.fromkeys(row.layer for row in ablation.rows):
        heads = [row for row in ablation.rows if row.layer == layer]
        harmless = sum(row.damage < ablation.threshold for row in heads)
        ends = (min(heads, key=lambda row: row.damage), max(heads, key=lambda row: row.damage))
        table.add_row(str(layer), f"{harmless} of {len(heads)}", *[f"{r.damage:.2g} (head {r.head})" for r in ends])
    screen.print(table)
    perplexity = f", whose perplexity is {ablation.baseline:.4g}" if ablation.measure == "perplexity" else ""
    together, random = (_damage(ablation, value) for value in (ablation.all_at_once, ablation.control))
    screen.print(
        f"{len(ablation.can_go)} of {len(ablation.rows)} heads can go one at a time: replaced alone, each does less "
        f"than {ablation.threshold:g} to the model on {ablation.tokens:,} tokens{perplexity}. All of them replaced at "
        f"once do {together}; as many heads chosen at random do {random}.",
        highlight=False,
    )
    names = _head_names(ablation.together)
    screen.print(
        f"{len(ablation.together)} heads can go together, within {ablation.threshold:g}: {names}.", highlight=False
    )


def _damage(ablation: Ablation, value: float) -> str:
    """A change of perplexity with its factor, or a change of embeddings."""
    return f"{value:.2g} (perplexity × {1 + value:.3g})" if ablation.measure == "perplexity" else f"{value:.2g}"


def _head_names(heads: tuple[AblatedHead, ...]) -> str:
    layers = dict.fromkeys(row.layer for row in heads)
    parts = [f"layer {n} head {', '.join(str(r.head) for r in heads if r.layer == n)}" for n in layers]
    return "; ".join(parts) or "none"
