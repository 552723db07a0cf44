"""Models and plain NumPy filters that share nothing with the library, for the tests of filters."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from scipy import special

from cumulant.filters import SwitchingLinearGaussian
from tests.compare import close

NAN = float("nan")
FIELDS = (
    "prior_mean",
    "prior_covariance",
    "mean",
    "covariance",
    "mode_means",
    "mode_covariances",
    "mode_probabilities",
)


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def same(a, b, atol=1e-12, fields=(*FIELDS, "log_likelihood")):
    for name in fields:
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=atol, atol=atol, msg=lambda m, n=name: n + m
        )


def rows(rng, count, modes):
    return rng.dirichlet(np.ones(modes), size=count)


def parameters(modes=3, d=2, m=2, seed=0):
    """NumPy arrays of a model in which every parameter depends on the mode."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(modes, d, d)), rng.normal(size=(modes, m, m)), rng.normal(size=(modes, d, d))
    q, r, p = (a @ a.transpose(0, 2, 1) + 0.1 * np.eye(a.shape[-1]) for a in half)
    f, h = 0.7 * rng.normal(size=(modes, d, d)), rng.normal(size=(modes, m, d))
    offsets = rng.normal(size=(modes, d)), rng.normal(size=(modes, m))
    return rows(rng, modes, modes), f, q, h, r, *offsets, rng.normal(size=(modes, d)), p, rows(rng, 1, modes)[0]


def model_of(p, start="prior", **change) -> SwitchingLinearGaussian:
    names = ("state_offset", "observation_offset", "initial_mean", "initial_covariance", "initial_modes")
    return SwitchingLinearGaussian(
        *map(t, p[:5]), **dict(zip(names, map(t, p[5:]), strict=True)), start=start, **change
    )


def series(steps=4, m=2, seed=1, batch=()):
    return t(np.random.default_rng(seed).normal(size=(*batch, steps, m), scale=2))


def condition(x, p, y, h, c, r):
    """Posterior and log-likelihood of one observation; rows with NaN are dropped."""
    seen = ~np.isnan(y)
    if not seen.any():
        return x, p, 0.0
    h, c, r, y = h[seen], c[seen], r[np.ix_(seen, seen)], y[seen]
    s = h @ p @ h.T + r
    gain = np.linalg.solve(s, h @ p).T
    error = y - h @ x - c
    log_likelihood = -0.5 * (error @ np.linalg.solve(s, error) + np.linalg.slogdet(2 * np.pi * s)[1])
    return x + gain @ error, p - gain @ h @ p, log_likelihood


def mixture(weights, means, covariances):
    mean = np.tensordot(weights, means, 1)
    gaps = means - mean
    return mean, np.tensordot(weights, covariances, 1) + np.einsum("i,ia,ib->ab", weights, gaps, gaps)


class Oracle(NamedTuple):
    prior_mean: np.ndarray
    prior_covariance: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    mode_means: np.ndarray
    mode_covariances: np.ndarray
    mode_probabilities: np.ndarray
    log_likelihood: np.ndarray


def oracle(p, y, start, before, after):
    """Hypotheses in a dictionary from mode tuples to (weight, mean, covariance), collapsed as the two slots say."""
    transition, f, q, h, r, b, c, m0, p0, pi = p
    modes = range(len(pi))
    kept = {(s,): (pi[s], m0[s], p0[s]) for s in modes}
    out = []
    for k, observation in enumerate(y):
        if k or start == "belief":
            kept = merged(kept, after)
            grown = {(*key, j): (w * transition[key[-1], j], x, v) for key, (w, x, v) in kept.items() for j in modes}
            grown = merged(grown, before)
            moved = {
                a: (w, f[a[-1]] @ x + b[a[-1]], f[a[-1]] @ v @ f[a[-1]].T + q[a[-1]]) for a, (w, x, v) in grown.items()
            }
        else:
            moved = kept
        told = {a: condition(x, v, observation, h[a[-1]], c[a[-1]], r[a[-1]]) for a, (w, x, v) in moved.items()}
        joint = {a: moved[a][0] * np.exp(told[a][2]) for a in moved}
        total = sum(joint.values())
        kept = {a: (joint[a] / total, *told[a][:2]) for a in moved}
        by_mode = merged(kept, 1)
        each = [by_mode[(s,)] for s in modes]
        out.append(
            (
                *overall(moved),
                *overall(kept),
                *map(np.array, (list(zip(*each, strict=True))[1:])),
                np.array([e[0] for e in each]),
                np.log(total),
            )
        )
    return Oracle(*map(np.array, zip(*out, strict=True)))


def overall(kept):
    w, x, v = map(np.array, zip(*kept.values(), strict=True))
    return mixture(w / w.sum(), x, v)


def merged(kept, keep):
    """Moment-matched over all modes but the last ``keep``; with 0, one belief for all while the last mode is known."""
    if keep == 0:
        common = overall(kept)
        marginal = {}
        for key, (w, _, _) in kept.items():
            marginal[key[-1:]] = marginal.get(key[-1:], 0) + w
        return {key: (w, *common) for key, w in marginal.items()}
    groups = {}
    for key, value in kept.items():
        groups.setdefault(key[-keep:], {})[key] = value
    return {key: (sum(v[0] for v in group.values()), *overall(group)) for key, group in groups.items()}


def enumerated(p, y, start):
    """Every mode path with its own Kalman filter; the posterior of the last step."""
    transition, f, q, h, r, b, c, m0, p0, pi = p
    first = 0 if start == "belief" else 1
    weights, means, covariances, last = [], [], [], []
    for path in itertools.product(range(len(pi)), repeat=len(y) + 1 - first):
        x, v, log_weight = m0[path[0]], p0[path[0]], np.log(pi[path[0]])
        for k, observation in enumerate(y):
            s = path[k + 1 - first]
            if k + 1 - first > 0:
                log_weight += np.log(transition[path[k - first], s])
                x, v = f[s] @ x + b[s], f[s] @ v @ f[s].T + q[s]
            x, v, gained = condition(x, v, observation, h[s], c[s], r[s])
            log_weight += gained
        weights.append(log_weight)
        means.append(x)
        covariances.append(v)
        last.append(path[-1])
    weights = np.array(weights)
    total = special.logsumexp(weights)
    share = np.exp(weights - total)
    mode = np.array([share[np.array(last) == s].sum() for s in range(len(pi))])
    return *mixture(share, np.array(means), np.array(covariances)), mode, total


def agrees(filtered, reference, atol=1e-11):
    for name in Oracle._fields:
        close(getattr(filtered, name), getattr(reference, name), atol)
