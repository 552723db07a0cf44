"""Log-masses of atoms: how much of a measure each stands for, as the queries of a law see it."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.fitted.atoms import LEAST, Atoms
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings

LOWEST = -30.0  # log-mass of an atom that stands for nothing


def unit_mass(atoms: Atoms, tokens: KeyHeads, queries: LawQueries, readings: Readings) -> Tensor:
    """Mass 1, as a token has: (key heads, m) zeros. What is left out is missing."""
    return torch.zeros_like(atoms.expected)


def expected_mass(atoms: Atoms, tokens: KeyHeads, queries: LawQueries, readings: Readings) -> Tensor:
    """The attention that the law expects an atom to draw is that of all that it stands for.

        w_c = log E[Σ_{j in c} p_j] − log E[e^{⟨η,k̂_c⟩ − G(η)}]

    >>> two = KeyHeads.tokens(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
    >>> queries = LawQueries(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1))
    >>> from cumulant.cache.fitted.readings import read
    >>> one = Atoms(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([[2 / 3]]))
    >>> expected_mass(one, two, queries, read(two, queries)).exp().round(decimals=3)
    tensor([[2.]])
    """
    drawn = (queries.eta @ atoms.keys.mT - readings.log_normalizer[..., None]).exp().mean(1)
    log_mass = atoms.expected.clamp_min(LEAST).log() - drawn.clamp_min(LEAST).log()
    return torch.where(atoms.expected > 0, log_mass, LOWEST).clamp(LOWEST, -LOWEST)


def tangent_mass(atoms: Atoms, tokens: KeyHeads, queries: LawQueries, readings: Readings) -> Tensor:
    """The tangent of each cluster's own G at the typical query η₀ = E[η].

    w_c = G_c(η₀) − ⟨η₀, k̂_c⟩,    G_c(η) = log Σ_{j in c} e^{⟨η,k_j⟩ + w_j}
    """
    return _log_sums(atoms, tokens, queries) - (queries.eta.mean(1, keepdim=True) @ atoms.keys.mT)[:, 0]


def shared_sigma_mass(atoms: Atoms, tokens: KeyHeads, queries: LawQueries, readings: Readings) -> Tensor:
    """`tangent_mass`, and the second order of one covariance for all clusters, at the typical spread of queries.

        w_c = G_c(η₀) − ⟨η₀, k̂_c⟩ + ½ tr(Σ Cov(η)),    Σ = Σ_c Σ_{j in c} p̄_j (k_j − k̂_c)(k_j − k̂_c)ᵀ / Σ_j p̄_j

    Atoms with one Σ are Proposition 2's Σ_c δ_(k̂_c) convolved with a Gaussian, which has
    G(η) = ½ ηᵀΣη + log Σ_c e^{⟨η,k̂_c⟩ + w_c}; the quadratic is taken at its mean over queries, so that no entry grows.
    """
    cluster = atoms.cluster
    if cluster is None:
        return tangent_mass(atoms, tokens, queries, readings)
    centres = atoms.keys.gather(1, cluster[..., None].expand(-1, -1, atoms.keys.shape[-1]))
    offset = tokens.keys - centres
    eta = queries.eta - queries.eta.mean(1, keepdim=True)
    along = (offset @ (eta.mT @ eta / eta.shape[1]) * offset).sum(-1)  # (k_j − k̂_c)ᵀ Cov(η) (k_j − k̂_c)
    weight = readings.mean
    alone = torch.zeros_like(atoms.expected).scatter_add_(1, cluster, torch.ones_like(weight)) <= 1
    spread = (weight * along).sum(1) / weight.sum(1).clamp_min(LEAST)
    return tangent_mass(atoms, tokens, queries, readings) + torch.where(alone, 0.0, spread[:, None] / 2)


def _log_sums(atoms: Atoms, tokens: KeyHeads, queries: LawQueries) -> Tensor:
    """(key heads, m) G_c(η₀) of the entries that each atom stands for."""
    scores = (queries.eta.mean(1, keepdim=True) @ tokens.keys.mT)[:, 0] + tokens.log_mass
    if atoms.cluster is None:
        return scores if atoms.chosen is None else scores.gather(1, atoms.chosen)
    highest = scores.amax(1, keepdim=True)
    sums = torch.zeros_like(atoms.expected).scatter_add_(1, atoms.cluster, (scores - highest).exp())
    return torch.where(sums > 0, sums.log() + highest, LOWEST)
