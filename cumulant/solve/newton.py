"""Newton's method with line search for the minimum of a convex function, sample by sample.

x⁺ = x − t H(x)⁺ ∇φ(x),     t the first of 1, ½, ¼, … with φ(x⁺) ≤ φ(x) − 10⁻⁴ t ∇φᵀH⁺∇φ

or, where φ is a difference of large numbers and rounding hides its descent, with φ(x⁺) ≈ φ(x) and |∇φ(x⁺)| ≤ ½|∇φ(x)|.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import everywhere, somewhere
from cumulant.solve.solution import Solution, Status

ARMIJO = 1e-4
HALVINGS = 50
NEARLY = 1e-6  # relative difference in φ below which ∇φ may decide


class Local(NamedTuple):
    """The function at a point: φ, ∇φ, the spectrum of ∇²φ and the full Newton step.

    ``slopes`` are the coordinates of ∇φ in the eigenvectors of ∇²φ.
    """

    x: Tensor  # (*samples, d)
    value: Tensor  # (*samples)
    gradient: Tensor  # (*samples, d)
    eigenvalues: Tensor  # (*samples, d) ascending
    slopes: Tensor  # (*samples, d)
    proposal: Tensor  # (*samples, d)


def newton(
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    hessian: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    tol: Tensor | float,
    max_steps: int = 100,
    reach: float = torch.inf,
    verdict: Callable[[Local], Tensor] | None = None,
) -> Solution:
    """Minimise a convex φ over x (*samples, d); the residual is |∇φ|.

    ``reach`` bounds how far one step may go: eigenvalues of H below |∇φ|/reach are raised to it, which keeps Newton's
    speed near the minimum and makes far, flat regions crossable.

    ``verdict`` is a stopping rule of the caller: it maps a `Local` to status codes, −1 for "go on", and is evaluated
    before the residual.

    >>> import torch
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> solution = newton(lambda x: (x.exp() - 2 * x).sum(-1), lambda x: x.exp() - 2,
    ...                   lambda x: torch.diag_embed(x.exp()), zero, tol=1e-12)
    >>> round(solution.value.item(), 12), solution.converged.item()
    (0.69314718056, True)
    """
    x = x0.detach()
    samples, device = x.shape[:-1], x.device
    status = torch.full(samples, int(Status.MAX_STEPS), dtype=torch.int8, device=device)
    steps = torch.zeros(samples, dtype=torch.int64, device=device)
    active = torch.ones(samples, dtype=torch.bool, device=device)
    trace = []
    with torch.no_grad():
        for step in range(max_steps + 1):
            local = _evaluate(value, gradient, hessian, x, reach)
            residual = torch.linalg.vector_norm(local.gradient, dim=-1)
            trace.append(torch.where(active, residual, trace[-1]) if trace else residual)
            code = torch.full_like(status, -1) if verdict is None else verdict(local).to(status.dtype)
            code = torch.where((code < 0) & (residual <= tol), int(Status.CONVERGED), code)
            code = torch.where((code < 0) & ~residual.isfinite(), int(Status.NONFINITE), code)
            code = torch.where((code < 0) & _flat(local, trace), int(Status.STALLED), code)
            status = torch.where(active & (code >= 0), code, status)
            active = active & (code < 0)
            if step == max_steps or not somewhere(active):
                break
            x, moved = _step(value, gradient, local, active)
            status = torch.where(active & ~moved, int(Status.STALLED), status)
            active = active & moved
            steps = steps + active
    return Solution(x, status.to(torch.int8), steps, trace[-1], torch.stack(trace))


def _evaluate(value, gradient, hessian, x: Tensor, reach: float) -> Local:
    slope = gradient(x)
    matrix = hessian(x)
    # a Hessian that is not finite counts as flat: no curvature, no step
    broken = ~matrix.isfinite().all(-1).all(-1)[..., None]
    matrix = torch.where(broken[..., None], torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), matrix)
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    floor = torch.finfo(x.dtype).eps * eigenvalues[..., -1:].clamp_min(torch.finfo(x.dtype).tiny)
    floor = torch.maximum(floor, torch.linalg.vector_norm(slope, dim=-1, keepdim=True) / reach)
    slopes = (vectors.mT @ slope[..., None])[..., 0]
    step = (vectors @ (slopes / eigenvalues.clamp_min(floor))[..., None])[..., 0]
    proposal = torch.where(broken, x, x - step)
    eigenvalues = torch.where(broken, 0, eigenvalues)
    return Local(x, value(x), slope, eigenvalues, slopes, proposal)


def _flat(local: Local, trace: list[Tensor]) -> Tensor:
    """Samples where φ can no longer tell a step from rounding and the residual has stopped falling too."""
    if len(trace) < 2:
        return torch.zeros_like(local.value, dtype=torch.bool)
    descent = (local.gradient * (local.x - local.proposal)).sum(-1)
    return (descent <= _rounding(local.value)) & (trace[-1] > 0.9 * trace[-2])


def _rounding(value: Tensor) -> Tensor:
    return 16 * torch.finfo(value.dtype).eps * (1 + value.abs())


def _step(value, gradient, local: Local, active: Tensor) -> tuple[Tensor, Tensor]:
    """The samples after the line search, and which of them moved."""
    step = local.proposal - local.x
    descent = -(local.gradient * step).sum(-1)
    noise, nearly = _rounding(local.value), local.value + NEARLY * (1 + local.value.abs())
    residual = torch.linalg.vector_norm(local.gradient, dim=-1)
    accepted, x = ~active, local.x
    length = torch.ones_like(local.value)
    for _ in range(HALVINGS):
        trial = local.x + length[..., None] * step
        reached = value(trial)
        fresh = (reached <= local.value - ARMIJO * length * descent + noise) & ~accepted
        unsure = (reached <= nearly) & ~accepted & ~fresh
        if somewhere(unsure):
            slope = gradient(torch.where(unsure[..., None], trial, local.x))
            fresh = fresh | (unsure & (torch.linalg.vector_norm(slope, dim=-1) <= residual / 2))
        x = torch.where(fresh[..., None], trial, x)
        accepted = accepted | fresh
        if everywhere(accepted):
            break
        length = length / 2
    return x, accepted & active
