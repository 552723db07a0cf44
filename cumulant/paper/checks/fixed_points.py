"""D. Contraction and fixed points: layer normalisation, retrieval without a residual, the descent sign."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import optimize
from scipy.spatial.distance import pdist
from torch.nn.functional import layer_norm

from cumulant import Empirical
from cumulant.dynamics import Ascend, Layer, SphereNorm, log_interaction_energy, run, sphere_equilibrium
from cumulant.geometry import maximum_entropy
from cumulant.hopfield import contraction_bound, retrieve
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import attention_mean, differences, log_normalizer
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.residual import ascend


def _normalise(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without gain, bias and epsilon."""
    return layer_norm(x, x.shape[-1:], eps=0.0)


def _slope(x: np.ndarray) -> np.ndarray:
    """The Jacobian of LayerNorm by autograd."""
    return array(torch.autograd.functional.jacobian(_normalise, tensor(x)))


@check("D1", "LayerNorm maps every token on a sphere: its Jacobian, and why no Gaussian comes out")
def layer_normalisation(inputs: RandomInputs) -> Iterator[Evidence]:
    x, d = inputs.normal(6) * 2.3, 6
    z = (x - x.mean()) / x.std()
    yield agrees("J by differences", _slope(x), differences(lambda e: (e - e.mean()) / e.std(), x), 1e-8)
    yield agrees("J = (1/σ)(I − 11ᵀ/d − zzᵀ/d)", _slope(x), (np.eye(d) - 1 / d - np.outer(z, z) / d) / x.std(), 1e-12)
    states = _normalise(tensor(inputs.normal(1000, d)))
    yield agrees("Σz = 0", states.sum(1), 0.0, 1e-12)
    yield agrees("|z|² = d for Gaussian states", states.square().sum(1), d, 1e-12)
    spread = states.square().sum(1).var().item()
    yield differs("a Gaussian: |z|² has variance 2d", 2 * d, spread, 1.0, f"variance {spread:.1e}")
    gain, bias = inputs.rng.uniform(0.5, 2.0, d), inputs.normal(d)
    learned = array(layer_norm(tensor(inputs.normal(1000, d)), [d], tensor(gain), tensor(bias), eps=0.0))
    yield agrees("with gain and bias, an ellipsoid", (((learned - bias) / gain) ** 2).sum(1), d, 1e-11)


@check("D2", "LayerNorm contracts by exactly σ: iff σ > 1")
def layer_contraction(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(6)
    x /= x.std()
    for sigma in (2.3, 0.4):
        norm = np.linalg.norm(_slope(x * sigma), 2)
        yield agrees(f"operator norm 1/σ at σ = {sigma}", norm, 1 / sigma, 1e-12)
    yield true("it contracts at 2.3 and expands at 0.4", np.linalg.norm(_slope(x * 2.3), 2) < 1 < norm)


@check("D3", "fixed keys and the sphere: G never decreases, and the iteration ends at a critical point of it")
def sphere_with_fixed_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    keys, start = 2 * _unit(inputs.normal(9, 4)), _unit(inputs.normal(1, 4))
    layer = Layer(ascend=Ascend(keys=tensor(keys)), renormalize=SphereNorm())
    path = run(layer, tensor(start), 3000, readouts={"G": layer.ascend.log_normalizer}, tol=1e-13)
    climbed = np.diff(array(path.readings["G"])[:, 0])
    yield true("G never decreases", climbed.min() > -1e-13, f"{len(climbed)} steps, least gain {climbed.min():.1e}")
    end = array(path.state)[0]
    mean = attention_mean(end, keys)
    yield agrees("at the end the ascent is radial", mean - (mean @ end) * end, 0.0, 1e-7)
    solved = sphere_equilibrium(Empirical(tensor(keys)), tensor(start[0]))
    yield agrees("the solver ends there too", solved.solution.value, end, 1e-6)


@check("D4", "self-attention and the sphere: Σ_ij e^{β⟨x_i,x_j⟩} never decreases, whatever β (X-4)")
def sphere_with_moving_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    for beta in (0.5, 2.0, 8.0, 30.0):
        start = _unit(inputs.normal(12, 3))
        layer = Layer(ascend=Ascend(scale=beta), renormalize=SphereNorm())
        energy = {"log energy": lambda x, beta=beta: log_interaction_energy(x, beta)}
        path = run(layer, tensor(start), 200, readouts=energy)
        gain = np.expm1(np.diff(array(path.readings["log energy"])))
        yield true(f"never at β = {beta:g}", gain.min() > -1e-12, f"least relative gain {gain.min():.1e}")
        direct = np.log(np.exp(beta * (start @ start.T)).sum() / 2)
        yield agrees(f"the energy at β = {beta:g}, summed", path.readings["log energy"][0], direct, 1e-11)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@check("D5", "attention without a residual has one fixed point where β(diam/2)² < 1")
def unique_fixed_point(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(8, 3)
    x *= 0.9 / np.linalg.norm(x, axis=1).max()
    bound = contraction_bound(tensor(x))
    yield agrees("β(diam/2)²", bound, (pdist(x).max() / 2) ** 2, 1e-12, f"{bound.item():.3f} < 1")
    yield true("below 1", bound < 1)
    truth = optimize.root(lambda e: attention_mean(e, x) - e, np.zeros(3), tol=1e-14)
    ours = retrieve(tensor(inputs.normal(20, 3) * 5), tensor(x), tol=1e-14)
    yield agrees("the root, from 20 starts", ours.state, truth.x, 1e-10)


@check("D6", "beyond the bound there are several, one near each pattern that stands out")
def several_fixed_points(inputs: RandomInputs) -> Iterator[Evidence]:
    x = 4 * np.linalg.qr(inputs.normal(3, 3))[0]
    bound = contraction_bound(tensor(x))
    yield true("β(diam/2)² exceeds 1", bound > 1, f"{bound.item():.1f}")
    ours = array(retrieve(tensor(x), tensor(x), tol=1e-14).state)
    roots = [optimize.root(lambda e: attention_mean(e, x) - e, start, tol=1e-14).x for start in x]
    yield agrees("the root near each pattern", ours, np.array(roots), 1e-10)
    yield agrees("which is nearly the pattern", ours, x, 1e-4)
    yield true("far apart", pdist(ours) > 1)


@check("D7", "the opposite sign, descent on G, converges to the parameter of mean zero and largest entropy")
def descent(inputs: RandomInputs) -> Iterator[Evidence]:
    frame, _ = np.linalg.qr(inputs.normal(3, 3))
    x = np.vstack([frame, -frame]) * inputs.rng.uniform(1.0, 1.5, (6, 1))  # 0 lies well inside their hull
    b = inputs.normal(6)
    lipschitz = (pdist(x).max() / 2) ** 2
    eta = inputs.normal(3)
    for _ in range(4000):
        mass = np.exp(x @ eta + b)
        eta = eta - mass @ x / mass.sum() / lipschitz
    ours = maximum_entropy(tensor(x), tensor(b))
    yield agrees("its end by plain descent", ours.x, eta, 1e-7)
    yield agrees("the mean there", attention_mean(array(ours.x), x, b), np.zeros(3), 1e-8)
    yield agrees("the value is the least G, and the largest entropy", ours.dual, log_normalizer(eta, x, b), 1e-10)
    a, c = inputs.normal(2, 200, 3) * 3
    h = Empirical(tensor(x), tensor(b))
    steps = [array(ascend(h, tensor(e), -2 / lipschitz).eta) for e in (a, c)]
    ratio = (np.linalg.norm(steps[0] - steps[1], axis=1) / np.linalg.norm(a - c, axis=1)).max()
    yield true("descent up to step 2/L never expands", ratio <= 1 + 1e-12, f"largest ratio {ratio:.4f} of 200 pairs")
