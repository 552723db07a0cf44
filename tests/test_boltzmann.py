"""Restricted Boltzmann machines against enumeration of every joint state."""

import itertools

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

import cumulant.boltzmann as module
from cumulant import Empirical
from cumulant.boltzmann import RestrictedBoltzmann, contrastive_divergence
from tests.compare import close


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def states(units: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64).reshape(-1, units)


def machine(v: int = 3, h: int = 4, seed: int = 0, biases: bool = True) -> RestrictedBoltzmann:
    weight = 1.5 * draw(v, h, seed=seed)
    return (
        RestrictedBoltzmann(weight, draw(v, seed=seed + 1), draw(h, seed=seed + 2))
        if biases
        else RestrictedBoltzmann(weight)
    )


def joint(model: RestrictedBoltzmann) -> np.ndarray:
    """−E over every pair of states."""
    v, h = states(model.weight.shape[0]).numpy(), states(model.weight.shape[1]).numpy()
    b = 0 if model.visible_bias is None else v @ model.visible_bias.numpy()
    c = 0 if model.hidden_bias is None else h @ model.hidden_bias.numpy()
    return np.asarray(b)[..., None] + c + v @ model.weight.numpy() @ h.T


SIZES = [(1, 1), (3, 4), (4, 2), (5, 5)]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_marginal_partition_and_energy_by_enumeration(size, biases):
    model = machine(*size, biases=biases)
    v, h, table = states(size[0]), states(size[1]), joint(model)
    close(model.energy(v[:, None], h), -table)
    close(model.log_marginal(v), special.logsumexp(table, -1))
    close(model.swapped.log_marginal(h), special.logsumexp(table, 0))
    close(model.log_partition(), special.logsumexp(table))
    close(model.log_likelihood(v).exp().sum(), 1.0)
    p = special.softmax(table)
    close(model.hidden_mean(v), (p @ h.numpy()) / p.sum(1, keepdims=True))
    close(model.visible_mean(h), (p.T @ v.numpy()) / p.sum(0)[:, None])


def test_hidden_units_are_a_convolution_of_pairs_of_atoms():
    model = machine(3, 4)
    atoms, weights = states(4) @ model.weight.T, states(4) @ model.hidden_bias
    v = states(3)
    close(model.log_marginal(v) - v @ model.visible_bias, Empirical(atoms, weights).log_normalizer(v))


def test_enumeration_goes_in_blocks(monkeypatch):
    model = machine(6, 5)
    whole, gradient = model.log_partition(), model.likelihood_gradient(states(6)[:7])
    monkeypatch.setattr(module, "BLOCK_SIZE", 40)
    close(model.log_partition(), whole, 1e-13)
    for mine, theirs in zip(model.likelihood_gradient(states(6)[:7]), gradient, strict=True):
        close(mine, theirs, 1e-13)


def test_far_fields_stay_exact():
    model = RestrictedBoltzmann(torch.tensor([[30.0, -800.0]], dtype=torch.float64))
    close(model.log_marginal(torch.ones(1).double()), 30.0 + np.log1p(np.exp(-30.0)), 1e-15)
    assert model.log_partition().isfinite()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_likelihood_gradient_is_the_derivative_of_the_likelihood(size):
    weight, b, c = 1.5 * draw(*size), draw(size[0], seed=1), draw(size[1], seed=2)
    leaves = [t.requires_grad_() for t in (weight, b, c)]
    data = (draw(7, size[0], seed=3) > 0).double()
    model = RestrictedBoltzmann(*leaves)
    expected = torch.autograd.grad(model.log_likelihood(data).mean(), leaves)
    for mine, theirs in zip(model.likelihood_gradient(data), expected, strict=True):
        assert not mine.requires_grad
        close(mine, theirs)
    assert torch.autograd.gradcheck(lambda *x: RestrictedBoltzmann(*x).log_partition(), leaves)


def chain(model: RestrictedBoltzmann) -> np.ndarray:
    """Transition matrix of one Gibbs sweep v → h → v over the visible states."""
    v, h = states(model.weight.shape[0]), states(model.weight.shape[1])
    up, down = model.hidden_mean(v).numpy()[:, None], model.visible_mean(h).numpy()[:, None]
    to_h = np.where(h.numpy() == 1, up, 1 - up).prod(-1)
    return to_h @ np.where(v.numpy() == 1, down, 1 - down).prod(-1)


def expected_divergence(model: RestrictedBoltzmann, start: np.ndarray, steps: int) -> np.ndarray:
    """CD-k of the weight without sampling noise, from a law over the visible states."""
    v = states(model.weight.shape[0]).numpy()
    mean = v[:, :, None] * model.hidden_mean(torch.tensor(v)).numpy()[:, None]
    end = start @ np.linalg.matrix_power(chain(model), steps)
    return np.tensordot(start - end, mean, 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_contrastive_divergence_has_the_mean_of_its_chain(steps):
    model, copies = machine(3, 3), 20_000
    rows = states(3)[[0, 3, 3, 6]]
    start = np.bincount([0, 3, 3, 6], minlength=8) / 4
    found = contrastive_divergence(model, rows.repeat(copies, 1), steps, generator=torch.Generator().manual_seed(steps))
    error = 0.5 / np.sqrt(4 * copies)  # a product of numbers in [0, 1] has deviation at most ½
    assert np.abs(found.weight.numpy() - expected_divergence(model, start, steps)).max() < 4.5 * error
    v = states(3).numpy()
    end = start @ np.linalg.matrix_power(chain(model), steps)
    assert np.abs(found.visible_bias.numpy() - (start - end) @ v).max() < 4.5 * error
    hidden = model.hidden_mean(states(3)).numpy()
    assert np.abs(found.hidden_bias.numpy() - (start - end) @ hidden).max() < 4.5 * error


def test_long_chains_give_the_likelihood_gradient_and_short_ones_do_not():
    model, rows = machine(3, 3), states(3)[[0, 3, 3, 6]]
    start = np.bincount([0, 3, 3, 6], minlength=8) / 4
    exact = model.likelihood_gradient(rows).weight.numpy()
    close(expected_divergence(model, start, 2000), exact, 1e-10)
    assert np.abs(expected_divergence(model, start, 1) - exact).max() > 1e-2
    found = contrastive_divergence(model, rows.repeat(5000, 1), 60, generator=torch.Generator().manual_seed(0))
    limit = np.abs(expected_divergence(model, start, 60) - exact).max() + 4.5 * 0.5 / np.sqrt(20_000)
    assert np.abs(found.weight.numpy() - exact).max() < limit


def test_samples_follow_the_conditional_means_and_the_generator():
    model = machine(3, 4)
    v = states(3)[5].expand(40_000, 3)
    h = model.sample_hidden(v, generator=torch.Generator().manual_seed(0))
    assert set(h.unique().tolist()) == {0.0, 1.0}
    assert (h.mean(0) - model.hidden_mean(v[0])).abs().max() < 4.5 * 0.5 / 200
    again = model.sample_hidden(v, generator=torch.Generator().manual_seed(0))
    assert torch.equal(h, again)
    back = model.sample_visible(states(4)[9].expand(40_000, 4), generator=torch.Generator().manual_seed(1))
    assert (back.mean(0) - model.visible_mean(states(4)[9])).abs().max() < 4.5 * 0.5 / 200


def test_ascent_of_the_likelihood_learns_the_data():
    data = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    model = RestrictedBoltzmann(0.1 * draw(3, 3), torch.zeros(3).double(), torch.zeros(3).double())
    before = model.log_likelihood(data).mean()
    for _ in range(400):
        g = model.likelihood_gradient(data)
        model = RestrictedBoltzmann(
            model.weight + g.weight / 2,
            model.visible_bias + g.visible_bias / 2,
            model.hidden_bias + g.hidden_bias / 2,
        )
    after = model.log_likelihood(data).mean()
    assert before < -1.9
    assert -0.75 < after <= -np.log(2)


def test_without_data_or_units():
    model = machine(3, 4)
    for found in (model.likelihood_gradient(states(3)[:0]), contrastive_divergence(model, states(3)[:0])):
        assert found.weight.shape == (3, 4)
        assert all((part == 0).all() for part in found)
    blind = RestrictedBoltzmann(torch.zeros(0, 2).double(), None, draw(2))
    close(blind.log_partition(), np.log1p(np.exp(draw(2).numpy())).sum())
    assert model.log_marginal(states(3)[:0]).shape == (0,)


def test_half_precision_is_accumulated_in_single():
    model = RestrictedBoltzmann(draw(3, 2).half(), draw(3, seed=1).half())
    wide = RestrictedBoltzmann(model.weight.double(), model.visible_bias.double())
    close(model.log_partition().double(), wide.log_partition(), 1e-5)
    data = states(3)[:4]
    g = model.likelihood_gradient(data.half())
    assert g.weight.dtype == torch.float32
    close(g.weight.double(), wide.likelihood_gradient(data).weight, 1e-5)
    assert model.sample_hidden(data.half()).dtype == torch.float16
    assert contrastive_divergence(model, data.half()).weight.dtype == torch.float32


M = machine(3, 4)
BAD = {
    "weight": (lambda: RestrictedBoltzmann(draw(3)), "RestrictedBoltzmann.weight: expected shape (v, h), got (3)"),
    "infinite": (lambda: RestrictedBoltzmann(draw(3, 2) / 0), "RestrictedBoltzmann.weight: expected finite values"),
    "visible bias": (
        lambda: RestrictedBoltzmann(draw(3, 2), draw(2)),
        "RestrictedBoltzmann.visible_bias: expected shape (3,), got (2)",
    ),
    "hidden bias": (
        lambda: RestrictedBoltzmann(draw(3, 2), None, draw(3)),
        "RestrictedBoltzmann.hidden_bias: expected shape (2,), got (3)",
    ),
    "visible": (
        lambda: M.log_marginal(states(4)),
        "RestrictedBoltzmann.visible: expected shape (*batch, 3), got (16, 4)",
    ),
    "hidden": (lambda: M.visible_mean(states(3)), "RestrictedBoltzmann.hidden: expected shape (*batch, 4), got (8, 3)"),
    "range": (lambda: M.hidden_mean(2 * states(3)), "RestrictedBoltzmann.visible: expected values in [0, 1]"),
    "dtype": (lambda: M.hidden_mean(states(3).float()), "RestrictedBoltzmann.visible: expected dtype torch.float64"),
    "data": (lambda: M.likelihood_gradient(states(3)[0]), "likelihood_gradient.data: expected shape (n, 3), got (3)"),
    "too large": (
        lambda: RestrictedBoltzmann(torch.zeros(30, 21)).log_partition(),
        "RestrictedBoltzmann.log_partition: expected at most 20 units on one side",
    ),
    "steps": (
        lambda: contrastive_divergence(M, states(3), 0),
        "contrastive_divergence.steps: expected a number of steps",
    ),
    "model": (
        lambda: contrastive_divergence(draw(3, 4), states(3)),
        "contrastive_divergence.model: expected a Restricted",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")
