"""Seeded tensors for the cases. ``spread`` is the standard deviation of the scores: 1 is ordinary, 4 is sharp."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from cumulant.nn.language_model import LanguageConfig, LanguageModel

REFERENCE = LanguageConfig()
ORDINARY, SHARP = 1.0, 4.0


class Tensors(NamedTuple):
    """Queries and atoms, which atoms a query sees, and directions of their size for derivatives."""

    eta: Tensor  # (batch, heads, queries, d)
    atoms: Tensor  # (batch, key heads, n, d)
    values: Tensor  # (batch, key heads, n, e)
    along_mean: Tensor  # (batch, heads, queries, e)
    along_normalizer: Tensor  # (batch, heads, queries)
    causal: bool = False
    mask: Tensor | None = None  # (batch, 1, 1, n), True = attend
    log_weights: Tensor | None = None  # (batch, heads, n) or (batch, heads, queries, n)

    def first(self, n: int) -> Tensors:
        """The first ``n`` queries and atoms of inputs without mask and weights."""
        eta, atoms, values, along_mean, along_normalizer = (t[:, :, :n].contiguous() for t in self[:5])
        return Tensors(eta, atoms, values, along_mean, along_normalizer, self.causal)


@dataclass(frozen=True)
class Attention:
    """Normal queries and keys; scores have standard deviation ``spread``.

    key_heads, value_dim   0: as many as heads, as wide as keys
    support                what is hidden or weighted: "padding" hides the last quarter of the keys, "weights" has a
                           log weight for every key, "biases" one for every pair
    """

    heads: int
    queries: int
    atoms: int
    dim: int
    spread: float = ORDINARY
    batch: int = 1
    key_heads: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.float32
    causal: bool = False
    support: Literal["all", "padding", "weights", "biases"] = "all"

    def __str__(self) -> str:
        sizes = [f"{self.batch} sequences"] * (self.batch > 1) + [f"{self.heads} heads"] * (self.heads > 1)
        if self.key_heads:
            sizes[-1] += f" over {self.key_heads}"
        if self.queries == self.atoms:
            sizes.append(f"{self.queries}")
        else:
            keys = "keys" if self.heads > 1 else "patterns"
            sizes.append(f"{self.queries} {'queries' if self.queries > 1 else 'query'} × {self.atoms} {keys}")
        wide = f", values {self.value_dim}" if self.value_dim else ""
        kind = "" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{' × '.join(sizes)}, d={self.dim}{wide}{kind}" + sharpness(self.spread)

    def __call__(self) -> Tensors:
        def normal(*size: int) -> Tensor:
            return torch.randn(self.batch, *size, generator=seed)

        seed = torch.Generator().manual_seed(0)
        h, q, n, d = self.heads, self.queries, self.atoms, self.dim
        shared, e = self.key_heads or h, self.value_dim or d
        eta = normal(h, q, d) * (self.spread / d**0.5)
        tensors = (eta, normal(shared, n, d), normal(shared, n, e), normal(h, q, e), normal(h, q))
        eta, atoms, values, along_mean, along_normalizer = (t.to(self.dtype) for t in tensors)
        mask = weights = None
        if self.support == "padding":
            mask = (torch.arange(n) < n - n // 4).expand(self.batch, 1, 1, n)
        elif self.support != "all":
            weights = normal(h, n) if self.support == "weights" else normal(h, q, n)
        return Tensors(eta, atoms, values, along_mean, along_normalizer, self.causal, mask, weights)

    def small(self) -> Attention:
        """A few blocks of the same kind."""
        fewer = {name: min(getattr(self, name), 384) for name in ("queries", "atoms")}
        return replace(self, heads=min(self.heads, 2), batch=min(self.batch, 2), key_heads=0, **fewer)


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
    """The reference language model, or one of other sizes, and random tokens for one update."""

    batch: int
    config: LanguageConfig = REFERENCE

    def __str__(self) -> str:
        other = f" of {self.config.layers} layers, d={self.config.dim}" if self.config != REFERENCE else ""
        return f"language model{other}, {self.batch} windows of {self.config.context} tokens"

    def __call__(self) -> TrainingBatch:
        config, seed = self.config, torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = LanguageModel(config)
        return TrainingBatch(model, torch.randint(config.vocabulary, (self.batch, config.context + 1), generator=seed))

    def small(self) -> Update:
        return replace(self, batch=min(self.batch, 2))


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


class RadarTracked(NamedTuple):
    """Ranges and bearings of targets that fly straight or turn, and a model with state (x, vx, y, vy, w)."""

    observed: Tensor  # (tracks, steps, 2)
    transition: Tensor  # (2, 2)
    straight: Tensor  # (5, 5), the dynamics of the first mode; the second turns at the rate w
    process_noise: Tensor  # (2, 5, 5)
    observation_noise: Tensor  # (2, 2)
    mean: Tensor  # (5,)
    covariance: Tensor  # (5, 5)


@dataclass(frozen=True)
class RadarTracks:
    """Targets on circles of different radii about a radar, in float64."""

    tracks: int
    steps: int = 60

    def __str__(self) -> str:
        return f"{self.tracks} tracks × {self.steps} steps, range and bearing, 2 modes, state 5"

    def __call__(self) -> RadarTracked:
        double = torch.float64
        noise = torch.randn(self.tracks, self.steps, 2, generator=torch.Generator().manual_seed(0), dtype=double)
        angle = (
            0.05 * torch.arange(1, self.steps + 1, dtype=double)
            + torch.linspace(0, 0.5, self.tracks, dtype=double)[:, None]
        )
        spread = torch.tensor([10.0, 0.005], dtype=double)
        bearing = (angle + spread[1] * noise[..., 1] + math.pi) % (2 * math.pi) - math.pi
        straight = torch.eye(5, dtype=double)
        straight[0, 1] = straight[2, 3] = 1
        straight[4, 4] = 0
        quiet = torch.diag(torch.tensor([0.1, 0.1, 0.1, 0.1, 1e-6], dtype=double))
        return RadarTracked(
            observed=torch.stack([2000 + spread[0] * noise[..., 0], bearing], -1),
            transition=torch.tensor([[0.95, 0.05], [0.05, 0.95]], dtype=double),
            straight=straight,
            process_noise=torch.stack([quiet, 10 * quiet]),
            observation_noise=torch.diag(spread**2),
            mean=torch.tensor([2000.0, 0.0, 0.0, 100.0, 0.05], dtype=double),
            covariance=torch.diag(torch.tensor([1e5, 100.0, 1e5, 100.0, 1e-3], dtype=double)),
        )

    def small(self) -> RadarTracks:
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


def title(
    name: str, table: str, work: str, inputs: Attention | Pairs | Sequences | Vocabulary
) -> tuple[str, str, str, Attention | Pairs | Sequences | Vocabulary]:
    """The first four fields of a case: sharp inputs show in its name."""
    return name + ("-sharp" if inputs.spread == SHARP else ""), table, f"{work}: {inputs}", inputs
