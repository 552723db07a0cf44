"""Every kernel against the reference: values, first and second gradients, at odd sizes, sharp scores and empty rows."""

import itertools
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import cumulant.kernels.operator as operator
import cumulant.kernels.streaming as streaming
from cumulant import Empirical, Moments, fisher_product, moments
from cumulant.kernels.compiled import compiled_stream
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native.call import entries
from cumulant.kernels.support import Band
from tests.kernels.native.problems import native

NATIVE = pytest.param("native", marks=native)

SUPPORTS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, cached": {"causal": True, "offset": 37},
    "causal, before the keys": {"causal": True, "offset": -5},
    "window": {"window": 9, "offset": 5},
    "causal window": {"causal": True, "window": 7, "offset": 40},
}
WEIGHTS = ["none", "per atom", "per pair", "shared pairs", "mask", "padding"]
LAYOUTS = {"heads": ((2, 3), (2, 3)), "grouped": ((2, 6), (2, 3)), "shared": ((2, 3), ()), "flat": ((), ())}


def rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 × 64, so that a hundred atoms already need several."""
    monkeypatch.setattr(streaming, "BLOCK", 1024)
    monkeypatch.setattr(streaming, "ROWS", 16)
    monkeypatch.setattr(streaming, "WHOLE", 16)


def problem(layout: str, support: str, weights: str, width: int | None, seed: int = 0):
    """Inputs with gradients, keyword arguments."""
    g = torch.Generator().manual_seed(seed)
    lead, keys = LAYOUTS[layout]
    q, n, d = 63, 63 if support == "causal" else 100, 7
    eta, atoms = rand(g, *lead, q, d), rand(g, *keys, n, d)
    values = None if width is None else rand(g, *keys, n, width)
    options = dict(SUPPORTS[support])
    w = None
    if weights == "per atom":
        w = rand(g, *keys, n)
        w[..., 3] = -torch.inf
    elif weights in ("per pair", "shared pairs"):
        w = rand(g, *((1,) * len(lead) if weights == "shared pairs" else lead), q, n)
        w[..., 5, :] = -torch.inf
    elif weights == "mask":
        options["mask"] = torch.rand(*lead, q, n, generator=g) > 0.5
        options["mask"][..., 7, :] = False
    elif weights == "padding":
        options["mask"] = torch.rand(*lead, 1, n, generator=g) > 0.5
    if w is not None:
        options["log_weights"] = w.requires_grad_()
    inputs = [t.requires_grad_() for t in (eta, atoms, values) if t is not None]
    return (eta, atoms, values), options, inputs + ([] if w is None else [w])


def held(record: Moments) -> dict[str, torch.Tensor]:
    """Everything a record holds, by name."""
    found = {"log_normalizer": record.log_normalizer, **record.statistics}
    return found if record.sink_mass is None else found | {"sink_mass": record.sink_mass}


def probes(record: Moments, seed: int = 1) -> torch.Tensor:
    """A random linear function of every finite statistic."""
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for _, value in sorted(held(record).items()):
        total = total + (torch.where(value.isfinite(), value, 0) * rand(g, *value.shape)).sum()
    return total


def answers(arguments, options, inputs, backend, statistics):
    """The record, its gradients, and gradients of those."""
    record = moments(*arguments, backend=backend, statistics=statistics, **options)
    first = torch.autograd.grad(probes(record), inputs, create_graph=True)
    g = torch.Generator().manual_seed(2)
    second = torch.autograd.grad(sum((f * rand(g, *f.shape)).sum() for f in first), inputs)
    return record, first, second


def assert_same(left, right, tolerance: float):
    assert held(left[0]).keys() == held(right[0]).keys()
    for name, a in held(left[0]).items():
        b = held(right[0])[name]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for order in (1, 2):
        for a, b in zip(left[order], right[order], strict=True):
            torch.testing.assert_close(a, b, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("width", [None, 5], ids=["values=atoms", "own values"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("backend", ["streaming", NATIVE])
def test_every_statistic_is_that_of_the_reference(backend, support, weights, layout, width, small_blocks):
    arguments, options, inputs = problem(layout, support, weights, width)
    dense = answers(arguments, options, inputs, "dense", "all")
    assert_same(dense, answers(arguments, options, inputs, backend, "all"), 1e-11)


@pytest.mark.parametrize("width", [None, 7], ids=["values=atoms", "own values"])
@pytest.mark.parametrize("layout", ["heads", "grouped", "shared"])
@pytest.mark.parametrize(
    ("support", "weights"), [("plain", "none"), ("causal", "none"), ("plain", "mask"), ("plain", "padding")]
)
def test_fused_is_the_reference(support, weights, layout, width):
    arguments, options, inputs = problem(layout, support, weights, width)
    dense = answers(arguments, options, inputs, "dense", ("mean", "entropy"))
    fused = answers(arguments, options, inputs, "fused", ("mean", "entropy"))
    assert_same(dense, fused, 1e-11)


@pytest.mark.parametrize("statistic", [*operator.STATISTICS, "entropy", "effective_atoms"])
@pytest.mark.parametrize("backend", ["streaming", "fused", "dense", NATIVE])
def test_one_statistic_at_a_time(statistic, backend, small_blocks):
    arguments, _, inputs = problem("heads", "plain", "none", None)
    if backend == "fused" and statistic not in ("mean", "mean_score", "mean_log_weight", "entropy"):
        with pytest.raises(ValueError, match="it returns G and means only"):
            moments(*arguments, backend="fused", statistics=(statistic,))
        return
    alone = moments(*arguments, backend=backend, statistics=(statistic,))
    whole = moments(*arguments, backend="dense", statistics="all")
    torch.testing.assert_close(getattr(alone, statistic), getattr(whole, statistic), rtol=1e-11, atol=1e-11)
    if statistic in alone.statistics and getattr(alone, statistic).requires_grad:
        a, b = (torch.autograd.grad(getattr(r, statistic).sum(), inputs, allow_unused=True) for r in (alone, whole))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("q", "n"), list(itertools.product([1, 63, 100, 1000], repeat=2)))
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["ordinary", "sharp"])
@pytest.mark.parametrize("backend", ["streaming", "fused", NATIVE])
def test_float32_accuracy(q, n, scale, backend):
    """G within 3e-7·max(1,|G|) plus the rounding of the largest score, gradients 1e-5 relative, against float64."""
    g = torch.Generator().manual_seed(q * n)
    d = 64
    exact = [rand(g, 2, q, d) * scale / math.sqrt(d), rand(g, 2, n, d)]
    single = [t.float().requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in single]
    wanted = ("mean", "entropy") if backend == "fused" else ("mean", "entropy", "score_variance")
    a, b = moments(*single, backend=backend, statistics=wanted), moments(*exact, backend="dense", statistics=wanted)
    # a score of d products is rounded in units of Σ|η_k x_k|
    rounding = torch.finfo(torch.float32).eps * (exact[0].abs() @ exact[1].abs().mT).amax(-1)
    bound = 3e-7 * b.log_normalizer.abs().clamp_min(1) + rounding
    assert ((a.log_normalizer - b.log_normalizer).abs() <= bound).all()
    probe = rand(g, *b.mean.shape)
    losses = [(r.mean * probe.to(r.mean.dtype)).sum() + r.log_normalizer.sum() for r in (a, b)]
    for x, y in zip(torch.autograd.grad(losses[0], single), torch.autograd.grad(losses[1], exact), strict=True):
        assert torch.linalg.vector_norm(x - y) <= 1e-5 * torch.linalg.vector_norm(y)


@pytest.mark.parametrize("backend", ["streaming", NATIVE])
def test_real_blocks_and_threads(backend):
    """Sizes beyond one block at the library's own settings, on one and on two threads."""
    g = torch.Generator().manual_seed(3)
    eta, atoms, values = rand(g, 3, 700, 8), rand(g, 3, 2500, 8), rand(g, 3, 2500, 5)
    weights = rand(g, 3, 2500)
    expected = moments(eta, atoms, values, log_weights=weights, backend="dense", statistics="all")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = moments(eta, atoms, values, log_weights=weights, backend=backend, statistics="all")
            assert_same((got, [], []), (expected, [], []), 1e-11)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["streaming", NATIVE])
def test_scipy_agrees(backend):
    g = torch.Generator().manual_seed(4)
    eta, atoms, w = rand(g, 9, 3), rand(g, 40, 3), rand(g, 9, 40)
    got = moments(eta, atoms, log_weights=w, backend=backend, statistics="all")
    logits = eta.numpy() @ atoms.numpy().T + w.numpy()
    np.testing.assert_allclose(got.log_normalizer, logsumexp(logits, axis=1), rtol=1e-13)
    p = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(got.entropy, -(p * np.log(p)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(got.effective_atoms, 1 / (p**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("backend", ["dense", "streaming", "auto", NATIVE])
@pytest.mark.parametrize(("q", "n"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sets(backend, q, n):
    got = moments(torch.zeros(2, q, 3), torch.zeros(2, n, 3), torch.zeros(2, n, 4), backend=backend, statistics="all")
    assert got.log_normalizer.shape == (2, q)
    assert (got.log_normalizer == -torch.inf).all()
    assert (got.mean == 0).all()
    assert got.mean.shape == (2, q, 4)


@pytest.mark.parametrize("backend", ["dense", "streaming", NATIVE])
def test_minus_infinite_weights_are_absent_atoms_and_plus_infinite_ones_are_refused(backend):
    g = torch.Generator().manual_seed(5)
    eta, atoms, w = rand(g, 4, 3), rand(g, 30, 3).requires_grad_(), rand(g, 30)
    w[::3] = -torch.inf
    kept = w > -torch.inf
    got = moments(eta, atoms, log_weights=w, backend=backend, statistics="all")
    alone = moments(eta, atoms[kept], log_weights=w[kept], backend=backend, statistics="all")
    assert_same((got, [], []), (alone, [], []), 1e-12)
    (gradient,) = torch.autograd.grad(probes(got), atoms)
    assert (gradient[~kept] == 0).all()
    with pytest.raises(ValueError, match=r"log_weights: expected values below \+inf, got"):
        moments(eta, atoms, log_weights=w.masked_fill(kept, torch.inf), backend=backend)


@pytest.mark.parametrize("backend", ["dense", "streaming", "fused", NATIVE])
def test_a_sink_is_one_more_atom_at_zero(backend):
    g = torch.Generator().manual_seed(6)
    eta, atoms, values = rand(g, 2, 4, 9, 3), rand(g, 2, 4, 30, 3), rand(g, 2, 4, 30, 3)
    sink = rand(g, 4).requires_grad_()
    wanted = ("mean", "entropy") if backend == "fused" else ("mean", "entropy", "effective_atoms", "value_trace")
    got = moments(eta, atoms, values, sink=sink, backend=backend, statistics=wanted)
    more = [torch.cat([t, torch.zeros(2, 4, 1, 3, dtype=t.dtype)], -2) for t in (atoms, values)]
    w = torch.cat([torch.zeros(2, 4, 30, dtype=torch.float64), sink[None, :, None].expand(2, 4, 1)], -1)
    by_hand = moments(eta, *more, log_weights=w, backend="dense", statistics="all")
    for name in ("log_normalizer", "mean", "entropy", *wanted[2:]):
        torch.testing.assert_close(getattr(got, name), getattr(by_hand, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.sink_mass, torch.exp(sink[:, None] - by_hand.log_normalizer))
    a, b = (torch.autograd.grad(r.mean.sum() + r.entropy.sum(), sink)[0] for r in (got, by_hand))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_sink_alone_makes_an_empty_row_whole():
    got = moments(torch.zeros(1, 2), torch.zeros(0, 2), sink=0.5, statistics=("mean", "entropy"))
    assert got.log_normalizer.item() == 0.5
    assert got.sink_mass.item() == 1
    assert got.entropy.item() == 0


@pytest.mark.parametrize("backend", ["dense", "streaming", "fused", NATIVE])
def test_merge_joins_cache_blocks(backend):
    g = torch.Generator().manual_seed(7)
    eta, atoms, values = rand(g, 20, 4), rand(g, 90, 4), rand(g, 90, 4)
    wanted = ("mean", "entropy") if backend == "fused" else "all"
    whole = moments(eta, atoms, values, backend=backend, statistics=wanted)
    parts = [
        moments(eta, atoms[s], values[s], backend=backend, statistics=wanted) for s in (slice(0, 31), slice(31, 90))
    ]
    assert_same((parts[0].merge(parts[1]), [], []), (whole, [], []), 1e-12)


def test_fused_refuses_in_a_sentence():
    eta = torch.zeros(2, 5, 4)
    for options, why in [
        ({"statistics": ("score_variance",)}, r"it returns G and means only, not .*score_variance"),
        ({"values": torch.zeros(2, 5, 3)}, r"values must be as wide as atoms \(4\), not 3"),
        ({"causal": True, "offset": 3}, r"its causal order starts at key 0"),
        ({"log_weights": torch.zeros(2, 5)}, r"it gives no gradient to log weights|not mean_log_weight"),
    ]:
        with pytest.raises(ValueError, match=why) as error:
            moments(eta, torch.zeros(2, 5, 4), backend="fused", **options)
        assert "moments.backend: expected" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (((5, 4), (7, 3)), {}, r"moments.atoms: expected shape \(\*batch, n, d=4\)"),
        (((5, 4), (7, 4), (6, 4)), {}, r"moments.values: expected shape \(\*batch, n=7, e\)"),
        (((5, 4), (7, 4)), {"causal": True}, r"moments.offset: expected the key index of the first query \(q=5, n=7\)"),
        (((5, 4), (7, 4)), {"window": 0, "offset": 0}, "moments.window: expected a positive number"),
        (((5, 4), (7, 4)), {"backend": "fast"}, "one of auto, dense, fused, native, streaming, triton, got 'fast'"),
        (((5, 4), (7, 4)), {"statistics": ("variance",)}, "moments.statistics: expected names among mean"),
        (((5, 4), (7, 4)), {"log_weights": torch.zeros(6)}, "moments.log_weights: expected"),
        (((6, 5, 4), (4, 7, 4)), {}, "a number of heads that divides eta's 6, got 4"),
        (((3, 5, 4), (1, 7, 4)), {"mask": torch.zeros(5, 6, dtype=torch.bool)}, "moments.mask: expected broadcastable"),
    ],
)
def test_bad_input(arguments, options, words):
    tensors = [torch.zeros(s) for s in arguments]
    with pytest.raises(ValueError, match=words):
        moments(*tensors, **options)


def test_bad_types():
    x = torch.zeros(5, 4)
    with pytest.raises(TypeError, match=r"moments\.mask: expected a Boolean tensor, got torch\.float32"):
        moments(x, x, mask=torch.zeros(5, 5))
    with pytest.raises(TypeError, match=r"moments\.atoms: expected dtype torch\.float32 as eta"):
        moments(x, x.double())


@pytest.mark.parametrize("backend", ["streaming", "fused", "dense", NATIVE])
def test_transforms(backend, small_blocks):
    g = torch.Generator().manual_seed(8)
    eta, atoms = rand(g, 5, 11, 4), rand(g, 30, 4)

    def mean(e, x):
        return moments(e, x, backend=backend, statistics=("mean",)).mean

    looped = torch.stack([mean(e, atoms) for e in eta])
    torch.testing.assert_close(torch.func.vmap(mean, in_dims=(0, None))(eta, atoms), looped)
    many = rand(g, 5, 30, 4)
    torch.testing.assert_close(
        torch.func.vmap(mean)(eta, many), torch.stack([mean(*a) for a in zip(eta, many, strict=True)])
    )
    jacobian = torch.func.jacrev(mean)(eta[0], atoms)
    torch.testing.assert_close(torch.func.jacfwd(mean)(eta[0], atoms), jacobian)
    tangent = torch.func.jvp(lambda e: mean(e, atoms), (eta[0],), (eta[1],))[1]
    torch.testing.assert_close(tangent, torch.einsum("qead,ad->qe", jacobian, eta[1]))
    hessian = torch.func.hessian(lambda e: moments(e, atoms, backend=backend, statistics=()).log_normalizer.sum())(
        eta[0]
    )
    torch.testing.assert_close(torch.einsum("qdqe->qde", hessian), Empirical(atoms).fisher(eta[0]))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "options", [{"backend": "streaming", "statistics": "all"}, {"backend": "fused"}, {"backend": "auto"}]
)
def test_compiles(options, compiler):
    g = torch.Generator().manual_seed(9)
    eta, atoms = rand(g, 2, 4, 200, 8).requires_grad_(), rand(g, 2, 2, 200, 8).requires_grad_()

    def loss(e, x):
        record = moments(e, x, **options)
        return record.mean.square().sum() + record.log_normalizer.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(eta, atoms), loss(eta, atoms))
    for a, b in zip(*(torch.autograd.grad(f(eta, atoms), (eta, atoms)) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"causal": True, "offset": 3}, {"weights": True}, {"mask": True}])
@pytest.mark.parametrize("kernel", ["streaming", NATIVE])
def test_fisher_product(options, kernel, small_blocks):
    g = torch.Generator().manual_seed(10)
    eta, atoms, v = (rand(g, 2, 3, k, 7).requires_grad_() for k in (63, 100, 63))
    options = dict(options)
    if options.pop("weights", False):
        options["log_weights"] = rand(g, 2, 3, 100)
    if options.pop("mask", False):
        options["mask"] = torch.rand(2, 3, 63, 100, generator=g) > 0.5
        options["mask"][..., 2, :] = False
    a, b = (fisher_product(eta, atoms, v, backend=backend, **options) for backend in ("dense", kernel))
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    probe = rand(g, *a.shape)
    first = [torch.autograd.grad((x * probe).sum(), (eta, atoms, v)) for x in (a, b)]
    for x, y in zip(*first, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    variance = moments(eta, atoms, backend="dense", statistics=("score_variance",), **options).score_variance
    along = (eta * fisher_product(eta, atoms, eta, backend=kernel, **options)).sum(-1)
    torch.testing.assert_close(along, variance, rtol=1e-10, atol=1e-10)


def test_empirical_beyond_small_sizes():
    """The measure on the fast kernels: G, mean and Fisher of 900 atoms against brute force."""
    g = torch.Generator().manual_seed(11)
    atoms, w, eta = rand(g, 900, 5), rand(g, 900), rand(g, 300, 5)
    h = Empirical(atoms, w)
    logits = eta @ atoms.mT + w
    p = torch.softmax(logits, -1)
    mean = p @ atoms
    centred = atoms - mean[:, None]
    torch.testing.assert_close(h.log_normalizer(eta), torch.logsumexp(logits, -1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h.mean(eta), mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h.fisher(eta), centred.mT @ (p[..., None] * centred), rtol=1e-10, atol=1e-11)
    assert h.sample(eta, 3, generator=g).shape == (300, 3, 5)


HALF = """
import torch
from cumulant import moments
torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    eta, atoms = (torch.randn(2, 300, 64) / 4).to(dtype), torch.randn(2, 500, 64).to(dtype)
    for options in ({}, {"statistics": "all"}):
        got = moments(eta, atoms, **options)
        exact = moments(eta.double(), atoms.double(), backend="dense", statistics="all")
        assert got.log_normalizer.dtype == torch.float32
        assert (got.log_normalizer - exact.log_normalizer).abs().max() < 2e-6
        assert (got.mean - exact.mean).abs().max() < 1e-5
    eta.requires_grad_()
    (g,) = torch.autograd.grad(moments(eta, atoms).mean.sum(), eta)
    assert g.dtype == dtype and g.isfinite().all()
print("half precision ok")
"""


@pytest.mark.long
def test_half_precision_accumulates_in_float32():
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    run = subprocess.run([sys.executable, "-c", HALF], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "half precision ok", run.stderr[-2000:]


MEMORY = """
import re, torch
from cumulant import moments
torch.set_num_threads(1)
def peak():  # not ru_maxrss, which a child inherits from its parent
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024
def once(n, order):
    eta, atoms = torch.randn(1, n, 16, requires_grad=order > 0), torch.randn(1, n, 16, requires_grad=order > 0)
    statistics = ("mean",) if {fused} else ("mean", "score_variance", "log_sum_square") if order > 1 else "all"
    m = moments(eta, atoms, backend={backend!r}, statistics=statistics)
    total = m.log_normalizer.sum() + sum(t.sum() for t in m.statistics.values())
    if order > 0:
        g = torch.autograd.grad(total, (eta, atoms), create_graph=order > 1)
        if order > 1:
            torch.autograd.grad(g[0].square().sum(), (eta, atoms))
once(256, {order})
before = peak()
once({n}, {order})
print(peak() - before)
"""


@pytest.mark.parametrize(
    "backend", [NATIVE, *(pytest.param(b, marks=pytest.mark.long) for b in ("streaming", "fused"))]
)
@pytest.mark.parametrize(
    ("order", "n", "share"),
    [
        pytest.param(0, 16384, 0.1, marks=pytest.mark.long),
        (1, 8192, 0.1),
        pytest.param(1, 16384, 0.1, marks=pytest.mark.long),
        pytest.param(2, 8192, 0.3, marks=pytest.mark.long),
    ],
    ids=["forward", "backward", "backward, large", "second order"],
)
def test_no_path_materialises_queries_times_atoms(backend, order, n, share):
    """Peak memory stays below a small share of one N × N matrix."""
    if backend == "native" and entries() is None:
        pytest.skip("no native kernel here: `cumulant doctor` says why")
    code = MEMORY.format(backend=backend, order=order, n=n, fused=backend == "fused")
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536"
    }  # freed blocks go back, so that the peak is what is held
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) < share * n * n * 4 / 2**20


def test_a_direction_of_another_shape_gets_a_sentence():
    with pytest.raises(ValueError, match="One direction per query"):
        fisher_product(torch.zeros(5, 4), torch.zeros(6, 4), torch.zeros(5, 3))


LINEAR = """
import re, torch
from cumulant import moments
from cumulant.kernels.compiled import compiled_stream
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native.call import entries
from cumulant.kernels.support import Band
from cumulant.kernels import fisher_product
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024
def once(n):
    eta, atoms = ((torch.randn(n, 16) / 4).requires_grad_() for _ in range(2))
    if {fisher}:
        torch.autograd.grad(fisher_product(eta, atoms, torch.randn(n, 16)).square().sum(), (eta, atoms))
        return
    m = moments(eta, atoms, statistics=("mean", "score_variance"))
    g = torch.autograd.grad(m.log_normalizer.sum() + m.mean.sin().sum(), (eta, atoms), create_graph=True)
    torch.autograd.grad(g[0].square().sum(), (eta, atoms))
once(256)
before = peak()
once({n})
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("fisher", [True, False], ids=["gradient of the Fisher product", "second derivative"])
def test_derivatives_by_recomputation_hold_linear_memory_with_the_usual_allocator(fisher):
    """Peak of resident memory at 3, 6 and 12 thousand queries and atoms: linear would double, the square quadruple."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    used = []
    for n in (3000, 6000, 12000):
        run = subprocess.run(
            [sys.executable, "-c", LINEAR.format(fisher=fisher, n=n)], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-2000:]
        used.append(float(run.stdout))
    assert max(used) < 60, used  # one matrix of 12 000 × 12 000 has 549 MiB
    assert used[2] < 2.5 * max(used[0], 16), used


@pytest.mark.parametrize("kind", ["transposed", "every other", "expanded", "Fortran order"])
@pytest.mark.parametrize("how", ["fused", "streaming", "compiled", "vmap", NATIVE])
def test_every_layout_is_read_rightly(kind, how):
    """Above the size up to which the reference serves; `tests/generated` has many more."""
    plain = [torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(3)]
    if kind == "expanded":
        plain[1] = plain[1][..., :1].expand(2, 300, 8)

    def laid(t):
        if kind == "transposed":
            return t.mT.contiguous().mT
        if kind == "every other":
            return torch.stack([t, t + torch.nan], -1).flatten(-2)[..., ::2]
        if kind == "Fortran order":
            return torch.from_numpy(np.asfortranarray(t.numpy()))
        return t

    given = [laid(t).requires_grad_() for t in plain]
    assert all(torch.equal(a, b) for a, b in zip(given, plain, strict=True))
    exact = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in plain]

    def ours(eta, atoms, values):
        backend = how if how in ("streaming", "fused", "native") else "auto"
        found = moments(eta, atoms, values, backend=backend, statistics=("mean",))
        return torch.cat([found.mean, found.log_normalizer[..., None]], -1)

    run = {"compiled": torch.compile(ours, backend="aot_eager"), "vmap": torch.vmap(ours)}.get(how, ours)
    found = run(*given)
    record = moments(*exact, backend="dense", statistics=("mean",))
    expected = torch.cat([record.mean, record.log_normalizer[..., None]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = torch.autograd.grad(found.sin().sum(), given), torch.autograd.grad(expected.sin().sum(), exact)
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["dense", "streaming", NATIVE])
@pytest.mark.parametrize("outlier", [1e6, 1e12])
def test_traces_do_not_feel_what_a_row_does_not_see(backend, outlier):
    """One value that late rows see, and one that no row sees: 31 % of a trace once, in float32."""
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(200, dtype=torch.bool)
    mask[50] = False
    clean = moments(x / 4, x, x, mask=mask, causal=True, backend="dense", statistics=("value_trace", "atom_trace"))
    values, keys = x.clone(), x.clone()
    values[50] = values[150] = keys[50] = outlier
    found = moments(
        x / 4, keys, values, mask=mask, causal=True, backend=backend, statistics=("value_trace", "atom_trace")
    )
    torch.testing.assert_close(found.value_trace[:150], clean.value_trace[:150], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.atom_trace, clean.atom_trace, rtol=1e-5, atol=1e-5)
    assert (found.value_trace[0] == 0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("backend", ["dense", "streaming", "fused", NATIVE])
def test_padding_may_hold_any_bits(backend, garbage):
    """Values and gradients are those of the tokens alone, and padding has gradient 0."""
    q, k, v = (torch.randn(2, 3, 150, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[0, ..., 100:] = False
    k, v = (torch.where(mask.mT, t, torch.tensor(garbage)).requires_grad_() for t in (k, v))
    q = q.requires_grad_()
    statistics = ("mean",) if backend == "fused" else "all"
    found = moments(q / 3, k, v, mask=mask, backend=backend, statistics=statistics)
    alone = moments(q[:1] / 3, k[:1, :, :100], v[:1, :, :100], backend="dense", statistics=statistics)
    for name, theirs in held(alone).items():
        torch.testing.assert_close(held(found)[name][:1], theirs, rtol=1e-5, atol=1e-5)
    total = sum(t[:1].sum() for t in held(found).values())
    slopes = torch.autograd.grad(total, (q, k, v))
    assert all(s.isfinite().all() for s in slopes)
    assert not slopes[1][0, :, 100:].any()
    assert not slopes[2][0, :, 100:].any()


def test_a_statistic_that_was_not_requested_is_refused_by_name():
    m = moments(torch.zeros(1, 2), torch.ones(3, 2), statistics=("mean",))
    assert set(m.statistics) == {"mean", "atom_mean", "mean_log_weight"}
    with pytest.raises(ValueError, match=r"Moments.value_trace: expected statistics that include 'value_trace', got a"):
        _ = m.value_trace


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_record_leaves_a_compiled_function(compiler):
    eta, atoms = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    torch.compiler.reset()
    found = torch.compile(moments, fullgraph=True, backend=compiler)(eta, atoms, sink=0.5)
    plain = moments(eta, atoms, sink=0.5)
    assert isinstance(found, Moments)
    for name, value in held(plain).items():
        torch.testing.assert_close(held(found)[name], value)
    assert pickle.loads(pickle.dumps(plain)).mean.equal(plain.mean)


def test_an_absent_sink_over_an_empty_row():
    sink = torch.tensor([-torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([False, True, True])[:, None].expand(3, 3)
    found = moments(x, x, mask=mask, sink=sink, statistics=("mean", "entropy"))
    assert found.sink_mass[0, 0] == 0
    assert found.sink_mass[1, 0] == 1
    (slope,) = torch.autograd.grad(found.sink_mass.sum() + found.entropy.sum() + found.mean.sum(), sink)
    assert slope.isfinite().all()
    assert slope[0] == 0


@pytest.mark.parametrize("how", ["vmap", "compile", "grad", "vmap of grad", "jvp", "second order"])
def test_padding_may_hold_any_bits_under_transforms(how):
    q, k, v = (
        torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3)
    )
    mask = torch.ones(3, 1, 200, dtype=torch.bool)
    mask[0, :, 100:] = False
    hidden = ~mask.mT

    def statistics(q, k, v, mask=mask):
        found = moments(q, k, v, mask=mask, statistics=("mean", "entropy", "value_trace"))
        return torch.cat([found.mean, found.entropy[..., None], found.value_trace[..., None]], -1)

    def loss(q, k, v, mask=mask):
        return statistics(q, k, v, mask).sin().sum()

    def second(q, k, v):
        q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (q, k))

    run = {
        "vmap": lambda q, k, v: torch.vmap(statistics)(q, k, v, mask),
        "compile": torch.compile(statistics, backend="aot_eager", fullgraph=True),
        "grad": torch.func.grad(loss, argnums=(0, 1, 2)),
        "vmap of grad": lambda q, k, v: torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v, mask),
        "jvp": lambda q, k, v: torch.func.jvp(lambda q: statistics(q, k, v), (q,), (torch.ones_like(q),)),
        "second order": second,
    }[how]
    clean = run(q, k, v)
    found = run(q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, -torch.inf))
    for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, clean)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["streaming", "native"])
def test_the_operator_of_the_compiler_has_a_rule_for_vmap(engine):
    if engine == "native" and entries() is None:
        pytest.skip("no native kernel here: `cumulant doctor` says why")
    eta, atoms, values = torch.randn(3, 2, 7, 5), torch.randn(2, 9, 5), torch.randn(3, 2, 9, 4)
    plan = Plan(frozenset({"log_normalizer", "mean", "max_score"}), Band(), engine)

    def total(e, v):
        out = compiled_stream(Inputs(e, atoms, v, None, None, None), plan)
        return out["mean"].square().sum() + out["log_normalizer"].sum() + out["max_score"].sum()

    def expected(e, v):
        m = moments(e, atoms, v, backend="dense", statistics=("mean", "max_score"))
        return m.mean.square().sum() + m.log_normalizer.sum() + m.max_score.sum()

    mapped, plain = eta.clone().requires_grad_(), eta.clone().requires_grad_()
    found = torch.func.vmap(total)(mapped, values)
    torch.testing.assert_close(found, torch.stack([expected(e, v) for e, v in zip(plain, values, strict=True)]))
    slope = torch.autograd.grad(found.sum(), mapped)
    torch.testing.assert_close(slope, torch.autograd.grad(expected(plain, values), plain), rtol=1e-4, atol=1e-5)
