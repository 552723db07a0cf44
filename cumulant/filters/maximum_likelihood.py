"""Learning the parameters of any switching model by its likelihood: gradients through the filter, quasi-Newton steps.

    θ̂ = argmax Σ log p(y | θ)                  the log-likelihood of a filter, exact or approximate as the filter is
    Cov(θ̂) ≈ I⁻¹,   I = −∇² Σ log p(y | θ̂)     the observed information

The model is built from the parameters by a function of yours, so that they may be anything that its functions, noises
and probabilities are made of. The search (Broyden, Fletcher, Goldfarb and Shanno) takes a step only where it raises the
log-likelihood; where a step leads to a model that is refused or has no likelihood, a shorter one is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_alike, require_finite, require_float, require_integer, sentence
from cumulant.filters.protocol import SwitchingModel
from cumulant.filters.records import Filtered
from cumulant.filters.switching import imm
from cumulant.solve import Status

Build = Callable[[dict[str, Tensor]], SwitchingModel]
Filter = Callable[..., Filtered]
ENOUGH = 1e-4  # part of the slope that a step must realise
HALVINGS = 30


class MaximumLikelihood(NamedTuple):
    """The result of a search; never worse than its start.

    parameters       by name, as given; those that were fixed too
    model            built from them
    log_likelihoods  (k+1,) log p(y) at the start and after each of k steps, ascending
    status           CONVERGED; MAX_STEPS; STALLED where no step along the search direction raises it; NONFINITE where
                     the start has no log-likelihood
    standard_errors  by name, for those that were not fixed: NaN where the information is not positive
    covariance       (n, n) of all entries that were not fixed, in the order of the names: I⁻¹
    held_out         log p of the held-out sequences at the start and at the end, (2,); None without them

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian, kalman
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> def level(p):                                        # one number, seen through unit noise: its mean
    ...     return SwitchingLinearGaussian(eye, eye, 0 * eye, eye, eye, initial_mean=p["x"], initial_covariance=0 * eye)
    >>> y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).double()
    >>> fit = maximum_likelihood(level, {"x": 0 * eye[0]}, y, run=kalman)
    >>> round(fit.parameters["x"].item(), 4), round(fit.standard_errors["x"].item(), 4)           # 2.5 and 1/√4
    (2.5, 0.5)
    """

    parameters: dict[str, Tensor]
    model: SwitchingModel
    log_likelihoods: Tensor
    status: Status
    standard_errors: dict[str, Tensor]
    covariance: Tensor
    held_out: Tensor | None


def maximum_likelihood(
    build: Build,
    start: Mapping[str, Tensor],
    y: Tensor,
    *,
    fixed: Collection[str] = (),
    run: Filter = imm,
    mask: Tensor | None = None,
    held_out: Tensor | None = None,
    held_out_mask: Tensor | None = None,
    steps: int = 100,
    tol: float = 1e-9,
) -> MaximumLikelihood:
    """The parameters of greatest log p(y) near a start, with standard errors (module docstring).

    build     parameters by name → a model; parameters are free real numbers, so take exp for a variance, sigmoid for a
              probability
    start     the parameters to begin with
    y         (*batch, T, m), NaN where an entry is missing, with a ``mask`` as in `gpb`; sequences share parameters
    fixed     names of parameters to keep
    run       the filter: `imm`, `kalman`, or functools.partial(gpb, order=3)
    held_out  further sequences whose log-likelihood is reported and not fitted, with ``held_out_mask``
    steps     how often to improve at most
    tol       stop where log p(y) rises by no more than tol · (1 + |log p(y)|)

    The search climbs the nearest hill, so let modes differ at the start. Standard errors hold for many observations.

    >>> import torch
    >>> from cumulant.filters import NonlinearMode, SwitchingNonlinear, kalman
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> def decay(p):                                          # x' = tanh(a x) + noise, seen through noise
    ...     mode = NonlinearMode(lambda x, t: torch.tanh(p["a"] * x), 0.01 * eye, eye, p["log_r"].exp() * eye)
    ...     return SwitchingNonlinear(eye, [mode], initial_mean=eye[0], initial_covariance=0.01 * eye)
    >>> truth = {"a": torch.tensor(1.5).double(), "log_r": torch.tensor(-4.0).double()}
    >>> y = decay(truth).simulate(6, batch_shape=(200,), generator=torch.Generator().manual_seed(0)).observations
    >>> start = {"a": torch.tensor(1.0).double(), "log_r": torch.tensor(-3.0).double()}
    >>> fit = maximum_likelihood(decay, start, y, run=kalman)
    >>> {name: (round(v.item(), 1), round(fit.standard_errors[name].item(), 2)) for name, v in fit.parameters.items()}
    {'a': (1.5, 0.02), 'log_r': (-4.0, 0.06)}
    """
    free = _check(start, y, fixed, steps, tol)
    objective = Objective(build, dict(start), free, y, run, mask)
    theta = torch.cat([start[name].detach().reshape(-1) for name in free]) if free else y.new_zeros(0)
    theta, history, status = _climb(objective, theta, steps, tol)
    covariance = _covariance(objective, theta)
    parameters = objective.named(theta)
    errors = objective.split(covariance.diagonal().sqrt())
    outside = None
    if held_out is not None:
        models = build(dict(start)), build(parameters)
        with torch.no_grad():
            totals = [run(model, held_out, mask=held_out_mask).log_likelihood.sum() for model in models]
        outside = torch.stack(totals)
    return MaximumLikelihood(parameters, build(parameters), history, status, errors, covariance, outside)


@dataclass(frozen=True, eq=False)
class Objective:
    """−log p(y) as a function of one vector, the free parameters flat."""

    build: Build
    start: dict[str, Tensor]
    free: list[str]
    y: Tensor
    run: Filter
    mask: Tensor | None

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """The entries by name, in the shapes of the start."""
        sizes = [self.start[name].numel() for name in self.free]
        parts = theta.split(sizes) if sizes else ()
        return {name: part.reshape(self.start[name].shape) for name, part in zip(self.free, parts, strict=True)}

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.start.items()} | self.split(theta)

    def __call__(self, theta: Tensor) -> tuple[float, Tensor]:
        """Value and gradient; infinite where there is no such model."""
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            try:
                value = -self.run(self.build(self.named(theta)), self.y, mask=self.mask).log_likelihood.sum()
            except (ValueError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                return inf, torch.zeros_like(theta)
            if not value.requires_grad:
                return value.item(), torch.zeros_like(theta)
            (gradient,) = torch.autograd.grad(value, theta, allow_unused=True)
        gradient = torch.zeros_like(theta) if gradient is None else gradient
        sound = isfinite(value.item()) and bool(gradient.isfinite().all())
        return (value.item(), gradient) if sound else (inf, torch.zeros_like(theta))


def _climb(objective: Objective, theta: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Status]:
    """BFGS with backtracking: values only fall."""
    value, gradient = objective(theta)
    if not isfinite(value):
        objective.run(objective.build(objective.named(theta)), objective.y, mask=objective.mask)  # says why
        return theta, theta.new_tensor([-value]), Status.NONFINITE
    history, inverse = [value], _first_inverse(gradient)
    for _ in range(steps):
        step = -inverse @ gradient
        if float(step @ gradient) >= 0:
            inverse = _first_inverse(gradient)
            step = -inverse @ gradient
        slope, size = float(step @ gradient), 1.0
        trial = objective(theta + step)
        for _ in range(HALVINGS):
            if trial[0] <= value + ENOUGH * size * slope:
                break
            size /= 2
            trial = objective(theta + size * step)
        gain = value - trial[0]
        if not gain > 0:
            done = float(gradient.abs().max()) <= tol**0.5 * (1 + abs(value)) if len(gradient) else True
            return theta, -theta.new_tensor(history), Status.CONVERGED if done else Status.STALLED
        inverse = _updated(inverse, size * step, trial[1] - gradient)
        theta, (value, gradient) = theta + size * step, trial
        history.append(value)
        if gain <= tol * (1 + abs(value)):
            return theta, -theta.new_tensor(history), Status.CONVERGED
    return theta, -theta.new_tensor(history), Status.MAX_STEPS


def _first_inverse(gradient: Tensor) -> Tensor:
    """A multiple of the identity whose step is at most of length 1."""
    eye = torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device)
    return eye / max(1.0, float(gradient.norm()))


def _updated(inverse: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The inverse of the Hessian after a step and the change of the gradient over it; as it was without curvature."""
    curvature = step @ change
    if not float(curvature) > 1e-12 * float(step.norm() * change.norm()):
        return inverse
    left = torch.eye(len(step), dtype=step.dtype, device=step.device) - torch.outer(step, change) / curvature
    return left @ inverse @ left.mT + torch.outer(step, step) / curvature


def _covariance(objective: Objective, theta: Tensor) -> Tensor:
    """The inverse of the observed information, by central differences of the gradient; NaN where it is not positive."""
    rows = []
    for k in range(len(theta)):
        size = torch.finfo(theta.dtype).eps ** (1 / 3) * (1 + abs(float(theta[k])))
        ahead, back = theta.clone(), theta.clone()
        ahead[k] += size
        back[k] -= size
        values = objective(ahead), objective(back)
        if not all(isfinite(value) for value, _ in values):
            return theta.new_full((len(theta), len(theta)), torch.nan)
        rows.append((values[0][1] - values[1][1]) / (2 * size))
    if not rows:
        return theta.new_zeros(0, 0)
    information = torch.stack(rows)
    root, failed = torch.linalg.cholesky_ex((information + information.mT) / 2)
    if int(failed):
        return torch.full_like(information, torch.nan)
    return torch.cholesky_inverse(root)


def _check(start: Mapping[str, Tensor], y: Tensor, fixed: Collection[str], steps: int, tol: float) -> list[str]:
    """The names that are free."""
    where = "maximum_likelihood"
    require_float(f"{where}.y", y)
    for name, value in start.items():
        require_alike(f"{where}.start[{name!r}]", require_float(f"{where}.start[{name!r}]", value), "y", y)
        require_finite(f"{where}.start[{name!r}]", value)
    if isinstance(fixed, str) or not set(fixed) <= set(start):
        got = repr(fixed) if isinstance(fixed, str) else ", ".join(sorted(set(fixed) - set(start)))
        raise ValueError(sentence(f"{where}.fixed", f"names among {', '.join(start)}", got, "Pass a tuple of them."))
    require_integer(f"{where}.steps", steps, 0)
    if not tol >= 0:
        raise ValueError(sentence(f"{where}.tol", "a number ≥ 0", tol, "1e-9 is the default."))
    return [name for name in start if name not in set(fixed)]
