"""`moments`: one operation for attention, retrieval, contrast and regression, whatever kernel serves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.kernels import fused
from cumulant.kernels.autocast import autocast, without_autocast
from cumulant.kernels.compiled import compiled_stream
from cumulant.kernels.dense import accumulate
from cumulant.kernels.fisher import FisherProduct, reference_product
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.moments import ATOMS_AS_VALUES, STATISTICS, Moments, mixing_weights
from cumulant.kernels.recompute import reference
from cumulant.kernels.stream_function import stream
from cumulant.kernels.support import Band

BACKENDS = ("auto", "dense", "fused", "streaming")
DERIVED = {"entropy": ("mean_score", "mean_log_weight"), "effective_atoms": ("log_sum_square",)}
SMALL = 1 << 15  # scores up to which the reference is the fastest kernel, and its matrix no larger than a block


def moments(
    eta: Tensor,
    atoms: Tensor,
    values: Tensor | None = None,
    *,
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    sink: float | Tensor | None = None,
    offset: int | None = None,
    backend: str = "auto",
    statistics: Collection[str] = ("mean", "entropy"),
) -> Moments:
    """Statistics of p_ij ∝ exp(⟨η_i,x_j⟩ + w_ij) for every query, exactly, without the matrix p.

        G_i = log Σ_j exp(⟨η_i,x_j⟩ + w_ij),      mean_i = Σ_j p_ij v_j,      …      (see `Moments`)

    eta          (*batch, q, d) natural parameters (queries times their scale), or (d,) for one
    atoms        (*batch, n, d); with fewer heads than eta on the last batch axis they are shared by groups of heads
    values       (*batch, n, e); the atoms themselves if None
    log_weights  (*batch, n) per atom or (*batch, q, n) per pair; −inf removes an atom
    mask         Boolean, broadcastable to (*batch, q, n); True = attend
    causal       key j is visible to query i iff j ≤ offset + i; ``offset`` is required where q ≠ n (cached tokens)
    window       only the last ``window`` visible keys (causal), or |offset + i − j| < window
    sink         log weight of one more atom at 0 with value 0, a number or (*batch): it counts in G, entropy and
                 effective_atoms
    backend      "dense" (reference), "streaming" (blocks, every statistic), "fused" (torch's attention kernel), "auto"
    statistics   names of `Moments` fields, "entropy", "effective_atoms"; G always comes. "all" is every field.

    A row without atoms has G = −inf, zero statistics and zero gradient. An atom that a query does not see is absent for
    it, whatever it holds; a query that sees a NaN or an infinity among atoms of which some are hidden from some query
    has NaN for every statistic. Half precision is accumulated and returned in float32; under torch.autocast arguments
    are rounded as for a matrix product. Differentiable twice in eta, atoms, values and log_weights, through every
    statistic.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> m = moments(q / 4, k, v, causal=True, statistics=("mean", "entropy"))
    >>> torch.allclose(m.mean, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    >>> bool(m.entropy[0, 0, 0].abs() < 1e-12)          # the first token sees only itself
    True
    """
    eta, atoms = autocast(eta, atoms)
    values, log_weights = autocast(values, log_weights)
    request = _Request(eta, atoms, values, log_weights, mask, causal, window, offset)
    wanted = _wanted(statistics, values is not None)
    with without_autocast(eta):
        x, band = request.flatten()
        plan = Plan(_closure(wanted, x), band)
        out = _compute(x, plan, _choose(backend, x, plan))
        record = _record(request, x, out)
        return record if sink is None else add_sink(record, sink, request.single)


def fisher_product(
    eta: Tensor,
    atoms: Tensor,
    vector: Tensor,
    *,
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    offset: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """∇²G(η) v = Cov_p(x) v for every query, in linear memory; arguments as in `moments`, vector of the shape of eta.

    Differentiable once ("dense": any number of times).

    >>> import torch
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> fisher_product(torch.zeros(1, 1), x, torch.ones(1, 1))
    tensor([[0.2500]])
    """
    eta, atoms, vector = autocast(eta, atoms, vector)
    log_weights = autocast(log_weights)[0]
    if backend not in ("auto", "dense", "streaming"):
        got = repr(backend)
        raise ValueError(sentence("fisher_product.backend", "one of auto, dense, streaming", got, "Pick one."))
    request = _Request(eta, atoms, None, log_weights, mask, causal, window, offset)
    x, band = request.flatten()
    plan = Plan(frozenset({"log_normalizer"}), band)
    require_alike("fisher_product.vector", require_float("fisher_product.vector", vector), "eta", eta)
    if vector.ndim == 0 or vector.shape[-1] != eta.shape[-1] or vector.shape[-2:-1] not in ((1,), eta.shape[-2:-1]):
        expected = f"the shape of eta {shape(eta)}"
        raise ValueError(sentence("fisher_product.vector", expected, shape(vector), "One direction per query."))
    v = request.rows(vector[None] if vector.ndim == 1 else vector)
    with without_autocast(eta):
        if backend == "dense" or (backend == "auto" and _scores(x) <= SMALL):
            out = reference_product(x, v, plan)
        else:
            out = FisherProduct.apply(x.eta, x.atoms, x.per_atom, x.per_pair, x.mask, v, plan)
    return request.unflatten(out)


def _scores(x: Inputs) -> int:
    return x.eta.shape[0] * x.eta.shape[1] * x.atoms.shape[1]


def _wanted(statistics: Collection[str], own_values: bool) -> frozenset[str]:
    if isinstance(statistics, str):
        statistics = STATISTICS if statistics == "all" else (statistics,)
    names: set[str] = set()
    for name in statistics:
        if name not in STATISTICS and name not in DERIVED and name != "atom_mean":
            known = ", ".join((*STATISTICS, *DERIVED))
            raise ValueError(
                sentence("moments.statistics", f'names among {known}, or "all"', repr(name), "Pick from them.")
            )
        names |= set(DERIVED.get(name, (name,)))
    if not own_values:  # the values are the atoms
        names = {ATOMS_AS_VALUES.get(n, n) for n in names}
    return frozenset(names)


def _closure(wanted: frozenset[str], x: Inputs) -> frozenset[str]:
    """What the kernels must form to give these, and to let them be merged."""
    names = set(wanted) | {"log_normalizer"}
    if "value_trace" in names:
        names.add("mean")
    if "atom_trace" in names:
        names.add("atom_mean")
    if "score_variance" in names:
        names.add("mean_score")
    if x.per_atom is None and x.per_pair is None:
        names.discard("mean_log_weight")
    return frozenset(names)


def _choose(backend: str, x: Inputs, plan: Plan) -> str:
    if backend not in BACKENDS:
        raise ValueError(sentence("moments.backend", f"one of {', '.join(BACKENDS)}", repr(backend), "Pick one."))
    why = fused.refusal(x, _without_score(plan))
    if backend == "fused" and why is not None:
        raise ValueError(
            sentence("moments.backend", "a request that 'fused' can serve", why, "Use 'streaming' or 'auto'.")
        )
    if backend != "auto":
        return backend
    if _scores(x) <= SMALL:
        return "dense"
    return "streaming" if why is not None else "fused"


def _without_score(plan: Plan) -> Plan:
    """mean_score is ⟨η, mean of the atoms⟩: the fused kernel serves it through that mean."""
    if "mean_score" not in plan.statistics or "score_variance" in plan.statistics:
        return plan
    return replace(plan, statistics=plan.statistics - {"mean_score"} | {"atom_mean"})


def _compute(x: Inputs, plan: Plan, backend: str) -> dict[str, Tensor]:
    if backend == "dense":
        return dict(zip(plan.outputs, reference(x, plan), strict=True))
    run = compiled_stream if torch.compiler.is_compiling() else stream
    if backend == "streaming":
        return run(x, plan)
    out = run(x, replace(_without_score(plan), fused=True))
    if "mean_score" in plan.statistics:
        out["mean_score"] = (x.eta * out["atom_mean"]).sum(-1)
    return {name: out[name] for name in plan.outputs}


def _record(request: _Request, x: Inputs, out: dict[str, Tensor]) -> Moments:
    found = {name: request.unflatten(tensor) for name, tensor in out.items()}
    g = found.pop("log_normalizer")
    if x.values is None:
        found |= {name: found[of_atoms] for name, of_atoms in ATOMS_AS_VALUES.items() if of_atoms in found}
    if x.per_atom is None and x.per_pair is None:
        found["mean_log_weight"] = torch.zeros_like(g)
    return Moments(g, found)


def add_sink(record: Moments, sink: float | Tensor, single: bool = False) -> Moments:
    """One more atom at 0 with value 0, by the merge that joins any two sets of atoms; ``single``: no query axis."""
    g = record.log_normalizer
    s = torch.as_tensor(sink, dtype=g.dtype, device=g.device)
    if not holds(s < torch.inf):  # also false for NaN
        advice = "It is the logarithm of a finite mass; -inf is no sink."
        raise ValueError(sentence("moments.sink", "values below +inf", "NaN or +inf", advice))
    if s.ndim:
        lead = g.shape if single else g.shape[:-1]
        if broadcast("moments.sink", s.shape, lead) != lead:
            expected = f"a number or one per batch entry {tuple(lead)}"
            raise ValueError(sentence("moments.sink", expected, shape(s), "Heads are a batch axis: one sink per head."))
        s = s if single else s[..., None]
    s = s.expand(g.shape)
    alone = {
        "mean_log_weight": torch.where(s == -torch.inf, 0, s),
        "log_sum_square": 2 * s,
        "max_score": torch.zeros_like(g) - torch.inf,
    }
    statistics = {name: alone.get(name, torch.zeros_like(value)) for name, value in record.statistics.items()}
    return replace(record.merge(Moments(s, statistics)), sink_mass=mixing_weights(g, s)[2])


class _Request:
    """The arguments of `moments`, checked, and the way between their shapes and the kernels' (g, q, ·)."""

    def __init__(self, eta, atoms, values, log_weights, mask, causal, window, offset):
        self.eta, self.atoms = require_float("moments.eta", eta), require_float("moments.atoms", atoms)
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

    def _check(self) -> None:
        eta, atoms, d = self.eta, self.atoms, self.eta.shape[-1]
        if atoms.ndim < 2 or atoms.shape[-1] != d:
            expected = f"shape (*batch, n, d={d}) as eta {shape(eta)}"
            raise ValueError(sentence("moments.atoms", expected, shape(atoms), "Check the last axis."))
        require_alike("moments.atoms", atoms, "eta", eta)
        n = atoms.shape[-2]
        if self.values is not None:
            v = require_float("moments.values", self.values)
            require_alike("moments.values", v, "atoms", atoms)
            if v.ndim < 2 or v.shape[-2] != n:
                raise ValueError(
                    sentence("moments.values", f"shape (*batch, n={n}, e)", shape(v), "One value per atom.")
                )
        if self.log_weights is not None:
            w = require_float("moments.log_weights", self.log_weights)
            require_alike("moments.log_weights", w, "atoms", atoms)
            if w.ndim not in (atoms.ndim - 1, atoms.ndim, eta.ndim) or w.shape[-1] != n:
                expected = f"(*batch, n={n}) or (*batch, q={eta.shape[-2]}, n={n})"
                raise ValueError(sentence("moments.log_weights", expected, shape(w), "Match atoms or pairs."))
            if not holds(w < torch.inf):
                advice = "Weights are logarithms of finite masses; log 0 = -inf is legal."
                raise ValueError(sentence("moments.log_weights", "values below +inf", "NaN or +inf", advice))
        if self.mask is not None:
            m = self.mask
            if not isinstance(m, Tensor) or m.dtype != torch.bool:
                got = m.dtype if isinstance(m, Tensor) else type(m).__name__
                advice = "Pass True where a query may attend; additive biases go into log_weights."
                raise TypeError(sentence("moments.mask", "a Boolean tensor", got, advice))
            if m.ndim < 1 or m.shape[-1] not in (1, n) or (m.ndim > 1 and m.shape[-2] not in (1, eta.shape[-2])):
                expected = f"broadcastable to (*batch, q={eta.shape[-2]}, n={n})"
                raise ValueError(sentence("moments.mask", expected, shape(m), "Match the last two axes."))

    def _band(self, causal: bool, window: int | None, offset: int | None) -> Band:
        q, n = self.eta.shape[-2], self.atoms.shape[-2]
        if (causal or window is not None) and offset is None and q != n:
            advice = "Pass offset=0 for the first token, or the number of cached keys (n - q for a full cache)."
            raise ValueError(
                sentence("moments.offset", f"the key index of the first query (q={q}, n={n})", None, advice)
            )
        if window is not None and window < 1:
            raise ValueError(sentence("moments.window", "a positive number of keys", window, "1 sees one key."))
        return Band(bool(causal), window, offset or 0, max(1, q))

    def _heads_per_group(self) -> int:
        """How many heads of eta share one head of atoms; 1 where the axes agree or broadcast."""
        if self.eta.ndim < 3 or self.atoms.ndim < 3:
            return 1
        mine, theirs = self.eta.shape[-3], self.atoms.shape[-3]
        grouped = theirs > 1 and mine != theirs and mine > 1
        if grouped and mine % theirs:
            expected = f"a number of heads that divides eta's {mine}"
            raise ValueError(sentence("moments.atoms", expected, theirs, "Give every group of queries one key head."))
        return mine // theirs if grouped else 1

    def _lead(self) -> torch.Size:
        """The batch axes of the answer."""
        shapes = [self.eta.shape[:-2], self._wide(self.atoms.shape[:-2])]
        if self.values is not None:
            shapes.append(self._wide(self.values.shape[:-2]))
        if self.log_weights is not None:
            w = self.log_weights
            shapes.append(w.shape[:-2] if self._per_pair else self._wide(w.shape[:-1]))
        if self.mask is not None:
            shapes.append(self.mask.shape[:-2])
        return broadcast("moments", *shapes)

    def _wide(self, lead: torch.Size) -> torch.Size:
        """Batch axes of the key side in terms of query heads."""
        if self.ratio > 1 and lead and lead[-1] > 1:
            return torch.Size([*lead[:-1], lead[-1] * self.ratio])
        return lead

    @property
    def _per_pair(self) -> bool:
        """Rank decides, as for `Empirical`; a table of the rank of eta is per pair too where atoms have fewer axes."""
        w = self.log_weights
        return w is not None and (
            w.ndim == self.atoms.ndim or (w.ndim == self.eta.ndim and w.ndim > self.atoms.ndim - 1)
        )

    # ------------------------------------------------------------------ shapes

    @property
    def _foldable(self) -> bool:
        """Whether heads that share keys can stand one after another in the query axis, as rows that are all alike."""
        return self.mask is None and not self._per_pair and self.band.trivial

    def flatten(self) -> tuple[Inputs, Band]:
        """Groups of queries over one set of atoms: eta (g, q, d), atoms (g, n, d), and the band."""
        keys = self._key_lead() if self._foldable else self.lead
        self.axes = _split(self.lead, keys)
        self.kept, self.shared = self._order(keys)
        values = None if self.values is None else self._keys(accumulate(self.values), keys)
        w = None if self.log_weights is None else accumulate(self.log_weights)
        atom_w = None if w is None or self._per_pair else self._keys(w[..., None], keys)[..., 0]
        pair_w = (
            self._pairs(w.expand(*w.shape[:-2], self.eta.shape[-2], -1)) if w is not None and self._per_pair else None
        )
        inputs = Inputs(
            self.rows(self.eta), self._keys(accumulate(self.atoms), keys), values, atom_w, pair_w, self._mask()
        )
        return inputs, self.band

    def rows(self, tensor: Tensor) -> Tensor:
        """(*batch, q, ·) → (g, q, ·); heads that share keys stand one after another."""
        tensor = accumulate(tensor).expand(*self.lead, -1, -1)
        split = tensor.reshape(*self.axes, *tensor.shape[-2:])
        ordered = split.permute(*self.kept, *self.shared, split.ndim - 2, split.ndim - 1)
        groups, heads = (_count([split.shape[i] for i in axes]) for axes in (self.kept, self.shared))
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
        kept, shared = [], []
        for i, pair in enumerate(zip(self.lead, keys, strict=True)):
            outer = kept if pair[1] != 1 or pair[0] == 1 else shared
            outer.append(2 * i)
            (shared if pair[1] != pair[0] else kept).append(2 * i + 1)
        return kept, shared

    def unflatten(self, tensor: Tensor) -> Tensor:
        """(g, q, ·) → (*batch, q, ·), and without q for a single query."""
        split = [self.axes[i] for i in (*self.kept, *self.shared)]
        tail = tensor.shape[2:]
        wide = tensor.reshape(*split, self.eta.shape[-2], *tail)
        order = [*self.kept, *self.shared]
        back = sorted(range(len(order)), key=order.__getitem__)
        wide = wide.permute(*back, *range(len(split), wide.ndim))
        out = wide.reshape(*self.lead, self.eta.shape[-2], *tail)
        return out.select(len(self.lead), 0) if self.single else out


def _split(lead: torch.Size, keys: torch.Size) -> list[int]:
    """Every batch axis as (groups of keys, heads that share one)."""
    return [
        size for whole, own in zip(lead, keys, strict=True) for size in ((own, whole // own) if own else (whole, 1))
    ]


def _count(sizes) -> int:
    return torch.Size(sizes).numel()
