"""One sweep over strips of rows of a loss: log-normalizers, losses, and the gradients of a weighted sum of both.

`Sweep` is what every kernel of a loss shares; `TorchSweep` is the one in torch operations, the reference and the one
for other devices. That in C++ is in native/losses.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.strips import LogSum, Side, Tiling, positives_of

Needs = tuple[bool, bool, bool]  # which of eta, atoms and bias need a gradient


@dataclass(frozen=True)
class LossPlan:
    """What is computed, apart from tensors."""

    exclude_self: bool = False  # log weight −inf on the diagonal
    two_sided: bool = False  # losses of the n rows, then of the m columns
    softcap: float | None = None  # s ↦ c tanh(s/c)
    smoothing: float = 0.0  # t ↦ (1 − ε) t + ε/m
    z_loss: float = 0.0


class SweepResult(NamedTuple):
    """What `Sweep.run` returns."""

    loss: Tensor
    log_normalizer: Tensor
    gradients: tuple[Tensor, ...]  # of those inputs that need one


class Sweep(ABC):
    """Scores of (n, d) rows against (m, d) atoms, a strip of rows at a time."""

    def __init__(self, eta: Tensor, atoms: Tensor, bias: Tensor | None, positives: Tensor, plan: LossPlan):
        self.eta, self.atoms, self.bias, self.plan = eta, atoms, bias, plan
        self.n, self.m = eta.shape[0], atoms.shape[0]
        self.positives = positives_of(positives, self.m, plan.exclude_self)
        self.counts = self.positives.row_counts

    def run(self, weight: Tensor | None, extra: Tensor | None, needs: Needs) -> SweepResult:
        """Losses, log-normalizers, and the gradients of Σ weight·ℓ + Σ extra·G."""
        self.gradients = [
            t.new_zeros(t.shape) if need and t is not None else None
            for t, need in zip((self.eta, self.atoms, self.bias), needs, strict=True)
        ]
        if self.n == 0 or self.m == 0:
            lines = self.n + self.m if self.plan.two_sided else self.n
            loss, log_normalizer = self.eta.new_zeros(lines), self.eta.new_full((lines,), -torch.inf)
        else:
            sweep = self._two_sided if self.plan.two_sided else self._one_sided
            with without_autocast(self.eta):
                loss, log_normalizer = sweep(weight if any(needs) else None, extra)
        return SweepResult(loss, log_normalizer, tuple(g for g in self.gradients if g is not None))

    @abstractmethod
    def _one_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and log-normalizers of the rows; adds to ``gradients`` if there is a weight."""

    @abstractmethod
    def _two_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same of the rows and then of the columns."""


class TorchSweep(Sweep):
    """In torch operations, in buffers that are reused."""

    def __init__(self, eta: Tensor, atoms: Tensor, bias: Tensor | None, positives: Tensor, plan: LossPlan):
        super().__init__(eta, atoms, bias, positives, plan)
        buffers = 2 if plan.two_sided or plan.softcap is not None else 1
        self.tiling = Tiling.of(self.n, self.m, eta.shape[1], buffers)
        self.spans = self.tiling.spans()
        self.space = eta.new_empty(buffers, len(self.spans) * self.tiling.rows * self.tiling.cols)
        self.mean = eta.new_full((self.m,), 1 / max(1, self.m)) if plan.smoothing else None
        self.removed = bias == -torch.inf if bias is not None and plan.softcap is not None else None

    def _one_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        sides = []
        for strip in self.tiling.strips():
            s = self._scores(strip)
            slope = self._slope(s) if weight is not None else None
            side, chunks = self._compare(s, strip, None)
            sides.append(side)
            if weight is not None:
                on_p, on_t = side.weights(weight[strip], None if extra is None else extra[strip])
                s.mul_((chunks.share(side.sums) * on_p)[..., None])
                self._subtract(s, strip, side, on_t, None)
                self._absorb(s if slope is None else s.mul_(slope), strip)
        return together(sides)

    def _two_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Column sums first, then gradients."""
        columns = LogSum(*self.space.new_empty(2, len(self.spans), self.tiling.cols))
        columns.top.fill_(-torch.inf)
        columns.mass.fill_(0)
        positive, counts = self.eta.new_zeros(self.m), self.positives.column_counts
        sides = []
        for strip in self.tiling.strips():
            s = self._scores(strip)
            columns = columns.plus(LogSum.of(s, 1, self._view(1, strip)))
            sides.append(self._compare(s, strip, positive)[0])
        flat = LogSum(*(part.flatten()[: self.m] for part in columns))
        side = Side.of(flat, positive, counts, self.plan.z_loss)
        if weight is not None:
            more = None if extra is None else extra[self.n :]
            on_p, on_t = side.weights(weight[self.n :], more)
            pad = columns.top.numel() - self.m
            self._pull_both(columns, torch.nn.functional.pad(on_p, (0, pad)), on_t / counts.clamp_min(1), weight, extra)
        return together([*sides, side])

    def _pull_both(self, columns: LogSum, on_q: Tensor, on_t: Tensor, weight: Tensor, extra: Tensor | None) -> None:
        """Gradients of both sides: the coefficient of a score is that of its row plus that of its column."""
        for strip in self.tiling.strips():
            s, q = self._scores(strip), self._view(1, strip)
            part = LogSum.of(s, 1, q)
            q.mul_((part.share(columns) * on_q.view_as(columns.top))[:, None, :])
            side, chunks = self._compare(s, strip, None)
            on_p, own = side.weights(weight[strip], None if extra is None else extra[strip])
            torch.addcmul(q, s, (chunks.share(side.sums) * on_p)[..., None], out=s)
            self._subtract(s, strip, side, own, on_t)
            self._absorb(s, strip)

    def _view(self, buffer: int, strip: slice) -> Tensor:
        shape = len(self.spans), strip.stop - strip.start, self.tiling.cols
        return self.space[buffer, : shape[0] * shape[1] * shape[2]].view(shape)

    def _scores(self, strip: slice) -> Tensor:
        """(chunk, row, column); −inf in the padding and where a point would meet itself."""
        s = self._view(0, strip)
        for block, cols in self._blocks(s):
            if self.bias is None:
                torch.mm(self.eta[strip], self.atoms[cols].T, out=block)
            else:
                torch.addmm(self.bias[cols], self.eta[strip], self.atoms[cols].T, out=block)
            if self.plan.exclude_self:
                block.diagonal(strip.start - cols.start).fill_(-torch.inf)
        if self.plan.softcap is not None:
            s.div_(self.plan.softcap).tanh_().mul_(self.plan.softcap)
            if self.removed is not None:
                for block, cols in self._blocks(s):
                    block.masked_fill_(self.removed[cols], -torch.inf)
        s[-1, :, self.spans[-1].stop - self.spans[-1].start :] = -torch.inf
        return s

    def _blocks(self, s: Tensor) -> list[tuple[Tensor, slice]]:
        """The chunks of a strip without padding."""
        return [(s[k, :, : cols.stop - cols.start], cols) for k, cols in enumerate(self.spans)]

    def _slope(self, s: Tensor) -> Tensor | None:
        """The derivative 1 − (s/c)² of the cap; 0 where there is no atom."""
        if self.plan.softcap is None:
            return None
        slope = self.space[1, : s.numel()].view(s.shape)
        return torch.div(s, self.plan.softcap, out=slope).clamp_min_(-1).square_().neg_().add_(1)

    def _compare(self, s: Tensor, strip: slice, by_column: Tensor | None) -> tuple[Side, LogSum]:
        """The losses of a strip, and the sums of its chunks; ``s`` becomes the softmax of every chunk by itself."""
        counts = self.counts[strip]
        positive = self.positives.pick(s, strip, self.tiling, by_column)
        if self.mean is not None:
            mean = torch.stack([block @ self.mean[cols] for block, cols in self._blocks(s)]).sum(0)
            positive = (1 - self.plan.smoothing) * positive + self.plan.smoothing * mean
        chunks = LogSum.of(s, -1, s)
        return Side.of(chunks.joined(), positive, counts, self.plan.z_loss), chunks

    def _subtract(self, s: Tensor, strip: slice, side: Side, row: Tensor, column: Tensor | None) -> None:
        if self.plan.smoothing:
            s.sub_((row * (self.plan.smoothing / self.m))[:, None])
            row = row * (1 - self.plan.smoothing)
        self.positives.subtract(s, strip, self.tiling, row / side.counts.clamp_min(1), column)

    def _absorb(self, s: Tensor, strip: slice) -> None:
        """Coefficients of the scores → gradients."""
        eta, atoms, bias = self.gradients
        for block, cols in self._blocks(s):
            if eta is not None:
                eta[strip].addmm_(block, self.atoms[cols])
            if atoms is not None:
                atoms[cols].addmm_(block.T, self.eta[strip])
            if bias is not None:
                bias[cols] += block.sum(0)


def together(sides: list[Side]) -> tuple[Tensor, Tensor]:
    """Losses and log-normalizers, side after side."""
    return torch.cat([side.loss for side in sides]), torch.cat([side.sums.log() for side in sides])
