"""Options of `cumulant audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.terminal import importing

METHODS = (
    *("backtest", "stream", "h2o", "snapkv", "tova", "knorm", "keydiff", "expected", "adakv", "kvzip"),
    "d2o-like",
)


def audit(
    model: Annotated[
        str, typer.Argument(help="smollm2, gemma3, a directory, a GGUF file, or owner/name on the hub: a decoder.")
    ] = "smollm2",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; adakv:h2o is AdaKV with the scores of another, backtest+norepeat the backtest "
            "with another part. May be repeated.",
            show_default="h2o",
            autocompletion=lambda: list(METHODS),
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Several methods at once: stream,h2o,snapkv; or all.", show_default="none"),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Bytes held over bytes of the full cache, all layers together: 0.25, or 0.5,0.25. May be repeated.",
            show_default="0.25",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, directory or URI of text, JSONL or Parquet. May be repeated.",
            show_default="prose, code, help pages and licences of this Python",
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of JSONL or Parquet that holds the text.", show_default="found")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to put record, tables and page.", show_default="audited/MODEL")
    ] = None,
    prefix: Annotated[int, typer.Option(min=2, help="Tokens that are read and compressed.")] = 1024,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens that are read after them, with the full cache and each compressed one.")
    ] = 512,
    documents: Annotated[int, typer.Option(min=1, help="Documents: intervals are over them.")] = 8,
    every: Annotated[int, typer.Option(min=1, help="One token in so many has the queries of all heads measured.")] = 16,
    retrieval: Annotated[
        bool, typer.Option("--retrieval/--no-retrieval", help="Ask for facts hidden in the text.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, …: compute in it.", show_default="as stored")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another audit that is in --out.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights from pickle, which can run code.")
    ] = False,
) -> None:
    """Measure how wrong a compressed cache of a language model is, and where.

    Of every document a prefix is read and compressed, and what follows is read twice, with the full cache and with the
    compressed one: the error of every head, the change of every prediction, and which hidden facts are still found.

    Writes methods.parquet, heads.parquet, report.html, a page to look at, and the record, window by window: the same
    command goes on where it was stopped.
    """
    with importing("audit", "hf,report"):
        from cumulant.cache.audit.command import AuditRequest, audit_command
    names = [name for given in (*(method or ()), *([compare] if compare else ())) for name in given.split(",")]
    keeps = [part for given in keep or ["0.25"] for part in given.split(",")]
    audit_command(
        AuditRequest(
            model,
            tuple(dict.fromkeys(METHODS if names == ["all"] else names or ["h2o"])),
            tuple(keeps),
            tuple(text or ()),
            column,
            out,
            prefix,
            continuation,
            documents,
            every,
            retrieval,
            device,
            dtype,
            force,
            allow_pickle,
        )
    )
