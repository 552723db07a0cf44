"""Tempered sequential Monte Carlo: from p_η0 to p_η1 along the straight line of natural parameters.

    η(t) = η0 + t (η1 − η0),     0 = t_0 < t_1 < … = 1
    weight    w_i = e^{(t_k − t_{k−1}) ⟨x_i, η1 − η0⟩}
    evidence  G(η1) − G(η0) ≈ Σ_k log (1/N) Σ_i w_i
    resample, and move by a kernel that leaves p_η(t_k) alone

The next temperature is the largest at which the weights are still worth ``target`` of the particles, by bisection.
With temperatures fixed in advance the exponential of the evidence is an unbiased estimate of e^{G(η1) − G(η0)}; chosen
adaptively it is so only as the number of particles grows.

Kernels come from proposals that leave p_η0 alone and are accepted with probability min(1, e^{t⟨x′−x, η1−η0⟩}), so that
only p_η0 has to be sampled, not the law to be reached: `redraw` for any measure, `crank_nicolson` for a Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.measures import Gaussian, Measure
from cumulant.samplers.resampling import Scheme, effective_size, require_generator, systematic
from cumulant.solve import Status

Proposal = Callable[[Tensor, torch.Generator], Tensor]

HALVINGS = 60


class SmcState(NamedTuple):
    """Weighted particles of p_η(t).

    particles    (*batch, q, n, d)
    log_weights  (*batch, q, n)  equal (0) after resampling
    temperature  (*batch, q)     t, 0 at the start and 1 at the end
    log_ratio    (*batch, q)     the estimate of G(η(t)) − G(η0) so far
    """

    particles: Tensor
    log_weights: Tensor
    temperature: Tensor
    log_ratio: Tensor


class SmcInfo(NamedTuple):
    """Diagnostics of a step, all (*batch, q).

    effective   1/Σp² of the weights before resampling
    acceptance  part of the proposals accepted, over all moves
    """

    effective: Tensor
    acceptance: Tensor


class Tempered(NamedTuple):
    """Result of a tempering run.

    particles     (*batch, q, n, d)    with log_weights (*batch, q, n): the law at the last temperature
    log_ratio     (*batch, q)          estimate of G(η1) − G(η0)
    temperatures  (steps + 1, *batch, q)
    effective     (steps, *batch, q)   effective sizes, as `SmcInfo`
    acceptance    (steps, *batch, q)
    status        (*batch, q)          CONVERGED at temperature 1, MAX_STEPS before
    """

    particles: Tensor
    log_weights: Tensor
    log_ratio: Tensor
    temperatures: Tensor
    effective: Tensor
    acceptance: Tensor
    status: Tensor


def init(measure: Measure, start: Tensor, particles: int, *, generator: torch.Generator) -> SmcState:
    """Particles drawn from p_η0, equally weighted, at temperature 0.  start is η0, (*batch, q, d) or (d,)."""
    if not isinstance(particles, int) or particles < 1:
        raise ValueError(sentence("init.particles", "a number of particles ≥ 1", particles, "A thousand is usual."))
    x = measure.sample(start, particles, generator=require_generator("init", generator))
    zero = x.new_zeros(x.shape[:-2])
    return SmcState(x, x.new_zeros(x.shape[:-1]), zero, zero)


def step(
    state: SmcState,
    direction: Tensor,
    proposal: Proposal,
    *,
    temperature: float | None = None,
    target: float = 0.5,
    moves: int = 1,
    resample: Scheme = systematic,
    generator: torch.Generator,
) -> tuple[SmcState, SmcInfo]:
    """Reweight to the next temperature, resample unless it is 1, move.

    direction    η1 − η0, (*batch, q, d) or (d,)
    proposal     (x, generator) → x′, reversible for p_η0; `redraw` or `crank_nicolson`
    temperature  the next t, or None for the largest with an effective size of ``target`` · n
    moves        Metropolis moves of every particle afterwards

    A state at temperature 1 keeps its weights and is only moved.
    """
    require_generator("step", generator)
    if not 0 < target < 1:
        raise ValueError(sentence("step.target", "a part of the particles in (0, 1)", target, "Half is usual."))
    if not isinstance(moves, int) or moves < 0:
        raise ValueError(sentence("step.moves", "a number of moves ≥ 0", moves, "0 only reweights and resamples."))
    x, w, t, ratio = state
    score = (x @ direction[..., :, None])[..., 0]  # (*batch, q, n)
    after = _next_temperature(w, score, t, target) if temperature is None else torch.full_like(t, temperature)
    heavier = w + (after - t)[..., None] * score
    ratio = ratio + (torch.logsumexp(heavier, -1) - torch.logsumexp(w, -1))
    effective, done = effective_size(heavier), after >= 1
    ancestors = resample(heavier, generator=generator)
    resampled = x.gather(-2, ancestors[..., None].expand_as(x))
    x = torch.where(done[..., None, None], x, resampled)
    w = torch.where(done[..., None], heavier, 0)
    x, acceptance = metropolis_moves(x, direction * after[..., None], proposal, moves, generator)
    return SmcState(x, w, after, ratio), SmcInfo(effective, acceptance)


def temper(
    measure: Measure,
    start: Tensor,
    end: Tensor,
    *,
    particles: int = 1000,
    target: float = 0.5,
    temperatures: Sequence[float] | None = None,
    proposal: Proposal | None = None,
    moves: int = 1,
    resample: Scheme = systematic,
    max_steps: int = 1000,
    generator: torch.Generator,
) -> Tempered:
    """Run from p_η0 to p_η1; each query has its own temperatures.

    start, end    η0 and η1, (*batch, q, d) or (d,), inside the natural domain
    target        effective size to keep, as a part of the particles; decides the temperatures
    temperatures  or these, ascending and ending in 1
    proposal      default `redraw(measure, start)`
    Others as in `step`.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    >>> zero, far = torch.zeros(1, dtype=torch.float64), torch.full((1,), 3.0, dtype=torch.float64)
    >>> move = crank_nicolson(h, zero)
    >>> g = torch.Generator().manual_seed(0)
    >>> tempered = temper(h, zero, far, particles=4000, proposal=move, moves=5, generator=g)
    >>> bool((tempered.log_ratio - 4.5).abs() < 0.2)                                # G(3) − G(0) = 9/2
    True
    """
    start, end = _ends(measure, start, end)
    ladder = None if temperatures is None else _ladder(temperatures)
    if not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(sentence("temper.max_steps", "a number of steps ≥ 1", max_steps, "Pass at least 1."))
    proposal = redraw(measure, start) if proposal is None else proposal
    state = init(measure, start, particles, generator=generator)
    path, infos = [state.temperature], []
    options = {"target": target, "moves": moves, "resample": resample, "generator": generator}
    for count in range(max_steps if ladder is None else len(ladder)):
        temperature = None if ladder is None else ladder[count]
        state, info = step(state, end - start, proposal, temperature=temperature, **options)
        path.append(state.temperature)
        infos.append(info)
        if bool((state.temperature >= 1).all()):
            break
    status = torch.where(state.temperature >= 1, int(Status.CONVERGED), int(Status.MAX_STEPS)).to(torch.int8)
    effective, acceptance = (torch.stack(part) for part in zip(*infos, strict=True))
    last = state.particles, state.log_weights, state.log_ratio
    return Tempered(*last, torch.stack(path), effective, acceptance, status)


def redraw(measure: Measure, start: Tensor) -> Proposal:
    """Propose a fresh draw of p_η0: for any measure that can be sampled; accepted rarely once p_η is far from p_η0.

    start  η0, (*batch, q, d) or (d,); the proposal maps particles (*batch, q, n, d) to new ones

    >>> import torch
    >>> from cumulant import Gaussian
    >>> propose = redraw(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([3.0]))               # N(3, 1)
    >>> abs(float(propose(torch.zeros(4000, 1), torch.Generator().manual_seed(0)).mean()) - 3) < 0.1
    True
    """

    def propose(x: Tensor, generator: torch.Generator) -> Tensor:
        # one start for many queries must not give them one draw in common
        return measure.sample(start.expand(*x.shape[:-2], -1), x.shape[-2], generator=generator)

    return propose


def crank_nicolson(measure: Gaussian, start: Tensor, step: float = 0.5) -> Proposal:
    """Propose x′ = m + √(1−s²)(x − m) + s(ξ − m), ξ ~ p_η0 with mean m: a step of size s that leaves N(m, Σ) alone.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> propose = crank_nicolson(Gaussian(torch.zeros(1), torch.eye(1)), torch.zeros(1), 0.6)
    >>> x = propose(torch.ones(4000, 1), torch.Generator().manual_seed(0))                        # N(0.8, 0.36)
    >>> abs(float(x.mean()) - 0.8) < 0.05, abs(float(x.std()) - 0.6) < 0.05
    (True, True)
    """
    if not isinstance(measure, Gaussian):
        got, advice = type(measure).__name__, "Use redraw for other measures."
        raise TypeError(sentence("crank_nicolson.measure", "a Gaussian", got, advice))
    if not 0 < step <= 1:
        raise ValueError(sentence("crank_nicolson.step", "a number in (0, 1]", step, "1 forgets where x was."))
    mean, redrawn = measure.mean(start)[..., None, :], redraw(measure, start)

    def propose(x: Tensor, generator: torch.Generator) -> Tensor:
        fresh = redrawn(x, generator)
        return mean + (1 - step**2) ** 0.5 * (x - mean) + step * (fresh - mean)

    return propose


def _next_temperature(w: Tensor, score: Tensor, t: Tensor, target: float) -> Tensor:
    """The largest t⁺ in (t, 1] with 1/Σp² ≥ target · (its value at t), by bisection: it falls as t⁺ grows."""
    goal = target * effective_size(w)
    low, high = torch.zeros_like(t), 1 - t
    whole = effective_size(w + high[..., None] * score) >= goal
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = effective_size(w + middle[..., None] * score) >= goal
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # at least one representable step, so that every run comes to an end
    onward = torch.maximum(t + low, torch.nextafter(t, torch.ones_like(t)))
    return torch.where(whole, 1.0, onward).to(t.dtype)


def metropolis_moves(
    x: Tensor, tilt: Tensor, proposal: Proposal, moves: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Metropolis moves for p_η(t), and the part of them accepted."""
    accepted = x.new_zeros(x.shape[:-2])
    for _ in range(moves):
        trial = proposal(x, generator)
        gain = ((trial - x) @ tilt[..., :, None])[..., 0]
        uniform = torch.rand(gain.shape, dtype=x.dtype, device=x.device, generator=generator)
        take = uniform.log() < gain
        x = torch.where(take[..., None], trial, x)
        accepted = accepted + take.to(x.dtype).mean(-1)
    return x, accepted / max(1, moves)


def _ends(measure: Measure, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    for name, eta in (("start", start), ("end", end)):
        require_float(f"temper.{name}", eta)
        if not holds(measure.log_normalizer(eta).isfinite()):
            advice = "Between two points of the domain every η is in it."
            raise ValueError(sentence(f"temper.{name}", "parameters with a finite G", f"{shape(eta)}", advice))
    require_alike("temper.end", end, "start", start)
    common = broadcast("temper.end", start.shape, end.shape)
    return start.expand(common), end.expand(common)


def _ladder(temperatures: Sequence[float]) -> list[float]:
    ladder = [float(t) for t in temperatures]
    rising = all(a < b for a, b in zip([0.0, *ladder], ladder, strict=False))
    if not ladder or not rising or ladder[-1] != 1:
        expected, advice = "numbers that rise from above 0 to 1", "End in 1; 0 is where it starts."
        raise ValueError(sentence("temper.temperatures", expected, list(temperatures), advice))
    return ladder
