"""Watching attention while a model trains: entropies, log-normalizers, scores, sinks, dead and collapsed heads.

    monitor = Monitor(model, every=50)
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        monitor.step()

One pass of every fiftieth step is observed, on a sample of its queries; nothing else costs anything, what is kept has a
bounded size, and what the model computes does not change.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cumulant.checks import sentence
from cumulant.nn.call_statistics import in_backward
from cumulant.nn.calls import AttentionCall
from cumulant.nn.wrappers import without_wrappers
from cumulant.observatory.hooks.compiler import without_compiler
from cumulant.observatory.hooks.structure import block_of, list_elements
from cumulant.observatory.monitor.actions import Action, log_actions
from cumulant.observatory.monitor.attention import (
    advice_without_calls,
    entrances,
    expansion_hook,
    observe_pass,
    require_observable,
)
from cumulant.observatory.monitor.checkpoints import load_state, settings_of, state_of
from cumulant.observatory.monitor.history import Check, CheckHistory, check_rows, save, table
from cumulant.observatory.monitor.qk_clip import LogitClipper, QKClip
from cumulant.observatory.monitor.reactions import LearningRateBrake, Reaction
from cumulant.observatory.monitor.switched import SwitchedAttention
from cumulant.observatory.monitor.thresholds import Alarm, AlarmDetector, LayerCheck, Thresholds
from cumulant.observatory.monitor.trained_calls import TrainedCalls
from cumulant.observatory.monitor.weak_hook import WeakHook
from cumulant.observatory.monitor.writers import Writer, write_check
from cumulant.observatory.statistics.heads import HeadStatistics, head_statistics

ALARMS = 1000  # kept at most, the latest


class MonitorWarning(UserWarning):
    """A warning of a monitor."""


class Monitor:
    """Looks at the attention of ``model`` in the first pass of every ``every``-th step, and warns in words.

    model       of layers of `cumulant.nn`, a transformers model, or both
    every       steps from one check to the next; the first is at step 0, before anything was learnt
    thresholds  when to warn
    writer      called after every check with its `Check.scalars` and the step, as wandb.log and print can be; or a
                `CheckWriter`, as `TensorBoard` is, with the `Check` itself
    on_alarm    called with every `Alarm`, before the warning
    sequences, queries   how many of a batch are looked at, at most
    keep        checks in the history, at most; when full it is thinned
    clip        a `QKClip`: bound the logits of every head, after every step, by scaling its projections; `actions` and
                the logger "cumulant.monitor" say what was done
    reactions   `Reaction`s that act on every check, `Stop` and `LearningRateBrake`, or add a term to the loss,
                `EntropyFloor` and `ZLoss` (`penalty`), or your own

    Passes without gradients are validation and are not observed, nor are copies of the model;
    ``with monitor.watching():`` observes whatever runs inside. Warnings are `MonitorWarning`, one per check. Of a model
    that is compiled, ``Monitor(torch.compile(model))``, the observed passes run without the compiler.

    >>> import torch
    >>> from cumulant.nn import MultiheadAttention
    >>> x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    >>> model = MultiheadAttention(16, 4, batch_first=True)
    >>> monitor = Monitor(model, every=2)
    >>> for _ in range(5):
    ...     _ = model(x, x, x, need_weights=False)
    ...     _ = monitor.step()
    >>> [check.step for check in monitor.history]
    [0, 2, 4]
    >>> [row["head"] for row in monitor.rows()][:5]
    [0, 1, 2, 3, 0]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        thresholds: Thresholds | None = None,
        writer: Writer | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
        sequences: int = 4,
        queries: int = 32,
        keep: int = 512,
        clip: QKClip | None = None,
        reactions: Sequence[Reaction] = (),
    ):
        for reaction in reactions:
            if not isinstance(reaction, Reaction):
                got, advice = type(reaction).__name__, "Stop() is one; subclass Reaction for your own."
                raise TypeError(sentence("Monitor.reactions", "Reactions", got, advice))
        if clip is not None and not isinstance(clip, QKClip):
            got, advice = type(clip).__name__, "QKClip(threshold=100.0) is usual."
            raise TypeError(sentence("Monitor.clip", "a QKClip", got, advice))
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise TypeError(sentence("Monitor.model", "a torch.nn.Module", got, "Pass the model that is trained."))
        for name, value in (("every", every), ("sequences", sequences), ("queries", queries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(sentence(f"Monitor.{name}", "a positive whole number", value, "1 is the least."))
        self.model, self.every, self.writer, self.on_alarm = model, every, writer, on_alarm
        self.sequences, self.queries = sequences, queries
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self.history, self.alarms = CheckHistory(keep), deque[Alarm](maxlen=ALARMS)
        self.actions = deque[Action](maxlen=ALARMS)
        self.reactions, self.should_stop = tuple(reactions), False
        self.now = 0
        self._detector = AlarmDetector(self.thresholds)
        self._statistics: dict[str, HeadStatistics] = {}
        self._expansions: dict[str, Tensor] = {}
        self._blocks: dict[str, nn.Module] | None = None
        self._done: set[str] = set()  # layers whose statistics an earlier pass of this step has given
        # the call in which it was opened, and the paths of its module among the blocks
        self._open: tuple[ExitStack, nn.Module | None, list[str]] | None = None
        self._penalised: tuple[ExitStack, nn.Module] | None = None  # a pass with penalties, and its module
        self._warned: set[str] = set()
        require_observable(model)
        with observe_pass(model, self._on_call, self._on_expansion, {}):
            pass  # a model that cannot be observed is refused here, not in the middle of training
        self.clip = clip
        self._switched = self._switch_attention()
        try:
            self.clipper = None if clip is None else LogitClipper(without_wrappers(model), clip)
            self._trained = TrainedCalls(model, self.reactions) if any(r.statistics for r in self.reactions) else None
        except BaseException:
            if self._switched is not None:
                self._switched.close()
            raise
        before, after = WeakHook(self, "_begin"), WeakHook(self, "_end")
        self._handles = [
            handle
            for part in entrances(model)
            for handle in (
                part.register_forward_pre_hook(before, with_kwargs=True),
                part.register_forward_hook(after, with_kwargs=True, always_call=True),
            )
        ]

    @property
    def due(self) -> bool:
        """Whether this step is observed."""
        return self.now % self.every == 0

    def step(
        self, step: int | None = None, *, optimizer: Optimizer | None = None, scheduler: object = None
    ) -> Check | None:
        """Say that a step of training is done; call it after the optimizer's.

        step       how many are done now; one more than before if None
        optimizer  the one that trains the model, for ``QKClip(momentum="scale")`` and reactions that change it
        scheduler  the schedule of its learning rate, for `LearningRateBrake`

        Returns the check that ended with this step, if there was one.
        """
        later = self.now + 1 if step is None else step
        if isinstance(later, bool) or not isinstance(later, int) or later <= self.now:
            advice = "Call monitor.start(step) to begin anew."
            raise ValueError(sentence("Monitor.step", f"a step after {self.now}", later, advice))
        check = self._conclude(stacklevel=3)
        if check is None and self.due and self._handles:
            got = f"none in step {self.now}"
            self._warn_once("step", "an observed pass", got, advice_without_calls(self.model))
        self._let_go_of_calls()
        actions = [] if check is None else [a._replace(step=later) for a in self._react(check, optimizer, scheduler)]
        if self.clipper is not None and self._handles:
            actions += self.clipper.act(later, optimizer)
        self.actions.extend(actions)
        self.should_stop = self.should_stop or any(action.kind == "stop" for action in actions)
        log_actions(later, actions)
        self.now = later
        return check

    def start(self, step: int = 0) -> None:
        """Begin to count at ``step``, with nothing to compare with; the history stays."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(sentence("Monitor.start.step", "a whole number, 0 or more", step, "0 is the beginning."))
        self.now = step
        self._clear()
        self._detector.reset()

    def penalty(self) -> Tensor:
        """The penalties of the reactions, `EntropyFloor` and `ZLoss`, for the passes with gradients since it was last
        called: a scalar with gradients, to be added to the loss of these passes.

            loss = model(batch) + monitor.penalty()

        0 where no reaction has a penalty now, and in validation. Of accumulated gradients call it for each micro-batch.
        """
        parameter = next(self.model.parameters(), None)
        nothing = torch.zeros((), device=None if parameter is None else parameter.device)
        if self._trained is None or not torch.is_grad_enabled():
            return nothing
        total = self._trained.take()
        if total is None and self._trained.asks and self._handles:
            advice = "Call it after the pass and before backward; gradient checkpointing needs use_reentrant=False."
            self._warn_once("penalty", "attention calls of a pass with gradients", "none", advice)
        return nothing if total is None else total

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs for the monitor: step, settings and what reactions have to go on with. No history.

        Numbers, strings and lists, so that accelerate's ``register_for_checkpointing(monitor)`` takes it. The callbacks
        of Trainer and Lightning put it into their checkpoints.
        """
        return state_of(self.now, self._settings(), self.reactions)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`: at its step, with nothing to compare with. Other settings are warned of."""
        step, words = load_state(state, self._settings(), self.reactions)
        if words is not None:
            warnings.warn(words, MonitorWarning, stacklevel=2)
        if self._trained is not None:
            self._trained.request()
        self.start(step)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe what runs inside, with or without gradients, if a check is due."""
        if not self.due or self._open is not None:
            yield
            return
        self._start_observing(None, None)
        try:
            yield
        finally:
            self._stop_observing()

    def rows(self) -> list[dict]:
        """The history as rows, one per check, layer and head; None where there is no number."""
        return check_rows(self.history)

    def save(self, path: str | PathLike) -> None:
        """The rows as .parquet (needs cumulant[report]), or with the alarms as .json; replaced in one step."""
        save(Path(path), self.history, self.alarms)

    def report(self) -> str:
        """The last check as a table to print, a line per layer, and the last alarms."""
        return table(self.history.last, self.alarms)

    def close(self) -> None:
        """Let go of the model; statistics that are in no check yet become one."""
        self._stop_observing()
        self._conclude(stacklevel=3)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for part in (self.clipper, self._trained, self._switched):
            if part is not None:
                part.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():
            return
        if self._trained is not None and self._trained.asks and self._penalised is None and not in_backward():
            self._penalised = self._trained.enter_pass(module, args, kwargs), module
        if self.due and self._open is None:
            self._start_observing(module, (module, args, kwargs))

    def _end(self, module: nn.Module, *call: object) -> None:
        if self._open is not None and self._open[1] is module:
            for path in self._open[2]:
                expansion_hook(path, self._on_expansion)(module, *call)
            self._stop_observing()
        if self._penalised is not None and self._penalised[1] is module:
            self._penalised[0].close()
            self._penalised = None

    def _settings(self) -> dict[str, Any]:
        return settings_of(self.every, self.thresholds, self.clip, self.reactions)

    def _react(self, check: Check, optimizer: Optimizer | None, scheduler: object) -> list[Action]:
        actions = []
        for reaction in self.reactions:
            if isinstance(reaction, LearningRateBrake):
                reaction.follow(scheduler)
            actions += reaction.act(check, optimizer)
        if self._trained is not None:
            self._trained.request()
        return actions

    def _let_go_of_calls(self) -> None:
        """Calls that no loss has got hold the graph of their pass."""
        if self._trained is not None and self._trained.waiting:
            got = f"{len(self._trained.waiting)} attention calls that no loss has got"
            self._trained.waiting = []
            advice = (
                "Write loss = model(batch) + monitor.penalty(); for Trainer MonitorCallback(monitor, trainer=trainer)."
            )
            self._warn_once("penalty", "to be added to the loss", got, advice)

    def _switch_attention(self) -> SwitchedAttention | None:
        penalised = any(reaction.statistics for reaction in self.reactions)
        if self.clip is None and not penalised:
            return None
        return SwitchedAttention(without_wrappers(self.model), "reactions" if self.clip is None else "clip")

    def _warn_once(self, where: str, expected: str, got: str, advice: str) -> None:
        if where not in self._warned:
            self._warned.add(where)
            words = sentence(f"Monitor.{where}", expected, got, advice)
            warnings.warn(words, MonitorWarning, stacklevel=3)

    def _start_observing(self, module: nn.Module | None, running: tuple | None) -> None:
        blocks = list_elements(self.model, (nn.ModuleList, nn.Sequential)) if self._blocks is None else self._blocks
        self._done = set(self._statistics)
        with ExitStack() as stack:
            stack.enter_context(without_compiler())  # a compiled graph reports no calls
            stack.enter_context(observe_pass(self.model, self._on_call, self._on_expansion, blocks, running))
            own = [path for path, block in blocks.items() if block is module]
            self._open = (stack.pop_all(), module, own)

    def _stop_observing(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None

    def _clear(self) -> None:
        self._statistics, self._expansions, self._done = {}, {}, set()

    def _on_call(self, name: str, call: AttentionCall) -> None:
        if name in self._done:
            return
        heads = head_statistics(call, sequences=self.sequences, queries=self.queries)
        self._statistics[name] = self._statistics[name].merge(heads) if name in self._statistics else heads

    def _on_expansion(self, path: str, ratio: Tensor) -> None:
        self._expansions.setdefault(path, ratio)

    def _conclude(self, stacklevel: int) -> Check | None:
        """A check of the statistics of this step."""
        if not self._statistics:
            return None
        order = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        names = sorted(self._statistics, key=lambda name: order.get(name, len(order)))
        homes = {name: block_of(self.model, name, whole=False, sequential=True) for name in names}
        self._blocks = {path: self.model.get_submodule(path) for path in homes.values() if path is not None}
        layers = tuple(self._layer(name, homes[name]) for name in names)
        alarms = self._detector.alarms(self.now, layers)
        check = Check(self.now, layers, tuple(alarms))
        self._clear()
        self.history.add(check)
        self.alarms.extend(alarms)
        if self.writer is not None:
            write_check(self.writer, check)
        if self.on_alarm is not None:
            for alarm in alarms:
                self.on_alarm(alarm)
        if alarms:
            more = f" (and {len(alarms) - 1} more: see Monitor.alarms)" if len(alarms) > 1 else ""
            warnings.warn(f"step {self.now}: {alarms[0].words}{more}", MonitorWarning, stacklevel=stacklevel)
        return check

    def _layer(self, name: str, home: str | None) -> LayerCheck:
        heads, bounds = self._statistics[name], self.thresholds
        expansion = float(self._expansions[home].cpu()) if home in self._expansions else torch.nan
        return LayerCheck(name, heads, expansion, bounds.dead_heads(heads), bounds.collapsed_heads(heads))
