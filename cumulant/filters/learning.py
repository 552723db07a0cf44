"""Learning the parameters of a switching linear-Gaussian model: expectation–maximisation with the smoother.

    E-step   the smoother's moments of (x_{t−1}, x_t), (x_t, y_t) and probabilities of (s_{t−1}, s_t)
    M-step   transition[i, j] ∝ Σ_t P(s_{t−1} = i, s_t = j)
             F_j, b_j, Q_j from the weighted regression of x_t on x_{t−1}; H_j, c_j, R_j from that of y_t on x_t
             the initial law from the first step

Exact where the smoother is: then no step lowers the log-likelihood. With several modes the smoother is approximate and
so is this EM; it climbs the log-likelihood of `gpb` roughly, stops where a step lowers it, and returns the best model
met, which may be the initial one: where `smooth` fails, the first step already lowers it. The log-likelihood is
differentiable in every parameter, so that any optimiser can go on from there (docs/filters.md has an example).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, sentence
from cumulant.filters.beliefs import Beliefs, marginal
from cumulant.filters.fitting import Joint, completed, fit
from cumulant.filters.linear_gaussian import SwitchingLinearGaussian
from cumulant.filters.linear_laws import LinearLaw
from cumulant.filters.parameters import require_shared, varies
from cumulant.filters.passes import Link, Passes, levels
from cumulant.filters.projection import m_projection
from cumulant.filters.protocol import log_probabilities
from cumulant.filters.smoother import choose_passes, require_linear
from cumulant.filters.switching import gpb
from cumulant.solve import Status

LAWS = {  # u = A z + b + N(0, V): the parameters that are A, b and V
    "moves": ("dynamics", "state_offset", "process_noise"),
    "emissions": ("observation", "observation_offset", "observation_noise"),
    "first": ("", "initial_mean", "initial_covariance"),
}
PARAMETERS = (*LAWS["moves"], *LAWS["emissions"], *LAWS["first"][1:], "transition", "initial_modes")


class Learned(NamedTuple):
    """The result of EM.

    model            the best model met on the way: no other has a greater log p(y) by the filter of this order
    log_likelihoods  (k+1,) log p(y) of the initial model and after each of k steps, summed over the sequences; the last
                     may be that of a step which lowered it and was not taken
    status           CONVERGED; MAX_STEPS; STALLED where an approximate step lowered the log-likelihood; NONFINITE where
                     it led to a model without one
    step             after which step the model was met, 0 for the initial one
    """

    model: SwitchingLinearGaussian
    log_likelihoods: Tensor
    status: Status
    step: int

    @property
    def log_likelihood(self) -> Tensor:
        """log p(y) of the model, the greatest of all."""
        return self.log_likelihoods[self.step]


class Expected(NamedTuple):
    """Expected statistics of the E-step, all sequences together; cases are steps of sequences, time first.

    first           x at the first step, one case a sequence
    moves           (x_{t−1}, x_t) given s_t, with the times t of the cases
    emissions       x_t given s_t, likewise
    switches        (M, M), expected numbers of them
    """

    first: Joint
    moves: Joint
    move_times: Tensor
    emissions: Joint
    emission_times: Tensor
    switches: Tensor


def em(
    model: SwitchingLinearGaussian,
    y: Tensor,
    *,
    fixed: Collection[str] = (),
    shared: Collection[str] = (),
    steps: int = 50,
    tol: float = 1e-6,
    order: int = 2,
    method: str = "propagation",
    sweeps: int = 1,
    mask: Tensor | None = None,
) -> Learned:
    """Approximate expectation–maximisation, from a model to start with; exact for one mode and for orders above T+1.

    y       (*batch, T, m), NaN where an entry is missing; all sequences share the parameters
    fixed   names of parameters to keep, such as ("observation", "initial_covariance"). What varies in time must be
            among them. Offsets that were left out of the model are zero, and learnt too unless they are fixed.
    shared  names of matrices and offsets that are one for all modes, and stay so
    steps   how often to improve at most
    tol     stop where log p(y) changes by no more than tol · (1 + |log p(y)|)
    order   of the filter and the smoother
    method  of the smoother, and its sweeps: see `smooth`
    mask    (*batch, T) Boolean, True up to the end of each sequence

    What the data do not determine stays as it was, such as the matrices of a mode that is never visited, and zeros of
    the transition stay zeros. ``observation_noise`` stays positive definite. A single sequence determines no initial
    covariance, whose maximum is at 0: fix it. EM climbs the nearest hill, so let the modes differ at the start.

    Returned is the best model met, never one with a lower log p(y) than the initial one. With several modes a step can
    lower it, the first one too; that step is not taken: ``status`` is STALLED. A higher order costs more and is less
    biased (docs/filters.md has both measured).

    >>> import torch
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> walk = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=0 * eye[0], initial_covariance=eye)
    >>> y = walk.simulate(20, batch_shape=(50,), generator=torch.Generator().manual_seed(0)).observations
    >>> start = replace(walk, process_noise=9 * eye, observation_noise=9 * eye)
    >>> keep = ("dynamics", "state_offset", "observation", "observation_offset", "initial_mean", "initial_covariance")
    >>> fit = em(start, y, fixed=keep)
    >>> round(fit.model.process_noise.item(), 2), round(fit.model.observation_noise.item(), 2), fit.status.name
    (1.05, 1.03, 'CONVERGED')
    """
    require_linear("em.model", model)
    _check(model, y, fixed, shared, steps, tol)
    passes = choose_passes("em", model, y, order, method, sweeps)
    free = set(PARAMETERS) - set(fixed)
    best, step, here = model, 0, model
    status, history = Status.MAX_STEPS, []
    with torch.no_grad():
        for k in range(steps + 1):
            history.append(gpb(here, y, order=passes.order, mask=mask).log_likelihood.sum())
            if not isfinite(history[-1]):
                status = Status.NONFINITE
                break
            gain = float(history[-1] - history[-2]) if k else torch.inf
            small = tol * (1 + float(history[-1].abs()))
            best, step = (here, k) if gain > 0 else (best, step)
            if gain <= small:
                status = Status.CONVERGED if gain >= -small else Status.STALLED
                break
            if k < steps:
                improved = _maximise(here, _expect(here, y, passes, mask), y, free, set(shared))
                if not all(holds(part.isfinite()) for part in improved.values()):
                    status = Status.NONFINITE
                    break
                try:
                    here = replace(here, **improved)
                except ValueError:  # a regression that nothing determined, whose noise is no covariance
                    status = Status.NONFINITE
                    break
    return Learned(best, torch.stack(history), status, step)


def _expect(model: SwitchingLinearGaussian, y: Tensor, passes: Passes, mask: Tensor | None) -> Expected:
    count, steps = y.shape[:-2].numel(), y.shape[-2]
    lengths = torch.full((count,), steps, device=y.device) if mask is None else mask.sum(-1).flatten()
    first, begin = 0, None
    if model.start == "belief":
        first = -1
        parts = log_probabilities(model.initial_modes), model.initial_mean, model.initial_covariance
        begin = Beliefs(*(part.expand(count, *part.shape) for part in parts))
    emissions, moves, switches = [], [], y.new_zeros(model.modes, model.modes)
    found = levels(model, y, passes, lengths, begin)
    for k, level in zip(reversed(range(steps - first)), found, strict=True):
        emissions.append(_emission(level.beliefs, lengths > first + k))
        if level.link is not None:
            here = lengths > first + k + 1
            moves.append(_move(level.link, here))
            switches = switches + _switches(level.link, here)
    emissions = emissions[::-1]
    return Expected(
        emissions[0]._replace(weights=emissions[0].weights * (lengths > 0)[:, None]),
        *_cases(moves[::-1], first + 1, model.modes, 2 * model.dim, y),
        *_cases(emissions[-first:], 0, model.modes, model.dim, y),
        switches,
    )


def _cases(parts: list[Joint], first: int, modes: int, size: int, like: Tensor) -> tuple[Joint, Tensor]:
    """Steps one after the other, and their times."""
    if not parts:
        return Joint(*(like.new_zeros(0, modes, *[size] * rank) for rank in range(3))), like.new_zeros(0).long()
    times = torch.arange(first, first + len(parts), device=like.device).repeat_interleave(len(parts[0].weights))
    return Joint(*(torch.cat(part) for part in zip(*parts, strict=True))), times


def _emission(beliefs: Beliefs, here: Tensor) -> Joint:
    log_weights, mean, covariance = marginal(beliefs)
    return Joint(torch.softmax(log_weights, -1) * here[:, None], mean, covariance)


def _move(link: Link, here: Tensor) -> Joint:
    """(x_{t−1}, x_t) given s_t, the older modes collapsed."""
    cross = link.gain @ link.later.covariance
    after = link.later.covariance.expand_as(cross)
    mean = torch.cat([link.mean, link.later.mean.expand_as(link.mean)], -1).flatten(1, -3)
    covariance = torch.cat([torch.cat([link.covariance, cross], -1), torch.cat([cross.mT, after], -1)], -2)
    log_weights = link.log_weights.flatten(1, -2)  # (batch, older, M)
    shares = torch.softmax(log_weights, 1).mT
    weights = torch.softmax(torch.logsumexp(log_weights, 1), -1)
    joint = m_projection(shares, mean.transpose(1, 2), covariance.flatten(1, -4).transpose(1, 2))
    return Joint(weights * here[:, None], *joint)


def _switches(link: Link, here: Tensor) -> Tensor:
    """(M, M), summed over the sequences."""
    weights = torch.softmax(link.log_weights.flatten(1), 1).reshape(link.log_weights.shape)
    return (weights.flatten(1, -3).sum(1) if weights.ndim > 3 else weights)[here].sum(0)


def _maximise(
    model: SwitchingLinearGaussian, expected: Expected, y: Tensor, free: set[str], shared: set[str]
) -> dict[str, Tensor]:
    """The parameters that are free, by name."""
    count, (steps, m) = y.shape[:-2].numel(), y.shape[-2:]
    rows = y.reshape(count, steps, m).transpose(0, 1).reshape(steps * count, m)  # cases, time first
    emissions = completed(expected.emissions, rows, _law(model, "emissions", expected.emission_times))
    cases = {"moves": (expected.moves, expected.move_times), "emissions": (emissions, expected.emission_times)}
    cases["first"] = expected.first, expected.emission_times
    updated = {}
    for kind, (joint, times) in cases.items():
        names = LAWS[kind]
        roles = dict(zip(names, LinearLaw._fields, strict=True))
        fields = ({roles[n] for n in names if n in group} for group in (free, shared))
        fitted = fit(joint, _law(model, kind, times), *fields)
        updated |= {name: part for name, part in zip(names, fitted, strict=True) if name in free}
    for name in {"process_noise", "initial_covariance"} & free:
        updated[name] = _floored(updated[name], y.new_zeros(()))  # rounding may have made eigenvalues negative
    if "observation_noise" in free:
        updated["observation_noise"] = _floored(updated["observation_noise"], _rounding(rows))
    if "transition" in free:
        updated["transition"] = _shares(expected.switches, model.transition)
    if "initial_modes" in free:
        updated["initial_modes"] = _shares(expected.first.weights.sum(0), model.initial_modes)
    return {name: part.expand_as(getattr(model, name)) for name, part in updated.items()}


def _law(model: SwitchingLinearGaussian, kind: str, times: Tensor) -> LinearLaw:
    """The parameters of a regression, those that vary for each case on its own."""
    nothing = model.initial_mean.new_zeros(model.modes, model.dim, 0)  # the first state is explained by nothing
    parts = [(name, getattr(model, name) if name else nothing) for name in LAWS[kind]]
    return LinearLaw(*(value[times] if name and varies(name, value) else value for name, value in parts))


def _shares(counts: Tensor, before: Tensor) -> Tensor:
    """Counts (…, M) as probabilities; those of before where nothing was counted."""
    total = counts.sum(-1, keepdim=True)
    known = total > torch.finfo(counts.dtype).eps
    return torch.where(known, counts / torch.where(known, total, 1), before)


def _rounding(y: Tensor) -> Tensor:
    """The variance that counts as rounding of the observations."""
    observed = ~y.isnan()
    size = torch.where(observed, y, 0).square().sum() / observed.sum().clamp_min(1)
    return torch.finfo(y.dtype).eps ** 0.75 * torch.where(size > 0, size, 1)


def _floored(noise: Tensor, floor: Tensor) -> Tensor:
    """Covariances whose eigenvalues are raised to a floor: the maximum of the likelihood among such matrices."""
    values, vectors = torch.linalg.eigh(noise)
    clipped = vectors * torch.maximum(values, floor)[..., None, :] @ vectors.mT
    return torch.where((values[..., :1] < floor)[..., None], (clipped + clipped.mT) / 2, noise)


def _check(
    model: SwitchingLinearGaussian, y: Tensor, fixed: Collection[str], shared: Collection[str], steps: int, tol: float
) -> None:
    require_float("em.y", y)
    require_shared("em.model", model)
    for where, names in {"em.fixed": fixed, "em.shared": shared}.items():
        known = PARAMETERS if where == "em.fixed" else PARAMETERS[:-2]
        if isinstance(names, str) or not set(names) <= set(known):
            got = repr(names) if isinstance(names, str) else ", ".join(sorted(set(names) - set(known)))
            raise ValueError(sentence(where, f"names among {', '.join(known)}", got, "Pass a tuple of them."))
    for name in PARAMETERS:
        value = getattr(model, name)
        if name not in fixed and name != "initial_modes" and varies(name, value):
            got, advice = f"{name} with T={value.shape[0]}", f'Add "{name}" to fixed.'
            raise ValueError(sentence("em.fixed", "every parameter that varies in time", got, advice))
        if name in shared and not varies(name, value) and not holds(value == value[:1]):
            advice = "Begin with one matrix for every mode."
            raise ValueError(sentence("em.shared", f"{name} equal in every mode", "modes that differ", advice))
    if steps < 0 or not tol >= 0 or y.ndim < 2 or not y.shape[-2]:
        got = f"{steps}, {tol} and y of shape {tuple(y.shape)}"
        raise ValueError(sentence("em", "steps ≥ 0, tol ≥ 0 and y with T ≥ 1", got, "50 and 1e-6 are the defaults."))
