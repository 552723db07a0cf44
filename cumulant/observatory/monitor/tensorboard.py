"""The statistics of a monitor as curves in TensorBoard."""

from __future__ import annotations

from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING

from torch import Tensor

from cumulant.extras import missing_package
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.thresholds import LayerCheck
from cumulant.observatory.monitor.writers import CheckWriter
from cumulant.observatory.statistics.heads import MEANS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(CheckWriter):
    """A writer for `Monitor`: curves per layer, or per head.

    directory  where TensorBoard looks for runs
    heads      also one curve for every head and quantity

    Per layer: the mean over heads of each quantity, the least entropy and the largest score of its heads, how many are
    dead and collapsed, and the expansion of its block. Alarms are written as text.

        monitor = Monitor(model, every=50, writer=TensorBoard("runs/first"))
    """

    def __init__(self, directory: str | PathLike, *, heads: bool = False):
        self.heads = heads
        self.events: SummaryWriter = _writer(str(directory))

    def __call__(self, check: Check) -> None:
        for number, layer in enumerate(check.layers):
            for name, value in _of_layer(layer).items():
                self._scalar(f"{name}/layer {number:02}", value, check.step)
            if self.heads:
                self._per_head(number, layer, check.step)
        for alarm in check.alarms:
            self.events.add_text("alarms", alarm.words, check.step)
        self.events.flush()

    def _per_head(self, number: int, layer: LayerCheck, step: int) -> None:
        for name in MEANS:
            for head, value in enumerate(getattr(layer.heads, name).tolist()):
                self._scalar(f"{name} per head/layer {number:02} head {head:02}", value, step)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if isfinite(value):
            self.events.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.events.close()


def _of_layer(layer: LayerCheck) -> dict[str, float]:
    heads = layer.heads
    means = {name: _mean(getattr(heads, name)) for name in MEANS}
    return means | {
        "least entropy": float(heads.entropy.min()),
        "max_score": float(heads.max_score.max()),
        "expansion": layer.expansion,
        "dead heads": float(layer.dead.sum()),
        "collapsed heads": float(layer.collapsed.sum()),
    }


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _writer(directory: str) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise missing_package("TensorBoard", "tensorboard", "monitor") from None
    return SummaryWriter(directory)
