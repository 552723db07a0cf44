"""What a training leaves on disk, in safetensors and JSON alone: models at chosen steps, and the state to go on from.

step-000100/config.json, model.safetensors   and the files of the task; whole or absent
state.safetensors                            weights and moments of AdamW, in one file that is replaced in one step
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.files import new_directory, replacing
from cumulant.nn.kinds import FORMAT
from cumulant.nn.trunk import Stack
from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.tasks import TASKS

CONFIG, WEIGHTS, STATE = "config.json", "model.safetensors", "state.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


class Checkpoint(NamedTuple):
    """A model read from a directory, in eval mode.

    task       its name
    config     what the model is made from
    step       updates it has seen
    seed       of the training
    tokenizer  of `tokenizers`, or None where the task has no text
    """

    model: nn.Module
    task: str
    config: Any
    step: int
    seed: int
    tokenizer: Any


def step_directory(run: Path, step: int) -> Path:
    """
    >>> step_directory(Path("run"), 100).name
    'step-000100'
    """
    return run / f"step-{step:06d}"


def checkpoint_steps(steps: int, count: int = 10) -> tuple[int, ...]:
    """About ``count`` steps from 0 to ``steps``, evenly spaced in their logarithm.

    >>> checkpoint_steps(300)
    (0, 1, 2, 4, 8, 17, 35, 72, 147, 300)
    """
    spaced = [round(steps ** (k / (count - 2))) for k in range(count - 1)]
    return tuple(sorted({0, *spaced, steps}))


def save_checkpoint(run: Path, task: Task, model: nn.Module, config: Stack, *, step: int, seed: int) -> Path:
    """A directory with the model at a step; one that is there already is left as it is, for steps repeat exactly."""
    place = step_directory(run, step)
    if place.exists():
        return place
    with new_directory(place) as draft:
        about = {"format": FORMAT, "task": task.name, "step": step, "seed": seed, "model": asdict(config)}
        texts = {CONFIG: json.dumps(about, indent=1) + "\n", **task.files()}
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        _save({name: p.detach().contiguous() for name, p in model.state_dict().items()}, draft / WEIGHTS, {})
    return place


def load_checkpoint(directory: str | Path) -> Checkpoint:
    """The model that a training left in step-…/, in eval mode, with its tokenizer.

    Nothing but safetensors and JSON is read. A directory that is no checkpoint is refused with one sentence.
    """
    place = Path(directory)
    about, config = _described(place)
    task = TASKS[about["task"]]()
    with torch.random.fork_rng(devices=[]):  # building a model draws numbers; whoever loads one did not ask for that
        model = task.build(config)
    weights, _ = _load(place / WEIGHTS)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    if {name: tuple(p.shape) for name, p in weights.items()} != expected:
        raise ValueError(_foreign(place, "weights that do not fit config.json"))
    model.load_state_dict(weights)
    return Checkpoint(model.eval(), task.name, config, about["step"], about["seed"], _tokenizer(place))


def _described(place: Path) -> tuple[dict, Stack]:
    try:
        about = json.loads((place / CONFIG).read_text(encoding="utf-8"))
        kind = type(TASKS[about["task"]]().standard)
        if not (isinstance(about["step"], int) and isinstance(about["seed"], int)):
            raise TypeError
        if about.get("format") == FORMAT:
            return about, kind(**about["model"])
    except FileNotFoundError:
        raise FileNotFoundError(_foreign(place, f"no {CONFIG}")) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_foreign(place, f"another {CONFIG}")) from error
    raise ValueError(_foreign(place, f"format {about.get('format')} instead of {FORMAT}"))


def _foreign(place: Path, got: str) -> str:
    return sentence("load_checkpoint", "a step-… directory of `cumulant train`", f"{got} in {place}", "Name another.")


def _tokenizer(place: Path):
    if not (place / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(place / "tokenizer.json"))


class Progress(NamedTuple):
    """How far a training is: updates done, seconds spent, and the rows of its curve so far."""

    step: int = 0
    seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


def save_state(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """All that is needed to go on exactly, replaced in one step."""
    tensors = {f"weight.{name}": p for name, p in model.state_dict().items()}
    for name, p in model.named_parameters():
        tensors |= {f"{key}.{name}": optimizer.state[p][key] for key in MOMENTS if p in optimizer.state}
    still = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(run / STATE) as draft:
        _save(still, draft, {"progress": json.dumps(progress._asdict())})


def load_state(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Put a saved state into model and optimizer; None if there is none."""
    path = run / STATE
    if not path.exists():
        return None
    tensors, about = _load(path)
    try:
        progress = Progress(**json.loads(about["progress"]))
        with torch.no_grad():
            for name, p in model.state_dict().items():
                p.copy_(tensors[f"weight.{name}"])  # into memory that torch has aligned: sums keep their order
            for name, p in model.named_parameters():
                if f"step.{name}" in tensors:
                    optimizer.state[p] = {key: tensors[f"{key}.{name}"].clone() for key in MOMENTS}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        advice = "Train again with --force."
        raise ValueError(sentence("--resume", f"a state of this model in {path}", "another", advice)) from error
    return progress._replace(curve=tuple(progress.curve))


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    _safetensors()
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=metadata or None)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(sentence(str(path), "a whole safetensors file", "another", "Train again.")) from error


def _safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError:
        advice = "install cumulant[train]"
        raise ModuleNotFoundError(sentence("train", "safetensors", "no such package", advice)) from None
