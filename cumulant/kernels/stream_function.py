"""The sweep as an autograd.Function: first and second derivatives, vmap and forward mode."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportMissingImports]

from cumulant.kernels.evaluate import evaluate, gradients
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.recompute import push_forward, push_pullback, reference, second_order, untracked


def stream(x: Inputs, plan: Plan) -> dict[str, Tensor]:
    """Every output of ``plan`` by name."""
    out = MomentsFunction.apply(*x, plan)
    return dict(zip(plan.outputs, out, strict=False))


class MomentsFunction(torch.autograd.Function):
    """Inputs → outputs of the plan, then the index of the best atom if ``max_score`` is among them."""

    @staticmethod
    def forward(eta, atoms, values, per_atom, per_pair, mask, plan: Plan):
        out, best = evaluate(Inputs(eta, atoms, values, per_atom, per_pair, mask), plan)
        return (*out,) if best is None else (*out, best)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.plan = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)
        if "max_score" in ctx.plan.statistics:
            ctx.mark_non_differentiable(output[-1])

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        names = ctx.plan.outputs
        have = tuple(name for name, g in zip(names, grads, strict=False) if g is not None)
        incoming = [g for g in grads[: len(names)] if g is not None]
        needs = tuple(ctx.needs_input_grad[:5])
        if not incoming:
            return (None,) * 7
        if any(is_legacy_batchedtensor(g) for g in incoming):
            return (*_batched(Inputs(*saved[:6]), ctx.plan, have, incoming, needs), None, None)
        pulled = MomentsBackward.apply(ctx.plan, have, needs, *saved, *incoming)
        return (*_spread(pulled, saved[:5], needs), None, None)

    @staticmethod
    def jvp(ctx, *tangents):
        saved = ctx.saved_tensors
        moved = push_forward(Inputs(*saved[:6]), ctx.plan, Inputs.of(tangents[:5]))
        return (*moved, None) if "max_score" in ctx.plan.statistics else (*moved,)

    @staticmethod
    def vmap(info, in_dims, *args):
        *tensors, plan = args
        out = MomentsFunction.apply(*fold(info.batch_size, in_dims[:6], tensors), plan)
        return tuple(unfold(info.batch_size, t) for t in out), (0,) * len(out)


class MomentsBackward(torch.autograd.Function):
    """(inputs, outputs, incoming gradients) → gradients of those inputs that need one, in order."""

    @staticmethod
    def forward(plan: Plan, have: tuple[str, ...], needs: tuple[bool, ...], *tensors):
        x, out, best, grad = _unpack(plan, have, tensors)
        pulled = gradients(x, plan, out, best, grad, needs)
        return tuple(f for f in pulled if f is not None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.plan, ctx.have, ctx.needs, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx, *tangents):
        x, _, _, grad = _unpack(ctx.plan, ctx.have, ctx.saved_tensors)
        small = replace(ctx.plan, statistics=frozenset(ctx.have))
        moving = dict(zip(ctx.have, tangents[-len(ctx.have) :], strict=True))
        names = small.outputs
        pulled = push_pullback(x, small, [grad[n] for n in names], Inputs.of(tangents[3:8]), [moving[n] for n in names])
        return tuple(g for g, need in zip(pulled, ctx.needs, strict=True) if need and g is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *incoming):
        saved = untracked(ctx.saved_tensors)
        x, _, _, grad = _unpack(ctx.plan, ctx.have, saved)
        small = replace(ctx.plan, statistics=frozenset(ctx.have))
        full = _spread(incoming, x[:5], ctx.needs)
        total = second_order(x, small, [grad[name] for name in small.outputs], list(full))
        by_name = dict(zip(small.outputs, total[5:], strict=True))
        skipped = len(saved) - 5 - len(ctx.have)
        return (None, None, None, *total[:5], *(None,) * skipped, *(by_name[name] for name in ctx.have))

    @staticmethod
    def vmap(info, in_dims, plan, have, needs, *tensors):
        out = MomentsBackward.apply(plan, have, needs, *fold(info.batch_size, in_dims[3:], tensors))
        return tuple(unfold(info.batch_size, t) for t in out), (0,) * len(out)


def _batched(x: Inputs, plan: Plan, have: tuple[str, ...], incoming, needs) -> tuple[Tensor | None, ...]:
    """Gradients for many incoming ones at once (``is_grads_batched``): they have no memory that a kernel could read, so
    that torch pulls them back through the reference."""
    with torch.enable_grad():
        leaves = [
            t.detach().requires_grad_() if t is not None and need else t
            for t, need in zip(x, (*needs, False), strict=True)
        ]
        out = dict(zip(plan.outputs, reference(Inputs(*leaves), plan), strict=True))  # pyright: ignore[reportArgumentType]
        wanted = [t for t, need in zip(leaves, needs, strict=False) if t is not None and need]
        pairs = [(out[name], g) for name, g in zip(have, incoming, strict=True) if out[name].requires_grad]
        pulled = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return _spread(pulled, x[:5], needs)


def _unpack(plan: Plan, have: tuple[str, ...], tensors):
    """The arguments of `MomentsBackward` by name."""
    x, rest = Inputs(*tensors[:6]), tensors[6:]
    out = dict(zip(plan.outputs, rest, strict=False))
    best = rest[len(plan.outputs)] if "max_score" in plan.statistics else None
    return x, out, best, dict(zip(have, tensors[-len(have) :], strict=True))


def _spread(pulled, inputs, needs) -> tuple[Tensor | None, ...]:
    """One gradient per input slot, None where none is needed."""
    left = iter(pulled)
    return tuple(next(left) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))


def fold(size: int, in_dims, tensors) -> list[Tensor | None]:
    """A vmapped axis becomes part of the group axis, which comes first in every tensor."""
    wide = [_leading(size, t, axis) for t, axis in zip(tensors, in_dims, strict=True)]
    groups = max(t.shape[1] for t in wide[:2] if t is not None)
    # a table shared by all groups has one; the folded axis must still distinguish the mapped ones
    return [None if t is None else t.expand(size, groups, *t.shape[2:]).flatten(0, 1) for t in wide]


def unfold(size: int, tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _leading(size: int, tensor: Tensor | None, axis: int | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
