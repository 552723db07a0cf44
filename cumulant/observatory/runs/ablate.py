"""Ablation: heads replaced by their Gaussian approximation, and what the model loses by it (S1-C1, S1-P2′)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.runs.interventions import (
    HeadOutput,
    ReplacingPasses,
    by_module,
    gaussian_output,
    mixture_output,
)
from cumulant.observatory.text.corpus import TextInput
from cumulant.observatory.text.windows import Batch, batches

THRESHOLDS = {"cosine": 0.001, "perplexity": 0.01}
TOKENS = {"cosine": 1024, "perplexity": 256}  # a decoder with 270 heads is through in minutes
MEASURES = {"embedding": "cosine", "loss": "perplexity"}  # how damage is told


class AblatedHead(NamedTuple):
    """One head replaced alone.

    damage  1 − mean cosine of the pooled embeddings, or the relative change of perplexity
    r2      1 − Σ|out − replacement|² / Σ|out − v̄|² over the tokens; None if the head only ever averages its values
    """

    layer: int
    head: int
    name: str
    damage: float
    r2: float | None


class Ablation(NamedTuple):
    """What the model loses.

    rows         one for every head, replaced alone
    all_at_once  damage with all heads replaced that do less than ``threshold`` alone
    control      damage with as many heads replaced that are chosen at random
    together     heads that were replaced at once with less damage than ``threshold``: the least damaging ones, as many
                 as bisection found; another set may be larger
    baseline     perplexity of the untouched model; 1, the cosine with itself, for an encoder
    measure      "cosine" or "perplexity"
    """

    rows: tuple[AblatedHead, ...]
    all_at_once: float
    control: float
    together: tuple[AblatedHead, ...]
    baseline: float
    threshold: float
    tokens: int
    measure: str
    kind: str

    @property
    def can_go(self) -> tuple[AblatedHead, ...]:
        """Heads whose damage is below the threshold."""
        return tuple(row for row in self.rows if row.damage < self.threshold)


def ablate(
    model: Loaded,
    texts: Iterable[TextInput],
    *,
    kind: str = "gaussian",
    components: int = 4,
    max_tokens: int | None = None,
    max_length: int = 128,
    batch_size: int = 8,
    threshold: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Replace every head in turn, then all that can go at once, then as many as the model bears; measure the damage.

    kind       "gaussian", or "mixture" of ``components`` Gaussians for models whose queries all see the same keys
    max_tokens where to stop; 1024 for an embedding, 256 for a perplexity if None
    threshold  a head can go below it; 0.001 of cosine or 1 % of perplexity if None
    seed       of k-means and of the heads of the control
    progress   called with the passes that are done and how many there are

    A decoder with its language-model head is judged by its perplexity, any other model by the mean over the tokens of
    its last hidden state. Blocks before the replaced head are not computed again.

        ablate(load("minilm"), ["A head is an average."]).all_at_once
    """
    trial = _Trial(model, _approximation(kind, components, seed))
    threshold = THRESHOLDS[trial.measure] if threshold is None else threshold
    max_tokens = TOKENS[trial.measure] if max_tokens is None else max_tokens
    stream = batches(texts, model.tokenizer, max_length=max_length, batch_size=batch_size, max_tokens=max_tokens)
    read, bar = list(stream), _Bar(progress)
    base, damage = _one_by_one(trial, read, bar)
    cells = trial.cells()
    rows = tuple(trial.row(name, head, _damage(trial.measure, damage[name, head], base)) for name, head in cells)

    def at_once(indices: list[int]) -> float:
        score = trial.together(read, [cells[i] for i in sorted(indices)])
        bar.advance(len(read))
        return _damage(trial.measure, score, base)

    go = sorted((i for i, row in enumerate(rows) if row.damage < threshold), key=lambda i: rows[i].damage)
    drawn = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))[: len(go)].tolist()
    both = at_once(go), at_once(drawn)
    fit = _largest(go, lambda indices: at_once(indices) < threshold)
    bar.finish()
    tokens = sum(batch.tokens for batch in read)
    baseline = math.exp(base.mean) if trial.measure == "perplexity" else 1.0
    together = tuple(rows[i] for i in sorted(fit))
    return Ablation(rows, *both, together, baseline, threshold, tokens, trial.measure, kind)


def _one_by_one(trial: _Trial, read: list[Batch], bar: _Bar) -> tuple[_Score, dict[tuple[str, int], _Score]]:
    """The untouched model, and the model with each head replaced alone."""
    damage: dict[tuple[str, int], _Score] = {}
    base = _Score()
    for batch in read:
        plain, outputs = trial.plain(batch)
        base += trial.score(batch, plain, plain)
        cells = trial.cells()
        bar.total = len(read) * (len(cells) + 2 + len(cells).bit_length())  # each alone, two sets, and a bisection
        for name, head in cells:
            score = trial.score(batch, plain, trial.altered(batch, [(name, head)], outputs))
            damage[name, head] = damage.get((name, head), _Score()) + score
            bar.advance(1)
    if base.count == 0:
        advice = "A perplexity needs a token that follows another."
        raise ValueError(sentence("ablate.texts", "windows of at least two tokens", "none", advice))
    return base, damage


class _Bar:
    """Calls ``progress`` with the number of passes that are done."""

    def __init__(self, progress: Callable[[int, int], None] | None):
        self.progress, self.done, self.total = progress, 0, 0

    def advance(self, passes: int) -> None:
        self.done += passes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        """A bisection may end early."""
        self.advance(self.total - self.done)


def _largest(items: list[int], fits: Callable[[list[int]], bool]) -> list[int]:
    """A long beginning of ``items`` that fits, by bisection; the longest if no longer one than a misfit fits."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(items[:middle]) else (low, middle - 1)
    return items[:low]


def _approximation(kind: str, components: int, seed: int) -> HeadOutput:
    known: dict[str, HeadOutput] = {
        "gaussian": gaussian_output,
        "mixture": lambda call: mixture_output(call, components, seed),
    }
    if kind not in known:
        raise ValueError(sentence("ablate.kind", " or ".join(known), repr(kind), "Choose one of them."))
    return known[kind]


class _Score(NamedTuple):
    """A sum over windows or next tokens."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: tuple) -> _Score:
        return _Score(self.total + other[0], self.count + other[1])

    @property
    def mean(self) -> float:
        return self.total / self.count


def _damage(measure: str, score: _Score, base: _Score) -> float:
    return math.exp(score.mean - base.mean) - 1 if measure == "perplexity" else score.mean


class _Trial:
    """A model with some of its heads replaced by one approximation, and how well that predicts each head."""

    def __init__(self, loaded: Loaded, approximate: HeadOutput):
        self.passes = ReplacingPasses(loaded, "ablate")
        self.approximate = approximate
        self.measure = MEASURES[self.passes.measure]
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def plain(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Output of the untouched model, and of its blocks; adds to the sums of how well each head is predicted."""
        return self.passes.plain(batch, self._fit)

    def _fit(self, call: AttentionCall) -> None:
        mine, mean = self.approximate(call), gaussian_output(replace(call, eta=torch.zeros_like(call.eta)))
        if mine is None:
            advice = 'Use kind="gaussian" here.'
            expected = "queries that all see the same keys, for a mixture"
            raise ValueError(sentence(f"ablate({call.name})", expected, "a mask or bias that differs by query", advice))
        tokens = call.eta.new_ones(1, 1, 1, dtype=torch.bool) if call.rows is None else call.rows[:, None, :]
        left, whole = (
            torch.where(tokens[..., None], call.output.float() - x, 0.0).double().square().sum((0, 2, 3))
            for x in (mine, mean)
        )
        before = self.sums.get(call.name, (0.0, 0.0))
        self.sums[call.name] = (before[0] + left, before[1] + whole)

    def altered(self, batch: Batch, cells: list[tuple[str, int]], blocks: dict[str, Any]) -> Tensor:
        return self.passes.altered(batch, by_module(cells), self.approximate, blocks)

    def together(self, read: list[Batch], cells: list[tuple[str, int]]) -> _Score:
        total = _Score()
        for batch in read:
            plain = self.passes.run(batch)
            total += self.score(batch, plain, self.altered(batch, cells, {}) if cells else plain)
        return total

    def score(self, batch: Batch, plain: Tensor, altered: Tensor) -> _Score:
        total, count = self.passes.window_scores(batch, plain, altered).sum(0).tolist()
        return _Score(total, int(count))

    def cells(self) -> list[tuple[str, int]]:
        order = {name: i for i, (name, _) in enumerate(self.passes.network.named_modules())}
        return [(name, h) for name in sorted(self.sums, key=order.__getitem__) for h in range(len(self.sums[name][0]))]

    def row(self, name: str, head: int, damage: float) -> AblatedHead:
        layer = list(dict.fromkeys(n for n, _ in self.cells())).index(name)
        left, whole = (float(x[head]) for x in self.sums[name])
        return AblatedHead(layer, head, name, damage, 1 - left / whole if whole > 0 else None)
