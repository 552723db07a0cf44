"""Hopfield layers: retrieval without projections, β per head, samples that stop one by one, records and edges."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch import nn

from cumulant import hopfield
from cumulant.kernels import moments
from cumulant.nn import Hopfield, HopfieldLayer, HopfieldPooling, MultiheadAttention, on_attention
from cumulant.solve import Status


def normal(*size, seed=0):
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def memory(dim, heads=1, **options):
    return Hopfield(dim, heads, dtype=torch.float64, **options)


def oracle(state, patterns, values, beta, steps):
    """Iterated softmax in NumPy; the last step averages the values."""
    for _ in range(steps - 1):
        state = softmax(beta * state @ patterns.T, -1) @ patterns
    return softmax(beta * state @ patterns.T, -1) @ values


def test_stored_patterns_are_retrieved_without_any_projection():
    patterns = nn.functional.normalize(normal(2, 6, 16), dim=-1)
    layer = memory(16, beta=40.0)
    assert [name for name, _ in layer.named_parameters()] == ["log_beta"]
    noisy = patterns + 0.05 * normal(2, 6, 16, seed=1)
    assert (layer(noisy, patterns) - patterns).norm(dim=-1).max() < 1e-3
    assert layer.last is not None
    assert (layer.last.status == Status.CONVERGED).all()


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("own_values", [False, True])
def test_a_number_of_steps_is_its_definition(steps, own_values):
    state, stored, value = normal(2, 3, 6), normal(2, 5, 6, seed=1), normal(2, 5, 8, seed=2)
    betas = [0.5, 3.0]
    layer = memory(6, 2, beta=betas, steps=steps, value_size=8 if own_values else None)
    found = layer(state, stored, value if own_values else None).detach().numpy()
    for b in range(2):
        for h in range(2):
            width = 4 if own_values else 3
            s, k = (x[b, :, 3 * h : 3 * h + 3].numpy() for x in (state, stored))
            v = value[b, :, 4 * h : 4 * h + 4].numpy() if own_values else k
            expected = oracle(s, k, v, betas[h], steps)
            assert np.abs(found[b, :, width * h : width * h + width] - expected).max() < 1e-12


def test_one_step_with_all_projections_is_multi_head_attention():
    ours = memory(12, 3, steps=1, projections=("state", "stored", "value", "output"), learn_beta=False)
    theirs = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        parts = [ours.get_submodule(f"{name}_projection") for name in ("state", "stored", "value")]
        theirs.in_proj_weight.copy_(torch.cat([part.get_parameter("weight") for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.get_parameter("bias") for part in parts]))
        theirs.out_proj.load_state_dict(ours.get_submodule("output_projection").state_dict())
    x, c = normal(2, 4, 12), normal(2, 5, 12, seed=1)
    mask = {"attn_mask": torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) < 0.3}
    mask |= {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}
    assert (ours(x, c, **mask) - theirs(x, c, c, **mask)[0]).abs().max() < 1e-12


def test_the_end_is_a_fixed_point_with_its_gradient():
    layer = memory(4, 2, beta=[1.5, 4.0], tol=1e-13)
    state, stored = normal(1, 3, 4), normal(1, 5, 4, seed=1)
    again = memory(4, 2, beta=[1.5, 4.0], steps=400)
    assert (layer(state, stored) - again(state, stored)).abs().max() < 1e-10
    through, implicit = (
        torch.autograd.grad(m(state, k).square().sum(), [k, m.log_beta])
        for m, k in ((again, stored.clone().requires_grad_()), (layer, stored.clone().requires_grad_()))
    )
    for a, b in zip(through, implicit, strict=True):
        assert (a - b).abs().max() < 1e-8
    assert layer.log_beta.shape == (2,)


def test_gradients_through_steps():
    layer = memory(4, 2, steps=2, value_size=2)
    inputs = [x.requires_grad_() for x in (normal(1, 2, 4), normal(1, 3, 4, seed=1), normal(1, 3, 2, seed=2))]
    assert torch.autograd.gradcheck(layer, tuple(inputs))
    log_beta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    call = lambda b: torch.func.functional_call(layer, {"log_beta": b}, tuple(x.detach() for x in inputs))  # noqa: E731
    assert torch.autograd.gradcheck(call, (log_beta,))


def test_beta_is_of_a_head_and_stays_positive():
    layer = memory(6, 3)
    assert torch.allclose(layer.beta, torch.full((3,), 1 / math.sqrt(2), dtype=torch.float64), atol=1e-12)
    state, stored = normal(2, 4, 6), normal(2, 5, 6, seed=1)
    before = layer.energy(state, stored)
    with torch.no_grad():
        layer.log_beta[1] = 1.0
    changed = (layer.energy(state, stored) - before).abs().amax((0, 2))
    assert changed[1] > 1e-3
    assert changed[0] == changed[2] == 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(state, stored).sum().backward()
    optimizer.step()
    assert (layer.beta > 0).all()
    fixed = memory(6, 3, learn_beta=False)
    assert not [*fixed.parameters()]
    assert "log_beta" in fixed.state_dict()


def test_energy_is_its_definition_and_descends():
    state, stored, beta = normal(1, 3, 4), normal(1, 6, 4, seed=1), 2.0
    layer = memory(4, beta=beta)
    found = layer.energy(state, stored)
    x, k = state[0].numpy(), stored[0].numpy()
    lse = (logsumexp(beta * x @ k.T, -1) - math.log(6)) / beta
    expected = -lse + (np.square(x).sum(-1) + np.square(k).sum(-1).max()) / 2
    assert found.shape == (1, 1, 3)
    assert np.abs(found[0, 0].detach().numpy() - expected).max() < 1e-12
    recall = layer.retrieve(state, stored)
    assert torch.equal(recall.output, layer(state, stored))
    assert (recall.heads.energy[0] - found).abs().max() < 1e-12
    assert (recall.heads.energy.diff(dim=0) < 1e-12).all()


def test_a_sample_stops_on_its_own():
    layer, stored = memory(8, beta=1.2), normal(3, 9, 8, seed=1)
    state, other = normal(3, 4, 8), normal(3, 4, 8, seed=2)
    other[0] = state[0]
    far = stored.clone()
    far[1:] *= 5
    first, steps = layer.retrieve(state, stored).output[0], layer.last.steps[0]
    assert torch.equal(layer.retrieve(other, far).output[0], first)
    assert torch.equal(layer.last.steps[0], steps)
    assert layer.last.steps.unique().numel() > 1


def test_masks_are_torch_s_and_absent_patterns_do_not_count():
    layer = memory(4, 2, beta=2.0)
    state, stored = normal(2, 3, 4), normal(2, 5, 4, seed=1)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    found = layer(state, stored, key_padding_mask=padding)
    assert (found[1] - layer(state[1], stored[1, :2])).abs().max() < 1e-10
    energy = layer.energy(state, stored, key_padding_mask=padding)
    assert (energy[1] - layer.energy(state[1], stored[1, :2])).abs().max() < 1e-12
    own = ~torch.eye(3, dtype=torch.bool)
    assert (layer(state, attn_mask=own) - state).abs().max() < 1e-12
    by_head = own.expand(4, 3, 3)
    assert (layer(state, attn_mask=by_head) - state).abs().max() < 1e-12


def test_a_state_that_sees_nothing_retrieves_zero():
    layer = memory(4, 2)
    state, stored = normal(2, 3, 4), normal(2, 5, 4, seed=1).requires_grad_()
    padding = torch.tensor([[True] * 5, [False] * 5])
    out = layer(state, stored, key_padding_mask=padding)
    assert (out[0] == 0).all()
    assert (layer.last.status == Status.CONVERGED).all()
    (grad,) = torch.autograd.grad(out.sum(), stored)
    assert (grad[0] == 0).all()
    assert grad.isfinite().all()
    energy = layer.energy(state, stored, key_padding_mask=padding)[0]
    half = state[0].unflatten(-1, (2, 2)).square().sum(-1).T / 2
    assert (energy - half).abs().max() < 1e-12
    assert (layer(state, stored[:, :0]) == 0).all()
    assert layer(state[:, :0], stored).shape == (2, 0, 4)


def test_one_memory_without_a_batch_axis_and_shared_by_a_batch():
    layer = memory(4, 2, beta=2.0)
    state, stored = normal(3, 2, 4), normal(5, 4, seed=1)
    every = layer(state, stored)
    for b in range(3):
        recall = layer.retrieve(state[b], stored)
        assert (recall.output - every[b]).abs().max() < 1e-10
        assert recall.heads.status.shape == (2, 2)
        assert recall.heads.energy.shape[1:] == (2, 2)
    assert layer.energy(state[0], stored).shape == (2, 2)
    assert (layer(state[0]) - layer(state[0], state[0])).abs().max() == 0


def test_other_widths_are_projected():
    layer = memory(6, 2, hidden_size=8, stored_size=5, projections=("state", "stored", "output"))
    assert layer(normal(2, 3, 6), normal(2, 4, 5)).shape == (2, 3, 6)
    valued = memory(4, 2, value_size=6, projections=("output",))
    assert valued(normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 6)).shape == (2, 3, 4)


def test_states_that_do_not_come_to_rest_are_told_of_once():
    state, stored = normal(2, 3, 4), normal(2, 5, 4, seed=1)
    layer = memory(4, max_steps=1, tol=1e-14)
    with pytest.warns(RuntimeWarning, match=r"Hopfield.forward: expected states at rest within 1 steps, got 6 of 6"):
        layer(state, stored)
    assert (layer.last.status == Status.MAX_STEPS).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(state, stored)
    with pytest.raises(ArithmeticError, match=r"states at rest within 1 steps"):
        memory(4, max_steps=1, tol=1e-14, fallback="raise")(state, stored)


def test_listeners_hear_the_state_at_rest():
    layer, calls = memory(4, 2, beta=[1.0, 3.0]), []
    state, stored = normal(2, 3, 4), normal(5, 4, seed=1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with on_attention(calls.append):
        out = layer(state, stored, key_padding_mask=padding)
    (call,) = calls
    assert call.scale == pytest.approx(2.0)
    assert call.key.shape == (2, 2, 5, 2)
    mean = moments(call.eta, call.key, call.value, statistics=("mean",), **call.support.arguments()).mean
    assert (mean - call.output).abs().max() < 1e-12
    assert (call.output.transpose(1, 2).flatten(-2) - out).abs().max() < 1e-12


# ---------------------------------------------------------------------- learned questions, learned patterns


def test_pooling_does_not_depend_on_order_or_padding():
    pool = HopfieldPooling(6, 2, quantity=3, dtype=torch.float64)
    stored = normal(2, 7, 6)
    found = pool(stored)
    assert found.shape == (2, 3, 6)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert (pool(stored[:, order]) - found).abs().max() < 1e-10
    padded = torch.cat([stored, normal(2, 2, 6, seed=3)], 1)
    mask = torch.tensor([[False] * 7 + [True] * 2] * 2)
    assert (pool(padded, key_padding_mask=mask) - found).abs().max() < 1e-10
    assert (pool(stored[0]) - found[0]).abs().max() < 1e-10
    assert pool.energy(padded, key_padding_mask=mask).shape == (2, 2, 3)
    expected = hopfield.energy(pool.state[:, :3], stored[0, :, :3], beta=pool.memory.beta[0])
    assert (pool.energy(stored[0])[0] - expected).abs().max() < 1e-12
    names = [name for name, _ in pool.named_parameters()]
    assert names == ["state", "memory.log_beta"]


def test_pooling_of_values():
    pool = HopfieldPooling(6, 1, quantity=2, value_size=3, steps=1, dtype=torch.float64)
    stored, value = normal(2, 7, 6), normal(2, 7, 3, seed=1)
    p = torch.softmax(pool.memory.beta * pool.state @ stored.mT, -1)
    assert (pool(stored, value) - p @ value).abs().max() < 1e-12


def test_a_layer_of_learned_patterns():
    layer = HopfieldLayer(6, 2, quantity=5, dtype=torch.float64)
    state = normal(3, 4, 6)
    memory = Hopfield(6, 2, dtype=torch.float64)
    assert (layer(state) - memory(state, layer.stored)).abs().max() < 1e-12
    assert (layer.energy(state) - memory.energy(state, layer.stored)).abs().max() < 1e-12
    assert (layer.retrieve(state).heads.status == Status.CONVERGED).all()
    assert layer(state[0]).shape == (4, 6)
    separate = HopfieldLayer(6, 1, quantity=5, value_size=2, steps=1, dtype=torch.float64)
    p = torch.softmax(separate.memory.beta * state @ separate.stored.mT, -1)
    assert (separate(state) - p @ separate.value).abs().max() < 1e-12
    names = [name for name, _ in separate.named_parameters()]
    assert names == ["stored", "value", "memory.log_beta"]
    twin = HopfieldLayer(6, 1, quantity=5, value_size=2, steps=1, dtype=torch.float64)
    twin.load_state_dict(separate.state_dict(), strict=True)
    assert torch.equal(twin(state), separate(state))


def test_learned_patterns_learn():
    """Two classes on a circle, classified by patterns with values, in a few steps of Adam."""
    torch.manual_seed(0)
    angle = 2 * math.pi * torch.rand(200)
    x, y = torch.stack([angle.cos(), angle.sin()], -1), (angle.sin() * angle.cos() > 0).long()
    layer = HopfieldLayer(2, quantity=8, value_size=2, steps=1, beta=4.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        loss = nn.functional.cross_entropy(layer(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (layer(x).argmax(-1) == y).double().mean() > 0.95


BAD = {
    "divide": (lambda: Hopfield(10, 3), ValueError, r"num_heads: expected a number that divides hidden_size=10, got 3"),
    "beta": (
        lambda: Hopfield(4, beta=0.0),
        ValueError,
        r"beta: expected a positive number, or one for each of 1 heads",
    ),
    "negative beta": (lambda: Hopfield(4, 2, beta=[1.0, -1.0]), ValueError, r"Hopfield.beta: .* got \[1.0, -1.0\]"),
    "betas": (lambda: Hopfield(4, 2, beta=torch.ones(3)), ValueError, r"Hopfield.beta: expected a positive number"),
    "projection": (
        lambda: Hopfield(4, projections=("query",)),
        ValueError,
        r"projections: expected names among state, stored, value, output, got 'query'",
    ),
    "hidden": (
        lambda: Hopfield(4, hidden_size=8),
        ValueError,
        r"Hopfield.state: expected patterns as wide as hidden_size=8, got 4. Add 'state' to projections",
    ),
    "stored": (lambda: Hopfield(4, stored_size=5), ValueError, r"Hopfield.stored: .* Add 'stored' to projections"),
    "values": (lambda: Hopfield(4, 2, value_size=3), ValueError, r"value_size: expected a multiple of num_heads=2"),
    "steps": (lambda: Hopfield(4, steps=0), ValueError, r"steps: expected a number of steps ≥ 1, or None, got 0"),
    "fallback": (lambda: Hopfield(4, fallback="x"), ValueError, r"fallback: expected 'last' or 'raise', got 'x'"),
    "quantity": (lambda: HopfieldLayer(4, quantity=0), ValueError, r"HopfieldLayer.quantity: expected a positive int"),
    "pooling": (lambda: HopfieldPooling(4, quantity=0), ValueError, r"HopfieldPooling.quantity: expected a positive"),
    "width": (lambda: Hopfield(4)(torch.zeros(2, 3)), ValueError, r"state: expected shape \(batch, tokens, 4\)"),
    "type": (lambda: Hopfield(4)(torch.zeros(2, 4).double()), TypeError, r"state: expected dtype torch.float32"),
    "batch": (
        lambda: Hopfield(4)(torch.zeros(2, 3, 4), torch.zeros(3, 3, 4)),
        ValueError,
        r"stored: expected the batch of state \(2\), got 3",
    ),
    "pairs": (
        lambda: Hopfield(4)(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, 4)),
        ValueError,
        r"value: expected one value for each of 3 patterns, got \(2, 4\)",
    ),
    "padding": (
        lambda: Hopfield(4)(torch.zeros(2, 4), key_padding_mask=torch.zeros(3, dtype=torch.bool)),
        ValueError,
        r"Hopfield.key_padding_mask: expected shape \(1, 2\), got \(1, 3\)",
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_sentence(bad):
    function, kind, message = bad
    with pytest.raises(kind, match=message):
        function()
