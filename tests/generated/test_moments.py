"""`moments` on tensors of every layout, with every support and garbage underneath, against sums over the atoms that are
there, row by row in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from cumulant.kernels import fisher_product, moments
from tests.generated.properties import holds_for
from tests.generated.tensors import DTYPES, Layout, layouts, normal, seeds

GARBAGE = {"nan": np.nan, "infinity": np.inf, "huge": 1e200, "large": 1e6}
STATISTICS = ("mean", "mean_score", "score_variance", "mean_log_weight", "value_trace", "max_score", "log_sum_square")
FORMED = {"fused": ("mean",), "triton": tuple(name for name in STATISTICS if name != "value_trace")}  # else all
LARGEST = {k: torch.finfo(torch.promote_types(t, torch.float32)).max for k, t in DTYPES.items()}
COEFFICIENTS = ("log_normalizer", "mean_score", "mean_log_weight", "value_trace", "score_variance")


@dataclass(frozen=True)
class Request:
    """A call of `moments`. Garbage lies in some atoms: where it is finite, in any that some query does not see; where
    it is not, in those that no query of their batch entry sees."""

    batch: tuple[int, ...] = ()
    kv_heads: int | None = None
    q: int = 3
    n: int = 4
    d: int = 2
    e: int | None = None
    dtype: str = "float64"
    layouts: tuple[Layout, Layout, Layout] = field(default=(Layout(), Layout(), Layout()))
    weights: str = "none"
    mask: str = "none"
    causal: bool = False
    window: int | None = None
    offset: int | None = None
    sink: str = "none"
    garbage: str = "none"
    sharpness: float = 1.0
    shift: float = 0.0
    backend: str = "auto"
    constant: tuple[str, ...] = ()  # arguments that want no gradient
    seed: int = 0

    # ------------------------------------------------------------------ arguments

    @property
    def key_batch(self) -> tuple[int, ...]:
        return self.batch if self.kv_heads is None else (*self.batch[:-1], self.kv_heads)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def position(self) -> int:
        return self.offset or 0

    @cached_property
    def eta(self) -> torch.Tensor:
        return self._tensor(0, (*self.batch, self.q, self.d), self.sharpness, 0.0)

    @cached_property
    def atoms(self) -> torch.Tensor:
        return self._with_garbage(1, self._tensor(1, (*self.key_batch, self.n, self.d), 1.0, 0.0))

    @cached_property
    def values(self) -> torch.Tensor | None:
        if self.e is None:
            return None
        return self._with_garbage(2, self._tensor(2, (*self.key_batch, self.n, self.e), 1.0, self.shift))

    @cached_property
    def log_weights(self) -> torch.Tensor | None:
        shape = {"atom": (*self.key_batch, self.n), "pair": (*self.batch, self.q, self.n)}.get(self.weights)
        if shape is None:
            return None
        w = normal(self.seed + 3, *shape)
        return w.masked_fill(normal(self.seed + 4, *shape) > 0.8, -torch.inf).to(self.torch_dtype)

    @cached_property
    def attn_mask(self) -> torch.Tensor | None:
        shape = {"padding": (*self.batch, 1, self.n), "dense": (*self.batch, self.q, self.n), "shared": (self.n,)}
        if self.mask == "lengths":  # sequences of different lengths, padded
            ends = torch.randint(0, self.n + 1, self.batch, generator=torch.Generator().manual_seed(self.seed))
            return (torch.arange(self.n) < ends[..., None])[..., None, :]
        return normal(self.seed + 5, *shape[self.mask]) > -0.3 if self.mask in shape else None

    @cached_property
    def sinks(self) -> float | torch.Tensor | None:
        if self.sink == "per head":
            s = normal(self.seed + 6, *self.batch)
            return s.masked_fill(s > 0.5, -torch.inf).to(torch.promote_types(self.torch_dtype, torch.float32))
        return {"none": None, "number": 0.5, "absent": -torch.inf}[self.sink]

    def _tensor(self, which: int, shape: tuple[int, ...], scale: float, shift: float) -> torch.Tensor:
        values = (normal(self.seed + which, *shape) * scale + shift).to(self.torch_dtype)
        return self.layouts[which].shape(values)

    def _with_garbage(self, which: int, clean: torch.Tensor) -> torch.Tensor:
        """In about a third of the atoms that may hold it."""
        if self.garbage == "none" or not clean.numel():
            return clean
        value = GARBAGE[self.garbage]
        if np.isfinite(value):
            value = min(value, float(torch.finfo(self.torch_dtype).max) / 8)
        shared = 1 if self.kv_heads is None else self.batch[-1] // self.kv_heads
        per_key = self.visible.reshape(*self.key_batch, shared, self.q, self.n)  # heads of a group together
        hidden = ~per_key.any(dim=(-3, -2)) if not np.isfinite(value) else ~per_key.all(dim=-3).all(dim=-2)
        where = hidden & (normal(self.seed + 7 + which, *hidden.shape) > 0.4)
        return torch.where(where[..., None], torch.tensor(value, dtype=clean.dtype), clean)

    @cached_property
    def visible(self) -> torch.Tensor:
        """(*batch, q, n)"""
        seen = torch.ones(*self.batch, self.q, self.n, dtype=torch.bool)
        if self.attn_mask is not None:
            seen = seen & self.attn_mask
        gap = (torch.arange(self.q) + self.position)[:, None] - torch.arange(self.n)
        if self.causal:
            seen = seen & (gap >= 0)
        if self.window is not None:
            seen = seen & (gap.abs() < self.window)
        w = self.log_weights
        if w is not None:
            w = w if self.weights == "pair" else self._heads(w, -1)[..., None, :]
            seen = seen & (w > -torch.inf)
        return seen

    def _heads(self, tensor: torch.Tensor, after: int) -> torch.Tensor:
        """Of keys in terms of query heads."""
        if self.kv_heads is None:
            return tensor
        return tensor.repeat_interleave(self.batch[-1] // self.kv_heads, dim=tensor.ndim + after - 1)

    def laid_out(self) -> dict[str, torch.Tensor | None]:
        """The tensors as a user would hand them over; garbage may have broken what an axis shared."""
        tensors = {"eta": self.eta, "atoms": self.atoms, "values": self.values}
        found = {}
        for (name, tensor), layout in zip(tensors.items(), self.layouts, strict=True):
            if tensor is not None:
                plain = layout if torch.equal(layout.shape(tensor), tensor) else replace(layout, shared="none")
                tensor = plain.of(tensor).detach().requires_grad_(name not in self.constant)
            found[name] = tensor
        w = self.log_weights
        return found | {
            "log_weights": None if w is None else w.clone().requires_grad_("log_weights" not in self.constant)
        }

    def options(self) -> dict:
        given = {"mask": self.attn_mask, "causal": self.causal, "window": self.window, "backend": self.backend}
        if self.causal or self.window is not None:
            given["offset"] = self.position
        return given

    # ------------------------------------------------------------------ the oracle

    def rows(self):
        """(batch index, row, numbers of what it sees: eta, atoms, values, weights, their columns)"""
        kind = np.longdouble if self.dtype == "float64" and self.q * self.n < 2000 else np.float64
        key_side = [self.atoms, self.atoms if self.values is None else self.values]
        atoms, values = (self._heads(t, -2).to(torch.float64).numpy().astype(kind) for t in key_side)
        eta = self.eta.to(torch.float64).numpy().astype(kind)
        w = torch.zeros(*self.batch, self.q, self.n) if self.log_weights is None else self.log_weights
        w = w if w.ndim == eta.ndim and self.weights != "atom" else self._heads(w, -1)[..., None, :]
        w = w.to(torch.float64).expand(*self.batch, self.q, self.n).numpy().astype(kind)
        seen = self.visible.numpy()
        for b in np.ndindex(*self.batch):
            for i in range(self.q):
                j = np.flatnonzero(seen[b][i])
                yield b, i, eta[b][i], atoms[b][j], values[b][j], w[b][i][j], j


@dataclass
class Expected:
    """One row, and how large its rounding may be."""

    known: dict[str, np.ndarray]
    size: dict[str, float]
    p: np.ndarray
    s: np.ndarray
    far: float = 0.0  # largest value

    def bound(self, name: str, rounding: float) -> float:
        squared = (
            np.square(np.float64(rounding * self.far)) if name == "value_trace" else 0.0
        )  # of values that are all equal
        return rounding * self.size.get(name, 0.0) + squared


def row_of(eta, atoms, values, w) -> Expected:
    if not len(w):
        known = dict.fromkeys(STATISTICS, 0.0) | {"mean": np.zeros(values.shape[-1])}
        known |= dict.fromkeys(("log_normalizer", "max_score", "log_sum_square"), -np.inf)
        return Expected(known, {}, np.zeros(0), np.zeros(0))
    s = atoms @ eta
    top = (s + w).max()
    e = np.exp(s + w - top)
    g, p = top + np.log(e.sum()), e / e.sum()
    m, mu = p @ values, p @ s
    apart = ((values - m) ** 2).sum(-1)
    known = {
        "log_normalizer": g,
        "mean": m,
        "mean_score": mu,
        "score_variance": p @ (s - mu) ** 2,
        "mean_log_weight": p @ w,
        "value_trace": p @ apart,
        "max_score": s.max(),
        "log_sum_square": 2 * top + np.log((e * e).sum()),
    }
    reach = 1 + np.abs(atoms).max() * np.abs(eta).sum() + np.abs(w).max()  # what scores are rounded at
    width, far = np.sqrt(apart.max()), np.abs(values).max()
    size = {
        "log_normalizer": reach,
        "mean": reach * far,
        "mean_score": reach**2,
        "score_variance": reach**3,
        "mean_log_weight": reach**2,
        "value_trace": reach * width**2 + far * width,
        "max_score": reach,
        "log_sum_square": reach,
    }
    return Expected(known, {k: float(v) for k, v in size.items()}, p, s, float(far))


# ---------------------------------------------------------------------- cases


def _fits(case: Request) -> bool:
    return int(np.prod((*case.batch, case.q, case.n))) <= 60_000


@st.composite
def requests(draw, backends=("auto", "streaming", "fused", "dense")) -> Request:
    batch, kv_heads = draw(st.sampled_from([((), None), ((2,), None), ((1, 3), None), ((2, 4), 2), ((0,), None)]))
    q, n = draw(
        st.sampled_from(
            [
                (3, 4),
                (1, 1),
                (0, 3),
                (3, 0),
                (1, 100),
                (100, 1),
                (63, 63),
                (100, 63),
                (2, 5000),
                (200, 250),
                (300, 1000),
            ]
        )
    )
    backend = draw(st.sampled_from(backends))
    square = draw(st.booleans())
    e = draw(st.sampled_from([None, None, 1, 5]))
    d = draw(st.sampled_from([1, 2, 3, 16]))
    case = Request(
        batch=batch if q * n <= 10_000 else batch[:1] and (2,),
        kv_heads=kv_heads if q * n <= 10_000 else None,
        q=q,
        n=q if square and q < 300 else n,
        d=d,
        e=d if e is not None and backend == "fused" else e,
        dtype=draw(st.sampled_from(["float64", "float32", "float32", "bfloat16", "float16"])),
        layouts=tuple(draw(layouts()) for _ in range(3)),
        weights=draw(st.sampled_from(["none", "none", "atom", "pair"])),
        mask=draw(st.sampled_from(["none", "lengths", "padding", "dense", "shared"])),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 7])),
        offset=draw(st.sampled_from([0, 0, 2, -3])),
        sink=draw(st.sampled_from(["none", "none", "number", "absent", "per head"])),
        garbage=draw(st.sampled_from(["none", *GARBAGE])),
        sharpness=draw(st.sampled_from([0.0, 0.3, 1.0, 30.0])),
        shift=draw(st.sampled_from([0.0, 1e3])),
        backend=backend,
        constant=tuple(sorted(draw(st.sets(st.sampled_from(["eta", "atoms", "values", "log_weights"]), max_size=2)))),
        seed=draw(seeds()),
    )
    if backend == "fused":  # what it serves
        case = replace(case, weights="none", window=None, offset=0, mask="none" if case.causal else case.mask)
        case = case if _serves_fused(case) else replace(case, backend="streaming")
    return case if _fits(case) else replace(case, batch=(), kv_heads=None)


def _serves_fused(case: Request) -> bool:
    return 0 not in (case.q, case.n, *case.batch)


def rounding(case: Request) -> float:
    """Of a sum of n numbers in the precision that sums are formed in."""
    return (400 + case.n) * torch.finfo(torch.promote_types(case.torch_dtype, torch.float32)).eps


def without_sink(case: Request) -> Request:
    return replace(case, sink="none")


# ---------------------------------------------------------------------- properties


@holds_for(requests(), examples=70)
def test_statistics_are_sums_over_the_atoms_that_are_there(case: Request) -> None:
    case = without_sink(case)
    given = case.laid_out()
    names = FORMED.get(case.backend, STATISTICS)
    found = moments(**given, **case.options(), statistics=names)
    for b, i, eta, atoms, values, w, _ in case.rows():
        row = row_of(eta, atoms, values, w)
        for name in ("log_normalizer", *names):
            got = getattr(found, name)[(*b, i)].detach().double().numpy()
            bound = row.bound(name, rounding(case))
            if not bound + row.size.get("mean", 0.0) < 1e-9 * LARGEST[case.dtype]:
                continue  # it sees numbers whose squares or cubes are near the end of the dtype
            assert np.allclose(got, np.asarray(row.known[name], float), rtol=0, atol=bound), (
                name,
                b,
                i,
                got,
                row.known[name],
            )


@holds_for(requests(), examples=50)
def test_gradients_are_those_of_the_definition(case: Request) -> None:
    case = without_sink(case)
    given = case.laid_out()
    names = FORMED.get(case.backend, STATISTICS)
    found = moments(**given, **case.options(), statistics=names)
    chosen = tuple(name for name in COEFFICIENTS if name in ("log_normalizer", *names))
    width = found.mean.shape[-1]
    on_mean = normal(case.seed + 20, *case.batch, case.q, width)
    on = {name: normal(case.seed + 21 + k, *case.batch, case.q) for k, name in enumerate(chosen)}
    seen_rows = found.log_normalizer.detach() > -torch.inf
    loss = (found.mean.double() * on_mean).sum()
    loss = loss + sum((torch.where(seen_rows, getattr(found, k), 0).double() * c).sum() for k, c in on.items())
    leaves = {k: t for k, t in given.items() if t is not None and t.requires_grad}
    if not leaves:
        return
    got = dict(
        zip(leaves, torch.autograd.grad(loss, leaves.values(), allow_unused=True, materialize_grads=True), strict=True)
    )
    expected, size = _gradients(case, on_mean.numpy(), {k: c.numpy() for k, c in on.items()})
    slack = rounding(case) if case.dtype in ("float64", "float32") else 2 * torch.finfo(case.torch_dtype).eps
    for name, gradient in got.items():
        assert gradient.dtype == leaves[name].dtype
        error = np.abs(gradient.double().numpy() - expected[name])
        known = size[name] < 1e-9 * LARGEST[case.dtype]  # elsewhere numbers near the end of the dtype are seen
        known = known & (np.abs(expected[name]) + rounding(case) * size[name] < torch.finfo(case.torch_dtype).max / 2)
        assert np.all((error <= slack * size[name]) | ~known), (name, np.nanmax(error[known]), size[name])


def _gradients(case: Request, on_mean: np.ndarray, on: dict[str, np.ndarray]):
    """Of eta, atoms, values and log weights, one visible pair at a time, and the largest number they are rounded at."""
    own = case.values is None
    shapes = {"eta": case.eta, "atoms": case.atoms, "values": case.values, "log_weights": case.log_weights}
    total = {k: np.zeros(t.shape) for k, t in shapes.items() if t is not None}
    size = {k: np.zeros(t.shape) + 1e-300 for k, t in shapes.items() if t is not None}
    ratio = 1 if case.kv_heads is None else case.batch[-1] // case.kv_heads

    def add(name, at, amount, rounded):
        total[name][at] += np.asarray(amount, float)
        size[name][at] += np.asarray(rounded, float)

    for b, i, eta, atoms, values, w, j in case.rows():
        if not len(j):
            continue
        row = row_of(eta, atoms, values, w)
        p, s, m = row.p, row.s, row.known["mean"]
        a = on_mean[b][i]
        c = {name: on[name][b][i] if name in on else 0.0 for name in COEFFICIENTS}
        mu, apart = row.known["mean_score"], ((values - m) ** 2).sum(-1)
        slope = c["log_normalizer"] + (values - m) @ a + c["mean_score"] * (s - mu)
        slope = slope + c["mean_log_weight"] * (w - row.known["mean_log_weight"])
        slope = slope + c["value_trace"] * (apart - row.known["value_trace"])
        slope = slope + c["score_variance"] * ((s - mu) ** 2 - row.known["score_variance"])
        on_logit = p * slope
        on_score = on_logit + p * (c["mean_score"] + 2 * c["score_variance"] * (s - mu))
        on_value = p[:, None] * (a + 2 * c["value_trace"] * (values - m))
        reach = np.float64(row.size["log_normalizer"])
        far = np.abs(values).max()
        rough = reach * (1 + np.abs(a).sum() * far + reach**2 + apart.max() + far * np.sqrt(apart.max()))
        rough = rough if rough < 1e-9 * LARGEST[case.dtype] else np.inf
        k = (*b[:-1], b[-1] // ratio) if b else b
        add("eta", (*b, i), on_score @ atoms, rough * (np.abs(atoms).max() + 1e-12))
        for name in ("atoms", "values") if rough == np.inf else ():  # its NaN meets a weight of 0 in a product
            if name in size:
                size[name][k] = np.inf
        flat = (*k, j)
        add("atoms", flat, on_score[:, None] * eta, rough * (np.abs(eta) + 1e-12))
        add("atoms" if own else "values", flat, on_value, rough)
        if case.log_weights is not None:
            at = (*b, i, j) if case.weights == "pair" else flat
            add("log_weights", at, on_logit + p * c["mean_log_weight"], rough)
    return total, size


@holds_for(requests(backends=("auto", "streaming", "dense")), examples=40)
def test_the_fisher_product_is_a_covariance_of_what_is_there(case: Request) -> None:
    given = case.laid_out()
    vector = normal(case.seed + 9, *case.batch, case.q, case.d, dtype=case.torch_dtype)
    found = fisher_product(given["eta"], given["atoms"], vector, log_weights=given["log_weights"], **case.options())
    for b, i, eta, atoms, values, w, _ in case.rows():
        row = row_of(eta, atoms, values, w)
        v = vector[(*b, i)].double().numpy()
        expected, bound = np.zeros(case.d), 0.0
        if len(w):
            slope = atoms @ v
            expected = (row.p * (slope - row.p @ slope)) @ atoms
            bound = rounding(case) * row.size["log_normalizer"] * np.abs(atoms).max() ** 2 * np.abs(v).sum()
            if not bound < 1e-9 * LARGEST[case.dtype]:
                continue
        got = found[(*b, i)].detach().double().numpy()
        assert np.allclose(got, np.asarray(expected, float), rtol=0, atol=float(bound)), (b, i, got, expected)


@holds_for(requests(backends=("auto", "streaming", "dense")), examples=40)
def test_a_sink_is_one_more_atom_at_zero(case: Request) -> None:
    if case.garbage == "huge":  # rows that see it have no finite gradient
        case = replace(case, garbage="large")
    given = case.laid_out()
    sink = case.sinks
    if isinstance(sink, torch.Tensor):
        sink = sink.clone().requires_grad_()
    found = moments(**given, **case.options(), sink=sink)
    if sink is None:
        assert found.sink_mass is None
        return
    leaves = [t for t in (*given.values(), sink) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return
    total = found.entropy.sum() + found.mean.sum() + found.sink_mass.sum()
    for gradient in torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True):
        assert not gradient.isnan().any()
    level = torch.as_tensor(sink, dtype=torch.float64).detach().expand(case.batch)
    for b, i, eta, atoms, values, w, _ in case.rows():
        one = float(level[b])
        s = np.append(w + atoms @ eta, one)
        e = np.exp(s - s.max()) if np.isfinite(s.max()) else np.zeros_like(s)
        p = e / max(e.sum(), 1e-300)
        reach = 1.0 if not len(w) else row_of(eta, atoms, values, w).size["log_normalizer"]
        got = float(found.sink_mass.detach()[(*b, i)])
        assert abs(got - float(p[-1])) <= rounding(case) * (reach + abs(one if np.isfinite(one) else 0)), (
            b,
            i,
            got,
            p[-1],
        )


@pytest.mark.parametrize("backend", ["dense", "streaming", "auto"])
@pytest.mark.parametrize("kind", ["nan", "infinity"])
@pytest.mark.parametrize("at", ["atoms", "values"])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(backend, kind, at):
    case = Request(batch=(2,), q=150, n=150, d=4, e=4, causal=True, offset=0, backend=backend, seed=3)
    broken = getattr(case, at).clone()
    broken[0, 100, 2] = GARBAGE[kind]
    given = {"eta": case.eta, "atoms": case.atoms, "values": case.values}
    found = moments(**given | {at: broken}, causal=True, backend=backend, statistics=STATISTICS)
    clean = moments(**given, causal=True, backend=backend, statistics=STATISTICS)
    for name in ("log_normalizer", *STATISTICS):
        if name == "mean_log_weight":
            continue
        got, expected = getattr(found, name), getattr(clean, name)
        assert got[0, 100:].isnan().all()
        assert torch.allclose(got[0, :100], expected[0, :100], rtol=1e-12, atol=1e-12)
        assert torch.allclose(got[1], expected[1], rtol=1e-12, atol=1e-12)
