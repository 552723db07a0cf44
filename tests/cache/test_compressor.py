"""The contract of a compressor: budgets in bytes, what comes back is checked, presses and functions are welcome."""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.cache.prefixes import decoder, hf, ids, made_prefix

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache.budget import budget, bytes_held
from cumulant.cache.compressor import Compressor, as_compressor, compress_prefix
from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import on_cumulant, prefill


@pytest.fixture(scope="module")
def prefix() -> Any:
    with on_cumulant(model := decoder()):
        found = prefill(model, ids(64))
        yield found


# ---------------------------------------------------------------------- budgets


def test_the_budget_counts_masses():
    prefix = made_prefix(torch.randn(2, 96, 4))
    assert budget(prefix, 0.25).per_head == 24
    assert budget(prefix, 0.25, with_mass=True).per_head == 21  # 24 · 32 / 36 bytes
    assert budget(prefix, 0.25).full == 2 * 96 * 32


@pytest.mark.parametrize("keep", [0, -0.5, 1.01, True, "half", float("nan")])
def test_a_share_is_above_zero_and_at_most_one(keep: Any):
    with pytest.raises(ValueError, match=r"budget\.keep: expected a share above 0 and at most 1, got"):
        compress_prefix(made_prefix(torch.randn(1, 8, 4)), "knorm", keep)


def test_a_share_below_one_entry_is_refused():
    with pytest.raises(ValueError, match=r"expected at least 0\.125, an entry for each head, got 0\.1"):
        compress_prefix(made_prefix(torch.randn(1, 8, 4)), "knorm", 0.1)


def test_layers_with_a_window_are_not_compressed_and_count_on_both_sides():
    layers = ["sliding_attention", "full_attention"]
    model = decoder("Gemma3", sliding_window=16, layer_types=layers)
    with on_cumulant(model):
        prefix = prefill(model, ids(64))
        small = compress_prefix(prefix, "knorm", 0.5)
    assert [layer.index for layer in prefix.layers] == [1]
    whole, window = 64 * 2 * 2 * 8 * 4, 15 * 2 * 2 * 8 * 4
    assert small.full == whole + window
    assert small.held == bytes_held(small.layers) + window
    assert small.keep <= 0.5


class Returns(Compressor):
    """What it is given, whatever the budget."""

    name = "mine"

    def __init__(self, made: Any):
        self.made = made

    def compress(self, prefix, budget, evidence):
        return self.made(prefix)


def heads(prefix, entries: int, **changes: Any) -> list[list[HeadEntries]]:
    return [
        [HeadEntries(k[:entries], v[:entries], None)._replace(**changes) for k, v in zip(x.keys, x.values, strict=True)]
        for x in prefix.layers
    ]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda p: heads(p, 40), r"compress\(mine\): expected at most 0\.5 of the bytes, got 0\.625"),
        (lambda p: heads(p, 8)[:1], r"expected 2 layers, got 1"),
        (lambda p: [h[:1] for h in heads(p, 8)], r"expected 2 key heads in layer 0, got 1"),
        (lambda p: heads(p, 8, values=torch.zeros(7, 8)), r"expected keys \(m, 8\) and values \(m, 8\), m ≥ 1, got"),
        (lambda p: heads(p, 8, log_mass=torch.zeros(7)), r"log_mass: expected shape \(8\), got \(7\)"),
        (lambda p: heads(p, 8, positions=torch.zeros(7)), r"positions: expected shape \(8\), got \(7\)"),
        (lambda p: heads(p, 8, keys=torch.full((8, 8), torch.nan)), "expected finite keys, values and log-masses"),
        (lambda p: heads(p, 8, keys=torch.zeros(8, 8).double()), r"expected the dtype of the cache, torch\.float32"),
        (lambda p: heads(p, 0), "m ≥ 1"),
    ],
)
def test_what_comes_back_is_checked(prefix: Any, made: Any, sentence: str):
    with pytest.raises((ValueError, TypeError), match=sentence):
        compress_prefix(prefix, Returns(made), 0.5)


def test_evidence_is_asked_for_once(prefix: Any):
    asked = []

    class Asks(Returns):
        def evidence(self, prefix):
            asked.append(len(prefix))

    chosen = Asks(lambda p: heads(p, 4))
    assert [compress_prefix(prefix, chosen, keep).keep for keep in (0.5, 0.25)] == [0.0625, 0.0625]
    assert asked == [64]


# ---------------------------------------------------------------------- functions


def test_a_function_of_one_layer_is_a_compressor(prefix: Any):
    def first_and_the_rest(keys, values, queries, positions, entries):
        assert queries.shape == (4, 64, 8)
        assert positions.tolist() == list(range(64))
        middle = keys[:, entries - 1 :].mean(1, keepdim=True), values[:, entries - 1 :].mean(1, keepdim=True)
        mass = torch.zeros(2, entries)
        mass[:, -1] = torch.tensor(float(64 - entries + 1)).log()
        both = [torch.cat([x[:, : entries - 1], y], 1) for x, y in zip((keys, values), middle, strict=True)]
        return *both, mass

    small = compress_prefix(prefix, first_and_the_rest, 0.5)
    head = small.layers[1][0]
    assert head.keys.shape == (30, 8)  # 64 · 0.5 · 64 / 68
    assert head.log_mass.exp().sum() == pytest.approx(64)
    assert small.keep == pytest.approx(30 * 68 / (64 * 64))


def test_a_function_that_returns_something_else_is_refused(prefix: Any):
    with pytest.raises(ValueError, match="expected three results, got 2 results"):
        compress_prefix(prefix, lambda k, v, q, p, n: (k, v), 0.5)
    with pytest.raises(TypeError, match="expected a Compressor, the name of a baseline, a press or a function"):
        as_compressor(7)


# ---------------------------------------------------------------------- presses


@dataclass
class HookedPress:
    """As kvpress documents it: hooks on the attention modules compress a layer's cache when it has been read."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs) -> torch.Tensor:
        return -keys.norm(dim=-1)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        count = int(keys.shape[2] * (1 - self.compression_ratio))
        index = self.score(module, hidden_states, keys, values, attentions, kwargs).topk(count, dim=-1).indices
        index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, index), values.gather(2, index)

    def hook(self, module, args, kwargs, output):
        assert kwargs["hidden_states"].shape[1] == len(kwargs["cache_position"])
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        layer.keys, layer.values = self.compress(
            module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
        )
        return output

    @contextmanager
    def __call__(self, model):
        handles = [x.self_attn.register_forward_hook(self.hook, with_kwargs=True) for x in model.model.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class CompressingPress:
    """Without a context manager."""

    compression_ratio: float = 0.0
    compress = HookedPress.compress
    score = HookedPress.score


@dataclass
class ScoringPress:
    """Scores alone."""

    compression_ratio: float = 0.0
    score = HookedPress.score


@pytest.mark.parametrize("press", [HookedPress(), CompressingPress(), ScoringPress()])
@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_a_press_holds_what_the_same_method_written_here_holds(prefix: Any, press: Any, keep: float):
    small, own = compress_prefix(prefix, press, keep), compress_prefix(prefix, "knorm", keep)
    assert small.keep == pytest.approx(own.keep, abs=1 / 64 + 1e-9)  # their ratio rounds down
    for ours, theirs in zip(own.layers, small.layers, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert {*other.positions.tolist()} <= {*mine.positions.tolist()}
            assert len(other.positions) >= len(mine.positions) - 1
    assert press.compression_ratio == 0
    assert not any(m._forward_hooks for m in prefix.model.modules())


@dataclass
class MaskingPress(CompressingPress):
    """Heads of different lengths, as kvpress has them: keys that are hidden from a head later on."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        _, heads, length = keys.shape[:3]
        count = int(self.compression_ratio * heads * length)
        where = torch.arange(count)  # all from the first head
        module.masked_key_indices = torch.zeros_like(where), where // length, where % length
        return keys, values


def test_keys_that_a_press_hides_are_left_out(prefix: Any):
    small = compress_prefix(prefix, MaskingPress(), 0.75)
    assert [[len(h.keys) for h in layer] for layer in small.layers] == [[32, 64]] * 2
    assert small.layers[0][0].positions.tolist() == list(range(32, 64))
    assert not any(hasattr(module, "masked_key_indices") for module in prefix.model.modules())


@dataclass
class WrongPress(CompressingPress):
    made: Any = None

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.made(keys, values)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda k, v: (k[:, :, :8], v[:, :, :9]), "press WrongPress, layer 0: expected keys (1, 2, m, 8) and values"),
        (lambda k, v: (k[:, :1, :8], v[:, :1, :8]), "expected keys (1, 2, m, 8)"),
        (lambda k, v: (k[..., :8, :4], v[..., :8, :4]), "expected keys (1, 2, m, 8)"),
        (lambda k, v: (k[0], v[0]), "got something else"),
        (lambda k, v: k, "press WrongPress.compress: expected keys and values, got Tensor"),
        (lambda k, v: (k, v), "expected at most 0.5 of the bytes, got 1"),
    ],
)
def test_a_press_that_returns_other_shapes_is_refused(prefix: Any, made: Any, sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        compress_prefix(prefix, WrongPress(made=made), 0.5)


def test_a_press_without_methods_is_refused(prefix: Any):
    class Empty:
        compression_ratio = 0.0

    with pytest.raises(TypeError, match="press Empty: expected compress, score or a context manager, got none"):
        compress_prefix(prefix, Empty(), 0.5)


# ---------------------------------------------------------------------- models


def test_encoder_decoders_and_encoders_are_refused():
    t5 = hf.T5Config(vocab_size=50, d_model=24, d_kv=6, num_layers=1, num_heads=4, d_ff=40)
    with pytest.raises(
        ValueError, match="expected a decoder, got T5ForConditionalGeneration, an encoder and a decoder"
    ):
        prefill(hf.T5ForConditionalGeneration(t5), ids(8))
    bert = hf.BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=3)
    with pytest.raises(ValueError, match="expected a decoder with a language-model head, got BertModel"):
        prefill(hf.BertModel(bert), ids(8))


def test_capped_scores_are_refused():
    model = decoder("Gemma2", attn_logit_softcapping=5.0, sliding_window=512)
    sentence = "expected scores that are inner products, got scores that are capped"
    with on_cumulant(model), pytest.raises(ValueError, match=sentence):
        prefill(model, ids(8))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Cohere", "Glm", "GPTNeoX", "Phi3", "Olmo2"])
def test_rotations_of_architectures_are_read(kind: str):
    """Turned back to position 0, the queries of equal tokens in the first layer are equal."""
    model = decoder(kind)
    with on_cumulant(model):
        prefix = prefill(model, torch.full((20,), 7))
    layer = prefix.layers[0]
    assert layer.rotation is not None
    back = layer.rotation.turn(layer.queries, -torch.arange(20))
    torch.testing.assert_close(back, back[:, :1].expand_as(back), atol=1e-4, rtol=1e-3)
    assert (layer.queries - back).abs().amax() > 0.1


def test_the_model_is_on_what_it_was_before():
    model = decoder(attn_implementation="eager")
    with on_cumulant(model):
        assert model.config._attn_implementation == "cumulant"
    assert model.config._attn_implementation == "eager"
