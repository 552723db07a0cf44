"""Clouds carried along a velocity that depends on the cloud alone: adaptive, with merging, stiff where it must be.

Knows no attention: a velocity is a function of distinct particles (k, d) and of the log of how many each stands for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cumulant.checks import sentence

PATIENCE = 1000  # explicit steps after which "auto" tries the stiff integrator, where nothing can merge
STIFF_SIZE = 600  # coordinates n·d up to which a Jacobian is cheap to factor
RESOLUTION = 1e-9  # of the time since the last restart; finer steps get a new origin of time
RUNAWAY = 1e-13  # of the time itself; in R^d finer steps mean a solution that ends here
ENDLESS = "it runs away to infinity in finite time"
FAILED = "LSODA could not go on; loosen rtol"
OVERFLOW = "the velocity leaves the floating numbers here"
RETRIES = 30  # tenfold cuts of a step whose velocity overflows


@runtime_checkable
class Velocity(Protocol):
    def __call__(self, x: Tensor, log_weights: Tensor | None = None) -> Tensor: ...


class _Pause(Exception):
    """Leaves an integrator between two of its steps."""


@dataclass
class Journey:
    """One cloud under way.

    x            (k, d)  its distinct particles
    log_weights  (k,)    log of how many each stands for; None before any two have merged
    place        (n,)    where each particle of the cloud is found among them
    sphere       whether positions have unit length
    merges       whether particles closer than rtol + atol may become one
    """

    velocity: Velocity
    x: Tensor
    sphere: bool
    merges: bool
    rtol: float
    atol: float
    max_steps: int
    method: str
    place: Tensor = field(init=False)
    log_weights: Tensor | None = None
    time: float = 0.0
    steps: int = 0
    reason: str = ""
    last_step: float | None = None
    stiff: _Stiff | None = None

    def __post_init__(self):
        self.place = torch.arange(len(self.x), device=self.x.device)

    def travel(self, times: list[float]) -> Tensor:
        """The cloud at each of these times (t, n, d); from where it stopped on, the last one."""
        states = []
        for until in times:
            if until > self.time and not self.reason:
                self._advance(until, times[-1])
            states.append(self.x[self.place])
        return torch.stack(states)

    def _advance(self, until: float, end: float) -> None:
        switches = self.method == "auto" and not self.merges and self.x.numel() <= STIFF_SIZE
        if self.method != "implicit" and self.stiff is None:
            self._explicit(until, PATIENCE if switches else self.max_steps)
        if self.time < until and not self.reason and (switches or self.method == "implicit"):
            self._implicit(until, end)
        if self.time < until and not self.reason:
            self.reason = too_few(self.max_steps)

    # ------------------------------------------------------------------ explicit

    def _explicit(self, until: float, allowance: int) -> None:
        """Dormand–Prince 8 up to a time, landing on it because the polynomial between its steps is of low order."""
        odeint = _torchdiffeq()
        failures = 0
        while self.time < until and self.steps < allowance and not self.reason:
            watch = _Watch(self, allowance)
            span = torch.tensor([0.0, until - self.time], dtype=self.x.dtype, device=self.x.device)
            options: dict[str, Any] = {"step_t": span[1:], "norm": _largest}
            if self.last_step is not None:
                options["first_step"] = min(self.last_step, until - self.time)
            try:
                path = odeint(watch, self.x, span, rtol=self.rtol, atol=self.atol, method="dopri8", options=options)
                self.steps += 1
                self._settle(path[-1], until, watch.step)
            except _Pause as pause:
                moved = watch.time > 0
                self._settle(watch.x, self.time + watch.time, watch.step)
                if str(pause) == "overflow":
                    failures = 0 if moved else failures + 1
                    self.last_step = watch.step / 10 if watch.step else None
                    if failures > RETRIES or not watch.step:
                        self.reason = OVERFLOW
                elif str(pause) == "runaway":
                    self.reason = ENDLESS
                elif str(pause) == "merge":
                    self._merge()

    def _settle(self, x: Tensor, time: float, step: float | None) -> None:
        self.x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) if self.sphere else x
        self.time, self.last_step = time, step

    @property
    def nearness(self) -> float:
        """What the integrator may be wrong by in one step; nearer particles are one."""
        return self.rtol + self.atol

    def _merge(self) -> None:
        """Neighbours in a sorted projection that are near in space become the first of them."""
        order = _sorted(self.x)
        ahead = self.x[order]
        group = torch.cat([order.new_zeros(1), (_gaps(ahead) > self.nearness).cumsum(0)])
        first = torch.zeros_like(group).scatter_reduce(
            0, group, torch.arange(len(group), device=group.device), "amin", include_self=False
        )
        # a chain of near neighbours may be long: who is far from its first stays alone
        alone = torch.linalg.vector_norm(ahead - ahead[first[group]], dim=-1) > self.nearness
        head = torch.where(alone, torch.arange(len(group), device=group.device), first[group])
        kept, inside = torch.unique(head, return_inverse=True)
        index = torch.empty_like(inside).scatter(0, order, inside)
        weights = torch.zeros_like(self.x[:, 0]) if self.log_weights is None else self.log_weights
        self.log_weights = weights.new_zeros(len(kept)).index_add(0, index, weights.exp()).log()
        self.x, self.place = ahead[kept], index[self.place]

    # ------------------------------------------------------------------ implicit

    def _implicit(self, until: float, end: float) -> None:
        """LSODA with the exact Jacobian, one run to the end of all times; between its steps its own polynomial."""
        self.stiff = _Stiff(self, end) if self.stiff is None else self.stiff
        try:
            while self.stiff.time < until and self.steps < self.max_steps and not self.reason:
                self.reason = self.stiff.step()
                self.steps += 1
                if not self.sphere and self.stiff.solver.step_size < RUNAWAY * self.stiff.time:
                    self.reason = self.reason or ENDLESS
        except _Pause:
            self.reason = OVERFLOW
        reached = min(until, self.stiff.time)
        if reached > self.time:
            self._settle(self.stiff.at(reached), reached, None)


class _Stiff:
    """LSODA from where a journey is now, in time since then."""

    def __init__(self, journey: Journey, end: float):
        self.start, self.velocity = journey.time, lambda x: journey.velocity(x, journey.log_weights)
        self.shape, self.device = journey.x.shape, journey.x.device
        y = journey.x.flatten().cpu().numpy()
        options = {"rtol": journey.rtol, "atol": journey.atol, "jac": self._jacobian}
        self.solver = lsoda()(self._speed, 0.0, y, end - self.start, **options)

    @property
    def time(self) -> float:
        return self.start + self.solver.t

    def step(self) -> str:
        """One step; why it failed, if it did."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LSODA's own words; its status says the same
            self.solver.step()
        return FAILED if self.solver.status == "failed" else ""

    def at(self, time: float) -> Tensor:
        """The state at a time within the last step."""
        return self._cloud(self.solver.dense_output()(time - self.start))

    def _cloud(self, y: Any) -> Tensor:
        return torch.as_tensor(y.copy(), device=self.device).reshape(self.shape)

    def _speed(self, _: float, y: Any) -> Any:
        v = self.velocity(self._cloud(y))
        if not bool(v.isfinite().all()):
            raise _Pause("overflow")
        return v.flatten().cpu().numpy()

    def _jacobian(self, _: float, y: Any) -> Any:
        return torch.func.jacrev(self.velocity)(self._cloud(y)).reshape(y.size, y.size).cpu().numpy()


class _Watch:
    """A velocity as torchdiffeq calls it; remembers the last accepted state and pauses where the cloud needs a hand."""

    def __init__(self, journey: Journey, allowance: int):
        self.journey, self.allowance = journey, allowance
        self.x, self.time, self.step = journey.x, 0.0, journey.last_step

    def __call__(self, _: Tensor, x: Tensor) -> Tensor:
        v = self.journey.velocity(x, self.journey.log_weights)
        if not bool(v.isfinite().all()):
            raise _Pause("overflow")
        return v

    def callback_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        """Before every attempt: where it starts, and how far it wants to go."""
        time, self.step = t.item(), dt.item()
        journey = self.journey
        if not journey.sphere and self.step < RUNAWAY * (journey.time + time):
            raise _Pause("runaway")
        if time == self.time:
            return
        self.x, self.time = x, time
        journey.steps += 1
        if journey.steps >= self.allowance:
            raise _Pause("allowance")
        if journey.merges and len(x) > 1 and bool((_gaps(x[_sorted(x)]) <= journey.nearness).any()):
            raise _Pause("merge")
        if self.step < RESOLUTION * time:
            raise _Pause("origin")


def _sorted(x: Tensor) -> Tensor:
    """Particles in the order of their projections on one generic direction."""
    return (x @ torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).sqrt().cos()).argsort()


def _gaps(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x[1:] - x[:-1], dim=-1)


def _largest(error: Tensor) -> Tensor:
    """Every particle keeps the tolerance, however many there are."""
    return error.abs().amax()


def _torchdiffeq() -> Callable[..., Any]:
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        advice = "Run: pip install cumulant[ode]"
        raise ImportError(sentence("flow", "torchdiffeq to be installed", "none", advice)) from error
    return odeint


def too_few(steps: int) -> str:
    return f"{steps} steps were not enough; raise max_steps or loosen rtol"


def lsoda() -> Callable[..., Any]:
    try:
        from scipy.integrate import LSODA
    except ImportError as error:
        advice = "Run: pip install cumulant[ode]"
        raise ImportError(sentence("flow", "scipy to be installed", "none", advice)) from error
    return LSODA
