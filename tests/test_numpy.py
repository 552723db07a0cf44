"""NumPy arrays stand for tensors over the same memory; results are tensors."""

import numpy as np
import pytest
import torch

from cumulant import Box, Empirical, Gaussian, attend, attention, moments
from tests.compare import close

RANDOM = np.random.default_rng(0)
Q, K, V = RANDOM.normal(size=(3, 2, 5, 4))


def tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(array) for array in arrays)


def test_attention_of_arrays_is_that_of_tensors():
    mask = RANDOM.random((5, 5)) < 0.7
    ours, theirs = attend(Q, K, V, mask=mask, log_weights=K[..., 0]), tensors(Q, K, V)
    expected = attend(*theirs, mask=torch.tensor(mask), log_weights=theirs[1][..., 0])
    close(ours.output, expected.output)
    close(ours.entropy, expected.entropy)
    close(attention(Q, K, V), attention(*theirs))
    close(moments(Q, K, V, causal=True).mean, moments(*theirs, causal=True).mean)
    assert isinstance(ours.output, torch.Tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Empirical(x[0], x[0, :, 0]),
        lambda x: Gaussian(x[0, 0], 4 * (x[0].T @ x[0])),
        lambda x: Box(x[0, 0], x[0, 0] + 1),
    ],
    ids=["Empirical", "Gaussian", "Box"],
)
def test_measures_of_arrays_are_those_of_tensors(make):
    ours, theirs = make(K), make(torch.tensor(K))
    assert isinstance(ours.mean(Q), torch.Tensor)
    close(ours.mean(Q), theirs.mean(torch.tensor(Q)))
    close(ours.kl(Q[0], Q[1]), theirs.kl(*tensors(Q[0], Q[1])))
    assert str(ours) == str(theirs)


def test_memory_is_shared_where_it_can_be():
    atoms = K[0].copy()
    assert Empirical(atoms).atoms.data_ptr() == atoms.ctypes.data
    fixed = atoms.copy()
    fixed.flags.writeable = False
    close(Empirical(fixed).atoms, torch.tensor(atoms))
    close(Empirical(atoms[::-1]).atoms, torch.tensor(atoms).flip(0))


def test_dtypes_must_agree_as_those_of_tensors():
    with pytest.raises(TypeError, match=r"dtype torch.float32 as query, got torch.float64. Call .to"):
        attend(Q.astype(np.float32), K, V)
    with pytest.raises(TypeError, match=r"Empirical.atoms: expected a floating dtype, got torch.int64"):
        Empirical(np.eye(2, dtype=int))
