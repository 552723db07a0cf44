"""`cumulant observe`, `cumulant report` and `cumulant compare` in the terminal, and the tables that they print."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.observatory.record.manifest import PAGE
from cumulant.observatory.record.meta import notes_of
from cumulant.observatory.record.record import Record
from cumulant.observatory.record.tables import Tables
from cumulant.observatory.report.causes import CONFIRMED, judgements
from cumulant.observatory.report.directory import answers, read_answers, read_nulls, write_report
from cumulant.observatory.report.verdicts import Answer, Number
from cumulant.observatory.runs.ablate import AblatedHead, Ablation
from cumulant.observatory.runs.over_training import SETTINGS
from cumulant.observatory.runs.run import run, run_ablation
from cumulant.observatory.runs.settings import Settings
from cumulant.observatory.series_command import observe_checkpoints, rewrite_series
from cumulant.terminal import INTERRUPTED, sentences

OPTIONS = {  # arguments of functions → options of the command line
    "load.name": "MODEL",
    "load.device": "--device",
    "batches.max_length": "--max-length",
    "load.dtype": "--dtype",
    "plan.sources": "--text",
    "plan.column": "--column",
    "quantities": "--quantities",
    "allow pickle (allow_pickle=True)": "pass --allow-pickle",
    "plan.prompts": "--prompt",
    "plan.audio": "--audio",
    "plan.transcripts": "--transcript",
    "Sound is given as audio=...": "Sound is given as --audio",
    "a passage itself as prompts=['…']": 'a passage itself as --prompt "…"',
}


def observe_command(settings: Settings) -> None:
    """Observe, write tables and page, and print what was seen."""
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors, "what is finished is kept, and --resume goes on from it", OPTIONS):
        if settings.checkpoints is not None:
            return observe_checkpoints(settings)
        observed = run(settings, errors)
    resumable = observed.corpus is not None and not observed.complete
    print_summary(screen, observed.tables, observed.nulls, settings.directory, resumable=resumable)
    if not observed.complete:
        raise typer.Exit(INTERRUPTED)
    if observed.causes is not None:
        print_causes(screen, observed.causes)
    if settings.ablation is not None:
        with sentences(errors, "no head was judged; the record is complete"):
            print_ablation(screen, run_ablation(settings, observed, errors))


def report_command(directory: Path) -> None:
    """Write the tables and the page of a record again, and print what was seen."""
    with sentences():
        if (directory / "series" / SETTINGS).is_file():
            return rewrite_series(directory)
        record = Record.load(directory)
        tables, nulls = write_report(record, directory, read_nulls(directory, record))
    print_summary(Console(), tables, nulls, directory)


def compare_command(directories: list[Path]) -> None:
    """Print the verdicts of several records side by side."""
    with sentences():
        if len(directories) < 2:
            raise ValueError("compare: expected at least two directories, got one. Name another.")
        records = {str(d): Record.load(d) for d in directories}
        verdicts = {name: read_answers(Path(name), record) for name, record in records.items()}
    print_comparison(Console(), verdicts)


def print_summary(
    screen: Console, tables: Tables, nulls: dict[str, Tables], directory: Path, *, resumable: bool = False
) -> None:
    """What was observed, what could not be read, and the verdicts."""
    meta, layers = tables.record.meta, tables.record.modules
    name, kind = escape(meta.model or "A model"), escape(meta.model_class or "of unknown class")
    tokens, windows, text = meta.tokens, meta.sequences, escape(meta.text or "text")
    screen.print(
        f"[bold]{name}[/] ({kind}): {len(layers)} attention modules, {len(tables.heads)} heads, "
        f"{tokens:,} tokens of {text} in {windows:,} windows.",
        highlight=False,
    )
    for note in notes_of(meta):
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


def print_causes(screen: Console, causes: dict) -> None:
    """What the model does without the heads that stand out, a sentence each."""
    if causes["reason"] is not None:
        screen.print(f"Note: no head was removed. {causes['reason']}", highlight=False, markup=False)
        return
    judged = judgements(causes)
    table = Table("head", "type", "what happens without it", title="Heads that stand out", title_justify="left")
    for j in judged:
        table.add_row(f"L{j.layer}H{j.head}", j.kind, escape(j.words))
    screen.print(table)
    confirmed = sum(j.verdict == CONFIRMED for j in judged)
    screen.print(
        f"{confirmed} of {len(judged)} heads that stand out do what their type says, on {causes['tokens']:,} tokens; "
        "a larger --causes tells more exactly.",
        highlight=False,
    )


def _damage(ablation: Ablation, value: float) -> str:
    """A change of perplexity with its factor, or a change of embeddings."""
    return f"{value:.2g} (perplexity × {1 + value:.3g})" if ablation.measure == "perplexity" else f"{value:.2g}"


def _head_names(heads: tuple[AblatedHead, ...]) -> str:
    layers = dict.fromkeys(row.layer for row in heads)
    parts = [f"layer {n} head {', '.join(str(r.head) for r in heads if r.layer == n)}" for n in layers]
    return "; ".join(parts) or "none"
