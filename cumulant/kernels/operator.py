"""`moments`: one operation for attention, retrieval, contrast and regression, whatever kernel serves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from cumulant.checks import (
    broadcast,
    from_numpy,
    holds,
    require_alike,
    require_float,
    require_log_weights,
    sentence,
    shape,
)
from cumulant.kernels import fused
from cumulant.kernels.autocast import autocast, without_autocast
from cumulant.kernels.compiled import compiled_stream
from cumulant.kernels.dense import accumulate
from cumulant.kernels.fisher import FisherProduct, reference_product
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.moments import ATOMS_AS_VALUES, STATISTICS, Moments, mixing_weights
from cumulant.kernels.native import flat as native
from cumulant.kernels.native.call import entries
from cumulant.kernels.native.direct import Arguments, DirectPlan, MomentsSettings, Shapes, serve
from cumulant.kernels.native.library import why_not
from cumulant.kernels.recompute import reference
from cumulant.kernels.request import Request
from cumulant.kernels.stream_function import stream
from cumulant.kernels.triton import flat as triton
from cumulant.kernels.triton import library as triton_library
from cumulant.kernels.triton.direct import TritonPlan

BACKENDS = ("auto", "dense", "fused", "native", "streaming", "triton")
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
    backend      "dense" (reference), "streaming" (blocks, every statistic), "fused" (torch's attention kernel),
                 "native" (compiled, every statistic; `cumulant doctor` says whether it is there), "triton" (CUDA
                 devices, every statistic but traces), "auto"
    statistics   names of `Moments` fields, "entropy", "effective_atoms"; G always comes. "all" is every field.

    A row without atoms has G = −inf, zero statistics and zero gradient. An atom hidden from a query is absent for it,
    whatever it holds; a query to which a NaN or an infinity is visible, where any atom is hidden from any query, has
    NaN for every statistic. Half precision is accumulated and returned in float32; under torch.autocast arguments
    are rounded as for a matrix product. Differentiable twice in eta, atoms, values and log_weights, through every
    statistic.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> m = moments(q / 4, k, v, causal=True, statistics=("mean", "entropy"))
    >>> torch.allclose(m.mean, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    >>> bool(m.entropy[0, 0, 0].abs() < 1e-12)          # only itself is visible to the first token
    True
    """
    eta, atoms, values, log_weights, mask = from_numpy(eta, atoms, values, log_weights, mask)
    eta, atoms = autocast(eta, atoms)
    values, log_weights = autocast(values, log_weights)
    settings = MomentsSettings(statistics_of(statistics, values is not None), 1.0, bool(causal), window, offset)
    return scaled_moments(Arguments(eta, atoms, values, log_weights, mask, None), sink, settings, backend)


def scaled_moments(x: Arguments, sink: float | Tensor | None, settings: MomentsSettings, backend: str) -> Moments:
    """`moments` at scale · eta, without a tensor for it where the native kernel serves."""
    if sink is not None:
        x = x._replace(sink=_sink(x.eta, sink, settings.caller))
    if x.log_weights is not None:
        where = f"{settings.caller}.log_weights"
        require_log_weights(where, require_float(where, x.log_weights))
    kind = None if recorded() else _kind_of_plan(backend, x.eta)
    if kind is not None:
        fields = serve(x, settings, _shapes, _flat, kind)
        if fields is not None:
            return as_record(x, fields, _nonempty(x, settings))
    return _flat_record(x, settings, backend)


def _kind_of_plan(backend: str, eta: Tensor) -> type[DirectPlan] | None:
    """How a call on tensors as they lie is made, if one may be."""
    if backend in ("auto", "triton") and not triton_library.refusal(eta.device.type, eta.device.index):
        return TritonPlan
    return DirectPlan if backend in ("auto", "native") and entries() is not None else None


def recorded() -> bool:
    """Whether operators of torch are recorded or replaced as they are called: by the compiler, by torch.jit.trace, by a
    mode such as that of fake tensors. A call of the native kernel would escape them."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def _nonempty(x: Arguments, settings: MomentsSettings) -> bool:
    """Whether every query sees an atom, as far as shapes tell."""
    keys, queries = x.atoms.shape[-2], x.eta.shape[-2]
    if x.mask is not None or x.log_weights is not None or not keys:
        return False
    first = settings.offset or 0
    return (not settings.causal or first >= 0) and (settings.window is None or 0 <= first <= keys - queries)


def _sink(eta: Tensor, sink: float | Tensor, caller: str = "moments") -> Tensor:
    """The log weight of the sink in the precision that sums are formed in."""
    dtype = torch.float32 if eta.dtype in (torch.float16, torch.bfloat16) else eta.dtype
    s = torch.as_tensor(sink, dtype=dtype, device=eta.device)
    if not holds(s < torch.inf):  # also false for NaN
        advice = "It is the logarithm of a finite mass; -inf is no sink."
        raise ValueError(sentence(f"{caller}.sink", "values below +inf", "NaN or +inf", advice))
    return s


def _request(x: Arguments, settings: MomentsSettings) -> Request:
    _, _, causal, window, offset, caller = settings
    return Request(x.eta, x.atoms, x.values, x.log_weights, x.mask, causal, window, offset, caller)


def _shapes(x: Arguments, settings: MomentsSettings) -> Shapes:
    """Check the arguments; what `serve` must know of them."""
    request = _request(x, settings)
    if x.sink is not None:
        _require_sink(x.sink, request.lead, settings.caller)
    band = request.band
    return Shapes(tuple(request.lead), request.ratio, request.per_pair, band.window, band.offset)


def _require_sink(sink: Tensor, lead: torch.Size, caller: str = "moments") -> None:
    if sink.ndim and broadcast(f"{caller}.sink", sink.shape, lead) != lead:
        expected = f"a number or one per batch entry {tuple(lead)}"
        raise ValueError(
            sentence(f"{caller}.sink", expected, shape(sink), "Heads are a batch axis: one sink per head.")
        )


def as_record(x: Arguments, fields: dict[str, Tensor], nonempty: bool) -> Moments:
    g = fields.pop("log_normalizer")
    sink_mass = fields.pop("sink_mass", None)
    if x.values is None:
        fields |= {name: fields[of_atoms] for name, of_atoms in ATOMS_AS_VALUES.items() if of_atoms in fields}
    if x.log_weights is None and x.sink is None:
        fields["mean_log_weight"] = torch.zeros_like(g)
    return Moments(g, fields, sink_mass, nonempty)


def _flat(x: Arguments, settings: MomentsSettings) -> dict[str, Tensor]:
    """Every field of the record by name, by flattened inputs."""
    record = _flat_record(x, settings, "auto")
    fields = {"log_normalizer": record.log_normalizer, **record.statistics}
    return fields if record.sink_mass is None else fields | {"sink_mass": record.sink_mass}


def _flat_record(x: Arguments, settings: MomentsSettings, backend: str) -> Moments:
    if settings.scale != 1:
        x = x._replace(eta=accumulate(x.eta) * settings.scale, atoms=accumulate(x.atoms))
        x = x._replace(
            **{n: t if t is None else accumulate(t) for n, t in (("values", x.values), ("log_weights", x.log_weights))}
        )
    request = _request(x, settings)
    with without_autocast(x.eta):
        flat, band = request.flatten()
        plan = Plan(_closure(settings.wanted, flat), band)
        out = _compute(flat, plan, _choose(backend, flat, plan, settings.caller))
        record = _record(request, flat, out)
        return record if x.sink is None else add_sink(record, x.sink, request.single, settings.caller)


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
    if backend not in ("auto", "dense", "native", "streaming"):
        got = repr(backend)
        raise ValueError(sentence("fisher_product.backend", "one of auto, dense, native, streaming", got, "Pick one."))
    request = Request(eta, atoms, None, log_weights, mask, causal, window, offset)
    x, band = request.flatten()
    plan = Plan(frozenset({"log_normalizer"}), band)
    require_alike("fisher_product.vector", require_float("fisher_product.vector", vector), "eta", eta)
    if vector.ndim == 0 or vector.shape[-1] != eta.shape[-1] or vector.shape[-2:-1] not in ((1,), eta.shape[-2:-1]):
        expected = f"the shape of eta {shape(eta)}"
        raise ValueError(sentence("fisher_product.vector", expected, shape(vector), "One direction per query."))
    v = request.rows(vector[None] if vector.ndim == 1 else vector)
    with without_autocast(eta):
        if backend == "auto":
            small = _scores(x) <= SMALL
            traced = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, v))
            # the reference has every derivative
            served = native_refusal(x) is None and not recorded() and not (small and traced)
            backend = "native" if served else "dense" if small else "streaming"
        if backend == "dense":
            out = reference_product(x, v, plan)
        else:
            plan = replace(plan, engine=backend)
            out = FisherProduct.apply(x.eta, x.atoms, x.per_atom, x.per_pair, x.mask, v, plan)
    return request.unflatten(out)


def _scores(x: Inputs) -> int:
    return x.eta.shape[0] * x.eta.shape[1] * x.atoms.shape[1]


def statistics_of(names: Collection[str], own_values: bool) -> frozenset[str]:
    """What the kernels must form for these names of statistics."""
    statistics = names if isinstance(names, str | tuple) else tuple(names)
    return (_statistics_of if torch.compiler.is_compiling() else _known_statistics)(statistics, own_values)


def _statistics_of(statistics: str | tuple[str, ...], own_values: bool) -> frozenset[str]:
    if isinstance(statistics, str):
        statistics = STATISTICS if statistics == "all" else (statistics,)
    names: set[str] = set()
    for name in statistics:
        if name not in STATISTICS and name not in DERIVED and name != "atom_mean":
            known = ", ".join((*STATISTICS, *DERIVED))
            expected = f'names among {known}, or "all"'
            raise ValueError(sentence("moments.statistics", expected, repr(name), "Pick from them."))
        names |= set(DERIVED.get(name, (name,)))
    if not own_values:  # the values are the atoms
        names = {ATOMS_AS_VALUES.get(n, n) for n in names}
    return frozenset(names)


_known_statistics = cache(_statistics_of)


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


def _choose(backend: str, x: Inputs, plan: Plan, caller: str) -> str:
    where = f"{caller}.backend"
    if backend not in BACKENDS:
        raise ValueError(sentence(where, f"one of {', '.join(BACKENDS)}", repr(backend), "Pick one."))
    why = fused.refusal(x, _without_score(plan))
    if backend == "fused" and why is not None:
        expected, advice = "a request that 'fused' can serve", "Use 'streaming' or 'auto'."
        raise ValueError(sentence(where, expected, why, advice))
    if backend == "native" and (why := native_refusal(x)) is not None:
        expected, advice = "a request that 'native' can serve", "Use 'auto'; `cumulant doctor` says more."
        raise ValueError(sentence(where, expected, why, advice))
    if backend == "triton" and (why := triton.refusal(x, plan)) is not None:
        expected, advice = "a request that 'triton' can serve", "Use 'streaming' or 'auto'."
        raise ValueError(sentence(where, expected, why, advice))
    if backend != "auto":
        return backend
    if native_refusal(x) is None:
        return "native"
    if triton.refusal(x, plan) is None:
        return "triton"
    if _scores(x) <= SMALL:
        return "dense"
    return "streaming" if why is not None else "fused"


def native_refusal(x: Inputs) -> str | None:
    """Why the native kernel cannot serve these tensors; None if it can."""
    return _absence() or native.refusal(x)


def _absence() -> str:
    return why_not() if entries() is None else ""


# what torch.compiler.assume_constant_result does, without importing the compiler: seven seconds of `import cumulant`
_absence.__dict__["_dynamo_marked_constant"] = True


def _without_score(plan: Plan) -> Plan:
    """mean_score is ⟨η, mean of the atoms⟩: the fused kernel serves it through that mean."""
    if "mean_score" not in plan.statistics or "score_variance" in plan.statistics:
        return plan
    return replace(plan, statistics=plan.statistics - {"mean_score"} | {"atom_mean"})


def _compute(x: Inputs, plan: Plan, backend: str) -> dict[str, Tensor]:
    if backend == "dense":
        return dict(zip(plan.outputs, reference(x, plan), strict=True))
    run = compiled_stream if recorded() else stream
    if backend != "fused":
        return run(x, replace(plan, engine=backend))
    out = run(x, replace(_without_score(plan), engine="fused"))
    if "mean_score" in plan.statistics:
        out["mean_score"] = (x.eta * out["atom_mean"]).sum(-1)
    return {name: out[name] for name in plan.outputs}


def _record(request: Request, x: Inputs, out: dict[str, Tensor]) -> Moments:
    fields = {name: request.unflatten(tensor) for name, tensor in out.items()}
    g = fields.pop("log_normalizer")
    if x.values is None:
        fields |= {name: fields[of_atoms] for name, of_atoms in ATOMS_AS_VALUES.items() if of_atoms in fields}
    if x.per_atom is None and x.per_pair is None:
        fields["mean_log_weight"] = torch.zeros_like(g)
    return Moments(g, fields)


def add_sink(record: Moments, sink: float | Tensor, single: bool = False, caller: str = "moments") -> Moments:
    """One more atom at 0 with value 0, by the merge that joins any two sets of atoms; ``single``: no query axis."""
    g = record.log_normalizer
    s = _sink(g, sink, caller)
    if s.ndim:
        _require_sink(s, g.shape if single else g.shape[:-1], caller)
        s = s if single else s[..., None]
    s = s.expand(g.shape)
    alone = {
        "mean_log_weight": torch.where(s == -torch.inf, 0, s),
        "log_sum_square": 2 * s,
        "max_score": torch.zeros_like(g) - torch.inf,
    }
    statistics = {name: alone.get(name, torch.zeros_like(value)) for name, value in record.statistics.items()}
    return replace(record.merge(Moments(s, statistics)), sink_mass=mixing_weights(g, s)[2])
