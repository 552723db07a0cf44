"""What recipes would have cost at earlier cuts of the same prefix, on the queries that came after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.query_law import QuerySample
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings, attention, output, read
from cumulant.cache.fitted.recipe import Recipe, fit
from cumulant.cache.prefix import LayerPrefix


class Trial(NamedTuple):
    """A law to fit to, and queries to judge by, of one layer and the same tokens.

    tokens   of the prefix up to the cut
    law      queries that entries are fitted to
    read     what they read
    judged   queries that judge
    target   (key heads, q, e) their outputs with all tokens
    """

    tokens: KeyHeads
    law: LawQueries
    read: Readings
    judged: LawQueries
    target: Tensor


def trial(layer: LayerPrefix, length: int, law: QuerySample, judged: QuerySample) -> Trial:
    """Both samples asked of the first ``length`` tokens of a layer."""
    tokens = KeyHeads.tokens(layer.keys[:, :length].float(), layer.values[:, :length].float())
    heads = len(layer.keys)
    fitting, judging = (LawQueries.of(s, length, layer.rotation, heads) for s in (law, judged))
    total, p = attention(tokens, judging)
    return Trial(tokens, fitting, read(tokens, fitting), judging, output(tokens, judging, total, p))


def errors(
    recipe: Recipe, trial: Trial, sizes: Sequence[int], recents: Sequence[float], metric: Tensor | None
) -> Tensor:
    """(key heads, sizes, recents) mean over judging queries of |W_O (ô − o)|², summed over the heads of a group.

    sizes    entries of a key head
    recents  shares of them that are the last tokens
    metric   (heads, e, e) W_Oᵀ W_O; None: the identity
    """
    heads, length = len(trial.tokens.keys), trial.tokens.keys.shape[1]
    out = torch.full((heads, len(sizes), len(recents)), torch.inf)
    for i, size in enumerate(sizes):
        if size >= length:
            out[:, i] = 0
            continue
        for j, recent in enumerate(recents):
            made = fit(recipe, trial.tokens, trial.law, trial.read, size, int(recent * size))
            out[:, i, j] = loss(made.entries, trial.judged, trial.target, metric)
    return out


def loss(entries: KeyHeads, judged: LawQueries, target: Tensor, metric: Tensor | None) -> Tensor:
    """(key heads,) mean over queries of |W_O (ô − o)|², summed over the heads of a group."""
    total, p = attention(entries, judged)
    error = output(entries, judged, total, p) - target
    if metric is not None:
        grouped = error.unflatten(1, (len(metric) // len(error), -1))  # (key heads, group, q, e)
        weighted = grouped @ metric.unflatten(0, (len(error), -1)).to(error)
        return (weighted * grouped).sum(-1).mean(-1).sum(-1)
    return error.square().sum(-1).mean(-1)
