"""An empirical measure whose atoms are split over a process group: the sum of the measures of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from cumulant.checks import holds, sentence
from cumulant.kernels.collectives import TIMEOUT, Group, Ranks
from cumulant.kernels.dense import row_weights
from cumulant.kernels.sharded import deal, sharded_moments
from cumulant.measures.base import Hull, Measure, per_query
from cumulant.measures.dual import scale_and_span
from cumulant.measures.empirical import Empirical
from cumulant.typing import Draws, Matrices, PerQuery, Queries


def shard(measure: Empirical, group: Group = None, *, timeout: float = TIMEOUT) -> Sharded:
    """Split the atoms of a measure, the same on every rank, over the ranks of a process group.

    Each rank keeps an equal run of atoms (the first ranks one more). Atoms that were never in one process need no
    splitting: ``Sharded(Empirical(own atoms), group)``. Of n atoms (*batch, n, d) each of R ranks has about n/R.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun does this for many
    >>> shard(Empirical(torch.tensor([[1.0], [3.0]]))).mean(torch.zeros(1))                # of the atoms of all ranks
    tensor([2.])
    >>> dist.destroy_process_group()
    """
    if not isinstance(measure, Empirical):
        advice = "Other measures have closed forms: there is nothing to split."
        raise TypeError(sentence("shard.measure", "an Empirical measure", type(measure).__name__, advice))
    weights = measure.log_weights
    own = None if weights is None else deal(weights, group, dim=-1).contiguous()
    return Sharded(Empirical(deal(measure.atoms, group).contiguous(), own), group, timeout)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sharded(Measure):
    """h = Σ_r h_r over the ranks r of a group, each of which holds its own h_r.

        G = log Σ_r e^{G_r},    ∇G = Σ_r u_r m_r,    ∇²G = Σ_r u_r (C_r + (m_r − m)(m_r − m)ᵀ),    u_r = e^{G_r − G}

    part     the atoms of this rank; none is legal
    group    a ProcessGroup, a DeviceMesh of one axis, or None for all processes
    timeout  seconds after which a rank that does not answer is named in a TimeoutError

    Every rank calls with the same queries at the same time and gets the same result. The gradient of the queries is
    whole on every rank, that of the atoms is each rank's own. `sample` needs generators in the same state everywhere.
    """

    part: Empirical
    group: Group = field(default=None)
    timeout: float = TIMEOUT

    def __post_init__(self):
        if not isinstance(self.part, Empirical):
            got = type(self.part).__name__
            raise TypeError(sentence("Sharded.part", "the Empirical measure of this rank", got, "Wrap its atoms."))
        atoms, weights = self.part.atoms, self.part.log_weights
        lead = "none" if weights is None else f"({', '.join(map(str, weights.shape[:-1]))}, *)"
        sizes = f"({', '.join(map(str, (*atoms.shape[:-2], '*', atoms.shape[-1])))})"
        self._ranks.agree(
            "Sharded.part", f"atoms {str(atoms.dtype).removeprefix('torch.')} {sizes}, log_weights {lead}"
        )

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.group, self.timeout)

    @property
    def dim(self) -> int:
        return self.part.dim

    @property
    def batch_shape(self) -> torch.Size:
        return self.part.batch_shape

    @property
    def query_rows(self) -> int | None:
        return self.part.query_rows

    def _moments(self, eta: Tensor, *statistics: str):
        options = {"group": self.group, "timeout": self.timeout, "statistics": statistics}
        return sharded_moments(eta, self.part.atoms, log_weights=self.part.log_weights, **options)

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return self._moments(eta).log_normalizer.to(eta.dtype)

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return self._moments(eta, "mean").mean.to(eta.dtype)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        ranks, eta, v, share, gap = self._apart(eta, v)
        along = (gap * v).sum(-1, keepdim=True)
        return ranks.total(share[..., None] * (self.part.fisher_mv(eta, v) + gap * along))

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        ranks, eta, _, share, gap = self._apart(eta, eta)
        return ranks.total(share[..., None, None] * (self.part.fisher(eta) + gap[..., :, None] * gap[..., None, :]))

    def _apart(self, eta: Tensor, v: Tensor) -> tuple[Ranks, Tensor, Tensor, Tensor, Tensor]:
        """u_r, and how far the mean of this rank is from that of all."""
        whole = self._moments(eta, "mean")
        ranks = self._ranks
        eta, v = ranks.spread(eta), ranks.spread(v)
        g, mean = ranks.spread(whole.log_normalizer), ranks.spread(whole.mean)
        own = self.part.log_normalizer(eta)
        share = torch.where(own == -torch.inf, 0, torch.exp(own - torch.where(g == -torch.inf, 0, g)))
        return ranks, eta, v, share, self.part.mean(eta) - mean

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        ranks = self._ranks
        log_mass = self.part.log_normalizer(eta)
        shares = torch.zeros(*log_mass.shape, ranks.size, dtype=log_mass.dtype, device=log_mass.device)
        shares[..., ranks.rank] = torch.exp(log_mass - self.log_normalizer(eta))
        shares = ranks.sum(shares)
        if not holds(shares.sum(-1) > 0):
            expected = "at least one atom of positive weight per query"
            raise ValueError(sentence("Sharded.sample", expected, "an empty row", "Unmask one."))
        flat = shares.reshape(-1, ranks.size)
        owner = torch.multinomial(flat, n, replacement=True, generator=generator).reshape(*log_mass.shape, n)
        # every rank draws as often, so that the generators stay in step
        seed = int(torch.randint(2**62, (1,), generator=generator))
        own = torch.Generator(log_mass.device).manual_seed((seed + ranks.rank) % 2**62)
        draws = torch.zeros(*log_mass.shape, n, self.dim, dtype=eta.dtype, device=eta.device)
        nonempty = log_mass > -torch.inf
        if bool(nonempty.any()):
            whole = bool(nonempty.all())
            local = self.part.sample(eta, n, generator=own) if whole else self._draw(eta, n, own, nonempty)
            draws = torch.where((owner == ranks.rank)[..., None], local, 0)
        return ranks.sum(draws)

    def _draw(self, eta: Tensor, n: int, generator: torch.Generator, nonempty: Tensor) -> Tensor:
        """Draws where this rank has atoms; rows without any are overwritten by the caller."""
        logits = eta @ self.part.atoms.mT
        w = row_weights(self.part.log_weights, self.part.atoms)
        logits = logits if w is None else logits + w
        logits = torch.where(nonempty[..., None], logits, 0)
        return self.part.draw_atoms(logits.softmax(-1), n, generator)

    def hull(self) -> Hull:
        """As for one set of atoms: G* ≤ max(−w_n) on the convex hull of all of them."""
        ranks, atoms = self._ranks, self.part.atoms
        w = row_weights(self.part.log_weights, atoms)
        w = atoms.new_zeros((*atoms.shape[:-2], 1, atoms.shape[-2])) if w is None else w
        present = (w > -torch.inf).to(atoms.dtype)  # (*batch, q, n)
        count = ranks.sum(present.sum(-1, keepdim=True)).clamp_min(1)
        centred = atoms[..., None, :, :] - (ranks.sum(present @ atoms) / count)[..., None, :]
        centred = centred * present[..., None]
        _, span = scale_and_span(ranks.sum(centred.mT @ centred) / count[..., None])
        empty = atoms.new_zeros((*present.shape[:-1], 1))
        radius = torch.cat([torch.linalg.vector_norm(centred, dim=-1), empty], -1).amax(-1)
        bound = torch.cat([torch.where(present > 0, -w, -torch.inf), empty - torch.inf], -1).amax(-1)
        return Hull(2 * ranks.largest(radius), span, ranks.largest(bound))
