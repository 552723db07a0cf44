"""What the queries of a law read of the measure that key heads hold: log-normalizers, outputs, attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.query_law import UNDERFLOW, SampledQueries
from cumulant.cache.prefix import LayerPrefix
from cumulant.cache.rotation import Rotation

RIDGE = 1e-9  # of a covariance of queries


class KeyHeads(NamedTuple):
    """What the key heads of a layer hold, as many entries in each: Σ_j e^{w_j} δ_(k_j, v_j).

    keys      (key heads, n, d)
    values    (key heads, n, e)
    log_mass  (key heads, n) w_j
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor

    @classmethod
    def tokens(cls, keys: Tensor, values: Tensor) -> KeyHeads:
        """Tokens, of mass 1."""
        return cls(keys, values, keys.new_zeros(keys.shape[:2]))

    @classmethod
    def of(cls, layer: LayerPrefix, length: int | None = None) -> KeyHeads:
        """What a layer holds of its first ``length`` tokens, in single precision; None: of all."""
        n = layer.keys.shape[1] - (0 if length is None else layer.length - length)
        tokens = cls.tokens(layer.keys[:, :n].float(), layer.values[:, :n].float())
        return tokens if layer.log_mass is None else tokens._replace(log_mass=layer.log_mass[:, :n].float())

    def head(self, number: int) -> KeyHeads:
        """One key head, without what has no mass."""
        present = self.log_mass[number] > -torch.inf
        return KeyHeads(*(x[number : number + 1, present] for x in self))


class LawQueries(NamedTuple):
    """Queries of the heads of a layer, those of heads that share a key head together.

    eta           (key heads, r, d)
    local         (key heads, r) log-normalizer of what they read beside the prefix
    local_output  (key heads, r, e)
    """

    eta: Tensor
    local: Tensor
    local_output: Tensor

    @classmethod
    def of(cls, sample: SampledQueries, length: int, rotation: Rotation | None, key_heads: int) -> LawQueries:
        """The queries of a sample after a prefix of ``length`` tokens."""
        eta = sample.at(length, rotation)
        parts = eta, sample.local, sample.local_output
        flat = (x.float().reshape(key_heads, -1, *x.shape[2:]) for x in parts)
        return cls(*flat)

    def alone(self) -> LawQueries:
        """The same queries, which read nothing beside the prefix."""
        return LawQueries(self.eta, torch.full_like(self.local, -torch.inf), torch.zeros_like(self.local_output))


class Readings(NamedTuple):
    """What queries read of a measure together with their local context.

        G_i = log(Σ_j e^{⟨η_i,k_j⟩ + w_j} + e^{local_i}),    p_ij = e^{⟨η_i,k_j⟩ + w_j − G_i}

    log_normalizer  (key heads, r) G
    output          (key heads, r, e) Σ_j p_ij v_j, local context included
    mean            (key heads, n) mean over i of p_ij
    rms             (key heads, n) root of the mean of p_ij²
    points          (key heads, n, d) Lᵀ k_j, L Lᵀ = Cov(η): their distances are standard deviations of ⟨η, k_j − k_i⟩
    """

    log_normalizer: Tensor
    output: Tensor
    mean: Tensor
    rms: Tensor
    points: Tensor


def attention(entries: KeyHeads, queries: LawQueries) -> tuple[Tensor, Tensor]:
    """G (key heads, r) and p (key heads, r, n).

    >>> nothing = KeyHeads.tokens(torch.zeros(1, 3, 2), torch.zeros(1, 3, 1))
    >>> total, p = attention(nothing, LawQueries(torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.zeros(1, 1, 1)))
    >>> p                                                         # the fourth quarter is its local context
    tensor([[[0.2500, 0.2500, 0.2500]]])
    """
    scores = torch.baddbmm(entries.log_mass[:, None], queries.eta, entries.keys.mT)
    highest = torch.maximum(scores.amax(-1), queries.local)
    p = (
        scores.sub_(highest[..., None]).clamp_min_(UNDERFLOW).exp_()
    )  # one exponential for each pair: the normalizer comes after the sum
    total = p.sum(-1) + (queries.local - highest).exp()
    return total.log() + highest, p.div_(total[..., None])


def output(entries: KeyHeads, queries: LawQueries, total: Tensor, p: Tensor) -> Tensor:
    """(key heads, r, e) of queries with normalizers (key heads, r) and attention (key heads, r, n)."""
    return p @ entries.values + (queries.local - total).exp()[..., None] * queries.local_output


def read(entries: KeyHeads, queries: LawQueries) -> Readings:
    """All readings of the queries, in one pass."""
    total, p = attention(entries, queries)
    points = entries.keys @ metric_root(queries.eta)
    return Readings(total, output(entries, queries, total, p), p.mean(1), p.square().mean(1).sqrt(), points)


def metric_root(eta: Tensor) -> Tensor:
    """(key heads, d, d) L with L Lᵀ = Cov(η), of queries (key heads, r, d)."""
    centred = eta - eta.mean(1, keepdim=True)
    covariance = (centred.mT @ centred / eta.shape[1]).double()
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny  # fewer queries than axes
    return torch.linalg.cholesky(covariance).to(eta.dtype)
