"""Smoothers over a grid of turning targets; `python -m tests.filters.smoother_grid` is the table of docs/filters.md.

A target at speed 10 flies straight or turns at ±0.1 rad a step; its position is measured 100 times. The reference
samples mode paths and smooths exactly given them. Of each smoother the root mean square error of the position counts,
over 50 tracks, with the standard error that these tracks determine it by.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant.filters import SmootherWarning, SwitchingLinearGaussian, gpb, imm, smooth
from cumulant.samplers import sample_smooth

TRACKS, STEPS = 50, 100
NOISES, MEASUREMENTS, MODES, STAYING = (1e-2, 1e-3, 1e-4), (1.0, 25.0), (2, 3), (0.9, 0.98)
SMOOTHERS = {
    "kim": {"method": "kim"},
    "correction": {"method": "correction"},
    "one sweep": {"sweeps": 1},
    "default": {},
    "order 3": {"order": 3},
}


class Cell(NamedTuple):
    """A target: process noise q, variance R of a measurement, number of modes, probability to stay in one."""

    q: float
    r: float
    modes: int
    stay: float


GRID = [Cell(*cell) for cell in itertools.product(NOISES, MEASUREMENTS, MODES, STAYING)]


def target(cell: Cell) -> SwitchingLinearGaussian:
    """x, y and their velocities."""

    def turn(rate: float) -> list[list[float]]:
        sin, cos = np.sin(rate), np.cos(rate)
        return [
            [1, 0, sin / rate, (cos - 1) / rate],
            [0, 1, (1 - cos) / rate, sin / rate],
            [0, 0, cos, -sin],
            [0, 0, sin, cos],
        ]

    moves = np.array([np.eye(4) + np.eye(4, k=2), turn(0.1), turn(-0.1)][: cell.modes])
    away = (1 - cell.stay) / (cell.modes - 1)
    transition = np.full((cell.modes, cell.modes), away) + (cell.stay - away) * np.eye(cell.modes)
    noise = cell.q * np.kron([[1 / 3, 1 / 2], [1 / 2, 1]], np.eye(2))
    start = [0.0, 0, 10, 0], np.diag([25.0, 25, 1, 1])
    parts = transition, moves, noise, np.eye(2, 4), cell.r * np.eye(2), *start
    transition, moves, noise, observation, seen, mean, covariance = (torch.tensor(part).double() for part in parts)
    law = {"initial_mean": mean, "initial_covariance": covariance}
    return SwitchingLinearGaussian(transition, moves, noise, observation, seen, **law)


class Measured(NamedTuple):
    """Squared errors of the position (tracks) by smoother, and the mean of errors² over stated variances (the NEES)."""

    squared: dict[str, Tensor]
    consistency: dict[str, float]

    def error(self, name: str) -> float:
        return self.squared[name].mean().sqrt().item()

    def ratio(self, name: str, to: str) -> tuple[float, float]:
        """The ratio of two errors on the same tracks, and its standard error by the jackknife over tracks."""
        a, b = self.squared[name], self.squared[to]
        n = len(a)
        left_out = ((a.sum() - a) / (b.sum() - b)).sqrt()
        spread = ((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt()
        return (a.mean() / b.mean()).sqrt().item(), spread.item()


def measure(cell: Cell, smoothers: dict[str, dict], *, histories: int = 200, futures: int = 16) -> Measured:
    """The filters, the smoothers and the reference on the same tracks."""
    model = target(cell)
    drawn = model.simulate(STEPS, batch_shape=(TRACKS,), generator=torch.Generator().manual_seed(0))
    y = drawn.observations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmootherWarning)
        found = {name: smooth(model, y, **options) for name, options in smoothers.items()}
    generator = torch.Generator().manual_seed(1)
    sampled = sample_smooth(model, y, histories=histories, futures=futures, generator=generator)
    records = {"imm": imm(model, y), "gpb2": gpb(model, y), **found, "reference": sampled}
    squared, consistency = {}, {}
    for name, record in records.items():
        apart = record.mean - drawn.states
        squared[name] = apart[..., :2].square().sum(-1).mean(-1)
        distance = apart[..., None, :] @ torch.linalg.solve(record.covariance, apart[..., None])
        consistency[name] = distance.mean().item() / apart.shape[-1]
    return Measured(squared, consistency)


def rows() -> None:
    """The table, a cell a line."""
    heads = ["q", "R", "modes", "P(stay)", "filter (IMM)", *SMOOTHERS, "reference", "default / reference"]
    sys.stdout.write("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n")
    for cell in GRID:
        begin, found = time.perf_counter(), measure(cell, SMOOTHERS)
        errors = [f"{found.error(name):.2f}" for name in ("imm", *SMOOTHERS, "reference")]
        ratio, spread = found.ratio("default", "reference")
        cells = [
            f"{cell.q:g}",
            f"{cell.r:g}",
            str(cell.modes),
            f"{cell.stay:g}",
            *errors,
            f"{ratio:.3f} ± {spread:.3f}",
        ]
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()
        nees = " ".join(f"{name} {value:.2f}" for name, value in found.consistency.items())
        sys.stderr.write(f"{time.perf_counter() - begin:.0f} s, errors² over stated variances: {nees}\n")


if __name__ == "__main__":
    rows()
