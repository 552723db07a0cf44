"""Checks of the shapes and values of the parameters of switching models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape

NAME = "SwitchingLinearGaussian"
ROUNDED = 1e-6  # how far a row of probabilities may be from 1: numbers typed with six digits are welcome
FLAT = 1e-6  # smallest singular value of an embedding, relative to its largest, that still counts
AXES = {  # of one mode's entry: d is the size of the state, m that of an observation
    "dynamics": "dd",
    "process_noise": "dd",
    "observation": "md",
    "observation_noise": "mm",
    "state_offset": "d",
    "observation_offset": "m",
    "initial_mean": "d",
    "initial_covariance": "dd",
}
RANKS = {name: len(axes) for name, axes in AXES.items()} | {"transition": 1}


def varies(name: str, value: Tensor) -> bool:
    """Whether a parameter has a time axis before its mode axis."""
    return not name.startswith("initial") and value.ndim >= RANKS[name] + 2


def at_step(name: str, value: Tensor, t: int) -> Tensor:
    """A parameter at step t, (*batch, M, …)."""
    return value.select(-2 - RANKS[name], t) if varies(name, value) else value


def own_batch(name: str, value: Tensor) -> torch.Size:
    """The batch axes of a parameter of which every sequence has its own; () where all share it."""
    others = RANKS[name] + 1 + (not name.startswith("initial"))  # one mode, the modes, time
    return value.shape[: max(0, value.ndim - others)]


def shared_batch(model: str, parameters: dict[str, Tensor]) -> torch.Size:
    """The batch axes that parameters of their own sequences have in common, () if there are none."""
    own = {name: own_batch(name, value) for name, value in parameters.items()}
    own = {name: batch for name, batch in own.items() if batch}
    if len(set(own.values())) > 1:
        got = ", ".join(f"{name} {tuple(batch)}" for name, batch in own.items())
        raise ValueError(sentence(model, "one *batch for all parameters that have it", got, "Expand the others."))
    return next(iter(own.values()), torch.Size())


def require_shared(where: str, model: object) -> None:
    """Refuse a model of which every sequence has parameters of its own."""
    batch = getattr(model, "batch_shape", ())
    if len(batch):
        advice = "Run the sequences one at a time, each with its own model."
        raise ValueError(sentence(where, "parameters that all sequences share", f"{tuple(batch)} of them", advice))


def checked(transition: Tensor, parameters: dict) -> dict[str, Tensor]:
    """Every parameter with a mode axis, after its shape and values have been checked."""
    tensors = {name: _stacked(name, value) for name, value in parameters.items() if value is not None}
    for name in ("dynamics", "observation"):
        if tensors[name].ndim < 2:
            advice = "Use x[:, None] or x[None] to make a matrix."
            raise ValueError(sentence(f"{NAME}.{name}", "a matrix for each mode", shape(tensors[name]), advice))
    sizes = {"d": tensors["dynamics"].shape[-1], "m": tensors["observation"].shape[-2]}
    modes, complete = transition.shape[-1], {}
    for name, axes in AXES.items():
        value, event = tensors.get(name), tuple(sizes[axis] for axis in axes)
        if value is None:
            complete[name] = transition.new_zeros(modes, *event)
            continue
        require_alike(f"{NAME}.{name}", value, "transition", transition)
        require_finite(f"{NAME}.{name}", value)
        complete[name] = _with_modes(name, value, modes, event)
    for name in ("process_noise", "observation_noise", "initial_covariance"):
        check_covariance(f"{NAME}.{name}", complete[name], definite=name == "observation_noise")
    return complete


def _stacked(name: str, value: object) -> Tensor:
    """A tensor, or one for each mode in a sequence."""
    where = f"{NAME}.{name}"
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        return require_float(where, value)
    parts = [require_float(where, part) for part in value]
    if not parts or any(p.shape != parts[0].shape or p.ndim < RANKS[name] for p in parts):
        got = ", ".join(shape(p) for p in parts) or "none"
        expected, advice = "one tensor a mode, all of one shape", "Use embeddings for sizes that differ."
        raise ValueError(sentence(where, expected, got, advice))
    return torch.stack(parts, -1 - RANKS[name])


def _with_modes(name: str, value: Tensor, modes: int, event: tuple[int, ...]) -> Tensor:
    rank = len(event)
    timed = not name.startswith("initial")
    extra = value.ndim - rank
    fits = value.shape[extra:] == event and (extra == 0 or value.shape[extra - 1] == modes)
    if extra < 0 or not fits:
        axes = ", ".join(map(str, event))
        choices = [f"({axes})", f"(M={modes}, {axes})"]
        choices += [f"(T, M={modes}, {axes})"] if timed else []
        choices += [f"(*batch, {'T, ' if timed else ''}M={modes}, {axes})"]
        advice = "d is the last axis of dynamics, m the rows of observation, M the rows of transition."
        raise ValueError(sentence(f"{NAME}.{name}", "shape " + " or ".join(choices), shape(value), advice))
    return value.expand(modes, *event) if extra == 0 else value


def check_covariance(where: str, value: Tensor, definite: bool) -> None:
    """Symmetric and positive semidefinite, or definite, up to rounding."""
    problem = covariance_problem(value, definite)
    if problem is not None:
        raise ValueError(sentence(where, *problem))


def covariance_problem(value: Tensor, definite: bool) -> tuple[str, str, str] | None:
    """What was expected of covariances, what they are, and what to do; None where nothing is wrong."""
    matrices = value.detach()
    if not matrices.numel() or torch.compiler.is_compiling():
        return None
    slack = 1e3 * torch.finfo(value.dtype).eps
    if _is_clear(matrices.double(), slack, definite):
        return None
    if not holds(matrices.isfinite()):
        return "finite numbers", "NaN or infinity", "It is a covariance."
    plain, scaled = (_departures(m) for m in (matrices.double(), _correlations(matrices.double())))
    asymmetry = torch.minimum(plain.asymmetry, scaled.asymmetry)
    if not holds(asymmetry <= slack):
        got = f"a relative asymmetry of {asymmetry.max().item():.2g}"
        return "symmetric matrices", got, "Pass (S + S.mT) / 2 if it is rounding."
    if definite and not holds(scaled.smallest > 0):
        got = f"a smallest eigenvalue of {scaled.smallest.min().item():.2g} in units of the deviations"
        return "positive definite matrices", got, "An entry observed without noise needs a small variance."
    smallest = torch.maximum(plain.smallest, scaled.smallest)
    if not holds(smallest >= -slack * value.shape[-1]):
        got = f"a smallest eigenvalue of {smallest.min().item():.2g} relative to its largest entry"
        return "positive semidefinite matrices", got, "Clip the eigenvalues at 0."
    return None


def _is_clear(matrices: Tensor, slack: float, definite: bool) -> bool:
    """Whether a Cholesky factor says it: most are sound, and eigenvalues of all gaps of all tracks take far longer."""
    if not holds((matrices - matrices.mT).abs().amax((-2, -1)) <= slack * matrices.abs().amax((-2, -1))):
        return False
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    margin = slack if definite else -slack * matrices.shape[-1] / 2
    return holds(torch.linalg.cholesky_ex(_correlations(matrices) - margin * eye).info == 0)


class Departures(NamedTuple):
    """Asymmetry and smallest eigenvalue of matrices, relative to their largest entries."""

    asymmetry: Tensor
    smallest: Tensor


def _departures(matrices: Tensor) -> Departures:
    scale = matrices.abs().amax((-2, -1)).clamp_min(torch.finfo(matrices.dtype).tiny)
    asymmetry = (matrices - matrices.mT).abs().amax((-2, -1)) / scale
    return Departures(asymmetry, torch.linalg.eigvalsh(matrices / scale[..., None, None])[..., 0])


def _correlations(matrices: Tensor) -> Tensor:
    """Matrices in units of the deviations: being definite does not depend on units, its rounding does."""
    unit = matrices.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    unit = torch.where(unit > 0, unit, 1)[..., None]
    return matrices / unit / unit.mT


def checked_modes(model: str, transition: Tensor, initial_modes: Tensor | None, start: str, ranks=(2,)) -> Tensor:
    """The initial probabilities of the modes, after those, the transition and the start have been checked."""
    check_probabilities(f"{model}.transition", transition, ranks)
    modes = transition.shape[-1]
    if start not in ("prior", "belief"):
        advice = '"prior" is the law of x_1, "belief" that of x_0.'
        raise ValueError(sentence(f"{model}.start", '"prior" or "belief"', repr(start), advice))
    if initial_modes is None:
        return transition.new_full((modes,), 1 / modes)
    where = f"{model}.initial_modes"
    check_probabilities(where, initial_modes, (1,))
    require_alike(where, initial_modes, "transition", transition)
    if len(initial_modes) != modes:
        raise ValueError(sentence(where, f"shape (M={modes})", shape(initial_modes), "One a mode."))
    return initial_modes


def check_probabilities(where: str, value: object, ranks: tuple[int, ...]) -> None:
    """Rows of probabilities, with one of these numbers of axes."""
    p = require_float(where, value)
    convention = "rows are from, columns are to: transition[i, j] = P(s_t = j | s_{t−1} = i)"
    known = p.ndim in ranks or (p.ndim > 3 and 3 in ranks)
    if not known or not p.shape[-1] or (p.ndim > 1 and p.shape[-2] != p.shape[-1]):
        expected = " or ".join(
            {1: "shape (M)", 2: "shape (M, M)", 3: "(T, M, M) or (*batch, T, M, M)"}[rank] for rank in ranks
        )
        raise ValueError(sentence(where, expected, shape(p), f"M ≥ 1; {convention}."))
    require_finite(where, p)
    total, slack = p.detach().sum(-1), max(ROUNDED, 100 * torch.finfo(p.dtype).eps)
    if not holds(p >= 0) or not holds((total - 1).abs() <= slack):
        worst = int((total - 1).abs().flatten().argmax())
        row = "the sum" if p.ndim == 1 else f"row {worst % p.shape[-2]} with sum"
        got = f"{row} {total.flatten()[worst].item():.6g} and a smallest entry of {p.min().item():.3g}"
        expected = "probabilities with sum 1" if p.ndim == 1 else "rows of probabilities with sum 1"
        advice = "Divide by the sum." if p.ndim == 1 else f"In this library {convention}."
        raise ValueError(sentence(where, expected, got, advice))


def check_steps(parameters: dict[str, Tensor]) -> None:
    """Parameters that vary in time must do so for equally many steps."""
    lengths = {name: p.shape[-2 - RANKS[name]] for name, p in parameters.items() if varies(name, p)}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(sentence(NAME, "one T for all parameters that vary in time", got, "Repeat the shorter ones."))


def embedded(transition: Tensor, embeddings: Sequence[Tensor], parameters: dict) -> dict:
    """The parameters of every mode on the common space."""
    where, modes = f"{NAME}.embeddings", transition.shape[-1]
    maps = [require_float(where, e) for e in embeddings]
    if len(maps) != modes or any(e.ndim != 2 or e.shape[0] != maps[0].shape[0] for e in maps):
        got = ", ".join(shape(e) for e in maps)
        raise ValueError(sentence(where, f"M={modes} matrices (D, d_k) with one D", got, "One a mode."))
    for k, e in enumerate(maps):
        require_alike(where, e, "transition", transition)
        require_finite(where, e)
        values = torch.linalg.svdvals(e.detach())
        if e.shape[1] > e.shape[0] or not bool(values[-1] > FLAT * values[0]):
            got = f"{shape(e)} with singular values from {values[-1].item():.2g} to {values[0].item():.2g} for mode {k}"
            advice = "A state must be readable from its embedding."
            raise ValueError(sentence(where, "embeddings of full column rank", got, advice))
    pairs = [(e, torch.linalg.pinv(e)) for e in maps]
    lifted = {name: _lifted(name, parameters[name], pairs) for name in LIFTS if parameters[name] is not None}
    return parameters | lifted


LIFTS = {  # how one mode's own parameter v becomes one on the common space, e its embedding and i the inverse of that
    "dynamics": lambda v, e, i: e @ v @ i,
    "process_noise": lambda v, e, i: e @ v @ e.mT,
    "observation": lambda v, e, i: v @ i,
    "state_offset": lambda v, e, i: v @ e.mT,
    "initial_mean": lambda v, e, i: v @ e.mT,
    "initial_covariance": lambda v, e, i: e @ v @ e.mT,
}


def _lifted(name: str, value: object, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    where = f"{NAME}.{name}"
    if isinstance(value, Tensor) or not isinstance(value, Sequence) or len(value) != len(pairs):
        got = shape(value) if isinstance(value, Tensor) else type(value).__name__
        expected = f"a sequence of M={len(pairs)} tensors, one in each mode's own size, with embeddings"
        raise ValueError(sentence(where, expected, got, "Use list(tensor) if the sizes are equal."))
    lifted = []
    for k, (part, (embedding, inverse)) in enumerate(zip(value, pairs, strict=True)):
        require_alike(where, require_float(where, part), "embeddings", embedding)
        own = embedding.shape[1]
        square = RANKS[name] == 2 and name != "observation"
        if part.ndim < RANKS[name] or part.shape[-1] != own or (square and part.shape[-2] != own):
            expected = f"size d_{k}={own} in mode {k}, the columns of its embedding"
            raise ValueError(sentence(where, expected, shape(part), "Match the embeddings."))
        lifted.append(LIFTS[name](part, embedding, inverse))
    return lifted
