"""Tracks in a table of measurements, filtered by a switching model in a TOML file: `cumulant track`."""

from cumulant.filters.tracking.consistency_figure import draw_consistency
from cumulant.filters.tracking.filter import Estimate, filter_tracks, measured_moments
from cumulant.filters.tracking.first_model import FirstModel, first_model
from cumulant.filters.tracking.model import Mode, TrackModel
from cumulant.filters.tracking.model_file import read_model
from cumulant.filters.tracking.table import TableColumns, Track, read_tracks

__all__ = [
    "Estimate",
    "FirstModel",
    "Mode",
    "TableColumns",
    "Track",
    "TrackModel",
    "draw_consistency",
    "filter_tracks",
    "first_model",
    "measured_moments",
    "read_model",
    "read_tracks",
]
