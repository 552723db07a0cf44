"""Presses of kvpress itself, beside the baselines of the same name: which tokens stay."""

from typing import Any

import pytest
import torch

from tests.cache.prefixes import decoder, ids

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache import compress_prefix, on_cumulant, prefill

kvpress = pytest.importorskip(
    "kvpress",
    reason="it asks for an older transformers: pip install --no-deps kvpress cachetools fire termcolor datasets peft "
    "dill multiprocess xxhash pyarrow pandas",
)

PRESSES = {
    "knorm": lambda: kvpress.KnormPress(0.5),
    "stream": lambda: kvpress.StreamingLLMPress(0.5, n_sink=4),
    "tova": lambda: kvpress.TOVAPress(0.5),
    "keydiff": lambda: kvpress.KeyDiffPress(0.5),
    "snapkv": lambda: kvpress.SnapKVPress(0.5),
    "expected": lambda: kvpress.ExpectedAttentionPress(0.5),
    "adakv:snapkv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.5)),
}


@pytest.fixture(scope="module")
def prefix() -> Any:
    with on_cumulant(model := decoder()):
        yield prefill(model, ids(256))


@pytest.mark.parametrize("name", PRESSES)
def test_a_press_of_the_package_keeps_the_tokens_that_our_baseline_keeps(prefix: Any, name: str):
    theirs, ours = compress_prefix(prefix, PRESSES[name](), 0.5), compress_prefix(prefix, name, 0.5)
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        for their_head, our_head in zip(a, b, strict=True):
            order = [head.keys[:, 0].argsort() for head in (their_head, our_head)]
            torch.testing.assert_close(their_head.keys[order[0]], our_head.keys[order[1]], atol=0, rtol=0)
