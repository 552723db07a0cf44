"""A law of the queries that will come: recent queries, queries from everywhere, and those of a repetition, mixed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cumulant.cache.fitted.growing_law import kept_after, kept_queries
from cumulant.cache.fitted.query_law import (
    SampledQueries,
    drawn_spans,
    recent_tokens,
    repeated_queries,
    sample_queries,
    spread_tokens,
)
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.cache.repetition import parts_of
from cumulant.checks import sentence

REPEATED_PART = 256  # tokens
TRIED = 96  # queries of each kind that trials are fitted to, at most


class QueryLaw(NamedTuple):
    """How many queries of each kind stand for those to come, in every head.

    recent    of the last 256 tokens
    spread    of all tokens
    repeated  of the model while it repeats parts of the prefix; 0: it is not asked to
    share     of the prefix that it repeats
    span      how far after the prefix the first two are asked, at most
    """

    recent: int = 160
    spread: int = 160
    repeated: int = 384
    share: float = 0.5
    span: int = 128

    def of_trials(self) -> QueryLaw:
        """Fewer recent and spread ones, in the same proportion.

        >>> QueryLaw(recent=300, spread=100).of_trials()[:2]
        (72, 24)
        """
        part = min(TRIED / max(self.recent + self.spread, 1), 1.0)
        return self._replace(recent=round(part * self.recent), spread=round(part * self.spread))


class LawSamples(NamedTuple):
    """Queries of every layer of a prefix.

    following  recent and spread ones
    repeated   those of a repetition that entries are fitted to; None: there was none
    judging    others of the repetition, that entries are judged by
    """

    following: list[SampledQueries]
    repeated: list[SampledQueries] | None
    judging: list[SampledQueries] | None

    def laws(self, layer: int) -> list[SampledQueries]:
        """What the entries of a layer may be fitted to: queries of the prefix alone, and mixed with those of the
        repetition."""
        following = self.following[layer]
        return [following] + (
            [] if self.repeated is None else [SampledQueries.joined([following, self.repeated[layer]])]
        )

    def trial_laws(self, number: int, following: SampledQueries) -> list[SampledQueries]:
        """The same for trials, with queries ``following`` an earlier cut."""
        if self.repeated is None:
            return [following]
        return [following, SampledQueries.joined([following, self.repeated[number].thinned(TRIED)])]

    def judges_of(self, layer: int, after: SampledQueries) -> list[SampledQueries]:
        """What judges them: queries ``after`` the cut, and those of the repetition that nothing is fitted to."""
        return [after] if self.judging is None else [after, self.judging[layer]]


def sample_law(prefix: Prefix, law: QueryLaw, judging: int, generator: torch.Generator) -> LawSamples:
    """The queries of a law for every layer, and ``judging`` more of the repetition."""
    following = [following_queries(layer, len(prefix), law, generator) for layer in prefix.layers]
    if not law.repeated:
        return LawSamples(following, None, None)
    parts = drawn_parts(len(prefix), law.share, generator)
    tokens_of_parts = torch.cat([torch.arange(start, stop) for start, stop in parts])
    drawn = torch.randperm(len(tokens_of_parts), generator=generator)[: law.repeated + judging]
    fitted = torch.ones(len(drawn), dtype=torch.bool)
    fitted[: min(judging, len(drawn) // 4)] = False
    order = drawn.argsort()
    samples = repeated_queries(prefix, parts, tokens_of_parts[drawn[order]])
    fitted = fitted[order]
    return LawSamples(following, *([sample.part(which) for sample in samples] for which in (fitted, ~fitted)))


def following_queries(layer: LayerPrefix, length: int, law: QueryLaw, generator: torch.Generator) -> SampledQueries:
    """Recent and spread queries of the first ``length`` tokens of a layer, as if asked after them."""
    if layer.growth is not None:
        return kept_queries(layer, length, law)
    drawn = spread_tokens(length, law.spread, generator), recent_tokens(length, law.recent, generator)
    at = torch.cat(drawn).sort().values
    return sample_queries(layer, at, drawn_spans(at, law.span, generator))


def drawn_parts(length: int, share: float, generator: torch.Generator) -> list[tuple[int, int]]:
    """Parts of 256 tokens, together about a ``share`` of ``length``, in their order; parts that follow each other are
    one."""
    parts = parts_of(length, REPEATED_PART)
    chosen = torch.randperm(len(parts), generator=generator)[: max(round(share * len(parts)), 1)].sort().values
    joined: list[tuple[int, int]] = []
    for start, stop in (parts[i] for i in chosen.tolist()):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def queries_after(layer: LayerPrefix, cut: int, number: int) -> SampledQueries:
    """Queries that the model had after its first ``cut`` tokens, ``number`` at most, with the tokens between them."""
    if layer.growth is not None:
        return kept_after(layer, cut, number)
    first, last = cut + 1, layer.keys.shape[1] - 1
    at = torch.linspace(first, last, min(number, last - first + 1)).round().long()
    return sample_queries(layer, at, at - cut)


def require_rotation(layer: LayerPrefix, where: str) -> None:
    """Refuse a layer whose queries cannot be turned on to later positions."""
    if layer.rotates and layer.rotation is None:
        got = f"{type(layer.module).__name__}, which rotates in a way that is not known"
        advice = "Use a method that needs no rotation, as snapkv."
        raise ValueError(sentence(where, "rotary positions, or none", got, advice))
