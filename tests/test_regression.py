"""Kernel regression against direct sums in NumPy, random features against quadrature and their own expectation."""

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

from cumulant.attention import attend, attention
from cumulant.regression import approximate_attention, nadaraya_watson, random_features, random_projection
from tests.cases import t
from tests.compare import close

RNG = np.random.default_rng(1964)
Q, X, V = RNG.normal(size=(6, 3)), RNG.normal(size=(9, 3)), RNG.normal(size=(9, 2))
LOG_W, LOG_PAIRS = RNG.normal(size=9), RNG.normal(size=(6, 9))


def brute(q, x, v, log_kernel, log_w=0.0):
    """Mean, variance and effective number by the definitions; log_kernel (q, n)."""
    p = special.softmax(log_kernel + log_w, axis=-1)
    mean = p @ v
    spread = ((v[None] - mean[:, None]) ** 2).sum(-1)
    return mean, (p * spread).sum(-1), 1 / (p**2).sum(-1)


def square(q, x, s=1.0):
    return (((q[:, None] - x[None]) / s) ** 2).sum(-1)


# ---------------------------------------------------------------------- Nadaraya–Watson


@pytest.mark.parametrize("s", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("weights", ["none", "per point", "per pair"])
@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
def test_mean_variance_and_effective_points_are_the_sums(kernel: str, weights: str, s: float):
    w = {"none": None, "per point": LOG_W, "per pair": LOG_PAIRS}[weights]
    found = nadaraya_watson(t(Q), t(X), t(V), kernel=kernel, bandwidth=s, log_weights=None if w is None else t(w))
    log_kernel = -square(Q, X, s) / 2 if kernel == "gaussian" else Q @ X.T / s**2
    mean, variance, effective = brute(Q, X, V, log_kernel, 0.0 if w is None else w)
    close(found.mean, mean)
    close(found.variance, variance)
    close(found.effective_points, effective, 1e-11)
    if kernel == "dot":
        assert found.log_density is None
        return
    assert found.log_density is not None
    share = np.zeros((6, 9)) if w is None else np.broadcast_to(w, (6, 9))
    share = share - special.logsumexp(share, axis=-1, keepdims=True)
    normal = stats.norm.logpdf((Q[:, None] - X[None]), scale=s).sum(-1)
    close(found.log_density, special.logsumexp(share + normal, axis=-1))


def test_density_integrates_to_one():
    points, w = t(X[:, :1]), t(LOG_W)

    def density(u: float) -> float:
        found = nadaraya_watson(t([u]), points, points, bandwidth=0.4, log_weights=w).log_density
        assert found is not None
        return float(found.exp())

    assert abs(integrate.quad(density, -8, 8, epsabs=1e-11, limit=200)[0] - 1) < 1e-9


def test_gaussian_kernel_with_weights_e_to_half_the_norm_is_attention():
    """A8, and A9: without those weights the two differ unless all points have one norm."""
    norm = t(X).square().sum(-1) / 2
    dot = nadaraya_watson(t(Q), t(X), t(V), kernel="dot")
    close(nadaraya_watson(t(Q), t(X), t(V), log_weights=norm).mean, dot.mean, 1e-13)
    close(dot.mean, attention(t(Q), t(X), t(V), scale=1.0), 1e-13)
    assert (nadaraya_watson(t(Q), t(X), t(V)).mean - dot.mean).abs().max() > 0.1
    sphere = X / np.linalg.norm(X, axis=-1, keepdims=True)
    pair = [nadaraya_watson(t(Q), t(sphere), t(V), kernel=kernel, bandwidth=0.5).mean for kernel in ("gaussian", "dot")]
    close(pair[0], pair[1], 1e-13)


def test_one_bandwidth_per_coordinate_and_per_batch_entry():
    s = np.array([0.5, 1.0, 3.0])
    found = nadaraya_watson(t(Q), t(X), t(V), bandwidth=t(s))
    mean, _, _ = brute(Q, X, V, -square(Q, X, s) / 2)
    close(found.mean, mean)
    normal = stats.norm.logpdf(Q[:, None] - X[None], scale=s).sum(-1)
    assert found.log_density is not None
    close(found.log_density, special.logsumexp(normal, axis=-1) - np.log(9))
    several = nadaraya_watson(t(Q), t(X), t(V), bandwidth=t([[0.5], [2.0]]), log_weights=t(LOG_W))
    assert several.mean.shape == (2, 6, 2)
    for i, scalar in enumerate((0.5, 2.0)):
        one = nadaraya_watson(t(Q), t(X), t(V), bandwidth=scalar, log_weights=t(LOG_W))
        for a, b in zip(several, one, strict=True):
            assert a is not None
            assert b is not None
            close(a[i], b)


def test_batches_equal_a_loop_and_a_single_query_drops_its_axis():
    rng = np.random.default_rng(1)
    q, x, v, w = (t(rng.normal(size=size)) for size in [(4, 5, 3), (4, 7, 3), (4, 7, 2), (4, 7)])
    found = nadaraya_watson(q, x, v, log_weights=w)
    for i in range(4):
        for a, b in zip(found, nadaraya_watson(q[i], x[i], v[i], log_weights=w[i]), strict=True):
            assert a is not None
            assert b is not None
            close(a[i], b)
    single = nadaraya_watson(q[1, 2], x[1], v[1], log_weights=w[1])
    close(single.mean, found.mean[1, 2])
    assert single.log_density is not None
    assert single.mean.shape == (2,)
    assert single.log_density.shape == single.variance.shape == single.effective_points.shape == ()
    against = nadaraya_watson(q[1, 2], x, v, log_weights=w)  # one query, four sets of points
    assert against.mean.shape == (4, 2)
    close(against.mean[1], found.mean[1, 2])
    shared = nadaraya_watson(q, x[0], v[0], log_weights=t(rng.normal(size=(4, 5, 7))))  # pairs per batch, one set
    assert shared.mean.shape == (4, 5, 2)


def test_leaving_one_out_by_a_diagonal_of_minus_infinity():
    w = torch.zeros(9, 9, dtype=torch.float64).fill_diagonal_(-torch.inf)
    found = nadaraya_watson(t(X), t(X), t(V), log_weights=w)
    for i in range(9):
        rest = np.arange(9) != i
        close(found.mean[i], nadaraya_watson(t(X[i]), t(X[rest]), t(V[rest])).mean)
        assert found.log_density is not None
        close(found.log_density[i], nadaraya_watson(t(X[i]), t(X[rest]), t(V[rest])).log_density)


def test_many_points_take_the_kernels_in_blocks():
    rng = np.random.default_rng(2)
    q, x, v = (rng.normal(size=size) for size in [(33, 3), (2001, 3), (2001, 2)])
    found = nadaraya_watson(t(q), t(x), t(v), bandwidth=0.4)
    mean, variance, effective = brute(q, x, v, -square(q, x, 0.4) / 2)
    close(found.mean, mean)
    close(found.variance, variance)
    close(found.effective_points, effective, 1e-10)


def test_a_common_offset_costs_nothing():
    exact = nadaraya_watson(t(Q), t(X), t(V), bandwidth=0.5).mean
    moved = nadaraya_watson(t(Q + 1e6), t(X + 1e6), t(V), bandwidth=0.5).mean
    close(moved, exact, 1e-8)
    single = nadaraya_watson(t(Q).float() + 4096, t(X).float() + 4096, t(V).float(), bandwidth=0.5).mean
    assert (single - exact).abs().max() < 0.02  # the inputs themselves are rounded to 2e-4


def test_far_from_every_point_the_nearest_one_answers():
    far = nadaraya_watson(t([[1e4, 0.0, 0.0]]), t(X), t(V), bandwidth=0.1)
    close(far.mean[0], V[X[:, 0].argmax()], 1e-6)
    assert far.log_density is not None
    assert far.log_density.isfinite().all()
    assert far.log_density < -1e9


def test_one_point_and_absent_points():
    one = nadaraya_watson(t(Q), t(X[:1]), t(V[:1]))
    close(one.mean, np.broadcast_to(V[0], (6, 2)))
    close(one.variance, np.zeros(6))
    close(one.effective_points, np.ones(6))
    padded = nadaraya_watson(
        t(Q),
        t(np.vstack([X, np.full((2, 3), 1e200)])),
        t(np.vstack([V, np.full((2, 2), 1e9)])),
        log_weights=t(np.r_[LOG_W, -np.inf, -np.inf]),
    )
    plain = nadaraya_watson(t(Q), t(X), t(V), log_weights=t(LOG_W))
    for a, b in zip(padded, plain, strict=True):
        assert torch.equal(a, b) or (a - b).abs().max() < 1e-13  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]


@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
def test_no_points_at_all(kernel: str):
    empty = nadaraya_watson(t(Q), t(X[:0]), t(V[:0]), kernel=kernel)
    assert (empty.mean == 0).all()
    assert (empty.variance == 0).all()
    assert (empty.effective_points == 0).all()
    if kernel == "gaussian":
        assert empty.log_density is not None
        assert (empty.log_density == -torch.inf).all()
    inputs = [t(a).requires_grad_() for a in (Q, X, V)]
    w = torch.zeros(6, 9, dtype=torch.float64)
    w[2] = -torch.inf
    found = nadaraya_watson(*inputs, kernel=kernel, bandwidth=0.7, log_weights=w)
    assert (found.mean[2] == 0).all()
    assert found.variance[2] == found.effective_points[2] == 0
    terms = [found.mean[2].sum(), found.variance[2], found.effective_points[2]]
    if found.log_density is not None:
        assert found.log_density[2] == -torch.inf
        terms.append(found.log_density[2])
    for term in terms:
        for gradient in torch.autograd.grad(term, inputs, retain_graph=True, allow_unused=True):
            assert gradient is None or (gradient == 0).all()
    everything = sum(x.masked_fill(x == -torch.inf, 0).sum() for x in found if x is not None)
    assert all(g.isfinite().all() for g in torch.autograd.grad(everything, inputs))


@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
def test_gradients(kernel: str):
    inputs = [t(a).requires_grad_() for a in (Q[:2], X[:4], V[:4], LOG_W[:4], [0.6, 1.0, 1.4])]

    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor, s: Tensor):
        found = nadaraya_watson(q, x, v, kernel=kernel, bandwidth=s, log_weights=w)
        return tuple(a for a in found if a is not None)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(lambda *a: run(*a)[0], inputs)


def test_half_precision_is_summed_in_float32():
    q, x, v = (t(a).half() for a in (Q, X, V))
    found = nadaraya_watson(q, x, v, bandwidth=0.5)
    exact = nadaraya_watson(q.double(), x.double(), v.double(), bandwidth=0.5)
    assert found.mean.dtype == torch.float16
    assert found.variance.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.variance.double(), exact.variance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": "cosine"}, ValueError, r"kernel: expected one of gaussian, dot, got 'cosine'"),
        ({"values": t(V[:, 0])}, ValueError, r"values: expected shape .*n=9, e\), got \(9\).*values\[:, None\]"),
        ({"values": t(V[:4])}, ValueError, r"values: expected shape .* got \(4, 2\)"),
        ({"points": t(X[:, :2])}, ValueError, r"points: expected query .* points \(9, 2\)"),
        ({"points": t(X).float()}, TypeError, r"points: expected dtype torch.float64 as query"),
        ({"query": Q}, TypeError, r"query: expected a torch.Tensor, got ndarray"),
        ({"points": t(X)[None].expand(2, -1, -1), "query": t(Q)[None].expand(3, -1, -1)}, ValueError, "batch axes"),
        ({"points": t(X) * 1e200}, ValueError, r"points: expected finite points and queries whose squared distance"),
        ({"query": t(Q) * torch.nan}, ValueError, r"points: expected finite points and queries"),
        ({"bandwidth": 0.0}, ValueError, r"bandwidth: expected positive finite lengths, got 0.0"),
        ({"bandwidth": torch.nan}, ValueError, r"bandwidth: expected positive finite lengths"),
        ({"bandwidth": t([1.0, 2.0])}, ValueError, r"bandwidth: expected a number, \(\*batch, d=3\)"),
        ({"bandwidth": torch.ones(3)}, TypeError, r"bandwidth: expected dtype"),
        ({"log_weights": t(LOG_W[:4])}, ValueError, r"log_weights: expected \(\*batch, n=9\) per point"),
        ({"log_weights": torch.zeros(5, 9, dtype=torch.float64)}, ValueError, r"\(\*batch, q=6, n=9\) per pair"),
        ({"log_weights": t(LOG_W) + torch.inf}, ValueError, r"log_weights: expected values below \+inf"),
    ],
)  # fmt: skip
def test_refusals(change: dict, error: type, message: str):
    given = {"query": t(Q), "points": t(X), "values": t(V)} | change
    with pytest.raises(error, match=message):
        nadaraya_watson(**given)


# ---------------------------------------------------------------------- random features


def test_gauss_hermite_nodes_make_the_features_exact():
    """B10: the expectation over ω is a two-dimensional Gaussian integral, which 50² nodes do to rounding."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(50)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    mass = t(np.outer(weights, weights).ravel() / (2 * np.pi))
    q, k = t([[0.6, -0.9], [1.0, 0.2]]), t([[-0.3, 0.8], [0.5, 0.5], [0.0, 0.0]])
    estimate = (random_features(q, t(grid)) * mass * len(grid)) @ random_features(k, t(grid)).mT
    close(estimate, (q @ k.mT).exp())


@pytest.mark.long
@pytest.mark.parametrize("orthogonal", [False, True])
def test_features_are_unbiased(orthogonal: bool):
    generator = torch.Generator().manual_seed(3)
    q, k = t(Q[:1]) / 2, t(X[:4]) / 2
    draws = []
    for _ in range(4000):
        w = random_projection(3, 5, orthogonal=orthogonal, generator=generator, dtype=torch.float64)
        draws.append(random_features(q, w) @ random_features(k, w).mT)
    draws = torch.cat(draws)
    z = (draws.mean(0) - (q @ k.mT).exp()[0]) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 4.5


def test_orthogonal_rows_are_orthogonal_normal_and_better():
    generator = torch.Generator().manual_seed(4)
    w = random_projection(4, 10, orthogonal=True, generator=generator, dtype=torch.float64)
    assert w.shape == (10, 4)
    for block in (w[:4], w[4:8], w[8:]):
        gram = block @ block.mT
        close(gram - torch.diag(gram.diagonal()), np.zeros_like(gram))
    many = random_projection(4, 20_000, orthogonal=True, generator=generator, dtype=torch.float64)
    assert stats.kstest(many.square().sum(-1).numpy(), stats.chi2(4).cdf).pvalue > 1e-3
    assert stats.kstest(many[::4, 0].numpy(), stats.norm.cdf).pvalue > 1e-3
    rng = np.random.default_rng(3)
    q, k = (t(rng.normal(size=size)) / 4 for size in [(20, 8), (30, 8)])
    error = {}
    for orthogonal in (False, True):
        total = 0.0
        for _ in range(200):
            w = random_projection(8, 8, orthogonal=orthogonal, generator=generator, dtype=torch.float64)
            total += float((random_features(q, w) @ random_features(k, w).mT - (q @ k.mT).exp()).square().mean())
        error[orthogonal] = total
    assert error[True] < error[False]


def test_a_generator_makes_projections_repeatable():
    a, b = (random_projection(3, 7, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(a, b)
    assert random_projection(2, 3, dtype=torch.float16, orthogonal=True).dtype == torch.float16


def test_log_features_do_not_overflow():
    x, w = 1e4 * t(X), t(Q)
    log = random_features(x, w, log=True)
    assert log.isfinite().all()
    close(random_features(t(X), w, log=True).exp(), random_features(t(X), w), 1e-13)
    assert random_features(t(X).half(), w.half()).dtype == torch.float32


# ---------------------------------------------------------------------- approximate attention


def projection(m: int, seed: int = 0, d: int = 3, **kind) -> Tensor:
    return random_projection(d, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, **kind)


@pytest.mark.parametrize("scale", [None, 1.0, 0.2, -0.5])
def test_it_is_the_quotient_of_features(scale: float | None):
    w, s = projection(11), 3**-0.5 if scale is None else scale
    root = abs(s) ** 0.5
    phi_q = random_features(np.sign(s) * root * t(Q), w)
    phi_k = random_features(root * t(X), w) * t(LOG_W).exp()[:, None]
    kernel = phi_q @ phi_k.mT
    found = approximate_attention(t(Q), t(X), t(V), w, scale=scale, log_weights=t(LOG_W))
    close(found.output, (kernel @ t(V)) / kernel.sum(-1, keepdim=True))
    close(found.log_normalizer, kernel.sum(-1).log())


def test_the_error_falls_as_one_over_the_root_of_features():
    """At norms of order 1 over the features; for larger ones the rate sets in only beyond m ≈ e^{|q+k|²}."""
    q, k, v = t(Q) / 2, t(X) / 2, t(V)
    exact = attend(q, k, v)
    sizes, errors = (64, 512, 4096), {"output": [], "log_normalizer": []}
    for m in sizes:
        found = [approximate_attention(q, k, v, projection(m, seed)) for seed in range(24)]
        for name in errors:
            gaps = torch.stack([getattr(f, name) - getattr(exact, name) for f in found])
            errors[name].append(float(gaps.square().mean().sqrt()))
    for found in errors.values():
        slope = np.polyfit(np.log(sizes), np.log(found), 1)[0]
        assert -0.65 < slope < -0.35
        assert found[-1] < 0.05


@pytest.mark.long
def test_the_normalizer_is_unbiased_before_its_logarithm():
    exact = attend(t(Q) / 2, t(X) / 2).log_normalizer
    found = [approximate_attention(t(Q) / 2, t(X) / 2, t(V), projection(4, seed)) for seed in range(3000)]
    ratio = torch.stack([(f.log_normalizer - exact).exp() for f in found])
    assert ((ratio.mean(0) - 1) / (ratio.std(0) / 3000**0.5)).abs().max() < 4.5
    assert torch.stack([f.log_normalizer - exact for f in found]).mean(0).max() < 0  # Jensen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e4])
def test_extreme_norms_stay_finite(size: float, dtype: torch.dtype):
    q, k, v = (t(a).to(dtype) for a in (size * Q, size * X, V))
    inputs = [a.clone().requires_grad_() for a in (q, k, v)]
    found = approximate_attention(*inputs, projection(16).to(dtype))
    assert found.output.isfinite().all()
    assert found.log_normalizer.isfinite().all()
    low, high = v.amin(0) - 1e-5, v.amax(0) + 1e-5
    assert ((found.output >= low) & (found.output <= high)).all()  # always an average of the values
    gradients = torch.autograd.grad(found.output.sum() + found.log_normalizer.sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)


def test_absent_keys_and_queries_that_see_nothing():
    w, mask = projection(8), t(np.r_[LOG_W, -np.inf])
    padded = approximate_attention(t(Q), t(np.vstack([X, X[:1]])), t(np.vstack([V, V[:1]])), w, log_weights=mask)
    plain = approximate_attention(t(Q), t(X), t(V), w, log_weights=t(LOG_W))
    close(padded.output, plain.output, 1e-14)
    close(padded.log_normalizer, plain.log_normalizer, 1e-14)
    inputs = [t(a).requires_grad_() for a in (Q, X, V)]
    for found in (
        approximate_attention(*inputs, w, log_weights=torch.full((9,), -torch.inf, dtype=torch.float64)),
        approximate_attention(inputs[0], inputs[1][:0], inputs[2][:0], w),
    ):
        assert (found.output == 0).all()
        assert (found.log_normalizer == -torch.inf).all()
        gradients = torch.autograd.grad(found.output.sum() + found.log_normalizer.sum(), inputs, allow_unused=True)
        assert all(g is None or (g == 0).all() for g in gradients)


def test_batches_heads_in_groups_and_a_single_query():
    rng = np.random.default_rng(4)
    q, k, v = (t(rng.normal(size=s)) for s in [(2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)])
    w = projection(9)
    found = approximate_attention(q, k, v, w)
    assert found.output.shape == (2, 4, 5, 6)
    for i in range(2):
        for h in range(4):
            one = approximate_attention(q[i, h], k[i, h // 2], v[i, h // 2], w)
            close(found.output[i, h], one.output)
            close(found.log_normalizer[i, h], one.log_normalizer)
    single = approximate_attention(q[0, 0, 0], k[0, 0], v[0, 0], w)
    close(single.output, found.output[0, 0, 0])
    assert single.log_normalizer.shape == ()
    half = approximate_attention(q.half(), k.half(), v.half(), w.half())
    assert half.output.dtype == torch.float16
    assert (half.output - found.output).abs().max() < 0.05


def test_gradients_of_the_approximation():
    w = projection(5)
    inputs = [t(a).requires_grad_() for a in (Q[:2], X[:4], V[:4], LOG_W[:4])]
    run = lambda q, k, v, b: approximate_attention(q, k, v, w, log_weights=b)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs)


def approximate(**change):
    return approximate_attention(**{"query": t(Q), "key": t(X), "value": t(V), "projection": t(Q)} | change)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random_projection(0, 3), ValueError, r"random_projection.dim: expected a positive integer, got 0"),
        (lambda: random_projection(3, -1), ValueError, r"random_projection.features: expected a positive integer"),
        (lambda: random_features(t(X), t(Q[:, :2])), ValueError, r"random_features.projection: expected shape"),
        (lambda: random_features(t(X), t(Q[:0])), ValueError, r"m ≥ 1"),
        (lambda: random_features(t(X), t(Q).float()), TypeError, r"projection: expected dtype torch.float64 as x"),
        (lambda: approximate(key=t(X[:, :2])), ValueError, r"approximate_attention.key: expected query"),
        (lambda: approximate(value=t(V[:3])), ValueError, r"value: expected shape \(\*batch, n=9"),
        (lambda: approximate(key=t(X).float()), TypeError, r"key: expected dtype"),
        (lambda: approximate(log_weights=t(LOG_PAIRS)), ValueError, r"log_weights: expected .* one per key.*attend"),
        (lambda: approximate(log_weights=t(LOG_W) * torch.nan), ValueError, r"expected values below \+inf"),
    ],
)  # fmt: skip
def test_refusals_of_features(call, error: type, message: str):
    with pytest.raises(error, match=message):
        call()
