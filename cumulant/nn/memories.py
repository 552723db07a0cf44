"""Hopfield layers with a part that is learned: the question (`HopfieldPooling`), or the patterns (`HopfieldLayer`)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.hopfield import Hopfield, Recall


@final
class HopfieldPooling(nn.Module):
    """A set of patterns as a few vectors: learned states retrieve from it.

        output_a = Σ_j softmax_j(β_h ⟨ξ_a*, k_j⟩) v_j,      ξ_a⁰ learned,      a = 1 … quantity

    dim, num_heads, options  as of `Hopfield`, which is ``memory``
    quantity                 how many vectors; they do not depend on the order of the set

    >>> import torch
    >>> pool = HopfieldPooling(4, quantity=2)
    >>> pool(torch.ones(3, 5, 4)).shape, pool(torch.ones(3, 5, 4)).mean().item()
    (torch.Size([3, 2, 4]), 1.0)
    """

    guarantees = Hopfield.guarantees

    def __init__(self, dim: int, num_heads: int = 1, *, quantity: int = 1, **options):
        super().__init__()
        self.memory = Hopfield(dim, num_heads, **options)
        self.state = _learned("HopfieldPooling.quantity", quantity, dim, self.memory)

    def forward(self, stored: Tensor, value: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """(batch, n, stored_size) → (batch, quantity, dim); (n, ·) → (quantity, ·)"""
        return self.retrieve(stored, value, key_padding_mask=key_padding_mask).output

    def retrieve(
        self, stored: Tensor, value: Tensor | None = None, *, key_padding_mask: Tensor | None = None
    ) -> Recall:
        """`forward` with the record of every state."""
        state = self.state if stored.ndim < 3 else self.state.expand(len(stored), -1, -1)
        return self.memory.retrieve(state, stored, value, key_padding_mask=key_padding_mask)

    def energy(self, stored: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Of the learned states among these patterns, (batch, heads, quantity)."""
        state = self.state if stored.ndim < 3 else self.state.expand(len(stored), -1, -1)
        return self.memory.energy(state, stored, key_padding_mask=key_padding_mask)


@final
class HopfieldLayer(nn.Module):
    """States retrieve from learned patterns, the same for every sample.

        output = Σ_a softmax_a(β_h ⟨ξ*, k_a⟩) v_a,      k_a learned,      v_a = k_a or learned too,      a ≤ quantity

    dim, num_heads, options  as of `Hopfield`, which is ``memory``
    quantity                 how many patterns
    value_size               width of separate output patterns, one for each; None: what is retrieved is the pattern

    >>> import torch
    >>> layer = HopfieldLayer(4, quantity=10, value_size=3, steps=1)
    >>> layer(torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """

    guarantees = Hopfield.guarantees
    value: Tensor | None

    def __init__(self, dim: int, num_heads: int = 1, *, quantity: int, value_size: int | None = None, **options):
        super().__init__()
        self.memory = Hopfield(dim, num_heads, value_size=value_size, **options)
        width, own = self.memory.stored_size, value_size is not None
        self.stored = _learned("HopfieldLayer.quantity", quantity, width, self.memory)
        values = _learned("HopfieldLayer.quantity", quantity, self.memory.value_size, self.memory) if own else None
        self.register_parameter("value", values)

    def forward(self, state: Tensor) -> Tensor:
        """(batch, q, dim) or (q, dim) → (batch, q, ·)"""
        return self.retrieve(state).output

    def retrieve(self, state: Tensor) -> Recall:
        """`forward` with the record of every state."""
        return self.memory.retrieve(state, self.stored, self.value)

    def energy(self, state: Tensor) -> Tensor:
        """Of these states among the learned patterns, (batch, heads, q)."""
        return self.memory.energy(state, self.stored)


def _learned(where: str, quantity: int, width: int, like: Hopfield) -> nn.Parameter:
    """Normal vectors of length about 1."""
    if not isinstance(quantity, int) or quantity < 1:
        raise ValueError(sentence(where, "a positive integer", quantity, "Pass at least 1."))
    start = torch.empty(quantity, width, dtype=like.log_beta.dtype, device=like.log_beta.device)
    return nn.Parameter(nn.init.normal_(start, std=width**-0.5))
