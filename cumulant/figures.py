"""Figures of commands: one style, saved in one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cumulant.extras import missing_package
from cumulant.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PALE, BLUE, ORANGE, GREEN, RED, VIOLET = (
    "#1d2733",
    "#b8c0ca",
    "#a9d8bd",
    "#2f6db5",
    "#e08a1e",
    "#3a9d6b",
    "#c8452f",
    "#7b5ea7",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET)


def figure(width: float = 8.0, height: float = 4.0) -> Figure:
    """An empty figure in the style of the package, outside pyplot."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_package("A figure", "matplotlib", "lab") from None
    mpl.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "font.size": 9,
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            "svg.hashsalt": "cumulant",
        }
    )
    return Figure(figsize=(width, height), layout="constrained")


def save(drawing: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with, replaced in one step."""
    with replacing(path) as temporary:
        drawing.savefig(temporary, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
