"""ConvexBlock: its potential against NumPy and the library's measures, its spectrum, its inverse, its edges."""

import re

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import nn

from cumulant import Empirical
from cumulant.nn.calls import on_attention
from cumulant.nn.convex import ConvexBlock, MultiheadPotential
from cumulant.potentials import asymmetry, multihead

KINDS = [
    {},
    {"units": "relu", "memory": 3},
    {"causal": True},
    {"causal": True, "memory": 2, "norm_context": False},
    {"hidden": 0},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)) or "plain")


def block(dim=6, heads=2, *, seed=0, **options) -> ConvexBlock:
    torch.manual_seed(seed)
    made = ConvexBlock(dim, heads, **{"hidden": 9, **options}).double()
    with torch.no_grad():  # away from the gentle start
        made.query.mul_(2)
        made.log_gain.add_(torch.randn(heads))
        made.unit_bias.add_(torch.randn(len(made.unit_bias)))
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numpy_potential(made, x, context, seen):
    """Φ of one sample x (q, D) over context (n, D), token by token and head by head."""
    w = {name: p.detach().numpy() for name, p in made.named_parameters()}
    if made.norm_context:
        context = (context - context.mean(-1, keepdims=True)) / np.sqrt(context.var(-1, keepdims=True) + 1e-5)
    drive = x @ w["unit_weight"].T + w["unit_bias"]
    units = np.logaddexp(0, drive) if made.units == "softplus" else np.maximum(drive, 0) ** 2 / 2
    value = units.sum(-1) + x @ w["drift"]
    for h in range(made.heads):
        atoms = np.concatenate([w["memory"][h], context @ w["key"][h].T])
        for i, token in enumerate(x):
            visible = np.concatenate([np.ones(len(w["memory"][h]), dtype=bool), seen[i]])
            if visible.any():
                value[i] += np.exp(w["log_gain"][h]) * logsumexp(atoms[visible] @ w["query"][h] @ token)
    return value


@kinds
@pytest.mark.parametrize("n", [1, 5])
def test_potential_is_the_plain_formula(kind, n):
    made, x = block(**kind), tokens(2, n, 6)
    padding = torch.zeros(2, n, dtype=torch.bool)
    padding[0, -1] = True
    order = np.tri(n, k=-1, dtype=bool) if made.causal else np.ones((n, n), dtype=bool)
    expected = [numpy_potential(made, s, s, order & ~p) for s, p in zip(x.numpy(), padding.numpy(), strict=True)]
    np.testing.assert_allclose(made.potential(x, padding).detach().numpy(), np.stack(expected), rtol=1e-12, atol=1e-12)


@kinds
def test_the_step_is_the_gradient_of_the_potential_given_the_context(kind):
    made, x, context = block(**kind), tokens(2, 5, 6), tokens(2, 5, 6, seed=2)
    start = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(made.potential(start, context=context).sum(), start)
    torch.testing.assert_close(made(x, context=context) - x, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(made(x), made(x, context=x), rtol=0, atol=0)


@kinds
def test_no_eigenvalue_of_the_jacobian_is_below_one(kind):
    made, x = block(**kind), 2 * tokens(3, 4, 6)
    jacobian = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda t, i=i: _one(made, x, t, i), x[:, i].clone())[..., :]
            for i in range(4)
        ]
    )  # (token, sample, D, sample, D)
    own = torch.einsum("tbdbe->btde", jacobian)
    assert (own - own.mT).abs().max() < 1e-12
    assert torch.linalg.eigvalsh((own + own.mT) / 2).min() >= 1 - 1e-8
    hessian = made.hessian(x).detach()
    torch.testing.assert_close(own, torch.eye(6, dtype=torch.float64) + hessian, rtol=0, atol=1e-11)


def _one(made, x, token, i):
    """Token i after the block as a function of token i, the context standing still."""
    moved = torch.cat([x[:, :i], token[:, None], x[:, i + 1 :]], 1)
    return made(moved, context=x)[:, i]


def test_a_token_given_its_context_moves_along_a_gradient():
    made, x = block(), tokens(1, 4, 6)
    assert asymmetry(lambda token: made(token[None, None], context=x)[0, 0], tokens(20, 6)).max() < 1e-12


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.get("causal")], ids=["plain", "relu", "heads"])
def test_no_two_tokens_come_closer(kind):
    """All tokens look at one context (X-3a)."""
    made, x = block(**kind), tokens(4, 7, 6)
    before, after = (torch.cdist(t, t) for t in (x, made(x)))
    assert (after >= before - 1e-12).all()
    assert (after > before + 1e-3).any()


@kinds
def test_inverse_given_the_context(kind):
    made, x, context = block(**kind), 3 * tokens(2, 5, 6), tokens(2, 5, 6, seed=2)
    found = made.inverse(made(x, context=context), context=context)
    assert found.converged.all()
    assert (found.value - x).abs().max() < 1e-9
    assert found.status.shape == found.steps.shape == found.residual.shape == found.trace.shape[1:] == (2, 5)


def test_inverse_in_float32():
    torch.manual_seed(0)
    made, x = ConvexBlock(16, 2), torch.randn(2, 8, 16)
    assert (made.inverse(made(x), context=x).value - x).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS[2:4], ids=["past", "memory"])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_a_causal_block_is_undone_from_left_to_right(kind, n):
    made, x = block(**kind), 2 * tokens(3, n, 6)
    padding = torch.zeros(3, n, dtype=torch.bool)
    padding[1, 1:3] = True
    found = made.inverse(made(x, padding), padding)
    assert found.value.shape == x.shape
    assert found.converged.all()
    assert n == 0 or (found.value - x).abs().max() < 1e-9
    assert found.trace.shape[1:] == (3, n)


def test_the_volume_of_a_causal_block_is_that_of_its_tokens():
    """The Jacobian of the whole sequence is block triangular, so that log|det| = Σ_i log det(I + ∇²Φ_i) ≥ 0."""
    made, x = block(causal=True, memory=1), tokens(1, 4, 6)
    whole = torch.autograd.functional.jacobian(made, x).reshape(24, 24)
    each = torch.linalg.slogdet(torch.eye(6, dtype=torch.float64) + made.hessian(x).detach()).logabsdet
    torch.testing.assert_close(torch.linalg.slogdet(whole).logabsdet, each.sum(), rtol=1e-10, atol=1e-10)
    assert (each >= 0).all()


def test_heads_with_unit_gains_are_a_convolution_of_measures():
    weight, atoms, x = tokens(2, 3, 5), tokens(1, 2, 4, 3, seed=2), tokens(1, 6, 5, seed=3)
    heads = MultiheadPotential(weight, torch.ones(2, dtype=torch.float64), atoms)
    measure = multihead([Empirical(atoms[0, 0]), Empirical(atoms[0, 1])], list(weight))
    torch.testing.assert_close(heads.value(x), measure.log_normalizer(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(heads.gradient(x), measure.mean(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(heads.hessian(x), measure.fisher(x), rtol=0, atol=1e-12)


@kinds
def test_gradients_of_the_block(kind):
    made = block(4, 2, **{**kind, "hidden": 3})
    names = [name for name, _ in made.named_parameters()]

    def run(x, *weights):
        return torch.func.functional_call(made, dict(zip(names, weights, strict=True)), (x,))

    inputs = [tokens(2, 3, 4).requires_grad_(), *(p.detach().clone().requires_grad_() for p in made.parameters())]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@kinds
def test_a_sample_does_not_depend_on_its_batch_mates(kind):
    made, x = block(**kind), tokens(3, 5, 6)
    other = x.clone()
    other[1:] *= 7
    assert torch.equal(made(x)[0], made(other)[0])
    y = made(x).detach()
    other = torch.cat([y[:1], 7 * y[1:]])
    assert torch.equal(made.inverse(y, context=x).value[0], made.inverse(other, context=x).value[0])


@pytest.mark.parametrize("kind", KINDS[2:4], ids=["past", "memory"])
def test_causal_tokens_do_not_depend_on_later_ones(kind):
    made, x = block(**kind), tokens(2, 7, 6)
    other = torch.cat([x[:, :4], tokens(2, 3, 6, seed=9)], 1)
    assert torch.equal(made(x)[:, :4], made(other)[:, :4])
    assert not torch.equal(made(x)[:, 4:], made(other)[:, 4:])


@pytest.mark.parametrize("kind", KINDS[:4], ids=["plain", "relu", "past", "past_and_memory"])
def test_padding_is_as_if_absent(kind):
    made, x = block(**kind), tokens(2, 6, 6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    torch.testing.assert_close(made(x, padding)[:, :4], made(x[:, :4]), rtol=0, atol=1e-12)


@kinds
@pytest.mark.parametrize("size", [(0, 5), (2, 0), (2, 1)])
def test_few_tokens(kind, size):
    made, x = block(**kind), tokens(*size, 6).requires_grad_()
    found = made(x)
    found.sum().backward()
    assert found.shape == x.shape
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_an_empty_context_leaves_units_and_drift():
    made, x = block(), tokens(2, 3, 6)
    alone = block(memory=2)
    drive = x @ made.unit_weight.mT + made.unit_bias
    expected = x + torch.sigmoid(drive) @ made.unit_weight + made.drift
    torch.testing.assert_close(made(x, context=x[:, :0]), expected, rtol=0, atol=1e-12)
    padded = made(x, torch.ones(2, 3, dtype=torch.bool))
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-12)
    assert alone(x, context=x[:, :0]).isfinite().all()


def test_other_context_sizes_and_leading_axes():
    made, x, context = block(), tokens(2, 3, 4, 6), tokens(2, 3, 9, 6, seed=2)
    found = made(x, context=context)
    torch.testing.assert_close(found[1, 2], made(x[1, 2], context=context[1, 2]), rtol=0, atol=1e-12)
    assert made.potential(x, context=context).shape == (2, 3, 4)
    assert made.hessian(x, context=context).shape == (2, 3, 4, 6, 6)
    assert made.inverse(found, context=context).value.shape == x.shape


@kinds
def test_listeners_hear_the_attention(kind):
    made, x, calls = block(**kind), tokens(3, 5, 6), []
    with on_attention(calls.append):
        made(x)
    (call,) = calls
    atoms = call.key.shape[-2]
    seen = torch.ones(5, atoms, dtype=torch.bool).tril(atoms if call.support.offset is None else call.support.offset)
    p = torch.softmax((call.eta @ call.key.mT).masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    torch.testing.assert_close(call.output, p @ call.value, rtol=0, atol=1e-12)


def test_guarantees_differ_by_order():
    assert "left to right" in block(causal=True).guarantees
    assert "left to right" not in block().guarantees


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "ConvexBlock.heads: expected a number of heads that divides dim=6, got 4. Or give head_dim."),
        ({"hidden": -1}, "ConvexBlock.hidden: expected an integer of at least 0, got -1"),
        ({"memory": -1}, "ConvexBlock.memory: expected an integer of at least 0, got -1"),
        ({"units": "gelu"}, "ConvexBlock.units: expected one of softplus, relu, got 'gelu'"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ConvexBlock(**{"dim": 6, "heads": 2, **options})


def test_refused_tokens():
    made, x = block(), tokens(2, 5, 6)
    with pytest.raises(ValueError, match=r"ConvexBlock\.context: expected the batch axes of x"):
        made(x, context=x[:1])
    with pytest.raises(ValueError, match="and its tokens if causal"):
        block(causal=True)(x, context=x[:, :3])
    with pytest.raises(ValueError, match=r"ConvexBlock\.context: expected the tokens that were seen, got None"):
        made.inverse(x)
    with pytest.raises(ValueError, match=r"ConvexBlock\.y: expected finite values"):
        made.inverse(x / 0, context=x)
    with pytest.raises(ValueError, match=r"ConvexBlock\.key_padding_mask: expected one flag per token"):
        made(x, torch.ones(2, 5, dtype=torch.bool), context=x[:, :3])


def test_a_block_stands_in_for_a_layer_of_torchs_encoder():
    from cumulant.nn import EnergyBlock, EquilibriumBlock

    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    order = nn.Transformer.generate_square_subsequent_mask(5)
    for kind in (ConvexBlock, EnergyBlock, EquilibriumBlock):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        block = model.layers[1] = kind(16, 2)
        first = model.layers[0](x, src_key_padding_mask=padding)
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), block(first, padding))
        with pytest.raises(
            ValueError, match=r"src_mask: expected no mask of pairs, got the causal one\. .*causal=True"
        ):
            model(x, mask=order)
        model.layers[1] = kind(16, 2, causal=True)
        first = model.layers[0](x, src_mask=order)
        torch.testing.assert_close(model(x, mask=order, is_causal=True), model.layers[1](first))
        with pytest.raises(ValueError, match="got another"):
            model.layers[1](x, src_mask=torch.zeros(5, 5).bool())
