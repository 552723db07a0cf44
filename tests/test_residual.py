"""The residual step: expansion, its inverse, and the Jacobian with moving keys."""

import pytest
import torch
from torch.autograd.functional import jacobian

from cumulant import Box, Empirical, Gaussian, residual
from cumulant.residual import ascend, gradientness, prox, self_attention_jacobian


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


keys = Empirical(normal(7, 3), normal(7, seed=1))


def test_the_step_and_its_log_volume():
    eta = normal(5, 3, seed=2)
    step = ascend(keys, eta)
    torch.testing.assert_close(step.eta, eta + keys.mean(eta), rtol=0, atol=1e-15)
    torch.testing.assert_close(step.log_volume, keys.log_volume(eta), rtol=0, atol=1e-13)
    whole = torch.stack([jacobian(lambda e: ascend(keys, e).eta, row) for row in eta])
    torch.testing.assert_close(step.log_volume, torch.linalg.slogdet(whole).logabsdet, rtol=0, atol=1e-12)


def test_the_step_in_a_metric_expands_in_its_own_norm():
    root = normal(3, 3, seed=3)
    metric = root @ root.T + 0.1 * torch.eye(3, dtype=torch.float64)
    a, b = 3 * normal(200, 3, seed=4), 3 * normal(200, 3, seed=5)
    inverse = torch.linalg.inv(metric)

    def length(x):
        return ((x @ inverse) * x).sum(-1)

    assert (length(ascend(keys, a, metric).eta - ascend(keys, b, metric).eta) >= length(a - b) * (1 - 1e-12)).all()
    whole = jacobian(lambda e: ascend(keys, e, metric).eta, a[0])
    torch.testing.assert_close(
        ascend(keys, a[0], metric).log_volume, torch.linalg.slogdet(whole).logabsdet, rtol=0, atol=1e-12
    )


def test_descent_may_turn_space_over():
    h, eta = Gaussian(torch.zeros(2, dtype=torch.float64), 4 * torch.eye(2, dtype=torch.float64)), normal(2)
    step = ascend(h, eta, -1.0)
    torch.testing.assert_close(step.eta, -3 * eta)
    torch.testing.assert_close(step.log_volume.exp(), torch.tensor(9.0, dtype=torch.float64))


@pytest.mark.parametrize("step", [0.1, 1.0, 50.0])
@pytest.mark.parametrize(
    "h", [keys, Gaussian(normal(3), torch.eye(3).double()), Box(-torch.ones(3), torch.ones(3)).to(torch.float64)]
)
def test_prox_undoes_the_step(h, step):
    eta = 3 * normal(20, 3, seed=6)
    found = prox(h, ascend(h, eta, step).eta, step=step)
    assert found.converged.all()
    torch.testing.assert_close(found.value, eta, rtol=0, atol=1e-9)


def test_prox_far_away_and_without_keys():
    found = prox(keys, 1e3 * normal(20, 3, seed=7))
    assert found.converged.all()
    assert found.residual.max() < 1e-9
    empty = Empirical(torch.zeros(0, 3, dtype=torch.float64))
    y = normal(2, 3)
    torch.testing.assert_close(prox(empty, y).value, y)


def test_prox_is_differentiable_in_point_and_keys():
    y, atoms = normal(2, 3, seed=8).requires_grad_(), normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, a: prox(Empirical(a), y).value, (y, atoms), atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_jacobian_with_moving_keys(causal, weighted):
    x = normal(2, 5, 3)
    shapes = {"query_weight": (4, 3), "key_weight": (4, 3), "value_weight": (3, 3)} if weighted else {}
    weights = {name: normal(*size, seed=i + 1) for i, (name, size) in enumerate(shapes.items())}
    eye = torch.eye(3, dtype=torch.float64)
    wq, wk, wv = (weights.get(f"{name}_weight", eye) for name in ("query", "key", "value"))

    def layer(z):
        logits = 0.7 * (z @ wq.T) @ (z @ wk.T).mT
        logits = logits.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf) if causal else logits
        return z + torch.softmax(logits, -1) @ z @ wv.T

    found = self_attention_jacobian(x, **weights, scale=0.7, causal=causal)
    for i in range(2):
        torch.testing.assert_close(found[i], jacobian(layer, x[i]), rtol=0, atol=1e-12)
    alone = self_attention_jacobian(x[0], **weights, scale=0.7, causal=causal, residual=False)
    identity = torch.eye(15, dtype=torch.float64).reshape(5, 3, 5, 3)
    torch.testing.assert_close(found[0] - alone, identity, rtol=0, atol=1e-12)


def test_jacobian_of_a_token_that_sees_nothing():
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    found = self_attention_jacobian(normal(3, 2), mask=mask)
    torch.testing.assert_close(found[1, :, 1], torch.eye(2, dtype=torch.float64))
    assert (found[1, :, 0] == 0).all()
    assert found.isfinite().all()


def test_gradientness_without_large_matrices():
    q, k, v = (normal(4, 2, 9, seed=s) for s in range(3))
    o = normal(4, 9, 2, seed=3)
    ours, theirs = (o @ v).flatten(1), (q.mT @ k).flatten(1)
    torch.testing.assert_close(
        gradientness(q, k, v, o), torch.cosine_similarity(ours, theirs, dim=1), rtol=0, atol=1e-14
    )
    assert gradientness(q[0], k[0], k[0], q[0].mT) == pytest.approx(1, abs=1e-14)
    assert gradientness(0 * q, k, v, o).tolist() == [0.0] * 4
    assert gradientness(q / 0, k, v, o).isnan().all()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ascend(keys, normal(3), -torch.eye(3).double()), ValueError, "positive definite"),
        (lambda: ascend(keys, normal(3), torch.eye(2).double()), ValueError, "d=3"),
        (lambda: prox(keys, normal(3), step=0.0), ValueError, "positive number"),
        (lambda: prox(keys, torch.full((3,), torch.nan, dtype=torch.float64)), ValueError, "finite"),
        (lambda: self_attention_jacobian(normal(3)), ValueError, "token axis"),
        (lambda: self_attention_jacobian(normal(3, 2), query_weight=normal(4, 3)), ValueError, "nn.Linear"),
        (lambda: self_attention_jacobian(normal(3, 2), value_weight=normal(4, 2)), ValueError, "W_v square"),
        (lambda: self_attention_jacobian(normal(3, 2), mask=torch.ones(3, 3)), TypeError, "Boolean"),
        (lambda: self_attention_jacobian(normal(3, 2), mask=torch.ones(3, 4).bool()), ValueError, "Rows are queries"),
        (lambda: gradientness(normal(2, 9), normal(2, 9), normal(2, 9), normal(2, 9)), ValueError, "by head"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_the_module_is_public():
    assert residual.ascend is ascend
