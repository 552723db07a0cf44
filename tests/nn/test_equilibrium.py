"""EquilibriumBlock: its fixed point, its gradient against the unrolled one, its memory, its bounds, its fallbacks."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from cumulant.nn.calls import on_attention
from cumulant.nn.equilibrium import EquilibriumBlock
from cumulant.solve import Damped, Picard, Status

KINDS = [{}, {"causal": True}, {"hidden": 0}, {"causal": True, "solver": Picard()}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["plain", "causal", "attention", "picard"])


def block(dim=8, heads=2, *, seed=0, **options) -> EquilibriumBlock:
    torch.manual_seed(seed)
    made = EquilibriumBlock(dim, heads, **{"hidden": 12, "tol": 1e-12, "max_steps": 300, **options}).double()
    with torch.no_grad():
        made.up_bias.add_(0.3 * torch.randn(len(made.up_bias)))
        made.shift.add_(0.1 * torch.randn(dim))
        made.gain.add_(0.1 * torch.randn(dim))
    return made


def expansive(**options) -> EquilibriumBlock:
    """Weights so large that no solver settles in a few steps."""
    made = block(**{"max_steps": 6, "tol": 1e-6, **options})
    with torch.no_grad():
        for weight in (made.output, made.down, made.query):
            weight *= 20
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numpy_layer(made, z, x):
    """N(x + f(z)) of one sample, query by query."""
    w = {name: p.detach().numpy() for name, p in made.named_parameters()}
    step = np.maximum(z @ w["up"].T + w["up_bias"], 0) @ w["down"].T + w["down_bias"]
    for h in range(made.heads):
        for i in range(len(z)):
            last = i + 1 if made.causal else len(z)
            scores = (z[:last] @ w["key"][h].T) @ (w["query"][h] @ z[i]) / np.sqrt(made.head_dim)
            p = np.exp(scores - scores.max())
            step[i] += w["output"][h].T @ (w["value"][h] @ (p / p.sum() @ z[:last]))
    y = x + step
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + made.eps)
    return y * w["gain"] + w["shift"]


@kinds
@pytest.mark.parametrize("n", [1, 5])
def test_the_answer_is_a_fixed_point_of_the_plain_formula(kind, n):
    made, x = block(**kind), tokens(3, n, 8)
    z = made(x).detach()
    for mine, given in zip(z.numpy(), x.numpy(), strict=True):
        np.testing.assert_allclose(numpy_layer(made, mine, given), mine, rtol=0, atol=1e-9)
    torch.testing.assert_close(made.layer(z, x).detach(), z, rtol=0, atol=1e-9)
    assert made.last is not None
    assert made.last.converged.all()
    assert (made.last.residual < 1e-10).all()
    assert (made.last.rate < 1).all()
    assert made.last.status.shape == made.last.steps.shape == (3,)


@kinds
def test_gradient_is_that_of_the_unrolled_iteration(kind):
    made, x = block(**kind), tokens(2, 5, 8).requires_grad_()
    inputs = [x, *made.parameters()]
    found = torch.autograd.grad(made(x).square().sum() + made(x)[0, 0, 0], inputs)
    z = x
    for _ in range(200):
        z = made.layer(z, x)
    expected = torch.autograd.grad(z.square().sum() + z[0, 0, 0], inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_the_way_back_has_a_status():
    made, x = block(), tokens(2, 5, 8)
    made(x).sum().backward()
    assert made.backward_last is not None
    assert made.backward_last.converged.all()
    made.max_steps = 2  # too few on either way
    with pytest.warns(RuntimeWarning, match=r"EquilibriumBlock\.forward"):
        made(x)
    made.tol = 1e-2
    z = block(tol=1e-2)(x)
    assert z.isfinite().all()
    made.max_steps = 300
    out = made(x)
    made.max_steps, made.tol = 1, 1e-14
    with pytest.warns(RuntimeWarning, match=r"EquilibriumBlock\.backward: expected a fixed point within 1 steps"):
        out.square().sum().backward()
    assert made.backward_last is not None
    assert not made.backward_last.converged.any()


@pytest.mark.filterwarnings("ignore:EquilibriumBlock.forward")
def test_a_sample_without_a_fixed_point_has_the_gradient_of_one_application():
    made, x = expansive(fallback="last"), tokens(2, 5, 8)
    z = made(x)
    assert made.last is not None
    assert not made.last.converged.any()
    (found,) = torch.autograd.grad(z.square().sum(), made.output)
    attached = made.layer(z.detach(), x)
    (expected,) = torch.autograd.grad(attached, made.output, 2 * z.detach())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_nothing_to_differentiate():
    made, x = block().requires_grad_(False), tokens(2, 5, 8)
    assert not made(x).requires_grad
    with torch.no_grad():
        assert not block()(x).requires_grad


def saved_bytes(made, x) -> int:
    kept, held = {}, []

    def pack(tensor):
        held.append(tensor)  # alive until all are counted: no address is used twice
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        made(x).sum().backward()
    return sum(kept.values())


def test_memory_does_not_depend_on_the_number_of_solver_steps():
    x, seen = tokens(2, 6, 8), {}
    for tol in (1e-2, 1e-12):
        made = block(tol=tol, solver=Damped(0.3))
        size = saved_bytes(made, x)
        assert made.last is not None
        seen[int(made.last.steps.max())] = size
    few, many = sorted(seen)
    assert many > 4 * few
    assert seen[many] == seen[few]


def test_samples_stop_one_by_one_and_do_not_depend_on_each_other():
    made, x = block(), tokens(3, 5, 8)
    other = torch.cat([x[:1], 30 * x[1:]])
    first = made(x)[0]
    assert torch.equal(first, made(other)[0])
    assert made.last is not None
    assert made.last.steps[1] < made.last.steps[0]  # a large input leaves f little to say


def test_causal_to_the_tolerance():
    made, x = block(causal=True), tokens(2, 7, 8)
    other = torch.cat([x[:, :4], tokens(2, 3, 8, seed=9)], 1)
    assert (made(x) - made(other))[:, :4].abs().max() < 1e-10
    assert (made(x) - made(other))[:, 4:].abs().max() > 1e-2


def test_the_way_back_does_not_depend_on_the_scale_of_the_loss():
    made, x = block(tol=1e-3), tokens(2, 5, 8)
    found = []
    for scale in (1.0, 1e-8):
        made.zero_grad()
        (scale * made(x).sin().sum()).backward()
        found.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]) / scale)
        assert made.backward_last is not None
        assert (made.backward_last.steps > 2).all()
    assert (found[0] - found[1]).norm() < 1e-9 * found[0].norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("solver", [None, Picard(), Damped(0.5)], ids=["anderson", "picard", "damped"])
@pytest.mark.parametrize("fallback", ["last", "unrolled"])
def test_a_causal_block_that_does_not_converge_does_not_look_ahead(solver, fallback):
    made, x = block(causal=True, solver=solver, fallback=fallback, max_steps=6), 0.1 * tokens(2, 7, 8)
    with torch.no_grad():
        made.output.mul_(10)
        made.down.mul_(10)
    other = torch.cat([x[:, :4], 0.1 * tokens(2, 3, 8, seed=9)], 1)
    first, second = made(x), made(other)
    assert made.last is not None
    assert not made.last.converged.any()
    assert (made.layer(first, x) - first).norm() > 1e-2
    assert (first - second)[:, :4].abs().max() < 1e-12
    assert (first - second)[:, 4:].abs().max() > 1e-2


def test_the_residual_of_a_causal_sample_is_that_of_its_answer():
    made, x = block(causal=True, max_steps=3), tokens(2, 5, 8)
    with pytest.warns(RuntimeWarning, match="Their last iterate is used"), torch.no_grad():
        z = made(x)
    assert made.last is not None
    assert torch.allclose((made.layer(z, x) - z).flatten(1).norm(dim=1), made.last.residual, rtol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_as_if_absent(causal):
    made, x = block(causal=causal), tokens(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    found = made(x, padding)
    assert (found[:, :4] - made(x[:, :4])).abs().max() < 1e-10
    torch.testing.assert_close(
        found[:, 4:], torch.nn.functional.layer_norm(x[:, 4:], (8,), made.gain, made.shift, made.eps)
    )


def test_bound_holds_for_any_two_states():
    made, x = block(), 40 * tokens(3, 5, 8)
    with torch.no_grad():
        for weight in (made.query, made.output, made.down):
            weight *= 0.5
    bound = made.contraction_bound(x)
    assert bound.shape == (3,)
    assert (bound < 1).any()
    radius = made.gain.abs().max() * 8**0.5 + made.shift.norm()
    for seed in range(40):
        a, b = (torch.nn.functional.normalize(tokens(3, 5, 8, seed=2 * seed + i), dim=-1) * radius for i in (0, 1))
        b = a + (b - a) * 10.0 ** -(seed % 5)
        moved = (made.layer(a, x) - made.layer(b, x)).norm(dim=-1).amax(-1)
        assert (moved <= bound * (a - b).norm(dim=-1).amax(-1) * (1 + 1e-9)).all()


def test_bound_of_a_small_input_is_large():
    made = block()
    assert (made.contraction_bound(tokens(2, 4, 8)) > 1).all()
    assert (made.contraction_bound(tokens(2, 0, 8)) == 0).all()
    assert block(hidden=0).contraction_bound(1e4 * tokens(2, 4, 8)).max() < 1


@pytest.mark.parametrize("kind", KINDS[:3], ids=["plain", "causal", "attention"])
def test_estimate_is_the_spectral_radius(kind):
    made, x = block(4, 2, **kind), tokens(2, 3, 4)
    z = made(x).detach()
    for i in range(2):
        jacobian = torch.autograd.functional.jacobian(lambda t, i=i: made.layer(t, x[i]), z[i]).reshape(12, 12)
        expected = torch.linalg.eigvals(jacobian).abs().max()
        found = made.contraction_estimate(x, steps=300)[i]
        assert found.item() == pytest.approx(expected.item(), rel=0.02)


def test_not_converged_raises_if_asked():
    made = expansive(fallback="raise")
    with pytest.raises(ArithmeticError, match=r"EquilibriumBlock\.forward: expected a fixed point within 6 steps, got"):
        made(tokens(2, 5, 8))
    assert made.last is not None
    assert (made.last.status == Status.MAX_STEPS).any()


@pytest.mark.parametrize("fallback", ["last", "unrolled"])
def test_not_converged_warns_once_and_says_so_each_time(fallback):
    made, x = expansive(fallback=fallback), tokens(2, 5, 8)
    with pytest.warns(
        RuntimeWarning, match=r"EquilibriumBlock\.forward: expected a fixed point within 6 steps"
    ) as said:
        made(x)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = made(x)
    assert found.isfinite().all()
    assert made.last is not None
    assert (made.last.status == Status.MAX_STEPS).any()


@pytest.mark.filterwarnings("ignore:EquilibriumBlock.forward")
def test_unrolled_fallback_is_damped_steps_with_their_own_gradient():
    made, x = expansive(fallback="unrolled", gate=0.3), tokens(3, 5, 8)
    x[1] *= 1e6  # this one converges
    x.requires_grad_()
    found = made(x)
    assert made.last is not None
    assert made.last.converged.tolist() == [False, True, False]
    z = torch.nn.functional.layer_norm(x, (8,), made.gain, made.shift, made.eps)
    for _ in range(6):
        z = 0.7 * z + 0.3 * made.layer(z, x)
    torch.testing.assert_close(found[[0, 2]], z[[0, 2]], rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(out[[0, 2]].square().sum(), [x, made.output]) for out in (found, z))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:EquilibriumBlock.forward")
def test_last_fallback_returns_the_best_iterate():
    made, x = expansive(fallback="last"), tokens(2, 5, 8)
    z = made(x).detach()
    assert made.last is not None
    residual = (made.layer(z, x) - z).flatten(1).norm(dim=1)
    torch.testing.assert_close(made.last.residual, residual.detach(), rtol=1e-9, atol=1e-9)
    assert torch.equal(z, expansive(fallback="last")(x).detach())


@pytest.mark.parametrize("size", [(0, 5), (2, 0), (2, 1)])
def test_few_tokens(size):
    made, x = block(), tokens(*size, 8).requires_grad_()
    found = made(x)
    found.sum().backward()
    assert found.shape == x.shape
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_all_padding_and_leading_axes():
    made, x = block(), tokens(2, 3, 4, 8)
    z = made(x, torch.ones(2, 3, 4, dtype=torch.bool))
    torch.testing.assert_close(z, torch.nn.functional.layer_norm(x, (8,), made.gain, made.shift, made.eps))
    assert made.last is not None
    assert made.last.status.shape == (2, 3)
    assert made.contraction_bound(x).shape == made.contraction_estimate(x, steps=3).shape == (2, 3)


def test_listeners_hear_the_fixed_point_and_nothing_else():
    made, x, calls = block(causal=True), tokens(3, 5, 8), []
    with on_attention(calls.append):
        z = made(x).detach()
    (call,) = calls
    p = torch.softmax((call.eta @ call.key.mT).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), -1)
    torch.testing.assert_close(call.output, p @ call.value, rtol=0, atol=1e-12)
    torch.testing.assert_close(call.key[:, 0], z @ made.key[0].detach().mT, rtol=0, atol=1e-12)
    assert call.scale == made.head_dim**-0.5


@pytest.mark.long
def test_training_reaches_a_target():
    torch.manual_seed(0)
    made, x = EquilibriumBlock(8, 2, hidden=16), torch.randn(4, 5, 8)
    target = torch.nn.functional.layer_norm(torch.randn(4, 5, 8), (8,))
    optimiser, losses = torch.optim.Adam(made.parameters(), lr=3e-3), []
    for _ in range(25):
        loss = (made(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert "CONVERGED" in made.guarantees


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "EquilibriumBlock.heads: expected a number of heads that divides dim=8, got 3"),
        ({"hidden": -1}, "EquilibriumBlock.hidden: expected an integer of at least 0, got -1"),
        ({"tol": 0.0}, "EquilibriumBlock.tol: expected a positive number, got 0.0"),
        ({"max_steps": 0}, "EquilibriumBlock.max_steps: expected an integer of at least 1, got 0"),
        ({"fallback": "ignore"}, "EquilibriumBlock.fallback: expected one of raise, last, unrolled, got 'ignore'"),
        ({"gate": 2.0}, "Damped.gate: expected 0 < gate < 2, got 2.0"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EquilibriumBlock(**{"dim": 8, "heads": 2, **options})


def test_refused_solver():
    with pytest.raises(TypeError, match=r"EquilibriumBlock\.solver: expected Picard"):
        EquilibriumBlock(8, 2, solver=Picard)  # pyright: ignore[reportArgumentType]
