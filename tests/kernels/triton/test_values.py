"""Kernels in Triton, run by its interpreter, against the reference in float64: every statistic, every gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _round_f32_to_tf32  # pyright: ignore[reportPrivateUsage]

from cumulant import moments
from cumulant.kernels import attention_profile, operator
from cumulant.kernels.triton import launch
from cumulant.kernels.triton.interpreter import interpreter
from tests.kernels.native.problems import Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy: ∞ − ∞ where nothing reads it
STATISTICS = ("mean", "entropy", "score_variance", "effective_atoms")  # and no traces
VALUES, GRADIENTS = 2e-6, 1e-5  # largest errors in float32, relative to the largest number of the reference or to 1
GQA = {"lead": (2, 4), "keys": (2, 2)}
PROBLEMS = {
    "own values": Problem.of(5, 45, 7, 9, lead=(2,)),
    "values are the atoms": Problem.of(17, 19, 7),
    "grouped heads": Problem.of(5, 19, 7, 9, **GQA),
    "heads that share all keys": Problem.of(3, 19, 7, 9, lead=(5,), keys=()),
    "causal": Problem.of(70, 40, 7, 9, causal=True, offset=-20),
    "causal, cached": Problem.of(20, 40, 7, 9, causal=True, offset=12),
    "causal window": Problem.of(7, 45, 7, 9, **GQA, causal=True, offset=12, window=5),
    "window on both sides": Problem.of(20, 45, 7, 9, offset=2, window=5),
    "window beyond the keys": Problem.of(5, 9, 7, offset=2, window=1 << 62),
    "weights of keys": Problem.of(5, 19, 7, 9, **GQA, log_weights=(2, 2, 19)),
    "weights of pairs": Problem.of(5, 19, 7, 9, lead=(2, 2), log_weights=(2, 2, 5, 19)),
    "weights of pairs, shared": Problem.of(5, 19, 7, 9, lead=(2, 2), log_weights=(1, 2, 1, 19)),
    "weights of pairs, grouped": Problem.of(5, 19, 7, 9, **GQA, log_weights=(1, 1, 5, 19), causal=True, offset=14),
    "sink": Problem.of(5, 19, 7, 9, lead=(2, 2), sink=0.3, log_weights=(2, 2, 19)),
    "sinks of heads": Problem.of(5, 19, 7, 9, **GQA, sink=(2, 4)),
    "wide": Problem.of(9, 20, 70, 130),
    "wide values": Problem.of(9, 20, 3, 150),
    "one query, many keys": Problem.of(1, 70, 7, 9, lead=(2,), causal=True, offset=60),
    "few queries, sink, weights": Problem.of(3, 70, 7, 9, sink=0.3, log_weights=(70,)),
    "few grouped queries": Problem.of(1, 70, 7, lead=(4,), keys=(2,), window=40, offset=60),
    "one key": Problem.of(3, 1, 7, 9),
    "no keys": Problem.of(3, 0, 7, 9, lead=(2,)),
    "no queries": Problem.of(0, 3, 7, 9, lead=(2,)),
    "no width": Problem.of(3, 5, 0, 2),
    "no width of values": Problem.of(3, 5, 2, 0),
    "mask of keys": Problem.of(5, 19, 7, 9, **GQA, mask=torch.arange(19) % 3 > 0),
    "mask of pairs": Problem.of(5, 19, 7, 9, **GQA, mask=torch.arange(5 * 19).reshape(5, 19) % 3 > 0),
    "a row without keys": Problem.of(5, 19, 7, 9, **GQA, mask=torch.arange(5)[:, None].expand(5, 19) != 2),
    "three batch axes, one shared": Problem.of(3, 7, 5, 4, lead=(2, 3, 2), keys=(2, 1, 2)),
}


SHORT = (
    *("causal, cached", "few queries, sink, weights", "weights of pairs, grouped", "wide", "a row without keys"),
    *("no keys", "no queries", "no width", "one key"),
)


def long(names):
    """The names as parameters; in `make test` only those that are SHORT."""
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in names]


def errors(problem: Problem, statistics, dtype=torch.float32) -> dict[str, float]:
    """Of each statistic and gradient, relative to the largest of the reference, or to 1."""
    problem = problem.to(dtype)
    with interpreter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "SPLIT", 32)  # keys that few queries share among programs; 256 take the interpreter long
        ours = problem.answer("triton", statistics)
    theirs = problem.to(torch.float64).answer("dense", statistics)
    found = {}
    for kind, got, expected in (("", ours[0], theirs[0]), ("d ", ours[1], theirs[1])):
        for name in got.keys() & expected.keys():
            a, b = got[name].double(), expected[name]
            assert a.shape == b.shape
            assert torch.equal(a.isfinite(), b.isfinite())
            assert torch.equal(a[~a.isfinite()], b[~b.isfinite()])
            a, b = a[a.isfinite()], b[b.isfinite()]
            found[kind + name] = float((a - b).abs().max() / b.abs().max().clamp_min(1)) if a.numel() else 0.0
    return found


@pytest.mark.parametrize("name", long(PROBLEMS))
@pytest.mark.parametrize(
    "flattened", [False, pytest.param(True, marks=pytest.mark.long)], ids=["as they lie", "flattened"]
)
def test_values_and_gradients_are_those_of_the_reference(name, flattened, monkeypatch):
    if flattened:
        monkeypatch.setattr(operator, "_kind_of_plan", lambda backend, eta: None)
    statistics = (*STATISTICS, "max_score") if flattened else STATISTICS
    for what, error in errors(PROBLEMS[name], statistics).items():
        assert error < (GRADIENTS if what.startswith("d ") else VALUES), what


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_half_precision_is_summed_in_float32(name, dtype):
    rounding = torch.finfo(dtype).eps  # of gradients, which are returned in it
    for what, error in errors(PROBLEMS[name], STATISTICS, dtype).items():
        assert error < (rounding if what.startswith("d ") else VALUES), what


@pytest.mark.parametrize(
    "statistic",
    ["mean_score", *(pytest.param(name, marks=pytest.mark.long) for name in ("mean", "max_score", *STATISTICS[1:]))],
)
def test_one_statistic_at_a_time(statistic):
    for what, error in errors(PROBLEMS["causal window"], (statistic,)).items():
        assert error < (GRADIENTS if what.startswith("d ") else VALUES), what


def test_sharp_scores():
    problem = PROBLEMS["causal, cached"]
    eta = problem.tensors["eta"] * 30
    found = errors(replace(problem, tensors={**problem.tensors, "eta": eta}), STATISTICS)
    assert found["log_normalizer"] < VALUES
    assert found["mean"] < 30 * VALUES  # scores of 300 are rounded at 3e-5
    assert found["d values"] < 30 * VALUES


@pytest.mark.parametrize(
    "garbage", [float("nan"), *(pytest.param(value, marks=pytest.mark.long) for value in (float("inf"), 3e38))]
)
def test_what_is_hidden_is_absent(garbage):
    problem = PROBLEMS["grouped heads"]
    atoms, values = (problem.tensors[name].clone() for name in ("atoms", "values"))
    mask = torch.ones(19, dtype=torch.bool)
    mask[[0, 7, 18]] = False
    clean = replace(problem, options={"mask": mask})
    atoms[..., 7, :], values[..., [0, 18], :] = garbage, garbage
    dirty = replace(clean, tensors={**problem.tensors, "atoms": atoms, "values": values})
    with interpreter():
        expected, found = (p.to(torch.float32).answer("triton", STATISTICS) for p in (clean, dirty))
    for a, b in zip(expected, found, strict=True):
        for name, tensor in a.items():
            assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("at", ["atoms", pytest.param("values", marks=pytest.mark.long)])
def test_a_query_that_sees_what_is_not_finite_has_no_numbers(at):
    problem = PROBLEMS["causal, cached"].to(torch.float32)
    broken = problem.tensors[at].clone()
    broken[22, 2] = torch.nan  # visible from query 10 on
    with interpreter(), torch.no_grad():
        found = replace(problem, tensors={**problem.tensors, at: broken}).answer("triton", (*STATISTICS, "max_score"))[
            0
        ]
        clean = problem.answer("triton", (*STATISTICS, "max_score"))[0]
    for name in ("log_normalizer", "mean", "mean_score", "score_variance", "max_score", "log_sum_square"):
        assert found[name][10:].isnan().all(), name
        assert torch.equal(found[name][:10], clean[name][:10]), name


def test_rows_without_keys_have_no_gradient_whatever_comes_in():
    eta, atoms = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    with interpreter():
        m = moments(eta, atoms, mask=torch.tensor([[True], [False]]), backend="triton", statistics=STATISTICS)
        (m.mean[1] * torch.nan).sum().backward()
    assert m.log_normalizer[1] == -torch.inf
    assert not m.mean[1].any()
    assert not eta.grad.any()
    assert not atoms.grad.any()


def test_splits_of_the_keys_change_the_last_digits_only(monkeypatch):
    problem = PROBLEMS["few queries, sink, weights"].to(torch.float32)
    with interpreter(), torch.no_grad():
        monkeypatch.setattr(launch, "SPLIT", 32)
        split = problem.answer("triton", (*STATISTICS, "max_score"))[0]
        monkeypatch.setattr(launch, "MOST_SPLITS", 1)
        whole = problem.answer("triton", (*STATISTICS, "max_score"))[0]
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=2e-6, atol=2e-6)


def test_second_derivatives_are_those_of_the_reference():
    problem = Problem.of(3, 5, 2, 2, log_weights=(5,))

    def second(backend: str, dtype: torch.dtype):
        x = [t.to(dtype).requires_grad_() for t in problem.tensors.values()]
        m = moments(x[0], x[1], x[2], log_weights=x[3], backend=backend, statistics=STATISTICS)
        first = torch.autograd.grad(m.mean.square().sum() + m.entropy.sum(), x, create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), x)

    with interpreter():
        found = second("triton", torch.float32)
    for a, b in zip(found, second("dense", torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b.masked_fill(~b.isfinite(), 0), rtol=1e-4, atol=1e-4)


def test_autocast():
    q, k, v = (torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    with interpreter(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = moments(q, k, v, causal=True, backend="triton")
    rounded = [t.bfloat16() for t in (q, k, v)]
    expected = moments(*rounded, causal=True, backend="dense")
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean, expected.mean, rtol=2e-6, atol=2e-6)


def test_the_largest_logit_of_every_head():
    q, k, v = PROBLEMS["grouped heads"].to(torch.float32).tensors.values()
    expected = attention_profile(q, k, v, causal=True, offset=3, scale=0.5)
    with interpreter():
        found = attention_profile(q, k, v, causal=True, offset=3, scale=0.5)
    torch.testing.assert_close(found.max_logit.amax(-1), expected.max_logit.amax(-1), rtol=VALUES, atol=VALUES)
    torch.testing.assert_close(found.moments.entropy, expected.moments.entropy, rtol=VALUES, atol=VALUES)


def tensor_cores(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product of float32 as TF32 tensor cores form it in three passes: each side in two parts of 11 bits."""
    parts = []
    for side in (a.data, b.data):
        high = _round_f32_to_tf32(side)
        parts.append((high, _round_f32_to_tf32(side - high)))
    (high, low), (right, rest) = parts
    assert a.data.dtype == np.float32
    return TensorHandle(high @ rest + low @ right + high @ right + d.data, d.dtype.scalar)


@pytest.mark.parametrize("name", long([name for name in PROBLEMS if name not in ("one key", "no width", "no keys")]))
def test_products_rounded_as_tensor_cores_round_them_are_precise_enough(name, monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", tensor_cores)
    for what, error in errors(PROBLEMS[name], STATISTICS).items():
        assert error < (GRADIENTS if what.startswith("d ") else VALUES), what


@pytest.mark.long
def test_a_compiled_graph_holds_one_operator_and_calls_the_kernels():
    q, k, v = (t.to(torch.float32).requires_grad_() for t in PROBLEMS["grouped heads"].tensors.values())

    def loss(q, k, v, backend):
        m = moments(q, k, v, causal=True, offset=14, backend=backend, statistics=STATISTICS)
        return m.mean.square().sum() + m.entropy.sum() + m.score_variance.sum()

    with interpreter():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(q, k, v, "triton"), (q, k, v))
    expected = torch.autograd.grad(loss(q.double(), k.double(), v.double(), "dense"), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=GRADIENTS * float(b.abs().max().clamp_min(1)))


def test_transforms():
    q, k, v = PROBLEMS["causal, cached"].to(torch.float32).tensors.values()

    def slopes(backend, *x):
        def entropy(q):
            m = moments(q, *x[1:], causal=True, offset=12, backend=backend, statistics=STATISTICS)
            return m.entropy.sum()

        return torch.func.vmap(torch.func.grad(entropy))(torch.stack([x[0], 2 * x[0]]))

    with interpreter():
        found = slopes("triton", q, k, v)
    expected = slopes("dense", q.double(), k.double(), v.double())
    bound = GRADIENTS * float(expected.abs().max().clamp_min(1))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)
