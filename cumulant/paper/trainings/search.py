"""Which learning rate a block gets: the best of a few on the validation part, with a seed that no table has.

A training whose fixed points are not all found in the end counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.train import Run, Step, train

RATES = (1e-3, 2e-3, 5e-3, 1e-2)
SEED = 100


def search(
    task: Task,
    block: str,
    rates: Sequence[float] = RATES,
    *,
    steps: int | None = None,
    watch: Callable[[float], Callable[[Step], object]] = lambda rate: lambda step: None,
) -> dict[float, Run]:
    """A whole training for each rate, measured on the validation part.

    steps  updates of each; the task's own number if None
    watch  told the rate, returns what is told after each update

    >>> from cumulant.paper.trainings.recall import RecallTask
    >>> found = search(RecallTask(), "standard", (1e-3, 1e-2), steps=2)
    >>> best_rate(RecallTask(), found) in found
    True
    """
    recipe = task.recipe_for(block)
    recipe = recipe if steps is None else recipe._replace(steps=steps)
    return {
        rate: train(task, block, seed=SEED, recipe=recipe._replace(rate=rate), part="validation", after=watch(rate))
        for rate in rates
    }


def best_rate(task: Task, found: dict[float, Run]) -> float | None:
    """The rate whose training is best by the measure that judges; None if none counts."""
    judge = task.measures[0]
    sign = 1 if judge.less_is_better else -1
    scores = {rate: sign * run.measures[judge.key] for rate, run in found.items() if counts(run)}
    return min(scores, key=scores.__getitem__, default=None)


def counts(run: Run) -> bool:
    """Whether a training came to its end, with every fixed point found there."""
    return run.diverged is None and run.curve[-1].get("settled", 1.0) == 1.0
