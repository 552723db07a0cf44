"""Losses on generated cases: values and gradients by the definitions, in NumPy and float64.

With scores s, positives T and weights w of the losses, targets t = (1 − ε) T/ΣT + ε/m and p = e^{s − G},

    ℓ_i = Σ_j t_ij (G_i − s_ij) + z G_i²,        ∂/∂s_ij Σ w ℓ = w_i ((1 + 2z G_i) p_ij − t_ij).

A tolerance is what rounding allows: δ is the error of a score, Σ_k |η_k x_k| times the precision that sums are formed
in, and 0 where all numbers are small integers times a power of two, so that even huge scores are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from cumulant.contrastive import VocabularyLoss, info_nce, linear_cross_entropy, nt_xent, sgns_loss
from tests.generated.properties import holds_for
from tests.generated.tensors import DTYPES, SIZES, Layout, layouts, normal, seeds

PLENTY = 32  # roundings that are not counted one by one
GARBAGE = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "huge": 1e200}


# ---------------------------------------------------------------------- the oracle


class Lines(NamedTuple):
    """Of every line: loss, log-normalizer, p, and the slopes of each loss in its scores with a bound on their size."""

    loss: np.ndarray
    log_normalizer: np.ndarray
    p: np.ndarray
    slope: np.ndarray
    size: np.ndarray


def lines(s: np.ndarray, table: np.ndarray, *, smoothing: float = 0.0, z: float = 0.0) -> Lines:
    m = s.shape[1]
    count = table.sum(1)
    target = (1 - smoothing) * table / np.maximum(count, 1)[:, None] + smoothing / max(1, m)
    top = s.max(1, initial=-np.inf)
    empty = top == -np.inf
    shifted = s - np.where(empty, 0, top)[:, None]
    mass = np.exp(shifted).sum(1)
    g = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, mass)))
    absent = (count == 0) | empty
    with np.errstate(invalid="ignore"):
        distance = np.where(target > 0, -target * shifted, 0).sum(1)
    finite = np.where(absent, 0, g)
    loss = np.where(absent, 0, distance + np.log(np.where(empty, 1, mass)) + (z * finite**2 if z else 0))
    p = np.exp(shifted) / np.where(empty, 1, mass)[:, None]
    present = ~absent[:, None]
    slope = np.where(present, (1 + 2 * z * finite)[:, None] * p - target, 0)
    return Lines(loss, g, p, slope, np.where(present, (1 + 2 * z * (1 + np.abs(finite)))[:, None] * p + target, 0))


def weights(count: np.ndarray, reduction: str, probe: np.ndarray) -> np.ndarray:
    """What each line's loss is multiplied by."""
    if reduction == "none":
        return probe
    return (count > 0) / (max(1, (count > 0).sum()) if reduction == "mean" else 1)


class Rounding(NamedTuple):
    """Of scores (``score``), of sums in the precision they are formed in (``eps``), of results (``out``, ``tiny``)."""

    score: float
    eps: float
    out: float
    tiny: float

    @staticmethod
    def of(dtype: torch.dtype, score_size: float, depth: int, exact: bool) -> Rounding:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        eps, info = torch.finfo(wide).eps, torch.finfo(dtype)
        return Rounding(0.0 if exact else eps * (depth + 3) * score_size, eps, info.eps, float(info.smallest_normal))

    def slopes(self, terms: int) -> float:
        """Relative to the sizes of the slopes."""
        return 2 * PLENTY * (self.score + self.eps * (1 + math.sqrt(terms)))


def near(found: Tensor, expected: np.ndarray, slack: np.ndarray | float, what: str) -> None:
    got = found.detach().double().numpy()
    assert got.shape == np.shape(expected), what
    worst = np.abs(got - expected) - slack
    wrong = ~(worst <= 0)
    assert not wrong.any(), f"{what}: {got[wrong][:3]} for {np.asarray(expected)[wrong][:3]}, {wrong.sum()} wrong"


def gradient_near(found: Tensor, expected: np.ndarray, slack: np.ndarray, rounding: Rounding, what: str) -> None:
    """Also rounded to the dtype of its tensor; beyond its largest number it may be infinite."""
    top = torch.finfo(found.dtype).max
    inside = np.abs(expected) < 0.9 * top
    slack = slack + 2 * rounding.out * np.abs(expected) + rounding.tiny
    near(torch.where(torch.as_tensor(inside), found, 0), np.where(inside, expected, 0), slack, what)


# ---------------------------------------------------------------------- tensors of a case


def numbers(seed: int, shape: tuple[int, ...], exact: bool, exponent: int, dtype: torch.dtype) -> Tensor:
    """Standard normal, or integers −2 … 2, times a power of two."""
    x = normal(seed, *shape)
    return ((x.round().clamp(-2, 2) if exact else x) * 2.0**exponent).to(dtype)


def laid(x: Tensor, layout: Layout, learned: bool) -> Tensor:
    return layout.of(x).detach().requires_grad_(learned)


def with_garbage(x: Tensor, rows: np.ndarray, kind: str) -> Tensor:
    return torch.where(torch.as_tensor(rows).reshape(-1, *[1] * (x.ndim - 1)), torch.tensor(GARBAGE[kind]).to(x), x)


def exponents(dtype: str, exact: bool) -> st.SearchStrategy[int]:
    """Exact cases go to where scores of 16 terms nearly overflow, others as far as rounding leaves something to see."""
    if not exact:
        return st.integers(-3, 1)
    return st.sampled_from([0, 0, 1, 3, {"float16": 13, "float64": 490}.get(dtype, 52)])


# ---------------------------------------------------------------------- InfoNCE


@dataclass(frozen=True)
class Pairs:
    seed: int
    n: int
    m: int
    d: int
    dtype: str
    exact: bool
    exponent: int
    log_temperature: int  # τ is a power of two
    positives: str  # own | index | table
    reduction: str
    symmetric: bool
    exclude_self: bool
    layouts: tuple[Layout, Layout]
    learned: tuple[bool, bool, bool]  # query, key, temperature
    table_layout: str  # contiguous | transposed | rows (all alike) | slice
    garbage: str


@st.composite
def pairs(draw) -> Pairs:
    dtype, exact = draw(st.sampled_from([*DTYPES])), draw(st.booleans())
    square = draw(st.booleans())
    n = draw(st.sampled_from(SIZES))
    m = n if square else draw(st.sampled_from([s for s in SIZES if s >= n]))
    symmetric, exclude = square and draw(st.booleans()), square and draw(st.booleans())
    kinds = ["table"] if m == 0 or (exclude and n < 2) else ["index", "table"] if exclude else ["own", "index", "table"]
    return Pairs(
        seed=draw(seeds()),
        n=n,
        m=m,
        d=draw(st.sampled_from([1, 2, 5, 16])),
        dtype=dtype,
        exact=exact,
        exponent=draw(exponents(dtype, exact)),
        log_temperature=draw(st.sampled_from([0, 0, -3, 2])),
        positives=draw(st.sampled_from(kinds)),
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        symmetric=symmetric,
        exclude_self=exclude,
        layouts=(draw(layouts()), draw(layouts())),
        learned=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        table_layout=draw(st.sampled_from(["contiguous", "transposed", "rows", "slice"])),
        garbage=draw(st.sampled_from([*GARBAGE])),
    )


def table_of(case: Pairs) -> Tensor:
    rate = 3 / max(3, case.m)
    table = torch.rand(case.n, case.m, generator=torch.Generator().manual_seed(case.seed)) < rate
    if case.table_layout == "rows" and case.n:
        return table[:1].expand(case.n, case.m)
    if case.table_layout == "transposed":
        return table.T.contiguous().T
    if case.table_layout == "slice":
        return torch.stack([table, ~table], -1)[..., 0]
    return table


def index_of(case: Pairs) -> Tensor:
    draws = torch.randint(0, max(1, case.m), (case.n, 2), generator=torch.Generator().manual_seed(case.seed))
    index = draws[:, 0]  # every second entry
    if case.exclude_self:
        own = torch.arange(case.n)
        draws[:, 0] = torch.where(index == own, (index + 1) % max(1, case.m), index)
    return index


@holds_for(pairs(), examples=45)
def test_info_nce_is_that_of_the_definition(case: Pairs) -> None:
    dtype, tau = DTYPES[case.dtype], 2.0**case.log_temperature
    positives = {"own": None, "index": index_of(case), "table": table_of(case)}[case.positives]
    if positives is None:
        table = np.eye(case.n, case.m, dtype=bool)
    elif positives.dtype == torch.bool:
        table = positives.numpy().copy()
    else:
        table = positives[:, None].numpy() == np.arange(case.m)
    if case.exclude_self:
        table &= ~np.eye(case.n, dtype=bool)
    query = case.layouts[0].shape(numbers(case.seed, (case.n, case.d), case.exact, case.exponent, dtype))
    key = case.layouts[1].shape(numbers(case.seed + 1, (case.m, case.d), case.exact, case.exponent, dtype))
    q, k = query.double().numpy(), key.double().numpy()
    if not case.symmetric and case.layouts[0].shared == "none":
        query = with_garbage(query, ~table.any(1), case.garbage)

    inputs = [laid(query, case.layouts[0], case.learned[0]), laid(key, case.layouts[1], case.learned[1])]
    temperature = torch.tensor(tau, dtype=torch.float32 if dtype != torch.float64 else dtype)
    inputs.append(temperature.requires_grad_(case.learned[2]))
    loss = info_nce(
        *inputs[:2],
        temperature=inputs[2] if case.learned[2] else tau,
        symmetric=case.symmetric,
        exclude_self=case.exclude_self,
        positives=positives,
        reduction=case.reduction,
    )
    probe = normal(case.seed + 2, case.n) if case.reduction == "none" else torch.ones(())

    s = q @ k.T / tau
    reach = float((np.abs(q) @ np.abs(k).T).max(initial=0)) / tau
    if case.exclude_self:
        s[np.eye(case.n, dtype=bool)] = -np.inf
    rounding = Rounding.of(dtype, reach, case.d, case.exact)
    rows = lines(s, table)
    w = weights(table.sum(1), case.reduction, probe.numpy())
    slope, size = w[:, None] * rows.slope, np.abs(w)[:, None] * rows.size
    expected, terms = rows.loss if case.reduction == "none" else (w * rows.loss).sum(), np.abs(w) @ (rows.loss + 1)
    if case.symmetric:
        columns = lines(s.T, table.T)
        u = weights(table.sum(0), case.reduction, probe.numpy())
        slope, size = (slope + (u[:, None] * columns.slope).T) / 2, (size + (np.abs(u)[:, None] * columns.size).T) / 2
        other = columns.loss if case.reduction == "none" else (u * columns.loss).sum()
        expected, terms = (expected + other) / 2, terms + np.abs(u) @ (columns.loss + 1)
    several = table.sum(1).max(initial=0) > 1 or (case.symmetric and table.sum(0).max(initial=0) > 1)
    blur = rounding.score + (rounding.eps * reach if several else 0)  # a mean of several scores is rounded as they are
    each = PLENTY * (blur + rounding.eps * (1 + np.abs(expected)))
    if case.reduction != "none":
        each = PLENTY * (blur * (np.abs(w).sum() + 1) + rounding.eps * (1 + terms))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near(loss, expected, each + math.log(max(2, case.m)) * rounding.eps, "loss")

    if not any(case.learned):
        assert not loss.requires_grad
        return
    ours = torch.autograd.grad((loss * probe.to(loss)).sum(), [x for x in inputs if x.requires_grad])
    gradients = dict(zip([i for i, x in enumerate(inputs) if x.requires_grad], ours, strict=True))
    relative = rounding.slopes(case.n + case.m)
    on_eta, size_eta = slope @ k, size @ np.abs(k)
    if 0 in gradients:
        gradient_near(gradients[0], on_eta / tau, relative * size_eta / tau, rounding, "query")
    if 1 in gradients:
        gradient_near(gradients[1], slope.T @ q / tau, relative * size.T @ np.abs(q) / tau, rounding, "key")
    if 2 in gradients:
        summed = (size_eta * np.abs(q)).sum() / tau**2
        expected = np.asarray(-(on_eta * q).sum() / tau**2)
        gradient_near(gradients[2], expected, relative * np.asarray(summed), rounding, "temperature")


@dataclass(frozen=True)
class Views:
    seed: int
    n: int
    d: int
    dtype: str
    layouts: tuple[Layout, Layout]


@holds_for(
    st.builds(
        Views,
        seed=seeds(),
        n=st.sampled_from([0, 1, 2, 63, 100]),
        d=st.sampled_from([1, 3]),
        dtype=st.sampled_from([*DTYPES]),
        layouts=st.tuples(layouts(), layouts()),
    ),
    examples=15,
)
def test_nt_xent_is_that_of_the_definition(case: Views) -> None:
    dtype = DTYPES[case.dtype]
    views = [laid(numbers(case.seed + i, (case.n, case.d), False, 0, dtype), case.layouts[i], True) for i in (0, 1)]
    z = np.concatenate([v.detach().double().numpy() for v in views])
    s = z @ z.T / 0.5
    s[np.eye(len(z), dtype=bool)] = -np.inf
    table = np.roll(np.eye(len(z), dtype=bool), case.n, axis=0)
    rows = lines(s, table)
    loss = nt_xent(*views, temperature=0.5)
    reach = float((np.abs(z) @ np.abs(z).T).max(initial=0)) / 0.5
    rounding = Rounding.of(dtype, reach, case.d, False)
    count = max(1, len(z))
    near(loss, np.asarray(rows.loss.sum() / count), PLENTY * (rounding.score + rounding.eps * (1 + reach)), "loss")
    ours = torch.autograd.grad(loss, views)
    slope, size = rows.slope / count / 0.5, rows.size / count / 0.5
    expected = (slope + slope.T) @ z
    slack = rounding.slopes(len(z)) * (size + size.T) @ np.abs(z)
    for i, gradient in enumerate(ours):
        part = slice(i * case.n, (i + 1) * case.n)
        gradient_near(gradient, expected[part], slack[part], rounding, f"view {i}")


# ---------------------------------------------------------------------- a vocabulary


@dataclass(frozen=True)
class Words:
    seed: int
    batch: tuple[int, ...]
    words: int
    d: int
    dtype: str
    exact: bool
    exponent: int
    bias: str  # none | all | some (others −inf) | nothing (all −inf)
    ignored: float  # share of positions
    ignore_index: int
    smoothing: float
    z: float
    softcap: float | None
    reduction: str
    log_normalizer: bool
    layouts: tuple[Layout, Layout, Layout]
    learned: tuple[bool, bool, bool]  # hidden, weight, bias
    garbage: str


@st.composite
def vocabularies(draw) -> Words:
    dtype, exact = draw(st.sampled_from([*DTYPES])), draw(st.booleans())
    words = draw(st.sampled_from([1, 2, 63, 100, 1000]))
    bias = draw(st.sampled_from(["none", "all", "some", "nothing"]))
    exponent = draw(exponents(dtype, exact))
    plain = exponent > 3  # huge scores: nothing that squares or caps them
    softcap = None if plain else draw(st.sampled_from([None, None, 0.5, 30.0]))
    return Words(
        seed=draw(seeds()),
        batch=draw(st.sampled_from([(), (0,), (1,), (63,), (100,), (1000,), (3, 5), (2, 0, 4)])),
        words=words,
        d=draw(st.sampled_from([1, 2, 5, 16])),
        dtype=dtype,
        exact=exact and softcap is None,
        exponent=exponent if exact else min(exponent, 1),
        bias=bias,
        ignored=draw(st.sampled_from([0.0, 0.3, 1.0])),
        ignore_index=draw(st.sampled_from([-100, -1, 0])),
        smoothing=0.0 if bias in ("some", "nothing") else draw(st.sampled_from([0.0, 0.2, 1.0])),
        z=0.0 if plain else draw(st.sampled_from([0.0, 0.1])),
        softcap=softcap,
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        log_normalizer=draw(st.booleans()),
        layouts=(draw(layouts()), draw(layouts()), draw(layouts())),
        learned=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        garbage=draw(st.sampled_from([*GARBAGE])),
    )


class Built(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    removed: np.ndarray
    ignored: np.ndarray


def built(case: Words) -> Built:
    """Tensors before garbage; zeros where something is absent."""
    dtype, generator = DTYPES[case.dtype], torch.Generator().manual_seed(case.seed)
    hidden = case.layouts[0].shape(numbers(case.seed, (*case.batch, case.d), case.exact, case.exponent, dtype))
    weight = case.layouts[1].shape(numbers(case.seed + 1, (case.words, case.d), case.exact, case.exponent, dtype))
    removed = torch.zeros(case.words, dtype=torch.bool)
    bias = None
    if case.bias != "none":
        removed = torch.rand(case.words, generator=generator) < {"all": 0.0, "some": 0.4, "nothing": 2.0}[case.bias]
        bias = case.layouts[2].shape(numbers(case.seed + 2, (case.words,), case.exact, 0, dtype))
        bias = bias if case.exponent <= 3 else 0 * bias  # beside huge scores it would be rounded away
        bias = bias.masked_fill(removed, -torch.inf) if case.layouts[2].shared == "none" else bias
        removed = bias == -torch.inf
    present = (~removed).nonzero()[:, 0] if not removed.all() else torch.arange(case.words)
    chosen = torch.randint(0, len(present), (*case.batch, 2), generator=generator)
    targets = present[chosen]
    ignored = torch.rand(case.batch, generator=generator) < case.ignored
    targets[..., 0] = torch.where(ignored, case.ignore_index, targets[..., 0])
    targets = targets[..., 0]  # every second entry
    return Built(hidden, weight, bias, targets, removed.numpy(), (targets == case.ignore_index).numpy().reshape(-1))


def with_absent(case: Words, x: Built) -> tuple[Tensor, Tensor]:
    """hidden and weight with garbage where positions are ignored and words removed."""
    hidden, weight = x.hidden, x.weight
    if case.layouts[0].shared == "none":
        mask = torch.as_tensor(x.ignored).reshape(*case.batch, 1)
        hidden = torch.where(mask, torch.tensor(GARBAGE[case.garbage]).to(hidden), hidden)
    if case.layouts[1].shared == "none":
        weight = with_garbage(weight, x.removed, case.garbage)
    return hidden, weight


@holds_for(vocabularies(), examples=55)
def test_linear_cross_entropy_is_that_of_the_definition(case: Words) -> None:
    x, dtype = built(case), DTYPES[case.dtype]
    hidden, weight = with_absent(case, x)
    inputs = [laid(hidden, case.layouts[0], case.learned[0]), laid(weight, case.layouts[1], case.learned[1])]
    if x.bias is not None:
        inputs.append(laid(x.bias, case.layouts[2], case.learned[2]))
    found = linear_cross_entropy(
        *inputs[:2],
        x.targets,
        bias=inputs[2] if x.bias is not None else None,
        ignore_index=case.ignore_index,
        z_loss=case.z,
        label_smoothing=case.smoothing,
        softcap=case.softcap,
        reduction=case.reduction,
        return_log_normalizer=case.log_normalizer,
    )
    loss, log_normalizer = found if isinstance(found, VocabularyLoss) else (found, None)

    h, w = hidden.double().numpy().reshape(math.prod(case.batch), case.d), x.weight.double().numpy()
    lost = x.ignored & ~(np.abs(h) < 1e100).all(1)  # nothing may depend on these rows
    h = np.where(lost[:, None], 0, h)
    b = np.zeros(case.words) if x.bias is None else x.bias.double().numpy()
    s = h @ w.T + np.where(x.removed, 0, b)
    reach = float((np.abs(h) @ np.abs(w).T).max(initial=0)) + float(np.abs(b[~x.removed]).max(initial=0))
    cap_slope = np.ones_like(s)
    if case.softcap is not None:
        cap_slope = 1 - np.tanh(s / case.softcap) ** 2
        s = case.softcap * np.tanh(s / case.softcap)
    s[:, x.removed] = -np.inf
    table = x.targets.reshape(-1, 1).numpy() == np.arange(case.words)
    table[x.ignored] = False
    rows = lines(s, table, smoothing=case.smoothing, z=case.z)
    rounding = Rounding.of(dtype, reach * (1 if case.softcap is None else 1 + 1 / case.softcap), case.d, case.exact)
    probe = normal(case.seed + 3, len(h)).reshape(case.batch) if case.reduction == "none" else torch.ones(())
    each = weights(table.sum(1), case.reduction, probe.numpy().reshape(-1))
    expected = rows.loss.reshape(case.batch) if case.reduction == "none" else np.asarray((each * rows.loss).sum())
    size_g = np.abs(np.where(rows.log_normalizer == -np.inf, 0, rows.log_normalizer))
    blur = (rounding.score + rounding.eps * (1 + reach * (case.smoothing > 0))) * (1 + case.z * size_g)
    slack = PLENTY * (blur + rounding.eps * (1 + np.abs(rows.loss)))
    slack = slack.reshape(case.batch) if case.reduction == "none" else (np.abs(each) * slack).sum()
    near(loss, expected, slack + math.log(case.words) * PLENTY * rounding.eps, "loss")
    total = (loss * probe.to(loss)).sum()

    on_g = np.zeros(len(h))
    if log_normalizer is not None:
        ours = log_normalizer.reshape(-1)
        empty = rows.log_normalizer == -np.inf
        assert np.array_equal(empty[~lost], (ours == -torch.inf).numpy()[~lost])
        known = ~lost & ~empty
        keep = torch.as_tensor(known)
        near(
            torch.where(keep, ours, 0),
            np.where(known, rows.log_normalizer, 0),
            PLENTY * (rounding.score + rounding.eps * (1 + np.where(known, size_g, 0) + math.log(case.words))),
            "log_normalizer",
        )
        on_g = np.where(known, normal(case.seed + 4, len(h)).numpy(), 0)
        total = total + (torch.where(keep, ours, 0) * torch.as_tensor(on_g).to(ours)).sum()

    leaves = [i for i, t in enumerate(inputs) if t.requires_grad]
    if not leaves:
        assert not total.requires_grad
        return
    slopes = dict(zip(leaves, torch.autograd.grad(total, [inputs[i] for i in leaves]), strict=True))
    slope = (each[:, None] * rows.slope + on_g[:, None] * rows.p) * cap_slope
    size = np.abs(each)[:, None] * rows.size + np.abs(on_g)[:, None] * rows.p
    slope[:, x.removed], size[:, x.removed] = 0, 0
    relative = rounding.slopes(len(h) + case.words)
    if 0 in slopes:
        gradient = slopes[0].reshape(h.shape)
        gradient_near(gradient, slope @ w, relative * size @ np.abs(w), rounding, "hidden")
    if 1 in slopes:
        gradient_near(slopes[1], slope.T @ h, relative * size.T @ np.abs(h), rounding, "weight")
    if 2 in slopes:
        gradient_near(slopes[2], slope.sum(0), relative * size.sum(0), rounding, "bias")


def small(case: Words) -> Words:
    return replace(case, batch=(7,), words=min(case.words, 63), exponent=min(case.exponent, 3))


@holds_for(vocabularies().map(small), examples=25)
def test_what_is_absent_does_not_change_a_bit_of_first_or_second_derivatives(case: Words) -> None:
    x = built(case)
    results = []
    for tensors in ((x.hidden, x.weight), with_absent(case, x)):
        inputs = [laid(t, layout, True) for t, layout in zip(tensors, case.layouts, strict=False)]
        bias = None if x.bias is None else x.bias.clone().requires_grad_()
        inputs += [] if bias is None else [bias]
        loss = linear_cross_entropy(
            *inputs[:2],
            x.targets,
            bias=bias,
            ignore_index=case.ignore_index,
            z_loss=case.z,
            label_smoothing=case.smoothing,
            softcap=case.softcap,
            reduction=case.reduction,
        )
        assert isinstance(loss, Tensor)
        first = torch.autograd.grad(loss.sum(), inputs, create_graph=True)
        probe = sum((g.double() * normal(case.seed + i, *g.shape)).sum() for i, g in enumerate(first))
        second = torch.autograd.grad(probe, inputs, materialize_grads=True)  # pyright: ignore[reportArgumentType]
        results.append([loss, *first, *second])
    for clean, found in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, found)


# ---------------------------------------------------------------------- skip-grams


@dataclass(frozen=True)
class Grams:
    seed: int
    n: int
    k: int
    d: int
    dtype: str
    layouts: tuple[Layout, Layout, Layout]


@holds_for(
    st.builds(
        Grams,
        seed=seeds(),
        n=st.sampled_from([0, 1, 63]),
        k=st.sampled_from([1, 2, 5]),
        d=st.sampled_from([1, 3]),
        dtype=st.sampled_from([*DTYPES]),
        layouts=st.tuples(layouts(), layouts(), layouts()),
    ),
    examples=15,
)
def test_sgns_is_that_of_the_definition(case: Grams) -> None:
    dtype = DTYPES[case.dtype]
    shapes = (case.n, case.d), (case.n, case.d), (case.n, case.k, case.d)
    inputs = [
        laid(numbers(case.seed + i, size, False, 0, dtype), layout, True)
        for i, (size, layout) in enumerate(zip(shapes, case.layouts, strict=True))
    ]
    c, o, drawn = (t.detach().double().numpy() for t in inputs)
    true, false = (c * o).sum(-1), np.einsum("nd,nkd->nk", c, drawn)
    loss = sgns_loss(*inputs, reduction="sum")
    reach = np.abs(true).sum() + np.abs(false).sum()
    rounding = Rounding.of(dtype, 1 + float(reach), case.d, False)
    near(loss, np.asarray(np.logaddexp(0, -true).sum() + np.logaddexp(0, false).sum()), PLENTY * rounding.score, "loss")
    right, wrong = -1 / (1 + np.exp(true)), 1 / (1 + np.exp(-false))
    expected = (
        right[:, None] * o + np.einsum("nk,nkd->nd", wrong, drawn),
        right[:, None] * c,
        wrong[..., None] * c[:, None],
    )
    slack = PLENTY * rounding.eps * (1 + np.abs(c).max(initial=0)) * (1 + np.abs(o).max(initial=0)) * (case.k + 3)
    slack = np.asarray(slack * (1 + np.abs(drawn).max(initial=0)))
    for gradient, exactly in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        gradient_near(gradient, exactly, slack, rounding, "sgns")
