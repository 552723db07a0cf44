"""Checkpoints of `cumulant train`: a step-… directory with config.json, model.safetensors and a tokenizer.

Only JSON and safetensors are read. Which class a model has is written in this package, not in the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from cumulant.checks import sentence
from cumulant.nn.block_types import FORMAT
from cumulant.nn.language_model import LanguageConfig, LanguageModel

TOLD = {"task", "step", "seed", "model"}  # what config.json of a training says


class Trained(NamedTuple):
    """A language model, the updates it has seen, and the seed of its training."""

    model: LanguageModel
    step: int
    seed: int


def is_trained(directory: Path) -> bool:
    """Whether a directory says of itself that `cumulant train` wrote it."""
    try:
        about = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.keys() >= TOLD and "model_type" not in about


def read_trained(directory: Path) -> Trained:
    """The language model of a step, in eval mode; other trainings have no text to read and are refused."""
    about = json.loads((directory / "config.json").read_bytes())
    if about["task"] != "language":
        got, advice = f"one of {about['task']!r} in {directory}", "What is observed reads texts; name another."
        raise ValueError(sentence("load.name", "a checkpoint of `cumulant train language`", got, advice))
    if about.get("format") != FORMAT:
        raise ValueError(_broken(directory, f"format {about.get('format')} instead of {FORMAT}"))
    try:
        config, step, seed = LanguageConfig(**about["model"]), int(about["step"]), int(about["seed"])
    except (TypeError, ValueError) as error:
        raise ValueError(_broken(directory, f"another config.json ({error})".removesuffix("."))) from error
    with torch.random.fork_rng(devices=[]):  # building a model draws numbers that are then replaced
        model = LanguageModel(config)
    weights = _weights(directory)
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in model.state_dict().items()}:
        raise ValueError(_broken(directory, "weights that do not fit config.json"))
    model.load_state_dict(weights)
    return Trained(model.eval(), step, seed)


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(directory / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ValueError(_broken(directory, f"a model.safetensors that cannot be read ({error})")) from error


def _broken(directory: Path, got: str) -> str:
    return sentence("load.name", "a checkpoint of `cumulant train`", f"{got} in {directory}", "Train it again.")
