"""Fixed points and roots: what each method finds, what it says when it does not, and that no sample sees its mates."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from cumulant import Anderson, Damped, Empirical, Gaussian, Picard, Solution, Status, fixed_point
from cumulant.solve import newton
from tests.cases import KEYS, LOG_H, t

SOLVERS = [Picard(), Damped(0.7), Anderson(), Anderson(memory=2, gate=0.8)]
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return t(np.random.default_rng(seed).normal(size=shape))


def contraction(rate: float = 0.5, dim: int = 4) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """x ↦ Ax + b with spectral norm ``rate``, and its fixed point."""
    a, b = random(dim, dim, seed=1), random(dim, seed=2)
    a = rate * a / torch.linalg.matrix_norm(a, 2)
    return lambda x: x @ a.mT + b, torch.linalg.solve(torch.eye(dim, dtype=a.dtype) - a, b)


def bitwise(a: Solution, b: Solution, sample: int):
    """Everything a solution says about one sample is the same to the last bit (the trace up to its last entry)."""
    for name in ("value", "status", "steps", "residual"):
        assert torch.equal(getattr(a, name)[sample], getattr(b, name)[sample]), name
    steps = int(a.steps[sample]) + 1
    assert torch.equal(a.trace[:steps, sample], b.trace[:steps, sample])


# ---------------------------------------------------------------------- what is found


@each_solver
def test_contraction_is_solved(solver):
    fn, expected = contraction()
    found = fixed_point(fn, random(5, 4), solver=solver, tol=1e-12)
    assert found.converged.all()
    torch.testing.assert_close(found.value, expected.expand(5, 4), rtol=1e-11, atol=1e-11)
    assert (found.residual <= 1e-12 * (1 + found.value.norm(dim=-1)) * 1.01).all()


@each_solver
def test_nonlinear_contraction_is_the_root_that_scipy_finds(solver):
    w, b = 0.3 * random(3, 3, seed=3), random(3, seed=4)
    found = fixed_point(lambda x: torch.tanh(x @ w.mT + b), torch.zeros(3, dtype=w.dtype), solver=solver, tol=1e-13)
    expected = optimize.fsolve(lambda x: np.tanh(w.numpy() @ x + b.numpy()) - x, np.zeros(3), xtol=1e-14)
    np.testing.assert_allclose(found.value, expected, rtol=0, atol=1e-12)


def test_anderson_needs_fewer_steps_than_picard():
    fn, _ = contraction(rate=0.95)
    slow, fast = (fixed_point(fn, random(1, 4), solver=s, max_steps=1000) for s in (Picard(), Anderson()))
    assert slow.converged.all()
    assert fast.converged.all()
    assert int(fast.steps) < int(slow.steps) / 4


def test_damping_tames_a_repelling_slope():
    swing = lambda x: 1 - 1.5 * x  # noqa: E731  slope −1.5: Picard runs away, damping by ½ has slope −¼
    start = torch.zeros(1, 1, dtype=torch.float64)
    assert not fixed_point(swing, start, solver=Picard()).converged
    found = fixed_point(swing, start, solver=Damped(0.5))
    assert found.converged
    torch.testing.assert_close(found.value, torch.full_like(start, 0.4), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("shape", "event_ndim"), [((3,), 1), ((5, 3), 1), ((2, 5, 3), 1), ((4, 2, 3), 2), ((6,), 0)])
def test_shapes_of_a_solution(shape: tuple[int, ...], event_ndim: int):
    found = fixed_point(lambda x: x / 2 + 1, torch.zeros(shape, dtype=torch.float64), event_ndim=event_ndim)
    samples = shape[: len(shape) - event_ndim]
    assert found.value.shape == shape
    assert found.status.shape == found.steps.shape == found.residual.shape == samples
    assert found.trace.shape == (int(found.steps.max()) + 1, *samples)
    torch.testing.assert_close(found.value, torch.full(shape, 2.0, dtype=torch.float64), rtol=1e-8, atol=0)


def test_an_empty_batch_has_an_empty_solution():
    found = fixed_point(torch.cos, torch.zeros(0, 3, dtype=torch.float64), solver=Anderson())
    assert found.value.shape == (0, 3)
    assert found.status.shape == (0,)


def test_trace_holds_the_residual_before_each_step_and_then_repeats():
    fn, _ = contraction()
    x0 = random(1, 4)
    found = fixed_point(fn, torch.cat([x0, fixed_point(fn, x0, tol=1e-14).value]))
    assert found.steps[1] == 0
    torch.testing.assert_close(found.trace[0, 0], (fn(x0) - x0).norm())
    torch.testing.assert_close(found.trace[1, 0], (fn(fn(x0)) - fn(x0)).norm())
    assert (found.trace[:, 1] == found.trace[0, 1]).all()
    assert torch.equal(found.trace[-1], found.residual)


def test_tolerance_is_relative_to_the_size_of_the_answer():
    found = fixed_point(lambda x: x / 2 + 1e12, torch.zeros(1, dtype=torch.float64), tol=1e-9)
    assert found.converged
    assert 1 < found.residual < 1e4


def test_float32_converges_at_its_default_tolerance():
    found = fixed_point(torch.cos, torch.ones(3, 1))
    assert found.converged.all()
    assert found.value.dtype == torch.float32
    torch.testing.assert_close(found.value, torch.full((3, 1), 0.7390851), rtol=1e-5, atol=0)


# ---------------------------------------------------------------------- what is said when nothing is found


def mixed(x: Tensor) -> Tensor:
    """Row 0 contracts, row 1 rotates for ever, row 2 squares itself to infinity, row 3 is NaN at once."""
    turned = torch.stack([-x[1, 1], x[1, 0]])
    return torch.stack([x[0] / 2 + 1, turned, x[2].square() * 10, x[3] * torch.nan])


@each_solver
def test_status_is_per_sample(solver):
    found = fixed_point(mixed, torch.ones(4, 2, dtype=torch.float64), solver=solver, max_steps=60)
    assert found.status[0] == Status.CONVERGED
    assert found.status[3] == Status.NONFINITE
    if isinstance(solver, Picard):
        assert found.names() == ["CONVERGED", "MAX_STEPS", "NONFINITE", "NONFINITE"]
        assert found.steps.tolist()[1] == 60
        summary = found.summary().splitlines()
        assert summary[0] == f"1 of 4: {Status.CONVERGED.sentence}"
        assert summary[2] == f"2 of 4: {Status.NONFINITE.sentence}"
    assert found.value.isfinite().all()


def test_every_status_has_a_sentence_of_its_own():
    sentences = [status.sentence for status in Status]
    assert len(set(sentences)) == len(sentences) == 6
    assert all(len(s) > 20 for s in sentences)


def test_best_iterate_is_returned_when_nothing_converges():
    def fn(x: Tensor) -> Tensor:  # comes close to 0 near x = 3, then leaves
        return x + 0.01 + (x - 3).square()

    found = fixed_point(fn, torch.zeros(1, 1, dtype=torch.float64), solver=Damped(0.3), max_steps=150)
    assert not found.converged
    assert found.residual == found.trace[:, 0][found.trace[:, 0].isfinite()].min()
    torch.testing.assert_close((fn(found.value) - found.value).norm(dim=-1), found.residual, rtol=1e-14, atol=0)
    assert found.residual < found.trace[-1, 0]


def test_nonfinite_returns_the_best_finite_iterate():
    found = fixed_point(lambda x: x.square() + 1, torch.full((1, 1), 2.0, dtype=torch.float64))
    assert found.status == Status.NONFINITE
    assert found.value.item() == 2.0  # the start was best
    assert found.residual.item() == 3.0


def test_nothing_finite_returns_the_start():
    found = fixed_point(lambda x: x / 0, torch.ones(2, 3, dtype=torch.float64))
    assert (found.status == Status.NONFINITE).all()
    assert torch.equal(found.value, torch.ones(2, 3, dtype=torch.float64))


# ---------------------------------------------------------------------- batch independence

MATES = {
    "others": lambda x: x,
    "diverging": lambda x: x * 1e200,
    "nonfinite": lambda x: x * torch.inf,
    "at the solution": lambda x: x * 0 + 0.7390851332151607,
}


@each_solver
@pytest.mark.parametrize("change", MATES.values(), ids=MATES.keys())
def test_values_of_mates_do_not_change_a_bit(solver, change: Callable[[Tensor], Tensor]):
    fn = lambda x: torch.cos(x) + 1e-3 * x.square()  # noqa: E731
    x0 = random(6, 3)
    reference = fixed_point(fn, x0, solver=solver, max_steps=80)
    for kept in (0, 3):
        others = change(random(6, 3, seed=9))
        others[kept] = x0[kept]
        bitwise(reference, fixed_point(fn, others, solver=solver, max_steps=80), kept)


@each_solver
def test_mates_that_never_converge_do_not_change_a_bit(solver):
    scale = torch.tensor([0.5, 0.5, -1.0, 30.0], dtype=torch.float64)[:, None]  # contract, contract, swing, explode
    x0 = random(4, 2)
    whole = fixed_point(lambda x: scale * x + 1, x0, solver=solver, max_steps=300)
    calm = fixed_point(lambda x: 0.5 * x + 1, x0, solver=solver, max_steps=300)
    for sample in (0, 1):
        bitwise(whole, calm, sample)
        assert whole.converged[sample]


@each_solver
def test_batch_size_changes_nothing_but_rounding(solver):
    x0 = random(7, 3)
    whole = fixed_point(torch.cos, x0, solver=solver, tol=1e-12)
    for i in range(7):
        alone = fixed_point(torch.cos, x0[i], solver=solver, tol=1e-12)
        torch.testing.assert_close(alone.value, whole.value[i], rtol=1e-12, atol=1e-12)
        assert abs(int(alone.steps) - int(whole.steps[i])) <= 1


# ---------------------------------------------------------------------- implicit gradients

BETA, PATTERNS = 0.4, 0.8 * random(5, 3, seed=5)  # contraction: β (diam/2)² < 1
PROBE = random(4, 3, seed=6)


def hopfield(x: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    return torch.softmax(beta * x @ k.mT, dim=-1) @ k


def hopfield_leaves() -> tuple[Tensor, Tensor]:
    return PATTERNS.clone().requires_grad_(), torch.tensor(BETA, dtype=torch.float64, requires_grad=True)


def unrolled(fn: Callable[[Tensor], Tensor], x: Tensor, steps: int = 400) -> Tensor:
    for _ in range(steps):
        x = fn(x)
    return x


@pytest.mark.parametrize("adjoint", ["anderson", "cg", "cholesky"])
@each_solver
def test_implicit_gradient_of_a_symmetric_map_is_the_unrolled_one(adjoint: str, solver):
    k, beta = hopfield_leaves()
    expected = torch.autograd.grad((unrolled(lambda x: hopfield(x, k, beta), PROBE) * PROBE).sum(), [k, beta])
    found = fixed_point(lambda x: hopfield(x, k, beta), PROBE, solver=solver, tol=1e-13, adjoint=adjoint)
    assert found.converged.all()
    got = torch.autograd.grad((found.value * PROBE).sum(), [k, beta])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_implicit_gradient_of_a_map_without_symmetry_is_the_unrolled_one():
    w, b = (0.4 * random(3, 3, seed=7)).requires_grad_(), random(3, seed=8).requires_grad_()
    fn = lambda x: torch.tanh(x @ w.mT + b)  # noqa: E731
    expected = torch.autograd.grad((unrolled(fn, PROBE) * PROBE).sum(), [w, b])
    got = torch.autograd.grad((fixed_point(fn, PROBE, tol=1e-13).value * PROBE).sum(), [w, b])
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


def test_implicit_gradient_agrees_with_finite_differences():
    def solve(beta: float) -> float:
        fn = lambda x: hopfield(x, PATTERNS, torch.tensor(beta, dtype=torch.float64))  # noqa: E731
        return float((fixed_point(fn, PROBE, tol=1e-14).value * PROBE).sum())

    k, beta = hopfield_leaves()
    (slope,) = torch.autograd.grad(
        (fixed_point(lambda x: hopfield(x, k, beta), PROBE, tol=1e-14).value * PROBE).sum(), beta
    )
    np.testing.assert_allclose(slope, (solve(BETA + 1e-5) - solve(BETA - 1e-5)) / 2e-5, rtol=1e-7)


def test_implicit_gradient_reaches_through_what_makes_the_parameters():
    raw = (0.4 * PATTERNS).requires_grad_()
    value = fixed_point(lambda x: hopfield(x, torch.tanh(2 * raw), torch.tensor(BETA)), PROBE, tol=1e-13).value
    expected = unrolled(lambda x: hopfield(x, torch.tanh(2 * raw), torch.tensor(BETA)), PROBE)
    (got,), (reference,) = (torch.autograd.grad((v * PROBE).sum(), raw) for v in (value, expected))
    torch.testing.assert_close(got, reference, rtol=1e-9, atol=1e-10)


def test_gradient_of_a_constant_map_is_that_of_the_constant():
    theta = random(3, seed=1).requires_grad_()
    found = fixed_point(lambda x: theta.expand(4, 3), PROBE)
    (slope,) = torch.autograd.grad((found.value * PROBE).sum(), theta)
    torch.testing.assert_close(slope, PROBE.sum(0))


def test_adjoint_none_and_no_grad_detach():
    k, beta = hopfield_leaves()
    assert not fixed_point(lambda x: hopfield(x, k, beta), PROBE, adjoint="none").value.requires_grad
    with torch.no_grad():
        assert not fixed_point(lambda x: hopfield(x, k, beta), PROBE).value.requires_grad
    assert not fixed_point(lambda x: hopfield(x, PATTERNS, beta.detach()), PROBE).value.requires_grad


@each_solver
def test_asking_for_gradients_does_not_change_the_value(solver):
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([0.5, 0.9, 1e20, -1.0], dtype=torch.float64)[:, None]
    fn = lambda x: theta * rate * (x + 1)  # noqa: E731  two contract, two never converge
    x0 = random(4, 2)
    with_grad, without = (fixed_point(fn, x0, solver=solver, max_steps=50, adjoint=a) for a in ("anderson", "none"))
    assert torch.equal(with_grad.value.detach(), without.value)
    assert torch.equal(with_grad.status, without.status)


@pytest.mark.parametrize("adjoint", ["anderson", "cg", "cholesky"])
def test_gradients_do_not_see_mates_that_fail(adjoint: str):
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([0.5, 2.0, 1e200], dtype=torch.float64)[:, None]  # 1/(1 − θ/2); no contraction; overflow
    found = fixed_point(lambda x: theta * rate * x + 1, torch.zeros(3, 1).double(), adjoint=adjoint)
    assert found.converged.tolist() == [True, False, False]
    (slope,) = torch.autograd.grad(found.value[0].sum(), theta)
    torch.testing.assert_close(slope, torch.tensor(2.0, dtype=torch.float64), rtol=1e-8, atol=0)  # ½ / (1 − ½)²


@pytest.mark.parametrize("adjoint", ["anderson", "cg", "cholesky"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_gradient_that_is_not_found_is_told(adjoint: str):
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([[0.5], [1.0]], dtype=torch.float64)  # the second has I − J = 0 and no fixed point
    found = fixed_point(lambda x: theta * rate * x + 1, torch.zeros(2, 1).double(), adjoint=adjoint)
    found.value[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeWarning, match=r"fixed_point.backward: .* got none for 1 of 2 samples. Their gradient"):
        found.value.sum().backward()


@pytest.mark.parametrize("adjoint", ["anderson", "cg", "cholesky"])
def test_gradients_do_not_depend_on_the_scale_of_the_loss(adjoint: str):
    k, beta = hopfield_leaves()
    found = fixed_point(lambda x: hopfield(x, k, beta), PROBE, tol=1e-6, adjoint=adjoint).value.sin().sum()
    large, small = (torch.autograd.grad(s * found, k, retain_graph=True)[0] / s for s in (1.0, 1e-9))
    assert (large - small).norm() < 1e-9 * large.norm()


def test_causal_coefficients_see_no_later_token_and_solve_as_fast():
    torch.manual_seed(0)
    n, d = 6, 3
    blocks = torch.tril(torch.ones(n, n)).double()[:, None, :, None] * torch.randn(n, d, n, d).double()
    matrix = blocks.reshape(n * d, n * d)
    matrix = matrix * (1.3 / torch.linalg.eigvals(matrix).abs().max())  # Picard diverges
    first, second = random(2, n * d), random(2, n * d, seed=5)
    second = torch.cat([first[:, : 4 * d], second[:, 4 * d :]], 1)
    solver = Anderson(memory=12, width=d)
    for steps in range(1, 12):
        one, two = (
            solve_steps(lambda x, b=b: x @ matrix.T + b, torch.zeros(2, n * d).double(), solver, steps)
            for b in (first, second)
        )
        assert (one - two)[:, : 4 * d].abs().max() < 1e-9 * (1 + one.abs().max())
    whole, causal = (
        fixed_point(lambda x: x @ matrix.T + first, torch.zeros_like(first), solver=s, tol=1e-8, max_steps=60)
        for s in (Anderson(memory=12), solver)
    )
    assert whole.converged.all()
    assert causal.converged.all()
    assert causal.steps.max() <= 2 * whole.steps.max()


def solve_steps(fn, x, solver, steps):
    state = solver.init(x)
    for _ in range(steps):
        state, x = solver.step(state, x, fn(x))
    return x


def test_backward_can_run_twice():
    k, beta = hopfield_leaves()
    value = fixed_point(lambda x: hopfield(x, k, beta), PROBE, tol=1e-12).value.sum()
    first = torch.autograd.grad(value, k, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(value, k)[0])


# ---------------------------------------------------------------------- Newton


def softplus_problem(target: Tensor):
    """min Σ softplus(x_i) − ⟨x, target⟩, solved by x = logit(target); convex, with exponential tails."""
    return (
        lambda x: (torch.nn.functional.softplus(x) - x * target).sum(-1),
        lambda x: torch.sigmoid(x) - target,
        lambda x: torch.diag_embed(torch.sigmoid(x) * torch.sigmoid(-x)),
    )


def test_newton_minimises_convex_functions():
    target = torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.98 + 0.01
    found = newton(*softplus_problem(target), torch.zeros_like(target), tol=1e-13)
    assert found.converged.all()
    assert (found.steps <= 12).all()
    torch.testing.assert_close(found.value, torch.logit(target), rtol=1e-10, atol=1e-10)
    assert found.trace.shape == (int(found.steps.max()) + 1, 20)


def test_newton_solves_a_quadratic_in_one_step():
    a = random(4, 4)
    a = a @ a.mT + torch.eye(4, dtype=a.dtype)
    b = random(3, 4, seed=1)
    found = newton(
        lambda x: (x * (x @ a / 2 - b)).sum(-1), lambda x: x @ a - b, lambda x: a.expand(3, 4, 4), 0 * b, tol=1e-12
    )
    assert (found.steps == 1).all()
    torch.testing.assert_close(found.value, torch.linalg.solve(a, b.mT).mT, rtol=1e-12, atol=1e-12)


def test_newton_comes_home_from_far_flat_starts():
    target = torch.tensor([[0.3, 0.6]], dtype=torch.float64)
    found = newton(*softplus_problem(target), torch.tensor([[40.0, -300.0]]).double(), tol=1e-12, reach=1e3)
    assert found.converged
    torch.testing.assert_close(found.value, torch.logit(target), rtol=1e-9, atol=1e-9)


def test_newton_reports_what_it_cannot_do():
    linear = newton(
        lambda x: x[..., 0], torch.ones_like, lambda x: torch.zeros(*x.shape, 1).double(), t([[0.0]]), tol=0.1
    )
    assert not linear.converged
    few = newton(*softplus_problem(t([[0.7]])), t([[-1.0]]), tol=1e-14, max_steps=2)
    assert few.status == Status.MAX_STEPS
    assert few.steps == 2
    broken = newton(
        lambda x: x[..., 0], lambda x: x * torch.nan, lambda x: torch.ones(*x.shape, 1).double(), t([[1.0]]), tol=1e-9
    )
    assert broken.status == Status.NONFINITE
    assert broken.value.isfinite().all()


def test_newton_verdict_comes_first():
    stop = lambda local: torch.where(local.x[..., 0] > 1, int(Status.BOUNDARY), -1)  # noqa: E731
    target = t([[0.9], [0.6]])
    found = newton(*softplus_problem(target), torch.zeros_like(target), tol=1e-12, verdict=stop)
    assert found.names() == ["BOUNDARY", "CONVERGED"]


def test_newton_mates_do_not_change_a_bit():
    x0 = random(5, 3)
    target = torch.sigmoid(random(5, 3, seed=1))
    reference = newton(*softplus_problem(target), x0, tol=1e-13)
    for mates in (torch.full((5, 3), 1e3).double(), torch.full((5, 3), torch.nan).double(), -x0):
        mates[2] = x0[2]
        bitwise(reference, newton(*softplus_problem(target), mates, tol=1e-13), 2)


# ---------------------------------------------------------------------- Newton in the canonical link


def well_inside(rng: np.random.Generator) -> tuple[Empirical, Tensor, float]:
    """A random weighted polytope, means that give every atom at least a tenth of its fair share, and its diameter."""
    d = int(rng.integers(1, 8))
    n = int(rng.integers(d + 1, 5 * d + 4))
    x = 10 ** rng.uniform(-3, 3) * (rng.normal(size=(n, d)) + rng.normal(size=d))
    shares = 0.9 * rng.dirichlet(np.ones(n), size=4) + 0.1 / n
    diameter = np.linalg.norm(x[:, None] - x, axis=-1).max()
    return Empirical(t(x), t(rng.uniform(0, 3) * rng.normal(size=n))), t(shares @ x), float(diameter)


@pytest.mark.long
def test_natural_takes_at_most_30_steps_and_returns_the_mean_on_200_polytopes():
    rng = np.random.default_rng(200)
    worst_steps, worst_error = 0, 0.0
    for _ in range(200):
        h, mean, diameter = well_inside(rng)
        found = h.natural(mean)
        assert found.converged.all(), found.summary()
        worst_steps = max(worst_steps, int(found.steps.max()))
        worst_error = max(worst_error, float((h.mean(found.value) - mean).abs().max()) / diameter)
    assert worst_steps <= 30
    assert worst_error <= 1e-8


@pytest.mark.parametrize("mates", ["inside", "outside", "vertices", "nan"])
def test_natural_does_not_see_its_mates(mates: str):
    h, rng = Empirical(t(KEYS), t(LOG_H)), np.random.default_rng(3)
    mean = t(rng.dirichlet(np.ones(7), size=5) @ KEYS)
    reference = h.natural(mean)
    other = {"inside": mean.flip(0), "outside": 50 * mean, "vertices": t(KEYS[:5]), "nan": mean * torch.nan}[mates]
    for kept in range(5):
        batch = other.clone()
        batch[kept] = mean[kept]
        bitwise(reference, h.natural(batch), kept)
        single = h.natural(mean[kept])
        torch.testing.assert_close(single.value, reference.value[kept], rtol=1e-9, atol=1e-9)


def test_natural_does_not_see_other_measures_of_its_batch():
    rng = np.random.default_rng(4)
    atoms = t(rng.normal(size=(3, 6, 2)))
    mean = Empirical(atoms).mean(t(rng.normal(size=(3, 1, 2))))
    reference = Empirical(atoms).natural(mean)
    changed = atoms.clone()
    changed[0], changed[2] = 1e6 * atoms[0], 0.0
    found = Empirical(changed).natural(mean)
    for name in ("value", "status", "steps", "residual"):
        assert torch.equal(getattr(found, name)[1], getattr(reference, name)[1])


def test_natural_value_is_the_same_with_and_without_gradients():
    h, mean = Empirical(t(KEYS), t(LOG_H)), t(np.random.default_rng(5).dirichlet(np.ones(7), size=6) @ KEYS)
    plain, tracked = h.natural(mean), h.natural(mean.clone().requires_grad_())
    torch.testing.assert_close(tracked.value.detach(), plain.value, rtol=1e-15, atol=1e-15)
    assert torch.equal(tracked.status, plain.status)


def test_natural_is_differentiable_in_atoms_and_weights():
    def eta(x: Tensor, w: Tensor) -> Tensor:
        return Empirical(x, w).natural(mean).value

    mean = t(np.full(7, 1 / 7) @ KEYS)
    x, w = t(KEYS).requires_grad_(), t(LOG_H).requires_grad_()
    assert torch.autograd.gradcheck(eta, (x, w), eps=1e-5, atol=1e-5)
    loc, root = random(2, seed=1).requires_grad_(), random(2, 2, seed=2).requires_grad_()
    solve = lambda m, r: Gaussian(m, r @ r.mT + torch.eye(2).double()).natural(torch.zeros(2).double()).value  # noqa: E731
    assert torch.autograd.gradcheck(solve, (loc, root))
