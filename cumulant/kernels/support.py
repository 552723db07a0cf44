"""Which atoms a query may see, as an edit of the measure: masks, causal order, windows and log weights, block by block.

A key outside the support has log weight −inf: G, every mean and every gradient are as if it were not there. Structural
supports (causal, window) are never written down as queries × atoms; whole blocks are skipped or left untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Key j is visible to the query at position t iff  t − window < j ≤ t  (causal)  or  |t − j| < window.

    Query row r stands at position t = offset + (r mod period): heads that share keys follow one another.
    """

    causal: bool = False
    window: int | None = None
    offset: int = 0
    period: int = 1

    @property
    def trivial(self) -> bool:
        return not self.causal and self.window is None

    def _reach(self, position: int) -> tuple[float, float]:
        """First and last visible key of a position."""
        window = float("inf") if self.window is None else self.window
        return position - window + 1, position if self.causal else position + window - 1

    def _positions(self, rows: slice) -> tuple[int, int]:
        """Smallest and largest position among some rows."""
        first, last = rows.start, rows.stop - 1
        if first // self.period != last // self.period:
            return self.offset, self.offset + self.period - 1
        return self.offset + first % self.period, self.offset + last % self.period

    def hides(self, rows: slice, cols: slice) -> bool:
        """Nothing in this block is visible."""
        if self.trivial:
            return False
        low, high = self._positions(rows)
        return cols.stop - 1 < self._reach(low)[0] or cols.start > self._reach(high)[1]

    def shows(self, rows: slice, cols: slice) -> bool:
        """Everything in this block is visible."""
        if self.trivial:
            return True
        low, high = self._positions(rows)
        return cols.start >= self._reach(high)[0] and cols.stop - 1 <= self._reach(low)[1]

    def mask(self, rows: slice, cols: slice, device: torch.device) -> Tensor:
        """(rows, cols), True where visible."""
        t = torch.arange(rows.start, rows.stop, device=device) % self.period + self.offset
        gap = t[:, None] - torch.arange(cols.start, cols.stop, device=device)
        seen = torch.ones_like(gap, dtype=torch.bool)
        if self.causal:
            seen = seen & (gap >= 0)
        if self.window is not None:
            seen = seen & (gap.abs() < self.window)
        return seen


@dataclass(frozen=True)
class Support:
    """Everything that is added to scores: a band, a Boolean mask, log weights per atom and per pair.

    mask       (groups | 1, q | 1, n)  True = visible
    per_atom   (groups, n)             log weights
    per_pair   (groups | 1, q, n)      log weights of each query row
    """

    band: Band
    mask: Tensor | None = None
    per_atom: Tensor | None = None
    per_pair: Tensor | None = None

    @property
    def empty_rows_possible(self) -> bool:
        return not (self.band.trivial and self.mask is None and self.per_atom is None and self.per_pair is None)

    def weigh(self, score: Tensor, heads: slice, rows: slice, cols: slice) -> Tensor:
        """score + log weight for one block; the same tensor where nothing is to add."""
        if self.per_atom is not None:
            score = score + self.per_atom[heads, None, cols]
        if self.per_pair is not None:
            score = score + block(self.per_pair, heads, rows, cols)
        if self.mask is not None:
            score = score.masked_fill(~block(self.mask, heads, rows, cols), -torch.inf)
        if not self.band.shows(rows, cols):
            score = score.masked_fill(~self.band.mask(rows, cols, score.device), -torch.inf)
        return score

    def log_weight(self, heads: slice, rows: slice, cols: slice) -> Tensor | None:
        """The finite log weights of one block, 0 where an atom is absent (its probability is 0, and 0 · −inf is 0)."""
        w = None if self.per_atom is None else self.per_atom[heads, None, cols]
        if self.per_pair is not None:
            pair = block(self.per_pair, heads, rows, cols)
            w = pair if w is None else w + pair
        return None if w is None else torch.where(w == -torch.inf, 0, w)


def block(table: Tensor, heads: slice, rows: slice, cols: slice) -> Tensor:
    """A part of a (g | 1, q | 1, n) table; an axis of size 1 serves all."""
    return table[
        heads if table.shape[0] > 1 else slice(None),
        rows if table.shape[1] > 1 else slice(None),
        cols,
    ]
