"""Selections from the tables of an experiment, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cumulant.paper.experiments.experiment import Row


def column(rows: Iterable[Mapping], name: str, **where: object) -> list[float]:
    """The numbers of a column, in the rows that match ``where``; missing values are left out.

    >>> column([{"d": 1, "w2": 0.5}, {"d": 2, "w2": 0.75}, {"d": 2, "w2": None}], "w2", d=2)
    [0.75]
    """
    values = [r[name] for r in select(rows, **where)]
    return [float(value) for value in values if value is not None]


def select(rows: Iterable[Mapping], **where: object) -> list[Row]:
    """The rows that match ``where``.

    >>> select([{"d": 1}, {"d": 2}], d=2)
    [{'d': 2}]
    """
    return [dict(r) for r in rows if all(r[k] == value for k, value in where.items())]


def range_text(values: Sequence[float], form: str = ".2f") -> str:
    """
    >>> range_text([0.5, 0.251]), range_text([3, 3], ".0f")
    ('0.25 to 0.50', '3')
    """
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def magnitude(value: float) -> str:
    """A number to one digit.

    >>> magnitude(3.2e-13), magnitude(0.0)
    ('3e-13', '0')
    """
    return f"{value:.0e}" if value else "0"


def join_words(values: Iterable[object]) -> str:
    """
    >>> join_words([2, 4, 8])
    '2, 4 and 8'
    """
    *most, last = [str(v) for v in values]
    return f"{', '.join(most)} and {last}" if most else last
