"""h = Σ_n e^{w_n} δ_{x_n}: keys, patterns, candidates, samples. Its mean is softmax attention (S0-E7, S1-P1a)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import (
    broadcast,
    holds,
    require_alike,
    require_finite,
    require_float,
    require_log_weights,
    sentence,
    shape,
)
from cumulant.kernels import Moments, fisher_product, moments
from cumulant.kernels.dense import accumulate, normalize, row_weights
from cumulant.measures.base import Hull, Measure, per_query
from cumulant.measures.dual import scale_and_span
from cumulant.typing import Draws, Matrices, PerQuery, Queries

LARGE = 1 << 20  # numbers that may be held at once besides inputs and answers


@final
@dataclass(frozen=True, eq=False, repr=False)
class Empirical(Measure):
    """A weighted set of atoms.

        G(η) = log Σ_n exp(⟨η,x_n⟩ + w_n),    ∇G = Σ p_n x_n,    ∇²G = Σ p_n (x_n−m)(x_n−m)ᵀ,    p = softmax(⟨η,x⟩ + w)

    atoms        (*batch, n, d), finite; n = 0 is the zero measure
    log_weights  None: each atom counts 1; (*batch, n): per atom; (*batch, q, n): one measure per query row.
                 −inf removes an atom (mask, window, padding): exactly as if it were not there.

    A row without atoms has G = −inf, mean 0 and gradient 0.

    >>> import torch
    >>> keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> h = Empirical(keys, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log())
    >>> h.mean(torch.tensor([0.5, -0.25], dtype=torch.float64))
    tensor([0.7165, 0.6349], dtype=torch.float64)
    """

    atoms: Tensor
    log_weights: Tensor | None = None

    def __post_init__(self):
        self.accept_numpy()
        atoms = require_float("Empirical.atoms", self.atoms)
        if atoms.ndim < 2:
            advice = "Add the atom axis: atoms[:, None] for d=1."
            raise ValueError(sentence("Empirical.atoms", "shape (*batch, n, d)", shape(atoms), advice))
        require_finite("Empirical.atoms", atoms)
        if self.log_weights is not None:
            self._check_log_weights(require_float("Empirical.log_weights", self.log_weights))

    def _check_log_weights(self, w: Tensor) -> None:
        where, n = "Empirical.log_weights", self.atoms.shape[-2]
        require_alike(where, w, "atoms", self.atoms)
        if w.ndim not in (self.atoms.ndim - 1, self.atoms.ndim) or w.shape[-1] != n:
            expected = f"(*batch, n={n}) per atom or (*batch, q, n={n}) per query, with atoms {shape(self.atoms)}"
            raise ValueError(sentence(where, expected, shape(w), "Match the atom axis."))
        broadcast(where, self.atoms.shape[:-2], self._weights_batch(w))
        require_log_weights(where, w)

    def _weights_batch(self, w: Tensor) -> torch.Size:
        return w.shape[:-1] if w.ndim == self.atoms.ndim - 1 else w.shape[:-2]

    @property
    def dim(self) -> int:
        return self.atoms.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        own = self.atoms.shape[:-2]
        return own if self.log_weights is None else broadcast("batch_shape", own, self._weights_batch(self.log_weights))

    @property
    def query_rows(self) -> int | None:
        w = self.log_weights
        return None if w is None or w.ndim < self.atoms.ndim else w.shape[-2]

    def _moments(self, eta: Tensor, *statistics: str) -> Moments:
        return moments(eta, self.atoms, log_weights=self.log_weights, statistics=statistics)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return self._moments(eta).log_normalizer.to(eta.dtype)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._moments(eta, "mean").mean.to(eta.dtype)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        return fisher_product(eta, self.atoms, v, log_weights=self.log_weights).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        if eta.numel() * self.atoms.shape[-2] > LARGE:  # one column at a time, in linear memory
            basis = torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
            return torch.stack([self.fisher_mv(eta, e.expand_as(eta)) for e in basis], dim=-1)
        p, atoms = self._probabilities(eta), accumulate(self.atoms)
        atoms = atoms.expand(*p.shape[:-2], *atoms.shape[-2:])[..., None, :, :]
        if p.shape[-1]:
            # relative to the likeliest atom, so that the variance of a rare one does not meet the rounding of a mean
            atoms = atoms - torch.take_along_dim(atoms, p.argmax(-1)[..., None, None], dim=-2).detach()
        centred = atoms - p[..., None, :] @ atoms  # (*batch, q, n, d)
        return (centred.mT @ (p[..., None] * centred)).to(eta.dtype)

    def _probabilities(self, eta: Tensor) -> Tensor:
        """p (*batch, q, n), for a few queries at a time."""
        logits = accumulate(eta) @ accumulate(self.atoms).mT
        w = row_weights(self.log_weights, self.atoms)
        return normalize(logits if w is None else logits + w)[1]

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        if not holds(self.log_normalizer(eta) > -torch.inf):
            expected = "at least one atom of positive weight per query"
            raise ValueError(sentence("Empirical.sample", expected, "an empty row", "Unmask one."))
        step = max(1, LARGE // max(1, self.atoms.shape[-2] * eta.shape[:-2].numel()))
        draws = []
        for start in range(0, eta.shape[-2], step):
            rows = slice(start, start + step)
            p = self._rows(rows)._probabilities(eta[..., rows, :])
            draws.append(self.draw_atoms(p, n, generator))
        return torch.cat(draws, dim=-3)

    def draw_atoms(self, p: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n atoms for every row of probabilities (*batch, q, atoms)."""
        index = torch.multinomial(p.reshape(-1, p.shape[-1]), n, replacement=True, generator=generator)
        index = index.reshape(*p.shape[:-1], n)
        atoms = self.atoms.expand(*p.shape[:-2], *self.atoms.shape[-2:])
        flat = index.flatten(-2)[..., None].expand(*index.shape[:-2], -1, self.dim)
        return atoms.gather(-2, flat).unflatten(-2, index.shape[-2:])

    def _rows(self, rows: slice) -> "Empirical":
        """The measures of some query rows."""
        w = self.log_weights
        return self if self.query_rows is None or w is None else Empirical(self.atoms, w[..., rows, :])

    def hull(self) -> Hull:
        """From the atoms themselves, whatever their weights: G* ≤ max(−w_n) on their convex hull."""
        w = row_weights(self.log_weights, self.atoms)
        w = self.atoms.new_zeros(self.atoms.shape[:-2] + (1, self.atoms.shape[-2])) if w is None else w
        present = (w > -torch.inf).to(self.atoms.dtype)  # (*batch, q, n)
        count = present.sum(-1, keepdim=True).clamp_min(1)
        centred = self.atoms[..., None, :, :] - (present / count @ self.atoms)[..., None, :]
        # the mean of copies of one atom is that atom but for rounding, which must not look like an extent
        rounding = 8 * torch.finfo(centred.dtype).eps * self.atoms[..., None, :, :].abs()
        centred = torch.where(centred.abs() <= rounding, 0, centred) * present[..., None]
        _, span = scale_and_span(centred.mT @ centred / count[..., None])
        radius = torch.linalg.vector_norm(centred, dim=-1)
        bound = torch.where(present > 0, -w, -torch.inf)
        if self.atoms.shape[-2] == 0:
            return Hull(radius.sum(-1), span, radius.sum(-1))
        return Hull(2 * radius.amax(-1), span, bound.amax(-1))
