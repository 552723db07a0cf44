"""Attention in continuous time: particles that move along their attention mean, in R^d or on the unit sphere.

    SA    ẋ_i = ± P m_i,         m_i = Σ_j softmax_j(β⟨x_i,x_j⟩) x_j                        normalised: speed at most 1
    USA   ẋ_i = ± P Z_i m_i,     Z_i = (1/n) Σ_j e^{β⟨x_i,x_j⟩}                             speed up to e^β
    P y = y − ⟨x_i,y⟩ x_i on the sphere, P = I in R^d

Both increase E = (1/2βn²) Σ_ij e^{β⟨x_i,x_j⟩} on the sphere; the residual layer is the Euler step of SA (S3-R4).
Particles that attract each other meet at a rate e^β, to which an explicit solver would keep adapting its steps. `flow`
merges two particles that are closer than the tolerance into one of double weight: by uniqueness they would stay
together. Under a causal mask, where particles have different keys, a stiff solver takes over; over fixed keys every
particle is integrated in a time of its own (`time_change`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.dynamics.checks import require_cloud
from cumulant.dynamics.integrate import MAX_STIFF_SIZE, Integrator
from cumulant.dynamics.readouts import log_interaction_energy
from cumulant.dynamics.time_change import LOG_MAX, TimeChangedIntegrator
from cumulant.kernels import moments
from cumulant.kernels.dense import normalize
from cumulant.measures import Measure
from cumulant.typing import Codes, PerQuery, Queries

METHODS = ("auto", "explicit", "implicit")
PAIRS = 1 << 22  # numbers n·m·d up to which differences of all pairs are held


class Flow(NamedTuple):
    """The solution of `flow`.

    times    (t,)
    states   (t, *batch, n, d)  the cloud at each time; one that stopped repeats its last state
    energy   (t, *batch)        E, which never decreases for sign +1 on the sphere without a mask; see `flow`
    steps    (*batch)           accepted steps of the integrator
    reached  (*batch)           the last time, or the time at which the integration had to stop
    reason   str                why, one sentence a cloud; empty if all clouds reached the end
    """

    times: Tensor
    states: Tensor
    energy: Tensor
    steps: Codes
    reached: PerQuery
    reason: str


def flow(
    x0: Queries,
    times: Tensor | Sequence[float],
    *,
    beta: float = 1.0,
    normalized: bool = True,
    sphere: bool = True,
    sign: int = 1,
    keys: Tensor | Measure | None = None,
    causal: bool = False,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    method: str = "auto",
    max_steps: int = 20_000,
) -> Flow:
    """The clouds at the given times, x0 at time 0 (X-4, X-7, S3-R4).

    x0          (*batch, n, d); of unit length if ``sphere``. Each cloud is integrated on its own, in float64
    times       (t,), not negative and not decreasing
    beta        any number; 0 averages
    normalized  True: SA; False: USA, where a causal particle averages over those before it
    keys        None: the particles are the keys. (m, d) or a `Measure`: fixed keys, USA divides by their mass
    method      "explicit": Dormand–Prince 8 with merging; "implicit": LSODA with the exact Jacobian, n·d ≤ 600;
                "auto": explicit, then implicit where that cannot merge and needs more than 1000 steps. USA over fixed
                keys is SA with a time change for each particle, by LSODA, unless "explicit" is asked for
    max_steps   accepted steps a cloud may take; then it stops with a reason, as does one that diverges

    Two particles closer than rtol + atol become one, on the sphere, for sign +1 and moving keys without a mask. States
    have unit length to rounding. ``energy`` is E above; ½|x̄|² for β = 0; (1/βn) Σ_i Z_i for fixed keys. Not
    differentiable. Needs ``cumulant[ode]``.

    >>> import torch
    >>> path = flow(torch.eye(2, dtype=torch.float64), [0.0, 1.0], beta=0.0)
    >>> path.states[-1, 0] @ path.states[-1, 1], torch.tensor(1.0).tanh()            # n = 2, β = 0: cos = tanh t
    (tensor(0.7616, dtype=torch.float64), tensor(0.7616))
    """
    x, grid = _start(x0, sphere), _grid(times)
    field = _Field(beta, normalized, sphere, sign, keys, causal).on(x)
    if method not in METHODS:
        raise ValueError(sentence("flow.method", f"one of {', '.join(METHODS)}", repr(method), "Pick one."))
    for name, number in (("rtol", rtol), ("atol", atol), ("max_steps", max_steps)):
        if not 0 < number < math.inf:
            raise ValueError(sentence(f"flow.{name}", "a positive number", number, "The defaults are tight."))
    n, d = x.shape[-2:]
    if method == "implicit" and n * d > MAX_STIFF_SIZE and (keys is None or normalized):
        advice = "Use method='explicit', or fewer particles."
        raise ValueError(sentence("flow.method", f"'implicit' for n·d ≤ {MAX_STIFF_SIZE}", f"n·d = {n * d}", advice))
    lead = x.shape[:-2]
    states = x.new_zeros(len(grid), *lead, n, d)
    steps, reached, reasons = torch.zeros(lead, dtype=torch.int64), torch.zeros(lead, dtype=torch.float64), []
    with torch.no_grad():
        for index in itertools.product(*map(range, lead)):
            if keys is not None and not normalized and method != "explicit":
                cloud = TimeChangedIntegrator(field.along, x[index], sphere, rtol, atol, max_steps)
            else:
                cloud = Integrator(field, x[index], sphere, field.merges, rtol, atol, max_steps, method)
            states[(slice(None), *index)] = cloud.integrate(grid.tolist())
            steps[index], reached[index] = cloud.steps, cloud.time
            if cloud.reason:
                name = f"cloud {index}" if index else "the cloud"
                reasons.append(f"{name} stopped at t = {cloud.time:.6g} of {grid[-1].item():.6g}: {cloud.reason}")
        energy = field.energy(states)
    return Flow(grid, states.to(x0.dtype), energy.to(x0.dtype), steps, reached, "; ".join(reasons))


def velocity(
    x: Queries,
    *,
    beta: float = 1.0,
    normalized: bool = True,
    sphere: bool = True,
    sign: int = 1,
    keys: Tensor | Measure | None = None,
    causal: bool = False,
) -> Queries:
    """ẋ of `flow` at one instant, with the same arguments:  (*batch, n, d) → (*batch, n, d); differentiable.

    In R^d with fixed keys it is the gradient of G(βx)/β, so its divergence, the rate of log-volume, is β tr ∇²G(βx).

    >>> import torch
    >>> velocity(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))                                              # 1/(1 + e)
    tensor([[0.0000, 0.2689],
            [0.2689, 0.0000]])
    """
    _start(x, sphere, "velocity")
    return _Field(beta, normalized, sphere, sign, keys, causal, "velocity").on(x)(x)


@dataclass(frozen=True)
class _Field:
    """The velocity of clouds (*batch, n, d), each distinct particle standing for e^{log weight} of them."""

    beta: float
    normalized: bool
    sphere: bool
    sign: int
    keys: Tensor | Measure | None
    causal: bool
    where: str = "flow"

    def on(self, x: Tensor) -> _Field:
        """The same field with its keys checked against x and in the dtype of x."""
        if not isinstance(self.beta, int | float) or not math.isfinite(self.beta):
            raise ValueError(sentence(f"{self.where}.beta", "a finite number", self.beta, "It multiplies the scores."))
        if self.sign not in (1, -1):
            raise ValueError(sentence(f"{self.where}.sign", "+1 or -1", self.sign, "+1 attracts, -1 repels."))
        if self.keys is None:
            return self
        where = f"{self.where}.keys"
        if self.causal:
            raise ValueError(sentence(f"{self.where}.causal", "False with fixed keys", True, "Keys have no order."))
        if isinstance(self.keys, Measure):
            dim, lead, keys = self.keys.dim, self.keys.batch_shape, self.keys.to(x.dtype)
        else:
            keys = require_float(where, self.keys)
            if keys.ndim < 2 or 0 in keys.shape[-2:]:
                raise ValueError(sentence(where, "shape (m, d), m ≥ 1", shape(keys), "Add the key axis."))
            require_finite(where, keys)
            dim, lead, keys = keys.shape[-1], keys.shape[:-2], keys.to(x.dtype)
            require_alike(where, keys, "x0", x)
        if dim != x.shape[-1]:
            raise ValueError(sentence(where, f"dimension d={x.shape[-1]} as the particles", dim, "Match them."))
        if lead:
            got = f"batch axes {tuple(lead)}"
            raise ValueError(sentence(where, "one set of keys for all clouds", got, "Call once for each set."))
        return _Field(self.beta, self.normalized, self.sphere, self.sign, keys, self.causal, self.where)

    @property
    def merges(self) -> bool:
        """Whether particles attract each other and equal particles have equal velocities."""
        return self.sphere and self.sign > 0 and self.keys is None and not self.causal

    def __call__(self, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        along, log_z = self.along(x, log_weights)
        return along if self.normalized else torch.exp(log_z)[..., None] * along

    def along(self, x: Tensor, log_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """± P m (*batch, n, d), and log Z (*batch, n)."""
        u = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) if self.sphere else x
        mean, log_z = self._attend(u, log_weights)
        mean = self.sign * mean
        return mean - (u * mean).sum(-1, keepdim=True) * u if self.sphere else mean, log_z

    def _attend(self, u: Tensor, log_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """m, or m − u on the sphere, and log Z."""
        points, eta = u if self.keys is None else self.keys, self.beta * u
        if isinstance(points, Measure):
            return points.mean(eta), points.log_normalizer(eta) - points.log_mass
        total = self._total(u, points, log_weights)
        if u.numel() * points.shape[-2] > PAIRS:
            result = moments(eta, points, log_weights=log_weights, causal=self.causal, statistics=("mean",))
            return result.mean, result.log_normalizer - total
        logits = eta @ points.mT if log_weights is None else eta @ points.mT + log_weights
        if self.causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=u.device).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        g, p = normalize(logits)
        if not self.sphere:
            return p @ points, g - total
        # P removes the own direction: a sum of differences has no e^β of it that would have to cancel
        return (p[..., None] * (points[..., None, :, :] - u[..., :, None, :])).sum(-2), g - total

    def _total(self, u: Tensor, points: Tensor, log_weights: Tensor | None) -> Tensor:
        """log of the number of keys of each particle."""
        if self.causal:
            return torch.arange(1, u.shape[-2] + 1, dtype=u.dtype, device=u.device).log()
        if log_weights is not None:
            return torch.logsumexp(log_weights, -1)
        return torch.tensor(float(points.shape[-2]), dtype=u.dtype, device=u.device).log()

    def energy(self, x: Tensor) -> Tensor:
        """(*batch, n, d) → (*batch)"""
        n = x.shape[-2]
        if self.keys is None:
            if self.beta == 0:
                return x.mean(-2).square().sum(-1) / 2
            return torch.exp(log_interaction_energy(x, self.beta) - 2 * math.log(n)) / self.beta
        eta = self.beta * x
        if isinstance(self.keys, Measure):
            centre, log_z = self.keys.mean(torch.zeros_like(x)), self.keys.log_normalizer(eta) - self.keys.log_mass
        else:
            log_z = moments(eta, self.keys, statistics=()).log_normalizer - math.log(self.keys.shape[-2])
            centre = self.keys.mean(-2)
        if self.beta == 0:
            return (x * centre).sum(-1).mean(-1)
        return torch.exp(torch.logsumexp(log_z, -1) - math.log(n)) / self.beta


def _start(x0: object, sphere: bool, where: str = "flow") -> Tensor:
    """x0 in float64, on the sphere to rounding."""
    wide = require_cloud(f"{where}.x0", x0).detach().double()
    if not sphere:
        return wide
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if not holds((length - 1).abs() < 1e-5):
        got = f"lengths from {length.min().item():.6g} to {length.max().item():.6g}"
        advice = "Divide by x.norm(dim=-1, keepdim=True), or pass sphere=False."
        raise ValueError(sentence(f"{where}.x0", "unit vectors", got, advice))
    return wide / length


def _grid(times: Tensor | Sequence[float]) -> Tensor:
    grid = torch.as_tensor(times, dtype=torch.float64).detach().cpu()
    if grid.ndim != 1 or len(grid) == 0:
        raise ValueError(sentence("flow.times", "shape (t,), t ≥ 1", shape(grid), "Pass a list of times."))
    if not bool(grid.isfinite().all() & (grid >= 0).all() & (grid.diff() >= 0).all()):
        raise ValueError(sentence("flow.times", "times from 0 on, in order", grid.tolist(), "The start is at time 0."))
    return grid


def orthogonal_cosine(times: float | Tensor | Sequence[float], n: int, beta: float, normalized: bool = True) -> Tensor:
    """The cosine γ(t) between any two of n particles that start orthogonal; it describes the whole flow.

        SA    γ̇ = 2 e^{βγ} (1 − γ)((n−1)γ + 1) / (e^β + (n−1) e^{βγ}),        USA   γ̇ = (2/n) e^{βγ} (1 − γ)((n−1)γ + 1)

    Both separate: with γ = 1 − e^{−u}, t = ∫ W du for a smooth W. The integral is summed by Gauss–Legendre and inverted
    by Newton, so that no β is stiff.

    times (…), not negative → (…) in float64.

    >>> [round(c, 10) for c in orthogonal_cosine([1.0, 2.0], 4, 1.0).tolist()]
    [0.4794867822, 0.8771311725]
    """
    t = torch.as_tensor(times, dtype=torch.float64).cpu()
    if not isinstance(n, int) or n < 2:
        raise ValueError(sentence("orthogonal_cosine.n", "at least 2 particles", n, "One has no cosine."))
    if not math.isfinite(beta):
        raise ValueError(sentence("orthogonal_cosine.beta", "a finite number", beta, "It multiplies the scores."))
    if not bool((t.isfinite() & (t >= 0)).all()):
        raise ValueError(sentence("orthogonal_cosine.times", "times from 0 on", t.tolist(), "They start orthogonal."))

    def pace(u: Tensor) -> Tensor:
        """dt/du"""
        gap = torch.exp(-u)  # 1 − γ
        top = n - (n - 1) * gap  # (n−1)γ + 1
        if normalized:
            return (torch.exp((beta * gap).clamp(max=LOG_MAX)) + (n - 1)) / (2 * top)
        return n * torch.exp((-beta * (1 - gap)).clamp(-LOG_MAX, LOG_MAX)) / (2 * top)

    # beyond u = 40 the cosine is 1 in float64 and the pace constant; its pole is at u ≈ −1/n
    marks = [0.0]
    while marks[-1] < 40:
        u = marks[-1]
        marks.append(u + min(0.5, 4 / (1 + abs(beta) * math.exp(-u)), u + 1 / n))
    u = _inverse_integral(pace, torch.tensor(marks, dtype=torch.float64), t.reshape(-1))
    return -torch.expm1(-u).reshape(t.shape)


def _inverse_integral(pace: Callable[[Tensor], Tensor], edges: Tensor, t: Tensor) -> Tensor:
    """u with ∫₀^u pace = t, elementwise; +inf beyond the last edge. Newton in the panel that holds it, kept inside."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(20))

    def integral(a: Tensor, b: Tensor) -> Tensor:
        half = (b - a) / 2
        return (pace(a[..., None] + half[..., None] * (1 + nodes)) * weights).sum(-1) * half

    passed = torch.cat([edges[:1], integral(edges[:-1], edges[1:]).cumsum(0)])
    panel = (torch.searchsorted(passed, t, right=True) - 1).clamp(max=len(edges) - 2)
    start, rest = edges[panel], t - passed[panel]
    low, high = start, edges[panel + 1]
    u = start + rest / pace(start)
    for _ in range(60):
        u = torch.where((u >= low) & (u <= high), u, (low + high) / 2)
        over = integral(start, u) - rest
        low, high = torch.where(over <= 0, u, low), torch.where(over >= 0, u, high)
        u = u - over / pace(u)
    return torch.where(t >= passed[-1], torch.inf, u)
