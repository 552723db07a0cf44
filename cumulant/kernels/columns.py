"""Per-atom quantities whose means are requested, as columns beside the values: one product averages them all.

A trace is formed about one centre c for all rows:   tr Cov_p(v) = Σ p |v − c|² − |m − c|².   The nearer c is to
the visible atoms of a row, the fewer digits the difference costs. So c is the centre of all atoms visible to any row;
rows whose own atoms lie many of their own widths away from it are listed in ``far`` for a computation without c, and
rows with one visible atom in ``single``: their trace is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.support import FlatSupport

FAR = 100.0  # |centre of a row's atoms − c|² in units of their variance: two digits


class AtomColumns(NamedTuple):
    """Squared distances to the centre and finite log weights of every atom."""

    names: tuple[str, ...]
    table: Tensor | None  # (g, n, columns)
    centre: dict[str, Tensor]  # (g, 1, ·)
    single: Tensor | None = None  # (g, q)
    far: Tensor | None = None  # (g, q)

    @staticmethod
    def of(x: Inputs, plan: Plan) -> AtomColumns:
        columns, centre = {}, {}
        support = x.support(plan.band)
        traced = [
            (name, points)
            for name, points in (("value_trace", x.values), ("atom_trace", x.atoms))
            if name in plan.statistics and points is not None
        ]
        single, far = None, None
        for name, points in traced:
            centre[name] = _centre(x, points, support)
            apart = points - centre[name]
            columns[name] = apart.square().sum(-1)
            if not support.everything:
                single, far_here = _rows(apart, columns[name], support, x.eta.shape[1])
                far = far_here if far is None else far | far_here
        if "mean_log_weight" in plan.statistics and x.per_atom is not None and x.per_pair is None:
            columns["mean_log_weight"] = torch.where(x.per_atom == -torch.inf, 0, x.per_atom)
        table = torch.stack(list(columns.values()), -1) if columns else None
        return AtomColumns(tuple(columns), table, centre, single, None if far is None or holds(~far) else far)

    @property
    def without_trace(self) -> Tensor | None:
        """(g, q): rows whose traces do not come from the columns."""
        return self.single if self.far is None or self.single is None else self.single | self.far


def _centre(x: Inputs, points: Tensor, support: FlatSupport) -> Tensor:
    """(g, 1, ·) of the points that are visible to any query."""
    if not points.shape[1]:
        return points.new_zeros(1)
    if support.everything:
        return points.mean(1, keepdim=True)
    seen = support.seen_atoms(x.eta.shape[1], points.shape[1], points.device)[..., None]
    return (points * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp_min(1)


def _rows(apart: Tensor, square: Tensor, support: FlatSupport, queries: int) -> tuple[Tensor, Tensor]:
    """Which rows have one visible atom, and which are far from the centre that ``apart`` is counted from."""
    table = torch.cat([apart, square[..., None], torch.ones_like(square)[..., None]], -1).double()
    sums = support.row_sums(table, queries)
    count = sums[..., -1].round()
    mean = sums[..., :-1] / count.clamp_min(1)[..., None]
    distance = mean[..., :-1].square().sum(-1)
    near = distance <= FAR * (mean[..., -1] - distance)  # false for NaN
    return count == 1, ~near & (count > 1)
