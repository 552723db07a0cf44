"""Random numbers from a hash of a seed and identifiers: the same sample for any order and batching."""

from __future__ import annotations

import torch
from torch import Tensor


def priorities(seed: int, *identifiers: Tensor) -> Tensor:
    """Integers below 2⁶³ that look random and depend on nothing but a seed and integer identifiers.

    The identifiers broadcast together.

    >>> import torch
    >>> both, alone = (priorities(0, torch.tensor(text), torch.tensor(7)) for text in ([3, 4], 4))
    >>> bool(both[1] == alone)
    True
    """
    state = _mix(torch.full((), seed, dtype=torch.int64))
    for identifier in identifiers:
        state = _mix(state ^ identifier.to("cpu", torch.int64))
    return state & 0x7FFFFFFFFFFFFFFF


def uniform(seed: int, *identifiers: Tensor) -> Tensor:
    """The same as numbers in [0, 1).

    >>> import torch
    >>> uniform(0, torch.arange(3)[:, None], torch.arange(4)).shape
    torch.Size([3, 4])
    """
    return (priorities(seed, *identifiers) >> 10).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea and Flood 2014): an invertible scrambling of 64 bits; int64 arithmetic wraps around."""
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15 modulo 2⁶⁴
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, filling with zeros, as for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
