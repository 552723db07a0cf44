"""The sweep of a loss by the native kernel: sums of rows and columns, and gradients, in C++ (losses.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import LossCall
from cumulant.kernels.native.call import PLAIN, enter
from cumulant.kernels.strips import ROWS, STRIP, Index, LogSum, Side
from cumulant.kernels.sweep import Sweep, together

LANES = 64  # rows in a multiple of the lanes of every instruction set, and of all vectors of its largest tile
KEPT = 1 << 20  # scores that a strip may have in any case
CACHED = 160 << 10  # numbers of the atoms and scores of a block, which three products read
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
        if weight is None:
            return together([self._rows(Pass(self, slice(0, self.n), self.n))])
        sides, rows = [], self._strip_rows()
        space = Space(self, rows)
        for i in range(0, self.n, rows):
            strip = slice(i, min(i + rows, self.n))
            both = Pass(self, strip, rows, space)
            side = self._rows(both)
            sides.append(side)
            on_p, on_t = side.weights(weight[strip], None if extra is None else extra[strip])
            if self.plan.smoothing:
                both.give("uniform", on_t * (self.plan.smoothing / self.m))
                on_t = on_t * (1 - self.plan.smoothing)
            both.give("row_weight", on_p)
            both.give("row_positive", on_t / side.counts.clamp_min(1))
            both.pull()
        return together(sides)

    def _two_sided(self, weight: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Nothing is kept: scores are computed again once the sums of columns are known."""
        both = Pass(self, slice(0, self.n), self.n)
        counts = self.positives.column_counts
        both.give("column_count", counts.clamp_min(1))
        sums = LogSum(both.result("column_top", self.m), both.result("column_mass", self.m))
        positive = both.result("column_picked", self.m)
        rows = self._rows(both)
        columns = Side.of(sums, positive, counts, self.plan.z_loss)
        if weight is not None:
            for name, side, lines in (("row", rows, slice(0, self.n)), ("column", columns, slice(self.n, None))):
                on_p, on_t = side.weights(weight[lines], None if extra is None else extra[lines])
                both.give(f"{name}_weight", on_p)
                both.give(f"{name}_positive", on_t / side.counts.clamp_min(1))
            both.pull()
        return together([rows, columns])

    def _rows(self, both: Pass) -> Side:
        """The first pass over some rows."""
        count = both.strip.stop - both.strip.start
        sums = LogSum(both.result("row_top", count), both.result("row_mass", count))
        positive = both.result("row_picked", count)
        mean = both.result("row_mean", count) if self.plan.smoothing else None
        enter("loss_sums", both.call)
        if mean is not None:
            positive = (1 - self.plan.smoothing) * positive + self.plan.smoothing * mean
        return Side.of(sums, positive, self.counts[both.strip], self.plan.z_loss)

    def _strip_rows(self) -> int:
        """Rows of a strip whose exponentials are kept: as `Tiling.of`, in strips of about one size."""
        buffers = 1 if self.plan.softcap is None else 2
        most = max(32, min(self.eta.shape[1], 256), STRIP // (self.m * buffers))
        most = min(most, max(ROWS, KEPT // self.m))
        most = most // LANES * LANES or most
        strips = -(-self.n // most)
        return min(self.n, -(-self.n // (strips * LANES)) * LANES)


class Space:
    """Memory for what is kept of a strip; used again by the next."""

    def __init__(self, sweep: Sweep, rows: int):
        self.lead = -(-rows // LANES) * LANES
        self.block = block_of(sweep, self.lead)
        self.kept = sweep.eta.new_empty(sweep.m, self.lead)
        self.tops = sweep.eta.new_empty(-(-sweep.m // self.block), self.lead)
        self.slope = None if sweep.plan.softcap is None else torch.empty_like(self.kept)


def block_of(sweep: Sweep, rows: int) -> int:
    """Atoms of a block: it stays in cache with its scores, and there is one for every thread."""
    least, most = BLOCKS
    shared = -(-sweep.m // (8 * torch.get_num_threads())) * 8
    return max(least, min(most, shared, CACHED // (sweep.eta.shape[1] + rows) // 8 * 8))


class Pass:
    """The arguments of both passes over some rows, and the tensors that must live as long as they run."""

    def __init__(self, sweep: Sweep, strip: slice, rows: int, space: Space | None = None):
        self.sweep, self.strip, self.alive = sweep, strip, []
        c = self.call = LossCall()
        plan, d = sweep.plan, sweep.eta.shape[1]
        c.rows, c.atoms, c.width, c.first = strip.stop - strip.start, sweep.m, d, strip.start
        c.precision, c.exclude_self = sweep.eta.element_size(), int(plan.exclude_self)
        c.softcap = plan.softcap or 0.0
        c.block = block_of(sweep, min(rows, 4 * LANES)) if space is None else space.block
        c.eta_row = self.give("eta", _packed(sweep.eta[strip])).stride(0)
        c.atom_row = self.give("atom", _packed(sweep.atoms)).stride(0)
        if sweep.bias is not None:
            self.give("bias", sweep.bias)
        if isinstance(sweep.positives, Index):
            self.give("index", sweep.positives.index[strip])
        else:
            table = sweep.positives.table[strip]
            c.table_row, c.table_column = table.stride()
            self.alive.append(table)
            c.table = table.data_ptr()
        self.give("row_count", sweep.counts[strip].clamp_min(1))
        if space is not None:
            c.kept, c.block_top, c.lead = space.kept.data_ptr(), space.tops.data_ptr(), space.lead
            c.slope = None if space.slope is None else space.slope.data_ptr()

    def give(self, name: str, tensor: Tensor) -> Tensor:
        """An argument: integers of one number per row as they are, or numbers of the dtype of the sums."""
        if name not in ("eta", "atom", "index"):
            tensor = tensor.to(self.sweep.eta.dtype)
        if name not in ("eta", "atom"):
            tensor = tensor.detach().resolve_neg().contiguous()
        self.alive.append(tensor)
        setattr(self.call, name, tensor.data_ptr())
        return tensor

    def result(self, name: str, count: int) -> Tensor:
        return self.give(name, self.sweep.eta.new_empty(count))

    def pull(self) -> None:
        """The second pass: adds to the gradients of the sweep."""
        eta, atoms, bias = self.sweep.gradients
        for name, tensor in (("d_eta", None if eta is None else eta[self.strip]), ("d_atoms", atoms), ("d_bias", bias)):
            if tensor is not None:
                setattr(self.call, name, tensor.data_ptr())
        enter("loss_gradients", self.call)


def _packed(tensor: Tensor) -> Tensor:
    """The tensor with entries of a row side by side; a copy only if they are not."""
    tensor = tensor.detach().resolve_neg()
    return tensor if tensor.shape[1] <= 1 or tensor.stride(1) == 1 else tensor.contiguous()
