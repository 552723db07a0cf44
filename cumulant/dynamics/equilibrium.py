"""Where a layer, iterated, comes to rest: fixed points with what is known about them (S0-C4b, S3-R6, S3-R7).

| equation                       | function                     | exists                        | no other, if         |
|--------------------------------|------------------------------|-------------------------------|----------------------|
| z = (1−g) z + g ∇G(βz)         | `hopfield_equilibrium`       | Brouwer on the hull of keys   | β (diam/2)² < 1      |
| z = b − γ ∇G(z)                | `descent_equilibrium`        | I + γ∇G is onto               | always               |
| z = b + γ ∇G(z)                | `ascent_equilibrium`         | γL < 1, or bounded support    | γL < 1               |
| z = z ± γ ∇G(z)                | `zero_mean_point`            | 0 inside the hull             | it spans R^d         |
| z = RN(z + γ ∇G(sz))           | `sphere_equilibrium`         | maximum of G on a sphere      | several possible     |
| x_i = RN(x_i + γ Σ_j a_ij x_j) | `self_attention_equilibrium` | the energy never falls (X-4)  | one cluster anywhere |
| the same, j ≤ i                | `causal_equilibrium`         | token by token, left to right | token 1 is its own   |

RN is the projection on a sphere (see `on_sphere`), L = sup λ_max(∇²G) as `lipschitz_bound` has it. Gradients are those
of the fixed point itself, in memory that does not depend on the number of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import broadcast, sentence
from cumulant.dynamics.equilibrium_record import (
    Equilibrium,
    at_once,
    banach,
    counted,
    drop_query,
    number,
    rows,
    where_zero_lies,
)
from cumulant.dynamics.on_sphere import (
    causal_equilibrium,
    self_attention_equilibrium,
    sphere_equilibrium,
    tangential_residual,
)
from cumulant.dynamics.splitting import SPLITTINGS, lipschitz_bound, lipschitz_per_query
from cumulant.hopfield import retrieve
from cumulant.measures import Box, Empirical, Measure, Sphere
from cumulant.residual import prox
from cumulant.solve import Solution, fixed_point
from cumulant.typing import Queries, Stepper

__all__ = [
    "METHODS",
    "Equilibrium",
    "ascent_equilibrium",
    "causal_equilibrium",
    "descent_equilibrium",
    "hopfield_equilibrium",
    "self_attention_equilibrium",
    "sphere_equilibrium",
    "tangential_residual",
    "zero_mean_point",
]

METHODS = ("newton", *SPLITTINGS)


def hopfield_equilibrium(
    keys: Tensor,
    start: Queries,
    *,
    beta: float | Tensor = 1.0,
    gate: float = 1.0,
    log_weights: Tensor | None = None,
    max_steps: int = 1000,
    tol: float | None = None,
) -> Equilibrium:
    """z = (1 − g) z + g ∇G(βz) by `hopfield.retrieve`, whose arguments these are; every gate 0 < g < 2 has the same z.

        |∇G(βa) − ∇G(βb)| ≤ λ |a − b|,   λ = β (diam/2)²,      contraction = max(|1 − g|, |1 − g + gλ|),  < 1 iff λ < 1

    keys (*batch, n, d), start (*batch, q, d) or (d,). The trace has the last residual only: retrieval keeps energies.
    Differentiable in keys, beta and log_weights. Without keys the fixed point is 0.

    >>> import torch
    >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> found = hopfield_equilibrium(keys, torch.zeros(2, dtype=torch.float64), beta=0.5)
    >>> found.solution.value, found.reason
    (tensor([0.0000, 0.3764], dtype=torch.float64), 'contraction 0.5 < 1: every start leads to the same point')
    """
    found = retrieve(start, keys, beta=beta, gate=gate, log_weights=log_weights, max_steps=max_steps, tol=tol)
    with torch.no_grad():
        bound = lipschitz_per_query(Empirical(keys, log_weights), found.status.shape)
        b = torch.as_tensor(beta, dtype=keys.dtype, device=keys.device)
        slope = (b[..., None] if b.ndim else b) * bound
        contraction = (1 - gate + gate * slope).abs().clamp_min(abs(1 - gate))
    solution = Solution(found.state, found.status, found.steps, found.residual, found.residual[None])
    exists = "by Brouwer: the update maps the hull of the keys into itself"
    unique, reason = banach(contraction, "one near each key that stands out, and averages between")
    answer = Equilibrium(solution, exists, contraction, unique, reason)
    alone = start.ndim == 1 and unique.ndim > keys.ndim - 2 and unique.shape[-1] == 1
    return drop_query(answer) if alone else answer


def descent_equilibrium(
    measure: Measure,
    b: Queries,
    *,
    step: float = 1.0,
    method: str = "newton",
    stride: float | None = None,
    max_steps: int = 2000,
    tol: float | None = None,
) -> Equilibrium:
    """z = b − γ ∇G(z): one solution for every step γ ≥ 0, because I + γ∇G is strongly monotone (S3-R7).

        "newton"             z = prox_{γG}(b) by `residual.prox`, a handful of steps whatever γ
        "forward-backward"   z⁺ = (z + t (b − γ∇G(z)))/(1 + t), contraction 1/(1 + t); t < 2/(γL), 1.9/(γL) if None
        "peaceman-rachford"  reflections in z − b and in γ∇G, contraction |1 − t|/(1 + t); t = ½ if None, and t = 1 is
                             the proximal map at once

    b (*batch, q, d) or (d,); ``stride`` is t. The residual is |z + γ∇G(z) − b| for all three. ``contraction`` is
    that of the iterated map; for Newton that of z ← b − γ∇G(z), which is γL and need not contract. ``tol`` is for the
    splittings, 1e-12 if None. Differentiable in b and in the parameters of the measure.

    >>> import torch
    >>> h, b = Empirical(torch.tensor([[1.0], [-1.0]], dtype=torch.float64)), torch.tensor([11.0], dtype=torch.float64)
    >>> found = [descent_equilibrium(h, b, step=10.0, method=m) for m in METHODS]            # z + 10 tanh z = 11
    >>> [(round(f.solution.value.item(), 9), f.solution.steps.item()) for f in found]
    [(1.676257749, 6), (1.676257749, 68), (1.676257749, 12)]
    """
    where = "descent_equilibrium"
    if method not in METHODS:
        raise ValueError(sentence(f"{where}.method", f"one of {', '.join(METHODS)}", repr(method), "Pick one."))
    target = rows(f"{where}.b", measure, b)
    gamma = number(f"{where}.step", step, least=0.0)
    slope = gamma * lipschitz_per_query(measure, target.shape[:-1]).to(target)
    slope = slope.nan_to_num(0.0, posinf=torch.inf)  # γ = 0 of an unbounded measure
    if gamma == 0:
        solution, contraction = at_once(target), slope
    elif method == "newton":
        solution, contraction = prox(measure, target, step=gamma, max_steps=max_steps), slope
    else:
        tol = max(1e-12, 32 * torch.finfo(target.dtype).eps) if tol is None else tol
        solution, contraction = SPLITTINGS[method](measure, target, gamma, slope, stride, max_steps, tol)
    unique = torch.ones_like(contraction, dtype=torch.bool)
    exists = "z + γ∇G(z) is continuous, strongly monotone and therefore onto"
    answer = Equilibrium(solution, exists, contraction, unique, "z + γ∇G(z) is strongly monotone, so one to one")
    return drop_query(answer) if b.ndim == 1 else answer


def ascent_equilibrium(
    measure: Measure,
    b: Queries,
    *,
    step: float,
    start: Queries | None = None,
    solver: Stepper | None = None,
    max_steps: int = 2000,
    tol: float | None = None,
) -> Equilibrium:
    """z = b + γ ∇G(z), iterated from ``start`` (b if None): a contraction if γL < 1, otherwise what was found.

    b (*batch, q, d) or (d,); γ = step ≥ 0; solver as in `fixed_point`. Beyond γL = 1 there may be several solutions,
    and ``start`` chooses; a `Gaussian` then sends the iteration to infinity. Differentiable in b and in the measure.

    >>> import torch
    >>> h = Empirical(torch.tensor([[1.0], [-1.0]], dtype=torch.float64))                             # z = γ tanh z
    >>> both = ascent_equilibrium(h, torch.zeros(2, 1).double(), step=2.0, start=torch.tensor([[1.0], [-1.0]]).double())
    >>> both.solution.value[:, 0], both.unique
    (tensor([ 1.9150, -1.9150], dtype=torch.float64), tensor([False, False]))
    """
    where = "ascent_equilibrium"
    offset = rows(f"{where}.b", measure, b)
    gamma = number(f"{where}.step", step, least=0.0)
    begin = offset if start is None else rows(f"{where}.start", measure, start)
    lead = broadcast(f"{where}.start", offset.shape, begin.shape)
    offset, begin = offset.expand(lead), begin.expand(lead)

    def update(z: Tensor) -> Tensor:
        return offset + gamma * measure.mean(z)

    solution = fixed_point(update, begin, solver=solver, max_steps=max_steps, tol=tol)
    contraction = (gamma * lipschitz_per_query(measure, lead[:-1]).to(offset)).nan_to_num(0.0, posinf=torch.inf)
    unique, reason = banach(contraction, "the solution found depends on the start")
    bounded = isinstance(measure, Empirical | Sphere | Box)
    otherwise = "by Brouwer: ∇G is bounded" if bounded else "not guaranteed: γL ≥ 1 and ∇G is not known to be bounded"
    exists = counted((unique, "by Banach: the map is a contraction"), (~unique, otherwise))
    answer = Equilibrium(solution, exists, contraction, unique, reason)
    return drop_query(answer) if b.ndim == 1 and (start is None or start.ndim == 1) else answer


def zero_mean_point(measure: Measure, *, sign: int = -1, max_steps: int = 100) -> Equilibrium:
    """The η of mean zero, fixed by every η ± γ ∇G(η): the minimum of G, where the entropy is largest (D7).

    Found by `Measure.natural`. Descent (sign −1) reaches it for γ < 2/L, there non-expansive; ascent (sign +1) is
    repelled, ``contraction`` 1 + L for a unit step. It exists iff 0 lies inside the hull of the support, otherwise the
    status is BOUNDARY or OUTSIDE. Unique where the support spans R^d, otherwise the shortest is returned.
    Returns (*batch, d), or (*batch, q, d) where each query row has its own measure.

    >>> import torch
    >>> found = zero_mean_point(Empirical(torch.tensor([[-1.0], [1.0], [3.0]], dtype=torch.float64)))
    >>> found.solution.value, found.exists
    (tensor([-0.4171], dtype=torch.float64), '0 lies inside the hull of the support')
    """
    if sign not in (1, -1):
        raise ValueError(sentence("zero_mean_point.sign", "-1 (descent) or +1 (ascent)", sign, "It only describes."))
    like, count = measure.empty_tensor(), measure.query_rows
    zero = torch.zeros(measure.dim, dtype=like.dtype, device=like.device)
    solution = measure.natural(zero if count is None else zero.expand(count, -1), max_steps=max_steps)
    found, full = solution.converged, (measure.hull().span.square().sum(-2) > 0.5).all(-1)  # (*batch), (*batch, q | 1)
    unique = found & (full[..., 0] if count is None else full)
    slope = lipschitz_bound(measure).to(solution.residual)
    contraction = torch.ones_like(solution.residual) if sign < 0 else (1 + slope).expand(solution.status.shape)
    repelled = "" if sign < 0 else "; it repels, every step of ascent leads away from it"
    flat = "G does not change along directions the support does not span: the shortest solution is given"
    cases = (unique, f"G is strictly convex{repelled}"), (found & ~unique, flat + repelled), (~found, "there is none")
    return Equilibrium(solution, where_zero_lies(solution), contraction, unique, counted(*cases))
