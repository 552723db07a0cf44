"""The arguments of every kernel: tensors with one group axis, and the plan of what to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cumulant.kernels.moments import STATISTICS
from cumulant.kernels.support import Band, FlatSupport


@dataclass(frozen=True)
class Plan:
    """The statistics to compute and the band of the support.

    Where the values are the atoms, "mean" and "value_trace" are not among the statistics.
    """

    statistics: frozenset[str]
    band: Band
    engine: str = "streaming"  # or "fused", torch's attention kernel, "native" or "triton"

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in OUTPUTS if name in self.statistics)


OUTPUTS = ("log_normalizer", "mean", "atom_mean", *STATISTICS[1:])


class Inputs(NamedTuple):
    """Flattened tensors: eta (g, q, d), atoms (g, n, d), values (g, n, e), per_atom (g, n), per_pair (g | 1, q, n), and
    a Boolean mask (g | 1, q | 1, n); what is absent is None."""

    eta: Tensor
    atoms: Tensor
    values: Tensor | None
    per_atom: Tensor | None
    per_pair: Tensor | None
    mask: Tensor | None

    @staticmethod
    def of(tensors, mask: Tensor | None = None) -> Inputs:
        """From a tensor, gradient or tangent for each of the five differentiable slots."""
        eta, atoms, values, per_atom, per_pair = tensors
        return Inputs(eta, atoms, values, per_atom, per_pair, mask)

    def support(self, band: Band) -> FlatSupport:
        """Which atoms are visible to each query, and with what weight."""
        return FlatSupport(band, self.mask, self.per_atom, self.per_pair)
