"""`Backtest`: entries fitted to a law of queries, and budgets by the errors that they had at earlier cuts."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers
from cumulant.cache.entries import HeadEntries
from cumulant.cache.fitted.backtest import RECENT, BacktestSettings, Curves, curves, grid_of
from cumulant.cache.fitted.budgets import allocate, interpolated, shared_by_scores
from cumulant.cache.fitted.law import LawSamples, QueryLaw, require_rotation, sample_law
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, read
from cumulant.cache.fitted.recipe import EntryRecipe, fit
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.observatory.hooks.structure import NotFound
from cumulant.observatory.hooks.weights import head_outputs

SHORTEST = 64  # tokens that a prefix needs to be cut and judged
SAFE = 0.2  # of an equal share, that every key head gets where attention shares them out
WITHOUT_REPETITION = (128, 0.5)  # cuts: the second asks from far back what a repetition would
UNIFORM_RECENT = 0.25  # share of recent tokens where nothing was judged


class BacktestEvidence(NamedTuple):
    """Of one prefix, for every budget.

    samples  the queries that entries are fitted to
    curves   errors of every layer; None: budgets are uniform
    """

    samples: LawSamples
    curves: list[Curves] | None


class HeadPlan(NamedTuple):
    """What the key heads of all layers get, one after the other: entries, how many of these are the last tokens, which
    law of `LawSamples.laws` they are fitted to, and the error that the backtest expects of them, |W_O (ô − o)|² over
    |x|²; NaN where nothing was judged."""

    entries: Tensor
    recent: Tensor
    law: Tensor
    expected: Tensor


class Backtest(Compressor):
    """Every head gets the atoms, the recent tokens and the entries that served it best on what it was asked before.

        h = Σ_{j<T} δ_(k_j, v_j)  →  ĥ = Σ_c e^{w_c} δ_(k̂_c, v̂_c),
        min Σ_h E|W_O (ô_h − o_h)|² / |x|²  over entries m_h of every key head,  Σ_h m_h bytes ≤ keep · bytes

    1. A law of queries: those the model had, turned on to later positions, and those of a repetition of the prefix.
    2. Atoms are tangents of G on clusters of keys, with the mass that the law expects; the first 4 tokens and recent
       ones stay as they are; values are least squares to the outputs that the law read.
    3. The error of every head with 1/64 to all of its tokens, on the queries after an earlier cut and on queries of
       the repetition that nothing was fitted to, says what an entry is worth to it; entries go where they are worth
       most, over all heads of all layers.

    law       see `QueryLaw`; ``repeat=False`` leaves the repetition out, which is half of the time
    recipe    see `EntryRecipe`
    budgets   "backtest"; "uniform": every key head as many; "adakv": by attention over the key heads of a layer. With
              the last two a quarter of the entries are recent tokens
    settings  see `BacktestSettings`
    seed      of the queries that are drawn

    >>> import transformers
    >>> from cumulant.cache import compress_prefix, on_cumulant, prefill
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes)).eval()
    >>> with on_cumulant(model):
    ...     prefix = prefill(model, torch.arange(128) % 9)
    >>> small = compress_prefix(prefix, Backtest(repeat=False), 0.25)
    >>> round(small.keep, 2), len({len(head.keys) for layer in small.layers for head in layer}) > 1
    (0.25, True)
    """

    with_mass = True

    def __init__(
        self,
        *,
        repeat: bool = True,
        law: QueryLaw | None = None,
        recipe: EntryRecipe | None = None,
        budgets: str = "backtest",
        settings: BacktestSettings | None = None,
        seed: int = 0,
        name: str = "backtest",
    ):
        law = QueryLaw() if law is None else law
        self.law = law if repeat else law._replace(repeated=0)
        self.while_growing = not self.law.repeated  # a repetition needs the whole text, and the model
        self.recipe = EntryRecipe() if recipe is None else recipe
        self.budgets, self.seed, self.name = budgets, seed, name
        if settings is None:
            settings = BacktestSettings() if self.law.repeated else BacktestSettings(WITHOUT_REPETITION)
        self.settings = settings

    def evidence(self, prefix: Prefix) -> BacktestEvidence:
        for layer in prefix.layers:
            require_rotation(layer, self.name)
        generator = torch.Generator().manual_seed(self.seed)
        samples = sample_law(prefix, self.law, self.settings.judging, generator)
        if self.budgets != "backtest" or len(prefix) < SHORTEST:
            if self.budgets == "backtest":
                words = f"{self.name}: {len(prefix)} tokens are too few for a backtest, which needs {SHORTEST}"
                warnings.warn(f"{words}: every key head gets as many entries", stacklevel=2)
            return BacktestEvidence(samples, None)
        sizes = grid_of(prefix)
        found = [
            curves(
                *(layer, n, samples, self.law, self.settings, self.recipe),
                *(output_metric(prefix.model, layer), generator, sizes),
            )
            for n, layer in enumerate(prefix.layers)
        ]
        return BacktestEvidence(samples, found)

    def plan(self, prefix: Prefix, budget: Budget, evidence: BacktestEvidence) -> HeadPlan:
        """How many entries every key head gets, and how many of them are recent tokens."""
        heads = sum(budget.heads)
        if evidence.curves is None:
            entries = torch.full((heads,), budget.per_head)
            if self.budgets == "adakv":
                entries = torch.cat(
                    [self._by_attention(prefix, budget, evidence, n) for n in range(len(prefix.layers))]
                )
            mixed = torch.full((heads,), len(evidence.samples.laws(0)) - 1)
            return HeadPlan(entries, (UNIFORM_RECENT * entries).long(), mixed, torch.full((heads,), torch.nan))
        errors, best = torch.cat([c.total() for c in evidence.curves]).transpose(1, 2).flatten(2).min(-1)
        sizes = torch.tensor(grid_of(prefix))
        fine, grid = interpolated(errors, sizes)
        costs = [cost for cost, count in zip(budget.entry_bytes, budget.heads, strict=True) for _ in range(count)]
        entries = allocate(fine, grid, torch.tensor(costs), budget.bytes)
        near = (sizes.log() - entries[:, None].log()).abs().argmin(-1)
        law, share = best[torch.arange(heads), near].div(len(RECENT), rounding_mode="floor"), best % len(RECENT)
        recent = torch.tensor(RECENT)[share[torch.arange(heads), near]] * entries
        at = torch.searchsorted(grid, entries.to(grid)).clamp_max(len(grid) - 1)
        return HeadPlan(entries, recent.long(), law, fine[torch.arange(heads), at])

    def _by_attention(self, prefix: Prefix, budget: Budget, evidence: BacktestEvidence, number: int) -> Tensor:
        """Entries (key heads,) of a layer as AdaKV shares them: those that the law pays most, and a fifth for each."""
        layer, entries = prefix.layers[number], budget.per_head
        tokens = KeyHeads.of(layer)
        queries = LawQueries.of(evidence.samples.laws(number)[-1], len(prefix), layer.rotation, len(layer.keys))
        return shared_by_scores(read(tokens, queries).rms, budget.of_layer(number), max(1, int(SAFE * entries)))

    def compress(self, prefix: Prefix, budget: Budget, evidence: BacktestEvidence) -> Layers:
        plan = self.plan(prefix, budget, evidence)
        per_head = iter(zip(plan.entries.tolist(), plan.recent.tolist(), plan.law.tolist(), strict=True))
        return [
            self._layer(layer, evidence.samples, n, [next(per_head) for _ in layer.keys])
            for n, layer in enumerate(prefix.layers)
        ]

    def _layer(
        self, layer: LayerPrefix, samples: LawSamples, number: int, of_heads: list[tuple[int, int, int]]
    ) -> list[HeadEntries]:
        """Head by head: each has its own number of entries."""
        tokens, exact = KeyHeads.of(layer), layer.length - layer.first_token
        laws = [LawQueries.of(law, layer.length, layer.rotation, len(layer.keys)) for law in samples.laws(number)]
        out = []
        for head, (entries, recent, law) in enumerate(of_heads):
            own = tokens.head(head)
            asked = LawQueries(*(x[head : head + 1] for x in laws[law]))
            made = fit(self.recipe, own, asked, read(own, asked), entries, min(recent, exact))
            keys, values = made.entries.keys[0].to(layer.keys), made.entries.values[0].to(layer.values)
            positions = made.positions[0] if layer.growth is None else None  # of entries, not of tokens
            out.append(HeadEntries(keys, values, made.entries.log_mass[0], positions))
        return out


def output_metric(model: nn.Module, layer: LayerPrefix) -> Tensor | None:
    """(heads, e, e) W_Oᵀ W_O of the heads of a layer; None where W_O is not known."""
    outputs = head_outputs(model, layer.name)
    return None if isinstance(outputs, NotFound) else (outputs.mT @ outputs).float()
