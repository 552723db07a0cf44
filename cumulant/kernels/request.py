"""The arguments of `moments`: their checks, and the way between their shapes and those of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import (
    broadcast,
    require_alike,
    require_device,
    require_float,
    require_log_weights,
    sentence,
    shape,
)
from cumulant.kernels.dense import accumulate
from cumulant.kernels.inputs import Inputs
from cumulant.kernels.support import Band

FAR = 1 << 61  # positions beyond which no key is, and sums of two of them still integers of 64 bits
ATTEND = {"eta": "query", "atoms": "key", "values": "value"}
ATTENTION = ATTEND | {"log_weights": "attn_mask", "mask": "attn_mask"}
NAMES = {"moments": {}, "attend": ATTEND, "attention": ATTENTION}  # of our arguments in the messages of a function


class Request:
    """The arguments of `moments`, checked, and the way between their shapes and the kernels' (g, q, ·)."""

    def __init__(self, eta, atoms, values, log_weights, mask, causal, window, offset, caller="moments"):
        self.caller = caller
        self.eta, self.atoms = require_float(self._at("eta"), eta), require_float(self._at("atoms"), atoms)
        self.values, self.log_weights, self.mask = values, log_weights, mask
        if isinstance(log_weights, Tensor) and log_weights.ndim == 1 < atoms.ndim - 1:  # one weight per atom for all
            self.log_weights = log_weights.reshape((1,) * (atoms.ndim - 2) + log_weights.shape)
        self.single = eta.ndim == 1
        if self.single:
            self.eta = eta[None]
        self._check()
        self.band = self._band(causal, window, offset)
        self.ratio = self._heads_per_group()
        self.lead = self._lead()

    # ------------------------------------------------------------------ checks

    def _at(self, argument: str) -> str:
        """Where a message says it happened."""
        return f"{self.caller}.{self._name(argument)}"

    def _name(self, argument: str) -> str:
        return NAMES[self.caller].get(argument, argument)

    def _check(self) -> None:
        eta, atoms, d = self.eta, self.atoms, self.eta.shape[-1]
        query, key = self._name("eta"), self._name("atoms")
        if atoms.ndim < 2 or atoms.shape[-1] != d:
            expected = f"shape (*batch, n, d={d}) as {query} {shape(eta)}"
            raise ValueError(sentence(self._at("atoms"), expected, shape(atoms), "Check the last axis."))
        require_alike(self._at("atoms"), atoms, query, eta)
        n = atoms.shape[-2]
        if self.values is not None:
            v = require_float(self._at("values"), self.values)
            require_alike(self._at("values"), v, key, atoms)
            if v.ndim < 2 or v.shape[-2] != n:
                expected = f"shape (*batch, n={n}, e)"
                raise ValueError(sentence(self._at("values"), expected, shape(v), f"One for each row of {key}."))
        if self.log_weights is not None:
            w = require_float(self._at("log_weights"), self.log_weights)
            require_alike(self._at("log_weights"), w, key, atoms)
            if w.ndim not in (atoms.ndim - 1, atoms.ndim, eta.ndim) or w.shape[-1] != n:
                raise self._misshapen_log_weights(w)
            require_log_weights(self._at("log_weights"), w)
        if self.mask is not None:
            m = self.mask
            if not isinstance(m, Tensor) or m.dtype != torch.bool:
                got = m.dtype if isinstance(m, Tensor) else type(m).__name__
                advice = "Pass True where a query may attend; additive biases go into log_weights."
                raise TypeError(sentence(self._at("mask"), "a Boolean tensor", got, advice))
            require_device(self._at("mask"), m, query, eta)
            if m.ndim < 1 or m.shape[-1] not in (1, n) or (m.ndim > 1 and m.shape[-2] not in (1, eta.shape[-2])):
                expected = f"broadcastable to (*batch, q={eta.shape[-2]}, n={n})"
                raise ValueError(sentence(self._at("mask"), expected, shape(m), "Match the last two axes."))

    def _band(self, causal: bool, window: int | None, offset: int | None) -> Band:
        q, n = self.eta.shape[-2], self.atoms.shape[-2]
        if (causal or window is not None) and offset is None and q != n:
            advice = "Pass offset=0 for the first token, or the number of cached keys (n - q for a full cache)."
            expected = f"the key index of the first query (q={q}, n={n})"
            raise ValueError(sentence(self._at("offset"), expected, None, advice))
        if window is not None and window < 1:
            raise ValueError(sentence(self._at("window"), "a positive number of keys", window, "1 is the key itself."))
        window = None if window is None else min(window, FAR)
        return Band(bool(causal), window, max(-FAR, min(offset or 0, FAR)), max(1, q))

    def _heads_per_group(self) -> int:
        """How many heads of eta share one head of atoms; 1 where the axes agree or broadcast."""
        if self.eta.ndim < 3 or self.atoms.ndim < 3:
            return 1
        query_heads, key_heads = self.eta.shape[-3], self.atoms.shape[-3]
        grouped = key_heads > 1 and query_heads != key_heads and query_heads > 1
        if grouped and query_heads % key_heads:
            advice = "Give every group one key head."
            expected = f"a number of heads that divides {self._name('eta')}'s {query_heads}"
            raise ValueError(sentence(self._at("atoms"), expected, key_heads, advice))
        return query_heads // key_heads if grouped else 1

    def _lead(self) -> torch.Size:
        """The batch axes of the answer."""
        shapes = [self.eta.shape[:-2], self._wide(self.atoms.shape[:-2])]
        if self.values is not None:
            shapes.append(self._wide(self.values.shape[:-2]))
        if self.mask is not None:
            shapes.append(self.mask.shape[:-2])
        lead, w = broadcast(self.caller, *shapes), self.log_weights
        if w is None:
            return lead
        own = w.shape[:-2] if self.per_pair else self._wide(w.shape[:-1])
        # weights of a measure may be a batch of priors over the same atoms; a bias of attention belongs to its scores,
        # and one per pair that lacks a batch axis would be read as one per key of a larger batch
        if self.caller == "attend" and not _fits(own, lead):
            raise self._misshapen_log_weights(w)
        return broadcast(self._at("log_weights"), lead, own)

    def _misshapen_log_weights(self, w: Tensor) -> ValueError:
        batch = self.eta.shape[:-2] if self.eta.ndim >= self.atoms.ndim else self._wide(self.atoms.shape[:-2])
        lead, q, n = "".join(f"{size}, " for size in batch), self.eta.shape[-2], self.atoms.shape[-2]
        expected = f"({lead}n={n}) for each row of {self._name('atoms')} or ({lead}q={q}, n={n}) for each pair"
        missing = len(batch) + 2 - w.ndim
        if missing > 0 and w.ndim > 1 and w.shape[-2] in (1, q) and w.shape[-1] == n and _fits(w.shape[:-2], batch):
            name = self._name("log_weights")
            advice = f"One for each pair has every batch axis, size 1 allowed: {name}[{', '.join(['None'] * missing)}]."
        else:
            advice = "Batch axes may have size 1."
        return ValueError(sentence(self._at("log_weights"), expected, shape(w), advice))

    def _wide(self, lead: torch.Size) -> torch.Size:
        """Batch axes of the key side in terms of query heads."""
        if self.ratio > 1 and lead and lead[-1] > 1:
            return torch.Size([*lead[:-1], lead[-1] * self.ratio])
        return lead

    @property
    def per_pair(self) -> bool:
        """Rank decides, as for `Empirical`; a table of the rank of eta is per pair too where atoms have fewer axes."""
        w = self.log_weights
        return w is not None and (
            w.ndim == self.atoms.ndim or (w.ndim == self.eta.ndim and w.ndim > self.atoms.ndim - 1)
        )

    # ------------------------------------------------------------------ shapes

    @property
    def _foldable(self) -> bool:
        """Whether heads that share keys can stand one after another in the query axis, as rows that are all alike."""
        return self.mask is None and not self.per_pair and self.band.trivial

    def flatten(self) -> tuple[Inputs, Band]:
        """Groups of queries over one set of atoms: eta (g, q, d), atoms (g, n, d), and the band."""
        keys = self._key_lead() if self._foldable else self.lead
        self.axes = _split(self.lead, keys)
        self.selecting, self.sharing = self._order(keys)
        values = None if self.values is None else self._keys(accumulate(self.values), keys)
        w = None if self.log_weights is None else accumulate(self.log_weights)
        atom_w = None if w is None or self.per_pair else self._keys(w[..., None], keys)[..., 0]
        pair_w = (
            self._pairs(w.expand(*w.shape[:-2], self.eta.shape[-2], -1)) if w is not None and self.per_pair else None
        )
        inputs = Inputs(
            self.rows(self.eta), self._keys(accumulate(self.atoms), keys), values, atom_w, pair_w, self._mask()
        )
        return inputs, self.band

    def rows(self, tensor: Tensor) -> Tensor:
        """(*batch, q, ·) → (g, q, ·); heads that share keys stand one after another."""
        tensor = accumulate(tensor).expand(*self.lead, -1, -1)
        split = tensor.reshape(*self.axes, *tensor.shape[-2:])
        ordered = split.permute(*self.selecting, *self.sharing, split.ndim - 2, split.ndim - 1)
        groups, heads = (_count([split.shape[i] for i in axes]) for axes in (self.selecting, self.sharing))
        return ordered.reshape(groups, heads * tensor.shape[-2], tensor.shape[-1])

    def _key_lead(self) -> torch.Size:
        """Batch axes over which the key side really varies, 1 elsewhere, in terms of query heads."""
        shapes = [self.atoms.shape[:-2]]
        if self.values is not None:
            shapes.append(self.values.shape[:-2])
        if self.log_weights is not None:
            shapes.append(self.log_weights.shape[:-1])
        lead = broadcast("moments", *shapes)
        return torch.Size([1] * (len(self.lead) - len(lead)) + list(lead))

    def _keys(self, tensor: Tensor, keys: torch.Size) -> Tensor:
        """(*batch, n, ·) → (g, n, ·)"""
        if not self._foldable and self.ratio > 1 and tensor.ndim > 2 and tensor.shape[-3] > 1:
            tensor = tensor.repeat_interleave(self.ratio, dim=-3)
        return tensor.expand(*keys, *tensor.shape[-2:]).reshape(_count(keys), *tensor.shape[-2:])

    def _mask(self) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask.expand(*self.mask.shape[:-1], self.atoms.shape[-2])
        return self._pairs(mask[None] if mask.ndim == 1 else mask)

    def _pairs(self, table: Tensor) -> Tensor:
        """(*batch, q, n) → (g, q, n), or (1, q, n) where all groups share it."""
        if _count(table.shape[:-2]) == 1:
            return table.reshape(1, *table.shape[-2:])
        return table.expand(*self.lead, *table.shape[-2:]).reshape(_count(self.lead), *table.shape[-2:])

    def _order(self, keys: torch.Size) -> tuple[list[int], list[int]]:
        """Axes of the split lead that select atoms, and axes that share them."""
        selecting, sharing = [], []
        for i, pair in enumerate(zip(self.lead, keys, strict=True)):
            outer = selecting if pair[1] != 1 or pair[0] == 1 else sharing
            outer.append(2 * i)
            (sharing if pair[1] != pair[0] else selecting).append(2 * i + 1)
        return selecting, sharing

    def unflatten(self, tensor: Tensor) -> Tensor:
        """(g, q, ·) → (*batch, q, ·), and without q for a single query."""
        split = [self.axes[i] for i in (*self.selecting, *self.sharing)]
        tail = tensor.shape[2:]
        wide = tensor.reshape(*split, self.eta.shape[-2], *tail)
        order = [*self.selecting, *self.sharing]
        back = sorted(range(len(order)), key=order.__getitem__)
        wide = wide.permute(*back, *range(len(split), wide.ndim))
        out = wide.reshape(*self.lead, self.eta.shape[-2], *tail)
        return out.select(len(self.lead), 0) if self.single else out


def _fits(own: torch.Size, lead: torch.Size) -> bool:
    """Whether axes broadcast to a shape without enlarging it."""
    return len(own) <= len(lead) and all(a in (1, b) for a, b in zip(reversed(own), reversed(lead), strict=False))


def _split(lead: torch.Size, keys: torch.Size) -> list[int]:
    """Every batch axis as (groups of keys, heads that share one)."""
    return [
        size for whole, own in zip(lead, keys, strict=True) for size in ((own, whole // own) if own else (whole, 1))
    ]


def _count(sizes) -> int:
    return torch.Size(sizes).numel()
