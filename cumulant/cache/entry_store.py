"""The entries of one layer, of all sequences and key heads, in one storage without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cumulant.cache.entries import HeadEntries
from cumulant.checks import holds, require_log_weights, sentence, shape
from cumulant.kernels.dense import accumulate
from cumulant.kernels.ragged import RaggedAtoms


@dataclass(frozen=True)
class LayerShape:
    """What the entries of a layer must agree with: the keys and values that its model makes.

    heads    key heads
    width    d of keys (m, d), value_width e of values (m, e)
    """

    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerShape:
        """Of keys (batch, key heads, n, d) and values (batch, key heads, n, e)."""
        return cls(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)


@dataclass(frozen=True, eq=False)
class EntryStore:
    """Entries of every key head of every sequence, one after another.

    atoms      keys (total, d), values (total, e), log-mass (total,) or None, and where each head (batch, key heads) has
               its rows; sequences that are copies of one another, as beams are, share rows
    positions  (total,) int32, −1 for merged entries; None: not known of all
    """

    atoms: RaggedAtoms
    positions: Tensor | None

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[HeadEntries]], expected: LayerShape, where: str, tokens: int
    ) -> EntryStore:
        """From the entries of every head of every sequence, checked; what has no mass is left out.

        tokens  entries are at positions before this one
        """
        rows = []
        for b, heads in enumerate(sequences):
            name = f"{where}[{b}]"
            if isinstance(heads, HeadEntries) or len(heads) != expected.heads:
                got = "one" if isinstance(heads, HeadEntries) else len(heads)
                advice = "A sequence of a layer is a list of HeadEntries, one for each key head."
                raise ValueError(sentence(name, f"entries of {expected.heads} key heads", got, advice))
            rows += [_checked(entries, expected, f"{name}[{h}]", tokens) for h, entries in enumerate(heads)]
        keys, values = torch.cat([r.keys for r in rows]), torch.cat([r.values for r in rows])
        masses = [r.log_mass for r in rows]
        weights = None if all(w is None for w in masses) else torch.cat([_masses(r) for r in rows])
        known = [r.positions for r in rows if r.positions is not None]
        positions = torch.cat(known).to(torch.int32) if len(known) == len(rows) else None
        lengths = torch.tensor([len(r.keys) for r in rows], dtype=torch.int64).reshape(-1, expected.heads)
        starts = lengths.flatten().cumsum(0).reshape(lengths.shape) - lengths
        return cls(RaggedAtoms(keys, values, weights, starts, lengths), positions)

    def head(self, batch: int, key_head: int) -> HeadEntries:
        """The entries of one head: views."""
        rows, atoms = self.atoms.head(batch, key_head), self.atoms
        weights = None if atoms.log_weights is None else atoms.log_weights[rows]
        return HeadEntries(
            atoms.atoms[rows],
            atoms.values[rows],
            weights,
            None if self.positions is None else self.positions[rows].to(torch.int64),
        )

    def select(self, indices: Tensor) -> EntryStore:
        """Sequences by number, as often as they are named; rows are shared, not copied."""
        indices = indices.to("cpu")
        starts, lengths = (t.index_select(0, indices).contiguous() for t in (self.atoms.starts, self.atoms.lengths))
        return replace(self, atoms=self.atoms._replace(starts=starts, lengths=lengths))

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by name."""
        named = {**self.atoms._asdict(), "positions": self.positions}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor]) -> EntryStore:
        """The inverse of `tensors`."""
        atoms = RaggedAtoms(*(named.get(name) for name in RaggedAtoms._fields))  # pyright: ignore[reportArgumentType]
        return cls(atoms, named.get("positions"))


def _checked(entries: object, expected: LayerShape, where: str, tokens: int) -> HeadEntries:
    """Entries of the right shapes, dtypes and values, those without mass left out."""
    if not isinstance(entries, HeadEntries):
        raise TypeError(sentence(where, "HeadEntries", type(entries).__name__, "Give keys, values and log_mass."))
    sizes = {"keys": expected.width, "values": expected.value_width}
    for name, width in sizes.items():
        tensor = getattr(entries, name)
        if tensor.ndim != 2 or tensor.shape[1] != width or len(tensor) != len(entries.keys):
            wanted, advice = f"shape (m={len(entries.keys)}, {width})", "Keep the width that the model has."
            raise ValueError(sentence(f"{where}.{name}", wanted, shape(tensor), advice))
        if tensor.dtype != expected.dtype or tensor.device != expected.device:
            wanted, got = f"{expected.dtype} on {expected.device}", f"{tensor.dtype} on {tensor.device}"
            advice = "Entries have the dtype and device of the cache: call .to(cache's)."
            raise TypeError(sentence(f"{where}.{name}", wanted, got, advice))
        if not holds(tensor.isfinite()):
            raise ValueError(sentence(f"{where}.{name}", "finite numbers", "NaN or infinite ones", "Remove them."))
    _check_per_entry(entries, where, tokens)
    entries = HeadEntries(*(t if t is None else t.detach() for t in entries))  # pyright: ignore[reportArgumentType]
    if entries.log_mass is None or holds(entries.log_mass > -torch.inf):
        return entries
    present = entries.log_mass > -torch.inf
    return HeadEntries(*(t if t is None else t[present] for t in entries))  # pyright: ignore[reportArgumentType]


def _check_per_entry(entries: HeadEntries, where: str, tokens: int) -> None:
    m = len(entries.keys)
    for name, tensor in (("log_mass", entries.log_mass), ("positions", entries.positions)):
        if tensor is None:
            continue
        if tensor.shape != (m,):
            raise ValueError(sentence(f"{where}.{name}", f"shape (m={m},)", shape(tensor), "One number per entry."))
        if tensor.is_floating_point() != (name == "log_mass"):
            wanted = "a floating dtype" if name == "log_mass" else "integers"
            raise TypeError(sentence(f"{where}.{name}", wanted, tensor.dtype, "Convert it with .to(...)."))
    if entries.log_mass is not None:
        require_log_weights(f"{where}.log_mass", entries.log_mass)
    at = entries.positions
    if at is not None and m and not -1 <= int(at.min()) <= int(at.max()) < tokens:
        wanted, got = f"positions from 0 to {tokens - 1}, or −1", f"from {int(at.min())} to {int(at.max())}"
        advice = "Entries stand for tokens that the cache has seen; merged ones are at −1."
        raise ValueError(sentence(f"{where}.positions", wanted, got, advice))


def _masses(entries: HeadEntries) -> Tensor:
    """Log-mass in the precision that sums are formed in."""
    dtype = accumulate(entries.keys[:0]).dtype
    if entries.log_mass is None:
        return torch.zeros(len(entries.keys), dtype=dtype, device=entries.keys.device)
    return entries.log_mass.to(entries.keys.device, dtype)


def joined(parts: Iterable[HeadEntries]) -> HeadEntries:
    """The sum of measures: the entries of all.

    >>> one = HeadEntries(torch.zeros(1, 2), torch.ones(1, 2), None, torch.tensor([0]))
    >>> two = joined([one, HeadEntries(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([3.0]), torch.tensor([-1]))])
    >>> two.log_mass, two.positions
    (tensor([0., 3.]), tensor([ 0, -1]))
    """
    parts = list(parts)
    plain = all(p.log_mass is None for p in parts)
    known = [p.positions for p in parts if p.positions is not None]
    return HeadEntries(
        torch.cat([p.keys for p in parts]),
        torch.cat([p.values for p in parts]),
        None if plain else torch.cat([_masses(p) for p in parts]),
        torch.cat([p.to(torch.int64) for p in known]) if len(known) == len(parts) else None,
    )
