"""One training: a task, a kind of block, a seed. Random numbers of a step depend on the seed and the step only."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import device_of, sentence
from cumulant.files import write
from cumulant.nn.block_types import FORMAT
from cumulant.nn.equilibrium import EquilibriumBlock
from cumulant.nn.stack import StackConfig, count_parameters
from cumulant.paper.trainings.checkpoints import (
    STATE,
    Progress,
    checkpoint_steps,
    load_state,
    save_checkpoint,
    save_state,
)
from cumulant.paper.trainings.task import PARTS, Recipe, Task

SETTINGS, RESULT = "settings.json", "result.json"
SAVED_EVERY = 25  # steps; at most so many are repeated after an interruption


class TrainingStep(NamedTuple):
    """The state after an update: number of updates, loss of the last one, and the model."""

    step: int
    loss: float
    model: nn.Module


class TrainingRun(NamedTuple):
    """A finished training.

    metrics   on the test part, by the keys of the task
    curve     rows of step and metrics, at the steps of the checkpoints; for fixed points also ``converged``, the share
              that converged in the evaluation
    seconds   of training, evaluation included
    diverged  the step after which the loss was not finite, where the training ended; None otherwise
    """

    task: str
    block: str
    seed: int
    parameters: int
    steps: int
    metrics: dict[str, float]
    curve: tuple[dict[str, float], ...]
    seconds: float
    diverged: int | None = None


def train(
    task: Task,
    block: str = "standard",
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    part: str = "test",
    directory: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    on_step: Callable[[TrainingStep], object] = lambda step: None,
) -> TrainingRun:
    """Train a model with blocks of one kind, and evaluate it.

    recipe     the task's own for this block if None
    part       data of the metrics: "validation" to select something, otherwise "test"
    directory  for checkpoints, and for the state every 25 steps; None stores nothing
    resume     go on from the state in ``directory``: equal to the bit to an uninterrupted run on the same machine
    device     of model and batches; initial weights and batches are drawn on the processor, the same for all devices
    on_step    called after every update

    >>> from cumulant.paper.trainings.recall import RecallTask
    >>> recipe = RecallTask.recipe._replace(steps=2, batch=4)
    >>> run = train(RecallTask(), recipe=recipe)
    >>> [row["step"] for row in run.curve], sorted(run.metrics)
    ([0, 1, 2], ['accuracy', 'excess', 'nats'])
    """
    recipe = _checked(recipe or task.recipe_for(block))
    if part not in PARTS:
        raise ValueError(sentence("train.part", f"one of {', '.join(PARTS)}", repr(part), "Pick one."))
    config, target = task.configure(block), device_of("train.device", device)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        settings = _settings(task, config, recipe, seed, part)
        settings |= {} if device == "cpu" else {"device": device}  # sums are formed in another order there
        done = _prepare(directory, settings, resume)
        if done is not None:
            return done
    model = _initial(task, config, seed).to(target)
    optimizer = _optimizer(model, recipe)
    progress = (load_state(directory, model, optimizer) if directory is not None else None) or Progress()
    progress, diverged = _Loop(task, config, recipe, seed, part, directory, on_step).run(model, optimizer, progress)
    metrics = {m.key: progress.curve[-1][m.key] for m in task.metrics} if diverged is None else {}
    size = count_parameters(model)
    run = TrainingRun(task.name, block, seed, size, recipe.steps, metrics, progress.curve, progress.seconds, diverged)
    if directory is not None:
        write(directory / RESULT, json.dumps(run._asdict(), indent=1) + "\n")
        (directory / STATE).unlink(missing_ok=True)
    return run


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of an update: a linear rise, then half a cosine down to a tenth.

    >>> recipe = Recipe(steps=100, rate=1.0, batch=1, warmup=10)
    >>> [round(rate_at(recipe, step), 3) for step in (0, 9, 50, 100)]
    [0.1, 0.982, 0.55, 0.1]
    """
    rise = min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
    return recipe.rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / recipe.steps))


@dataclasses.dataclass
class _Loop:
    task: Task
    config: StackConfig
    recipe: Recipe
    seed: int
    part: str
    directory: Path | None
    on_step: Callable[[TrainingStep], object]

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress):
        """Updates until the last step; returns the progress, and the step after which the loss was not finite."""
        steps, marks = self.recipe.steps, checkpoint_steps(self.recipe.steps)
        before, start = progress.seconds, time.perf_counter()
        while True:
            if progress.step in marks and not (progress.curve and progress.curve[-1]["step"] == progress.step):
                row = self._evaluate(model, progress.step)
                if not all(map(math.isfinite, row.values())):
                    return progress, progress.step
                progress = progress._replace(curve=(*progress.curve, row))
            progress = progress._replace(seconds=before + time.perf_counter() - start)
            if self.directory is not None and (progress.step in marks or progress.step % SAVED_EVERY == 0):
                save_state(self.directory, model, optimizer, progress)
            if progress.step == steps:
                return progress, None
            loss = self._update(model, optimizer, progress.step)
            if not math.isfinite(loss):
                return progress, progress.step
            progress = progress._replace(step=progress.step + 1)
            self.on_step(TrainingStep(progress.step, loss, model))

    def _evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if self.directory is not None:
            save_checkpoint(self.directory, self.task, model, self.config, step=step, seed=self.seed)
        model.eval()
        with _convergence(model) as flags:
            metrics = self.task.evaluate(model, self.part)
        model.train()
        return {"step": step, **metrics, **({"converged": float(torch.cat(flags).double().mean())} if flags else {})}

    def _update(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        generator = torch.Generator().manual_seed((self.seed << 32) + step)
        optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(model, self.recipe.batch, generator)
        value = float(loss.detach())
        if math.isfinite(value):
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(self.recipe, step)
            optimizer.step()
        return value


@contextmanager
def _convergence(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects whether the fixed points of `EquilibriumBlock`s converged."""
    flags: list[Tensor] = []

    def record(block: nn.Module, args: tuple, output: Tensor) -> None:
        assert isinstance(block, EquilibriumBlock)
        if block.last is not None:
            flags.append(block.last.converged.flatten())

    handles = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, EquilibriumBlock)]
    try:
        yield flags
    finally:
        for handle in handles:
            handle.remove()


def _initial(task: Task, config: StackConfig, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return task.build(config)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)


def _checked(recipe: Recipe) -> Recipe:
    for name in ("steps", "rate", "batch", "clip"):
        if not getattr(recipe, name) > 0:
            raise ValueError(sentence(f"train.{name}", "a positive number", getattr(recipe, name), "Give one."))
    return recipe


def _settings(task: Task, config: StackConfig, recipe: Recipe, seed: int, part: str) -> dict:
    """All settings that determine a training, flat, so that a difference can be named."""
    general = {"format": FORMAT, "task": task.name, "seed": seed, "part": part, "data": task.fingerprint}
    return {**general, **recipe._asdict(), **dataclasses.asdict(config)}


def _prepare(directory: Path, settings: dict, resume: bool) -> TrainingRun | None:
    """Check that ``directory`` holds a training with these settings, or none; returns the run if it is finished."""
    if not (directory / SETTINGS).exists():
        write(directory / SETTINGS, json.dumps(settings, indent=1) + "\n")
        return None
    if not resume:
        advice = "Pass --resume to go on with it, or --force to train again."
        raise ValueError(sentence("train.directory", "a new directory", f"{directory}, which holds a training", advice))
    stored = _stored(directory / SETTINGS)
    differ = [key for key in {**stored, **settings} if stored.get(key) != settings.get(key)]
    if differ:
        then = ", ".join(f"{key} {stored.get(key)}" for key in differ)
        now = ", ".join(f"{key} {settings.get(key)}" for key in differ)
        advice = "Pass the same settings, or name a new directory."
        raise ValueError(sentence("--resume", f"{then} as in {directory}", now, advice))
    return _finished(directory)


def _stored(path: Path) -> dict:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(stored, dict):
            return stored
    except ValueError:
        pass
    raise ValueError(sentence("--resume", f"the settings of a training in {path}", "another text", "Use --force."))


def _finished(directory: Path) -> TrainingRun | None:
    if not (directory / RESULT).exists():
        return None
    try:
        run = TrainingRun(**_stored(directory / RESULT))
        return run._replace(curve=tuple(run.curve))
    except TypeError:
        advice = "Delete it, or train again with --force."
        raise ValueError(sentence("--resume", f"a result in {directory / RESULT}", "something else", advice)) from None
