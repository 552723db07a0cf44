"""`cumulant observe`, `cumulant report` and `cumulant compare` in the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cumulant.checks import sentence
from cumulant.files import write, write_parquet
from cumulant.observatory.models.load import PACKAGED_MODELS, Loaded, load
from cumulant.observatory.record.manifest import ABLATION, PAGE, TABLES, writing
from cumulant.observatory.record.record import Record, claim_directory, null_places
from cumulant.observatory.report.directory import page_data, read_ablation, read_nulls, render, write_tables
from cumulant.observatory.runs.ablate import AblatedHead, Ablation, ablate
from cumulant.observatory.runs.nulls import chosen_nulls
from cumulant.observatory.runs.over_training import SETTINGS, TOKENS, dimension
from cumulant.observatory.runs.runner import (
    Cluster,
    Run,
    check_stream,
    forget,
    from_stream,
    null_tokens,
)
from cumulant.observatory.runs.shards import Job
from cumulant.observatory.series_command import Place, observe_checkpoints, rewrite_series
from cumulant.observatory.statistics.quantities import chosen
from cumulant.observatory.text.corpus import plan
from cumulant.terminal import INTERRUPTED, sentences

FEWEST = 16  # tokens that are worth reading
MOST = 20_000  # that are read unless others are asked for
HELP = "pydoc_data.topics, Python's own help"
OPTIONS = {  # what arguments of functions are called on the command line
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
    ] = "minilm",
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
        typer.Option(min=0, help=f"Stop after so many tokens; 0: all; {MOST:,}, or {TOKENS:,} a step, if none."),
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
    sources, place = text or [], out or Path("observed") / Path(model).name
    wanted = None if not quantities else tuple(quantities)
    job = Job(model, device, dtype, allow_pickle, wanted, max_length, batch_size, seed)
    with sentences(errors, "what is finished is kept, and --resume goes on from it", OPTIONS), ExitStack() as stack:
        chosen(wanted)
        names = chosen_nulls(null)
        max_tokens = (MOST if checkpoints is None else TOKENS) if max_tokens is None else max_tokens
        _check(ablation, max_tokens, resume, force, ray, workers)
        if checkpoints is not None:
            alone = {"MODEL": model != "minilm", "--null": bool(names and null), "--ablate": bool(ablation)}
            alone |= {"--ray": bool(ray), "--shard-bytes": bool(shard_bytes)}
            where = Place(out, resume, force)
            observe_checkpoints(checkpoints, sources, job, column, max_tokens, where, alone, ", ".join(sources) or HELP)
            return
        given = {
            "--ablate": ablation,
            "--resume": resume,
            "--ray": ray,
            "--column": column,
            "--shard-bytes": shard_bytes,
            "--null": null and names,
        }
        check_stream(sources, {option: bool(value) for option, value in given.items()})
        corpus = None if "-" in sources else plan(sources, column=column, shard_bytes=shard_bytes)
        if not resume:
            claim_directory(place, force)
        with errors.status(f"loading {escape(model)}"):
            loaded = load(model, device=device, dtype=dtype, allow_pickle=allow_pickle)
        most = max_tokens or None
        told = {
            "text": ", ".join(sources) or HELP,
            "command": shlex.join(["cumulant", *sys.argv[1:]]),
            "dimension": dimension(loaded.model),
        }
        found: dict[str, Record] = {}
        run = None
        if corpus is None:
            record = from_stream(errors, loaded, job, sources, most)
            record = replace(record, meta=record.meta | told)
            forget(place, None)
            record.save(place)
        else:
            cluster = Cluster(ray, workers) if ray else None
            run = stack.enter_context(Run(errors, loaded, corpus, cluster, resume, force))
            record = run.observed(run.open(job, most, place), told)
            for name in names if record.meta["complete"] else ():
                tokens = null_tokens(record, most)
                found[name] = run.observed(run.open(job._replace(null=name), tokens, null_places(place)[name]))
        with errors.status("writing tables and page"):
            _show(record, place, found)
        complete = all(r.meta["complete"] for r in (record, *found.values()))
        if run is not None and complete:
            run.clear()
    _summarise(screen, record, found, place, going_on=corpus is not None and not complete)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if ablation is not None and corpus is not None:
        with sentences(errors, "no head was judged; the record is complete"):
            _ablate(screen, errors, loaded, corpus.texts([]), ablation, seed, place)
            with writing(place, PAGE):
                render(record, place / PAGE, found, read_ablation(place))


def _show(record: Record, place: Path, nulls: dict[str, Record]) -> None:
    """Write the tables and the page of a record."""
    ablation = read_ablation(place)
    with writing(place, *TABLES, PAGE):
        write_tables(record, place, nulls)
        render(record, place / PAGE, nulls, ablation)


def report_command(
    directory: Annotated[Path, typer.Argument(help="What `cumulant observe --out` wrote.")],
) -> None:
    """Write the tables and the page of a record again, from what its directory holds."""
    with sentences():
        if (directory / "series" / SETTINGS).is_file():
            return rewrite_series(directory)
        record = Record.load(directory)
        found = read_nulls(directory, record)
        _show(record, directory, found)
    _summarise(Console(), record, found, directory)


def compare_command(
    directories: Annotated[list[Path], typer.Argument(help="Two or more directories of `cumulant observe`.")],
) -> None:
    """Put observations side by side: other models, other texts, other checkpoints."""
    screen = Console()
    with sentences():
        if len(directories) < 2:
            raise ValueError("compare: expected at least two directories, got one. Name another.")
        records = {str(d): Record.load(d) for d in directories}
        answers = {name: page_data(r, read_nulls(Path(name), r))["verdicts"] for name, r in records.items()}
    table = Table("", *[escape(Path(name).name) for name in records], title="The questions", title_justify="left")
    questions = list(dict.fromkeys(a["question"] for found in answers.values() for a in found))
    for question in questions:
        told = {name: next((a for a in found if a["question"] == question), None) for name, found in answers.items()}
        table.add_row(f"[bold]{question}[/]", *[a["answer"] if a else "–" for a in told.values()])
        labels = list(dict.fromkeys(n["label"] for a in told.values() if a for n in a["numbers"]))
        for label in labels:
            cells = []
            for a in told.values():
                number = next((n for n in a["numbers"] if n["label"] == label), None) if a else None
                cells.append(_figure(number))
            table.add_row(f"  {label}", *cells)
    screen.print(table)


def _figure(number: dict | None) -> str:
    if number is None or number["value"] is None:
        return "–"
    null = "" if number["null"] is None else f" (null {number['null']:.3g})"
    return f"{number['value']:.3g}{null}"


def _check(ablation: str | None, max_tokens: int, resume: bool, force: bool, ray: str | None, workers: int | None):
    """Refuse options that do not go together."""
    if ablation not in (None, "gaussian", "mixture"):
        raise ValueError(sentence("--ablate", "gaussian or mixture", repr(ablation), "Choose one of them."))
    if 0 < max_tokens < FEWEST:
        raise ValueError(sentence("--max-tokens", f"0 for everything, or at least {FEWEST}", max_tokens, "Raise it."))
    if resume and force:
        advice = "The one goes on with a run, the other starts anew."
        raise ValueError(sentence("--resume", "no --force beside it", "both", advice))
    if workers is not None and ray is None:
        raise ValueError(sentence("--workers", "--ray beside it", "none", "This process alone reads with one model."))


def _ablate(screen: Console, errors: Console, loaded: Loaded, texts, kind: str, seed: int, place: Path) -> None:
    """Replace every head, write ablation.parquet and ablation.json, and say which can go."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(f"{escape(loaded.name)}: replacing heads")
        found = ablate(
            loaded,
            texts,
            kind=kind,
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    marks = {"can_go": found.can_go, "together": found.together}
    rows = [row._asdict() | {name: row in heads for name, heads in marks.items()} for row in found.rows]
    told = {k: v for k, v in found._asdict().items() if k not in ("rows", "together")}
    told |= {"heads": len(rows), **{name: len(heads) for name, heads in marks.items()}}
    with writing(place, *ABLATION):
        write_parquet(rows, place / "ablation.parquet")
        write(place / "ablation.json", json.dumps(told | {"rows": rows}, indent=1) + "\n")
    _tell_ablation(screen, found)


def _tell_ablation(screen: Console, found: Ablation) -> None:
    what = "relative change of perplexity" if found.measure == "perplexity" else "1 − cosine of embeddings"
    table = Table("layer", "can go", "least damage", "most damage", title=f"Heads replaced ({found.kind}): {what}")
    for layer in dict.fromkeys(row.layer for row in found.rows):
        mine = [row for row in found.rows if row.layer == layer]
        gone = sum(row.damage < found.threshold for row in mine)
        ends = (min(mine, key=lambda row: row.damage), max(mine, key=lambda row: row.damage))
        table.add_row(str(layer), f"{gone} of {len(mine)}", *[f"{r.damage:.2g} (head {r.head})" for r in ends])
    screen.print(table)
    perplexity = f", whose perplexity is {found.baseline:.4g}" if found.measure == "perplexity" else ""
    screen.print(
        f"{len(found.can_go)} of {len(found.rows)} heads can go one at a time: replaced alone, each does less than "
        f"{found.threshold:g} to the model on {found.tokens:,} tokens{perplexity}. All of them replaced at once do "
        f"{_damage(found, found.all_at_once)}; as many heads chosen at random do {_damage(found, found.control)}.",
        highlight=False,
    )
    screen.print(
        f"{len(found.together)} heads can go together, within {found.threshold:g}: {_named(found.together)}.",
        highlight=False,
    )


def _damage(found: Ablation, value: float) -> str:
    """A large change of perplexity is better told as a factor."""
    return f"{value:.2g} (perplexity × {1 + value:.3g})" if found.measure == "perplexity" else f"{value:.2g}"


def _named(heads: tuple[AblatedHead, ...]) -> str:
    layers = dict.fromkeys(row.layer for row in heads)
    parts = [f"layer {n} head {', '.join(str(r.head) for r in heads if r.layer == n)}" for n in layers]
    return "; ".join(parts) or "none"


def _summarise(
    screen: Console, record: Record, nulls: dict[str, Record], place: Path, *, going_on: bool = False
) -> None:
    """What a person wants to know when the command ends."""
    data = page_data(record, nulls)
    meta = record.meta
    heads = sum(layer.heads for layer in record.layers)
    name, kind = escape(meta.get("model", "A model")), escape(meta.get("model_class", "of unknown class"))
    tokens, windows, text = meta.get("tokens", 0), meta.get("sequences", 0), escape(meta.get("text", "text"))
    screen.print(
        f"[bold]{name}[/] ({kind}): {len(record.layers)} attention modules, {heads} heads, "
        f"{tokens:,} tokens of {text} in {windows:,} windows.",
        highlight=False,
    )
    for note in meta.get("notes", []):
        screen.print(f"Note: {note}.", highlight=False, markup=False)
    if meta.get("spoiled"):
        shown = "; ".join(f"{d['name']} ({d['why']})" for d in meta.get("spoiled_documents", [])[:3])
        more = ", …" if meta["spoiled"] > 3 else ""
        documents = "document" if meta["spoiled"] == 1 else "documents"
        screen.print(
            f"{meta['spoiled']:,} {documents} could not be read: {shown}{more}.", highlight=False, markup=False
        )
    if going_on or not meta.get("complete", True):
        words = " The same command with --resume goes on." if going_on else ""
        screen.print(f"[yellow]Interrupted: the record holds what was read until then.{words}[/]")
    table = Table("question", "", "what was seen", show_lines=True)
    for answer in data["verdicts"]:
        table.add_row(answer["question"], f"[bold]{answer['answer']}[/]", answer["words"])
    screen.print(table)
    where = escape(str(place))
    screen.print(f"Page: [bold]{where}/{PAGE}[/]   Tables: {where}/*.parquet", highlight=False)
