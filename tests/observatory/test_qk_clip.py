"""Clipping of attention logits: exact maxima, one head changes and no other, on every kind of projection."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from cumulant.nn import MultiheadAttention
from cumulant.nn.largest_logit import ATTRIBUTE
from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.structure import NotFound, attention_modules
from cumulant.observatory.monitor.actions import Action, log_actions
from cumulant.observatory.monitor.projections import head_rows
from cumulant.training import (
    ClipWarning,
    LanguageConfig,
    LanguageModel,
    LearningRateBrake,
    Monitor,
    QKClip,
    Stop,
)
from tests.observatory import clip_checks, tiny_models
from tests.observatory.tiny_models import hf

pytestmark = pytest.mark.filterwarnings("ignore::cumulant.training.MonitorWarning")  # heads that collapse are meant

ONE_HEAD_AT_A_TIME = [
    "bert", "gpt2", "llama", "t5", "gemma2", "gemma2_capped", "olmo2", "gptoss", "vit",
    "whisper", "opt", "bart", "neox", "phi3", "modernbert", "deepseek", "phi",
]  # fmt: skip
SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "pad_token_id": 0}
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MORE = {
    "phi3": lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)),
    "phi": lambda: hf.PhiModel(hf.PhiConfig(**SIZES, num_attention_heads=3)),
    "modernbert": lambda: hf.ModernBertModel(hf.ModernBertConfig(**SIZES, num_attention_heads=3)),
    "deepseek": lambda: hf.DeepseekV3Model(
        hf.DeepseekV3Config(**SIZES, num_attention_heads=4, num_key_value_heads=4, **LATENT, first_k_dense_replace=2)
    ),
}
DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def make(kind: str):
    if kind in MORE:
        torch.manual_seed(0)
        model = MORE[kind]()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter.data, std=0.3)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.data.abs_().add_(0.5)
    else:
        model = tiny_models.make(kind)
    for config in [model.config, *(getattr(m, "config", None) for m in model.modules())]:
        for name in DROPOUT:
            if getattr(config, name, 0):
                setattr(config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.requires_grad_(True)


def inputs(kind: str):
    return tiny_models.inputs("llama" if kind in MORE else kind)


def logits(model, batch) -> dict[str, torch.Tensor]:
    """The largest logit of every head by brute force from the queries and keys of eager attention: name → (heads,)."""
    found: dict[str, torch.Tensor] = {}

    def observe(call):
        key = call.key.repeat_interleave(call.eta.shape[1] // call.key.shape[1], 1)
        score = (call.eta @ key.mT).double()
        visible = call.support.weigh(torch.zeros_like(score)) > -torch.inf if not call.support.unrestricted else None
        score = score if visible is None else score.masked_fill(~visible, -torch.inf)
        largest = score.amax((0, 2, 3))
        found[call.name] = torch.maximum(found[call.name], largest) if call.name in found else largest

    with torch.no_grad(), observe_attention(model, observe):
        model(**batch)
    return found


def recorded(monitor) -> dict[str, torch.Tensor]:
    return {layer.name: layer.largest.clone().double() for layer in monitor.clipper.layers}


@pytest.mark.parametrize("kind", ONE_HEAD_AT_A_TIME)
def test_the_clipped_head_falls_to_the_threshold_and_no_other_head_changes(kind):
    model, batch = make(kind).train(), inputs(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClipWarning)
        with Monitor(model, every=1000, clip=QKClip(1e9)) as monitor:
            model(**batch)
            first = recorded(monitor)
    if kind != "gemma2_capped":  # observers see capped scores as log weights
        brute = logits(model, batch)
        for name, largest in brute.items():
            assert torch.allclose(first[name], largest, rtol=1e-5), name
    name = next(name for name, largest in first.items() if torch.isfinite(largest).all())  # nothing depends on layer 0
    values = first[name].sort().values
    bound = float((values[-1] + values[-2]) / 2) if values[-2] > 0 else float(values[-1]) / 2
    head = int(first[name].argmax())
    assert bound > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClipWarning)
        monitor = Monitor(model, every=1000, clip=QKClip(bound))
    with monitor:
        model(**batch)
        monitor.step()
        acted = [action for action in monitor.actions if action.name == name]
        assert [(a.kind, a.head) for a in acted] == [("clip", head)]
        model(**batch)
        after = recorded(monitor)[name]
    assert float(after[head]) == pytest.approx(bound, rel=1e-3)
    others = torch.arange(len(after)) != head
    assert torch.allclose(after[others], first[name][others], rtol=1e-6, atol=1e-6)


WITHOUT_KERNEL = """
import logging, torch
logging.basicConfig()
from cumulant.kernels.native.library import library
from cumulant.training import EntropyFloor, Monitor, QKClip
from tests.observatory import test_qk_clip as t
assert library() is None
for kind in ("llama", "gpt2", "t5", "gemma2_capped"):
    model, batch = t.make(kind).train(), t.inputs(kind)
    before = model(**batch).last_hidden_state
    with Monitor(model, clip=QKClip(1e9), reactions=[EntropyFloor(0.99, heads="all")]) as monitor:
        assert torch.allclose(before, model(**batch).last_hidden_state, atol=1e-5)
        assert float(monitor.penalty()) > 0
        for name, largest in t.logits(model, batch).items() if kind != "gemma2_capped" else ():
            assert torch.allclose(t.recorded(monitor)[name], largest, rtol=1e-5), name
        bound = float(t.recorded(monitor).popitem()[1].max()) / 2
    with Monitor(model, clip=QKClip(bound)) as monitor:
        model(**batch)
        monitor.step()
        assert monitor.actions
"""


def test_without_the_compiled_kernel_the_same_is_done_and_the_log_says_what_it_costs():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_KERNEL],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUMULANT_NATIVE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = (
        "attention runs without the compiled kernel (switched off by CUMULANT_NATIVE=0): a training step with a clip"
    )
    assert words in done.stderr


def test_outputs_are_those_of_sdpa_and_the_model_is_as_it_was_afterwards():
    model, batch = make("llama").train(), inputs("llama")
    before = model(**batch).last_hidden_state
    with Monitor(model, clip=QKClip(1e9)):
        during = model(**batch).last_hidden_state
        assert model.config._attn_implementation == "cumulant"
    assert torch.allclose(before, during, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"
    assert not any(ATTRIBUTE in module.__dict__ for module in model.modules())


def test_maxima_are_of_all_micro_batches_since_the_step_and_not_of_validation():
    model = LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=64, context=8))
    ids = torch.randint(64, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    with Monitor(model, clip=QKClip(1e9)) as monitor:
        each = []
        for part in ids:
            model(part)
            each.append(recorded(monitor))
            for layer in monitor.clipper.layers:
                layer.largest.fill_(-torch.inf)
        for part in ids:
            model(part)
        together = recorded(monitor)
        for name, largest in together.items():
            assert torch.equal(largest, torch.stack([e[name] for e in each]).amax(0))
        monitor.step()
        with torch.no_grad():
            model(ids[0])
        assert all(bool((largest == -torch.inf).all()) for largest in recorded(monitor).values())


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}])
def test_layers_of_this_library_are_clipped_to_the_threshold(options):
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, batch_first=True, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    query, key, value = torch.randn(2, 7, 16), torch.randn(2, 7, layer.kdim), torch.randn(2, 7, layer.vdim)
    with Monitor(layer, clip=QKClip(1.5)) as monitor:
        layer(query, key, value, need_weights=False)
        first = recorded(monitor)[""]
        monitor.step()
        layer(query, key, value, need_weights=True)
        after = recorded(monitor)[""]
    over = first > 1.5
    assert bool(over.any())
    assert torch.allclose(after[over], torch.full_like(after[over], 1.5), rtol=1e-4)
    assert torch.allclose(after[~over], first[~over], rtol=1e-6)


@pytest.mark.parametrize("factor", [1.5, 30.0])
def test_with_weights_held_still_one_head_falls_to_the_threshold_and_the_others_of_its_layer_stay(factor):
    """Updates at rate 0: the largest logit on the batch that set it is τ to 1 %, those of other heads are the same."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(dim=32, heads=4, hidden=64, vocabulary=64, context=16))
    ids = torch.randint(64, (3, 16))
    layer, head = "trunk.blocks.1.attention", 2
    with torch.no_grad():
        model.get_submodule(layer).in_proj_weight[32:64].view(4, 8, 32)[head] *= 20 * factor  # its keys
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with Monitor(model, clip=QKClip(5.0)) as monitor:
        seen = []
        for _ in range(2):
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            seen.append(recorded(monitor)[layer])
            optimizer.step()
            monitor.step(optimizer=optimizer)
        assert [(a.step, a.name, a.head) for a in monitor.actions if a.step == 1] == [(1, layer, head)]
    before, after = seen
    assert float(before[head]) > 5.0 * factor
    assert float(after[head]) == pytest.approx(5.0, rel=0.01)
    others = torch.arange(4) != head
    assert torch.allclose(after[others], before[others], rtol=0, atol=1e-6)


def test_momentum_is_scaled_with_the_rows_where_asked():
    torch.manual_seed(0)
    layer, x = MultiheadAttention(8, 2, batch_first=True), 5 * torch.randn(2, 5, 8)
    optimizer = torch.optim.Adam(layer.parameters(), 0.0)
    layer(x, x, x)[0].sum().backward()
    optimizer.step()
    moment = optimizer.state[layer.in_proj_weight]["exp_avg"]
    before, weight = moment.clone(), layer.in_proj_weight.detach().clone()
    with Monitor(layer, clip=QKClip(0.1, momentum="scale")) as monitor:
        layer(x, x, x)
        with pytest.raises(ValueError, match="expected the optimizer"):
            monitor.step()
        monitor.step(optimizer=optimizer)
    factor = layer.in_proj_weight.detach() / weight
    assert float(factor.min()) < 0.9
    assert torch.allclose(moment, before * factor, rtol=1e-4, atol=1e-9)


def test_a_gain_shared_by_all_heads_is_reported_and_not_clipped():
    model, batch = make("qwen3").train(), inputs("qwen3")
    with pytest.raises(ValueError, match="all heads share one"):
        Monitor(model, clip=QKClip(1.0))
    both = nn.ModuleDict({"a": model, "b": MultiheadAttention(8, 2, batch_first=True)})
    with pytest.warns(ClipWarning, match="measured and not clipped"):
        monitor = Monitor(both, clip=QKClip(1e-3))
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with monitor:
        model(**batch)
        monitor.step()
    assert {a.kind for a in monitor.actions} == {"unclipped"}
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_the_log_says_in_words_what_was_done(caplog):
    torch.manual_seed(0)
    layer, x = MultiheadAttention(8, 2, batch_first=True), 9 * torch.randn(2, 5, 8)
    with Monitor(layer, clip=QKClip(0.5)) as monitor, caplog.at_level(logging.WARNING, "cumulant.monitor"):
        layer(x, x, x)
        monitor.step(optimizer=None)
    assert len(monitor.actions) == 2
    assert caplog.messages[0].startswith("step 1: layer 0 head 0: logits scaled from ")
    assert "down to 0.5" in caplog.messages[0]


def test_the_line_of_a_step_begins_with_what_is_gravest_and_no_action_is_left_out(caplog):
    kinds = ["clip", "clip", "entropy floor", "clip", "learning rate", "stop"]
    actions = [Action(kind, 7, 0, "a", head, 1.0, 2.0, f"{kind} {head}") for head, kind in enumerate(kinds)]
    with caplog.at_level(logging.INFO, "cumulant.monitor"):
        log_actions(7, actions)
    line, *others = caplog.messages
    assert line == "step 7: stop 5; learning rate 4; clip 0; and 3 more"
    assert others == ["step 7: clip 1", "step 7: entropy floor 2", "step 7: clip 3"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]


def test_logits_that_are_not_finite_are_reported_and_nothing_is_scaled():
    layer = MultiheadAttention(8, 2, batch_first=True)
    weight = layer.in_proj_weight.detach().clone()
    with Monitor(layer, clip=QKClip(1.0)) as monitor:
        layer(torch.full((1, 3, 8), torch.nan), torch.ones(1, 3, 8), torch.ones(1, 3, 8), need_weights=False)
        monitor.step()
    assert {action.kind for action in monitor.actions} == {"finite"}
    assert torch.equal(layer.in_proj_weight, weight)


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), float("inf"), True, "100"])
def test_thresholds_that_are_no_positive_number_are_refused(threshold):
    with pytest.raises(ValueError, match=r"QKClip\.threshold: expected a positive number"):
        QKClip(threshold)


def test_two_monitors_that_clip_one_model_are_refused_and_one_that_was_left_is_not_in_the_way():
    layer = MultiheadAttention(8, 2, batch_first=True)
    first = Monitor(layer, clip=QKClip())
    with pytest.raises(ValueError, match="no other monitor clips"):
        Monitor(layer, clip=QKClip())
    with pytest.raises(RuntimeError), first:
        raise RuntimeError
    second = Monitor(layer, clip=QKClip())
    del second  # left behind without closing
    with Monitor(layer, clip=QKClip()):
        assert ATTRIBUTE in layer.__dict__
    assert ATTRIBUTE not in layer.__dict__


def test_tied_projections_are_refused():
    first, second = MultiheadAttention(8, 2), MultiheadAttention(8, 2)
    second.in_proj_weight = first.in_proj_weight
    with pytest.raises(ValueError, match="Untie them"):
        Monitor(nn.ModuleList([first, second]), clip=QKClip())


class OwnAttention(nn.Module):
    """Attention of one's own, with a projection by no known name."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.read = 2, nn.Linear(8, 24)


def test_a_model_without_reachable_projections_is_refused():
    own = nn.ModuleDict({"a": OwnAttention()})
    with pytest.raises(ValueError, match="query and key projections"):
        Monitor(own, clip=QKClip())


def test_dropout_of_attention_is_refused_in_words():
    model = hf.GPT2Model(hf.GPT2Config(**tiny_models.GPT2))
    with pytest.raises(ValueError, match=r"attn_pdrop: expected 0, got 0\.1"):
        Monitor(model, clip=QKClip())
    assert not any(ATTRIBUTE in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("inside", [True, False], ids=["compiled later", "compiled model"])
def test_a_compiled_model_records_in_one_graph_without_compiling_anew(inside):
    model = LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=64, context=8))
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    compiles = []

    def count(graph, example):
        compiles.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    with Monitor(model if inside else compiled, every=3, clip=QKClip(1e9)) as monitor:
        model(ids)
        eager = recorded(monitor)
        monitor.step()
        for step in range(1, 7):
            compiled(ids)
            for name, largest in recorded(monitor).items():
                assert torch.allclose(largest, eager[name], rtol=1e-5), step
            monitor.step()
        assert [check.step for check in monitor.history] == ([0] if inside else [0, 3, 6])
    assert len(compiles) == 1


def test_a_transformers_model_is_recorded_inside_one_graph():
    model, batch = make("llama").train(), inputs("llama")
    torch.compiler.reset()
    with Monitor(model, every=10**6, clip=QKClip(1e9)) as monitor:
        model(**batch)
        eager = recorded(monitor)
        monitor.step()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(**batch).last_hidden_state.sum().backward()
        for name, largest in recorded(monitor).items():
            assert torch.allclose(largest, eager[name], rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_and_checkpointing_record_the_same_maxima(checkpointing):
    model, batch = make("llama").train(), inputs("llama")
    with Monitor(model, every=10**6, clip=QKClip(1e9)) as monitor:
        model(**batch)
        full = recorded(monitor)
        monitor.step()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model(**batch).last_hidden_state.sum().backward()
            assert all(torch.equal(full[name], largest) for name, largest in recorded(monitor).items())
        else:
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch)
            assert all(torch.allclose(full[name], x, rtol=0.05) for name, x in recorded(monitor).items())


def test_every_attention_layer_of_the_tiny_models_has_rows_or_a_reason():
    for kind in tiny_models.MAKERS:
        model = tiny_models.make(kind)
        for name in attention_modules(model):
            rows = head_rows(model.get_submodule(name))
            assert (isinstance(rows, NotFound) and rows.reason) or len(rows) >= 1, (kind, name)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_clip_alike_by_the_largest_logit_of_all(kind, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.observatory.clip_checks", kind, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, ids = clip_checks.model_and_batch()
    actions = [(a.name, a.head, a.before) for a in clip_checks.one_step(model, ids)]
    assert actions
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert [(n, h) for n, h, _ in found["actions"]] == [(n, h) for n, h, _ in actions]
        assert [b for *_, b in found["actions"]] == pytest.approx([b for *_, b in actions], rel=1e-5)
        for name, parameter in model.named_parameters():
            assert torch.allclose(found["state"][name], parameter, rtol=1e-5, atol=1e-7), name


def test_three_lines_in_a_trainer_keep_logits_at_the_threshold(tmp_path, caplog):
    pytest.importorskip("accelerate", reason="install accelerate: transformers' Trainer needs it")
    from cumulant.training import MonitorCallback

    torch.manual_seed(0)
    config = hf.LlamaConfig(**tiny_models.GROUPED)
    model = hf.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(60)
    ids = torch.randint(50, (4, 12))  # all of them in every step
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True}
    arguments = hf.TrainingArguments(str(tmp_path), report_to=[], save_strategy="no", disable_tqdm=True, **options)
    monitor = Monitor(model, every=2, clip=QKClip(1.0))
    trainer = hf.Trainer(model, arguments, train_dataset=data, callbacks=[MonitorCallback(monitor)])
    with caplog.at_level(logging.WARNING, "cumulant.monitor"):
        trainer.train()
    assert [check.step for check in monitor.history] == [0, 2]
    first = [action for action in monitor.actions if action.step == 1]
    assert max(a.before for a in first) > 1.2
    assert max((a.before for a in monitor.actions if a.step > 1), default=0) < 1.2  # moved by the updates alone
    assert any(line.startswith("step 1: layer ") for line in caplog.messages)
    assert model.config._attn_implementation == "sdpa"


def test_the_rate_is_lowered_and_training_is_ended_at_alarms():
    torch.manual_seed(0)
    layer, x = MultiheadAttention(8, 2, batch_first=True), 50 * torch.randn(2, 5, 8)  # collapsed from the beginning
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with Monitor(layer, every=1, reactions=[LearningRateBrake(0.5), Stop(("entropy",))]) as monitor:
        layer(x, x, x)
        monitor.step(optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert monitor.should_stop
    rate, stop = monitor.actions
    assert (rate.kind, rate.before, rate.after) == ("learning rate", 0.1, 0.05)
    assert stop.words.startswith("training is ended: layer 0 head ")


def test_reactions_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"Stop\.kinds: expected a tuple of names"):
        Stop(("divergence",))
    with pytest.raises(ValueError, match=r"LearningRateBrake\.factor"):
        LearningRateBrake(factor=2.0)
    with pytest.raises(TypeError, match=r"Monitor\.reactions"):
        Monitor(MultiheadAttention(8, 2), reactions=["stop"])
