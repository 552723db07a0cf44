"""A stack of blocks of one type, and the width at which two stacks have equally many parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.block_types import find_block_type, make_block


@dataclass(frozen=True)
class StackConfig:
    """The sizes of a stack of blocks.

    block   one of `BLOCK_TYPES`
    dim     width of the stream, a multiple of heads
    heads   of each block
    layers  how many blocks
    hidden  width that each block is free to choose
    causal  whether a token sees only itself and what comes before it
    """

    block: str = "standard"
    dim: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 256
    causal: bool = False

    def __post_init__(self):
        find_block_type(self.block)
        for name in ("dim", "heads", "layers", "hidden"):
            if not getattr(self, name) > 0:
                raise ValueError(sentence(f"StackConfig.{name}", "a positive number", getattr(self, name), "Give one."))
        if self.dim % self.heads:
            got = f"{self.dim} with {self.heads} heads"
            raise ValueError(sentence("StackConfig.dim", "a multiple of heads", got, "Choose sizes that divide."))


class BlockStack(nn.Module):
    """Blocks in a row between two norms, (batch, n, dim) to the same shape.

    Embeddings are small, and what a block does to a stream should not depend on how small: hence the norm at the start.

    >>> import torch
    >>> BlockStack(StackConfig(dim=8, heads=2, hidden=16))(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, stack: StackConfig):
        super().__init__()
        sizes = (stack.dim, stack.heads, stack.hidden)
        self.blocks = nn.ModuleList(make_block(stack.block, *sizes, causal=stack.causal) for _ in range(stack.layers))
        self.start, self.end = nn.LayerNorm(stack.dim), nn.LayerNorm(stack.dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """key_padding_mask (batch, n), True where there is no token."""
        x = self.start(x)
        for block in self.blocks:
            x = block(x, key_padding_mask=key_padding_mask)
        return self.end(x)


Config = TypeVar("Config", bound=StackConfig)


def count_parameters(module: nn.Module) -> int:
    """
    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in module.parameters())


def count_built(config: Config, build: Callable[[Config], nn.Module]) -> int:
    """Parameters of the model that a configuration builds; no random number of the caller is used up."""
    with torch.random.fork_rng(devices=[]):
        return count_parameters(build(config))


def match_parameters(config: Config, budget: int, build: Callable[[Config], nn.Module]) -> Config:
    """``config`` with the ``hidden`` that brings the model it builds nearest to ``budget`` parameters.

    The count is affine in ``hidden``, so two counts say where it meets the budget.

    >>> match_parameters(StackConfig(dim=8, heads=2), 2000, BlockStack).hidden
    39
    """
    least, wider = (count_built(dataclasses.replace(config, hidden=h), build) for h in (1, 2))
    hidden = 1 + round((budget - least) / (wider - least))
    if hidden < 1:
        got = f"{least:,} parameters at the narrowest"
        advice = "Take fewer layers or a smaller dim."
        raise ValueError(sentence(f"match_parameters.{config.block}", f"at most {budget:,} parameters", got, advice))
    return dataclasses.replace(config, hidden=hidden)
