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
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from cumulant.checks import sentence
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
from cumulant.observatory.monitor.history import Check, CheckHistory, check_rows, save, table
from cumulant.observatory.monitor.qk_clip import LogitClipper, QKClip
from cumulant.observatory.monitor.reactions import Reaction
from cumulant.observatory.monitor.thresholds import Alarm, AlarmDetector, LayerCheck, Thresholds
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
    reactions   `Reaction`s that act on every check: `Stop`, `LearningRateBrake`, or your own

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
        self._expansions: dict[str, float] = {}
        self._blocks: dict[str, nn.Module] | None = None
        self._done: set[str] = set()  # layers whose statistics an earlier pass of this step has given
        # the call in which it was opened, and the paths of its module among the blocks
        self._open: tuple[ExitStack, nn.Module | None, list[str]] | None = None
        self._warned = False
        require_observable(model)
        with observe_pass(model, self._on_call, self._on_expansion, {}):
            pass  # a model that cannot be observed is refused here, not in the middle of training
        self.clipper = None if clip is None else LogitClipper(without_wrappers(model), clip)
        before, after = _Hook(self, "_begin"), _Hook(self, "_end")
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

    def step(self, step: int | None = None, *, optimizer: Optimizer | None = None) -> Check | None:
        """Say that a step of training is done; call it after the optimizer's.

        step       how many are done now; one more than before if None
        optimizer  the one that trains the model, for ``QKClip(momentum="scale")`` and reactions that change it

        Returns the check that ended with this step, if there was one.
        """
        later = self.now + 1 if step is None else step
        if isinstance(later, bool) or not isinstance(later, int) or later <= self.now:
            advice = "Call monitor.start(step) to begin anew."
            raise ValueError(sentence("Monitor.step", f"a step after {self.now}", later, advice))
        check = self._conclude(stacklevel=3)
        if check is None and self.due and self._handles and not self._warned:
            self._warned = True
            advice = advice_without_calls(self.model)
            got = f"none in step {self.now}"
            warnings.warn(sentence("Monitor.step", "an observed pass", got, advice), MonitorWarning, stacklevel=2)
        actions = [] if check is None else [a for r in self.reactions for a in r.act(check, optimizer)]
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
        if self.clipper is not None:
            self.clipper.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.due and self._open is None and torch.is_grad_enabled():
            self._start_observing(module, (module, args, kwargs))

    def _end(self, module: nn.Module, *call: object) -> None:
        if self._open is not None and self._open[1] is module:
            for path in self._open[2]:
                expansion_hook(path, self._on_expansion)(module, *call)
            self._stop_observing()

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

    def _on_expansion(self, path: str, ratio: float) -> None:
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
        expansion = self._expansions.get(home, torch.nan) if home is not None else torch.nan
        return LayerCheck(name, heads, expansion, bounds.dead_heads(heads), bounds.collapsed_heads(heads))


def _nothing(*args: object) -> None:
    """What the hooks of a copied or unpickled model do."""


class _Hook:
    """A hook of a monitor on its model. Copies of the model are not watched, and the hook keeps no monitor alive."""

    def __init__(self, monitor: Monitor, name: str):
        self.monitor, self.name = weakref.ref(monitor), name

    def __call__(self, module: nn.Module, *call) -> None:
        if torch.compiler.is_compiling():  # the step would be a constant of the graph, and every step a new one
            return
        monitor = self.monitor()
        if monitor is not None:
            getattr(monitor, self.name)(module, *call)

    def __reduce__(self):
        return _return_nothing, ()


def _return_nothing() -> Callable:
    return _nothing
