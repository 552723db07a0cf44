"""`attention` beside torch's own function, and `attend` against sums over a weight matrix."""

import math
import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cumulant import Empirical, attend, attention, fisher_product, moments
from cumulant.nn import MultiheadAttention


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(q=33, n=41, heads=4, key_heads=4, d=16, e=16, dtype=torch.float32):
    return (
        normal(2, heads, q, d, seed=1, dtype=dtype),
        normal(2, key_heads, n, d, seed=2, dtype=dtype),
        normal(2, key_heads, n, e, seed=3, dtype=dtype),
    )


padding = torch.ones(2, 1, 1, 41, dtype=torch.bool)
padding[0, ..., 30:] = False
SETTINGS = {
    "plain": ({}, {}),
    "scaled": ({}, {"scale": 0.15}),
    "causal": ({"n": 33}, {"is_causal": True}),
    "causal, more keys": ({}, {"is_causal": True}),
    "padded": ({}, {"attn_mask": padding}),
    "one mask for all": ({}, {"attn_mask": normal(33, 41, seed=5) > -1}),
    "bias per head": ({}, {"attn_mask": normal(1, 4, 33, 41, seed=4, dtype=torch.float32)}),
    "bias per key": ({}, {"attn_mask": normal(2, 1, 1, 41, seed=4, dtype=torch.float32)}),
    "bias of two axes": ({}, {"attn_mask": normal(33, 41, seed=4, dtype=torch.float32)}),
    "mask per query": ({}, {"attn_mask": normal(33, 1, seed=5) > -9}),
    "bias per query": ({}, {"attn_mask": normal(33, 1, seed=4, dtype=torch.float32)}),
    "one bias": ({}, {"attn_mask": normal(1, 1, seed=4, dtype=torch.float32)}),
    "grouped": ({"key_heads": 2}, {"enable_gqa": True}),
    "grouped, causal": ({"key_heads": 1, "n": 33}, {"enable_gqa": True, "is_causal": True}),
    "wide values": ({"e": 24}, {}),
    "large": ({"q": 300, "n": 300}, {"is_causal": True}),
}


@pytest.mark.parametrize(("sizes", "arguments"), SETTINGS.values(), ids=SETTINGS.keys())
def test_drop_in_on_values_and_gradients(sizes, arguments):
    ours, theirs = ([x.requires_grad_() for x in inputs(**sizes)] for _ in range(2))
    out, expected = attention(*ours, **arguments), scaled_dot_product_attention(*theirs, **arguments)
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    direction = normal(*expected.shape, seed=9, dtype=torch.float32)
    for mine, peer in zip(
        torch.autograd.grad(out, ours, direction), torch.autograd.grad(expected, theirs, direction), strict=True
    ):
        torch.testing.assert_close(mine, peer, rtol=0, atol=1e-6 * float(peer.abs().max()))


def test_gradient_reaches_a_learned_bias():
    q, k, v = inputs(dtype=torch.float64)
    bias = normal(4, 33, 41, seed=4).requires_grad_()
    mine = torch.autograd.grad(attention(q, k, v, attn_mask=bias).sin().sum(), bias)[0]
    theirs = torch.autograd.grad(scaled_dot_product_attention(q, k, v, attn_mask=bias).sin().sum(), bias)[0]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_dropout_is_torchs():
    q, k, v = inputs()
    torch.manual_seed(0)
    mine = attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(0)
    torch.testing.assert_close(mine, scaled_dot_product_attention(q, k, v, dropout_p=0.3))


def test_half_precision_keeps_its_dtype():
    q, k, v = (x.to(torch.float16) for x in inputs())
    out = attention(q, k, v)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=2e-3, atol=2e-3)


def test_a_mask_per_query_silences_it():
    q, k, v = inputs()
    seen = torch.arange(33)[:, None] % 3 > 0
    out, expected = attention(q, k, v, attn_mask=seen), scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, torch.where(seen, expected, 0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [33, 300], ids=["dense", "streaming"])
@pytest.mark.parametrize("given", ["single", "mixed"])
def test_autocast_rounds_as_for_a_product_and_sums_in_float32(half, n, given):
    """Beside SDPA in float32 on the rounded numbers; the backward pass stands inside too."""
    ours = list(inputs(q=n, n=n))
    if given == "mixed":
        ours[1] = ours[1].to(half)
    exact = [x.to(half).float().requires_grad_() for x in ours]
    ours = [x.requires_grad_() for x in ours]
    expected = scaled_dot_product_attention(*exact, is_causal=True)
    direction = normal(*expected.shape, seed=9, dtype=torch.float32)
    slopes = torch.autograd.grad(expected, exact, direction)
    with torch.autocast("cpu", dtype=half):
        out = attention(*ours, is_causal=True)
        found = attend(*ours, causal=True)
        record = moments(ours[0] / 4, ours[1], ours[2], causal=True, statistics=("mean",))
        gradients = torch.autograd.grad(found.output, ours, direction)
        product = fisher_product(ours[0], ours[1], ours[0])
    assert out.dtype == half
    assert found.output.dtype == found.entropy.dtype == record.log_normalizer.dtype == product.dtype == torch.float32
    slack = torch.finfo(half).eps
    torch.testing.assert_close(out.float(), expected, rtol=slack, atol=slack)
    torch.testing.assert_close(found.output, expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(product, fisher_product(exact[0], exact[1], exact[0]), rtol=1e-5, atol=1e-5)
    for own, mine, peer in zip(ours, gradients, slopes, strict=True):
        assert mine.dtype == own.dtype
        assert (mine.float() - peer).abs().max() <= slack * peer.abs().max()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_layer_under_autocast_is_torchs(half, need_weights):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    ours, x = MultiheadAttention.of(theirs), normal(2, 9, 24, dtype=torch.float32)
    with torch.autocast("cpu", dtype=half):
        mine, peer = (m(x, x, x, need_weights=need_weights)[0] for m in (ours, theirs))
        heads = ours.attend(x, x, x).heads
    assert mine.dtype == peer.dtype
    torch.testing.assert_close(mine, peer, rtol=0.03 if half == torch.bfloat16 else 4e-3, atol=4e-3)
    assert heads.entropy.dtype == torch.float32
    mine.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in ours.parameters())


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float64))
    mask = torch.ones(33, 41, dtype=torch.bool)
    mask[7] = False
    out = attention(q, k, v, attn_mask=mask)
    assert (out[..., 7, :] == 0).all()
    (slope,) = torch.autograd.grad(out.square().sum(), q)
    assert slope.isfinite().all()
    assert (slope[..., 7, :] == 0).all()


# ---------------------------------------------------------------------- attend


def by_hand(q, k, v, *, scale, bias, sink=None, pi=None):
    """Everything `attend` returns, from the matrix of weights."""
    score = scale * q @ k.mT
    logits = score + bias
    values, zero = v, torch.zeros_like(score[..., :1])
    base = bias.expand_as(score)
    if sink is not None:
        extra = torch.as_tensor(sink, dtype=q.dtype).expand(score.shape[:-2])[..., None, None].expand_as(zero)
        logits, score, base = (torch.cat([a, b], -1) for a, b in ((logits, extra), (score, zero), (base, extra)))
        values = torch.cat([v, torch.zeros_like(v[..., :1, :])], -2)
    g = torch.logsumexp(logits, -1)
    p = torch.softmax(logits, -1).nan_to_num(0)
    out = p @ values
    entropy = -torch.xlogy(p, p).sum(-1)
    gap = (values[..., None, :, :] - out[..., None, :]).square().sum(-1)
    kl = torch.where(p > 0, p * (torch.where(p > 0, p, 1).log() - base + torch.logsumexp(base, -1, keepdim=True)), 0)
    pi = torch.full_like(g, 1 / g.shape[-1]) if pi is None else pi
    received = (pi[..., None] * p)[..., : k.shape[-2]].sum(-2)
    square = p.square().sum(-1)
    effective = torch.where(square > 0, 1 / square, 0)
    return (
        out,
        g,
        entropy,
        effective,
        kl.sum(-1),
        (p * gap).sum(-1),
        p[..., -1] if sink is not None else torch.zeros_like(g),
        received,
    )


def compare(found, expected, tol=1e-12):
    out, g, entropy, effective, kl, loss, sink, received = expected
    for mine, theirs in (
        (found.output, out),
        (found.log_normalizer, g),
        (found.entropy, entropy),
        (found.perplexity, entropy.exp()),
        (found.effective_atoms, effective),
        (found.kl_to_base, kl),
        (found.collapse_loss, loss),
        (found.sink_mass, sink),
        (found.source_marginal, received),
    ):
        torch.testing.assert_close(mine, theirs, rtol=tol, atol=tol)


def banned(allowed):
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("backend", ["dense", "streaming"])
@pytest.mark.parametrize(("q", "n", "offset"), [(5, 5, None), (4, 9, 3), (9, 4, 0), (1, 1, None), (70, 63, -2)])
def test_attend_causal_and_windowed(q, n, offset, backend):
    query, key, value = normal(2, 3, q, 4), normal(2, 3, n, 4, seed=1), normal(2, 3, n, 5, seed=2)
    gap = (offset or 0) + torch.arange(q)[:, None] - torch.arange(n)
    for window in (None, 2):
        allowed = (gap >= 0) & (gap < (window or 10**6))
        found = attend(
            query, key, value, causal=True, window=window, offset=offset, source_marginal=True, backend=backend
        )
        compare(found, by_hand(query, key, value, scale=0.5, bias=banned(allowed)))


@pytest.mark.parametrize("backend", ["dense", "streaming"])
def test_attend_masks_weights_and_sinks(backend):
    query, key, value = normal(2, 4, 7, 3), normal(2, 4, 11, 3, seed=1), normal(2, 4, 11, 2, seed=2)
    mask = normal(2, 1, 7, 11, seed=3) > -0.7
    mask[0, 0, 2] = False  # a query that sees nothing
    per_key, per_pair = normal(2, 4, 11, seed=4), normal(2, 4, 7, 11, seed=5)
    pi = torch.softmax(normal(2, 4, 7, seed=6), -1)
    for weights, bias in ((per_key, per_key[..., None, :]), (per_pair, per_pair)):
        arguments = {"mask": mask, "log_weights": weights, "scale": 1.3, "backend": backend}
        found = attend(query, key, value, source_marginal=pi, **arguments)
        compare(found, by_hand(query, key, value, scale=1.3, bias=bias + banned(mask), pi=pi))
        assert found.log_normalizer[0, 0, 2] == -torch.inf
        heads = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
        found = attend(query, key, value, source_marginal=True, sink=heads, **arguments)
        compare(found, by_hand(query, key, value, scale=1.3, bias=bias + banned(mask), sink=heads))
        received = found.source_marginal.sum(-1) + found.sink_mass.mean(-1)
        torch.testing.assert_close(received, torch.ones(2, 4, dtype=torch.float64))


def test_attend_grouped_heads():
    query, key, value = normal(2, 6, 5, 3), normal(2, 2, 8, 3, seed=1), normal(2, 2, 8, 4, seed=2)
    weights = normal(2, 2, 8, seed=3)
    wide = [x.repeat_interleave(3, 1) for x in (key, value, weights)]
    for causal in (False, True):
        found = attend(query, key, value, log_weights=weights, causal=causal, offset=3, source_marginal=True)
        allowed = 3 + torch.arange(5)[:, None] >= torch.arange(8)
        bias = wide[2][..., None, :] + (banned(allowed) if causal else 0)
        compare(found, by_hand(query, *wide[:2], scale=3**-0.5, bias=bias))


def test_attend_one_query_and_values_equal_keys():
    query, key = normal(3), normal(6, 3, seed=1)
    found = attend(query, key, source_marginal=True)
    weights = torch.softmax(key @ query / math.sqrt(3), 0)
    torch.testing.assert_close(found.output, weights @ key, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.source_marginal, weights, rtol=0, atol=1e-14)
    assert found.entropy.ndim == 0


def test_a_sink_of_no_mass_is_no_sink():
    query, key = normal(4, 3), normal(6, 3, seed=1)
    with_sink, without = attend(query, key, sink=-torch.inf), attend(query, key)
    for name in ("output", "log_normalizer", "entropy", "kl_to_base", "collapse_loss"):
        torch.testing.assert_close(getattr(with_sink, name), getattr(without, name), rtol=0, atol=1e-14)
    assert (with_sink.sink_mass == 0).all()


def test_one_weight_per_key_serves_every_batch_entry():
    query, key, weights = normal(2, 3, 4, 3), normal(2, 3, 6, 3, seed=1), normal(6, seed=2)
    wide = attend(query, key, log_weights=weights.expand(2, 3, 6), source_marginal=True)
    found = attend(query, key, log_weights=weights, source_marginal=True)
    for mine, theirs in zip(found, wide, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_attend_without_keys():
    query = normal(2, 3).requires_grad_()
    found = attend(query, torch.zeros(0, 3, dtype=torch.float64), source_marginal=True)
    assert (found.output == 0).all()
    assert (found.log_normalizer == -torch.inf).all()
    assert (found.kl_to_base == 0).all()
    assert found.source_marginal.shape == (0,)


def test_attend_is_differentiable_in_every_field():
    query, key, value = (normal(2, 3, 2, seed=s).requires_grad_() for s in range(3))
    weights = normal(2, 3, seed=4).requires_grad_()

    def fields(q, k, v, w):
        found = attend(q, k, v, log_weights=w, causal=True, sink=0.3, source_marginal=True)
        return (*found[:-2], found.sink_mass, found.source_marginal)

    assert torch.autograd.gradcheck(fields, (query, key, value, weights), atol=1e-7)


def test_alibi_and_rope_are_edits_of_the_measure():
    n, d = 6, 2
    q, k, v = normal(n, d), normal(n, d, seed=1), normal(n, 3, seed=2)
    angle = 0.7 * torch.arange(n, dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).reshape(n, 2, 2)
    rotated = attend((turn @ q[..., None])[..., 0], (turn @ k[..., None])[..., 0], v, scale=1.0)
    gap = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    relative = torch.stack([0.7 * gap.double()], -1)[..., 0]
    cos, sin = relative.cos(), relative.sin()
    turned = torch.stack([cos * k[:, 0] - sin * k[:, 1], sin * k[:, 0] + cos * k[:, 1]], -1)
    logits = (turned * q[:, None]).sum(-1)
    torch.testing.assert_close(rotated.output, torch.softmax(logits, -1) @ v, rtol=0, atol=1e-14)
    alibi = -0.5 * gap.abs().double()
    torch.testing.assert_close(
        attend(q, k, v, log_weights=alibi, scale=1.0).output, torch.softmax(q @ k.T + alibi, -1) @ v, rtol=0, atol=1e-14
    )


MASK = torch.ones(3, 3, dtype=torch.bool)
BAD = [
    (lambda q, k: attention(q, k, k, attn_mask=MASK.long()), TypeError, "attn_mask.*Boolean"),
    (lambda q, k: attention(q, k, k, attn_mask=MASK, is_causal=True), ValueError, "attend"),
    (lambda q, k: attention(q.expand(4, 3, 2), k.expand(2, 3, 2), k.expand(2, 3, 2)), ValueError, "enable_gqa"),
    (lambda q, k: attention(q[0], k, k), ValueError, "at least 2 axes"),
    (lambda q, k: attention(q, k, k, attn_mask=MASK.float()), TypeError, "attn_mask"),
    (lambda q, k: attend(q, k, mask=MASK.float()), TypeError, "Boolean"),
    (lambda q, k: attend(q, k[:2], causal=True), ValueError, "offset"),
    (lambda q, k: attend(q, k, source_marginal=torch.ones(2, dtype=torch.float64)), ValueError, "One per query"),
    (lambda q, k: attend(q, k, sink=torch.zeros(5, dtype=torch.float64)), ValueError, "one sink per head"),
    (lambda q, k: attend([1.0], k), TypeError, "torch.Tensor"),
    (lambda q, k: attend(q, k, scale=float("nan")), ValueError, "a finite number"),
    (lambda q, k: attend(q, k, scale=torch.ones(2)), ValueError, "per head multiply"),
    (lambda q, k: attend(q, k, sink=float("nan")), ValueError, r"below \+inf"),
    (lambda q, k: attention(q, k, k, dropout_p=2.0), ValueError, "probability"),
    (
        lambda q, k: attend(q, k[:, :1]),
        ValueError,
        r"attend.key: expected shape .* d=2\) as query \(3, 2\), got \(3, 1\)",
    ),
    (
        lambda q, k: attend(q, k, k[:2]),
        ValueError,
        r"attend.value: expected shape .*n=3, e\), got \(2, 2\). One .* key",
    ),
    (lambda q, k: attention(q, k[:, :1], k), ValueError, r"attention.key: expected"),
    (
        lambda q, k: attend(q, k, log_weights=q),
        ValueError,
        r"attend.log_weights: expected .* for each row of key or .* for each pair, got",
    ),
    (lambda q, k: attend(q, k, log_weights=q[:, 0].log() * torch.inf), ValueError, "attend.log_weights"),
    (lambda q, k: attend(q.expand(3, 3, 2), k.expand(2, 3, 2)), ValueError, "attend.key: .* divides query's 3"),
    (lambda q, k: attend(q, k, window=0), ValueError, "attend.window"),
    (lambda q, k: attend(q, k, backend="fast"), ValueError, "attend.backend: expected one of"),
    (lambda q, k: attend(q, k.float()), TypeError, "attend.key"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input_gets_a_sentence(call, error, match):
    with pytest.raises(error, match=match) as refused:
        call(normal(3, 2), normal(3, 2, seed=1))
    words = re.findall(r"[a-z]+", str(refused.value))
    assert not {"moments", "eta", "atoms"} & {*words}, "words of the kernel, not of the function called"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_causal", r"expected causal=True, and offset=n - q where there are more keys than queries, got is_causal="),
        ("attn_mask", r"expected mask= for a Boolean mask, True = attend, or log_weights= for a bias"),
        ("dropout_p", r"expected nothing, as weights with dropout are no probabilities; cumulant.attention has"),
        ("enable_gqa", r"expected nothing, as fewer heads of key and value than of query are always shared"),
        ("start", r"expected offset=, the number of keys before the first query, got start="),
        (
            "speed",
            r"attend.speed: expected one of query, key, value, scale, mask, causal, .*, got speed. Leave it out.",
        ),
    ],
)
def test_arguments_of_sdpa_are_refused_with_ours_in_their_place(name, words):
    x = torch.eye(2)
    with pytest.raises(TypeError, match=words):
        attend(x, x, x, **{name: True})


def test_arguments_that_sdpa_names_in_the_same_way_mean_the_same():
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3)
    torch.testing.assert_close(attend(query=q, key=k, value=v, scale=0.3).output, theirs)


# ---------------------------------------------------------------------- shapes of an additive bias

BIASES = {  # query, key, and a bias of the scores as SDPA takes it
    "one head axis too few": ((2, 4, 9, 8), (2, 4, 12, 8), (4, 9, 12)),
    "no batch axis at all": ((2, 4, 9, 8), (2, 4, 12, 8), (9, 12)),
    "one query over a cache": ((1, 8, 1, 8), (1, 8, 12, 8), (8, 1, 12)),
    "one axis, many queries": ((1, 9, 8), (1, 12, 8), (9, 12)),
    "as many queries as heads": ((2, 1, 9, 8), (2, 1, 12, 8), (1, 9, 12)),
    "shared keys": ((2, 4, 9, 8), (2, 2, 12, 8), (4, 9, 12)),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_lacks_a_batch_axis_is_refused_with_the_way_to_pass_it(name):
    queries, keys, bias = BIASES[name]
    query, key, bias = torch.randn(queries), torch.randn(keys), torch.randn(bias)
    missing = query.ndim - bias.ndim
    with pytest.raises(ValueError, match=r"attend\.log_weights: expected .* for each pair, got") as raised:
        attend(query, key, log_weights=bias)
    assert f"log_weights[{', '.join(['None'] * missing)}]" in str(raised.value)
    whole = attend(query, key, log_weights=bias[(None,) * missing]).output
    theirs = scaled_dot_product_attention(query, key, key, attn_mask=bias, enable_gqa=name == "shared keys")
    assert torch.allclose(whole, theirs, atol=1e-5)


@pytest.mark.parametrize("lead", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_a_weight_of_every_key_may_be_shared_over_batch_axes(lead):
    query, key, weights = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 12, 8), torch.randn(*lead, 12)
    theirs = scaled_dot_product_attention(query, key, key, attn_mask=weights[..., None, :].expand(2, 4, 9, 12))
    assert torch.allclose(attend(query, key, log_weights=weights).output, theirs, atol=1e-5)


def test_a_measure_may_have_a_batch_of_weights_over_the_same_atoms():
    atoms, weights = torch.randn(1, 12, 8), torch.randn(5, 12)
    assert Empirical(atoms, weights).log_normalizer(torch.randn(5, 8)).shape == (5, 5)
