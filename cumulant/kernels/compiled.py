"""The sweep as an opaque operator for torch.compile: the graph holds one node, not a thousand blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.evaluate import evaluate, gradients
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.stream_function import fold, unfold
from cumulant.kernels.streaming import empty_output
from cumulant.kernels.support import Band


def compiled_stream(x: Inputs, plan: Plan) -> dict[str, Tensor]:
    """What `stream` returns, through `torch.ops.cumulant.sweep`; differentiable once."""
    band = plan.band
    settings = (",".join(plan.outputs), band.causal, band.window, band.offset, band.period, plan.engine)
    return dict(zip(plan.outputs, sweep_operator(*x, *settings), strict=False))


def _plan(names: str, causal: bool, window: int | None, offset: int, period: int, engine: str) -> Plan:
    return Plan(frozenset(names.split(",")), Band(causal, window, offset, period), engine)


@torch.library.custom_op("cumulant::sweep", mutates_args=())
def sweep_operator(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None,
    per_atom: Tensor | None,
    per_pair: Tensor | None,
    mask: Tensor | None,
    names: str,
    causal: bool,
    window: int | None,
    offset: int,
    period: int,
    engine: str,
) -> list[Tensor]:
    x = Inputs(eta, atoms, values, per_atom, per_pair, mask)
    plan = _plan(names, causal, window, offset, period, engine)
    out, best = evaluate(x, plan)
    return out if best is None else [*out, best]


@sweep_operator.register_fake
def _(eta, atoms, values, per_atom, per_pair, mask, names, causal, window, offset, period, engine):
    x = Inputs(eta, atoms, values, per_atom, per_pair, mask)
    out = [empty_output(x, name) for name in names.split(",")]
    if "max_score" in names.split(","):
        out.append(eta.new_empty(eta.shape[:2], dtype=torch.int64))
    return out


@sweep_operator.register_vmap
def _(info, in_dims, *arguments):
    out = sweep_operator(*fold(info.batch_size, in_dims[:6], arguments[:6]), *arguments[6:])
    return [unfold(info.batch_size, t) for t in out], [0] * len(out)


@torch.library.custom_op("cumulant::pull_back", mutates_args=())
def pull_back_operator(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None,
    per_atom: Tensor | None,
    per_pair: Tensor | None,
    mask: Tensor | None,
    out: list[Tensor],
    grads: list[Tensor],
    names: str,
    causal: bool,
    window: int | None,
    offset: int,
    period: int,
    engine: str,
) -> list[Tensor]:
    """Gradients of those of the five inputs that are present, in order."""
    x = Inputs(eta, atoms, values, per_atom, per_pair, mask)
    plan = _plan(names, causal, window, offset, period, engine)
    known, grad = dict(zip(plan.outputs, out, strict=False)), dict(zip(plan.outputs, grads, strict=True))
    best = out[-1] if "max_score" in plan.statistics else None
    pulled = gradients(x, plan, known, best, grad, (True,) * 5)
    return [g for g in pulled if g is not None]


@pull_back_operator.register_fake
def _(eta, atoms, values, per_atom, per_pair, mask, out, grads, names, causal, window, offset, period, engine):
    return [torch.empty_like(t) for t in (eta, atoms, values, per_atom, per_pair) if t is not None]


@pull_back_operator.register_vmap
def _(info, in_dims, *arguments):
    inputs, (out, grads), settings = arguments[:6], arguments[6:8], arguments[8:]
    flat = [*inputs, *out, *grads]
    folded = fold(info.batch_size, [*in_dims[:6], *in_dims[6], *in_dims[7]], flat)
    split = 6 + len(out)
    slopes = pull_back_operator(*folded[:6], folded[6:split], folded[split:], *settings)
    return [unfold(info.batch_size, t) for t in slopes], [0] * len(slopes)


def _remember(ctx, inputs, output):
    ctx.tensors, ctx.settings = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output)


def _backward(ctx, grads):
    names = ctx.settings[0].split(",")
    out = list(ctx.saved_tensors)
    incoming = [torch.zeros_like(o) if g is None else g for o, g in zip(out[: len(names)], grads, strict=False)]
    pulled = iter(pull_back_operator(*ctx.tensors, out, incoming, *ctx.settings))
    return (*(None if t is None else next(pulled) for t in ctx.tensors[:5]), *(None,) * 7)


sweep_operator.register_autograd(_backward, setup_context=_remember)
