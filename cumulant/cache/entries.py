"""What one key head of one sequence holds: entries with mass, a measure Σ_j e^{w_j} δ_(k_j, v_j)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadEntries(NamedTuple):
    """The entries of one key head of one sequence: the measure Σ_j e^{w_j} δ_(k_j, v_j).

        G(η) = log Σ_j exp(⟨η,k_j⟩ + w_j),    output = Σ_j p_j v_j,    p_j = exp(⟨η,k_j⟩ + w_j − G(η))

    keys       (m, d) as they lie in the cache: rotated to their positions
    values     (m, e)
    log_mass   (m,) w_j, logarithms of finite masses; None: every entry has mass 1
    positions  (m,) integers: which token of the sequence an entry is, −1 where several were merged; None: not known

    A layer has one for each key head of each sequence; their lengths may differ.

    >>> import torch
    >>> pair = HeadEntries(torch.zeros(2, 4), torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0]).log())
    >>> pair.values.T @ pair.log_mass.softmax(0)
    tensor([3.])
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor | None
    positions: Tensor | None = None
