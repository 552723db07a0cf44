"""Runs one cloud through one kind of layer and classifies its final state (§5.5).

    z⁺ = RN(z + v Σ_j softmax_j(s ⟨z_i,z_j⟩) z_j)

The outcome is the first of these that holds:

    rank collapse    norms of the ensemble: an effective rank below 0.6 of what it was, and more than one cluster
    clusters         one cluster; or fewer than N/10, and farther from a Gaussian than at the start
    uniform          per-token norms: sliced W₂ to the uniform law on their sphere below twice that of an i.i.d. sample
    Gaussian         sliced W₂ below twice that of an i.i.d. Gaussian sample of the same N and d
    nearer           W₂ to a Gaussian below half of what it was at the start
    undecided        none of these after the last step
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics import (
    Ascend,
    BatchNorm,
    Layer,
    LayerNorm,
    Renormalize,
    RMSNorm,
    Whiten,
    clusters,
    effective_rank,
    gaussian_band,
    kurtosis,
    run,
    skewness,
    w2_to_gaussian,
)
from cumulant.paper.experiments.experiment import Row

LAWS = ("gaussian", "uniform", "bimodal", "gamma")
NORMALISERS: dict[str, Renormalize] = {"full": Whiten(), "diag": BatchNorm(), "rms": RMSNorm(), "ln": LayerNorm()}
OUTCOMES = ("Gaussian", "nearer", "uniform", "clusters", "rank collapse", "undecided")
STEPS, TOL = 150, 1e-9


class Cell(NamedTuple):
    """One point of the grid; the initial laws run as a batch."""

    normaliser: str
    v: float
    s: float
    d: int
    n: int
    steps: int = STEPS
    laws: tuple[str, ...] = LAWS


def start(law: str, n: int, d: int, seed: int) -> Tensor:
    """n particles with independent coordinates of this law, before any normalisation, float64.

    >>> start("bimodal", 4, 1, 0).shape
    torch.Size([4, 1])
    """
    rng = np.random.default_rng([seed, LAWS.index(law), n, d])
    drawn = {
        "gaussian": lambda: rng.standard_normal((n, d)),
        "uniform": lambda: rng.uniform(-1, 1, (n, d)),
        "bimodal": lambda: rng.choice([-1.0, 1.0], (n, d)) + 0.5 * rng.standard_normal((n, d)),
        "gamma": lambda: rng.gamma(3.0, size=(n, d)),
    }
    return torch.from_numpy(drawn[law]())


def layer_of(v: float, s: float, normaliser: str) -> Layer:
    """The layer with value v (its sign is the direction), logit scale s and one of the four normalisers."""
    return Layer(ascend=Ascend(step=abs(v), sign=1 if v > 0 else -1, scale=s), renormalize=NORMALISERS[normaliser])


def run_cell(cell: Cell, seed: int) -> list[Row]:
    """One row for each initial law: its statistics at the start and the end, and the outcome."""
    cloud = torch.stack([start(law, cell.n, cell.d, seed) for law in cell.laws])
    layer = layer_of(cell.v, cell.s, cell.normaliser)
    path = run(layer, cloud, cell.steps, readouts={"w2": w2_to_gaussian}, every=10, tol=TOL)
    end, w2 = path.state, path.readings["w2"]
    dim = cell.d - (cell.normaliser == "ln")
    sphere = cell.normaliser in ("rms", "ln")
    away = w2_to_uniform(end, dim) if sphere else torch.full((len(cell.laws),), torch.nan)
    band = _gaussian_band(cell.n, cell.d)
    sphere_band = uniform_band(cell.n, cell.d, dim) if sphere else float("nan")
    count = clusters(end, limit=cell.n // 10).count
    rank = (effective_rank(layer.init(cloud)), effective_rank(end))
    rows: list[Row] = []
    for i, law in enumerate(cell.laws):
        row: Row = cell._asdict() | {
            "law": law,
            "w2_start": float(w2[0, i]),
            "w2_end": float(w2[-1, i]),
            "w2_gaussian": band,
            "w2_uniform_end": float(away[i]) if sphere else None,
            "w2_uniform": sphere_band if sphere else None,
            "skewness": float(skewness(end[i])),
            "kurtosis": float(kurtosis(end[i])),
            "rank_start": float(rank[0][i]),
            "rank_end": float(rank[1][i]),
            "clusters": int(count[i]),
            "halt": path.halt.name,
            "taken": int(path.times[-1]),
        }
        del row["laws"]
        rows.append(row | {"outcome": outcome(row), "seed": seed})
    return rows


def outcome(row: Mapping[str, Any]) -> str:
    """The outcome of a row, by the rule above.

    >>> outcome({"normaliser": "full", "n": 600, "clusters": 2, "rank_start": 1.0, "rank_end": 1.0, "w2_start": 0.05,
    ...          "w2_end": 0.9, "w2_gaussian": 0.05, "w2_uniform": None, "w2_uniform_end": None})
    'clusters'
    """
    few = row["clusters"] < row["n"] / 10 and row["w2_end"] > row["w2_start"]
    flat = row["rank_end"] < 0.6 * row["rank_start"]
    sphere = row["w2_uniform"] is not None
    if not sphere and flat and row["clusters"] > 1:
        return "rank collapse"
    if row["clusters"] == 1 or few:
        return "clusters"
    if sphere:
        return "uniform" if row["w2_uniform_end"] < 2 * row["w2_uniform"] else "undecided"
    if row["w2_end"] < 2 * row["w2_gaussian"]:
        return "Gaussian"
    return "nearer" if row["w2_end"] < row["w2_start"] / 2 else "undecided"


def w2_to_uniform(x: Tensor, dim: int, directions: int = 64) -> Tensor:
    """Sliced W₂, as `w2_to_gaussian`, of particles on a sphere of radius √d to the uniform law there."""
    along = torch.from_numpy(np.random.default_rng(1).standard_normal((directions, x.shape[-1])))
    if dim < x.shape[-1]:
        along = along - along.mean(-1, keepdim=True)  # the sphere of LayerNorm lies in Σz = 0
    along = along / torch.linalg.vector_norm(along, dim=-1, keepdim=True)
    z = (along @ x.mT).sort(-1).values / sqrt(x.shape[-1] / dim)
    return (z - _uniform_quantiles(x.shape[-2], dim)).square().mean(-1).sqrt().mean(-1)


@lru_cache(maxsize=32)
def _uniform_quantiles(n: int, dim: int) -> Tensor:
    """Quantiles (k+½)/n of a coordinate of the uniform law on the sphere of radius √dim: of t² ~ Beta(½, (dim−1)/2)."""
    from scipy.stats import beta

    level = (np.arange(n) + 0.5) / n
    if dim == 1:
        return torch.from_numpy(np.sign(level - 0.5))
    size = np.sqrt(dim * beta.ppf(np.abs(2 * level - 1), 0.5, (dim - 1) / 2))
    return torch.from_numpy(np.sign(level - 0.5) * size)


@lru_cache(maxsize=32)
def _gaussian_band(n: int, d: int) -> float:
    return gaussian_band(n, d).mean


@lru_cache(maxsize=32)
def uniform_band(n: int, d: int, dim: int, draws: int = 20) -> float:
    """`w2_to_uniform` of i.i.d. samples of that law, on average."""
    rng = np.random.default_rng(0)
    norm = NORMALISERS["ln" if dim < d else "rms"]
    samples = [norm(torch.from_numpy(rng.standard_normal((n, d)))) for _ in range(draws)]
    return float(torch.stack([w2_to_uniform(x, dim) for x in samples]).mean())
