"""Associative recall: pairs of keys and values are shown, then keys alone; which value belongs to each?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cumulant.nn.trunk import Stack, Trunk
from cumulant.training.task import EVALUATED, Measure, Recipe, Task


@dataclass(frozen=True)
class RecallConfig(Stack):
    """A stack of blocks and the alphabet: how many keys and values there are, how many pairs are shown and asked."""

    keys: int = 32
    values: int = 32
    pairs: int = 8
    asked: int = 8


class Example(NamedTuple):
    """keys (batch, pairs + asked); values alike, where ``asked`` the number of values stands for "which?"; answers."""

    keys: Tensor
    values: Tensor
    answers: Tensor


def draw_pairs(config: RecallConfig, batch: int, generator: torch.Generator) -> Example:
    """Different keys with values drawn at random, and some of the keys once more.

    >>> keys, values, answers = draw_pairs(RecallConfig(keys=4, values=3, pairs=2, asked=1), 5, torch.Generator())
    >>> keys.shape, values[:, -1].tolist(), answers.shape
    (torch.Size([5, 3]), [3, 3, 3, 3, 3], torch.Size([5, 1]))
    """
    order = torch.rand(batch, config.keys, generator=generator).argsort(-1)
    keys = order[:, : config.pairs]
    values = torch.randint(config.values, keys.shape, generator=generator)
    chosen = torch.rand(batch, config.pairs, generator=generator).argsort(-1)[:, : config.asked]
    open_values = values.new_full(chosen.shape, config.values)
    return Example(
        torch.cat([keys, keys.gather(1, chosen)], -1),
        torch.cat([values, open_values], -1),
        values.gather(1, chosen),
    )


class RecallModel(nn.Module):
    """A token is a key with its value, or with the sign for "which?"; the answer is read with the values' embeddings.

    There are no positions: the pairs are a set. (batch, n) keys and values to (batch, n, values) scores.

    >>> import torch
    >>> model = RecallModel(RecallConfig(dim=8, heads=2, hidden=8, keys=4, values=3, pairs=2, asked=1))
    >>> model(torch.tensor([[0, 1, 0]]), torch.tensor([[2, 1, 3]])).shape
    torch.Size([1, 3, 3])
    """

    def __init__(self, config: RecallConfig):
        super().__init__()
        self.config = config
        self.key = nn.Embedding(config.keys, config.dim)
        self.value = nn.Embedding(config.values + 1, config.dim)
        self.trunk = Trunk(config)
        self.answer = nn.Linear(config.dim, config.values, bias=False)

    def hidden(self, keys: Tensor, values: Tensor) -> Tensor:
        return self.trunk(self.key(keys) + self.value(values))

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return self.answer(self.hidden(keys, values))


class RecallTask(Task):
    """8 pairs out of 32 keys and 32 values, shown and then asked for; fresh ones at every step."""

    name = "recall"
    question = "How well do these blocks recall which value was shown with a key?"
    measures = (Measure("nats", "nats/answer", ".3f"), Measure("accuracy", "right", ".1%", less_is_better=False))
    recipe = Recipe(steps=250, rate=3e-3, batch=128)
    # by held-out nats after 150 steps: of 3e-3 and 6e-3 (energy, convex), 2e-3 and 4e-3 (equilibrium); one for standard
    rates: ClassVar = {"standard": 3e-3, "energy": 6e-3, "convex": 6e-3, "equilibrium": 4e-3}

    @property
    def standard(self) -> RecallConfig:
        return RecallConfig()

    def build(self, config: Any) -> RecallModel:
        return RecallModel(config)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self.standard)).encode()).hexdigest()

    def loss(self, model: RecallModel, batch: int, generator: torch.Generator) -> Tensor:
        return cross_entropy(*self._answered(model, draw_pairs(model.config, batch, generator)))

    def _answered(self, model: RecallModel, shown: Example) -> tuple[Tensor, Tensor]:
        """Scores of all answers that are asked for, and which are right."""
        scores = model(shown.keys, shown.values)[:, -model.config.asked :]
        return scores.flatten(0, 1), shown.answers.flatten()

    @torch.no_grad()
    def evaluate(self, model: RecallModel) -> dict[str, float]:
        """On 256 examples that are always the same."""
        shown = draw_pairs(model.config, 256, torch.Generator().manual_seed(EVALUATED))
        scores, answers = self._answered(model, shown)
        right = (scores.argmax(-1) == answers).double().mean()
        return {"nats": float(cross_entropy(scores, answers)), "accuracy": float(right)}
