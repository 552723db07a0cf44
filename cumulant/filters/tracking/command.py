"""`cumulant track FILE.csv --model MODEL.toml` in the terminal."""

from __future__ import annotations

import shlex
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.checks import sentence
from cumulant.files import versions
from cumulant.filters import SmootherWarning
from cumulant.filters.tracking.directory import SUMMARY, check_output_directory, write_directory
from cumulant.filters.tracking.estimates import summary_of
from cumulant.filters.tracking.example import write_example
from cumulant.filters.tracking.filter import check_method, filter_tracks, smoother_order
from cumulant.filters.tracking.model import TrackModel, read_model
from cumulant.filters.tracking.table import read_tracks
from cumulant.terminal import sentences

TRACKS_PRINTED = 20  # tracks in the terminal


def track_command(
    file: Path | None,
    model: Path | None,
    out: Path | None,
    *,
    method: str,
    smoother: str | None,
    figures: int,
    example: Path | None,
    force: bool,
) -> None:
    """Filter the tracks of a table, write estimates and figures, and print a summary."""
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors):
        if example is not None:
            _write_example(screen, example, force)
            return
        if file is None or model is None:
            missing, advice = ("FILE.csv", "Or see --example.") if file is None else ("--model", "A TOML file.")
            raise ValueError(sentence("track", missing, "none", advice))
        directory = out or Path("tracked") / file.stem
        check_method(method, smoother)
        check_output_directory(directory, force)
        with errors.status("reading") as status:
            built = read_model(model)
            tracks = read_tracks(file, built.columns)
            status.update(f"filtering {len(tracks)} tracks")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SmootherWarning)
                estimates = filter_tracks(built, tracks, method=method, smoother=smoother)
            summaries = [summary_of(built, estimate) for estimate in estimates]
            about = _about(file, model, built, method, smoother) | {"tracks": summaries}
            status.update("drawing")
            drawn = write_directory(directory, built, estimates, about, figures=figures, force=force)
    _print_summary(screen, built, summaries, directory, drawn)
    for warning in caught:
        errors.print(f"Warning: {warning.message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _write_example(screen: Console, directory: Path, force: bool) -> None:
    table, model = write_example(directory, force=force)
    command = shlex.join(["cumulant", "track", str(table), "--model", str(model)])
    screen.print(f"Wrote {table} and {model}. Now run\n  {command}", markup=False, highlight=False, soft_wrap=True)


def _about(file: Path, path: Path, model: TrackModel, method: str, smoother: str | None) -> dict:
    return {
        "file": file.name,
        "model": path.name,
        "method": method,
        "smoothed": smoother is not None,
        "smoother": smoother,
        "smoother_order": smoother_order(method) if smoother else None,
        "state": model.states,
        "modes": [mode.name for mode in model.modes],
        "command": shlex.join(["cumulant", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions("torch", "numpy", "polars", "matplotlib"),
    }


def _print_summary(
    screen: Console, model: TrackModel, summaries: list[dict], directory: Path, drawn: list[str]
) -> None:
    modes = [f"in {escape(mode.name)}" for mode in model.modes]
    table = Table("track", "rows", "empty", "from", "to", *modes, "log p(y)")
    for track in summaries[:TRACKS_PRINTED]:
        shares = [f"{share:.0%}" for share in track["mode_shares"].values()]
        ends = [f"{track[key]:.6g}" for key in ("from", "to")]
        counts = [f"{track[key]:,}" for key in ("rows", "empty")]
        table.add_row(escape(track["track"]), *counts, *ends, *shares, f"{track['log_likelihood']:.2f}")
    screen.print(table)
    if len(summaries) > TRACKS_PRINTED:
        screen.print(
            f"… and {len(summaries) - TRACKS_PRINTED:,} more in {escape(str(directory / SUMMARY))}.", highlight=False
        )
    total = sum(track["log_likelihood"] for track in summaries)
    rows = sum(track["rows"] for track in summaries)
    screen.print(f"Tracks: {len(summaries):,}, rows: {rows:,}, log-likelihood: {total:.2f}.", highlight=False)
    where = escape(str(directory))
    figures = f"   Figures: {where}/figures ({len(drawn)})" if drawn else ""
    screen.print(f"Table: [bold]{where}/estimates.csv[/] and .parquet{figures}", highlight=False)
