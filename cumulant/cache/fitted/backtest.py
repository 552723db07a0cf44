"""What entries would have cost at earlier cuts of the same prefix, on the queries that came after them, and on queries
of a repetition that they were not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.law import LawSamples, queries_after
from cumulant.cache.fitted.query_law import SampledQueries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings, attention, output, read
from cumulant.cache.fitted.recipe import EntryRecipe, fit
from cumulant.cache.prefix import LayerPrefix

SIZES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the prefix, that a key head may hold
RECENT = (0.25, 0.6, 1.0)  # of its entries, that may be the last tokens
MANY = 0.25  # of the prefix, above which only the first share is tried
SMALLEST = 8  # entries of a key head


class BacktestSettings(NamedTuple):
    """cuts: how many tokens before its end the prefix is cut; judging: queries of each kind that judge."""

    cuts: tuple[int, ...] = (128,)
    judging: int = 64


class Curves(NamedTuple):
    """Errors of the key heads of a layer, |W_O (ô − o)|² over the squared norm of the residual stream.

    after     (key heads, sizes, recents) on queries after earlier cuts
    repeated  (key heads, sizes, recents) on queries of a repetition; zeros without one
    """

    after: Tensor
    repeated: Tensor

    def total(self) -> Tensor:
        """Both kinds count alike."""
        return self.after + self.repeated


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


def sizes_of(length: int) -> list[int]:
    """Numbers of entries that are tried for a prefix of ``length`` tokens, growing, the last of them all tokens.

    >>> sizes_of(1024), sizes_of(48)
    ([16, 32, 64, 128, 256, 512, 1024], [8, 12, 24, 48])
    """
    return sorted({min(max(int(share * length), SMALLEST), length) for share in SIZES})


def curves(
    layer: LayerPrefix,
    number: int,
    samples: LawSamples,
    settings: BacktestSettings,
    recipe: EntryRecipe,
    metric: Tensor | None,
) -> Curves:
    """The errors of a layer, the ``number``-th of the prefix, for every size of `sizes_of` and share of `RECENT`.

    metric  (heads, e, e) W_Oᵀ W_O; None: the identity
    """
    length = layer.keys.shape[1]
    sizes = sizes_of(length)
    after = torch.zeros(len(layer.keys), len(sizes), len(RECENT))
    for back in settings.cuts:
        cut = length - back
        judged = queries_after(layer, cut, settings.judging)
        after += errors(
            recipe, trial(layer, cut, samples.before(number, cut), judged), [m * cut // length for m in sizes], metric
        )
    after, repeated = after / len(settings.cuts), torch.zeros_like(after)
    if samples.repeated is not None and samples.judging is not None:
        half = samples.repeated[number].every_other()
        held_out = trial(layer, length, half, samples.judging[number])
        repeated = errors(recipe, held_out, sizes, metric)
    norm = layer.stream or 1.0
    return Curves(after / norm, repeated / norm)


def trial(layer: LayerPrefix, length: int, law: SampledQueries, judged: SampledQueries) -> Trial:
    """Both samples asked of the first ``length`` tokens of a layer."""
    tokens = KeyHeads.tokens(layer.keys[:, :length].float(), layer.values[:, :length].float())
    fitting, judging = (LawQueries.of(s, length, layer.rotation, len(layer.keys)) for s in (law, judged))
    total, p = attention(tokens, judging)
    return Trial(tokens, fitting, read(tokens, fitting), judging, output(tokens, judging, total, p))


def errors(recipe: EntryRecipe, trial: Trial, sizes: Sequence[int], metric: Tensor | None) -> Tensor:
    """(key heads, sizes, recents) the loss of a recipe, quickly made, with so many entries and recent shares."""
    heads, length = trial.tokens.keys.shape[:2]
    out = torch.zeros(heads, len(sizes), len(RECENT))
    for i, size in enumerate(sizes):
        shares = RECENT if size <= MANY * length else RECENT[:1]
        out[:, i, len(shares) :] = torch.inf
        for j, recent in enumerate(shares if size < length else ()):
            quick = recipe.quick(size / length)
            made = fit(quick, trial.tokens, trial.law, trial.read, size, int(recent * size))
            out[:, i, j] = loss(made.entries, trial.judged, trial.target, metric)
    return out


def loss(entries: KeyHeads, judged: LawQueries, target: Tensor, metric: Tensor | None) -> Tensor:
    """(key heads,) mean over queries of |W_O (ô − o)|², summed over the heads of a group."""
    total, p = attention(entries, judged)
    error = output(entries, judged, total, p) - target  # (key heads, group · q, e)
    if metric is None:
        return error.square().sum(-1).mean(-1)
    groups = len(metric) // len(error)
    error = error.unflatten(1, (groups, -1))
    weighted = error @ metric.unflatten(0, (-1, groups)).to(error)
    return (weighted * error).sum(-1).mean(-1).sum(-1)
