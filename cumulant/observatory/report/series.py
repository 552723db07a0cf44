"""What a series shows: rows for every step, layer, head and quantity, and the page with an axis of steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

from cumulant.observatory.record.record import Record
from cumulant.observatory.record.rows import HeadRow, LayerRow, columns, known
from cumulant.observatory.record.tables import Tables
from cumulant.observatory.report.directory import NUMBERS, STATES, page_data, page_parts
from cumulant.observatory.report.page import render_page
from cumulant.observatory.statistics.quantities import ADDED, LENS

Steps = dict[int, Tables]  # in order
DEPTH_QUANTITIES = tuple(q.name for q in (*LENS, *ADDED))


def read_steps(records: dict[int, Record]) -> Steps:
    """Records with their tables."""
    return {step: Tables.of(record) for step, record in records.items()}


def series_rows(steps: Steps) -> list[dict]:
    """One row for every step, layer, head and quantity; of hidden states for every step, block, stage and quantity.

    step, layer, name, head, stage, quantity   name is a path, of the attention module or of the block; head is None
                                               where a row is about a state, stage where about a head
    value, std, count                          mean over tokens and standard deviation; count None for fits and weights
    null                                       of a distance to a Gaussian: what a Gaussian sample gives
    """
    rows: list[dict] = []
    for step, tables in steps.items():
        parts = [part for row in tables.heads for part in _head_rows(row)]
        parts += [part for row in tables.layers if row.role == "state" for part in _state_rows(row)]
        rows += [{"step": step, **part} for part in parts]
    return rows


def _head_rows(row: HeadRow) -> list[dict]:
    where = {"layer": row.layer, "name": row.name, "head": row.head, "stage": None}
    cells = {name: (cell.value, cell.std, cell.count) for name, cell in row.quantities.items() if cell.count}
    cells |= {name: (row.value(name), nan, None) for name in NUMBERS if known([row.value(name)])}
    return [{**where, "quantity": name, **_numbers(*cell)} for name, cell in cells.items()]


def _state_rows(row: LayerRow) -> list[dict]:
    where = {"layer": row.layer, "name": row.block, "head": None, "stage": row.stage}
    cells = {}
    for name in (*STATES, "growth", "step", *DEPTH_QUANTITIES):
        cell: dict[str, Any] = columns(name, getattr(row, name))
        count = cell[f"{name}_count"] if name in DEPTH_QUANTITIES else row.tokens
        if known([cell[name]]):
            cells[name] = (cell[name], cell.get(f"{name}_std", nan), count, cell.get(f"{name}_null", nan))
    return [{**where, "quantity": name, **_numbers(*cell)} for name, cell in cells.items()]


def _numbers(value: float, std: float, count: int | None, null: float = nan) -> dict:
    return {"value": value, "std": std, "count": count, "null": null}


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
    nulls = {"random": steps[first]} if first == 0 and len(numbers) > 1 else {}
    data = page_data(steps[last], nulls)
    parts = [page_parts(steps[step], nulls) for step in numbers[:-1]]
    notes = [f"{len(numbers)} steps of a training, from {first:,} to {last:,}: the slider chooses one"]
    notes += ["the null is step 0, the weights before training"] if nulls else []
    meta = data["meta"] | {"notes": [*notes, *data["meta"]["notes"]]}
    return data | {"meta": meta, "series": {"steps": numbers, "log": log_spaced(numbers), "parts": parts}}


def render_series(steps: Steps, path: str | Path) -> None:
    """One self-contained HTML page of a series."""
    render_page(series_data(steps), Path(path))


def mean_over_heads(steps: Steps, quantity: str) -> dict[int, float]:
    """Of a quantity at every step; NaN where no head has it."""
    values = {step: known(row.value(quantity) for row in tables.heads) for step, tables in steps.items()}
    return {step: statistics.fmean(numbers) if numbers else nan for step, numbers in values.items()}


def after_last_block(tables: Tables) -> LayerRow:
    """The hidden states there; an empty row if they were not observed."""
    return next((row for row in reversed(tables.layers) if row.stage == "out"), LayerRow("", "out"))
