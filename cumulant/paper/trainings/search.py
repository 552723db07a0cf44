"""Selection of the learning rate of a block on the validation part, with a seed that no table uses.

A training whose fixed points do not all converge is not eligible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.train import TrainingRun, TrainingStep, train

RATES = (1e-3, 2e-3, 5e-3, 1e-2)
SEED = 100


def search(
    task: Task,
    block: str,
    rates: Sequence[float] = RATES,
    *,
    steps: int | None = None,
    device: str = "cpu",
    watch: Callable[[float], Callable[[TrainingStep], object]] = lambda rate: lambda step: None,
) -> dict[float, TrainingRun]:
    """A whole training for each rate, measured on the validation part.

    steps   updates of each; the task's own number if None
    device  as in `train`
    watch   called with the rate; returns the callback after each update

    >>> from cumulant.paper.trainings.recall import RecallTask
    >>> runs = search(RecallTask(), "standard", (1e-3, 1e-2), steps=2)
    >>> best_rate(RecallTask(), runs) in runs
    True
    """
    recipe = task.recipe_for(block)
    recipe = recipe if steps is None else recipe._replace(steps=steps)
    options = {"seed": SEED, "part": "validation", "device": device}
    return {
        rate: train(task, block, recipe=recipe._replace(rate=rate), on_step=watch(rate), **options) for rate in rates
    }


def best_rate(task: Task, runs: dict[float, TrainingRun]) -> float | None:
    """The rate with the best first metric; None if no training is eligible."""
    metric = task.metrics[0]
    sign = 1 if metric.less_is_better else -1
    scores = {rate: sign * run.metrics[metric.key] for rate, run in runs.items() if eligible(run)}
    return min(scores, key=scores.__getitem__, default=None)


def eligible(run: TrainingRun) -> bool:
    """Whether a training finished, and every fixed point converged in its last evaluation."""
    return run.diverged is None and run.curve[-1].get("converged", 1.0) == 1.0
