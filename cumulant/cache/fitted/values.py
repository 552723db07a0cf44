"""Values of entries, fitted so that the outputs which a law of queries reads are those of the full measure."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output


def refitted(entries: KeyHeads, queries: LawQueries, target: Tensor, ridge: float = 1e-2) -> KeyHeads:
    """The same keys and masses with the values that bring outputs nearest to ``target`` (key heads, r, e).

        argmin over v̂ of  Σ_i |Σ_c p̂_ic v̂_c + local_i − o_i|² + λ Σ_c |v̂_c − v_c|²,    λ = ridge · mean_c Σ_i p̂_ic²

    >>> one = KeyHeads.tokens(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    >>> queries = LawQueries(torch.zeros(1, 4, 1), torch.full((1, 4), -30.0), torch.zeros(1, 4, 1))
    >>> refitted(one, queries, torch.full((1, 4, 1), 2.0), 1.0).values.round(decimals=3)
    tensor([[[1.]]])
    """
    total, p = attention(entries, queries)
    missing = target - output(entries, queries, total, p)
    gram = p.mT @ p
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(-1, keepdim=True) + torch.finfo(gram.dtype).tiny
    change = torch.cholesky_solve(p.mT @ missing, torch.linalg.cholesky(gram))
    return entries._replace(values=entries.values + change)
