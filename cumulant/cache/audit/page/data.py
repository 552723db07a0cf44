"""What the page of an audit shows, as plain data."""

from __future__ import annotations

from typing import Any

from cumulant.cache.audit.record import AuditRecord
from cumulant.cache.audit.result import Method, WindowResult, WorstToken, merged_heads
from cumulant.cache.audit.summary import MethodRow, method_rows, overhead, retrieval, seconds_of, sentence_of
from cumulant.observatory.record.bootstrap import Interval

TEXTS = 4  # windows whose tokens are shown
TOKENS = 4096  # of all of them together
WORST = 5  # tokens of a method
BEFORE = 40  # tokens in front of one
AROUND = 4  # tokens on either side of one that was looked at


def page_data(record: AuditRecord) -> dict[str, Any]:
    """Settings, sentence, rows of the table, maps of heads, texts with what was lost, and the worst tokens."""
    settings, rows = record.settings, method_rows(record)
    spent = seconds_of(record.windows)
    return {
        "model": settings.model,
        "settings": {
            name: getattr(settings, name)
            for name in ("model", "prefix", "continuation", "every", "retrieval", "versions", "fingerprint")
        },
        "facts": {
            "documents": len(record.windows),
            "kinds": list(dict.fromkeys(window.kind for window in record.windows)),
            "full_nll": float(sum(w.nll.mean() for w in record.windows)) / len(record.windows),
            "seconds": spent,
            "overhead": overhead(record),
        },
        "notes": list(settings.notes),
        "sentence": sentence_of(record),
        "full": _interval(retrieval([window.answers for window in record.windows])),
        "rows": [_row(row) for row in rows],
        "maps": [_map(record, method) for method in record.methods],
        "texts": [_text(record, window) for window in _shown(record)],
        "worst": [_worst(record, method) for method in record.methods],
    }


def _interval(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def _row(row: MethodRow) -> dict[str, Any]:
    spans = ("kl", "nll", "agreement", "gap", "missed", "error", "written", "joint", "retrieval")
    return {
        "name": row.method.name,
        "asked": row.method.keep,
        "keep": row.keep,
        **{name: _interval(getattr(row, name)) for name in spans},
        "kl_at": [[horizon, *_interval(interval)] for horizon, interval in row.kl_at.items()],
        "tasks": {task: _interval(interval) for task, interval in row.tasks.items()},
        "seconds": row.seconds,
        "lowest": row.lowest,
    }


def _map(record: AuditRecord, method: Method) -> dict[str, Any]:
    """Numbers of every head, layer by layer, and of layers what heads write one by one and together."""
    sums = merged_heads(record.results(method))
    stream = sums.stream[:, 0]
    return {
        "damage": (sums.written / sums.stream).tolist(),
        "missed": (sums.missed / sums.queries).tolist(),
        "size": (sums.size / sums.queries).tolist(),
        "gap": (sums.gap / sums.queries).tolist(),
        "error": (sums.error / sums.output).sqrt().tolist(),
        "on_prefix": (sums.on_prefix / sums.queries).tolist(),
        "apart": (sums.written.sum(1) / stream).tolist(),
        "joint": (sums.joint[:, 0] / stream).tolist(),
    }


def _shown(record: AuditRecord) -> list[WindowResult]:
    """The first window of each kind, as many as there is room for."""
    found = {window.kind: window for window in reversed(record.windows)}
    kinds = dict.fromkeys(window.kind for window in record.windows)
    many = max(1, min(TEXTS, TOKENS // record.settings.prefix))
    return [found[kind] for kind in kinds][:many]


def _text(record: AuditRecord, window: WindowResult) -> dict[str, Any]:
    prefix = record.settings.prefix
    top = max(float(window.attention.max()), 1e-30)
    return {
        "name": window.name,
        "kind": window.kind,
        "tokens": list(window.tokens[:prefix]),
        "attention": [round(1000 * x / top) for x in window.attention.tolist()],
        "methods": [
            {
                "held": [round(100 * x) for x in window.methods[method].held.tolist()],
                "lost": [round(1000 * x / top) for x in window.methods[method].lost.tolist()],
                "share": float(window.methods[method].lost.sum() / window.attention.sum()),
            }
            for method in record.methods
        ],
    }


def _worst(record: AuditRecord, method: Method) -> list[dict[str, Any]]:
    found = [(token, window) for window in record.windows for token in window.methods[method].worst]
    found.sort(key=lambda pair: -pair[0].kl)
    return [_token(record, token, window) for token, window in found[:WORST]]


def _token(record: AuditRecord, token: WorstToken, window: WindowResult) -> dict[str, Any]:
    at, tokens = token.position, window.tokens
    return {
        "text": window.name,
        "position": at - record.settings.prefix,
        "kl": token.kl,
        "before": list(tokens[max(at - BEFORE, 0) : at]),
        "token": tokens[at],
        "next": tokens[at + 1],
        "full": [list(prediction) for prediction in token.full],
        "compressed": [list(prediction) for prediction in token.compressed],
        "lost": [
            {
                "before": "".join(tokens[max(i - AROUND, 0) : i]),
                "token": tokens[i],
                "after": "".join(tokens[i + 1 : min(i + AROUND, record.settings.prefix - 1) + 1]),
                "position": i,
                "share": share,
            }
            for i, share in token.lost
        ],
    }
