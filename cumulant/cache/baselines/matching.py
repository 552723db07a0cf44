"""Attention Matching: keys among those of the prefix, masses and values by least squares to what a repetition reads
(arXiv 2602.16284)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers
from cumulant.cache.entries import HeadEntries
from cumulant.cache.fitted.backtest import Judges, loss, sizes_of
from cumulant.cache.fitted.budgets import allocate, interpolated
from cumulant.cache.fitted.compressor import output_metric
from cumulant.cache.fitted.law import require_rotation
from cumulant.cache.fitted.mass import LOWEST
from cumulant.cache.fitted.nonnegative import HIGHEST
from cumulant.cache.fitted.pursuit import pursuit_order
from cumulant.cache.fitted.query_law import (
    SampledQueries,
    drawn_spans,
    repeated_queries,
    sample_queries,
    spread_tokens,
)
from cumulant.cache.fitted.readings import KeyHeads
from cumulant.cache.fitted.reference import Reference, ReferenceFit, matched
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.cache.repetition import parts_of

REPEATED_PART = 2048  # tokens that the model repeats at a time
SPAN = 128  # how far after the prefix its own queries are asked, where it is not repeated
LARGEST_SHARE = 0.75  # of the tokens, that a key head holds at most
JUDGING = 4  # one query in so many judges, where errors are measured
QUICK_STEPS = 10  # for masses, where errors are measured
BOUNDS = {"attention": (-3.0, 3.0), "omp": (LOWEST, HIGHEST)}  # of log-masses


class MatchingEvidence(NamedTuple):
    """Of one prefix, for every budget.

    references  what reference queries read of every layer
    errors      (all key heads, sizes) of `sizes_of`; None: every key head holds as many
    orders      for every layer (key heads, n), the keys that a pursuit chooses first; None: by attention
    """

    references: list[Reference]
    errors: Tensor | None
    orders: list[Tensor | None]


class Matching(Compressor):
    """Keys are those of tokens that reference queries pay most, log-masses and values are fitted to what they read.

        Σ_c e^{β_c + ⟨η,k_c⟩} ≈ Σ_j e^⟨η,k_j⟩,    Σ_c p̂_c v̂_c ≈ Σ_j p_j v_j,    over reference queries η

    1. Reference queries: those of the model while it repeats the prefix, of all heads that share a key head.
    2. Keys: the highest (E p_j²)^½ ("attention", AM-HighestAttnKeys), or by orthogonal matching pursuit on the mass,
       four tokens between one refit and the next ("omp", AM-OMP-fast but for a refit every other time there).
    3. Masses e^β by least squares to the mass within [e⁻³, e³], with a pursuit at most e⁷; every query counts relative
       to its largest term.
    4. Values by least squares to the outputs, with a ridge towards the tokens' own.
    5. Entries go over all key heads where they take most of an error away, 3/4 of the tokens at most.

    As in the authors' code, mass and outputs are of what is compressed alone, without what a query reads beside it.
    Otherwise than there: queries come from one pass with the full cache, not layer by layer from what is compressed
    already ("on-policy"); questions that the model asks itself (self-study) are not among them; the first 4 tokens
    stay, in the place of a chat template's; least squares with bounds are solved, where theirs end after two steps;
    there is a ridge; a pursuit drops no key of small mass again. Their head budgets are shares made once for a model,
    from the perplexity of other texts as one head gets more or less; here they are from the error |W_O (ô − o)|² / |x|²
    of this prefix, on a quarter of the reference queries with entries fitted to the others, for each budget anew: both
    should favour the method.

    keys     "attention" or "omp"
    repeat   False: queries are the prefix's own, of all of it and turned on to later positions
    own      with ``repeat``, how many of the prefix's own are mixed in, for every key head
    recent   last tokens that stay as they are, in every head
    budgets  "curves" or "uniform"
    queries  for every key head, at most; None: all
    ridge    of the values' least squares
    bounds   of log-masses; None: those above
    seed     of the queries that are drawn

    >>> import transformers
    >>> from cumulant.cache import compress_prefix, on_cumulant, prefill
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes)).eval()
    >>> with on_cumulant(model):
    ...     prefix = prefill(model, torch.arange(128) % 9)
    ...     small = compress_prefix(prefix, Matching(), 0.25)
    >>> round(small.keep, 2), small.layers[0][0].log_mass.abs().max() <= 3
    (0.25, tensor(True))
    """

    with_mass = True

    def __init__(
        self,
        *,
        keys: str = "attention",
        repeat: bool = True,
        own: int = 0,
        recent: int = 0,
        budgets: str = "curves",
        queries: int | None = None,
        ridge: float = 1e-4,
        bounds: tuple[float, float] | None = None,
        seed: int = 0,
        name: str = "matching",
    ):
        self.keys, self.repeat, self.own, self.recent, self.budgets = keys, repeat, own, recent, budgets
        self.queries, self.seed, self.name = queries, seed, name
        self.fit = ReferenceFit(BOUNDS[keys] if bounds is None else bounds, ridge=ridge)

    def evidence(self, prefix: Prefix) -> MatchingEvidence:
        for layer in prefix.layers:
            require_rotation(layer, self.name)
        references, errors, orders = [], [], []
        for layer, sample in zip(prefix.layers, self.samples(prefix), strict=True):
            judging = _judging(len(sample.span))
            whole, fitting, judged = Reference.of(layer, sample, ~judging, judging, recent=self.recent)
            references.append(whole)
            orders.append(self._order(whole, len(prefix)))
            if self.budgets == "curves":
                metric = output_metric(prefix.model, layer)
                found = self._errors(fitting, judged, orders[-1], sizes_of(len(prefix)), metric)
                errors.append(found / (layer.stream or 1.0))
        return MatchingEvidence(references, torch.cat(errors) if errors else None, orders)

    def samples(self, prefix: Prefix) -> list[SampledQueries]:
        """Reference queries of every layer; those that judge, with what they read beside the prefix."""
        generator = torch.Generator().manual_seed(self.seed)
        groups = max(layer.groups for layer in prefix.layers)
        most = groups * len(prefix) if self.queries is None else self.queries
        number, own = (min(-(-count // groups), len(prefix)) for count in (most, self.own if self.repeat else most))
        parts: list[list[SampledQueries]] = []
        if self.repeat:
            at = torch.randperm(len(prefix), generator=generator)[:number].sort().values
            parts.append(repeated_queries(prefix, parts_of(len(prefix), REPEATED_PART), at, _judging(len(at))))
        if own:
            at = spread_tokens(len(prefix), own, generator).sort().values
            span = drawn_spans(at, SPAN, generator)
            parts.append([sample_queries(layer, at, span) for layer in prefix.layers])
        return [SampledQueries.joined(of_layer) for of_layer in zip(*parts, strict=True)]

    def _order(self, reference: Reference, length: int) -> Tensor | None:
        if self.keys != "omp":
            return None
        number = min(int(LARGEST_SHARE * length), reference.tokens.keys.shape[1])
        return pursuit_order(reference.tokens, reference.asked, reference.target, number)

    def _errors(
        self, fitting: Reference, judged: Reference, order: Tensor | None, sizes: list[int], metric: Tensor | None
    ) -> Tensor:
        """(key heads, sizes) |W_O (ô − o)|² of entries that are fitted to some queries, on others."""
        target, fit = judged.whole_output(), self.fit._replace(steps=QUICK_STEPS)
        errors = torch.zeros(len(fitting.rms), len(sizes))
        for i, size in enumerate(sizes[:-1]):
            entries, _ = matched(fitting, size, order, fit)
            errors[:, i], _ = loss(entries, Judges(judged.asked, target, len(judged.asked.eta[0])), metric)
        return errors

    def plan(self, prefix: Prefix, budget: Budget, evidence: MatchingEvidence) -> Tensor:
        """(all key heads,) how many entries each gets."""
        uniform = torch.full((sum(budget.heads),), budget.per_head)
        sizes = torch.tensor(sizes_of(len(prefix)))
        most = int(max(LARGEST_SHARE, budget.keep) * len(prefix))
        if evidence.errors is None or most <= sizes[0]:
            return uniform
        errors, grid = _up_to(most, *interpolated(evidence.errors, sizes))
        costs = [cost for cost, count in zip(budget.entry_bytes, budget.heads, strict=True) for _ in range(count)]
        return allocate(errors, grid, torch.tensor(costs), budget.bytes)

    def compress(self, prefix: Prefix, budget: Budget, evidence: MatchingEvidence) -> Layers:
        numbers = self.plan(prefix, budget, evidence).split(budget.heads)
        parts = zip(prefix.layers, evidence.references, evidence.orders, numbers, strict=True)
        return [self._layer(layer, reference, order, of_heads.tolist()) for layer, reference, order, of_heads in parts]

    def _layer(
        self, layer: LayerPrefix, reference: Reference, order: Tensor | None, numbers: list[int]
    ) -> list[HeadEntries]:
        """Head by head: each has its own number of entries."""
        out = []
        for head, number in enumerate(numbers):
            one, length = slice(head, head + 1), layer.keys.shape[1]
            if number >= length:
                entries = KeyHeads.tokens(layer.keys[one].float(), layer.values[one].float())
                positions = torch.arange(length, device=layer.keys.device)[None]
            else:
                first = None if order is None else order[one]
                entries, positions = matched(reference.head(head), number, first, self.fit)
            keys, values = entries.keys[0].to(layer.keys), entries.values[0].to(layer.values)
            out.append(HeadEntries(keys, values, entries.log_mass[0], positions[0]))
        return out


def _up_to(most: int, errors: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Errors (heads, s) and sizes (s,) that end at ``most``, with a straight line to it from the size before."""
    after = min(int(torch.searchsorted(grid, float(most))), len(grid) - 1)
    (low, high), (before, beyond) = grid[after - 1 : after + 1], errors[:, after - 1 : after + 1].unbind(1)
    end = before + (beyond - before) * (most - low) / (high - low)
    return torch.cat([errors[:, :after], end[:, None]], 1), torch.cat([grid[:after], grid.new_tensor([most])])


def _judging(number: int) -> Tensor:
    """(number,) true for the queries that judge."""
    return torch.arange(number) % JUDGING == 0
