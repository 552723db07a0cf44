"""Contrastive learning of handwritten digits from two views of each, without labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.contrastive import info_nce
from cumulant.extras import missing_package
from cumulant.nn.stack import BlockStack, StackConfig
from cumulant.paper.trainings.task import EVALUATION_SEEDS, PARTS, Metric, Recipe, Task, device_of_model

SIDE = 8  # pixels
PATCH = 2
FOLDS, HELD_OUT = 5, {"test": 0, "validation": 1}  # which of every five digits are held out, and for what


@dataclass(frozen=True)
class DigitsConfig(StackConfig):
    """A stack of blocks over patches of 2 × 2 pixels, the size of the embedding, and the temperature of the loss."""

    embedding: int = 32
    temperature: float = 0.2


class Digits(NamedTuple):
    """images (N, 8, 8) in [0, 1] and their labels (N,)."""

    images: Tensor
    labels: Tensor


def load_digits(part: str) -> Digits:
    """scikit-learn's digits: 1,077 to "train", and of every five one for "test" and one for "validation", 360 each.

    >>> [len(load_digits(part).labels) for part in ("train", "validation", "test")]
    [1077, 360, 360]
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        raise missing_package("load_digits", "scikit-learn", "train") from None
    data: Any = load()
    fold = torch.arange(len(data.target)) % FOLDS
    selected = (fold == HELD_OUT[part]) if part in HELD_OUT else (fold >= len(HELD_OUT))
    return Digits(torch.from_numpy(data.images)[selected].float() / 16, torch.from_numpy(data.target)[selected])


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel either way, its ink scaled by 0.6 to 1.4, with noise of deviation 0.15."""
    count = len(images)
    wide = nn.functional.pad(images, (1, 1, 1, 1))
    moves = torch.randint(3, (2, count, 1, 1), generator=generator)
    rows, columns = moves[0] + torch.arange(SIDE)[:, None], moves[1] + torch.arange(SIDE)
    moved = wide[torch.arange(count)[:, None, None], rows, columns]
    ink = 0.6 + 0.8 * torch.rand(count, 1, 1, generator=generator)
    return ink * moved + 0.15 * torch.randn(moved.shape, generator=generator)


class DigitsEncoder(nn.Module):
    """Images (N, 8, 8) to unit vectors (N, embedding): patches as tokens, blocks, the mean over tokens, a linear map.

    >>> import torch
    >>> embedding = DigitsEncoder(DigitsConfig(dim=8, heads=2, hidden=8))(torch.rand(3, 8, 8))
    >>> embedding.shape, bool((embedding.norm(dim=-1) - 1).abs().max() < 1e-6)
    (torch.Size([3, 32]), True)
    """

    def __init__(self, config: DigitsConfig):
        super().__init__()
        self.config = config
        self.patch = nn.Linear(PATCH**2, config.dim, bias=False)
        self.position = nn.Parameter(0.5 * torch.randn((SIDE // PATCH) ** 2, config.dim))
        self.trunk = BlockStack(config)
        self.project = nn.Linear(config.dim, config.embedding)

    def tokens(self, images: Tensor) -> Tensor:
        """(N, 16, dim)"""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(images), -1, PATCH**2)
        return self.trunk(self.patch(patches) + self.position)

    def features(self, images: Tensor) -> Tensor:
        """Inputs of a classifier: (N, dim)."""
        return self.tokens(images).mean(1)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.project(self.features(images)), dim=-1)


class DigitsTask(Task):
    """InfoNCE between two views of each of 128 digits; no label is used in training.

    Judged on held-out digits: nats of the loss among all 360, and how many have the label of their nearest neighbour
    among the training digits.
    """

    name = "contrastive"
    question = "How well do these blocks learn digits from pairs of views, without labels?"
    metrics = (Metric("nats", "nats/pair", ".3f"), Metric("accuracy", "nearest neighbour right", ".1%", False))
    recipe = Recipe(steps=160, rate=5e-3, batch=128)
    rates: ClassVar = dict.fromkeys(("standard", "energy", "convex", "equilibrium"), 5e-3)

    @property
    def standard(self) -> DigitsConfig:
        return DigitsConfig()

    def build(self, config: Any) -> DigitsEncoder:
        return DigitsEncoder(config)

    @cached_property
    def train_digits(self) -> Digits:
        return load_digits("train")

    @cached_property
    def held_out(self) -> dict[str, Digits]:
        return {part: load_digits(part) for part in PARTS}

    @property
    def fingerprint(self) -> str:
        parts = [*self.train_digits, *(tensor for part in PARTS for tensor in self.held_out[part])]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()

    def loss(self, model: DigitsEncoder, batch: int, generator: torch.Generator) -> Tensor:
        images = self.train_digits.images
        sample = images[torch.randperm(len(images), generator=generator)[:batch]]
        both = model(torch.cat([view(sample, generator), view(sample, generator)]).to(device_of_model(model)))
        first, second = both.chunk(2)
        return info_nce(first, second, temperature=model.config.temperature, symmetric=True)

    @torch.no_grad()
    def evaluate(self, model: DigitsEncoder, part: str = "test") -> dict[str, float]:
        generator = torch.Generator().manual_seed(EVALUATION_SEEDS[part])
        images, labels = self.held_out[part]
        device = device_of_model(model)
        first, second = (model(view(images, generator).to(device)) for _ in range(2))
        nats = info_nce(first, second, temperature=model.config.temperature, symmetric=True)
        known = model(self.train_digits.images.to(device))
        nearest = (model(images.to(device)) @ known.T).argmax(-1).cpu()
        right = (self.train_digits.labels[nearest] == labels).double().mean()
        return {"nats": float(nats), "accuracy": float(right)}
