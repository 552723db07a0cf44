"""Several trainings beside each other: kinds of blocks × seeds, each in a directory of its own.

OUT/train.json                  which task this is; a directory without it is not ours
OUT/BLOCK/seed-N/               settings.json, step-…/, state.safetensors while it runs, result.json when it is done,
                                notes.json if there was something to say
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
from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.train import Run, Step, train

MARK, RESULTS, NOTES = "train.json", "results.json", "notes.json"
WRITTEN = (MARK, RESULTS, "results.parquet", "curves.parquet", "curves.svg", "curves.png")


class Study(NamedTuple):
    """What came of it: one run for each block and seed, and sentences to show beside them."""

    task: Task
    runs: tuple[Run, ...]
    notes: tuple[str, ...]


Watch = Callable[[str, int], Callable[[Step], object]]  # told block and seed, returns what is told after each update


def claim(place: Path, task: str, *, resume: bool = False, force: bool = False) -> None:
    """Make ``place`` ours for this task: a new directory, one to go on with, or one that may be replaced.

    Nothing that `cumulant train` did not write is ever deleted.
    """
    if place.exists() and not place.is_dir():
        raise ValueError(sentence("--out", "a directory", f"the file {place}", "Name another place."))
    entries = {p.name for p in place.iterdir()} if place.is_dir() else set()
    if entries and MARK not in entries:
        raise ValueError(sentence("--out", "a new directory", f"{place}, which holds other files", "Name a new one."))
    if MARK in entries and not (resume or force):
        advice = "Pass --resume to go on with it, or --force to train again."
        raise ValueError(sentence("--out", "a new directory", f"{place}, which holds a training", advice))
    if MARK in entries and not force and (held := _task_of(place / MARK)) != task:
        advice = "Name a new directory, or train what it holds."
        raise ValueError(sentence("--resume", f"a training of {task} in {place}", f"one of {held}", advice))
    if force:
        for name in entries & {*WRITTEN, *BLOCK_TYPES}:
            old = place / name
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    place.mkdir(parents=True, exist_ok=True)
    write(place / MARK, json.dumps({"task": task}) + "\n")


def _task_of(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["task"])
    except (ValueError, KeyError, TypeError):
        return "something else"


def study(
    task: Task,
    place: Path,
    *,
    blocks: Sequence[str] = tuple(BLOCK_TYPES),
    seeds: Sequence[int] = (0,),
    steps: int | None = None,
    resume: bool = False,
    watch: Watch = lambda block, seed: lambda step: None,
) -> Study:
    """Train every block with every seed. The same seed draws the same batches whatever the block.

    place   claimed by `claim`
    steps   updates of each training; the task's own number if None
    resume  take finished trainings as they are, and go on with the others
    watch   told what begins, returns what is told after each update
    """
    for block in blocks:
        find_block_type(block)
    runs, notes = [], []
    for seed in seeds:
        for block in dict.fromkeys(blocks):
            recipe = task.recipe_for(block)
            recipe = recipe if steps is None else recipe._replace(steps=steps)
            after, home, mine = watch(block, seed), place / block / f"seed-{seed}", []
            with noted(f"{block}, seed {seed}", mine):
                runs.append(train(task, block, seed=seed, recipe=recipe, place=home, resume=resume, after=after))
            notes += _kept(home / NOTES, mine)
    return Study(task, tuple(runs), tuple(notes))


def _kept(path: Path, said: list[str]) -> list[str]:
    """What was said of a training: a run that was finished before is silent now, and its notes still hold."""
    if said:
        write(path, json.dumps(said, ensure_ascii=False, indent=1) + "\n")
        return said
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


@contextmanager
def noted(what: str, notes: list[str]) -> Iterator[None]:
    """Warnings of a training become notes beside its numbers, each once."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    notes += [f"{what}: {text}" for text in dict.fromkeys(str(w.message) for w in heard)]
