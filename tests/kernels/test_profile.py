"""`attention_profile` beside sums in NumPy, by the native kernel and by torch: masses by distance, of marked keys, the
largest logit, heads of different lengths."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import cumulant.kernels.profile as profile
from cumulant.kernels import attention_profile, moments
from tests.kernels.native.problems import by_sums, native, normal, threads

EDGES = (0, 1, 4, 16, 64)
STATISTICS = ("mean", "entropy", "score_variance", "value_trace", "max_score", "effective_atoms")
KERNELS = [pytest.param("native", marks=native), "torch"]


@pytest.fixture
def kernel(request, monkeypatch):
    """The native kernel, or none."""
    if request.param == "torch":
        monkeypatch.setattr(profile, "_by_kernel", lambda *_: None)
        monkeypatch.setattr(profile, "SCORES", 400)  # a few rows at a time
    elif "finite" not in request.node.name:
        monkeypatch.setattr(profile, "_by_rows", lambda *_: pytest.fail("the native kernel did not serve"))
    return request.param


def boolean(*shape: int, seed: int = 7, share: float = 0.4) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > share


def expected(eta, atoms, values=None, *, w=None, visible=None, position=0, edges=EDGES, marked=None, scale=1.0):
    """One head by definition, in NumPy: eta (q, d), atoms (n, d)."""
    q, n = len(eta), len(atoms)
    sums = by_sums(eta * scale, atoms, values, w, visible)
    weights = np.broadcast_to(np.zeros(n) if w is None else np.asarray(w, float), (q, n))
    seen = (weights > -np.inf) & (True if visible is None else np.broadcast_to(np.asarray(visible), (q, n)))
    logits = np.where(seen, scale * np.asarray(eta) @ np.asarray(atoms).T + np.where(seen, weights, 0), -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.where(seen, np.exp(logits - sums["log_normalizer"][:, None]), 0) if q else logits
    distance = np.abs(position + np.arange(q)[:, None] - np.arange(n))
    ends = (*edges[1:], np.inf)
    bins = [np.where((distance >= a) & (distance < b), p, 0).sum(1) for a, b in zip(edges, ends, strict=True)]
    found = {"bin_mass": np.stack(bins, -1), "max_logit": logits.max(1, initial=-np.inf)}
    if marked is not None:
        found["marked_mass"] = np.where(np.asarray(marked), p, 0).sum(1)
    return sums, found


def check(found, sums, masses, tolerance=1e-11):
    for name in ("log_normalizer", *STATISTICS):
        np.testing.assert_allclose(
            getattr(found.moments, name), sums[name], rtol=tolerance, atol=tolerance, err_msg=name
        )
    for name, value in masses.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("q", [1, 3, 20])
@pytest.mark.parametrize("support", ["plain", "causal", "window", "weights", "pairs", "mask", "pair mask", "hidden"])
def test_masses_are_sums_over_what_is_visible(kernel, support, q):
    n, position = 600, 400
    gap = np.arange(q)[:, None] + position - np.arange(n)
    w = {"weights": normal(n, seed=4), "pairs": normal(q, n, seed=4)}.get(support)
    if w is not None:
        w = w.masked_fill(boolean(*w.shape, share=0.8), -torch.inf)
    mask = {"mask": boolean(n), "pair mask": boolean(q, n), "hidden": torch.zeros(n, dtype=torch.bool)}.get(support)
    visible = {"causal": gap >= 0, "window": np.abs(gap) < 40}.get(support, None if mask is None else mask.numpy())
    options = {"causal": {"causal": True}, "window": {"window": 40}}.get(support, {})
    eta, atoms, values, marked = normal(q, 5), normal(n, 5, seed=1), normal(n, 3, seed=2), boolean(n, seed=8)
    for count in (1, 3):
        with threads(count):
            found = attention_profile(
                *(eta, atoms, values),
                log_weights=w,
                mask=mask,
                offset=position,
                scale=0.7,
                distance_edges=EDGES,
                marked=marked,
                statistics=STATISTICS,
                **options,
            )
        check(found, *expected(eta, atoms, values, w=w, visible=visible, position=position, marked=marked, scale=0.7))
        whole = (found.moments.log_normalizer > -torch.inf).double()
        torch.testing.assert_close(found.bin_mass.sum(-1), whole)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("q", [1, 6])
def test_ragged_heads(kernel, packed, q):
    """Two sequences, six heads on three key heads, lengths from 0 to 300: padded rows, or all heads in one storage."""
    lengths = torch.tensor([[300, 17, 0], [256, 1, 130]])
    starts = lengths.flatten().cumsum(0).reshape(2, 3) - lengths if packed else torch.tensor([[0, 20, 5], [30, 0, 3]])
    rows = int(lengths.sum()) if packed else 310
    keys = () if packed else (2, 3)
    eta, atoms, values = normal(2, 6, q, 4), normal(*keys, rows, 4, seed=1), normal(*keys, rows, 3, seed=2)
    w, marked = normal(*keys, rows, seed=3), boolean(*keys, rows)
    found = attention_profile(
        *(eta, atoms, values),
        log_weights=w,
        starts=starts,
        lengths=lengths,
        causal=True,
        offset=200,
        distance_edges=EDGES,
        marked=marked,
        statistics=STATISTICS,
    )
    assert found.max_logit.shape == (2, 6, q)
    for b in range(2):
        for h in range(6):
            own = slice(int(starts[b, h // 2]), int(starts[b, h // 2] + lengths[b, h // 2]))
            part = [t[own] if packed else t[b, h // 2, own] for t in (atoms, values, w, marked)]
            visible = np.arange(q)[:, None] + 200 - np.arange(len(part[0])) >= 0
            sums, masses = expected(eta[b, h], *part[:2], w=part[2], visible=visible, position=200, marked=part[3])
            for name in ("log_normalizer", *STATISTICS):
                got = getattr(found.moments, name)[b, h]
                np.testing.assert_allclose(got, sums[name], rtol=1e-11, atol=1e-11, err_msg=name)
            for name, value in masses.items():
                np.testing.assert_allclose(getattr(found, name)[b, h], value, rtol=1e-11, atol=1e-11, err_msg=name)


@native
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lead", "keys", "marks"),
    [
        ((), (), ()),
        ((2, 4), (2, 2), (2, 2)),
        ((2, 4), (2, 1), (1, 1)),
        ((2, 4), (1, 4), (2, 1)),
        ((2, 4), (), (2, 2)),
        ((3, 2, 4), (1, 2, 1), (3, 1, 1)),
        ((0, 4), (0, 2), (0, 2)),
    ],
    ids=str,
)
def test_the_native_kernel_and_torch_agree(lead, keys, marks, dtype):
    for q, options in (
        (3, {"causal": True, "offset": 290}),
        (33, {"window": 20, "offset": 100}),
        (17, {"mask": boolean(17, 300), "offset": 9}),
        (17, {"mask": boolean(1, 300).expand(17, 300), "causal": True, "offset": 9}),
    ):
        given = [normal(*lead, q, 8, dtype=dtype), *(normal(*keys, 300, k, seed=k, dtype=dtype) for k in (8, 5))]
        given[1] = given[1].mT.contiguous().mT
        more = {"distance_edges": (1, 2, 9, 100), "marked": boolean(*marks, 300), "statistics": "all"}
        if marks and 0 not in marks:
            more["lengths"] = torch.randint(0, 301, marks, generator=torch.Generator().manual_seed(1))
        ours = attention_profile(*given, **options, **more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(profile, "_by_kernel", lambda *_: None)
            theirs = attention_profile(*given, **options, **more)
        tolerance = 1e-11 if dtype == torch.float64 else 2e-4
        assert ours.moments.statistics.keys() >= theirs.moments.statistics.keys()
        for name, value in theirs.moments.statistics.items():
            torch.testing.assert_close(ours.moments.statistics[name], value, rtol=tolerance, atol=tolerance)
        for name in ("max_logit", "bin_mass", "marked_mass"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_moments_are_those_of_moments(kernel):
    eta, atoms, values = normal(2, 3, 20, 8), normal(2, 3, 40, 8, seed=1), normal(2, 3, 40, 5, seed=2)
    found = attention_profile(eta, atoms, values, causal=True, offset=20, scale=0.5, statistics="all")
    plain = moments(eta * 0.5, atoms, values, causal=True, offset=20, statistics="all")
    for name, value in plain.statistics.items():
        torch.testing.assert_close(found.moments.statistics[name], value, rtol=1e-11, atol=1e-11)
    assert found.bin_mass is None
    assert found.marked_mass is None


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("q", [3, 30])
def test_what_is_not_finite_shows_where_it_is_seen(kernel, q):
    eta, atoms = normal(q, 4).abs(), normal(40, 4, seed=1)
    options = {"causal": True, "offset": 0, "distance_edges": (0, 2), "marked": boolean(40)}
    clean = attention_profile(eta, atoms, **options)
    for garbage in (torch.nan, torch.inf, -torch.inf):
        dirty = atoms.clone()
        dirty[q // 2, 1] = garbage
        found = attention_profile(eta, dirty, **options)
        for name in ("max_logit", "bin_mass", "marked_mass"):
            value = getattr(found, name)
            assert value[q // 2 :].isnan().all()
            torch.testing.assert_close(value[: q // 2], getattr(clean, name)[: q // 2])
        hidden = attention_profile(eta, dirty, **options, mask=torch.arange(40) != q // 2)
        assert hidden.bin_mass.isfinite().all()


def test_refusals():
    x, edges = normal(2, 5, 4), (0, 1)
    cases = [
        ({"eta": normal(4)}, r"attention_profile\.eta: expected shape \(\*batch, q, d\)"),
        ({"distance_edges": ()}, r"distance_edges: expected 1 to 16 ascending distances"),
        ({"distance_edges": range(17)}, r"distance_edges: expected 1 to 16"),
        ({"distance_edges": (3, 1)}, r"distance_edges: expected 1 to 16 ascending"),
        ({"atoms": normal(2, 7, 4), "distance_edges": edges}, r"attention_profile\.offset: expected the key index"),
        ({"lengths": torch.tensor([5, 5]), "causal": True}, r"attention_profile\.offset: .*ragged"),
        ({"lengths": torch.tensor([5, 6])}, r"attention_profile\.lengths: expected ranges of rows within 0 … 5"),
        ({"starts": torch.tensor([-1, 0])}, r"attention_profile\.lengths: expected ranges of rows"),
        ({"marked": torch.ones(2, 6, dtype=torch.bool)}, r"attention_profile\.marked: expected shape \(\*batch, n=5\)"),
        ({"marked": torch.ones(3, 5, dtype=torch.bool)}, r"attention_profile\.marked: expected batch axes"),
        ({"atoms": normal(2, 5, 4).requires_grad_()}, r"attention_profile\.atoms: expected a tensor that requires no"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError, match=words):
            attention_profile(**{"eta": x, "atoms": x} | options)
    for options, words in [
        ({"marked": torch.ones(2, 5)}, "a Boolean tensor, got torch.float32"),
        ({"lengths": torch.ones(2)}, "a tensor of integers, got torch.float32"),
        ({"lengths": [5, 5]}, "a tensor of integers, got list"),
    ]:
        with pytest.raises(TypeError, match=words):
            attention_profile(x, x, **options)
    with torch.no_grad():
        assert attention_profile(x, normal(2, 5, 4).requires_grad_()).max_logit.shape == (2, 5)


@native
@pytest.mark.long
@pytest.mark.parametrize("q", [1, 64])
def test_heads_of_an_eighth_of_the_length_cost_an_eighth(q):
    """Within a half, least of many runs."""
    n = 32768 if q == 1 else 8192
    eta, atoms, values = (normal(1, 16, k, 64, seed=k, dtype=torch.float32) for k in (q, n, n))

    def seconds(length: int) -> float:
        lengths = torch.full((1, 16), length)
        best = np.inf
        for _ in range(30):
            start = time.perf_counter()
            attention_profile(eta, atoms, values, lengths=lengths, distance_edges=EDGES, offset=n)
            best = min(best, time.perf_counter() - start)
        return best

    whole, part = seconds(n), seconds(n // 8)
    assert part < 1.5 * whole / 8, (part, whole)
