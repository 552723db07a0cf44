"""Losses of the form G − ⟨η, x⁺⟩ over many atoms, with their gradient, in one sweep over strips of rows.

With scores s_ij = ⟨η_i,x_j⟩ + b_j, weights p_ij = exp(s_ij − G_i) and targets t_ij = T_ij / Σ_j T_ij,

    ℓ_i = G_i − Σ_j t_ij s_ij + z G_i²,        ∂/∂s_ij Σ_i w_i ℓ_i = w_i ((1 + 2z G_i) p_ij − t_ij),

so a strip of scores is all that its share of the loss and of every gradient needs: three matrix products and one
softmax. Where the weights w are known in the forward pass (a mean or a sum), the gradient is computed there and the
backward pass only scales it. Where they are not, and for two sides, whose column normalizers need all rows first,
there is a second sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.dense import normalize
from cumulant.kernels.strips import LogSum, Side, Tiling, positives_of

GRAPH = 1 << 18  # scores held at once with their graph, for second derivatives
Needs = tuple[bool, bool, bool]  # which of eta, atoms and bias need a gradient


@dataclass(frozen=True)
class LossPlan:
    """What is computed, apart from tensors."""

    exclude_self: bool = False  # log weight −inf on the diagonal
    two_sided: bool = False  # losses of the n rows, then of the m columns
    softcap: float | None = None  # s ↦ c tanh(s/c)
    smoothing: float = 0.0  # t ↦ (1 − ε) t + ε/m
    z_loss: float = 0.0


class Losses(NamedTuple):
    """Losses (n,), or (n + m,) on two sides, or their weighted sum; log-normalizers (n,) or (n + m,)."""

    value: Tensor
    log_normalizer: Tensor


def losses(
    eta: Tensor,
    atoms: Tensor,
    positives: Tensor,
    plan: LossPlan,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
) -> Losses:
    """Every ℓ_i, or Σ_i w_i ℓ_i, and G; a row without positives or without atoms has loss 0 and gradient 0.

    eta (n, d), atoms (m, d), positives (n,) indices with −1 for none or Boolean (n, m), bias (m,) on one side only,
    −inf where an atom is absent, weight as many as there are losses. A row without positives still has its G: what it
    holds must be finite. Differentiable twice in eta, atoms and bias, through both results, and never
    with n × m numbers in memory.
    """
    wanted = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in (eta, atoms, bias))
    value, log_normalizer, *_ = LossFunction.apply(eta, atoms, bias, weight, positives, plan, wanted)
    return Losses(value, log_normalizer)


# ---------------------------------------------------------------------- the sweep


class SweepResult(NamedTuple):
    """What `Sweep.run` returns."""

    loss: Tensor
    log_normalizer: Tensor
    gradients: tuple[Tensor, ...]  # of those inputs that need one


class Sweep:
    """Scores of (n, d) rows against (m, d) atoms, strip by strip, in buffers that are reused."""

    def __init__(self, eta: Tensor, atoms: Tensor, bias: Tensor | None, positives: Tensor, plan: LossPlan):
        self.eta, self.atoms, self.bias, self.plan = eta, atoms, bias, plan
        self.n, self.m = eta.shape[0], atoms.shape[0]
        self.positives = positives_of(positives, self.m, plan.exclude_self)
        self.counts = self.positives.row_counts
        buffers = 2 if plan.two_sided or plan.softcap is not None else 1
        self.tiling = Tiling.of(self.n, self.m, eta.shape[1], buffers)
        self.spans = self.tiling.spans()
        self.space = eta.new_empty(buffers, len(self.spans) * self.tiling.rows * self.tiling.cols)
        self.mean = eta.new_full((self.m,), 1 / max(1, self.m)) if plan.smoothing else None
        self.removed = bias == -torch.inf if bias is not None and plan.softcap is not None else None

    def run(self, weight: Tensor | None, extra: Tensor | None, needs: Needs) -> SweepResult:
        """Losses, log-normalizers, and the gradients of Σ weight·ℓ + Σ extra·G."""
        self.gradients = [
            torch.zeros_like(t) if need and t is not None else None
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
        return _together(sides)

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
        return _together([*sides, side])

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


def _together(sides: list[Side]) -> tuple[Tensor, Tensor]:
    return torch.cat([side.loss for side in sides]), torch.cat([side.sums.log() for side in sides])


# ---------------------------------------------------------------------- as differentiable operations


class LossFunction(torch.autograd.Function):
    """(eta, atoms, bias) → losses or their weighted sum, log-normalizers, and the gradients of that sum."""

    @staticmethod
    def forward(eta, atoms, bias, weight, positives, plan: LossPlan, wanted: Needs):
        nothing = (False, False, False)
        result = Sweep(eta, atoms, bias, positives, plan).run(weight, None, wanted if weight is not None else nothing)
        value = result.loss if weight is None else (weight * result.loss).sum()
        return (value, result.log_normalizer, *result.gradients)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.plan, ctx.wanted = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*output[2:])
        ctx.gradients = tuple(g.detach() for g in output[2:])  # handed over by the first backward pass, never copied
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, grad_log, *_):
        eta, atoms, bias, weight, positives = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if grad is not None:
            each = grad if weight is None else weight * grad
        elif grad_log is not None:
            each = torch.zeros_like(grad_log)
        else:
            return (None,) * 7
        gradients, ctx.gradients = ctx.gradients, ()
        if gradients and grad_log is None and needs == ctx.wanted and not torch.is_grad_enabled():
            return (*_spread((g.mul_(grad) for g in gradients), needs), None, None, None, None)
        pulled = LossGradients.apply(eta, atoms, bias, each, grad_log, positives, ctx.plan, needs)
        return (*_spread(pulled, needs), None, None, None, None)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(LossFunction, info.batch_size, in_dims, args)


class LossGradients(torch.autograd.Function):
    """(eta, atoms, bias, weight, extra) → the gradients of Σ weight·ℓ + Σ extra·G that are needed."""

    @staticmethod
    def forward(eta, atoms, bias, weight, extra, positives, plan: LossPlan, needs: Needs):
        return Sweep(eta, atoms, bias, positives, plan).run(weight, extra, needs).gradients

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.plan, ctx.needs = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *incoming):
        if all(v is None for v in incoming):
            return (None,) * 8
        *inputs, positives = ctx.saved_tensors
        eta, atoms, bias, weight, extra = inputs
        full = PullInputs(eta, atoms, _or_zeros(bias, atoms.sum(1)), weight, _or_zeros(extra, weight))
        totals = LossSecondOrder.apply(*full, *_spread(incoming, ctx.needs), positives, ctx.plan)
        return (*(None if t is None else total for t, total in zip(inputs, totals, strict=True)), None, None, None)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(LossGradients, info.batch_size, in_dims, args)


class PullInputs(NamedTuple):
    """The differentiable inputs of `LossGradients`; zeros where there is none."""

    eta: Tensor
    atoms: Tensor
    bias: Tensor
    weight: Tensor
    extra: Tensor


class LossSecondOrder(torch.autograd.Function):
    """(inputs of `LossGradients`, a vector for each result) → the derivative of their inner product in every input."""

    @staticmethod
    def forward(eta, atoms, bias, weight, extra, on_eta, on_atoms, on_bias, positives, plan: LossPlan):
        inputs, vectors = PullInputs(eta, atoms, bias, weight, extra), (on_eta, on_atoms, on_bias)
        totals = PullInputs(*(torch.zeros_like(t) for t in inputs))
        for transposed in (False, True) if plan.two_sided else (False,):
            _second_order(inputs, vectors, positives, plan, transposed, totals)
        return (*totals,)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        advice = "Write the loss with full logits for more."
        raise NotImplementedError(sentence("losses", "first or second derivatives", "a third", advice))

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(LossSecondOrder, info.batch_size, in_dims, args)


def _second_order(
    inputs: PullInputs, vectors, positives: Tensor, plan: LossPlan, transposed: bool, totals: PullInputs
) -> None:
    """Adds to ``totals`` the derivatives of ⟨gradients, vectors⟩, a few rows (or columns, transposed) at a time."""
    matrix = positives_of(positives, len(inputs.atoms), plan.exclude_self)
    before, lines, others = (0, len(inputs.eta), len(inputs.atoms))
    if transposed:
        before, lines, others = lines, others, lines
    step = max(1, GRAPH // max(1, others))
    wanted = [k for k, v in enumerate(vectors) if v is not None]
    for i in range(0, lines, step):
        part, every = slice(i, min(i + step, lines)), slice(None)
        losses_of = slice(before + part.start, before + part.stop)
        where = (*((every, part) if transposed else (part, every)), every, losses_of, losses_of)
        leaves = PullInputs(*(t[w].detach().requires_grad_() for t, w in zip(inputs, where, strict=True)))
        with torch.enable_grad(), without_autocast(inputs.eta):
            loss, g = reference(leaves, matrix.dense(part, transposed), plan, transposed, i)
            total = (leaves.weight * loss + leaves.extra * torch.where(g == -torch.inf, 0, g)).sum()
            first = torch.autograd.grad(total, [leaves[k] for k in wanted], create_graph=True, materialize_grads=True)
            along = [(f * vectors[k][where[k]]).sum() for k, f in zip(wanted, first, strict=True)]
            second = torch.autograd.grad(along, leaves, materialize_grads=True)
        for target, w, piece in zip(totals, where, second, strict=True):
            target[w] += piece


def reference(x: PullInputs, positives: Tensor, plan: LossPlan, transposed: bool, first: int) -> tuple[Tensor, Tensor]:
    """ℓ and G of some rows (or columns) by their definitions; ``first`` is the index of row 0."""
    s = x.atoms @ x.eta.T if transposed else x.eta @ x.atoms.T + x.bias
    if plan.softcap is not None:
        s = torch.where(x.bias == -torch.inf, -torch.inf, plan.softcap * torch.tanh(s / plan.softcap))
    if plan.exclude_self:
        i, j = (torch.arange(size, device=s.device) for size in s.shape)
        s = s.masked_fill(i[:, None] + first == j, -torch.inf)
    g, _ = normalize(s)
    counts = positives.sum(1, keepdim=True)
    target = positives.to(s.dtype) / counts.clamp_min(1)
    if plan.smoothing:
        target = (1 - plan.smoothing) * target + plan.smoothing / s.shape[1]
    absent = (counts[:, 0] == 0) | (g == -torch.inf)
    finite = torch.where(absent, 0, g)
    loss = finite - torch.where((target > 0) & ~absent[:, None], target * s, 0).sum(1) + plan.z_loss * finite.square()
    return torch.where(absent, 0, loss), g


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _spread(gradients, needs: Needs) -> tuple[Tensor | None, ...]:
    """The gradients in the slots that need one, None in the others."""
    left = iter(gradients)
    return tuple(next(left) if need else None for need in needs)


def _one_by_one(function, size: int, in_dims, args):
    """A batch under vmap, problem by problem: memory stays that of one."""
    runs = []
    for i in range(size):
        own = [a.select(axis, i) if isinstance(axis, int) else a for a, axis in zip(args, in_dims, strict=True)]
        runs.append(function.apply(*own))
    return tuple(torch.stack(column) for column in zip(*runs, strict=True)), (0,) * len(runs[0])
