"""The checks of a monitor: a bounded number of them, as rows, as files and as a table to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from cumulant.checks import sentence
from cumulant.files import data_frame, write, write_parquet
from cumulant.observatory.monitor.thresholds import Alarm, LayerCheck
from cumulant.observatory.statistics.heads import MEANS

if TYPE_CHECKING:
    import pandas
    import polars


class Check(NamedTuple):
    """The statistics of one step: every attention layer in the order of the model, and its alarms."""

    step: int
    layers: tuple[LayerCheck, ...]
    alarms: tuple[Alarm, ...] = ()

    def scalars(self) -> dict[str, float]:
        """The finite numbers by name: what `cumulant.observatory.monitor.HeadStatistics` has, of every head as
        "attention/layer03/head07/entropy", and of every layer "attention/layer03/expansion", "…/dead_heads" and
        "…/collapsed_heads". Layers and heads are numbered from 0, as in alarms."""
        named = (pair for number, layer in enumerate(self.layers) for pair in _scalars(number, layer))
        return {name: value for name, value in named if isfinite(value)}


def _scalars(number: int, layer: LayerCheck) -> Iterator[tuple[str, float]]:
    home = f"attention/layer{number:02}"
    columns = {name: getattr(layer.heads, name).tolist() for name in MEANS}
    for head in range(len(layer.dead)):
        for name, values in columns.items():
            yield f"{home}/head{head:02}/{name}", values[head]
    yield f"{home}/expansion", layer.expansion
    yield f"{home}/dead_heads", float(layer.dead.sum())
    yield f"{home}/collapsed_heads", float(layer.collapsed.sum())


class CheckHistory(Sequence[Check]):
    """The first check, the last one, and between them evenly spread ones, never more than ``keep`` in all.

    When full, every second is let go, and from then on every second is taken.

    >>> history = CheckHistory(keep=4)
    >>> for step in range(100):
    ...     history.add(Check(step, ()))
    >>> [check.step for check in history]
    [0, 64, 99]
    >>> history[-1].step, [check.step for check in history[:2]], history
    (99, [0, 64], CheckHistory(3 of 100 checks, steps 0 to 99))
    """

    def __init__(self, keep: int):
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 3:
            raise ValueError(sentence("CheckHistory.keep", "at least 3 checks", keep, "512 is usual."))
        self.keep, self.stride, self.added = keep, 1, 0
        self.checks: list[Check] = []
        self.last: Check | None = None

    def add(self, check: Check) -> None:
        if self.added % self.stride == 0:
            if len(self.checks) == self.keep - 1:
                self.checks, self.stride = self.checks[::2], 2 * self.stride
            if self.added % self.stride == 0:
                self.checks.append(check)
        self.added, self.last = self.added + 1, check

    def __iter__(self) -> Iterator[Check]:
        yield from self.checks
        if self.last is not None and (not self.checks or self.checks[-1] is not self.last):
            yield self.last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Check: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Check, ...]: ...
    def __getitem__(self, index: int | slice) -> Check | tuple[Check, ...]:
        return tuple(self)[index]

    def __contains__(self, check: object) -> bool:
        return any(kept is check for kept in self)  # checks hold tensors, which have no single answer to ==

    def __repr__(self) -> str:
        kept = tuple(self)
        steps = f", steps {kept[0].step} to {kept[-1].step}" if kept else ""
        return f"CheckHistory({len(kept)} of {self.added} checks{steps})"

    @overload
    def frame(self, kind: Literal["polars"] = "polars") -> polars.DataFrame: ...
    @overload
    def frame(self, kind: Literal["pandas"]) -> pandas.DataFrame: ...
    def frame(self, kind: str = "polars") -> polars.DataFrame | pandas.DataFrame:
        """One row per check, layer and head, as a data frame of polars (needs cumulant[report]) or pandas.

        >>> history = CheckHistory(keep=4)
        >>> history.frame().height
        0
        """
        if kind == "polars":
            return data_frame(check_rows(self))
        if kind != "pandas":
            raise ValueError(sentence("CheckHistory.frame.kind", '"polars" or "pandas"', repr(kind), "Give one."))
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError("A pandas frame needs pandas: run pip install pandas.", name="pandas") from None
        return pandas.DataFrame(check_rows(self))


def check_rows(checks: Iterable[Check]) -> list[dict]:
    """One row per check, layer and head; None where there is no number."""
    return [row for check in checks for number, layer in enumerate(check.layers) for row in _rows(check, number, layer)]


def _rows(check: Check, number: int, layer: LayerCheck) -> Iterator[dict]:
    columns = {name: getattr(layer.heads, name).tolist() for name in MEANS}
    for head in range(len(layer.dead)):
        row = {"step": check.step, "layer": number, "name": layer.name, "head": head}
        row |= {name: _number(values[head]) for name, values in columns.items()}
        row["expansion"] = _number(layer.expansion)
        yield row | {"dead": bool(layer.dead[head]), "collapsed": bool(layer.collapsed[head])}


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


def save(path: Path, checks: Iterable[Check], alarms: Iterable[Alarm]) -> None:
    """The rows as .parquet, or with the alarms as .json, by the end of the name."""
    rows = check_rows(checks)
    if path.suffix == ".parquet":
        write_parquet(rows, path)
    elif path.suffix == ".json":
        alarm_rows = [{k: _number(v) if isinstance(v, float) else v for k, v in a._asdict().items()} for a in alarms]
        write(path, json.dumps({"rows": rows, "alarms": alarm_rows}, allow_nan=False))
    else:
        advice = "The end of the name chooses the format."
        raise ValueError(sentence("Monitor.save.path", "a name that ends in .json or .parquet", path.name, advice))


def table(check: Check | None, alarms: Iterable[Alarm]) -> str:
    """The last check, a line per layer with means over its heads, and the last alarms."""
    if check is None:
        return "no pass has been observed yet"
    names, widths = ("layer", "entropy", "least", "G", "score", "first", "expansion"), (5, 8, 7, 8, 8, 6, 9)
    head = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)) + "  dead  collapsed"
    lines = [f"step {check.step}", head]
    for number, (_, heads, expansion, dead, collapsed) in enumerate(check.layers):
        means = [float(x.nanmean()) for x in (heads.entropy, heads.log_normalizer, heads.first_mass)]
        lines.append(
            f"{number:>5} {means[0]:>8.3f} {float(heads.entropy.min()):>7.3f} {means[1]:>8.2f} "
            f"{float(heads.max_score.max()):>8.2f} {means[2]:>6.3f} {expansion:>9.3f}  "
            f"{int(dead.sum()):>4}  {int(collapsed.sum()):>9}"
        )
    return "\n".join([*lines, *(f"step {a.step}: {a.words}" for a in list(alarms)[-10:])])
