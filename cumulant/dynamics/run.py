"""Iterates a dynamics, records readouts of its states, and stops with a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.display import html_table
from cumulant.dynamics.layer import Dynamics
from cumulant.dynamics.readouts import READOUTS
from cumulant.dynamics.renormalize import NormalizationError
from cumulant.solve.solution import CodeWithMessage

DEFAULT_READOUTS = ("w2_to_gaussian", "skewness", "kurtosis", "effective_rank", "clusters", "mean_norm")


class Halt(CodeWithMessage):
    """Why a run ended; ``halt.sentence`` says it in words.

    >>> Halt.CONVERGED.sentence
    'no particle moved more than tol'
    """

    FINISHED = 0, "all steps were taken"
    DIVERGED = 1, "the state left the finite numbers or the bound"
    COLLAPSED = 2, "the cloud became one point, which no ensemble normaliser can spread"
    REFUSED = 3, "the normaliser is singular at this cloud"
    CONVERGED = 4, "no particle moved more than tol"


class Trajectory(NamedTuple):
    """Readouts along a run, and how it ended.

    times     (t,)  the steps after which the state was read: 0, every, 2·every, …, and the last
    readings  name → (t, *batch)      one row per time
    state     the last state that is finite and within the bound
    states    time → state, for the times in ``keep`` that were reached
    halt      a `Halt`
    reason    one sentence
    info      name → (t − 1, *batch)  the info of the steps that led to times[1:]
    """

    times: Tensor
    readings: dict[str, Tensor]
    state: Any
    states: dict[int, Any]
    halt: Halt
    reason: str
    info: dict[str, Tensor]

    def __repr__(self) -> str:
        return f"Trajectory({self.summary})"

    def _repr_html_(self) -> str:
        ends = {name: f"{_mean_text(values[0])} → {_mean_text(values[-1])}" for name, values in self.readings.items()}
        title = f"Trajectory: {self.halt.name} after {int(self.times[-1])} steps ({self.reason})"
        return html_table(title, {"times": self.times, **ends, "kept states": str(sorted(self.states))})

    @property
    def summary(self) -> str:
        """One line: how it ended, then each reading from first to last, averaged over a batch."""
        parts = [f"{name} {_mean_text(values[0])} → {_mean_text(values[-1])}" for name, values in self.readings.items()]
        return "; ".join([f"{self.halt.name} after {int(self.times[-1])} steps ({self.reason})", *parts])


def run(
    dynamics: Dynamics,
    state: Any,
    steps: int,
    *,
    readouts: Collection[str] | Mapping[str, Callable[[Any], Tensor]] = DEFAULT_READOUTS,
    every: int = 1,
    keep: Iterable[int] = (),
    tol: float | None = None,
    bound: float = 1e12,
    progress: Callable[[int, int], object] | None = None,
) -> Trajectory:
    """Take ``steps`` steps from ``dynamics.init(state)``, without gradients, and record readouts.

    readouts  names among `READOUTS`, or name → function of the state. The default reads clouds only
    every     read after every so many steps; the start and the end are always read
    keep      times whose states are stored
    tol       CONVERGED as soon as no particle moves more than this (of a law: no parameter) in a step; None: never
    bound     DIVERGED as soon as a number of the state exceeds it, is infinite or NaN; readings until then are kept
    progress  called with (steps taken, steps) after each

    Clouds of a batch start and stop together. A start that cannot be renormalised raises; a state on the way that
    cannot ends the run with COLLAPSED or REFUSED and the sentence.

    >>> import torch
    >>> from cumulant.dynamics import Ascend, Layer, SphereNorm
    >>> layer = Layer(ascend=Ascend(), renormalize=SphereNorm())
    >>> path = run(layer, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 100, readouts=("mean_cosine",), tol=1e-4)
    >>> path.summary
    'CONVERGED after 15 steps (no particle moved more than tol = 0.0001); mean_cosine 0.5 → 1'
    """
    stored_times = _check(dynamics, steps, every, keep, tol, bound)
    with torch.no_grad():
        state = dynamics.init(state)
        log = _Log(_functions(readouts, state), stored_times)
        log.read(0, state)
        halt, reason, info = Halt.FINISHED, Halt.FINISHED.sentence, None
        taken = 0
        while taken < steps:
            try:
                following, info = dynamics.step(state)
            except NormalizationError as refusal:
                halt, reason = _refusal(refusal, taken + 1)
                break
            cause = _divergence(following, bound)
            if cause is not None:
                halt, reason = Halt.DIVERGED, f"step {taken + 1}: {cause}"
                break
            taken, moved, state = taken + 1, None if tol is None else _distance(following, state), following
            if progress is not None:
                progress(taken, steps)
            log.store(taken, state)
            if moved is not None and tol is not None and moved <= tol:
                halt, reason = Halt.CONVERGED, f"{Halt.CONVERGED.sentence} = {tol:g}"
                break
            if taken % every == 0:
                log.read(taken, state, info)
        log.read(taken, state, info)
    return Trajectory(
        times=torch.tensor(log.times),
        readings=_stacked(log.rows),
        state=state,
        states=log.states,
        halt=halt,
        reason=reason,
        info=_stacked(log.infos),
    )


class _Log:
    """Readings and stored states, row by row; a time is read once."""

    def __init__(self, functions: Mapping[str, Callable[[Any], Tensor]], stored_times: set[int]):
        self.functions, self.stored_times = functions, stored_times
        self.times: list[int] = []
        self.rows: dict[str, list[Tensor]] = {name: [] for name in functions}
        self.infos: dict[str, list[Tensor]] = {}
        self.states: dict[int, Any] = {}

    def read(self, time: int, state: Any, info: Any = None) -> None:
        if self.times and self.times[-1] == time:
            return
        self.store(time, state)
        self.times.append(time)
        for name, function in self.functions.items():
            self.rows[name].append(torch.as_tensor(function(state)).detach())
        for name, value in _named(info).items():
            self.infos.setdefault(name, []).append(value)

    def store(self, time: int, state: Any) -> None:
        if time in self.stored_times:
            self.states[time] = state


def _stacked(rows: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(values) for name, values in rows.items()}


def _named(info: Any) -> dict[str, Tensor]:
    """The tensors of an info NamedTuple by name; none of anything else."""
    names = getattr(info, "_fields", ())
    return {name: getattr(info, name).detach() for name in names if isinstance(getattr(info, name), Tensor)}


def _refusal(refusal: NormalizationError, step: int) -> tuple[Halt, str]:
    kinds = {"collapsed": Halt.COLLAPSED, "nonfinite": Halt.DIVERGED}
    return kinds.get(refusal.kind, Halt.REFUSED), f"step {step}: {refusal}"


def _divergence(state: Any, bound: float) -> str | None:
    """Why a state counts as diverged, or None. In a law −inf is the logarithm of a weight 0."""
    for tensor in _tensors(state):
        absent = torch.zeros_like(tensor, dtype=torch.bool) if isinstance(state, Tensor) else tensor == -torch.inf
        bad = ~(tensor.isfinite() | absent)
        if bad.any():
            return f"{int(bad.sum())} of {tensor.numel()} numbers are NaN or infinite"
        largest = torch.where(absent, 0, tensor).abs().max().item() if tensor.numel() else 0.0
        if largest > bound:
            return f"the largest number is {largest:.3g}, beyond the bound {bound:g}"
    return None


def _distance(following: Any, state: Any) -> float:
    """The largest displacement of a particle; of a law, the largest change of a parameter."""
    if isinstance(state, Tensor):
        return torch.linalg.vector_norm(following - state, dim=-1).max().item()
    pairs = [(a, b) for a, b in zip(_tensors(following), _tensors(state), strict=True) if a.numel() or b.numel()]
    if any(a.shape != b.shape for a, b in pairs):
        return torch.inf
    return max([torch.where(a == b, 0, a - b).abs().max().item() for a, b in pairs], default=0.0)


def _tensors(state: Any) -> list[Tensor]:
    """The floating tensors of a state: of a cloud itself, of a law its parameters."""
    if isinstance(state, Tensor):
        return [state] if state.is_floating_point() else []
    if isinstance(state, Mapping):
        state = tuple(state.values())
    elif is_dataclass(state):
        state = tuple(getattr(state, f.name) for f in fields(state))
    return [t for part in state for t in _tensors(part)] if isinstance(state, tuple | list) else []


def _functions(readouts: Any, state: Any) -> Mapping[str, Callable[[Any], Tensor]]:
    if isinstance(readouts, Mapping):
        return readouts
    if readouts is DEFAULT_READOUTS and not isinstance(state, Tensor):
        return {}
    names = (readouts,) if isinstance(readouts, str) else tuple(readouts)
    for name in names:
        if name not in READOUTS:
            advice = "Pass a mapping name → function for your own."
            raise ValueError(sentence("run.readouts", f"names among {', '.join(READOUTS)}", repr(name), advice))
    return {name: READOUTS[name] for name in names}


def _check(dynamics: object, steps: Any, every: Any, keep: Iterable[int], tol: float | None, bound: float) -> set[int]:
    if not isinstance(dynamics, Dynamics) or isinstance(dynamics, type):
        advice = "Give it init(state) and step(state) -> (state, info)."
        raise TypeError(sentence("run.dynamics", "an object with init and step", repr(dynamics), advice))
    for name, value, least in (("steps", steps, 0), ("every", every, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(sentence(f"run.{name}", f"an integer ≥ {least}", value, "Count whole steps."))
    if tol is not None and not tol >= 0:
        raise ValueError(sentence("run.tol", "a number ≥ 0, or None", tol, "None runs all steps."))
    if not bound > 0:
        raise ValueError(sentence("run.bound", "a positive number", bound, "1e12 is far beyond any layer."))
    times = set(keep)
    if not all(isinstance(t, int) and 0 <= t <= steps for t in times):
        expected = f"times from 0 to steps = {steps}"
        raise ValueError(sentence("run.keep", expected, sorted(times), "They are numbers of steps."))
    return times


def _mean_text(values: Tensor) -> str:
    return f"{values.double().mean().item():.4g}"
