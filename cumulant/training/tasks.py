"""The reference trainings by name."""

from __future__ import annotations

from cumulant.checks import sentence
from cumulant.training.digits import DigitsTask
from cumulant.training.language import LanguageTask
from cumulant.training.recall import RecallTask
from cumulant.training.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (LanguageTask, DigitsTask, RecallTask)}


def find_task(name: str) -> Task:
    """
    >>> find_task("recall").measures[2].heading
    'right'
    """
    if name not in TASKS:
        raise ValueError(sentence("train", f"one of {', '.join(TASKS)}", repr(name), "Choose one of them."))
    return TASKS[name]()
