"""The figure of a set of trainings: metrics against steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cumulant.figures import COLOURS, figure
from cumulant.nn.block_types import BLOCK_TYPES
from cumulant.paper.trainings.tables import mean_std
from cumulant.paper.trainings.task import Task
from cumulant.paper.trainings.train import TrainingRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(task: Task, runs: Sequence[TrainingRun]) -> Figure:
    """One panel a metric; a line is the mean over seeds, the band around it one standard deviation either way."""
    drawn = figure(4.2 * len(task.metrics), 3.4)
    panels = drawn.subplots(1, len(task.metrics), squeeze=False)[0]
    colours = dict(zip(BLOCK_TYPES, COLOURS, strict=False))
    for panel, metric in zip(panels, task.metrics, strict=True):
        for block in dict.fromkeys(run.block for run in runs):
            rows = [row for run in runs if run.block == block for row in run.curve]
            steps = sorted({row["step"] for row in rows})
            points = [mean_std(row[metric.key] for row in rows if row["step"] == step) for step in steps]
            means = [s.mean for s in points if s is not None]
            widths = [s.deviation or 0.0 for s in points if s is not None]
            panel.plot(steps, means, "o-", markersize=3, color=colours[block], label=block)
            low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
            panel.fill_between(steps, low, high, color=colours[block], alpha=0.2, linewidth=0)
        panel.set_xscale("symlog", linthresh=1)
        panel.set(xlabel="step", title=f"{metric.heading}, test part")
    panels[0].legend()
    return drawn
