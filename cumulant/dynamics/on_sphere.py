"""Fixed points of tokens that are put back on a sphere after every step: fixed keys, moving keys, causal (D3, X-4).

    z = RN(z + γ ∇G(sz)),      RN y = r y/|y|

One step is ascent on a convex function followed by a projection, so that it never loses what it climbs: G for keys that
stand still, E = ½ Σ_ij e^{s⟨x_i,x_j⟩} for tokens that are each other's keys. A causal mask breaks that argument; there
tokens settle one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import holds, require_finite, require_float, sentence, shape
from cumulant.dynamics.ascend import Ascend
from cumulant.dynamics.equilibrium_record import Equilibrium, drop_query, number, rows, side_by_side
from cumulant.dynamics.renormalize import Renormalize, SphereNorm
from cumulant.kernels import moments
from cumulant.measures import Measure
from cumulant.solve import Solution, fixed_point
from cumulant.typing import PerQuery, Queries

CLUSTER = 1e-6  # distance from the mean token, in radii, up to which a cloud counts as one cluster


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
    """z = r (z + γ∇G(sz))/|z + γ∇G(sz)| with keys that stand still: a critical point of G on the sphere |z| = r (D3).

        G(s z⁺) ≥ G(s z),        P_z ∇G(sz) = 0 at the end,        contraction = (r/|y|)(1 + γ s λ_max(P ∇²G P))

    start (*batch, q, d) or (d,) is put on the sphere first. G rises at every step because it is convex; from a point
    where z + γ∇G(sz) = 0, already critical, nothing moves. Which critical point is reached depends on the start.
    Differentiable in scale and in the parameters of the measure.

    >>> import torch
    >>> from cumulant import Empirical
    >>> h = Empirical(torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    >>> found = sphere_equilibrium(h, torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
    >>> found.solution.value
    tensor([[0.9982, 0.0598],
            [0.0598, 0.9982]], dtype=torch.float64)
    """
    where = "sphere_equilibrium"
    begin = rows(f"{where}.start", measure, start)
    norm, s = SphereNorm(radius), _positive(f"{where}.scale", scale, begin)
    gamma = number(f"{where}.step", step)

    def update(z: Tensor) -> Tensor:
        return _settle(norm, z + gamma * measure.mean(s * z), z)

    solution = fixed_point(update, norm(begin), max_steps=max_steps, tol=tol)
    with torch.no_grad():
        z = solution.value
        y = z + gamma * measure.mean(s * z)
        out = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        tangent = torch.eye(measure.dim, dtype=z.dtype, device=z.device) - out[..., :, None] * out[..., None, :]
        bend = torch.linalg.eigvalsh(tangent @ measure.fisher(s * z) @ tangent)[..., -1].clamp_min(0)
        contraction = norm.operator_norm(torch.where((y == 0).all(-1, keepdim=True), z, y)) * (1 + gamma * s * bend)
    exists = "G has a maximum on the sphere, and rises along the iteration"
    reason = "a convex function may have several critical points on a sphere; one with contraction < 1 attracts"
    answer = Equilibrium(solution, exists, contraction, torch.zeros_like(solution.converged), reason)
    return drop_query(answer) if start.ndim == 1 else answer


def tangential_residual(measure: Measure, state: Queries, *, scale: float | Tensor = 1.0) -> PerQuery:
    """|P_z ∇G(sz)|, the part of the mean that is tangent to the sphere through z: zero at critical points (D3).

    (*batch, q, d) → (*batch, q); at z = 0 the whole mean.

    >>> import torch
    >>> from cumulant import Empirical
    >>> tangential_residual(Empirical(torch.eye(2)), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    tensor([0.0000, 0.2689])
    """
    mean, square = measure.mean(scale * state), state.square().sum(-1, keepdim=True)
    along = (mean * state).sum(-1, keepdim=True) / torch.where(square > 0, square, 1)
    return torch.linalg.vector_norm(mean - along * state, dim=-1)


def self_attention_equilibrium(
    x: Tensor,
    *,
    scale: float = 1.0,
    radius: float = 1.0,
    step: float = 1.0,
    renormalize: Renormalize | None = None,
    max_steps: int = 2000,
    tol: float | None = None,
) -> Equilibrium:
    """x_i = RN(x_i + γ Σ_j a_ij x_j) for all tokens at once, the keys moving with them; a_ij = softmax_j(s ⟨x_i,x_j⟩).

    On the sphere E = ½ Σ_ij e^{s⟨x_i,x_j⟩} never decreases, for any step (X-4), and its maximisers are one cluster. At
    a large scale clusters hold for a time exponential in s: then the residual passes the test, or max_steps ends it.

    x            (*batch, n, d), no token 0, renormalised first. One status per cloud (*batch)
    renormalize  the sphere of ``radius`` if None; with another nothing is promised

    The whole cluster may be turned: fixed points are not isolated, and the answer carries no gradient.

    >>> import torch
    >>> found = self_attention_equilibrium(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64))
    >>> found.solution.value
    tensor([[0.7071, 0.7071],
            [0.7071, 0.7071],
            [0.7071, 0.7071]], dtype=torch.float64)
    """
    where = "self_attention_equilibrium"
    norm, cloud = _normaliser(where, radius, renormalize), _cloud(where, x)
    ascend = Ascend(step=number(f"{where}.step", step), scale=number(f"{where}.scale", scale))
    solution = fixed_point(
        lambda z: _settle(norm, ascend(z), z), norm(cloud), event_ndim=2, max_steps=max_steps, tol=tol, adjoint="none"
    )
    away = torch.linalg.vector_norm(solution.value - solution.value.mean(-2, keepdim=True), dim=-1).amax(-1)
    together = (away <= CLUSTER * radius) & (renormalize is None)
    exists = "the energy is bounded on the sphere and never decreases (X-4)"
    exists = exists if renormalize is None else "not guaranteed: the argument is for the sphere"
    reason = "fixed points come in families that rotations connect: a cluster may sit anywhere"
    # near one cluster a turn of the whole is kept, all else shrinks by 1/(1 + γ)
    contraction = torch.where(together, 1.0, torch.inf).to(x.dtype)
    return Equilibrium(solution, exists, contraction, torch.zeros_like(solution.converged), reason)


def causal_equilibrium(
    x: Tensor,
    *,
    scale: float | Tensor = 1.0,
    radius: float = 1.0,
    step: float = 1.0,
    renormalize: Renormalize | None = None,
    max_steps: int = 2000,
    tol: float | None = None,
) -> Equilibrium:
    """x_i = RN(x_i + γ Σ_{j≤i} a_ij x_j), solved left to right: earlier tokens are fixed keys, the own term moves.

        contraction_i = ‖RN'‖ (1 + γ (s tr C_i + a_ii (1 + s |x_i − m_i| |x_i|))),      the earlier tokens at rest

    Token 1 attends to itself only and stays where RN puts it. On a sphere the own term of token i only shortens its
    step, so that it climbs G of the tokens before it, and all are drawn to token 1. Where a token may rest in several
    places this can be another one than iterating the whole layer finds, for here the earlier tokens do not move.

    x            (*batch, n, d), no token 0. One status, number of steps and residual per token (*batch, n)
    renormalize  a normaliser of single tokens; the sphere of ``radius`` if None

    Differentiable in x (through token 1, where RN leaves it at once), scale, and what renormalize holds.

    >>> import torch
    >>> found = causal_equilibrium(torch.tensor([[3.0, 0.0], [1.0, 2.0], [-1.0, 1.0]], dtype=torch.float64))
    >>> found.solution.value.round(decimals=6), found.contraction
    (tensor([[1., 0.],
            [1., 0.],
            [1., 0.]], dtype=torch.float64), tensor([1.0000, 0.7500, 0.6667], dtype=torch.float64))
    """
    where = "causal_equilibrium"
    norm, cloud = _normaliser(where, radius, renormalize), _cloud(where, x)
    if norm.ensemble:
        got, advice = type(norm).__name__, "Use self_attention_equilibrium for ensemble maps."
        raise ValueError(sentence(f"{where}.renormalize", "a normaliser of single tokens", got, advice))
    s, gamma = _positive(f"{where}.scale", scale, cloud), number(f"{where}.step", step)
    begin = norm(cloud)

    def solve(before: Tensor, token: Tensor) -> Solution:  # (*batch, i, d) and (*batch, 1, d)
        def update(z: Tensor) -> Tensor:
            keys = torch.cat([before, z], -2)
            # a lone token attends to itself whatever the scale
            mean = z if keys.shape[-2] == 1 else moments(s * z, keys, statistics=("mean",)).mean
            return _settle(norm, z + gamma * mean.to(z.dtype), z)

        return fixed_point(update, token, max_steps=max_steps, tol=tol)

    found: list[Solution] = []
    settled = begin[..., :0, :]
    for i in range(begin.shape[-2]):
        token = begin[..., i : i + 1, :]
        found.append(solve(settled, token))
        value = found[-1].value
        if i == 0:  # where RN leaves it at once its derivative is that of RN; the equation alone has no say in it
            value = torch.where((found[0].steps == 0)[..., None], token, value)
        settled = torch.cat([settled, value], -2)
    solution = side_by_side(settled, found)
    with torch.no_grad():
        contraction = _causal_bound(norm, settled, s, gamma)
    exists = "each token climbs G of the tokens before it, which has a maximum on the sphere"
    exists = exists if renormalize is None else "not guaranteed: the argument is for the sphere"
    reason = "token 1 may rest anywhere, a later one at several points; one with contraction < 1 attracts"
    return Equilibrium(solution, exists, contraction, torch.zeros_like(solution.converged), reason)


def _causal_bound(norm: Renormalize, x: Tensor, scale: Tensor, step: float) -> Tensor:
    """‖RN'‖ ‖I + γ ∂m_i/∂x_i‖, with ∂m_i/∂x_i = s C_i + a_ii (I + s (x_i − m_i) x_iᵀ) and λ_max(C) ≤ tr C."""
    found = moments(scale * x, x, causal=True, statistics=("mean", "atom_trace"))
    length = torch.linalg.vector_norm(x, dim=-1)
    own = torch.exp(scale * length.square() - found.log_normalizer)
    apart = torch.linalg.vector_norm(x - found.mean, dim=-1)
    inner = scale * found.atom_trace + own * (1 + scale * apart * length)
    y = x + step * found.mean.to(x.dtype)
    still = (y == 0).all(-1, keepdim=True)
    return norm.operator_norm(torch.where(still, x, y)) * (1 + step * inner).to(x.dtype)


def _settle(norm: Renormalize, y: Tensor, x: Tensor) -> Tensor:
    """RN(y); a token whose step ends at 0 stays where it was, for it is a critical point."""
    return norm(torch.where((y == 0).all(-1, keepdim=True), x, y))


def _cloud(where: str, x: Tensor) -> Tensor:
    cloud = require_float(f"{where}.x", x)
    if cloud.ndim < 2 or 0 in cloud.shape[-2:]:
        expected = "at least one token (*batch, n, d)"
        raise ValueError(sentence(f"{where}.x", expected, shape(cloud), "Add the token axis."))
    require_finite(f"{where}.x", cloud)
    return cloud


def _normaliser(where: str, radius: float, renormalize: Renormalize | None) -> Renormalize:
    if renormalize is None:
        return SphereNorm(radius)
    if not isinstance(renormalize, Renormalize):
        got = repr(renormalize)
        raise TypeError(sentence(f"{where}.renormalize", "a Renormalize, or None", got, "RMSNorm() is one."))
    return renormalize


def _positive(where: str, value: float | Tensor, like: Tensor) -> Tensor:
    """A positive number as a tensor; one that requires grad keeps its graph."""
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if tensor.ndim or not holds((tensor > 0) & tensor.isfinite()):
        raise ValueError(sentence(where, "one positive number", value, "It multiplies the logits."))
    return tensor
