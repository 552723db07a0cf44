"""Heads of other numbers of atoms in one storage, beside `moments` of each head and sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cumulant.kernels.ragged as ragged
from cumulant.kernels import STATISTICS, moments
from cumulant.kernels.native.direct import MomentsSettings
from cumulant.kernels.operator import statistics_of
from cumulant.kernels.ragged import RaggedAtoms, ragged_moments
from tests.kernels.native.problems import by_sums, native, normal, threads

KERNELS = [pytest.param("native", marks=native), "torch"]
WIDTH, VALUES = 5, 3


@pytest.fixture
def kernel(request, monkeypatch):
    """The native kernel, or one call for each head."""
    by_kernel = vars(ragged)["_by_kernel"]
    if request.param == "torch":
        monkeypatch.setattr(ragged, "_by_kernel", lambda *_: None)
    else:
        monkeypatch.setattr(ragged, "_by_kernel", lambda *a: by_kernel(*a) or pytest.fail("the kernel did not serve"))
    return request.param


def settings(*names: str, scale: float = 0.5) -> MomentsSettings:
    return MomentsSettings(statistics_of(names, True) | {"mean"}, scale, False, None, None)


def problem(key_heads: int, weighted: bool, lengths=(700, 0, 3, 64, 300, 1)) -> RaggedAtoms:
    """Two sequences; the storage begins with rows of nobody."""
    sizes = torch.tensor(lengths[: 2 * key_heads]).reshape(2, key_heads)
    starts = (sizes.flatten().cumsum(0) + 2).reshape(sizes.shape) - sizes
    total = int(sizes.sum()) + 2
    weights = normal(total, seed=4) if weighted else None
    return RaggedAtoms(normal(total, WIDTH, seed=1), normal(total, VALUES, seed=2), weights, starts, sizes)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("q", [1, 3, 20])
@pytest.mark.parametrize(("heads", "key_heads"), [(3, 3), (6, 3), (4, 1), (24, 3), (1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_head_sees_its_own_atoms(kernel, q, heads, key_heads, weighted):
    x, eta = problem(key_heads, weighted), normal(2, heads, q, WIDTH, seed=3)
    for count in (1, 3):
        with threads(count):
            found = ragged_moments(eta, x, settings(*STATISTICS))
        for b, h in np.ndindex(2, heads):
            rows = x.head(b, h * key_heads // heads)
            w = None if x.log_weights is None else x.log_weights[rows]
            sums = by_sums(0.5 * eta[b, h], x.atoms[rows], x.values[rows], w, None)
            np.testing.assert_allclose(found.log_normalizer[b, h], sums["log_normalizer"], rtol=1e-11, atol=1e-11)
            np.testing.assert_allclose(found.mean[b, h], sums["mean"], rtol=1e-11, atol=1e-11)
            alone = moments(0.5 * eta[b, h], x.atoms[rows], x.values[rows], log_weights=w, statistics="all")
            for name in STATISTICS:
                ours, theirs = found.statistics[name][b, h], alone.statistics[name]
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_sequences_may_share_rows(kernel):
    x, eta = problem(3, True), normal(4, 6, 1, WIDTH, seed=3)
    beams = x._replace(starts=x.starts[[1, 0, 0, 1]].contiguous(), lengths=x.lengths[[1, 0, 0, 1]].contiguous())
    found = ragged_moments(eta, beams, settings("mean"))
    for i, b in enumerate((1, 0, 0, 1)):
        twice = torch.stack([eta[i], eta[i]])
        assert torch.equal(found.mean[i], ragged_moments(twice, x, settings("mean")).mean[b])


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(kernel, dtype):
    x, eta = problem(3, True), normal(2, 6, 1, WIDTH, seed=3).to(dtype)
    narrow = x._replace(atoms=x.atoms.to(dtype), values=x.values.to(dtype), log_weights=x.log_weights.float())
    wide = x._replace(
        atoms=narrow.atoms.double(), values=narrow.values.double(), log_weights=narrow.log_weights.double()
    )
    found, expected = (
        ragged_moments(eta, narrow, settings("mean")),
        ragged_moments(eta.double(), wide, settings("mean")),
    )
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=2e-6, atol=2e-6)


@native
def test_what_is_not_finite_reaches_only_the_head_that_sees_it():
    x, eta = problem(3, False), normal(2, 3, 1, WIDTH, seed=3)
    broken = x._replace(values=x.values.clone())
    broken.values[x.head(1, 1)][5] = torch.nan
    found, clean = (ragged_moments(eta, y, settings("mean")).mean for y in (broken, x))
    assert found[1, 1].isnan().all()
    found[1, 1] = clean[1, 1]
    torch.testing.assert_close(found, clean, rtol=1e-12, atol=1e-12)


def test_caps_and_gradients_go_head_by_head():
    x, eta = problem(3, True, lengths=(7, 0, 3, 4, 5, 1)), normal(2, 6, 3, WIDTH, seed=3).requires_grad_()
    found = ragged_moments(eta, x, settings("mean"), cap=2.0)
    slope = torch.autograd.grad(found.mean.sum() + ragged_moments(eta, x, settings("mean")).mean.square().sum(), eta)[0]
    again = eta.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for b, h in np.ndindex(2, 6):
        rows = x.head(b, h // 2)
        score = 0.5 * again[b, h] @ x.atoms[rows].T
        capped = (2 * torch.tanh(score / 2) + x.log_weights[rows]).softmax(-1) @ x.values[rows]
        torch.testing.assert_close(found.mean[b, h], capped, rtol=1e-12, atol=1e-12)
        total = total + capped.sum() + ((score + x.log_weights[rows]).softmax(-1) @ x.values[rows]).square().sum()
    torch.testing.assert_close(slope, torch.autograd.grad(total, again)[0], rtol=1e-10, atol=1e-10)
