"""Figures of the experiments on the Gaussian equilibrium and its stability."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from cumulant.dynamics.stability import cumulant_multiplier, escape_time
from cumulant.figures import BLUE, COLOURS, FAINT, GREEN, INK, ORANGE, figure
from cumulant.paper.experiments.experiment import Row
from cumulant.paper.experiments.tables import column, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"zca": "ZCA: the identity", "cholesky": "Cholesky: turned", "pca": "PCA: turned"}


def draw_equilibrium(points: list[Row], turned: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Attention over sampled keys against the mean field, and where three whitenings leave the particles."""
    drawn = figure(12, 3.4)
    spec = drawn.add_gridspec(1, 4, width_ratios=[1.3, 1, 1, 1])
    _deviations(drawn.add_subplot(spec[0]), points)
    for index, (kind, (before, after)) in enumerate(turned.items()):
        ax = drawn.add_subplot(spec[index + 1])
        for a, b in zip(before.tolist(), after.tolist(), strict=True):
            ax.plot(*zip(a, b, strict=True), color=ORANGE, lw=0.8)
        ax.plot(*before.mT.numpy(), "o", ms=4, mfc="white", color=INK, label="before")
        ax.plot(*after.mT.numpy(), ".", ms=4, color=ORANGE, label="after")
        ax.set(aspect="equal", xlim=(-3, 3), ylim=(-3, 3), title=TITLES[kind])
        if index == 0:
            ax.legend(loc="lower left", handletextpad=0, borderpad=0)
    return drawn


def _deviations(ax: Axes, points: list[Row]) -> None:
    for n, colour in zip(dict.fromkeys(r["keys"] for r in points), COLOURS, strict=False):
        selected = select(points, keys=n)
        ax.plot(column(selected, "length"), column(selected, "off"), ".", ms=3, color=colour, label=f"{n:,} keys")
        r = np.linspace(0.05, 4, 60)
        ax.plot(r, np.sqrt(np.exp(r**2) * (2 + r**2) / float(n or 1)), color=colour, lw=1)
    ax.plot([], [], color=INK, lw=1, label="fluctuation, X-8")
    ax.set(
        yscale="log", ylim=(2e-4, 8), xlim=(0, 4), xlabel="|η| in units of Σ", ylabel="off from μ + Ση, in units of Σ"
    )
    ax.set_title("Attention over sampled keys")
    ax.legend(loc="upper left")


def median_escape(escapes: list[Row], particles: float) -> float:
    """The layer after which half of the runs had left; +inf if more than half never did.

    >>> median_escape([{"particles": 9, "left_after": t} for t in (4, 8, None)], 9)
    8.0
    """
    left = [inf if r["left_after"] is None else float(r["left_after"]) for r in select(escapes, particles=particles)]
    return float(np.median(left))


def draw_stability(rows: list[Row], escapes: list[Row]) -> Figure:
    """λ_n over s for both signs, predicted and measured, and escape times of Gaussian samples."""
    drawn = figure(11, 3.9)
    axes = drawn.subplots(1, 3)
    for ax, v in zip(axes, (0.5, -0.5), strict=False):
        _multipliers(ax, rows, v)
    axes[0].set_ylabel("λ_n, growth of the n-th cumulant per layer")
    axes[0].legend(loc="upper left")
    ax, sizes = axes[2], list(dict.fromkeys(column(escapes, "particles")))
    for n in sizes:
        left = column(escapes, "left_after", particles=n)
        ax.plot([n] * len(left), left, "o", ms=4, mfc="none", color=BLUE, alpha=0.7)
        ax.plot(n, median_escape(escapes, n), "_", ms=18, mew=2, color=INK)
    n = np.geomspace(min(sizes), max(sizes), 50)
    ax.plot(n, [escape_time(int(k), 0.5, 0.5) for k in n], color=ORANGE, label="estimate log √(N/6) / log λ_3")
    ax.plot([], [], "o", mfc="none", ms=4, color=BLUE, label="one run")
    ax.plot([], [], "_", ms=12, mew=2, color=INK, label="median")
    ax.set(xscale="log", xlabel="particles", ylabel="layers until W₂ > 0.3", ylim=(0, 52))
    ax.set_title("v = s = ½: when Gaussian samples leave")
    ax.set_xticks(sizes, [f"{k:g}" for k in sizes])
    ax.set_xticks([], minor=True)
    ax.legend(loc="upper right")
    return drawn


def _multipliers(ax: Axes, rows: list[Row], v: float) -> None:
    s = np.linspace(0, 1.1, 100)
    ax.axhspan(-1, 1, color=FAINT, alpha=0.3, lw=0)
    for n, colour in zip((3, 4, 5, 8), (BLUE, ORANGE, GREEN, INK), strict=True):
        ax.plot(s, [cumulant_multiplier(n, v, k) for k in s], color=colour, lw=1.2, label=f"n = {n}")
        selected = select(rows, n=n, v=v)
        ax.plot(column(selected, "s"), column(selected, "measured"), "o", ms=4, color=colour)
    ax.axhline(1, color=INK, lw=0.8)
    ax.set(xlabel="s, logit scale", ylim=(0.9, 4) if v > 0 else (-4, 1.15))
    ax.set_title("v = +½: attention leaves" if v > 0 else "v = −½: it comes back where |λ_n| < 1")
