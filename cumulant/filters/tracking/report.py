"""What a run prints: tracks, how they fared, and whether the filter is consistent, in 80 columns."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cumulant.filters import BandedValue, Consistency
from cumulant.filters.diagnostics.banded import OUTSIDE, SLIGHTLY, Limit
from cumulant.filters.diagnostics.verdict import ENTRY_MEAN, ENTRY_MEMORY, ENTRY_NIS, MEMORY_LIMIT, NIS_LIMIT
from cumulant.filters.tracking.directory import SUMMARY
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.units import ISO, time_text

TRACKS_PRINTED = 20  # tracks in the terminal
DATE = len("2024-05-01")
TRACK_LIMIT = Limit(1.0, float("inf"))  # nothing is said of one track


def results_of(model: TrackModel, summaries: list[dict], judged: Consistency) -> dict[str, Any]:
    """What summary.json has of the results: totals, tracks, consistency."""
    total, rows = sum(t["log_likelihood"] for t in summaries), sum(t["rows"] - t["empty"] for t in summaries)
    for track in summaries:
        of_track = judged.tracks.get(track["track"])
        if of_track is not None:
            memory = of_track.autocorrelation
            track |= {"nis": _number(of_track.nis.value), "autocorrelation": memory and _number(memory.value)}
    return {
        "measured": list(model.columns.measured),
        "time_unit": model.columns.time_unit,
        "log_likelihood": total,
        "log_likelihood_per_row": total / max(rows, 1),
        "tracks": summaries,
        "consistency": consistency_as_json(judged),
    }


def consistency_as_json(judged: Consistency) -> dict[str, Any]:
    """Numbers that JSON has."""
    rows = [{key: _number(value) for key, value in row.items()} for row in judged.table()]
    counts = {"outliers": judged.outliers, "rejected_rows": judged.rejected_rows, "rejected": judged.rejected}
    entries = {
        name: {
            "nis": _number(e.nis.value),
            "mean": _number(e.mean.value),
            "autocorrelation": [_number(r.value) for r in e.autocorrelation],
            "persistence": _number(e.persistence.value),
            "constant": e.constant,
            "typical": e.typical,
        }
        for name, e in judged.details.items()
    }
    return {"status": judged.status, "verdict": judged.verdict, **counts, "numbers": rows, "entries": entries}


def _number(value: Any) -> Any:
    return value if not isinstance(value, float) or isfinite(value) else None


def print_summary(screen: Console, about: dict[str, Any], directory: Path, drawn: list[str]) -> None:
    """Two tables with a row for each track, totals, and where everything is."""
    shown = about["tracks"][:TRACKS_PRINTED]
    screen.print(_time_table(shown, about["time_unit"]))
    screen.print(_quality_table(shown))
    more = len(about["tracks"]) - len(shown)
    if more > 0:
        screen.print(f"… and {more:,} more in {escape(str(directory / SUMMARY))}.", highlight=False)
    rows = sum(track["rows"] for track in about["tracks"])
    words = f"Tracks: {len(about['tracks']):,}, rows: {rows:,}, log-likelihood: {about['log_likelihood']:.2f}, "
    screen.print(f"{words}{about['log_likelihood_per_row']:.4f} a row.", highlight=False)
    where = escape(str(directory))
    figures = f"   Figures: {where}/figures ({len(drawn)})" if drawn else ""
    screen.print(f"Table: [bold]{where}/estimates.csv[/] and .parquet{figures}", highlight=False)


def _time_table(tracks: list[dict], unit: str) -> Table:
    """Dates of one day stand in the head of the table, times in its rows."""
    ends = [[t[key] if unit == ISO else time_text(t[key], unit) for key in ("from", "to")] for t in tracks]
    days = {text[:DATE] for pair in ends for text in pair} if unit == ISO else set()
    head = [f"{word}, {next(iter(days))}" if len(days) == 1 else word for word in ("from", "to")]
    ends = [[text[DATE + 1 :] for text in pair] for pair in ends] if len(days) == 1 else ends
    gated = any(t.get("rejected_rows") for t in tracks)
    table = Table("track", "rows", "empty", *(["rejected rows"] if gated else []), *head)
    for track, pair in zip(tracks, ends, strict=True):
        counts = [f"{track[key]:,}" for key in ("rows", "empty", *(["rejected_rows"] if gated else []))]
        table.add_row(escape(track["track"]), *counts, *pair)
    return table


def _quality_table(tracks: list[dict]) -> Table:
    modes = [f"in {escape(name)}" for name in tracks[0]["mode_shares"]]
    scored = "nis" in tracks[0]
    # names of many modes are broken into lines rather than numbers cut
    numbers = [Column(name, no_wrap=True) for name in (*(["NIS", "autocorr."] if scored else []), "log p(y)", "a row")]
    table = Table("track", *(Column(name, overflow="fold") for name in modes), *numbers)
    for track in tracks:
        shares = [f"{share:.0%}" for share in track["mode_shares"].values()]
        scores = [track.get("nis"), track.get("autocorrelation")] if scored else []
        total, rows = track["log_likelihood"], max(track["rows"] - track["empty"], 1)
        cells = ["" if value is None else f"{value:.2f}" for value in scores]
        table.add_row(escape(track["track"]), *shares, *cells, f"{total:.2f}", f"{total / rows:.3f}")
    return table


def print_consistency(screen: Console, judged: Consistency) -> None:
    """A row for all numbers and one for each entry, then modes and NEES, then the verdict."""
    table = Table("expected", "NIS: 1", "mean: 0", "autocorrelation: 0")
    memory = judged.autocorrelation[0] if judged.autocorrelation else None
    table.add_row("all numbers", _banded(judged.nis, NIS_LIMIT), "", _around_zero(memory, MEMORY_LIMIT))
    for name, e in judged.details.items():
        lag = e.memory if e.autocorrelation else None
        cells = _banded(e.nis, ENTRY_NIS), _around_zero(e.mean, ENTRY_MEAN), _around_zero(lag, ENTRY_MEMORY)
        table.add_row(escape(name), *cells)
    for name, nis in judged.mode_nis.items():
        table.add_row(f"in {escape(name)}", _banded(nis, TRACK_LIMIT), "", "")
    screen.print(table)
    for row in judged.table():
        if str(row["number"]).startswith("share of") or row["number"] == "NEES":
            band = f"95 % band {row['low']:.3g} to {row['high']:.3g}, {row['mark']}"
            screen.print(f"{escape(str(row['number']))}: {row['value']:.3g}, {band}.", highlight=False)
    if judged.rejected_rows:
        screen.print(f"The gate rejected something in {judged.rejected_rows:,} rows.", highlight=False)
    screen.print(judged.verdict, highlight=False, markup=False, soft_wrap=True)


def _banded(number: BandedValue, limit: Limit) -> str:
    return f"{number.value:.2f} {number.low:.2f}–{number.high:.2f}{_mark(number, limit)}"


def _around_zero(number: BandedValue | None, limit: Limit) -> str:
    return "" if number is None else f"{number.value:.2f} ±{number.high:.2f}{_mark(number, limit)}"


def _mark(number: BandedValue, limit: Limit) -> str:
    """In brackets where it is outside of its band by chance, or by too little to matter."""
    side = "high" if number.value > number.high else "low"
    mark = limit.mark(number)
    return f" [yellow]{side}[/]" if mark == OUTSIDE else f" ({side})" if mark == SLIGHTLY else ""
