"""Which atoms are visible to a query: masks, causal order, windows and log weights as edits of the measure, by blocks.

A key outside the support has log weight −inf: G, every mean and every gradient are as if it were not there. Structural
supports (causal, window) are never written down as queries × atoms; whole blocks are skipped or left untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TABLE = 1 << 22  # pairs in one table of visibility


@dataclass(frozen=True)
class Band:
    """Key j is visible to the query at position t iff  t − window < j ≤ t  (causal)  or  |t − j| < window.

    Query row r has position t = offset + (r mod period): heads that share keys follow one another.
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
        return self.visible(*(torch.arange(part.start, part.stop, device=device) for part in (rows, cols)))

    def visible(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(rows, cols) for any choice of row and column numbers, True where visible."""
        gap = (rows % self.period + self.offset)[:, None] - cols
        seen = torch.ones_like(gap, dtype=torch.bool)
        if self.causal:
            seen = seen & (gap >= 0)
        if self.window is not None:
            seen = seen & (gap.abs() < self.window)
        return seen

    def span(self, rows: slice, atoms: int) -> tuple[int, int]:
        """The keys that some of these rows see: the first, and the one after the last."""
        low, high = self._positions(rows)
        first, last = self._reach(low)[0], self._reach(high)[1]
        first = int(min(max(first, 0), atoms))
        return first, int(max(min(last + 1, atoms), first))

    def reached(self, rows: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
        """The visible keys of each row as a range: the first, and the one after the last."""
        t = rows % self.period + self.offset
        first = torch.zeros_like(t) if self.window is None else t - self.window + 1
        after = t + 1 if self.causal else torch.full_like(t, atoms) if self.window is None else t + self.window
        first = first.clamp(0, atoms)
        return first, torch.maximum(after.clamp(0, atoms), first)


@dataclass(frozen=True)
class FlatSupport:
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
    def everything(self) -> bool:
        """Every atom is visible to every query, all with the same weight."""
        return self.band.trivial and self.mask is None and self.per_atom is None and self.per_pair is None

    @property
    def _dense(self) -> bool:
        """Whether there is a table of queries × atoms."""
        return self.per_pair is not None or (self.mask is not None and self.mask.shape[1] != 1)

    def visible(self, heads: slice, rows: Tensor, atoms: int) -> Tensor:
        """(heads | 1, rows, atoms) for any choice of row numbers, True where an atom is visible to a row."""
        seen = self.band.visible(rows, torch.arange(atoms, device=rows.device))[None]
        if self.per_atom is not None:
            seen = seen & (self.per_atom[heads, None] > -torch.inf)
        for table in (self.mask, None if self.per_pair is None else self.per_pair > -torch.inf):
            if table is not None:
                part = table[heads if table.shape[0] > 1 else slice(None)]
                seen = seen & (part[:, rows] if part.shape[1] != 1 else part)
        return seen

    def seen_atoms(self, queries: int, atoms: int, device: torch.device) -> Tensor:
        """(groups | 1, atoms), True where the atom is visible to any query of the group."""
        every = slice(None)
        if self._dense:
            parts = [self.visible(every, rows, atoms).any(1) for rows in self._row_numbers(queries, atoms, device)]
            return torch.stack(parts).any(0) if parts else torch.zeros(1, atoms, dtype=torch.bool, device=device)
        seen = torch.zeros(1, atoms, dtype=torch.bool, device=device)
        if queries:
            # rows of one period stand side by side, so that their ranges have no holes between them
            first, after = self.band.span(slice(0, min(queries, self.band.period)), atoms)
            seen[:, first:after] = True
        return self._weighed_in(seen)

    def _weighed_in(self, seen: Tensor) -> Tensor:
        """Less the atoms that mask or weight hide from every query, where neither is a table of pairs."""
        if self.mask is not None:
            seen = seen & self.mask[:, 0]
        return seen if self.per_atom is None else seen & (self.per_atom > -torch.inf)

    def row_sums(self, table: Tensor, queries: int) -> Tensor:
        """(groups, queries, k): for every query the sum of a (groups, atoms, k) table over its visible atoms."""
        atoms, device = table.shape[1], table.device
        if self._dense:
            parts = [
                self.visible(slice(None), rows, atoms).to(table.dtype).expand(table.shape[0], -1, -1) @ table
                for rows in self._row_numbers(queries, atoms, device)
            ]
            return torch.cat(parts, 1) if parts else table[:, :0]
        seen = self._weighed_in(torch.ones(1, atoms, dtype=torch.bool, device=device))
        total = torch.nn.functional.pad((table * seen[..., None]).cumsum(1), (0, 0, 1, 0))
        first, after = self.band.reached(torch.arange(queries, device=device), atoms)
        return total[:, after] - total[:, first]

    @staticmethod
    def _row_numbers(queries: int, atoms: int, device: torch.device) -> tuple[Tensor, ...]:
        """Few enough at a time for a table of queries × atoms."""
        return torch.arange(queries, device=device).split(max(1, TABLE // max(1, atoms))) if queries else ()

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
    every = slice(None)
    return table[heads if table.shape[0] > 1 else every, rows if table.shape[1] > 1 else every, cols]
