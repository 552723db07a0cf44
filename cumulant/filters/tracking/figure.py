"""A track as a figure: where it went with ellipses of its covariance, which mode it was in, and how sure that is."""

from __future__ import annotations

from itertools import cycle
from math import log, sqrt
from typing import TYPE_CHECKING

import numpy as np
import torch

from cumulant.figures import COLOURS, INK, RED, figure
from cumulant.filters import ProjectedNormal
from cumulant.filters.tracking.filter import Estimate, located_rows, position_moments
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.units import ISO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHIN = 0.95  # the probability that an ellipse holds
ELLIPSES = 24
MAX_PANELS = 4  # measured columns that are drawn where they are not two
LONG_GAP = 4.0  # median gaps, over which no line is drawn


def draw_track(model: TrackModel, estimate: Estimate) -> Figure:
    """Two axes are drawn as a plane, others against time; the modes against time in any case."""
    moments = position_moments(model, estimate.filtered)
    measured = _axes_drawn(model)
    if len(measured) == 2:
        wide = _width(moments.mean)
        drawn = figure(wide + 5.0, 5.0)
        spec = drawn.add_gridspec(2, 2, width_ratios=[wide, 5.0])
        _plane(drawn.add_subplot(spec[:, 0]), model, estimate, moments)
        modes = drawn.add_subplot(spec[0, 1])
        _modes(modes, model, estimate)
        _deviations(drawn.add_subplot(spec[1, 1], sharex=modes), model, estimate, moments)
        return drawn
    panels = min(len(measured), MAX_PANELS)
    drawn = figure(9.0, 2.2 + 1.9 * panels)
    axes = drawn.subplots(panels + 1, 1, sharex=True, squeeze=False)[:, 0]
    for column, ax in enumerate(axes[:-1]):
        _against_time(ax, model, estimate, moments, column)
    axes[0].set_title(_plain(f"Track {estimate.track.name}"))
    axes[0].legend(loc="lower right", ncols=4, fontsize=8, bbox_to_anchor=(1, 1), borderaxespad=0)
    _modes(axes[-1], model, estimate)
    _label_times(axes[-1], model)
    return drawn


def _times(model: TrackModel, estimate: Estimate) -> np.ndarray:
    """Numbers as in the table, or dates."""
    times = np.asarray(estimate.track.times)
    return (1e3 * times).round().astype("datetime64[ms]") if model.columns.time_unit == ISO else times


def _label_times(ax: Axes, model: TrackModel) -> None:
    if model.columns.time_unit == ISO:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(minticks=3, maxticks=8)
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    ax.set_xlabel(_plain(model.columns.time) + (" (UTC)" if model.columns.time_unit == ISO else ""))


def _long_gaps(estimate: Estimate) -> np.ndarray:
    """(T−1,), True where the next row comes so late that a line to it would be a guess."""
    gaps = np.asarray(estimate.track.gaps)
    return gaps > LONG_GAP * np.median(gaps) if len(gaps) else np.zeros(0, dtype=bool)


def _line(
    ax: Axes, estimate: Estimate, x: np.ndarray, y: np.ndarray, style: str = "-", label: str = "", **look
) -> None:
    """A line that breaks at long gaps."""
    ends = np.flatnonzero(_long_gaps(estimate)) + 1
    for k, rows in enumerate(np.split(np.arange(len(x)), ends)):
        ax.plot(x[rows], y[rows], style, label=None if k else label, **look)


def _axes_drawn(model: TrackModel) -> tuple[str, ...]:
    """Positions, or what is measured where modes are matrices."""
    return model.axes or model.columns.measured


def _rejected_rows(estimate: Estimate) -> np.ndarray:
    """(T,), True where a gate rejected something."""
    found = estimate.innovations
    return np.zeros(len(estimate.track.times), dtype=bool) if found is None else found.rejected.any(-1).numpy()


def _width(mean: torch.Tensor) -> float:
    """Inches for a plane four and a half high: as wide as the track asks for, within reason."""
    across, up = (mean.amax(0) - mean.amin(0)).tolist()
    return min(max(4.5 * across / up if up > 0 else 6.0, 3.6), 6.0)


def _plane(ax: Axes, model: TrackModel, estimate: Estimate, moments: ProjectedNormal) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Ellipse

    mean = moments.mean.numpy()
    colours = _colours(model)
    likeliest = estimate.filtered.mode_probabilities.argmax(-1).tolist()
    for k in _rows_with_ellipse(len(mean)):
        width, height, angle = _axes_of(moments.covariance[k])
        colour = colours[likeliest[k]]
        ellipse = Ellipse((mean[k, 0], mean[k, 1]), width, height, angle=angle, fc=(colour, 0.15), ec=(colour, 0.6))
        ellipse.set_linewidth(0.7)
        ax.add_patch(ellipse)
    rejected, crosses = _rejected_rows(estimate), "rejected by the gate"
    for (name, located), marker in zip(located_rows(model, estimate.track).items(), cycle(".v^s"), strict=False):
        y = located.numpy()
        ax.plot(y[~rejected, 0], y[~rejected, 1], marker, ms=5, mew=0, color=INK, alpha=0.4, label=_plain(name))
        if rejected.any():
            ax.plot(y[rejected, 0], y[rejected, 1], "x", ms=5, color=RED, label=crosses)
            crosses = None
    missing, late = estimate.track.y[1:].isnan().all(-1).numpy(), _long_gaps(estimate)
    segments = np.stack([mean[:-1], mean[1:]], 1)
    for style, where in (("-", ~missing & ~late), (":", missing & ~late)):
        segment_colours = [colours[k] for k, here in zip(likeliest[1:], where, strict=True) if here]
        ax.add_collection(LineCollection(list(segments[where]), colors=segment_colours, lw=1.6, linestyles=style))
    for mode, colour in zip(model.modes, colours, strict=True):
        ax.plot([], [], color=colour, label=_plain(f"filtered, {mode.name}"))
    if estimate.smoothed is not None:
        after = position_moments(model, estimate.smoothed).mean.numpy()
        _line(ax, estimate, after[:, 0], after[:, 1], "--", "smoothed", lw=1, color=INK)
    ax.plot(*mean[0], "o", ms=6, mfc="white", color=INK, label="first row")
    ax.plot(*mean[-1], "s", ms=5, color=INK, label="last row")
    names = [f"{axis}, m" if model.columns.sensors else axis for axis in _axes_drawn(model)]
    ax.set(xlabel=_plain(names[0]), ylabel=_plain(names[1]))
    ax.set_title(_plain(f"Track {estimate.track.name}, with ellipses that hold {WITHIN:.0%}"))
    if _rejected_rows(estimate).any():
        _show_around(ax, mean)
        ax.set_aspect("equal", adjustable="box")
    else:
        ax.set_aspect("equal", adjustable="datalim")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8)


def _show_around(ax: Axes, mean: np.ndarray) -> None:
    """The track with a margin, not as far as an outlier lies."""
    low, high = mean.min(0), mean.max(0)
    margin = 0.08 * max(float((high - low).max()), 1e-9)
    ax.set_xlim(low[0] - margin, high[0] + margin)
    ax.set_ylim(low[1] - margin, high[1] + margin)


def _modes(ax: Axes, model: TrackModel, estimate: Estimate) -> None:
    """Probabilities on top of one another, from 0 to 1."""
    record = estimate.filtered.mode_probabilities
    times, names = _times(model, estimate), [_plain(mode.name) for mode in model.modes]
    if len(times) == 1:
        half = np.timedelta64(500, "ms") if model.columns.time_unit == ISO else 0.5
        times, record = np.array([times[0] - half, times[0] + half]), record.expand(2, -1)
    ax.set_xlim(times[0], times[-1])
    ax.stackplot(times, record.T.numpy(), colors=_colours(model), labels=names, alpha=0.75, lw=0)
    _shade(ax, model, estimate)
    ax.set(ylim=(0, 1), ylabel="probability")
    ax.set_title("Modes", loc="left")
    ax.legend(loc="lower right", ncols=min(3, len(names)), fontsize=8, bbox_to_anchor=(1, 1), borderaxespad=0)


def _deviations(ax: Axes, model: TrackModel, estimate: Estimate, moments: ProjectedNormal) -> None:
    deviations = moments.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    for name, series, style in zip(_axes_drawn(model), deviations.mT.numpy(), ("-", "--"), strict=True):
        _line(ax, estimate, _times(model, estimate), series, style, _plain(name), color=INK, lw=1.2)
    _shade(ax, model, estimate)
    ax.set(ylim=(0, None), ylabel="standard deviation")
    _label_times(ax, model)
    ax.set_title("Standard deviation of the position", loc="left")
    ax.legend(loc="lower right", ncols=2, fontsize=8, bbox_to_anchor=(1, 1), borderaxespad=0)


def _against_time(ax: Axes, model: TrackModel, estimate: Estimate, moments: ProjectedNormal, column: int) -> None:
    times, mean = _times(model, estimate), moments.mean[:, column].numpy()
    band = 1.96 * moments.covariance[:, column, column].clamp_min(0).sqrt().numpy()
    ax.fill_between(times, mean - band, mean + band, color=COLOURS[0], alpha=0.2, lw=0, label="95 %")
    for name, located in located_rows(model, estimate.track).items():
        ax.plot(times, located[:, column].numpy(), ".", ms=5, mew=0, color=INK, alpha=0.4, label=_plain(name))
    _line(ax, estimate, times, mean, "-", "filtered", color=COLOURS[0])
    if estimate.smoothed is not None:
        after = position_moments(model, estimate.smoothed).mean[:, column]
        _line(ax, estimate, times, after.numpy(), "--", "smoothed", lw=1, color=INK)
    _shade(ax, model, estimate)
    ax.set_ylabel(_plain(_axes_drawn(model)[column]))


def _shade(ax: Axes, model: TrackModel, estimate: Estimate) -> None:
    """Grey where nothing was measured, up to the rows on either side, and over long gaps."""
    times, empty = _times(model, estimate), estimate.track.y.isnan().all(-1).tolist()
    for k in np.flatnonzero(_long_gaps(estimate)):
        ax.axvspan(times[k], times[k + 1], color=INK, alpha=0.12, lw=0)
    first = None
    for k, missing in enumerate([*empty, False]):
        if missing and first is None:
            first = max(k - 1, 0)
        if not missing and first is not None:
            ax.axvspan(times[first], times[min(k, len(times) - 1)], color=INK, alpha=0.12, lw=0)
            first = None


def _colours(model: TrackModel) -> list[str]:
    return [COLOURS[k % len(COLOURS)] for k in range(len(model.modes))]


def _plain(text: str) -> str:
    """A name from a file as it stands, not as a formula."""
    return text.replace("$", r"\$")


def _rows_with_ellipse(rows: int) -> list[int]:
    """Rows with an ellipse, evenly spread, the last among them.

    >>> _rows_with_ellipse(3)
    [0, 1, 2]
    """
    return sorted(set(np.linspace(0, rows - 1, min(rows, ELLIPSES)).round().astype(int).tolist()))


def _axes_of(covariance: torch.Tensor) -> tuple[float, float, float]:
    """Width, height and angle in degrees of the ellipse that holds `WITHIN` of a normal distribution in the plane.

    >>> width, height, angle = _axes_of(torch.diag(torch.tensor([4.0, 1.0])))
    >>> round(width / height, 6), round(width / 2, 3)                        # twice √(−2 log 0.05)
    (2.0, 4.895)
    """
    values, vectors = torch.linalg.eigh(covariance)
    scale = 2 * sqrt(-2 * log(1 - WITHIN))
    short, long = (scale * values.clamp_min(0).sqrt()).tolist()
    return long, short, float(torch.rad2deg(torch.atan2(vectors[1, 1], vectors[0, 1])))
