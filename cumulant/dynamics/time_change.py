"""Particles that do not see each other, carried at speeds that differ by many powers of e.

    ẋ = e^{r(x)} a(x)      has the orbit of      dx/dτ = a(x)      on the clock      dt/dτ = e^{−r(x)}

Along a the problem is tame whatever r is. Every particle has a clock of its own; the answer at time t is read off where
the clock says t.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics.integrate import ENDLESS, FAILED, OVERFLOW, RUNAWAY, lsoda, too_few

LOG_MAX = 700.0  # exponents that stay finite with room for factors


@dataclass
class Clocks:
    """A cloud x (n, d) of independent particles under way; see `Journey` for what is common.

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

    def travel(self, times: list[float]) -> Tensor:
        """The cloud at each of these times (t, n, d); a particle that stopped stays where it was."""
        n, d = self.x.shape
        asked = np.asarray(times)
        read = (asked <= 0).sum().repeat(n)  # times read so far, of each particle
        states = np.broadcast_to(self.x.cpu().numpy(), (len(asked), n, d)).copy()
        late = asked[asked > 0]
        if len(late):
            self._run(asked, read, states, float(late[0]))
        found = torch.from_numpy(states).to(self.x)
        return found / torch.linalg.vector_norm(found, dim=-1, keepdim=True) if self.sphere else found

    def _run(self, asked: np.ndarray, read: np.ndarray, states: np.ndarray, first: float) -> None:
        n, d = self.x.shape
        slack = np.full((n, d + 1), self.atol)
        slack[:, d] = self.rtol * first  # a clock is as exact as the first time it is read at
        start = np.concatenate([self.x.cpu().numpy(), np.zeros((n, 1))], 1).ravel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LSODA's own words; its status says the same
            solver = lsoda()(self._speed, 0.0, start, np.inf, rtol=self.rtol, atol=slack.ravel(), lband=d, uband=d)
            while (read < len(asked)).any() and not self.reason:
                if self.steps >= self.max_steps:
                    self.reason = too_few(self.max_steps)
                    break
                solver.step()
                self.steps += 1
                self._read(solver, asked, read, states)
        self.time = float(asked[-1]) if not self.reason else float(solver.y.reshape(n, d + 1)[:, d].min())

    def _read(self, solver: Any, asked: np.ndarray, read: np.ndarray, states: np.ndarray) -> None:
        """Take down every particle whose clock passed a time in this step, or say why none ever will."""
        n, d = self.x.shape
        y = solver.y.reshape(n, d + 1)
        if solver.status == "failed" or not np.isfinite(y).all():
            self.reason = OVERFLOW if not np.isfinite(y).all() else FAILED
            return
        between = solver.dense_output()
        while True:
            due = np.flatnonzero((read < len(asked)) & (y[:, d] >= asked[np.minimum(read, len(asked) - 1)]))
            if not len(due):
                break
            low, high = np.full(len(due), solver.t_old), np.full(len(due), solver.t)
            for _ in range(80):
                middle = (low + high) / 2
                clock = between(middle).reshape(n, d + 1, -1)[due, d, np.arange(len(due))]
                low, high = (
                    np.where(clock < asked[read[due]], middle, low),
                    np.where(clock < asked[read[due]], high, middle),
                )
            place = between(high).reshape(n, d + 1, -1)[due, :d, np.arange(len(due))]
            for which, index, x in zip(due, read[due], place, strict=True):
                states[index:, which] = x
            read[due] += 1
        waiting = read < len(asked)
        states[np.minimum(read, len(asked) - 1)[waiting], np.flatnonzero(waiting)] = y[waiting, :d]
        slow = (self._speed(0.0, solver.y).reshape(n, d + 1)[:, d] * max(solver.t, 1.0) < RUNAWAY * y[:, d]) & waiting
        if not self.sphere and slow.any():
            self.reason = ENDLESS

    def _speed(self, _: float, y: np.ndarray) -> np.ndarray:
        n, d = self.x.shape
        x = torch.from_numpy(y.reshape(n, d + 1)[:, :d].copy()).to(self.x)
        a, r = self.along(x)
        if self.sphere:  # holds the length at 1 against rounding, over times of e^β
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            a = a + (1 - length) / length * x
        clock = torch.exp((-r).clamp(max=LOG_MAX))[:, None]
        return torch.cat([a, clock], -1).flatten().cpu().numpy()
