"""Published methods to compress a cache, each one short file, with its source and its settings.

They are written from their papers to be measured beside each other, applied once to a prefix that has been read. What
a paper does at every step of a generation (H2O, TOVA), or while the prefix is read in blocks (KeyDiff), is done here
once, at its end.
"""

from cumulant.cache.baselines.adakv import AdaKV
from cumulant.cache.baselines.d2o_like import D2OLike
from cumulant.cache.baselines.expected_attention import ExpectedAttention
from cumulant.cache.baselines.h2o import H2O
from cumulant.cache.baselines.keydiff import KeyDiff
from cumulant.cache.baselines.knorm import Knorm
from cumulant.cache.baselines.kvzip import KVzip
from cumulant.cache.baselines.matching import Matching
from cumulant.cache.baselines.registry import BASELINES, baseline
from cumulant.cache.baselines.snapkv import SnapKV
from cumulant.cache.baselines.streaming_llm import StreamingLLM
from cumulant.cache.baselines.tova import TOVA

__all__ = [
    "BASELINES",
    "H2O",
    "TOVA",
    "AdaKV",
    "D2OLike",
    "ExpectedAttention",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "Matching",
    "SnapKV",
    "StreamingLLM",
    "baseline",
]
