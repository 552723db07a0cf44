"""Losses of sentence-transformers and pytorch-metric-learning: by definition, by these packages, and their memory."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from cumulant.nn import MultipleNegativesRankingLoss, NTXentLoss, contrastive_losses
from tests.compare import close


def draw(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both(loss, *tensors):
    """The value, then every gradient."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    value = loss(*leaves)
    return [value, *torch.autograd.grad(value, leaves, materialize_grads=True)]


def agree(ours, theirs, *tensors):
    found, expected = both(ours, *tensors), both(theirs, *tensors)
    close(found[0], expected[0], 1e-6)
    for a, b in zip(found[1:], expected[1:], strict=True):
        close(a, b, 1e-5)


def columns(*embeddings):
    return [{"sentence_embedding": e} for e in embeddings]


class Encoder(torch.nn.Module):
    """Takes and returns features as a SentenceTransformer does."""

    def forward(self, features):
        return features


# ---------------------------------------------------------------------- ranking among candidates

SIZES = {
    "one row": (1, 2),
    "pairs": (7, 2),
    "a negative": (6, 3),
    "several negatives": (5, 5),
    "one row, negatives": (1, 4),
}
sizes = pytest.mark.parametrize(("rows", "count"), SIZES.values(), ids=SIZES)


def dense_ranking(embeddings, scale, similarity, symmetric):
    a, *c = [F.normalize(e, dim=-1) if similarity == "cos" else e for e in embeddings]
    scores, own = scale * a @ torch.cat(c).T, torch.arange(len(a))
    loss = F.cross_entropy(scores, own)
    return (loss + F.cross_entropy(scores[:, : len(a)].T, own)) / 2 if symmetric else loss


@sizes
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("scale", "similarity"), [(20.0, "cos"), (1.0, "dot")])
def test_ranking_is_that_of_the_definition(rows, count, scale, similarity, symmetric):
    loss = MultipleNegativesRankingLoss(Encoder(), scale, similarity, symmetric=symmetric)
    agree(
        lambda *e: loss(columns(*e), None),
        lambda *e: dense_ranking(e, scale, similarity, symmetric),
        *draw(count, rows, 4),
    )


@sizes
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("scale", "similarity"), [(20.0, "cos"), (1.0, "dot")])
def test_ranking_is_that_of_sentence_transformers(rows, count, scale, similarity, symmetric):
    reason = "pip install sentence-transformers to compare with it"
    pytest.importorskip("sentence_transformers", reason=reason)
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import losses

    options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"} if symmetric else {}
    score = util.cos_sim if similarity == "cos" else util.dot_score
    theirs = losses.MultipleNegativesRankingLoss(Encoder(), scale, score, **options)
    ours = MultipleNegativesRankingLoss(Encoder(), scale, similarity, symmetric=symmetric)
    labels = torch.zeros(rows)
    agree(lambda *e: ours(columns(*e), labels), lambda *e: theirs(columns(*e), labels), *draw(count, rows, 4))


def test_the_model_that_is_trained_is_a_part_of_the_loss():
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.EmbeddingBag(10, 4, dtype=torch.float64)

        def forward(self, features):
            return {"sentence_embedding": self.table(features["input_ids"])}

    model = Words()
    loss = MultipleNegativesRankingLoss(model)
    features = ({"input_ids": torch.arange(6).reshape(3, 2) + k} for k in range(3))  # any iterable
    loss(features, torch.empty(0)).backward()
    assert [name for name, _ in loss.named_parameters()] == ["model.table.weight"]
    assert model.table.weight.grad[:8].abs().sum(1).min() > 0


def test_half_precision_is_accumulated_in_float32():
    a, b = draw(2, 9, 4).bfloat16()
    exact = dense_ranking((a.double(), b.double()), 20.0, "cos", False)
    loss = MultipleNegativesRankingLoss(Encoder())(columns(a, b))
    assert loss.dtype == torch.float32
    close(loss.double(), exact, 1e-5)
    labels = torch.arange(9) % 3
    close(NTXentLoss()(a, labels).double(), dense_pairs(a.double(), labels, a.double(), labels, True), 1e-5)


# ---------------------------------------------------------------------- pairs by label

LABELS = {
    "two of each": [0, 1, 2, 0, 1, 2],
    "duplicated": [0, 0, 0, 1, 1, 2, 0],
    "some without positives": [0, 1, 0, 2, 3],
    "none has positives": [0, 1, 2],
    "none has negatives": [4, 4, 4],
    "one row": [0],
}
labelled = pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)


def dense_pairs(z, labels, refs, ref_labels, same_points, temperature=0.07, similarity="cos"):
    z, refs = (F.normalize(x, dim=-1) if similarity == "cos" else x for x in (z, refs))
    terms = []
    for i in range(len(z)):
        score = refs @ z[i] / temperature
        for j in range(len(refs)):
            if labels[i] == ref_labels[j] and not (same_points and i == j):
                candidates = torch.cat([score[j : j + 1], score[ref_labels != labels[i]]])
                terms.append(candidates.logsumexp(0) - score[j])
    return torch.stack(terms).mean() if terms else (z * 0).sum() + (refs * 0).sum()


@labelled
@pytest.mark.parametrize(("temperature", "similarity"), [(0.07, "cos"), (1.0, "dot")])
@pytest.mark.parametrize("scores", [1, 1 << 19], ids=["row by row", "at once"])
def test_pairs_by_label_are_those_of_the_definition(monkeypatch, labels, temperature, similarity, scores):
    monkeypatch.setattr(contrastive_losses, "SCORES", scores)
    y, loss = torch.tensor(labels), NTXentLoss(temperature, similarity)
    agree(
        lambda z: loss(z, y),
        lambda z: dense_pairs(z, y, z, y, True, temperature, similarity),
        draw(len(y), 4),
    )


@labelled
def test_pairs_with_references_are_those_of_the_definition(labels):
    y, other = torch.tensor(labels), torch.tensor([0, 1, 1, 4, 7])
    agree(
        lambda z, r: NTXentLoss()(z, y, ref_emb=r, ref_labels=other),
        lambda z, r: dense_pairs(z, y, r, other, False),
        *(draw(len(y), 4), draw(5, 4, seed=1)),
    )


def pairs_of(labels):
    same, own = labels[:, None] == labels, torch.eye(len(labels), dtype=torch.bool)
    return *torch.where(same & ~own), *torch.where(~same)


@labelled
def test_listed_pairs_are_those_of_the_labels(monkeypatch, labels):
    monkeypatch.setattr(contrastive_losses, "NUMBERS", 12)
    y = torch.tensor(labels)
    agree(lambda z: NTXentLoss()(z, None, pairs_of(y)), lambda z: NTXentLoss()(z, y), draw(len(y), 4))


def test_second_derivatives_are_those_of_the_definition():
    y = torch.tensor(LABELS["duplicated"])

    def curvature(loss):
        def value(z):
            return torch.autograd.grad(loss(z), z, create_graph=True)[0].square().sum()

        return value

    ours, theirs = curvature(lambda z: NTXentLoss(0.5)(z, y)), curvature(lambda z: dense_pairs(z, y, z, y, True, 0.5))
    agree(ours, theirs, draw(len(y), 4))


def test_far_scores_neither_overflow_nor_vanish():
    """log(1 + e^{N − s}) at N − s = 2000, where the exponential is infinite, and at 0."""
    x, y = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64), torch.tensor([0, 0, 1])
    value, gradient = both(lambda z: NTXentLoss(1e-3, "dot")(z, y), x)
    close(value, (2000 + math.log(2)) / 2)
    assert gradient.isfinite().all()


# ---------------------------------------------------------------------- pairs, by the other package


def metric_learning():
    reason = "pip install pytorch-metric-learning to compare with it"
    pytest.importorskip("pytorch_metric_learning", reason=reason)
    from pytorch_metric_learning import distances, losses, miners

    return distances, losses, miners


@labelled
@pytest.mark.parametrize(("temperature", "similarity"), [(0.07, "cos"), (1.0, "dot")])
def test_pairs_are_those_of_pytorch_metric_learning(labels, temperature, similarity):
    distances, losses, _ = metric_learning()
    distance = (
        distances.CosineSimilarity()
        if similarity == "cos"
        else distances.DotProductSimilarity(normalize_embeddings=False)
    )
    theirs, ours = losses.NTXentLoss(temperature, distance=distance), NTXentLoss(temperature, similarity)
    y, other = torch.tensor(labels), torch.tensor([0, 1, 1, 4, 7])
    z, refs = draw(len(y), 4), draw(5, 4, seed=1)
    agree(lambda z: ours(z, y), lambda z: theirs(z, y), z)
    agree(lambda z, r: ours(z, y, None, r, other), lambda z, r: theirs(z, y, None, r, other), z, refs)


@labelled
def test_mined_pairs_are_those_of_pytorch_metric_learning(labels):
    _, losses, miners = metric_learning()
    y, ours, theirs = torch.tensor(labels), NTXentLoss(), losses.NTXentLoss()
    z = draw(len(y), 4)
    for miner in (miners.MultiSimilarityMiner(), miners.TripletMarginMiner(), miners.BatchHardMiner()):
        mined = miner(z, y)
        if all(len(index) == 1 for index in mined):
            continue  # theirs is 0: see where it differs
        agree(lambda z, mined=mined: ours(z, y, mined), lambda z, mined=mined: theirs(z, y, mined), z)


def test_where_pytorch_metric_learning_differs():
    _, losses, _ = metric_learning()
    z, refs = draw(1, 4), draw(2, 4, seed=1)
    y, other = torch.tensor([0]), torch.tensor([0, 1])
    assert losses.NTXentLoss()(z, y, ref_emb=refs, ref_labels=other) == 0
    close(NTXentLoss()(z, y, ref_emb=refs, ref_labels=other), dense_pairs(z, y, refs, other, False))
    view, y = draw(2, 4, seed=2), torch.tensor([0, 1])
    assert losses.NTXentLoss()(refs, y, ref_emb=view, ref_labels=y) == 0
    close(losses.NTXentLoss()(refs, y, ref_emb=view, ref_labels=y.clone()), NTXentLoss()(refs, y, None, view, y), 1e-9)


# ---------------------------------------------------------------------- memory

MEMORY = """
import re, torch
from cumulant.nn import MultipleNegativesRankingLoss, NTXentLoss
torch.set_num_threads(1)
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
def ranking(n):
    columns = [{{"sentence_embedding": torch.randn(n, 64, requires_grad=True)}} for _ in range(3)]
    MultipleNegativesRankingLoss(lambda features: features)(columns).backward()
def pairs(n):
    NTXentLoss()(torch.randn(n, 64, requires_grad=True), torch.arange(n) % (n // 4)).backward()
{work}(64)
before = peak()
{work}(4096)
print((peak() - before) / (4 * 4096 * 4096))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which Linux has")
@pytest.mark.parametrize("work", ["ranking", "pairs"])
def test_neither_holds_all_pairs(work):
    """Of a batch of 4096: one matrix of scores would be 64 MiB, with a negative each 128, their gradients as much."""
    code = MEMORY.format(work=work)
    held = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed blocks go back, so that the peak is what is held
    run = subprocess.run([sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True)
    share = float(run.stdout)
    assert 0.001 < share < 0.5


# ---------------------------------------------------------------------- messages

X, Y = draw(3, 2), torch.tensor([0, 0, 1])
BAD = {
    "scale": (
        lambda: MultipleNegativesRankingLoss(None, 0.0),
        "MultipleNegativesRankingLoss.scale: expected a positive",
    ),
    "similarity": (lambda: NTXentLoss(similarity="l2"), "NTXentLoss.similarity: expected 'cos' or 'dot', got 'l2'"),
    "temperature": (lambda: NTXentLoss(-1.0), "NTXentLoss.temperature: expected a positive finite number, got -1.0"),
    "columns": (
        lambda: MultipleNegativesRankingLoss(Encoder())(columns(X)),
        "MultipleNegativesRankingLoss.sentence_features: expected two columns or more, got 1",
    ),
    "positives": (
        lambda: MultipleNegativesRankingLoss(Encoder())(columns(X, X[:2])),
        "sentence_features: expected positives of shape (3, 2) as the anchors, got (2, 2)",
    ),
    "no labels": (lambda: NTXentLoss()(X), "NTXentLoss.labels: expected labels, or an indices_tuple, got None"),
    "label count": (lambda: NTXentLoss()(X, Y[:2]), "NTXentLoss.labels: expected shape (N=3,), got (2)"),
    "rank": (lambda: NTXentLoss()(X[0], Y), "NTXentLoss.embeddings: expected shape (N, d), got (2)"),
    "reference labels": (lambda: NTXentLoss()(X, Y, ref_emb=X), "NTXentLoss.ref_labels: expected labels"),
    "references": (
        lambda: NTXentLoss()(X, Y, ref_emb=X[:, :1], ref_labels=Y),
        "NTXentLoss.ref_emb: expected dimension d=2 as embeddings, got (3, 1)",
    ),
    "two indices": (
        lambda: NTXentLoss()(X, Y, (Y, Y)),
        "NTXentLoss.indices_tuple: expected three index tensors or four",
    ),
    "lengths": (lambda: NTXentLoss()(X, Y, (Y, Y, Y[:1])), "NTXentLoss.indices_tuple: expected index tensors of one"),
    "range": (lambda: NTXentLoss()(X, Y, (Y, Y, Y + 3)), "NTXentLoss.indices_tuple: expected indices in 0 … 2"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
