"""Reading the tables of an experiment: a column of numbers, and how a verdict says a few of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cumulant.paper.experiments.experiment import Row


def column(rows: Iterable[Mapping], name: str, **where: object) -> list[float]:
    """The numbers under a name, from the rows that agree with ``where``; rows without one are left out.

    >>> column([{"d": 1, "w2": 0.5}, {"d": 2, "w2": 0.75}, {"d": 2, "w2": None}], "w2", d=2)
    [0.75]
    """
    found = [r[name] for r in chosen(rows, **where)]
    return [float(value) for value in found if value is not None]


def chosen(rows: Iterable[Mapping], **where: object) -> list[Row]:
    """The rows that agree with ``where``.

    >>> chosen([{"d": 1}, {"d": 2}], d=2)
    [{'d': 2}]
    """
    return [dict(r) for r in rows if all(r[k] == value for k, value in where.items())]


def span(values: Sequence[float], form: str = ".2f") -> str:
    """
    >>> span([0.5, 0.251]), span([3, 3], ".0f")
    ('0.25 to 0.50', '3')
    """
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def about(value: float) -> str:
    """A small number by its order of magnitude.

    >>> about(3.2e-13), about(0.0)
    ('3e-13', '0')
    """
    return f"{value:.0e}" if value else "0"


def listed(values: Iterable[object]) -> str:
    """
    >>> listed([2, 4, 8])
    '2, 4 and 8'
    """
    *most, last = [str(v) for v in values]
    return f"{', '.join(most)} and {last}" if most else last
