"""Reactions of a monitor to what a check finds, on one contract.

class Halve(Reaction):
    def act(self, check, optimizer):
        ...
        return [Action(...)]

Monitor(model, reactions=[Halve()])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from typing import final

from torch.optim import Optimizer

from cumulant.checks import sentence
from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.history import Check

KINDS = ("finite", "entropy", "score", "dead", "expansion")
SERIOUS = ("finite", "entropy", "score")


class Reaction(ABC):
    """Something that is done after a check. Abstract; `act` is all that it needs."""

    @abstractmethod
    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        """Act on a check; returns what was done, which the monitor logs."""


@final
@dataclass
class Stop(Reaction):
    """End the training at an alarm of these kinds: ``monitor.should_stop`` becomes True, and Trainer stops by itself.

    kinds   among finite, entropy, score, dead, expansion
    checks  how many checks may have such alarms before the training is ended

        monitor = Monitor(model, reactions=[Stop()])
        for batch in batches:
            ...
            monitor.step()
            if monitor.should_stop:
                break

    >>> Stop(kinds=("finite",)).checks
    1
    """

    kinds: Collection[str] = SERIOUS
    checks: int = 1
    seen: int = 0

    def __post_init__(self) -> None:
        _require_kinds("Stop", self.kinds)
        if isinstance(self.checks, bool) or not isinstance(self.checks, int) or self.checks < 1:
            raise ValueError(sentence("Stop.checks", "a positive number of checks", self.checks, "1 is the least."))

    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        alarms = [alarm for alarm in check.alarms if alarm.kind in self.kinds]
        self.seen += bool(alarms)
        if not alarms or self.seen < self.checks:
            return []
        a = alarms[0]
        words = f"training is ended: {a.words}"
        return [Action("stop", check.step, a.layer, a.name, a.head, a.before, a.now, words)]


@final
@dataclass
class LearningRateBrake(Reaction):
    """Lower the learning rate at an alarm, once for each check that has one.

        lr ← factor · lr,      down to least · the rate at the first alarm

    factor  in (0, 1)
    least   part of the first rate below which it is not lowered
    kinds   among finite, entropy, score, dead, expansion

    The rates of the optimizer's groups are changed. A schedule that computes the rate from the step, as LambdaLR and
    those of transformers do, sets them anew: lower its own rate in ``on_alarm`` there.

    >>> import torch
    >>> brake, optimizer = LearningRateBrake(factor=0.5), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> brake.act(Check(3, ()), optimizer)
    []
    """

    factor: float = 0.5
    least: float = 0.01
    kinds: Collection[str] = SERIOUS
    part: float = 1.0

    def __post_init__(self) -> None:
        _require_kinds("LearningRateBrake", self.kinds)
        for name in ("factor", "least"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (isfinite(value) and 0 < value < 1):
                raise ValueError(
                    sentence(f"LearningRateBrake.{name}", "a number between 0 and 1", value, "0.5 halves.")
                )

    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        alarms = [alarm for alarm in check.alarms if alarm.kind in self.kinds]
        if not alarms or self.part * self.factor < self.least:
            return []
        if optimizer is None:
            advice = "Call monitor.step(optimizer=optimizer)."
            raise ValueError(sentence("LearningRateBrake.optimizer", "the optimizer", None, advice))
        before = float(optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor
        self.part *= self.factor
        a, now = alarms[0], float(optimizer.param_groups[0]["lr"])
        words = f"learning rate lowered from {before:.3g} to {now:.3g}: {a.words}"
        return [Action("learning rate", check.step, a.layer, a.name, None, before, now, words)]


def _require_kinds(where: str, kinds: Collection[str]) -> None:
    unknown = [kind for kind in ((kinds,) if isinstance(kinds, str) else kinds) if kind not in KINDS]
    if isinstance(kinds, str) or unknown:
        got = repr(kinds) if isinstance(kinds, str) else repr(unknown[0])
        raise ValueError(sentence(f"{where}.kinds", f"a tuple of names among {', '.join(KINDS)}", got, "Pick some."))
