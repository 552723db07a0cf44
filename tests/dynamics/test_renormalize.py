"""Normalisers against NumPy, their Jacobians, what they refuse, and the roots behind whitening."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from cumulant import Gaussian
from cumulant.dynamics import Ascend, BatchNorm, LayerNorm, NormalizationError, RMSNorm, SphereNorm, Unchanged, Whiten
from cumulant.dynamics.checks import require_positive_definite
from cumulant.dynamics.matrices import symmetric_root, symmetric_transport
from tests import compare

close = partial(compare.close, rtol=0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(d, seed=0):
    root = normal(d, d, seed=seed)
    return root @ root.T + 0.3 * torch.eye(d, dtype=torch.float64)


GAIN, BIAS = torch.tensor([0.5, -2.0, 1.5, 1.0], dtype=torch.float64), normal(4, seed=9)
PLAIN = [Unchanged(), SphereNorm(), SphereNorm(2.5), RMSNorm(), LayerNorm(), BatchNorm(), Whiten(), Whiten("cholesky")]
EVERY = [
    *PLAIN,
    RMSNorm(GAIN),
    LayerNorm(GAIN, BIAS),
    LayerNorm(2.0),
    Whiten("pca"),
    *(Whiten(kind, mean=BIAS, covariance=spd(4, seed=8)) for kind in ("zca", "cholesky", "pca")),
]


def name(rn):
    return f"{type(rn).__name__}{'' if len(repr(rn)) > 60 else repr(rn).removeprefix(type(rn).__name__)}"


def test_each_is_its_formula():
    y = 2 + normal(7, 4)
    a = y.numpy()
    length = np.linalg.norm(a, axis=1, keepdims=True)
    assert Unchanged()(y) is y
    close(SphereNorm(3.0)(y), 3 * a / length)
    close(RMSNorm()(y), a / np.sqrt((a**2).mean(1, keepdims=True)))
    close(RMSNorm(GAIN)(y), GAIN.numpy() * 2 * a / length)
    standard = (a - a.mean(1, keepdims=True)) / a.std(1, keepdims=True)
    close(LayerNorm()(y), standard)
    close(LayerNorm(GAIN, BIAS)(y), GAIN.numpy() * standard + BIAS.numpy())
    close(LayerNorm(GAIN, BIAS)(y), torch.nn.functional.layer_norm(y, (4,), GAIN, BIAS, eps=0.0))
    close(BatchNorm()(y), (a - a.mean(0)) / a.std(0))
    values, vectors = np.linalg.eigh(np.cov(a.T, bias=True))
    close(Whiten()(y), (a - a.mean(0)) @ (vectors / np.sqrt(values)) @ vectors.T)


@pytest.mark.parametrize("rn", PLAIN, ids=name)
def test_idempotent_and_free_of_scale(rn):
    y = 1 + normal(3, 9, 4)
    once = rn(y)
    close(rn(once), once)
    if not isinstance(rn, Unchanged):
        for factor in (1e-3, 1e5):
            close(rn(factor * y), once, 1e-10)
    if not rn.ensemble and not isinstance(rn, Unchanged):
        for factor in (1e-300, 1e300):  # the square of such a number is 0 or infinite
            close(rn(factor * y), once)


@pytest.mark.parametrize("rn", PLAIN, ids=name)
def test_single_precision_stays(rn):
    y = normal(9, 4)
    single = rn(y.float())
    assert single.dtype == torch.float32
    close(single.double(), rn(y), 1e-5)


def test_the_axes_of_a_white_cloud_are_anyones():
    y = normal(50, 4)
    twice = Whiten("pca")(Whiten("pca")(y))
    close(twice.T.cov(correction=0), torch.eye(4, dtype=torch.float64))
    assert (twice - Whiten("pca")(y)).abs().max() > 0.1


@pytest.mark.parametrize("rn", EVERY, ids=name)
def test_clouds_of_a_batch_are_alone(rn):
    y = normal(2, 3, 9, 4)
    together, bound = rn(y), rn.operator_norm(y)
    assert together.shape == y.shape
    assert bound.shape == (y.shape[:2] if rn.ensemble else y.shape[:3])
    for i in range(2):
        for j in range(3):
            close(together[i, j], rn(y[i, j]))
            close(bound[i, j], rn.operator_norm(y[i, j]))


@pytest.mark.parametrize("rn", [SphereNorm(2.0), RMSNorm(), LayerNorm()], ids=name)
def test_operator_norm_of_a_token_is_exact(rn):
    y = 3 * normal(5, 6)
    for row, bound in zip(y, rn.operator_norm(y), strict=True):
        whole = jacobian(lambda t: rn(t[None])[0], row)
        close(torch.linalg.matrix_norm(whole, 2), bound)


def test_layer_norm_jacobian():
    y = 2.3 * normal(6)
    z, sigma = LayerNorm()(y[None])[0], y.std(correction=0)
    expected = (torch.eye(6, dtype=torch.float64) - 1 / 6 - torch.outer(z, z) / 6) / sigma
    close(jacobian(lambda t: LayerNorm()(t[None])[0], y), expected)


@pytest.mark.parametrize("rn", [RMSNorm(GAIN), LayerNorm(GAIN, BIAS), BatchNorm(), Unchanged()], ids=name)
def test_operator_norm_bounds_the_whole_jacobian(rn):
    y = normal(6, 4, seed=3)
    whole = torch.linalg.matrix_norm(jacobian(rn, y).reshape(24, 24), 2)
    assert whole <= rn.operator_norm(y).max() * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["zca", "cholesky", "pca"])
def test_operator_norm_of_whitening(kind):
    y = normal(6, 4, seed=3)
    smallest = np.linalg.eigvalsh(np.cov(y.numpy().T, bias=True))[0]
    close(Whiten(kind).operator_norm(y), torch.tensor(smallest**-0.5))


@pytest.mark.parametrize("kind", ["zca", "cholesky", "pca"])
def test_whitening_meets_its_target(kind):
    y = 5 + normal(50, 4) @ normal(4, 4, seed=1)
    white = Whiten(kind)(y)
    close(white.mean(0), torch.zeros(4, dtype=torch.float64))
    close(white.T.cov(correction=0), torch.eye(4, dtype=torch.float64))
    mean, target = normal(4, seed=2), spd(4, seed=3)
    recoloured = Whiten(kind, mean=mean, covariance=target)(y)
    close(recoloured.mean(0), mean)
    close(recoloured.T.cov(correction=0), target)


def test_the_three_maps_have_their_shapes():
    y = normal(50, 4) @ normal(4, 4, seed=1)
    kinds = ("zca", "cholesky", "pca")
    axes = {kind: Whiten(kind)._affine(y, None)[1] for kind in kinds}  # pyright: ignore[reportPrivateUsage]
    close(axes["zca"], axes["zca"].T)
    close(axes["cholesky"], axes["cholesky"].tril())
    values, vectors = np.linalg.eigh(np.cov(y.numpy().T, bias=True))
    turned = vectors[:, ::-1] * np.sign(vectors[np.abs(vectors).argmax(0), range(4)])[::-1]
    close(axes["pca"], (turned / np.sqrt(values[::-1])).T.copy())
    # the symmetric one moves the particles least
    moved = {kind: (Whiten(kind)(y) - (y - y.mean(0))).square().sum() for kind in axes}
    assert moved["zca"] < min(moved["cholesky"], moved["pca"])


@pytest.mark.parametrize(("d", "seed"), [(1, 0), (2, 1), (4, 2), (16, 3)])
def test_theorem_1_holds_particle_by_particle(d, seed):
    sigma, mu = spd(d, seed), normal(d, seed=seed + 10)
    covariance = torch.linalg.inv(sigma)
    covariance = (covariance + covariance.T) / 2
    mean = covariance @ mu
    x = mean + normal(200, d, seed=seed + 20) @ torch.linalg.cholesky(covariance).T
    grown = torch.eye(d, dtype=torch.float64) + sigma
    population = (mean + 2 * mu, grown @ covariance @ grown)
    y = Ascend(keys=Gaussian(mu, sigma))(x)
    close(y, x @ grown + mu, 1e-11)
    close(population[1], covariance + 2 * torch.eye(d, dtype=torch.float64) + sigma, 1e-10)
    back = Whiten(mean=mean, covariance=covariance)
    close(back(y, moments=population), x, 1e-10)
    close(back.operator_norm(y, moments=population), torch.linalg.matrix_norm(torch.linalg.inv(grown), 2), 1e-10)
    for kind in ("cholesky", "pca"):  # only up to a rotation in the norm of the law
        turned = Whiten(kind, mean=mean, covariance=covariance)(y, moments=population)
        length = (((t - mean) @ sigma) * (t - mean) for t in (x, turned))
        close(*(s.sum(-1) for s in length), 1e-9)
        assert d == 1 or (turned - x).abs().max() > 0.1


def test_transport_where_matrices_commute_and_where_not():
    a = spd(3)
    vectors = torch.linalg.eigh(a).eigenvectors
    b = (vectors * torch.tensor([3.0, 0.1, 2.0])) @ vectors.T
    close(symmetric_transport(a, b), symmetric_root(b) @ torch.linalg.inv(symmetric_root(a)))
    b = spd(3, seed=5)
    r = symmetric_transport(a, b)
    close(r, r.T)
    close(r @ a @ r, b)
    assert (torch.linalg.eigvalsh(r) > 0).all()
    close((symmetric_root(a) @ symmetric_root(a)), a)
    close(symmetric_root(torch.stack([a, b]))[1], symmetric_root(b))


@pytest.mark.parametrize("matrix", [spd(3), torch.eye(3, dtype=torch.float64)], ids=["distinct", "equal eigenvalues"])
def test_the_root_has_derivatives_of_every_kind(matrix):
    a = matrix.clone().requires_grad_()
    assert torch.autograd.gradcheck(symmetric_root, (a,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(symmetric_root, (a,))
    forward, backward = torch.func.jacfwd(symmetric_root)(matrix), torch.func.jacrev(symmetric_root)(matrix)
    close(forward, backward)


@pytest.mark.parametrize("rn", EVERY, ids=name)
def test_gradients(rn):
    y = normal(6, 4, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(rn, (y,))


def test_whitening_a_white_cloud_has_a_gradient():
    eye = torch.eye(3, dtype=torch.float64)
    y = torch.cat([eye, -eye]).requires_grad_()  # all eigenvalues equal: eigenvectors have no derivative
    assert torch.autograd.gradcheck(Whiten(), (y,))
    push = normal(6, 3)
    tangent = torch.func.jvp(Whiten(), (y.detach(),), (push,))[1]
    step = 1e-6
    close(tangent, (Whiten()(y + step * push) - Whiten()(y - step * push)).detach() / (2 * step), 1e-8)


def test_parameters_receive_gradients():
    y, gain, bias = normal(5, 4), GAIN.clone().requires_grad_(), BIAS.clone().requires_grad_()
    target = spd(4).requires_grad_()
    assert torch.autograd.gradcheck(lambda g, b: LayerNorm(g, b)(y), (gain, bias))
    assert torch.autograd.gradcheck(
        lambda m, c: Whiten(mean=m, covariance=(c + c.T) / 2)(y[:, [0, 1, 2, 3]]), (bias, target)
    )


def test_a_ridge_serves_singular_clouds():
    y = normal(20, 2) @ normal(2, 3, seed=1)  # a plane in R³
    a = y.T.cov(correction=0) + 0.1 * torch.eye(3, dtype=torch.float64)
    close(Whiten(ridge=0.1)(y), (y - y.mean(0)) @ torch.linalg.inv(symmetric_root(a)))
    point = torch.full((4, 3), 2.0, dtype=torch.float64)
    close(Whiten(ridge=0.5, mean=BIAS[:3])(point), BIAS[:3].expand(4, 3))
    close(Whiten(ridge=0.5).operator_norm(point), torch.tensor(2.0, dtype=torch.float64).sqrt())


ONES = torch.ones(4, 3, dtype=torch.float64)
PLANE = torch.cat([normal(9, 2), ONES[:1].expand(9, 3)[:, :1]], 1)
ROUNDED = torch.cat([normal(9, 2), 1e9 + 4e-7 * normal(9, 1, seed=1)], 1)  # varies in its last bits alone
ZEROS = normal(64, 3).index_fill(0, torch.tensor([3, 5, 60]), 0.0)


@pytest.mark.parametrize(
    ("rn", "y", "match", "kind"),
    [
        (Whiten(), PLANE, r"full rank d=3, got rank 2\. Pass ridge", "singular"),
        (Whiten(), 1e9 + PLANE, "rank 2", "singular"),
        (Whiten(), ROUNDED, "rank 2", "singular"),
        (Whiten("cholesky"), normal(2, 3), "rank 1", "singular"),
        (Whiten(), torch.stack([PLANE, normal(9, 3)]), "rank 2 in 1 of 2 clouds", "singular"),
        (Whiten(), 0.1 * ONES, "rank 0: the cloud has collapsed to a point", "collapsed"),
        (Whiten(), normal(1, 3), "rank 0", "collapsed"),
        (Whiten(), normal(0, 3), "at least one particle", "singular"),
        (BatchNorm(), PLANE, r"1 of 3 channels of variance 0\. ", "singular"),
        (BatchNorm(), 0.1 * ONES, "3 of 3 channels of variance 0: the cloud has collapsed", "collapsed"),
        (BatchNorm(), normal(0, 3), "at least one particle", "singular"),
        (SphereNorm(), ZEROS, "3 of 64 tokens have norm 0", "singular"),
        (RMSNorm(), ZEROS, "3 of 64 tokens have norm 0", "singular"),
        (LayerNorm(), ZEROS + 0.1, "3 of 64 tokens have standard deviation 0", "singular"),
        (LayerNorm(), normal(2, 1), "2 of 2 tokens have standard deviation 0", "singular"),
        (SphereNorm(), normal(2, 1) / 0, "2 entries that are NaN or infinite", "nonfinite"),
    ],
)
def test_singular_clouds_are_refused(rn, y, match, kind):
    for call in (rn, rn.operator_norm):
        with pytest.raises(NormalizationError, match=match) as caught:
            call(y)
        assert caught.value.kind == kind


@pytest.mark.parametrize("rn", [Unchanged(), SphereNorm(), RMSNorm(), LayerNorm()], ids=name)
def test_an_empty_cloud_has_no_token_to_refuse(rn):
    assert rn(normal(0, 3)).shape == (0, 3)
    assert rn.operator_norm(normal(2, 0, 3)).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Whiten("svd"), ValueError, "one of zca, cholesky, pca"),
        (lambda: Whiten(ridge=-1.0), ValueError, "ridge"),
        (lambda: Whiten(covariance=-torch.eye(2)), ValueError, "symmetric positive definite"),
        (lambda: Whiten(covariance=torch.eye(2))(normal(5, 3).float()), ValueError, "d=3"),
        (lambda: Whiten(covariance=torch.eye(3))(normal(5, 3)), TypeError, "dtype torch.float64"),
        (lambda: Whiten(mean=torch.zeros(2, 2)), ValueError, r"shape \(d,\)"),
        (lambda: Whiten()(normal(5, 3), (normal(2), spd(3))), ValueError, "moments .mean."),
        (lambda: Whiten()(normal(5, 3), (normal(3), spd(2))), ValueError, "moments .covariance."),
        (lambda: SphereNorm(0.0), ValueError, "positive number"),
        (lambda: RMSNorm(torch.ones(3).double())(normal(5, 4)), ValueError, "One entry per channel"),
        (lambda: LayerNorm(torch.tensor([torch.nan])), ValueError, "finite"),
        (lambda: LayerNorm([1.0]), TypeError, "torch.Tensor"),
        (lambda: SphereNorm()(normal(3)), ValueError, "particle axis"),
        (lambda: BatchNorm()(torch.ones(2, 2, dtype=torch.int64)), TypeError, "floating"),
        (lambda: require_positive_definite("f.m", normal(2, 3)), ValueError, "square matrix"),
        (lambda: require_positive_definite("f.m", torch.tensor([[1.0, 0.5], [0.0, 1.0]])), ValueError, "symmetric"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, match):
    with pytest.raises(error, match=match):
        call()
