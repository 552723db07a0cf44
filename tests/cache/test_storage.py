"""Caches in files: the same numbers afterwards, and refused for another model or dtype."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="install cumulant[hf]")
from safetensors.torch import save_file

from cumulant.cache import MeasureCache
from tests.cache.models import LENGTH, batch, decoder, drawn_entries, run
from tests.observatory.tiny_models import randomise


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("state", ["exact", "compressed", "all compressed"])
def test_a_saved_cache_goes_on_where_it_was(kind, state, tmp_path):
    model, (ids, mask) = decoder(kind), batch()
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, 12)
    if state != "exact" and cache.compressible:
        i = max(cache.compressible)
        heads = [drawn_entries(2, 8, seed, torch.float32) for seed in (1, 2)]
        cache.compress({i: heads}, tokens=12 if "all" in state else 8, attention_mask=mask)
    path = cache.save(tmp_path / "new" / "cache.safetensors")
    for source in (model, model.config):
        loaded = MeasureCache.load(path, source)
        assert (loaded.get_seq_length(), loaded.bytes(), loaded.keep) == (12, cache.bytes(), cache.keep)
        theirs = run(model, copy.deepcopy(cache), ids, mask, 12, LENGTH)
        assert torch.equal(run(model, loaded, ids, mask, 12, LENGTH), theirs)
    assert path.stat().st_size < cache.bytes() + 8000
    assert [p.name for p in path.parent.iterdir()] == ["cache.safetensors"]


def test_sums_and_later_starts_are_saved(tmp_path):
    model, (ids, mask) = decoder("llama"), batch(padded=False)
    first, second = MeasureCache(model), MeasureCache(model, start=7)
    run(model, first, ids, mask, 0, 5)
    run(model, second, ids, mask, 5, 9)
    loaded = MeasureCache.load(second.save(tmp_path / "second"), model)
    assert (loaded.start, loaded.spans) == (7, ((7, 11),))
    both = MeasureCache.load(
        (first.compress(attention_mask=mask) + loaded.compress(attention_mask=mask)).save(tmp_path / "both"), model
    )
    assert both.spans == ((0, 5), (7, 11))
    assert MeasureCache.load(MeasureCache(model).save(tmp_path / "empty"), model).get_seq_length() == 0


def test_caches_of_another_model_or_dtype_are_refused(tmp_path):
    model, (ids, mask) = decoder("llama"), batch()
    cache = MeasureCache(model)
    run(model, cache, ids, mask, 0, 9)
    path = cache.save(tmp_path / "cache")
    words = r"MeasureCache\.load: expected a cache of this 'llama', got .*cache, made by another 'llama'"
    with pytest.raises(ValueError, match=words):
        MeasureCache.load(path, randomise(decoder("llama"), seed=2))  # the same configuration, other weights
    with pytest.raises(ValueError, match=words):
        MeasureCache.load(path, decoder("llama", heads=2, key_heads=2))
    with pytest.raises(ValueError, match=r"this 'qwen3', got .*, made by another 'llama'"):
        MeasureCache.load(path, decoder("qwen3").config)
    with pytest.raises(ValueError, match=r"expected a cache in torch\.bfloat16, got .* in torch\.float32"):
        MeasureCache.load(path, copy.deepcopy(model).to(torch.bfloat16))
    assert MeasureCache.load(path, model.model).get_seq_length() == 9  # the same model without its head


def test_files_of_something_else(tmp_path):
    model = decoder("llama")
    with pytest.raises(FileNotFoundError, match=r"expected a file that MeasureCache\.save wrote, got no file"):
        MeasureCache.load(tmp_path / "none", model)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="got one that cannot be read"):
        MeasureCache.load(tmp_path / "text", model)
    save_file({"a": torch.zeros(2)}, tmp_path / "tensors")
    with pytest.raises(ValueError, match="got tensors of something else"):
        MeasureCache.load(tmp_path / "tensors", model)
