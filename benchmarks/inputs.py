"""Seeded tensors for the cases. ``spread`` is the standard deviation of the scores: 1 is ordinary, 4 is sharp."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from cumulant.nn.language_model import LanguageConfig, LanguageModel

ORDINARY, SHARP = 1.0, 4.0


class Tensors(NamedTuple):
    """Queries and atoms, and directions of their size for derivatives."""

    eta: Tensor  # (1, heads, queries, d)
    atoms: Tensor  # (1, heads, n, d)
    values: Tensor  # (1, heads, n, d)
    along_mean: Tensor  # (1, heads, queries, d)
    along_normalizer: Tensor  # (1, heads, queries)

    def first(self, n: int) -> Tensors:
        """The first ``n`` queries and atoms."""
        return Tensors(*(t[:, :, :n].contiguous() for t in self))


@dataclass(frozen=True)
class Attention:
    """Normal queries and keys; scores have standard deviation ``spread``."""

    heads: int
    queries: int
    atoms: int
    dim: int
    spread: float = ORDINARY

    def __str__(self) -> str:
        heads = f"{self.heads} heads × " if self.heads > 1 else ""
        size = f"{self.queries}" if self.queries == self.atoms else f"{self.queries} queries × {self.atoms} patterns"
        return f"{heads}{size}, d={self.dim}" + sharpness(self.spread)

    def __call__(self) -> Tensors:
        def normal(*size: int) -> Tensor:
            return torch.randn(1, self.heads, *size, generator=seed)

        seed = torch.Generator().manual_seed(0)
        q, n, d = self.queries, self.atoms, self.dim
        eta = normal(q, d) * (self.spread / d**0.5)
        return Tensors(eta, normal(n, d), normal(n, d), normal(q, d), normal(q))

    def small(self) -> Attention:
        """A few blocks of the same kind."""
        return replace(self, heads=min(self.heads, 2), queries=min(self.queries, 384), atoms=min(self.atoms, 384))


class Layered(NamedTuple):
    """Tokens, the direction of their gradient, and torch's layer with the parameters."""

    tokens: Tensor  # (batch, n, dim)
    along: Tensor  # (batch, n, dim)
    layer: nn.MultiheadAttention


@dataclass(frozen=True)
class Sequences:
    """Normal tokens and a multi-head layer whose scores have standard deviation ``spread``."""

    batch: int
    tokens: int
    dim: int
    heads: int
    spread: float = ORDINARY

    def __str__(self) -> str:
        return f"{self.batch} × {self.tokens} tokens, {self.heads} heads, d={self.dim}" + sharpness(self.spread)

    def __call__(self) -> Layered:
        seed = torch.Generator().manual_seed(0)
        x, along = torch.randn(2, self.batch, self.tokens, self.dim, generator=seed)
        layer = nn.MultiheadAttention(self.dim, self.heads, batch_first=True)
        with torch.no_grad():
            for weight in (layer.in_proj_weight, layer.out_proj.weight):
                weight.copy_(torch.randn(weight.shape, generator=seed) / self.dim**0.5)
            layer.in_proj_weight[: self.dim] *= self.spread
        return Layered(x, along, layer)

    def small(self) -> Sequences:
        return replace(self, batch=min(self.batch, 2), tokens=min(self.tokens, 128))


class TrainingBatch(NamedTuple):
    """A language model, and what it reads and is to say."""

    model: LanguageModel
    windows: Tensor  # (batch, context + 1)


@dataclass(frozen=True)
class Update:
    """The reference language model and random tokens for one update."""

    batch: int

    def __str__(self) -> str:
        return f"language model, {self.batch} windows of {LanguageConfig().context} tokens"

    def __call__(self) -> TrainingBatch:
        config, seed = LanguageConfig(), torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = LanguageModel(config)
        return TrainingBatch(model, torch.randint(config.vocabulary, (self.batch, config.context + 1), generator=seed))

    def small(self) -> Update:
        return Update(min(self.batch, 2))


class Classes(NamedTuple):
    """A table of logits given by its two factors, and the right column of every row."""

    rows: Tensor  # (n, d), requires a gradient
    columns: Tensor  # (classes, d), requires a gradient
    targets: Tensor  # (n,)
    temperature: float


@dataclass(frozen=True)
class Pairs:
    """Unit vectors; query i belongs to key i. The temperature gives the logits their ``spread``."""

    n: int
    dim: int
    spread: float = ORDINARY

    def __str__(self) -> str:
        return f"N={self.n}, d={self.dim}" + sharpness(self.spread)

    def __call__(self) -> Classes:
        seed = torch.Generator().manual_seed(0)
        x, y = normalize(torch.randn(2, self.n, self.dim, generator=seed), dim=-1)
        temperature = 1 / (self.spread * self.dim**0.5)
        return Classes(x.clone().requires_grad_(), y.clone().requires_grad_(), torch.arange(self.n), temperature)

    def small(self) -> Pairs:
        return replace(self, n=min(self.n, 384))


@dataclass(frozen=True)
class Vocabulary:
    """Hidden states against the rows of an output matrix; logits have standard deviation ``spread``."""

    tokens: int
    words: int
    dim: int
    spread: float = ORDINARY

    def __str__(self) -> str:
        return f"{self.tokens} × {self.words}, d={self.dim}" + sharpness(self.spread)

    def __call__(self) -> Classes:
        seed = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.tokens, self.dim, generator=seed)
        weight = torch.randn(self.words, self.dim, generator=seed) * (self.spread / self.dim**0.5)
        targets = torch.randint(self.words, (self.tokens,), generator=seed)
        return Classes(hidden.requires_grad_(), weight.requires_grad_(), targets, 1.0)

    def small(self) -> Vocabulary:
        return replace(self, tokens=min(self.tokens, 256), words=min(self.words, 1024))


@dataclass(frozen=True)
class TextWindows:
    """So many windows of a text; methods make the tokens, since only they have the model that reads them."""

    sequences: int
    length: int

    def __str__(self) -> str:
        return f"{self.sequences} × {self.length} tokens"

    def __call__(self) -> TextWindows:
        return self

    def small(self) -> TextWindows:
        return TextWindows(min(self.sequences, 2), min(self.length, 32))


class Tracked(NamedTuple):
    """Measured positions, and the numbers of a model with M modes and a state (x, vx, y, vy)."""

    observed: Tensor  # (tracks, steps, 2)
    transition: Tensor  # (M, M)
    dynamics: Tensor  # (M, 4, 4), turns at different rates
    process_noise: Tensor  # (M, 4, 4)
    observation: Tensor  # (2, 4)
    observation_noise: Tensor  # (2, 2)
    mean: Tensor  # (4,)
    covariance: Tensor  # (4, 4)


@dataclass(frozen=True)
class Tracks:
    """Random walks in the plane that a filter with ``modes`` coordinated turns follows, in float64."""

    tracks: int
    modes: int
    steps: int = 60

    def __str__(self) -> str:
        tracks = f"{self.tracks} tracks" if self.tracks > 1 else "one track"
        return f"{tracks} × {self.steps} steps, {self.modes} modes, state 4"

    def __call__(self) -> Tracked:
        eye = torch.eye(4, dtype=torch.float64)
        seed = torch.Generator().manual_seed(0)
        walk = 5 * torch.randn(self.tracks, self.steps, 2, generator=seed, dtype=torch.float64).cumsum(1)
        stay = torch.full((self.modes, self.modes), 0.05 / max(1, self.modes - 1), dtype=torch.float64)
        stay.fill_diagonal_(0.95 if self.modes > 1 else 1.0)
        return Tracked(
            observed=walk,
            transition=stay,
            dynamics=torch.stack([_turn(0.05 * k + 1e-9) for k in range(self.modes)]),
            process_noise=torch.stack([0.01 * (k + 1) * eye for k in range(self.modes)]),
            observation=eye[[0, 2]],
            observation_noise=25 * eye[:2, :2],
            mean=torch.tensor([0.0, 10.0, 0.0, 5.0], dtype=torch.float64),
            covariance=100 * eye,
        )

    def small(self) -> Tracks:
        return replace(self, tracks=min(self.tracks, 4), steps=8)


def _turn(rate: float) -> Tensor:
    """A coordinated turn by ``rate`` in a unit of time."""
    s, c = math.sin(rate), math.cos(rate)
    rows = [
        [1, s / rate, 0, (c - 1) / rate],
        [0, c, 0, -s],
        [0, (1 - c) / rate, 1, s / rate],
        [0, s, 0, c],
    ]
    return torch.tensor(rows, dtype=torch.float64)


def sharpness(spread: float) -> str:
    return ", sharp" if spread >= SHARP else ""
