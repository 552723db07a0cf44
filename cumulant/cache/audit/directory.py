"""The directory of an audit: its record, and the tables and the page that are made from it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cumulant.cache.audit.page.render import render_audit
from cumulant.cache.audit.record import NAMED, SETTINGS, WINDOWS, AuditRecord, load_settings
from cumulant.cache.audit.summary import MethodRow, damaged_heads, method_rows
from cumulant.files import write_parquet
from cumulant.observatory.record.bootstrap import Interval

METHODS, HEADS, PAGE = "methods.parquet", "heads.parquet", "report.html"
SPANS = ("kl", "nll", "agreement", "gap", "missed", "error", "written", "joint", "retrieval")


def write_report(record: AuditRecord, directory: str | Path) -> None:
    """Write methods.parquet, heads.parquet and report.html."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_parquet([method_cells(row) for row in method_rows(record)], directory / METHODS)
    heads = [
        {"method": method.name, "asked": method.keep, **head._asdict()}
        for method in record.methods
        for head in damaged_heads(record, method)
    ]
    write_parquet(heads, directory / HEADS)
    render_audit(record, directory / PAGE)


def method_cells(row: MethodRow) -> dict:
    """A row of the table, each number with its interval."""
    out: dict = {"method": row.method.name, "asked": row.method.keep, "keep": row.keep}

    def add(name: str, interval: Interval) -> None:
        out.update({name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high})

    for name in SPANS:
        add(name, getattr(row, name))
    for horizon, interval in row.kl_at.items():
        add(f"kl_{horizon}", interval)
    for task, interval in row.tasks.items():
        add(f"retrieval_{task.replace(' ', '_').replace('–', '_')}", interval)
    return out | {"seconds": row.seconds, "lowest": row.lowest}


def delete_audit(directory: Path) -> None:
    """Remove what an audit wrote, and nothing else; nothing where there is none."""
    if load_settings(directory) is None:
        return
    for path in (directory / WINDOWS).glob("*"):
        if NAMED.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):  # something else is in it
        (directory / WINDOWS).rmdir()
    for name in (SETTINGS, METHODS, HEADS, PAGE):
        (directory / name).unlink(missing_ok=True)
