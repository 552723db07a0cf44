"""The dual side of a measure: η = ∇G*(μ), the inverse of the mean map, and the conjugate G*(μ), by Newton's method.

Both minimise the convex φ(η) = G(η) − ⟨η,μ⟩ in float64, in units of the diameter of the support and along the
directions that the support spans, so that η has minimum norm where it is not unique.

The status of μ follows from two tests, in this order (X-11):

    OUTSIDE    ⟨η,μ⟩ − G(η) exceeds the largest value G* takes on the hull (a proof), or μ leaves the affine hull
    BOUNDARY   |∇G(η) − μ| ≤ 1e-9 diameter and the smallest eigenvalue of ∇²G(η) on the span is ≤ 1e-9 diameter²

A residual test alone would call points on a face converged; an eigenvalue test alone would call a start far from μ a
boundary point. A point within about 1e-9 diameters of a face, inside or outside, is BOUNDARY.

Where G* has no finite bound on the hull (continuous laws on bounded sets, half-lines) there is no such proof. `Sphere`,
`Box` and the classical laws decide in closed form; for compositions of them a point is OUTSIDE if the mean stays 1e-3
diameters away along a direction in which ∇²G is flat, and on their BOUNDARY `conjugate` is a lower bound.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cumulant.measures.base import Hull, Measure
from cumulant.solve import Solution, Status, newton
from cumulant.solve.newton import Local

FLAT = 1e-9  # eigenvalue of ∇²G, in diameters², below which η counts as infinite
STUCK = 1e-3  # distance to the mean, in diameters along a flat direction, that counts as outside without a proof
REACH = 1e5  # longest Newton step, in inverse diameters
RANK = 1e-13  # eigenvalue of the support's covariance, relative to the largest, below which a direction is not spanned


def natural(measure: Measure, mean: Tensor, max_steps: int) -> Solution:
    """`Measure.natural` by Newton's method; mean (*batch, q, d)."""
    exact, mu = measure.to(torch.float64), mean.double()
    hull = exact.hull()
    with torch.no_grad():
        solution = _solve(exact, mu.detach(), hull, max_steps, torch.finfo(mean.dtype).eps)
    value = solution.value
    if torch.is_grad_enabled():
        value = _with_gradient(exact, mu, solution, hull)
    dtype = mean.dtype
    residual, trace = solution.residual.to(dtype), solution.trace.to(dtype)
    return replace(solution, value=value.to(dtype), residual=residual, trace=trace)


def conjugate(measure: Measure, mean: Tensor) -> Tensor:
    """`Measure.conjugate` from the solution of `natural`; its second derivative in μ is exact too."""
    exact, mu = measure.to(torch.float64), mean.double()
    solution = measure.natural(mean)  # in the dtype of the mean, whose precision decides what is off a flat support
    outside = solution.status == Status.OUTSIDE
    eta = torch.where(outside[..., None], 0, solution.value.double())
    value = (eta * mu).sum(-1) - torch.where(outside, 0, exact.log_normalizer(eta))
    return torch.where(outside, torch.inf, value).to(mean.dtype)


def hull_from_fisher(measure: Measure) -> Hull:
    """Scale and directions from the covariance of h at η = 0."""
    like = measure.empty_tensor()
    rows = measure.query_rows or 1
    zero = torch.zeros(rows, measure.dim, dtype=like.dtype, device=like.device)
    diameter, span = scale_and_span(measure.fisher(zero))
    return Hull(diameter, span, torch.full_like(diameter, torch.inf))


def scale_and_span(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Twice the standard deviation of a law, and an orthonormal basis of its directions padded by zero columns."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    top = eigenvalues[..., -1:].clamp_min(0)
    spanned = eigenvalues > RANK * top
    return 2 * eigenvalues.clamp_min(0).sum(-1).sqrt(), vectors * spanned[..., None, :]


def _solve(measure: Measure, mu: Tensor, hull: Hull, max_steps: int, precision: float) -> Solution:
    origin = torch.zeros_like(mu)
    log_mass = measure.log_normalizer(origin)
    start = torch.where((log_mass == -torch.inf)[..., None], mu, measure.mean(origin))
    diameter = hull.diameter.expand(mu.shape[:-1])
    unit = torch.where(diameter > 0, diameter, 1)
    span = hull.span / unit[..., None, None]  # η = span · b, so that b, ∇φ and ∇²φ have no unit
    padding = torch.diag_embed((hull.span.square().sum(-2) == 0).to(mu.dtype))

    def to_eta(b: Tensor) -> Tensor:
        return (span @ b[..., None])[..., 0]

    def potential(b: Tensor) -> Tensor:
        eta = to_eta(b)
        return measure.log_normalizer(eta) - (eta * mu).sum(-1)

    def gradient(b: Tensor) -> Tensor:
        return (span.mT @ (measure.mean(to_eta(b)) - mu)[..., None])[..., 0]

    def hessian(b: Tensor) -> Tensor:
        return span.mT @ measure.fisher(to_eta(b)) @ span + padding

    eps = torch.finfo(mu.dtype).eps
    size = torch.linalg.vector_norm(mu, dim=-1) + torch.linalg.vector_norm(start, dim=-1)
    off = mu - start
    off = off - (hull.span @ (hull.span.mT @ off[..., None]))[..., 0]
    unreachable = torch.linalg.vector_norm(off, dim=-1) > FLAT * diameter + max(1e4 * eps, 8 * precision) * size
    unreachable = unreachable | (log_mass == -torch.inf)
    unprovable = hull.bound.isinf()
    bound = hull.bound + 1e-8 * (1 + hull.bound.abs())

    def verdict(local: Local) -> Tensor:
        flat = local.eigenvalues[..., 0] <= FLAT
        beyond = torch.where(flat, potential(local.proposal), local.value)
        outside = unreachable | (-local.value > bound) | (-beyond > bound)
        stuck = ((local.eigenvalues <= FLAT) & (local.slopes.abs() > STUCK)).any(-1)
        outside = outside | (unprovable & stuck)
        still = unprovable | (torch.linalg.vector_norm(local.gradient, dim=-1) <= FLAT)
        code = torch.where(flat & still, int(Status.BOUNDARY), -1)
        return torch.where(outside, int(Status.OUTSIDE), code)

    tol = 512 * eps * (1 + size / unit)
    solution = newton(potential, gradient, hessian, origin, tol=tol, max_steps=max_steps, reach=REACH, verdict=verdict)
    eta, residual, trace = to_eta(solution.value), solution.residual * unit, solution.trace * unit
    return replace(solution, value=eta, residual=residual, trace=trace)


def _with_gradient(measure: Measure, mu: Tensor, solution: Solution, hull: Hull) -> Tensor:
    """The solution plus one Newton step of value 0 that carries the implicit gradient."""
    eta = solution.value.detach()
    residual = mu - measure.mean(eta)
    if not residual.requires_grad:
        return solution.value
    span = hull.span.detach()
    padding = torch.diag_embed((span.square().sum(-2) == 0).to(mu.dtype))
    matrix = span.mT @ measure.fisher(eta) @ span + padding
    usable = solution.converged[..., None]
    matrix = torch.where(usable[..., None], matrix, torch.eye(span.shape[-1], dtype=mu.dtype, device=mu.device))
    step = torch.linalg.solve(matrix, (span.mT @ residual[..., None])[..., 0])
    step = torch.where(usable, (span @ step[..., None])[..., 0], 0)
    return solution.value + step - step.detach()
