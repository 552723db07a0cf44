"""Training with the blocks of this library, and watching attention while any model trains."""

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.observatory.monitor.head_statistics import Sight
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds
from cumulant.paper.trainings.checkpoints import Checkpoint, load_checkpoint

__all__ = [
    "Alarm",
    "Check",
    "Checkpoint",
    "LanguageConfig",
    "LanguageModel",
    "Monitor",
    "MonitorWarning",
    "Sight",
    "Thresholds",
    "load_checkpoint",
]
