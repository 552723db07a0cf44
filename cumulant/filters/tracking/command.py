"""`cumulant track FILE.csv --model MODEL.toml` in the terminal."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.checks import sentence
from cumulant.files import versions, write
from cumulant.filters import Consistency, SmootherWarning
from cumulant.filters.consistency import MOST_REJECTED
from cumulant.filters.tracking.column_warnings import distance_warning, suspicious_columns
from cumulant.filters.tracking.directory import SUMMARY, check_output_directory, write_directory
from cumulant.filters.tracking.estimates import judge, summary_of
from cumulant.filters.tracking.example import write_example
from cumulant.filters.tracking.explain import print_explanation
from cumulant.filters.tracking.filter import Estimate, filter_tracks
from cumulant.filters.tracking.first_model import first_model
from cumulant.filters.tracking.geodesy import FARTHEST
from cumulant.filters.tracking.methods import DEFAULT_PARTICLES, PARTICLES, check_method, smoother_order
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.model_file import read_model
from cumulant.filters.tracking.table import read_tracks
from cumulant.filters.tracking.units import time_text
from cumulant.terminal import sentences

TRACKS_PRINTED = 20  # tracks in the terminal
NO_MODEL = "A TOML file; --init FILE.csv writes a first one."


class TrackOptions(NamedTuple):
    """The options of `cumulant track`, as its help has them."""

    out: Path | None = None
    method: str = "imm"
    smoother: str | None = None
    order: int | None = None
    gate: float | None = None
    particles: int | None = None
    seed: int | None = None
    figures: int = 12
    check: bool = False
    init: Path | None = None
    example: Path | None = None
    force: bool = False


def track_command(file: Path | None, model: Path | None, options: TrackOptions) -> None:
    """Filter the tracks of a table, write estimates and figures, and print a summary and a verdict."""
    screen, errors = Console(), Console(stderr=True)
    with sentences(errors):
        if options.example is not None:
            _write_example(screen, options.example, options.force)
            return
        if options.init is not None:
            _write_first_model(screen, options.init, model, options.force)
            return
        if file is None or model is None:
            missing, advice = ("FILE.csv", "Or see --example.") if file is None else ("--model", NO_MODEL)
            raise ValueError(sentence("track", missing, "none", advice))
        directory = options.out or Path("tracked") / file.stem
        check_method(options.method, options.smoother, options.particles, options.seed)
        if not options.check:
            check_output_directory(directory, options.force)
        with errors.status("reading") as status:
            built = read_model(model)
            tracks = read_tracks(file, built.columns)
            _warn(errors, suspicious_columns(built, tracks) + distance_warning(built, tracks, FARTHEST))
            if options.check:
                status.stop()
                gate = built.gate if options.gate is None else options.gate
                print_explanation(screen, built, tracks, options.method, options.smoother, gate)
                screen.print("Nothing was run; leave --check out to run it.", highlight=False)
                return
            status.update(f"filtering {len(tracks)} tracks")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SmootherWarning)
                estimates = filter_tracks(
                    built,
                    tracks,
                    method=options.method,
                    smoother=options.smoother,
                    order=options.order,
                    gate=options.gate,
                    score=True,
                    particles=options.particles,
                    seed=options.seed,
                    progress=lambda done: status.update(f"filtering {len(tracks)} tracks, {done} done"),
                )
            judged = judge(built, estimates)
            summaries = [summary_of(built, estimate) for estimate in estimates]
            about = _about(file, model, built, options) | {"tracks": summaries, "consistency": _as_json(judged)}
            status.update("drawing")
            drawn = write_directory(
                directory, built, estimates, about, figures=options.figures, judged=judged, force=options.force
            )
    _print_summary(screen, built, summaries, directory, drawn)
    _print_consistency(screen, judged)
    _warn(errors, [str(warning.message) for warning in caught] + _gate_warnings(estimates))


def _warn(errors: Console, messages: Sequence[str]) -> None:
    for message in messages:
        errors.print(f"Warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _gate_warnings(estimates: Sequence[Estimate]) -> list[str]:
    """Tracks of which a gate rejects so much that the model, not the measurements, must be wrong."""
    lost = []
    for e in estimates:
        if e.innovations is not None:
            rejected, measured = int(e.innovations.rejected.sum()), int((~e.track.y.isnan()).sum())
            if rejected > MOST_REJECTED * measured:
                lost.append(f"{e.track.name} ({rejected} of {measured})")
    if not lost:
        return []
    listed = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return [f"the gate rejects much of {listed}: a sensor is described wrongly, or the filter lost them."]


def _as_json(judged: Consistency) -> dict:
    """Numbers that JSON has."""
    rows = [
        {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in row.items()}
        for row in judged.table()
    ]
    counts = {"outliers": judged.outliers, "rejected": judged.rejected}
    return {"status": judged.status, "verdict": judged.verdict, **counts, "numbers": rows}


def _print_consistency(screen: Console, judged: Consistency) -> None:
    table = Table("consistency", "value", "95 % band", "")
    for row in judged.table():
        name = str(row["number"])
        if name.startswith("autocorrelation") and not name.endswith("lag 1"):
            continue
        band = f"{row['low']:.3g} to {row['high']:.3g}"
        table.add_row(escape(name), f"{row['value']:.3g}", band, "inside" if row["inside"] else "[yellow]outside[/]")
    screen.print(table)
    if judged.rejected:
        screen.print(f"The gate rejected {judged.rejected:,} numbers.", highlight=False)
    screen.print(judged.verdict, highlight=False, markup=False, soft_wrap=True)


def _write_first_model(screen: Console, table: Path, model: Path | None, force: bool) -> None:
    path = model or table.with_suffix(".toml")
    if path.exists() and not force:
        raise ValueError(sentence("--init", "a new file", f"{path}", "Name another one by --model, or pass --force."))
    first = first_model(table)
    write(path, first.text)
    for note in first.notes:
        screen.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)
    command = shlex.join(["cumulant", "track", str(table), "--model", str(path)])
    words = f"Wrote {path}: guesses, with what they rest on beside them. Read it, then run"
    words += f"\n  {command} --check\n  {command} --smooth"
    screen.print(words, markup=False, highlight=False, soft_wrap=True)


def _write_example(screen: Console, directory: Path, force: bool) -> None:
    table, model = write_example(directory, force=force)
    command = shlex.join(["cumulant", "track", str(table), "--model", str(model)])
    screen.print(f"Wrote {table} and {model}. Now run\n  {command}", markup=False, highlight=False, soft_wrap=True)


def _about(file: Path, path: Path, model: TrackModel, options: TrackOptions) -> dict:
    return {
        "file": file.name,
        "model": path.name,
        "method": options.method,
        "smoothed": options.smoother is not None,
        "smoother": options.smoother,
        "smoother_order": (options.order or smoother_order(options.method)) if options.smoother else None,
        "gate": model.gate if options.gate is None else options.gate,
        "particles": (options.particles or DEFAULT_PARTICLES) if options.method == PARTICLES else None,
        "seed": (options.seed or 0) if options.method == PARTICLES else None,
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
    gated = any(track["rejected"] for track in summaries)
    table = Table("track", "rows", "empty", *(["rejected"] if gated else []), "from", "to", *modes, "log p(y)")
    for track in summaries[:TRACKS_PRINTED]:
        shares = [f"{share:.0%}" for share in track["mode_shares"].values()]
        ends = [time_text(track[key], model.columns.time_unit) for key in ("from", "to")]
        counts = [f"{track[key]:,}" for key in ("rows", "empty", *(["rejected"] if gated else []))]
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
