"""What a compressed cache does to predictions: per token of a continuation, against those with the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 8  # whose probabilities are in double precision at once, in the cache of the processor
HORIZONS = (32, 64, 128, 256, 512)


@dataclass(frozen=True, eq=False)
class TokenErrors:
    """Of every token of a continuation, (n,): what is predicted after it.

        kl = Σ_y p(y) log(p(y) / p̂(y)),    p with the full cache, p̂ with the compressed one

    kl      nats
    nll     −log p̂ of the token that follows
    full    −log p of the token that follows
    agrees  1 where both have the same most likely token
    """

    kl: Tensor
    nll: Tensor
    full: Tensor
    agrees: Tensor


class FullPredictions(NamedTuple):
    """Predictions with the full cache, which every method is compared with.

    logits          (n, vocabulary)
    probabilities   (n, vocabulary) softmax, in the dtype of the logits
    mass, score     (n,) float64 sums of these probabilities, and of them times the logits
    log_normalizer  (n,) of the logits, float64
    following       (n,) tokens that follow in the text
    nll             (n,) −log p of these
    """

    logits: Tensor
    probabilities: Tensor
    mass: Tensor
    score: Tensor
    log_normalizer: Tensor
    following: Tensor
    nll: Tensor


@torch.no_grad()
def full_predictions(logits: Tensor, following: Tensor) -> FullPredictions:
    """From logits (n, vocabulary) of the pass with the full cache and the tokens (n,) that follow in the text."""
    probabilities, sums = torch.empty_like(logits), []
    for rows in _blocks(logits):
        wide = logits[rows].double()
        normalizer = wide.logsumexp(-1)
        probabilities[rows] = (wide - normalizer[:, None]).exp_()
        rounded = probabilities[rows].double()
        sums.append((rounded.sum(-1), torch.linalg.vecdot(rounded, wide), normalizer))
    mass, score, normalizer = (torch.cat(parts) for parts in zip(*sums, strict=True))
    nll = normalizer - logits.gather(1, following[:, None])[:, 0].double()
    return FullPredictions(logits, probabilities, mass, score, normalizer, following, nll)


@torch.no_grad()
def token_errors(full: FullPredictions, compressed: Tensor) -> TokenErrors:
    """From logits (n, vocabulary) with the compressed cache, in float64.

        Σ_y p(y) (s_y − ŝ_y) − (log Σ e^s − log Σ e^ŝ) = KL(p ‖ p̂)    for logits s, ŝ

    >>> full = full_predictions(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 0]))
    >>> found = token_errors(full, full.logits + torch.tensor([0.0, 1.0]))
    >>> found.kl[0], found.agrees
    (tensor(0.1201, dtype=torch.float64), tensor([0., 0.], dtype=torch.float64))
    """
    kls, normalizers = [], []
    for rows in _blocks(compressed):
        wide = compressed[rows].double()
        normalizers.append(wide.logsumexp(-1))
        change = full.log_normalizer[rows] - normalizers[-1]
        score = torch.linalg.vecdot(full.probabilities[rows].double(), wide)
        kls.append(full.score[rows] - score - full.mass[rows] * change)
    nll = torch.cat(normalizers) - compressed.gather(1, full.following[:, None])[:, 0].double()
    agrees = (full.logits.argmax(-1) == compressed.argmax(-1)).double()
    return TokenErrors(torch.cat(kls), nll, full.nll, agrees)


def _blocks(logits: Tensor) -> list[slice]:
    return [slice(start, start + ROWS) for start in range(0, len(logits), ROWS)]


def horizons(length: int) -> list[int]:
    """Those of 32, 64, … 512 tokens that a continuation of so many has, and its own length.

    >>> horizons(128), horizons(200)
    ([32, 64, 128], [32, 64, 128, 200])
    """
    return sorted({h for h in HORIZONS if h <= length} | {length})
