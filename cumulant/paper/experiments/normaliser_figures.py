"""The figure of the experiment that compares normalisers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumulant.figures import BLUE, COLOURS, FAINT, INK, ORANGE, figure
from cumulant.paper.experiments.experiment import Row
from cumulant.paper.experiments.phase_diagram import TITLE
from cumulant.paper.experiments.tables import column, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: list[Row], corners: list[Row], stream: list[Row]) -> Figure:
    """Rank, clusters and corners under attention, W₂ under its opposite, and post-norm beside pre-norm."""
    drawn = figure(11, 6.6)
    (rank, groups, w2), (corner, cosine, norm) = drawn.subplots(2, 3)
    _over_layers(rank, rows, "rank", 0.5)
    rank.set(title="v = +½: effective rank until it is one point", ylabel="effective rank", yscale="log")
    ticks = (1, 2, 4, 8, 16)
    rank.set_yticks(ticks, [str(t) for t in ticks])
    rank.set_yticks([], minor=True)
    _over_layers(groups, rows, "clusters", 0.5)
    groups.set(title="v = +½: clusters, at most 61 counted", ylabel="clusters", yscale="log")
    ticks = (1, 5, 17, 61)
    groups.set_yticks(ticks, [str(t) for t in ticks])
    groups.set_yticks([], minor=True)
    _over_layers(w2, rows, "w2", -0.5)
    w2.set(title="v = −½: distance to a Gaussian", ylabel="W₂", ylim=(0, 0.31))
    for d, style in ((4, "-"), (16, "--")):
        w2.plot([], [], style, color=INK, lw=1.3, label=f"d = {d}")
    w2.legend(loc="upper right", ncols=2)
    _draw_corners(corner, corners)
    for order, colour in (("post", BLUE), ("pre", ORANGE)):
        selected = select(stream, order=order)
        t = column(selected, "t")
        cosine.plot(t[1:], column(selected, "cosine")[1:], color=colour, label=f"{order}-norm")
        norm.plot(t[1:], column(selected, "norm")[1:], color=colour, label=f"{order}-norm")
    cosine.set(title="Where the norm stands: how alike tokens get", ylabel="mean cosine", xlabel="layers", xscale="log")
    norm.set(title="… and how long they get", ylabel="mean |x|", xlabel="layers", xscale="log", yscale="log")
    cosine.legend(loc="lower right")
    return drawn


def _over_layers(ax: Axes, rows: list[Row], name: str, v: float) -> None:
    for norm, colour in zip(TITLE, COLOURS, strict=False):
        for d, style in ((4, "-"), (16, "--")):
            selected = [r for r in select(rows, normaliser=norm, v=v, d=d) if r[name] is not None]
            label = TITLE[norm] if d == 4 else None
            ax.plot(column(selected, "t"), column(selected, name), style, color=colour, label=label, lw=1.3)
    ax.set_xlabel("layers")


def _draw_corners(ax: Axes, corners: list[Row]) -> None:
    dims = column(corners, "d")
    top = max(dims)
    ax.plot([1, top], [2, top + 1], color=FAINT, label="d + 1")
    ax.plot(dims, column(corners, "clusters"), "o", ms=5, mfc="none", color=INK, label="one run")
    ax.set(title="Full whitening, v = s = ½: clusters in the end", xlabel="d", ylabel="clusters")
    ax.legend(loc="upper left")
