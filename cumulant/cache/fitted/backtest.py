"""What entries would have cost at earlier cuts of the same prefix, on the queries that came after them, and on queries
of a repetition that they were not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.law import LawSamples, QueryLaw, following_queries, queries_after
from cumulant.cache.fitted.query_law import SampledQueries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output, read
from cumulant.cache.fitted.recipe import EntryRecipe, fit
from cumulant.cache.prefix import LayerPrefix, Prefix

SIZES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1.0)  # of the prefix, that a key head may hold
RECENT = (0.25, 1.0)  # of its entries, that may be the last tokens
MANY = 0.125  # of the prefix, above which only the first share is tried
SMALLEST = 8  # entries of a key head
LATEST = 3  # quarters of the tokens that are held as they are, before which no cut is


class BacktestSettings(NamedTuple):
    """cuts: how far before its end the prefix is cut, in tokens, or below 1 as a share of it; judging: queries of each
    kind that judge."""

    cuts: tuple[float, ...] = (128,)
    judging: int = 64

    def tokens(self, length: int) -> list[int]:
        """Cuts of ``length`` tokens; those too far back for it are at a quarter.

        >>> BacktestSettings((128, 0.5)).tokens(1024), BacktestSettings((128, 0.5)).tokens(256)
        ([128, 512], [64, 128])
        """
        return [int(cut * length) if cut < 1 else min(int(cut), length // 4) for cut in self.cuts]


class Curves(NamedTuple):
    """Errors of the key heads of a layer, |W_O (ô − o)|² over the squared norm of the residual stream, for every law of
    `LawSamples.laws`, size of `sizes_of` and share of `RECENT`.

    after     (key heads, laws, sizes, recents) on queries after earlier cuts
    repeated  (key heads, laws, sizes, recents) on queries of a repetition; zeros without one
    """

    after: Tensor
    repeated: Tensor

    def total(self) -> Tensor:
        """Both kinds count alike."""
        return self.after + self.repeated


class Judges(NamedTuple):
    """Queries that judge entries, of one layer and the same tokens.

    queries   those after the cut, then those of the repetition
    target    (key heads, q, e) their outputs with all tokens
    after     how many of a head are after the cut
    """

    queries: LawQueries
    target: Tensor
    after: int


def sizes_of(length: int) -> list[int]:
    """Numbers of entries that are tried for a prefix of ``length`` tokens, growing, the last of them all tokens.

    >>> sizes_of(1024), sizes_of(48)
    ([16, 32, 64, 128, 256, 1024], [8, 12, 48])
    """
    return sorted({min(max(int(share * length), SMALLEST), length) for share in SIZES})


def grid_of(prefix: Prefix) -> list[int]:
    """The sizes that are tried for every key head of a prefix. Where a text grows, what is held before is most of what
    will be held after: a half of it is tried, too."""
    most = max(layer.keys.shape[1] for layer in prefix.layers)
    grows = any(layer.growth is not None for layer in prefix.layers)
    return sorted({*sizes_of(most), most // 2}) if grows else sizes_of(most)


def curves(
    layer: LayerPrefix,
    number: int,
    samples: LawSamples,
    law: QueryLaw,
    settings: BacktestSettings,
    recipe: EntryRecipe,
    metric: Tensor | None,
    generator: torch.Generator,
    sizes: Sequence[int],
) -> Curves:
    """The errors of a layer, the ``number``-th of the prefix, had its tokens been compressed at earlier cuts, where
    tokens after the cut are held as they are.

    metric  (heads, e, e) W_Oᵀ W_O; None: the identity
    sizes   as `grid_of` has them
    """
    entries, exact = layer.keys.shape[1], layer.length - layer.first_token
    of_cuts = []
    for back in settings.tokens(layer.length):
        back = min(back, LATEST * exact // 4)
        cut = layer.length - back
        tokens = KeyHeads.of(layer, cut)
        judges = judges_of(layer, tokens, samples.judges_of(number, queries_after(layer, cut, settings.judging)))
        shorter = [min(m * (entries - back) // entries, entries - back) for m in sizes]
        following = following_queries(layer, cut, law.of_trials(), generator)
        laws = [LawQueries.of(s, cut, layer.rotation, len(layer.keys)) for s in samples.trial_laws(number, following)]
        many = [MANY if len(laws) > 1 and n == 0 else 1.0 for n in range(len(laws))]
        most = (judges, shorter, metric, exact - back)
        tried = [errors(recipe, tokens, *pair, *most) for pair in zip(laws, many, strict=True)]
        of_cuts.append(torch.stack(tried, 2))
    after, repeated = torch.stack(of_cuts).mean(0) / (layer.stream or 1.0)
    return Curves(after, repeated)


def judges_of(layer: LayerPrefix, tokens: KeyHeads, judging: Sequence[SampledQueries]) -> Judges:
    """Both kinds of queries asked of the first tokens of a layer."""
    sample = SampledQueries.joined(judging)
    cut = layer.length - (layer.keys.shape[1] - tokens.keys.shape[1])
    queries = LawQueries.of(sample, cut, layer.rotation, len(layer.keys))
    return Judges(queries, output(tokens, queries, *attention(tokens, queries)), len(judging[0].span))


def errors(
    recipe: EntryRecipe,
    tokens: KeyHeads,
    law: LawQueries,
    most: float,
    judges: Judges,
    sizes: Sequence[int],
    metric: Tensor | None,
    exact: int,
) -> Tensor:
    """(2, key heads, sizes, recents) the `loss` of a recipe, quickly made, with so many entries and recent shares, at
    most ``exact`` of them. Infinite beyond a share ``most`` of the tokens."""
    heads, length = tokens.keys.shape[:2]
    readings = read(tokens, law)
    out = torch.zeros(2, heads, len(sizes), len(RECENT))
    for i, size in enumerate(sizes):
        shares = RECENT if size <= MANY * length else RECENT[:1] if size <= most * length else ()
        out[..., i, len(shares) :] = torch.inf
        for j, recent in enumerate(shares if size < length else ()):
            made = fit(recipe.quick(size / length), tokens, law, readings, size, min(int(recent * size), exact))
            out[..., i, j] = loss(made.entries, judges, metric)
    return out


def loss(entries: KeyHeads, judges: Judges, metric: Tensor | None) -> Tensor:
    """(2, key heads) mean over queries after the cut, and of a repetition, of |W_O (ô − o)|², summed over the heads of
    a group."""
    error = output(entries, judges.queries, *attention(entries, judges.queries)) - judges.target
    groups = 1 if metric is None else len(metric) // len(error)
    error = error.unflatten(1, (groups, -1))  # (key heads, group, q, e)
    weighted = error if metric is None else error @ metric.unflatten(0, (-1, groups)).to(error)
    squared = (weighted * error).sum(-1)
    kinds = squared[..., : judges.after], squared[..., judges.after :]
    return torch.stack([x.mean(-1).sum(-1) if x.shape[-1] else x.new_zeros(len(x)) for x in kinds])
