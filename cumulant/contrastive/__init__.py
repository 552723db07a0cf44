"""Contrastive and large-vocabulary losses, each a log-normalizer minus an inner product (§10).

    loss(η, x⁺) = G(η) − ⟨η, x⁺⟩ = −log p_η(x⁺),        G(η) = log Σ_j exp⟨η, x_j⟩

The negative log-likelihood of the positive x⁺ under the family p_η whose measure counts the candidates x_j. InfoNCE,
NT-Xent, SupCon, CLIP and the softmax over a vocabulary differ in what η, the candidates and x⁺ are; NCE and word2vec
put a pair {0, 1} in the place of the candidates; von Mises–Fisher puts the whole sphere there. Gradients are
∇G − x⁺: the mean of the family minus the data.

The softmax losses never hold queries × candidates, forward or backward, and are twice differentiable. Half precision is
accumulated and returned in float32. Nothing is normalised on the way: for cosine similarity pass unit vectors.
"""

from cumulant.contrastive.batch import Parts, alignment_uniformity, info_nce, mutual_information_bound, nt_xent
from cumulant.contrastive.pairs import nce_loss, sgns_loss, sgns_optimum, vmf_nll
from cumulant.contrastive.vocabulary import VocabularyLoss, linear_cross_entropy

__all__ = [
    "Parts",
    "VocabularyLoss",
    "alignment_uniformity",
    "info_nce",
    "linear_cross_entropy",
    "mutual_information_bound",
    "nce_loss",
    "nt_xent",
    "sgns_loss",
    "sgns_optimum",
    "vmf_nll",
]
