"""A strip of scores of a loss: its tiling, its sums of exponentials, its positives.

The matrix T of positives, T_ij = 1 where atom j is a positive of row i, is one index per row or a Boolean table.
Both have the same methods:

    row_counts, column_counts   Σ_j T_ij and Σ_i T_ij
    pick                        Σ_j T_ij s_ij / Σ_j T_ij of a strip of scores, 0 without positives; its rows' share of
                                Σ_i T_ij s_ij / Σ_i T_ij is added to ``by_column``. Divided first: a sum may overflow
    subtract                    s_ij −= T_ij (row_i + column_j), in place
    dense                       T itself for some rows, or its transpose for some columns
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import known_on_cpu

COLUMNS = 896  # of one chunk, at most
ROWS = 384  # of one strip, at most
THREADED = 1024, 4096  # rows and columns for several threads: they meet after every operation, so fewer and larger ones
STRIP = 1 << 23  # scores of one strip, unless the atoms themselves are larger


@dataclass(frozen=True)
class Tiling:
    """How (n, m) scores are cut: strips of ``rows`` rows, each stored as (chunk, row, column) with ``cols`` columns.

    So every block is contiguous, and no row of one is a large power of two long: such a stride costs the matrix
    products a tenth of their speed. The last chunk is padded.
    """

    n: int
    m: int
    rows: int
    cols: int

    @staticmethod
    def of(n: int, m: int, d: int, buffers: int) -> Tiling:
        """Strips of at most 32 MiB in float32, or about as large as the m × d atoms."""
        most, widest = (ROWS, COLUMNS) if torch.get_num_threads() == 1 else THREADED
        rows = max(32, min(d, 256), STRIP // max(1, m * buffers))
        chunks = max(1, -(-m // widest))
        cols = max(1, -(-m // (64 * chunks))) * 64
        return Tiling(n, m, max(1, min(n, rows, most)), cols + 64 if cols % 512 == 0 else cols)

    def strips(self) -> list[slice]:
        return [slice(i, min(i + self.rows, self.n)) for i in range(0, self.n, self.rows)]

    def spans(self) -> list[slice]:
        return [slice(j, min(j + self.cols, self.m)) for j in range(0, self.m, self.cols)]


class LogSum(NamedTuple):
    """Σ exp(s) = mass · exp(top) along an axis; an empty sum has top −inf and mass 0."""

    top: Tensor
    mass: Tensor

    @staticmethod
    def of(s: Tensor, dim: int, out: Tensor) -> LogSum:
        """Of every line of ``s`` along an axis; its softmax goes to ``out``, zeros where there is nothing to sum."""
        top = s.amax(dim)
        torch.softmax(s, dim, out=out)
        mass = out.amax(dim).reciprocal_()
        empty = top == -torch.inf
        if not known_on_cpu(~empty):
            out.masked_fill_(empty.unsqueeze(dim), 0)
            mass.masked_fill_(empty, 0)
        return LogSum(top, mass)

    @property
    def empty(self) -> Tensor:
        return self.mass == 0

    def joined(self) -> LogSum:
        """The sum over the first axis."""
        top = self.top.amax(0)
        return LogSum(top, (self.mass * torch.exp(self.top - torch.where(top == -torch.inf, 0, top))).sum(0))

    def plus(self, other: LogSum) -> LogSum:
        return LogSum(torch.stack([self.top, other.top]), torch.stack([self.mass, other.mass])).joined()

    def share(self, whole: LogSum) -> Tensor:
        """The part of a larger sum that this one is; 0 of an empty one."""
        top, mass = torch.where(whole.empty, 0, whole.top), torch.where(whole.empty, 1, whole.mass)
        return self.mass * torch.exp(self.top - top) / mass

    def log(self) -> Tensor:
        return self.top + torch.log(self.mass)

    def minus(self, score: Tensor) -> Tensor:
        """log Σ exp(s) − score without the rounding of the larger of the two."""
        return (self.top - score) + torch.log(self.mass)


class Side(NamedTuple):
    """Losses of some rows (or columns), and the factors of their gradient."""

    sums: LogSum
    counts: Tensor
    loss: Tensor
    z: float

    @staticmethod
    def of(sums: LogSum, positive: Tensor, counts: Tensor, z: float) -> Side:
        """``positive`` is Σ_j t_ij s_ij."""
        loss = sums.minus(positive)
        if z:
            loss = loss + z * sums.log().square()
        return Side(sums, counts, torch.where(_absent(sums, counts), 0, loss), z)

    def weights(self, weight: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Coefficients of p and t in the gradient of Σ weight·ℓ + Σ extra·G."""
        absent = _absent(self.sums, self.counts)
        on_t = torch.where(absent, 0, weight)
        on_p = torch.where(absent, 0, on_t * (1 + 2 * self.z * self.sums.log())) if self.z else on_t
        if extra is not None:
            on_p = on_p + torch.where(self.sums.empty, 0, extra)
        return on_p, on_t


def _absent(sums: LogSum, counts: Tensor) -> Tensor:
    return (counts == 0) | sums.empty


@dataclass(frozen=True)
class Index:
    """Row i has the one positive ``index[i]``, or none where that is negative."""

    index: Tensor  # (n,) int64
    m: int

    @cached_property
    def row_counts(self) -> Tensor:
        return (self.index >= 0).long()

    @cached_property
    def column_counts(self) -> Tensor:
        return torch.bincount(self.index[self.index >= 0], minlength=self.m)

    def _cells(self, rows: slice, tiling: Tiling) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The positives of a strip, and where they are among its chunks."""
        j = self.index[rows].clamp_min(0)
        chunk = torch.div(j, tiling.cols, rounding_mode="floor")
        return j, (chunk, torch.arange(len(j), device=j.device), j - chunk * tiling.cols)

    def pick(self, s: Tensor, rows: slice, tiling: Tiling, by_column: Tensor | None) -> Tensor:
        j, cells = self._cells(rows, tiling)
        positive = torch.where(self.index[rows] >= 0, s[cells], 0)
        if by_column is not None:
            by_column.index_add_(0, j, positive / self.column_counts[j].clamp_min(1))
        return positive

    def subtract(self, s: Tensor, rows: slice, tiling: Tiling, row: Tensor, column: Tensor | None) -> None:
        j, cells = self._cells(rows, tiling)
        weight = row if column is None else row + column[j]
        s[cells] -= torch.where(self.index[rows] >= 0, weight, 0)

    def dense(self, part: slice, transposed: bool) -> Tensor:
        if transposed:
            return self.index == torch.arange(part.start, part.stop, device=self.index.device)[:, None]
        return self.index[part, None] == torch.arange(self.m, device=self.index.device)


@dataclass(frozen=True)
class Table:
    """A Boolean matrix; where no point is compared with itself, the diagonal does not count."""

    table: Tensor  # (n, m)
    exclude_self: bool

    @cached_property
    def row_counts(self) -> Tensor:
        return self.table.sum(1) - self._own

    @cached_property
    def column_counts(self) -> Tensor:
        return self.table.sum(0) - self._own

    @property
    def _own(self) -> Tensor | int:
        return self.table.diagonal().long() if self.exclude_self else 0

    def _block(self, rows: slice, cols: slice) -> Tensor:
        block = self.table[rows, cols]
        if self.exclude_self:
            block = block.clone()
            block.diagonal(rows.start - cols.start).fill_(False)
        return block

    def pick(self, s: Tensor, rows: slice, tiling: Tiling, by_column: Tensor | None) -> Tensor:
        mean, counts = s.new_zeros(s.shape[1]), self.row_counts[rows, None].clamp_min(1)
        for chunk, cols in zip(s, tiling.spans(), strict=True):
            positive = torch.where(self._block(rows, cols), chunk[:, : cols.stop - cols.start], 0)
            if by_column is not None:
                by_column[cols] += (positive / self.column_counts[cols].clamp_min(1)).sum(0)
            mean += positive.div_(counts).sum(1)
        return mean

    def subtract(self, s: Tensor, rows: slice, tiling: Tiling, row: Tensor, column: Tensor | None) -> None:
        for chunk, cols in zip(s, tiling.spans(), strict=True):
            weight = row[:, None] if column is None else row[:, None] + column[cols]
            chunk[:, : cols.stop - cols.start] -= self._block(rows, cols) * weight

    def dense(self, part: slice, transposed: bool) -> Tensor:
        every = slice(0, self.table.shape[0 if transposed else 1])
        return self._block(every, part).T if transposed else self._block(part, every)


Positives = Index | Table


def positives_of(tensor: Tensor, m: int, exclude_self: bool) -> Positives:
    """(n,) indices with −1 for none, or a Boolean (n, m)."""
    return Table(tensor, exclude_self) if tensor.dtype == torch.bool else Index(tensor, m)
