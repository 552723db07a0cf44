"""Adaptive integration of an autonomous flow of particles, with merging and a switch to a stiff solver.

A velocity is a function of distinct particles (k, d) and of the log of how many each stands for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cumulant.extras import missing_package

EXPLICIT_STEPS = 1000  # after so many "auto" switches to the stiff solver, where particles cannot merge
MAX_STIFF_SIZE = 600  # coordinates n·d up to which a Jacobian is cheap to factor
RESOLUTION = 1e-9  # of the time since the last restart; finer steps get a new origin of time
BLOW_UP_STEP = 1e-13  # of the time itself; in R^d a finer step means a singularity of the solution
BLOW_UP = "it runs away to infinity in finite time"
FAILED = "LSODA could not go on; loosen rtol"
OVERFLOW = "the velocity leaves the floating numbers here"
RETRIES = 30  # tenfold reductions of a step whose velocity overflows


@runtime_checkable
class Velocity(Protocol):
    def __call__(self, x: Tensor, log_weights: Tensor | None = None) -> Tensor: ...


class _Interrupt(Exception):
    """Stops a solver between two of its steps; the argument is the reason."""


@dataclass
class Integrator:
    """The state of the integration of one cloud.

    x            (k, d)  the distinct particles
    log_weights  (k,)    log of how many each stands for; None before any two have merged
    index        (n,)    row of x that holds each particle of the cloud
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
    index: Tensor = field(init=False)
    log_weights: Tensor | None = None
    time: float = 0.0
    steps: int = 0
    reason: str = ""
    last_step: float | None = None
    stiff: _StiffSolver | None = None

    def __post_init__(self):
        self.index = torch.arange(len(self.x), device=self.x.device)

    def integrate(self, times: list[float]) -> Tensor:
        """The cloud at each of these times (t, n, d); after a stop the last state is repeated."""
        states = []
        for until in times:
            if until > self.time and not self.reason:
                self._advance(until, times[-1])
            states.append(self.x[self.index])
        return torch.stack(states)

    def _advance(self, until: float, end: float) -> None:
        switches = self.method == "auto" and not self.merges and self.x.numel() <= MAX_STIFF_SIZE
        if self.method != "implicit" and self.stiff is None:
            self._explicit(until, EXPLICIT_STEPS if switches else self.max_steps)
        if self.time < until and not self.reason and (switches or self.method == "implicit"):
            self._implicit(until, end)
        if self.time < until and not self.reason:
            self.reason = step_limit(self.max_steps)

    # ------------------------------------------------------------------ explicit

    def _explicit(self, until: float, allowance: int) -> None:
        """Dormand–Prince 8 with ``until`` as a step boundary: its dense output is of low order."""
        odeint = _torchdiffeq()
        failures = 0
        while self.time < until and self.steps < allowance and not self.reason:
            monitored = _MonitoredVelocity(self, allowance)
            span = torch.tensor([0.0, until - self.time], dtype=self.x.dtype, device=self.x.device)
            options: dict[str, Any] = {"step_t": span[1:], "norm": _largest}
            if self.last_step is not None:
                options["first_step"] = min(self.last_step, until - self.time)
            try:
                path = odeint(monitored, self.x, span, rtol=self.rtol, atol=self.atol, method="dopri8", options=options)
                self.steps += 1
                self._accept(path[-1], until, monitored.step)
            except _Interrupt as interrupt:
                moved = monitored.time > 0
                self._accept(monitored.x, self.time + monitored.time, monitored.step)
                if str(interrupt) == "overflow":
                    failures = 0 if moved else failures + 1
                    self.last_step = monitored.step / 10 if monitored.step else None
                    if failures > RETRIES or not monitored.step:
                        self.reason = OVERFLOW
                elif str(interrupt) == "blow-up":
                    self.reason = BLOW_UP
                elif str(interrupt) == "merge":
                    self._merge()

    def _accept(self, x: Tensor, time: float, step: float | None) -> None:
        self.x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) if self.sphere else x
        self.time, self.last_step = time, step

    @property
    def merge_distance(self) -> float:
        """Error tolerance of one step; particles that are closer are merged."""
        return self.rtol + self.atol

    def _merge(self) -> None:
        """Neighbours in a sorted projection that are near in space become the first of them."""
        order = _sorted(self.x)
        ahead = self.x[order]
        group = torch.cat([order.new_zeros(1), (_gaps(ahead) > self.merge_distance).cumsum(0)])
        first = torch.zeros_like(group).scatter_reduce(
            0, group, torch.arange(len(group), device=group.device), "amin", include_self=False
        )
        # a chain of near neighbours may be long: a particle far from the first one is not merged
        alone = torch.linalg.vector_norm(ahead - ahead[first[group]], dim=-1) > self.merge_distance
        head = torch.where(alone, torch.arange(len(group), device=group.device), first[group])
        heads, inside = torch.unique(head, return_inverse=True)
        merged = torch.empty_like(inside).scatter(0, order, inside)
        weights = torch.zeros_like(self.x[:, 0]) if self.log_weights is None else self.log_weights
        self.log_weights = weights.new_zeros(len(heads)).index_add(0, merged, weights.exp()).log()
        self.x, self.index = ahead[heads], merged[self.index]

    # ------------------------------------------------------------------ implicit

    def _implicit(self, until: float, end: float) -> None:
        """LSODA with the exact Jacobian, one run to the last time, read off by its dense output."""
        self.stiff = _StiffSolver(self, end) if self.stiff is None else self.stiff
        try:
            while self.stiff.time < until and self.steps < self.max_steps and not self.reason:
                self.reason = self.stiff.step()
                self.steps += 1
                if not self.sphere and self.stiff.solver.step_size < BLOW_UP_STEP * self.stiff.time:
                    self.reason = self.reason or BLOW_UP
        except _Interrupt:
            self.reason = OVERFLOW
        reached = min(until, self.stiff.time)
        if reached > self.time:
            self._accept(self.stiff.at(reached), reached, None)


class _StiffSolver:
    """LSODA started from the state of an integrator, in time since then."""

    def __init__(self, integrator: Integrator, end: float):
        self.start, self.velocity = integrator.time, lambda x: integrator.velocity(x, integrator.log_weights)
        self.shape, self.device = integrator.x.shape, integrator.x.device
        y = integrator.x.flatten().cpu().numpy()
        options = {"rtol": integrator.rtol, "atol": integrator.atol, "jac": self._jacobian}
        self.solver = lsoda()(self._speed, 0.0, y, end - self.start, **options)

    @property
    def time(self) -> float:
        return self.start + self.solver.t

    def step(self) -> str:
        """One step; returns why it failed, or an empty string."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its status says the same
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
            raise _Interrupt("overflow")
        return v.flatten().cpu().numpy()

    def _jacobian(self, _: float, y: Any) -> Any:
        return torch.func.jacrev(self.velocity)(self._cloud(y)).reshape(y.size, y.size).cpu().numpy()


class _MonitoredVelocity:
    """A velocity as torchdiffeq calls it; keeps the last accepted state, may interrupt the solver."""

    def __init__(self, integrator: Integrator, allowance: int):
        self.integrator, self.allowance = integrator, allowance
        self.x, self.time, self.step = integrator.x, 0.0, integrator.last_step

    def __call__(self, _: Tensor, x: Tensor) -> Tensor:
        v = self.integrator.velocity(x, self.integrator.log_weights)
        if not bool(v.isfinite().all()):
            raise _Interrupt("overflow")
        return v

    def callback_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        """Called by torchdiffeq before every attempted step, with its start and its length."""
        time, self.step = t.item(), dt.item()
        integrator = self.integrator
        if not integrator.sphere and self.step < BLOW_UP_STEP * (integrator.time + time):
            raise _Interrupt("blow-up")
        if time == self.time:
            return
        self.x, self.time = x, time
        integrator.steps += 1
        if integrator.steps >= self.allowance:
            raise _Interrupt("allowance")
        if integrator.merges and len(x) > 1 and bool((_gaps(x[_sorted(x)]) <= integrator.merge_distance).any()):
            raise _Interrupt("merge")
        if self.step < RESOLUTION * time:
            raise _Interrupt("origin")


def _sorted(x: Tensor) -> Tensor:
    """Particles in the order of their projections on one generic direction."""
    return (x @ torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).sqrt().cos()).argsort()


def _gaps(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x[1:] - x[:-1], dim=-1)


def _largest(error: Tensor) -> Tensor:
    """Maximum norm, so that the tolerance holds for every particle."""
    return error.abs().amax()


def _torchdiffeq() -> Callable[..., Any]:
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise missing_package("flow", "torchdiffeq", "ode") from error
    return odeint


def step_limit(steps: int) -> str:
    return f"{steps} steps were not enough; raise max_steps or loosen rtol"


def lsoda() -> Callable[..., Any]:
    try:
        from scipy.integrate import LSODA
    except ImportError as error:
        raise missing_package("flow", "scipy", "ode") from error
    return LSODA
