"""Checkpoints of `cumulant train`: a step-… directory with config.json, model.safetensors and a tokenizer.

Only JSON and safetensors are read. The class of a model is chosen by this package, not by the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from cumulant.checks import sentence
from cumulant.nn.block_types import FORMAT
from cumulant.nn.language_model import LanguageConfig, LanguageModel


class TrainedLanguageModel(NamedTuple):
    """A language model, the updates it has seen, and the seed of its training."""

    model: LanguageModel
    step: int
    seed: int


def read_trained(directory: Path) -> TrainedLanguageModel:
    """The language model of a checkpoint, in eval mode; trainings of other tasks are refused."""
    config_json = json.loads((directory / "config.json").read_bytes())
    if config_json["task"] != "language":
        got, advice = f"one of {config_json['task']!r} in {directory}", "What is observed reads texts; name another."
        raise ValueError(sentence("load.name", "a checkpoint of `cumulant train language`", got, advice))
    if config_json.get("format") != FORMAT:
        raise ValueError(_broken(directory, f"format {config_json.get('format')} instead of {FORMAT}"))
    try:
        config, step, seed = LanguageConfig(**config_json["model"]), int(config_json["step"]), int(config_json["seed"])
    except (TypeError, ValueError) as error:
        raise ValueError(_broken(directory, f"another config.json ({error})".removesuffix("."))) from error
    with torch.random.fork_rng(devices=[]):  # building a model draws numbers that are then replaced
        model = LanguageModel(config)
    weights = _weights(directory)
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in model.state_dict().items()}:
        raise ValueError(_broken(directory, "weights that do not fit config.json"))
    model.load_state_dict(weights)
    return TrainedLanguageModel(model.eval(), step, seed)


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(directory / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ValueError(_broken(directory, f"a model.safetensors that cannot be read ({error})")) from error


def _broken(directory: Path, got: str) -> str:
    return sentence("load.name", "a checkpoint of `cumulant train`", f"{got} in {directory}", "Train it again.")
