"""Compositions of several measures, whose closed forms follow from those of the parts; they may be nested.

h + g           Sum           logaddexp(G_h, G_g)     concatenate keys, shards, cache blocks; mixtures
convolve(h, g)  Convolution   G_h + G_g               sum of independent draws; heads writing to one stream
product(h, g)   Product       G_h(η_1) + G_g(η_2)     independent heads
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, sentence
from cumulant.kernels.dense import accumulate, normalize
from cumulant.measures.base import Hull, Measure, first_tensor, per_query
from cumulant.measures.dual import hull_from_fisher
from cumulant.measures.transform import add_logs, vanish
from cumulant.solve import Solution
from cumulant.typing import Draws, Matrices, PerQuery, Queries


def convolve(*measures: Measure) -> Measure:
    """The law of a sum of independent draws: G = Σ_i G_i at the same η.

    >>> import torch
    >>> from cumulant import Empirical, Gaussian
    >>> smooth = convolve(Empirical(torch.eye(2)), Gaussian(torch.zeros(2), torch.eye(2)))  # Proposition 2
    >>> smooth.mean(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    return Convolution(_flatten(Convolution, measures, "convolve"))


def product(*measures: Measure) -> Measure:
    """Independent measures side by side: dimensions add, G(η) = Σ_i G_i(η_i).

    >>> import torch
    >>> from cumulant import Gaussian, Sphere
    >>> product(Sphere(3), Gaussian(torch.zeros(2), torch.eye(2))).dim
    5
    """
    return Product(_flatten(Product, measures, "product"))


@dataclass(frozen=True, eq=False, repr=False)
class _Several(Measure):
    """Base of Sum, Convolution and Product: parts with one dtype, device and compatible batches."""

    parts: tuple[Measure, ...]

    def __post_init__(self):
        name = type(self).__name__
        if not self.parts:
            raise ValueError(sentence(f"{name}.parts", "at least one measure", "none", "Pass measures."))
        _require_measures(f"{name}.parts", self.parts)
        _agree(name, *self.parts)

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast("batch_shape", *(p.batch_shape for p in self.parts))

    @property
    def query_rows(self) -> int | None:
        return next((p.query_rows for p in self.parts if p.query_rows is not None), None)


@dataclass(frozen=True, eq=False, repr=False)
class _SameSpace(_Several):
    """Several measures on one R^d."""

    def __post_init__(self):
        super().__post_init__()
        dims = [p.dim for p in self.parts]
        if len(set(dims)) > 1:
            where, advice = f"{type(self).__name__}.parts", "Map one with A @ h first."
            raise ValueError(sentence(where, "measures of equal dim", f"dims {dims}", advice))

    @property
    def dim(self) -> int:
        return self.parts[0].dim


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sum(_SameSpace):
    """h = Σ_i h_i:  G = logsumexp_i G_i; the mean mixes the parts' means with weights e^{G_i − G} (S1-P2′).

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.tensor([-1.0]), torch.eye(1)) + Gaussian(torch.tensor([1.0]), torch.eye(1))
    >>> h.mean(torch.tensor([2.0])), h.fisher(torch.tensor([0.0]))
    (tensor([2.9640]), tensor([[2.]]))
    """

    @staticmethod
    def of(*measures: Measure) -> Sum:
        return Sum(_flatten(Sum, measures, "h + g"))

    def _share(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """G, and the posterior weight of every part (*batch, q, parts)."""
        g, share = normalize(self._each(eta))
        return g, share.to(eta.dtype)

    def _each(self, eta: Tensor) -> Tensor:
        """G of every part (*batch, q, parts), in the precision sums are formed in: rounding G moves weights."""
        wide = accumulate(eta)
        parts = self.parts if wide.dtype == eta.dtype else [p.to(wide.dtype) for p in self.parts]
        return torch.stack([p.log_normalizer(wide) for p in parts], dim=-1)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        each = self._each(eta)
        # outside the domain of one part the sum is infinite, and no weights exist
        infinite = (each == torch.inf).any(-1)
        return torch.where(infinite, torch.inf, normalize(torch.where(infinite[..., None], 0, each))[0]).to(eta.dtype)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        means = torch.stack([p.mean(eta) for p in self.parts], dim=-2)  # (*batch, q, parts, d)
        _, share = self._share(eta)
        return (share[..., None, :] @ means)[..., 0, :]

    def _spread(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the parts and their means, centred."""
        means = torch.stack([p.mean(eta) for p in self.parts], dim=-2)
        _, share = self._share(eta)
        return share, means - share[..., None, :] @ means

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        within = torch.stack([p.fisher_mv(eta, v) for p in self.parts], dim=-2)
        share, centred = self._spread(eta)
        between = centred * (centred @ v[..., None])
        return (share[..., None, :] @ (within + between))[..., 0, :]

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        within = torch.stack([p.fisher(eta) for p in self.parts], dim=-3)
        share, centred = self._spread(eta)
        return (share[..., None, None] * within).sum(-3) + centred.mT @ (share[..., None] * centred)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        self._check_domain(eta, self.log_normalizer(eta))
        _, share = self._share(eta)
        flat = share.reshape(-1, share.shape[-1])
        if not holds(flat.sum(-1) > 0):
            raise ValueError(sentence("Sum.sample", "a measure of positive mass", "mass 0 in some row", "Add an atom."))
        which = torch.multinomial(flat, n, replacement=True, generator=generator).reshape(*share.shape[:-1], n)
        draws = eta.new_zeros(*eta.shape[:-1], n, self.dim)
        for i, part in enumerate(self.parts):
            from_part = which == i
            if from_part.any():  # a part of mass 0 cannot be sampled, and no draw comes from it
                draws = torch.where(from_part[..., None], part.sample(eta, n, generator=generator), draws)
        return draws

    def hull(self) -> Hull:
        """The hull of a union: G* is at most the largest bound of the parts."""
        return hull_from_fisher(self)._replace(bound=_fold(torch.maximum, [p.hull().bound for p in self.parts]))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Convolution(_SameSpace):
    """The law of a sum of independent draws: G, mean and covariance add (X-12: heads that write to one stream)."""

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return add_logs(*(p.log_normalizer(eta) for p in self.parts))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return vanish(_fold(torch.add, [p.mean(eta) for p in self.parts]), self.log_normalizer(eta))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return vanish(_fold(torch.add, [p.fisher_mv(eta, v) for p in self.parts]), self.log_normalizer(eta))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return vanish(_fold(torch.add, [p.fisher(eta) for p in self.parts]), self.log_normalizer(eta))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        return _fold(torch.add, [p.sample(eta, n, generator=generator) for p in self.parts])

    def hull(self) -> Hull:
        """The Minkowski sum of the hulls: bounds add."""
        return hull_from_fisher(self)._replace(bound=_fold(torch.add, [p.hull().bound for p in self.parts]))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Product(_Several):
    """Independent coordinates: G(η) = Σ_i G_i(η_i), block-diagonal covariance."""

    @property
    def dim(self) -> int:
        return sum(p.dim for p in self.parts)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([p.dim for p in self.parts], dim=-1)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return add_logs(*(p.log_normalizer(e) for p, e in zip(self.parts, self._split(eta), strict=True)))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        means = [p.mean(e) for p, e in zip(self.parts, self._split(eta), strict=True)]
        return vanish(torch.cat(means, dim=-1), self.log_normalizer(eta))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        blocks = zip(self.parts, self._split(eta), self._split(v), strict=True)
        products = [p.fisher_mv(e, u) for p, e, u in blocks]
        return vanish(torch.cat(products, dim=-1), self.log_normalizer(eta))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        rows, before = [], 0
        for part, e in zip(self.parts, self._split(eta), strict=True):
            after = self.dim - before - part.dim
            rows.append(torch.nn.functional.pad(part.fisher(e), (before, after)))
            before += part.dim
        return vanish(torch.cat(rows, dim=-2), self.log_normalizer(eta))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        blocks = zip(self.parts, self._split(eta), strict=True)
        return torch.cat([p.sample(e, n, generator=generator) for p, e in blocks], dim=-1)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """Each part on its own; the worst status of the parts is the status."""
        blocks = zip(self.parts, self._split(mean), strict=True)
        return _join([p.natural(block, max_steps=max_steps) for p, block in blocks])

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        return _fold(torch.add, [p.conjugate(b) for p, b in zip(self.parts, self._split(mean), strict=True)])


def _flatten(kind: type, measures: tuple[Measure, ...], name: str) -> tuple[Measure, ...]:
    """Associative compositions stay flat: (a + b) + c holds three parts."""
    _require_measures(name, measures)
    return tuple(part for m in measures for part in (m.parts if type(m) is kind else (m,)))  # pyright: ignore[reportAttributeAccessIssue]


def _require_measures(where: str, parts: tuple[object, ...]) -> None:
    for part in parts:
        if not isinstance(part, Measure):
            raise TypeError(sentence(where, "measures", type(part).__name__, "Wrap points in Empirical(...)."))


def _fold(function, tensors: list[Tensor]) -> Tensor:
    return functools.reduce(function, tensors)


def _join(parts: list[Solution]) -> Solution:
    """Solutions of independent blocks as one; shorter traces repeat their last entry."""
    longest = max(p.trace.shape[0] for p in parts)
    traces = [torch.cat([p.trace, p.trace[-1:].expand(longest - p.trace.shape[0], *p.trace.shape[1:])]) for p in parts]
    return Solution(
        torch.cat([p.value for p in parts], dim=-1),
        _fold(torch.maximum, [p.status for p in parts]),
        _fold(torch.maximum, [p.steps for p in parts]),
        torch.linalg.vector_norm(torch.stack([p.residual for p in parts]), dim=0),
        torch.linalg.vector_norm(torch.stack(traces), dim=0),
    )


def _agree(where: str, *parts: Measure) -> None:
    """Parts that hold tensors share dtype and device; batches broadcast; query rows are equal where there are any."""
    tensors = [t for t in map(first_tensor, parts) if t is not None]
    for t in tensors[1:]:
        if t.dtype != tensors[0].dtype or t.device != tensors[0].device:
            expected = f"one dtype and device ({tensors[0].dtype}, {tensors[0].device})"
            got, advice = f"{t.dtype}, {t.device}", "Call .to(...) on one measure."
            raise TypeError(sentence(f"{where}.parts", expected, got, advice))
    broadcast(f"{where}.parts", *(p.batch_shape for p in parts))
    rows = {p.query_rows for p in parts} - {None}
    if len(rows) > 1:
        got = f"log_weights for {sorted(r for r in rows if r)} rows"
        raise ValueError(sentence(f"{where}.parts", "equal numbers of query rows", got, "Give both one row per query."))
