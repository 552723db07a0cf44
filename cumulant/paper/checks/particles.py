"""L. The open question: do particles under attention and normalisation become Gaussian?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.stats import norm
from torch.nn.functional import layer_norm

from cumulant.dynamics import Ascend, Layer, Whiten, clusters, gaussian_band, kurtosis, run, w2_to_gaussian
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, measured, true
from cumulant.paper.checks.oracle import attention_mean
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

PARTICLES = 600


def _starts(inputs: RandomInputs) -> dict[str, np.ndarray]:
    """Four laws on the line."""
    n = (PARTICLES, 1)
    return {
        "Gaussian": inputs.normal(*n),
        "uniform": inputs.rng.uniform(-1, 1, n),
        "bimodal": inputs.rng.choice([-1.0, 1.0], n) + 0.5 * inputs.normal(*n),
        "gamma": inputs.rng.gamma(3.0, 1.0, n),
    }


def _layer(sign: int, scale: float, own: bool = True) -> Layer:
    """z ← white(z ± ½ Σ_j softmax_j(s⟨z_i,z_j⟩) z_j)."""
    return Layer(ascend=Ascend(step=0.5, sign=sign, scale=scale, self_term=own), renormalize=Whiten())


def _distances(inputs: RandomInputs, sign: int) -> tuple[list[str], np.ndarray, torch.Tensor]:
    """Names of the laws, W₂ to a Gaussian at the start and at the end, and the clouds at the end."""
    starts = _starts(inputs)
    path = run(_layer(sign, 0.5), tensor(np.stack(list(starts.values()))), 150, readouts=("w2_to_gaussian",), every=150)
    return list(starts), array(path.readings["w2_to_gaussian"][[0, -1]]), path.state


@check("L1", "with the sign of attention every law, a Gaussian sample too, ends farther from a Gaussian")
def ascent_leaves(inputs: RandomInputs) -> Iterator[Evidence]:
    names, (start, end), state = _distances(inputs, 1)
    z = np.sort(array(state[0, :, 0]))
    level = norm.ppf((np.arange(PARTICLES) + 0.5) / PARTICLES)
    direct = np.sqrt((((z - z.mean()) / z.std() - level) ** 2).mean())
    yield agrees("W₂ by sorting", w2_to_gaussian(state[0]), direct, 1e-12)
    for name, before, after in zip(names, start, end, strict=True):
        yield true(f"{name} leaves", after > max(0.3, before), f"W₂ {before:.3f} → {after:.3f}")
    band = gaussian_band(PARTICLES, 1).mean
    yield differs("as written, they end as near as a Gaussian sample", band, end.min(), 0.3, f"a sample has {band:.3f}")
    yield true("into a few clusters", bool((clusters(state, limit=60).count < PARTICLES / 10).all()))


@check("L2", "with the opposite sign, at s = ½, every law ends as near to a Gaussian as a Gaussian sample")
def descent_reaches(inputs: RandomInputs) -> Iterator[Evidence]:
    names, (start, end), state = _distances(inputs, -1)
    band = gaussian_band(PARTICLES, 1).mean
    for name, before, after in zip(names, start, end, strict=True):
        yield true(f"{name} arrives", after < 2 * band, f"W₂ {before:.3f} → {after:.3f}, a sample has {band:.3f}")
    z = array(state[1])
    moved = z - 0.5 * np.stack([attention_mean(0.5 * q, z) for q in z])
    moved -= moved.mean(0)
    yield agrees("one more step, by hand", _layer(-1, 0.5)(state[1]), moved / moved.std(0), 1e-10)


@check("L3", "full whitening with the sign of attention ends in d + 1 clusters; LayerNorm makes no Gaussian of them")
def fewest_clusters(inputs: RandomInputs) -> Iterator[Evidence]:
    for d in (1, 2):
        path = run(_layer(1, 0.5), tensor(inputs.normal(100, d)), 1500, readouts=(), tol=1e-7)
        ours = clusters(path.state)
        yield agrees(f"clusters in dimension {d}", ours.count, d + 1, 0.0, f"of {ours.sizes.tolist()} particles")
    states = layer_norm(tensor(inputs.normal(2000, 6)), [6], eps=0.0)
    lengths = states.square().sum(-1)
    yield agrees("|LayerNorm(z)|² = d, whatever z", lengths, 6.0, 1e-11)
    yield true("no Gaussian: its |z|² would vary by 2d", float(lengths.var()) < 1e-20)


@check("L4", "descent: the own weight equalises norms; without it outliers grow heavy tails")
def own_weight(inputs: RandomInputs) -> Iterator[Evidence]:
    start = tensor(inputs.rng.uniform(-1, 1, (300, 8)))
    ours = {}
    for own in (True, False):
        end = run(_layer(-1, 0.35, own), start, 80, readouts=()).state
        ours[own] = float(kurtosis(end))
    yield true("with it the kurtosis goes towards the sphere's −6/(d+2)", -0.7 < ours[True] < 0.0, f"{ours[True]:.3f}")
    yield true("without it tails are heavier", ours[False] > ours[True] + 0.2, f"{ours[False]:.3f}")
    yield measured("kurtosis without the own weight", ours[False])
