"""Fixed points: what is found, what is said about it, its gradient, and the splittings."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.distributions import Poisson

from cumulant import (
    Anderson,
    Box,
    Empirical,
    Gaussian,
    Measure,
    Sphere,
    Status,
    convolve,
    from_distribution,
    independent,
    product,
)
from cumulant.dynamics import splitting
from cumulant.dynamics.equilibrium import (
    METHODS,
    ascent_equilibrium,
    causal_equilibrium,
    descent_equilibrium,
    hopfield_equilibrium,
    self_attention_equilibrium,
    sphere_equilibrium,
    tangential_residual,
    zero_mean_point,
)
from cumulant.dynamics.renormalize import LayerNorm, Renormalize, RMSNorm, SphereNorm, Whiten
from cumulant.dynamics.splitting import cocoercivity, forward_backward, lipschitz_bound, peaceman_rachford
from cumulant.geometry import maximum_entropy
from cumulant.hopfield import retrieve
from tests import compare

close = partial(compare.close, rtol=0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(eta, x, w=0.0):
    """The mean by NumPy."""
    logits = x @ eta + w
    p = np.exp(logits - logits.max())
    return p @ x / p.sum()


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


# ---------------------------------------------------------------------- z = (1 − g) z + g ∇G(βz)


@pytest.mark.parametrize("gate", [0.4, 1.0, 1.5])
def test_hopfield_contraction_means_one_fixed_point(gate):
    keys, w = 0.4 * normal(8, 3), normal(8, seed=1)
    found = hopfield_equilibrium(keys, 5 * normal(20, 3, seed=2), beta=0.7, gate=gate, log_weights=w, tol=1e-14)
    root = optimize.root(lambda e: attention(0.7 * e, keys.numpy(), w.numpy()) - e, np.zeros(3), tol=1e-14).x
    close(found.solution.value, np.tile(root, (20, 1)))
    slope = 0.7 * (torch.pdist(keys).max() / 2) ** 2
    assert slope < 2 / 3  # so that at gate 1.5 it is |1 − g| that binds
    close(found.contraction, torch.maximum((1 - gate + gate * slope).abs(), torch.tensor(abs(1 - gate))).expand(20))
    assert found.unique.all()
    assert found.unique.shape == found.solution.status.shape == (20,)
    assert found.reason == f"contraction {found.contraction[0]:.4g} < 1: every start leads to the same point"
    assert found.exists.startswith("by Brouwer")


def test_hopfield_bound_bounds_the_iterated_map():
    keys = normal(9, 4)
    bound = hopfield_equilibrium(keys, normal(4), beta=2.0, gate=0.7).contraction
    h, a, b = Empirical(keys), normal(500, 4, seed=1), normal(500, 4, seed=2)
    step = 0.3 * (a - b) + 0.7 * (h.mean(2.0 * a) - h.mean(2.0 * b))
    ratio = torch.linalg.vector_norm(step, dim=-1) / torch.linalg.vector_norm(a - b, dim=-1)
    assert ratio.max() <= bound


def test_hopfield_beyond_the_bound_has_one_near_each_pattern():
    keys = 4 * torch.linalg.qr(normal(3, 3)).Q
    found = hopfield_equilibrium(keys, keys, tol=1e-14)
    close(found.solution.value, retrieve(keys, keys, tol=1e-14).state)
    roots = [optimize.root(lambda e: attention(e, keys.numpy()) - e, k, tol=1e-14).x for k in keys.numpy()]
    close(found.solution.value, np.array(roots), 1e-10)
    assert torch.pdist(found.solution.value).min() > 1
    assert not found.unique.any()
    assert "contraction 8 ≥ 1 proves nothing" in found.reason


def test_hopfield_heads_with_their_own_temperature():
    keys, beta = normal(2, 6, 3), torch.tensor([0.1, 9.0], dtype=torch.float64)
    found = hopfield_equilibrium(keys, normal(5, 3), beta=beta)
    assert found.solution.value.shape == (2, 5, 3)
    assert found.unique.tolist() == [[True] * 5, [False] * 5]
    largest = [f"{found.contraction[i, 0]:.4g}" for i in range(2)]
    assert found.reason.startswith(
        f"5 of 10: contraction {largest[0]} < 1: every start leads to the same point; 5 of 10: "
    )
    assert f"contraction {largest[1]} ≥ 1 proves nothing" in found.reason
    for i in range(2):
        alone = hopfield_equilibrium(keys[i], normal(5, 3), beta=beta[i].item())
        close(found.solution.value[i], alone.solution.value, 1e-13)
        close(found.contraction[i], alone.contraction, 1e-14)
    lone = hopfield_equilibrium(keys, normal(3), beta=beta)
    assert lone.solution.value.shape == (2, 3)
    assert lone.unique.shape == lone.contraction.shape == (2,)


def test_hopfield_masked_keys_do_not_count():
    keys = torch.cat([0.3 * normal(4, 2), 100 * torch.ones(1, 2).double()])
    w = torch.zeros(5).double()
    w[-1] = -torch.inf
    found, without = (
        hopfield_equilibrium(keys, normal(3, 2), log_weights=w),
        hopfield_equilibrium(keys[:-1], normal(3, 2)),
    )
    close(found.solution.value, without.solution.value)
    close(found.contraction, without.contraction)
    assert found.unique.all()
    rows = torch.stack([w, torch.zeros_like(w)])
    assert hopfield_equilibrium(keys, normal(2, 2), log_weights=rows).unique.tolist() == [True, False]
    assert hopfield_equilibrium(keys, normal(2), log_weights=rows).solution.value.shape == (2, 2)


def test_hopfield_without_keys_and_with_one():
    none = hopfield_equilibrium(torch.zeros(0, 2).double(), normal(3, 2))
    assert (none.solution.value == 0).all()
    assert none.unique.all()
    key = normal(1, 2)
    close(hopfield_equilibrium(key, normal(3, 2)).solution.value, key.expand(3, 2))


# ---------------------------------------------------------------------- z = b − γ ∇G(z)

centred = normal(7, 3)
MEASURES = {
    "atoms": Empirical(centred, normal(7, seed=1)),
    "one atom": Empirical(normal(1, 3)),
    "no atom": Empirical(torch.zeros(0, 3).double()),
    "gaussian": Gaussian(normal(3), torch.diag(torch.tensor([0.0, 0.5, 2.0]).double())),
    "sphere": Sphere(3, 1.5),
    "box": Box(-torch.ones(3).double(), torch.tensor([0.0, 1.0, 3.0]).double()),
    "heads": convolve(Empirical(normal(4, 3)), 0.5 * torch.eye(3).double() @ Empirical(normal(5, 3, seed=4))),
}


@pytest.mark.long
@pytest.mark.parametrize("step", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("name", MEASURES)
def test_descent_three_methods_one_solution(name, step):
    h, b = MEASURES[name], 3 * normal(4, 3, seed=2)
    found = {method: descent_equilibrium(h, b, step=step, method=method) for method in METHODS}
    for each in found.values():
        assert each.solution.converged.all()
        assert each.unique.all()
        z = each.solution.value
        close(z, found["newton"].solution.value, 1e-8)
        distance = torch.linalg.vector_norm(z + step * h.mean(z) - b, dim=-1)
        assert distance.max() < 1e-9
        close(each.solution.residual, distance, 1e-10)
    slope = step * lipschitz_bound(h).item()
    close(found["newton"].contraction, slope, 1e-13)
    assert found["newton"].solution.steps.max() <= 15
    if step:
        t = min(1.9 / slope if slope else math.inf, 1 / torch.finfo(torch.float64).eps)
        close(found["forward-backward"].contraction, 1 / (1 + t), 1e-15)
        assert found["forward-backward"].solution.steps.max() <= 2 + 33 / math.log1p(t)
        close(found["peaceman-rachford"].contraction, 1 / 3, 1e-15)
        assert found["peaceman-rachford"].solution.steps.max() <= 32


def test_descent_against_scipy_where_the_plain_iteration_would_fail():
    h, b = MEASURES["atoms"], 3 * normal(4, 3, seed=3)
    found = descent_equilibrium(h, b, step=50.0)
    x, w = h.atoms.numpy(), h.log_weights.numpy()
    for z, point in zip(found.solution.value, b.numpy(), strict=True):
        close(z, optimize.root(lambda e, p=point: e + 50 * attention(e, x, w) - p, z.numpy(), tol=1e-14).x, 1e-10)
    assert (found.contraction > 1).all()
    assert "strongly monotone" in found.reason


@pytest.mark.parametrize(("method", "stride"), [("forward-backward", 0.1), ("peaceman-rachford", 3.0)])
def test_every_step_of_a_splitting_contracts_as_stated(method, stride):
    h = MEASURES["atoms"]
    found = descent_equilibrium(h, 3 * normal(5, 3, seed=4), step=2.0, method=method, stride=stride)
    rate = 1 / 1.1 if method == "forward-backward" else 0.5
    close(found.contraction, rate, 1e-15)
    trace = found.solution.trace
    moving = trace[:-1] > 1e-9
    assert moving.sum() > 20
    assert (trace[1:] <= rate * trace[:-1] * (1 + 1e-6))[moving].all()
    early = descent_equilibrium(
        h, 3 * normal(5, 3, seed=4), step=2.0, method=method, stride=stride, max_steps=4
    ).solution
    distance = torch.linalg.vector_norm(early.value + 2.0 * h.mean(early.value) - 3 * normal(5, 3, seed=4), dim=-1)
    assert not early.converged.any()
    close(early.residual, distance, 1e-11)


def test_peaceman_rachford_with_stride_one_is_the_proximal_map():
    h, b = MEASURES["atoms"], 3 * normal(5, 3, seed=4)
    found = descent_equilibrium(h, b, step=2.0, method="peaceman-rachford", stride=1.0)
    assert found.solution.steps.tolist() == [0] * 5
    assert (found.contraction == 0).all()
    close(found.solution.value, descent_equilibrium(h, b, step=2.0).solution.value, 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_descent_of_a_batch_is_that_of_its_members(method):
    h, b = Empirical(normal(2, 5, 3), normal(2, 5, seed=1)), normal(4, 3, seed=2)
    found = descent_equilibrium(h, b, step=2.0, method=method)
    assert found.solution.value.shape == (2, 4, 3)
    for i in range(2):
        alone = descent_equilibrium(Empirical(h.atoms[i], h.log_weights[i]), b, step=2.0, method=method)
        close(found.solution.value[i], alone.solution.value)
        assert found.solution.steps[i].tolist() == alone.solution.steps.tolist()
    lone = descent_equilibrium(h, b[0], step=2.0, method=method)
    assert lone.solution.value.shape == (2, 3)
    close(lone.solution.value, found.solution.value[:, 0])
    assert lone.solution.trace.shape[1:] == lone.contraction.shape == lone.unique.shape == (2,)


def test_descent_without_a_known_bound():
    h = from_distribution(Poisson(torch.tensor([2.0]).double()))
    assert lipschitz_bound(h).tolist() == [math.inf]
    z = descent_equilibrium(h, torch.tensor([3.0]).double()).solution.value
    close(z + 2 * z.exp(), 3.0)
    assert descent_equilibrium(h, torch.tensor([3.0]).double(), step=0.0).contraction == 0
    with pytest.raises(ValueError, match=r'method: expected a measure with a known .* Use method="newton"'):
        descent_equilibrium(h, torch.tensor([3.0]).double(), method="forward-backward")


# ---------------------------------------------------------------------- z = b + γ ∇G(z)


@pytest.mark.parametrize("solver", [None, Anderson()])
def test_ascent_below_the_bound(solver):
    h, b = MEASURES["atoms"], normal(5, 3, seed=5)
    step = 0.9 / lipschitz_bound(h).item()
    found = ascent_equilibrium(h, b, step=step, solver=solver, tol=1e-13)
    far = ascent_equilibrium(h, b, step=step, start=b + 50, tol=1e-13)
    close(found.solution.value, far.solution.value, 1e-11)
    x, w = h.atoms.numpy(), h.log_weights.numpy()
    for z, point in zip(found.solution.value, b.numpy(), strict=True):
        close(z, optimize.root(lambda e, p=point: e - step * attention(e, x, w) - p, point, tol=1e-14).x, 1e-10)
    assert found.unique.all()
    close(found.contraction, 0.9, 1e-13)
    assert found.exists == "by Banach: the map is a contraction"


def test_ascent_beyond_the_bound_says_so():
    pair = Empirical(torch.tensor([[1.0], [-1.0]]).double())
    start = torch.tensor([[3.0], [-3.0], [0.0]]).double()
    found = ascent_equilibrium(pair, torch.zeros(1, 1).double(), step=2.0, start=start)
    root = optimize.brentq(lambda z: z - 2 * math.tanh(z), 1, 3, xtol=1e-14)
    close(found.solution.value[:, 0], [root, -root, 0.0], 1e-9)
    assert not found.unique.any()
    assert found.exists == "by Brouwer: ∇G is bounded"
    assert "2 ≥ 1 proves nothing: there may be several" in found.reason
    wide = ascent_equilibrium(Gaussian(torch.ones(2).double(), 3 * torch.eye(2).double()), normal(2), step=1.0)
    assert not wide.solution.converged
    assert wide.solution.value.isfinite().all()
    assert wide.exists.startswith("not guaranteed")
    narrow = Gaussian(torch.ones(2).double(), 0.5 * torch.eye(2).double())
    close(ascent_equilibrium(narrow, normal(2), step=1.0).solution.value, 2 * (normal(2) + 1), 1e-9)


# ---------------------------------------------------------------------- z = z ± γ ∇G(z)


def test_zero_mean_point_is_the_maximum_entropy_point():
    frame = torch.linalg.qr(normal(3, 3)).Q
    x, w = torch.cat([frame, -1.5 * frame]), normal(6, seed=1)
    found = zero_mean_point(Empirical(x, w))
    close(found.solution.value, maximum_entropy(x, w).x, 1e-10)
    assert np.abs(attention(found.solution.value.numpy(), x.numpy(), w.numpy())).max() < 1e-10
    assert found.unique
    assert found.contraction == 1
    assert found.reason == "G is strictly convex"
    repelled = zero_mean_point(Empirical(x, w), sign=1)
    close(repelled.contraction, 1 + lipschitz_bound(Empirical(x, w)))
    assert repelled.reason == "G is strictly convex; it repels, every step of ascent leads away from it"
    near = found.solution.value + 1e-4 * unit(normal(20, 3, seed=2))
    climbed = near + Empirical(x, w).mean(near)
    assert (torch.linalg.vector_norm(climbed - found.solution.value, dim=-1) > 1e-4).all()


def test_zero_mean_point_that_does_not_exist():
    x = torch.tensor([[[-1.0], [1.0], [3.0]], [[0.0], [1.0], [3.0]], [[0.5], [1.0], [3.0]]]).double()
    found = zero_mean_point(Empirical(x))
    assert found.solution.names() == ["CONVERGED", "BOUNDARY", "OUTSIDE"]
    assert found.unique.tolist() == [True, False, False]
    assert found.solution.value.isfinite().all()
    for i, words in enumerate(["inside", "on the boundary of", "outside"]):
        assert f"0 lies {words} the hull" in found.exists
        assert zero_mean_point(Empirical(x[i])).exists.startswith(f"0 lies {words} the hull")
    assert found.reason == "1 of 3: G is strictly convex; 2 of 3: there is none"
    assert zero_mean_point(Empirical(x[2])).reason == "there is none"
    assert zero_mean_point(Empirical(torch.zeros(0, 2).double())).solution.status == Status.OUTSIDE


def test_zero_mean_point_of_a_flat_support():
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0]]).double()
    found = zero_mean_point(Empirical(x))
    assert found.solution.converged
    assert not found.unique
    assert "the shortest solution" in found.reason
    assert abs(found.solution.value[0] - found.solution.value[1]) < 1e-12
    rows = torch.zeros(2, 3).double()
    rows[1, 1] = -torch.inf
    assert zero_mean_point(Empirical(x, rows)).solution.names() == ["CONVERGED", "OUTSIDE"]
    spread = zero_mean_point(Gaussian(torch.ones(2).double(), 2 * torch.eye(2).double()))
    close(spread.solution.value, [-0.5, -0.5])
    assert spread.unique


# ---------------------------------------------------------------------- z = RN(z + γ ∇G(sz))


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
    assert tangential_residual(h, z, scale=scale).max() < 1e-7
    assert (found.contraction < 1).all()
    assert not found.unique.any()


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
        best = optimize.minimize_scalar(
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
    assert tangential_residual(Empirical(2 * north), 0 * north).item() == 2
    heads = Empirical(normal(2, 5, 3))
    assert sphere_equilibrium(heads, normal(3)).solution.value.shape == (2, 3)


# ---------------------------------------------------------------------- tokens that are each other's keys


class Watching(Renormalize):
    """The unit sphere, and every cloud that was put on it."""

    ensemble = False

    def __init__(self):
        self.seen = []

    def __call__(self, y):
        self.seen.append(unit(y).detach())
        return unit(y)

    def operator_norm(self, y):
        return SphereNorm().operator_norm(y)


def energy(x, beta):
    return torch.logsumexp((beta * x @ x.mT).flatten(-2), -1)


@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0, 30.0])
@pytest.mark.parametrize("step", [0.3, 1.0, 10.0])
def test_self_attention_never_loses_energy(beta, step):
    watch = Watching()
    self_attention_equilibrium(normal(12, 3), scale=beta, step=step, renormalize=watch, max_steps=200)
    climb = torch.stack([energy(x, beta) for x in watch.seen])
    assert len(climb) > 10
    assert climb.diff().min() > -1e-12


def test_self_attention_ends_in_one_cluster():
    x = normal(3, 10, 4)
    found = self_attention_equilibrium(x, scale=0.4, radius=2.0)
    z = found.solution.value
    assert found.solution.converged.tolist() == [True] * 3
    close(z, z[:, :1].expand_as(z), 1e-8)
    close(torch.linalg.vector_norm(z, dim=-1), 2.0)
    assert found.contraction.tolist() == [1.0] * 3
    assert not found.unique.any()
    for i in range(3):
        alone = self_attention_equilibrium(x[i], scale=0.4, radius=2.0)
        close(z[i], alone.solution.value)
        assert alone.solution.steps == found.solution.steps[i]


def test_self_attention_that_holds_two_clusters():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]).double()
    found = self_attention_equilibrium(x, scale=60.0)
    assert found.solution.converged
    z = found.solution.value
    assert (z @ z.T).min() < 0.2
    assert found.contraction == math.inf  # not at the maximum of the energy, so nothing is known


def test_self_attention_with_one_token_and_other_normalisers():
    lone = self_attention_equilibrium(normal(1, 3))
    close(lone.solution.value, unit(normal(1, 3)))
    white = self_attention_equilibrium(normal(40, 2), scale=0.5, renormalize=Whiten(), max_steps=50)
    assert white.exists.startswith("not guaranteed")
    assert white.contraction == math.inf
    close(white.solution.value.mean(0), [0.0, 0.0], 1e-12)


# ---------------------------------------------------------------------- left to right


def causal_layer(x, scale, step, norm):
    logits = (scale * x @ x.mT).masked_fill(~torch.ones(x.shape[-2], x.shape[-2]).tril().bool(), -torch.inf)
    return norm(x + step * torch.softmax(logits, -1) @ x)


@pytest.mark.parametrize(
    "norm", [None, RMSNorm(), RMSNorm(torch.tensor([1.0, 0.5, 1.4]).double())], ids=["sphere", "rms", "gain"]
)
def test_causal_left_to_right_is_where_the_whole_layer_ends(norm):
    x, scale, step = normal(2, 6, 3), 0.2, 0.8
    found = causal_equilibrium(x, scale=scale, step=step, renormalize=norm, tol=1e-13)
    norm = SphereNorm() if norm is None else norm
    whole = norm(x)
    for _ in range(300):
        whole = causal_layer(whole, scale, step, norm)
    assert found.solution.converged.all()
    close(found.solution.value, whole, 1e-10)
    assert found.solution.status.shape == found.solution.steps.shape == found.contraction.shape == (2, 6)
    assert found.solution.trace.shape[1:] == (2, 6)


def test_causal_where_tokens_may_rest_in_several_places():
    x, norm = normal(2, 6, 3), RMSNorm(torch.tensor([1.0, 0.5, 1.4]).double())
    found = causal_equilibrium(x, scale=1.3, renormalize=norm, tol=1e-13).solution.value
    whole = norm(x)
    for _ in range(300):
        whole = causal_layer(whole, 1.3, 1.0, norm)
    for rest in (found, whole):
        close(causal_layer(rest, 1.3, 1.0, norm), rest, 1e-10)
    assert (found - whole).abs().max() > 1


def test_causal_contraction_bounds_the_jacobian_of_each_token():
    norm, scale = LayerNorm(1 + 0.3 * normal(4), 0.5 * normal(4, seed=1)), 0.45
    found = causal_equilibrium(normal(4, 4, seed=1), scale=scale, renormalize=norm)
    x = found.solution.value
    traces = []
    for i in range(4):
        keys = x[: i + 1]
        p = torch.softmax(scale * keys @ x[i], 0)
        apart = keys - p @ keys
        traces.append((p * apart.square().sum(-1)).sum())
        inner = scale * traces[-1] + p[-1] * (1 + scale * apart[-1].norm() * x[i].norm())
        close(found.contraction[i], norm.operator_norm((x[i] + p @ keys)[None])[0] * (1 + inner), 1e-10)

        def step(z, i=i):
            keys = torch.cat([x[:i], z[None]])
            return norm((z + torch.softmax(scale * keys @ z, 0) @ keys)[None])[0]

        slope = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(step, x[i]), ord=2)
        assert slope <= found.contraction[i]
    assert max(traces) > 1e-3


def test_causal_on_the_sphere_each_climbs_what_came_before():
    x, watch = normal(5, 3), Watching()
    with torch.no_grad():
        found = causal_equilibrium(x, scale=2.0, renormalize=watch).solution
    steps = iter(watch.seen[1:])
    for i in range(5):
        climb = torch.cat([unit(x)[i : i + 1], *(next(steps) for _ in range(int(found.steps[i])))])
        next(steps)  # the evaluation that passed the test
        if i:
            heights = Empirical(found.value[:i]).log_normalizer(2.0 * climb)
            assert heights.diff().min() > -1e-12
            assert heights[-1] > heights[0]
    assert causal_equilibrium(x).exists.startswith("each token climbs G of the tokens before it")
    assert causal_equilibrium(x, renormalize=RMSNorm()).exists.startswith("not guaranteed")


def test_causal_on_the_sphere_everyone_follows_the_first():
    found = causal_equilibrium(normal(7, 4), radius=3.0, scale=0.2)
    first = 3 * unit(normal(7, 4)[:1])
    close(found.solution.value, first.expand(7, 4), 1e-8)
    assert found.solution.steps[0] == 0
    close(found.contraction, (1 + 1 / torch.arange(1.0, 8.0).double()) / 2, 1e-8)
    trace = found.solution.trace
    for i in range(1, 7):
        last = int(found.solution.steps[i]) - 2
        assert (trace[last, i] / trace[last - 1, i]).item() == pytest.approx(found.contraction[i].item(), rel=1e-3)
    assert not found.unique.any()
    lone = causal_equilibrium(normal(1, 4))
    close(lone.solution.value, unit(normal(1, 4)))


def test_a_sample_does_not_feel_its_batch_mates():
    keys, x = normal(2, 5, 3), normal(2, 4, 3, seed=1)
    other_keys, other = keys.clone(), x.clone()
    other_keys[1], other[1] = 2 * normal(5, 3, seed=2), 7 * normal(4, 3, seed=3)
    solved = [
        *(lambda k, z, m=m: descent_equilibrium(Empirical(k), z, step=3.0, method=m) for m in METHODS),
        lambda k, z: hopfield_equilibrium(k, z),
        lambda k, z: ascent_equilibrium(Empirical(k), z, step=0.1),
        lambda k, z: sphere_equilibrium(Empirical(k), z),
        lambda k, z: self_attention_equilibrium(z, scale=0.5),
        lambda k, z: causal_equilibrium(z, scale=0.5),
    ]
    for solve in solved:
        ours, theirs = solve(keys, x).solution, solve(other_keys, other).solution
        assert torch.equal(ours.value[0], theirs.value[0])
        assert torch.equal(ours.steps[0], theirs.steps[0])


# ---------------------------------------------------------------------- gradients


def gradients(value, parameters, seed=9):
    weight = normal(*value.shape, seed=seed)
    return torch.autograd.grad((value * weight).sum(), parameters)


def same_gradients(implicit, unrolled, parameters):
    for ours, theirs in zip(gradients(implicit, parameters), gradients(unrolled, parameters), strict=True):
        assert theirs.abs().max() > 1e-3
        close(ours, theirs, 1e-6)


@pytest.mark.parametrize("gate", [1.0, 0.6])
def test_hopfield_gradient_is_the_unrolled_one(gate):
    keys, w = normal(6, 3).requires_grad_(), normal(6, seed=1).requires_grad_()
    beta, start = torch.tensor(0.4, dtype=torch.float64, requires_grad=True), normal(4, 3, seed=2)
    found = hopfield_equilibrium(keys, start, beta=beta, gate=gate, log_weights=w)
    unrolled = retrieve(start, keys, beta=beta, gate=gate, log_weights=w, steps=300).state
    same_gradients(found.solution.value, unrolled, (keys, beta, w))


@pytest.mark.parametrize("method", METHODS)
def test_descent_gradient_is_the_unrolled_one(method):
    keys, w, b = (
        normal(6, 3).requires_grad_(),
        normal(6, seed=1).requires_grad_(),
        normal(4, 3, seed=2).requires_grad_(),
    )
    h = Empirical(keys, w)
    found = descent_equilibrium(h, b, step=2.0, method=method)
    z = b.detach()
    for _ in range(400):
        z = z + 0.1 * (b - 2.0 * h.mean(z) - z)
    same_gradients(found.solution.value, z, (keys, w, b))


def test_ascent_gradient_is_the_unrolled_one_and_right_where_it_repels():
    keys, b = (0.5 * normal(6, 3)).requires_grad_(), normal(4, 3, seed=2).requires_grad_()
    h = Empirical(keys)
    z = b.detach()
    for _ in range(300):
        z = b + 0.8 * h.mean(z)
    same_gradients(ascent_equilibrium(h, b, step=0.8).solution.value, z, (keys, b))
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    top = ascent_equilibrium(Empirical(torch.tensor([[1.0], [-1.0]]).double()), zero, step=2.0)
    close(torch.autograd.grad(top.solution.value.sum(), zero)[0], [-1.0], 1e-9)  # 1/(1 − 2)


def test_sphere_gradient_is_the_unrolled_one():
    keys, scale = normal(6, 3).requires_grad_(), torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    h, start = Empirical(keys), normal(4, 3, seed=2)
    found = sphere_equilibrium(h, start, scale=scale, tol=1e-13)
    z = unit(start)
    for _ in range(500):
        z = unit(z + h.mean(scale * z))
    same_gradients(found.solution.value, z, (keys, scale))


def test_causal_gradient_is_the_unrolled_one():
    gain, bias = (1 + 0.3 * normal(4)).requires_grad_(), (0.5 * normal(4, seed=1)).requires_grad_()
    scale, x = torch.tensor(0.45, dtype=torch.float64, requires_grad=True), normal(4, 4, seed=1)
    norm = LayerNorm(gain, bias)
    found = causal_equilibrium(x, scale=scale, renormalize=norm, tol=1e-13)
    whole = norm(x)
    for _ in range(400):
        whole = causal_layer(whole, scale, 1.0, norm)
    assert torch.pdist(whole.detach()).min() > 1e-3
    same_gradients(found.solution.value, whole, (gain, bias, scale))


def test_causal_gradient_towards_the_first_token():
    x = normal(5, 3).requires_grad_()
    whole = unit(x)
    for _ in range(200):
        whole = causal_layer(whole, 1.0, 1.0, unit)
    same_gradients(causal_equilibrium(x, tol=1e-13).solution.value, whole, (x,))


def test_gradients_against_differences():
    keys, b = normal(4, 2).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    beta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    settle, loose = {"tol": 1e-14}, {"atol": 1e-6, "check_undefined_grad": False}
    assert torch.autograd.gradcheck(
        lambda k, t: hopfield_equilibrium(k, b.detach(), beta=t, **settle).solution.value, (keys, beta), **loose
    )
    assert torch.autograd.gradcheck(
        lambda k, t: descent_equilibrium(Empirical(k), t, step=1.5).solution.value, (keys, b), **loose
    )
    around = torch.cat([keys, -keys.detach()])
    assert torch.autograd.gradcheck(lambda k: zero_mean_point(Empirical(k)).solution.value, (around,), **loose)


SOLVED = {
    "hopfield": lambda keys, steps: hopfield_equilibrium(keys, normal(4, 3), beta=0.5, max_steps=steps, tol=0.0),
    "forward-backward": lambda keys, steps: descent_equilibrium(
        Empirical(keys), normal(4, 3), method="forward-backward", max_steps=steps, tol=0.0
    ),
    "peaceman-rachford": lambda keys, steps: descent_equilibrium(
        Empirical(2 * keys), normal(4, 3), method="peaceman-rachford", max_steps=steps, tol=0.0
    ),
    "ascent": lambda keys, steps: ascent_equilibrium(Empirical(keys), normal(4, 3), step=0.3, max_steps=steps, tol=0.0),
    "sphere": lambda keys, steps: sphere_equilibrium(Empirical(keys), normal(4, 3), max_steps=steps, tol=0.0),
}


@pytest.mark.parametrize("name", SOLVED)
def test_memory_does_not_grow_with_the_steps(name):
    keys = normal(6, 3).requires_grad_()
    saved, counted = {}, {}
    many = 60 if name == "peaceman-rachford" else 1000  # each of its steps is a minimisation
    for steps in (10, many):
        with Saved() as saved[steps]:
            counted[steps] = SOLVED[name](keys, steps).solution.steps.max()
    assert counted[10] == 10
    assert counted[many] > 30
    assert saved[10].tensors == saved[many].tensors > 0
    assert saved[10].numbers == saved[many].numbers


# ---------------------------------------------------------------------- monotone operators

BOUNDED = {
    **MEASURES,
    "batch": Empirical(normal(2, 7, 3)),
    "masked": Empirical(3 * normal(7, 3), normal(7, seed=1).masked_fill(normal(7, seed=1) < 0, -torch.inf)),
    "masked rows": Empirical(3 * normal(7, 3), normal(4, 7, seed=1).masked_fill(normal(4, 7, seed=1) < 0, -torch.inf)),
    "shifted, tilted, scaled": 3.0 * MEASURES["atoms"].shift(normal(3)).tilt(normal(3, seed=1)),
    "image": normal(3, 3, seed=6) @ MEASURES["atoms"],
    "product": product(Empirical(normal(4, 2)), Gaussian(torch.zeros(1).double(), 2 * torch.eye(1).double())),
    "independent": independent(Empirical(normal(3, 4, 1))),
    "union": Empirical(normal(4, 3)) + Empirical(normal(3, 3, seed=1) + 2),
    "masked union": Empirical(normal(4, 3), torch.tensor([0.0, -torch.inf, 1.0, 0.0]).double()) + MEASURES["atoms"],
}


@pytest.mark.parametrize("name", BOUNDED)
def test_lipschitz_bound_and_cocoercivity(name):
    h = BOUNDED[name]
    count = h.query_rows or 60
    bound = lipschitz_bound(h)
    assert bound.shape == (*h.batch_shape, *([] if h.query_rows is None else [count]))
    for seed in range(3):
        a, b = 2 * normal(count, 3, seed=seed), 2 * normal(count, 3, seed=seed + 10)
        slack = cocoercivity(h, a, b)
        assert slack.shape == (*h.batch_shape, count)
        assert slack.min() > -1e-12
        top = torch.linalg.eigvalsh(h.fisher(a))[..., -1]
        assert (top <= (bound if h.query_rows else bound[..., None]) * (1 + 1e-12) + 1e-15).all()
    if h.query_rows is None:
        close(cocoercivity(h, a[0], b[0]), slack[..., 0])


def test_lipschitz_bounds_that_are_exact():
    assert lipschitz_bound(MEASURES["gaussian"]) == 2
    for h in (Sphere(3, 1.5), MEASURES["box"]):
        top = torch.linalg.eigvalsh(h.fisher(torch.zeros(3).double()))[-1]
        assert lipschitz_bound(h).item() == pytest.approx(top.item(), rel=1e-12)
    pair = Empirical(torch.tensor([[1.0], [-3.0]]).double(), torch.tensor([0.0, 7.0]).double())
    balance = torch.tensor([7.0 / 4]).double()  # equal weights: the largest variance two points can have
    assert lipschitz_bound(pair).item() == pytest.approx(pair.fisher(balance).item(), rel=1e-12) == 4
    radii = torch.tensor([1.0, 2.0]).double()
    assert lipschitz_bound(Sphere(2, radii)).tolist() == [0.5, 2.0]


def test_lipschitz_bound_of_many_atoms_is_looser_but_holds(monkeypatch):
    few = [BOUNDED["atoms"], BOUNDED["masked rows"]]
    exact = [lipschitz_bound(h) for h in few]
    monkeypatch.setattr(splitting, "EXACT", 3)
    for h, tight in zip(few, exact, strict=True):
        loose = lipschitz_bound(h)
        assert loose.shape == tight.shape
        assert (loose >= tight).all()
        assert (loose > tight).any()
    x = BOUNDED["atoms"].atoms
    close(lipschitz_bound(BOUNDED["atoms"]), (x - x.mean(0)).square().sum(-1).max())


def test_unions_of_unbounded_measures_have_no_bound():
    mixture = Gaussian(torch.zeros(1).double(), torch.eye(1).double()) + Empirical(torch.ones(1, 1).double())
    assert lipschitz_bound(mixture) == math.inf
    one = torch.ones(1).double()
    close(cocoercivity(mixture, one, 0 * one), mixture.mean(one)[0] - mixture.mean(0 * one)[0])


def test_splittings_of_a_problem_with_an_edge():
    """min |z| + ½|z − c|²: A = ∂|z| has the soft threshold as resolvent, B z = z − c."""
    c = torch.tensor([[2.0, -0.3, 0.5], [-4.0, 1.0, 0.0]]).double()
    truth = c.sign() * (c.abs() - 1).clamp_min(0)

    def threshold(y, t):
        return y.sign() * (y.abs() - t).clamp_min(0)

    t = torch.tensor([0.5, 1.5]).double()
    found = forward_backward(lambda y: threshold(y, t[:, None]), lambda z: z - c, torch.zeros_like(c), step=t)
    close(found.value, truth, 1e-9)
    for gate in (1.0, 0.5):
        split = peaceman_rachford(
            lambda y: threshold(y, 0.7), lambda y: (y + 0.7 * c) / 1.7, torch.zeros_like(c), gate=gate
        )
        assert split.converged.all()
        close(split.value, truth, 1e-9)


# ---------------------------------------------------------------------- what is refused

h, z = MEASURES["atoms"], normal(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: descent_equilibrium(h, z, step=-1.0), ValueError, r"descent_equilibrium.step: expected a number ≥ 0"),
        (lambda: descent_equilibrium(h, z, step=math.nan), ValueError, "descent_equilibrium.step"),
        (lambda: descent_equilibrium(h, z, method="euler"), ValueError, "method: expected one of newton, forward-back"),
        (
            lambda: descent_equilibrium(h, z, method="forward-backward", stride=9.0),
            ValueError,
            r"stride: expected 0 < t < 2/\(γL\) = 0\.",
        ),
        (
            lambda: descent_equilibrium(h, z, method="peaceman-rachford", stride=0.0),
            ValueError,
            "stride: expected a positive number",
        ),
        (lambda: descent_equilibrium(h, z.float()), TypeError, "Empirical.descent_equilibrium: expected dtype"),
        (lambda: descent_equilibrium(h, z[:, :2]), ValueError, r"descent_equilibrium: expected queries of shape"),
        (lambda: descent_equilibrium(h, z / 0), ValueError, "descent_equilibrium.b: expected finite values"),
        (lambda: ascent_equilibrium(h, z, step=-1.0), ValueError, "ascent_equilibrium.step"),
        (lambda: ascent_equilibrium(h, z, step=1.0, start=normal(3, 3)), ValueError, "ascent_equilibrium.start"),
        (lambda: zero_mean_point(h, sign=0), ValueError, r"zero_mean_point.sign: expected -1 \(descent\)"),
        (lambda: sphere_equilibrium(h, 0 * z), ValueError, "2 of 2 tokens have norm 0"),
        (lambda: sphere_equilibrium(h, z, radius=0.0), ValueError, "SphereNorm.radius"),
        (lambda: sphere_equilibrium(h, z, scale=-1.0), ValueError, "scale: expected one positive number"),
        (lambda: sphere_equilibrium(h, z, step=0.0), ValueError, "sphere_equilibrium.step: expected a positive"),
        (lambda: self_attention_equilibrium(normal(3)), ValueError, r"x: expected at least one token \(\*batch"),
        (lambda: self_attention_equilibrium(normal(0, 3)), ValueError, "x: expected at least one token"),
        (lambda: self_attention_equilibrium(0 * z), ValueError, "2 of 2 tokens have norm 0"),
        (lambda: self_attention_equilibrium(z, renormalize=abs), TypeError, "renormalize: expected a Renormalize"),
        (lambda: causal_equilibrium(z, renormalize=Whiten()), ValueError, "a normaliser of single tokens, got Whiten"),
        (lambda: causal_equilibrium(z.int()), TypeError, "causal_equilibrium.x: expected a floating dtype"),
        (lambda: hopfield_equilibrium(z, z, beta=-1.0), ValueError, "hopfield.beta"),
        (lambda: hopfield_equilibrium(z, z, gate=2.0), ValueError, "Damped.gate"),
        (lambda: self_attention_equilibrium(z, scale=-1.0), ValueError, "scale: expected a positive number, got -1.0"),
        (
            lambda: forward_backward(abs, abs, 0.0, step=1.0),
            TypeError,
            "forward_backward.start: expected a torch.Tensor",
        ),
        (
            lambda: forward_backward(abs, abs, z, step=0.0),
            ValueError,
            "forward_backward.step: expected positive finite",
        ),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()
