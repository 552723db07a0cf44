"""Monotone operators: the gradient of G never turns back, and equations with it can be split (S3-R7).

    ⟨∇G(a) − ∇G(b), a − b⟩ ≥ |∇G(a) − ∇G(b)|² / L,      L = sup λ_max(∇²G)              Baillon–Haddad

Both methods solve 0 ∈ A z + B z for monotone A, B through resolvents J_A = (I + tA)⁻¹; that of ∇G is `residual.prox`:

    forward–backward     z⁺ = J_A(z − t B z)                              B single-valued, 0 < t < 2/L
    Peaceman–Rachford    w⁺ = R_A R_B w,    z = J_B w,    R = 2J − I      A or B strongly monotone and Lipschitz
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, sentence
from cumulant.hopfield import contraction_bound
from cumulant.measures import Box, Empirical, Gaussian, Measure, Sphere
from cumulant.measures.compose import Convolution, Product, Sum
from cumulant.measures.independent import Independent
from cumulant.measures.transform import Image, Scaled, Shifted, Tilted
from cumulant.residual import prox
from cumulant.solve import Damped, Picard, Solution, fixed_point
from cumulant.typing import PerQuery, Queries

EXACT = 4096  # atoms up to which all pairs are compared
LARGE = 1 << 22  # numbers that may be held for the atoms of every query row


def forward_backward(
    resolvent: Callable[[Tensor], Tensor],
    operator: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    step: float | Tensor,
    max_steps: int = 2000,
    tol: float | None = None,
    adjoint: str = "anderson",
) -> Solution:
    """Solve 0 ∈ A z + B z by z⁺ = J_A(z − t B z): an explicit step along B, an implicit one along A.

    Converges where B is 1/L-cocoercive and 0 < t < 2/L; by the factor 1/(1 + t m) a step if A is m-strongly monotone.

    resolvent  J_A = (I + tA)⁻¹ for the same t
    operator   B
    start      (*samples, d)
    step       t, a number or one per sample, broadcastable to (*samples)
    adjoint    as in `fixed_point`; the residual of the answer is |z⁺ − z|

    >>> import torch
    >>> pull = lambda y: (y + 2.0) / 2                         # A z = z − 2, t = 1
    >>> found = forward_backward(pull, torch.sigmoid, torch.zeros(1, dtype=torch.float64), step=1.0)
    >>> round(found.value.item(), 8)                           # z + sigmoid(z) = 2
    1.22675064
    """
    require_float("forward_backward.start", start)
    length = torch.as_tensor(step, dtype=start.dtype, device=start.device)
    if not holds((length > 0) & length.isfinite()):
        raise ValueError(sentence("forward_backward.step", "positive finite numbers", step, "Stay below 2/L."))

    def update(z: Tensor) -> Tensor:
        return resolvent(z - length[..., None] * operator(z))

    return fixed_point(update, start, max_steps=max_steps, tol=tol, adjoint=adjoint)


def peaceman_rachford(
    resolvent_a: Callable[[Tensor], Tensor],
    resolvent_b: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    gate: float = 1.0,
    max_steps: int = 2000,
    tol: float | None = None,
    adjoint: str = "anderson",
) -> Solution:
    """Solve 0 ∈ A z + B z by w⁺ = R_A R_B w with reflections R = 2J − I; the answer is z = J_B w.

    Converges where A or B is strongly monotone and Lipschitz; for A z = z − b by the factor |1 − t|/(1 + t) a step.
    A gate of ½, w⁺ = ½w + ½R_A R_B w, is Douglas–Rachford: any monotone A and B with a solution.

    resolvent_a, resolvent_b  J_A and J_B, both for one t > 0
    start                     w (*samples, d)
    adjoint                   as in `fixed_point`; the residual of the answer is |w⁺ − w|

    >>> import torch
    >>> pull, shrink = lambda y: (y + 1.5) / 1.5, lambda y: y / 2     # A z = z − 3, B z = 2z, t = ½
    >>> peaceman_rachford(pull, shrink, torch.zeros(1, dtype=torch.float64)).value
    tensor([1.], dtype=torch.float64)
    """

    def update(w: Tensor) -> Tensor:
        reflected = 2 * resolvent_b(w) - w
        return 2 * resolvent_a(reflected) - reflected

    solver = Picard() if gate == 1 else Damped(gate)
    found = fixed_point(update, start, solver=solver, max_steps=max_steps, tol=tol, adjoint=adjoint)
    return Solution(resolvent_b(found.value), found.status, found.steps, found.residual, found.trace)


class _Split(NamedTuple):
    """The solution, its residual in units of the equation z = b − γ∇G(z), and the factor of one step (*batch, q)."""

    solution: Solution
    contraction: PerQuery


def _descend_forward_backward(
    measure: Measure, b: Tensor, gamma: float, slope: Tensor, stride: float | None, max_steps: int, tol: float
) -> _Split:
    """z = b − γ∇G(z) with A z = z − b and B = γ∇G, of Lipschitz constant ``slope`` (*batch, q)."""
    where, limit = "descent_equilibrium.stride", 2 / slope
    if not holds(slope < torch.inf):
        expected, got = "a measure with a known Lipschitz constant", f"{type(measure).__name__}, which has none"
        raise ValueError(sentence("descent_equilibrium.method", expected, got, 'Use method="newton".'))
    if stride is None:
        length = (0.95 * limit).clamp_max(1 / torch.finfo(b.dtype).eps)  # all atoms in one place: b − γ∇G at once
    elif stride > 0 and holds(stride < limit):
        length = torch.full_like(slope, stride)
    else:
        raise ValueError(sentence(where, f"0 < t < 2/(γL) = {limit.min().item():.4g}", stride, "None chooses one."))
    t = length[..., None]
    found = forward_backward(
        lambda y: (y + t * b) / (1 + t),
        lambda z: gamma * measure.mean(z),
        b.detach(),
        step=length,
        max_steps=max_steps,
        tol=tol,
        adjoint="cg",
    )
    return _Split(_rescaled(found, (1 + length) / length), 1 / (1 + length))


def _descend_peaceman_rachford(
    measure: Measure, b: Tensor, gamma: float, slope: Tensor, stride: float | None, max_steps: int, tol: float
) -> _Split:
    """z = b − γ∇G(z) with A z = z − b and B = γ∇G: J_A y = (y + tb)/(1 + t), J_B = prox_{tγG}."""
    t = 0.5 if stride is None else stride
    if not 0 < t < torch.inf:
        raise ValueError(sentence("descent_equilibrium.stride", "a positive number", stride, "None takes ½."))
    found = peaceman_rachford(
        lambda y: (y + t * b) / (1 + t),
        lambda w: prox(measure, w, step=t * gamma).value,
        b.detach(),
        max_steps=max_steps,
        tol=tol,
    )
    return _Split(_rescaled(found, (1 + t) / (2 * t)), torch.full_like(slope, abs(1 - t) / (1 + t)))


SPLITTINGS = {"forward-backward": _descend_forward_backward, "peaceman-rachford": _descend_peaceman_rachford}


def _rescaled(found: Solution, factor: float | Tensor) -> Solution:
    return Solution(found.value, found.status, found.steps, found.residual * factor, found.trace * factor)


def cocoercivity(measure: Measure, a: Queries, b: Queries) -> PerQuery:
    """⟨∇G(a) − ∇G(b), a − b⟩ − |∇G(a) − ∇G(b)|²/L: what is left of the inequality; negative only by rounding.

    (*batch, q, d) twice → (*batch, q). With L from `lipschitz_bound`; where that is infinite, plain monotonicity.

    >>> import torch
    >>> h = Empirical(torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> round(cocoercivity(h, one, 0 * one).item(), 6)                     # t − t², t = tanh 1
    0.181568
    """
    gap = measure.mean(a) - measure.mean(b)
    square = gap.square().sum(-1)
    bound = lipschitz_per_query(measure, square.shape).to(gap)
    return (gap * (a - b)).sum(-1) - torch.where(bound > 0, square / torch.where(bound > 0, bound, 1), 0)


def lipschitz_bound(measure: Measure) -> PerQuery:
    """L with |∇G(a) − ∇G(b)| ≤ L |a − b| for all a, b; +inf where none is known.

    | measure          | L                                                                                      |
    |------------------|----------------------------------------------------------------------------------------|
    | `Empirical`      | (diam/2)² of the atoms of positive weight; beyond 4096 atoms max|x − x̄|², which is looser |
    | `Gaussian`       | λ_max(Σ), exact                                                                        |
    | `Sphere`, `Box`  | r²/d and max (high − low)²/12, exact                                                   |
    | c h, shift, tilt | that of h                                                                              |
    | A @ h            | ‖A‖² L                                                                                 |
    | convolve         | the sum; product, independent: the largest                                             |
    | h + g            | of the union, if all parts are `Empirical`                                             |

    Returns (*batch), or (*batch, q) where each query row has its own measure; no gradient.

    >>> import torch
    >>> lipschitz_bound(Empirical(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5]])))
    tensor(1.)
    """
    with torch.no_grad():
        bound = _bound(measure)
    rows = measure.query_rows
    return bound.expand(*measure.batch_shape, 1)[..., 0] if rows is None else bound.expand(*measure.batch_shape, rows)


def lipschitz_per_query(measure: Measure, samples: torch.Size) -> PerQuery:
    """`lipschitz_bound` for every query of (*batch, q), or of (*batch) where a lone query lost its axis."""
    bound = lipschitz_bound(measure)
    axis = len(samples) > len(measure.batch_shape)
    if measure.query_rows is None:
        return (bound[..., None] if axis else bound).expand(samples)
    return (bound if axis else bound[..., 0]).expand(samples)


def _bound(measure: Measure) -> Tensor:
    """L, broadcastable to (*batch, q | 1)."""
    like = measure.empty_tensor()
    match measure:
        case Empirical():
            return _of_atoms(measure.atoms, _present(measure))
        case Gaussian():
            return torch.linalg.eigvalsh(measure.covariance)[..., -1:].clamp_min(0)
        case Sphere():
            return (
                torch.as_tensor(measure.radius, dtype=like.dtype, device=like.device)[..., None].square() / measure.dim
            )
        case Box():
            return ((measure.high - measure.low).square() / 12).amax(-1, keepdim=True)
        case Scaled() | Shifted() | Tilted():
            return _bound(measure.base)
        case Image():
            return torch.linalg.matrix_norm(measure.matrix, ord=2)[..., None].square() * _bound(measure.base)
        case Independent():
            return _bound(measure.base).expand(*measure.base.batch_shape, -1).amax(-2)
        case Convolution():
            return reduce(torch.add, map(_bound, measure.parts))
        case Product():
            return reduce(torch.maximum, map(_bound, measure.parts))
        case Sum() if all(isinstance(part, Empirical) for part in measure.parts):
            return _of_union(measure)
    return like.new_full((1,), torch.inf)


def _present(measure: Empirical) -> Tensor | None:
    """Which atoms have weight (*batch, q | 1, n); None where all have."""
    w = measure.log_weights
    if w is None or holds(w > -torch.inf):
        return None
    rows = w if measure.query_rows is not None else w[..., None, :]
    return (rows > -torch.inf).expand(*measure.batch_shape, -1, -1)


def _of_atoms(atoms: Tensor, present: Tensor | None) -> Tensor:
    if atoms.shape[-2] == 0:
        return atoms.new_zeros(*atoms.shape[:-2], 1)
    small = atoms.shape[-2] <= EXACT
    if present is None:
        return contraction_bound(atoms, method="diameter" if small else "centre")[..., None]
    if small and present.numel() * atoms.shape[-1] <= LARGE:
        # an absent atom goes where a present one is, and adds no distance
        first = present.to(torch.int8).argmax(-1, keepdim=True)[..., None]  # (*batch, q | 1, 1, 1)
        rows = atoms[..., None, :, :].expand(*present.shape, -1)
        stand_in = torch.take_along_dim(rows, first, dim=-2)
        return contraction_bound(torch.where(present[..., None], rows, stand_in))
    away = (atoms - atoms.mean(-2, keepdim=True)).square().sum(-1)
    return torch.where(present, away[..., None, :], 0).amax(-1)


def _of_union(measure: Sum) -> Tensor:
    parts = [part for part in measure.parts if isinstance(part, Empirical)]
    lead, rows = measure.batch_shape, measure.query_rows or 1
    atoms = [part.atoms.expand(*lead, *part.atoms.shape[-2:]) for part in parts]
    shown = [_present(part) for part in parts]
    full = [
        torch.ones(*lead, rows, a.shape[-2], dtype=torch.bool, device=a.device)
        if p is None
        else p.expand(*lead, rows, -1)
        for a, p in zip(atoms, shown, strict=True)
    ]
    return _of_atoms(torch.cat(atoms, -2), None if all(p is None for p in shown) else torch.cat(full, -1))
