"""Training with the blocks of this library, and watching attention while any model trains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.observatory.monitor import (
    CALLBACKS,
    AccelerateWriter,
    Action,
    Alarm,
    Check,
    CheckHistory,
    CheckWriter,
    ClipWarning,
    EntropyFloor,
    HeadStatistics,
    LearningRateBrake,
    Monitor,
    MonitorWarning,
    QKClip,
    Reaction,
    Stop,
    TensorBoard,
    Thresholds,
    TrainedCall,
    ZLoss,
)
from cumulant.paper.trainings.checkpoints import Checkpoint, load_checkpoint

if TYPE_CHECKING:
    from cumulant.observatory.monitor import MonitorCallback

__all__ = [
    "AccelerateWriter",
    "Action",
    "Alarm",
    "Check",
    "CheckHistory",
    "CheckWriter",
    "Checkpoint",
    "ClipWarning",
    "EntropyFloor",
    "HeadStatistics",
    "LanguageConfig",
    "LanguageModel",
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
    "load_checkpoint",
]


def __getattr__(name: str) -> Any:
    """The callbacks of other libraries are imported when they are first used."""
    if name not in CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("cumulant.observatory.monitor"), name)
