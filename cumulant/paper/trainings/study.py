"""A set of trainings, kinds of blocks × seeds, each in a directory of its own.

OUT/train.json                  the task; marks the directory as an output of `cumulant train`
OUT/BLOCK/seed-N/               settings.json, step-…/, state.safetensors while it runs, result.json when it is done,
                                notes.json if there were warnings
OUT/results.json, *.parquet, curves.svg, curves.png    when all are
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cumulant.checks import sentence
from cumulant.files import write
from cumulant.nn.block_types import BLOCK_TYPES, find_block_type
from cumulant.paper.output import entries
from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.train import TrainingRun, TrainingStep, train

MARK, RESULTS, NOTES = "train.json", "results.json", "notes.json"
WRITTEN = (MARK, RESULTS, "results.parquet", "curves.parquet", "curves.svg", "curves.png")


class Study(NamedTuple):
    """The results: one run for each block and seed, and notes for the reader."""

    task: Task
    runs: tuple[TrainingRun, ...]
    notes: tuple[str, ...]


Watch = Callable[[str, int], Callable[[TrainingStep], object]]  # block, seed → callback after each update


def prepare_directory(directory: Path, task: str, *, resume: bool = False, force: bool = False) -> None:
    """Prepare a directory for this task: a new one, one to resume, or one that may be replaced.

    Nothing that `cumulant train` did not write is ever deleted.
    """
    files = entries(directory)
    if files and MARK not in files:
        raise ValueError(
            sentence("--out", "a new directory", f"{directory}, which holds other files", "Name a new one.")
        )
    if MARK in files and not (resume or force):
        advice = "Pass --resume to go on with it, or --force to train again."
        raise ValueError(sentence("--out", "a new directory", f"{directory}, which holds a training", advice))
    if MARK in files and not force and (other := _task_of(directory / MARK)) != task:
        advice = "Name a new directory, or train what it holds."
        raise ValueError(sentence("--resume", f"a training of {task} in {directory}", f"one of {other}", advice))
    if force:
        for name in files & {*WRITTEN, *BLOCK_TYPES}:
            old = directory / name
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / MARK, json.dumps({"task": task}) + "\n")


def _task_of(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["task"])
    except (ValueError, KeyError, TypeError):
        return "something else"


def study(
    task: Task,
    directory: Path,
    *,
    blocks: Sequence[str] = tuple(BLOCK_TYPES),
    seeds: Sequence[int] = (0,),
    steps: int | None = None,
    resume: bool = False,
    device: str = "cpu",
    watch: Watch = lambda block, seed: lambda step: None,
) -> Study:
    """Train every block with every seed. Batches depend on the seed and not on the block.

    directory  from `prepare_directory`
    steps      updates of each training; the task's own number if None
    resume     skip finished trainings, and go on with the others
    device     as in `train`
    watch      called with block and seed before a training; returns its callback after each update
    """
    for block in blocks:
        find_block_type(block)
    runs, notes = [], []
    for seed in seeds:
        for block in dict.fromkeys(blocks):
            recipe = task.recipe_for(block)
            recipe = recipe if steps is None else recipe._replace(steps=steps)
            on_step, home, new = watch(block, seed), directory / block / f"seed-{seed}", []
            where = {"directory": home, "resume": resume, "device": device}
            with collect_warnings(f"{block}, seed {seed}", new):
                runs.append(train(task, block, seed=seed, recipe=recipe, on_step=on_step, **where))
            notes += _stored_notes(home / NOTES, new)
    return Study(task, tuple(runs), tuple(notes))


def _stored_notes(path: Path, new: list[str]) -> list[str]:
    """The notes of a training: the new ones, which are stored, or those of an earlier run."""
    if new:
        write(path, json.dumps(new, ensure_ascii=False, indent=1) + "\n")
        return new
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


@contextmanager
def collect_warnings(what: str, notes: list[str]) -> Iterator[None]:
    """Append the warnings of a training to its notes, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    notes += [f"{what}: {text}" for text in dict.fromkeys(str(w.message) for w in caught)]
