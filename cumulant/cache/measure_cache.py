"""`MeasureCache`: a cache of transformers whose heads hold measures, compressed or exact.

How mass and lengths reach the attention function: transformers hands it what `update` returned, and nothing else. After
compression that is a key tensor of a class of its own (`cumulant.nn.compressed_keys.CompressedKeys`) with the shape of
the tokens that were not compressed, as the masks of the model count them, and the entries of all heads as an attribute.
The attention function "cumulant" reads both; the answer to any other operation on these keys is a sentence. Nothing is
global, no hook is on the model, and one model may use several caches at once. The keys of a cache that compresses while
it grows are such a tensor from the first token: it carries who wants to have the queries, too, and the attention
function hands them on once it has its output. After the last layer all have them, and what is due is compressed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

import cumulant.transformers  # noqa: F401, the attention function that compressed caches need
from cumulant.cache import storage
from cumulant.cache.adding import Spans, require_addable, united
from cumulant.cache.entries import HeadEntries
from cumulant.cache.entry_store import EntryStore, joined
from cumulant.cache.layer import MeasureLayer
from cumulant.cache.models import ModelIdentity, layers_for, taken_over
from cumulant.checks import require_integer, sentence, shape
from cumulant.measures.empirical import Empirical
from cumulant.nn.compressed_keys import CompressedKeys

if TYPE_CHECKING:
    from cumulant.cache.growing import Growing

LayerEntries = Sequence[Sequence[HeadEntries] | None] | Sequence[HeadEntries]


class MeasureCache(Cache):
    """The cache of a decoder, each head a measure of keys and values; compressed, a smaller one in its place.

        h = Σ_j e^{w_j} δ_(k_j, v_j),    output = Σ_j p_j v_j,    p_j = exp(⟨η,k_j⟩ + w_j − G(η)),
        G(η) = log Σ_j exp(⟨η,k_j⟩ + w_j)

    model     a decoder of transformers, or its configuration
    start     how many tokens come before those of this cache: the first has this position (see ``+``). Masks (batch,
              tokens), where they are passed, count from position 0
    compress  a method that compresses while the text grows, "backtest+norepeat", ``Backtest(repeat=False)`` or a
              compressor that is ``while_growing``; None: nothing is compressed of itself
    keep      bytes of entries over bytes of the tokens that they stand for, or
    bytes     how many bytes entries may have, of all sequences together
    every     tokens between one compression and the next, at least

    It is given to the model as ``past_key_values``, to `forward` or `generate`. Until `compress` is called it is
    transformers' DynamicCache, on any attention function, to the last bit. Then entries with mass stand for tokens, of
    their own number in every head, without padding; every later query sees them, the mask of the model is about later
    tokens only, and these are held exactly. That needs ``attn_implementation="cumulant"``. Positions go on from the
    number of tokens seen. Layers with sliding windows are not compressed.

    With ``compress`` it is compressed at the end of a pass, once there are ``every`` tokens (or a quarter of the
    entries of a head, if that is more) and 32 since the last time; the last 32 stay as they are. Beside entries and
    these tokens it holds a sample of queries, by the law of the method. Padding is on the left. ``deepcopy`` shares the
    model, a sum of two caches is compressed no more.

    >>> import torch, transformers
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.LlamaConfig(vocab_size=9, attn_implementation="cumulant", **sizes)
    >>> model, ids = transformers.LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3, 4]])
    >>> cache = MeasureCache(model)
    >>> _ = model(ids, past_key_values=cache)
    >>> heads = [HeadEntries(*(t[1:] for t in (e.keys, e.values)), None) for e in cache.entries(0)]
    >>> _ = cache.compress({0: [heads]})                        # the first token is gone
    >>> cache.get_seq_length(), len(cache.entries(0)[0].keys), cache.keep       # 1/8 says where heads begin
    (4, 3, 0.875)
    """

    def __init__(
        self,
        model: nn.Module | PreTrainedConfig,
        *,
        start: int = 0,
        compress: object | None = None,
        keep: float | None = None,
        bytes: int | None = None,
        every: int = 512,
    ) -> None:
        self.identity = ModelIdentity.of(model)
        require_integer("MeasureCache.start", start, 0)
        self.start = start
        self._summed: Spans = ()
        self._growing: Growing | None = None
        super().__init__(layers=layers_for(model, start))
        if compress is not None:
            self._grow(model, compress, keep, bytes, every)
        elif keep is not None or bytes is not None:
            advice = 'Name a method, compress="backtest+norepeat".'
            raise ValueError(sentence("MeasureCache.compress", "a method, where there is a budget", "None", advice))

    def _grow(
        self, model: nn.Module | PreTrainedConfig, compress: object, keep: float | None, bytes: int | None, every: int
    ) -> None:
        """Compress from now on, as `MeasureCache` says."""
        from cumulant.cache.growing import Growing  # compressors know of caches

        self._growing = Growing.of(model, compress, keep, bytes, every)
        self._growing.require_layers(list(self.compressible))
        for i, layer in self.compressible.items():
            layer.asked = self._growing.sample(i, self.start)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append tokens (batch, key heads, q, d) to a layer; keys and values to attend to."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if self._growing is None or not isinstance(layer, MeasureLayer) or layer.asked is None:
            return keys, values
        assert layer.keys is not None
        entries = None if layer.store is None else layer.store.atoms
        receiver = partial(self._growing.received, self, layer_idx)
        return CompressedKeys.of(layer.keys, entries, receiver=receiver), values

    def __repr__(self) -> str:
        entries = [int(m.store.atoms.lengths.sum()) for m in self.compressible.values() if m.store is not None]
        held = f", {sum(entries)} entries" if entries else ""
        return f"MeasureCache({len(self.layers)} layers, {self.get_seq_length()} tokens seen{held})"

    @classmethod
    def from_cache(cls, cache: Cache, model: nn.Module | PreTrainedConfig) -> MeasureCache:
        """The tokens of transformers' DynamicCache: keys (batch, key heads, n, d) are taken over, not copied.

        cache  what ``model(...).past_key_values`` is by default
        """
        new = cls(model)
        taken_over(cache, new.layers)
        return new

    # ------------------------------------------------------------------ what is held

    @property
    def compressible(self) -> dict[int, MeasureLayer]:
        """The layers with full attention, by number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, MeasureLayer)}

    @property
    def compressed_tokens(self) -> int:
        """How many of the first tokens are held as entries."""
        return next((m.first for m in self.compressible.values() if m.store is not None), 0)

    def entries(self, layer: int, batch: int = 0, attention_mask: Tensor | None = None) -> list[HeadEntries]:
        """What the key heads of a layer hold of one sequence: compressed entries, then the tokens since.

        attention_mask  (batch, tokens seen) of the model, 0 where a token is padding, which is left out. Needed where
                        several sequences have tokens that are not compressed
        """
        held = self._layer(layer, batch)
        mask = self._mask(attention_mask, held.get_seq_length(), needed=held.recent > 0)
        return held.entries(batch, mask=None if mask is None else mask[batch])

    def measure(
        self,
        layer: int,
        kv_head: int,
        batch: int = 0,
        *,
        values: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Empirical:
        """The measure of one key head: Σ_j e^{w_j} δ_{k_j} in its query space, atoms (m, d), log weights (m,) or None.

        values  the measure of pairs, atoms (k_j, v_j) of shape (m, d + e). Its mean at (scale · query, 0) is
                E[k] and, in the last e numbers, the output of attention: ∇_θ G(η, θ) at θ = 0

        Rotation, scale and mask are not in it: η = scale · query, rotated to its position.
        """
        require_integer("MeasureCache.measure.kv_head", kv_head, 0, self._layer(layer, batch).shape.heads - 1)
        head = self.entries(layer, batch, attention_mask)[kv_head]
        atoms = torch.cat([head.keys, head.values], -1) if values else head.keys
        weights = None if head.log_mass is None else head.log_mass.to(atoms.dtype)
        return Empirical(atoms, weights)

    def bytes(self) -> int:
        """Bytes of all tensors that are held: keys, values, log-mass, positions, where heads begin, windows."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in storage.tensors_of(layer).values())

    def full_bytes(self) -> int:
        """Bytes of the keys and values of a cache that compresses nothing, after the same tokens."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, MeasureLayer) and layer.keys is not None:
                tokens, sizes = sum(end - first for first, end in self.spans), layer.shape
                numbers = layer.batch_size * sizes.heads * tokens * (sizes.width + sizes.value_width)
                total += numbers * layer.keys.element_size()
            else:
                total += sum(t.numel() * t.element_size() for t in storage.tensors_of(layer).values())
        return total

    @property
    def keep(self) -> float:
        """`bytes` over `full_bytes`, all layers together; 1 for an empty cache."""
        full = self.full_bytes()
        return self.bytes() / full if full else 1.0

    # ------------------------------------------------------------------ compression

    def compress(
        self,
        entries: Mapping[int, LayerEntries] | Sequence[LayerEntries | None] = (),
        *,
        tokens: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> MeasureCache:
        """Hold entries in the place of the first tokens; returns the cache itself.

        entries         layer → for each sequence a list of `HeadEntries`, one a key head, keys (m, d), values (m, e);
                        of a single sequence the list itself. Layers and sequences that are not there, or None, keep
                        their tokens, as entries of mass 1
        tokens          how many of the tokens seen they stand for; None: all. Later ones are held as they are
        attention_mask  (batch, tokens seen) of the model, 0 where a token is padding: it is not stored. Needed where
                        one of several sequences keeps its tokens

        Either all layers change or, where an entry is refused, none.
        """
        layers = self.compressible
        seen = self._require_tokens()
        given = (
            dict(entries) if isinstance(entries, Mapping) else {i: e for i, e in enumerate(entries) if e is not None}
        )
        for i in given:
            self._layer(i, 0)
        tokens = seen if tokens is None else tokens
        require_integer("MeasureCache.compress.tokens", tokens, max(self.compressed_tokens, self.start), seen)
        mask = self._mask(attention_mask, seen)
        if mask is None and tokens > self.compressed_tokens and self._keeps_tokens(given):
            self._mask(None, seen, needed=True)
        stores = {i: self._store(i, layer, given.get(i), tokens, mask) for i, layer in layers.items()}
        if self._growing is not None:
            self._growing.settle(self, tokens)
        for i, layer in layers.items():
            layer.compress(stores[i], tokens)
        return self

    def replace(self, layer: int, entries: Sequence[HeadEntries], batch: int = 0) -> MeasureCache:
        """Other entries for what is compressed of one sequence in one layer, one `HeadEntries` a key head, keys (m, d).

        Where nothing is compressed yet, they stand for all tokens seen, and all else is held as it is.
        """
        sequences: list[Sequence[HeadEntries] | None] = [None] * self._layer(layer, batch).batch_size
        sequences[batch] = entries
        return self.compress({layer: sequences}, tokens=self.compressed_tokens or None)

    def _keeps_tokens(self, given: Mapping[int, LayerEntries]) -> bool:
        """Whether some layer or sequence has no entries of its own."""
        return any(i not in given or any(own is None for own in given[i]) for i in self.compressible)

    def _store(
        self, index: int, layer: MeasureLayer, given: LayerEntries | None, tokens: int, mask: Tensor | None
    ) -> EntryStore:
        """The entries of one layer: those given, and exact ones for sequences without."""
        where, batch = f"MeasureCache.compress.entries[{index}]", layer.batch_size
        if given is None:
            given = [None] * batch
        elif batch == 1 and len(given) and isinstance(given[0], HeadEntries):
            given = [cast(Sequence[HeadEntries], given)]
        if len(given) != batch:
            advice = "Give a list for each sequence: one HeadEntries a key head, or None."
            raise ValueError(sentence(where, f"lists of {batch} sequences", len(given), advice))
        sequences = [
            layer.entries(b, tokens, None if mask is None else mask[b]) if own is None else own
            for b, own in enumerate(cast(Sequence[Sequence[HeadEntries] | None], given))
        ]
        return EntryStore.of(sequences, layer.shape, where, tokens)

    # ------------------------------------------------------------------ algebra

    @property
    def spans(self) -> Spans:
        """Which positions of the sequence it stands for: pairs of the first, and the one after the last."""
        begin = max((end for _, end in self._summed), default=self.start)
        return united(self._summed, ((begin, self.get_seq_length()),))

    def __add__(self, other: MeasureCache) -> MeasureCache:
        """The sum of measures, head by head: what one cache holds and what the other holds, of disjoint positions.

            h_a + h_b,    G = log(e^{G_a} + e^{G_b})

        Both are of one model and batch. A second cache begins where the first ends: ``MeasureCache(model, start=n)``.
        The tokens of neither saw those of the other when their keys were made; the sum is exact for these keys. All is
        held as entries, the next token follows the last position. Several sequences are compressed before, with their
        mask, so that no padding is added.
        """
        if not isinstance(other, MeasureCache):
            return NotImplemented
        require_addable(self, other)
        new = MeasureCache.__new__(MeasureCache)
        new.identity, new.start, new._growing = self.identity, min(self.start, other.start), None
        new._summed = united(self.spans, other.spans)
        end = new._summed[-1][1]
        layers = []
        for a, b in zip(self.compressible.values(), other.compressible.values(), strict=True):
            sums = [
                [joined(pair) for pair in zip(a.entries(n), b.entries(n), strict=True)] for n in range(a.batch_size)
            ]
            layer = MeasureLayer(new.start, a.limit)
            assert a.keys is not None
            assert a.values is not None
            layer.lazy_initialization(a.keys, a.values)
            layer.keys, layer.values = a.keys[:, :, :0].clone(), a.values[:, :, :0].clone()
            layer.first, layer.store = end, EntryStore.of(sums, a.shape, "MeasureCache", end)
            layers.append(layer)
        Cache.__init__(new, layers=layers)
        return new

    def reset(self) -> None:
        """Forget every token; the cache begins anew at ``start``."""
        super().reset()
        self._summed = ()

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> Path:
        """Write all that is held to a file of safetensors, with what identifies the model; replaced in one step."""
        metadata = self.identity.metadata() | {"start": str(self.start), "summed": json.dumps(self._summed)}
        if self._growing is not None:
            metadata["growing"] = json.dumps(self._growing.settings())
        return storage.save(self.layers, Path(path), metadata)

    @classmethod
    def load(
        cls, path: str | Path, model: nn.Module | PreTrainedConfig, *, compress: object | None = None
    ) -> MeasureCache:
        """A cache that `save` wrote; refused where model or dtype are not those that it was made with.

        compress  the method of a cache that compresses while it grows, where it was not given by name

        A model is recognised by its configuration and some numbers of every weight, a configuration by itself alone.
        The cache lies where the model does, without one on the CPU.
        """
        named, metadata = storage.read(Path(path))
        identity = ModelIdentity.of(model)
        identity.require_equal(metadata, str(path))
        settings = storage.growing(metadata, compress, str(path))
        new = cls(model, start=int(metadata["start"]), **settings)
        new._summed = storage.spans(metadata["summed"])
        device = next(model.parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")
        storage.fill(new.layers, named, metadata, str(path), device)
        return new

    # ------------------------------------------------------------------ checks

    def _layer(self, index: int, batch: int) -> MeasureLayer:
        where = "MeasureCache.layer"
        require_integer(where, index, 0, len(self.layers) - 1)
        layer = self.layers[index]
        if not isinstance(layer, MeasureLayer):
            expected = f"a layer with full attention, of {list(self.compressible)}"
            advice = "Layers with sliding windows are held as they are."
            raise ValueError(sentence(where, expected, f"{index}, {type(layer).__name__}", advice))
        if layer.keys is None:
            raise ValueError(sentence("MeasureCache", "tokens", "an empty cache", "Run the model with it first."))
        require_integer("MeasureCache.batch", batch, 0, layer.batch_size - 1)
        return layer

    def _require_tokens(self) -> int:
        """Tokens seen, by every layer."""
        layers = self.compressible
        if not layers:
            expected, advice = "a layer with full attention", "Layers with sliding windows are held as they are."
            raise ValueError(sentence("MeasureCache.compress", expected, "a model without", advice))
        seen = {layer.get_seq_length() if layer.keys is not None else None for layer in layers.values()}
        if len(seen) > 1 or None in seen:
            got = "an empty cache" if seen == {None} else "layers that saw different numbers of tokens"
            raise ValueError(sentence("MeasureCache.compress", "tokens", got, "Run the model with it first."))
        return cast(int, seen.pop())

    def _mask(self, mask: Tensor | None, seen: int, needed: bool = False) -> Tensor | None:
        """The mask of tokens, checked; one sequence has no padding, of several it must be known."""
        batch = next(iter(self.compressible.values())).batch_size
        if mask is None and not (needed and batch > 1):
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != batch or mask.shape[1] < seen:
            got = shape(mask) if isinstance(mask, Tensor) else type(mask).__name__
            advice = "Pass the attention_mask that the model got, 0 at padding, so that none of it is stored."
            raise ValueError(sentence("MeasureCache.attention_mask", f"shape (batch={batch}, {seen})", got, advice))
        return mask.bool()
