"""Weights of heads: what they give is what the model computes."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.structure import Norm, NotFound, attention_modules, norm_of
from cumulant.observatory.hooks.weights import (
    HeadWeights,
    _projections,  # pyright: ignore[reportPrivateUsage]
    ascent_index,
    head_weights,
)
from cumulant.residual import gradientness
from tests.observatory.tiny_models import inputs, make

KINDS = ["bert", "gpt2", "llama", "t5", "gemma2", "gptoss", "vit", "whisper", "opt", "opt_post", "bart", "mbart"]
READ = ("query", "key", "value")


def reason(found: object) -> str:
    assert isinstance(found, NotFound)
    return found.reason


def seen(model, kind, name):
    """One pass: the attention call of ``name``, what its projections read, and what its output projection wrote."""
    module, read, wrote, calls = model.get_submodule(name), {}, [], []
    handles = []
    projections = _projections(module)
    assert not isinstance(projections, NotFound)
    for part, (child, _) in projections.items():

        def keep(m, args, part=part):
            read[part] = args[0]

        handles.append(getattr(module, child).register_forward_pre_hook(keep))
    parent = model.get_submodule(name.rpartition(".")[0])
    last = [getattr(module, c) for c in ("o_proj", "out_proj", "c_proj", "o") if hasattr(module, c)]
    last = last[0] if last else parent.output.dense
    handles.append(last.register_forward_hook(lambda m, args, output: wrote.append(output)))
    with torch.no_grad(), observe_attention(model, calls.append):
        model(**inputs(kind))
    for handle in handles:
        handle.remove()
    return next(c for c in calls if c.name == name), read, wrote[0]


@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_those_of_the_model(kind):
    model = make(kind, biases=False)
    for name in attention_modules(model):
        w = head_weights(model, name)
        assert isinstance(w, HeadWeights), w
        call, read, wrote = seen(model, kind, name)
        crossed = any(s in name for s in ("encoder_attn", "EncDec"))
        assert w.crossed == crossed
        behind_norm = kind not in ("bert", "opt_post") and not (kind == "bart" and not crossed)
        assert (w.gain is not None) == behind_norm
        bare = {k: v[:, 0].double() for k, v in read.items()}  # position 0: the rotation is the identity
        if w.gain is not None:
            bare["query"] = bare["query"] / w.gain
            if not crossed:
                bare["key"], bare["value"] = bare["key"] / w.gain, bare["value"] / w.gain
        q, k, v = (torch.einsum("hdD,bD->bhd", getattr(w, part), bare[part]) for part in READ)
        group = q.shape[1] // call.key.shape[1]
        # Whisper, OPT and their kin scale the query themselves and pass 1
        scale = call.scale if call.scale != 1 or kind == "t5" else model.get_submodule(name).scaling
        yarn = getattr(getattr(model, "rotary_emb", None), "attention_scaling", 1.0)
        torch.testing.assert_close(call.eta[:, :, 0].double(), yarn * scale * q, rtol=1e-4, atol=1e-5)
        keys = call.key.repeat_interleave(group, 1)[:, :, 0].double()
        torch.testing.assert_close(keys, yarn * k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(call.value.repeat_interleave(group, 1)[:, :, 0].double(), v, rtol=1e-4, atol=1e-5)
        out = torch.einsum("hDe,bhqe->bqD", w.output, call.output.double())
        torch.testing.assert_close(out, wrote.double().reshape(out.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_norms_on_queries_leave_the_direction(kind):
    model = make(kind, biases=False)
    name = "layers.1.self_attn"
    w = head_weights(model, name)
    assert isinstance(w, HeadWeights)
    assert w.normed
    call, read, _ = seen(model, kind, name)
    bare = read["query"][:, 0].double() / (1 if w.gain is None else w.gain)
    q = torch.einsum("hdD,bD->bhd", w.query, bare)
    cosine = torch.cosine_similarity(q, call.eta[:, :, 0].double(), dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-5)


def test_gain_of_gemma_is_one_more_than_it_stores():
    model = make("gemma2")
    w = head_weights(model, "layers.0.self_attn")
    assert isinstance(w, HeadWeights)
    stored = model.layers[0].input_layernorm.weight.double()
    torch.testing.assert_close(w.gain, 1 + stored, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "gain", "centred"),
    [(nn.LayerNorm(5), 1.0, True), (nn.RMSNorm(5), 1.0, False), (nn.LayerNorm(5, elementwise_affine=False), 1.0, True)],
)
def test_norms_are_known_by_what_they_do(module, gain, centred):
    norm = norm_of(module, 5)
    assert isinstance(norm, Norm)
    assert norm.centred == centred
    assert norm.gain.tolist() == [gain] * 5


def test_what_is_no_norm_is_unknown():
    assert isinstance(norm_of(nn.Tanh(), 5), NotFound)
    assert "does not take" in reason(norm_of(nn.LayerNorm(4), 5))


def test_unknown_says_why():
    assert "query_key_value" in reason(head_weights(make("neox"), "layers.0.attention"))
    model = make("llama")
    attention = model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    assert "query projection" in reason(head_weights(model, "layers.0.self_attn"))
    attention.q_proj = nn.Linear(24, 48, bias=False)
    assert "4 heads but query rows for 8" in reason(head_weights(model, "layers.0.self_attn"))
    lonely = make("bert").encoder.layer[0].attention
    assert "no list of blocks" in reason(head_weights(lonely, "self"))
    with pytest.raises(
        ValueError, match=r"head_weights.name: expected the path of a module of LlamaModel, got 'nowhere'"
    ):
        head_weights(model, "nowhere")


def test_an_operation_between_norm_and_projection_is_not_guessed():
    model = make("vit")
    block = model.layers[0]
    block.layernorm_before = nn.Sequential(block.layernorm_before, nn.Tanh())
    assert "neither the state" in reason(head_weights(model, "layers.0.attention"))


def test_finding_weights_leaves_no_trace():
    model, calls, hooked = make("whisper"), [], []
    handle = model.decoder.layers[0].register_forward_hook(lambda *args: hooked.append(1))
    state = torch.get_rng_state()
    with observe_attention(model, calls.append):
        assert isinstance(head_weights(model, "decoder.layers.0.encoder_attn"), HeadWeights)
    handle.remove()
    assert not calls
    assert not hooked
    assert torch.equal(state, torch.get_rng_state())


def weights(dim=6, heads=3, d=2):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, d, dim, dtype=torch.float64, generator=g) for _ in range(3))
    return HeadWeights(q, k, v, torch.randn(heads, dim, d, dtype=torch.float64, generator=g), None, False, False)


@pytest.mark.parametrize("rank", [6, 4])
def test_ascent_index_is_the_definition(rank):
    w = weights()
    a = torch.randn(6, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    s = a @ a.mT
    value, basis = torch.linalg.eigh(s)
    kept = value > 1e-10
    root = basis[:, kept] * value[kept].sqrt() @ basis[:, kept].mT
    inverse = basis[:, kept] / value[kept].sqrt() @ basis[:, kept].mT
    for h, index in enumerate(ascent_index(w, s, 0.7).tolist()):
        b = 0.7 * root @ w.query[h].mT @ w.key[h] @ root
        v = inverse @ w.output[h] @ w.value[h] @ root
        assert index == pytest.approx(float((v * b).sum() / (v.norm() * b.norm())), abs=1e-10)


def test_ascent_index_of_white_states_is_gradientness():
    w = weights()
    index = ascent_index(w, torch.eye(6))
    torch.testing.assert_close(index, gradientness(w.query, w.key, w.value, w.output), rtol=0, atol=1e-12)
    assert ascent_index(w, torch.zeros(6, 6)).tolist() == [0, 0, 0]


def test_ascent_index_refuses():
    w = weights()
    with pytest.raises(ValueError, match=r"ascent_index.covariance: expected shape \(D=6, D=6\), got \(5, 5\)"):
        ascent_index(w, torch.eye(5))
    with pytest.raises(ValueError, match=r"expected self-attention, got queries from 6 and keys from 4 channels"):
        ascent_index(w._replace(key=w.key[..., :4]), torch.eye(6))
