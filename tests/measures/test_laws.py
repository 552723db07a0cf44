"""Law × case: every measure of the registry obeys every law, and its G is the oracle's."""

import numpy as np
import pytest
import torch

from cumulant import Empirical, Measure
from cumulant.solve import Status
from cumulant.testing import LAWS, Law, sampling_law
from tests.cases import CASES, KEYS, LOG_H, Case, t

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@each_case
def test_log_normalizer_is_the_oracle(case: Case):
    eta = case.queries()
    expected = [case.oracle(e) for e in eta.numpy()]
    np.testing.assert_allclose(case.build().log_normalizer(eta).numpy(), expected, rtol=1e-12, atol=1e-12)


@each_case
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.statement)
def test_law(case: Case, law: Law):
    assert law.error(case.build(), case.queries()) <= law.tolerance


@each_case
def test_samples(case: Case):
    law = sampling_law(20_000, seed=0)
    assert law.error(case.build(), case.queries(3)) <= law.tolerance


@pytest.mark.long
@each_case
def test_gradcheck_and_gradgradcheck(case: Case):
    h = case.build()
    eta = case.queries(2).requires_grad_()
    assert torch.autograd.gradcheck(h.log_normalizer, eta)
    assert torch.autograd.gradcheck(h.mean, eta)
    assert torch.autograd.gradgradcheck(h.log_normalizer, eta)
    assert torch.autograd.gradgradcheck(h.mean, eta, atol=1e-4)


# a compilation takes seconds: these go first, the others are long tests
COMPILED_FIRST = ("Empirical, weighted", "Gaussian, 3-D", "Box", "Poisson", "tilt", "2.5 · Empirical", "image, down")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.name in COMPILED_FIRST else pytest.mark.long, id=c.name) for c in CASES]
)
def test_compiles(case: Case):
    h, eta = case.build(), case.queries()
    for function in (h.log_normalizer, h.mean):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(eta), function(eta), rtol=1e-12, atol=1e-12)


@each_case
def test_derived_kl_and_volume(case: Case):
    h, eta = case.build(), case.queries()
    fisher = h.fisher(eta)
    expected = torch.linalg.slogdet(torch.eye(h.dim, dtype=eta.dtype) + fisher)[1]
    torch.testing.assert_close(h.log_volume(eta), expected, rtol=1e-11, atol=1e-12)
    assert (h.kl_to_base(eta) >= -1e-12).all()
    torch.testing.assert_close(h.kl(eta, eta), torch.zeros(len(eta), dtype=eta.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(h.normalized().log_mass, torch.zeros((), dtype=eta.dtype), rtol=0, atol=1e-12)


@each_case
def test_natural_is_differentiable(case: Case):
    h, eta = case.build(), case.queries(2)
    mean = h.mean(eta).detach().requires_grad_()
    found = h.natural(mean)
    probe = torch.linspace(-1, 1, eta.numel(), dtype=eta.dtype).reshape(eta.shape)
    # dη = C⁺ dμ: only directions that h spans can be pulled back
    direction = h.fisher_mv(eta, probe)
    (gradient,) = torch.autograd.grad((found.value * direction).sum(), mean)
    torch.testing.assert_close(h.fisher_mv(eta, gradient), direction, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", ["shuffled", "split"])
def test_atoms_are_a_set(order: str):
    eta = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 3)))
    h = Empirical(t(KEYS), t(LOG_H))
    permutation = np.random.default_rng(2).permutation(len(KEYS))
    same: Measure = Empirical(t(KEYS[permutation]), t(LOG_H[permutation]))
    if order == "split":
        same = Empirical(t(KEYS[:2]), t(LOG_H[:2])) + Empirical(t(KEYS[2:]), t(LOG_H[2:]))
    for name in ("log_normalizer", "mean", "fisher"):
        torch.testing.assert_close(getattr(same, name)(eta), getattr(h, name)(eta), rtol=1e-13, atol=1e-13)


def test_batches_of_measures_equal_a_loop():
    rng = np.random.default_rng(3)
    atoms, weights, eta = (t(rng.normal(size=s)) for s in [(2, 5, 7, 3), (2, 5, 7), (2, 5, 4, 3)])
    h = Empirical(atoms, weights)
    assert h.batch_shape == (2, 5)
    for name in ("log_normalizer", "mean", "fisher", "log_volume", "kl_to_base", "conjugate"):
        whole = getattr(h, name)
        argument = h.mean(eta) if name == "conjugate" else eta
        got = whole(argument)
        for i in range(2):
            for j in range(5):
                single = getattr(Empirical(atoms[i, j], weights[i, j]), name)(argument[i, j])
                torch.testing.assert_close(got[i, j], single, rtol=1e-10, atol=1e-10)
    one = h.mean(eta[0, 0, 0])  # a single query (d,) against a batch of measures
    torch.testing.assert_close(one, h.mean(eta[0, 0, :1].expand(2, 5, 1, 3))[..., 0, :])
    assert h.sample(eta[0, 0, 0], 6).shape == (2, 5, 6, 3)


def test_rows_of_log_weights_are_measures_of_their_own():
    rng = np.random.default_rng(4)
    atoms, weights, eta = (t(rng.normal(size=s)) for s in [(7, 3), (4, 7), (4, 3)])
    weights[1, 2:] = -torch.inf
    h = Empirical(atoms, weights)
    assert h.query_rows == 4
    assert h.log_mass.shape == (4,)
    for name in ("log_normalizer", "mean", "fisher", "kl_to_base"):
        got = getattr(h, name)(eta)
        for i in range(4):
            torch.testing.assert_close(
                got[i], getattr(Empirical(atoms, weights[i]), name)(eta[i]), rtol=1e-12, atol=1e-12
            )
    both = h + Empirical(atoms[:2])
    torch.testing.assert_close(
        both.log_normalizer(eta)[2], (Empirical(atoms, weights[2]) + Empirical(atoms[:2])).log_normalizer(eta[2])
    )
    found = h.natural(h.mean(eta))
    assert (found.status == Status.CONVERGED).all()
    torch.testing.assert_close(h.mean(found.value), h.mean(eta), rtol=1e-9, atol=1e-9)
