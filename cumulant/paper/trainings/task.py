"""The interface of a reference training: data, a model for each kind of block, a loss and metrics."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.nn.block_types import find_block_type
from cumulant.nn.stack import StackConfig, count_built, match_parameters

PARTS = ("validation", "test")  # held-out data: validation selects learning rates, test is reported
EVALUATION_SEEDS = {"validation": 1 << 62, "test": (1 << 62) + 1}  # not the seed of any training step


class Recipe(NamedTuple):
    """How a model is trained, with AdamW.

    steps   updates
    rate    the highest learning rate: reached after ``warmup`` updates, then down a half cosine to a tenth of it
    batch   examples in an update
    warmup  updates
    decay   of weights with two axes or more
    clip    bound on the norm of the whole gradient
    """

    steps: int
    rate: float
    batch: int
    warmup: int = 20
    decay: float = 0.05
    clip: float = 1.0


class Metric(NamedTuple):
    """A number of the table: its key in a result, its heading, its format, and whether lower is better."""

    key: str
    heading: str
    form: str
    less_is_better: bool = True


def device_of_model(model: nn.Module) -> torch.device:
    """Where its parameters are, and its inputs are to be."""
    return next(model.parameters()).device


class Task(ABC):
    """A reference training.

    name      on the command line
    question  one line
    metrics   what `evaluate` returns; the first one decides
    recipe    for the standard block
    rates     learning rates of the blocks, from a search on the validation part (see `search`)
    """

    name: ClassVar[str]
    question: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    recipe: ClassVar[Recipe]
    rates: ClassVar[Mapping[str, float]]

    @property
    @abstractmethod
    def standard(self) -> StackConfig:
        """The configuration of the standard model; the others have as many parameters."""

    @abstractmethod
    def build(self, config: Any) -> nn.Module:
        """The model that a configuration describes."""

    @abstractmethod
    def loss(self, model: Any, batch: int, generator: torch.Generator) -> Tensor:
        """The loss on a batch that the generator draws: on the processor, so that every device gets the same."""

    @abstractmethod
    def evaluate(self, model: Any, part: str = "test") -> dict[str, float]:
        """The metrics on one of `PARTS`, which are not trained on."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of the data."""

    def files(self) -> dict[str, str]:
        """Text files to store with the weights, by file name."""
        return {}

    def configure(self, block: str) -> StackConfig:
        """The configuration of a block with as many parameters as the standard model, to 1 %."""
        if block == "standard":
            return self.standard
        standard = self.standard
        layers = find_block_type(block).layers or standard.layers
        changed = dataclasses.replace(standard, block=block, layers=layers)
        return match_parameters(changed, count_built(standard, self.build), self.build)

    def recipe_for(self, block: str) -> Recipe:
        """The recipe with the learning rate of a block."""
        find_block_type(block)
        return self.recipe._replace(rate=self.rates[block])
