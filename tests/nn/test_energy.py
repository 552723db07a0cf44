"""EnergyBlock: its energy and gradient against autograd on a plain formula, its descent, its order, its edges."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from cumulant.nn.calls import on_attention
from cumulant.nn.energy import EnergyBlock

KINDS = [{}, {"self_included": True}, {"causal": True}, {"causal": True, "self_included": True}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")


def block(dim=8, heads=2, *, seed=0, **options) -> EnergyBlock:
    torch.manual_seed(seed)
    made = EnergyBlock(dim, heads, **options).double()
    with torch.no_grad():  # away from the symmetric start
        made.log_beta.add_(torch.randn(heads))
        made.log_gain.add_(0.3)
        made.shift.add_(0.2 * torch.randn(dim))
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def visible(n, kind, padding=None):
    order = np.arange(n)[:, None] - np.arange(n)
    seen = order >= 0 if kind.get("causal") else np.ones((n, n), dtype=bool)
    seen = seen if kind.get("self_included") else seen & (order != 0)
    return seen if padding is None else seen & ~padding


def numpy_energy(made, x, kind, padding=None):
    """E of every token of one sample (n, D), head by head and pair by pair."""
    weights = {name: p.detach().numpy() for name, p in made.named_parameters()}
    spread = np.sqrt(x.var(-1, keepdims=True) + made.eps)
    g = np.exp(weights["log_gain"]) * (x - x.mean(-1, keepdims=True)) / spread + weights["shift"]
    energy = -0.5 * (np.maximum(g @ weights["memory"].T, 0) ** 2).sum(-1)
    seen = visible(len(x), kind, padding)
    for w, v, log_beta in zip(weights["query"], weights["key"], weights["log_beta"], strict=True):
        beta = np.exp(log_beta)
        for c in range(len(x)):
            scores = [beta * (v @ g[b]) @ (w @ g[c]) for b in range(len(x)) if seen[c, b]]
            energy[c] -= logsumexp(scores) / beta if scores else 0.0
    return energy if padding is None else np.where(padding, 0.0, energy)


def torch_energy(made, g, kind):
    """E of samples (b, n, D) as a function of g, for autograd."""
    scores = torch.einsum("hdD,bnD->bhnd", made.query, g) @ torch.einsum("hdD,bnD->bhnd", made.key, g).mT
    beta = made.log_beta.exp()[:, None, None]
    seen = torch.as_tensor(visible(g.shape[1], kind))
    rows = (beta * scores).masked_fill(~seen, -torch.inf)[:, :, seen.any(-1)]
    heads = -(rows.logsumexp(-1) / beta[..., 0]).sum((-2, -1))
    return heads - (g @ made.memory.mT).relu().square().sum((-2, -1)) / 2


@kinds
@pytest.mark.parametrize("n", [1, 2, 7])
def test_energy_is_the_plain_formula(kind, n):
    made, x = block(**kind), tokens(3, n, 8)
    expected = np.stack([numpy_energy(made, sample, kind) for sample in x.numpy()])
    np.testing.assert_allclose(made.energy(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@kinds
def test_padding_is_as_if_absent(kind):
    made, x = block(**kind), tokens(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = padding[1, 1] = True
    expected = np.stack(
        [numpy_energy(made, *pair) for pair in zip(x.numpy(), [kind] * 2, padding.numpy(), strict=True)]
    )
    np.testing.assert_allclose(made.energy(x, padding).detach().numpy(), expected, rtol=1e-12)
    found = made(x, padding)
    assert torch.equal(found[padding], x[padding])
    torch.testing.assert_close(found[0, :4], made(x[:1, :4])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS[:2], ids=["plain", "self_included"])
def test_two_term_gradient_is_that_of_autograd(kind):
    made, x = block(heads=4, head_dim=3, memories=11, **kind), tokens(5, 9, 8)
    g = made.normalize(x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(torch_energy(made, g, kind).sum(), g)
    assert (made.gradient(x) - expected).abs().max() < 1e-10


@kinds
def test_gradient_given_a_context_is_that_of_autograd(kind):
    made, x, context = block(**kind), tokens(2, 5, 8), tokens(2, 5, 8, seed=2)
    start = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(made.energy(start, context=context).sum(), start)
    # the chain rule through LayerNorm: dE/dx = (∂²L/∂x²) ∂E/∂g
    hessian = torch.func.vmap(torch.func.vmap(torch.func.hessian(made.lagrangian)))(x)
    found = (hessian @ made.gradient(x, context=context)[..., None])[..., 0]
    assert (found - expected).abs().max() < 1e-10


def test_causal_gradient_is_the_query_term_alone():
    made, x = block(causal=True), tokens(2, 5, 8)
    torch.testing.assert_close(made.gradient(x), made.gradient(x, context=x), rtol=0, atol=0)
    g = made.normalize(x).detach().requires_grad_()
    (whole,) = torch.autograd.grad(torch_energy(made, g, {"causal": True}).sum(), g)
    assert (whole - made.gradient(x))[:, -1].abs().max() < 1e-12  # nobody looks at the last token
    assert (whole - made.gradient(x))[:, 0].abs().max() > 1e-2


def test_layer_norm_is_the_gradient_of_its_lagrangian_token_by_token():
    made, x = block(), tokens(11, 8).requires_grad_()
    (expected,) = torch.autograd.grad(made.lagrangian(x).sum(), x)
    assert (made.normalize(x) - expected).abs().max() < 1e-12
    hessian = torch.func.vmap(torch.func.hessian(made.lagrangian))(x.detach())
    assert torch.linalg.eigvalsh(hessian).min() > -1e-12
    assert (hessian @ torch.ones(8, dtype=torch.float64)).abs().max() < 1e-12


def test_gap_of_the_lagrangian_closes_with_epsilon():
    """⟨g,x⟩ − L = −γ D ε / √(σ² + ε) per token without shift: 0 as ε → 0."""
    made, x, gaps = block(), tokens(11, 8), []
    with torch.no_grad():
        made.shift.zero_()
    for made.eps in (1e-2, 1e-5, 1e-12):
        gaps.append(((made.normalize(x) * x).sum(-1) - made.lagrangian(x)).detach())
        size = (x.var(-1, correction=0) + made.eps).sqrt()
        torch.testing.assert_close(gaps[-1], -made.log_gain.detach().exp() * 8 * made.eps / size, rtol=1e-4, atol=1e-13)
    assert gaps[0].abs().max() > 1e-2
    assert gaps[-1].abs().max() < 1e-10


@pytest.mark.parametrize("step_size", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("included", [False, True], ids=["others", "all"])
def test_energy_never_rises(included, step_size):
    made, x = block(steps=12, step_size=step_size, self_included=included), 3 * tokens(4, 6, 8)
    found = made.descend(x)
    assert found.energies.shape == (13, 4, 6)
    assert (found.trace.diff(dim=0) <= 0).all()
    assert (found.trace[-1] < found.trace[0] - 1e-3).all()
    torch.testing.assert_close(found.energies[-1], made.energy(found.state).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made(x), found.state, rtol=0, atol=0)


@pytest.mark.parametrize("step_size", [0.1, 1.0, 1e6])
@pytest.mark.parametrize("included", [False, True], ids=["past", "past_and_self"])
@pytest.mark.parametrize("attract", [1, -1])
def test_causal_energy_of_every_token_never_rises_whatever_the_step(included, step_size, attract):
    made, x = block(causal=True, steps=12, step_size=step_size, self_included=included), 3 * tokens(4, 6, 8)
    with torch.no_grad():
        made.key.copy_(attract * made.query)
    found = made.descend(x)
    assert (found.energies.diff(dim=0) <= 1e-12 * found.energies[:-1].abs()).all()
    assert (found.trace[-1] < found.trace[0] - 1e-3).all()
    torch.testing.assert_close(found.energies[-1], made.energy(found.state, context=x).detach(), rtol=1e-12, atol=1e-12)


def repelling(**options) -> EnergyBlock:
    """Every token wants to be opposite to the mean of the others, and a long step takes all of them to one side."""
    made = block(heads=1, memories=0, beta=0.01, step_size=10.0, steps=5, **options)
    with torch.no_grad():
        made.key.copy_(3 * torch.eye(8))
        made.query.copy_(-3 * torch.eye(8))
    return made


def test_backtracking_shortens_a_step_that_would_raise_the_energy():
    x = tokens(4, 9, 8)
    assert (repelling(search="fixed").descend(x).trace.diff(dim=0) > 0).any(0).all()
    found = repelling().descend(x)
    assert (found.trace.diff(dim=0) <= 0).all()
    assert (found.lengths[0] < 10).all()
    assert (found.lengths == found.lengths[..., :1]).all()  # one length a sample


def test_energy_never_rises_in_float32_either():
    torch.manual_seed(0)
    made, x = EnergyBlock(32, 4, steps=30, step_size=8.0), torch.randn(4, 40, 32)
    assert (made.descend(x).trace.diff(dim=0) <= 0).all()


def test_short_fixed_steps_descend():
    found = block(search="fixed", step_size=0.01, steps=30).descend(tokens(4, 6, 8))
    assert (found.trace.diff(dim=0) < 0).all()
    assert (found.lengths == 0.01).all()


def test_fixed_step_of_the_energy_and_its_state():
    made, x = block(search="fixed", step_size=0.3, steps=2), tokens(2, 5, 8)
    once = x - 0.3 * made.gradient(x)
    twice = once - 0.3 * made.gradient(once)
    torch.testing.assert_close(made(x), twice, rtol=0, atol=1e-13)
    expected = torch.stack([made.energy(state) for state in (x, once, twice)]).detach()
    torch.testing.assert_close(made.descend(x).energies, expected, rtol=1e-13, atol=1e-13)


def test_a_stationary_point_stays():
    made = block(memories=0, steps=3)
    same = tokens(1, 1, 8)
    found = made.descend(same)
    assert torch.equal(found.state, same)  # one token sees nobody: E = 0
    assert torch.equal(found.trace, torch.zeros(4, 1, dtype=torch.float64))


@kinds
def test_a_sample_does_not_depend_on_its_batch_mates(kind):
    made, x = block(step_size=5.0, **kind), 3 * tokens(4, 6, 8)
    other = x.clone()
    other[1:] *= 7
    assert torch.equal(made(x)[0], made(other)[0])


@pytest.mark.parametrize("kind", KINDS[2:], ids=["past", "past_and_self"])
def test_causal_tokens_do_not_depend_on_later_ones(kind):
    made, x = block(step_size=5.0, **kind), 3 * tokens(2, 7, 8)
    other = x.clone()
    other[:, 4:] = tokens(2, 3, 8, seed=9)
    assert torch.equal(made(x)[:, :4], made(other)[:, :4])
    assert not torch.equal(made(x)[:, 4:], made(other)[:, 4:])


@kinds
def test_gradients_of_the_block(kind):
    made = block(4, 2, memories=3, steps=2, step_size=0.4, **kind)
    names = [name for name, _ in made.named_parameters()]

    def run(x, *weights):
        return torch.func.functional_call(made, dict(zip(names, weights, strict=True)), (x,))

    inputs = [tokens(2, 3, 4).requires_grad_(), *(p.detach().clone().requires_grad_() for p in made.parameters())]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6, fast_mode=True)


@kinds
@pytest.mark.parametrize("size", [(0, 5), (2, 0), (2, 1)])
def test_few_tokens(kind, size):
    made, x = block(**kind), tokens(*size, 8).requires_grad_()
    found = made(x)
    found.sum().backward()
    assert found.shape == x.shape
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_all_padding_returns_the_input():
    made, x = block(), tokens(2, 3, 8).requires_grad_()
    found = made(x, torch.ones(2, 3, dtype=torch.bool))
    found.sum().backward()
    assert torch.equal(found, x)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_shapes_and_zero_steps():
    made, x = block(steps=0), tokens(2, 3, 5, 8)
    assert torch.equal(made(x), x)
    found = made.descend(x)
    assert found.energies.shape == (1, 2, 3, 5)
    assert found.lengths.shape == (0, 2, 3, 5)
    assert block()(x[0, 0]).shape == (5, 8)


@kinds
def test_listeners_hear_the_attention_of_the_first_step(kind):
    made, x, calls = block(**kind), tokens(3, 5, 8), []
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with on_attention(calls.append):
        made(x, padding)
    (call,) = calls
    scores = call.eta @ call.key.mT
    seen = torch.as_tensor(np.stack([visible(5, kind, p) for p in padding.numpy()]))[:, None]
    p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    torch.testing.assert_close(call.output, p @ call.value, rtol=1e-10, atol=1e-12)
    assert call.scale == pytest.approx(made.log_beta.exp().mean().item())
    assert torch.equal(call.rows, ~padding)


def test_guarantees_are_one_sentence_for_every_kind():
    said = {block(**kind, search=search).guarantees for kind in KINDS for search in ("backtracking", "fixed")}
    assert len(said) == 3
    assert all("." not in text and text for text in said)


def test_beta_per_head_and_its_default():
    made = EnergyBlock(8, 2, beta=torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(made.log_beta.detach().exp(), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(EnergyBlock(8, 2).log_beta.detach(), torch.full((2,), -math.log(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "EnergyBlock.heads: expected a number of heads that divides dim=8, got 3"),
        ({"heads": 0}, "EnergyBlock.heads: expected an integer of at least 1, got 0"),
        ({"head_dim": 0}, "EnergyBlock.head_dim: expected an integer of at least 1, got 0"),
        ({"memories": -1}, "EnergyBlock.memories: expected an integer of at least 0, got -1"),
        ({"beta": 0.0}, "EnergyBlock.beta: expected a positive number, or 2 of them, got 0.0"),
        ({"beta": torch.ones(3)}, "EnergyBlock.beta: expected a positive number, or 2 of them"),
        ({"steps": -1}, "EnergyBlock.steps: expected an integer of at least 0"),
        ({"step_size": 0.0}, "EnergyBlock.step_size: expected a positive number, got 0.0"),
        ({"search": "exact"}, "EnergyBlock.search: expected one of backtracking, fixed, got 'exact'"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EnergyBlock(**{"dim": 8, "heads": 2, **options})


def test_refused_tokens():
    made, x = block(), tokens(2, 5, 8)
    with pytest.raises(ValueError, match=re.escape("EnergyBlock.x: expected tokens of shape (*batch, n, dim=8)")):
        made(x[..., :7])
    with pytest.raises(TypeError, match=r"EnergyBlock\.x: expected dtype torch.float64 as the weights"):
        made(x.float())
    with pytest.raises(TypeError, match=r"EnergyBlock\.key_padding_mask: expected a Boolean tensor, got torch.float64"):
        made(x, x[..., 0])
    with pytest.raises(ValueError, match=r"EnergyBlock\.key_padding_mask: expected one flag per token"):
        made(x, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"EnergyBlock\.context: expected the shape of x"):
        made.energy(x, context=x[:, :3])
