"""How the native kernel is called: from any number of threads and processes, under every transform of torch, twice, in
parts, with gradients or without; and what it does not serve goes another way."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cumulant.kernels.native.direct as direct
from cumulant import fisher_product, moments
from cumulant.kernels import operator
from tests.kernels.native.problems import Problem, held, native, normal, probe, same, threads

pytestmark = native


def loss(eta, atoms, values=None, **options):
    """A number that depends on every statistic but the largest score, whose second derivative is 0."""
    found = moments(eta, atoms, values, **{"backend": "native", "statistics": "all"} | options)
    total = found.log_normalizer.sum()
    for i, name in enumerate(("mean", "score_variance", "entropy", "value_trace", "atom_trace", "effective_atoms")):
        total = total + (getattr(found, name) * (i - 2.5)).sin().sum()
    return total if found.sink_mass is None else total + found.sink_mass.square().sum()


@pytest.fixture
def problem() -> Problem:
    return Problem.of(9, 40, 4, 3, lead=(2,), causal=True, offset=35)


# ---------------------------------------------------------------------- derivatives and transforms


@pytest.mark.long
@pytest.mark.parametrize("q", [2, 5])
@pytest.mark.parametrize(
    "support", ["causal", *(pytest.param(s, marks=pytest.mark.long) for s in ("plain", "window", "pairs", "sink"))]
)
def test_gradients_by_differences(support, q):
    n = 4
    given = Problem.of(q, n, 2, 1, log_weights=normal(q, n, seed=5) if support == "pairs" else None)
    sink = normal(seed=6).requires_grad_() if support == "sink" else None
    options = {"causal": {"causal": True}, "window": {"window": 3}}.get(support, {})
    leaves = given.leaves()

    def numbers(sink, *tensors):
        found = moments(**dict(zip(leaves, tensors, strict=True)), sink=sink, offset=1, **options, statistics="all")
        values = held(found) | {"entropy": found.entropy, "effective_atoms": found.effective_atoms}
        alive = found.log_normalizer.detach() > -torch.inf
        return tuple(t[alive] for name, t in sorted(values.items()) if t.requires_grad and name != "max_score")

    assert torch.autograd.gradcheck(numbers, (sink, *leaves.values()), atol=1e-7)
    assert torch.autograd.gradgradcheck(numbers, (sink, *leaves.values()), atol=1e-6)


def test_second_derivatives_are_those_of_the_reference(problem):
    results = []
    for backend in ("native", "dense"):
        given = problem.leaves()
        first = torch.autograd.grad(
            loss(**given, **problem.options, backend=backend), list(given.values()), create_graph=True
        )
        results.append(torch.autograd.grad(sum(f.square().sum() for f in first), list(given.values())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("how", ["vmap", "grad", "vmap of grad", "jvp", "jacrev", "vmap over keys"])
def test_transforms(how):
    eta, atoms, values = normal(3, 9, 4), normal(3, 20, 4, seed=1), normal(3, 20, 5, seed=2)
    backends = []
    for backend in ("native", "dense"):

        def f(e, x, v, backend=backend):
            return loss(e, x, v, causal=True, offset=15, backend=backend)

        backends.append(
            {
                "vmap": lambda f=f: torch.vmap(f)(eta, atoms, values),
                "grad": lambda f=f: torch.func.grad(f, argnums=(0, 1, 2))(eta, atoms, values),
                "vmap of grad": lambda f=f: torch.vmap(torch.func.grad(f, argnums=(0, 1, 2)))(eta, atoms, values),
                "jvp": lambda f=f: torch.func.jvp(f, (eta, atoms, values), (eta.sin(), atoms.cos(), values.exp())),
                "jacrev": lambda f=f: torch.func.jacrev(f)(eta[0], atoms[0], values[0]),
                "vmap over keys": lambda f=f: torch.vmap(f, in_dims=(None, 0, 0))(eta[0], atoms, values),
            }[how]()
        )
    ours, theirs = (b if isinstance(b, tuple) else (b,) for b in backends)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * max(1.0, float(b.abs().max())))


def test_many_incoming_gradients_at_once():
    """`is_grads_batched`, and Jacobians by it: such gradients have no memory to read."""
    eta, atoms = normal(9, 4).requires_grad_(), normal(20, 4, seed=1).requires_grad_()
    for options in ({"causal": True, "offset": 11}, {"window": 5, "offset": 11}):
        out = moments(eta, atoms, **options, statistics=("mean", "value_trace")).mean
        rows = normal(5, 9, 4, seed=2)
        many = torch.autograd.grad(out, (eta, atoms), rows, is_grads_batched=True, retain_graph=True)
        one = [torch.autograd.grad(out, (eta, atoms), row, retain_graph=True) for row in rows]
        for slot in (0, 1):
            torch.testing.assert_close(many[slot], torch.stack([each[slot] for each in one]))

    def log_normalizer(e):
        return moments(e, atoms.detach()).log_normalizer

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(log_normalizer, eta, vectorize=True), jacobian(log_normalizer, eta))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("q", [9, pytest.param(2, marks=pytest.mark.long)])
def test_compiled_graphs(compiler, q):
    torch.compiler.reset()
    given = [t.transpose(1, 2) for t in (normal(2, q, 3, 4), normal(2, 20, 3, 4, seed=1), normal(2, 20, 3, 5, seed=2))]
    given = [t.requires_grad_() for t in given]

    def f(e, x, v):
        return loss(e, x, v, causal=True, offset=15, sink=0.5, backend="auto")

    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(*given), f(*given))
    for ours, theirs in zip(*(torch.autograd.grad(g(*given), given) for g in (compiled, f)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), f(*given))


@pytest.mark.long
def test_a_compiled_fisher_product():
    eta, atoms, vector = (normal(k, 4, seed=k).requires_grad_() for k in (9, 20, 9))

    def f(e, x, v):
        return fisher_product(e, x, v, causal=True, offset=15).sin().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    inputs = (eta, atoms, vector.detach().requires_grad_())
    for ours, theirs in zip(*(torch.autograd.grad(g(*inputs), inputs) for g in (compiled, f)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("recorder", ["torch.jit.trace", "make_fx", "fake tensors", "flops"])
def test_recorders_see_the_call(recorder):
    """A call of a foreign library that they do not see would be recorded as a constant, or read no memory at all."""
    eta, atoms = normal(2, 9, 4), normal(2, 20, 4, seed=1)

    def f(e, x):
        found = moments(e, x, causal=True, offset=15, statistics="all")
        return found.mean * found.entropy[..., None] + found.value_trace[..., None]

    if recorder == "fake tensors":
        with FakeTensorMode() as mode:
            assert f(mode.from_tensor(eta), mode.from_tensor(atoms)).shape == (2, 9, 4)
        return
    if recorder == "flops":
        with FlopCounterMode(display=False):
            torch.testing.assert_close(f(eta, atoms), f(eta, atoms))
        return
    recorded = torch.jit.trace(f, (eta, atoms)) if recorder == "torch.jit.trace" else make_fx(f)(eta, atoms)
    torch.testing.assert_close(recorded(2 * eta, atoms - 1), f(2 * eta, atoms - 1))


class Labelled(torch.Tensor):
    """A tensor with a name of its own type."""


def test_tensors_of_other_types_go_another_way():
    eta, atoms = normal(9, 4).as_subclass(Labelled), normal(20, 4)
    torch.testing.assert_close(moments(eta, atoms).mean.as_subclass(torch.Tensor), moments(normal(9, 4), atoms).mean)
    with pytest.raises(
        ValueError, match=r"reads tensors of torch by their addresses, not those of type Labelled.*doctor"
    ):
        moments(eta, atoms, backend="native")
    assert moments(torch.nn.Parameter(normal(9, 4)), atoms, backend="native").mean.requires_grad


def test_a_default_device_moves_no_result():
    given = Problem.of(9, 40, 4, 3, log_weights=(9, 40), sink=())
    for options in ({}, {"window": 5, "offset": 9}):
        problem = Problem(given.tensors, options)
        found = moments(**problem.leaves(), **options, backend="native", statistics="all")
        with torch.device("meta"):
            inside = moments(**problem.leaves(), **options, backend="native", statistics="all")
            torch.autograd.backward(inside.mean.sum())
        for name, value in held(found).items():
            assert torch.equal(held(inside)[name], value)


@pytest.mark.parametrize("window", [2**31, 2**62, 2**63 - 1, 2**70])
def test_windows_and_offsets_of_any_size(window):
    eta, atoms = normal(9, 4), normal(20, 4)
    found = moments(eta, atoms, window=window, offset=5, backend="native").mean
    torch.testing.assert_close(found, moments(eta, atoms, backend="native").mean)
    far = moments(eta, atoms, causal=True, offset=window, backend="native").mean
    torch.testing.assert_close(far, found)
    assert (moments(eta, atoms, causal=True, offset=-window, backend="native").log_normalizer == -torch.inf).all()


# ---------------------------------------------------------------------- modes of autograd


def test_without_gradients(problem):
    expected = problem.answer("dense")[0]
    given = problem.leaves()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = held(moments(**given, **problem.options, backend="native", statistics="all"))
        assert not any(t.requires_grad for t in found.values())
        assert all(t.is_inference() == (mode is torch.inference_mode) for t in found.values())
        same((found, {}), (expected, {}), 1e-11)


def test_a_frozen_argument_gets_no_gradient(problem):
    given = problem.leaves(needs=("atoms",))
    found = moments(**given, **problem.options, backend="native")
    (found.mean.sum() + found.entropy.sum()).backward()
    assert given["atoms"].grad is not None
    assert given["eta"].grad is None
    assert given["values"].grad is None


def test_a_leaf_that_is_used_twice():
    x = normal(2, 9, 8).requires_grad_()
    slopes = []
    for backend in ("native", "dense"):
        found = moments(x, x, x, causal=True, backend=backend, statistics="all")
        slopes.append(torch.autograd.grad(probe({k: v for k, v in held(found).items() if k != "max_score"}), x)[0])
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"window": 3, "offset": 1}], ids=["as they lie", "flattened"])
@pytest.mark.parametrize("changed", ["eta", "atoms", "values", "log_weights"])
def test_a_change_in_place_is_noticed(changed, options):
    given = Problem.of(9, 40, 4, 3, log_weights=normal(40)).leaves()
    total = loss(**given, **options)
    with torch.no_grad():
        given[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_graph_may_be_used_again_and_is_freed_with_its_tensors(problem):
    given = problem.leaves()
    total = loss(**given, **problem.options)
    once, again = (torch.autograd.grad(total, list(given.values()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    torch.autograd.grad(total, list(given.values()))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, list(given.values()))


def test_hooks_of_saved_tensors_and_checkpoints():
    given = Problem.of(9, 40, 4, 3).leaves()
    plain = torch.autograd.grad(loss(**given), list(given.values()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        hooked = loss(**given)
    again = checkpoint(lambda e, x, v: loss(e, x, v), *given.values(), use_reentrant=False)
    for total in (hooked, again):
        for ours, theirs in zip(torch.autograd.grad(total, list(given.values())), plain, strict=True):
            assert torch.equal(ours, theirs)


def test_records_are_copied_and_pickled(problem):
    with torch.no_grad():
        found = moments(**problem.tensors, **problem.options, backend="native", statistics="all")
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert all(torch.equal(value, held(other)[name]) for name, value in held(found).items())


def test_gradients_that_come_in_any_layout(problem):
    given = problem.leaves()
    mean = moments(**given, **problem.options, backend="native").mean
    rows = normal(*mean.shape, seed=4)
    plain = torch.autograd.grad(mean, list(given.values()), rows, retain_graph=True)
    wide = torch.stack([rows, rows + torch.nan], -1)[..., 0]
    for laid in (rows.mT.contiguous().mT, wide, torch.ops.aten._neg_view(-rows)):
        for ours, theirs in zip(
            torch.autograd.grad(mean, list(given.values()), laid, retain_graph=True), plain, strict=True
        ):
            assert torch.equal(ours, theirs)
    ones = torch.autograd.grad(mean.sum(), list(given.values()), retain_graph=True)  # expanded from one number
    for ours, theirs in zip(torch.autograd.grad(mean, list(given.values()), torch.ones_like(mean)), ones, strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("q", [3, 40])
def test_results_are_the_same_bit_for_bit(q, count):
    case = Problem.of(q, 3000, 8, 5, lead=(2,), log_weights=(1, q, 3000), causal=True, offset=2950).to(torch.float32)
    with threads(count):
        first = case.answer("native")
        for _ in range(4):
            again = case.answer("native")
            for one, other in zip(first, again, strict=True):
                assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_calls_from_several_threads_of_python():
    cases = [Problem.of(3 + 7 * k, 700, 8, 5, lead=(2,), causal=True, offset=600, seed=k) for k in range(6)]
    with threads(2):
        expected = [case.answer("native") for case in cases]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda k: cases[k % 6].answer("native"), range(48)))
    for k, one in enumerate(found):
        same(one, expected[k % 6], 1e-12)


def _child(connection):
    torch.set_num_threads(2)
    found = Problem.of(40, 3000, 8).answer("native")[0]
    connection.send({name: value.numpy() for name, value in found.items()})


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="runs where processes fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    with threads(2):
        expected = Problem.of(40, 3000, 8).answer("native")[0]
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs,))
        process.start()
        assert ours.poll(60), "the child does not answer"
        found = {name: torch.from_numpy(value) for name, value in ours.recv().items()}
        process.join(30)
        again = Problem.of(40, 3000, 8).answer("native")[0]
    same((found, {}), (expected, {}), 1e-12)
    same((again, {}), (expected, {}), 1e-12)


# ---------------------------------------------------------------------- plans


def test_equal_shapes_in_other_layouts_have_plans_of_their_own():
    direct.plans.clear()
    plain = Problem.of(9, 40, 8, 8, lead=(2, 3))
    expected = plain.answer("native")
    layouts = (
        lambda t: t.mT.contiguous().mT,
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat(1, 1, 1, 2)[..., :8],
        lambda t: t.to(torch.float32),
    )
    for lay in layouts:
        exact = plain.laid(lay)
        same(exact.to(torch.float64).answer("native"), expected, 1e-5 if lay is layouts[-1] else 1e-12)
        exact.answer("native")
    assert len(direct.plans) >= 4
    same(plain.answer("native"), expected, 0)


def test_plans_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(direct, "PLANS", 16)
    direct.plans.clear()
    for n in range(1, 60):
        found = moments(normal(2, 3), normal(n, 3, seed=1), backend="native").log_normalizer
        torch.testing.assert_close(found, torch.logsumexp(normal(2, 3) @ normal(n, 3, seed=1).mT, -1))
        assert len(direct.plans) <= 16


@pytest.mark.long
def test_more_shapes_than_plans():
    direct.plans.clear()
    for n in range(1, direct.PLANS + 300):
        found = moments(normal(2, 3), torch.zeros(n, 3, dtype=torch.float64), backend="native").log_normalizer
        assert abs(float(found[0]) - torch.tensor(float(n)).log()) < 1e-6
    assert len(direct.plans) <= direct.PLANS


def test_bad_arguments_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match=r"moments\.values: expected shape"):
            moments(normal(5, 4), normal(7, 4), normal(6, 4))
        with pytest.raises(
            ValueError, match=r"moments\.sink: expected batch axes that broadcast, got \(3,\) and \(2,\)"
        ):
            moments(normal(2, 5, 4), normal(2, 7, 4), sink=normal(3))
        with pytest.raises(ValueError, match=r"moments\.log_weights: expected values below \+inf"):
            moments(normal(5, 4), normal(7, 4), log_weights=torch.full((7,), torch.inf, dtype=torch.float64))


def test_the_native_kernel_serves_by_default(monkeypatch):
    def refuse(*_):
        raise AssertionError("another kernel was asked")

    monkeypatch.setattr(operator, "reference", refuse)
    monkeypatch.setattr(operator, "stream", refuse)
    for q, n in ((1, 1), (1, 500), (300, 300)):
        moments(normal(2, q, 4), normal(2, n, 4), statistics=("mean", "entropy", "value_trace"))
