"""Up to which query length attention over N Gaussian keys is that of the Gaussian (X-8, X-9).

    ∇G(η) = Ση over the law;     over N keys only while |η|_Σ < √(2 log N)

That is the size of the largest of N keys, where softmax ends up: the output cannot be longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from cumulant.dynamics.finite_sample import condensation_scale, effective_sample_size, saturation
from cumulant.figures import COLOURS, FAINT, INK, figure
from cumulant.kernels import moments
from cumulant.paper.experiments.experiment import Result, Row, Setting, expect, experiment
from cumulant.paper.experiments.tables import column, range_text, select

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS, DIM = (100, 1_000, 10_000, 100_000), 4
DRAWS, DIRECTIONS = 16, 8
REACH = tuple(float(r) for r in np.round(np.geomspace(0.125, 4, 21), 6))  # |η| over √(2 log N); holds ½, 1, 2 and 4


@experiment(
    "condensation",
    "Up to which query length is attention over N Gaussian keys that of the Gaussian?",
    rests_on="X-8, X-9",
    takes="ten seconds",
)
def condensation(setting: Setting) -> Result:
    rows: list[Row] = []
    for number, n in enumerate(KEYS):
        rows += _sweep(n, setting.seed)
        setting.progress(number + 1, len(KEYS), f"{n} keys")
    breaks: list[Row] = [{"keys": n, "scale": condensation_scale(n), "break": _break(rows, n)} for n in KEYS]
    at = {r: column(rows, "ratio", reach=r) for r in (0.5, 1.0, 2.0, 4.0)}
    lengths, few = column(breaks, "break"), column(rows, "effective_keys", reach=2.0)
    relative = [a / b for a, b in zip(lengths, column(breaks, "scale"), strict=True)]
    near, off = (_against_formula(rows, least, most) for least, most in ((0.0, 0.3), (0.5, 0.5)))
    return Result(
        tables={"sweep": rows, "breaks": breaks},
        figures={"condensation": lambda: draw(rows)},
        verdict=(
            f"Up to about √(2 log N). Over {KEYS[0]:,} to {KEYS[-1]:,} keys in {DIM} dimensions ({DRAWS} draws, "
            f"{DIRECTIONS} directions each) attention is {range_text(at[0.5])} of its population value at half that "
            f"length, {range_text(at[1.0])} at it, {range_text(at[2.0])} at twice and {range_text(at[4.0])} at four "
            "times: it saturates at the largest key. The output stops following the query, by growing half as fast, "
            f"at |η| = {range_text(lengths)}, {range_text(relative)} of √(2 log N), and nearer to it the more keys "
            f"there are. At twice the length softmax sits on {range_text(few, '.1f')} keys (effective number), however "
            f"many there are. The formula N e^(−|η|²) for that number ends earlier: {range_text(near)} times as many "
            f"are seen below 0.3, {range_text(off, '.1f')} times at ½, because it rests on G(2η), twice as far out. "
            "Limits: isotropic Gaussian keys; leading order in log N, so that the corner is round at any N that can "
            "be run."
        ),
        expectations=(
            expect("the population formula holds at half the length", min(at[0.5]) > 0.9, range_text(at[0.5])),
            expect("it is rounded at √(2 log N): 0.6 to 1", _within(at[1.0], 0.6, 1.0), range_text(at[1.0])),
            expect("it falls like 1/r: 0.36 to 0.52 at r = 2", _within(at[2.0], 0.36, 0.52), range_text(at[2.0])),
            expect("and 0.19 to 0.26 at r = 4", _within(at[4.0], 0.19, 0.26), range_text(at[4.0])),
            expect("the break is near √(2 log N) for every N", _within(relative, 0.7, 1.3), range_text(relative)),
            expect("N e^(−|η|²) keys are averaged below 0.3", _within(near, 0.9, 1.2), range_text(near)),
        ),
    )


def _within(values: list[float], least: float, most: float) -> bool:
    return least < min(values) and max(values) < most


def _against_formula(rows: list[Row], least: float, most: float) -> list[float]:
    """Effective number of keys over the formula for it, where the scaled length is within these bounds."""
    selected = [r for r in rows if least <= float(r["reach"] or 0) <= most]
    pairs = zip(column(selected, "effective_keys"), column(selected, "effective_formula"), strict=True)
    return [count / formula for count, formula in pairs]


def _sweep(n: int, seed: int) -> list[Row]:
    """Attention along a direction over the length of the query, averaged over key sets and directions."""
    rng = np.random.default_rng([seed, n])
    keys = torch.from_numpy(rng.standard_normal((DRAWS, n, DIM)))
    along = torch.from_numpy(rng.standard_normal((DRAWS, 1, DIRECTIONS, DIM)))
    along = along / torch.linalg.vector_norm(along, dim=-1, keepdim=True)
    length = condensation_scale(n) * torch.tensor(REACH, dtype=keys.dtype)
    eta = length[:, None, None] * along  # (draw, length, direction, d)
    result = moments(eta.flatten(1, 2), keys, statistics=("mean", "effective_atoms"))
    ratio = (result.mean.reshape(eta.shape) * along).sum(-1) / length[:, None]
    count = result.effective_atoms.reshape(ratio.shape).mean((0, 2))
    formula = effective_sample_size(length[:, None], torch.eye(1, dtype=keys.dtype), n)
    return [
        {
            "keys": n,
            "reach": r,
            "length": float(length[i]),
            "ratio": float(ratio[:, i].mean()),
            "ratio_deviation": float(ratio[:, i].std(correction=0)),
            "leading_order": float(saturation(r)),
            "effective_keys": float(count[i]),
            "effective_formula": float(formula[i]),
        }
        for i, r in enumerate(REACH)
    ]


def _break(rows: list[Row], n: int) -> float:
    """The length at which the output grows half as fast as the query: d log|m| / d log|η| = ½."""
    length, ratio = (np.log(column(rows, k, keys=n)) for k in ("length", "ratio"))
    slope = np.diff(length + ratio) / np.diff(length)
    middle = (length[1:] + length[:-1]) / 2
    # the last crossing from above: short queries are noisy where keys are few
    i = int(np.flatnonzero(slope >= 0.5)[-1])
    share = (slope[i] - 0.5) / (slope[i] - slope[i + 1])
    return float(np.exp(middle[i] + share * (middle[i + 1] - middle[i])))


def draw(rows: list[Row]) -> Figure:
    """The output over the query, the ratio over the scaled length, and the effective number of keys."""
    drawn = figure(11, 3.9)
    output, ratio, count = drawn.subplots(1, 3)
    for n, colour in zip(KEYS, COLOURS, strict=False):
        selected = select(rows, keys=n)
        length, reach, share, spread = (column(selected, k) for k in ("length", "reach", "ratio", "ratio_deviation"))
        output.plot(length, np.multiply(length, share), color=colour, label=f"{n:,} keys")
        output.plot(condensation_scale(n), condensation_scale(n), "o", ms=6, color=colour)
        ratio.plot(reach, share, color=colour)
        ratio.fill_between(reach, np.subtract(share, spread), np.add(share, spread), color=colour, alpha=0.12, lw=0)
        count.plot(reach, column(selected, "effective_keys"), color=colour)
        count.plot(reach, column(selected, "effective_formula"), ":", color=colour, lw=1)
    top = 8.0
    output.plot([0, top], [0, top], color=INK, lw=1, label="population: |Ση|")
    output.plot([], [], "o", ms=6, color=INK, label="√(2 log N)")
    output.set(xlim=(0, top), ylim=(0, top), xlabel="|η|", ylabel="attention along η", title="The output saturates")
    output.legend(loc="upper left")
    ratio.plot(REACH, [float(saturation(r)) for r in REACH], color=INK, lw=1, label="leading order")
    for ax in (ratio, count):
        ax.axvline(1, color=FAINT, lw=1, zorder=0)
        ax.set(xscale="log", xlabel="|η| / √(2 log N)")
        ax.set_xticks((0.125, 0.25, 0.5, 1, 2, 4), ("⅛", "¼", "½", "1", "2", "4"))
        ax.set_xticks([], minor=True)
    ratio.set(ylim=(0, 1.5), ylabel="attention / population", title="… at the same scaled length for every N")
    ratio.legend()
    count.plot([], [], ":", color=INK, lw=1, label="N e^(−|η|²)")
    count.set(yscale="log", ylim=(0.7, 2e5), ylabel="effective number of keys", title="… where a few keys are left")
    count.legend()
    return drawn
