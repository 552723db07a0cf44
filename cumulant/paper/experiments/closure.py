"""Gaussian summaries of keys: the error of a few Gaussians, and when the closure by one breaks down (§4, §5).

    one Gaussian    ∇G = μ + Ση                                                                               (S1-C1)
    centroids       softmax over (log count, mean) of each cluster
    mixture         Σ_n w_n (μ_n + Σ_nη),   w_n = softmax_n(log N_n + ⟨μ_n,η⟩ + ½ηᵀΣ_nη)                      (S1-P2')

Without a norm the covariance of one Gaussian obeys Ċ = 2C² and is infinite at t = 1/(2λ_max) (S3-R5).
"""

from __future__ import annotations

from functools import reduce
from math import exp, inf, sqrt
from operator import add
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics import Ascend, GaussianFlow, Layer, Whiten, effective_keys, run
from cumulant.dynamics.closure import blow_up_time, covariance_flow
from cumulant.dynamics.finite_sample import condensed
from cumulant.figures import BLUE, COLOURS, FAINT, INK, ORANGE, RED, figure
from cumulant.measures import Empirical, Gaussian, Measure
from cumulant.paper.experiments.experiment import Result, Row, Setting, expect, experiment
from cumulant.paper.experiments.tables import column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS, CLUSTERS, DIM, QUERIES = 4_000, 8, 6, 400
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NAMES = {"gaussian": "one Gaussian", "centroids": "centroids", "mixture": "a Gaussian each (P2′)"}
PARTICLES, STEPS, BEYOND = 2_000, 100, 1.2
APART = 0.1  # relative difference of variances from which the closure counts as broken


@experiment(
    "closure",
    "Can a few Gaussians stand for the keys, and for how long can one stand for the whole cloud?",
    rests_on="S1-C1, S1-P2, S1-P2', S3-R5",
    takes="ten seconds",
)
def closure(setting: Setting) -> Result:
    rng = np.random.default_rng(setting.seed)
    errors = _compression(rng)
    setting.progress(1, 2, "keys")
    path = _blow_up(rng)
    setting.progress(2, 2, "blow-up")
    mixture, one, centroids = (column(errors, name) for name in ("mixture", "gaussian", "centroids"))
    wins = sum(a < b for a, b in zip(mixture, centroids, strict=True))
    broken = min((t for t, off in zip(column(path, "t"), column(path, "off"), strict=True) if off > APART), default=inf)
    (end,) = column(path, "particles", t=1.0)
    half = max(column([r for r in path if float(r["t"] or 0) <= 0.5], "off"))
    growth = column(path, "longest_over_bound")
    numbers = CLUSTERS * (1 + DIM + DIM * (DIM + 1) // 2)
    return Result(
        tables={"errors": errors, "blow_up": path},
        figures={"closure": lambda: draw(errors, path, broken)},
        verdict=(
            f"A few can, until a cluster condenses; one cannot for long. For {KEYS:,} keys in {CLUSTERS} clusters (d = "
            f"{DIM}) a Gaussian for each cluster, {numbers} numbers in the place of {KEYS * DIM:,}, gives attention to "
            f"a relative squared error of {_errors_text(mixture)} at query scale ½, 1, 2 and 4; centroids alone "
            f"{_errors_text(centroids)}, one Gaussian for all {_errors_text(one)}. It fails where ηᵀΣ_nη > 2 log N_n: "
            f"at scale {SCALES[-1]:g} that is so for {100 * column(errors, 'condensed')[-1]:.0f} % of queries and "
            f"clusters, and the error is {mixture[-1]:.2f}. Over time without a norm the covariance of the Gaussian "
            f"closure is infinite at t = 1/(2λ_max). {PARTICLES:,} particles follow it to {100 * half:.1f} % until "
            f"half of that time, are {100 * APART:.0f} % apart at {broken:.2f} of it, and pass the blow-up with "
            f"variance {end:.1f}: none grows faster than e^t (the longest has {growth[-1]:.2f} of that in the end). "
            f"Limits: true cluster labels; one start; Euler steps of 1/{STEPS} of the blow-up time, for particles and "
            "closure alike."
        ),
        expectations=(
            expect("a Gaussian each beats centroids at every scale", wins == len(SCALES), f"{wins} of {len(SCALES)}"),
            expect("to 1e-3 at query scale 1", mixture[2] < 1e-3, f"{mixture[2]:.0e}"),
            expect("one Gaussian fails by scale 4 (error over 1)", one[4] > 1, f"{one[4]:.1f}"),
            expect("particles follow the closure to half its time", half < APART, f"{100 * half:.1f} % off"),
            expect("the closure breaks before it blows up", broken < 1, f"at {broken:.2f} of the blow-up time"),
            expect("no particle grows faster than e^t", max(growth) <= 1 + 1e-9, f"{growth[-1]:.3f} of it in the end"),
        ),
    )


def _errors_text(values: list[float]) -> str:
    """The errors at query scale ½, 1, 2 and 4."""
    return ", ".join(f"{values[SCALES.index(s)]:.1g}" for s in (0.5, 1.0, 2.0, 4.0))


def _compression(rng: np.random.Generator) -> list[Row]:
    """Relative squared error of three summaries of clustered keys, over the scale of the queries."""
    label = torch.from_numpy(rng.integers(0, CLUSTERS, KEYS))
    centre = torch.from_numpy(1.5 * rng.standard_normal((CLUSTERS, DIM)))
    width = torch.linspace(0.2, 0.9, DIM, dtype=torch.float64)
    keys = centre[label] + width * torch.from_numpy(rng.standard_normal((KEYS, DIM)))
    parts = [keys[label == c] for c in range(CLUSTERS)]
    count = [len(p) for p in parts]
    gaussians = [Gaussian(p.mean(0), torch.cov(p.mT)) for p in parts]
    summaries: dict[str, Measure] = {
        "gaussian": Gaussian(keys.mean(0), torch.cov(keys.mT)),
        "centroids": Empirical(torch.stack([g.loc for g in gaussians]), torch.tensor(count, dtype=keys.dtype).log()),
        "mixture": reduce(add, (n * g for n, g in zip(count, gaussians, strict=True))),
    }
    rows: list[Row] = []
    for scale in SCALES:
        eta = scale / sqrt(DIM) * torch.from_numpy(rng.standard_normal((QUERIES, DIM)))
        exact = Empirical(keys).mean(eta)
        whole = (exact - keys.mean(0)).square().sum()
        row: Row = {"scale": scale}
        row |= {name: float((h.mean(eta) - exact).square().sum() / whole) for name, h in summaries.items()}
        hit = torch.stack([condensed(eta, g.covariance, n) for g, n in zip(gaussians, count, strict=True)])
        rows.append(row | {"condensed": float(hit.double().mean())})
    return rows


def _blow_up(rng: np.random.Generator) -> list[Row]:
    """The largest variance over time: particles, the Gaussian closure with the same steps, and its closed form."""
    start = torch.diag(torch.tensor([0.5, 0.25], dtype=torch.float64))
    cloud = Whiten(covariance=start)(torch.from_numpy(rng.standard_normal((PARTICLES, 2))))
    end = float(blow_up_time(start))
    step, steps = end / STEPS, round(BEYOND * STEPS)
    readouts = {
        "particles": lambda x: _largest(x.mT @ x / len(x) - torch.outer(x.mean(0), x.mean(0))),
        "longest": lambda x: torch.linalg.vector_norm(x, dim=-1).max(),
        "effective_keys": effective_keys,
    }
    path = run(Layer(ascend=Ascend(step=step)), cloud, steps, readouts=readouts)
    law = Gaussian(torch.zeros(2, dtype=start.dtype), start)
    closed = run(GaussianFlow(step_size=step), law, steps, readouts={"closure": lambda g: _largest(g.covariance)})
    closure = closed.readings["closure"].tolist()
    longest = path.readings["longest"]
    rows: list[Row] = []
    for t in path.times.tolist():
        measured, predicted = float(path.readings["particles"][t]), closure[t] if t < len(closure) else inf
        exact = float(_largest(covariance_flow(start, t * step))) if t < STEPS else inf
        rows.append(
            {
                "t": t / STEPS,
                "particles": measured,
                "closure": predicted,
                "closed_form": exact,
                "off": abs(predicted - measured) / measured,
                "longest_over_bound": float(longest[t] / longest[0]) / exp(t * step),
                "effective_keys": float(path.readings["effective_keys"][t]),
            }
        )
    return rows


def _largest(covariance: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(covariance)[-1]


def draw(errors: list[Row], path: list[Row], broken: float) -> Figure:
    """Error of the summaries over the query scale, and the variance over time."""
    drawn = figure(9.5, 3.9)
    left, right = drawn.subplots(1, 2)
    for (name, words), colour in zip(NAMES.items(), COLOURS, strict=False):
        left.plot(column(errors, "scale"), column(errors, name), "o-", color=colour, label=words)
    left.axhline(1, color=INK, lw=0.8)
    left.annotate("as bad as the mean of all keys", (SCALES[0], 1), xytext=(0, 3), textcoords="offset points")
    left.set(xscale="log", yscale="log", xlabel="query scale", ylabel="relative squared error")
    left.set_title(f"{KEYS:,} keys in {CLUSTERS} clusters, summarised")
    left.set_xticks(SCALES, [f"{s:g}" for s in SCALES])
    left.set_xticks([], minor=True)
    left.legend(loc="lower right")
    t = column(path, "t")
    finite = [r for r in path if float(r["closed_form"] or 0) < 100]
    right.plot(column(finite, "t"), column(finite, "closed_form"), color=ORANGE, label="closure, Ċ = 2C²")
    right.plot(t, column(path, "particles"), color=BLUE, label=f"{PARTICLES:,} particles")
    right.axvline(1, color=RED, lw=1, ls="--", label="blow-up")
    right.axvline(broken, color=FAINT, lw=1, label=f"{100 * APART:.0f} % apart")
    right.set(yscale="log", ylim=(0.4, 100), xlabel="time / blow-up time", ylabel="largest variance")
    right.set_title("One Gaussian for the whole cloud, no norm")
    right.legend(loc="upper left")
    return drawn
