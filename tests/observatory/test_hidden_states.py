"""Hidden states over depth: stages, statistics that merge, expansion, and a model that does not notice."""

import json
import math
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.hidden_states import HiddenStateObserver, StageKey, merge_layers, observe_hidden_states
from cumulant.observatory.hooks.residual_stages import PERTURBATION_SIZE, perturbation
from cumulant.observatory.hooks.structure import attention_modules, block_of, twin
from cumulant.observatory.record.tables import layer_rows, layer_spectra, read_covariance
from cumulant.observatory.statistics.gaussianity import (
    compare_with_gaussian,
    lle_error,
    mardia,
    participation_ratio,
    principal_axes,
)
from cumulant.observatory.statistics.quantities import ADDED, LENS
from cumulant.observatory.statistics.sampling import priorities
from cumulant.observatory.statistics.states import (
    SAMPLE_SIZE,
    CentredStates,
    MeanScatter,
    StateSample,
    WithinScatter,
    flatten,
    unflatten,
)
from cumulant.observatory.statistics.tally import Tally
from cumulant.special import effective_rank
from tests.observatory.tiny_models import hooks_of, inputs, make

PRE, POST = ["in", "attention", "out"], ["in", "attention", "attention normed", "mlp", "out"]
CROSS = ["in", "attention", "cross attention", "out"]
S = TypeVar("S")


def run(model, *batches, **options):
    with torch.no_grad(), observe_hidden_states(model, **options) as layers:
        for batch in batches:
            model(**batch)
    return layers


def statistic(layers: HiddenStateObserver, key: str, of: type[S]) -> S:
    value = layers.statistics[key]
    assert isinstance(value, of)
    return value


def stages(layers, block):
    return [n.stage for n in layers.names() if n.block == block and n.role == "state"]


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        ("bert", "encoder.layer.1", POST),
        ("opt_post", "decoder.layers.1", POST),
        ("albert", "encoder.albert_layer_groups.0.albert_layers.0", POST),
        ("gpt2", "h.1", PRE),
        ("llama", "layers.0", PRE),
        ("gemma2", "layers.0", PRE),
        ("vit", "layers.1", PRE),
        ("t5", "encoder.block.1", PRE),
        ("t5", "decoder.block.0", CROSS),
        ("whisper", "decoder.layers.1", CROSS),
        ("olmo2", "layers.0", ["in", "out"]),
        ("neox", "layers.0", ["in", "out"]),
    ],
)
def test_stages_of_each_kind(kind, block, expected):
    layers = run(make(kind), inputs(kind))
    assert stages(layers, block) == expected
    assert ("only in and out" in layers.notes.get(block, "")) == (len(expected) == 2)
    assert ("several times" in layers.notes.get(block, "")) == (kind == "albert")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_ends_are_the_hidden_states_of_the_model(kind):
    model = make(kind)
    with torch.no_grad():
        out = model(**inputs(kind), output_hidden_states=True)
    hidden = out.encoder_hidden_states if kind == "t5" else out.hidden_states
    layers = run(model, inputs(kind))
    first, second = [b.name for b in layers.blocks if "decoder" not in b.name]
    for place, states in ((f"{first}/in", hidden[0]), (f"{first}/out", hidden[1])):
        x = states.reshape(-1, 24).double()
        spread = statistic(layers, f"{place}/spread", MeanScatter)
        assert int(spread.count) == len(x)
        torch.testing.assert_close(spread.mean, x.mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(spread.covariance, x.T.cov(correction=0), rtol=1e-4, atol=1e-5)
        assert float(statistic(layers, f"{place}/size", Tally).mean) == pytest.approx(
            float(x.norm(dim=1).mean()) / 24**0.5, rel=1e-5
        )
        unit = states.double() / states.double().norm(dim=-1, keepdim=True)
        pairs = (unit @ unit.mT)[:, ~torch.eye(states.shape[1], dtype=torch.bool)]
        assert float(statistic(layers, f"{place}/pairwise", Tally).mean) == pytest.approx(float(pairs.mean()), abs=1e-5)
        mean = nn.functional.normalize(unit.sum(1, keepdim=True), dim=-1)
        assert float(statistic(layers, f"{place}/cosine", Tally).mean) == pytest.approx(
            float((unit * mean).sum(-1).mean()), abs=1e-5
        )
        sample = statistic(layers, f"{place}/sample", StateSample)
        within = statistic(layers, f"{place}/within", WithinScatter)
        centred = (states.double() - states.double().mean(1, keepdim=True)).reshape(-1, 24)
        order = priorities(0, torch.arange(3)[:, None], torch.arange(states.shape[1])).flatten().argsort()
        assert sample.sequence.tolist() == (order // states.shape[1]).tolist()  # fewer than 512: all of them
        assert sample.length.unique().tolist() == [states.shape[1]]
        torch.testing.assert_close(sample.state.double(), centred[order], rtol=0, atol=1e-6)
        assert (int(within.tokens), int(within.sequences)) == (len(x), 3)
        torch.testing.assert_close(within.covariance, centred.T @ centred / len(x), rtol=1e-4, atol=1e-5)
    cells = {n.block: n.cell for n in layers.names() if n.stage == "in"}
    assert cells[first] == f"{first}/in"
    assert cells[second] == f"{first}/out"  # one state, kept once


def test_middle_stages_are_what_the_block_computes():
    bert, llama = make("bert"), make("llama")
    layers = run(bert, inputs("bert"))
    block, x = bert.encoder.layer[0], bert.embeddings(**inputs("bert"))
    summed = x + block.attention.output.dense(block.attention.self(x)[0])
    normed = block.attention.output.LayerNorm(summed)
    mlp = normed + block.output.dense(block.intermediate(normed))
    for stage, states in (("attention", summed), ("attention normed", normed), ("mlp", mlp)):
        torch.testing.assert_close(
            statistic(layers, f"encoder.layer.0/{stage}/spread", MeanScatter).mean,
            states.double().mean((0, 1)),
            rtol=0,
            atol=1e-5,
        )
    sigma = summed.double().std(-1, correction=0)
    inverse = statistic(layers, "encoder.layer.0/norm attention.output.LayerNorm/inverse", Tally)
    assert float(inverse.mean) == pytest.approx(float((1 / sigma).mean()), rel=1e-5)
    layers = run(llama, inputs("llama"))
    x = llama.embed_tokens(inputs("llama")["input_ids"]).double()
    rms = x.square().mean(-1, keepdim=True).sqrt()
    inverse = statistic(layers, "layers.0/norm input_layernorm/inverse", Tally)
    assert float(inverse.mean) == pytest.approx(float((1 / rms).mean()), rel=1e-5)
    torch.testing.assert_close(
        read_covariance(layers.state(), layers.names(), "layers.0"),
        (x / rms).reshape(-1, 24).T.cov(correction=0),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "whisper", "gptoss", "vit"])
def test_outputs_do_not_change_and_nothing_stays_behind(kind):
    model = make(kind)

    with torch.no_grad():
        plain = model(**inputs(kind), output_hidden_states=True)
        before, seed = hooks_of(model), torch.get_rng_state()
        calls = []
        with observe_hidden_states(model), observe_attention(model, calls.append) as hooks:
            watched = model(**inputs(kind), output_hidden_states=True)
    assert hooks_of(model) == before
    assert torch.equal(seed, torch.get_rng_state())
    assert torch.equal(plain.last_hidden_state, watched.last_hidden_state)
    assert hooks.calls == len(attention_modules(model))  # the second call of a block is not observed
    one = plain.encoder_hidden_states if "encoder_hidden_states" in plain else plain.hidden_states
    two = watched.encoder_hidden_states if "encoder_hidden_states" in plain else watched.hidden_states
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_hooks_go_after_an_error():
    model = make("bert")
    model.encoder.layer[1].intermediate.forward = lambda x: 1 / 0
    with torch.no_grad(), pytest.raises(ZeroDivisionError), observe_hidden_states(model):
        model(**inputs("bert"))
    assert not hooks_of(model.encoder)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_halves_merge_to_the_whole(kind):
    model, batches = make(kind), [inputs(kind, seed=s) for s in range(4)]
    whole = run(model, *batches, perturb=False)
    halves = []
    for start in (0, 2):
        with torch.no_grad(), observe_hidden_states(model, perturb=False) as layers:
            for i in (start, start + 1):
                layers.expect(texts=torch.arange(3 * i, 3 * i + 3))
                model(**batches[i])
        halves.append(layers)
    for one, two in ((0, 1), (1, 0)):
        merged = merge_layers(halves[one].state(), halves[two].state())
        assert merged.keys() == whole.state().keys()
        for key, tensor in whole.state().items():
            if tensor.dtype == torch.int64 or key.endswith("sample.state"):
                assert torch.equal(merged[key], tensor), key
            else:
                # a tally weighs its halves by a quotient in single precision
                tolerance = 1e-6 if ":tally." in key else 1e-10
                torch.testing.assert_close(merged[key], tensor, rtol=tolerance, atol=tolerance)
    halves[0].merge(halves[1].state())
    assert torch.equal(halves[0].state()[f"{whole.blocks[0].name}/in/size:tally.count"], torch.tensor([84]))
    assert halves[0].names() == [StageKey(*name) for name in json.loads(json.dumps(whole.names()))]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_growth_is_the_derivative_of_the_block(kind):
    model = make(kind).double()
    model.set_attn_implementation("eager")  # the fused function has no second derivative, which this jvp needs
    layers = run(model, inputs(kind))
    block, name = layers.blocks[0], layers.blocks[0].name
    with torch.no_grad():
        x = model(**inputs(kind), output_hidden_states=True).hidden_states[0]
    rows = torch.ones(x.shape[:2], dtype=torch.bool)
    v = perturbation(x, rows, 0)
    torch.testing.assert_close(v.norm(dim=-1), PERTURBATION_SIZE * x.norm(dim=-1), rtol=1e-12, atol=0)
    mask = torch.full((1, 1, 7, 7), -1e9, dtype=torch.float64).triu(1) if kind == "gpt2" else None
    copy: Any = twin(block.module)

    def attention(x):
        if kind == "gpt2":
            return x + copy.attn(copy.ln_1(x), attention_mask=mask)[0]
        return x + copy.attention.output.dense(copy.attention.self(x)[0])

    def whole(x):
        out = copy(x, attention_mask=mask)
        return out[0] if isinstance(out, tuple) else out

    for stage, function in (("attention", attention), ("out", whole)):
        _, moved = torch.autograd.functional.jvp(function, x, v)
        assert isinstance(moved, torch.Tensor)
        exact = (moved.norm(dim=-1) / v.norm(dim=-1)).log()
        growth = statistic(layers, f"{name}/{stage}/growth", Tally)
        assert int(growth.count) == rows.numel()
        assert float(growth.mean) == pytest.approx(float(exact.mean()), abs=0.02)
        assert float(growth.high) == pytest.approx(float(exact.max()), abs=0.05)
    steps = sum(float(statistic(layers, f"{name}/{s}/step", Tally).mean) for s in stages(layers, name)[1:])
    assert steps == pytest.approx(float(statistic(layers, f"{name}/out/growth", Tally).mean), abs=1e-10)


def test_half_precision_measures_no_growth_and_says_so():
    layers = run(make("vit").half(), {k: v.half() for k, v in inputs("vit").items()})
    assert not any("growth" in place for place in layers.statistics)
    assert "half precision" in layers.notes["layers.0"]
    assert statistic(layers, "layers.0/out/spread", MeanScatter).mean.isfinite().all()


def test_a_filled_cache_is_not_touched():
    model, ids = make("llama"), inputs("llama")["input_ids"]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=True)
        plain = model(input_ids=ids[:, :2], past_key_values=plain.past_key_values, use_cache=True)
        first = model(input_ids=ids, use_cache=True)
        with observe_hidden_states(model) as layers:
            again = model(input_ids=ids[:, :2], past_key_values=first.past_key_values, use_cache=True)
    assert torch.equal(plain.last_hidden_state, again.last_hidden_state)
    assert again.past_key_values.get_seq_length() == 9
    assert not any("growth" in place for place in layers.statistics)


def test_padding_is_left_out():
    model, batch = make("bert"), inputs("bert")
    alone = run(model, {"input_ids": batch["input_ids"][:2, :5]}, perturb=False)
    mask = torch.zeros(3, 7, dtype=torch.long)
    mask[:2, :5] = 1  # the third row is nothing but padding
    padded = run(model, batch | {"attention_mask": mask}, perturb=False)
    for key, tensor in alone.state().items():
        if key.startswith("encoder.layer.0/in/"):
            torch.testing.assert_close(padded.state()[key], tensor, rtol=1e-6, atol=1e-6)
    with torch.no_grad(), observe_hidden_states(model) as layers:
        layers.expect(rows=torch.zeros(3, 7, dtype=torch.bool))
        model(**batch)
    statistics: dict[str, Any] = layers.statistics
    assert not any(int(r.count) for place, r in statistics.items() if "sample" not in place)
    assert all(row.tokens == 0 for row in layer_rows(layers.state(), layers.names()))
    positional = run(model, perturb=False)
    assert positional.state() == {}
    assert layer_rows({}, []) == []


def test_state_does_not_grow_with_the_text():
    model = make("gpt2")

    def sizes(passes):
        batches = [inputs("gpt2", batch=90, seed=seed) for seed in range(passes)]
        return {key: tensor.shape for key, tensor in run(model, *batches).state().items()}

    one, five = sizes(1), sizes(5)
    assert one == five
    assert one["h.0/in/sample:sample.priority"] == (SAMPLE_SIZE,)


def test_sample_does_not_depend_on_batches():
    model, batch = make("bert"), inputs("bert", batch=120)
    whole = run(model, batch, perturb=False)
    with torch.no_grad(), observe_hidden_states(model, perturb=False) as parts:
        for rows in (slice(60, 120), slice(0, 60)):
            parts.expect(texts=torch.arange(120)[rows])
            model(input_ids=batch["input_ids"][rows])
    other = run(model, batch, seed=1, perturb=False)
    one, two, third = (statistic(s, "encoder.layer.1/out/sample", StateSample) for s in (whole, parts, other))
    assert torch.equal(one.priority, two.priority)
    torch.testing.assert_close(one.state, two.state, rtol=1e-4, atol=1e-5)
    assert not torch.equal(one.priority, third.priority)


def test_sequences_that_are_chosen_by_name_do_not_depend_on_batches():
    model, batch = make("bert"), inputs("bert", batch=6)
    length = batch["input_ids"].shape[1]
    batch["attention_mask"] = (torch.arange(length) < torch.tensor([7, 3, 6, 5, 4, 2])[:, None]).long()
    names, some = torch.arange(6) * 7, torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    moved = torch.tensor([0, 1, 0, 1, 1, 0]).bool()
    kept = []
    for groups in ([[0, 1, 2, 3, 4, 5]], [[4], [1, 3, 0], [2, 5]]):
        with torch.no_grad(), observe_hidden_states(model, seed=2) as layers:
            for group in groups:
                widest = int(batch["attention_mask"][group].sum(1).max())
                layers.expect(texts=names[group], sampled=some[group], perturbed=moved[group])
                model(**{k: v[group, :widest] for k, v in batch.items()})
        kept.append(layers.state())
    whole, parts = kept
    assert whole.keys() == parts.keys()
    assert int(whole["encoder.layer.1/out/cosine:tally.count"]) == 7 + 6 + 5
    assert int(whole["encoder.layer.1/out/growth:tally.count"]) == 3 + 5 + 4
    for state in kept:  # the sample is of the tokens that the scatter is of
        assert sorted(state["encoder.layer.1/out/sample:sample.sequence"].tolist()) == [0] * 7 + [14] * 6 + [21] * 5
        assert int(state["encoder.layer.1/out/within:within.tokens"]) == 7 + 6 + 5
        assert int(state["encoder.layer.1/out/within:within.sequences"]) == 3
    for name, tensor in whole.items():
        if name.endswith("count"):
            assert torch.equal(tensor, parts[name]), name
        elif name.endswith("tally.mean"):
            torch.testing.assert_close(tensor, parts[name], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"expect\.perturbed: expected shape \(b,\)"):
        layers.expect(perturbed=moved[None])


def test_rows_hold_every_quantity():
    layers = run(make("bert"), inputs("bert", batch=40))
    rows = layer_rows(layers.state(), layers.names())
    assert [(r.block, r.stage) for r in rows] == [(n.block, n.stage) for n in layers.names()]
    assert len({tuple(r.columns()) for r in rows}) == 1  # the same columns everywhere
    out = next(r for r in rows if r.stage == "out")
    others = ("inverse", "contraction", *(q.name for q in (*LENS, *ADDED)))  # of norms, and of test_depth.py
    assert all(math.isfinite(v) for k, v in out.columns().items() if isinstance(v, float) and not k.startswith(others))
    assert out.tokens == out.perturbed == 280
    assert 1 <= out.participation_ratio <= out.effective_rank <= 24
    norm = next(r for r in rows if r.role == "norm")
    assert math.isfinite(norm.inverse.value)
    assert math.isfinite(norm.contraction.value)
    spectrum = layer_spectra(layers.state(), layers.names())["encoder.layer.0/out"]
    assert spectrum == sorted(spectrum, reverse=True)
    assert sum(spectrum) == pytest.approx(out.variance, rel=1e-9)
    assert read_covariance(layers.state(), layers.names(), "encoder.layer.1").shape == (24, 24)
    assert read_covariance({}, layers.names(), "encoder.layer.1") is None


def cloud(x):
    sample, spread = torch.as_tensor(x), MeanScatter.of(torch.as_tensor(x))
    return compare_with_gaussian(sample[:SAMPLE_SIZE], principal_axes(spread.mean, spread.covariance, len(x)), len(x))


def test_gaussian_clouds_are_inside_the_null_and_others_outside():
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(20, 20))
    inside = []
    for _ in range(8):
        found = cloud(rng.normal(size=(2000, 20)) @ mix + 3)
        inside += [
            low <= s <= high for s, low, high in zip(found.observed, found.null_low, found.null_high, strict=True)
        ]
        assert (found.rank, found.principal) == (20, 16)
    assert np.mean(inside) > 0.6  # a tenth is expected outside, and the band is made of 16 clouds
    heavy = cloud(rng.standard_t(3, size=(2000, 20)) @ mix)
    assert heavy.observed.kurtosis > heavy.null_high.kurtosis
    skewed = cloud((rng.exponential(size=(2000, 20)) - 1) @ mix)
    assert skewed.observed.skewness > skewed.null_high.skewness
    two = cloud(np.sign(rng.normal(size=(2000, 1))) + 0.1 * rng.normal(size=(2000, 1)))
    assert two.observed.sliced_w2 > 3 * two.null_high.sliced_w2
    assert two.observed.kurtosis < two.null_low.kurtosis
    t = rng.uniform(size=(2000, 1)) * 6
    curve = cloud(np.concatenate([np.cos(t), np.sin(t), t, np.cos(2 * t), np.sin(3 * t)], 1))
    assert curve.observed.lle_error < 0.2 * curve.null_low.lle_error


def test_statistics_of_a_sample_by_hand():
    rng = np.random.default_rng(1)
    y = rng.normal(size=(40, 3))
    b1 = np.mean([(a @ b) ** 3 for a in y for b in y])
    b2 = np.mean([(a @ a) ** 2 for a in y]) / 15
    assert mardia(torch.as_tensor(y)) == pytest.approx((b1, b2), rel=1e-12)
    value = np.array([4.0, 2.0, 1.0, 0.0])
    p = value[:3] / 7
    assert float(effective_rank(torch.as_tensor(value))) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-12)
    assert participation_ratio(torch.as_tensor(value)) == pytest.approx(49 / 21, rel=1e-12)
    assert effective_rank(torch.zeros(3)) == participation_ratio(torch.zeros(3)) == 0
    line = torch.linspace(0, 1, 64, dtype=torch.float64)[:, None] ** torch.ones(1, 5, dtype=torch.float64)
    assert lle_error(line) < 1e-2


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_a_vector_near_the_mean_does_not_decide_the_error_of_reconstruction(rank):
    x = torch.as_tensor(np.random.default_rng(rank).normal(size=(128, rank)))
    central = torch.cat([x[1:].mean(0, keepdim=True) + 1e-9, x[1:]])
    assert lle_error(central) == pytest.approx(lle_error(x), rel=0.2)


def test_few_or_equal_states_have_no_shape():
    few = cloud(np.random.default_rng(0).normal(size=(5, 3)))
    assert all(math.isnan(v) for v in few.observed)
    same = cloud(np.ones((100, 3)))
    assert same.rank == 0
    assert all(math.isnan(v) for v in same.null_mean)


def test_spread_and_sample_merge():
    x = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e3
    parts = MeanScatter.of(x[:0]).merge(MeanScatter.of(x[:1])).merge(MeanScatter.of(x[1:]))
    torch.testing.assert_close(parts.covariance, x.T.cov(correction=0), rtol=1e-10, atol=1e-10)
    names = torch.arange(50) // 7
    centred = [CentredStates.of(x[rows], names[rows]) for rows in (slice(0, 50), slice(0, 21), slice(21, 50))]
    whole, one, two = (WithinScatter.of(c) for c in centred)
    torch.testing.assert_close(two.merge(one).triangle, whole.triangle, rtol=1e-12, atol=1e-12)
    assert [int(part.sequences) for part in (whole, one.merge(two))] == [8, 8]
    again = MeanScatter.of_sequences(whole, centred[0])
    torch.testing.assert_close(again.triangle, MeanScatter.of(x).triangle, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again.mean, x.mean(0), rtol=1e-14, atol=0)
    rank = priorities(3, torch.arange(50), torch.tensor(0))
    assert len(set(rank.tolist())) == 50
    assert bool((rank >= 0).all())
    halves = StateSample.of(x[30:], rank[30:]).merge(StateSample.of(x[:30], rank[:30]))
    assert torch.equal(halves.state, x[rank.argsort()])
    spread = unflatten(dict(reversed(flatten({"a/b": parts}).items())))["a/b"]
    assert isinstance(spread, MeanScatter)
    assert torch.equal(spread.scatter, parts.scatter)


def test_priorities_look_uniform():
    p = priorities(0, torch.arange(200)[:, None], torch.arange(50)).double() / 2.0**63
    assert abs(float(p.mean()) - 0.5) < 4.5 / math.sqrt(12 * 10_000)
    assert abs(float((p[:, 1:] * p[:, :-1]).mean()) - 0.25) < 0.01


def test_blocks_of_lists():
    model = make("t5")
    name = "decoder.block.1.layer.1.EncDecAttention"
    assert name in attention_modules(model)
    assert block_of(model, name) == "decoder.block.1"
    assert block_of(model, name, whole=False) == "decoder.block.1.layer.1"
    lonely = model.encoder.block[0].layer[0]
    assert block_of(lonely, "SelfAttention") is None
    with observe_hidden_states(lonely) as layers:
        assert "no attention inside a list" in layers.notes["model"]


def test_wrong_states_are_refused():
    with pytest.raises(ValueError, match=r"layers.state: expected keys key:type.field with a type in .*, got 'a:b.c'"):
        merge_layers({"a:b.c": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"expected every field of x, got mean, triangle amiss"):
        layer_rows({"x:spread.count": torch.zeros(())}, [])
    with (
        observe_hidden_states(make("bert")) as layers,
        pytest.raises(ValueError, match=r"HiddenStateObserver.expect.rows: expected shape \(b, L\)"),
    ):
        layers.expect(rows=torch.ones(3))
