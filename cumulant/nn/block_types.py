"""The four blocks that the reference trainings compare, at equal cost in parameters.

    standard     x + attention(N x), then x + MLP(N x): what transformers use; nothing is guaranteed
    energy       steps down an energy of all tokens
    convex       N x + ∇Φ(N x): one step up a convex potential of each token given its context, after a norm
    equilibrium  the fixed point of a normalised layer

Every block takes x (batch, n, dim) and returns the same shape; ``hidden`` is the width that is left to choose: units of
the MLP, memories of the energy, units of the potential. The number of parameters is affine in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.attention import MultiheadAttention
from cumulant.nn.convex import ConvexBlock
from cumulant.nn.energy import EnergyBlock
from cumulant.nn.equilibrium import EquilibriumBlock

FORMAT = 2  # what the names below stand for in a checkpoint: one more whenever a block or a model of a name changes
MakeBlock = Callable[[int, int, int, bool], nn.Module]  # dim, heads, hidden, causal


class StandardBlock(nn.Module):
    """Attention, then two layers of units, each behind a norm and beside the stream.

        x ← x + attention(N x),      x ← x + W₂ gelu(W₁ N x + b₁) + b₂

    dim, heads  width of the stream, a multiple of the number of heads
    hidden      units of the MLP
    causal      a token attends to itself and what comes before it

    >>> import torch
    >>> StandardBlock(8, 2, 16)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    guarantees = "nothing: no energy, no inverse and no bound is known"

    def __init__(self, dim: int, heads: int, hidden: int, *, causal: bool = False):
        super().__init__()
        self.causal = causal
        self.before_attention = nn.LayerNorm(dim)
        self.attention = MultiheadAttention(dim, heads, batch_first=True)
        self.before_units = nn.LayerNorm(dim)
        self.read, self.write = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """x (batch, n, dim); key_padding_mask (batch, n), True where there is no token."""
        h = self.before_attention(x)
        mixed, _ = self.attention(h, h, h, key_padding_mask, need_weights=False, is_causal=self.causal)
        x = x + mixed
        return x + self.write(nn.functional.gelu(self.read(self.before_units(x))))


class NormedBlock(nn.Module):
    """A block behind a norm that the stream itself passes: x ↦ block(N x)."""

    def __init__(self, block: nn.Module, dim: int):
        super().__init__()
        self.norm, self.block = nn.LayerNorm(dim), block

    @property
    def guarantees(self) -> str:
        """What holds of the block, for the stream behind the norm."""
        return f"behind a norm, {self.block.guarantees}"

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.block(self.norm(x), key_padding_mask=key_padding_mask)


class AmplifiedBlock(nn.Module):
    """A block behind a gain for each channel, learned: x ↦ block(γ x).

    A norm contracts by one over the deviation of what it is given (S1-A4): the larger the stream that enters a fixed
    point z = N(γ x + f(z)), the surer the solver, and the less tokens are mixed on the way to it.
    """

    def __init__(self, block: nn.Module, dim: int, gain: float):
        super().__init__()
        self.gain, self.block = nn.Parameter(torch.full((dim,), gain)), block

    @property
    def guarantees(self) -> str:
        """What holds of the block, for the stream behind the gain."""
        return f"behind a gain, {self.block.guarantees}"

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.block(self.gain * x, key_padding_mask=key_padding_mask)


class BlockType(NamedTuple):
    """How a block of this type is made, and how many a model has; None: as many as the standard model has layers."""

    make: MakeBlock
    layers: int | None = None


def _standard(dim: int, heads: int, hidden: int, causal: bool) -> nn.Module:
    return StandardBlock(dim, heads, hidden, causal=causal)


def _energy(dim: int, heads: int, hidden: int, causal: bool) -> nn.Module:
    return EnergyBlock(dim, heads, memories=hidden, causal=causal, steps=2, step_size=1.0)


def _convex(dim: int, heads: int, hidden: int, causal: bool) -> nn.Module:
    return NormedBlock(ConvexBlock(dim, heads, hidden=hidden, causal=causal, units="relu"), dim)


def _equilibrium(dim: int, heads: int, hidden: int, causal: bool) -> nn.Module:
    block = EquilibriumBlock(dim, heads, hidden=hidden, causal=causal, max_steps=20, tol=3e-3)
    return AmplifiedBlock(block, dim, 6.0)


BLOCK_TYPES = {
    "standard": BlockType(_standard),
    "energy": BlockType(_energy),
    "convex": BlockType(_convex),
    "equilibrium": BlockType(_equilibrium, layers=1),
}


def find_block_type(name: str) -> BlockType:
    """The type of a block by name."""
    if name not in BLOCK_TYPES:
        raise ValueError(sentence("block", f"one of {', '.join(BLOCK_TYPES)}", repr(name), "Choose one of them."))
    return BLOCK_TYPES[name]


def make_block(name: str, dim: int, heads: int, hidden: int, *, causal: bool = False) -> nn.Module:
    """A block by name.

    >>> type(make_block("standard", 8, 2, 16)).__name__
    'StandardBlock'
    """
    return find_block_type(name).make(dim, heads, hidden, causal)
