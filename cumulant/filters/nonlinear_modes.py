"""Modes of a switching model as plain functions.

    x_t = f(x_{t−1}, t) + w,    w ~ N(0, Q)        or  f(x_{t−1}, w, t)
    y_t = h(x_t, t) + v,        v ~ N(0, R)        or  h(x_t, v, t)

A mode says how mean and covariance of the state move on, and which mean and covariance an observation then has; the
update, its likelihood, the collapse of modes and the smoother follow from those moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from cumulant.checks import require_finite, require_float, require_integer, sentence, shape
from cumulant.filters.moment_rules import Extended, MomentRule, PropagatedMoments
from cumulant.filters.noisy_map import Map, Noise, NoisyMap, normal_log_density, sample_normal
from cumulant.filters.parameters import check_covariance

NAME = "NonlinearMode"
EXTENDED = Extended()


class GaussianMode(ABC):
    """One mode of a `SwitchingNonlinear`: two methods, from moments of the state to moments of what follows.

        x_{t−1} ~ N(m, P)  ↦  E[x_t], Cov(x_t), Cov(x_{t−1}, x_t)
        x_t     ~ N(m, P)  ↦  E[y_t], Cov(y_t), Cov(x_t, y_t)

    angles        entries of y that are angles in radians: differences from a prediction are wrapped into [−π, π)
    state_angles  entries of x that are; they continue beyond ±π rather than jump
    iterations    how often an update linearises the observation, the first time about the prediction and then about
                  the posterior of the time before

    With covariance 0 the moments are those given x, from which particles are drawn and weighed.

    >>> import torch
    >>> class Halving(GaussianMode):
    ...     def predict(self, mean, covariance, t):
    ...         return PropagatedMoments(mean / 2, covariance / 4 + 1, covariance / 2)
    ...     def observe(self, mean, covariance, t):
    ...         return PropagatedMoments(mean, covariance + 1, covariance)
    >>> Halving().predict(torch.tensor([[2.0]]), torch.tensor([[[4.0]]]), 0).covariance
    tensor([[[2.]]])
    """

    angles: tuple[int, ...] = ()
    state_angles: tuple[int, ...] = ()
    iterations: int = 1

    @abstractmethod
    def predict(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        """Moments of x_t from those of x_{t−1}: (…, d) and (…, d, d) → mean, covariance, and Cov(x_{t−1}, x_t).

        ``t`` is the number of the step from 0, or the row of the model's ``inputs``.
        """

    @abstractmethod
    def observe(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        """Moments of y_t from those of x_t: (…, d) and (…, d, d) → mean, covariance, and Cov(x_t, y_t)."""

    def sample_next(self, x: Tensor, t: Any, generator: torch.Generator | None) -> Tensor:
        """A draw of x_t for each x_{t−1} (…, d): normal with the moments of `predict` unless overridden."""
        return sample_normal(self.predict(x, _no_covariance(x), t), generator)

    def sample_observation(self, x: Tensor, t: Any, generator: torch.Generator | None) -> Tensor:
        """A draw of y_t for each x_t (…, d): normal with the moments of `observe` unless overridden."""
        return sample_normal(self.observe(x, _no_covariance(x), t), generator)

    def log_likelihood(self, x: Tensor, y: Tensor, observed: Tensor | None, t: Any) -> Tensor:
        """log p(y_t | x_t) for x (…, d) and y (…, m): normal with the moments of `observe` unless overridden.

        Entries of y that were not ``observed`` (…, m) are left out.
        """
        moments = self.observe(x, _no_covariance(x), t)
        return normal_log_density(y, moments.mean, moments.covariance, observed, self.angles)


@final
@dataclass(frozen=True, eq=False)
class NonlinearMode(GaussianMode):
    """A mode whose motion and measurement are functions, or matrices, with normal noise.

        x_t = f(x_{t−1}, t) + N(0, Q),      y_t = h(x_t, t) + N(0, R)

    dynamics           f(x, t), (…, d) → (…, d), or a matrix F (d, d), for which the prediction is exact
    process_noise      Q (d, d), or a function of t with values (d, d) or (sequences, d, d)
    observation        h(x, t), (…, d) → (…, m), or a matrix H (m, d)
    observation_noise  R (m, m), or a function of t with values (m, m) or (sequences, m, m)
    rule               `Extended()`, `Unscented(alpha, beta, kappa)`, `Cubature()`, `GaussHermite(order)`
    angles             entries of y that are angles in radians, such as a bearing
    state_angles       entries of x that are, such as a heading
    additive_process_noise, additive_observation_noise
                       False: the function is f(x, w, t) or h(x, v, t), with noise (…, r) of covariance Q or R (r, r)
    iterations         2 or more: the iterated update, Gauss–Newton for `Extended`, posterior linearisation else

    Functions act on every vector by itself: x has shape (…, d), its entries are x[..., i], results are stacked along
    the last axis. ``t`` is the number of the step from 0, or the row of the model's ``inputs``: (k,), or (sequences, k)
    which broadcasts with the leading axes of x. Whatever a function captures is differentiated.

    >>> import torch
    >>> def distance(x, t):
    ...     return torch.hypot(x[..., :1], x[..., 1:])
    >>> mode = NonlinearMode(torch.eye(2), 0.1 * torch.eye(2), distance, torch.eye(1))
    >>> mode.observe(torch.tensor([[3.0, 4.0]]), torch.eye(2)[None], 0).mean
    tensor([[5.]])
    """

    dynamics: Map
    process_noise: Noise
    observation: Map
    observation_noise: Noise
    rule: MomentRule = EXTENDED
    angles: tuple[int, ...] = ()
    state_angles: tuple[int, ...] = ()
    additive_process_noise: bool = True
    additive_observation_noise: bool = True
    iterations: int = 1

    def __post_init__(self) -> None:
        for name in ("dynamics", "observation"):
            _check_map(name, getattr(self, name))
        for name in ("process_noise", "observation_noise"):
            _check_noise(name, getattr(self, name))
        if not isinstance(self.rule, MomentRule):
            advice = "Use Extended(), Unscented(), Cubature() or GaussHermite()."
            raise TypeError(sentence(f"{NAME}.rule", "a MomentRule", type(self.rule).__name__, advice))
        for name in ("angles", "state_angles"):
            object.__setattr__(self, name, _indices(name, getattr(self, name)))
        require_integer(f"{NAME}.iterations", self.iterations, 1)
        for additive, name in (("additive_process_noise", "dynamics"), ("additive_observation_noise", "observation")):
            if not getattr(self, additive) and isinstance(getattr(self, name), Tensor):
                expected, advice = f"a function where {additive} is False", "A matrix has additive noise."
                raise ValueError(sentence(f"{NAME}.{name}", expected, "a matrix", advice))

    def predict(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        return self.motion(mean.shape[-1]).moments(mean, covariance, t)

    def observe(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        return self.sensor().moments(mean, covariance, t)

    def sample_next(self, x: Tensor, t: Any, generator: torch.Generator | None) -> Tensor:
        return self.motion(x.shape[-1]).sample(x, t, generator)

    def sample_observation(self, x: Tensor, t: Any, generator: torch.Generator | None) -> Tensor:
        return self.sensor().sample(x, t, generator)

    def log_likelihood(self, x: Tensor, y: Tensor, observed: Tensor | None, t: Any) -> Tensor:
        """log p(y_t | x_t); with noise that is not additive, of the normal law that the rule finds over the noise."""
        if not self.additive_observation_noise:
            return super().log_likelihood(x, y, observed, t)
        sensor = self.sensor()
        noise = sensor.noise_at(t)
        return normal_log_density(y, sensor.evaluate((x,), t, noise.shape[-1]), noise, observed, self.angles)

    def motion(self, d: int, name: str = "dynamics") -> NoisyMap:
        """x_{t−1} ↦ x_t with its noise."""
        additive, angles = self.additive_process_noise, self.state_angles
        return NoisyMap(name, self.dynamics, self.process_noise, additive, self.rule, angles, d, continues=True)

    def sensor(self, name: str = "observation") -> NoisyMap:
        """x_t ↦ y_t with its noise."""
        additive, angles = self.additive_observation_noise, self.angles
        return NoisyMap(name, self.observation, self.observation_noise, additive, self.rule, angles)


def _no_covariance(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape, x.shape[-1])


def _check_map(name: str, value: object) -> None:
    where = f"{NAME}.{name}"
    if isinstance(value, Tensor):
        require_finite(where, require_float(where, value))
        if value.ndim != 2:
            advice = "What varies in time is a function of (x, t)."
            raise ValueError(sentence(where, "a matrix or a function", shape(value), advice))
    elif not callable(value):
        advice = "Give f(x, t), (…, d) → (…, k), or a matrix."
        raise TypeError(sentence(where, "a function or a matrix", type(value).__name__, advice))


def _check_noise(name: str, value: object) -> None:
    where = f"{NAME}.{name}"
    if callable(value) and not isinstance(value, Tensor):
        return
    noise = require_float(where, value)
    if noise.ndim != 2 or noise.shape[0] != noise.shape[1]:
        advice = "What varies in time is a function of t."
        raise ValueError(sentence(where, "a square matrix or a function", shape(noise), advice))
    require_finite(where, noise)
    check_covariance(where, noise, definite=name == "observation_noise")


def _indices(name: str, value: Sequence[int]) -> tuple[int, ...]:
    entries = tuple(value) if isinstance(value, Sequence) else (value,)
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in entries) or len({*entries}) < len(entries):
        advice = "Count entries from 0, each once."
        raise ValueError(sentence(f"{NAME}.{name}", "indices of entries", repr(value), advice))
    return entries
