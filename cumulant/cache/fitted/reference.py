"""Entries fitted to what reference queries read of tokens alone, as Attention Matching fits them (arXiv 2602.16284)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.nonnegative import STEPS, MassTarget, matched_mass
from cumulant.cache.fitted.query_law import SampledQueries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, attention, output
from cumulant.cache.fitted.recipe import SINKS
from cumulant.cache.fitted.values import refitted
from cumulant.cache.prefix import LayerPrefix


class Reference(NamedTuple):
    """The tokens of key heads that are compressed, and what reference queries read of them and of nothing else.

    exact   the first tokens and the last ones, which stay as they are: the latest of the last first
    which   (number of exact ones,) where they are
    start   where the tokens between these begin
    tokens  n of each key head, the tokens between
    asked   the queries, with what they read beside the prefix
    rms     (key heads, n) (E p_j²)^½ of the attention p that the queries pay these tokens
    output  (key heads, r, e) Σ_j p_j v_j
    target  their mass Σ_j e^⟨η,k_j⟩, relative to the largest term
    """

    exact: KeyHeads
    which: Tensor
    start: int
    tokens: KeyHeads
    asked: LawQueries
    rms: Tensor
    output: Tensor
    target: MassTarget

    @classmethod
    def of(cls, layer: LayerPrefix, sample: SampledQueries, *parts: Tensor, recent: int = 0) -> list[Reference]:
        """All but the first 4 tokens of a layer and the last ``recent`` ones (of a very short prefix, its later half),
        as all queries of a sample read them, and as those read them where each of ``parts`` (queries of a head,) is
        true."""
        tokens = KeyHeads.tokens(layer.keys.float(), layer.values.float())
        length = layer.keys.shape[1]
        before = min(SINKS, length // 2)
        last = length - min(recent, (length - before) // 2)
        which = torch.cat([torch.arange(before), torch.arange(length - 1, last - 1, -1)]).to(layer.keys.device)
        exact, tokens = (KeyHeads(*(x[:, part] for x in tokens)) for part in (which, slice(before, last)))
        asked = LawQueries.of(sample, length, layer.rotation, len(layer.keys))
        total, p = attention(tokens, asked.alone())
        largest, out = p.amax(-1), p @ tokens.values
        squares = p.square_()
        target = MassTarget(total + largest.log(), 1 / largest)
        whole = cls(exact, which, before, tokens, asked, squares.mean(1).sqrt(), out, target)
        each = (part.repeat(layer.groups) for part in parts)
        return [whole, *(whole._part(part, squares[:, part].mean(1).sqrt()) for part in each)]

    def _part(self, which: Tensor, rms: Tensor) -> Reference:
        asked, target = LawQueries(*(x[:, which] for x in self.asked)), MassTarget(*(x[:, which] for x in self.target))
        return self._replace(asked=asked, target=target, output=self.output[:, which], rms=rms)

    def head(self, number: int) -> Reference:
        """Those of one key head."""
        one = slice(number, number + 1)
        exact, tokens = (KeyHeads(*(x[one] for x in part)) for part in (self.exact, self.tokens))
        asked, target = LawQueries(*(x[one] for x in self.asked)), MassTarget(*(x[one] for x in self.target))
        return Reference(exact, self.which, self.start, tokens, asked, self.rms[one], self.output[one], target)

    def whole_output(self) -> Tensor:
        """(key heads, r, e) what the queries read of all tokens and beside them."""
        total = self.target.highest + self.target.mass.log()
        context = torch.logaddexp(self.asked.local, total)
        shares = ((part - context).exp()[..., None] for part in (self.asked.local, total))
        parts = (share * x for share, x in zip(shares, (self.asked.local_output, self.output), strict=True))
        queries = LawQueries(self.asked.eta, context, sum(parts, torch.zeros(())))
        return output(self.exact, queries, *attention(self.exact, queries))


class ReferenceFit(NamedTuple):
    """How entries are fitted to a reference.

    bounds  of log-masses
    steps   of the projected gradient that finds masses
    ridge   of the values' least squares
    """

    bounds: tuple[float, float]
    steps: int = STEPS
    ridge: float = 1e-4


def matched(reference: Reference, number: int, order: Tensor | None, fit: ReferenceFit) -> tuple[KeyHeads, Tensor]:
    """``number`` entries of each key head, the exact tokens among them, and which token's key each has.

        Σ_c e^{w_c + ⟨η,k_c⟩} ≈ Σ_j e^⟨η,k_j⟩,    Σ_c p̂_c v̂_c ≈ Σ_j p_j v_j

    order  (key heads, n') tokens whose keys are taken, the first first; then, or with None, by attention
    """
    exact = reference.which[: number - 1]
    chosen = _chosen(reference.rms, number - len(exact), order)
    keys, values = (x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) for x in reference.tokens[:2])
    queries = reference.asked.alone()
    log_mass = matched_mass(keys, queries, reference.target, fit.bounds, fit.steps)
    fitted = refitted(KeyHeads(keys, values, log_mass), queries, reference.output, fit.ridge)
    parts = zip(reference.exact, fitted, strict=True)
    whole = KeyHeads(*(torch.cat([a[:, : len(exact)], b], 1) for a, b in parts))
    return whole, torch.cat([exact.expand(len(chosen), -1), chosen + reference.start], 1)


def _chosen(scores: Tensor, number: int, order: Tensor | None) -> Tensor:
    """(key heads, number) indices, growing: the first of an order, then those of the highest scores."""
    if order is not None:
        first = order[:, :number]
        rank = torch.arange(first.shape[1], 0, -1, device=first.device).to(scores) + scores.amax()
        scores = scores.scatter(1, first, rank.expand(len(first), -1))
    return scores.topk(number, -1).indices.sort(-1).values
