"""The native kernel beside the reference and beside sums in NumPy: every statistic and its gradients, at every size,
support, layout and dtype."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cumulant import fisher_product, moments
from cumulant.kernels.moments import STATISTICS
from tests.kernels.native.problems import FIELDS, Problem, by_sums, held, native, normal, same, threads

pytestmark = native
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 257, 600)
WIDTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100)
BANDS = {
    "plain": {},
    "causal": {"causal": True, "offset": 0},
    "cached": {"causal": True, "offset": 37},
    "before the keys": {"causal": True, "offset": -5},
    "all before the keys": {"causal": True, "offset": -200},
    "beyond the end": {"causal": True, "offset": 500},
    "window": {"window": 9, "offset": 5},
    "window beyond the end": {"window": 9, "offset": 66},
    "causal window": {"causal": True, "window": 7, "offset": 40},
    "window before the keys": {"causal": True, "window": 3, "offset": -30},
    "one key": {"causal": True, "window": 1, "offset": 3},
}


def boolean(*shape: int, seed: int = 7, share: float = 0.4) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > share


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("size", [*SIZES[:-1], pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("axis", ["queries", "keys", "both"])
def test_odd_numbers_of_queries_and_keys(size, axis):
    q, n = {"queries": (size, 33), "keys": (17, size), "both": (size, size)}[axis]
    for count, (options, d, e) in enumerate([({}, 5, 9), ({"causal": True, "offset": n - q}, 8, None)]):
        with threads(1 + (size + count) % 3):
            Problem.of(q, n, d, e, seed=size, **options).check()


@pytest.mark.parametrize("width", WIDTHS)
def test_odd_widths_of_keys_and_values(width):
    for q, n in ((3, 40), (20, 40)):
        Problem.of(q, n, width, 5, log_weights=(n,)).check()
        Problem.of(q, n, 4, width, causal=True, offset=20, sink=0.5).check()
    Problem.of(9, 300, width, causal=True, offset=290).check()


@pytest.mark.parametrize(("d", "e"), [(0, 0), (0, 3), (3, 0), (0, None)])
def test_vectors_without_entries(d, e):
    for q in (2, 20):
        Problem.of(q, 30, d, e, causal=True, offset=15).check()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("q", [1, 4, 5, 16, 17])
def test_keys_are_split_over_threads(q, count):
    """Few queries and many keys: parts of the keys are summed by several threads, forward and backward, and merged."""
    with threads(count):
        Problem.of(q, 3000, 8, 5, log_weights=(3000,), sink=(), seed=count).check()
        Problem.of(q, 2600, 5, None, causal=True, offset=2400, lead=(2,)).check()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("q", [2, 9])
def test_very_many_keys_are_summed_in_segments(q, count):
    n = 70_000
    with threads(count):
        Problem.of(q, n, 3, 2, causal=True, offset=n - 5, log_weights=(n,), sink=()).check()
        Problem.of(q, n, 2, mask=boolean(1, n)).check(statistics=("mean", "entropy", "max_score"))


@pytest.mark.parametrize("q", [1, 2, 3, 4])
def test_few_rows(q):
    for options in (
        {},
        {"causal": True, "offset": 290},
        {"causal": True, "window": 7, "offset": 290},
        {"log_weights": (2, 1, q, 300)},
        {"mask": boolean(2, 3, q, 300), "sink": (3,)},
    ):
        Problem.of(q, 300, 9, 17, lead=(2, 3), **options).check()


# ---------------------------------------------------------------------- supports


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("weights", ["none", "per key", "per pair", "shared pairs", "mask", "padding", "both"])
def test_bands_weights_and_masks(band, weights):
    q, n, lead = 31, 70, (2, 3)
    options = {
        "none": {},
        "per key": {"log_weights": (2, 3, n)},
        "per pair": {"log_weights": (2, 3, q, n)},
        "shared pairs": {"log_weights": (1, 1, q, n)},
        "mask": {"mask": boolean(2, 3, q, n)},
        "padding": {"mask": boolean(2, 1, 1, n)},
        "both": {"log_weights": (2, 3, n), "mask": boolean(q, n), "sink": (3,)},
    }[weights]
    if weights == "mask":
        options["mask"][..., 7, :] = False
    Problem.of(q, n, 5, 3, lead=lead, **BANDS[band], **options).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        boolean(33),
        boolean(17, 33),
        boolean(1, 33),
        boolean(17, 1),
        boolean(1, 1, share=0.0),
        boolean(2, 1, 1, 33),
        boolean(1, 3, 1, 33),
        boolean(2, 1, 17, 33),
        boolean(2, 3, 17, 33),
        boolean(2, 3, 17, 1),
        boolean(1, 3, 1, 1),
        boolean(33).expand(2, 3, 17, 33),
        boolean(17, 1).expand(2, 3, 17, 33),
        boolean(2, 1, 17, 33).expand(2, 3, 17, 33),
        boolean(2, 3, 33, 17).mT,
        boolean(2, 3, 17, 66)[..., ::2],
        boolean(17, 3, 2, 33).permute(2, 1, 0, 3),
        torch.zeros(17, 33, dtype=torch.bool),
    ],
    ids=lambda m: f"{tuple(m.shape)} {m.stride()}",
)
def test_masks_of_every_shape_and_layout(mask, causal):
    Problem.of(17, 33, 4, 3, lead=(2, 3), mask=mask, causal=causal, offset=11).check()


@pytest.mark.parametrize(
    "shape", [(33,), (1, 33), (2, 33), (2, 3, 33), (1, 1, 17, 33), (2, 3, 17, 33), (2, 1, 1, 33), (1, 3, 17, 33)]
)
def test_log_weights_of_every_shape(shape):
    """With gradients, shared tables summed over what shares them, and rows whose every key is removed."""
    lead = (2, 3) if len(shape) > 2 else shape[:-1]
    w = normal(*shape, seed=5).masked_fill(boolean(*shape, share=0.8), -torch.inf)
    if len(shape) == 4:
        w[..., 0, :] = -torch.inf
    Problem.of(17, 33, 4, 3, lead=lead, log_weights=w).check()


@pytest.mark.parametrize("q", [2, 17])
@pytest.mark.parametrize(
    "sink", [0.5, -5.0, -torch.inf, (), (3,), (2, 3), (1, 3), (2, 1)], ids=lambda s: f"{s}".replace("()", "scalar")
)
def test_sinks(sink, q):
    for options in ({}, {"causal": True, "offset": -3}, {"log_weights": (2, 3, 33)}, {"window": 3, "offset": 1}):
        Problem.of(q, 33, 4, 5, lead=(2, 3), sink=sink, **options).check()


def test_a_sink_gets_its_gradient_through_its_mass_alone():
    given = Problem.of(17, 33, 4, 5, lead=(2, 3), sink=(3,)).leaves()
    slopes = [
        torch.autograd.grad(
            moments(**given, backend=b).sink_mass.square().sum(), list(given.values()), allow_unused=True
        )
        for b in ("native", "dense")
    ]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if ours is None else ours, torch.zeros(()) if theirs is None else theirs
        )


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("q", [1, 5, 33])
def test_grouped_queries(key_heads, q):
    for options in (
        {},
        {"causal": True, "offset": 20},
        {"mask": boolean(2, 1, 1, 50)},
        {"mask": boolean(2, 8, q, 50)},
        {"mask": boolean(q, 50), "causal": True, "offset": 49},
        {"log_weights": (2, key_heads, 50), "sink": (8,)},
        {"log_weights": (2, 8, q, 50)},
        {"log_weights": (1, 8, 1, 50), "window": 9, "offset": 30},
    ):
        Problem.of(q, 50, 5, 3, lead=(2, 8), keys=(2, key_heads), **options).check()


# ---------------------------------------------------------------------- batch axes and layouts


@pytest.mark.parametrize("rank", [1, 2])
def test_batch_axes_broadcast_in_every_combination(rank):
    """Every axis of queries, keys, values, pair weights and sink: of full size or 1."""
    full = (2, 3)[:rank]
    choices = list(itertools.product(*[(size, 1) for size in full]))
    for count, (eta, atoms, values, pairs) in enumerate(itertools.product(choices, repeat=4)):
        if rank == 2 and count % 5:
            continue
        lead = torch.broadcast_shapes(eta, atoms, values, pairs)
        tensors = {
            "eta": normal(*eta, 5, 3, seed=1),
            "atoms": normal(*atoms, 9, 3, seed=2),
            "values": normal(*values, 9, 2, seed=3),
            "log_weights": normal(*pairs, 5, 9, seed=4),
            "sink": normal(*lead, seed=5),
        }
        Problem(tensors, {"causal": bool(count % 2), "offset": 3}).check(statistics=("mean", "entropy", "value_trace"))


@pytest.mark.parametrize(
    ("eta", "atoms", "values"),
    [
        ((2, 1, 3, 1, 2), (2, 2, 1, 1, 2), (2, 2, 3, 1, 1)),
        ((2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2)),
        ((2, 3, 2, 1, 2, 3), (1, 3, 1, 2, 1, 3), (2, 1, 2, 1, 2, 1)),
        ((2, 2, 2, 2, 2, 4), (2, 1, 2, 1, 2, 2), (1, 1, 2, 1, 2, 2)),
        ((2, 3), (3,), (1,)),
        ((3,), (2, 3), (2, 3)),
        ((), (2, 3), (3,)),
        ((2, 3), (), ()),
        ((0, 3), (0, 3), (0, 3)),
        ((0, 3), (3,), (1, 3)),
        ((2, 0, 3), (2, 1, 3), (1, 1, 1)),
        ((2, 0), (1, 0), (0,)),
    ],
    ids=str,
)
def test_batches_of_any_rank(eta, atoms, values):
    for q in (3, 9):
        tensors = {"eta": normal(*eta, q, 3), "atoms": normal(*atoms, 7, 3), "values": normal(*values, 7, 2)}
        for options in ({}, {"causal": True, "offset": 2}):
            Problem(tensors, options).check()


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "every other": lambda t: torch.stack([t, t + torch.nan], -1).flatten(-2)[..., ::2] if t.ndim else t,
    "expanded batch": lambda t: t[:1].expand(t.shape) if t.ndim > 1 else t,
    "expanded rows": lambda t: t[..., :1, :].expand(t.shape) if t.ndim > 1 else t,
    "expanded columns": lambda t: t[..., :1].expand(t.shape) if t.ndim > 1 else t,
    "(b, t, h, d)": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 3 else t,
    "(t, b, h, d)": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) if t.ndim > 3 else t,
    "Fortran order": lambda t: torch.from_numpy(np.asfortranarray(t.numpy())),
    "part of a storage": lambda t: torch.cat([t + torch.nan, t, t + torch.nan]).narrow(0, t.shape[0], t.shape[0]),
    "every other row": lambda t: torch.stack([t + torch.nan, t], -2).flatten(-3, -2)[..., 1::2, :] if t.ndim > 1 else t,
    "negated": lambda t: torch.ops.aten._neg_view(-t),
    "imaginary part": lambda t: torch.complex(t, -t).conj().imag,
    "one storage": None,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q", [3, 20])
def test_layouts(layout, q):
    if layout == "one storage":  # queries, keys and values as one projection gives them
        joint = normal(2, q, 3, 2, 8)  # (b, t, qkv, h, d)
        problem = Problem(dict(zip(FIELDS, joint.permute(2, 0, 3, 1, 4), strict=False)), {"causal": True})
        problem.check()
        return
    lay = LAYOUTS[layout]
    alike = layout == "expanded rows"  # all keys are the best: which of them has the gradient is a kernel's choice
    names = tuple(name for name in STATISTICS if name != "max_score" or not alike)
    Problem.of(q, 33, 8, 4, lead=(2, 3), log_weights=(2, 3, 33), sink=(2, 3)).laid(lay).check(statistics=names)
    pairs = Problem.of(q, 33, 1, 1, lead=(2, 3), log_weights=(2, 3, q, 33), causal=True, offset=9)
    pairs.laid(lay).check(statistics=names)


# ---------------------------------------------------------------------- sums in NumPy


@pytest.mark.parametrize("q", [3, 40])
@pytest.mark.parametrize("own_values", [True, False])
@pytest.mark.parametrize("case", ["plain", "causal", "weights", "pairs", "mask", "window", "sink", "all hidden"])
def test_statistics_are_sums_over_what_is_visible(case, own_values, q):
    n, t = 300, np.arange(q)[:, None] + 200 - np.arange(300)
    w = {"weights": normal(n, seed=4), "pairs": normal(q, n, seed=4)}.get(case)
    if w is not None:
        w[..., ::7] = -torch.inf
    mask = {"mask": boolean(q, n), "all hidden": torch.zeros(n, dtype=torch.bool)}.get(case)
    visible = {"causal": t >= 0, "window": np.abs(t) < 9}.get(case, None if mask is None else mask.numpy())
    options = {"causal": {"causal": True}, "window": {"window": 9}, "sink": {"sink": 0.7}}.get(case, {})
    eta, atoms, values = normal(q, 5), normal(n, 5, seed=1), normal(n, 3, seed=2) if own_values else None
    found = moments(
        eta, atoms, values, log_weights=w, mask=mask, offset=200, **options, backend="native", statistics="all"
    )
    for name, expected in by_sums(eta, atoms, values, w, visible, options.get("sink")).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("statistic", [*STATISTICS, "atom_mean", "entropy", "effective_atoms"])
def test_one_statistic_at_a_time(statistic):
    for q in (2, 20):
        problem = Problem.of(q, 300, 5, 3, causal=True, offset=280, log_weights=(300,), sink=())
        whole, part = (problem.answer("native", s)[0] for s in ("all", (statistic,)))
        for name, value in part.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)
        problem.check(statistics=(statistic,))


def test_gradients_for_every_choice_of_arguments():
    problem = Problem.of(9, 33, 4, 3, lead=(2,), log_weights=(2, 33), sink=(2,), causal=True, offset=30)
    for count in range(6):
        for needs in itertools.combinations(FIELDS, count):
            problem.check(needs=needs, statistics=("mean", "entropy", "value_trace"))


# ---------------------------------------------------------------------- precision


def double(problem: Problem) -> Problem:
    return problem.to(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("q", [2, 20])
def test_low_precision_is_that_of_the_rounded_inputs(dtype, q):
    options = {"lead": (2, 3), "causal": True, "offset": 280}
    for more in ({}, {"log_weights": (2, 3, 300)}, {"log_weights": (1, 1, q, 300)}, {"mask": boolean(2, 1, 1, 300)}):
        problem = Problem.of(q, 300, 9, 17, **options, **more).to(dtype)
        ours, theirs = problem.answer("native"), double(problem).answer("dense")
        assert all(t.dtype == torch.float32 for t in ours[0].values())
        assert all(g.dtype == dtype for g in ours[1].values())
        size = {name: float(torch.where(t.isfinite(), t, 0).abs().max()) for name, t in theirs[0].items()}
        for name, expected in theirs[0].items():
            torch.testing.assert_close(ours[0][name].double(), expected, rtol=0, atol=3e-6 * max(1, size[name]))
        slack = 3e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        for name, expected in theirs[1].items():
            bound = slack * max(1, float(expected.abs().max()))
            torch.testing.assert_close(ours[1][name].double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("q", [1, 64])
@pytest.mark.parametrize("widths", [(64, 64), (9, 17)])
def test_variances_and_means_are_as_near_as_those_of_the_torch_path(q, widths):
    """float32, 300 keys: sums about a number far from the mean (the largest score, one key) lose digits."""
    bounds = {"score_variance": 6e-7, "value_trace": 6e-7, "atom_trace": 6e-7, "mean": 1e-6}
    for lead in ((40,), (41,)):
        problem = Problem.of(q, 300, *widths, lead=lead)
        problem.tensors["eta"] /= widths[0] ** 0.5
        problem = problem.to(torch.float32)
        ours, theirs = problem.answer("native")[0], double(problem).answer("dense")[0]
        for name, bound in bounds.items():
            size = max(1.0, float(theirs[name].abs().max()))
            assert float((ours[name].double() - theirs[name]).abs().max()) < bound * size, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_rounds_as_for_a_product(dtype):
    problem = Problem.of(20, 40, 8, 5, lead=(2,), causal=True, offset=20).to(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inside = problem.answer("native")
    assert all(g.dtype == torch.float32 for g in inside[1].values())
    rounded = problem.to(dtype).answer("native")
    for name, value in rounded[0].items():
        assert torch.equal(inside[0][name], value), name
    for name, slope in rounded[1].items():
        assert torch.equal(inside[1][name].to(dtype), slope), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [3, 40])
def test_sharp_scores(dtype, q):
    """Scores of a thousand: as near to the exact sums as scores of that size can be rounded."""
    problem = Problem.of(q, 300, 8, 5, causal=True, offset=270)
    problem.tensors["eta"] *= 1e3
    problem = problem.to(dtype)
    ours, theirs = problem.answer("native")[0], double(problem).answer("dense")[0]
    reach = 1e4 * torch.finfo(dtype).eps
    for name, expected in theirs.items():
        assert ours[name].isfinite().all()
        size = max(1.0, float(expected.abs().max()))
        power = 10 if name == "score_variance" else 1
        torch.testing.assert_close(ours[name].double(), expected, rtol=0, atol=4 * power * reach * size, msg=name)


@pytest.mark.parametrize("q", [3, 200])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": 40}], ids=["plain", "causal", "window"]
)
def test_a_common_offset_costs_traces_no_digits(options, q):
    """Values that lie at 10⁴: errors in float32 are those of the streaming kernel at most, or a few roundings."""
    problem = Problem.of(q, 200 + q, 8, 5, **options, offset=200)
    problem.tensors["values"] += 1e4
    problem = problem.to(torch.float32)
    names = ("value_trace", "atom_trace", "score_variance", "mean")
    answers = [problem.answer(b, names) for b in ("native", "streaming")]
    exact = double(problem).answer("dense", names)
    for part, roundings in ((0, 60), (1, 2000)):
        for name, expected in exact[part].items():
            if name.endswith(("trace", "variance")) or part:
                ours, theirs = (float((a[part][name].double() - expected).abs().max()) for a in answers)
                floor = roundings * torch.finfo(torch.float32).eps * float(expected.abs().max())
                assert ours <= max(floor, 1.5 * theirs), (name, ours, theirs, floor)


def test_one_late_outlier_leaves_gradients_of_traces_alone():
    """A value of 10⁶ that no query before 150 sees: their gradients had no digit right when one centre served all."""
    problem = Problem.of(300, 300, 16, 16, causal=True).to(torch.float32)
    problem.tensors["eta"] /= 4
    problem.tensors["values"][150] = 1e6
    slopes = {}
    for backend, case in (("native", problem), ("dense", double(problem))):
        given = case.leaves()
        found = moments(**given, **case.options, backend=backend, statistics=("value_trace", "atom_trace"))
        loss = found.value_trace[:150].sum() + found.atom_trace[:150].sum()
        slopes[backend] = torch.autograd.grad(loss, list(given.values()))
    for ours, theirs in zip(*slopes.values(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


# ---------------------------------------------------------------------- what is hidden, and what is not finite


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e300])
@pytest.mark.parametrize("hidden_by", ["mask", "pair mask", "weights", "pair weights", "causal", "window"])
@pytest.mark.parametrize("q", [3, 20])
def test_hidden_atoms_may_hold_anything(hidden_by, garbage, q):
    """Keys 30 to 39 are visible to no query; blocks that hold no other key are skipped."""
    n = 600
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[30:40] = hidden[256:512] = True
    w = normal(n, seed=5).masked_fill(hidden, -torch.inf)
    options = {
        "mask": {"mask": ~hidden},
        "pair mask": {"mask": (~hidden).repeat(q, 1)},
        "weights": {"log_weights": w},
        "pair weights": {"log_weights": w.repeat(q, 1)},
        "causal": {"causal": True, "offset": 29 - q},
        "window": {"window": 4, "offset": 20 - q},
    }[hidden_by]
    if hidden_by in ("causal", "window"):
        hidden[30:] = True
    clean = Problem.of(q, n, 4, 3, **options)
    dirty = Problem(dict(clean.tensors), clean.options)
    for name in ("atoms", "values"):
        dirty.tensors[name] = clean.tensors[name].masked_fill(hidden[:, None], garbage)
    ours = dirty.answer("native")
    same(ours, clean.answer("native"), 1e-12)
    assert not ours[1]["atoms"][hidden].any()
    assert not ours[1]["values"][hidden].any()


@pytest.mark.parametrize("statistics", [(), ("mean",), ("entropy",), ("max_score",), "all"], ids=str)
@pytest.mark.parametrize("kind", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", ["atoms", "values"])
@pytest.mark.parametrize("q", [4, 30])
def test_what_is_not_finite_shows_where_it_is_seen_in_every_backend(at, kind, statistics, q):
    """NaN for queries that see it, in every statistic, and nothing for the others; also where its score is −∞, and
    where no statistic reads the values."""
    problem = Problem.of(q, 40, 4, 3, causal=True, offset=0)
    problem.tensors["eta"] = problem.tensors["eta"].abs()
    clean = problem.answer("native", statistics)
    problem.tensors[at] = problem.tensors[at].clone()
    problem.tensors[at][q // 2, 1] = kind
    for backend in ("dense", "streaming", "native"):
        found, slopes = problem.answer(backend, statistics)
        for name, value in found.items():
            if name == "mean_log_weight":
                continue
            assert value[q // 2 :].isnan().all(), (backend, name)
            torch.testing.assert_close(value[: q // 2], clean[0][name][: q // 2], rtol=1e-12, atol=1e-12)
        assert backend == "fused" or slopes["eta"][: q // 2].isfinite().all()


@pytest.mark.parametrize("kind", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_where_all_is_visible(kind):
    """Then every query sees it, and numbers go their natural way, the same as in the reference."""
    problem = Problem.of(20, 40, 4, 3)
    problem.tensors["values"][5, 1] = kind
    ours, theirs = (problem.answer(b, ("mean", "entropy"))[0] for b in ("native", "dense"))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, equal_nan=True)


# ---------------------------------------------------------------------- the Fisher product


@pytest.mark.parametrize("q", [0, 1, 3, 17, 40])
@pytest.mark.parametrize("n", [0, 1, 33, 300])
def test_the_fisher_product_and_its_gradient(q, n):
    for count, options in enumerate(
        [
            {},
            {"causal": True, "offset": n - q},
            {"window": 9, "offset": 3},
            {"log_weights": (2, 3, n)},
            {"log_weights": (1, 1, q, n)},
            {"mask": boolean(2, 1, 1, n)},
            {"mask": boolean(q, n), "log_weights": (2, 3, n)},
        ]
    ):
        problem = Problem.of(q, n, 5 + 3 * (count % 2), lead=(2, 3), **options)
        vector = normal(*problem.tensors["eta"].shape, seed=8).requires_grad_()
        results = []
        for backend in ("native", "dense"):
            given = problem.leaves()
            with threads(1 if backend == "dense" else 1 + count % 3):
                product = fisher_product(**given, vector=vector, **problem.options, backend=backend)
                probe = normal(*product.shape, seed=9)
                slopes = torch.autograd.grad((product * probe).sum(), [*given.values(), vector], allow_unused=True)
            results.append([product.detach(), *(torch.zeros(()) if s is None else s for s in slopes)])
        for ours, theirs in zip(*results, strict=True):
            size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
            torch.testing.assert_close(ours.expand(theirs.shape), theirs, rtol=0, atol=1e-11 * size)


def test_the_fisher_product_of_many_keys():
    """More than fit into cache: blocks are centred one by one, gradients formed segment by segment."""
    eta, atoms, v = (normal(k, 8, seed=k).requires_grad_() for k in (9, 60_000, 9))
    eta, v = eta[:, :], v[:, :]
    results = []
    for backend in ("native", "dense"):
        product = fisher_product(eta, atoms, v, backend=backend)
        results.append([product.detach(), *torch.autograd.grad(product.sin().sum(), (eta, atoms, v))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * max(1.0, float(theirs.abs().max())))


def test_held_names_are_those_of_the_reference():
    given = Problem.of(3, 4, 2).tensors
    for statistics in ((), ("mean",), ("entropy",), ("atom_trace",), "all"):
        names = [held(moments(**given, backend=b, statistics=statistics)).keys() for b in ("native", "dense")]
        assert names[0] == names[1]
