"""Training with the blocks of this library, and watching attention while any model trains."""

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds
from cumulant.observatory.statistics.heads import HeadStatistics
from cumulant.paper.trainings.checkpoints import Checkpoint, load_checkpoint

__all__ = [
    "Alarm",
    "Check",
    "Checkpoint",
    "HeadStatistics",
    "LanguageConfig",
    "LanguageModel",
    "Monitor",
    "MonitorWarning",
    "Thresholds",
    "load_checkpoint",
]
