"""The figure of the open question: convergence of four laws, and the phase diagram in (v, s)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cumulant.dynamics import gaussian_band
from cumulant.figures import BLUE, COLOURS, FAINT, GREEN, INK, ORANGE, PALE, RED, figure
from cumulant.paper.experiments.experiment import Row
from cumulant.paper.experiments.outcomes import LAWS, OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADE = dict(zip(OUTCOMES, (GREEN, PALE, BLUE, RED, ORANGE, FAINT), strict=True))
TITLE = {"full": "full whitening", "diag": "diagonal norm", "rms": "RMSNorm", "ln": "LayerNorm"}


def draw(paths: list[Row], phase: list[Row]) -> Figure:
    """W₂ over the layers above, the phase diagram of each normaliser below."""
    from matplotlib.patches import Patch

    drawn = figure(11, 7.2)
    spec = drawn.add_gridspec(2, 6, height_ratios=[1, 1.25])
    for column, v in enumerate((-0.5, 0.5)):
        _curves(drawn.add_subplot(spec[0, 3 * column : 3 * column + 3]), paths, v)
    norms = list(dict.fromkeys((str(r["normaliser"]), int(r["d"] or 0)) for r in phase))
    for column, (norm, d) in enumerate(norms):
        ax = drawn.add_subplot(spec[1, 2 * column : 2 * column + 2])
        _phases(ax, [r for r in phase if r["normaliser"] == norm])
        ax.set_title(f"{TITLE[norm]}, d = {d}")
        ax.set_ylabel("s, logit scale" if column == 0 else "")
    patches = [Patch(color=colour, label=name) for name, colour in SHADE.items()]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    title = "Where layers of attention and normalisation end, from laws that are not discrete"
    drawn.suptitle(title, x=0.01, ha="left")
    return drawn


def _curves(ax: Axes, paths: Sequence[Mapping], v: float) -> None:
    for law, colour in zip(LAWS, COLOURS, strict=False):
        line = [(r["t"], r["w2"]) for r in paths if r["v"] == v and r["law"] == law]
        ax.plot(*zip(*line, strict=True), color=colour, label=law)
    band = gaussian_band(int(paths[0]["n"]), 1).mean
    ax.axhspan(0, 2 * band, color=FAINT, alpha=0.4, lw=0, label="as near as a Gaussian sample")
    name = "attention, ascent" if v > 0 else "the opposite, descent"
    ax.set(title=f"v = {v:+g}: {name}", xlabel="layers", ylabel="W₂ to a Gaussian", ylim=(0, 1.05))
    if v < 0:
        ax.legend(loc="upper right", ncols=2)


def _phases(ax: Axes, phase: Sequence[Mapping]) -> None:
    from matplotlib.colors import ListedColormap

    across, up = (sorted({r[k] for r in phase}) for k in ("v", "s"))
    code = {(r["v"], r["s"]): OUTCOMES.index(r["outcome"]) for r in phase}
    table = np.array([[code[v, s] for v in across] for s in up])
    colours, top = ListedColormap(list(SHADE.values())), len(OUTCOMES) - 0.5
    ax.imshow(table, cmap=colours, vmin=-0.5, vmax=top, origin="lower", aspect="auto")
    ax.set_xticks(range(len(across)), [f"{v:g}" for v in across], rotation=90)
    ax.set_yticks(range(len(up)), [f"{s:g}" for s in up])
    ax.set_xlabel("v  (descent < 0 < ascent)")
    ax.axvline(sum(v < 0 for v in across) - 0.5, color=INK, lw=1)
