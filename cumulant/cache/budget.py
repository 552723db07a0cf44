"""How many bytes a cache holds, and how many entries a share of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import LayerPrefix, Prefix
from cumulant.checks import sentence


@dataclass(frozen=True)
class Budget:
    """What a compressed cache may hold, of what the full one holds: all layers together.

        keep = bytes held / bytes of the full cache

    keep         share that may be held
    full         bytes of the full cache
    fixed        bytes of layers that are not compressed, as those with a sliding window: part of both sides
    entry_bytes  of every layer that is compressed: key and value of an entry, and its log-mass if it has one
    heads        key heads of these layers
    length       tokens of the prefix
    """

    keep: float
    full: int
    fixed: int
    entry_bytes: tuple[int, ...]
    heads: tuple[int, ...]
    length: int

    @property
    def bytes(self) -> int:
        """That may be held, of keys, values and masses of the layers that are compressed."""
        return int(self.keep * self.full + 1e-6) - self.fixed

    @property
    def per_head(self) -> int:
        """Entries of a key head if all of them hold as many."""
        of_one = sum(size * heads for size, heads in zip(self.entry_bytes, self.heads, strict=True))
        return min(self.bytes // of_one, self.length)

    def of_layer(self, layer: int) -> int:
        """Entries of all key heads of a layer together, if all layers hold as many of each."""
        return self.per_head * self.heads[layer]


def budget(prefix: Prefix, keep: float, *, with_mass: bool = False) -> Budget:
    """The budget of a share ``keep`` in (0, 1] of the cache of ``prefix``; at least one entry of every key head.

    >>> budget(None, 1.5)
    Traceback (most recent call last):
    ValueError: budget.keep: expected a share above 0 and at most 1, got 1.5. Half of the bytes is 0.5.
    """
    keep = require_keep("budget.keep", keep)
    layers = prefix.layers
    sizes = tuple(entry_bytes(layer, with_mass) for layer in layers)
    heads = tuple(len(layer.keys) for layer in layers)
    of_layers = sum(_bytes(layer.keys) + _bytes(layer.values) for layer in layers)
    fixed = other_bytes(prefix)
    found = Budget(keep, of_layers + fixed, fixed, sizes, heads, len(prefix))
    if found.per_head < 1:
        least = (sum(s * h for s, h in zip(sizes, heads, strict=True)) + fixed) / found.full
        advice = "Give more, or a longer prefix."
        raise ValueError(sentence("budget.keep", f"at least {least:.3g}, an entry for each head", keep, advice))
    return found


def require_keep(where: str, keep: float) -> float:
    """A share in (0, 1]."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(sentence(where, "a share above 0 and at most 1", repr(keep), "Half of the bytes is 0.5."))
    return float(keep)


def entry_bytes(layer: LayerPrefix, with_mass: bool = False) -> int:
    """Of a key, a value and, if it is there, a log-mass in float32."""
    row = layer.keys.shape[-1] * layer.keys.element_size() + layer.values.shape[-1] * layer.values.element_size()
    return row + 4 * with_mass


def other_bytes(prefix: Prefix) -> int:
    """Of layers that are not compressed."""
    compressed = {layer.index for layer in prefix.layers}
    others = [layer for i, layer in enumerate(prefix.cache.layers) if i not in compressed]
    tensors = [x for layer in others for x in vars(layer).values() if isinstance(x, Tensor)]
    return sum(_bytes(x) for x in tensors if x.is_floating_point())  # not what counts the tokens


def bytes_held(layers: Sequence[Sequence[HeadEntries]]) -> int:
    """Of keys, values and log-masses. Positions are not counted: no query reads them.

    >>> import torch
    >>> bytes_held([[HeadEntries(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3))]])
    108
    """
    return sum(
        _bytes(part)
        for heads in layers
        for head in heads
        for part in (head.keys, head.values, head.log_mass)
        if part is not None
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
