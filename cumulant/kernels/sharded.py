"""Sums of exponentials over atoms that are split over several processes.

If all ranks hold the queries, each sums over its own atoms, and an all-reduce of a few numbers per query makes the
whole (`sharded_sums` has the formula). If queries are sharded too, as tokens of a long sequence are, blocks of atoms go
round a ring and each rank meets all of them.

Parts meet through their G: its rounding, ε |G| / 2, is the relative error of a part's weight. In single precision that
is 5e-7 at |G| = 8.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.kernels.collectives import TIMEOUT, Group, Ranks
from cumulant.kernels.moments import ATOMS_AS_VALUES, Moments
from cumulant.kernels.operator import add_sink, moments
from cumulant.kernels.sharded_sums import Block, Fields, all_reduced, fields_of, record_of, round_the_ring

Span = tuple[int, int]  # first position and length


def sharded_moments(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None = None,
    *,
    group: Group = None,
    queries: str = "replicated",
    layout: str = "contiguous",
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    sink: float | Tensor | None = None,
    offset: int | None = None,
    backend: str = "auto",
    statistics: Collection[str] = ("mean", "entropy"),
    timeout: float = TIMEOUT,
) -> Moments:
    """`moments` over atoms that are split over the ranks of a process group: the same numbers and gradients.

    eta          (*batch, q, d); "replicated": the same on every rank, and so is the answer; "sharded": the rows of this
                 rank, and so is the answer
    atoms        (*batch, n, d) the atoms of this rank; n may differ between ranks and be 0
    values       (*batch, n, e) their values
    group        a ProcessGroup, a DeviceMesh of one axis, or None for all processes
    layout       how positions are dealt out, for ``causal`` and ``window``: "contiguous", rank after rank, or (sharded
                 queries only) "zigzag", stripes r and 2R − 1 − r of 2R on rank r (see `deal`), which gives every rank
                 the same share of a causal triangle
    log_weights  (*batch, n) of the atoms of this rank, or, with replicated queries, (*batch, q, n) of its pairs
    mask         Boolean, broadcastable to (*batch, q, n): the columns of this rank; replicated queries only
    offset       global key index of the first query; sharded queries stand where their keys do, beginning at ``offset``
    timeout      seconds after which a rank that does not answer is named in a TimeoutError

    Other arguments as in `moments`. Gradients: of replicated queries whole on every rank, of what is sharded the shard,
    for a loss that is the sum over ranks of what they compute from their shards ("sharded") or the same on every rank
    ("replicated"). Twice differentiable with replicated queries, once in a ring.

    Sent per rank of R, in numbers: an all-reduce of q (1 + width of the statistics) forwards and of q d backwards, each
    2 (R − 1)/R times; in a ring (R − 1) n (d + e) forwards and (2R − 1) n (d + e) backwards.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun does this for many
    >>> sharded_moments(torch.zeros(1, 1), torch.tensor([[1.0], [3.0]])).mean             # of the keys of all ranks
    tensor([[2.]])
    >>> dist.destroy_process_group()
    """
    single = eta.ndim == 1 and queries == "replicated"
    eta = eta[None] if single else eta
    ranks = Ranks(group, timeout)
    work = _Work(
        *(ranks, eta, atoms, values, log_weights, mask, queries, layout),
        *(causal, window, offset, backend, statistics),
    )
    block = (atoms, values, log_weights)
    if queries == "replicated":
        fields = all_reduced(ranks, work.part, eta, block)
    else:
        fields = round_the_ring(ranks, work.part, eta, block, work.lengths)
    record = work.record(fields)
    record = record if sink is None else add_sink(record, sink)
    return _first_row(record) if single else record


def _first_row(record: Moments) -> Moments:
    rows = {name: t.select(record.log_normalizer.ndim - 1, 0) for name, t in fields_of(record).items()}
    sink = record.sink_mass
    return replace(record_of(rows), sink_mass=None if sink is None else sink.select(sink.ndim - 1, 0))


@dataclass
class _Work:
    """Checked arguments, and the positions of the rows and atoms of every rank."""

    ranks: Ranks
    eta: Tensor
    atoms: Tensor
    values: Tensor | None
    log_weights: Tensor | None
    mask: Tensor | None
    queries: str
    layout: str
    causal: bool
    window: int | None
    offset: int | None
    backend: str
    statistics: Collection[str]

    def __post_init__(self):
        self._check()
        rows = self.eta.shape[-2]
        everyone = self.ranks.agree("sharded_moments", self._signature(), rows, self.atoms.shape[-2])
        self.lengths = [n for _, n in everyone]
        counts = [q for q, _ in everyone]
        if self.layout == "zigzag" and any(q != n or n % 2 or n != counts[0] for q, n in everyone):
            got = ", ".join(f"{q} and {n}" for q, n in everyone)
            advice = "Pad the sequence to a multiple of twice the number of ranks."
            raise ValueError(sentence("sharded_moments.layout", "equal even numbers of queries and keys", got, advice))
        queries, keys = (sum(counts) if self.sharded else rows), sum(self.lengths)
        if self.banded and self.offset is None and queries != keys:
            expected = f"the key index of the first query (q={queries}, n={keys})"
            raise ValueError(sentence("sharded_moments.offset", expected, None, "0 for the first token."))
        first = self.offset or 0
        stretches = spans(counts, self.ranks.rank, self.layout) if self.sharded else [(0, rows)]
        self.rows = [(first + start, n) for start, n in stretches]

    @property
    def sharded(self) -> bool:
        return self.queries == "sharded"

    @property
    def banded(self) -> bool:
        return self.causal or self.window is not None

    def _check(self) -> None:
        where = "sharded_moments"
        if self.queries not in ("replicated", "sharded"):
            raise ValueError(sentence(f"{where}.queries", "replicated or sharded", repr(self.queries), "Pick one."))
        if self.layout not in ("contiguous", "zigzag") or (self.layout == "zigzag" and not self.sharded):
            expected = "contiguous, or zigzag with sharded queries"
            raise ValueError(sentence(f"{where}.layout", expected, repr(self.layout), "Use contiguous."))
        if self.eta.ndim < 2 or self.atoms.ndim < 2:
            got = f"{tuple(self.eta.shape)} and {tuple(self.atoms.shape)}"
            raise ValueError(sentence(where, "eta (*batch, q, d) and atoms (*batch, n, d)", got, "Add the axes."))
        table = self.log_weights is not None and self.log_weights.ndim >= max(self.atoms.ndim, self.eta.ndim)
        if self.sharded and (self.mask is not None or table):
            advice, got = "Give weights per atom, or replicate the queries.", "a table of queries and atoms"
            raise ValueError(sentence(where, "no table of pairs, if queries are sharded", got, advice))

    def _signature(self) -> str:
        """What must be equal on all ranks; the number of atoms need not, nor that of sharded queries."""
        parts = [_named("eta", self.eta, -2 if self.sharded else None), _named("atoms", self.atoms, -2)]
        parts += [] if self.values is None else [_named("values", self.values, -2)]
        parts += [] if self.log_weights is None else [_named("log_weights", self.log_weights, -1)]
        parts += [f"{self.queries} {self.layout} causal={self.causal} window={self.window} offset={self.offset}"]
        parts += [self.statistics if isinstance(self.statistics, str) else " ".join(sorted(self.statistics))]
        tracked = [t is not None and t.requires_grad for t in (self.eta, self.atoms, self.values, self.log_weights)]
        return "; ".join(parts) + f"; gradients {torch.is_grad_enabled() and any(tracked)}"

    def part(self, eta: Tensor, block: Block, owner: int) -> Fields:
        """Statistics of the rows of this rank over the atoms that ``owner`` holds."""
        keys = spans(self.lengths, owner, self.layout)
        done = []
        for r in range(len(self.rows)):
            parts = (self._stretch(eta, block, keys, r, k) for k in range(len(keys)))
            done.append(self._own_fields(functools.reduce(Moments.merge, parts)))
        return {k: torch.cat([d[k] for d in done], -2 if k in ("mean", "atom_mean") else -1) for k in done[0]}

    def _stretch(self, eta: Tensor, block: Block, keys: list[Span], r: int, k: int) -> Moments:
        """Stretch r of the rows over stretch k of the keys."""
        atoms, values, weights = (_cut(t, keys, k, axis) for t, axis in zip(block, (-2, -2, -1), strict=True))
        return moments(
            *(_cut(eta, self.rows, r, -2), atoms, values),  # pyright: ignore[reportArgumentType]
            log_weights=weights,
            mask=self.mask,
            causal=self.causal,
            window=self.window,
            offset=self.rows[r][0] - keys[k][0] if self.banded else None,
            backend=self.backend,
            statistics=self.statistics,
        )

    def _own_fields(self, record: Moments) -> Fields:
        """What goes over the wire: of atoms that are their own values one copy, of weights that are all 1 nothing."""
        known = ATOMS_AS_VALUES if self.values is None else {}
        known = known if self.log_weights is not None else {**known, "mean_log_weight": ""}
        return {name: value for name, value in fields_of(record).items() if name not in known}

    def record(self, fields: Fields) -> Moments:
        if self.values is None:
            fields = fields | {k: fields[a] for k, a in ATOMS_AS_VALUES.items() if a in fields}
        if self.log_weights is None:
            fields = fields | {"mean_log_weight": torch.zeros_like(fields["log_normalizer"])}
        return record_of(fields)


def _named(name: str, tensor: Tensor, free: int | None) -> str:
    sizes = ["*" if free is not None and i == tensor.ndim + free else str(n) for i, n in enumerate(tensor.shape)]
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} ({', '.join(sizes)})"


def _cut(tensor: Tensor | None, stretches: list[Span], index: int, axis: int) -> Tensor | None:
    if tensor is None or len(stretches) == 1:
        return tensor
    start = sum(n for _, n in stretches[:index])
    return tensor.narrow(axis, start, stretches[index][1])


def spans(lengths: Sequence[int], rank: int, layout: str = "contiguous") -> list[Span]:
    """Positions of the rows of a rank in the whole sequence: stretches (first position, length).

    >>> spans([3, 2], 1), spans([4, 4], 1, "zigzag")
    ([(3, 2)], [(2, 2), (4, 2)])
    """
    if layout == "contiguous":
        return [(sum(lengths[:rank]), lengths[rank])]
    half = lengths[rank] // 2
    return [(rank * half, half), ((2 * len(lengths) - 1 - rank) * half, half)]


def deal(tensor: Tensor, group: Group = None, *, dim: int = -2, layout: str = "contiguous") -> Tensor:
    """The part of a tensor, whole on every rank, that belongs to this one.

    tensor  (*batch, n, d), or any with n at ``dim``; the answer has about n/R there

    "contiguous" gives the first ranks one more row if the rows do not divide evenly; "zigzag" needs a multiple of 2R.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun does this for many
    >>> deal(torch.arange(4.0)[:, None]).shape                                            # one rank has everything
    torch.Size([4, 1])
    >>> dist.destroy_process_group()
    """
    ranks = Ranks(group)
    n = tensor.shape[dim]
    if layout == "zigzag":
        if n % (2 * ranks.size):
            expected = f"a multiple of {2 * ranks.size} rows"
            raise ValueError(sentence("deal.tensor", expected, n, "Pad it, or deal contiguously."))
        lengths = [n // ranks.size] * ranks.size
    else:
        lengths = even(n, ranks.size)
    return torch.cat([tensor.narrow(dim, a, k) for a, k in spans(lengths, ranks.rank, layout)], dim)


def even(n: int, parts: int) -> list[int]:
    """n as a sum of parts that differ by at most one.

    >>> even(7, 3)
    [3, 2, 2]
    """
    return [n // parts + (r < n % parts) for r in range(parts)]
