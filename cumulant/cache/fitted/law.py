"""A law of the queries that will come: recent queries, queries from everywhere, and those of a repetition, mixed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.query_law import (
    SampledQueries,
    drawn_spans,
    recent_tokens,
    repeated_queries,
    sample_queries,
    spread_tokens,
)
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.checks import sentence


class QueryLaw(NamedTuple):
    """How many queries of each kind stand for those to come, in every head.

    recent    of the last 256 tokens
    spread    of all tokens
    repeated  of the model while it repeats the prefix, which takes one more pass; 0: it is not asked to
    span      how far after the prefix the first two are asked, at most
    """

    recent: int = 96
    spread: int = 96
    repeated: int = 192
    span: int = 128


class LawSamples(NamedTuple):
    """Queries of every layer of a prefix.

    following  recent and spread ones
    tokens     (n,) which tokens these are of
    repeated   those of a repetition that entries are fitted to; None: there was none
    judging    others of the repetition, that entries are judged by
    """

    following: list[SampledQueries]
    tokens: list[Tensor]
    repeated: list[SampledQueries] | None
    judging: list[SampledQueries] | None

    def before(self, layer: int, cut: int) -> SampledQueries:
        """Recent and spread ones of the first ``cut`` tokens."""
        return self.following[layer].part(self.tokens[layer] < cut)

    def all_of(self, layer: int) -> SampledQueries:
        """The mixture for one layer."""
        parts = [self.following[layer], *([] if self.repeated is None else [self.repeated[layer]])]
        return SampledQueries.joined(parts)


def sample_law(prefix: Prefix, law: QueryLaw, judging: int, generator: torch.Generator) -> LawSamples:
    """The queries of a law for every layer, and ``judging`` more of the repetition."""
    tokens, following = [], []
    for layer in prefix.layers:
        drawn = spread_tokens(len(prefix), law.spread, generator), recent_tokens(len(prefix), law.recent, generator)
        at = torch.cat(drawn).sort().values
        tokens.append(at)
        following.append(sample_queries(layer, at, drawn_spans(at, law.span, generator)))
    if not law.repeated:
        return LawSamples(following, tokens, None, None)
    drawn = torch.randperm(len(prefix), generator=generator)[: law.repeated + judging]
    fitted = torch.ones(len(drawn), dtype=torch.bool)
    fitted[: min(judging, len(drawn) // 4)] = False
    order = drawn.argsort()
    samples = repeated_queries(prefix, drawn[order])
    fitted = fitted[order]
    return LawSamples(following, tokens, *([sample.part(which) for sample in samples] for which in (fitted, ~fitted)))


def queries_after(layer: LayerPrefix, cut: int, number: int) -> SampledQueries:
    """Queries that the model had after its first ``cut`` tokens, ``number`` at most, with the tokens between them."""
    first, last = cut + 1, layer.keys.shape[1] - 1
    at = torch.linspace(first, last, min(number, last - first + 1)).round().long()
    return sample_queries(layer, at, at - cut)


def require_rotation(layer: LayerPrefix, where: str) -> None:
    """Refuse a layer whose queries cannot be turned on to later positions."""
    if layer.rotates and layer.rotation is None:
        got = f"{type(layer.module).__name__}, which rotates in a way that is not known"
        advice = "Use a method that needs no rotation, as snapkv."
        raise ValueError(sentence(where, "rotary positions, or none", got, advice))
