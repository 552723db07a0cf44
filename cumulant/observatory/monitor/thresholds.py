"""Bounds on what a monitor measures, and the alarms where they are crossed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.statistics.heads import HeadStatistics

SEVERITY = ("finite", "entropy", "score", "dead", "expansion")  # kinds of alarms, the gravest first


@dataclass(frozen=True)
class Thresholds:
    """Bounds within which training is left alone; evenness is entropy as a share of log N (`HeadStatistics`).

    collapsed   a head whose evenness is below this has collapsed on single keys
    uniform     a head whose evenness is within this of 1 looks at nothing in particular: it is dead
    silent      a head whose output is smaller than this part of the largest of its layer is dead; as many heads are
                uniform for a while when training begins, dead ones are warned of after ``reach`` checks in a row
    fall        entropy below this part of the largest in the last checks is warned of
    score       scores below this are never warned of, however they grow
    rise        the largest score above this multiple of the smallest in the last checks is warned of
    expansion   |output|/|input| of a block above this multiple of the smallest in the last checks is warned of
    reach       how many checks comparisons reach back

    The bounds lie outside of what the language model of `cumulant train` does at its own learning rate, checked every
    10 steps: entropies fall to 0.33 of what they were, scores reach 25, expansion grows 6-fold.
    """

    collapsed: float = 0.05
    uniform: float = 1e-3
    silent: float = 1e-3
    fall: float = 0.2
    score: float = 50.0
    rise: float = 3.0
    expansion: float = 30.0
    reach: int = 10

    def __post_init__(self) -> None:
        for name in ("collapsed", "uniform", "silent", "fall"):
            if not 0 <= getattr(self, name) < 1:
                got = getattr(self, name)
                raise ValueError(sentence(f"Thresholds.{name}", "a share in [0, 1)", got, "0 switches it off."))
        for name in ("score", "rise", "expansion"):
            if not getattr(self, name) > 0:
                got, advice = getattr(self, name), "Infinity switches it off."
                raise ValueError(sentence(f"Thresholds.{name}", "a positive number", got, advice))
        if isinstance(self.reach, bool) or not isinstance(self.reach, int) or self.reach < 1:
            raise ValueError(sentence("Thresholds.reach", "a positive number of checks", self.reach, "10 is usual."))

    def collapsed_heads(self, heads: HeadStatistics) -> Tensor:
        """(heads,) True where a head has collapsed."""
        return heads.evenness < self.collapsed

    def dead_heads(self, heads: HeadStatistics) -> Tensor:
        """(heads,) True where a head is dead: it attends to all keys alike, or its output is next to nothing."""
        size = heads.output_size
        return (heads.evenness > 1 - self.uniform) | (size <= self.silent * size.max())


class Alarm(NamedTuple):
    """One warning.

    kind    "entropy", "score", "expansion", "dead" or "finite"
    layer   number of the attention layer in the order of the model, from 0; name is its path in the model
    head    its number, or None where the whole layer is meant
    before, since   what it was, and at which step
    words   the warning, as it is shown
    """

    kind: str
    step: int
    layer: int
    name: str
    head: int | None
    before: float
    now: float
    since: int
    words: str


class LayerCheck(NamedTuple):
    """One layer in one check; expansion is that of its block, NaN where it stands in none."""

    name: str
    heads: HeadStatistics
    expansion: float
    dead: Tensor
    collapsed: Tensor


@dataclass
class AlarmDetector:
    """Compares every check with those before it.

    An alarm sounds when its condition begins to hold, not while it does, and not again before it has been silent for as
    many checks as comparisons reach back.
    """

    thresholds: Thresholds
    recent: deque[tuple[int, dict[str, LayerCheck]]] = field(init=False)
    active: dict[tuple, int] = field(default_factory=dict)  # what, where → the last check it held in
    checks: int = 0

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.thresholds.reach)

    def reset(self) -> None:
        """Begin anew: nothing to compare with, nothing sounding."""
        self.recent.clear()
        self.active.clear()

    def alarms(self, step: int, layers: Iterable[LayerCheck]) -> list[Alarm]:
        """The alarms that are new in this check: by `SEVERITY`, then by layer and head."""
        layers = list(layers)
        alarms = [alarm for number, layer in enumerate(layers) for alarm in self._of_layer(step, number, layer)]
        quiet = self.checks - self.thresholds.reach
        self.active = {key: number for key, number in self.active.items() if number >= quiet}
        new = [a for a in alarms if (a.kind, a.name, a.head) not in self.active]
        self.active |= {(a.kind, a.name, a.head): self.checks for a in alarms}
        self.checks += 1
        self.recent.append((step, {layer.name: layer for layer in layers}))
        return sorted(new, key=lambda alarm: SEVERITY.index(alarm.kind))

    def _of_layer(self, step: int, number: int, layer: LayerCheck) -> Iterator[Alarm]:
        past = [(at, seen[layer.name]) for at, seen in self.recent if layer.name in seen]
        past = [(at, old) for at, old in past if old.heads.entropy.shape == layer.heads.entropy.shape]
        if not layer.heads.finite:
            words = f"layer {number}: attention is no longer finite"
            yield Alarm("finite", step, number, layer.name, None, torch.nan, torch.nan, step, words)
            return
        yield from self._growth(step, number, layer, past)
        for head in range(len(layer.heads.entropy)):
            yield from self._of_head(step, number, layer, head, past)

    def _growth(self, step: int, number: int, layer: LayerCheck, past: list) -> Iterator[Alarm]:
        least, since = min(((o.expansion, at) for at, o in past if isfinite(o.expansion)), default=(torch.inf, step))
        now = layer.expansion
        if now > self.thresholds.expansion * least:
            words = f"layer {number}: expansion of its block rose from {least:.3g} to {now:.3g}{_span(step, since)}"
            yield Alarm("expansion", step, number, layer.name, None, least, now, since, words)

    def _of_head(self, step: int, number: int, layer: LayerCheck, head: int, past: list) -> Iterator[Alarm]:
        bounds, heads = self.thresholds, layer.heads

        def alarm(kind: str, before: float, now: float, since: int, what: str) -> Alarm:
            words = f"layer {number} head {head}: {what}{_span(step, since)}"
            return Alarm(kind, step, number, layer.name, head, before, now, since, words)

        entropies = [(float(o.heads.entropy[head]), at) for at, o in past]
        before, since = max((e for e in entropies if isfinite(e[0])), default=(0.0, step))
        now, collapsed = float(heads.entropy[head]), bool(layer.collapsed[head])
        if now < bounds.fall * before:
            yield alarm("entropy", before, now, since, f"entropy fell from {before:.3g} to {now:.3g}")
        elif collapsed:
            what = f"entropy is {now:.3g}, the head has collapsed"
            yield alarm("entropy", before, now, step, what)
        scores = [(float(o.heads.max_score[head]), at) for at, o in past]
        least, since = min(((max(s, 0.0), at) for s, at in scores if isfinite(s)), default=(torch.inf, step))
        now = float(heads.max_score[head])
        if now > max(bounds.score, bounds.rise * least):
            yield alarm("score", least, now, since, f"largest score rose from {least:.3g} to {now:.3g}")
        if bool(layer.dead[head]) and len(past) == bounds.reach and all(bool(o.dead[head]) for _, o in past):
            even, since = float(heads.evenness[head]), past[0][0]
            what = "attended to all keys alike" if even > 1 - bounds.uniform else "put out next to nothing"
            words = f"layer {number} head {head}: it has {what} for {step - since} steps"
            yield Alarm("dead", step, number, layer.name, head, even, even, since, words)


def _span(step: int, since: int) -> str:
    return f" in {step - since} steps" if step > since else ""
