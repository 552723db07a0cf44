"""Which queries a compressed prefix will be asked: queries that the model had, turned on to the positions after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.cache.repetition import repeated_parts
from cumulant.cache.rotation import Rotation

FIRST = 64  # the first tokens have queries like no later ones
RECENT_WINDOW = 256  # last tokens that recent queries are drawn from
UNDERFLOW = -80.0  # torch's exp is slow where it underflows
BLOCK = 32  # queries whose weights are held at once


class SampledQueries(NamedTuple):
    """Queries of one layer that stand for those to come, each with what it read beside the prefix.

        G(η) = log(Σ_{j<T} e^⟨η,k_j⟩ + e^local),    η = R_(T+span) η₀

    queries       (heads, n, d) η₀ = scale · query, turned back to position 0
    span          (n,) how many tokens after the prefix a query is asked: its position is T + span
    local         (heads, n) log-normalizer of the last ``span`` + 1 tokens before it, its own among them, and of a sink
                  of the model: these are held exactly, as tokens after the prefix are
    local_output  (heads, n, e) Σ p_j v_j over these tokens, Σ p_j = 1 (the sink has value 0)
    """

    queries: Tensor
    span: Tensor
    local: Tensor
    local_output: Tensor

    def at(self, length: int, rotation: Rotation | None) -> Tensor:
        """(heads, n, d) η of a prefix of ``length`` tokens."""
        return self.queries if rotation is None else rotation.turn(self.queries, length + self.span)

    def part(self, which: Tensor) -> SampledQueries:
        """Those of its queries that ``which`` (n,) selects: numbers, or True and False."""
        return SampledQueries(
            self.queries[:, which], self.span[which], self.local[:, which], self.local_output[:, which]
        )

    def thinned(self, number: int) -> SampledQueries:
        """At most ``number`` of its queries, evenly spaced."""
        count = len(self.span)
        which = torch.linspace(0, count - 1, min(number, count), device=self.span.device).round().long()
        return self.part(which)

    @classmethod
    def joined(cls, samples: Sequence[SampledQueries]) -> SampledQueries:
        """A mixture: the queries of all."""
        queries, span, local, output = zip(*samples, strict=True)
        return cls(torch.cat(queries, 1), torch.cat(span), torch.cat(local, 1), torch.cat(output, 1))


def sample_queries(layer: LayerPrefix, at: Tensor, span: Tensor) -> SampledQueries:
    """The queries of tokens ``at`` (n,), as if each had been asked ``span`` (n,) tokens after a prefix.

    What it read of its own last ``span`` + 1 tokens is its local context; of the tokens before it, nothing is kept.

    >>> import transformers
    >>> from cumulant.cache.prefix import on_cumulant, prefill
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.LlamaConfig(vocab_size=9, num_key_value_heads=1, **sizes)
    >>> with on_cumulant(model := transformers.LlamaForCausalLM(config).eval()):
    ...     layer = prefill(model, torch.arange(8)).layers[0]
    >>> sample = sample_queries(layer, torch.tensor([5]), torch.tensor([0]))
    >>> torch.allclose(sample.local[0], (layer.queries[0, 5] * layer.keys[0, 5]).sum())   # it read itself alone
    True
    """
    at, span = at.to(layer.queries.device), span.to(layer.queries.device)
    local, output = own_context(layer, at, span)
    queries = layer.queries_of(at)
    turned = queries if layer.rotation is None else layer.rotation.turn(queries, -at)
    return SampledQueries(turned, span, local, output)


def own_context(layer: LayerPrefix, at: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens ``at`` (n,) read of themselves and the ``span`` (n,) tokens before them, and of a sink: its
    log-normalizer (heads, n) and output (heads, n, e). Tokens in order share the keys that they look at."""
    blocks = zip(at.split(BLOCK), span.split(BLOCK), strict=True)
    if not len(at):
        empty = layer.values.new_zeros(len(layer.queries), 0, layer.values.shape[-1], dtype=torch.float32)
        return empty[..., 0], empty
    local, output = zip(*(_of_block(layer, *block) for block in blocks), strict=True)
    return torch.cat(local, 1), torch.cat(output, 1)


def _of_block(layer: LayerPrefix, at: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    first = at - span
    tokens = torch.arange(max(int(first.min()), 0), int(at.max()) + 1, device=at.device)
    outside = (tokens < first[:, None]) | (tokens > at[:, None])
    keys, values = (x.float() for x in layer.tokens(int(tokens[0]), int(tokens[-1]) + 1))
    grouped = layer.queries_of(at).float().unflatten(0, (len(layer.keys), -1))  # (key heads, group, n, d)
    scores = (grouped.flatten(1, 2) @ keys.mT).unflatten(1, grouped.shape[1:3])
    highest = scores.masked_fill(outside, -torch.inf).amax(-1)
    weights = scores.sub_(highest[..., None]).clamp_min_(UNDERFLOW).exp_().masked_fill_(outside, 0)
    local = weights.sum(-1).log() + highest
    if layer.sinks is not None:
        local = torch.logaddexp(local, layer.sinks.to(local).view(*local.shape[:2], 1))
    output = (weights.flatten(1, 2) @ values).unflatten(1, local.shape[1:]) * (highest - local).exp()[..., None]
    return local.flatten(0, 1), output.flatten(0, 1)


def spread_tokens(length: int, number: int, generator: torch.Generator) -> Tensor:
    """(n,) tokens drawn from a whole prefix but its beginning."""
    first = min(FIRST, length // 2)
    return first + torch.randperm(length - first, generator=generator)[:number]


def recent_tokens(length: int, number: int, generator: torch.Generator) -> Tensor:
    """(n,) tokens drawn from the last of a prefix."""
    window = min(RECENT_WINDOW, length)
    return length - window + torch.randperm(window, generator=generator)[:number]


def drawn_spans(at: Tensor, span: int, generator: torch.Generator) -> Tensor:
    """(n,) how far after the prefix each token ``at`` (n,) is asked: no further than its own context reaches."""
    return torch.minimum(torch.randint(0, span, (len(at),), generator=generator), at)


def repeated_queries(
    prefix: Prefix, parts: Sequence[tuple[int, int]], at: Tensor, beside: Tensor | None = None
) -> list[SampledQueries]:
    """For every layer, the queries of the model while it repeats parts of the prefix, at tokens ``at`` (n,) of them, in
    order.

    What a query reads of question and answer is its local context; where ``beside`` (n,) is false it is left out, which
    saves the time: local is −∞ then.
    """
    beside = torch.ones(len(at), dtype=torch.bool) if beside is None else beside
    samples: list[list[SampledQueries]] = []
    for repeated in repeated_parts(prefix, parts):
        here = (at >= repeated.start) & (at < repeated.stop)
        which, reading = repeated.asked + at[here] - repeated.start, beside[here]
        if len(which):
            own = (repeated.own_layer(layer) for layer in prefix.layers)
            samples.append([_of_repetition(layer, len(prefix), which, reading) for layer in own])
    return [SampledQueries.joined(of_layer) for of_layer in zip(*samples, strict=True)]


def _of_repetition(own: LayerPrefix, length: int, which: Tensor, reading: Tensor) -> SampledQueries:
    which, reading = which.to(own.queries.device), reading.to(own.queries.device)
    queries = own.queries[:, which]
    turned = queries if own.rotation is None else own.rotation.turn(queries, -(length + which))
    local = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)
    output = local.new_zeros(*local.shape, own.values.shape[-1])
    if bool(reading.any()):
        local[:, reading], output[:, reading] = own_context(own, which[reading], which[reading])
    return SampledQueries(turned, which, local, output)
