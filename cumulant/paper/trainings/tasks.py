"""The registry of reference trainings."""

from __future__ import annotations

from cumulant.checks import sentence
from cumulant.paper.trainings.digits import DigitsTask
from cumulant.paper.trainings.language import LanguageTask
from cumulant.paper.trainings.recall import RecallTask
from cumulant.paper.trainings.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (LanguageTask, DigitsTask, RecallTask)}


def find_task(name: str) -> Task:
    """
    >>> find_task("recall").metrics[2].heading
    'right'
    """
    if name not in TASKS:
        raise ValueError(sentence("train", f"one of {', '.join(TASKS)}", repr(name), "Choose one of them."))
    return TASKS[name]()
