"""Training with the blocks of this library, and watching attention while any model trains."""

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.training.checkpoints import Checkpoint, load_checkpoint
from cumulant.training.history import Check
from cumulant.training.monitor import Monitor, MonitorWarning
from cumulant.training.sights import Sight
from cumulant.training.thresholds import Alarm, Thresholds

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
