"""The record of an observation: mergeable data, the files that hold it, and the recorder that fills it."""

from cumulant.observatory.record.record import Record

__all__ = ["Record"]
