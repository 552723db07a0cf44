"""The consistency of a filter as a figure: normalised innovations, NIS over rows, autocorrelation, one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import torch

from cumulant.figures import BLUE, INK, ORANGE, figure
from cumulant.filters.diagnostics.consistency import Consistency
from cumulant.filters.diagnostics.innovations import Innovations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS, WIDEST = 40, 5.0
STRETCHES = 40  # of rows, over which NIS is averaged
TRACKS_NAMED, LINES = 8, 40  # tracks that have their names, and lines between them


def draw_consistency(judged: Consistency, found: Innovations | Sequence[Innovations]) -> Figure:
    """Three panels under the verdict: normalised innovations and φ(z), NIS = mean z² along the rows, ρ_k with its band.

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian, consistency, innovations
    >>> eye, zero = torch.eye(1).double(), torch.zeros(1).double()
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=zero, initial_covariance=eye)
    >>> found = innovations(walk, walk.simulate(100, generator=torch.Generator().manual_seed(0)).observations)
    >>> len(draw_consistency(consistency(found), found).axes)
    3
    """
    records = [found] if isinstance(found, Innovations) else list(found)
    scores = torch.cat([r.scores.reshape(-1, r.scores.shape[-1]) for r in records])
    drawn = figure(11.0, 3.9)
    drawn.suptitle(fill(judged.verdict, 140), x=0.01, ha="left", fontsize=9.5, color=INK)
    left, middle, right = drawn.subplots(1, 3)
    if bool((~scores.isnan()).any()):
        _draw_scores(left, scores)
        _draw_nis(middle, [r.scores.reshape(-1, r.scores.shape[-1]) for r in records], judged)
    _draw_autocorrelation(right, judged)
    return drawn


def _draw_scores(ax: Axes, scores: torch.Tensor) -> None:
    z = scores[~scores.isnan()].numpy().clip(-WIDEST, WIDEST)
    ax.hist(z, bins=BINS, range=(-WIDEST, WIDEST), density=True, color=BLUE, alpha=0.45, label="measured")
    at = np.linspace(-WIDEST, WIDEST, 201)
    ax.plot(at, np.exp(-(at**2) / 2) / np.sqrt(2 * np.pi), color=INK, lw=1.2, label="expected")
    ax.set(xlabel="normalised innovation", ylabel="density")
    ax.set_title("Normalised innovations")
    ax.legend(fontsize=8)


def _draw_nis(ax: Axes, tracks: Sequence[torch.Tensor], judged: Consistency) -> None:
    """Means over stretches of rows that follow one another, tracks one after the other, with lines between them."""
    measured = [scores[~scores.isnan().all(-1)] for scores in tracks]
    total, first, means, names = sum(len(rows) for rows in measured), 0, [], list(judged.tracks)
    for k, rows in enumerate(measured):
        count = max(1, min(len(rows) // 5, round(STRETCHES * len(rows) / max(total, 1))))
        parts = [p for p in rows.tensor_split(count) if len(p)]
        here = [float(p[~p.isnan()].square().mean()) for p in parts]
        ends = first + np.cumsum([len(p) for p in parts])
        ax.plot(ends, here, ".-", color=BLUE, lw=1, ms=5, label="mean of a stretch" if not k else None)
        means += here
        if len(names) == len(tracks) <= TRACKS_NAMED:
            middle, text = first + len(rows) / 2, names[k].replace("$", r"\$")
            ax.text(middle, 0.01, text, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=7)
        first += len(rows)
        if k < len(measured) - 1 and len(tracks) <= LINES:
            ax.axvline(first, color=INK, lw=0.6, ls=":")
    ax.axhline(1, color=INK, lw=0.8)
    ax.axhspan(judged.nis.low, min(judged.nis.high, 1e6), color=INK, alpha=0.15, lw=0, label="95 % band of the whole")
    ax.axhline(judged.nis.value, color=ORANGE, lw=1.2, ls="--", label=f"all: {judged.nis.value:.3g}")
    if max(means, default=0) > 20:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, max(2.0, 1.35 * max(means, default=1)))
    ax.set(xlabel="rows, tracks one after the other", ylabel="NIS / dimension")
    ax.set_title("NIS divided by its dimension, 1 expected")
    ax.legend(fontsize=8, loc="upper right")


def _draw_autocorrelation(ax: Axes, judged: Consistency) -> None:
    lags = np.arange(1, len(judged.autocorrelation) + 1)
    values = [v.value for v in judged.autocorrelation]
    ax.bar(lags, values, color=BLUE, width=0.6)
    if len(lags):
        low, high = [v.low for v in judged.autocorrelation], [v.high for v in judged.autocorrelation]
        ax.fill_between(lags, low, high, color=INK, alpha=0.15, lw=0)
    ax.axhline(0, color=INK, lw=0.8)
    bound = max(0.3, *(1.2 * abs(v) for v in values)) if values else 0.3
    ax.set(xlabel="lag, in measurements", ylabel="autocorrelation", ylim=(-bound, bound))
    ax.set_title("Autocorrelation of innovations, 0 expected")
