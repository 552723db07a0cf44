"""Watching attention while a model trains."""

from cumulant.observatory.monitor.head_statistics import Sight
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds

__all__ = ["Alarm", "Check", "Monitor", "MonitorWarning", "Sight", "Thresholds"]
