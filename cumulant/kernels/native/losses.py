"""The sweep of a loss by the native kernel: sums of rows and columns, and gradients, in C++ (losses.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import LossCall
from cumulant.kernels.native.call import PLAIN, enter
from cumulant.kernels.strips import ROWS, STRIP, Index, LogSum, Side
from cumulant.kernels.sweep import Sweep, together

LANES = 64  # rows are taken in multiples of this, the lanes of the widest tile of any instruction set
UNKEPT = 256  # rows of a strip of which nothing is kept
KEPT = 1 << 20  # scores that a strip may have in any case
CACHED = 96 << 10  # numbers of the atoms and scores of a block, which three products read
BLOCKS = 32, 256  # atoms of a block, at least and at most


def refusal(*tensors: Tensor | None) -> str | None:
    """Why the native kernel cannot serve these tensors, eta first; None if it can."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return f"it reads tensors of torch by their addresses, not those of type {type(tensor).__name__}"
        if tensor is not None and tensor.device.type != "cpu":
            return f"it runs on the CPU, not on {tensor.device.type}"
    eta = tensors[0]
    if eta is not None and eta.dtype not in (torch.float32, torch.float64):
        return f"sums are formed in float32 and float64, not {eta.dtype}"
    return None


class NativeSweep(Sweep):
    """In C++: where gradients are wanted, exponentials of a strip are kept between its two passes."""

    def _one_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        call = LossArguments(self, kept=weight is not None)
        if weight is not None:
            call.weigh("row", self.counts, weight, extra)
        sums, positive = call.sums("row", self.n)
        mean = call.result("row_mean", self.n) if self.plan.smoothing else None
        call.run("loss_sums" if weight is None else "loss_both")
        if mean is not None:
            positive = (1 - self.plan.smoothing) * positive + self.plan.smoothing * mean
        return together([Side.of(sums, positive, self.counts, self.plan.z_loss)])

    def _two_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Nothing is kept: scores are computed again once the sums of columns are known."""
        call, counts = LossArguments(self, kept=False), self.positives.column_counts
        call.give("column_count", counts.clamp_min(1))
        rows, columns = call.sums("row", self.n), call.sums("column", self.m)
        call.run("loss_sums")
        if weight is not None:
            for name, lines, own in (("row", slice(0, self.n), self.counts), ("column", slice(self.n, None), counts)):
                call.weigh(name, own, weight[lines], None if extra is None else extra[lines])
            call.run("loss_gradients")
        z = self.plan.z_loss
        return together([Side.of(*rows, self.counts, z), Side.of(*columns, counts, z)])


class LossArguments:
    """The arguments of a call, and the tensors that must live as long as it runs."""

    def __init__(self, sweep: Sweep, kept: bool):
        self.sweep, self.alive = sweep, []
        c = self.call = LossCall()
        plan, rows = sweep.plan, strip_rows(sweep) if kept else min(sweep.n, UNKEPT)
        c.rows, c.atoms, c.width = sweep.n, sweep.m, sweep.eta.shape[1]
        c.precision, c.exclude_self = sweep.eta.element_size(), int(plan.exclude_self)
        c.strip, c.block = rows, block_atoms(sweep, rows)
        c.softcap, c.smoothing = plan.softcap or 0.0, plan.smoothing
        c.eta_row = self.give("eta", _packed(sweep.eta)).stride(0)
        c.atom_row = self.give("atom", _packed(sweep.atoms)).stride(0)
        if sweep.bias is not None:
            self.give("bias", sweep.bias.resolve_neg().contiguous())
        if isinstance(sweep.positives, Index):
            self.give("index", sweep.positives.index.contiguous())
        else:
            c.table_row, c.table_column = self.give("table", sweep.positives.table).stride()
        self.give("row_count", sweep.counts.clamp_min(1))
        if kept:
            self._keep(rows)

    def _keep(self, rows: int) -> None:
        """Room for the exponentials of a strip."""
        lead = self.call.lead = -(-rows // LANES) * LANES
        self.result("kept", self.sweep.m * lead)
        self.result("block_top", -(-self.sweep.m // self.call.block) * lead)
        if self.sweep.plan.softcap is not None:
            self.result("slope", self.sweep.m * lead)

    def give(self, name: str, tensor: Tensor) -> Tensor:
        """An argument as it is, but counts in the precision of the sums, weights without strides."""
        tensor = tensor.to(self.sweep.eta.dtype) if name.endswith("count") else tensor
        tensor = tensor.contiguous() if name.endswith(("weight", "tilt", "positive")) else tensor
        self.alive.append(tensor)
        setattr(self.call, name, tensor.data_ptr())
        return tensor

    def result(self, name: str, count: int) -> Tensor:
        return self.give(name, self.sweep.eta.new_empty(count))

    def sums(self, name: str, lines: int) -> tuple[LogSum, Tensor]:
        """What will be the sums of exponentials and the mean scores of positives of one side."""
        top, mass, picked = (self.result(f"{name}_{part}", lines) for part in ("top", "mass", "picked"))
        return LogSum(top, mass), picked

    def weigh(self, name: str, counts: Tensor, weight: Tensor, extra: Tensor | None) -> None:
        """Weights of the losses and log-normalizers of one side, as `Side.weights`; what is empty has none."""
        positive = torch.where(counts == 0, 0, weight)
        self.give(f"{name}_positive", positive)
        self.give(f"{name}_weight", positive if extra is None else positive + extra)
        if self.sweep.plan.z_loss:
            self.give(f"{name}_tilt", 2 * self.sweep.plan.z_loss * positive)

    def run(self, entry: str) -> None:
        for name, tensor in zip(("d_eta", "d_atoms", "d_bias"), self.sweep.gradients, strict=True):
            setattr(self.call, name, None if tensor is None else tensor.data_ptr())
        enter(entry, self.call)


def strip_rows(sweep: Sweep) -> int:
    """Rows of a strip whose exponentials are kept: as many as `Tiling.of` takes, in strips of about one size."""
    buffers = 1 if sweep.plan.softcap is None else 2
    most = max(32, min(sweep.eta.shape[1], 256), STRIP // (sweep.m * buffers))
    most = min(most, max(ROWS, KEPT // sweep.m))
    most = most // LANES * LANES or most
    strips = -(-sweep.n // most)
    return min(sweep.n, -(-sweep.n // (strips * LANES)) * LANES)


def block_atoms(sweep: Sweep, rows: int) -> int:
    """Atoms of a block: it stays in cache with its scores, and there is one for every thread."""
    least, most = BLOCKS
    shared = -(-sweep.m // (8 * torch.get_num_threads())) * 8
    return max(least, min(most, shared, CACHED // (sweep.eta.shape[1] + rows) // 8 * 8))


def _packed(tensor: Tensor) -> Tensor:
    """The tensor with entries of a row side by side; a copy only if they are not."""
    tensor = tensor.detach().resolve_neg()
    return tensor if tensor.shape[1] <= 1 or tensor.stride(1) == 1 else tensor.contiguous()
