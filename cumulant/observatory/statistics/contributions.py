"""What heads and sublayers add to the residual stream: how much, and in which direction.

A head with output o (e,) and slice W_O (D, e) of the output projection adds c = W_O o. Beside the stream x that it is
added to and the whole update u = out − in of its block:

    contribution    |c| / |x|                contribution_cosine     ⟨c, u⟩ / (|c| |u|)

The vectors c of all heads, tokens × heads × D numbers, are never formed: |c|² = oᵀ (W_Oᵀ W_O) o, ⟨c, u⟩ = ⟨o, W_Oᵀ u⟩.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CONTRIBUTIONS = ("contribution", "contribution_cosine")
SUBLAYERS = ("attention", "cross_attention", "mlp")  # of a block, whose contributions are `attention_contribution`, …


class HeadProjection(NamedTuple):
    """The slices W_O of an output projection: matrix (D, heads · e), gram W_Oᵀ W_O (heads, e, e)."""

    matrix: Tensor
    gram: Tensor

    @classmethod
    def of(cls, output: Tensor) -> HeadProjection:
        """output (heads, D, e)."""
        return cls(output.transpose(0, 1).flatten(1), output.mT @ output)


class Contribution(NamedTuple):
    """size |c|/|x| and cosine with the update of the block, of the same shape; NaN where a length is 0."""

    size: Tensor
    cosine: Tensor


def head_contributions(
    heads: Tensor, projection: HeadProjection, before: Tensor, update: Tensor, factor: Tensor | None = None
) -> Contribution:
    """Of every head, (heads, n).

    heads   (n, heads, e) outputs of the heads of n tokens
    before  (n, D) the stream that they are added to
    update  (n, D) of the whole block
    factor  (n,) by which what is projected is multiplied before it is added, as by the norm on the branch; None: 1

    >>> import torch
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> found = head_contributions(eye[:1, :, None] * 3, HeadProjection.of(eye[:, :, None]), 2 * eye[:1], eye[:1])
    >>> found.size.T, found.cosine.T                        # the first head adds 3 along the update, the second nothing
    (tensor([[1.5000, 0.0000]], dtype=torch.float64), tensor([[1., nan]], dtype=torch.float64))
    """
    heads = heads.transpose(0, 1)  # (heads, n, e)
    square = torch.linalg.vecdot(heads @ projection.gram, heads).clamp_min(0)
    read = (update @ projection.matrix).unflatten(1, (len(heads), -1))  # W_Oᵀ u of all heads at once
    along = torch.linalg.vecdot(heads, read.transpose(0, 1))
    factor = torch.ones_like(along[0]) if factor is None else factor
    length = square.sqrt() * factor.abs()
    return _compared(length, along * factor, before, update)


def contribution(added: Tensor, before: Tensor, update: Tensor) -> Contribution:
    """Of what a sublayer adds, (n, D) beside the same; (n,).

    >>> import torch
    >>> contribution(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, -3.0]]))
    Contribution(size=tensor([0.5000]), cosine=tensor([-1.]))
    """
    length, along = torch.linalg.vector_norm(added, dim=-1), torch.linalg.vecdot(added, update)
    return _compared(length, along, before, update)


def _compared(length: Tensor, along: Tensor, before: Tensor, update: Tensor) -> Contribution:
    stream, whole = (torch.linalg.vector_norm(x, dim=-1) for x in (before, update))
    size = torch.where(stream > 0, length / stream, torch.nan)
    both = length * whole
    return Contribution(size, torch.where(both > 0, (along / both).clamp(-1, 1), torch.nan))
