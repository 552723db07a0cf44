"""Normal laws of many sequences in the native kernel: against linear algebra, and when it does not serve."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from cumulant.kernels.native import normals
from tests.kernels.native.problems import native, threads

pytestmark = native
ROUNDING = {torch.float64: 2e-13, torch.float32: 1e-4}
BATCHES = [1, 3, 8, 21, 520]  # less than a vector, whole vectors, both, more than one task


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def triangle(matrix: torch.Tensor) -> torch.Tensor:
    """(…, n, n) as (…, n(n+1)/2)."""
    first, second = torch.triu_indices(*matrix.shape[-2:])
    return matrix[..., first, second]


def packed(mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """The triangle of (1, x), sequences last, from (…, batch, d) and (…, batch, d, d)."""
    return torch.cat([torch.ones_like(mean[..., :1]), mean, triangle(covariance)], -1).mT.contiguous()


def laws(*shape: int, dim: int, dtype: torch.dtype, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Means (*shape, dim) and covariances, all positive definite."""
    root = torch.randn(*shape, dim, dim, dtype=dtype, generator=random)
    eye = torch.eye(dim, dtype=dtype)
    return torch.randn(*shape, dim, dtype=dtype, generator=random), root @ root.mT + eye


def served(result):
    """What the kernel gave, if it did."""
    assert result is not None
    return result


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=ROUNDING[expected.dtype], atol=ROUNDING[expected.dtype])


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", BATCHES)
def test_log_weights_are_normalized(batch, dtype, random):
    logs = 40 * torch.randn(5, 3, batch, dtype=dtype, generator=random)
    logs[1, 0] = -(torch.finfo(dtype).max ** 0.75)  # what stands for log 0
    log_total, shares = served(normals.normalize(logs))
    torch.testing.assert_close(log_total, torch.logsumexp(logs.double(), 0).to(dtype), rtol=1e-6, atol=0)
    same(shares, torch.softmax(logs, 0))
    assert (shares[1, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logarithms_are_those_of_torch(dtype):
    info = torch.finfo(dtype)
    x = torch.logspace(math.log10(info.tiny) - 4, math.log10(info.max) - 1, 4001, dtype=torch.float64).to(dtype)
    # two equal terms: log 2 + x; the logarithm of any other number by elimination of a variance
    two = normals.normalize(torch.zeros(2, 5, dtype=dtype))[0]
    torch.testing.assert_close(two, torch.full((5,), math.log(2), dtype=dtype), rtol=info.eps, atol=0)
    joint = torch.zeros(6, len(x), dtype=dtype)
    joint[0] = x  # the variance of y, which has nothing to do with x
    floor = torch.zeros(1, 1, dtype=dtype)
    found = normals.eliminate(joint, None, None, floor, floor + torch.inf, 1).log_likelihood
    torch.testing.assert_close(found, -(1 + math.log(2 * math.pi) + x.log()) / 2, rtol=4 * info.eps, atol=info.eps)


@pytest.mark.parametrize("variance", [0.0, -1.0, torch.inf, torch.nan])
def test_logarithms_at_the_edges(variance):
    joint = torch.zeros(6, 11, dtype=torch.float64)
    joint[0] = variance
    least = torch.full((1, 1), -2.0, dtype=torch.float64)
    found = normals.eliminate(joint, None, None, least, -least, 1)
    square = 0 / joint[0]  # of what was observed, in units of its variance
    expected = -(square + 1 + math.log(2 * math.pi) + joint[0].log()) / 2
    torch.testing.assert_close(found.log_likelihood, expected, equal_nan=True)
    assert (found.vague is not None) == (variance == torch.inf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("axis", "hypotheses"), [(0, (3,)), (0, (3, 2)), (1, (4, 3)), (1, (2, 3, 2, 2))])
def test_a_mixture_has_the_moments_of_its_parts(axis, hypotheses, batch, dtype, random):
    dim = 3
    weights = torch.softmax(torch.randn(*hypotheses, batch, dtype=dtype, generator=random), axis)
    mean, covariance = laws(*hypotheses, batch, dim=dim, dtype=dtype, random=random)
    found = normals.collapse(weights, packed(mean, covariance), axis, dim)
    m = (weights[..., None] * mean).sum(axis)
    apart = mean - m.unsqueeze(axis)
    spread = covariance + apart[..., :, None] * apart[..., None, :]
    same(found, packed(m, (weights[..., None, None] * spread).sum(axis)))


def test_beliefs_are_shared_between_targets_and_sequences(random):
    weights = torch.softmax(torch.randn(3, 2, 9, dtype=torch.float64, generator=random), 0)
    moments = packed(*laws(3, 1, 9, dim=2, dtype=torch.float64, random=random))
    each = moments.expand(3, 2, -1, -1).clone()
    same(normals.collapse(weights, moments, 0, 2), normals.collapse(weights, each, 0, 2))
    one = moments[..., :1]
    same(normals.collapse(weights, one, 0, 2), normals.collapse(weights, one.expand(3, 2, -1, 9).clone(), 0, 2))
    other = weights[..., :1]
    same(normals.collapse(other, moments, 0, 2), normals.collapse(other.expand(3, 2, 9).clone(), moments, 0, 2))


def test_a_mixture_far_from_the_origin_keeps_its_covariance(random):
    weights = torch.softmax(torch.randn(3, 10, dtype=torch.float64, generator=random), 0)
    mean, covariance = laws(3, 10, dim=2, dtype=torch.float64, random=random)
    whole = (mean * 2**20).round() / 2**20  # so that adding 1e8 rounds nothing
    near = normals.collapse(weights, packed(whole, covariance), 0, 2)
    far = normals.collapse(weights, packed(whole + 1e8, covariance), 0, 2)
    torch.testing.assert_close(far[3:], near[3:], rtol=1e-7, atol=1e-7)


def joint_triangle(mean, covariance, m: int) -> torch.Tensor:
    """The triangle of (y, 1, x) of which y are the first m entries."""
    n = mean.shape[-1]
    whole = torch.zeros(*mean.shape[:-1], n + 1, n + 1, dtype=mean.dtype)
    order = [*range(m), *range(m + 1, n + 1)]
    whole[..., torch.tensor(order)[:, None], torch.tensor(order)] = covariance
    whole[..., m, order] = whole[..., order, m] = mean
    whole[..., m, m] = 1
    return triangle(whole).mT.contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("m", "dim"), [(1, 1), (2, 4), (3, 2)])
def test_what_is_left_is_the_conditional_law(m, dim, missing, batch, dtype, random):
    mean, covariance = laws(2, 2, batch, dim=m + dim, dtype=dtype, random=random)
    y = torch.randn(m, batch, dtype=dtype, generator=random)
    seen = torch.rand(m, batch, generator=random) < 0.6 if missing else None
    floors, bounds = torch.zeros(m, 1, dtype=dtype), torch.full((m, 1), torch.inf, dtype=dtype)
    joint = joint_triangle(mean, covariance, m)
    rest, log_likelihood, vague = served(normals.eliminate(joint, y, seen, floors, bounds, dim))
    assert vague is None
    for b in range(0, batch, 7):
        here = list(range(m)) if seen is None else seen[:, b].nonzero()[:, 0].tolist()
        there = list(range(m, m + dim))
        p = covariance[..., b, :, :].double()
        noise, cross = p[..., here, :][..., here], p[..., here, :][..., there]
        apart = y[here, b].double() - mean[..., b, here].double()
        gain = torch.linalg.solve(noise, cross)
        moved = mean[..., b, there] + (apart[..., None] * gain).sum(-2)
        after = torch.cat([torch.ones(2, 2, 1), moved, triangle(p[..., there, :][..., there] - gain.mT @ cross)], -1)
        same(rest[..., b], after.to(dtype))
        law = torch.distributions.MultivariateNormal(torch.zeros(len(here)).double(), noise) if here else None
        expected = torch.zeros(2, 2, dtype=dtype) if law is None else law.log_prob(apart).to(dtype)
        same(log_likelihood[..., b], expected)


def test_variances_are_kept_from_their_floor_and_compared_with_their_bound(random):
    joint = torch.zeros(2, 6, 21, dtype=torch.float64)  # y, 1, x: one entry each
    joint[:, 0] = 4.0
    joint[1, 0, 13] = 1e20
    floors, bounds = torch.full((2, 1, 1), 9.0).double(), torch.full((2, 1, 21), 1e9).double()
    y = torch.full((1, 21), 6.0).double()
    _, log_likelihood, vague = served(normals.eliminate(joint, y, None, floors, bounds, 1))
    assert vague.nonzero().tolist() == [[1, 13]]
    expected = -(1 + 6.0**2 / 9 + math.log(2 * math.pi) + math.log(9)) / 2
    torch.testing.assert_close(log_likelihood[0], torch.full((21,), expected).double())
    seen = torch.ones(1, 21, dtype=torch.bool)
    seen[0, 13] = False
    assert normals.eliminate(joint, y, seen, floors, bounds, 1).vague is None  # not observed: nothing is lost


def test_a_sequence_is_the_same_alone_and_among_others(random):
    weights = torch.softmax(torch.randn(3, 2, 21, dtype=torch.float64, generator=random), 0)
    moments = packed(*laws(3, 1, 21, dim=4, dtype=torch.float64, random=random))
    together = normals.collapse(weights, moments, 0, 4)
    for b in range(21):
        alone = normals.collapse(weights[..., b : b + 1], moments[..., b : b + 1].contiguous(), 0, 4)
        torch.testing.assert_close(alone[..., 0], together[..., b], rtol=4e-16, atol=1e-15)


def test_threads_change_nothing(random):
    weights = torch.softmax(torch.randn(4, 4, 3000, dtype=torch.float64, generator=random), 0)
    moments = packed(*laws(4, 1, 3000, dim=4, dtype=torch.float64, random=random))
    with threads(1):
        alone = normals.collapse(weights, moments, 0, 4), *served(normals.normalize(weights.log()))
    with threads(3):
        shared = normals.collapse(weights, moments, 0, 4), *served(normals.normalize(weights.log()))
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_results_are_where_the_arguments_are(random):
    logs = torch.randn(3, 9, generator=random)
    with torch.device("meta"):
        log_total, shares = served(normals.normalize(logs))
    same(log_total, torch.logsumexp(logs, 0))
    assert shares.is_cpu


def test_arguments_stay_as_they_are(random):
    joint = joint_triangle(*laws(2, 9, dim=3, dtype=torch.float64, random=random), 1)
    before, floors = joint.clone(), torch.zeros(1, 1).double()
    normals.eliminate(joint, torch.ones(1, 9).double(), None, floors, floors + 1e9, 2)
    assert torch.equal(joint, before)


# ---------------------------------------------------------------------- when it does not serve


def half(w, m):
    return w.half(), m.half()


def of_two_types(w, m):
    return w, m.float()


def on_another_device(w, m):
    return w.to("meta"), m.to("meta")


def with_a_derivative(w, m):
    return w, m.requires_grad_()


def too_many_axes(w, m):
    return w[:, None, None, None, None], m[:, None, None, None, None]


def too_many_sources(w, m):
    return w[:1].expand(17, -1), m[:1].expand(17, -1, -1)


@pytest.mark.parametrize(
    "change",
    [half, of_two_types, on_another_device, with_a_derivative, too_many_axes, too_many_sources],
    ids=lambda change: change.__name__,
)
def test_what_the_kernel_does_not_serve(change, random):
    weights = torch.full((2, 9), 0.5, dtype=torch.float64)
    moments = packed(*laws(2, 9, dim=2, dtype=torch.float64, random=random))
    assert normals.collapse(weights, moments, 0, 2) is not None
    assert normals.collapse(*change(weights, moments), 0, 2) is None


def test_sequences_that_are_apart_in_memory_are_computed_in_the_same_way(random):
    """So that a rounding does not depend on strides, which a batch and a sequence alone have of their own."""
    weights = torch.rand(2, 9, dtype=torch.float64, generator=random)
    moments = packed(*laws(2, 9, dim=2, dtype=torch.float64, random=random))
    weights_apart, moments_apart = (torch.stack([x, x], -1)[..., 0] for x in (weights, moments))
    expected, found = normals.collapse(weights, moments, 0, 2), normals.collapse(weights_apart, moments_apart, 0, 2)
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
    for a, b in zip(normals.normalize(weights_apart) or (), normals.normalize(weights) or (), strict=True):
        assert torch.equal(a, b)


def test_transforms_of_torch_are_not_escaped(random):
    logs = torch.randn(3, 9, dtype=torch.float64, generator=random)
    served = []

    def total(x):
        served.append(normals.normalize(x))
        return x

    torch.func.vmap(total)(logs[None])
    torch.func.jvp(total, (logs,), (logs,))
    with forward_ad.dual_level():
        total(forward_ad.make_dual(logs, logs))
    with FakeTensorMode(allow_non_fake_inputs=True):
        total(logs)
    assert served == [None] * 4
    assert normals.normalize(logs) is not None
    with torch.no_grad():
        assert normals.normalize(logs.clone().requires_grad_()) is not None


def test_nothing_to_do():
    assert normals.normalize(torch.zeros(0, 3)) is None
    assert normals.collapse(torch.zeros(2, 0), torch.zeros(2, 6, 0), 0, 2) is None
    assert normals.eliminate(torch.zeros(2, 6, 0), None, None, torch.zeros(1, 1), torch.zeros(1, 1), 1) is None
