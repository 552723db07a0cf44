"""Contrastive losses under the names and call contracts of the libraries that train embeddings with them.

Both are log-normalizers minus an inner product (`cumulant.contrastive`), and neither holds anchors × candidates,
forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.contrastive import info_nce
from cumulant.contrastive.arguments import in_range
from cumulant.kernels.autocast import without_autocast
from cumulant.kernels.dense import accumulate

SIMILARITIES = ("cos", "dot")
SCORES = 1 << 18  # held at once, of one strip of anchors
NUMBERS = 1 << 21  # held at once, of the rows that listed pairs select


@final
class MultipleNegativesRankingLoss(nn.Module):
    """The loss of that name in sentence-transformers: the positive of an anchor among all candidates of the batch.

        ℓ_i = log Σ_j exp(scale · sim(a_i, c_j)) − scale · sim(a_i, c_i),      c = positives, then all negatives

    model       features ↦ a dictionary with "sentence_embedding" (N, d), as a SentenceTransformer
    scale       1/temperature > 0; 20 is theirs for cosines, 1 is common for inner products
    similarity  "cos" (their ``cos_sim``) or "dot" (their ``dot_score``)
    symmetric   ½ (mean of ℓ + mean of ℓ with the roles of anchors and positives exchanged): their
                ``directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"``, and
                MultipleNegativesSymmetricRankingLoss

    Equal to theirs with ``directions=("query_to_doc",)``, their default; other directions, hardness weights and
    gathering over devices are not here (`cumulant.contrastive.info_nce` has ``group``). Every column has a forward pass
    of its own. Half precision is accumulated and returned in float32.

    >>> import torch
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> loss = MultipleNegativesRankingLoss(lambda features: features, scale=2.0)
    >>> loss([{"sentence_embedding": x}, {"sentence_embedding": x}])              # log(e² + 2) − 2
    tensor(0.2395, dtype=torch.float64)
    """

    def __init__(self, model: Any, scale: float = 20.0, similarity: str = "cos", *, symmetric: bool = False):
        super().__init__()
        if not 0 < scale < float("inf"):
            where, advice = "MultipleNegativesRankingLoss.scale", "It is 1/temperature."
            raise ValueError(sentence(where, "a positive finite number", scale, advice))
        _known_similarity("MultipleNegativesRankingLoss", similarity)
        self.model, self.scale, self.similarity, self.symmetric = model, scale, similarity, symmetric

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Features of the anchors, the positives and any number of hard negatives → (); labels are not read."""
        return self.compute_loss_from_embeddings([self.model(f)["sentence_embedding"] for f in sentence_features])

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """(N, d) of every column → ()"""
        where, advice = "MultipleNegativesRankingLoss.sentence_features", "Anchors, then positives, then negatives."
        if len(embeddings) < 2:
            raise ValueError(sentence(where, "two columns or more", len(embeddings), advice))
        anchors, positives, *_ = rows = [_rows(e, self.similarity) for e in embeddings]
        if anchors.shape != positives.shape:
            expected = f"positives of shape {shape(anchors)} as the anchors"
            raise ValueError(sentence(where, expected, shape(positives), advice))
        loss = info_nce(anchors, torch.cat(rows[1:]), temperature=self.temperature)
        if not self.symmetric:
            return loss
        return (loss + info_nce(positives, anchors, temperature=self.temperature)) / 2

    @property
    def temperature(self) -> float:
        """1/scale"""
        return 1 / self.scale

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card of sentence-transformers says of this loss."""
        return {"scale": self.scale, "similarity": self.similarity, "symmetric": self.symmetric}


@final
class NTXentLoss(nn.Module):
    """The loss of that name in pytorch-metric-learning: each positive of an anchor against all its negatives.

        mean over pairs (a, p) of  log(1 + exp(N_a − s_ap)),      s_ij = sim(z_i, z_j)/τ,      N_a = log Σ_n exp s_an

    p runs over the points with the label of a, except a itself, and n over those with other labels: other positives of
    an anchor are in no denominator, unlike SupCon (``positives=`` of `cumulant.contrastive.info_nce`).

    temperature  τ > 0
    similarity   "cos" or "dot", their CosineSimilarity (the default) and DotProductSimilarity without normalisation

    Equal to theirs with the default reducer, but for three cases: pairs count however few there are, where theirs is 0
    with at most one positive and one negative pair; references are other points than the anchors, where theirs leaves
    out the pairs (i, i) if ``ref_labels`` is the same object as ``labels``; and losses are not cut off at −log of the
    smallest number. 0 without positives or negatives. Half precision is accumulated and returned in float32.

    >>> import torch
    >>> x = torch.eye(2, dtype=torch.float64).repeat(2, 1)
    >>> NTXentLoss(temperature=1.0)(x, torch.tensor([0, 1, 0, 1]))                 # log(1 + 2/e)
    tensor(0.5514, dtype=torch.float64)
    """

    def __init__(self, temperature: float = 0.07, similarity: str = "cos"):
        super().__init__()
        if not 0 < temperature < float("inf"):
            where, advice = "NTXentLoss.temperature", "Smaller is sharper; 0.07 is common for unit vectors."
            raise ValueError(sentence(where, "a positive finite number", temperature, advice))
        _known_similarity("NTXentLoss", similarity)
        self.temperature, self.similarity = temperature, similarity

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Embeddings (N, d) with labels (N,) → ()

        indices_tuple  pairs in the place of those by labels: (anchors, positives, anchors, negatives), or triplets
                       (anchors, positives, negatives), as miners return them; a pair that is listed twice counts twice
        ref_emb        (M, d), positives and negatives are among these in the place of the embeddings
        ref_labels     (M,)
        """
        _check_points("embeddings", embeddings)
        z = refs = _rows(embeddings, self.similarity)
        if ref_emb is not None:
            _check_references(ref_emb, embeddings)
            refs = _rows(ref_emb, self.similarity)
        with without_autocast(z):
            eta = z / self.temperature
            if indices_tuple is not None:
                return _mean_of_listed(eta, refs, _listed(indices_tuple, eta, refs))
            own = theirs = _labels("labels", labels, eta)
            if ref_emb is not None:
                theirs = _labels("ref_labels", ref_labels, refs)
            return _mean_by_label(eta, refs, own, theirs, ref_emb is None)


def _rows(embedding: Tensor, similarity: str) -> Tensor:
    """In the precision of sums; unit vectors for cosines."""
    rows = accumulate(embedding)
    return F.normalize(rows, dim=-1) if similarity == "cos" else rows


# ---------------------------------------------------------------------- pairs by label


def _mean_by_label(eta: Tensor, refs: Tensor, labels: Tensor, ref_labels: Tensor, same_points: bool) -> Tensor:
    """Strip by strip of anchors; the backward pass computes the scores of a strip again."""
    size = max(1, SCORES // max(1, len(refs)))
    total, pairs, first = eta.sum() * 0 + refs.sum() * 0, labels.new_zeros((), dtype=torch.long), 0
    for rows, own in zip(eta.split(size), labels.split(size), strict=True):
        start = first if same_points else None
        part, count = checkpoint(_strip, rows, refs, own, ref_labels, start, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
        total, pairs, first = total + part, pairs + count, first + len(rows)
    return total / pairs.clamp_min(1)


def _strip(eta: Tensor, refs: Tensor, labels: Tensor, ref_labels: Tensor, first: int | None) -> tuple[Tensor, Tensor]:
    """The sum over the positive pairs of some anchors and their number; ``first`` is the index of anchor 0, if any."""
    same = labels[:, None] == ref_labels
    opposed = ~same.all(1, keepdim=True)
    scores = eta @ refs.T
    negative = scores.masked_fill(same & opposed, -torch.inf).logsumexp(1, keepdim=True)
    if first is not None:
        same.diagonal(first).fill_(False)
    terms = F.softplus(negative - scores, threshold=50)
    return torch.where(same & opposed, terms, 0).sum(), same.sum()


# ---------------------------------------------------------------------- listed pairs


def _mean_of_listed(eta: Tensor, refs: Tensor, pairs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Numbers for the listed pairs are held, and no more."""
    a, p, b, n = pairs
    negative, positive = _pair_scores(eta, refs, b, n), _pair_scores(eta, refs, a, p)
    top = eta.new_full((len(eta),), -torch.inf).scatter_reduce(0, b, negative.detach(), "amax")
    opposed = top > -torch.inf
    top = torch.where(opposed, top, 0)
    mass = eta.new_zeros(len(eta)).index_add(0, b, torch.exp(negative - top[b]))
    log_sum = top + torch.log(torch.where(opposed, mass, 1))
    terms = F.softplus(log_sum[a] - positive, threshold=50)
    return torch.where(opposed[a], terms, 0).sum() / max(1, len(a))


def _pair_scores(eta: Tensor, refs: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """⟨η_i, x_j⟩ of every pair, (pairs,)."""

    def some(eta: Tensor, refs: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (eta[i] * refs[j]).sum(-1)

    size = max(1, NUMBERS // max(1, eta.shape[1]))
    parts = zip(i.split(size), j.split(size), strict=True)
    return torch.cat([checkpoint(some, eta, refs, *part, use_reentrant=False) for part in parts])  # pyright: ignore[reportArgumentType, reportCallIssue]


# ---------------------------------------------------------------------- arguments


def _known_similarity(where: str, similarity: str) -> None:
    if similarity not in SIMILARITIES:
        raise ValueError(sentence(f"{where}.similarity", "'cos' or 'dot'", repr(similarity), "Pick one."))


def _check_points(name: str, points: Tensor) -> None:
    if require_float(f"NTXentLoss.{name}", points).ndim != 2:
        advice = "Flatten the leading axes."
        raise ValueError(sentence(f"NTXentLoss.{name}", "shape (N, d)", shape(points), advice))


def _check_references(ref_emb: Tensor, embeddings: Tensor) -> None:
    where = "NTXentLoss.ref_emb"
    _check_points("ref_emb", ref_emb)
    require_alike(where, ref_emb, "embeddings", embeddings)
    if ref_emb.shape[1] != embeddings.shape[1]:
        expected = f"dimension d={embeddings.shape[1]} as embeddings"
        raise ValueError(sentence(where, expected, shape(ref_emb), "Project both into one space."))


def _labels(name: str, labels: Tensor | None, points: Tensor) -> Tensor:
    where, advice = f"NTXentLoss.{name}", "One label per row."
    if labels is None:
        raise ValueError(sentence(where, "labels, or an indices_tuple", None, advice))
    if labels.shape != points.shape[:1]:
        raise ValueError(sentence(where, f"shape (N={len(points)},)", shape(labels), advice))
    return labels.to(points.device)


def _listed(indices: Sequence[Tensor], eta: Tensor, refs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(anchors, positives, anchors, negatives), whichever form was given."""
    where, advice = "NTXentLoss.indices_tuple", "Pass what a miner returns."
    if len(indices) not in (3, 4):
        raise ValueError(sentence(where, "three index tensors or four", len(indices), advice))
    moved = [i.to(eta.device).long() for i in indices]
    a, p, b, n = moved if len(moved) == 4 else (moved[0], moved[1], moved[0], moved[2])
    if a.shape != p.shape or b.shape != n.shape or a.ndim != 1 or b.ndim != 1:
        got = ", ".join(map(shape, indices))
        raise ValueError(sentence(where, "index tensors of one length", got, advice))
    for index, size in ((a, len(eta)), (p, len(refs)), (b, len(eta)), (n, len(refs))):
        in_range(where, index, size, None)
    return a, p, b, n
