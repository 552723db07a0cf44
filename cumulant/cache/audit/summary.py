"""Numbers of an audit with their intervals: rows of its table, heads by damage, and one sentence.

Intervals are of documents drawn again with replacement; a number is a ratio of sums over documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.audit.head_errors import HeadErrors
from cumulant.cache.audit.record import AuditRecord
from cumulant.cache.audit.result import Answers, Method, MethodResult, WindowResult, merged_heads
from cumulant.cache.audit.retrieval import TASKS
from cumulant.cache.audit.token_errors import horizons
from cumulant.observatory.record.bootstrap import Interval, draw_counts

REPLICATES = 1000


class MethodRow(NamedTuple):
    """A method at a budget, over all documents.

    keep        share of bytes that is held, measured
    kl          nats a token, over the continuation; kl_at: horizon → over its first tokens
    nll         nats that the text costs more than with the full cache
    agreement   share of tokens whose most likely next token stays the same
    gap         mean |ΔG| of a head and query
    missed      attention on tokens that are not held
    error       |ô − o| of heads in the root mean square, over that of |o|
    written     Σ_h |W_O^h (ô_h − o_h)|² over the squared norm of the residual stream: heads one by one
    joint       |Σ_h W_O^h (ô_h − o_h)|² over the same: heads of a layer together
    retrieval   share of answer tokens that are right; tasks: the same of each task; NaN where nothing was asked
    seconds     of the compressor for one prefix
    lowest      documents on which no other method at this budget has less KL
    """

    method: Method
    keep: float
    kl: Interval
    kl_at: dict[int, Interval]
    nll: Interval
    agreement: Interval
    gap: Interval
    missed: Interval
    error: Interval
    written: Interval
    joint: Interval
    retrieval: Interval
    tasks: dict[str, Interval]
    seconds: float
    lowest: int


class DamagedHead(NamedTuple):
    """A head and what a compressed cache does to it.

    rank     1: the head whose error, as written to the residual stream, is largest for the size of the stream
    damage   |W_O (ô − o)|² / |x|², means over queries
    gap      mean ΔG; negative: the compressed cache has too little mass
    size     mean |ΔG|
    missed   attention on tokens that are not held
    on_prefix  attention on the prefix
    error    |ô − o| over |o|, root mean squares
    """

    rank: int
    layer: int
    head: int
    damage: float
    gap: float
    size: float
    missed: float
    on_prefix: float
    error: float


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, root: bool = False) -> Interval:
    """Σ a_d / Σ b_d over documents d, or its square root, with the middle 95 % of what other draws of documents give.

    >>> ratio([1.0, 3.0], [1.0, 1.0])[:3]
    (2.0, 1.0, 3.0)
    """
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (numerators, denominators))
    value = _ratio(a.sum(), b.sum(), root)
    if len(a) < 2:
        return Interval(float(value), torch.nan, torch.nan, torch.nan)
    counts = draw_counts(len(a), REPLICATES).double()
    drawn = _ratio(counts @ a, counts @ b, root)
    drawn = drawn[~drawn.isnan()]
    if len(drawn) < 2:
        return Interval(float(value), torch.nan, torch.nan, torch.nan)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(value), low, high, float(drawn.std()))


def _ratio(a: Tensor, b: Tensor, root: bool) -> Tensor:
    found = torch.where(b == 0, torch.nan, a / b)
    return found.sqrt() if root else found


def method_rows(record: AuditRecord) -> list[MethodRow]:
    """The table: a row for every method at every budget."""
    kl = {method: [float(r.tokens.kl.mean()) for r in record.results(method)] for method in record.methods}
    return [_row(record, method, kl) for method in record.methods]


def _row(record: AuditRecord, method: Method, kl: dict[Method, list[float]]) -> MethodRow:
    results = record.results(method)
    rivals = [kl[other] for other in record.methods if other.keep == method.keep]
    lowest = sum(own <= min(column) for own, *column in zip(kl[method], *rivals, strict=True))

    def tokens(of: Callable[[MethodResult], Tensor], upto: int | None = None) -> Interval:
        parts = [of(result)[:upto] for result in results]
        return ratio([float(part.sum()) for part in parts], [len(part) for part in parts])

    def heads(above: str, below: str, *, root: bool = False, once: bool = False) -> Interval:
        def total(heads: HeadErrors, name: str) -> float:
            part = getattr(heads, name)
            return float((part[:, 0] if once or name == "stream" else part).sum())

        return ratio([total(r.heads, above) for r in results], [total(r.heads, below) for r in results], root=root)

    return MethodRow(
        method,
        sum(r.bytes for r in results) / sum(r.full for r in results),
        tokens(lambda r: r.tokens.kl),
        {h: tokens(lambda r: r.tokens.kl, h) for h in horizons(record.settings.continuation)},
        tokens(lambda r: r.tokens.nll - r.tokens.full),
        tokens(lambda r: r.tokens.agrees),
        heads("size", "queries"),
        heads("missed", "queries"),
        heads("error", "output", root=True),
        heads("written", "stream"),
        heads("joint", "stream", once=True),
        retrieval([r.answers for r in results]),
        {task: retrieval([r.answers for r in results], task) for task in TASKS},
        sum(r.seconds for r in results) / len(results),
        lowest,
    )


def retrieval(answers: Sequence[Answers], task: str | None = None) -> Interval:
    """Share of answer tokens that are right, of one task or of all; NaN where nothing was asked."""
    picked = [[a for name, a in asked.items() if task in (None, name)] for asked in answers]
    return ratio([sum(a[0] for a in part) for part in picked], [sum(a[1] for a in part) for part in picked])


def damaged_heads(record: AuditRecord, method: Method) -> list[DamagedHead]:
    """All heads of a method at a budget, the most damaged first."""
    sums = merged_heads(record.results(method))
    damage = sums.written / sums.stream
    columns = {
        "gap": sums.gap / sums.queries,
        "size": sums.size / sums.queries,
        "missed": sums.missed / sums.queries,
        "on_prefix": sums.on_prefix / sums.queries,
        "error": (sums.error / sums.output).sqrt(),
    }
    found = []
    for rank, index in enumerate(damage.flatten().argsort(descending=True).tolist(), 1):
        layer, head = divmod(index, damage.shape[1])
        values = {name: float(column[layer, head]) for name, column in columns.items()}
        found.append(DamagedHead(rank, layer, head, float(damage[layer, head]), **values))
    return found


def seconds_of(windows: Sequence[WindowResult]) -> dict[str, float]:
    """Seconds of all windows, by what they were spent on."""
    names = dict.fromkeys(name for window in windows for name in window.seconds)
    return {name: sum(window.seconds.get(name, 0.0) for window in windows) for name in names}


def overhead(record: AuditRecord) -> float:
    """Seconds that statistics took, over those of the passes over the continuation, with full and compressed caches."""
    spent = seconds_of(record.windows)
    return spent.get("statistics", 0.0) / max(spent.get("full", 0.0) + spent.get("compressed", 0.0), 1e-9)


def sentence_of(record: AuditRecord) -> str:
    """What was found, in one or two sentences."""
    rows, settings = method_rows(record), record.settings
    count = len(record.windows)
    documents = f"{count} document{'s' * (count != 1)}"
    where = f"after {settings.prefix} tokens of {documents}, over the next {settings.continuation}"
    if len(settings.methods) == 1:
        row = rows[0]
        head = damaged_heads(record, row.method)[0]
        known = "" if row.retrieval.value != row.retrieval.value else _retrieval_words(record, row)
        return (
            f"{row.method.name} holds {row.keep:.1%} of the bytes of the cache of {settings.model}: {where}, "
            f"predictions move by {_number(row.kl)} nats of KL a token and {1 - row.agreement.value:.1%} of the most "
            f"likely tokens change{known}. Most of the damage is done to layer {head.layer}, head {head.head}, "
            f"which looks at what is lost with {head.missed:.0%} of its attention."
        )
    parts = []
    for keep in settings.keeps:
        at = [row for row in rows if row.method.keep == keep]
        best = min(at, key=lambda row: row.kl.value)
        part = f"at {keep:g} of the bytes {best.method.name} has the lowest KL, {_number(best.kl)} nats a token, and "
        part += f"the lowest of all on {best.lowest} of {documents}"
        asked = [row for row in at if row.retrieval.value == row.retrieval.value]
        if asked:
            finds = max(asked, key=lambda row: row.retrieval.value)
            part += f"; {finds.method.name} answers most questions right, {finds.retrieval.value:.0%}"
        parts.append(part)
    return f"{settings.model}, {where}: " + ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _retrieval_words(record: AuditRecord, row: MethodRow) -> str:
    full = retrieval([window.answers for window in record.windows])
    return f"; of what was asked it finds {row.retrieval.value:.0%}, and {full.value:.0%} with the full cache"


def _number(interval: Interval) -> str:
    """A number with its interval.

    >>> _number(Interval(0.0123, 0.01, 0.02, 0.001)), _number(Interval(0.5, torch.nan, torch.nan, torch.nan))
    ('0.012 (0.010 to 0.020)', '0.5')
    """
    if interval.low != interval.low:
        return f"{interval.value:.2g}"
    return f"{interval.value:.2g} ({_two(interval.low)} to {_two(interval.high)})"


def _two(value: float) -> str:
    return f"{value:#.2g}"
