"""Integration of independent particles whose speeds differ by many powers of e, by a change of time.

    ẋ = e^{r(x)} a(x)      has the orbit of      dx/dτ = a(x)      with      dt/dτ = e^{−r(x)}

In τ the problem is not stiff, whatever r is. Each particle has a clock t(τ) of its own; its state at a time is
interpolated where the clock reaches that time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics.integrate import BLOW_UP, BLOW_UP_STEP, FAILED, OVERFLOW, lsoda, step_limit

LOG_MAX = 700.0  # exponents that stay finite with room for factors


@dataclass
class TimeChangedIntegrator:
    """The state of the integration of a cloud x (n, d) of independent particles; fields as in `Integrator`.

    along  (n, d) → a (n, d) and r (n)
    """

    along: Callable[[Tensor], tuple[Tensor, Tensor]]
    x: Tensor
    sphere: bool
    rtol: float
    atol: float
    max_steps: int
    time: float = 0.0
    steps: int = 0
    reason: str = ""

    def integrate(self, times: list[float]) -> Tensor:
        """The cloud at each of these times (t, n, d); a particle that stopped stays where it was."""
        n, d = self.x.shape
        grid = np.asarray(times)
        next_time = (grid <= 0).sum().repeat(n)  # index of the first time not yet reached, per particle
        states = np.broadcast_to(self.x.cpu().numpy(), (len(grid), n, d)).copy()
        late = grid[grid > 0]
        if len(late):
            self._run(grid, next_time, states, float(late[0]))
        result = torch.from_numpy(states).to(self.x)
        return result / torch.linalg.vector_norm(result, dim=-1, keepdim=True) if self.sphere else result

    def _run(self, grid: np.ndarray, next_time: np.ndarray, states: np.ndarray, first: float) -> None:
        n, d = self.x.shape
        slack = np.full((n, d + 1), self.atol)
        slack[:, d] = self.rtol * first  # relative to the first time that is asked for
        start = np.concatenate([self.x.cpu().numpy(), np.zeros((n, 1))], 1).ravel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its status says the same
            solver = lsoda()(self._speed, 0.0, start, np.inf, rtol=self.rtol, atol=slack.ravel(), lband=d, uband=d)
            while (next_time < len(grid)).any() and not self.reason:
                if self.steps >= self.max_steps:
                    self.reason = step_limit(self.max_steps)
                    break
                solver.step()
                self.steps += 1
                self._record(solver, grid, next_time, states)
        self.time = float(grid[-1]) if not self.reason else float(solver.y.reshape(n, d + 1)[:, d].min())

    def _record(self, solver: Any, grid: np.ndarray, next_time: np.ndarray, states: np.ndarray) -> None:
        """Store the particles whose clock passed a requested time in this step, or set the reason why none will."""
        n, d = self.x.shape
        y = solver.y.reshape(n, d + 1)
        if solver.status == "failed" or not np.isfinite(y).all():
            self.reason = OVERFLOW if not np.isfinite(y).all() else FAILED
            return
        dense = solver.dense_output()
        while True:
            due = np.flatnonzero((next_time < len(grid)) & (y[:, d] >= grid[np.minimum(next_time, len(grid) - 1)]))
            if not len(due):
                break
            low, high = np.full(len(due), solver.t_old), np.full(len(due), solver.t)
            for _ in range(80):
                middle = (low + high) / 2
                clock = dense(middle).reshape(n, d + 1, -1)[due, d, np.arange(len(due))]
                low, high = (
                    np.where(clock < grid[next_time[due]], middle, low),
                    np.where(clock < grid[next_time[due]], high, middle),
                )
            position = dense(high).reshape(n, d + 1, -1)[due, :d, np.arange(len(due))]
            for which, index, x in zip(due, next_time[due], position, strict=True):
                states[index:, which] = x
            next_time[due] += 1
        waiting = next_time < len(grid)
        states[np.minimum(next_time, len(grid) - 1)[waiting], np.flatnonzero(waiting)] = y[waiting, :d]
        slow = (
            self._speed(0.0, solver.y).reshape(n, d + 1)[:, d] * max(solver.t, 1.0) < BLOW_UP_STEP * y[:, d]
        ) & waiting
        if not self.sphere and slow.any():
            self.reason = BLOW_UP

    def _speed(self, _: float, y: np.ndarray) -> np.ndarray:
        n, d = self.x.shape
        x = torch.from_numpy(y.reshape(n, d + 1)[:, :d].copy()).to(self.x)
        a, r = self.along(x)
        if self.sphere:  # corrects the length for rounding, over times of order e^β
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            a = a + (1 - length) / length * x
        clock = torch.exp((-r).clamp(max=LOG_MAX))[:, None]
        return torch.cat([a, clock], -1).flatten().cpu().numpy()
