"""Multi-head layers beside torch's, their masks, records and edges, and the two closures of a head."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch import nn

from cumulant import Gaussian
from cumulant.attention import attend
from cumulant.kernels import moments
from cumulant.nn import (
    GaussianHead,
    MixtureHead,
    MultiheadAttention,
    Support,
    approximate_by_gaussian,
    approximate_by_mixture,
)
from cumulant.nn.calls import is_observed, on_attention, report_attention
from cumulant.nn.masks import as_log_weights, as_one_mask, support_of_masks

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4


def normal(*size, seed=0, dtype=torch.float64):
    return torch.randn(*size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def blocked(*size, seed=0):
    """Some True entries, none of them on the first key."""
    mask = torch.rand(*size, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 0] = False
    return mask


def pair(dtype=torch.float64, **options):
    """torch's layer with parameters all of which matter, and ours with the same."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=i, dtype=dtype))
    ours = MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
CONSTRUCTORS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 6, "vdim": 9, "batch_first": True},
    "equal other widths": {"kdim": 6, "vdim": 6},
    "one more key": {"add_bias_kv": True, "batch_first": True},
    "a zero": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": blocked(BATCH, KEYS)},
    "mask": {"attn_mask": blocked(QUERIES, KEYS, seed=1)},
    "mask by head": {"attn_mask": blocked(BATCH * HEADS, QUERIES, KEYS, seed=2)},
    "bias": {"attn_mask": normal(QUERIES, KEYS, seed=3)},
    "minus infinity": {"attn_mask": torch.where(blocked(QUERIES, KEYS, seed=1), -torch.inf, 0.0).double()},
    "bias by head and padding": {
        "attn_mask": normal(BATCH * HEADS, QUERIES, KEYS, seed=4),
        "key_padding_mask": torch.where(blocked(BATCH, KEYS), -torch.inf, 0.3).double(),
    },
    "mask and padding": {
        "attn_mask": blocked(QUERIES, KEYS, seed=1),
        "key_padding_mask": blocked(BATCH, KEYS, seed=5),
    },
}


def compare(theirs, ours, inputs, tolerance=1e-12, **options):
    """Output, weights and every gradient of both layers."""
    results = []
    for layer in (theirs, ours):
        given = [x.clone().requires_grad_() for x in inputs]
        out, weights = layer(*given, **options)
        loss = (out * normal(*out.shape, seed=9, dtype=out.dtype)).sum()
        if weights is not None:
            loss = loss + (weights * normal(*weights.shape, seed=8, dtype=out.dtype)).sum()
        named = dict(layer.named_parameters())
        grads = torch.autograd.grad(loss, [*given, *named.values()])
        results.append([out, weights, *grads[:3], *(g for _, g in sorted(zip(named, grads[3:], strict=True)))])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert (a - b).abs().max() < tolerance


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_values_and_gradients_are_torch_s(options, masks, need_weights):
    theirs, ours = pair(**options)
    sizes = ((QUERIES, WIDTH), (KEYS, ours.kdim), (KEYS, ours.vdim))
    inputs = [normal(BATCH, *size, seed=i) for i, size in enumerate(sizes)]
    if not ours.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    compare(theirs, ours, inputs, need_weights=need_weights, average_attn_weights=False, **masks)


@pytest.mark.parametrize("size", [QUERIES, 200], ids=["reference kernel", "fused kernel"])
@pytest.mark.parametrize("padding", [None, "Boolean"])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_in_float32_to_1e_6(size, padding, causal):
    """Of the largest number, values and gradients; the layers start as torch starts them."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = MultiheadAttention.of(theirs)
    mask = {"attn_mask": torch.ones(size, size, dtype=torch.bool).triu(1), "is_causal": True} if causal else {}
    mask |= {} if padding is None else {"key_padding_mask": blocked(BATCH, size)}
    results = []
    for layer in (theirs, ours):
        x = normal(BATCH, size, WIDTH, dtype=torch.float32).requires_grad_()
        out = layer(x, x, x, need_weights=False, **mask)[0]
        loss = (out * normal(*out.shape, seed=1, dtype=torch.float32)).mean()
        results.append([out, *torch.autograd.grad(loss, [x, *theirs.parameters()])])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 1e-6 * max(1, float(a.detach().abs().max()))


@pytest.mark.parametrize("need_weights", [False, True])
def test_one_sequence_without_a_batch_axis(need_weights):
    theirs, ours = pair(add_bias_kv=True)
    x, c = normal(QUERIES, WIDTH), normal(KEYS, WIDTH, seed=1)
    masks = {"key_padding_mask": blocked(KEYS), "attn_mask": blocked(HEADS, QUERIES, KEYS, seed=2)}
    compare(theirs, ours, (x, c, c), need_weights=need_weights, **masks)
    heads = ours.attend(x, c, c, **masks).heads
    assert heads.entropy.shape == (HEADS, QUERIES)


def test_the_hint_is_causal_with_and_without_the_mask():
    _, ours = pair(batch_first=True)
    x = normal(BATCH, QUERIES, WIDTH)
    expected = ours(x, x, x, attn_mask=CAUSAL)[0]
    floating = torch.where(CAUSAL, -torch.inf, 0.0).double()
    for options in ({}, {"attn_mask": CAUSAL}, {"attn_mask": floating}):
        for need_weights in (False, True):
            found = ours(x, x, x, is_causal=True, need_weights=need_weights, **options)[0]
            assert (found - expected).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"attn_mask: expected the causal mask, as is_causal says, got another mask"):
        ours(x, x, x, is_causal=True, attn_mask=CAUSAL.T)


def test_the_extra_key_is_seen_under_the_hint_too():
    """torch's layer hides it when the hint stands alone, and shows it when weights are asked for."""
    theirs, ours = pair(batch_first=True, add_bias_kv=True)
    x = normal(BATCH, QUERIES, WIDTH)
    expected = theirs(x, x, x, attn_mask=CAUSAL)[0]
    found = ours(x, x, x, is_causal=True, need_weights=False)[0]
    assert (found - expected).abs().max() < 1e-12
    assert (theirs(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False)[0] - expected).abs().max() > 1e-3


def test_weights_are_averaged_as_torch_does():
    theirs, ours = pair(add_zero_attn=True)
    x = normal(QUERIES, BATCH, WIDTH)
    expected, found = (layer(x, x, x)[1] for layer in (theirs, ours))
    assert found.shape == (BATCH, QUERIES, QUERIES + 1)
    assert (found - expected).abs().max() < 1e-12


def test_state_dicts_and_initial_values_are_torch_s():
    for options in CONSTRUCTORS.values():
        torch.manual_seed(7)
        theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
        torch.manual_seed(7)
        ours = MultiheadAttention(WIDTH, HEADS, **options)
        assert [*ours.state_dict()] == [*theirs.state_dict()]
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name])
        theirs.load_state_dict(MultiheadAttention(WIDTH, HEADS, **options).state_dict(), strict=True)


def test_a_layer_of_torch_is_taken_over_in_one_line():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, padding = normal(BATCH, QUERIES, WIDTH), blocked(BATCH, QUERIES)
    expected = layer(x, src_key_padding_mask=padding)
    theirs = layer.self_attn
    layer.self_attn = MultiheadAttention.of(theirs)  # pyright: ignore[reportAttributeAccessIssue]
    assert layer.self_attn.in_proj_weight is theirs.in_proj_weight
    assert layer.self_attn.out_proj.weight is theirs.out_proj.weight
    assert (layer(x, src_key_padding_mask=padding) - expected).abs().max() < 1e-12
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.where(CAUSAL, -torch.inf, 0.0).double()
    assert torch.isfinite(stack(x, mask=mask, is_causal=True)).all()
    with pytest.raises(TypeError, match=r"MultiheadAttention.of: expected a multi-head attention layer, got Linear"):
        MultiheadAttention.of(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


def test_the_record_is_each_head_s_family():
    _, ours = pair(batch_first=True, add_zero_attn=True)
    x, mask = normal(BATCH, QUERIES, WIDTH), blocked(BATCH, QUERIES)
    found = ours.attend(x, x, x, key_padding_mask=mask)
    assert (found.output - ours(x, x, x, key_padding_mask=mask)[0]).abs().max() < 1e-12
    parts = nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2).detach().numpy() for part in parts)
    logits = q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS)
    logits = np.where(mask.numpy()[:, None, None], -np.inf, logits)
    logits = np.concatenate([logits, np.zeros_like(logits[..., :1])], -1)
    p = softmax(logits, -1)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    assert np.abs(found.heads.log_normalizer.detach().numpy() - logsumexp(logits, -1)).max() < 1e-12
    assert np.abs(found.heads.entropy.detach().numpy() - entropy).max() < 1e-12
    assert np.abs(found.heads.sink_mass.detach().numpy() - p[..., -1]).max() < 1e-12


def test_the_log_normalizer_trains():
    _, ours = pair(batch_first=True)
    x = normal(2, 3, WIDTH)

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ours

        def forward(self, x):
            found = self.layer.attend(x, x, x, is_causal=True)
            return found.heads.log_normalizer.square().mean() + found.output.sum()

    module = Square()
    assert torch.autograd.gradcheck(module, (x.clone().requires_grad_(),))
    module(x).backward()
    assert ours.in_proj_weight.grad.abs().sum() > 0


@pytest.mark.long
def test_gradients_of_gradients_exist():
    _, ours = pair(batch_first=True)
    x = normal(1, 3, WIDTH).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ours(x, x, x, need_weights=False)[0], (x,))


def test_a_query_that_sees_nothing_has_the_bias_as_output():
    _, ours = pair(batch_first=True)
    x = normal(2, 4, WIDTH).requires_grad_()
    padding = torch.tensor([[True] * 4, [False] * 4])
    for need_weights in (False, True):
        out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        assert torch.equal(out[0], ours.out_proj.bias.expand(4, -1))
        assert weights is None or torch.equal(weights[0], torch.zeros(4, 4, dtype=x.dtype))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad[0], torch.zeros_like(grad[0]))
        assert grad.isfinite().all()
    heads = ours.attend(x, x, x, key_padding_mask=padding).heads
    assert (heads.log_normalizer[0] == -torch.inf).all()
    assert (heads.entropy[0] == 0).all()
    _, with_zero = pair(batch_first=True, add_zero_attn=True)
    assert (with_zero.attend(x, x, x, key_padding_mask=padding).heads.sink_mass[0] == 1).all()


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 1, 1)])
def test_empty_and_single(sizes):
    batch, q, n = sizes
    _, ours = pair(batch_first=True)
    x, c = normal(batch, q, WIDTH), normal(batch, n, WIDTH, seed=1)
    for need_weights in (False, True):
        out = ours(x, c, c, need_weights=need_weights)[0]
        assert out.shape == (batch, q, WIDTH)
        if n == 0:
            assert torch.equal(out, ours.out_proj.bias.expand(batch, q, -1))
        if n == 1:
            value = nn.functional.linear(c, ours.in_proj_weight[-WIDTH:], ours.in_proj_bias[-WIDTH:])
            assert (out - ours.out_proj(value)).abs().max() < 1e-12


def test_a_sample_does_not_depend_on_its_batch_mates():
    _, ours = pair(batch_first=True)
    x, other = normal(3, 4, WIDTH), normal(3, 4, WIDTH, seed=1)
    other[0] = x[0]
    assert torch.equal(ours(x, x, x, need_weights=False)[0][0], ours(other, other, other, need_weights=False)[0][0])


def test_half_precision_keeps_its_type():
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = normal(2, 4, WIDTH, dtype=torch.float32)
    expected = ours(x, x, x, need_weights=False)[0]
    with torch.autocast("cpu", dtype=torch.float16):
        found = ours(x, x, x, need_weights=False)[0]
    assert found.dtype in (torch.float16, torch.float32)
    assert (found - expected).abs().max() < 1e-2


def test_dropout_of_weights_is_torch_s():
    torch.manual_seed(0)
    theirs, ours = pair(batch_first=True, dropout=0.3)
    x = normal(1, 400, WIDTH)
    assert (ours.eval()(x, x, x)[0] - theirs.eval()(x, x, x)[0]).abs().max() < 1e-12
    weights = ours.train()(x, x, x, average_attn_weights=False)[1]
    kept = weights > 0
    share = kept.double().mean().item()
    assert abs(share - 0.7) < 4.5 * math.sqrt(0.21 / weights.numel())
    full = ours.eval()(x, x, x, average_attn_weights=False)[1]
    assert (weights[kept] - full[kept] / 0.7).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"attend: expected probabilities, got weights with dropout=0.3"):
        ours.train().attend(x, x, x)


def test_dropout_of_keys_stays_in_the_family():
    torch.manual_seed(0)
    layer = MultiheadAttention(WIDTH, HEADS, dropout=0.4, drop="keys", batch_first=True, dtype=torch.float64)
    x, padding = normal(2, 50, WIDTH), blocked(2, 50)
    weights = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
    assert (weights.sum(-1) - 1).abs().max() < 1e-12
    seen = (weights > 0).double().mean((1, 2))
    assert (seen[padding] == 0).all()
    assert abs(seen[~padding].mean().item() - 0.6) < 0.02
    heads = layer.attend(x, x, x, key_padding_mask=padding).heads
    plain = layer.eval().attend(x, x, x, key_padding_mask=padding).heads
    assert (heads.log_normalizer < plain.log_normalizer).all()


@pytest.mark.long
def test_torch_compiles_it():
    _, ours = pair(batch_first=True)
    x = normal(2, 80, WIDTH)
    run = torch.compile(lambda x: ours(x, x, x, need_weights=False, is_causal=True)[0], backend="aot_eager")
    assert (run(x) - ours(x, x, x, need_weights=False, is_causal=True)[0]).abs().max() < 1e-12


def test_listeners_hear_what_reproduces_the_output():
    _, ours = pair(batch_first=True, add_zero_attn=True)
    x, padding, calls = normal(BATCH, QUERIES, WIDTH), blocked(BATCH, QUERIES), []
    with on_attention(calls.append):
        for need_weights in (False, True):
            ours(x, x, x, key_padding_mask=padding, need_weights=need_weights, is_causal=True)
    assert not is_observed()
    assert len(calls) == 2
    for call in calls:
        assert call.module is ours
        assert torch.equal(call.rows, ~padding)
        assert call.scale == (WIDTH // HEADS) ** -0.5
        assert not call.output.requires_grad
        mean = moments(call.eta, call.key, call.value, statistics=("mean",), **call.support.arguments()).mean
        assert (mean - call.output).abs().max() < 1e-12
    ours(x, x, x)
    assert len(calls) == 2


def test_a_listener_that_fails_is_still_removed():
    def fails(call):
        raise KeyError("listener")

    ours, x = MultiheadAttention(4, 2), torch.zeros(1, 1, 4)
    with pytest.raises(KeyError), on_attention(fails):
        ours(x, x, x)
    assert not is_observed()


def test_telling_wants_four_axes():
    x = torch.zeros(1, 2, 3)
    report_attention(nn.Identity(), x, x, x, x)  # nobody listens
    with (
        on_attention(lambda call: None),
        pytest.raises(ValueError, match=r"report_attention.eta: expected four axes .* got \(1, 2, 3\)"),
    ):
        report_attention(nn.Identity(), x, x, x, x)


def test_what_queries_see_in_three_forms():
    """Support of `moments`, dense scores and log weights say the same."""
    eta, key = normal(2, HEADS, 5, 3), normal(2, HEADS, 5, 3, seed=1)
    bias = normal(5, 5, seed=2)
    for options in (
        {"is_causal": True},
        {"is_causal": True, "key_padding_mask": blocked(2, 5)},
        {"key_padding_mask": normal(2, 5, seed=3)},
        {"attn_mask": bias, "key_padding_mask": blocked(2, 5)},
        {},
    ):
        seen = support_of_masks("test", eta[:, 0], key[:, 0], heads=HEADS, **options)
        dense = torch.logsumexp(seen.weigh(eta @ key.mT), -1)
        for form in (
            seen.arguments(),
            as_one_mask(seen, 5, HEADS).arguments(),
            {"log_weights": as_log_weights(seen, key, 5)},
        ):
            found = moments(eta, key, statistics=(), **form).log_normalizer
            assert (found - dense).abs().max() < 1e-12
    assert as_log_weights(Support(), key, 5) is None


def test_a_learned_bias_gets_its_gradient():
    theirs, ours = pair(batch_first=True)
    x = normal(2, QUERIES, WIDTH)
    grads = []
    for layer in (theirs, ours):
        bias = normal(QUERIES, QUERIES, seed=4).requires_grad_()
        grads.append(torch.autograd.grad(layer(x, x, x, attn_mask=bias)[0].square().sum(), bias)[0])
    assert (grads[0] - grads[1]).abs().max() < 1e-12
    zero = torch.zeros(QUERIES, QUERIES, dtype=torch.float64, requires_grad=True)
    out = ours(x, x, x, attn_mask=zero, need_weights=False)[0]
    assert torch.autograd.grad(out.square().sum(), zero)[0].abs().sum() > 0


BAD = {
    "sizes": (
        lambda: MultiheadAttention(10, 3),
        ValueError,
        r"num_heads: expected a number that divides embed_dim=10, got 3",
    ),
    "no heads": (lambda: MultiheadAttention(10, 0), ValueError, r"num_heads: expected a positive integer, got 0"),
    "no width": (lambda: MultiheadAttention(0, 1), ValueError, r"embed_dim: expected a positive integer, got 0"),
    "dropout": (lambda: MultiheadAttention(4, 2, 1.0), ValueError, r"dropout: expected a probability in \[0, 1\)"),
    "drop": (lambda: MultiheadAttention(4, 2, drop="rows"), ValueError, r"drop: expected 'weights' or 'keys'"),
    "width": (lambda: call(query=torch.zeros(2, 3, 5)), ValueError, r"query: expected shape \(batch, tokens, 4\)"),
    "axes": (lambda: call(query=torch.zeros(4)), ValueError, r"query: expected shape \(batch, tokens, 4\)"),
    "nested": (
        lambda: call(query=torch.nested.nested_tensor([torch.zeros(2, 4)])),
        ValueError,
        r"query: .* got a nested tensor",
    ),
    "type": (lambda: call(key=torch.zeros(2, 3, 4).double()), TypeError, r"key: expected dtype torch.float32"),
    "no tensor": (lambda: call(value=[1.0]), TypeError, r"value: expected a torch.Tensor, got list"),
    "lengths": (lambda: call(value=torch.zeros(2, 2, 4)), ValueError, r"value: expected the batch and tokens of key"),
    "batches": (lambda: call(query=torch.zeros(1, 3, 4)), ValueError, r"key: expected the batch of query \(1\), got 2"),
    "mask type": (
        lambda: call(attn_mask=torch.zeros(3, 3, dtype=torch.int64)),
        TypeError,
        r"attn_mask: expected a Boolean or floating mask, got torch.int64",
    ),
    "mask shape": (
        lambda: call(attn_mask=torch.zeros(3, 4)),
        ValueError,
        r"attn_mask: expected shape \(3, 3\) or \(4, 3, 3\), got \(3, 4\)",
    ),
    "padding shape": (
        lambda: call(key_padding_mask=torch.zeros(3, 2)),
        ValueError,
        r"key_padding_mask: expected shape \(2, 3\), got \(3, 2\)",
    ),
}


def call(**changes):
    x = torch.zeros(2, 3, 4)
    MultiheadAttention(4, 2, batch_first=True)(**({"query": x, "key": x, "value": x} | changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_sentence(bad):
    function, kind, message = bad
    with pytest.raises(kind, match=message):
        function()


# ---------------------------------------------------------------------- Gaussian and mixture heads


def heads(n=40, q=6, d=3, e=2, seed=0, scale=1.0):
    return (
        scale * normal(2, HEADS, q, d, seed=seed),
        normal(2, HEADS, n, d, seed=seed + 1),
        normal(2, HEADS, n, e, seed=5),
    )


def gaussian_oracle(eta, key, value, weight):
    """v̄ + Cov(v, k) η for one query and weights of its own, in NumPy."""
    p = weight / weight.sum()
    k, v = p @ key, p @ value
    return v + (value - v).T @ (p[:, None] * (key - k)) @ eta


SUPPORTS = {
    "everything": {},
    "padding": {"mask": ~blocked(2, 1, 1, 6)},
    "causal": {"causal": True},
    "causal and padding": {"causal": True, "mask": ~blocked(2, 1, 1, 6)},
    "causal as a mask": {"mask": torch.ones(6, 6, dtype=torch.bool).tril()[None, None]},
    "rows of their own": {"mask": ~blocked(2, HEADS, 6, 6)},
    "weights": {"log_weights": normal(2, HEADS, 6, seed=7)},
    "weights by row": {"log_weights": normal(2, HEADS, 6, 6, seed=7)},
    "sink": {"sink": 0.3},
    "causal with sinks": {"causal": True, "sink": normal(1, HEADS, seed=8)},
    "rows with sinks": {"mask": ~blocked(2, HEADS, 6, 6), "sink": normal(1, HEADS, seed=8)},
}


def weights_of(support, b, h, i, n):
    """Base weights of the keys and then of the sink, in NumPy."""
    w = np.ones(n)
    if "mask" in support:
        w = w * support["mask"].expand(2, HEADS, n, n)[b, h, i].numpy()
    if support.get("causal"):
        w = w * (np.arange(n) <= i)
    if "log_weights" in support:
        table = support["log_weights"]
        w = w * np.exp((table if table.ndim == 4 else table[..., None, :]).expand(2, HEADS, n, n)[b, h, i].numpy())
    sink = support.get("sink", -np.inf)
    return np.append(w, np.exp(float(sink[0, h]) if isinstance(sink, torch.Tensor) else sink))


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_gaussian_closure_is_its_definition(support):
    eta, key, value = heads(n=6)
    found = approximate_by_gaussian(eta, key, value, **support)
    for b, h, i in np.ndindex(2, HEADS, 6):
        k, v = (np.vstack([x[b, h].numpy(), np.zeros(x.shape[-1])]) for x in (key, value))
        expected = gaussian_oracle(eta[b, h, i].numpy(), k, v, weights_of(support, b, h, i, 6))
        assert np.abs(found[b, h, i].numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_mixture_closure_is_its_definition(support):
    eta, key, value = heads(n=6)
    shares = torch.rand(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = approximate_by_mixture(eta, key, value, responsibilities=shares, **support)
    for b, h, i in np.ndindex(2, HEADS, 6):
        base = weights_of(support, b, h, i, 6)
        point, k, v = (x.numpy() for x in (eta[b, h, i], key[b, h], value[b, h]))
        logits, outputs = [], []
        for c in range(3):
            w = base[:6] * shares[:, c].numpy()
            p = w / w.sum()
            mean = p @ k
            covariance = (k - mean).T @ (p[:, None] * (k - mean))
            logits.append(np.log(w.sum()) + mean @ point + point @ covariance @ point / 2)
            outputs.append(gaussian_oracle(point, k, v, w))
        with np.errstate(divide="ignore"):
            logits, outputs = [*logits, np.log(base[6])], [*outputs, np.zeros_like(outputs[0])]
        expected = softmax(logits) @ np.array(outputs)
        assert np.abs(found[b, h, i].numpy() - expected).max() < 1e-12


def test_a_gaussian_head_is_the_mean_of_a_gaussian_measure():
    eta, key, _ = heads()
    centred = key - key.mean(-2, keepdim=True)
    h = Gaussian(key.mean(-2), centred.mT @ centred / key.shape[-2])
    assert (approximate_by_gaussian(eta, key, key) - h.mean(eta)).abs().max() < 1e-12


def test_a_mixture_is_the_mean_of_a_sum_of_gaussians():
    eta, key, _ = heads(n=20)
    key = key[:1, :1]
    shares = torch.zeros(20, 2, dtype=torch.float64)
    shares[:8, 0], shares[8:, 1] = 1.0, 1.0
    parts = []
    for group in (key[0, 0, :8], key[0, 0, 8:]):
        centred = group - group.mean(0)
        parts.append(len(group) * Gaussian(group.mean(0), centred.mT @ centred / len(group)))
    found = approximate_by_mixture(eta[:1, :1], key, key, responsibilities=shares)[0, 0]
    assert (found - (parts[0] + parts[1]).mean(eta[0, 0])).abs().max() < 1e-12


def test_the_gaussian_error_is_of_second_order():
    """Halving the query quarters the error (S1-C1)."""
    eta, key, value = heads()
    errors = []
    for scale in (1e-2, 5e-3):
        exact = attend(scale * eta, key, value, scale=1.0).output
        errors.append((approximate_by_gaussian(scale * eta, key, value) - exact).norm())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.03)


def test_clusters_help_where_there_are_clusters():
    centres = 3 * normal(8, 6, seed=3)
    key = (centres[:, None] + 0.5 * normal(8, 250, 6, seed=4)).reshape(1, 1, -1, 6)
    eta = 0.5 * normal(1, 1, 50, 6, seed=5)
    exact = attend(eta, key, scale=1.0).output
    one = (approximate_by_gaussian(eta, key, key) - exact).norm() / exact.norm()
    eight = (approximate_by_mixture(eta, key, key, components=8) - exact).norm() / exact.norm()
    assert eight < 0.1 * one


def test_one_component_is_one_gaussian_and_one_per_key_is_attention():
    eta, key, value = heads(n=7)
    one = approximate_by_mixture(eta, key, value, components=1)
    assert (one - approximate_by_gaussian(eta, key, value)).abs().max() < 1e-12
    every = approximate_by_mixture(eta, key, value, components=7)
    assert (every - attend(eta, key, value, scale=1.0).output).abs().max() < 1e-12


def test_closures_are_differentiable():
    eta, key, value = (x[:1, :1].clone().requires_grad_() for x in heads(n=5, q=5))
    shares = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"causal": True}):
        gaussian = partial(approximate_by_gaussian, **options)
        mixture = partial(approximate_by_mixture, responsibilities=shares, **options)
        assert torch.autograd.gradcheck(gaussian, (eta, key, value))
        assert torch.autograd.gradcheck(mixture, (eta, key, value))


def test_closures_of_nothing_are_zero():
    eta, key, value = heads(n=4)
    shut = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    for support in ({"mask": shut}, {"mask": shut, "causal": True, "offset": 1}):
        assert (approximate_by_gaussian(eta, key, value, **support) == 0).all()
    assert (approximate_by_mixture(eta, key, value, components=2, mask=shut) == 0).all()
    empty = approximate_by_mixture(eta, key[..., :0, :], value[..., :0, :], components=2)
    assert torch.equal(empty, torch.zeros(2, HEADS, 6, 2, dtype=torch.float64))
    assert approximate_by_gaussian(eta[..., :0, :], key[..., :0, :], value[..., :0, :], causal=True).shape[-2] == 0


def test_key_heads_are_shared_by_groups():
    eta, key, value = heads()
    few = approximate_by_gaussian(eta, key[:, :2], value[:, :2])
    many = approximate_by_gaussian(eta, *(x[:, :2].repeat_interleave(2, 1) for x in (key, value)))
    assert torch.equal(few, many)


@pytest.mark.parametrize("kind", [GaussianHead, MixtureHead])
def test_closed_layers_take_over_trained_ones(kind):
    _, exact = pair(batch_first=True, add_bias_kv=True, add_zero_attn=True)
    closed = kind.of(exact)
    assert [*closed.state_dict()] == [*exact.state_dict()]
    assert closed.out_proj.weight is exact.out_proj.weight
    x, calls = normal(2, 30, WIDTH), []
    with on_attention(calls.append):
        out, weights = closed(x, x, x, key_padding_mask=blocked(2, 30))
    assert weights is None
    assert out.shape == x.shape
    (call,) = calls
    options = {"components": 8} if kind is MixtureHead else {}
    function = approximate_by_mixture if options else approximate_by_gaussian
    again = function(call.eta, call.key, call.value, **options, **call.support.arguments())
    assert (again - call.output).abs().max() < 1e-12
    assert (exact.out_proj(again.transpose(1, 2).flatten(-2)) - out).abs().max() < 1e-12


def test_a_gaussian_layer_is_causal():
    layer = GaussianHead(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    x, y = normal(1, 100, WIDTH), normal(1, 100, WIDTH)
    y[:, 70:] += 1
    before, after = (layer(z, z, z, is_causal=True)[0][:, :70] for z in (x, y))
    assert (before - after).abs().max() < 1e-10  # sums are centred with the mean over all keys


def test_closed_layers_refuse_what_they_cannot():
    x = torch.zeros(1, 3, 4)
    for kind in (GaussianHead, MixtureHead):
        with pytest.raises(ValueError, match=r"need_weights: expected False: there are no weights here, got True"):
            kind(4, 2)(x, x, x, need_weights=True)
        with pytest.raises(ValueError, match=r"dropout: expected 0 in training: no weights to drop, got 0.1"):
            kind(4, 2, dropout=0.1)(x, x, x)
    with pytest.raises(ValueError, match=r"MixtureHead.components: expected a positive integer, got 0"):
        MixtureHead(4, 2, components=0)
    layer = MixtureHead(4, 2, batch_first=True, components=2)
    with pytest.raises(ValueError, match=r"mask: expected queries that all see the same keys, got rows that differ"):
        layer(x, x, x, is_causal=True)
    assert layer(x, x, x, is_causal=True, responsibilities=torch.ones(3, 2))[0].shape == (1, 3, 4)
    with pytest.raises(ValueError, match=r"responsibilities: expected shape \(…, n=3, components\), got \(2, 2\)"):
        layer(x, x, x, responsibilities=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"responsibilities: expected finite numbers ≥ 0, got others"):
        layer(x, x, x, responsibilities=-torch.ones(3, 2))
    eta, key, value = heads()
    with pytest.raises(ValueError, match=r"approximate_by_mixture.components: expected at least 1, got None"):
        approximate_by_mixture(eta, key, value)


@pytest.mark.parametrize("need_weights", [True, False])
def test_padding_may_hold_any_bits(need_weights):
    """Tokens that a padding mask blocks hold NaN: outputs and gradients of the others are as if they were not there."""
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    blocked = torch.zeros(2, 6, dtype=torch.bool)
    blocked[0, 4:] = True
    full = x.clone()
    full[0, 4:] = torch.nan
    alone = layer(x[:1, :4], x[:1, :4], x[:1, :4], need_weights=need_weights)[0]
    found = layer(x, full, full, key_padding_mask=blocked, need_weights=need_weights)[0]
    torch.testing.assert_close(found[:1, :4], alone, rtol=1e-12, atol=1e-12)
    assert found.isfinite().all()
