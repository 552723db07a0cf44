"""Random inputs of a check, determined by the seed and the name of the check."""

from __future__ import annotations

import zlib

import numpy as np
import torch


class RandomInputs:
    """Random NumPy arrays for the oracle; `tensor` converts them for the library."""

    def __init__(self, name: str, seed: int = 0):
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.generator = torch.Generator().manual_seed(int(self.rng.integers(2**62)))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape)

    def probabilities(self, n: int) -> np.ndarray:
        """A probability vector."""
        return self.rng.dirichlet(np.ones(n))

    def covariance(self, d: int, low: float = 0.3, high: float = 2.0) -> np.ndarray:
        """A symmetric matrix with eigenvalues spread from ``low`` to ``high``."""
        q, _ = np.linalg.qr(self.normal(d, d))
        return q @ np.diag(np.linspace(low, high, d)) @ q.T


def tensor(value) -> torch.Tensor:
    """A float64 tensor for the library."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64))
