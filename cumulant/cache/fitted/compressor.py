"""Backtest: entries with mass, fitted to a law of queries; every head gets the entries that an earlier cut asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.cache.budget import Budget
from cumulant.cache.compressor import Compressor, Layers
from cumulant.cache.entries import HeadEntries
from cumulant.cache.fitted.backtest import Trial, errors, trial
from cumulant.cache.fitted.budgets import allocate
from cumulant.cache.fitted.query_law import QuerySample, recent_queries, sample_queries, spread_queries
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, read
from cumulant.cache.fitted.recipe import Recipe, fit
from cumulant.cache.fitted.repetition import repeated_queries
from cumulant.cache.prefix import Prefix
from cumulant.observatory.hooks.structure import NotFound
from cumulant.observatory.hooks.weights import head_outputs

SIZES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


class Evidence(NamedTuple):
    laws: list
    curves: Tensor  # (kinds, layers, heads, sizes, recents)
    sizes: list


class Backtest(Compressor):
    name = "backtest"
    with_mass = True

    def __init__(self, **options):
        self.o = dict(queries=192, late=0.5, span=128, judged=64, cuts=(128,), repeat=0.0, weight=1.0, recents=(0.25, 0.6, 1.0),
                      repeat_law=192, recipe=Recipe(), curve_iterations=0, curve_ridge=None, sizes=SIZES, stream=True, law_weight=None, jrep=64)
        self.o.update(options)
        self.name = options.pop("name", "backtest")

    def evidence(self, prefix: Prefix) -> Evidence:
        o = self.o
        g = torch.Generator().manual_seed(0)
        T = len(prefix)
        rep_fit = rep_judge = None
        if o["repeat"]:
            perm = torch.randperm(T, generator=g)
            nf = o["repeat_law"]
            nj = o["jrep"]
            at = perm[: nf + nj].sort().values
            samples = repeated_queries(prefix, (0, T), at)
            mask = torch.zeros(T, dtype=torch.bool)
            mask[perm[nf : nf + nj]] = True
            judged = mask[at]
            pick = lambda s, m: QuerySample(s.queries[:, m], s.span[m], s.local[:, m], s.local_output[:, m])
            rep_fit = [pick(s, ~judged) for s in samples]
            rep_judge = [pick(s, judged) for s in samples]
        laws, curves = [], []
        for n, layer in enumerate(prefix.layers):
            W = head_outputs(prefix.model, layer.name)
            metric = None if isinstance(W, NotFound) else (W.mT @ W).float()
            scale = (layer.stream or 1.0) if o["stream"] else 1.0
            law = self._law(layer, T, g)
            if rep_fit is not None:
                law = QuerySample.joined([law, rep_fit[n]])
            laws.append(law)
            sizes = [max(int(s * T), 8) for s in o["sizes"]]
            recipe = o["recipe"]._replace(iterations=o["curve_iterations"], ridge=o["curve_ridge"])
            kinds = []
            e = 0
            for c in o["cuts"]:
                cut = T - c
                before = layer._replace(keys=layer.keys[:, :cut], values=layer.values[:, :cut], queries=layer.queries[:, :cut])
                at = cut + 1 + torch.arange(c - 1)[:: max(1, c // o["judged"])]
                judged = sample_queries(layer, at, at - cut)
                t = trial(layer, cut, self._law(before, cut, g), judged)
                scaled = [max(int(s * cut), 8) for s in o["sizes"]]
                e = e + errors(recipe, t, scaled, o["recents"], metric)
            kinds.append(e / len(o["cuts"]) / scale)
            if rep_judge is not None:
                t = trial(layer, T, rep_fit[n], rep_judge[n])
                kinds.append(errors(recipe, t, sizes, o["recents"], metric) / scale)
            curves.append(torch.stack(kinds))
        return Evidence(laws, torch.stack(curves, 1), sizes)

    def _law(self, layer, T, g):
        o = self.o
        late = int(o["late"] * o["queries"])
        return QuerySample.joined([
            spread_queries(layer._replace(keys=layer.keys[:, :T], values=layer.values[:, :T], queries=layer.queries[:, :T]), o["queries"] - late, o["span"], g),
            recent_queries(layer, late, o["span"], g)])

    def compress(self, prefix: Prefix, budget: Budget, evidence: Evidence) -> Layers:
        o = self.o
        E = evidence.curves[0] + (o["weight"] * evidence.curves[1] if len(evidence.curves) > 1 else 0)
        L, H, S, J = E.shape
        best, arg = E.min(-1)
        sizes = torch.tensor(evidence.sizes).float()
        fine, grid = refined(best.reshape(L * H, S), sizes)
        number = allocate(fine, grid, budget.per_head * L * H).view(L, H)
        self.number = number
        out = []
        for n, layer in enumerate(prefix.layers):
            tokens = KeyHeads.tokens(layer.keys.float(), layer.values.float())
            queries = LawQueries.of(evidence.laws[n], len(prefix), layer.rotation, H)
            heads = []
            for h in range(H):
                one, q = (type(x)(*(y[h : h + 1] for y in x)) for x in (tokens, queries))
                m = int(number[n, h])
                near = int((sizes.log() - torch.tensor(float(m)).log()).abs().argmin())
                share = o["recents"][int(arg[n, h, near])]
                made = fit(o["recipe"], one, q, read(one, q), m, int(share * m))
                heads.append(HeadEntries(made.entries.keys[0].to(layer.keys), made.entries.values[0].to(layer.values), made.entries.log_mass[0], made.positions[0]))
            out.append(heads)
        return out


def refined(errors, sizes, per=4):
    grid = [sizes[0].item()]
    for a, b in zip(sizes[:-1].tolist(), sizes[1:].tolist()):
        grid += [a * (b / a) ** (k / per) for k in range(1, per + 1)]
    grid = torch.tensor(grid)
    e = errors.cummin(-1).values.clamp_min(1e-12)
    out = []
    for k, m in enumerate(grid.tolist()):
        i = min(max(int(torch.searchsorted(sizes, torch.tensor(m), right=True)) - 1, 0), len(sizes) - 2)
        a, b = sizes[i], sizes[i + 1]
        if i == len(sizes) - 2:  # to the error 0 of all tokens: as the last measured slope says, at most a straight line
            w = (m - a) / (b - a)
            out.append(e[:, i] * (1 - w).clamp_min(0) ** 2)
        else:
            w = (torch.tensor(m).log() - a.log()) / (b.log() - a.log())
            out.append((e[:, i].log() * (1 - w) + e[:, i + 1].log() * w).exp())
    return torch.stack(out, 1), grid
