"""Training with the blocks of this library, and watching attention while any model trains."""

from typing import TYPE_CHECKING, Any

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.observatory.monitor import (
    Action,
    Alarm,
    Check,
    ClipWarning,
    HeadStatistics,
    LearningRateBrake,
    Monitor,
    MonitorWarning,
    QKClip,
    Reaction,
    Stop,
    TensorBoard,
    Thresholds,
)
from cumulant.paper.trainings.checkpoints import Checkpoint, load_checkpoint

if TYPE_CHECKING:
    from cumulant.observatory.monitor import MonitorCallback

__all__ = [
    "Action",
    "Alarm",
    "Check",
    "Checkpoint",
    "ClipWarning",
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
    "load_checkpoint",
]


def __getattr__(name: str) -> Any:
    """The callback of transformers' Trainer is imported when it is first used."""
    if name != "MonitorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cumulant.observatory.monitor import MonitorCallback

    return MonitorCallback
