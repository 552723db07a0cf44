"""The sweeps of the losses, native and in torch, against the definitions in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cumulant.kernels import losses
from cumulant.kernels.losses import LossPlan, PullInputs, reference, sweep_of
from cumulant.kernels.native import losses as native_losses
from cumulant.kernels.native.losses import NativeSweep
from cumulant.kernels.strips import positives_of
from cumulant.kernels.sweep import SweepResult, TorchSweep
from tests.compare import close
from tests.kernels.native.problems import native, normal, threads

SIZES = [(1, 1, 1), (1, 63, 2), (63, 1, 5), (63, 100, 17), (100, 257, 64), (257, 100, 33)]
SQUARES = [(1, 1, 3), (63, 63, 16), (130, 130, 7)]
ONE_SIDED = [
    LossPlan(),
    LossPlan(z_loss=0.1),
    LossPlan(smoothing=0.2),
    LossPlan(softcap=2.0),
    LossPlan(softcap=2.0, smoothing=0.1, z_loss=0.01),
]
SQUARE = [LossPlan(two_sided=True), LossPlan(exclude_self=True), LossPlan(two_sided=True, exclude_self=True)]


@dataclass(frozen=True)
class Problem:
    """Arguments of a sweep, and the weights of what it returns."""

    eta: Tensor
    atoms: Tensor
    bias: Tensor | None
    positives: Tensor
    plan: LossPlan
    weight: Tensor
    extra: Tensor

    @staticmethod
    def of(size: tuple[int, int, int], plan: LossPlan, table: bool, biased: bool = False, spread: float = 1) -> Problem:
        n, m, d = size
        bias = normal(m, seed=3).masked_fill(normal(m, seed=4) > 1, -torch.inf) if biased else None
        present = torch.ones(m, dtype=torch.bool) if bias is None else bias > -torch.inf
        if table:
            positives = (normal(n, m, seed=5) > 1) & present
        else:
            positives = (normal(n, seed=5).abs() * 1000).long() % m
            absent = (normal(n, seed=6) > 1) | ~present[positives]
            absent |= (positives == torch.arange(n)) & plan.exclude_self
            positives = positives.masked_fill(absent, -1)
        lines = n + m if plan.two_sided else n
        eta, atoms = normal(n, d, seed=1) * spread / d**0.5, normal(m, d, seed=2)
        return Problem(eta, atoms, bias, positives, plan, normal(lines, seed=7), normal(lines, seed=8))

    def run(self, sweep: type, dtype: torch.dtype = torch.float64) -> SweepResult:
        """All results of a sweep in a dtype."""
        bias, needs = None if self.bias is None else self.bias.to(dtype), (True, True, self.bias is not None)
        made = sweep(self.eta.to(dtype), self.atoms.to(dtype), bias, self.positives, self.plan)
        return made.run(self.weight.to(dtype), self.extra.to(dtype), needs)

    def defined(self) -> SweepResult:
        """The same by the definitions, rows and then columns, with gradients by autograd."""
        bias = torch.zeros_like(self.atoms[:, 0]) if self.bias is None else self.bias
        leaves = [t.clone().requires_grad_() for t in (self.eta, self.atoms, bias)]
        inputs = PullInputs(*leaves, self.weight, self.extra)
        matrix = positives_of(self.positives, len(self.atoms), self.plan.exclude_self)
        sides = [reference(inputs, matrix.dense(slice(0, len(self.eta)), False), self.plan, False, 0)]
        if self.plan.two_sided:
            sides.append(reference(inputs, matrix.dense(slice(0, len(self.atoms)), True), self.plan, True, 0))
        loss, g = (torch.cat(part) for part in zip(*sides, strict=True))
        finite = torch.where(loss == torch.inf, 0, self.weight * loss)
        total = (finite + self.extra * torch.where(g == -torch.inf, 0, g)).sum()
        found = torch.autograd.grad(total, leaves[: 2 if self.bias is None else 3])
        return SweepResult(loss.detach(), g.detach(), found)


def same(ours: SweepResult, theirs: SweepResult, tolerance: float) -> None:
    for mine, exact in zip((*ours[:2], *ours.gradients), (*theirs[:2], *theirs.gradients), strict=True):
        close(mine.double(), exact.double(), tolerance)


@pytest.fixture(params=[pytest.param(NativeSweep, marks=native), TorchSweep], ids=["native", "torch"])
def sweep(request):
    return request.param


@pytest.fixture(params=["one block", "small blocks"])
def blocks(request, monkeypatch):
    """As they are, or so small that every problem has several strips and blocks, the last ones shorter."""
    if request.param == "small blocks":
        for name, value in (("ROWS", 32), ("KEPT", 1), ("UNKEPT", 20), ("BLOCKS", (8, 24))):
            monkeypatch.setattr(native_losses, name, value)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("table", [False, True], ids=["index", "table"])
@pytest.mark.parametrize("plan", ONE_SIDED, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_side_is_its_definition(size, plan, table, biased, sweep, blocks):
    problem = Problem.of(size, plan, table, biased)
    if plan.smoothing and biased:  # an atom that is absent has an infinite share of the loss
        problem = Problem(**{**vars(problem), "bias": problem.bias.clamp_min(-3)})
    same(problem.run(sweep), problem.defined(), 1e-11)


@pytest.mark.parametrize("table", [False, True], ids=["index", "table"])
@pytest.mark.parametrize("plan", SQUARE, ids=str)
@pytest.mark.parametrize("size", SQUARES, ids=str)
def test_square_problems_are_their_definition(size, plan, table, sweep, blocks):
    problem = Problem.of(size, plan, table)
    same(problem.run(sweep), problem.defined(), 1e-11)


@pytest.mark.parametrize("spread", [1, 8, 30])
@pytest.mark.parametrize("plan", [LossPlan(), LossPlan(two_sided=True), LossPlan(softcap=3.0)], ids=str)
@native
def test_single_precision_is_no_worse_than_in_torch(plan, spread):
    """Ordinary and sharp scores: the largest error of every result, beside that of the sweep in torch."""
    problem = Problem.of((130, 300, 64), plan, table=False, spread=spread)
    exact = problem.defined()
    ours, torchs = (problem.run(kind, torch.float32) for kind in (NativeSweep, TorchSweep))
    flat = [(*r[:2], *r.gradients) for r in (exact, ours, torchs)]
    for want, mine, theirs in zip(*flat, strict=True):
        errors = [(found.double() - want).abs().amax() for found in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + 4e-7 * want.abs().amax()


@native
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("plan", [LossPlan(), LossPlan(two_sided=True)], ids=str)
def test_several_threads(count, plan, blocks):
    problem = Problem.of((130, 130, 19), plan, table=True)
    with threads(count):
        ours = problem.run(NativeSweep)
    same(ours, problem.defined(), 1e-11)


LAYOUTS = {
    "transposed": lambda t: t.T.contiguous().T,
    "rows apart": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    "columns apart": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    "negative": lambda t: torch.complex(t * 0, -t).conj().imag,
    "one row": lambda t: t[:1].expand_as(t),
}


@native
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, blocks):
    problem = Problem.of((40, 70, 21), LossPlan(), table=True)
    lay = LAYOUTS[layout]
    eta, atoms, table = lay(problem.eta), lay(problem.atoms), problem.positives.T.contiguous().T
    laid = Problem(**{**vars(problem), "eta": eta, "atoms": atoms, "positives": table})
    exact = Problem(**{**vars(problem), "eta": eta.clone(), "atoms": atoms.clone()})
    same(laid.run(NativeSweep), exact.defined(), 1e-11)
    assert all(g.is_contiguous() for g in laid.run(NativeSweep).gradients)


@native
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e300])
@pytest.mark.parametrize("plan", [LossPlan(), LossPlan(two_sided=True), LossPlan(softcap=2.0)], ids=str)
def test_what_is_not_finite_shows_where_it_does_in_torch(plan, number):
    """One coordinate of a row, and of an atom."""
    for name in ("eta", "atoms"):
        problem = Problem.of((40, 40, 6), plan, table=False)
        spoilt = getattr(problem, name).clone()
        spoilt[7, 2] = number
        problem = Problem(**{**vars(problem), name: spoilt})
        ours, torchs = problem.run(NativeSweep), problem.run(TorchSweep)
        for mine, theirs in zip((*ours[:2], *ours.gradients), (*torchs[:2], *torchs.gradients), strict=True):
            assert torch.equal(mine.isfinite(), theirs.isfinite())


@native
def test_only_wanted_gradients_are_formed():
    problem = Problem.of((33, 50, 9), LossPlan(), table=False, biased=True)
    exact = problem.defined()
    for slot in range(3):
        needs = (slot == 0, slot == 1, slot == 2)
        made = NativeSweep(problem.eta, problem.atoms, problem.bias, problem.positives, problem.plan)
        (gradient,) = made.run(problem.weight, problem.extra, needs).gradients
        close(gradient, exact.gradients[slot], 1e-11)


@native
def test_far_below_the_largest_score_is_exactly_nothing():
    eta, atoms = torch.tensor([[100.0]]), torch.tensor([[1.0], [0.0]])
    made = NativeSweep(eta, atoms, None, torch.tensor([0]), LossPlan())
    loss, log_normalizer, gradients = made.run(torch.ones(1), None, (True, True, False))
    assert loss == 0
    assert log_normalizer == 100
    assert not gradients[0].any()
    assert not gradients[1].any()


@native
def test_who_is_served_by_the_native_kernel():
    eta, index, plan = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), LossPlan()
    assert type(sweep_of(eta, eta, None, index, plan)) is NativeSweep
    assert type(sweep_of(eta, torch.nn.Parameter(eta), None, index, plan)) is NativeSweep

    class Odd(Tensor):
        pass

    assert type(sweep_of(eta, eta.as_subclass(Odd), None, index, plan)) is TorchSweep
    meta = eta.to("meta")
    assert native_losses.refusal(meta) == "it runs on the CPU, not on meta"
    with FakeTensorMode():
        assert losses.recorded()


@native
def test_memory_that_cannot_be_had_is_a_sentence(monkeypatch):
    from cumulant.kernels.native import call

    functions = dict(call.entries() or {}, loss_both=lambda _: -1)
    monkeypatch.setattr(call, "entries", lambda: functions)
    problem = Problem.of((3, 4, 2), LossPlan(), table=False)
    with pytest.raises(MemoryError, match="Use smaller batches"):
        problem.run(NativeSweep)
