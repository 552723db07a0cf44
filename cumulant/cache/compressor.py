"""The contract of a compressor: from what heads hold of a prefix, and the queries seen, to fewer entries with mass."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.cache.budget import Budget, budget, bytes_held
from cumulant.cache.entries import HeadEntries
from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.checks import sentence, shape

Layers = list[list[HeadEntries]]


class Compressor(ABC):
    """From a prefix to entries of every layer and key head, within a budget of bytes for all layers together.

        Σ_j δ_(k_j, v_j), j < T   →   Σ_j e^{w_j} δ_(k̂_j, v̂_j), j < m,    m (d + e) < keep · T (d + e)

    One method is required. `evidence` is what a method needs to know before it knows its budget, as scores of all
    tokens; it is asked for once for a prefix, whatever number of budgets follow.

    name           as it stands in tables
    with_mass      whether entries have log-masses, which count as bytes held
    while_growing  whether it can compress the beginning of a text again and again: from entries with mass and the
                   tokens since, with some of the queries (`LayerPrefix.growth`), and without the model
    """

    name: str = "compressor"
    with_mass: bool = False
    while_growing: bool = False

    def evidence(self, prefix: Prefix) -> Any:
        """What is computed once for a prefix, for every budget; None: nothing."""
        return None

    @abstractmethod
    def compress(self, prefix: Prefix, budget: Budget, evidence: Any) -> Layers:
        """Entries of every layer of ``prefix.layers`` and every key head, in their order."""


class Compressed(NamedTuple):
    """What a compressor made of a prefix: Σ_j e^{w_j} δ_(k_j, v_j) for every layer and key head.

    layers   entries of every layer of the prefix and every key head
    held     bytes, with those of layers that are not compressed
    full     bytes of the full cache
    seconds  that the compressor took, its evidence included, as if this had been its first budget
    """

    layers: Layers
    held: int
    full: int
    seconds: float

    @property
    def keep(self) -> float:
        """Share of the bytes that is held."""
        return self.held / self.full

    def cache(self, prefix: Prefix) -> MeasureCache:
        """A cache that holds the entries in the place of the prefix, to read on from; positions are left out."""
        cache = MeasureCache.from_cache(prefix.copy_cache(), prefix.model)
        entries = {
            layer.index: [head._replace(positions=None) for head in heads]
            for layer, heads in zip(prefix.layers, self.layers, strict=True)
        }
        return cache.compress(entries)


@torch.no_grad()
def compress_prefix(prefix: Prefix, compressor: object, keep: float) -> Compressed:
    """Compress a prefix to a share ``keep`` of its bytes, and check what came back: shapes, numbers and bytes.

        Σ_{j<T} δ_(k_j, v_j)  →  Σ_{j<m} e^{w_j} δ_(k̂_j, v̂_j),    bytes held ≤ keep · bytes of the full cache

    compressor  a `Compressor`, the name of a baseline, a press, or a function of one layer (see `as_compressor`)

    >>> import transformers
    >>> from cumulant.cache.prefix import on_cumulant, prefill
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.LlamaConfig(vocab_size=9, num_key_value_heads=1, **sizes)
    >>> with on_cumulant(model := transformers.LlamaForCausalLM(config).eval()):
    ...     prefix = prefill(model, torch.arange(8))
    >>> small = compress_prefix(prefix, "knorm", 0.5)
    >>> small.keep, small.layers[0][0].keys.shape
    (0.5, torch.Size([4, 4]))
    """
    chosen = as_compressor(compressor)
    weighted = any(layer.log_mass is not None for layer in prefix.layers)
    allowed = budget(prefix, keep, with_mass=chosen.with_mass or weighted)
    key = id(chosen)
    if key not in prefix.evidence:
        start = time.perf_counter()
        found = chosen.evidence(prefix)
        prefix.evidence[key] = chosen, found, time.perf_counter() - start  # the compressor too: it keeps its id
    _, evidence, before = prefix.evidence[key]
    start = time.perf_counter()
    layers = chosen.compress(prefix, allowed, evidence)
    seconds = before + time.perf_counter() - start
    layers = _checked(chosen.name, layers, prefix)
    held = bytes_held(layers)
    if held > allowed.bytes + max(allowed.entry_bytes):  # ratios are rounded: one entry of all is no matter
        share = (held + allowed.fixed) / allowed.full
        advice = "Make it hold fewer entries: `Budget.per_head` says how many there is room for."
        raise ValueError(sentence(f"compress({chosen.name})", f"at most {keep:g} of the bytes", f"{share:.4g}", advice))
    return Compressed(layers, held + allowed.fixed, allowed.full, seconds)


def _checked(name: str, layers: object, prefix: Prefix) -> Layers:
    """The entries, if they are those of this prefix."""
    where = f"compress({name})"
    advice = "Return, for every layer, a list of HeadEntries, one for each key head."
    if not isinstance(layers, Sequence) or len(layers) != len(prefix.layers):
        got = f"{len(layers)}" if isinstance(layers, Sequence) else type(layers).__name__
        raise ValueError(sentence(where, f"{len(prefix.layers)} layers", got, advice))
    for layer, heads in zip(prefix.layers, layers, strict=True):
        if len(heads) != len(layer.keys):
            raise ValueError(sentence(where, f"{len(layer.keys)} key heads in layer {layer.index}", len(heads), advice))
        for head in heads:
            _check_head(f"{where}, layer {layer.index}", layer, head)
    return [[*heads] for heads in layers]


def _check_head(where: str, layer: LayerPrefix, head: HeadEntries) -> None:
    d, e, m = layer.keys.shape[-1], layer.values.shape[-1], len(head.keys)
    advice = "Keys and values of an entry are as wide as those of a token."
    if head.keys.shape != (m, d) or head.values.shape != (m, e) or m < 1:
        got = f"{shape(head.keys)} and {shape(head.values)}"
        raise ValueError(sentence(where, f"keys (m, {d}) and values (m, {e}), m ≥ 1", got, advice))
    for name, part in (("log_mass", head.log_mass), ("positions", head.positions)):
        if part is not None and part.shape != (m,):
            raise ValueError(sentence(f"{where}, {name}", f"shape ({m})", shape(part), "Give one for each entry."))
    if head.keys.dtype != layer.keys.dtype or head.values.dtype != layer.values.dtype:
        got = f"{head.keys.dtype} and {head.values.dtype}"
        raise TypeError(sentence(where, f"the dtype of the cache, {layer.keys.dtype}", got, "Convert them."))
    parts = [head.keys, head.values, *([head.log_mass] if head.log_mass is not None else [])]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError(sentence(where, "finite keys, values and log-masses", "NaN or infinity", "Leave entries out."))


def as_compressor(compressor: object) -> Compressor:
    """A compressor from what people have.

    `Compressor`  as it is
    str           a baseline of `cumulant.cache.baselines`, as "snapkv" or "adakv:h2o"; "backtest" or, with other parts,
                  "backtest+norepeat+subset" (see `cumulant.cache.fitted.named`); so for "matching+omp"
    press         an object with ``compression_ratio`` and ``compress`` or ``score``, as those of kvpress
    function      (keys, values, queries, positions, entries) → keys, values, log_mass of one layer:
                  keys (key heads, T, d), values (key heads, T, e), queries (heads, T, d) = scale · query, positions
                  (T,), entries of a key head → (key heads, m, d), (key heads, m, e) and None or (key heads, m);
                  lists of tensors where heads differ in length

    >>> as_compressor("nothing")
    Traceback (most recent call last):
    ValueError: compressor: expected backtest or one of adakv, d2o-like, expected, h2o, keydiff, knorm, kvzip,
    matching, snapkv, stream, tova, got 'nothing'. An allocation over heads takes a scorer: adakv:h2o.
    """
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str):
        from cumulant.cache.fitted.named import method

        return method(compressor)
    if hasattr(compressor, "compression_ratio"):
        from cumulant.cache.press import PressCompressor

        return PressCompressor(compressor)
    if inspect.isfunction(compressor) or inspect.ismethod(compressor) or callable(compressor):
        return FunctionCompressor(compressor)
    expected = "a Compressor, the name of a baseline, a press or a function of one layer"
    raise TypeError(sentence("compressor", expected, type(compressor).__name__, 'Try "snapkv".'))


class FunctionCompressor(Compressor):
    """A function of keys, values, queries, positions and a number of entries, applied to one layer after the other."""

    def __init__(self, function: Callable, *, with_mass: bool = True):
        self.function, self.with_mass = function, with_mass
        self.name = getattr(function, "__name__", type(function).__name__)

    def compress(self, prefix: Prefix, budget: Budget, evidence: None) -> Layers:
        positions = torch.arange(len(prefix), device=prefix.input_ids.device)
        out = []
        for layer in prefix.layers:
            made = self.function(layer.keys, layer.values, layer.queries, positions, budget.per_head)
            if not isinstance(made, tuple | list) or len(made) != 3:
                advice = "Return keys, values and log-masses; None where every entry has mass 1."
                got = type(made).__name__ if not isinstance(made, tuple | list) else f"{len(made)} results"
                raise ValueError(sentence(f"compressor {self.name}", "three results", got, advice))
            keys, values, masses = made
            masses = [None] * len(keys) if masses is None else masses
            if not len(keys) == len(values) == len(masses):
                got = f"{len(keys)}, {len(values)} and {len(masses)}"
                advice = "Return one for each key head."
                raise ValueError(sentence(f"compressor {self.name}", "results of as many heads", got, advice))
            out.append([HeadEntries(*parts) for parts in zip(keys, values, masses, strict=True)])
        return out


class ScoreCompressor(Compressor):
    """The m tokens with the highest scores stay, every key head as many: what most methods of eviction are.

        stays: {j : s_j ≥ the m-th largest of s_0, …, s_(T−1)}

    sinks   first tokens that always stay
    recent  last tokens that always stay, if there is room for twice as many

    >>> class LongValues(ScoreCompressor):
    ...     sinks = 1
    ...     def score(self, layer):
    ...         return layer.values.norm(dim=-1)
    >>> LongValues().scores(torch.tensor([[0.5, 3.0, 1.0]]), 2)
    tensor([[inf, 3., 1.]])
    """

    sinks: int = 0
    recent: int = 0

    @abstractmethod
    def score(self, layer: LayerPrefix) -> Tensor:
        """(key heads, T): high for what should stay."""

    def evidence(self, prefix: Prefix) -> list[Tensor]:
        return [self.score(layer).float() for layer in prefix.layers]

    def compress(self, prefix: Prefix, budget: Budget, evidence: list[Tensor]) -> Layers:
        return [
            chosen(layer, [row.topk(budget.per_head).indices for row in self.scores(scores, budget.per_head)])
            for layer, scores in zip(prefix.layers, evidence, strict=True)
        ]

    def scores(self, scores: Tensor, entries: int) -> Tensor:
        """(key heads, T) with +∞ for what always stays, where a key head has so many entries on average."""
        out = scores.clone()
        recent = min(self.recent, entries // 2)
        out[:, : min(self.sinks, entries // 2)] = torch.inf
        if recent:
            out[:, -recent:] = torch.inf
        return out


def chosen(layer: LayerPrefix, indices: Sequence[Tensor]) -> list[HeadEntries]:
    """The tokens at ``indices`` (m,) of each key head, in their order, with mass 1; entries with the mass they have."""
    ordered = [index.sort().values for index in indices]
    if layer.log_mass is None:
        return [
            HeadEntries(keys[index], values[index], None, index)
            for keys, values, index in zip(layer.keys, layer.values, ordered, strict=True)
        ]
    ordered = [index[mass[index] > -torch.inf] for index, mass in zip(ordered, layer.log_mass, strict=True)]
    parts = zip(layer.keys, layer.values, layer.log_mass, ordered, strict=True)
    return [HeadEntries(keys[index], values[index], mass[index]) for keys, values, mass, index in parts]
