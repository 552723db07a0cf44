"""The directory that `cumulant track` leaves: all of it, or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.files import new_directory
from cumulant.filters import Consistency
from cumulant.filters.tracking.estimates import table_of
from cumulant.filters.tracking.filter import Estimate
from cumulant.filters.tracking.model import TrackModel

SUMMARY = "summary.json"
TABLES = ("estimates.parquet", "estimates.csv")
FIGURES = "figures"


def check_output_directory(directory: Path, force: bool) -> None:
    """Refuse a directory that holds anything, unless it is a finished run and may be replaced."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {directory}", "Name another one."))
    entries = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
    if SUMMARY in entries and entries <= {SUMMARY, *TABLES, FIGURES}:
        if not force:
            advice = "Name a new one, or pass --force to replace it."
            raise ValueError(sentence("--out", "a new directory", f"{directory}, which holds a finished run", advice))
    elif entries:
        got = f"{directory}, which holds other files"
        raise ValueError(sentence("--out", "a new directory", got, "Name a new one; nothing there is deleted."))


def write_directory(
    directory: Path,
    model: TrackModel,
    estimates: Sequence[Estimate],
    summary: dict[str, Any],
    *,
    figures: int,
    judged: Consistency | None = None,
    force: bool = False,
) -> list[str]:
    """Tables, figures of the first tracks and the summary, moved there in one step; the names of the figures."""
    try:
        import polars
    except ModuleNotFoundError:
        raise missing_package("cumulant track", "polars", "lab") from None
    with new_directory(directory, overwrite=True) as staging:
        table = polars.DataFrame(table_of(model, estimates)).fill_nan(None)
        table.write_parquet(staging / TABLES[0])
        table.write_csv(staging / TABLES[1])
        names = _draw(staging, model, estimates, figures, judged)
        text = json.dumps(summary | {"figures": names}, indent=1, ensure_ascii=False, allow_nan=False)
        (staging / SUMMARY).write_text(text + "\n", encoding="utf-8")
        check_output_directory(directory, force)  # again: it may have been taken meanwhile
    return names


def _draw(
    staging: Path, model: TrackModel, estimates: Sequence[Estimate], count: int, judged: Consistency | None
) -> list[str]:
    """Figures of the first tracks, and one of consistency."""
    shown = estimates[:count]
    if not shown:
        return []
    from cumulant.figures import save
    from cumulant.filters.tracking.consistency_figure import draw_consistency
    from cumulant.filters.tracking.figure import draw_track

    (staging / FIGURES).mkdir()
    names = file_names([e.track.name for e in shown])
    drawings = {name: draw_track(model, estimate) for name, estimate in zip(names, shown, strict=True)}
    if judged is not None:
        found = [e.innovations for e in estimates if e.innovations is not None]
        drawings["consistency"] = draw_consistency(judged, found)
    for name, drawn in drawings.items():
        for ending in ("svg", "png"):
            save(drawn, staging / FIGURES / f"{name}.{ending}")
    return [f"{FIGURES}/{name}.svg" for name in drawings]


def file_names(tracks: Sequence[str]) -> list[str]:
    """Names that any file system takes, different from one another even where case does not count.

    >>> file_names(["A", "a", "../b c"])
    ['track-A', 'track-a-2', 'track-b-c']
    """
    names, taken = [], set()
    for number, track in enumerate(tracks, 1):
        name = "track-" + (re.sub(r"[^\w.-]+", "-", track).strip("-.")[:60] or str(number))
        name = f"{name}-{number}" if name.lower() in taken else name
        taken.add(name.lower())
        names.append(name)
    return names
