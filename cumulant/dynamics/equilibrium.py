"""Fixed points of a layer with fixed keys on a sphere (§3).

    z = r (z + γ ∇G(sz)) / |z + γ ∇G(sz)|

One step is ascent on a convex function followed by a projection, so that G(sz) never decreases. The other fixed points
of the theory have their own solvers: z = ∇G(βz) is `hopfield.retrieve`, z = b − γ∇G(z) is `residual.prox`, ∇G(z) = 0 is
`Measure.natural` at mean 0, and any other map goes to `solve.fixed_point`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_finite, sentence
from cumulant.dynamics.renormalize import SphereNorm
from cumulant.measures import Measure
from cumulant.solve import Solution, fixed_point
from cumulant.typing import PerQuery, Queries


class Equilibrium(NamedTuple):
    """A fixed point and its stability, per query.

    solution     value (*batch, q, d), with status, steps and residual (*batch, q)
    contraction  (*batch, q) norm bound of the Jacobian of the iterated map at the solution; below 1 the solution
                 attracts its neighbourhood
    """

    solution: Solution
    contraction: PerQuery


def sphere_equilibrium(
    measure: Measure,
    start: Queries,
    *,
    radius: float = 1.0,
    scale: float | Tensor = 1.0,
    step: float = 1.0,
    max_steps: int = 2000,
    tol: float | None = None,
) -> Equilibrium:
    """z = r (z + γ∇G(sz))/|z + γ∇G(sz)|: a critical point of G on the sphere |z| = r, by fixed-point iteration.

        G(s z⁺) ≥ G(s z),        P_z ∇G(sz) = 0 at the end,        contraction = (r/|y|)(1 + γ s λ_max(P ∇²G P))

    start (*batch, q, d) or (d,) is projected on the sphere first. A solution exists because G has a maximum there; it
    need not be unique, and the start decides which one is reached. A start with z + γ∇G(sz) = 0 is critical and stays.
    Differentiable in scale and in the parameters of the measure, in memory that does not depend on the number of steps.

    >>> import torch
    >>> from cumulant import Empirical
    >>> h = Empirical(torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    >>> result = sphere_equilibrium(h, torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
    >>> result.solution.value
    tensor([[0.9982, 0.0598],
            [0.0598, 0.9982]], dtype=torch.float64)
    """
    initial, norm = _query_rows(measure, start), SphereNorm(radius)
    s = torch.as_tensor(scale, dtype=initial.dtype, device=initial.device)
    if s.ndim or not holds((s > 0) & s.isfinite()):
        raise ValueError(sentence("sphere_equilibrium.scale", "one positive number", scale, "It scales the logits."))
    if not 0 < step < torch.inf:
        raise ValueError(sentence("sphere_equilibrium.step", "a positive number", step, "It multiplies the mean."))

    def ascend(z: Tensor) -> Tensor:
        y = z + step * measure.mean(s * z)
        return torch.where((y == 0).all(-1, keepdim=True), z, y)

    solution = fixed_point(lambda z: norm(ascend(z)), norm(initial), max_steps=max_steps, tol=tol)
    with torch.no_grad():
        z = solution.value
        normal = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        tangent = torch.eye(measure.dim, dtype=z.dtype, device=z.device) - normal[..., :, None] * normal[..., None, :]
        curvature = torch.linalg.eigvalsh(tangent @ measure.fisher(s * z) @ tangent)[..., -1].clamp_min(0)
        contraction = norm.operator_norm(ascend(z)) * (1 + step * s * curvature)
    if start.ndim > 1:
        return Equilibrium(solution, contraction)
    axis = contraction.ndim - 1
    return Equilibrium(solution.select(axis, 0), contraction.select(axis, 0))


def _query_rows(measure: Measure, points: Tensor) -> Tensor:
    """Points as (*batch, q, d) with the batch of the measure."""
    measure.check_queries(points, "sphere_equilibrium")
    require_finite("sphere_equilibrium.start", points)
    rows = points[None] if points.ndim == 1 else points
    own = torch.Size([*measure.batch_shape, measure.query_rows or 1, measure.dim])
    return rows.expand(broadcast("sphere_equilibrium.start", own, rows.shape))
