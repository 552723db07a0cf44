"""The last batch axis of a measure as further coordinates: G(η) = Σ_i G_i(η_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.measures.base import Measure, per_query
from cumulant.measures.transform import Transformed, add_logs, vanish
from cumulant.solve import Solution
from cumulant.typing import Draws, Matrices, PerQuery, Queries


def independent(measure: Measure) -> Measure:
    """The last batch axis as further coordinates: batch (*b, k), dim d → batch (*b), dim k·d.

    >>> import torch
    >>> from cumulant import Sphere
    >>> independent(Sphere(3, torch.ones(4))).dim
    12
    """
    return Independent(measure)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Independent(Transformed):
    """The members of the last batch axis as independent blocks of coordinates: G(η) = Σ_i G_i(η_i)."""

    def __post_init__(self):
        if not self.base.batch_shape:
            got, advice = "batch_shape ()", "Use product(h, g) for a few."
            raise ValueError(sentence("independent(h)", "a measure with a batch axis", got, advice))
        if self.base.query_rows is not None:
            got, advice = f"one measure for each of {self.base.query_rows} query rows", "Give log_weights per atom."
            raise ValueError(sentence("independent(h)", "one measure for all queries", got, advice))

    @property
    def dim(self) -> int:
        return self.base.batch_shape[-1] * self.base.dim

    @property
    def batch_shape(self) -> torch.Size:
        return self.base.batch_shape[:-1]

    def _blocks(self, x: Tensor) -> Tensor:
        """(*batch, q, k·d) → (*batch, k, q, d)"""
        return x.unflatten(-1, (self.base.batch_shape[-1], self.base.dim)).movedim(-2, -3)

    def _joined(self, x: Tensor) -> Tensor:
        return x.movedim(-3, -2).flatten(-2)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return add_logs(*self.base.log_normalizer(self._blocks(eta)).unbind(-2))

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return vanish(self._joined(self.base.mean(self._blocks(eta))), self.log_normalizer(eta))

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        product = self._joined(self.base.fisher_mv(self._blocks(eta), self._blocks(v)))
        return vanish(product, self.log_normalizer(eta))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        blocks = self.base.fisher(self._blocks(eta)).movedim(-4, -3)  # (*batch, q, k, d, d)
        k = blocks.shape[-3]
        spread = torch.eye(k, dtype=eta.dtype, device=eta.device)[:, None, :, None] * blocks[..., :, :, None, :]
        return vanish(spread.flatten(-4, -3).flatten(-2), self.log_normalizer(eta))

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        draws = self.base.sample(self._blocks(eta), n, generator=generator)  # (*batch, k, q, n, d)
        return draws.movedim(-4, -2).flatten(-2)

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        blocks = self.base.natural(self._blocks(mean), max_steps=max_steps)
        return Solution(
            self._joined(blocks.value),
            blocks.status.amax(-2),
            blocks.steps.amax(-2),
            torch.linalg.vector_norm(blocks.residual, dim=-2),
            torch.linalg.vector_norm(blocks.trace, dim=-2),
        )

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        return self.base.conjugate(self._blocks(mean)).sum(-2)
