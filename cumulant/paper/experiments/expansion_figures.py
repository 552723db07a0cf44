"""Figures of the experiments on expansion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics import Ascend, Trajectory
from cumulant.figures import BLUE, COLOURS, FAINT, INK, ORANGE, RED, figure
from cumulant.paper.experiments.experiment import Row
from cumulant.paper.experiments.tables import column, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VISIBLE = 0.5  # distance from which two tokens are distinct in a figure


def draw_expansion(rows: list[Row], dims: Sequence[int]) -> Figure:
    """Log-volume of each step by two routes, and how far distances are stretched."""
    drawn = figure(9, 3.8)
    left, right = drawn.subplots(1, 2)
    for d, colour in zip(dims, COLOURS, strict=False):
        selected = select(rows, d=d, metric="identity")
        t = column(selected, "step")
        left.plot(t, column(selected, "log_volume"), color=colour, label=f"d = {d}")
        left.plot(t, column(selected, "difference_log_volume"), "o", ms=4, mfc="none", color=colour)
        right.plot(t, column(selected, "median_ratio"), color=colour, label=f"d = {d}, median pair")
        right.plot(t, column(selected, "least_ratio"), ":", color=colour)
    left.plot([], [], "o", ms=4, mfc="none", color=INK, label="central differences")
    left.set(yscale="log", title="Log-volume that a step adds, mean over queries", xlabel="step", ylabel="log|det JT|")
    right.plot([], [], ":", color=INK, label="the pair that grew least")
    right.axhline(1, color=INK, lw=1)
    right.set(title="How a step stretches distances", xlabel="step", ylabel="|T(a) − T(b)| / |a − b|", ylim=(0.9, None))
    for ax in (left, right):
        ax.legend()
    return drawn


def draw_causal(ratios: dict[bool, Tensor], x: Tensor, apart: Tensor) -> Figure:
    """Ratios of distances with and without the mask over the distance before, and a pair that shrank."""
    drawn = figure(9, 3.8)
    left, right = drawn.subplots(1, 2, width_ratios=[1.2, 1])
    for causal, colour, name in ((True, ORANGE, "causal mask"), (False, BLUE, "no mask")):
        left.plot(apart.flatten().numpy(), ratios[causal].flatten().numpy(), ".", ms=3, alpha=0.5, color=colour)
        left.plot([], [], "o", ms=5, color=colour, label=name)
    least = float(ratios[True].min())
    left.axhspan(0.8 * least, 1, color=FAINT, alpha=0.3, lw=0)
    left.set(xscale="log", yscale="log", xlabel="distance of two tokens", ylim=(0.8 * least, None))
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10) if t > 0.8 * least and t < left.get_ylim()[1]]
    left.set_yticks(ticks, [f"{t:g}" for t in ticks])
    left.set_yticks([], minor=True)
    left.set_ylabel("distance after the layer / before")
    left.set_title(f"All pairs of {len(x)} clouds of {x.shape[1]} tokens in the plane")
    left.legend(loc="lower right")
    _draw_pair(right, torch.where(apart > VISIBLE, ratios[True], torch.inf), x)
    return drawn


def _draw_pair(ax: Axes, ratio: Tensor, x: Tensor) -> None:
    """The pair that shrank most among those that are VISIBLE."""
    cloud, pair = divmod(int(ratio.argmin()), ratio.shape[1])
    ends = torch.triu_indices(x.shape[1], x.shape[1], 1)[:, pair].tolist()
    before = x[cloud]
    after = Ascend(causal=True)(before)
    for i, (a, b) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        colour = RED if i in ends else FAINT
        ax.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0})
        ax.plot(*a, "o", ms=5, color=colour)
        ax.plot(*b, alpha=0)
        ax.annotate(str(i + 1), a, xytext=(5, -10), textcoords="offset points", color=INK if i in ends else "grey")
    ax.set_title(f"Tokens {ends[0] + 1} and {ends[1] + 1} come nearer: {float(ratio.min()):.2f} of their distance")
    ax.set_aspect("equal", adjustable="datalim")
    ax.set_xlabel("numbers give the order of the mask")


def draw_divergence(path: Trajectory, keys: Tensor, atoms: Tensor, curves: list[Row]) -> Figure:
    """Eight steps in the plane, the increment's way to one key, and the growth of fixed and moving keys."""
    drawn = figure(11, 3.8)
    plane, near, size = drawn.subplots(1, 3, width_ratios=[1.1, 1, 1])
    ways = torch.stack([path.states[t] for t in sorted(path.states)])
    names = {a: COLOURS[i % len(COLOURS)] for i, a in enumerate(sorted(set(atoms.tolist())))}
    for way, a in zip(ways.unbind(1), atoms.tolist(), strict=True):
        plane.plot(*way.mT.numpy(), color=names[a], lw=0.5, alpha=0.5)
    plane.plot(*keys.mT.numpy(), "o", ms=5, color="white", mec=INK, label="keys")
    for a, colour in names.items():
        plane.plot(*keys[a].tolist(), "o", ms=7, color=colour, mec=INK)
    plane.set_aspect("equal", adjustable="datalim")
    plane.set_title(f"{len(ways) - 1} steps, coloured by the key they end at")
    plane.legend()
    t, end = column(curves, "step"), 60
    near.plot(t[:end], column(curves, "largest_distance")[:end], color=FAINT, label="the last to arrive")
    near.plot(t[:end], column(curves, "median_distance")[:end], color=BLUE, label="median")
    near.set(yscale="log", xlabel="step", ylabel="|∇G(η_t) − x*|", title="The increment becomes one key")
    near.set_ylim(1e-16, 10)
    near.legend()
    size.plot(t[1:], column(curves, "norm_fixed_keys")[1:], color=BLUE, label="fixed keys: linear")
    moving = column(curves, "norm_moving_keys")
    size.plot(t[1 : len(moving)], moving[1:], color=ORANGE, label="moving keys: exponential")
    size.set(xscale="log", yscale="log", xlabel="step", ylabel="mean |η_t|", title="How fast it grows")
    size.set_ylim(1, 1e16)
    size.legend(loc="upper left")
    return drawn


def draw_inversion(rows: list[Row], sizes: Sequence[float]) -> Figure:
    """Error of the inverse over the depth, and what plain iteration manages instead."""
    drawn = figure(9, 3.8)
    left, right = drawn.subplots(1, 2)
    shade = np.linspace(0.25, 1, len(sizes))
    for size, alpha in zip(sizes, shade, strict=True):
        selected = select(rows, size=size)
        depth = column(selected, "depth")
        left.plot(depth, column(selected, "error"), "o-", color=BLUE, alpha=alpha, label=f"{size:g}")
    left.axhline(1e-6, color=RED, lw=1)
    left.annotate("tolerance: 1e-6", (1, 1e-6), xytext=(0, -11), textcoords="offset points", color=RED)
    left.set(yscale="log", ylim=(1e-16, 1e-5), xlabel="layers undone", ylabel="largest error of a query")
    left.set_title("Undoing a stack with the proximal map")
    left.legend(title="size of keys", ncols=3, loc="center")
    one = select(rows, depth=1)
    ways = (("newton_share", BLUE, "proximal map (Newton)"), ("iteration_share", ORANGE, "x ← y − ∇G(x)"))
    for name, colour, label in ways:
        right.plot(column(one, "size"), [100 * s for s in column(one, name)], "o-", color=colour, label=label)
    right.set(
        xscale="log", xlabel="size of keys", ylabel="queries undone, %", ylim=(-3, 106), title="One layer, two ways"
    )
    right.set_xticks(sizes, [f"{s:g}" for s in sizes])
    right.set_xticks([], minor=True)
    right.legend(loc="center right")
    return drawn
