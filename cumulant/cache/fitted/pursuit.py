"""Atoms by orthogonal matching pursuit: tokens with which the mass of all is matched best (arXiv 2602.16284)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.fitted.atoms import Atoms
from cumulant.cache.fitted.nonnegative import (
    HIGHEST,
    MassTarget,
    factor_with_jitter,
    mass_target,
    relative_terms,
)
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings

EACH = 4  # tokens chosen between one refit and the next
LOWEST_MASS = 1e-12  # of a token in the fit


def omp_atoms(entries: KeyHeads, queries: LawQueries, readings: Readings, number: int) -> Atoms:
    """The entries that `pursuit_order` chooses first."""
    chosen = pursuit_order(entries, queries, mass_target(entries, queries), number).sort(-1).values
    keys, values = (x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) for x in (entries.keys, entries.values))
    return Atoms(keys, values, readings.mean.gather(1, chosen), chosen=chosen)


def pursuit_order(entries: KeyHeads, queries: LawQueries, target: MassTarget, number: int, each: int = EACH) -> Tensor:
    """(key heads, number) entries in the order in which they are chosen: the first of it serve any smaller number.

        c = argmax_j Σ_i E_ij (Σ_l E_il − Σ_{l chosen} E_il m_l),    E_ij = e^{s_ij − max_l s_il},  s = ⟨η, k⟩ + w

    ``each`` entries at a time; then the masses m are those of least squares to Σ_l E_il, brought into [10⁻¹², e⁷].
    Their factor grows by as many rows, so that a refit costs no more than a step.

    >>> entries = KeyHeads.tokens(torch.tensor([[[0.0], [0.0], [1.0]]]), torch.zeros(1, 3, 1))
    >>> queries = LawQueries(torch.tensor([[[-9.0], [9.0]]]), torch.zeros(1, 2), torch.zeros(1, 2, 1))
    >>> pursuit_order(entries, queries, mass_target(entries, queries), 2, each=1).sort().values[0, 1]
    tensor(2)
    """
    terms = relative_terms(entries.keys, queries, target)
    terms = terms * entries.log_mass.exp()[:, None]
    gram = terms.mT @ terms
    wanted = (terms.mT @ target.mass[..., None])[..., 0]
    rows = gram.new_zeros(len(gram), number, gram.shape[-1])
    growing = _GrowingFactor(len(gram), number, gram.device)
    chosen = torch.empty(len(gram), 0, dtype=torch.int64, device=gram.device)
    taken, missing = torch.zeros_like(wanted), wanted  # −∞ where an entry is chosen
    while (first := chosen.shape[1]) < number:
        last = min(first + each, number)
        new = (missing + taken).topk(last - first).indices
        taken = taken.scatter(1, new, -torch.inf)
        chosen = torch.cat([chosen, new], 1)
        rows[:, first:last] = gram.gather(1, new[..., None].expand(-1, -1, gram.shape[-1]))
        within = rows[:, first:last].gather(2, chosen[:, None].expand(-1, last - first, -1))
        masses = growing.solved_with(within, wanted.gather(1, chosen)).clamp(LOWEST_MASS, torch.e**HIGHEST)
        missing = wanted - (masses.to(rows)[:, None] @ rows[:, :last])[:, 0]
    return chosen


class _GrowingFactor:
    """The Cholesky factor of a matrix that rows are added to, up to ``number`` of them."""

    def __init__(self, heads: int, number: int, device: torch.device):
        self.factor = torch.zeros(heads, number, number, dtype=torch.float64, device=device)
        self.size = 0

    def solved_with(self, rows: Tensor, right: Tensor) -> Tensor:
        """x (heads, m) of A x = right, where A has grown by its last rows (heads, b, m)."""
        before, size = self.size, rows.shape[-1]
        side, corner = rows.double().split([before, size - before], -1)
        if before:
            old = self.factor[:, :before, :before]
            side = torch.linalg.solve_triangular(old, side.mT, upper=False).mT
            self.factor[:, before:size, :before] = side
        whole = corner.diagonal(dim1=-2, dim2=-1)
        left = corner - side @ side.mT
        self.factor[:, before:size, before:size] = factor_with_jitter(left, whole)
        self.size = size
        return torch.cholesky_solve(right.double()[..., None], self.factor[:, :size, :size])[..., 0]
