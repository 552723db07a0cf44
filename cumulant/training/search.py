"""Which learning rate a block gets: a search on the validation part, with a seed that no table has.

Of the rates within 0.05 nats of the best it is the smallest: nearer than that are two seeds, and a smaller rate is the
safer one. A training whose fixed points are not all found in the end counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cumulant.training.task import Task
from cumulant.training.train import Run, Step, train

RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
SEED = 100
SLACK = 0.05  # of the measure that judges: nats, in every task


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

    >>> from cumulant.training.recall import RecallTask
    >>> found = search(RecallTask(), "standard", (1e-3, 1e-2), steps=2)
    >>> chosen_rate(RecallTask(), found) in found
    True
    """
    recipe = task.recipe_for(block)
    recipe = recipe if steps is None else recipe._replace(steps=steps)
    return {
        rate: train(task, block, seed=SEED, recipe=recipe._replace(rate=rate), part="validation", after=watch(rate))
        for rate in rates
    }


def chosen_rate(task: Task, found: dict[float, Run]) -> float | None:
    """The smallest rate whose training is within `SLACK` of the best; None if there is none that counts."""
    judge = task.measures[0]
    sign = 1 if judge.less_is_better else -1
    scores = {rate: sign * run.measures[judge.key] for rate, run in found.items() if counts(run)}
    return min((rate for rate, score in scores.items() if score <= min(scores.values()) + SLACK), default=None)


def counts(run: Run) -> bool:
    """Whether a training came to its end, with every fixed point found there."""
    return run.diverged is None and run.curve[-1].get("settled", 1.0) == 1.0
