"""The loop of all fixed-point methods: freezing finished samples, the best iterate, the trace, the status.

A method is a `Stepper` on tensors (samples, features) that only proposes the next point; its file reads as its formula.

    init(x) → state,     step(state, x, fx) → (state, proposal)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cumulant.checks import sentence, shape, somewhere
from cumulant.solve.solution import Solution, Status
from cumulant.typing import Stepper


def iterate(
    fn: Callable[[Tensor], Tensor], x0: Tensor, solver: Stepper, *, max_steps: int, tol: float, event_ndim: int
) -> Solution:
    """Solve x = fn(x) without gradients; the contract is `fixed_point`'s."""
    samples = x0.shape[: x0.ndim - event_ndim]
    count = samples.numel()
    x = x0.reshape(count, x0.shape[len(samples) :].numel())
    state = solver.init(x)
    best, best_residual = x.clone(), torch.full((count,), torch.inf, dtype=x.dtype, device=x.device)
    status = torch.full((count,), int(Status.MAX_STEPS), dtype=torch.int8, device=x.device)
    steps = torch.zeros(count, dtype=torch.int64, device=x.device)
    active = torch.ones(count, dtype=torch.bool, device=x.device)
    trace = []
    for step in range(max_steps + 1):
        fx = _evaluate(fn, x.reshape(x0.shape)).reshape(x.shape)
        residual = torch.linalg.vector_norm(fx - x, dim=1)
        finite = residual.isfinite()
        better = active & finite & (residual < best_residual)
        best = torch.where(better[:, None], x, best)
        best_residual = torch.where(better, residual, best_residual)
        trace.append(torch.where(active, residual, trace[-1]) if trace else residual)
        done = active & finite & (residual <= tol * (1 + torch.linalg.vector_norm(fx, dim=1)))
        # a finished sample returns the point that passed the test, at its own residual
        best = torch.where(done[:, None], x, best)
        best_residual = torch.where(done, residual, best_residual)
        status = torch.where(done, int(Status.CONVERGED), status)
        status = torch.where(active & ~finite, int(Status.NONFINITE), status)
        active = active & finite & ~done
        if step == max_steps or not somewhere(active):
            break
        state, proposal = solver.step(state, x, fx)
        x = torch.where(active[:, None], proposal, best)
        steps = steps + active
    return Solution(
        best.reshape(x0.shape),
        status.to(torch.int8).reshape(samples),
        steps.reshape(samples),
        best_residual.reshape(samples),
        torch.stack(trace).reshape(len(trace), *samples),
    )


def _evaluate(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    fx = fn(x)
    if fx.shape != x.shape or fx.dtype != x.dtype:
        expected, got = f"a map that keeps shape {shape(x)} and {x.dtype}", f"{shape(fx)} and {fx.dtype}"
        raise ValueError(sentence("fixed_point.fn", expected, got, "Return one new value for every entry of x."))
    return fx
