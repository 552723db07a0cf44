"""Where the mass of attention lies: `attention_profile`, the moments of every query with masses of sets of keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from cumulant.checks import broadcast, require_device, require_log_weights, sentence, shape
from cumulant.kernels.autocast import autocast, without_autocast
from cumulant.kernels.dense import accumulate
from cumulant.kernels.moments import Moments
from cumulant.kernels.native import masses
from cumulant.kernels.native.arguments import MAX_BINS
from cumulant.kernels.native.call import entries, recorded
from cumulant.kernels.native.direct import Arguments, MomentsSettings, Shapes
from cumulant.kernels.native.masses import Masses
from cumulant.kernels.operator import as_record, scaled_moments, statistics_of
from cumulant.kernels.pullback import TRACES
from cumulant.kernels.request import Request
from cumulant.kernels.triton import library as triton_library
from cumulant.kernels.triton.direct import with_max_logit
from cumulant.typing import PerQuery

SCORES = 1 << 20  # that the reference holds at once


@dataclass(frozen=True, eq=False)
class AttentionProfile:
    """What `attention_profile` found of every query.

    moments      `Moments` with the statistics that were asked for
    max_logit    (*batch, q)        max_j (⟨η,x_j⟩ + w_j) over visible keys, −inf without any; per head its ``amax(-1)``
    bin_mass     (*batch, q, bins)  Σ p_j over keys whose distance falls into a bin; None without ``distance_edges``
    marked_mass  (*batch, q)        Σ p_j over marked keys; None without ``marked``
    """

    moments: Moments
    max_logit: PerQuery
    bin_mass: Tensor | None = None
    marked_mass: PerQuery | None = None


def attention_profile(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None = None,
    *,
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    offset: int | None = None,
    scale: float = 1.0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    distance_edges: Sequence[int] | None = None,
    marked: Tensor | None = None,
    statistics: Collection[str] = ("mean", "entropy"),
) -> AttentionProfile:
    """Moments of p_ij ∝ exp(scale · ⟨η_i,x_j⟩ + w_ij), and how much mass lies at what distance, in one sweep.

        bin_mass_ib = Σ_j p_ij [e_b ≤ |offset + i − j| < e_{b+1}],    marked_mass_i = Σ_{j marked} p_ij,
        max_logit_i = max_j (scale · ⟨η_i,x_j⟩ + w_ij)

    eta … offset     as in `moments`, with a query axis
    scale            factor of eta
    starts, lengths  integers, (*batch) with the heads of the key side: the keys of a head are the rows starts, …,
                     starts + lengths − 1 of atoms, values, log_weights (*batch, n) and marked, and only these are read.
                     Key j is row starts + j: order, window, distance, mask and log_weights (*batch, q, n) count j.
                     Heads of different lengths may so lie one after another in atoms (n, d). None: 0, and the rest
    distance_edges   ascending, at most 16: e_0 ≤ e_1 ≤ …; the last bin is open, what is nearer than e_0 is in none
    marked           (*batch, n) Boolean, heads as those of atoms
    statistics       as in `moments`

    Forward only: no gradients. Rows without keys have masses 0; rows to which a NaN or an infinity is visible have NaN
    where `moments` has. Ragged heads cost what they read; so do blocks of keys that a mask (*batch, 1, n) or weights
    hide altogether.

    >>> import torch
    >>> x = torch.zeros(4, 2)
    >>> found = attention_profile(x, x, causal=True, distance_edges=(0, 1, 2), marked=torch.tensor([1, 0, 0, 0]).bool())
    >>> found.bin_mass[3], found.marked_mass[3], found.moments.entropy[3]
    (tensor([0.2500, 0.2500, 0.5000]), tensor(0.2500), tensor(1.3863))
    """
    eta, atoms = autocast(eta, atoms)
    values, log_weights = autocast(values, log_weights)
    x = Arguments(eta, atoms, values, log_weights, mask, None)
    _require_no_gradient(x)
    ragged = starts is not None or lengths is not None
    settings = MomentsSettings(
        statistics_of(statistics, values is not None), float(scale), bool(causal), window, offset
    )
    request = Request(eta, atoms, values, log_weights, mask, causal, window, offset)
    if log_weights is not None:
        require_log_weights("attention_profile.log_weights", log_weights)
    if request.single:
        advice = "Use eta[None] for one query."
        raise ValueError(sentence("attention_profile.eta", "shape (*batch, q, d)", shape(eta), advice))
    if offset is None and (causal or window is not None or distance_edges is not None):
        queries, keys = eta.shape[-2], atoms.shape[-2]
        if ragged or queries != keys:
            expected = f"the key index of the first query (q={queries}, n={keys}{', ragged' if ragged else ''})"
            raise ValueError(sentence("attention_profile.offset", expected, None, "Pass offset=0 for the first token."))
    wanted = _masses(x, distance_edges, marked, starts, lengths)
    shapes = _shapes(request, wanted)
    with torch.no_grad(), without_autocast(eta):
        return _by_kernel(x, settings, shapes, wanted) or _by_rows(x, settings, shapes, wanted)


# ---------------------------------------------------------------------- checks


def _require_no_gradient(x: Arguments) -> None:
    for name, tensor in zip(Arguments._fields, x, strict=True):
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            where, expected = f"attention_profile.{name}", "a tensor that requires no gradient"
            advice = "It has none: call it under torch.no_grad(), and `moments` for what is differentiated."
            raise ValueError(sentence(where, expected, "one that does", advice))


def _masses(x: Arguments, edges, marked, starts, lengths) -> Masses:
    n = x.atoms.shape[-2]
    if edges is not None:
        edges = tuple(int(edge) for edge in edges)
        ascending = all(a <= b for a, b in pairwise(edges))
        if not 1 <= len(edges) <= MAX_BINS or edges[0] < 0 or not ascending:
            expected, advice = f"1 to {MAX_BINS} ascending distances from 0 on", "(0, 1, 8) has three bins."
            raise ValueError(sentence("attention_profile.distance_edges", expected, edges, advice))
    if marked is not None:
        if not isinstance(marked, Tensor) or marked.dtype != torch.bool:
            got = marked.dtype if isinstance(marked, Tensor) else type(marked).__name__
            raise TypeError(sentence("attention_profile.marked", "a Boolean tensor", got, "True for keys of the set."))
        if marked.ndim < 1 or marked.shape[-1] != n:
            expected = f"shape (*batch, n={n})"
            raise ValueError(sentence("attention_profile.marked", expected, shape(marked), "One flag per key."))
        require_device("attention_profile.marked", marked, "atoms", x.atoms)
    if starts is None and lengths is None:
        return Masses(edges, marked, None, None)
    for name, given in (("starts", starts), ("lengths", lengths)):
        if given is not None and (not isinstance(given, Tensor) or given.dtype.is_floating_point or given.is_complex()):
            got = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(sentence(f"attention_profile.{name}", "a tensor of integers", got, "One per key head."))
    first = torch.zeros((), dtype=torch.int64) if starts is None else starts.to("cpu", torch.int64)
    count = n - first if lengths is None else lengths.to("cpu", torch.int64)
    first, count = torch.broadcast_tensors(first, count)
    if first.numel() and (int(first.min()) < 0 or int(count.min()) < 0 or int((first + count).max()) > n):
        got = f"from {int(first.min())} to {int((first + count).max())}, lengths from {int(count.min())}"
        advice = "starts + lengths may not pass the last row of atoms."
        raise ValueError(sentence("attention_profile.lengths", f"ranges of rows within 0 … {n}", got, advice))
    return Masses(edges, marked, first, count)


def _shapes(request: Request, wanted: Masses) -> Shapes:
    """Batch axes of the answer and queries per key head; where ragged heads share one storage they decide it."""
    of_keys = [(name, t) for name, t in (("marked", wanted.marked), ("starts", wanted.starts)) if t is not None]
    tails = {"marked": 1, "starts": 0}
    leads = [(name, t.shape[: t.ndim - tails[name]]) for name, t in of_keys]
    ratio, lead = request.ratio, request.lead
    query_heads = lead[-1] if lead else 1
    key_heads = max([query_heads // ratio if ratio > 1 else 1, *(own[-1] for _, own in leads if own)])
    shared_storage = request.atoms.ndim < 3 or request.atoms.shape[-3] == 1
    if ratio == 1 and shared_storage and 1 < key_heads < query_heads and query_heads % key_heads == 0:
        ratio = query_heads // key_heads
    for name, own in leads:
        wide = torch.Size([*own[:-1], own[-1] * ratio]) if ratio > 1 and own and own[-1] > 1 else own
        lead = broadcast(f"attention_profile.{name}", wide, lead)
    band = request.band
    return Shapes(tuple(lead), ratio, request.per_pair, band.window, band.offset)


# ---------------------------------------------------------------------- by the native kernel


def _by_kernel(x: Arguments, settings: MomentsSettings, shapes: Shapes, wanted: Masses) -> AttentionProfile | None:
    if recorded():
        return None
    if all(part is None for part in wanted) and not triton_library.refusal(x.eta.device.type, x.eta.device.index):
        fields = with_max_logit(x, settings, shapes)
        if fields is not None:
            top = fields.pop("max_logit")
            return AttentionProfile(as_record(x, fields, nonempty=False), top, None, None)
    if entries() is None:
        return None
    traces = settings.wanted & frozenset(TRACES)
    apart = traces and (settings.window is not None or shapes.per_pair or x.mask is not None)
    if apart:  # `moments` may have to find centres for them first; all else in one sweep
        settings = settings._replace(wanted=settings.wanted - traces | ({"mean"} if x.values is not None else set()))
    elif x.values is not None:
        settings = settings._replace(wanted=settings.wanted | {"mean"})  # values are looked at, for what is not finite
    fields = masses.serve(x, settings, shapes, wanted)
    if fields is None:
        return None
    more = [fields.pop(name, None) for name in ("max_logit", "bin_mass", "marked_mass")]
    record = as_record(x, fields, nonempty=False)
    if apart:
        rest = _moments(x, settings._replace(wanted=traces), shapes, wanted)
        record = Moments(record.log_normalizer, rest.statistics | record.statistics)
    assert more[0] is not None
    return AttentionProfile(record, more[0], more[1], more[2])


# ---------------------------------------------------------------------- by torch, a few rows at a time


def _by_rows(
    x: Arguments, settings: MomentsSettings, shapes: Shapes, wanted: Masses, backend="auto"
) -> AttentionProfile:
    """The same by definition: p of a few rows at a time."""
    record = _moments(x, settings, shapes, wanted, backend)
    g = record.log_normalizer
    found = {"max_logit": torch.empty_like(g)}
    if wanted.edges is not None:
        found["bin_mass"] = g.new_empty(*g.shape, len(wanted.edges))
    if wanted.marked is not None:
        found["marked_mass"] = torch.empty_like(g)
    for index in product(*(range(size) for size in shapes.lead)):
        part, marked = _head(x, shapes, wanted, index)
        keys = part.atoms.shape[0]
        for rows in torch.arange(g.shape[-1], device=g.device).split(max(1, SCORES // max(1, keys))):
            logits = _logits(part, settings, shapes, rows)
            own = g[index][rows][:, None]
            p = torch.where(logits == -torch.inf, 0, torch.exp(logits - torch.where(own == -torch.inf, 0, own)))
            broken = own[:, 0].isnan()
            top = logits.amax(-1) if keys else own[:, 0]
            sums = {"max_logit": top}
            if wanted.edges is not None:
                sums["bin_mass"] = _by_distance(p, rows + shapes.offset, wanted.edges)
            if marked is not None:
                sums["marked_mass"] = torch.where(marked, p, 0).sum(-1)
            for name, value in sums.items():
                seen = broken if value.ndim == 1 else broken[:, None]
                found[name][index][rows] = torch.where(seen, torch.nan, value)
    return AttentionProfile(record, found["max_logit"], found.get("bin_mass"), found.get("marked_mass"))


def _moments(x: Arguments, settings: MomentsSettings, shapes: Shapes, wanted: Masses, backend: str = "auto") -> Moments:
    """By `moments`; head by head where they are ragged, or where the answer has axes that its arguments have not."""
    record = None
    if wanted.starts is None:
        record = scaled_moments(x, None, settings, backend)
        if record.log_normalizer.shape[:-1] == torch.Size(shapes.lead):
            return record
    indices = list(product(*(range(size) for size in shapes.lead)))
    if not indices:
        record = record or scaled_moments(x, None, settings._replace(offset=shapes.offset), backend)
        empty = {
            name: t.new_empty(*shapes.lead, *t.shape[record.log_normalizer.ndim - 1 :])
            for name, t in record.statistics.items()
        }
        return Moments(record.log_normalizer.new_empty(*shapes.lead, x.eta.shape[-2]), empty)
    settings = settings._replace(offset=shapes.offset)
    heads = [scaled_moments(_head(x, shapes, wanted, i)[0], None, settings, backend) for i in indices]

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).reshape(*shapes.lead, *tensors[0].shape)

    names = heads[0].statistics
    return Moments(
        stacked([head.log_normalizer for head in heads]),
        {name: stacked([head.statistics[name] for head in heads]) for name in names},
    )


def _head(x: Arguments, shapes: Shapes, wanted: Masses, index: tuple[int, ...]) -> tuple[Arguments, Tensor | None]:
    """The arguments of one head, without batch axes, and which of its keys are marked."""

    def pick(tensor: Tensor | None, tail: int, of_keys: bool) -> Tensor | None:
        if tensor is None:
            return None
        axes = tensor.ndim - tail
        own = list(index[len(index) - axes :]) if axes > 0 else []
        if own and of_keys:
            own[-1] //= shapes.ratio
        return tensor[tuple(min(i, size - 1) for i, size in zip(own, tensor.shape, strict=False))]

    start, end = 0, x.atoms.shape[-2]
    if wanted.starts is not None and wanted.lengths is not None:
        start = int(pick(wanted.starts, 0, True))  # pyright: ignore[reportArgumentType]
        end = start + int(pick(wanted.lengths, 0, True))  # pyright: ignore[reportArgumentType]
    rows = slice(start, end)
    eta, atoms, values = pick(x.eta, 2, False), pick(x.atoms, 2, True), pick(x.values, 2, True)
    assert eta is not None
    assert atoms is not None
    w = pick(x.log_weights, 2, False) if shapes.per_pair else pick(x.log_weights, 1, True)
    if w is not None:
        w = w[:, : end - start] if shapes.per_pair else w[rows]
    mask = pick(x.mask, min(2, x.mask.ndim), False) if x.mask is not None else None
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., : end - start]
    marked = pick(wanted.marked, 1, True)
    part = Arguments(eta, atoms[rows], None if values is None else values[rows], w, mask, None)
    return part, None if marked is None else marked[rows]


def _logits(x: Arguments, settings: MomentsSettings, shapes: Shapes, rows: Tensor) -> Tensor:
    """(rows, n) scale · ⟨η,x⟩ + w, −inf where a key is hidden."""
    logits = accumulate(x.eta)[rows] * settings.scale @ accumulate(x.atoms).mT
    if x.log_weights is not None:
        w = accumulate(x.log_weights)
        logits = torch.where(w == -torch.inf, -torch.inf, logits + w) if w.ndim == 1 else logits + _of(w, rows)
        if w.ndim > 1:
            logits = torch.where(_of(w, rows) == -torch.inf, -torch.inf, logits)
    gap = (rows + shapes.offset)[:, None] - torch.arange(x.atoms.shape[0], device=rows.device)
    if settings.causal:
        logits = torch.where(gap >= 0, logits, -torch.inf)
    if shapes.window is not None:
        logits = torch.where(gap.abs() < shapes.window, logits, -torch.inf)
    if x.mask is not None:
        logits = torch.where(x.mask if x.mask.ndim == 1 else _of(x.mask, rows), logits, -torch.inf)
    return logits


def _of(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows] if table.shape[0] > 1 else table


def _by_distance(p: Tensor, positions: Tensor, edges: tuple[int, ...]) -> Tensor:
    """(rows, bins) sums of p (rows, n) over keys by their distance."""
    distance = (positions[:, None] - torch.arange(p.shape[1], device=p.device)).abs()
    ends = (*edges[1:], None)
    inside = [
        (distance >= a) if b is None else (distance >= a) & (distance < b) for a, b in zip(edges, ends, strict=True)
    ]
    return torch.stack([torch.where(bin_, p, 0).sum(-1) for bin_ in inside], -1)
