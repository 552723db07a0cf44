"""Checkpoints of a training in safetensors and JSON: models at some steps, and the state to resume from.

step-000100/config.json, model.safetensors   and the files of the task; written atomically
state.safetensors                            weights and moments of AdamW, replaced atomically
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.files import new_directory, replacing
from cumulant.nn.block_types import FORMAT
from cumulant.nn.stack import StackConfig
from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.tasks import TASKS

CONFIG, WEIGHTS, STATE = "config.json", "model.safetensors", "state.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the state of AdamW for each parameter


class Checkpoint(NamedTuple):
    """A model read from a directory, in eval mode.

    task       its name
    config     of the model
    step       updates done
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


def save_checkpoint(run: Path, task: Task, model: nn.Module, config: StackConfig, *, step: int, seed: int) -> Path:
    """Save the model at a step; an existing directory is kept, because steps are reproducible."""
    directory = step_directory(run, step)
    if directory.exists():
        return directory
    with new_directory(directory) as draft:
        metadata = {"format": FORMAT, "task": task.name, "step": step, "seed": seed, "model": asdict(config)}
        texts = {CONFIG: json.dumps(metadata, indent=1) + "\n", **task.files()}
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        _save({name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}, draft / WEIGHTS, {})
    return directory


def load_checkpoint(directory: str | Path) -> Checkpoint:
    """The model of a step-… directory, in eval mode, with its tokenizer.

    Only safetensors and JSON are read; another directory raises an error.
    """
    directory = Path(directory)
    metadata, config = _read_config(directory)
    task = TASKS[metadata["task"]]()
    with torch.random.fork_rng(devices=[]):  # initialisation must not advance the generator of the caller
        model = task.build(config)
    weights, _ = _load(directory / WEIGHTS)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    if {name: tuple(p.shape) for name, p in weights.items()} != expected:
        raise ValueError(_not_a_checkpoint(directory, "weights that do not fit config.json"))
    model.load_state_dict(weights)
    return Checkpoint(model.eval(), task.name, config, metadata["step"], metadata["seed"], _tokenizer(directory))


def _read_config(directory: Path) -> tuple[dict, StackConfig]:
    try:
        metadata = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        kind = type(TASKS[metadata["task"]]().standard)
        if not (isinstance(metadata["step"], int) and isinstance(metadata["seed"], int)):
            raise TypeError
        if metadata.get("format") == FORMAT:
            return metadata, kind(**metadata["model"])
    except FileNotFoundError:
        raise FileNotFoundError(_not_a_checkpoint(directory, f"no {CONFIG}")) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_not_a_checkpoint(directory, f"another {CONFIG}")) from error
    raise ValueError(_not_a_checkpoint(directory, f"format {metadata.get('format')} instead of {FORMAT}"))


def _not_a_checkpoint(directory: Path, got: str) -> str:
    expected = "a step-… directory of `cumulant train`"
    return sentence("load_checkpoint", expected, f"{got} in {directory}", "Name another.")


def _tokenizer(directory: Path):
    if not (directory / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


class Progress(NamedTuple):
    """The progress of a training: updates done, seconds, and the rows of its curve."""

    step: int = 0
    seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


def save_state(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Save all that is needed to resume exactly, replaced atomically."""
    tensors = {f"weight.{name}": p for name, p in model.state_dict().items()}
    for name, p in model.named_parameters():
        tensors |= {f"{key}.{name}": optimizer.state[p][key] for key in MOMENTS if p in optimizer.state}
    detached = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(run / STATE) as temporary:
        _save(detached, temporary, {"progress": json.dumps(progress._asdict())})


def load_state(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Load a saved state into model and optimizer; None if there is none."""
    path = run / STATE
    if not path.exists():
        return None
    tensors, metadata = _load(path)
    try:
        progress = Progress(**json.loads(metadata["progress"]))
        with torch.no_grad():
            for name, p in model.state_dict().items():
                p.copy_(tensors[f"weight.{name}"])  # a copy into aligned memory keeps the order of sums
            for name, p in model.named_parameters():
                if f"step.{name}" in tensors:
                    optimizer.state[p] = {key: tensors[f"{key}.{name}"].to(p.device, copy=True) for key in MOMENTS}
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
        raise missing_package("A checkpoint", "safetensors", "train") from None
