"""The gradient of a fixed point without unrolling it.

At x = f(x, θ):  dx = J dx + ∂_θ f dθ,  so for an incoming gradient v the chain rule needs g = (I − Jᵀ)⁻¹ v and passes
gᵀ∂_θ f on to θ. J is only touched through vector-Jacobian products, one sample at a time by construction of f.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from cumulant.checks import everywhere, sentence, somewhere
from cumulant.solve.anderson import Anderson
from cumulant.solve.driver import iterate

ADJOINTS = ("anderson", "cg", "cholesky", "none")


def attach_implicit_gradient(
    fn: Callable[[Tensor], Tensor], solution: Tensor, event_ndim: int, adjoint: str, tol: float
) -> Tensor:
    """``solution`` with the implicit gradient towards what ``fn`` closes over; unchanged if nothing requires grad."""
    anchor = solution.detach().requires_grad_()
    image = fn(anchor)
    if not _reaches_beyond(image, anchor):
        return solution
    attached = fn(solution.detach())

    def backward(v: Tensor) -> Tensor:
        def transposed(g: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(image, anchor, g, retain_graph=True, materialize_grads=True)
            return product

        samples = v.shape[: v.ndim - event_ndim]
        return _solve(transposed, v, samples.numel(), adjoint, tol)

    attached.register_hook(backward)
    # the value stays the solver's; only the gradient comes from the attached evaluation
    return solution.detach() + (attached - attached.detach()).nan_to_num(0.0)


def _reaches_beyond(image: Tensor, anchor: Tensor) -> bool:
    """Whether the graph of ``image`` ends in a leaf other than ``anchor``."""
    pending, seen = [image.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not anchor:
            return True
        pending.extend(parent for parent, _ in node.next_functions)
    return False


def _solve(transposed: Callable[[Tensor], Tensor], v: Tensor, count: int, adjoint: str, tol: float) -> Tensor:
    if adjoint == "cg":
        return _conjugate_gradient(transposed, v, count, tol)
    if adjoint == "cholesky":
        return _cholesky(transposed, v, count)
    # the equation is linear: solved for unit vectors, its tolerance does not depend on the scale of the loss
    target = v.reshape(count, -1)
    size = torch.linalg.vector_norm(target, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    unit = target / size
    solution = iterate(
        lambda g: unit + transposed(g.reshape(v.shape)).reshape(count, -1),
        unit,
        Anderson(),
        max_steps=200,
        tol=tol,
        event_ndim=1,
    )
    # rounding may keep a residual just above the tolerance: warn of what is wrong, not of what could be better
    _warn_unsolved(solution.residual > tol**0.5 * (1 + torch.linalg.vector_norm(solution.value, dim=1)))
    return (size * solution.value).reshape(v.shape)


def _warn_unsolved(lost: Tensor) -> None:
    """Warn of samples whose gradient is wrong."""
    if not everywhere(~lost):
        got = f"none for {int(lost.sum())} of {len(lost)} samples"
        advice = "Their gradient is wrong: check that they converged, and that the map contracts there."
        words = sentence("fixed_point.backward", "a solution of (I − Jᵀ) g = v", got, advice)
        warnings.warn(words, RuntimeWarning, stacklevel=2)


def _conjugate_gradient(transposed: Callable[[Tensor], Tensor], v: Tensor, count: int, tol: float) -> Tensor:
    """(I − J) g = v for symmetric J, all samples at once, each with its own step lengths."""
    target = v.reshape(count, -1)
    g, residual = torch.zeros_like(target), target.clone()
    direction = residual.clone()
    power = residual.square().sum(1, keepdim=True)
    goal = tol**2 * power
    for _ in range(2 * target.shape[1] + 10):
        active = power > goal
        if not somewhere(active):
            break
        image = direction - transposed(direction.reshape(v.shape)).reshape(count, -1)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where(active & (curvature > 0), power / curvature, 0)
        g = g + length * direction
        residual = residual - length * image
        fresh = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(active, fresh / power, 0) * direction
        power = torch.where(active, fresh, power)
    _warn_unsolved((power > tol * target.square().sum(1, keepdim=True))[:, 0])
    return g.reshape(v.shape)


def _cholesky(transposed: Callable[[Tensor], Tensor], v: Tensor, count: int) -> Tensor:
    """(I − J) g = v for symmetric J by its matrix: one product per feature, then one factorisation."""
    target = v.reshape(count, -1)
    features = target.shape[1]
    eye = torch.eye(features, dtype=v.dtype, device=v.device)
    columns = [transposed(e.expand(count, -1).reshape(v.shape)).reshape(count, -1) for e in eye]
    matrix = eye - torch.stack(columns, dim=-1)
    factor, failed = torch.linalg.cholesky_ex((matrix + matrix.mT) / 2)
    g = torch.cholesky_solve(target[..., None], factor)[..., 0]
    _warn_unsolved((failed != 0) & target.any(1))
    return torch.where(failed[:, None] == 0, g, 0).reshape(v.shape)  # 0 where I − J is not positive definite
