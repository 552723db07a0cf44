"""`cumulant audit` in the terminal: options become arguments of `audit`; tables and page are written, and a summary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from cumulant.cache.audit.directory import PAGE, delete_audit, write_report
from cumulant.cache.audit.record import AuditRecord
from cumulant.cache.audit.run import audit
from cumulant.cache.audit.summary import MethodRow, method_rows, overhead, retrieval, seconds_of
from cumulant.cache.audit.texts import AuditText
from cumulant.checks import sentence
from cumulant.observatory.models.load import load
from cumulant.observatory.record.bootstrap import Interval
from cumulant.observatory.text.corpus import plan
from cumulant.terminal import sentences

OPTIONS = {  # arguments of functions → options of the command line
    "load.name": "MODEL",
    "load.device": "--device",
    "load.dtype": "--dtype",
    "prefill.model": "MODEL",
    "compressor": "--method",
    "audit.keep": "--keep",
    "budget.keep": "--keep",
    "audit.texts": "--text",
    "plan.sources": "--text",
    "plan.column": "--column",
    "retrieval.prefix": "--prefix",
    "audit.prefix + continuation": "--prefix + --continuation",
    "allow pickle (allow_pickle=True)": "pass --allow-pickle",
}


class AuditRequest(NamedTuple):
    """Options of the command; keeps are as they were written."""

    model: str
    methods: tuple[str, ...]
    keeps: tuple[str, ...]
    sources: tuple[str, ...]
    column: str | None
    out: Path | None
    prefix: int
    continuation: int
    documents: int
    every: int
    retrieval: bool
    device: str
    dtype: str | None
    force: bool
    allow_pickle: bool

    @property
    def directory(self) -> Path:
        return self.out or Path("audited") / self.model.rstrip("/").split("/")[-1]


def audit_command(request: AuditRequest) -> None:
    """Audit, write tables and page, and print what was seen."""
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors, "what is finished is kept, and the same command goes on from it", OPTIONS):
        keeps = [_keep(written) for written in request.keeps]
        if request.force:
            delete_audit(request.directory)
        loaded = load(request.model, device=request.device, dtype=request.dtype, allow_pickle=request.allow_pickle)
        with _bar(errors, request) as progress:
            record = audit(
                loaded,
                _documents(request),
                list(request.methods),
                keep=keeps,
                prefix=request.prefix,
                continuation=request.continuation,
                documents=request.documents,
                every=request.every,
                retrieval=request.retrieval,
                directory=request.directory,
                progress=progress,
            )
        write_report(record, request.directory)
    print_audit(screen, record, request.directory)


def _keep(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        advice = "Half of the bytes is 0.5."
        raise ValueError(sentence("--keep", "a share above 0 and at most 1", repr(written), advice)) from None


def _documents(request: AuditRequest) -> list[AuditText] | None:
    """Texts of the user that may be long enough, a few more than are asked for."""
    if not request.sources:
        return None
    least, found, name = request.prefix + request.continuation + 1, [], ""
    parts: list[str] = []
    for text in plan(list(request.sources), column=request.column).texts():
        name = name if parts else text.name
        parts.append(text.body)
        if text.more:
            continue
        body = "".join(parts)
        parts = []
        if len(body) >= least:
            found.append(AuditText(name, "text", body))
        if len(found) >= 4 * request.documents:
            break
    return found or [AuditText(name, "text", "")]


@contextmanager
def _bar(errors: Console, request: AuditRequest) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(escape(request.model), total=None)

        def progress(done: int, total: int, words: str) -> None:
            bar.update(task, completed=done, total=total, description=escape(words[:60]))

        yield progress


def print_audit(screen: Console, record: AuditRecord, directory: Path) -> None:
    """The table of methods, what the questions are without compression, the time, and the sentence."""
    rows, settings = method_rows(record), record.settings
    title = f"{settings.model}: {len(record.windows)} documents, {settings.prefix} tokens compressed"
    screen.print(f"{title}, {settings.continuation} after them", markup=False, highlight=False, soft_wrap=True)
    table = Table(
        *("method", "keep", "KL", "same", "missed", "error", "found", "s"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        table.add_row(*cells(row))
    screen.print(table)
    screen.print(
        "KL: nats a token. same: most likely tokens that stay. missed: attention on what is not held. error: |ô − o| "
        "/ |o| of heads. found: answer tokens that are right. s: seconds of the compressor for one prefix.",
        highlight=False,
    )
    full = retrieval([window.answers for window in record.windows])
    if full.value == full.value:
        screen.print(f"With the full cache {full.value:.0%} of what is asked is answered right.", highlight=False)
    spent = seconds_of(record.windows)
    passes = spent.get("full", 0.0) + spent.get("compressed", 0.0)
    screen.print(
        f"Passes over the continuation took {passes:.0f} s, statistics {overhead(record):.0%} of that more.",
        highlight=False,
    )
    screen.print(str(record), highlight=False, markup=False)
    path = escape(str(directory))
    screen.print(f"Page: [bold]{path}/{PAGE}[/]   Tables: {path}/*.parquet", highlight=False)


def cells(row: MethodRow) -> list[str]:
    """A row of the table, with intervals of what matters most where there are several documents; all others are in
    methods.parquet and on the page.

    >>> number = Interval(0.125, 0.1, 0.2, 0.0)
    >>> cells(MethodRow(("h2o", 0.5), 0.5, number, {}, *[number] * 8, {}, 1.25, 1))
    ['h2o', '0.500', '0.12 [0.1,0.2]', '0.125', '0.125', '0.125', '0.12 [0.1,0.2]', '1.2']
    """
    plain = (f"{interval.value:.3f}" for interval in (row.agreement, row.missed, row.error))
    return [row.method[0], f"{row.keep:.3f}", span(row.kl), *plain, span(row.retrieval), f"{row.seconds:.1f}"]


def span(interval: Interval) -> str:
    """A number and its interval; a dash for what is not known.

    >>> span(Interval(0.12345, 0.1, 0.2, 0.01)), span(Interval(float("nan"), 0.0, 0.0, 0.0))
    ('0.12 [0.1,0.2]', '–')
    """
    if interval.value != interval.value:
        return "–"
    ends = "" if interval.low != interval.low else f" [{interval.low:.2g},{interval.high:.2g}]"
    return f"{interval.value:.2g}{ends}"
