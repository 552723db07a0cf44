"""Atoms that stand for many tokens of a key head: tokens themselves, or tangents of G of their clusters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings

LEAST = 1e-30  # attention below which a cluster is nobody's


class Atoms(NamedTuple):
    """m atoms of each key head, and what they stand for.

    keys      (key heads, m, d)
    values    (key heads, m, e)
    expected  (key heads, m) the attention that a law expects of what each stands for; 0: it stands for nothing
    cluster   (key heads, n) which atom each entry went to; None: entries that are no atoms are dropped
    chosen    (key heads, m) which entry each atom is; None: it is none of them
    """

    keys: Tensor
    values: Tensor
    expected: Tensor
    cluster: Tensor | None = None
    chosen: Tensor | None = None


def subset_atoms(entries: KeyHeads, queries: LawQueries, readings: Readings, number: int) -> Atoms:
    """The entries that a law pays the highest root mean square attention to.

        {j : (E p_j²)^½ is among the m highest}

    >>> entries = KeyHeads.tokens(torch.arange(3.0).view(1, 3, 1), torch.zeros(1, 3, 1))
    >>> rms = torch.tensor([[0.1, 0.5, 0.2]])
    >>> queries = LawQueries(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1))
    >>> subset_atoms(entries, queries, Readings(rms, rms, rms, rms, rms), 2).keys.flatten()
    tensor([1., 2.])
    """
    chosen = readings.rms.topk(number, -1).indices.sort(-1).values
    keys, values = (_rows(x, chosen) for x in (entries.keys, entries.values))
    return Atoms(keys, values, readings.mean.gather(1, chosen), chosen=chosen)


def tangent_atoms(
    entries: KeyHeads, queries: LawQueries, readings: Readings, number: int, iterations: int = 5
) -> Atoms:
    """Tangents of G_c at the typical query, one for each cluster c of entries.

        k̂_c = Σ_{j in c} p̄_j k_j / Σ_{j in c} p̄_j,    p̄_j = E p_j the expected attention,    v̂_c the same of values

    At a query η₀ with attention p̄ it is ∇G_c(η₀) of G_c(η) = log Σ_{j in c} e^⟨η,k_j⟩, and a log-mass −G_c*(k̂_c) makes
    the atom its tangent. Clusters are by k-means in the metric Cov(η), from the entries with the highest root mean
    square attention: then Σ_j w_j (k_j − k̂_c)ᵀ Cov(η) (k_j − k̂_c), the second-order gap of G, is small.

    >>> entries = KeyHeads.tokens(torch.tensor([[[0.0], [0.1], [5.0]]]), torch.zeros(1, 3, 1))
    >>> queries = LawQueries(torch.tensor([[[0.5], [-0.5]]]), torch.zeros(1, 2), torch.zeros(1, 2, 1))
    >>> p = torch.tensor([[0.25, 0.25, 0.5]])
    >>> found = tangent_atoms(entries, queries, Readings(p, p, p, p, entries.keys), 2)
    >>> found.keys.flatten().sort().values, found.expected.sum()
    (tensor([0.0500, 5.0000]), tensor(1.))
    """
    cluster = k_means(readings.points, readings.rms, number, iterations)
    expected = _sums(readings.mean, cluster, number)

    def mean_of(x: Tensor) -> Tensor:
        total = _sums(readings.mean[..., None] * x, cluster, number)
        return total / expected.clamp_min(LEAST)[..., None]

    return Atoms(mean_of(entries.keys), mean_of(entries.values), expected, cluster=cluster)


def k_means(points: Tensor, weight: Tensor, number: int, iterations: int) -> Tensor:
    """(key heads, n) the nearest of ``number`` centres, which begin as the points of the highest weight and move
    ``iterations`` times to the weighted means of their clusters.

    >>> k_means(torch.tensor([[[0.0], [1.0], [9.0]]]), torch.tensor([[1.0, 0.0, 1.0]]), 2, 1)
    tensor([[0, 0, 1]])
    """
    first = weight.topk(number, -1).indices.sort(-1).values
    centres = _rows(points, first)
    for _ in range(iterations):
        cluster = _nearest(points, centres)
        mass = _sums(weight, cluster, number)[..., None]
        moved = _sums(weight[..., None] * points, cluster, number) / mass.clamp_min(LEAST)
        centres = torch.where(mass > 0, moved, centres)
    return _nearest(points, centres)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """(key heads, n) the centre with the smallest |x − c|² of each point."""
    return torch.baddbmm(centres.square().sum(-1)[:, None], points, centres.mT, alpha=-2).argmin(-1)


def _sums(x: Tensor, cluster: Tensor, number: int) -> Tensor:
    """Sums of x (key heads, n, …) over clusters, (key heads, number, …)."""
    first = number * torch.arange(len(x), device=x.device)[:, None]
    sums = x.new_zeros(len(x) * number, *x.shape[2:]).index_add_(0, (cluster + first).flatten(), x.flatten(0, 1))
    return sums.unflatten(0, (len(x), number))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index (key heads, m) of x (key heads, n, d)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
