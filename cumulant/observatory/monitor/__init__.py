"""Watching attention while a model trains."""

from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.monitor import Monitor, MonitorWarning
from cumulant.observatory.monitor.thresholds import Alarm, Thresholds
from cumulant.observatory.statistics.heads import HeadStatistics

__all__ = ["Alarm", "Check", "HeadStatistics", "Monitor", "MonitorWarning", "Thresholds"]
