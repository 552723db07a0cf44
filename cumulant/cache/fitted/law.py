"""A law of the queries that will come: recent queries, queries from everywhere, and those of a repetition, mixed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cumulant.cache.fitted.query_law import (
    QuerySample,
    recent_queries,
    repeated_queries,
    sample_queries,
    spread_queries,
)
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.checks import sentence


class Law(NamedTuple):
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
    repeated   those of a repetition that entries are fitted to; None: there was none
    judging    others of the repetition, that entries are judged by
    """

    following: list[QuerySample]
    repeated: list[QuerySample] | None
    judging: list[QuerySample] | None

    def all_of(self, layer: int) -> QuerySample:
        """The mixture for one layer."""
        parts = [self.following[layer], *([] if self.repeated is None else [self.repeated[layer]])]
        return QuerySample.joined(parts)


def sample_law(prefix: Prefix, law: Law, judging: int, generator: torch.Generator) -> LawSamples:
    """The queries of a law for every layer, and ``judging`` more of the repetition."""
    following = [following_queries(layer, len(prefix), law, generator) for layer in prefix.layers]
    if not law.repeated:
        return LawSamples(following, None, None)
    drawn = torch.randperm(len(prefix), generator=generator)[: law.repeated + judging]
    fitted = torch.ones(len(drawn), dtype=torch.bool)
    fitted[: min(judging, len(drawn) // 4)] = False
    order = drawn.argsort()
    samples = repeated_queries(prefix, drawn[order])
    fitted = fitted[order]
    return LawSamples(following, *([sample.part(which) for sample in samples] for which in (fitted, ~fitted)))


def following_queries(layer: LayerPrefix, length: int, law: Law, generator: torch.Generator) -> QuerySample:
    """Recent and spread queries of the first ``length`` tokens of a layer, as if asked after them."""
    before = layer.first(length)
    kinds = ((spread_queries, law.spread), (recent_queries, law.recent))
    return QuerySample.joined([draw(before, number, law.span, generator) for draw, number in kinds if number])


def queries_after(layer: LayerPrefix, cut: int, number: int) -> QuerySample:
    """Queries that the model had after its first ``cut`` tokens, ``number`` at most, with the tokens between them."""
    tokens = torch.arange(cut + 1, layer.keys.shape[1])
    at = tokens[:: max(len(tokens) // number, 1)]
    return sample_queries(layer, at, at - cut)


def require_rotation(layer: LayerPrefix, where: str) -> None:
    """Refuse a layer whose queries cannot be turned on to later positions."""
    if layer.rotates and layer.rotation is None:
        got = f"{type(layer.module).__name__}, which rotates in a way that is not known"
        advice = "Use a method that needs no rotation, as snapkv."
        raise ValueError(sentence(where, "rotary positions, or none", got, advice))
