"""The cache of a transformer as a measure: keys, values and masses of every head, compressed and compared.

entries.py         `HeadEntries`, what one head of one sequence holds
entry_store.py     the entries of a layer in one storage without padding
layer.py           one layer: entries, then the tokens since, as transformers' DynamicLayer
measure_cache.py   `MeasureCache`, the cache that a model takes as ``past_key_values``
models.py          which models have one, by what a saved cache recognises its model
adding.py          positions that a cache stands for, and when two can be added
storage.py         files
"""

from cumulant.cache.entries import HeadEntries
from cumulant.extras import missing_package

try:
    from cumulant.cache.measure_cache import MeasureCache
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("cumulant"):
        raise
    raise missing_package("cumulant.cache", missing.name or "transformers", "hf") from None

__all__ = ["HeadEntries", "MeasureCache"]
