"""The residual attention step: expansion of distances and volumes, divergence, and inversion (§2).

    T(η) = η + M ∇G(η),      |T(a) − T(b)| ≥ |a − b| in the norm of M⁻¹,      log|det JT| = Σ log(1 + λ) ≥ 0     (X-1)

λ are the eigenvalues of M^½ ∇²G M^½; the keys are fixed, and all queries share them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics import Ascend, Layer, Trajectory, run
from cumulant.measures import Empirical
from cumulant.paper.experiments.expansion_figures import draw_causal, draw_divergence, draw_expansion, draw_inversion
from cumulant.paper.experiments.experiment import Result, Row, Setting, expect, experiment
from cumulant.paper.experiments.tables import column, join_words, magnitude, range_text
from cumulant.residual import prox, self_attention_jacobian
from cumulant.solve import fixed_point

QUERIES, KEYS, DIMS = 100, 64, (2, 4, 8)
ASCENTS, DIFFERENCE = 12, 1e-5
DRAWS, TOKENS = 400, ((5, 2), (16, 2), (16, 8))
LONG, STARTS, ATOMS = 400, 200, 9
TIE = 0.1  # keys with a smaller margin ⟨x*,x*−x⟩ are not separated within LONG steps
DEPTHS, SIZES = (1, 2, 4, 8), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@experiment(
    "expand",
    "Does a residual step of attention with fixed keys expand distances and volumes?",
    rests_on="X-1, S1-A3",
    takes="a second",
)
def expand(setting: Setting) -> Result:
    rng, rows = np.random.default_rng(setting.seed), []
    for number, d in enumerate(DIMS):
        keys, x = (torch.from_numpy(rng.standard_normal((n, d))) for n in (KEYS, QUERIES))
        root = torch.from_numpy(rng.standard_normal((d, d)))
        metric = root @ root.mT / d + 0.3 * torch.eye(d, dtype=x.dtype)
        rows += _expansion_rows(Ascend(keys=keys), x, "identity")
        rows += _expansion_rows(Ascend(keys=keys, metric=metric), x, "random")
        setting.progress(number + 1, len(DIMS), f"d = {d}")
    error, volume = max(column(rows, "difference_error")), min(column(rows, "least_log_volume"))
    ratio = min(column(rows, "least_ratio"))
    first, last = (column(rows, "log_volume", step=t, metric="identity") for t in (1, ASCENTS))
    return Result(
        tables={"expansion": rows},
        figures={"expand": lambda: draw_expansion(rows, DIMS)},
        verdict=(
            f"Yes. Over {ASCENTS} steps of {QUERIES} queries past {KEYS} random keys in {join_words(DIMS)} dimensions "
            f"no distance shrank by more than rounding (smallest ratio 1 − {max(0.0, 1 - ratio):.0e}; in the norm of "
            "M⁻¹ where the step has a metric M). The log-volume from the eigenvalues of the covariance is never "
            f"negative (smallest {magnitude(volume)}) and agrees with central differences to {magnitude(error)}. "
            f"Expansion spends itself: the first step adds {range_text(first)} to the log-volume, step {ASCENTS} at "
            f"most {max(last):.0e}, because by then attention is on one key and moves neighbours alike. Limits: one "
            "set of fixed keys that all queries share; `expand-causal` shows what a mask does."
        ),
        expectations=(
            expect("no distance shrinks (ratio ≥ 1)", ratio >= 1 - 1e-12, f"smallest ratio 1 − {1 - ratio:.1e}"),
            expect("the log-volume of a step is not negative", volume >= -1e-12, f"smallest {volume:.1e}"),
            expect("Σ log(1 + λ) is the log-determinant by differences, to 1e-8", error <= 1e-8, f"{error:.1e}"),
        ),
    )


def _expansion_rows(ascend: Ascend, x: Tensor, metric: str) -> list[Row]:
    root = None if ascend.metric is None else torch.linalg.cholesky(ascend.metric)
    rows: list[Row] = []
    for step in range(1, ASCENTS + 1):
        volume, differenced, y = ascend.log_volume(x), _differenced(ascend, x), ascend(x)
        ratio = _distances(y, root) / _distances(x, root)
        rows.append(
            {
                "d": x.shape[-1],
                "metric": metric,
                "step": step,
                "log_volume": float(volume.mean()),
                "least_log_volume": float(volume.min()),
                "difference_log_volume": float(differenced.mean()),
                "difference_error": float((differenced - volume).abs().max()),
                "least_ratio": float(ratio.min()),
                "median_ratio": float(ratio.median()),
                "largest_ratio": float(ratio.max()),
            }
        )
        x = y
    return rows


def _distances(x: Tensor, root: Tensor | None = None) -> Tensor:
    """|x_i − x_j| over all pairs i < j, in the norm of M⁻¹ = (LLᵀ)⁻¹ if L is given."""
    row, col = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    away = x[..., row, :] - x[..., col, :]
    if root is not None:
        away = torch.linalg.solve_triangular(root, away.mT, upper=False).mT
    return torch.linalg.vector_norm(away, dim=-1)


def _differenced(ascend: Ascend, x: Tensor) -> Tensor:
    """log|det| of the step's Jacobian by central differences, query by query: with fixed keys queries do not mix."""
    q, d = x.shape
    nudge = DIFFERENCE * torch.eye(d, dtype=x.dtype)
    up, down = (ascend((x[:, None] + sign * nudge).reshape(-1, d)).reshape(q, d, d) for sign in (1, -1))
    return torch.linalg.slogdet((up - down) / (2 * DIFFERENCE)).logabsdet


@experiment(
    "expand-causal",
    "Do distances between tokens still expand under a causal mask?",
    rests_on="X-3, S1-A3",
    takes="ten seconds",
)
def expand_causal(setting: Setting) -> Result:
    rng = np.random.default_rng(setting.seed)
    clouds = {size: 1.5 * torch.from_numpy(rng.standard_normal((DRAWS, *size))) for size in TOKENS}
    rows: list[Row] = []
    ratios: dict[bool, Tensor] = {}
    for number, (size, x) in enumerate(clouds.items()):
        for causal in (False, True):
            row, ratio = _causal_row(x, causal)
            rows.append(row)
            ratios[causal] = ratio if size == TOKENS[0] else ratios[causal]
        setting.progress(number + 1, len(TOKENS), f"{size[0]} tokens")
    shared, least = (min(column(rows, "least_ratio", mask=mask)) for mask in ("none", "causal"))
    (shrink, *_), (wide, *_) = (column(rows, "pairs_that_shrink", mask="causal", d=d) for d in (2, 8))
    volume = min(column(rows, "least_log_volume"))
    singular = min(column(rows, "least_singular_value", mask="none"))
    return Result(
        tables={"distances": rows},
        figures={"expand-causal": lambda: draw_causal(ratios, clouds[TOKENS[0]], _distances(clouds[TOKENS[0]]))},
        verdict=(
            f"Not always. In {DRAWS} random clouds a layer without a mask shrinks no distance between tokens (smallest "
            f"ratio {shared:.4f}): all tokens read one G. With a causal mask each has its own, and two tokens can come "
            f"as near as {least:.2f} of their distance: {100 * shrink:.1f} % of the pairs of {TOKENS[0][0]} tokens in "
            f"the plane shrink, and {100 * wide:.1f} % in eight dimensions. Expansion stays true of every token with "
            f"its own context held fixed (least log-volume {magnitude(volume)}), and was never true of the layer as a "
            f"map of all tokens at once: there the least singular value is {singular:.2f} even without a mask. Limits: "
            "Q = K = V = I, one step."
        ),
        expectations=(
            expect("without a mask no distance shrinks", shared >= 1 - 1e-12, f"smallest ratio {shared:.4f}"),
            expect("with a causal mask some do", least < 0.95, f"smallest ratio {least:.3f}"),
            expect("each token with its context frozen expands", volume >= -1e-12, f"least log-volume {volume:.1e}"),
            expect("the whole map can contract, mask or not", singular < 1, f"least singular value {singular:.3f}"),
        ),
    )


def _causal_row(x: Tensor, causal: bool) -> tuple[Row, Tensor]:
    draws, n, d = x.shape
    ascend = Ascend(causal=causal)
    ratio = _distances(ascend(x)) / _distances(x)
    jacobian = self_attention_jacobian(x, causal=causal).reshape(draws, n * d, n * d)
    row: Row = {
        "tokens": n,
        "d": d,
        "mask": "causal" if causal else "none",
        "least_ratio": float(ratio.min()),
        "pairs_that_shrink": float((ratio < 1).double().mean()),
        "least_log_volume": float(ascend.log_volume(x).min()),
        "least_singular_value": float(torch.linalg.svdvals(jacobian).min()),
    }
    return row, ratio


@experiment(
    "diverge",
    "Where does attention lead without a norm?",
    rests_on="S0-C5, X-1, §2",
    takes="a second",
)
def diverge(setting: Setting) -> Result:
    rng = np.random.default_rng(setting.seed)
    keys, x = (torch.from_numpy(rng.standard_normal((n, 2))) for n in (ATOMS, STARTS))
    fixed = Ascend(keys=keys)
    readouts = {"mean": fixed.mean, "g": fixed.log_normalizer, "norm": lambda y: torch.linalg.vector_norm(y, dim=-1)}
    path = run(Layer(ascend=fixed), x, LONG, readouts=readouts, keep=range(9))
    setting.progress(1, 2, "fixed keys")
    free = run(Layer(ascend=Ascend()), x, LONG, readouts=("mean_norm",))
    setting.progress(2, 2, "moving keys")
    rows, atoms = _ends(path, keys)
    curves = _curves(path, free, keys, atoms)
    rise, growth = min(column(rows, "least_rise")), min(column(rows, "least_margin"))
    apart = [r for r in rows if float(r["gap"] or 0) >= TIE]
    far, slope = max(column(apart, "distance_to_key")), column(apart, "relative_speed")
    exception = _symmetric(keys)
    stays, leaves = float(exception["first_step"] or 0), float(exception["end"] or 0)
    return Result(
        tables={"starts": rows, "curves": curves, "zero_mean": [exception]},
        figures={"diverge": lambda: draw_divergence(path, keys, atoms, curves)},
        verdict=(
            f"To infinity, straight towards one key. Of {STARTS} starts past {ATOMS} fixed keys in the plane each ends "
            f"by adding one and the same key in every step, to {magnitude(far)} for the {len(apart)} whose key is "
            f"separated (⟨x*,x*⟩ exceeds every other ⟨x*,x⟩ by {TIE:g}); {len(set(atoms.tolist()))} keys are reached. "
            f"The mean never gets shorter (least change {rise:.0e}), G grows by at least |∇G(η₀)|² a step (least "
            f"margin {growth:.0e}), and over the last half of {LONG} steps the speed is {range_text(slope, '.4f')} of "
            "the length of that key: growth is linear. With moving keys it is exponential: the cloud would pass 10¹² "
            f"at step {int(free.times[-1]) + 1}. The exception is a point of zero mean, 0 among keys ±x: a step moves "
            f"it by {stays:.0e}, but it repels, and a query that starts 10⁻⁹ away is at {leaves:.0f} in the end. "
            "Limits: finitely many keys, W = I."
        ),
        expectations=(
            expect("|∇G| never decreases", rise >= -1e-12, f"least change {rise:.1e}"),
            expect("G grows by at least |∇G(η₀)|² a step", growth >= -1e-9, f"least margin {growth:.1e}"),
            expect("the increment becomes one key, to 1e-8", far <= 1e-8, f"{magnitude(far)} over {len(apart)} starts"),
            expect("that key has ⟨x*,x*⟩ ≥ ⟨x*,x⟩", min(column(rows, "gap")) >= 0, f"all of {len(rows)} starts"),
            expect("with fixed keys growth is linear", max(abs(s - 1) for s in slope) < 1e-2, range_text(slope, ".4f")),
            expect("a zero-mean point is fixed and repels", stays < 1e-12 and leaves > 1, f"{stays:.0e}, {leaves:.0f}"),
        ),
    )


def _ends(path: Trajectory, keys: Tensor) -> tuple[list[Row], Tensor]:
    """One row per start, and the index of the key it ends at."""
    increment, norm = path.readings["mean"][-1], path.readings["norm"]
    distance, atoms = torch.linalg.vector_norm(increment[:, None] - keys, dim=-1).min(-1)
    gram = keys @ keys.mT
    gap = (gram.diagonal()[:, None] - gram).fill_diagonal_(torch.inf)
    half, mean = LONG // 2, path.readings["mean"]
    rise = mean.norm(dim=-1).diff(dim=0).amin(0)
    margin = (path.readings["g"].diff(dim=0) - mean[0].square().sum(-1)).amin(0)
    rows: list[Row] = [
        {
            "start": i,
            "key": int(a),
            "distance_to_key": float(distance[i]),
            "gap": float(gap[a].min()),
            "least_rise": float(rise[i]),
            "least_margin": float(margin[i]),
            "relative_speed": float((norm[-1, i] - norm[half, i]) / (LONG - half) / keys[a].norm()),
        }
        for i, a in enumerate(atoms)
    ]
    return rows, atoms


def _curves(path: Trajectory, free: Trajectory, keys: Tensor, atoms: Tensor) -> list[Row]:
    away = torch.linalg.vector_norm(path.readings["mean"] - keys[atoms], dim=-1)
    moving = free.readings["mean_norm"].tolist()
    return [
        {
            "step": t,
            "median_distance": float(away[t].median()),
            "largest_distance": float(away[t].max()),
            "norm_fixed_keys": float(path.readings["norm"][t].mean()),
            "norm_moving_keys": moving[t] if t < len(moving) else None,
        }
        for t in range(LONG + 1)
    ]


def _symmetric(keys: Tensor) -> Row:
    """How far one step moves 0 among keys ±x, and how far away LONG steps take what starts 1e-9 from it."""
    ascend = Ascend(keys=torch.cat([keys, -keys]))
    still = ascend.mean(torch.zeros(1, 2, dtype=keys.dtype)).norm()
    near = torch.tensor([[1e-9, 0.0]], dtype=keys.dtype)
    end = run(Layer(ascend=ascend), near, LONG, readouts=()).state.norm()
    return {"first_step": float(still), "start": 1e-9, "end": float(end)}


@experiment(
    "invert",
    "Can a residual layer with fixed keys be undone exactly?",
    rests_on="X-2",
    takes="five seconds",
)
def invert(setting: Setting) -> Result:
    rng = np.random.default_rng(setting.seed)
    rows: list[Row] = []
    for number, size in enumerate(SIZES):
        h = Empirical(size * torch.from_numpy(rng.standard_normal((KEYS, 8))))
        rows += _inversion_rows(h, torch.from_numpy(rng.standard_normal((QUERIES, 8))), size)
        setting.progress(number + 1, len(SIZES), f"keys of size {size:g}")
    error, most = max(column(rows, "error")), max(column(rows, "newton_steps"))
    reach, single = max(column(rows, "largest_ratio")), [r for r in rows if r["depth"] == 1]
    soft = min(column(single, "iteration_share", size=SIZES[0]))
    sharp = column([r for r in single if float(r["size"] or 0) >= 1], "iteration_share")
    return Result(
        tables={"inversion": rows},
        figures={"invert": lambda: draw_inversion(rows, SIZES)},
        verdict=(
            f"Yes. The proximal map of G undoes stacks of {join_words(DEPTHS)} layers past {KEYS} random keys in eight "
            f"dimensions to {error:.0e}, whatever the size of the keys ({range_text(SIZES, 'g')}), in at most "
            f"{most:.0f} Newton steps a layer, and it never stretches a distance (largest ratio {reach:.4f}). The "
            f"usual way, iterating x ← y − ∇G(x), undoes {100 * soft:.0f} % of the queries when keys are small, and "
            f"{range_text([100 * s for s in sharp], '.0f')} % from size 1 on: it needs the covariance below 1 "
            "everywhere, which attention does not have. Limits: fixed keys only."
        ),
        expectations=(
            expect("the inverse is exact to 1e-6", error < 1e-6, f"largest error {error:.1e}"),
            expect("the inverse is 1-Lipschitz", reach <= 1 + 1e-9, f"largest ratio {reach:.6f}"),
            expect("plain iteration undoes a soft layer", soft == 1, f"{100 * soft:.0f} %"),
            expect("and not sharp ones", max(sharp) < 0.9, f"at most {100 * max(sharp):.0f} %"),
        ),
    )


def _inversion_rows(h: Empirical, start: Tensor, size: float) -> list[Row]:
    """A stack of each depth, layer after layer undone from the top."""
    ascend = Ascend(keys=h)
    states = [start]
    for _ in range(max(DEPTHS)):
        states.append(ascend(states[-1]))
    rows: list[Row] = []
    for depth in DEPTHS:
        x, steps, done = states[depth], 0, torch.ones(len(start), dtype=torch.bool)
        for _ in range(depth):
            inverse = prox(h, x)
            x, steps, done = inverse.value, max(steps, int(inverse.steps.max())), done & inverse.converged
        top = states[depth]
        plain = fixed_point(lambda z, top=top: top - h.mean(z), top, max_steps=100)
        rows.append(
            {
                "size": size,
                "depth": depth,
                "error": float(torch.linalg.vector_norm(x - start, dim=-1).max()),
                "newton_steps": steps,
                "largest_ratio": float((_distances(x) / _distances(top)).max()),
                "curvature": float(torch.linalg.eigvalsh(h.fisher(states[depth - 1])).max()),
                "newton_share": float(done.double().mean()),
                "iteration_share": float(plain.converged.double().mean()),
            }
        )
    return rows
