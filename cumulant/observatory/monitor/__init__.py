"""Watching attention while a model trains."""

from typing import TYPE_CHECKING, Any

from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.qk_clip import ClipWarning, QKClip
from cumulant.observatory.monitor.reactions import LearningRateBrake, Reaction, Stop
from cumulant.observatory.monitor.tensorboard import TensorBoard
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds
from cumulant.observatory.statistics.heads import HeadStatistics

if TYPE_CHECKING:
    from cumulant.observatory.monitor.trainer import MonitorCallback

__all__ = [
    "Action",
    "Alarm",
    "Check",
    "ClipWarning",
    "HeadStatistics",
    "LearningRateBrake",
    "Monitor",
    "MonitorCallback",
    "MonitorWarning",
    "QKClip",
    "Reaction",
    "Stop",
    "TensorBoard",
    "Thresholds",
]


def __getattr__(name: str) -> Any:
    """The callback of transformers' Trainer is imported when it is first used: the monitor works without it."""
    if name != "MonitorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cumulant.observatory.monitor.trainer import MonitorCallback

    return MonitorCallback
