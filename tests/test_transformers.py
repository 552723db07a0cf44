"""attn_implementation="cumulant": outputs, caches and gradients of sdpa, statistics of eager attention, observers."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

hf = pytest.importorskip("transformers", reason="install cumulant[hf]")
from transformers import masking_utils as masks  # noqa: E402

import cumulant.transformers as ours  # noqa: E402
from cumulant.extras import install  # noqa: E402
from cumulant.nn.structural_mask import StructuralMask  # noqa: E402
from cumulant.observatory import attach  # noqa: E402
from cumulant.observatory.hooks.attention import replace_attention  # noqa: E402
from cumulant.observatory.monitor import Monitor  # noqa: E402
from cumulant.transformers import AttentionMoments, mask_function, on_attention  # noqa: E402
from tests.generated.test_transformers import EXPERTS, QUANTITIES, Reading, eager_calls, same  # noqa: E402
from tests.observatory.tiny_models import (  # noqa: E402
    DECODERS,
    GROUPED_DECODERS,
    ON_THE_INTERFACE,
    TWO_SIDED,
    hooks_of,
    model_config,
    randomise,
    transformer,
)

CLOSE = 1e-5  # float32, outputs of order 1
# encoders, decoders, grouped keys, windows, sinks, caps, biases of position and of the model's own, two sides, images
KINDS = (
    *("bert", "distilbert", "albert", "modernbert", "esm", "gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen3"),
    *("gemma2", "gemma3_text", "phi3", "olmo2", "cohere2", "gpt_oss", "qwen3_moe", "doge", "t5", "umt5", "bart"),
    *("vit", "clip", "siglip", "whisper"),
)
REST = tuple(kind for kind in ON_THE_INTERFACE if kind not in KINDS)


def each(kinds, rest=()):
    return pytest.mark.parametrize("kind", [*kinds, *(pytest.param(k, marks=pytest.mark.long) for k in rest)])


def reading(kind: str, padding: str = "left", **more) -> Reading:
    return Reading(kind, heads=4, group=2, head_dim=8, length=9, padding=padding, seed=1, **more)


def on_ours(model: Any) -> Any:
    model.set_attn_implementation("cumulant")
    return model


def tokens(case: Reading, out: torch.Tensor) -> torch.Tensor:
    """(batch, q) the rows of an output that are tokens."""
    given = case.inputs()
    mask = given.get("decoder_attention_mask", given.get("attention_mask"))
    fits = mask is not None and mask.shape == out.shape[:2]
    return mask.bool() if fits else torch.ones(out.shape[:2], dtype=torch.bool)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = CLOSE) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


# ---------------------------------------------------------------------- outputs


@each(KINDS, REST)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_outputs_are_those_of_the_models_own_function(kind, padding):
    case = reading(kind, padding)
    model = case.model()
    theirs = case.run(model)
    mine = case.run(on_ours(model))
    rows = tokens(case, theirs)
    assert near(mine[rows], theirs[rows])


@pytest.mark.parametrize("kind", ["bert", "modernbert", "llama", "mistral", "gemma2", "gpt_oss", "t5"])
def test_outputs_and_gradients_where_blocks_are_needed(kind):
    """More scores than the reference takes: the kernels that real sizes have."""
    case = replace(reading(kind, "right"), batch=3, length=64)
    theirs, mine = case.model().requires_grad_(True), on_ours(case.model()).requires_grad_(True)
    outputs = []
    for model in (theirs, mine):
        out = model(**case.inputs())[0]
        outputs.append(out[tokens(case, out)])
        outputs[-1].square().mean().backward()
    assert near(outputs[1], outputs[0])
    for (name, one), two in zip(theirs.named_parameters(), mine.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or near(two.grad, one.grad, 2e-5), name


def causal_model(kind: str) -> Any:
    maker = hf.AutoModelForSeq2SeqLM if kind in TWO_SIDED else hf.AutoModelForCausalLM
    config = model_config(kind, 4, 2, 8, 2)
    if kind in TWO_SIDED:
        config.decoder_start_token_id = 1
    return randomise(maker.from_config(config).eval(), seed=1)


def continuations(model: Any, padded: bool, **more) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = mask[2, :5] = 0
    fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    fixed |= {"return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, **fixed, **more)
    return out.sequences, torch.stack(out.logits, 1)


GENERATING = ("gpt2", "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "t5", "bart")
ALSO_GENERATING = [k for k in (*DECODERS, *GROUPED_DECODERS) if k not in (*GENERATING, "eurobert")]


@each(GENERATING, ALSO_GENERATING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(kind, cache):
    model = causal_model(kind)
    for padded in (False, True):
        theirs = continuations(model, padded, cache_implementation=cache)
        before = model.config._attn_implementation
        mine = continuations(on_ours(model), padded, cache_implementation=cache)
        model.set_attn_implementation(before)
        assert torch.equal(mine[0], theirs[0])
        assert near(mine[1], theirs[1])


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
SIZES |= {"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CHUNKS = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "use_qk_norm": False}
CHUNKS |= {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"first_k_dense_replace": 2, "head_dim": 4}


@pytest.mark.parametrize(("kind", "more"), [("llama4_text", CHUNKS), ("deepseek_v3", LATENT)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunks_of_keys_and_values_of_another_width(kind, more, cache):
    model = randomise(hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **SIZES | more)).eval(), seed=1)
    theirs = continuations(model, True, cache_implementation=cache)
    mine = continuations(on_ours(model), True, cache_implementation=cache)
    assert torch.equal(mine[0], theirs[0])
    assert near(mine[1], theirs[1])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_text_in_parts_through_a_cache(kind, padded):
    """Several queries at once over cached keys: the order does not begin at the first key, windows reach across."""
    model = causal_model(kind)
    ids = torch.randint(3, 50, (2, 17), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0

    def parts() -> torch.Tensor:
        cache, out = hf.DynamicCache(config=model.config), []
        for start, stop in ((0, 5), (5, 6), (6, 13), (13, 17)):
            with torch.no_grad():
                now = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
            out.append(now.logits)
        return torch.cat(out, 1)

    theirs, rows = parts(), mask.bool()
    on_ours(model)
    mine, whole = parts(), model(ids, attention_mask=mask).logits
    assert near(mine[rows], theirs[rows])
    assert near(mine[rows], whole[rows])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(kind):
    model = reading(kind).model()
    ids = torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        theirs = model(ids, position_ids=positions, use_cache=False)[0]
        packed = on_ours(model)(ids, position_ids=positions, use_cache=False)[0]
        alone = torch.cat([model(ids[:, :4])[0], model(ids[:, 4:])[0]], 1)
    assert near(packed, theirs)
    assert near(packed, alone)


def test_a_mask_of_the_users_own():
    model = reading("llama").model()
    ids = torch.randint(3, 50, (1, 5), generator=torch.Generator().manual_seed(3))
    visible = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)).gt(0.4) | torch.eye(
        5, dtype=torch.bool
    )
    added = torch.where(visible, torch.randn(1, 1, 5, 5), torch.finfo(torch.float32).min)
    for mask in (visible, added):
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            theirs = model(ids, attention_mask=mask)[0]
            assert near(on_ours(model)(ids, attention_mask=mask)[0], theirs)


# ---------------------------------------------------------------------- gradients and precision


@each(KINDS, REST)
def test_gradients_are_those_of_the_models_own_function(kind):
    case = reading(kind, "left")

    def slopes(model: Any) -> dict[str, torch.Tensor]:
        model.requires_grad_(True)
        given = case.inputs()
        out = model(**given)
        out = out.logits_per_text if hasattr(out, "logits_per_text") else out[0]
        kept = out[tokens(case, out)] if out.ndim == 3 else out
        (kept * torch.linspace(-1, 1, kept.numel()).view(kept.shape)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    theirs, mine = slopes(case.model()), slopes(on_ours(case.model()))
    assert mine.keys() == theirs.keys()
    for name, slope in theirs.items():
        assert near(mine[name], slope, 2e-5), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same_and_calls_are_handed_on_again(reentrant):
    case = reading("mistral", "left")
    slopes, calls = {}, []
    for again in (False, True):
        model = on_ours(case.model()).requires_grad_(True).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with on_attention(model, calls.append):
            out = model(**case.inputs(), use_cache=False)[0]
            out[tokens(case, out)].square().sum().backward()
        slopes[again] = [p.grad for p in model.parameters()]
    assert len(calls) == 2 + 4
    for one, two in zip(*slopes.values(), strict=True):
        assert near(two, one, 1e-6)


@pytest.mark.parametrize("kind", ["llama", "bert", "t5", "gemma2", "gpt_oss"])
def test_bfloat16_and_autocast(kind):
    case = reading(kind, "right")
    exact = case.run(case.model())
    rows = tokens(case, exact)

    def away(model: Any) -> tuple[torch.dtype, float]:
        out = case.run(model)
        return out.dtype, float((out.float() - exact)[rows].norm() / exact[rows].norm())

    half = case.model().to(torch.bfloat16)
    dtype, theirs = away(half)
    assert away(on_ours(half))[0] == dtype == torch.bfloat16
    assert away(half)[1] < 1.5 * theirs
    mixed = case.model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = away(mixed)[1]
        assert away(on_ours(mixed))[1] < 1.5 * theirs


@pytest.mark.parametrize(
    ("kind", "padding"),
    [("bert", "right"), *(pytest.param(k, "right", marks=pytest.mark.long) for k in GENERATING if k != "gpt_oss")],
)
def test_a_compiled_model_is_one_graph(kind, padding):
    """Not gpt_oss: its experts are many graphs on any implementation."""
    torch.compiler.reset()
    case = reading(kind, padding)
    model = on_ours(case.model())
    expected = case.run(model)
    rows = tokens(case, expected)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert near(case.run(compiled)[rows], expected[rows])


@pytest.mark.long
def test_a_compiled_model_can_be_observed():
    torch.compiler.reset()
    case = reading("bert", "right")
    model = on_ours(case.model())
    compiled: Any = torch.compile(model, backend="eager")
    expected, calls = case.run(compiled), []
    with on_attention(compiled, calls.append):
        assert near(case.run(compiled), expected)
    assert [call.name for call in calls] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert near(case.run(compiled), expected)
    assert len(calls) == 2


# ---------------------------------------------------------------------- masks


def rule(causal: bool, window: int | None):
    if causal:
        return masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    if window is None:
        return masks.bidirectional_mask_function
    return masks.sliding_window_bidirectional_mask_function(window)


@given(data=st.data(), causal=st.booleans(), skip=st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rules_say_what_tables_say(data, causal, skip):
    """Any order, window, cache and padding: the mask of sdpa where nothing may be skipped."""
    queries, first, start = (data.draw(st.integers(low, 6)) for low in (1, 0, 0))
    start = min(start, first)
    keys = data.draw(st.integers(1, 12)) if not causal else first - start + queries + data.draw(st.integers(0, 4))
    window = data.draw(st.none() | st.integers(1, 9))
    length = data.draw(st.none() | st.integers(1, start + keys))
    padding = (
        None if length is None else torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    )
    padding = None if padding is None else torch.stack([padding, torch.ones(length, dtype=torch.bool)])
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first, "kv_offset": start}
    arguments = sizes | {"mask_function": rule(causal, window), "attention_mask": padding, "local_size": window}
    table = masks.sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mine = mask_function(
        **arguments, allow_is_causal_skip=skip and causal, allow_is_bidirectional_skip=skip and not causal
    )
    if mine is None:  # what layers make of it: all keys for one query, else the order from the first key on
        assert skip
        mine = torch.ones_like(table).tril() if causal and queries > 1 else torch.ones_like(table)
    assert mine.shape == table.shape
    assert torch.equal(mine & True, table)


@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma3_text", "modernbert", "bart", "gpt_oss", "t5"])
def test_no_table_of_queries_and_keys_where_a_rule_says_it(kind):
    calls: list[AttentionMoments] = []
    case = reading(kind, "left")
    model = on_ours(case.model())
    with on_attention(model, calls.append, ()):
        case.run(model)
    assert calls
    for call in calls:
        assert call.support.mask is None or call.support.mask.shape[2] == 1


def test_a_mask_that_is_composed_is_a_table():
    both = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(torch.zeros(1, 4)))
    one_sided = masks.sliding_window_overlay(2)
    for function in (both, one_sided):
        mask = mask_function(batch_size=1, q_length=4, kv_length=4, mask_function=function, allow_is_causal_skip=False)
        assert not isinstance(mask, StructuralMask)
        assert mask.shape == (1, 1, 4, 4)


def test_a_rule_is_its_table_to_everyone_else():
    mask = StructuralMask.of(torch.tensor([[False, True, True]]), batch=1, queries=2, keys=3, causal=True, offset=1)
    table = torch.tensor([[[[False, True, False], [False, True, True]]]])
    assert (mask.shape, mask.dtype, mask.device) == (table.shape, torch.bool, table.device)
    for use in (
        lambda m: m[:, :, :, :2],
        lambda m: m.to(torch.float64),
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m.expand(2, -1, -1, -1).contiguous(),
        lambda m: torch.cat([m, ~m], -1),
        lambda m: m.sum(),
    ):
        assert torch.equal(use(mask), use(table))
    assert "causal" in repr(mask)


# ---------------------------------------------------------------------- statistics


@each(KINDS, REST)
def test_statistics_are_those_of_eager_attention(kind):
    """The log-normalizer from W = e^{s − G}, entropy and effective atoms from W, in NumPy."""
    case = reading(kind, "right", dtype="float64")
    with eager_calls(case.model()) as (other, expected):
        case.run(other)
    model, calls = on_ours(case.model()), []
    with on_attention(model, calls.append, ("entropy", "effective_atoms")):
        case.run(model)
    assert [call.name for call in calls] == [call.name for call in expected]
    tolerance = 2e-4 if kind in EXPERTS else 2e-6
    for call, by_hand in zip(calls, expected, strict=True):
        rows = by_hand.tokens(case)
        known = np.ones_like(rows) if call.rows is None else call.rows.numpy()
        assert np.array_equal(known, rows)
        assert call.capped == (kind in ("gemma2", "vaultgemma"))
        for quantity in QUANTITIES:
            found = getattr(call.moments, quantity).numpy().transpose(0, 2, 1)[rows]
            wanted = by_hand.values[quantity].transpose(0, 2, 1)[rows]
            assert np.abs(found - wanted).max() <= tolerance * (1 + np.abs(wanted).max()), (call.name, quantity)


def test_the_record_has_the_output_and_what_is_needed_to_read_it():
    case = reading("llama", "right")
    model, calls, outputs = on_ours(case.model()), [], []
    layer = model.layers[1].self_attn
    hook = layer.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    with on_attention(model, calls.append):
        case.run(model)
    hook.remove()
    last = calls[-1]
    assert last.module is layer
    assert last.name == "layers.1.self_attn"
    assert torch.equal(last.moments.mean.transpose(1, 2).flatten(2), outputs[0])
    assert last.scale == pytest.approx(8**-0.5)
    assert torch.equal(last.rows, case.inputs()["attention_mask"].bool())


def test_rows_in_a_cached_step_are_those_of_the_new_tokens():
    model, calls = on_ours(causal_model("llama")), []
    with on_attention(model, calls.append):
        continuations(model, padded=True)
    assert [call.moments.entropy.shape[2] for call in calls[::2]] == [7, 1, 1, 1, 1, 1]
    assert calls[-1].rows.tolist() == [[True]] * 3
    assert calls[0].rows.sum(1).tolist() == [7, 4, 2]


def test_statistics_have_gradients():
    case = reading("bert", "none")
    model = on_ours(case.model()).requires_grad_(True)
    total: list[torch.Tensor] = []
    with on_attention(model, lambda call: total.append(call.moments.entropy.mean())):
        model(**case.inputs())
    torch.stack(total).sum().backward()
    slope = model.encoder.layer[1].attention.self.query.weight.grad
    assert slope.abs().max() > 0
    assert slope.isfinite().all()


def test_without_observers_only_the_output_is_computed(monkeypatch):
    asked, compute = [], ours.scaled_moments

    def count(x, sink, settings, backend):
        asked.append(settings.wanted)
        return compute(x, sink, settings, backend)

    monkeypatch.setattr(ours, "scaled_moments", count)
    case = reading("bert")
    model, other = on_ours(case.model()), on_ours(case.model())
    case.run(model)
    with on_attention(other, lambda call: None, ("entropy",)):
        case.run(model)
        case.run(other)
    entropy = {"mean", "mean_score", "mean_log_weight"}
    assert [set(names) for names in asked] == [{"mean"}] * 4 + [entropy] * 2


# ---------------------------------------------------------------------- observers


def test_two_models_and_nested_observers():
    case = reading("bert", "none")
    one, other = on_ours(case.model()), on_ours(case.model())
    seen: dict[str, list[AttentionMoments]] = {"outer": [], "inner": [], "other": []}
    with on_attention(one, seen["outer"].append), on_attention(other, seen["other"].append, "effective_atoms"):
        case.run(one)
        with on_attention(one, seen["inner"].append, ("max_score",)) as inner:
            case.run(one)
        inner.close()
        case.run(other)
        case.run(one)
    case.run(one)
    assert {name: len(calls) for name, calls in seen.items()} == {"outer": 6, "inner": 2, "other": 2}
    assert seen["inner"][0].moments is seen["outer"][2].moments  # of one kernel call
    assert seen["inner"][0].moments.max_score.shape == seen["outer"][0].moments.entropy.shape
    assert all(call.moments.effective_atoms.min() >= 1 for call in seen["other"])
    assert ours._observers == ()  # pyright: ignore[reportPrivateUsage]


def test_what_a_callback_raises_the_model_raises_and_all_is_restored():
    case = reading("llama", "left")
    model = on_ours(case.model())
    before, hooks = case.run(model), hooks_of(model)

    def fail(call: AttentionMoments) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), on_attention(model, fail):
        case.run(model)
    assert ours._observers == ()  # pyright: ignore[reportPrivateUsage]
    assert hooks_of(model) == hooks
    assert torch.equal(case.run(model), before)
    with pytest.raises(ValueError, match="input_ids"), on_attention(model, lambda call: None):
        model()
    assert hooks_of(model) == hooks


def test_a_handle_observes_until_it_is_closed():
    case = reading("bert", "none")
    model, calls = on_ours(case.model()), []
    handle = on_attention(model, calls.append)
    case.run(model)
    handle.close()
    handle.close()
    case.run(model)
    assert len(calls) == 2


def test_threads_have_their_own_models_and_masks():
    long, short = reading("bert", "left"), replace(reading("bert", "right"), seed=2, length=5)
    model = on_ours(long.model())
    ready, rows = threading.Barrier(2), {}

    def watch(name: str, case: Reading, call: AttentionMoments) -> None:
        if threading.current_thread().name == name:
            rows.setdefault(name, []).append(call.rows)

    def run(name: str, case: Reading) -> None:
        with on_attention(model, lambda call: watch(name, case, call)):
            ready.wait()
            for _ in range(10):
                case.run(model)
            ready.wait()

    threads = [threading.Thread(target=run, args=c, name=c[0]) for c in (("long", long), ("short", short))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, case in (("long", long), ("short", short)):
        assert len(rows[name]) == 20
        assert all(torch.equal(r, case.inputs()["attention_mask"].bool()) for r in rows[name])


def test_a_model_inside_a_module_is_observed_by_its_path():
    case = reading("bert", "none")
    whole, calls = torch.nn.ModuleDict({"text": on_ours(case.model())}), []
    with on_attention(whole, calls.append):
        case.run(whole["text"])
    assert [call.name for call in calls] == [f"text.encoder.layer.{k}.attention.self" for k in (0, 1)]


# ---------------------------------------------------------------------- the observatory


@pytest.mark.parametrize("kind", ["bert", "mistral", "gemma2", "gpt_oss", "t5"])
def test_attach_keeps_the_function_and_records_the_same(kind):
    case = reading(kind, "right")
    model, calls = on_ours(case.model()), []
    expected, hooks = case.run(model), hooks_of(model)
    with attach(model, QUANTITIES) as recorder:
        assert same(case.run(model), expected)
        with on_attention(model, calls.append):
            assert same(case.run(model), expected)
    assert (model.config._attn_implementation, hooks_of(model)) == ("cumulant", hooks)
    assert len(calls) == len({call.name for call in calls}) > 0
    record = recorder.record()
    for call in calls:
        entropy = call.moments.entropy.transpose(1, 2)  # (batch, q, heads)
        entropy = entropy.flatten(0, 1) if call.rows is None else entropy[call.rows]
        assert near(record.tallies[f"{call.name}/entropy"].mean.float(), entropy.mean(0), 1e-4)


def test_ablation_replaces_outputs_of_this_function():
    case = reading("llama", "right")
    model = on_ours(case.model())
    before = case.run(model)
    with replace_attention(model, lambda call: None):
        assert same(case.run(model), before)
    with replace_attention(model, lambda call: torch.zeros_like(call.output)):
        ablated = case.run(model)
    plain = case.model()
    with replace_attention(plain, lambda call: torch.zeros_like(call.output)):
        assert same(case.run(plain), ablated)
    assert not near(ablated, before)
    assert model.config._attn_implementation == "cumulant"


def test_the_monitor_watches_this_function():
    case = reading("bert", "right")
    found = {}
    for name in ("sdpa", "cumulant"):
        model = case.model().requires_grad_(True)
        model.set_attn_implementation(name)
        monitor = Monitor(model, every=1)
        model(**case.inputs())
        monitor.step()
        assert model.config._attn_implementation == name
        found[name] = [row["entropy"] for row in monitor.rows()]
    assert len(found["cumulant"]) == 8
    assert found["cumulant"] == pytest.approx(found["sdpa"], rel=1e-4)


# ---------------------------------------------------------------------- refusals


def test_dropout_in_training_is_refused_and_ignored_in_evaluation():
    case = reading("bert", "none")
    model = on_ours(case.model())
    case.run(model)
    model.train()
    with pytest.raises(ValueError, match=r"dropout: expected 0 in training, got 0\.1\. .*model\.eval\(\)"):
        case.run(model)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"tree_mask": 1, "head_mask": None}, r"arguments that are known, got tree_mask\. They might change"),
        ({"output_attentions": True}, r"output_attentions: expected False, got True.*eager"),
        ({"cache": object()}, r"got cache\."),
    ],
)
def test_arguments_that_might_change_the_result_are_refused(argument, words):
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=words):
        ours.attention_function(torch.nn.Identity(), q, q, q, None, **argument)
    out, weights = ours.attention_function(torch.nn.Identity(), q, q, q, None, use_cache=True, output_attentions=False)
    assert out.shape == (1, 2, 1, 4)
    assert weights is None


def test_models_on_another_function_are_refused_with_what_to_call():
    words = r'^on_attention\.model: .* got BertModel on .sdpa.\. .*set_attn_implementation\("cumulant"\)'
    with pytest.raises(ValueError, match=words) as no:
        on_attention(reading("bert").model(), print)
    assert "\n" not in str(no.value)
    with pytest.raises(ValueError, match=r"Linear, no model of transformers\. Load one"):
        on_attention(torch.nn.Linear(2, 2), print)
    with pytest.raises(TypeError, match="got a function"):
        on_attention(lambda ids: ids, print)
    other = transformer("bloom", heads=2, key_heads=2, head_dim=4, layers=1, seed=0)
    with pytest.raises(ValueError, match="BloomModel, whose attention is written out in its own code"):
        on_attention(other, print)


def test_statistics_and_callbacks_are_checked_at_once():
    model = on_ours(reading("bert").model())
    with pytest.raises(ValueError, match=r"on_attention\.statistics: expected names among mean, .* got 'entropie'"):
        on_attention(model, print, ("entropie",))
    with pytest.raises(TypeError, match=r"on_attention\.callback: expected a function, got dict"):
        on_attention(model, {})
    assert ours._observers == ()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.long
def test_the_library_does_not_import_transformers_and_names_the_extra():
    code = """
import sys, cumulant, cumulant.nn.attention_interface
print("transformers" in sys.modules)
sys.modules["transformers"] = None
try:
    import cumulant.transformers
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["False", f"cumulant.transformers needs transformers: run {install('hf')}."]
