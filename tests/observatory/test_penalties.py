"""Penalties of a monitor: their values and gradients against a dense oracle, in every kind of training loop."""

import copy
import gc
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cumulant.nn import MultiheadAttention, entropy_floor, z_loss
from cumulant.nn.call_statistics import ATTRIBUTE
from cumulant.training import (
    EntropyFloor,
    LanguageConfig,
    LanguageModel,
    Monitor,
    MonitorWarning,
    QKClip,
    Reaction,
    ZLoss,
)
from tests.observatory import tiny_models
from tests.observatory.clip_sweep import without_dropout
from tests.observatory.tiny_models import hf

pytestmark = pytest.mark.filterwarnings("ignore::cumulant.training.MonitorWarning")  # heads that collapse are meant

FLOOR = 0.6
dense: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # G, H, N of every call, (batch, heads, q)


def dense_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Attention of transformers with all its scores written down, which go to ``dense`` with their gradients."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    score = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    score = score if softcap is None else softcap * torch.tanh(score / softcap)
    bias = kwargs.get("position_bias")
    score = score if bias is None else score + bias
    if attention_mask is not None:
        mask = attention_mask
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
        score = torch.where(score < torch.finfo(score.dtype).min / 2, -torch.inf, score)
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*score.shape[:3], 1).to(score)
        score = torch.cat([score, sink], -1)
    g, p = torch.logsumexp(score, -1), torch.softmax(score, -1)
    h = -torch.where(p > 0, p * p.clamp_min(torch.finfo(p.dtype).tiny).log(), 0).sum(-1)
    dense.append((g, h, (score > -torch.inf).sum(-1)))
    return (p[..., : value.shape[2]] @ value).transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers.masking_utils import eager_mask

    hf.AttentionInterface.register("dense", dense_attention)
    hf.AttentionMaskInterface.register("dense", eager_mask)


def expected(rows: list[torch.Tensor | None], weights=None) -> torch.Tensor:
    """Both penalties of the calls in ``dense``, by loops over heads; rows of each are tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for layer, ((g, h, n), tokens) in enumerate(zip(dense, rows, strict=True)):
        tokens = torch.ones(g.shape[0], g.shape[2], dtype=torch.bool) if tokens is None else tokens
        for head in range(g.shape[1]):
            w = 1.0 if weights is None else weights.get((layer, head), 0.0)
            many = tokens & (n.expand_as(g)[:, head] > 1)
            lacking = (FLOOR * n.expand_as(g)[:, head][many].double().log() - h[:, head][many]).clamp_min(0)
            total = total + w * lacking.square().mean() + w * g[:, head][tokens].square().mean()
    return total


def sharp(kind: str) -> Any:
    """A model in double precision whose heads look at little."""
    return without_dropout(tiny_models.make(kind)).double().requires_grad_(True)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rtol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    scale = max(float(x.abs().max()) for x in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=rtol, atol=rtol * scale, msg=name)


def reactions(**options) -> list[Reaction]:
    return [  # pyright: ignore[reportReturnType]
        EntropyFloor(FLOOR, heads="all", **({"weight": 1.0} | options)),
        ZLoss(**({"weight": 1.0} | options)),
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "gptoss", "gemma2_capped", "whisper", "vit"])
def test_value_and_gradient_are_those_of_a_dense_oracle(kind):
    register()
    model, batch = sharp(kind), tiny_models.inputs(kind)
    if kind == "gptoss":
        model = model.float()  # its experts have no double precision
    wide, rtol = next(model.parameters()).dtype, 1e-4 if kind == "gptoss" else 1e-6
    batch = {name: x.to(wide) if x.is_floating_point() else x for name, x in batch.items()}
    padded = kind in ("llama", "gpt2", "bert", "gptoss")
    rows = None
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 4:] = 0
        rows = batch["attention_mask"].bool()
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        model(**batch)
        penalty = monitor.penalty()
        found = gradients(model, penalty)
        assert float(monitor.penalty()) == 0  # taken
    dense.clear()
    model.set_attn_implementation("dense")
    model(**batch)
    oracle = expected([rows] * len(dense))
    assert float(penalty.detach()) == pytest.approx(float(oracle.detach()), rel=rtol)
    assert_same(found, gradients(model, oracle), rtol)


@pytest.mark.parametrize("need_weights", [True, False])
def test_layers_of_this_library_have_the_penalties_of_their_functions(need_weights):
    torch.manual_seed(0)
    layer, x = MultiheadAttention(8, 2, batch_first=True).double(), 3 * torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    call = {"key_padding_mask": padding, "need_weights": need_weights}
    with Monitor(layer, every=10**6, reactions=reactions()) as monitor:
        layer(x, x, x, **call)
        penalty = monitor.penalty()
        found = gradients(layer, penalty)
    heads, rows = layer.attend(x, x, x, padding).heads, ~padding[:, None].expand(2, 2, 5)
    least = FLOOR * (~padding).sum(-1).double().log()[:, None, None]
    each = [
        entropy_floor(heads.entropy[:, [h]], least, 1.0, rows=rows[:, [h]])
        + z_loss(heads.log_normalizer[:, [h]], 1.0, rows=rows[:, [h]])
        for h in range(2)
    ]
    oracle = torch.stack(each).sum()
    assert float(penalty.detach()) == pytest.approx(float(oracle.detach()), rel=1e-9)
    assert_same(found, gradients(layer, oracle))


def test_weights_by_head_and_queries_that_see_one_key():
    register()
    model, batch = sharp("llama"), tiny_models.inputs("llama")
    weights = {(0, 1): 2.0, (1, 3): 0.5}
    with Monitor(model, every=10**6, reactions=reactions(weight=weights)) as monitor:
        model(**batch)
        penalty = monitor.penalty()
    dense.clear()
    model.set_attn_implementation("dense")
    model(**batch)
    assert float(penalty.detach()) == pytest.approx(float(expected([None, None], weights).detach()), rel=1e-6)
    assert int(dense[0][2].amin()) == 1  # the first query of a causal order


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=64, context=8))


def tokens(count: int = 4) -> torch.Tensor:
    return torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(0))


def test_micro_batches_have_their_own_penalties():
    model, ids = language_model(), tokens()
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        whole = []
        for part in ids.split(2):
            model(part)
            whole.append(monitor.penalty())
        one = gradients(model, (whole[0] + whole[1]) / 2)
        model.zero_grad()
        for part in ids.split(2):
            loss = model(part).sum() * 0 + monitor.penalty()
            (loss / 2).backward()
        assert_same(
            {n: p.grad for n, p in model.named_parameters()},
            one | {n: p.grad for n, p in model.named_parameters() if n not in one},
        )
        monitor.step()


def test_autocast_gives_nearly_the_same_penalty():
    model, batch = without_dropout(tiny_models.make("llama")).requires_grad_(True), tiny_models.inputs("llama")
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        model(**batch)
        full = float(monitor.penalty())
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch)
            rounded = monitor.penalty()
        assert rounded.dtype == torch.float32
        assert float(rounded) == pytest.approx(full, rel=0.05)
        rounded.backward()


@pytest.mark.parametrize("part", [False, True], ids=["causal model", "its layers are entrances"])
def test_checkpointed_passes_count_once_and_have_the_same_gradient(part):
    batch = tiny_models.inputs("llama")
    if part:
        model = sharp("llama")
    else:
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**tiny_models.GROUPED)).double()
        nn.init.normal_(model.model.layers[0].self_attn.q_proj.weight)
    model.train()
    with Monitor(model, every=2, reactions=reactions(), clip=QKClip(1e9)) as monitor:
        for _ in range(2):  # a step with a check, and one without
            model.gradient_checkpointing_disable()
            plain = gradients(model, model(**batch)[0].square().mean() + monitor.penalty())
            model.gradient_checkpointing_enable({"use_reentrant": False})
            again = gradients(model, model(**batch)[0].square().mean() + monitor.penalty())
            assert_same(plain, again)
            assert float(monitor.penalty()) == 0  # the repeated calls are no calls
            monitor.step()


def test_checkpointed_layers_of_this_library_count_once():
    model, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    block = nn.ModuleDict({"a": model})
    with Monitor(block, every=10**6, reactions=reactions()) as monitor:
        for need in (True, False):
            out = checkpoint(lambda: model(x, x, x, need_weights=need)[0], use_reentrant=False)  # noqa: B023
            (out.sum() + monitor.penalty()).backward()
            assert float(monitor.penalty()) == 0


def test_reentrant_checkpointing_is_named():
    model, batch = sharp("llama").train(), tiny_models.inputs("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        model(inputs_embeds=model.embed_tokens(batch["input_ids"]))
        with pytest.warns(MonitorWarning, match="gradient checkpointing needs use_reentrant=False"):
            assert float(monitor.penalty()) == 0


def test_validation_has_no_penalty_and_is_not_asked_for_one(monkeypatch):
    model, batch = sharp("llama"), tiny_models.inputs("llama")
    import cumulant.transformers as attention

    asked = []
    plain = attention._moments  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(attention, "_moments", lambda *call: asked.append(call[4]) or plain(*call))
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        with torch.no_grad():
            model(**batch)
            assert float(monitor.penalty()) == 0
        assert asked == [("mean",), ("mean",)]
        model(**batch)
        assert asked[2:] == [("entropy", "mean")] * 2
        assert float(monitor.penalty()) > 0


def graphs() -> int:
    gc.collect()
    return sum(1 for x in gc.get_objects() if type(x) is torch.Tensor and x.grad_fn is not None)


@pytest.mark.parametrize("taken", [True, False], ids=["added to the loss", "forgotten"])
def test_no_graph_lives_beyond_its_step(taken):
    model, ids = language_model(), tokens()
    with Monitor(model, every=2, reactions=reactions()) as monitor:
        before, counts = graphs(), []
        for _ in range(4):
            loss = model(ids).square().mean()
            if taken:
                loss = loss + monitor.penalty()
            loss.backward()
            del loss
            monitor.step()
            counts.append(graphs())
    assert counts == [before] * 4


def test_a_penalty_that_no_loss_gets_is_named():
    model = language_model()
    with Monitor(model, every=10**6, reactions=[ZLoss()]) as monitor:
        model(tokens())
        with pytest.warns(
            MonitorWarning, match=r"got 2 attention calls that no loss has got\. Write loss = model\(batch\)"
        ):
            monitor.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            model(tokens())
            monitor.step()


def test_a_head_gets_the_floor_when_it_has_collapsed_and_the_log_says_so(caplog):
    torch.manual_seed(0)
    layer, x = MultiheadAttention(16, 2, batch_first=True), torch.randn(4, 12, 16)
    with torch.no_grad():
        layer.in_proj_weight[:8].mul_(40)  # queries of head 0
    with Monitor(layer, every=1, reactions=[EntropyFloor(0.3)]) as monitor:
        layer(x, x, x, need_weights=False)
        assert ATTRIBUTE not in layer.__dict__  # nothing is asked for yet
        assert float(monitor.penalty()) == 0
        with caplog.at_level(logging.WARNING, "cumulant.monitor"):
            check = monitor.step()
        share = float(check.layers[0].heads.evenness[0])
        (action,) = monitor.actions
        assert (action.kind, action.head, action.before, action.after) == ("entropy floor", 0, share, 0.3)
        assert caplog.messages == [f"step 1: layer 0 head 0: entropy floor on, entropy {share:.2g} of log N, floor 0.3"]
        layer(x, x, x, need_weights=False)
        found = gradients(layer, monitor.penalty())["in_proj_weight"]
        assert float(found[:8].abs().max()) > 0
        assert float(found[8:16].abs().max()) == 0  # queries of head 1
        monitor.step()
        assert len(monitor.actions) == 1  # once
    assert ATTRIBUTE not in layer.__dict__


def test_a_floor_lifts_a_head_and_z_loss_holds_scores():
    torch.manual_seed(0)
    x = torch.randn(8, 12, 16)
    shares, normalizers = [], []
    for on in (False, True):
        torch.manual_seed(1)
        layer = MultiheadAttention(16, 2, batch_first=True)
        with torch.no_grad():
            layer.in_proj_weight[:16].mul_(4)
        optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
        chosen = [EntropyFloor(0.7, heads="all"), ZLoss(1e-2)] if on else []
        with Monitor(layer, every=60, reactions=chosen) as monitor:
            for _ in range(61):
                loss = (layer(x, x, x, need_weights=False)[0] - x).square().mean() + monitor.penalty()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step()
        heads = monitor.history[-1].layers[0].heads
        shares.append(float(heads.evenness.min()))
        normalizers.append(float(heads.log_normalizer.max()))
    assert shares[0] < 0.6 < 0.65 < shares[1]
    assert normalizers[1] < normalizers[0]


def test_penalties_of_compiled_models_run_without_the_compiler():
    model, ids = language_model(), tokens()
    compiles = []

    def count(graph, example):
        compiles.append(graph)
        return graph.forward

    torch.compiler.reset()
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        model(ids)
        plain = float(monitor.penalty())
    compiled = torch.compile(model, backend=count, fullgraph=True)
    with Monitor(compiled, every=10**6, reactions=reactions()) as monitor:
        compiled(ids)
        assert float(monitor.penalty()) == pytest.approx(plain)
    assert not compiles
    inside = Monitor(model, every=10**6, reactions=reactions())
    with inside:
        compiled(ids)  # compiled outside of what is watched: one graph, which hands nothing on
        with pytest.warns(MonitorWarning, match="expected attention calls"):
            assert float(inside.penalty()) == 0
    assert len(compiles) == 1


def test_copies_and_pickles_of_a_penalised_model_hand_nothing_on():
    model, ids = language_model(), tokens()
    with Monitor(model, every=10**6, reactions=reactions()) as monitor:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(ids).sum().backward()
            assert float(monitor.penalty()) == 0


def test_two_monitors_that_act_on_one_model_are_refused():
    model = language_model()
    with Monitor(model, reactions=[ZLoss()]):
        with pytest.raises(
            ValueError, match=r"Monitor\.clip: expected a model that no other monitor clips or penalises"
        ):
            Monitor(model, clip=QKClip())
        Monitor(model).close()  # one that only looks
    first = Monitor(model, reactions=[ZLoss()])
    del first  # left behind without closing
    Monitor(model, reactions=[ZLoss()], clip=QKClip()).close()


def test_a_monitor_left_by_an_exception_leaves_nothing_behind():
    model, batch = sharp("llama"), tiny_models.inputs("llama")
    hooks, name = tiny_models.hooks_of(model), model.config._attn_implementation

    def fail(*call):
        raise MemoryError

    handle = model.layers[1].mlp.register_forward_hook(fail)
    for every in (1, 10**6):
        with pytest.raises(MemoryError), Monitor(model, every=every, clip=QKClip(), reactions=reactions()):
            model(**batch)
    handle.remove()
    assert model.config._attn_implementation == name
    assert tiny_models.hooks_of(model) == hooks
    assert not any(ATTRIBUTE in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EntropyFloor(0.0), r"EntropyFloor\.floor: expected a share in \(0, 1\)"),
        (lambda: EntropyFloor(heads="some"), r"EntropyFloor\.heads: expected 'collapsed' or 'all', got 'some'"),
        (lambda: EntropyFloor(weight=-1.0), r"EntropyFloor\.weight: expected a finite number"),
        (lambda: ZLoss(weight={3: 1.0}), r"ZLoss\.weight: expected .* got 3: 1\.0"),
        (lambda: ZLoss(weight=float("nan")), r"ZLoss\.weight: expected a finite number"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_dropout_of_attention_is_refused():
    model = hf.GPT2Model(hf.GPT2Config(**tiny_models.GPT2))
    with pytest.raises(ValueError, match=r"Monitor\.reactions: attn_pdrop: expected 0, got 0\.1"):
        Monitor(model, reactions=[ZLoss()])
