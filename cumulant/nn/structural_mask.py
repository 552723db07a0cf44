"""A mask that is a rule, not a table: padding, causal order and window, written out only for those who ask for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cumulant.kernels.arguments import Support


class StructuralMask(Tensor):
    """A Boolean mask (batch, 1, q, n), True = attend, of which only padding and the rule of its band are stored.

        visible(b, i, j)  =  tokens(b, j)  and  j ≤ offset + i (causal)  and  |offset + i − j| < window

    To everyone else it is the tensor of that shape: any operation on it writes the table out first. Attention that
    knows it reads `support` and `visible_keys`.

    support       mask (batch, 1, 1, visible_keys) or None, causal, offset, window: arguments of `moments`
    visible_keys  keys behind this number are visible to no query (the unused end of a static cache)

    >>> mask = StructuralMask.of(None, batch=1, queries=2, keys=3, causal=True, offset=1)
    >>> mask.shape, mask.support.offset
    (torch.Size([1, 1, 2, 3]), 1)
    >>> mask & True
    tensor([[[[ True,  True, False],
              [ True,  True,  True]]]])
    """

    support: Support
    visible_keys: int

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        *,
        batch: int,
        queries: int,
        keys: int,
        causal: bool = False,
        window: int | None = None,
        offset: int = 0,
        device: torch.device | str = "cpu",
    ) -> StructuralMask:
        """tokens  (batch, keys) True where the key is a token; None: all are"""
        make: Any = getattr(Tensor, "_make_wrapper_subclass")  # noqa: B009, torch's only constructor of such tensors
        mask = make(cls, (batch, 1, queries, keys), dtype=torch.bool, device=device)
        mask.visible_keys = max(0, min(keys, offset + queries)) if causal else keys
        known = None if tokens is None else tokens[:, None, None, : mask.visible_keys]
        mask.support = Support(known, causal, offset, window)
        return mask

    # shape, dtype and device are answered without an operation
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(StructuralMask, StructuralMask.table, (args, kwargs or {}))
        return func(*args, **kwargs)

    def table(self) -> Tensor:
        """(batch, 1, q, n), written out."""
        batch, _, queries, keys = self.shape
        table = torch.ones(1, 1, queries, self.visible_keys, dtype=torch.bool, device=self.device)
        band = self.support.band(torch.arange(queries, device=self.device), self.visible_keys)
        table = table if band is None else table & band
        table = table if self.support.mask is None else table & self.support.mask
        hidden = keys - self.visible_keys
        table = torch.nn.functional.pad(table, (0, hidden)) if hidden else table
        return table.expand(batch, 1, queries, keys)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        rule = {k: v for k, v in self.support.arguments().items() if k != "mask"}
        padded = "" if self.support.mask is None else ", padded"
        return f"StructuralMask({tuple(self.shape)}, {rule}{padded})"
