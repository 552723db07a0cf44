"""Random choices that depend on what is chosen and not on when: the same sample for any order and partition."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(seed: int, *what: Tensor) -> Tensor:
    """Numbers in [0, 1) from a seed and integers that name the things, broadcast together.

    >>> import torch
    >>> a = uniform(0, torch.arange(3)[:, None], torch.arange(4))
    >>> a.shape, torch.equal(a[1], uniform(0, torch.tensor(1), torch.arange(4)))
    (torch.Size([3, 4]), True)
    """
    state = torch.tensor(seed & 0x7FFFFFFF, dtype=torch.int64)
    for part in what:
        state = _scramble(state ^ _scramble(part.to("cpu", torch.int64)))
    return (state & 0x1FFFFFFFFFFFFF).double() / 2**53


def _scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 arithmetic wraps around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
