"""Modern Hopfield networks: retrieval is attention without the residual (Ramsauer et al. 2020; S1-H1..H4, S3-R8).

    E(ξ) = −β⁻¹ (G(βξ) − G(0)) + ½|ξ|² + ½M²,      M = max|x_n|,      0 ≤ E ≤ 2M² on the hull of the patterns
    ξ⁺  = ξ − ∇E(ξ) = ∇G(βξ)                        one unit step of descent on E; G ascends along it

With the counting measure G(0) = log N, the constant of the paper. Patterns are what you pass: nothing is projected,
normalised or learned here. Where no pattern is visible to a state, E = ½|ξ|² and retrieval returns 0. Under
torch.autocast states and patterns are rounded as for attention, and what follows is float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast, autocast_float32, without_autocast
from cumulant.measures import Empirical
from cumulant.solve import Damped, Status, fixed_point
from cumulant.typing import Codes, PerQuery, Queries

CLASSES = ("I", "II", "III", "IV")
BLOCK = 1 << 20  # pairs of patterns held at once


def energy(
    state: Queries, patterns: Tensor, *, beta: float | Tensor = 1.0, log_weights: Tensor | None = None
) -> PerQuery:
    """E(ξ), with the constants that make it 0 ≤ E ≤ 2M² on the hull of the patterns.

    state        (*batch, q, d) or (d,)
    patterns     (*batch, n, d)
    beta         inverse temperature, a number or one per batch entry (*batch): heads keep their own
    log_weights  (*batch, n) or (*batch, q, n), as in `Empirical`

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> round(energy(torch.tensor([0.5, 0.25], dtype=torch.float64), x).item(), 12)
    0.490939721599
    """
    state, patterns, log_weights = _rounded(state, patterns, log_weights)
    memory = _PatternMemory(patterns, beta, log_weights, state)
    with without_autocast(state):
        return memory.energy(state, memory.measure.log_normalizer(memory.eta(state)))


class Retrieval(NamedTuple):
    """The states after retrieval, their energies and the status of each.

    state     (*batch, q, d)
    energy    (t + 1, *batch, q)  E before every step and at the end; it never increases but for rounding. A state that
                                  stopped repeats its last entry
    steps     (*batch, q)         steps each state took
    status    (*batch, q)         codes of `Status`
    residual  (*batch, q)         |∇G(βξ) − ξ| = |∇E| at ``state``
    """

    state: Queries
    energy: Tensor
    steps: Codes
    status: Codes
    residual: PerQuery


def retrieve(
    state: Queries,
    patterns: Tensor,
    *,
    beta: float | Tensor = 1.0,
    steps: int | None = None,
    gate: float = 1.0,
    log_weights: Tensor | None = None,
    tol: float | None = None,
    max_steps: int = 200,
) -> Retrieval:
    """Iterate ξ⁺ = (1 − g) ξ + g ∇G(βξ), descending E for every gate 0 < g < 2.

    steps  a number: exactly so many steps for all, differentiable through each of them. None: each state until
           |∇E| ≤ tol (1 + |ξ|) or max_steps, with the implicit gradient of the fixed point; a state's result does not
           depend on the others.
    Other arguments as in `energy`; tol as in `fixed_point`.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> retrieved = retrieve(torch.tensor([0.5, 0.25], dtype=torch.float64), x, beta=4.0, steps=1)
    >>> retrieved.state, [round(e, 12) for e in retrieved.energy.tolist()]
    (tensor([0.7082, 0.2654], dtype=torch.float64), [0.34926241185, 0.312428513521])
    """
    if not isinstance(gate, int | float):
        got, advice = type(gate).__name__, "One gate serves all states."
        raise TypeError(sentence("retrieve.gate", "a number in (0, 2)", got, advice))
    state, patterns, log_weights = _rounded(state, patterns, log_weights)
    memory = _PatternMemory(patterns, beta, log_weights, state)
    solver = Damped(gate)
    trace: list[Tensor] = []

    def update(x: Tensor) -> Tensor:
        with without_autocast(x):
            image = moments(memory.eta(x), patterns, log_weights=log_weights, statistics=("mean",))
        trace.append(memory.energy(x, image.log_normalizer).detach())
        return image.mean  # pyright: ignore[reportReturnType]

    start = _expand(state, memory.measure)
    if steps is None:
        limit = fixed_point(update, start, solver=solver, tol=tol, max_steps=max_steps)
        energies = torch.stack(trace[: limit.trace.shape[0]])
        return Retrieval(limit.value, energies, limit.steps, limit.status, limit.residual)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(sentence("retrieve.steps", "a number of steps ≥ 0, or None", steps, "None runs to the end."))
    for _ in range(steps):
        _, start = solver.step(None, start, update(start))
    image = update(start)
    residual = torch.linalg.vector_norm((image - start).detach(), dim=-1)
    tol = max(1e-10, 32 * torch.finfo(start.dtype).eps) if tol is None else tol
    done = residual <= tol * (1 + torch.linalg.vector_norm(image.detach(), dim=-1))
    status = torch.where(done, int(Status.CONVERGED), int(Status.MAX_STEPS)).to(torch.int8)
    return Retrieval(start, torch.stack(trace), torch.full_like(residual, steps, dtype=torch.int64), status, residual)


# ---------------------------------------------------------------------- bounds on convergence and retrieval


def contraction_bound(patterns: Tensor, *, beta: float | Tensor = 1.0, method: str = "diameter") -> PerQuery:
    """L with |∇G(βa) − ∇G(βb)| ≤ L |a − b|; below 1 retrieval has one fixed point, reached from anywhere.

        "diameter"  L = β (diam/2)²: the variance of a bounded law in any direction (all pairs, in linear memory)
        "centre"    L = β max|x_n − x̄|²: looser, one pass

    patterns (*batch, n, d) → (*batch); 0 without patterns.

    >>> import torch
    >>> contraction_bound(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5]]), beta=0.5)
    tensor(0.5000)
    """
    x, b = _patterns("contraction_bound", patterns), _beta("contraction_bound", beta, patterns)
    if x.shape[-2] == 0:
        return x.new_zeros(x.shape[:-2])
    if method == "centre":
        return b * (x - x.mean(-2, keepdim=True)).square().sum(-1).amax(-1)
    if method != "diameter":
        raise ValueError(sentence("contraction_bound.method", "'diameter' or 'centre'", repr(method), "Pick one."))
    widest = [torch.cdist(rows, x).amax((-2, -1)) for rows in _blocks(x)]
    return b * (torch.stack(widest).amax(0) / 2).square()


def separation(patterns: Tensor) -> PerQuery:
    """Δ_i = |x_i|² − max_{j≠i} ⟨x_i,x_j⟩: how far pattern i stands out;  (*batch, n, d) → (*batch, n).

    +inf for a lone pattern, negative for one that a longer pattern hides.

    >>> import torch
    >>> separation(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]))
    tensor([ 1.,  2., -1.])
    """
    x = _patterns("separation", patterns)
    if x.shape[-2] == 0:
        return x.new_zeros(x.shape[:-1])
    nearest, start = [], 0
    for rows in _blocks(x):
        score = rows @ x.mT  # (*batch, rows, n)
        own = torch.arange(start, start + rows.shape[-2], device=x.device)
        itself = own[:, None] == torch.arange(x.shape[-2], device=x.device)
        nearest.append(score.masked_fill(itself, -torch.inf).amax(-1))
        start += rows.shape[-2]
    return x.square().sum(-1) - torch.cat(nearest, -1)


def update_error_bound(patterns: Tensor, distance: float | Tensor, *, beta: float | Tensor = 1.0) -> PerQuery:
    """|∇G(βξ) − x_i| ≤ 2(N−1) M exp(−β(Δ_i − 2Mδ)): one step retrieves pattern i to this error (Theorem 5).

    ``distance`` is δ = max(|ξ − x_i|, |x_i* − x_i|), a number or (*batch, n), with x_i* the fixed point near x_i: see
    `fixed_point_bound`.

    >>> import torch
    >>> update_error_bound(4 * torch.eye(3), 0.1)
    tensor([4.0072e-06, 4.0072e-06, 4.0072e-06])
    """
    return _bound("update_error_bound", patterns, distance, beta, lambda n, m, b: 2 * (n - 1) * m)


def jacobian_bound(patterns: Tensor, distance: float | Tensor, *, beta: float | Tensor = 1.0) -> PerQuery:
    """‖β∇²G‖ ≤ 2βN(N−1) M² exp(−β(Δ_i − 2Mδ)) within δ of pattern i: the rate of its basin (Theorem 4).

    >>> import torch
    >>> jacobian_bound(4 * torch.eye(3), 0.1)
    tensor([4.8087e-05, 4.8087e-05, 4.8087e-05])
    """
    return _bound("jacobian_bound", patterns, distance, beta, lambda n, m, b: 2 * b * n * (n - 1) * m**2)


def fixed_point_bound(patterns: Tensor, *, beta: float | Tensor = 1.0) -> PerQuery:
    """|x_i* − x_i| ≤ 2e(N−1) M exp(−βΔ_i), if the fixed point x_i* lies within 1/(2βM) of x_i (Theorem 5).

    >>> import torch
    >>> fixed_point_bound(4 * torch.eye(3))
    tensor([4.8944e-06, 4.8944e-06, 4.8944e-06])
    """
    return _bound("fixed_point_bound", patterns, 0.0, beta, lambda n, m, b: 2 * math.e * (n - 1) * m)


class Capacity(NamedTuple):
    """base c, the threshold it must reach, whether it does, and the number √p c^{(d−1)/4} of patterns that then fit."""

    base: float
    threshold: float
    holds: bool
    patterns: float


def capacity(dim: int, *, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001) -> Capacity:
    """How many random patterns on the sphere of radius K√(d−1) can be stored and retrieved (Theorem 3).

        c = b / W₀(exp(a + ln b)),   a = 2(1 + ln(2βK²p(d−1)))/(d−1),   b = 2K²β/5,   c ≥ (2/√p)^{4/(d−1)}

    radius is K, failure the probability p with which storing may fail; the count is exponential in dim.

    >>> stored = capacity(20, radius=3.0)
    >>> round(stored.base, 5), stored.holds, round(stored.patterns, 3)
    (3.15461, True, 7.413)
    """
    if not dim >= 2:
        raise ValueError(sentence("capacity.dim", "at least 2 dimensions", dim, "Patterns lie on a sphere."))
    for name, number in {"beta": beta, "radius": radius}.items():
        if not 0 < number < math.inf:
            raise ValueError(sentence(f"capacity.{name}", "a positive number", number, "See the formula."))
    if not 0 < failure < 1:
        raise ValueError(sentence("capacity.failure", "a probability between 0 and 1", failure, "0.001 is common."))
    a = 2 / (dim - 1) * (1 + math.log(2 * beta * radius**2 * failure * (dim - 1)))
    b = 2 * radius**2 * beta / 5
    base = b / _lambert_of_exp(a + math.log(b))
    threshold = (2 / math.sqrt(failure)) ** (4 / (dim - 1))
    return Capacity(base, threshold, base >= threshold, math.sqrt(failure) * base ** ((dim - 1) / 4))


def _lambert_of_exp(t: float) -> float:
    """W₀(e^t), the w with w + ln w = t; Newton's iteration on a concave function."""
    w = math.exp(t) if t < 1 else t
    for _ in range(100):
        following = w * (1 + t - math.log(w)) / (1 + w)
        if following == w:
            break
        w = following
    return w


# ---------------------------------------------------------------------- how many keys a head attends to


def mass_count(weights: Tensor, mass: float = 0.9) -> Codes:
    """The smallest number of weights that make ``mass`` of their sum:  (..., n) → (...); 0 for an empty row.

    >>> import torch
    >>> mass_count(torch.full((32,), 1 / 32)), mass_count(torch.softmax(torch.arange(32.0), 0))
    (tensor(29), tensor(3))
    """
    if not 0 < mass <= 1:
        raise ValueError(sentence("mass_count.mass", "a share in (0, 1]", mass, "0.9 defines the classes."))
    w = require_float("mass_count.weights", weights)
    if w.ndim == 0 or not holds(w >= 0):
        advice = "Pass attention weights, keys on the last axis."
        raise ValueError(sentence("mass_count.weights", "non-negative weights (..., n)", shape(w), advice))
    total = w.sum(-1, keepdim=True)
    sums = w.sort(-1, descending=True).values.cumsum(-1)
    short = sums < mass * total * (1 - 8 * torch.finfo(w.dtype).eps * max(1, w.shape[-1]))
    return torch.where(total[..., 0] > 0, short.sum(-1) + 1, 0)


def head_class(count: float | Tensor, atoms: int | Tensor) -> Tensor:
    """Ramsauer's classes of heads from k = `mass_count` and the number N of visible keys: an index into `CLASSES`.

        I  k > N/2      II  N/8 < k ≤ N/2      III  N/32 < k ≤ N/8      IV  k ≤ N/32

    For a head over many sequences pass the median of k.

    >>> CLASSES[head_class(29, 32)], CLASSES[head_class(3, 32)]
    ('I', 'III')
    """
    count, atoms = torch.as_tensor(count), torch.as_tensor(atoms)
    return torch.stack([(count <= atoms / part).long() for part in (2, 8, 32)]).sum(0)


# ---------------------------------------------------------------------- arguments


def _rounded(state: Tensor, patterns: Tensor, log_weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As torch.autocast rounds them; an iteration needs more digits than that, so then held in float32."""
    state, patterns = autocast_float32(*autocast(state, patterns))
    (log_weights,) = autocast_float32(*autocast(log_weights))
    return state, patterns, log_weights


class _PatternMemory:
    """Patterns as a measure, with β and the constants of the energy."""

    def __init__(self, patterns: Tensor, beta: float | Tensor, log_weights: Tensor | None, state: Tensor):
        _patterns("hopfield", patterns)
        require_alike("hopfield.state", require_float("hopfield.state", state), "patterns", patterns)
        self.measure = Empirical(patterns, log_weights)
        self.beta = _beta("hopfield", beta, patterns)
        self.single = state.ndim == 1
        present = patterns.square().sum(-1)  # (*batch, n)
        if log_weights is not None:
            w = log_weights if self.measure.query_rows is not None else log_weights[..., None, :]
            present = torch.where(w == -torch.inf, 0, present[..., None, :])
        else:
            present = present[..., None, :]
        self.largest = present.amax(-1) if patterns.shape[-2] else present.sum(-1)  # M², (*batch, q | 1)
        with without_autocast(patterns):
            mass = self.measure.log_mass
        self.log_mass = mass if self.measure.query_rows is not None else mass[..., None]

    def eta(self, state: Tensor) -> Tensor:
        """βξ."""
        return (self.beta if self.beta.ndim == 0 else self.beta[..., None, None]) * state

    def energy(self, state: Tensor, log_normalizer: Tensor) -> Tensor:
        """E from G(βξ)."""
        beta = self.beta if self.beta.ndim == 0 else self.beta[..., None]
        empty = self.log_mass == -torch.inf
        constant, largest = torch.where(empty, 0, self.log_mass), self.largest
        if self.single and not self.measure.batch_shape:
            constant, largest, empty = constant[..., 0], largest[..., 0], empty[..., 0]
        gain = torch.where(empty, 0, log_normalizer) - constant
        return -gain / beta + (state.square().sum(-1) + largest) / 2


def _expand(state: Tensor, measure: Empirical) -> Tensor:
    """The state with the batch axes of the patterns."""
    if state.ndim == 1 and not measure.batch_shape and measure.query_rows is None:
        return state
    rows = state[None] if state.ndim == 1 else state
    lead = broadcast("retrieve.state", rows.shape[:-2], measure.batch_shape)
    return rows.expand(*lead, rows.shape[-2] if rows.shape[-2] != 1 else measure.query_rows or 1, -1)


def _patterns(where: str, patterns: Tensor) -> Tensor:
    x = require_float(f"{where}.patterns", patterns)
    if x.ndim < 2:
        raise ValueError(sentence(f"{where}.patterns", "shape (*batch, n, d)", shape(x), "Add the pattern axis."))
    return x


def _beta(where: str, beta: float | Tensor, patterns: Tensor) -> Tensor:
    if isinstance(beta, int | float):  # nothing is copied to the device, or read from it
        b, legal = patterns.new_full((), beta), 0 < beta < torch.inf
    else:
        b = torch.as_tensor(beta, dtype=patterns.dtype, device=patterns.device)
        legal = holds((b > 0) & b.isfinite())
    if not legal:
        raise ValueError(sentence(f"{where}.beta", "positive finite numbers", beta, "It is an inverse temperature."))
    lead = patterns.shape[:-2]
    if b.ndim > len(lead) or any(own not in (1, whole) for own, whole in zip(b.shape[::-1], lead[::-1], strict=False)):
        expected = f"a number or one per batch entry {tuple(lead)} of patterns"
        raise ValueError(sentence(f"{where}.beta", expected, shape(b), "Heads are a batch axis: one beta per head."))
    return b


def _blocks(x: Tensor):
    """Rows of patterns, few enough that a block of pairs is small."""
    return x.split(max(1, BLOCK // max(1, x.shape[-2] * x.shape[:-2].numel())), dim=-2)


def _bound(where: str, patterns: Tensor, distance: float | Tensor, beta: float | Tensor, factor) -> Tensor:
    x, b = _patterns(where, patterns), _beta(where, beta, patterns)
    b = b if b.ndim == 0 else b[..., None]
    gap = separation(x)
    away = torch.as_tensor(distance, dtype=x.dtype, device=x.device)
    if not holds(away >= 0) or (away.ndim and away.shape[-1] not in (1, x.shape[-2])):
        expected = f"a distance ≥ 0, or one per pattern (*batch, n={x.shape[-2]})"
        raise ValueError(sentence(f"{where}.distance", expected, shape(away) if away.ndim else distance, "Check it."))
    if x.shape[-2] < 2:
        return torch.zeros_like(gap)  # a lone pattern is retrieved exactly
    size = torch.linalg.vector_norm(x, dim=-1).amax(-1, keepdim=True)
    return factor(x.shape[-2], size, b) * torch.exp(-b * (gap - 2 * away * size))
