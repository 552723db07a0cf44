"""Baselines by name."""

from __future__ import annotations

from collections.abc import Callable

from cumulant.cache.baselines.adakv import AdaKV
from cumulant.cache.baselines.d2o_like import D2OLike
from cumulant.cache.baselines.expected_attention import ExpectedAttention
from cumulant.cache.baselines.h2o import H2O
from cumulant.cache.baselines.keydiff import KeyDiff
from cumulant.cache.baselines.knorm import Knorm
from cumulant.cache.baselines.kvzip import KVzip
from cumulant.cache.baselines.matching import Matching
from cumulant.cache.baselines.snapkv import SnapKV
from cumulant.cache.baselines.streaming_llm import StreamingLLM
from cumulant.cache.baselines.tova import TOVA
from cumulant.cache.compressor import Compressor, ScoreCompressor
from cumulant.checks import sentence

BASELINES: dict[str, Callable[[], Compressor]] = {
    "stream": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "tova": TOVA,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "expected": ExpectedAttention,
    "adakv": AdaKV,
    "kvzip": KVzip,
    "d2o-like": D2OLike,
    "matching": Matching,
}


def baseline(name: str) -> Compressor:
    """The baseline of this name; ``adakv:SCORER`` allocates entries by the scores of another.

    >>> baseline("adakv:h2o").name
    'adakv:h2o'
    """
    first, colon, scorer = name.strip().lower().partition(":")
    if first in BASELINES and not colon:
        return BASELINES[first]()
    inner = BASELINES.get(scorer)
    if first == "adakv" and inner is not None and isinstance(found := inner(), ScoreCompressor):
        return AdaKV(found)
    advice = "An allocation over heads takes a scorer: adakv:h2o."
    raise ValueError(sentence("compressor", f"one of {', '.join(sorted(BASELINES))}", repr(name), advice))
