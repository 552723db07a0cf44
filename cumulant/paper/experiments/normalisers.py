"""Attention under four normalisers: rank, clusters and distance to a Gaussian; pre-norm and post-norm (§3, §5.2, §5.5).

    full    whitening over the cloud     d + 1 clusters, the fewest that have rank d
    diag    one variance per channel     rank 1
    rms     a sphere for each token      one cluster
    ln      a sphere in Σz = 0           one cluster

is the final state under attention (v > 0).
"""

from __future__ import annotations

import numpy as np
import torch

from cumulant.dynamics import Ascend, Layer, RMSNorm, clusters, effective_rank, kurtosis, run, w2_to_gaussian
from cumulant.dynamics.readouts import MAX_CLUSTERS
from cumulant.dynamics.stability import correlation_multiplier
from cumulant.paper.experiments.experiment import Expectation, Result, Row, Setting, expect, experiment
from cumulant.paper.experiments.normaliser_figures import draw
from cumulant.paper.experiments.outcomes import NORMALISERS, layer_of
from cumulant.paper.experiments.tables import column, range_text, select

PARTICLES, SCALE, LAYERS, EVERY = 1000, 0.25, 100, 5
DIMS, DRIFT = (4, 16), (0.5, -0.5)
CORNERS, CORNER_PARTICLES, CORNER_RUNS, LONG = (1, 2, 3, 4, 6, 8), 300, 3, 400
TOKENS, WIDTH, DEPTH = 64, 8, 200
POINT = 1e-9  # a spread below this is rounding: the cloud is one point


@experiment(
    "rn-compare",
    "What do the usual normalisers make of attention in the long run?",
    rests_on="§5.2, §5.5, S0-C7, §3",
    takes="fifteen seconds",
)
def rn_compare(setting: Setting) -> Result:
    rows: list[Row] = []
    cells = [(d, norm, v) for d in DIMS for norm in NORMALISERS for v in DRIFT]
    for number, (d, norm, v) in enumerate(cells):
        rows += _readings(d, norm, v, setting.seed)
        setting.progress(number + 1, len(cells) + len(CORNERS), f"{norm}, d = {d}")
    corners: list[Row] = []
    for number, d in enumerate(CORNERS):
        corners += _corners(d, setting.seed)
        setting.progress(len(cells) + number + 1, len(cells) + len(CORNERS), f"corners, d = {d}")
    stream = _orders(setting.seed)
    return Result(
        tables={"readings": rows, "corners": corners, "order": stream},
        figures={"rn-compare": lambda: draw(rows, corners, stream)},
        verdict=_verdict(rows, corners, stream),
        expectations=_expectations(rows, corners, stream),
    )


def _readings(d: int, norm: str, v: float, seed: int) -> list[Row]:
    """Statistics along the layers from a uniform start; those of the shape are None once the cloud is one point."""
    cloud = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (PARTICLES, d)))
    readouts = {
        "w2": w2_to_gaussian,
        "kurtosis": kurtosis,
        "rank": effective_rank,
        "spread": lambda x: (x - x.mean(-2, keepdim=True)).square().mean((-2, -1)).sqrt(),
        "clusters": lambda x: clusters(x, limit=MAX_CLUSTERS).count,
    }
    path = run(layer_of(v, SCALE, norm), cloud, LAYERS, readouts=readouts, every=EVERY)
    rows: list[Row] = []
    for i, t in enumerate(path.times.tolist()):
        read = {name: float(values[i]) for name, values in path.readings.items()}
        shape = {k: read[k] if read["spread"] > POINT else None for k in ("w2", "kurtosis", "rank")}
        rows.append(
            {"d": d, "normaliser": norm, "v": v, "t": t}
            | shape
            | {"spread": read["spread"], "clusters": int(read["clusters"]), "halt": path.halt.name}
        )
    return rows


def _corners(d: int, seed: int) -> list[Row]:
    """Full whitening and ascent until nothing moves: how many clusters are left."""
    draws = [np.random.default_rng(seed + i).standard_normal((CORNER_PARTICLES, d)) for i in range(CORNER_RUNS)]
    path = run(layer_of(0.5, 0.5, "full"), torch.from_numpy(np.stack(draws)), LONG, readouts=(), tol=1e-9)
    groups = clusters(path.state)
    return [
        {
            "d": d,
            "run": i,
            "clusters": int(groups.count[i]),
            "largest": int(groups.sizes[i, 0]),
            "smallest": int(groups.sizes[i][groups.sizes[i] > 0].min()),
            "layers": int(path.times[-1]),
            "halt": path.halt.name,
        }
        for i in range(CORNER_RUNS)
    ]


def _orders(seed: int) -> list[Row]:
    """Post-norm and pre-norm side by side: the length of the stream and how alike its tokens have become."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((TOKENS, WIDTH)))
    rows: list[Row] = []
    for order in ("post", "pre"):
        layer = Layer(ascend=Ascend(scale=WIDTH**-0.5), renormalize=RMSNorm(), order=order)
        path = run(layer, x, DEPTH, readouts=("mean_norm", "mean_cosine"))
        pairs = zip(path.readings["mean_norm"].tolist(), path.readings["mean_cosine"].tolist(), strict=True)
        rows += [{"order": order, "t": t, "norm": norm, "cosine": cosine} for t, (norm, cosine) in enumerate(pairs)]
    return rows


def _end(rows: list[Row], name: str, **where: object) -> float:
    """The last reading of a run; nan if the cloud is one point by then."""
    last = select(rows, t=LAYERS, **where)[0][name]
    return float("nan") if last is None else float(last)


def _beyond(corners: list[Row], dims: tuple[int, ...]) -> list[int]:
    """Clusters beyond d, run by run, in these dimensions."""
    return [int(r["clusters"] or 0) - int(r["d"] or 0) for r in corners if r["d"] in dims]


def _expectations(rows: list[Row], corners: list[Row], stream: list[Row]) -> tuple[Expectation, ...]:
    low, high = _beyond(corners, CORNERS[:4]), _beyond(corners, CORNERS[4:])
    flat, wide = (_end(rows, "rank", normaliser="diag", v=0.5, d=d) for d in DIMS)
    token = [_end(rows, "clusters", normaliser=norm, v=0.5, d=d) for norm in ("rms", "ln") for d in DIMS]
    ends = {(norm, d): _end(rows, "rank", normaliser=norm, v=-0.5, d=d) for norm in NORMALISERS for d in DIMS}
    down = [rank / (d - (norm == "ln")) for (norm, d), rank in ends.items()]
    post, pre = (column(stream, "cosine", order=order, t=10)[0] for order in ("post", "pre"))
    speed = _speed(stream)
    return (
        expect("full whitening, ascent: d + 1 clusters, d ≤ 4", set(low) == {1}, f"{low.count(1)} of {len(low)} runs"),
        expect("and not fewer in more dimensions", min(high) >= 1, f"d + {min(high)} to d + {max(high)}, d = 6 and 8"),
        expect("diagonal norm, ascent: towards rank 1", flat < 1.5 and wide < 4, f"{flat:.2f} of 4, {wide:.2f} of 16"),
        expect("RMSNorm and LayerNorm, ascent: one cluster", max(token) == 1, f"{range_text(token, '.0f')} in 4 runs"),
        expect("descent: no normaliser loses rank", min(down) > 0.95, f"{range_text(down, '.3f')} of the full rank"),
        expect("post-norm clusters before pre-norm", post > pre, f"cosine {post:.3f} against {pre:.3f} at layer 10"),
        expect("a pre-norm stream grows linearly", 0.8 < speed < 1.2, f"{speed:.3f} √d a layer"),
    )


def _speed(stream: list[Row]) -> float:
    """Growth per layer of the length of a pre-norm stream in the second half of the depth, over √d."""
    norm = column(stream, "norm", order="pre")
    half = DEPTH // 2
    return (norm[DEPTH] - norm[half]) / (DEPTH - half) / WIDTH**0.5


def _verdict(rows: list[Row], corners: list[Row], stream: list[Row]) -> str:
    ends = {(norm, d): _end(rows, "rank", normaliser=norm, v=0.5, d=d) for norm in ("full", "diag") for d in DIMS}
    low, high = _beyond(corners, CORNERS[:4]), _beyond(corners, CORNERS[4:])
    layers = column([r for r in corners if r["d"] in CORNERS[:4]], "layers")
    token = {norm: [_collapse_layer(rows, norm, d) for d in DIMS] for norm in ("rms", "ln")}
    w2 = {t: column(rows, "w2", normaliser="full", v=-0.5, d=4, t=t)[0] for t in (0, LAYERS)}
    cosine = {(o, t): column(stream, "cosine", order=o, t=t)[0] for o in ("post", "pre") for t in (10, 100)}
    return (
        f"Under attention (v = ½, s = {SCALE:g}, {PARTICLES:,} particles from a uniform law) full whitening keeps the "
        f"rank ({ends['full', 4]:.1f} of 4, {ends['full', 16]:.1f} of 16) and lets the cloud fall apart into d + 1 "
        f"clusters, the fewest that have this rank: at s = ½ with {CORNER_PARTICLES} particles {low.count(1)} of "
        f"{len(low)} runs end so for d = 1 to 4, after {range_text(layers, '.0f')} layers, and {high.count(1)} of "
        f"{len(high)} for d = 6 and 8, the others with up to d + {max(high)} by layer {LONG}. A diagonal norm lets "
        f"correlations grow (by {correlation_multiplier(0.5 * SCALE):.2f} a layer at first) and ends at an "
        "effective rank of "
        f"{ends['diag', 4]:.2f} in d = 4 and {ends['diag', 16]:.2f} in d = 16. RMSNorm is one cluster by layer "
        f"{token['rms'][0]:.0f} (d = 4) and {token['rms'][1]:.0f} (d = 16), LayerNorm by {token['ln'][0]:.0f} and "
        f"{token['ln'][1]:.0f}. With the opposite sign none loses rank, and full whitening comes nearer to a Gaussian "
        f"(W₂ {w2[0]:.3f} → {w2[LAYERS]:.3f}, d = 4). Where the norm stands decides the pace: {TOKENS} tokens in "
        f"d = {WIDTH} have mean cosine {cosine['post', 10]:.2f} after 10 post-norm layers; pre-norm "
        f"{cosine['pre', 10]:.2f}, and {cosine['pre', 100]:.2f} after 100, while the stream grows by "
        f"{_speed(stream):.2f} √d a layer. Limits: W = I, one start law, numbers and no proof."
    )


def _collapse_layer(rows: list[Row], norm: str, d: int) -> float:
    """The layer from which a run is one cluster."""
    return min(column(rows, "t", normaliser=norm, v=0.5, d=d, clusters=1), default=float("inf"))
