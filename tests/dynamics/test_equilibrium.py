"""Fixed points on the sphere: what the iteration reaches, how fast, and its gradient."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from scipy import optimize

from cumulant import Empirical, Measure
from cumulant.dynamics.equilibrium import sphere_equilibrium
from tests import compare

close = partial(compare.close, rtol=0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x):
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class Saved:
    """Counts what autograd keeps for backward."""

    def __init__(self):
        self.tensors, self.numbers = 0, 0

    def pack(self, tensor):
        self.tensors, self.numbers = self.tensors + 1, self.numbers + tensor.numel()
        return tensor

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


class Watched(Measure):
    """Remembers where its mean was asked for."""

    def __init__(self, base):
        self.base, self.dim, self.seen = base, base.dim, []

    def log_normalizer(self, eta):
        return self.base.log_normalizer(eta)

    def mean(self, eta):
        self.seen.append(eta.detach())
        return self.base.mean(eta)

    def fisher(self, eta):
        return self.base.fisher(eta)


@pytest.mark.parametrize(("radius", "scale", "step"), [(1.0, 1.0, 1.0), (2.0, 3.0, 0.2), (0.5, 2.0, 40.0)])
def test_sphere_climbs_to_a_critical_point(radius, scale, step):
    h = Watched(Empirical(normal(12, 4), normal(12, seed=1)))
    found = sphere_equilibrium(h, normal(8, 4, seed=2), radius=radius, scale=scale, step=step)
    assert found.solution.converged.all()
    climb = torch.stack([h.log_normalizer(eta) for eta in h.seen[: found.solution.trace.shape[0]]])
    assert (climb.diff(dim=0) >= -1e-12 * climb[:-1].abs()).all()
    assert climb[-1].sum() > climb[0].sum() + 0.1
    z = found.solution.value
    close(torch.linalg.vector_norm(z, dim=-1), radius, 1e-14)
    mean = h.mean(scale * z)
    assert (mean - (mean * z).sum(-1, keepdim=True) * z / radius**2).abs().max() < 1e-7  # the tangential part
    assert (found.contraction < 1).all()


def test_sphere_contraction_is_the_measured_rate():
    h = Empirical(normal(12, 4))
    found = sphere_equilibrium(h, normal(4, 4, seed=2), scale=2.0, step=0.1, tol=1e-13)
    trace = found.solution.trace
    for i in range(4):
        last = int(found.solution.steps[i]) - 20
        assert (trace[last, i] / trace[last - 1, i]).item() == pytest.approx(found.contraction[i].item(), rel=1e-3)


def test_sphere_against_scipy_on_the_circle():
    h = Empirical(normal(5, 2), normal(5, seed=1))
    found = sphere_equilibrium(h, normal(6, 2, seed=2), tol=1e-13)

    def height(t):
        return -h.log_normalizer(torch.tensor([math.cos(t), math.sin(t)], dtype=torch.float64)).item()

    for z in found.solution.value:
        angle = math.atan2(z[1], z[0])
        best: Any = optimize.minimize_scalar(
            height, bounds=(angle - 0.1, angle + 0.1), method="bounded", options={"xatol": 1e-10}
        )
        assert best.x == pytest.approx(angle, abs=1e-6)


def test_sphere_edges():
    north = torch.tensor([[0.0, 1.0]]).double()
    stuck = sphere_equilibrium(Empirical(-north), north)  # z + ∇G = 0: critical, and not left
    close(stuck.solution.value, north)
    assert stuck.solution.converged
    gone = sphere_equilibrium(Empirical(-north), north + 1e-3)
    close(gone.solution.value, -north, 1e-8)
    none = sphere_equilibrium(Empirical(torch.zeros(0, 2).double()), normal(3, 2))
    close(none.solution.value, unit(normal(3, 2)))
    line = sphere_equilibrium(Empirical(torch.tensor([[2.0], [-1.0]]).double()), torch.tensor([[-3.0], [0.1]]).double())
    assert line.solution.value[:, 0].tolist() in ([1.0, 1.0], [-1.0, 1.0])
    heads = Empirical(normal(2, 5, 3))
    assert sphere_equilibrium(heads, normal(3)).solution.value.shape == (2, 3)


def test_a_sample_does_not_feel_its_batch_mates():
    keys, x = normal(2, 5, 3), normal(2, 4, 3, seed=1)
    other_keys, other = keys.clone(), x.clone()
    other_keys[1], other[1] = 2 * normal(5, 3, seed=2), 7 * normal(4, 3, seed=3)
    ours, theirs = (sphere_equilibrium(Empirical(k), z).solution for k, z in ((keys, x), (other_keys, other)))
    assert torch.equal(ours.value[0], theirs.value[0])
    assert torch.equal(ours.steps[0], theirs.steps[0])


def test_sphere_gradient_is_the_unrolled_one():
    keys, scale = normal(6, 3).requires_grad_(), torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    h, start = Empirical(keys), normal(4, 3, seed=2)
    found = sphere_equilibrium(h, start, scale=scale, tol=1e-13)
    z = unit(start)
    for _ in range(500):
        z = unit(z + h.mean(scale * z))
    weight = normal(*z.shape, seed=9)
    ours, theirs = (torch.autograd.grad((value * weight).sum(), (keys, scale)) for value in (found.solution.value, z))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        close(a, b, 1e-6)


def test_memory_does_not_grow_with_the_steps():
    keys = normal(6, 3).requires_grad_()
    saved, counted = {}, {}
    for steps in (10, 1000):
        with Saved() as saved[steps]:
            solution = sphere_equilibrium(Empirical(keys), normal(4, 3), max_steps=steps, tol=0.0).solution
            counted[steps] = solution.steps.max()
    assert counted[10] == 10
    assert counted[1000] > 30
    assert saved[10].tensors == saved[1000].tensors > 0
    assert saved[10].numbers == saved[1000].numbers


h, z = Empirical(normal(6, 3)), normal(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: sphere_equilibrium(h, z.float()), TypeError, "Empirical.sphere_equilibrium: expected dtype"),
        (lambda: sphere_equilibrium(h, z / 0), ValueError, "sphere_equilibrium.start: expected finite values"),
        (lambda: sphere_equilibrium(h, 0 * z), ValueError, "2 of 2 tokens have norm 0"),
        (lambda: sphere_equilibrium(h, z, radius=0.0), ValueError, "SphereNorm.radius"),
        (lambda: sphere_equilibrium(h, z, scale=-1.0), ValueError, "scale: expected one positive number"),
        (lambda: sphere_equilibrium(h, z, step=0.0), ValueError, "sphere_equilibrium.step: expected a positive"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()
