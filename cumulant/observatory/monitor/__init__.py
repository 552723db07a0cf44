"""Watching attention while a model trains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cumulant.observatory.monitor.accelerate import AccelerateWriter
from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.history import Check, CheckHistory
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.penalties import EntropyFloor, ZLoss
from cumulant.observatory.monitor.qk_clip import ClipWarning, QKClip
from cumulant.observatory.monitor.reactions import LearningRateBrake, Reaction, Stop, TrainedCall
from cumulant.observatory.monitor.tensorboard import TensorBoard
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds
from cumulant.observatory.monitor.writers import CheckWriter
from cumulant.observatory.statistics.heads import HeadStatistics

if TYPE_CHECKING:
    from cumulant.observatory.monitor.trainer import MonitorCallback

__all__ = [
    "AccelerateWriter",
    "Action",
    "Alarm",
    "Check",
    "CheckHistory",
    "CheckWriter",
    "ClipWarning",
    "EntropyFloor",
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
    "TrainedCall",
    "ZLoss",
]

CALLBACKS = {"MonitorCallback": "trainer", "MonitorLightningCallback": "lightning"}  # and the modules they are in


def __getattr__(name: str) -> Any:
    """The callbacks of other libraries are imported when they are first used: the monitor works without them."""
    if name not in CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{CALLBACKS[name]}"), name)
