"""The canonical link, and its linear fit on keys where the answer is known."""

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from cumulant import Status
from cumulant.attention import attend
from cumulant.link import canonical_link, link_fit
from tests.compare import close


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- the exact link


def test_attention_after_the_link_is_the_identity():
    key, w = draw(200, 2), draw(200, seed=1)
    mean = attend(0.7 * draw(40, 2, seed=2), key, scale=1.0).output
    found = canonical_link(key, mean, log_weights=w)
    assert found.converged.all()
    weights = special.softmax(found.value.numpy() @ key.numpy().T + w.numpy(), -1)
    close(weights @ key.numpy(), mean, 1e-9)


def test_link_inverts_attention_and_its_derivative_is_the_inverse_covariance():
    key, eta = draw(12, 3), draw(3, seed=1)
    mean = attend(eta, key, scale=1.0).output.requires_grad_()
    found = canonical_link(key, mean)
    close(found.value.detach(), eta, 1e-8)
    (gradient,) = torch.autograd.grad(found.value[0], mean)
    p = special.softmax(key.numpy() @ eta.numpy())
    centred = key.numpy() - p @ key.numpy()
    close(gradient, np.linalg.inv(centred.T @ (p[:, None] * centred))[0], 1e-7)


def test_means_at_and_beyond_the_hull_are_said():
    key = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    means = torch.tensor([[0.25, 0.25], [0.5, 0.5], [1.0, 1.0]], dtype=torch.float64)
    assert canonical_link(key, means).names() == ["CONVERGED", "BOUNDARY", "OUTSIDE"]
    assert canonical_link(key[:0], means[0]).status == Status.OUTSIDE
    shut = torch.full((3,), -torch.inf, dtype=torch.float64)
    assert canonical_link(key, means[0], log_weights=shut).status == Status.OUTSIDE
    lone = canonical_link(key[1:2], key[1])
    assert lone.converged
    assert (lone.value == 0).all()


# ---------------------------------------------------------------------- the linear fit


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    wide = np.c_[x, np.ones(len(x))]
    coefficients = np.linalg.lstsq(wide, y, rcond=None)[0]
    left = ((y - wide @ coefficients) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    return coefficients[:-1].T, 1 - left


def test_fit_is_ordinary_least_squares_per_head():
    query, key, hidden = draw(2, 3, 50, 4), draw(2, 3, 30, 4, seed=1), draw(2, 1, 50, 6, seed=2)
    w = draw(2, 3, 30, seed=3)
    fit = link_fit(query, key, log_weights=w, hidden=hidden)
    assert fit.r_squared.shape == fit.slope_error.shape == fit.effective_atoms.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            eta, k = query[i, j].numpy() / 2, key[i, j].numpy()
            p = special.softmax(eta @ k.T + w[i, j].numpy(), -1)
            slope, r_squared = least_squares(p @ k, eta)
            base = special.softmax(w[i, j].numpy())
            predicted = np.linalg.inv(np.cov(k.T, aweights=base, ddof=0))
            close(fit.slope[i, j], slope, 1e-10)
            close(fit.r_squared[i, j], r_squared)
            close(fit.gaussian_slope[i, j], predicted, 1e-10)
            close(fit.slope_error[i, j], np.linalg.norm(slope - predicted) / np.linalg.norm(predicted), 1e-10)
            close(fit.hidden_r_squared[i, j], least_squares(hidden[i, 0].numpy(), eta)[1])
            close(fit.effective_atoms[i, j], (1 / (p**2).sum(-1)).mean())


@pytest.mark.parametrize(
    ("size", "expected"), [(0.2, 0.998), (0.5, 0.989), (1.0, 0.963), (2.0, 0.907), (4.0, 0.829), (8.0, 0.756)]
)
def test_gaussian_keys_have_a_linear_link_until_they_saturate(size, expected):
    query, key = size * draw(8, 300, 2), draw(8, 200, 2, seed=1)
    fit = link_fit(query, key, scale=1.0)
    assert abs(fit.r_squared.mean() - expected) < 0.03


def test_short_queries_find_the_gaussian_slope():
    query, key = 0.01 * draw(300, 3), draw(5000, 3, seed=1) @ draw(3, 3, seed=2)
    fit = link_fit(query, key, scale=1.0)
    assert fit.r_squared > 0.999
    assert fit.slope_error < 0.02
    assert fit.effective_atoms > 4900


def test_directions_without_keys_do_not_count():
    key = draw(40, 3, seed=1) * torch.tensor([1.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 7.0])
    query = draw(60, 3)
    flat = link_fit(query, key, scale=1.0)
    plane = link_fit(query[:, :2], key[:, :2], scale=1.0)
    close(flat.r_squared, plane.r_squared)
    close(flat.slope[:2, :2], plane.slope, 1e-9)
    close(flat.gaussian_slope[:2, :2], plane.gaussian_slope, 1e-9)
    assert flat.slope[2].abs().max() < 1e-10
    assert flat.gaussian_slope[2].abs().max() < 1e-10


def test_masks_remove_keys_and_queries():
    query, key = draw(20, 2), draw(15, 2, seed=1)
    some = torch.arange(15) < 9
    plain = link_fit(query, key[:9])
    for fit in (
        link_fit(query, key, mask=some),
        link_fit(query, key, mask=some.expand(20, 15)),
        link_fit(query, key, log_weights=torch.where(some, 0.0, -torch.inf).double()),
        link_fit(query, key, log_weights=torch.where(some, 0.0, -torch.inf).double().expand(20, 15)),
        link_fit(query, key, mask=(torch.arange(15) < 12), log_weights=torch.where(some, 0.0, -torch.inf).double()),
    ):
        for mine, theirs in zip(fit, plain, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                close(mine, theirs, 1e-10)
    blind = torch.ones(20, 15, dtype=torch.bool)
    blind[12:] = False
    seeing = link_fit(query[:12], key)
    for mine, theirs in zip(link_fit(query, key, mask=blind)[:4], seeing[:4], strict=True):
        close(mine, theirs, 1e-10)


def test_causal_fit_sees_the_keys_up_to_the_last_query():
    query, key = draw(6, 2), draw(9, 2, seed=1)
    fit = link_fit(query, key, causal=True, offset=1)
    table = torch.arange(9) <= 1 + torch.arange(6)[:, None]
    same = link_fit(query, key, mask=table)
    for mine, theirs in zip(fit[:4], same[:4], strict=True):
        close(mine, theirs)
    close(fit.gaussian_slope, np.linalg.inv(np.cov(key[:7].numpy().T, ddof=0)), 1e-9)


def test_heads_that_share_keys():
    query, key, w = draw(2, 4, 30, 3), draw(2, 2, 20, 3, seed=1), draw(2, 2, 20, seed=2)
    wide = link_fit(query, key.repeat_interleave(2, 1), log_weights=w.repeat_interleave(2, 1))
    for mine, theirs in zip(link_fit(query, key, log_weights=w)[:4], wide[:4], strict=True):
        close(mine, theirs, 1e-10)
    shared = link_fit(query, key[0, 0])
    close(shared.r_squared[1, 3], link_fit(query[1, 3], key[0, 0]).r_squared)
    assert shared.gaussian_slope.shape == (2, 4, 3, 3)


@pytest.mark.parametrize("offset", [0.0, 1 / 3, 1e6])
def test_nothing_varies(offset):
    query, key = draw(10, 2), draw(1, 2, seed=1) + offset
    for fit in (link_fit(query, key), link_fit(query, key.expand(7, 2)), link_fit(query[:1].expand(5, 2), key)):
        assert fit.r_squared == 0
        assert (fit.slope == 0).all()
        assert (fit.gaussian_slope == 0).all()
        assert fit.slope_error == 0
    assert link_fit(query[:1], draw(5, 2)).r_squared == 0
    assert link_fit(query[:1].expand(7, 2) + offset, draw(5, 2)).r_squared == 0


def test_no_queries_no_keys():
    query, key, shut = draw(4, 2), draw(3, 2), torch.full((3,), -torch.inf, dtype=torch.float64)
    for fit in (
        link_fit(query[:0], key, hidden=query[:0]),
        link_fit(query, key[:0], hidden=query),
        link_fit(query, key, log_weights=shut, hidden=query),
    ):
        assert fit.r_squared == 0
        assert fit.effective_atoms == 0
        assert fit.hidden_r_squared == 0
        assert all(field.isfinite().all() for field in fit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_gives_the_same_fit(dtype):
    query, key = draw(80, 2).to(dtype), draw(50, 2, seed=1).to(dtype)
    exact = link_fit(query.double(), key.double(), scale=0.5, hidden=query.double())
    fit = link_fit(query, key, scale=0.5, hidden=query)
    assert fit.r_squared.dtype == torch.float32
    close(fit.r_squared.double(), exact.r_squared, 1e-5)
    close(fit.slope.double(), exact.slope, 1e-4)
    close(fit.hidden_r_squared, 1.0, 1e-5)


BAD = {
    "query": (lambda: link_fit(draw(3), draw(4, 3)), "link_fit.query: expected shape (*batch, q, d), got (3)"),
    "key": (lambda: link_fit(draw(4, 3), draw(3)), "link_fit.key: expected shape (*batch, n, d), got (3)"),
    "dtype": (lambda: link_fit(torch.ones(3, 3).long(), draw(4, 3)), "link_fit.query: expected a floating dtype"),
    "hidden": (
        lambda: link_fit(draw(5, 3), draw(4, 3), hidden=draw(4, 3)),
        "link_fit.hidden: expected shape (*batch, q=5, e), got (4, 3)",
    ),
    "hidden batch": (
        lambda: link_fit(draw(2, 5, 3), draw(4, 3), hidden=draw(3, 5, 3)),
        "link_fit.hidden: expected batch axes that broadcast",
    ),
    "link": (lambda: canonical_link(draw(4, 3), draw(2)), "Empirical.natural"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_numbers_that_are_none_get_a_sentence():
    with pytest.raises(ValueError, match="finite values"):
        link_fit(torch.full((5, 2), torch.nan), torch.randn(4, 2))
