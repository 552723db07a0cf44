"""A cache that compresses while its text grows: when it does, from what, and within which budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from cumulant.cache.budget import require_keep
from cumulant.cache.compressor import Compressor, Layers, as_compressor, compress_prefix
from cumulant.cache.entries import HeadEntries
from cumulant.cache.fitted.backtest import SMALLEST
from cumulant.cache.fitted.compressor import SHORTEST
from cumulant.cache.fitted.law import QueryLaw, require_rotation
from cumulant.cache.layer import MeasureLayer
from cumulant.cache.models import decoder_config, position_limit
from cumulant.cache.prefix import Growth, LayerPrefix, Prefix, on_cumulant, prefill, require_decoder
from cumulant.cache.query_sample import KeptQueries, begins_of
from cumulant.cache.storage import tensors_of
from cumulant.checks import require_integer, sentence
from cumulant.kernels.arguments import Support

if TYPE_CHECKING:
    from cumulant.cache.measure_cache import MeasureCache

WHERE = "MeasureCache(compress=…)"
TAIL = 32  # last tokens that are always held as they are: generation with an assistant takes some of them back
SHARE = 4  # a compression waits for a quarter of the entries that are held, so that all of them cost O(T)
READ = 64  # tokens of no meaning that a model reads once, to show its heads


@dataclass(frozen=True, eq=False)
class Growing:
    """How a cache compresses while it grows.

        tokens since ≥ max(every, entries of a head / 4) + 32   →   all but the last 32 tokens become entries

    model       that asks and is asked
    layers      what its layers are, without tokens, by their number
    compressor  one that is ``while_growing``, and its name, where it has been given by name
    keep        share of the bytes of the tokens that are compressed, or ``bytes``, of all sequences together
    every       tokens
    """

    model: nn.Module
    layers: dict[int, LayerPrefix]
    compressor: Compressor
    method: str
    keep: float | None
    bytes: int | None
    every: int

    @classmethod
    def of(
        cls, model: nn.Module | PreTrainedConfig, compress: object, keep: float | None, bytes: int | None, every: int
    ) -> Growing:
        """The settings, checked, and the heads of the model."""
        if not isinstance(model, nn.Module):
            advice = "Its queries and weights are needed, not its configuration alone."
            raise TypeError(sentence(f"{WHERE}.model", "the model itself", type(model).__name__, advice))
        compressor = as_compressor(compress)
        if not compressor.while_growing:
            got = f"{compressor.name}, which needs the whole text and the model"
            advice = 'Use compress="backtest+norepeat", or "stream"; or let `compress` read a finished text.'
            raise ValueError(sentence(WHERE, "a method for entries and a sample of queries", got, advice))
        if (keep is None) == (bytes is None):
            got, advice = f"keep={keep}, bytes={bytes}", "A quarter of the bytes is keep=0.25."
            raise ValueError(sentence(WHERE, "keep or bytes, one of them", got, advice))
        if keep is not None:
            require_keep("MeasureCache.keep", keep)
        require_integer("MeasureCache.every", every, SHORTEST)
        made = cls(*(require_decoder(model), heads_of(model), compressor), *(_name(compress), keep, bytes, every))
        if getattr(compressor, "law", None) is not None:
            require_steady(model)
            for layer in made.layers.values():
                require_rotation(layer, WHERE)
        if bytes is not None:
            made.require_room(bytes, 1)
        return made

    def settings(self) -> dict[str, Any]:
        """Arguments of `MeasureCache` by which it is made again; a method without a name is left empty."""
        return {"compress": self.method, "keep": self.keep, "bytes": self.bytes, "every": self.every}

    def require_layers(self, numbers: list[int]) -> None:
        """Refuse a model some of whose layers have no keys of their own."""
        if sorted(self.layers) != numbers:
            got, advice = f"keys of layers {sorted(self.layers)}", "Use MeasureCache(model) without compress=."
            raise ValueError(sentence(WHERE, f"attention in each of the layers {numbers}", got, advice))

    def __deepcopy__(self, memo: dict) -> Growing:
        """Settings and model are shared by copies of a cache."""
        return self

    def __reduce__(self) -> Any:
        advice = "Use MeasureCache.save and load, or copy.deepcopy."
        raise TypeError(
            sentence(WHERE, "a cache that is saved by itself", "one that is pickled with its model", advice)
        )

    # ------------------------------------------------------------------ queries

    def sample(self, index: int, start: int) -> KeptQueries:
        """An empty sample of the queries of a layer."""
        layer = self.layers[index]
        law: QueryLaw | None = getattr(self.compressor, "law", None)
        seed: int = getattr(self.compressor, "seed", 0)
        widths = layer.keys.shape[-1], layer.values.shape[-1]
        return KeptQueries(law, seed, len(layer.queries), widths, start)

    @torch.no_grad()
    def received(self, cache: MeasureCache, index: int, query: Tensor, scale: float, support: Support) -> None:
        """Queries of a layer; after those of the last layer, what is due is compressed."""
        layer = cache.compressible[index]
        assert layer.asked is not None
        if query.shape[1] != len(self.layers[index].queries) or query.shape[-1] != self.layers[index].keys.shape[-1]:
            got, advice = f"queries of {query.shape[1]} heads and width {query.shape[-1]}", "Use a cache of this model."
            raise ValueError(sentence(WHERE, f"those of layer {index} of its own model", got, advice))
        layer.asked.add(query, scale, support, layer.first)
        if index == max(self.layers) and self._is_due(layer):
            begins = begins_after(layer.asked, support, layer.first)
            with torch.autocast(query.device.type, enabled=False):
                self.compress(cache, begins)

    def _is_due(self, layer: MeasureLayer) -> bool:
        if layer.recent < self.every + TAIL:
            return False
        held = 0.0 if layer.store is None else float(layer.store.atoms.lengths.double().mean())
        return layer.recent >= max(self.every, held / SHARE) + TAIL

    # ------------------------------------------------------------------ compression

    def compress(self, cache: MeasureCache, begins: Tensor, tail: int = TAIL) -> None:
        """Put entries in the place of all but the last ``tail`` tokens; sequences that have room for all their tokens,
        and those too short to be judged, keep them, as entries."""
        layers = cache.compressible
        end = cache.get_seq_length() - tail
        lengths = (end - begins).clamp_min(0).tolist()
        rooms = self._allowed(cache, lengths)
        least = SMALLEST * (self.token_bytes() + self.mass_bytes())
        due = [
            length >= SHORTEST and least <= room < self._held(cache, b, end, int(begins[b]))
            for b, (length, room) in enumerate(zip(lengths, rooms, strict=True))
        ]
        if not any(due):
            return
        for layer in layers.values():
            assert layer.asked is not None
            layer.asked.settle(begins)
        made = [self._sequence(cache, b, end, room) if due[b] else None for b, room in enumerate(rooms)]
        mask = torch.arange(cache.get_seq_length()) >= begins[:, None]
        given = {index: [None if m is None else m[n] for m in made] for n, index in enumerate(layers)}
        cache.compress(given, tokens=end, attention_mask=mask)

    def _held(self, cache: MeasureCache, b: int, end: int, begin: int) -> int:
        """Bytes of entries and tokens of one sequence, before ``end``."""
        total = 0
        for layer in cache.compressible.values():
            entry = sum(x.shape[-1] * x.element_size() for x in (layer.keys, layer.values) if x is not None)
            total += (end - max(begin, layer.first)) * layer.shape.heads * entry
            if layer.store is not None:
                mass = 0 if layer.store.atoms.log_weights is None else 4
                total += int(layer.store.atoms.lengths[b].sum()) * (entry + mass)
        return total

    def _allowed(self, cache: MeasureCache, lengths: Sequence[int]) -> list[float]:
        """Bytes of the entries of every sequence, which has so many tokens."""
        token, batch = self.token_bytes(), len(lengths)
        others = [tensors_of(layer) for i, layer in enumerate(cache.layers) if i not in self.layers]
        fixed = sum(t.nbytes for named in others for t in named.values()) / batch
        if self.keep is not None:
            return [self.keep * (length * token + fixed) - fixed for length in lengths]
        assert self.bytes is not None
        self.require_room(self.bytes - int(fixed * batch), batch)
        return [self.bytes * length / max(sum(lengths), 1) - fixed for length in lengths]

    def require_room(self, bytes: int, batch: int) -> None:
        """Refuse a number of bytes that has no room for first tokens, recent ones and atoms."""
        least = SMALLEST * batch * (self.token_bytes() + self.mass_bytes())
        if bytes < least:
            heads = sum(len(layer.keys) for layer in self.layers.values())
            expected = f"at least {least}, {SMALLEST} entries for each of {heads} key heads and {batch} sequences"
            raise ValueError(sentence("MeasureCache.bytes", expected, bytes, "Give more, or keep= of the text."))

    def token_bytes(self) -> int:
        """Of the keys and values of a token in all layers."""
        return sum(
            len(x.keys) * (x.keys.shape[-1] + x.values.shape[-1]) * x.keys.element_size() for x in self.layers.values()
        )

    def mass_bytes(self) -> int:
        """Of the masses of an entry in all key heads."""
        return 4 * self.compressor.with_mass * sum(len(layer.keys) for layer in self.layers.values())

    def _sequence(self, cache: MeasureCache, b: int, end: int, room: float) -> Layers:
        """The entries of one sequence in ``room`` bytes."""
        prefix = self.prefix(cache, b, end)
        full = sum(p.keys.nbytes + p.values.nbytes for p in prefix.layers)
        made = compress_prefix(prefix, self.compressor, min(room / full, 1.0)).layers
        return [[head._replace(positions=None) for head in heads] for heads in made]

    def prefix(self, cache: MeasureCache, b: int, end: int) -> Prefix:
        """What is held of one sequence before token ``end``, as a compressor gets it, tokens counted from its first."""
        layers = [self._layer(index, layer, b, end) for index, layer in cache.compressible.items()]
        ids = torch.full((layers[0].length,), -1)
        return Prefix(self.model, ids, tuple(layers), DynamicCache(), torch.empty(0))

    def _layer(self, index: int, layer: MeasureLayer, b: int, end: int) -> LayerPrefix:
        assert layer.keys is not None
        assert layer.values is not None
        assert layer.asked is not None
        assert layer.asked.begins is not None
        begin, known = int(layer.asked.begins[b]), layer.asked.rows[b]
        own = slice(max(begin - layer.first, 0), end - layer.first)
        keys, values, log_mass = layer.keys[b, :, own], layer.values[b, :, own], None
        if layer.store is not None:
            heads = [layer.store.head(b, h) for h in range(layer.shape.heads)]
            keys, values, log_mass = in_front(heads, keys, values)
        before = known.at < end - begin
        growth = Growth(
            *(end - begin, max(layer.first - begin, 0), known.at[before]),
            *(known.earlier, known.earlier_at, layer.asked.seed),
        )
        return self.layers[index]._replace(
            keys=keys, values=values, queries=known.queries[:, before], log_mass=log_mass, growth=growth
        )

    def settle(self, cache: MeasureCache, end: int) -> None:
        """Before tokens up to ``end`` become entries: what is known of their queries."""
        for index, layer in cache.compressible.items():
            asked = layer.asked
            if asked is None or asked.begins is None or asked.law is None:
                continue
            asked.settle(asked.begins)
            for b in range(len(asked.rows)):
                if int(asked.begins[b]) < end:
                    own = self._layer(index, layer, b, end)
                    asked.rows[b] = asked.rows[b].settled(own, asked.law, asked.seed, self.every)


def begins_after(asked: KeptQueries, support: Support, first: int) -> Tensor:
    """(batch,) where the text of each sequence begins, after a pass with this support."""
    assert asked.begins is not None
    return begins_of(support, asked.begins, first, asked.end)


def in_front(heads: Sequence[HeadEntries], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys (key heads, n, d), values and log-masses (None: all are 1) of entries, then tokens (key heads, t, d). Where
    a head has fewer entries than others, rows of no mass fill its place.

    >>> one = HeadEntries(torch.ones(1, 2), torch.ones(1, 2), None)
    >>> two = HeadEntries(torch.ones(2, 2), torch.ones(2, 2), None)
    >>> in_front([one, two], torch.zeros(2, 1, 2), torch.zeros(2, 1, 2))[2]
    tensor([[0., -inf, 0.],
            [0., 0., 0.]])
    """
    most = max(len(head.keys) for head in heads)
    out_keys, out_values = (x.new_zeros(len(heads), most, x.shape[-1]) for x in (keys, values))
    mass = torch.full((len(heads), most), -torch.inf, device=keys.device, dtype=torch.float32)
    for h, head in enumerate(heads):
        m = len(head.keys)
        out_keys[h, :m], out_values[h, :m] = head.keys, head.values
        mass[h, :m] = 0.0 if head.log_mass is None else head.log_mass.float()
    plain = bool((mass == 0).all())
    mass = torch.cat([mass, mass.new_zeros(keys.shape[:2])], 1)
    return torch.cat([out_keys, keys], 1), torch.cat([out_values, values], 1), None if plain else mass


def heads_of(model: nn.Module) -> dict[int, LayerPrefix]:
    """The layers that hold all tokens, without tokens: heads, rotation, sinks, and how large the residual stream in
    front of them is. The model reads a few drawn tokens for it; what has no such heads is refused in words."""
    inner = require_decoder(model)
    embeddings = inner.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    weight: Tensor = embeddings.weight
    limit = position_limit(decoder_config(inner)) or READ
    ids = torch.randint(0, len(weight), (min(READ, limit),), generator=torch.Generator().manual_seed(0)).to(
        weight.device
    )
    with on_cumulant(inner):
        layers = prefill(inner, ids).layers
    return {x.index: x._replace(keys=x.keys[:, :0], values=x.values[:, :0], queries=x.queries[:, :0]) for x in layers}


def require_steady(model: nn.Module) -> None:
    """Refuse rotations that change with the length of the text: no query is turned on to later positions by them."""
    rope = json.dumps(getattr(decoder_config(model), "rope_parameters", None) or {}, default=str)
    changing = [kind for kind in ("dynamic", "longrope") if f'"{kind}"' in rope]
    if changing:
        advice = 'Use compress="stream", which asks no queries, or `compress` for a finished text.'
        raise ValueError(sentence(WHERE, "a rotation that stays as the text grows", f"rope {changing[0]!r}", advice))


def _name(compress: object) -> str:
    """By which the method is found again; empty where it was not given by name."""
    return compress if isinstance(compress, str) else ""
