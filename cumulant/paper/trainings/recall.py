"""Associative recall from noisy cues, compared with the Bayes-optimal answer.

    k_j uniform on the unit sphere of R^d,  v_j uniform,     cue c = k_J + σ ε,  J uniform,  ε normal
    P(J = j | c) = softmax_j ⟨k_j, c⟩ / σ²,                  P(v | c) = Σ_j P(J = j | c) [v_j = v]

The posterior is attention at β = σ⁻²: keys of one norm, the cue as the query, values as values. No answer is better on
average, so that nats above it are nats above what can be known. Keys are drawn anew for every cue, so that cues say
nothing about each other. A head of `ConvexBlock` matches and recalls in one space: its width is to exceed d.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from cumulant.kernels import moments
from cumulant.nn.stack import BlockStack, StackConfig
from cumulant.paper.trainings.task import EVALUATION_SEEDS, Metric, Recipe, Task, device_of_model

EXAMPLES = 512  # of the test, and of validation


@dataclass(frozen=True)
class RecallConfig(StackConfig):
    """A stack of blocks and the problem.

    features  d, numbers in a key
    values    number of values
    pairs     number of pairs
    asked     number of cues
    noise     σ
    """

    heads: int = 2
    features: int = 8
    values: int = 16
    pairs: int = 12
    asked: int = 8
    noise: float = 0.3


class Example(NamedTuple):
    """keys (batch, pairs, d), their values (batch, pairs), cues (batch, asked, d), their answers (batch, asked)."""

    keys: Tensor
    values: Tensor
    cues: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> Example:
        """The same on a device."""
        return Example(*(tensor.to(device) for tensor in self))


def draw_pairs(config: RecallConfig, batch: int, generator: torch.Generator) -> Example:
    """Random keys with random values, and noisy copies of random keys.

    >>> example = draw_pairs(RecallConfig(features=4, pairs=3, asked=2), 5, torch.Generator())
    >>> example.keys.shape, example.cues.shape, example.answers.shape
    (torch.Size([5, 3, 4]), torch.Size([5, 2, 4]), torch.Size([5, 2]))
    """
    keys = normalize(torch.randn(batch, config.pairs, config.features, generator=generator), dim=-1)
    values = torch.randint(config.values, (batch, config.pairs), generator=generator)
    index = torch.randint(config.pairs, (batch, config.asked), generator=generator)  # independent cues
    true = keys.gather(1, index[..., None].expand(-1, -1, config.features))
    cues = true + config.noise * torch.randn(true.shape, generator=generator)
    return Example(keys, values, cues, values.gather(1, index))


def best_answer(config: RecallConfig, example: Example) -> Tensor:
    """P(v | c) of every cue, (batch, asked, values): attention from the cues to the keys at β = σ⁻².

    >>> config = RecallConfig(features=4, values=3, pairs=2, asked=1, noise=0.5)
    >>> total = best_answer(config, draw_pairs(config, 5, torch.Generator())).sum(-1)
    >>> total.shape, bool((total - 1).abs().max() < 1e-6)
    (torch.Size([5, 1]), True)
    """
    values = one_hot(example.values, config.values).to(example.keys.dtype)
    posterior = moments(example.cues / config.noise**2, example.keys, values, statistics=("mean",)).mean
    assert posterior is not None
    return posterior


class RecallModel(nn.Module):
    """A token is a key with its value, or a cue with a question mark; the answer is read off the token of the cue.

    There are no positions: the pairs are a set. Examples to scores (batch, asked, values).

    >>> import torch
    >>> config = RecallConfig(dim=8, heads=2, hidden=8, features=4, values=3, pairs=2, asked=1)
    >>> RecallModel(config)(draw_pairs(config, 5, torch.Generator())).shape
    torch.Size([5, 1, 3])
    """

    def __init__(self, config: RecallConfig):
        super().__init__()
        self.config = config
        self.key = nn.Linear(config.features, config.dim, bias=False)
        self.value = nn.Embedding(config.values + 1, config.dim)  # the last one is the question mark
        self.trunk = BlockStack(config)
        self.answer = nn.Linear(config.dim, config.values, bias=False)
        nn.init.normal_(self.key.weight)  # keys and values enter with the same size

    def hidden(self, example: Example) -> Tensor:
        """Final states of all tokens, pairs first: (batch, pairs + asked, dim)."""
        question = torch.full_like(example.answers, self.config.values)
        values = self.value(torch.cat([example.values, question], 1))
        return self.trunk(self.key(torch.cat([example.keys, example.cues], 1)) + values)

    def forward(self, example: Example) -> Tensor:
        return self.answer(self.hidden(example)[:, example.values.shape[1] :])


class RecallTask(Task):
    """12 pairs of keys in 8 dimensions and 16 values, then 8 cues with noise of 0.3; fresh ones at every step."""

    name = "recall"
    question = "How near do these blocks come to the best possible recall from corrupted cues?"
    metrics = (
        Metric("excess", "nats above best", ".3f"),
        Metric("nats", "nats", ".3f"),
        Metric("accuracy", "right", ".1%", less_is_better=False),
    )
    recipe = Recipe(steps=300, rate=1e-2, batch=64)
    rates: ClassVar = {"standard": 1e-2, "energy": 1e-2, "convex": 2e-3, "equilibrium": 1e-2}

    @property
    def standard(self) -> RecallConfig:
        return RecallConfig()

    def build(self, config: Any) -> RecallModel:
        return RecallModel(config)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self.standard)).encode()).hexdigest()

    def loss(self, model: RecallModel, batch: int, generator: torch.Generator) -> Tensor:
        example = draw_pairs(model.config, batch, generator).to(device_of_model(model))
        return cross_entropy(model(example).flatten(0, 1), example.answers.flatten())

    @torch.no_grad()
    def evaluate(self, model: RecallModel, part: str = "test") -> dict[str, float]:
        """On a fixed set of examples."""
        example = draw_pairs(model.config, EXAMPLES, torch.Generator().manual_seed(EVALUATION_SEEDS[part]))
        example = example.to(device_of_model(model))
        scores, answers = model(example).flatten(0, 1), example.answers.flatten()
        best = best_answer(model.config, example).flatten(0, 1).gather(1, answers[:, None]).log().mean()
        nats = float(cross_entropy(scores, answers))
        right = (scores.argmax(-1) == answers).double().mean()
        return {"excess": nats + float(best), "nats": nats, "accuracy": float(right)}
