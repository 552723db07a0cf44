"""The monitor: what it sees against brute force, when it warns, that it changes nothing and keeps little."""

import copy
import gc
import json
import math
import pickle
import subprocess
import sys
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from cumulant.nn import AttentionCall, Support, on_attention, report_attention
from cumulant.nn.regularisers import entropy_floor, z_loss
from cumulant.observatory.hooks.structure import block_of, list_elements
from cumulant.observatory.monitor.attention import entrances, expansion
from cumulant.observatory.monitor.history import CheckHistory, save, table
from cumulant.observatory.monitor.thresholds import AlarmDetector, LayerCheck
from cumulant.observatory.statistics.heads import MEANS, HeadStatistics, head_statistics
from cumulant.training import Alarm, Check, CheckWriter, Monitor, MonitorWarning, Thresholds


class Attention(nn.Module):
    """Plain causal attention that reports its calls."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.read, self.write = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, dim = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.read(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scale = q.shape[-1] ** -0.5
        report_attention(self, scale * q, k, v, out, Support(causal=True, offset=0), scale=scale)
        return self.write(out.transpose(1, 2).reshape(b, n, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2, layers: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model_and_input(seed: int = 0, **sizes):
    torch.manual_seed(seed)
    return Model(**sizes), torch.randn(3, 6, sizes.get("dim", 8))


def attention_call(b=3, heads=2, q=7, n=7, d=4, *, key_heads=None, rows=None, seed=0, **support) -> AttentionCall:
    g = torch.Generator().manual_seed(seed)
    eta = torch.randn(b, heads, q, d, generator=g, dtype=torch.float64)
    key = torch.randn(b, key_heads or heads, n, d, generator=g, dtype=torch.float64)
    out = torch.randn(b, heads, q, 3, generator=g, dtype=torch.float64)
    return AttentionCall(nn.Identity(), eta, key, key, Support(**support), out, 1.0, rows)


def brute(
    call: AttentionCall, counted: np.ndarray | None = None, first: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The numbers of every query, one softmax at a time."""
    eta, key, out = (t.numpy() for t in (call.eta, call.key, call.output))
    b, heads, q, _ = eta.shape
    n, group = key.shape[2], heads // key.shape[1]
    sums: dict[str, list] = {name: [[] for _ in range(heads)] for name in MEANS}
    mask, weights, sink = (getattr(call.support, k) for k in ("mask", "log_weights", "sink"))
    for s in range(b):
        for h in range(heads):
            for i in range(q):
                if counted is not None and not counted[s, i]:
                    continue
                seen = np.ones(n, bool)
                if call.support.causal:
                    seen &= np.arange(n) <= call.support.offset + i
                if call.support.window is not None:
                    seen &= np.abs(call.support.offset + i - np.arange(n)) < call.support.window
                if mask is not None:
                    seen &= mask.expand(b, heads, q, n)[s, h, i].numpy()
                bias = np.zeros(n)
                if weights is not None:
                    w = weights if weights.ndim == 4 else weights[:, :, None].repeat_interleave(group, 1)
                    bias = w.expand(b, heads, q, n)[s, h, i].numpy()
                seen &= bias > -np.inf
                score = key[s, h // group] @ eta[s, h, i]
                logits = list((score + bias)[seen]) + ([float(sink[h])] if sink is not None else [])
                if len(logits) < 2:
                    continue
                top = max(logits)
                g = top + math.log(sum(math.exp(x - top) for x in logits))
                p = np.exp(np.array(logits) - g)
                start = 0 if first is None else first[s]
                row = {
                    "entropy": -(p * np.log(p)).sum(),
                    "evenness": -(p * np.log(p)).sum() / math.log(len(logits)),
                    "log_normalizer": g,
                    "max_score": score[seen].max(),
                    "first_mass": math.exp(score[start] + bias[start] - g) if seen[start] else 0.0,
                    "sink_mass": p[-1] if sink is not None else math.nan,
                    "output_size": math.sqrt((out[s, h, i] ** 2).mean()),
                }
                for name, value in row.items():
                    sums[name][h].append(value)
    merge = {"max_score": max}
    return {k: np.array([merge.get(k, np.mean)(rows) for rows in v]) for k, v in sums.items()}


def per_pair(b, h, q, n):
    w = torch.randn(b, h, q, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    w[0, 0, :, 2] = -torch.inf
    return w


CALLS = {
    "plain": lambda: attention_call(),
    "causal": lambda: attention_call(causal=True, offset=0),
    "cached": lambda: attention_call(q=4, n=7, causal=True, offset=3),
    "window": lambda: attention_call(causal=True, offset=0, window=2),
    "band": lambda: attention_call(window=3, offset=0),
    "grouped": lambda: attention_call(heads=4, key_heads=2, causal=True, offset=0),
    "mask for all": lambda: attention_call(mask=(torch.arange(7) != 3)[None]),
    "mask per sequence": lambda: attention_call(mask=torch.arange(7) < torch.tensor([7, 5, 2])[:, None, None, None]),
    "mask and causal": lambda: attention_call(mask=torch.arange(7)[None, None, None] != 1, causal=True, offset=0),
    "bias per pair": lambda: attention_call(log_weights=per_pair(3, 2, 7, 7)),
    "weight per atom": lambda: attention_call(heads=4, key_heads=2, log_weights=per_pair(3, 2, 7, 7)[:, :, 0]),
    "sink": lambda: attention_call(sink=torch.tensor([0.5, -1.0], dtype=torch.float64), causal=True, offset=0),
    "cross": lambda: attention_call(q=5, n=3),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_query_agrees_with_brute_force(name):
    call = CALLS[name]()
    heads, expected = head_statistics(call), brute(call)
    for quantity in MEANS:
        np.testing.assert_allclose(getattr(heads, quantity).numpy(), expected[quantity], rtol=1e-12, err_msg=quantity)


def test_padding_is_left_out_and_the_first_token_is_the_first_that_is_one():
    rows = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    call = attention_call(rows=rows, mask=rows[:, None, None], causal=True, offset=0)
    heads, expected = head_statistics(call), brute(call, rows.numpy(), rows.int().argmax(1).numpy())
    for quantity in MEANS:
        np.testing.assert_allclose(getattr(heads, quantity).numpy(), expected[quantity], rtol=1e-12, err_msg=quantity)
    assert heads.queries == 7 + 4 + 2 - 3  # the first token of each sees itself alone


@pytest.mark.parametrize(("sequences", "queries"), [(1, 3), (2, 5), (3, 1)])
def test_a_sample_is_the_same_queries_of_the_whole(sequences, queries):
    call = attention_call(causal=True, offset=0, log_weights=per_pair(3, 2, 7, 7))
    chosen = {1: [0], 2: [0, 1], 3: [0, 1, 2]}[sequences]
    picked = [(k + 1) * 7 // queries - 1 for k in range(queries)]
    counted = np.zeros((3, 7), bool)
    counted[np.ix_(chosen, picked)] = True
    heads, expected = head_statistics(call, sequences=sequences, queries=queries), brute(call, counted)
    for quantity in MEANS:
        np.testing.assert_allclose(getattr(heads, quantity).numpy(), expected[quantity], rtol=1e-12, err_msg=quantity)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"q": 0}, {"n": 0}, {"q": 1, "n": 1}], ids=str)
def test_where_nothing_can_be_chosen_nothing_is_seen(sizes):
    heads = head_statistics(attention_call(**sizes))
    assert heads.queries == 0
    assert heads.finite
    assert bool(torch.stack(heads[:-1]).isnan().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_and_does_not_raise(bad):
    call = attention_call()
    call.key[0, 0, 0, 0] = bad
    assert not head_statistics(call).finite
    call = attention_call()
    call.output[0, 0, 0, 0] = bad
    assert not head_statistics(call).finite
    assert not head_statistics(attention_call(log_weights=torch.full((3, 2, 7), bad, dtype=torch.float64))).finite


def test_half_precision_is_seen_in_single():
    x = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    low = head_statistics(
        AttentionCall(nn.Identity(), *(x.bfloat16() for _ in range(3)), Support(), x.bfloat16(), 1.0, None)
    )
    high = head_statistics(
        AttentionCall(
            nn.Identity(), *(x.bfloat16().float() for _ in range(3)), Support(), x.bfloat16().float(), 1.0, None
        )
    )
    torch.testing.assert_close(low.entropy, high.entropy, atol=1e-5, rtol=0)


def test_two_calls_of_a_layer_are_averaged_by_their_queries():
    one, other = head_statistics(attention_call(q=4)), head_statistics(attention_call(q=7, seed=1))
    both = one.merge(other)
    assert both.queries == one.queries + other.queries
    torch.testing.assert_close(both.entropy, (12 * one.entropy + 21 * other.entropy) / 33)
    torch.testing.assert_close(both.max_score, torch.maximum(one.max_score, other.max_score))
    empty = head_statistics(attention_call(b=0))
    assert empty.merge(one) is one
    assert one.merge(empty) is one


def test_expansion_of_nothing_and_of_zero_is_no_number():
    assert math.isnan(expansion(torch.zeros(0, 3), torch.zeros(0, 3)))
    assert math.isnan(expansion(torch.zeros(2, 3), torch.ones(2, 3)))
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    assert expansion(x, 3 * x) == pytest.approx(3, rel=1e-6)


def test_a_pass_of_every_kth_step_is_heard():
    model, x = model_and_input()
    monitor = Monitor(model, every=3)
    checks = []
    for _ in range(7):
        model(x).sum().backward()
        checks.append(monitor.step())
    assert [c.step for c in checks if c is not None] == [0, 3, 6]
    assert [c.step for c in monitor.history] == [0, 3, 6]
    assert [layer.name for layer in monitor.history.last.layers] == ["blocks.0.attention", "blocks.1.attention"]


def test_numbers_are_those_of_the_model():
    model, x = model_and_input()
    calls = []
    with torch.no_grad(), on_attention(calls.append):
        after = [model.blocks[0](x)]
    monitor = Monitor(model, every=1)
    model(x)
    layer = monitor.step().layers[0]
    torch.testing.assert_close(layer.heads.entropy, head_statistics(calls[0]).entropy)
    assert layer.expansion == pytest.approx(float(after[0].norm() / x.norm()), rel=1e-6)


def test_the_model_computes_what_it_did_and_draws_no_random_numbers():
    model, x = model_and_input()
    plain = model(x)
    plain.sum().backward()
    gradient = model.get_parameter("blocks.0.attention.read.weight").grad.clone()
    model.zero_grad()
    state = torch.get_rng_state()
    monitor = Monitor(model, every=1)
    out = model(x)
    out.sum().backward()
    monitor.step()
    assert torch.equal(out, plain)
    assert torch.equal(model.get_parameter("blocks.0.attention.read.weight").grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_first_of_accumulated_passes_is_heard_and_none_without_gradients():
    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    with torch.no_grad():
        model(100 * x)
    model(x)
    model(100 * x)
    first = monitor.step().layers[0].heads
    alone = Monitor(model, every=1)
    model(x)
    torch.testing.assert_close(first.entropy, alone.step().layers[0].heads.entropy)


def test_monitors_whose_passes_overlap_leave_the_compiler_on():
    model, x = model_and_input()
    compiles = []
    first, second = Monitor(model, every=1), Monitor(model, every=1)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model(x[..., 1:])
    model(x)  # the first to begin is the first to end
    for monitor in (first, second):
        monitor.step()
        monitor.close()
    torch.compile(lambda a: a + 1, backend=lambda graph, _: compiles.append(graph) or graph.forward)(x)
    assert len(compiles) == 1


def test_parts_of_a_model_can_be_called_instead_of_it():
    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    for block in model.blocks:
        x = block(x)
    layers = monitor.step().layers
    assert [layer.name for layer in layers] == ["blocks.0.attention", "blocks.1.attention"]
    assert all(math.isfinite(layer.expansion) for layer in layers)


def test_a_step_in_which_nothing_is_heard_is_said_once():
    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    with pytest.warns(MonitorWarning, match=r"Monitor.step: expected an observed pass, got none in step 0. Run"):
        monitor.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.step() is None
    with torch.no_grad(), monitor.watching():
        model(x)
    assert monitor.step().step == 2


def test_watching_between_checks_hears_nothing():
    model, x = model_and_input()
    monitor = Monitor(model, every=2)
    with monitor.watching(), monitor.watching():
        model(x)
    assert monitor.step() is not None
    with monitor.watching():
        model(x)
    assert monitor.step() is None


def test_a_failing_pass_leaves_nothing_behind():
    from cumulant.nn.calls import is_observed

    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    with pytest.raises(RuntimeError):
        model(x[..., :3])
    assert not is_observed()
    model(x)
    assert monitor.step() is not None


def test_closed_monitors_and_copies_of_the_model_are_silent():
    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    twin(x)
    stored(x)
    assert monitor.history.last is None
    with monitor:
        model(x)
    assert monitor.history.last is not None  # closing counts what was observed
    model(x)
    monitor.step()
    assert len(monitor.history) == 1
    modules = model.modules()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)  # pyright: ignore[reportPrivateUsage]


def test_a_forgotten_monitor_is_let_go():
    import weakref

    model, x = model_and_input()
    gone = weakref.ref(Monitor(model, every=1))
    gc.collect()
    assert gone() is None
    assert model(x).shape == x.shape


def test_steps_go_forward_and_start_begins_anew():
    model, x = model_and_input()
    monitor = Monitor(model, every=10)
    model(x)
    monitor.step(40)
    with pytest.raises(ValueError, match=r"Monitor.step: expected a step after 40, got 40. Call monitor.start"):
        monitor.step(40)
    model(x)
    assert monitor.step().step == 40
    monitor.start(0)
    model(x)
    assert monitor.step().step == 0


def layer(entropy=2.0, *, evenness=0.7, score=1.0, size=1.0, growth=1.0, heads=2, bounds=None) -> LayerCheck:
    def row(value):
        return torch.full((heads,), float(value), dtype=torch.float64)

    heads = HeadStatistics(row(entropy), row(evenness), row(1), row(score), row(0.1), row(math.nan), row(size), 5)
    bounds = bounds or Thresholds()
    return LayerCheck("a", heads, growth, bounds.dead_heads(heads), bounds.collapsed_heads(heads))


def words(*checks, every=100, **bounds) -> list[list[str]]:
    judge = AlarmDetector(Thresholds(**bounds))
    return [[a.words for a in judge.alarms(every * i, [check])] for i, check in enumerate(checks)]


def test_a_fall_of_entropy_is_said_once_in_words():
    found = words(layer(2.1, heads=1), layer(1.9, heads=1), *(layer(0.2, heads=1) for _ in range(4)))
    assert found == [[], [], ["layer 0 head 0: entropy fell from 2.1 to 0.2 in 200 steps"], [], [], []]


def test_an_alarm_sounds_again_after_it_has_been_silent_long_enough():
    rest = [layer(2.0, heads=1)] * 4
    found = words(*rest, layer(0.3, heads=1), *rest, layer(0.3, heads=1), reach=3)
    assert [bool(f) for f in found] == [False] * 4 + [True] + [False] * 4 + [True]
    flicker = words(*rest, layer(0.3, heads=1), layer(2.0, heads=1), layer(0.3, heads=1), reach=3)
    assert [bool(f) for f in flicker] == [False] * 4 + [True] + [False] * 2


def test_what_else_is_said():
    assert words(layer(score=2, heads=1), layer(score=60, heads=1))[1] == [
        "layer 0 head 0: largest score rose from 2 to 60 in 100 steps"
    ]
    assert words(layer(score=2), layer(score=20)) == [[], []]  # nothing to fear
    dead = layer(evenness=0.9999, heads=1)
    assert words(layer(), dead, dead, reach=3) == [[], [], []]  # it may come to life
    assert words(dead, dead, dead, dead, dead, reach=3)[3:] == [
        ["layer 0 head 0: it has attended to all keys alike for 300 steps"],
        [],
    ]
    assert words(layer(entropy=0.01, evenness=0.01, heads=1))[0] == [
        "layer 0 head 0: entropy is 0.01, the head has collapsed"
    ]
    assert words(layer(growth=2.0), layer(growth=100.0))[1] == [
        "layer 0: expansion of its block rose from 2 to 100 in 100 steps"
    ]
    assert words(layer(), layer(entropy=math.nan))[1] == ["layer 0: attention is no longer finite"]
    assert words(layer(growth=math.nan), layer(growth=5.0)) == [[], []]


def test_heads_that_put_out_nothing_are_dead():
    bounds = Thresholds()
    heads = layer().heads._replace(output_size=torch.tensor([1.0, 1e-5]))
    assert bounds.dead_heads(heads).tolist() == [False, True]
    assert bounds.dead_heads(heads._replace(output_size=torch.zeros(2))).tolist() == [True, True]
    before = layer()
    after = LayerCheck("a", heads, 1.0, bounds.dead_heads(heads), bounds.collapsed_heads(heads))
    assert words(before, after, after, reach=1)[2] == ["layer 0 head 1: it has put out next to nothing for 100 steps"]


class KeepChecks(CheckWriter):
    def __init__(self):
        self.checks = []

    def __call__(self, check: Check) -> None:
        self.checks.append(check)


def test_a_warning_a_callback_and_a_writer_get_the_alarm():
    model, x = model_and_input()
    alarms, kept = [], KeepChecks()
    monitor = Monitor(model, every=1, on_alarm=alarms.append, writer=kept)
    model(x)
    monitor.step()
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("attention.read.weight").mul_(30)
    model(x)
    with pytest.warns(MonitorWarning, match=r"step 1: layer 0.*\(and \d+ more: see Monitor.alarms\)") as shown:
        check = monitor.step()
    assert shown[0].filename == __file__  # the line of the loop, not one of the library
    assert tuple(alarms) == check.alarms == tuple(monitor.alarms)
    assert kept.checks == list(monitor.history)
    assert all(isinstance(a, Alarm) and a.step == 1 for a in alarms)
    assert any(a.kind == "entropy" for a in alarms)


def test_weights_that_are_not_finite_do_not_stop_the_model():
    model, x = model_and_input()
    with torch.no_grad():
        model.get_parameter("blocks.0.attention.read.weight").fill_(math.nan)
    monitor = Monitor(model, every=1)
    assert bool(model(x).isnan().all())
    with pytest.warns(MonitorWarning, match=r"layer 0: attention is no longer finite"):
        monitor.step()
    json.dumps(monitor.rows(), allow_nan=False)


def test_a_history_is_thinned_evenly_and_never_grows_past_its_bound():
    for keep in (3, 4, 7, 10):
        history = CheckHistory(keep)
        for step in range(200):
            history.add(Check(step, ()))
            steps = [c.step for c in history]
            assert len(steps) == len(history) <= keep
            assert steps[0] == 0
            assert steps[-1] == step
            assert len({b - a for a, b in pairwise(steps[:-1])}) <= 1
    with pytest.raises(ValueError, match=r"CheckHistory.keep: expected at least 3 checks, got 2"):
        CheckHistory(2)


@pytest.mark.long
def test_memory_is_flat():
    model, x = model_and_input()
    monitor = Monitor(model, every=1, keep=8, thresholds=Thresholds(reach=4))

    def held() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))

    for _ in range(40):
        model(x)
        monitor.step()
    before = held()
    for _ in range(40):
        model(x)
        monitor.step()
    assert held() <= before + 14 * 8  # no more than the checks kept can differ by
    assert len(monitor.history) <= 8


def test_rows_json_parquet_and_table(tmp_path):
    polars = pytest.importorskip("polars", reason="install cumulant[report]")
    model, x = model_and_input()
    monitor = Monitor(model, every=1)
    assert monitor.report() == "no pass has been observed yet"
    for scale in (1, 100):
        model(scale * x)
        monitor.step()
    rows = monitor.rows()
    assert len(rows) == 2 * 2 * 2  # checks, layers, heads
    assert rows[0]["sink_mass"] is None
    assert rows[-1]["name"] == "blocks.1.attention"
    assert set(MEANS) <= set(rows[0])
    monitor.save(tmp_path / "history.json")
    stored = json.loads((tmp_path / "history.json").read_text())
    assert stored["rows"] == rows
    monitor.save(tmp_path / "history.parquet")
    assert polars.read_parquet(tmp_path / "history.parquet")["entropy"].to_list() == [r["entropy"] for r in rows]
    with pytest.raises(ValueError, match=r"Monitor.save.path: expected a name that ends in .json or .parquet"):
        monitor.save(tmp_path / "h.csv")
    lines = monitor.report().splitlines()
    assert lines[0] == "step 1"
    assert lines[2].split()[:2] == ["0", f"{float(monitor.history.last.layers[0].heads.entropy.mean()):.3f}"]
    alarm = Alarm("entropy", 1, 0, "a", 0, math.nan, 0.2, 0, "layer 0 head 0: said")
    assert table(Check(1, (layer(),)), [alarm]).splitlines()[-1] == "step 1: layer 0 head 0: said"
    save(tmp_path / "alarms.json", [], [alarm])
    assert json.loads((tmp_path / "alarms.json").read_text())["alarms"][0]["before"] is None


def test_blocks_and_entrances():
    model = Model(layers=1)
    assert block_of(model, "blocks.0.attention") == "blocks.0"
    assert block_of(nn.Sequential(nn.Sequential(Attention(4, 2))), "0.0", sequential=True) == "0"
    assert block_of(Attention(4, 2), "") is None
    assert list(list_elements(model)) == ["blocks.0"]
    assert entrances(model) == [model, model.blocks[0]]
    lone, x = Attention(4, 2), torch.randn(1, 3, 4)
    monitor = Monitor(lone, every=1)
    lone(x)
    assert math.isnan(monitor.step().layers[0].expansion)


def test_bad_arguments_are_refused_in_a_sentence():
    model = Model()
    with pytest.raises(TypeError, match=r"Monitor.model: expected a torch.nn.Module, got int. Pass the model"):
        Monitor(3)
    with pytest.raises(ValueError, match=r"Monitor.every: expected a positive whole number, got 0"):
        Monitor(model, every=0)
    with pytest.raises(ValueError, match=r"Monitor.queries: expected a positive whole number, got 1\.5"):
        Monitor(model, queries=1.5)
    with pytest.raises(ValueError, match=r"Monitor.start.step: expected a whole number, 0 or more, got -1"):
        Monitor(model).start(-1)
    with pytest.raises(ValueError, match=r"Thresholds.fall: expected a share in \[0, 1\), got 2"):
        Thresholds(fall=2)
    with pytest.raises(ValueError, match=r"Thresholds.rise: expected a positive number, got 0"):
        Thresholds(rise=0)
    with pytest.raises(ValueError, match=r"Thresholds.reach: expected a positive number of checks, got 0"):
        Thresholds(reach=0)


def tiny_gpt2(**config):
    hf = pytest.importorskip("transformers", reason="install cumulant[hf]")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    sizes |= {"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes | config)).train()


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 5, 7])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_transformers_model_is_heard_as_the_observatory_hears_it(implementation):
    model, batch = tiny_gpt2(), padded_batch()
    from cumulant.observatory import attach

    model.set_attn_implementation(implementation)
    plain = model(**batch).logits
    with attach(model, ("entropy", "log_normalizer", "first_mass"), hidden_states=False) as recorder, torch.no_grad():
        model(**batch)
    record = recorder.record()
    monitor = Monitor(model, every=1, queries=9)
    assert torch.equal(model(**batch).logits, plain)
    assert model.config._attn_implementation == implementation
    check = monitor.step()
    assert [layer.name for layer in check.layers] == [layer.name for layer in record.modules]
    for layer in check.layers:
        # the observatory counts the first token of each of three sequences: it sees one key, with entropy 0
        tally = record.tallies[f"{layer.name}/entropy"]
        total = tally.mean * tally.count
        torch.testing.assert_close(layer.heads.entropy, (total / (tally.count - 3)).double(), rtol=1e-5, atol=0)
        assert layer.heads.queries == 9 + 5 + 7 - 3
        assert math.isfinite(layer.expansion)


def test_a_transformers_model_inside_another_and_layers_of_ours_beside_it():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.theirs, self.ours = tiny_gpt2(), Model(dim=40)

        def loss(self, ids):
            return self.ours(self.theirs(input_ids=ids).logits).square().mean()

    both = Both()
    monitor = Monitor(both, every=1)
    both.loss(padded_batch()["input_ids"]).backward()
    names = [layer.name for layer in monitor.step().layers]
    assert names == [
        "theirs.transformer.h.0.attn",
        "theirs.transformer.h.1.attn",
        "ours.blocks.0.attention",
        "ours.blocks.1.attention",
    ]


def test_a_transformers_model_that_cannot_be_heard_is_refused_at_once(monkeypatch):
    model = tiny_gpt2()
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    with pytest.raises(ValueError, match=r"AttentionInterface, got GPT2LMHeadModel"):
        Monitor(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_trainer_calls_the_monitor(tmp_path):
    hf = pytest.importorskip("transformers", reason="install cumulant[hf]")
    from cumulant.observatory.monitor.trainer import MonitorCallback

    model, batch = tiny_gpt2(), padded_batch()
    items = [{k: v[i % 3] for k, v in batch.items()} for i in range(24)]
    arguments = hf.TrainingArguments(
        str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    monitor = Monitor(model, every=2)
    trainer = hf.Trainer(
        model, arguments, train_dataset=items, eval_dataset=items[:3], callbacks=[MonitorCallback(monitor)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert [c.step for c in monitor.history] == [0, 2, 4]
    assert monitor.history.last.layers[0].heads.entropy.shape == (2,)
    assert not model._forward_pre_hooks
    with pytest.raises(TypeError, match=r"MonitorCallback.monitor: expected a Monitor, got int. Make it with"):
        MonitorCallback(3)


def test_tensorboard_gets_curves_and_alarms(tmp_path):
    pytest.importorskip("tensorboard", reason="install cumulant[monitor]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from cumulant.observatory.monitor.tensorboard import TensorBoard

    model, x = model_and_input()
    writer = TensorBoard(tmp_path, heads=True)
    monitor = Monitor(model, every=1, writer=writer)
    for scale in (1, 2):
        model(x)
        monitor.step()
        with torch.no_grad():
            model.get_parameter("blocks.0.attention.read.weight").mul_(scale)
    alarm = Alarm("entropy", 2, 0, "a", 0, 2.1, 0.2, 0, "layer 0 head 0: entropy fell from 2.1 to 0.2 in 400 steps")
    writer(Check(2, (), (alarm,)))
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = events.Scalars("entropy/layer 00")
    first = monitor.history.checks[0].layers[0]
    assert [e.step for e in found] == [0, 1]
    assert found[0].value == pytest.approx(float(first.heads.entropy.mean()), rel=1e-6)
    assert events.Scalars("max_score/layer 01")[0].value == pytest.approx(
        float(monitor.history.checks[0].layers[1].heads.max_score.max()), rel=1e-6
    )
    per_head = events.Scalars("entropy per head/layer 00 head 01")[0].value
    assert per_head == pytest.approx(float(first.heads.entropy[1]), rel=1e-6)
    assert "sink_mass/layer 00" not in events.Tags()["scalars"]  # no number, no point
    assert events.Tensors("alarms/text_summary")[0].tensor_proto.string_val[0].decode() == alarm.words


def test_missing_extras_are_named(tmp_path, monkeypatch):
    from cumulant.observatory.monitor.tensorboard import TensorBoard

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[monitor\]"):
        TensorBoard(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "cumulant.observatory.monitor.trainer", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[hf\]"):
        import cumulant.observatory.monitor.trainer  # noqa: F401
    model, x = model_and_input()  # which needs neither
    monitor = Monitor(model, every=1)
    model(x)
    assert monitor.step() is not None


def test_z_loss_is_the_mean_square_of_what_is_there():
    g = torch.tensor([[1.0, -2.0, -torch.inf], [3.0, 5.0, 7.0]], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[True, True, True], [True, False, True]])
    loss = z_loss(g, 0.5, rows=rows)
    assert float(loss.detach()) == pytest.approx(0.5 * (1 + 4 + 9 + 49) / 4, rel=1e-12)
    loss.backward()
    expected = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, 7.0]], dtype=torch.float64) / 4
    torch.testing.assert_close(g.grad, expected)
    finite = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(z_loss, (finite,))
    assert float(z_loss(torch.full((3,), -torch.inf))) == 0
    assert float(z_loss(torch.zeros(0))) == 0


def test_the_entropy_floor_costs_only_below_it():
    h = torch.tensor([0.2, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss = entropy_floor(h, torch.tensor([1.0, 1.5, 1.9], dtype=torch.float64), 3.0)
    assert float(loss.detach()) == pytest.approx(3 * (0.64 + 0.25) / 3, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: entropy_floor(x, 1.5), (h,))
    rows = torch.tensor([False, False, True])
    assert float(entropy_floor(h, 1.5, rows=rows).detach()) == 0
    assert float(entropy_floor(torch.zeros(0), 1.0)) == 0


def test_gradients_reach_the_queries_through_the_regularisers():
    from cumulant import attend

    q = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = attend(q, 3 * q.detach(), causal=True)
    (z_loss(found.log_normalizer) + entropy_floor(found.entropy, 1.0)).backward()
    assert bool(q.grad.isfinite().all())
    assert float(q.grad.abs().max()) > 0


def test_regularisers_refuse_in_a_sentence():
    g = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"z_loss.weight: expected a finite number, 0 or more, got -1"):
        z_loss(g, -1)
    with pytest.raises(TypeError, match=r"z_loss.log_normalizer: expected a torch.Tensor, got list"):
        z_loss([1.0])
    with pytest.raises(TypeError, match=r"z_loss.rows: expected a Boolean tensor, got torch.float32"):
        z_loss(g, rows=g)
    with pytest.raises(ValueError, match=r"z_loss.rows: expected a shape that broadcasts to \(2, 3\), got \(2\)"):
        z_loss(g, rows=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"entropy_floor.floor: expected nats, 0 or more, got -1"):
        entropy_floor(g, -1.0)
    with pytest.raises(ValueError, match=r"entropy_floor.floor: expected a shape that broadcasts to \(2, 3\)"):
        entropy_floor(g, torch.ones(2))
    with pytest.raises(TypeError, match=r"entropy_floor.floor: expected dtype torch.float32 as entropy"):
        entropy_floor(g, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("block", ["standard", "energy", "convex", "equilibrium"])
def test_every_block_of_the_language_model_is_heard(block):
    from cumulant.nn.language_model import LanguageConfig, LanguageModel

    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(block=block, dim=16, heads=2, hidden=16, vocabulary=40, context=8))
    ids = torch.randint(40, (2, 8))
    monitor = Monitor(model, every=1)
    model.loss(ids, ids).backward()
    layers = monitor.step().layers
    assert len(layers) == 2
    for number, seen in enumerate(layers):
        assert seen.name.startswith(f"trunk.blocks.{number}")
        assert seen.heads.entropy.shape == (2,)
        assert bool((seen.heads.entropy > 0).all())
        assert seen.heads.finite
        assert seen.expansion > 0


def train_language_model(seed: int, factor: float, steps: int, *, stop_at_alarm: bool) -> tuple[list[Alarm], bool]:
    """Steps of the reference training, checked every 10: the alarms of collapse, and whether the loss has doubled."""
    pytest.importorskip("tokenizers", reason="install cumulant[train]")
    from cumulant.paper.trainings.language import LanguageTask
    from cumulant.paper.trainings.train import rate_at

    task = LanguageTask()
    recipe = task.recipe_for("standard")
    recipe = recipe._replace(rate=factor * recipe.rate)
    torch.manual_seed(seed)
    model = task.build(task.standard)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.decay)
    monitor, initial = Monitor(model, every=10), math.nan
    for step in range(steps):
        loss = task.loss(model, recipe.batch, torch.Generator().manual_seed((seed << 32) + step))
        initial = float(loss.detach()) if step == 0 else initial
        if not float(loss.detach()) <= 2 * initial:
            return list(monitor.alarms), True
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.param_groups[0]["lr"] = rate_at(recipe, step)
        optimizer.step()
        monitor.step()
        if stop_at_alarm and any(a.kind == "entropy" for a in monitor.alarms):
            break
    return list(monitor.alarms), False


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::cumulant.training.MonitorWarning")
def test_collapse_at_thirty_times_the_learning_rate_is_reported_before_divergence():
    reported = 0
    for seed in range(10):
        alarms, diverged = train_language_model(seed, 30.0, 100, stop_at_alarm=True)
        reported += any(a.kind == "entropy" for a in alarms) and not diverged
    assert reported >= 9


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::cumulant.training.MonitorWarning")
def test_the_reference_training_itself_gives_no_alarm():
    alarms, diverged = train_language_model(10, 1.0, 130, stop_at_alarm=False)
    assert not diverged
    assert [a.words for a in alarms] == []


@pytest.mark.long  # a process that imports transformers
def test_what_serves_a_monitor_is_imported_beside_it():
    code = """
import sys
from cumulant.observatory.monitor import Monitor, TensorBoard
from cumulant.training import TensorBoard as same
print(same is TensorBoard, "transformers" in sys.modules, "tensorboard" in sys.modules)
from cumulant.observatory.monitor import MonitorCallback
print(MonitorCallback.__name__, "transformers" in sys.modules)
"""
    pytest.importorskip("transformers", reason="install cumulant[hf]")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "True False False\nMonitorCallback True\n", run.stderr


@pytest.mark.parametrize("part", [False, True], ids=["model", "block called alone"])
def test_an_error_in_an_observed_pass_is_raised_as_it_is(part):
    tiny_models = pytest.importorskip("tests.observatory.tiny_models")
    model = tiny_models.make("llama").requires_grad_(True)
    before = tiny_models.hooks_of(model)
    name = model.config._attn_implementation

    def fail(*call):
        raise MemoryError("no memory left")

    def call() -> None:
        if part:
            states = torch.randn(1, 4, 24)
            model.layers[0](states, position_embeddings=model.rotary_emb(states, torch.arange(4)[None]))
        else:
            model(**tiny_models.inputs("llama"))

    with Monitor(model, every=1) as monitor:
        handle = model.layers[0].mlp.register_forward_hook(fail)
        for _ in range(2):  # again with blocks that are known
            with pytest.raises(MemoryError, match="no memory left"):
                call()
            handle.remove()
            model(**tiny_models.inputs("llama"))
            assert monitor.step() is not None
            handle = model.layers[0].mlp.register_forward_hook(fail)
        assert model.config._attn_implementation == name
    handle.remove()
    assert tiny_models.hooks_of(model) == before


def test_a_block_that_is_called_alone_has_its_expansion():
    tiny_models = pytest.importorskip("tests.observatory.tiny_models")
    model = tiny_models.make("llama").requires_grad_(True)
    states = out = torch.randn(1, 4, 24)
    ratios = []
    with Monitor(model, every=1) as monitor:
        for _ in range(2):
            out = model.layers[1](states, position_embeddings=model.rotary_emb(states, torch.arange(4)[None]))
            ratios.append(monitor.step().layers[0].expansion)
    assert ratios == pytest.approx([float(out.detach().norm() / states.norm())] * 2, rel=1e-5)


def test_two_monitors_that_look_at_one_model_leave_it_as_it_was():
    tiny_models = pytest.importorskip("tests.observatory.tiny_models")
    model = tiny_models.make("llama").requires_grad_(True)
    name, before = model.config._attn_implementation, tiny_models.hooks_of(model)
    with Monitor(model, every=1) as one, Monitor(model, every=2) as other:  # their passes end in the order they began
        for _ in range(2):
            model(**tiny_models.inputs("llama"))
            assert model.config._attn_implementation == name
            one.step()
            other.step()
    assert [len(monitor.history) for monitor in (one, other)] == [2, 1]
    torch.testing.assert_close(one.history[0].layers[0].heads.entropy, other.history[0].layers[0].heads.entropy)
    assert tiny_models.hooks_of(model) == before
