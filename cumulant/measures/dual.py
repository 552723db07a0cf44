"""The canonical link: η with ∇G(η) = μ, and the conjugate G*(μ), for any measure.

Both minimise the convex φ(η) = G(η) − ⟨η,μ⟩ by Newton's method, in float64, in units of the diameter of the support and
along the directions the support spans (so that the answer has minimum norm where η is not unique).

Where μ stands is decided by two tests, in this order (X-11):

    OUTSIDE    ⟨η,μ⟩ − G(η) exceeds the largest value G* takes on the hull (a proof), or μ leaves the affine hull
    BOUNDARY   |∇G(η) − μ| ≤ 1e-9 diameter and the smallest eigenvalue of ∇²G(η) on the span is ≤ 1e-9 diameter²

A residual test alone would call faces converged, an eigenvalue test alone a start far from μ. The undecided band: a
point within about 1e-9 diameters of a face, inside or outside, is called BOUNDARY.

Where G* has no finite bound on the hull (continuous laws on bounded sets, half-lines) nothing can be proved this way.
`Sphere`, `Box` and the classical laws decide in closed form; compositions of them call a point OUTSIDE if the mean
stays 1e-3 diameters away along a direction in which ∇²G is flat, and on their BOUNDARY `conjugate` is a lower bound.
"""

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
        found = _solve(exact, mu.detach(), hull, max_steps, torch.finfo(mean.dtype).eps)
    value = found.value
    if torch.is_grad_enabled():
        value = _attach(exact, mu, found, hull)
    like = mean.dtype
    return Solution(value.to(like), found.status, found.steps, found.residual.to(like), found.trace.to(like))


def conjugate(measure: Measure, mean: Tensor) -> Tensor:
    """`Measure.conjugate` from the solution of `natural`; its second derivative in μ is exact too."""
    exact, mu = measure.to(torch.float64), mean.double()
    found = measure.natural(mean)  # in the dtype of the mean, which says how far off a flat support is rounding
    outside = found.status == Status.OUTSIDE
    eta = torch.where(outside[..., None], 0, found.value.double())
    value = (eta * mu).sum(-1) - torch.where(outside, 0, exact.log_normalizer(eta))
    return torch.where(outside, torch.inf, value).to(mean.dtype)


def hull_from_fisher(measure: Measure) -> Hull:
    """Scale and directions from the covariance of h at η = 0."""
    like = measure._like()
    rows = measure.query_rows or 1
    zero = torch.zeros(rows, measure.dim, dtype=like.dtype, device=like.device)
    diameter, span = spread(measure.fisher(zero))
    return Hull(diameter, span, torch.full_like(diameter, torch.inf))


def spread(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """A length scale of a law and an orthonormal basis of its directions, from its covariance; zero columns pad."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    top = eigenvalues[..., -1:].clamp_min(0)
    kept = eigenvalues > RANK * top
    return 2 * eigenvalues.clamp_min(0).sum(-1).sqrt(), vectors * kept[..., None, :]


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
    found = newton(potential, gradient, hessian, origin, tol=tol, max_steps=max_steps, reach=REACH, verdict=verdict)
    return Solution(to_eta(found.value), found.status, found.steps, found.residual * unit, found.trace * unit)


def _attach(measure: Measure, mu: Tensor, found: Solution, hull: Hull) -> Tensor:
    """The solution with its implicit gradient: one Newton step that moves nothing but carries the derivative."""
    eta = found.value.detach()
    residual = mu - measure.mean(eta)
    if not residual.requires_grad:
        return found.value
    span = hull.span.detach()
    padding = torch.diag_embed((span.square().sum(-2) == 0).to(mu.dtype))
    matrix = span.mT @ measure.fisher(eta) @ span + padding
    usable = found.converged[..., None]
    matrix = torch.where(usable[..., None], matrix, torch.eye(span.shape[-1], dtype=mu.dtype, device=mu.device))
    step = torch.linalg.solve(matrix, (span.mT @ residual[..., None])[..., 0])
    step = torch.where(usable, (span @ step[..., None])[..., 0], 0)
    return found.value + step - step.detach()
