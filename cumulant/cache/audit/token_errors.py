"""What a compressed cache does to predictions: per token of a continuation, against those with the full cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64  # whose probabilities are held at once
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


@torch.no_grad()
def token_errors(full: Tensor, compressed: Tensor, following: Tensor) -> TokenErrors:
    """From logits (n, vocabulary) of both passes and the tokens (n,) that follow in the text, in float64.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> found = token_errors(logits, logits + torch.tensor([0.0, 1.0]), torch.tensor([1, 0]))
    >>> found.kl[0], found.agrees
    (tensor(0.1201, dtype=torch.float64), tensor([0., 0.], dtype=torch.float64))
    """
    parts = []
    for start in range(0, len(following), ROWS):
        rows = slice(start, start + ROWS)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (full, compressed))
        next_ids = following[rows, None]
        agrees = (full[rows].argmax(-1) == compressed[rows].argmax(-1)).double()
        kl = (p.exp() * (p - q)).sum(-1)
        parts.append((kl, -q.gather(1, next_ids)[:, 0], -p.gather(1, next_ids)[:, 0], agrees))
    return TokenErrors(*(torch.cat(part) for part in zip(*parts, strict=True)))


def horizons(length: int) -> list[int]:
    """Those of 32, 64, … 512 tokens that a continuation of so many has, and its own length.

    >>> horizons(128), horizons(200)
    ([32, 64, 128], [32, 64, 128, 200])
    """
    return sorted({h for h in HORIZONS if h <= length} | {length})
