"""Free energy, evidence bounds, generalised divergence and boosting against NumPy, SciPy and brute force."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import Tensor

import cumulant.duality.evidence as module
from cumulant import Empirical, Status, moments
from cumulant.duality import boosting, elbo, elbo_gap, free_energy, generalized_kl
from tests.compare import close


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laws(*shape: int, seed: int = 0) -> Tensor:
    return torch.softmax(2 * draw(*shape, seed=seed), -1)


# ---------------------------------------------------------------------- free energy


@pytest.mark.parametrize("n", [1, 2, 63])
@pytest.mark.parametrize("temperature", [0.05, 0.37, 1.0, 20.0])
def test_free_energy_is_energy_minus_temperature_times_entropy(n, temperature):
    e = draw(3, n)
    found = free_energy(e, temperature=temperature)
    p = special.softmax(-e.numpy() / temperature, -1)
    close(found.value, -temperature * special.logsumexp(-e.numpy() / temperature, -1))
    close(found.mean_energy, (p * e.numpy()).sum(-1))
    close(found.entropy, special.entr(p).sum(-1))
    close(found.value, found.mean_energy - temperature * found.entropy)


def test_degeneracies_enter_as_a_base_measure():
    e, w = draw(4, 7), draw(7, seed=1)
    found = free_energy(e, temperature=0.6, log_weights=w)
    p = special.softmax(w.numpy() - e.numpy() / 0.6, -1)
    close(found.entropy, -special.rel_entr(p, np.exp(w.numpy())).sum(-1))
    close(found.value, found.mean_energy - 0.6 * found.entropy)
    counted = free_energy(torch.cat([e, e[:, :1]], -1))
    doubled = free_energy(e, log_weights=torch.tensor([math.log(2)] + [0.0] * 6, dtype=e.dtype))
    close(counted.value, doubled.value)
    close(counted.mean_energy, doubled.mean_energy)


def test_with_scores_as_energies_it_is_the_log_normalizer():
    q, k, beta = draw(3), draw(6, 3, seed=1), 1.7
    close(free_energy(-(k @ q), temperature=1 / beta).value, -Empirical(k).log_normalizer(beta * q) / beta)


def test_derivatives_are_probabilities_and_entropy():
    e, t = draw(5).requires_grad_(), torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    found = free_energy(e, temperature=t)
    by_energy, by_temperature = torch.autograd.grad(found.value, (e, t))
    close(by_energy, torch.softmax(-e.detach() / 0.8, -1))
    close(by_temperature, -found.entropy.detach())
    assert torch.autograd.gradcheck(lambda e, t: tuple(free_energy(e, temperature=t)), (e, t))


def test_forbidden_states_are_as_if_absent():
    e = draw(2, 4)
    wide = torch.cat([e, torch.full((2, 1), torch.inf, dtype=e.dtype)], -1).requires_grad_()
    t = torch.tensor([0.5, 2.0], dtype=e.dtype, requires_grad=True)
    found = free_energy(wide, temperature=t)
    for mine, theirs in zip(found, free_energy(e, temperature=t.detach()), strict=True):
        close(mine.detach(), theirs)
    gradients = torch.autograd.grad(sum(f.sum() for f in found), (wide, t))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, -1] == 0).all()
    masked = free_energy(torch.cat([e, e[:, :1]], -1), log_weights=torch.tensor([0.0] * 4 + [-torch.inf]).double())
    close(masked.value, free_energy(e).value)


@pytest.mark.parametrize("states", [0, 2])
def test_no_states_no_energy(states):
    e = torch.full((3, states), torch.inf, dtype=torch.float64, requires_grad=True)
    found = free_energy(e)
    assert (found.value == torch.inf).all()
    assert (found.mean_energy == 0).all()
    assert (found.entropy == 0).all()
    (gradient,) = torch.autograd.grad(sum(f.sum() for f in found), e)
    assert (gradient == 0).all()


def test_cold_and_hot_limits_and_half_precision():
    e = 1e6 + draw(8)
    cold = free_energy(e, temperature=1e-300)
    close(cold.value, e.min())
    assert cold.entropy == 0
    close(free_energy(e, temperature=1e-3).entropy, special.entr(special.softmax(-(e - e.min()).numpy() / 1e-3)).sum())
    assert abs(free_energy(e, temperature=1e12).entropy - math.log(8)) < 1e-12
    half = free_energy(draw(5).half())
    assert half.value.dtype == torch.float32


# ---------------------------------------------------------------------- the bound and its gap


def brute_gap(q: Tensor, logits: Tensor) -> np.ndarray:
    return special.rel_entr(q.numpy(), special.softmax(logits.numpy(), -1)).sum(-1)


@pytest.mark.parametrize("n", [1, 2, 63])
def test_bound_is_below_g_by_the_divergence(n):
    s, w, q = draw(5, n), draw(n, seed=1), laws(5, n, seed=2)
    g = torch.logsumexp(s + w, -1)
    close(g - elbo(q, s, w), brute_gap(q, s + w))
    close(elbo(torch.softmax(s + w, -1), s, w), g)
    close(elbo(q, s), (q * s).sum(-1) + torch.special.entr(q).sum(-1))


def test_bound_without_law_or_off_the_support():
    s = draw(3)
    assert elbo(torch.zeros(3).double(), s) == -torch.inf
    one = torch.tensor([0.0, 1.0, 0.0]).double()
    close(elbo(one, s), s[1])
    assert elbo(one, s, torch.tensor([0.0, -torch.inf, 0.0]).double()) == -torch.inf
    close(elbo(one, torch.where(one > 0, s, -torch.inf)), s[1])
    q = laws(4, 3).requires_grad_()
    free = s.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: elbo(torch.softmax(x, -1), s), (q, free))


def test_gap_of_weights_is_the_divergence():
    eta, x, w, q = draw(2, 5, 3), draw(2, 7, 3, seed=1), draw(2, 7, seed=2), laws(2, 5, 7, seed=3)
    logits = eta @ x.mT + w[:, None]
    close(elbo_gap(eta, x, weights=q, log_weights=w), brute_gap(q, logits))
    g = torch.logsumexp(logits, -1)
    close(elbo_gap(eta, x, weights=q, log_weights=w, log_normalizer=g), brute_gap(q, logits))
    assert (elbo_gap(eta, x, weights=torch.softmax(logits, -1), log_weights=w) < 1e-14).all()
    pairs = draw(2, 5, 7, seed=4)
    close(elbo_gap(eta, x, weights=q, log_weights=pairs), brute_gap(q, eta @ x.mT + pairs))


def test_gap_of_one_query_drops_the_query_axis():
    eta, x, q = draw(3), draw(6, 3, seed=1), laws(6, seed=2)
    logits = x @ eta
    close(elbo_gap(eta, x, weights=q), brute_gap(q, logits))
    kept = torch.tensor([4, 1])
    expected = torch.logsumexp(logits, 0) - torch.logsumexp(logits[kept], 0)
    found = elbo_gap(eta, x, kept=kept)
    assert found.shape == ()
    close(found, expected)
    table = torch.zeros(6, dtype=torch.bool)
    table[kept] = True
    close(elbo_gap(eta, x, kept=table, log_normalizer=torch.logsumexp(logits, 0)), expected)


@pytest.mark.parametrize("weights", [None, "atom", "pair"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 7, 3), (63, 100, 10)], ids=str)
def test_gap_of_kept_atoms_is_minus_the_log_of_their_mass(size, given, weights):
    q, n, k = size
    eta, x = draw(2, q, 4), draw(2, n, 4, seed=1)
    w = {None: None, "atom": draw(2, n, seed=2), "pair": draw(2, q, n, seed=2)}[weights]
    logits = eta @ x.mT + (0 if w is None else w if weights == "pair" else w[:, None])
    index = logits.topk(k, -1).indices
    p = torch.softmax(logits, -1)
    expected = -np.log(p.gather(-1, index).sum(-1).numpy())
    table = torch.zeros(p.shape, dtype=torch.bool).scatter(-1, index, True)
    options = {"log_weights": w, "log_normalizer": torch.logsumexp(logits, -1) if given else None}
    close(elbo_gap(eta, x, kept=index, **options), expected)
    close(elbo_gap(eta, x, kept=table, **options), expected)
    restricted = torch.where(table, p, 0) / torch.where(table, p, 0).sum(-1, keepdim=True)
    close(elbo_gap(eta, x, weights=restricted, **options), expected)


def test_small_loss_of_a_mask_keeps_its_digits():
    x = torch.tensor([[0.0], [-60.0]], dtype=torch.float64)
    gap = elbo_gap(torch.ones(1).double(), x, kept=torch.tensor([True, False]))
    close(gap / math.exp(-60), 1.0)


def test_indices_in_blocks_and_padded(monkeypatch):
    eta, x = draw(2, 9, 3), draw(7, 3, seed=1)
    index = (eta @ x.mT).topk(4, -1).indices
    whole = elbo_gap(eta, x, kept=index)
    monkeypatch.setattr(module, "LARGE", 50)
    close(elbo_gap(eta, x, kept=index), whole, 1e-15)
    padded = torch.cat([index, torch.full((2, 9, 2), -1)], -1)
    close(elbo_gap(eta, x, kept=padded.int()), whole, 1e-15)


def test_causal_attention_passes_its_own_normalizer():
    x = draw(6, 3)
    g = moments(x, x, causal=True, statistics=()).log_normalizer
    scores = (x @ x.mT).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
    top = scores.topk(2, -1)
    index = torch.where(top.values == -torch.inf, -1, top.indices)
    expected = g - torch.logsumexp(top.values, -1)
    close(elbo_gap(x, x, kept=index, log_normalizer=g), expected)
    q = torch.softmax(top.values, -1)
    sparse = torch.zeros(6, 6).double().scatter(-1, top.indices, q)
    close(elbo_gap(x, x, weights=sparse, log_normalizer=g), expected)


def test_nothing_kept_and_nothing_there():
    eta, x = draw(2, 3), draw(4, 3, seed=1)
    none, zero = torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4).double()
    shut = torch.full((4,), -torch.inf, dtype=torch.float64)
    approximations = [{"kept": none}, {"kept": torch.full((2, 3), -1)}, {"weights": zero}]
    approximations.append({"kept": torch.zeros(2, 0, dtype=torch.long)})
    for a in approximations:
        assert (elbo_gap(eta, x, **a) == torch.inf).all()
        assert (elbo_gap(eta, x, log_weights=shut, **a) == 0).all()
    assert (elbo_gap(eta, x, kept=~none, log_weights=shut) == 0).all()
    assert (elbo_gap(eta, x, weights=zero + 0.25, log_weights=shut) == 0).all()
    assert (elbo_gap(eta, x, kept=~none) == 0).all()
    closed = torch.tensor([0.0, 0.0, 0.0, -torch.inf]).double()
    last = torch.tensor([0.0, 0.0, 0.0, 1.0]).double().expand(2, 4)
    assert (elbo_gap(eta, x, weights=last, log_weights=closed) == torch.inf).all()
    empty = x[:0]
    assert (elbo_gap(eta, empty, kept=none[:, :0]) == 0).all()
    assert (elbo_gap(eta, empty, kept=torch.full((2, 1), -1)) == 0).all()
    assert (elbo_gap(eta, empty, weights=zero[:, :0]) == 0).all()
    assert elbo_gap(eta[:0], x, kept=none[:0]).shape == (0,)
    assert elbo_gap(eta[:0], x, kept=torch.zeros(0, 2, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("way", ["index", "mask", "weights"])
def test_gradients_of_the_gap(way):
    eta, x, w = (t.requires_grad_() for t in (draw(3, 2), draw(5, 2, seed=1), draw(5, seed=2)))
    index = torch.tensor([[0, 1], [3, -1], [2, 4]])
    table = torch.zeros(3, 6, dtype=torch.bool).scatter(-1, torch.where(index < 0, 5, index), True)[:, :5]
    how = {"index": {"kept": index}, "mask": {"kept": table}, "weights": {"weights": laws(3, 5)}}[way]
    assert torch.autograd.gradcheck(lambda e, x, w: elbo_gap(e, x, log_weights=w, **how), (eta, x, w))


def test_gradients_stay_finite_where_the_gap_is_not():
    eta, x = draw(2, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_()
    kept = torch.tensor([[True, False, True, False], [False] * 4])
    gap = elbo_gap(eta, x, kept=kept)
    gradients = torch.autograd.grad(gap[0], (eta, x), retain_graph=True)
    assert gap[1] == torch.inf
    assert all(g.isfinite().all() for g in gradients)
    lost = torch.autograd.grad(gap[1], (eta, x))
    assert all((g == 0).all() for g in lost)


def test_half_precision_gap():
    eta, x = draw(3, 2).half(), draw(5, 2, seed=1).half()
    q = torch.softmax((eta.float() @ x.float().mT), -1)
    gap = elbo_gap(eta, x, weights=q.half())
    assert gap.dtype == torch.float32
    assert gap.max() < 1e-3
    assert elbo_gap(eta, x, kept=torch.tensor([[0], [1], [2]])).dtype == torch.float32


# ---------------------------------------------------------------------- generalised divergence


def test_generalized_kl_is_scipys():
    p, q = draw(4, 6).abs(), draw(6, seed=1).abs()
    close(generalized_kl(p, q), special.kl_div(p.numpy(), q.numpy()).sum(-1))
    a, b = laws(3, 5), laws(3, 5, seed=1)
    close(generalized_kl(a, b), special.rel_entr(a.numpy(), b.numpy()).sum(-1))
    assert (generalized_kl(p, p) == 0).all()


def test_generalized_kl_at_zero():
    zero, q = torch.zeros(3).double(), draw(3).abs()
    close(generalized_kl(zero, q), q.sum())
    assert generalized_kl(q, zero) == torch.inf
    assert generalized_kl(zero, zero) == 0
    assert generalized_kl(zero[:0], q[:0]) == 0
    p = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(generalized_kl(p, q), p)
    close(gradient[1:], torch.log(p.detach() / q)[1:])
    assert gradient[0] == 0


# ---------------------------------------------------------------------- boosting


def problem(seed: int, n: int = 9, d: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m = rng.choice([-1.0, 1.0], (n, d)) * rng.uniform(0.5, 1.5, (n, d))
    return m - m.mean(0), rng.uniform(0.2, 1, n)


@pytest.mark.parametrize("seed", range(4))
def test_boosting_agrees_with_both_problems(seed):
    m, q = problem(seed)
    found = boosting(torch.tensor(m), torch.tensor(q))
    primal = optimize.minimize(
        lambda x: (q * np.exp(-m @ x)).sum(), np.zeros(2), jac=lambda x: -m.T @ (q * np.exp(-m @ x)), tol=1e-13
    )
    dual = optimize.minimize(
        lambda p: special.kl_div(p, q).sum(),
        q,
        jac=lambda p: np.log(np.maximum(p, 1e-300) / q),
        bounds=[(1e-12, None)] * 9,
        constraints=[{"type": "eq", "fun": lambda p: m.T @ p}],
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.status == Status.CONVERGED
    assert not found.separable
    close(found.loss, primal.fun, 1e-10)
    close(found.coefficients, primal.x, 1e-5)
    close(found.divergence, dual.fun, 1e-6)
    close(q.sum() - found.loss, found.divergence, 1e-10)  # strong duality
    close(found.weights, q * np.exp(-m @ found.coefficients.numpy()), 1e-10)
    close(m.T @ found.weights.numpy(), 0, 1e-10)


def test_adaboost_by_coordinates_reaches_the_same_loss():
    rng = np.random.default_rng(5)
    m = np.where(rng.random((30, 4)) < 0.7, 1.0, -1.0)  # features right seven times in ten
    x = np.zeros(4)
    for step in range(4000):
        j = step % 4
        w = np.exp(-m @ x)
        x[j] += 0.5 * np.log(w[m[:, j] > 0].sum() / w[m[:, j] < 0].sum())
    found = boosting(torch.tensor(m))
    close(found.loss, np.exp(-m @ x).sum(), 1e-9)
    close(found.coefficients, x, 1e-6)


@pytest.mark.parametrize(
    "m",
    [
        [[1.0]],
        [[1.0, 2.0], [3.0, -1.0]],
        [[1.0, 0.1], [-1.0, 0.1], [0.3, 0.2]],
        [[1.0, 1e-4], [-1.0, 1e-4], [0.5, 1.0], [0.0, 1.0]],
        [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]],
    ],
    ids=["one example", "fewer than features", "wedge", "thin wedge", "flat"],
)
def test_separable_data_have_no_loss(m):
    m = torch.tensor(m, dtype=torch.float64)
    q = torch.linspace(1, 2, len(m)).double()
    found = boosting(m, q)
    assert found.separable
    assert found.status == Status.OUTSIDE
    assert found.loss == 0
    assert (found.weights == 0).all()
    close(found.divergence, q.sum())
    assert (m @ found.coefficients > 0).all()


def test_partly_separable_data_are_on_the_boundary():
    m = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # the third is free
    found = boosting(m, torch.tensor([1.0, 4.0, 5.0]).double())
    assert found.status == Status.BOUNDARY
    assert not found.separable
    close(found.loss, 4.0, 1e-7)  # 2 √(1·4)
    close(found.weights, [2, 2, 0], 1e-7)
    close(10 - found.loss, found.divergence, 1e-6)


def test_boosting_without_weight_is_nothing():
    m, q = (torch.tensor(t) for t in problem(0))
    for found in (boosting(m, 0 * q), boosting(m[:0])):
        assert found.loss == 0
        assert found.divergence == 0
        assert (found.coefficients == 0).all()
        assert found.separable
    dropped = boosting(torch.cat([m, 9 + 0 * m[:1]]), torch.cat([q, 0 * q[:1]]))
    close(dropped.coefficients, boosting(m, q).coefficients, 1e-9)
    assert dropped.weights[-1] == 0


# ---------------------------------------------------------------------- messages

E, X, Q = draw(2, 3), draw(4, 3, seed=1), laws(2, 4)
BAD = {
    "energies": (lambda: free_energy(E * torch.nan), "free_energy.energies: expected (..., n) values above -inf"),
    "energy": (lambda: free_energy(torch.tensor(1.0)), "free_energy.energies"),
    "energy dtype": (lambda: free_energy(torch.ones(3).long()), "free_energy.energies: expected a floating dtype"),
    "temperature": (
        lambda: free_energy(E, temperature=0.0),
        "free_energy.temperature: expected positive finite numbers",
    ),
    "temperatures": (lambda: free_energy(E, temperature=torch.tensor([1.0, -1.0])), "got values from -1"),
    "degeneracies": (
        lambda: free_energy(E, log_weights=draw(4)),
        "free_energy.log_weights: expected shape (..., n=3) with values below +inf, got (4)",
    ),
    "scores": (lambda: elbo(Q, E), "elbo.scores: expected shape (..., n=4)"),
    "negative": (lambda: elbo(Q - 1, Q), "elbo.weights: expected non-negative rows that sum to 1 (or 0), got negative"),
    "sum": (lambda: elbo(2 * Q, Q), "got sums from 2 to 2. Divide by their sum."),
    "law of no axis": (lambda: elbo(Q.sum(), Q), "elbo.weights: expected shape (..., n)"),
    "both": (lambda: elbo_gap(E, X, weights=Q, kept=Q > 0), "elbo_gap: expected one of weights and kept, got both"),
    "neither": (lambda: elbo_gap(E, X), "elbo_gap: expected one of weights and kept, got neither"),
    "weights shape": (
        lambda: elbo_gap(E, X, weights=laws(3, 4)),
        "elbo_gap.weights: expected shape (*batch, q=2, n=4), got (3, 4)",
    ),
    "list": (lambda: elbo_gap(E, X, kept=[0, 1]), "elbo_gap.kept: expected a tensor, got list"),
    "float indices": (
        lambda: elbo_gap(E, X, kept=Q),
        "elbo_gap.kept: expected a Boolean or integer tensor, got torch.float64",
    ),
    "range": (
        lambda: elbo_gap(E, X, kept=torch.tensor([[0, 4], [1, 2]])),
        "elbo_gap.kept: expected indices in 0 … 3, or -1 for none, got values from 0 to 4",
    ),
    "repeated": (
        lambda: elbo_gap(E, X, kept=torch.tensor([[0, 1], [2, 2]])),
        "elbo_gap.kept: expected distinct indices in a row, got repeated ones",
    ),
    "index rows": (
        lambda: elbo_gap(E, X, kept=torch.tensor([[0], [1], [2]])),
        "elbo_gap.kept: expected shape (*batch, q=2, k), got (3, 1)",
    ),
    "atoms": (lambda: elbo_gap(E, X[:, :2], weights=Q), "elbo_gap.atoms: expected shape (*batch, n, d)"),
    "log weights": (
        lambda: elbo_gap(E, X, weights=Q, log_weights=draw(3)),
        "elbo_gap.log_weights: expected (*batch, n=4) or (*batch, q=2, n=4)",
    ),
    "normalizer shape": (
        lambda: elbo_gap(E, X, weights=Q, log_normalizer=draw(3)),
        "elbo_gap.log_normalizer: expected shape (*batch, q=2), got (3)",
    ),
    "normalizer": (
        lambda: elbo_gap(E, X, kept=torch.tensor([[0], [1]]), log_normalizer=torch.full((2,), -50.0).double()),
        "elbo_gap.log_normalizer: expected G of at least the part that is kept",
    ),
    "mass": (lambda: generalized_kl(E, E), "generalized_kl.p: expected non-negative finite masses (..., n)"),
    "masses": (lambda: generalized_kl(Q, Q[:, :3]), "generalized_kl.q: expected last axis n=4 as p, got (2, 3)"),
    "margins": (lambda: boosting(E[0]), "boosting.margins: expected shape (n, d), got (3)"),
    "example weights": (lambda: boosting(E, -Q[:, 0]), "boosting.weights: expected 2 non-negative finite weights"),
    "infinite margins": (lambda: boosting(E / 0), "boosting.margins: expected finite values"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")
