"""Tensors of every layout: what `.mT`, slicing, expanding, NumPy's Fortran order and factorisations hand to a library.

`Layout.of` gives a tensor with the same values and other strides, so that a result can be compared with that of the
contiguous copy, and garbage around the view shows who reads past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

SIZES = (0, 1, 2, 3, 63, 100, 1000)
GARBAGE = float("nan")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    order    contiguous | transposed (last two axes) | reversed (all axes, Fortran order)
    step     every step-th entry of the last axis of a wider storage
    offset   entries before the first, and as many after the last entry of each line
    shared   none | rows | columns: the stride of the last but one, or the last axis is 0 (all its entries are equal)
    """

    order: str = "contiguous"
    step: int = 1
    offset: int = 0
    shared: str = "none"

    def of(self, values: Tensor) -> Tensor:
        """A tensor of this layout; equal to ``values`` unless axes are shared, where the first entry serves all."""
        x = self.shape(values)
        if self.shared != "none" and x.ndim:
            axis = -1 if self.shared == "columns" or x.ndim < 2 else -2
            if x.shape[axis] > 0:
                return self._lay(x.narrow(axis, 0, 1)).expand(x.shape)
        return self._lay(x)

    def shape(self, values: Tensor) -> Tensor:
        """The values a tensor of this layout has, contiguous."""
        if self.shared == "none" or not values.ndim:
            return values.contiguous()
        axis = -1 if self.shared == "columns" or values.ndim < 2 else -2
        if values.shape[axis] == 0:
            return values.contiguous()
        return values.narrow(axis, 0, 1).expand(values.shape).contiguous()

    def _lay(self, x: Tensor) -> Tensor:
        axes = list(range(x.ndim))
        if self.order == "transposed" and x.ndim > 1:
            axes[-1], axes[-2] = axes[-2], axes[-1]
        if self.order == "reversed":
            axes.reverse()
        inside = x.permute(axes)  # every order here is its own inverse
        if not x.ndim:
            return x.clone()
        wide = inside.shape[-1] * self.step + 2 * self.offset
        storage = torch.full((*inside.shape[:-1], wide), GARBAGE, dtype=x.dtype)
        view = storage[..., self.offset : self.offset + inside.shape[-1] * self.step : self.step]
        view.copy_(inside)
        return view.permute(axes)


def layouts() -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        order=st.sampled_from(["contiguous", "transposed", "reversed"]),
        step=st.sampled_from([1, 1, 2, 3]),
        offset=st.sampled_from([0, 0, 1, 5]),
        shared=st.sampled_from(["none", "none", "none", "rows", "columns"]),
    )


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
