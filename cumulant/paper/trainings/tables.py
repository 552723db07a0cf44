"""Tables of a set of trainings: one row a block, with mean and deviation over seeds and the difference to standard."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cumulant.paper.output import Row
from cumulant.paper.trainings.task import Metric, Task
from cumulant.paper.trainings.train import TrainingRun


class MeanStd(NamedTuple):
    """Mean and standard deviation over seeds; the deviation of a single seed is None."""

    mean: float
    deviation: float | None
    seeds: int

    def text(self, form: str, sign: str = "") -> str:
        """
        >>> mean_std([1.0, 2.0]).text(".2f"), mean_std([0.5]).text(".1%", "+")
        ('1.50 ± 0.71', '+50.0%')
        """
        mean = f"{self.mean:{sign}{form}}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:{form}}"


def mean_std(values: Iterable[float]) -> MeanStd | None:
    """Mean and standard deviation (of a sample: divided by n − 1); None of nothing.

    >>> mean_std([1.0, 2.0, 3.0])
    MeanStd(mean=2.0, deviation=1.0, seeds=3)
    """
    numbers = list(values)
    if not numbers:
        return None
    return MeanStd(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


class Summary(NamedTuple):
    """A block over its seeds.

    metrics        by key
    from_standard  the first metric minus that of the standard block, seed by seed; None without it
    seconds        of a training
    diverged       number of trainings that ended in a loss that is not finite; they are in no mean
    converged      share of fixed points that converged in the last evaluation; None for other blocks
    """

    block: str
    parameters: int
    metrics: dict[str, MeanStd]
    from_standard: MeanStd | None
    seconds: MeanStd
    diverged: int
    converged: float | None = None


def summarise(task: Task, runs: Sequence[TrainingRun]) -> list[Summary]:
    """One summary a block, in the order in which they were trained."""
    main = task.metrics[0].key
    standard = {run.seed: run.metrics[main] for run in runs if run.block == "standard" and run.diverged is None}
    summaries = []
    for block in dict.fromkeys(run.block for run in runs):
        of_block = [run for run in runs if run.block == block]
        finished = [run for run in of_block if run.diverged is None]
        spreads = {m.key: mean_std(run.metrics[m.key] for run in finished) for m in task.metrics}
        apart = [run.metrics[main] - standard[run.seed] for run in finished if run.seed in standard]
        converged = mean_std(run.curve[-1]["converged"] for run in finished if "converged" in run.curve[-1])
        seconds = mean_std(run.seconds for run in of_block)
        assert seconds is not None
        summaries.append(
            Summary(
                block,
                of_block[0].parameters,
                {key: value for key, value in spreads.items() if value is not None},
                None if block == "standard" else mean_std(apart),
                seconds,
                len(of_block) - len(finished),
                None if converged is None else converged.mean,
            )
        )
    return summaries


def run_rows(runs: Sequence[TrainingRun]) -> list[Row]:
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
            "converged": run.curve[-1].get("converged") if run.curve else None,
            **run.metrics,
        }
        for run in runs
    ]


def curve_rows(runs: Sequence[TrainingRun]) -> list[Row]:
    """A row for each checkpoint of each training."""
    return [{"block": run.block, "seed": run.seed, **row} for run in runs for row in run.curve]


def cells(task: Task, summary: Summary) -> list[str]:
    """A summary as cells of the printed table."""
    numbers = [_number(summary, metric) for metric in task.metrics]
    apart = "" if summary.from_standard is None else summary.from_standard.text(task.metrics[0].form, "+")
    ended = f", {summary.diverged} diverged" if summary.diverged else ""
    return [summary.block, f"{summary.parameters:,}", *numbers, apart, f"{summary.seconds.mean:.0f} s{ended}"]


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """Notes under the table: how equal the sizes are, and how many fixed points converged."""
    sizes = [summary.parameters for summary in summaries]
    equal = (
        f"Sizes (numbers of parameters) are equal within {max(sizes) / min(sizes) - 1:.2%}." if len(sizes) > 1 else ""
    )
    shares = [(s.block, s.converged) for s in summaries if s.converged is not None]
    points = [f"{block}: {_share(part)} of the fixed points converged when it was measured." for block, part in shares]
    return [line for line in (equal, *points) if line]


def _share(part: float) -> str:
    """
    >>> _share(1.0), _share(0.99996), _share(0.5)
    ('all', '99.9%', '50.0%')
    """
    return "all" if part == 1 else f"{min(part, 0.999):.1%}"


def _number(summary: Summary, metric: Metric) -> str:
    value = summary.metrics.get(metric.key)
    return "–" if value is None else value.text(metric.form)


def headings(task: Task) -> list[str]:
    """The headings of `cells`."""
    return ["block", "size", *[m.heading for m in task.metrics], "from standard", "time"]
