"""The cache of a transformer as a measure: keys, values and masses of every head, compressed and compared."""

from cumulant.cache.entries import HeadEntries

__all__ = ["HeadEntries"]
