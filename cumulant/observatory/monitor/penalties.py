"""Penalties: terms of the loss, made of the attention calls of the pass that the loss is of.

    loss = model(batch) + monitor.penalty()

Each head has a term of its own, a mean over the queries of this pass: what it does to a head depends neither on the
size of the batch nor on how many other heads there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from cumulant.checks import sentence
from cumulant.nn.wrappers import WRAPPERS
from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.reactions import Reaction, TrainedCall

HeadWeight = float | Mapping[tuple[int, int], float]
PREFIXES = {*WRAPPERS.values(), "_fsdp_wrapped_module"}  # of paths in a wrapped model


@final
@dataclass
class EntropyFloor(Reaction):
    """A term of the loss that keeps the entropy of heads above a share of the largest they can have.

        Σ_h weight_h · mean_i max(0, floor · log N_i − H_hi)²

    over the heads h that have the floor and the queries i of a pass; query i sees N_i keys. Padding is left out, and so
    are queries that see a single key.

    floor   the share of log N, in (0, 1)
    weight  of each head: a number, or by (layer, head) with 0 for all others
    heads   "collapsed": a head gets the floor when a check finds it collapsed or below the floor, which is logged, and
            has it from then on; above the floor it costs nothing. "all": every head has it from the beginning

    The gradient of the entropy vanishes with the entropy: a floor holds heads that are falling, and lifts those that
    have not yet fallen on single keys for good. Add ``monitor.penalty()`` to the loss.

    >>> import torch
    >>> half = torch.full((1, 1, 1), 0.5)
    >>> call = TrainedCall(0, "attention", half, half, torch.full((1, 1, 1), 10.0), half > 0)
    >>> EntropyFloor(floor=0.5, weight=1.0, heads="all").penalty(call)  # (½ log 10 − ½)²
    tensor(0.4242)
    """

    floor: float = 0.1
    weight: HeadWeight = 1.0
    heads: Literal["collapsed", "all"] = "collapsed"
    active: set[tuple[str, int]] = field(default_factory=set)

    statistics: ClassVar[tuple[str, ...]] = ("entropy",)
    state: ClassVar[tuple[str, ...]] = ("active",)

    def __post_init__(self) -> None:
        if isinstance(self.floor, bool) or not isinstance(self.floor, int | float) or not 0 < self.floor < 1:
            raise ValueError(sentence("EntropyFloor.floor", "a share in (0, 1)", self.floor, "0.1 is usual."))
        if self.heads not in ("collapsed", "all"):
            got = repr(self.heads)
            raise ValueError(sentence("EntropyFloor.heads", "'collapsed' or 'all'", got, "See help(EntropyFloor)."))
        _require_weight("EntropyFloor.weight", self.weight)

    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        actions = []
        for number, layer in enumerate(check.layers):
            for head, share in enumerate(layer.heads.evenness.tolist()):
                key = _path(layer.name), head
                low = share < self.floor or (isfinite(share) and bool(layer.collapsed[head]))
                if low and key not in self.active and _weights(self.weight, number, head + 1)[head] > 0:
                    self.active.add(key)
                    words = (
                        f"layer {number} head {head}: entropy floor on, "
                        f"entropy {share:.2g} of log N, floor {self.floor:g}"
                    )
                    where = check.step, number, layer.name, head
                    actions.append(Action("entropy floor", *where, share, self.floor, words))
        return actions

    def penalises(self, name: str) -> bool:
        return self.heads == "all" or any(path == _path(name) for path, _ in self.active)

    def penalty(self, call: TrainedCall) -> Tensor:
        if call.entropy is None:
            return call.log_normalizer.new_zeros(())
        count = call.entropy.shape[1]
        heads = [h for h in range(count) if self.heads == "all" or (_path(call.name), h) in self.active]
        visible, entropy = call.visible[:, heads], call.entropy[:, heads]
        lacking = (self.floor * visible.clamp_min(1).log() - entropy).clamp_min(0)
        each = _mean_by_head(lacking.square(), call.tokens[:, heads] & (visible > 1))
        return (each * each.new_tensor(_weights(self.weight, call.layer, count))[heads]).sum()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.active = {(str(path), int(head)) for path, head in state.get("active", ())}


@final
@dataclass
class ZLoss(Reaction):
    """A term of the loss that draws the log-normalizers of attention towards 0, so that scores cannot drift away.

        Σ_h weight_h · mean_i G_hi²,      G_hi = log Σ_j exp(score_hij)

    over all heads h and the queries i of a pass that are tokens and see a key.

    weight  of each head: a number, or by (layer, head) with 0 for all others

    Add ``monitor.penalty()`` to the loss; of one layer it is `cumulant.nn.z_loss` of each head.

    >>> import torch
    >>> g = torch.tensor([[[1.0, 3.0, -torch.inf]]])
    >>> call = TrainedCall(0, "attention", g, None, g, torch.ones(1, 1, 3, dtype=torch.bool))
    >>> ZLoss(weight=0.1).penalty(call)
    tensor(0.5000)
    """

    weight: HeadWeight = 1e-5
    logged: bool = False

    statistics: ClassVar[tuple[str, ...]] = ("log_normalizer",)
    state: ClassVar[tuple[str, ...]] = ("logged",)

    def __post_init__(self) -> None:
        _require_weight("ZLoss.weight", self.weight)

    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        largest = [
            (abs(g), g, number, head)
            for number, layer in enumerate(check.layers)
            for head, g in enumerate(layer.heads.log_normalizer.tolist())
            if isfinite(g)
        ]
        if self.logged or not largest:
            return []
        self.logged = True
        _, g, number, head = max(largest)
        words = f"z-loss on: log-normalizers are drawn to 0, the largest is {g:.3g}, layer {number} head {head}"
        return [Action("z-loss", check.step, number, check.layers[number].name, head, g, 0.0, words)]

    def penalty(self, call: TrainedCall) -> Tensor:
        g = call.log_normalizer
        counted = call.tokens & (g != -torch.inf)
        each = _mean_by_head(torch.where(counted, g, 0).square(), counted)
        return (each * each.new_tensor(_weights(self.weight, call.layer, g.shape[1]))).sum()


def _mean_by_head(values: Tensor, counted: Tensor) -> Tensor:
    """(heads,) means of (batch, heads, q) over the queries that count; 0 where none does."""
    return torch.where(counted, values, 0).sum((0, 2)) / counted.sum((0, 2)).clamp_min(1)


def _weights(weight: HeadWeight, layer: int, heads: int) -> list[float]:
    if isinstance(weight, Mapping):
        return [float(weight.get((layer, head), 0.0)) for head in range(heads)]
    return [float(weight)] * heads


def _require_weight(where: str, weight: HeadWeight) -> None:
    by_head = weight if isinstance(weight, Mapping) else {(0, 0): weight}
    for key, value in by_head.items():
        pair = isinstance(key, tuple) and len(key) == 2 and all(type(part) is int and part >= 0 for part in key)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        if not (pair and number):
            expected = "a finite number, 0 or more, or such numbers by (layer, head)"
            got = f"{key!r}: {value!r}" if isinstance(weight, Mapping) else repr(weight)
            raise ValueError(sentence(where, expected, got, "Layers and heads are numbered from 0, as in alarms."))


def _path(name: str) -> str:
    """A path in a model, without what wrappers put before it."""
    parts = name.split(".")
    while parts[0] in PREFIXES:
        parts = parts[1:] or [""]
    return ".".join(parts)
