"""Every head quantity against float64 sums over the weights that eager attention returns, for every kind of model."""

from dataclasses import replace

import pytest
import torch

from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.statistics.heads import (
    DEFAULT,
    QUANTITIES,
    head_quantities,
    query_rows,
    received_attention,
    sampled_statistics,
    select_quantities,
)
from tests.observatory.tiny_models import inputs as inputs_of
from tests.observatory.tiny_models import make

ALL = frozenset(DEFAULT)
KINDS = ("bert", "gpt2", "llama", "t5", "gptoss", "vit", "whisper", "gemma2_capped")
PADDED = ("bert", "gpt2", "t5")


def build(kind):
    """A small random model of a kind, and inputs with padding where the kind has masks."""
    model, inputs = make(kind), inputs_of(kind, length=9)
    if kind == "gemma2_capped":
        model.set_attn_implementation("eager")
    if kind in PADDED:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, 6:] = 0
        inputs = inputs | {"attention_mask": mask}
    return model, inputs


each_kind = pytest.mark.parametrize("kind", KINDS)


def calls_of(model, inputs):
    calls = []
    with torch.no_grad(), observe_attention(model, calls.append):
        out = model(**inputs)
    return out[0], calls


def table(call):
    """Scores, log weights and values of every pair, in float64, from the definitions."""
    group = call.eta.shape[1] // call.key.shape[1]
    eta, key, value = call.eta.double(), *(x.double().repeat_interleave(group, 1) for x in (call.key, call.value))
    score = eta @ key.mT
    w = torch.zeros_like(score)
    if call.support.log_weights is not None:
        w = w + call.support.log_weights
    if call.support.mask is not None:
        w = w.masked_fill(~call.support.mask, -torch.inf)
    if call.support.causal:
        w = w.masked_fill(~torch.ones(score.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if call.support.sink is not None:
        sink = call.support.sink.double()[..., None, None].expand(*score.shape[:-1], 1)
        score, w = torch.cat([score, 0 * sink], -1), torch.cat([w, sink], -1)
        key, value = (torch.cat([x, torch.zeros_like(x[..., :1, :])], -2) for x in (key, value))
    return score, w, key, value


@each_kind
def test_the_model_computes_what_it_always_does(kind):
    model, inputs = build(kind)
    with torch.no_grad():
        plain = model(**inputs)[0]
    before = model.config._attn_implementation
    observed, calls = calls_of(model, inputs)
    assert torch.equal(plain, observed)
    assert model.config._attn_implementation == before
    assert len(calls) == {"t5": 6, "whisper": 6}.get(kind, 2)
    with pytest.raises(RuntimeError, match="stop"), observe_attention(model, lambda call: None):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(plain, model(**inputs)[0])


@each_kind
def test_weights_are_those_of_eager_attention(kind):
    """The measure that is observed gives the weights that the model itself returns."""
    model, inputs = build(kind)
    _, calls = calls_of(model, inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    eager = {id(w): w for name in names for w in (getattr(out, name, None) or ())}
    matched = 0
    for call in calls:
        score, w, *_ = table(call)
        p = torch.softmax(score + w, -1)[..., : call.key.shape[-2]].nan_to_num(0)
        rows = torch.ones(p.shape[0], 1, p.shape[2], 1, dtype=torch.bool)
        rows = rows if call.rows is None else call.rows[:, None, :, None]
        gaps = [((p - e).abs() * rows).max() for e in eager.values() if e.shape == p.shape]
        assert gaps
        assert min(gaps) < 1e-4  # float32 scores of T5 reach hundreds
        matched += 1
    assert matched == len(calls)


@each_kind
def test_every_quantity_by_its_definition(kind):
    model, inputs = build(kind)
    for call in calls_of(model, inputs)[1]:
        score, w, key, value = table(call)
        logits = score + w
        g = torch.logsumexp(logits, -1)
        p = torch.softmax(logits, -1)
        seen = (w > -torch.inf).double() if not call.capped else torch.isfinite(w).double()
        mean_k, mean_v = p @ key, p @ value
        spread = (p[..., None] * (key[..., None, :, :] - mean_k[..., None, :]).square()).sum((-2, -1))
        forget = (p[..., None] * (value[..., None, :, :] - mean_v[..., None, :]).square()).sum((-2, -1))
        base = torch.where(seen > 0, 0.0 if call.capped else w, -torch.inf)
        base = base - torch.logsumexp(base, -1, keepdim=True)
        kl = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - base.nan_to_num(neginf=0)), 0).sum(-1)
        expected = {
            "log_normalizer": g,
            "entropy": -torch.xlogy(p, p).sum(-1),
            "effective_atoms": 1 / p.square().sum(-1),
            "first_mass": p[..., 0],
            "kl_to_base": kl,
            "condensed": (kl > seen.sum(-1).log() - 1).double(),
            "fisher_trace": call.scale * spread,
            "collapse_loss": forget,
        }
        if not call.capped:
            visible = slice(None) if call.support.sink is None else slice(0, -1)
            expected["max_score"] = torch.where(w > -torch.inf, score, -torch.inf)[..., visible].amax(-1)
        if call.support.sink is not None:
            expected["sink_mass"] = p[..., -1]
        found = head_quantities(call, ALL)
        rows = torch.ones_like(g, dtype=torch.bool) if call.rows is None else call.rows[:, None].expand_as(g)
        for name, truth in expected.items():
            assert found[name][~rows].isnan().all(), name
            torch.testing.assert_close(
                found[name][rows].double(), truth[rows], rtol=1e-4, atol=1e-4, msg=f"{kind} {name}"
            )
        cheap = head_quantities(call, frozenset({"log_normalizer", "entropy"}))
        assert set(cheap) == {"log_normalizer", "entropy"}
        torch.testing.assert_close(cheap["entropy"][rows].double(), expected["entropy"][rows], rtol=1e-4, atol=1e-4)


@each_kind
def test_sampled_rows_and_received_attention(kind):
    model, inputs = build(kind)
    for call in calls_of(model, inputs)[1]:
        score, w, key, value = table(call)
        p = torch.softmax(score + w, -1)
        index = torch.tensor([1, 3])
        rows = query_rows(call, 1, index).p.double()
        torch.testing.assert_close(rows, p[1][:, index, : rows.shape[-1]], rtol=0, atol=1e-6)
        heads, d = call.eta.shape[1], call.eta.shape[-1]
        product = torch.randn(heads, d, call.value.shape[-1], dtype=torch.float64)
        found = {k: v.double() for k, v in sampled_statistics(call, [(1, index)], product).quantities.items()}
        for head in range(heads):
            for j, i in enumerate(index.tolist()):
                q, k, v = p[1, head, i], key[1, head], value[1, head]  # the sink, where there is one, is an atom at 0
                centred = k - q @ k
                spread = call.scale * centred.T @ (q[:, None] * centred)
                volume = torch.logdet(torch.eye(d) + spread)
                torch.testing.assert_close(found["fisher_volume"][head, j], volume, atol=1e-4, rtol=1e-4)
                if not call.capped:
                    crossed = call.scale * (v - q @ v).T @ (q[:, None] * centred) @ product[head]
                    volume = torch.linalg.slogdet(torch.eye(len(crossed)) + crossed).logabsdet
                    torch.testing.assert_close(found["head_volume"][head, j], volume, atol=1e-3, rtol=1e-3)
                q = q[: call.key.shape[-2]]
                top = q.sort(descending=True).values.cumsum(0)
                assert found["k90"][head, j] == int((top < 0.9 * q.sum() - 1e-9).sum()) + 1
        taken = received_attention(call, 1)
        tokens = torch.ones(p.shape[2], dtype=torch.bool) if call.rows is None else call.rows[1]
        sigma = p[1][:, tokens].mean(1)[:, : call.key.shape[-2]]
        torch.testing.assert_close(taken["received_top"][:, 0].double(), sigma.amax(-1), rtol=1e-4, atol=1e-5)


def test_the_gaussian_fit_is_exact_for_small_queries():
    model, inputs = build("bert")
    call = calls_of(model, inputs)[1][0]
    small = sampled_statistics(replace(call, eta=1e-3 * call.eta), [(1, torch.arange(9))], None).sums
    large = sampled_statistics(replace(call, eta=20 * call.eta), [(1, torch.arange(9))], None).sums
    assert (1 - small["gauss/left"] / small["gauss/whole"] > 0.999).all()
    assert (1 - large["gauss/left"] / large["gauss/whole"] < 0.9).any()


def test_names_are_checked():
    assert select_quantities(["cheap"]) == {"log_normalizer", "entropy"}
    assert select_quantities(None) == {q.name for q in QUANTITIES}
    with pytest.raises(ValueError, match="entropy"):
        select_quantities(["entropi"])


def test_what_cannot_be_heard_says_so():
    with pytest.raises(TypeError, match="transformers model"), observe_attention(torch.nn.Linear(2, 2), print):
        pass
