"""Transformations of one measure, whose closed forms follow from those of the base.

c * h           Scaled        G + log c        mass
A @ h           Image         G(Aᵀη)           W_K, W_V
h.shift(b)      Shifted       G + ⟨b,η⟩        translation
h.tilt(η0)      Tilted        G(η + η0)        a prior on the query; not renormalised
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_finite, require_float, sentence, shape
from cumulant.measures.base import Hull, Measure, first_tensor, per_query
from cumulant.measures.dual import hull_from_fisher
from cumulant.solve import Solution, Status
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@dataclass(frozen=True, eq=False, repr=False)
class Transformed(Measure):
    """A measure derived from ``base``, by default with its batch, its query rows and its family at `_pull(η)`."""

    base: Measure

    @property
    def dim(self) -> int:
        return self.base.dim

    @property
    def batch_shape(self) -> torch.Size:
        return self.base.batch_shape

    @property
    def query_rows(self) -> int | None:
        return self.base.query_rows

    def _check_vector(self, argument: str, vector: object) -> None:
        where = f"{type(self).__name__}.{argument}"
        v = require_float(where, vector)
        if v.ndim == 0 or v.shape[-1] != self.base.dim:
            raise ValueError(sentence(where, f"shape (*batch, d={self.base.dim})", shape(v), "Check the last axis."))
        require_finite(where, v)
        _agree_tensor(where, v, self.base)
        broadcast(where, v.shape[:-1], self.base.batch_shape)

    def _pull(self, eta: Tensor) -> Tensor:
        """The natural parameter of ``base`` that belongs to η."""
        return eta

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return self.base.log_normalizer(self._pull(eta))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self.base.mean(self._pull(eta))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return self.base.fisher_mv(self._pull(eta), v)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self.base.fisher(self._pull(eta))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        return self.base.sample(self._pull(eta), n, generator=generator)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Transformed):
    """c · h: G + log c; the law p_η does not change."""

    log_scale: Tensor | float

    @staticmethod
    def by(base: Measure, mass: int | float | Tensor) -> Scaled:
        try:
            c = torch.as_tensor(mass, dtype=None if isinstance(mass, Tensor) else torch.float64)
        except (TypeError, ValueError, RuntimeError):
            expected, advice = "a number or tensor of masses c", "Measures multiply by convolve(h, g) or product(h, g)."
            raise TypeError(sentence("c * h", expected, type(mass).__name__, advice)) from None
        if not holds((c >= 0) & (c < torch.inf)):
            advice = "Measures are positive; to move mass use tilt."
            raise ValueError(sentence("c * h", "a finite mass c ≥ 0", mass, advice))
        if isinstance(mass, Tensor) and mass.is_floating_point():
            return Scaled(base, mass.log())
        number = not isinstance(mass, Tensor) and c.ndim == 0
        return Scaled(base, c.log().item() if number else c.to(base.empty_tensor()).log())

    def __post_init__(self):
        w = self.log_scale
        w = require_float("Scaled.log_scale", w if isinstance(w, Tensor) else torch.tensor(w, dtype=torch.float64))
        if not holds(w < torch.inf):
            advice = "A zero measure cannot be normalized."
            raise ValueError(sentence("Scaled.log_scale", "values below +inf", "NaN or +inf", advice))
        if not isinstance(self.log_scale, Tensor):
            return
        rows = self.base.query_rows
        own = self.base.batch_shape + (() if rows is None else (rows,))
        _agree_tensor("Scaled.log_scale", w, self.base)
        broadcast("Scaled.log_scale", w.shape, own)

    @property
    def batch_shape(self) -> torch.Size:
        w = self.log_scale
        if not isinstance(w, Tensor):
            return self.base.batch_shape
        own = w.shape if self.base.query_rows is None else w.shape[:-1]
        return broadcast("batch_shape", own, self.base.batch_shape)

    def _rows(self, like: Tensor) -> Tensor:
        """log c with a query axis."""
        w = self.log_scale
        if not isinstance(w, Tensor):
            return torch.full((1,), w, dtype=like.dtype, device=like.device)
        return w if self.base.query_rows is not None and w.ndim > 0 else w[..., None]

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return add_logs(self.base.log_normalizer(eta), self._rows(eta))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._alive(self.base.mean(eta))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return self._alive(self.base.fisher_mv(eta, v))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self._alive(self.base.fisher(eta), extra=2)

    def _alive(self, x: Tensor, extra: int = 1) -> Tensor:
        """Zero where c = 0: the zero measure has mean 0."""
        keep = (self._rows(x) > -torch.inf)[(...,) + (None,) * extra]
        return torch.where(keep, x, 0)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        if not holds(self._rows(eta) > -torch.inf):
            raise ValueError(sentence("Scaled.sample", "a measure of positive mass", "c = 0", "Scale by c > 0."))
        return self.base.sample(eta, n, generator=generator)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        solution = self.base.natural(mean, max_steps=max_steps)
        status = torch.where(self._rows(mean) == -torch.inf, int(Status.OUTSIDE), solution.status)
        return replace(solution, status=status.to(solution.status.dtype))

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        return self.base.conjugate(mean) - self._rows(mean)

    def hull(self) -> Hull:
        hull = self.base.hull()
        return hull._replace(bound=hull.bound - self._rows(hull.bound))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Image(Transformed):
    """The image of h under x ↦ A x: G(Aᵀη), mean A m, covariance A C Aᵀ (S2-E9 repaired).

    matrix  (*batch, d', d); d' may be smaller or larger than d

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = torch.tensor([[1.0, 1.0]]) @ Gaussian(torch.zeros(2), torch.eye(2))
    >>> h.fisher(torch.zeros(1))
    tensor([[2.]])
    """

    matrix: Tensor

    def __post_init__(self):
        a = require_float("Image.matrix", self.matrix)
        if a.ndim < 2 or a.shape[-1] != self.base.dim:
            expected = f"A @ h with A of shape (*batch, d', d={self.base.dim})"
            raise ValueError(sentence("Image.matrix", expected, shape(a), "Transpose A, or check h.dim."))
        require_finite("Image.matrix", a)
        _agree_tensor("Image.matrix", a, self.base)
        broadcast("Image.matrix", a.shape[:-2], self.base.batch_shape)

    @property
    def dim(self) -> int:
        return self.matrix.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", self.matrix.shape[:-2], self.base.batch_shape)

    def _pull(self, eta: Tensor) -> Tensor:
        return eta @ self.matrix  # Aᵀη for row vectors

    def _push(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._push(self.base.mean(self._pull(eta)))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return self._push(self.base.fisher_mv(self._pull(eta), self._pull(v)))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        a = self.matrix[..., None, :, :]
        return a @ self.base.fisher(self._pull(eta)) @ a.mT

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        return self.base.sample(self._pull(eta), n, generator=generator) @ self.matrix[..., None, :, :].mT

    def hull(self) -> Hull:
        """Every point of the image has a preimage of no larger G*, so the bound stays."""
        return hull_from_fisher(self)._replace(bound=self.base.hull().bound)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Shifted(Transformed):
    """h translated by b: G + ⟨b,η⟩, mean + b, same covariance."""

    offset: Tensor

    def __post_init__(self):
        self._check_vector("offset", self.offset)

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", self.offset.shape[:-1], self.base.batch_shape)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return add_logs(self.base.log_normalizer(eta), (self.offset[..., None, :] * eta).sum(-1))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return vanish(self.base.mean(eta) + self.offset[..., None, :], self.base.log_normalizer(eta))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        return self.base.sample(eta, n, generator=generator) + self.offset[..., None, None, :]

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        return self.base.natural(mean - self.offset[..., None, :], max_steps=max_steps)

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        return self.base.conjugate(mean - self.offset[..., None, :])

    def hull(self) -> Hull:
        return self.base.hull()


@final
@dataclass(frozen=True, eq=False, repr=False)
class Tilted(Transformed):
    """e^⟨x,η0⟩ h(dx): G(η + η0). Not renormalised; `.normalized()` subtracts G(η0)."""

    eta0: Tensor

    def __post_init__(self):
        self._check_vector("eta0", self.eta0)

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", self.eta0.shape[:-1], self.base.batch_shape)

    def _pull(self, eta: Tensor) -> Tensor:
        return eta + self.eta0[..., None, :]

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        solution = self.base.natural(mean, max_steps=max_steps)
        return replace(solution, value=solution.value - self.eta0[..., None, :])

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        """G*(μ) − ⟨η0, μ⟩."""
        return self.base.conjugate(mean) - (mean * self.eta0[..., None, :]).sum(-1)


def add_logs(*terms: Tensor) -> Tensor:
    """A sum of logarithms where the zero measure wins: −inf + ∞ = −inf, because 0 · ∞ is 0 for measures."""
    total = functools.reduce(torch.add, terms)
    empty = functools.reduce(torch.logical_or, [(t == -torch.inf) for t in terms])
    return torch.where(empty, -torch.inf, total)


def vanish(moment: Tensor, log_normalizer: Tensor) -> Tensor:
    """A moment, or 0 where G = −inf: the zero measure has none."""
    extra = (None,) * (moment.ndim - log_normalizer.ndim)
    return torch.where((log_normalizer > -torch.inf)[(..., *extra)], moment, 0)


def _agree_tensor(where: str, tensor: Tensor, base: Measure) -> None:
    own = first_tensor(base)
    if own is not None and (own.dtype != tensor.dtype or own.device != tensor.device):
        expected = f"dtype {own.dtype} on {own.device} as the measure"
        got, advice = f"{tensor.dtype} on {tensor.device}", "Call .to(...) on one of them."
        raise TypeError(sentence(where, expected, got, advice))
