"""What several trainings say together: one row a block, with the spread over seeds and the distance to standard."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cumulant.paper.trainings.task import Measure, Task
from cumulant.paper.trainings.train import Run

Row = dict[str, float | int | str | None]


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; the deviation of a single seed is None."""

    mean: float
    deviation: float | None
    seeds: int

    def written(self, form: str, sign: str = "") -> str:
        """
        >>> spread([1.0, 2.0]).written(".2f"), spread([0.5]).written(".1%", "+")
        ('1.50 ± 0.71', '+50.0%')
        """
        mean = f"{self.mean:{sign}{form}}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:{form}}"


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and standard deviation (of a sample: divided by n − 1); None of nothing.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, deviation=1.0, seeds=3)
    """
    found = list(values)
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


class Summary(NamedTuple):
    """A block over its seeds.

    measures    by key
    from_standard  the first measure minus that of the standard block, seed by seed; None without it
    seconds     of a training
    diverged    how many trainings ended in a loss that is no number; they are in no mean
    settled     the share of fixed points that were found in the end, over all seeds; None where there are none to find
    """

    block: str
    parameters: int
    measures: dict[str, Spread]
    from_standard: Spread | None
    seconds: Spread
    diverged: int
    settled: float | None = None


def summarise(task: Task, runs: Sequence[Run]) -> list[Summary]:
    """One summary a block, in the order in which they were trained."""
    main = task.measures[0].key
    standard = {run.seed: run.measures[main] for run in runs if run.block == "standard" and run.diverged is None}
    found = []
    for block in dict.fromkeys(run.block for run in runs):
        mine = [run for run in runs if run.block == block]
        good = [run for run in mine if run.diverged is None]
        spreads = {m.key: spread(run.measures[m.key] for run in good) for m in task.measures}
        apart = [run.measures[main] - standard[run.seed] for run in good if run.seed in standard]
        settled = spread(run.curve[-1]["settled"] for run in good if "settled" in run.curve[-1])
        seconds = spread(run.seconds for run in mine)
        assert seconds is not None
        found.append(
            Summary(
                block,
                mine[0].parameters,
                {key: value for key, value in spreads.items() if value is not None},
                None if block == "standard" else spread(apart),
                seconds,
                len(mine) - len(good),
                None if settled is None else settled.mean,
            )
        )
    return found


def run_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each training."""
    return [
        {
            "task": run.task,
            "block": run.block,
            "seed": run.seed,
            "parameters": run.parameters,
            "steps": run.steps,
            "seconds": run.seconds,
            "diverged": run.diverged,
            "settled": run.curve[-1].get("settled") if run.curve else None,
            **run.measures,
        }
        for run in runs
    ]


def curve_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each checkpoint of each training."""
    return [{"block": run.block, "seed": run.seed, **row} for run in runs for row in run.curve]


def cells(task: Task, summary: Summary) -> list[str]:
    """A summary as the terminal shows it."""
    numbers = [_number(summary, measure) for measure in task.measures]
    apart = "" if summary.from_standard is None else summary.from_standard.written(task.measures[0].form, "+")
    ended = f", {summary.diverged} diverged" if summary.diverged else ""
    return [summary.block, f"{summary.parameters:,}", *numbers, apart, f"{summary.seconds.mean:.0f} s{ended}"]


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """What belongs under the table: how equal the sizes are, and how many fixed points were found."""
    sizes = [summary.parameters for summary in summaries]
    equal = (
        f"Sizes (numbers of parameters) are equal within {max(sizes) / min(sizes) - 1:.2%}." if len(sizes) > 1 else ""
    )
    shares = [(s.block, s.settled) for s in summaries if s.settled is not None]
    found = [f"{block}: {_share(part)} of the fixed points were found when it was measured." for block, part in shares]
    return [line for line in (equal, *found) if line]


def _share(part: float) -> str:
    """
    >>> _share(1.0), _share(0.99996), _share(0.5)
    ('all', '99.9%', '50.0%')
    """
    return "all" if part == 1 else f"{min(part, 0.999):.1%}"


def _number(summary: Summary, measure: Measure) -> str:
    found = summary.measures.get(measure.key)
    return "–" if found is None else found.written(measure.form)


def headings(task: Task) -> list[str]:
    """What stands above `cells`."""
    return ["block", "size", *[m.heading for m in task.measures], "from standard", "time"]
