"""One layer of a `MeasureCache`: entries with mass of what was compressed, then the tokens since, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from cumulant.cache.entries import HeadEntries
from cumulant.cache.entry_store import EntryStore, LayerShape, joined
from cumulant.checks import sentence
from cumulant.nn.compressed_keys import CompressedKeys

if TYPE_CHECKING:
    from cumulant.cache.query_sample import KeptQueries


class MeasureLayer(DynamicLayer):
    """A layer with full attention: the measure Σ_c e^{w_c} δ_(k_c, v_c) of compressed tokens, and recent tokens.

        tokens 0 … first − 1   entries of `store`, of their own number in every head (none: they are not held)
        tokens first …         `keys` (batch, key heads, n, d) and `values` (batch, key heads, n, e), as DynamicLayer

    first  index of the first recent token
    store  the entries; None while nothing is compressed
    limit  how many tokens the positions of the model reach; None: any number
    asked  a sample of the queries of these tokens, of a cache that compresses while it grows; None: it keeps none
    """

    def __init__(self, start: int = 0, limit: int | None = None) -> None:
        super().__init__()
        self.start = self.first = start
        self.limit = limit
        self.store: EntryStore | None = None
        self.asked: KeptQueries | None = None

    @property
    def batch_size(self) -> int:
        """Sequences; 0 before the first token."""
        return 0 if self.keys is None else len(self.keys)

    @property
    def recent(self) -> int:
        """How many tokens are held as they are."""
        return 0 if self.keys is None or self.keys.ndim < 4 else self.keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens seen, however many entries are held of them."""
        return self.first + self.recent

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the mask of a pass is about, and the index of the first: recent and new tokens."""
        return self.recent + query_length, self.first

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens (batch, key heads, q, d); keys and values to attend to.

        After compression the keys are `CompressedKeys`, which carry the entries to the attention function.
        """
        self._check(key_states)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return (keys, values) if self.store is None else (CompressedKeys.of(keys, self.store.atoms), values)

    def _check(self, key_states: Tensor) -> None:
        tokens = self.get_seq_length() + key_states.shape[-2]
        if self.limit is not None and tokens > self.limit:
            advice = "Positions beyond were never trained; use a model with a longer range, or shorter texts."
            where, expected = "MeasureCache.update", f"at most {self.limit} tokens (max_position_embeddings)"
            raise ValueError(sentence(where, expected, tokens, advice))
        if self.store is None and self.asked is None:
            return
        if torch.compiler.is_compiling():
            expected, advice = "a pass that torch.compile may leave", "Compile without fullgraph=True, or not at all."
            raise ValueError(
                sentence("MeasureCache", f"{expected}, once compressed or growing", "one in its graph", advice)
            )
        if self.keys is None:
            return
        if key_states.dtype != self.keys.dtype or (self.keys.ndim == 4 and len(key_states) != len(self.keys)):
            expected = f"{len(self.keys)} sequences in {self.keys.dtype}, as are held"
            got = f"{len(key_states)} in {key_states.dtype}"
            advice = (
                "For beams call cache.batch_repeat_interleave(num_beams) before; else use the batch that filled it."
            )
            raise ValueError(sentence("MeasureCache.update", expected, got, advice))

    # ------------------------------------------------------------------ entries

    @property
    def shape(self) -> LayerShape:
        """What entries must agree with."""
        assert self.keys is not None
        assert self.values is not None
        return LayerShape.of(self.keys, self.values)

    def entries(self, batch: int, tokens: int | None = None, mask: Tensor | None = None) -> list[HeadEntries]:
        """What every head holds of one sequence: compressed entries, and recent tokens before ``tokens``.

        mask  (seen,) True where a token is none of the padding, which is left out
        """
        assert self.keys is not None
        assert self.values is not None
        end = self.recent if tokens is None else tokens - self.first
        keys, values = self.keys[batch, :, :end], self.values[batch, :, :end]
        positions = torch.arange(self.first, self.first + keys.shape[1], device=keys.device)
        if mask is not None:
            shown = mask[self.first : self.first + keys.shape[1]].to(keys.device, torch.bool)
            keys, values, positions = keys[:, shown], values[:, shown], positions[shown]
        recent = [HeadEntries(k, v, None, positions) for k, v in zip(keys, values, strict=True)]
        if self.store is None:
            return recent
        return [joined((self.store.head(batch, h), r)) for h, r in enumerate(recent)]

    def compress(self, store: EntryStore, tokens: int) -> None:
        """Hold ``store`` in place of all tokens before ``tokens``."""
        assert self.keys is not None
        assert self.values is not None
        gone = tokens - self.first
        self.keys, self.values = self.keys[:, :, gone:].clone(), self.values[:, :, gone:].clone()
        self.store, self.first = store, tokens

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by name."""
        recent = {} if not self.recent else {"keys": self.keys, "values": self.values}
        stored = {} if self.store is None else {f"store.{name}": t for name, t in self.store.tensors().items()}
        asked = {} if self.asked is None else {f"asked.{name}": t for name, t in self.asked.tensors().items()}
        return {name: t for name, t in (recent | stored | asked).items() if t is not None}

    # ------------------------------------------------------------------ what generation does to a cache

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; a negative number of them, as in transformers. Compressed ones cannot be removed."""
        if self.store is not None and -tokens_to_remove > self.recent:
            expected = f"at most the {self.recent} tokens that are not compressed"
            raise ValueError(sentence("MeasureCache.crop", expected, -tokens_to_remove, "Compress fewer tokens."))
        super().crop(tokens_to_remove)
        if self.asked is not None:
            self.asked.crop(-tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.store, self.first = None, self.start
        if self.asked is not None:
            self.asked = self.asked.empty()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.keys is None or self.values is None or self.keys.ndim < 4:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.keys = self.keys.index_select(0, indices.to(self.keys.device))
        self.values = self.values.index_select(0, indices.to(self.values.device))
        self.store = None if self.store is None else self.store.select(indices)
        if self.asked is not None:
            self.asked.select(indices)
