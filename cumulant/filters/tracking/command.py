"""`cumulant track FILE.csv --model MODEL.toml` in the terminal."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from cumulant.checks import sentence
from cumulant.files import versions, write
from cumulant.filters import SmootherWarning
from cumulant.filters.diagnostics.rejection import MOST_REJECTED
from cumulant.filters.tracking.change import change_against, previous_summary
from cumulant.filters.tracking.column_warnings import distance_warning, suspicious_columns
from cumulant.filters.tracking.directory import check_output_directory, write_directory
from cumulant.filters.tracking.estimates import judge, summary_of
from cumulant.filters.tracking.example import write_example
from cumulant.filters.tracking.explain import print_explanation
from cumulant.filters.tracking.filter import Estimate, filter_tracks
from cumulant.filters.tracking.first_model import first_model
from cumulant.filters.tracking.geodesy import FARTHEST
from cumulant.filters.tracking.methods import DEFAULT_PARTICLES, PARTICLES, check_method, smoother_order
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.model_file import read_model
from cumulant.filters.tracking.report import print_consistency, print_summary, results_of
from cumulant.filters.tracking.table import read_tracks
from cumulant.terminal import sentences

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
            about = _about(file, model, built, options) | results_of(built, summaries, judged)
            change = change_against(previous_summary(directory), about)
            about |= {"replaced": change.numbers} if change is not None else {}
            status.update("drawing")
            drawn = write_directory(
                directory, built, estimates, about, figures=options.figures, judged=judged, force=options.force
            )
    print_summary(screen, about, directory, drawn)
    print_consistency(screen, judged)
    if change is not None:
        screen.print(change.words, highlight=False, markup=False, soft_wrap=True)
    _warn(errors, [str(warning.message) for warning in caught] + _gate_warnings(estimates))


def _warn(errors: Console, messages: Sequence[str]) -> None:
    for message in messages:
        errors.print(f"Warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _gate_warnings(estimates: Sequence[Estimate]) -> list[str]:
    """Tracks of which a gate rejects so much that the model, not the measurements, must be wrong."""
    lost = []
    for e in estimates:
        if e.innovations is not None:
            rejected, measured = e.innovations.rejected.any(-1).sum(), (~e.track.y.isnan()).any(-1).sum()
            if int(rejected) > MOST_REJECTED * int(measured):
                lost.append(f"{e.track.name} ({int(rejected)} of {int(measured)} rows)")
    if not lost:
        return []
    listed = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    causes = "a sensor is described wrongly, no mode moves as the target does, or the filter lost them"
    return [f"the gate rejects much of {listed}: {causes}."]


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
