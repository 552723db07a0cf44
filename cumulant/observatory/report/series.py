"""What a series shows: rows for every step, layer, head and quantity, and the page with an axis of steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cumulant.observatory.record.record import Record
from cumulant.observatory.report.directory import BANDED, DEPTH, NUMBERS, page_data
from cumulant.observatory.report.layer_table import Row, layer_rows
from cumulant.observatory.report.page import render_page
from cumulant.observatory.report.tables import figures, head_rows

PARTS = ("heads", "depth", "spectra", "texts")  # of a page, which a step changes
STATES = (*DEPTH.values(), *BANDED, "growth_mean", "step_mean")  # columns of the table of layers


class Seen(NamedTuple):
    """What is known of one step: its record, and its table of layers, which takes a moment to make."""

    record: Record
    states: list[Row]


Steps = dict[int, Seen]  # in order


def read_steps(records: dict[int, Record]) -> Steps:
    """Records with their tables of layers."""
    return {k: Seen(r, layer_rows(r.hidden, r.meta.get("places", []))) for k, r in records.items()}


def series_rows(steps: Steps) -> list[dict]:
    """One row for every step, layer, head and quantity; of hidden states for every step, block, stage and quantity.

    step, layer, name, head, stage, quantity   layer and head are None where a row is about a state, stage where about
                                               a head
    value, spread, count                       mean over tokens and standard deviation; count None for fits and weights
    null                                       of a distance to a Gaussian: what a Gaussian sample gives
    """
    rows: list[dict] = []
    for step, seen in steps.items():
        rows += [{"step": step, **row} for row in (*_head_figures(seen.record), *_state_figures(seen.states))]
    return rows


def _head_figures(record: Record) -> list[dict]:
    out, fits = [], head_rows(record)
    cells = [(i, layer, head) for i, layer in enumerate(record.layers) for head in range(layer.heads)]
    for (index, layer, head), fitted in zip(cells, fits, strict=True):
        place = {"layer": index, "name": layer.name, "head": head, "stage": None}
        for quantity in record.quantities:
            tally = record.tallies.get(f"{layer.name}/{quantity}")
            if tally is not None and int(tally.count[head]):
                found = figures(tally, head)
                numbers = {"value": found["mean"], "spread": found["sd"], "count": found["count"]}
                out.append({**place, "quantity": quantity, **numbers, "null": None})
        for quantity in NUMBERS:
            if fitted.get(quantity) is not None:
                numbers = {"value": fitted[quantity], "spread": None, "count": None, "null": None}
                out.append({**place, "quantity": quantity, **numbers})
    return out


def _state_figures(states: list[Row]) -> list[dict]:
    out = []
    for row in states:
        place = {"layer": None, "name": row["block"], "head": None, "stage": row["stage"]}
        for column in STATES if row["role"] == "state" else ():
            value = _number(row.get(column))
            if value is not None:
                quantity = column.removesuffix("_mean")
                numbers = {"value": value, "spread": _number(row.get(f"{quantity}_spread")), "count": row["tokens"]}
                out.append({**place, "quantity": quantity, **numbers, "null": _number(row.get(f"{column}_null"))})
    return out


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def log_spaced(steps: Sequence[int]) -> bool:
    """Whether the positive steps are spaced more evenly in their logarithm than as they are.

    >>> log_spaced([0, 1, 2, 4, 8, 17]), log_spaced([0, 100, 200, 300, 400]), log_spaced([5, 50])
    (True, False, False)
    """
    positive = [step for step in steps if step > 0]
    if len(positive) < 3:
        return False
    ratios = [b / a for a, b in pairwise(positive)]
    gaps = [b - a for a, b in pairwise(positive)]
    return statistics.pstdev(ratios) / statistics.mean(ratios) < statistics.pstdev(gaps) / statistics.mean(gaps)


def series_data(steps: Steps) -> dict:
    """The page of the last step, and under "series" the parts of the steps before it.

    Where the first step is 0 it stands for random initialisation, the null of all others.
    """
    numbers = list(steps)
    first, last = numbers[0], numbers[-1]
    begun = first == 0 and len(numbers) > 1
    nulls = {"random": steps[first].record} if begun else {}
    data = page_data(steps[last].record, nulls, depth=steps[last].states)
    wholes = [page_data(steps[n].record, {}, depth=steps[n].states) for n in numbers[:-1]]
    parts = [{key: whole[key] for key in PARTS} for whole in wholes]
    for part in parts if begun else ():
        _beside(part["heads"], parts[0]["heads"])
    notes = [f"{len(numbers)} steps of a training, from {first:,} to {last:,}: the slider chooses one"]
    notes += ["the null is step 0, the weights before training"] if begun else []
    meta = data["meta"] | {"notes": [*notes, *data["meta"].get("notes", [])]}
    return data | {"meta": meta, "series": {"steps": numbers, "log": log_spaced(numbers), "parts": parts}}


def _beside(heads: list[dict], null: list[dict]) -> None:
    """Means of ``null`` as the null of ``heads``, head by head."""
    for head, other in zip(heads, null, strict=True):
        for quantity, cell in head["values"].items():
            cell["null_random"] = other["values"].get(quantity, {}).get("mean")


def render_series(steps: Steps, path: str | Path) -> None:
    """One self-contained HTML page of a series."""
    render_page(series_data(steps), Path(path))


def course(steps: Steps, quantity: str) -> dict[int, float | None]:
    """The mean over heads of a quantity at every step; None where no head has it."""
    key = quantity if quantity in NUMBERS else f"{quantity}_mean"
    found = {n: [row[key] for row in head_rows(seen.record) if row.get(key) is not None] for n, seen in steps.items()}
    return {n: statistics.fmean(values) if values else None for n, values in found.items()}


def at_the_end(seen: Seen, column: str) -> float | None:
    """A column of the table of layers after the last block."""
    rows = [row for row in seen.states if row["stage"] == "out"]
    return _number(rows[-1].get(column)) if rows else None
