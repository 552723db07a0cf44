"""Losses of the form G − ⟨η, x⁺⟩ over many atoms, with their gradient, in one sweep over strips of rows.

With scores s_ij = ⟨η_i,x_j⟩ + b_j, weights p_ij = exp(s_ij − G_i) and targets t_ij = T_ij / Σ_j T_ij,

    ℓ_i = G_i − Σ_j t_ij s_ij + z G_i²,        ∂/∂s_ij Σ_i w_i ℓ_i = w_i ((1 + 2z G_i) p_ij − t_ij),

so a strip of scores is all that its share of the loss and of every gradient needs: three matrix products and one
softmax. Where the weights w are known in the forward pass (a mean or a sum), the gradient is computed there and the
backward pass only scales it. Where they are not, and for two sides, whose column normalizers need all rows first,
there is a second sweep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import known, sentence
from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.dense import normalize
from cumulant.kernels.native.call import entries, recorded
from cumulant.kernels.native.losses import NativeSweep, refusal
from cumulant.kernels.strips import positives_of
from cumulant.kernels.sweep import LossPlan, Needs, Sweep, TorchSweep

GRAPH = 1 << 18  # scores held at once with their graph, for second derivatives


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


def sweep_of(eta: Tensor, atoms: Tensor, bias: Tensor | None, positives: Tensor, plan: LossPlan) -> Sweep:
    """The sweep by the native kernel where there is one that serves these tensors."""
    native = entries() is not None and not recorded() and refusal(eta, atoms, bias, positives) is None
    return (NativeSweep if native else TorchSweep)(eta, atoms, bias, positives, plan)


# ---------------------------------------------------------------------- as differentiable operations


class LossFunction(torch.autograd.Function):
    """(eta, atoms, bias) → losses or their weighted sum, log-normalizers, and the gradients of that sum."""

    @staticmethod
    def forward(eta, atoms, bias, weight, positives, plan: LossPlan, wanted: Needs):
        nothing = (False, False, False)
        needs = nothing if weight is None else wanted
        result = sweep_of(eta, atoms, bias, positives, plan).run(weight, None, needs)
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
        known_weight = gradients and needs == ctx.wanted and not torch.is_grad_enabled()
        if known_weight and grad is not None and grad_log is None:
            if not (grad.is_cpu and known(grad == 1)):  # elsewhere the question costs more than the product
                gradients = tuple(g.mul_(grad) for g in gradients)
            return (*_spread(gradients, needs), None, None, None, None)
        pulled = LossGradients.apply(eta, atoms, bias, each, grad_log, positives, ctx.plan, needs)
        return (*_spread(pulled, needs), None, None, None, None)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(LossFunction, info.batch_size, in_dims, args)


class LossGradients(torch.autograd.Function):
    """(eta, atoms, bias, weight, extra) → the gradients of Σ weight·ℓ + Σ extra·G that are needed."""

    @staticmethod
    def forward(eta, atoms, bias, weight, extra, positives, plan: LossPlan, needs: Needs):
        return sweep_of(eta, atoms, bias, positives, plan).run(weight, extra, needs).gradients

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
