"""Reactions of a monitor to what a check finds, on one contract: what is done after a check, and a term of the loss.

class Halve(Reaction):
    def act(self, check, optimizer):
        ...
        return [Action(...)]

class Narrow(Reaction):
    statistics = ("log_normalizer",)

    def act(self, check, optimizer):
        return []

    def penalty(self, call):
        return 1e-3 * call.log_normalizer[call.tokens].square().mean()

Monitor(model, reactions=[Halve(), Narrow()])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor
from torch.optim import Optimizer

from cumulant.checks import sentence
from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.history import Check

KINDS = ("finite", "entropy", "score", "dead", "expansion")
SERIOUS = ("finite", "entropy", "score")
SCHEDULED = ("initial_lr", "max_lr", "min_lr")  # rates that schedules keep in the groups of an optimizer


class TrainedCall(NamedTuple):
    """One attention call of a training pass, with gradients: what a penalty is made of.

    layer, name     number of the attention layer in the order of the model, and its path in the model without wrappers
    log_normalizer  (batch, heads, q), −∞ where a query sees no key
    entropy         (batch, heads, q) in nats, or None where no penalty asked for it
    visible         (batch, heads, q) how many keys a query sees
    tokens          (batch, heads, q) True where a query is a token, False where it is padding

    >>> import torch
    >>> g, tokens = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[True, False]]])
    >>> call = TrainedCall(0, "attention", g, None, torch.ones(1, 1, 2), tokens)
    >>> call.log_normalizer[call.tokens]
    tensor([1.])
    """

    layer: int
    name: str
    log_normalizer: Tensor
    entropy: Tensor | None
    visible: Tensor
    tokens: Tensor


class Reaction(ABC):
    """Something that is done after a check, or a term of the loss, or both. Abstract; `act` is all that it needs.

    statistics  what `penalty` needs of attention calls: names of `moments`, "log_normalizer" among them; () if there is
                no penalty
    state       names of attributes that change while training: a checkpoint has them, and they are no settings
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def act(self, check: Check, optimizer: Optimizer | None) -> list[Action]:
        """Act on a check; returns what was done, which the monitor logs."""

    def penalty(self, call: TrainedCall) -> Tensor:
        """The term of the loss for one attention call of a training pass, a scalar; 0 if not overridden."""
        return call.log_normalizer.new_zeros(())

    def penalises(self, name: str) -> bool:
        """Whether `penalty` needs the calls of the layer at this path now; others cost nothing."""
        return bool(self.statistics)

    def settings(self) -> dict[str, Any]:
        """What it was made with, for the sentence where a checkpoint has another setting."""
        names = [f.name for f in fields(self) if f.name not in self.state] if is_dataclass(self) else []
        return {name: _plain(getattr(self, name)) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """What changed while training, as numbers, strings and lists."""
        return {name: _plain(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name in self.state:
            if name in state:
                setattr(self, name, state[name])


def _plain(value: Any) -> Any:
    """Numbers, strings and lists, which any format of checkpoints can have."""
    if isinstance(value, dict):
        return sorted([_plain(key), _plain(entry)] for key, entry in value.items())
    if isinstance(value, set | frozenset):
        return sorted(_plain(entry) for entry in value)
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


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
    state: ClassVar[tuple[str, ...]] = ("seen",)

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

    The rates of the optimizer's groups are changed, and those that a schedule begins from, which would else set the old
    ones anew: Trainer and Lightning have it known, in a loop of your own ``monitor.step(optimizer=…, scheduler=…)``.

    >>> import torch
    >>> brake, optimizer = LearningRateBrake(factor=0.5), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> brake.act(Check(3, ()), optimizer)
    []
    """

    factor: float = 0.5
    least: float = 0.01
    kinds: Collection[str] = SERIOUS
    part: float = 1.0
    state: ClassVar[tuple[str, ...]] = ("part",)

    def __post_init__(self) -> None:
        self._scheduler: Any = None
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
            for name in ("lr", *SCHEDULED):
                if name in group:
                    group[name] = group[name] * self.factor
        for scheduler in _schedules(self._scheduler):
            scheduler.base_lrs = [rate * self.factor for rate in scheduler.base_lrs]
        self.part *= self.factor
        a, now = alarms[0], float(optimizer.param_groups[0]["lr"])
        words = f"learning rate lowered from {before:.3g} to {now:.3g}: {a.words}"
        return [Action("learning rate", check.step, a.layer, a.name, None, before, now, words)]

    def follow(self, scheduler: Any) -> None:
        """Know the schedule of the rate, or None where there is none."""
        self._scheduler = scheduler


def _schedules(scheduler: Any) -> list[Any]:
    """A schedule and those that it runs, where they keep rates to begin from; behind a wrapper of accelerate."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    inner = [part for child in getattr(scheduler, "_schedulers", ()) for part in _schedules(child)]
    return inner + ([scheduler] if isinstance(getattr(scheduler, "base_lrs", None), list) else [])


def _require_kinds(where: str, kinds: Collection[str]) -> None:
    unknown = [kind for kind in ((kinds,) if isinstance(kinds, str) else kinds) if kind not in KINDS]
    if isinstance(kinds, str) or unknown:
        got = repr(kinds) if isinstance(kinds, str) else repr(unknown[0])
        raise ValueError(sentence(f"{where}.kinds", f"a tuple of names among {', '.join(KINDS)}", got, "Pick some."))
