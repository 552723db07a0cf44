"""Statistics as numbers that add over blocks of atoms, summed over ranks or on a ring, forwards and backwards.

With constants t (a top), c (a centre) and the G_b, m_b, V_b of block b (log-normalizer, a mean, the variance about it),

    S = Σ_b e^{G_b − t} · (1, m_b, V_b + |m_b − c|²),      G = t + log S_0,   m = S_1/S_0,   V = S_2/S_0 − |m − c|²

hold for any t and c, so they may be taken from the data without a gradient of their own: near the top nothing
overflows, near the mean nothing cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cumulant.kernels.collectives import Ranks
from cumulant.kernels.moments import CENTRED, Moments

LINEAR = ("mean", "atom_mean", "mean_score", "mean_log_weight")
PLAIN = ("positive",)  # sums as they are: scores of the positives of a loss
Fields = dict[str, Tensor]  # names of `Moments`, and those in PLAIN
Block = Sequence[Tensor | None]  # atoms and what goes with them
Part = Callable[[Tensor, Block, int], Fields]  # queries, block, the rank it belongs to


class Offsets(NamedTuple):
    """The constants t and c: top of G, centres of the variances, the largest score and how many blocks attain it."""

    top: Tensor
    centre: Fields
    peak: Tensor | None
    ties: Tensor | None

    def pack(self, part: Fields) -> Tensor:
        """(*batch, q, k): what is added over blocks."""
        e = torch.exp(part["log_normalizer"] - self.top)
        columns = [e]
        columns += [_wide(part[name], e) * e[..., None] for name in LINEAR if name in part]
        for name, mean in CENTRED.items():
            if name in part:
                columns.append(e * (part[name] + _square(part[mean] - self.centre[mean], e)))
        if "log_sum_square" in part:
            columns.append(torch.exp(part["log_sum_square"] - 2 * self.top))
        if "max_score" in part:
            assert self.ties is not None
            columns.append(torch.where(part["max_score"] == self.peak, part["max_score"] / self.ties, 0))
        columns += [part[name] for name in PLAIN if name in part]
        return torch.cat([_wide(column, e) for column in columns], -1)

    def unpack(self, sums: Tensor, like: Fields) -> Fields:
        """The statistics of all blocks; ``like`` has the names and widths of the columns."""
        columns = iter(sums.split([_width(like[name], sums.ndim - 1) for name in _order(like)], -1))
        total: Fields = {}
        mass = next(columns)[..., 0]
        empty = mass == 0
        safe = torch.where(empty, 1, mass)
        total["log_normalizer"] = torch.where(empty, -torch.inf, self.top + torch.log(safe))
        for name in _order(like)[1:]:
            column = next(columns)
            if name in LINEAR:
                mixed = column / safe[..., None]
                total[name] = mixed if like[name].ndim > mass.ndim else mixed[..., 0]
                continue
            column = column[..., 0]
            if name in CENTRED:
                mean = CENTRED[name]
                column = torch.where(empty, 0, column / safe - _square(total[mean] - self.centre[mean], mass))
            elif name == "log_sum_square":
                none = column == 0
                column = torch.where(none, -torch.inf, 2 * self.top + torch.log(torch.where(none, 1, column)))
            total[name] = column
        return total


def _order(fields: Fields) -> list[str]:
    """The columns in the order of `Offsets.pack`."""
    names = ("log_normalizer", *LINEAR, *CENTRED, "log_sum_square", "max_score", *PLAIN)
    return [name for name in names if name in fields]


def _width(tensor: Tensor, queries: int) -> int:
    return tensor.shape[-1] if tensor.ndim > queries else 1


def _wide(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.ndim > like.ndim else tensor[..., None]


def _square(gap: Tensor, like: Tensor) -> Tensor:
    return _wide(gap, like).square().sum(-1)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isfinite(), top, 0)


def merge(a: Fields, b: Fields) -> Fields:
    """Two blocks as one."""
    first, second = (record_of({name: x for name, x in part.items() if name not in PLAIN}) for part in (a, b))
    joined = fields_of(first.merge(second))
    return {name: a[name] + b[name] if name in PLAIN else joined[name] for name in a}


def record_of(fields: Fields) -> Moments:
    """Statistics by name as a record."""
    return Moments(fields["log_normalizer"], {k: v for k, v in fields.items() if k != "log_normalizer"})


def fields_of(record: Moments) -> Fields:
    """The log-normalizer and the statistics of a record, by name."""
    return {"log_normalizer": record.log_normalizer, **record.statistics}


# ---------------------------------------------------------------------- replicated queries


def all_reduced(ranks: Ranks, part: Part, eta: Tensor, block: Block) -> Fields:
    """Statistics over the atoms of all ranks, for queries that all ranks hold."""
    local = part(ranks.spread(eta), block, ranks.rank)
    offsets = _offsets(ranks, {name: value.detach() for name, value in local.items()})
    return offsets.unpack(ranks.total(offsets.pack(local)), local)


def _offsets(ranks: Ranks, part: Fields) -> Offsets:
    """The constants, the same on every rank: the largest of what must be large, the mean of what must be near."""
    g, peak = part["log_normalizer"], part.get("max_score")
    tops = ranks.largest(g if peak is None else torch.stack([g, peak]))
    top, peak = (tops, None) if peak is None else tops
    top = _finite(top)
    ties = None if peak is None else ranks.sum((part["max_score"] == peak).to(g.dtype))
    means = {CENTRED[name]: part[CENTRED[name]] for name in CENTRED if name in part}
    if not means:
        return Offsets(top, {}, peak, ties)
    linear = {"log_normalizer": g} | means
    bare = Offsets(top, {}, None, None)
    centre = bare.unpack(ranks.sum(bare.pack(linear)), linear)
    return Offsets(top, centre, peak, ties)


# ---------------------------------------------------------------------- sharded queries


class RingSchedule:
    """Which rank computes what in each step of a ring, and the names of the statistics for the backward pass."""

    def __init__(self, ranks: Ranks, part: Part, lengths: Sequence[int], axes: Sequence[int]):
        self.ranks, self.part, self.lengths, self.axes = ranks, part, lengths, axes
        self.names: list[str] = []

    def owner(self, step: int) -> int:
        """The rank whose block is here after ``step`` steps."""
        return (self.ranks.rank - step) % self.ranks.size

    def shapes(self, block: Sequence[Tensor], step: int) -> list[torch.Size]:
        """Shapes of the block that is here after ``step`` steps: ranks may have different numbers of atoms."""
        sizes = [list(tensor.shape) for tensor in block]
        for size, axis in zip(sizes, self.axes, strict=True):
            size[axis] = self.lengths[self.owner(step)]
        return [torch.Size(size) for size in sizes]


def round_the_ring(ranks: Ranks, part: Part, eta: Tensor, block: Block, lengths: Sequence[int]) -> Fields:
    """Statistics of the queries of this rank over the atoms of all ranks; blocks of atoms pass from rank to rank.

    lengths  how many atoms each rank has. In a block the atoms are the second axis from the end of the first two
             tensors and the last axis of the third.

    Computation and communication overlap. In the backward pass each block goes round once more with its gradient.
    Differentiable once.
    """
    present = [t is not None for t in block]
    axes = [axis for axis, there in zip((-2, -2, -1), present, strict=True) if there]

    def whole(e: Tensor, tensors: Block, owner: int) -> Fields:
        left = iter(tensors)
        return part(e, [next(left) if there else None for there in present], owner)

    schedule = RingSchedule(ranks, whole, lengths, axes)
    outputs = _Ring.apply(schedule, eta, *[t for t in block if t is not None])
    return dict(zip(schedule.names, outputs, strict=True))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, schedule: RingSchedule, eta: Tensor, *block: Tensor):
        ranks = schedule.ranks
        total: Fields = {}
        ties = None
        here: Sequence[Tensor] = block
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else ranks.send_on(here, schedule.shapes(here, step + 1))
            part = schedule.part(eta, here, schedule.owner(step))
            ties = _ties(total.get("max_score"), ties, part.get("max_score"))
            total = merge(total, part) if total else part
            here = here if coming is None else coming.wait()
        schedule.names = list(total)
        ctx.schedule, ctx.ties = schedule, ties
        ctx.save_for_backward(eta, *block, *total.values())
        return tuple(total.values())

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        schedule, ranks = ctx.schedule, ctx.schedule.ranks
        count = len(schedule.names)
        saved = ctx.saved_tensors
        eta, *block = saved[:-count]
        total = dict(zip(schedule.names, saved[-count:], strict=True))
        offsets = Offsets(_finite(total["log_normalizer"]), total, total.get("max_score"), ctx.ties)
        on_sums = _slope(offsets, total, gradients)
        on_eta, here = torch.zeros_like(eta), block
        on_block = [torch.zeros_like(t) for t in block]
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else ranks.send_on(here, schedule.shapes(here, step + 1))
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in (eta, *here)]
                packed = offsets.pack(schedule.part(inputs[0], inputs[1:], schedule.owner(step)))
            slopes = torch.autograd.grad(packed, inputs, on_sums, allow_unused=True, materialize_grads=True)
            on_eta += slopes[0]
            for sum_, slope in zip(on_block, slopes[1:], strict=True):
                sum_ += slope
            here = here if coming is None else coming.wait()
            if ranks.size > 1:  # after the last step it is back at its owner
                on_block = ranks.send_on(on_block, schedule.shapes(on_block, step + 1)).wait()
        return None, on_eta, *on_block


def _slope(offsets: Offsets, total: Fields, gradients: Sequence[Tensor]) -> Tensor:
    """The gradient on the sums, from that on the statistics."""
    with torch.enable_grad():
        sums = offsets.pack(total).requires_grad_()  # of one block that is everything
        ends = offsets.unpack(sums, total)
    pairs = [(ends[name], g) for name, g in zip(total, gradients, strict=True) if g is not None]
    return torch.autograd.grad([e for e, _ in pairs], sums, [g for _, g in pairs])[0]


def _ties(before: Tensor | None, ties: Tensor | None, now: Tensor | None) -> Tensor | None:
    """How many blocks attain the largest score so far."""
    if now is None:
        return None
    if before is None or ties is None:
        return torch.ones_like(now)
    return torch.where(before > now, ties, torch.where(before == now, ties + 1, 1))
