"""The cache of a transformer as a measure: keys, values and masses of every head, compressed and compared.

entries.py         `HeadEntries`, what one head of one sequence holds
entry_store.py     the entries of a layer in one storage without padding
layer.py           one layer: entries, then the tokens since, as transformers' DynamicLayer
measure_cache.py   `MeasureCache`, the cache that a model takes as ``past_key_values``
models.py          which models have one, by what a saved cache recognises its model
adding.py          positions that a cache stands for, and when two can be added
storage.py         files

prefix.py          what the heads of a model hold of a prefix, and the queries that read it
rotation.py        how queries and keys turn with their positions
budget.py          bytes and entries
compressor.py      the contract of a compressor, and `compress_prefix`
one_call.py        `compress`, from a model and tokens to a compressed cache
of_cache.py        the same from a cache that is there already, and its queries
growing.py         a cache that compresses while its text grows: when, from what, within which budget
query_sample.py    the queries that it keeps of a layer
press.py           presses of other libraries as compressors
repetition.py      a model that repeats a prefix, for methods that learn from it
baselines/         published methods, each one file
fitted/            `Backtest`: entries fitted to a law of queries, budgets by evidence
audit/             how wrong a compressed cache is, and where
"""

from cumulant.cache.entries import HeadEntries
from cumulant.extras import missing_package

try:
    from cumulant.cache.budget import Budget
    from cumulant.cache.compressor import Compressed, Compressor, ScoreCompressor, as_compressor, compress_prefix
    from cumulant.cache.fitted import Backtest
    from cumulant.cache.measure_cache import MeasureCache
    from cumulant.cache.one_call import compress
    from cumulant.cache.prefix import LayerPrefix, Prefix, on_cumulant, prefill
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("cumulant"):
        raise
    raise missing_package("cumulant.cache", missing.name or "transformers", "hf") from None

__all__ = [
    "Backtest",
    "Budget",
    "Compressed",
    "Compressor",
    "HeadEntries",
    "LayerPrefix",
    "MeasureCache",
    "Prefix",
    "ScoreCompressor",
    "as_compressor",
    "compress",
    "compress_prefix",
    "on_cumulant",
    "prefill",
]
