"""
A phase diagram of attention and normalisation
==============================================

Does a law that is not discrete become Gaussian under layer after layer of attention and normalisation? The paper leaves
it open. Here is a coarse answer: 400 particles with gamma distributed coordinates pass 60 layers ::

    z⁺ = RN(z + v Σ_j softmax_j(s⟨z_i,z_j⟩) z_j)

for a grid of values v (above 0 attention, below 0 the opposite) and logit scales s. Colours say what they become:
Gaussian if their distance W₂ from one, written in the cell and 0.20 at the start, is less than twice that of a Gaussian
sample; uniform likewise; clusters if fewer than 40 points are left; undecided if neither has happened yet.

Under whitening, a norm over all particles, the sign decides. Attention makes clusters, or is on the way. The opposite
makes the law Gaussian where theory predicts it, at the circles: there all λ_n = 1 + n v s^(n−1)/(1 + vs) lie within ±1.
At s = 1 they do for neither sign. Under RMSNorm, a norm of each token, a Gaussian is no equilibrium: the opposite sign
ends in the uniform law on the sphere, attention in one point.

The text claims that no cell with v > 0 ends Gaussian or uniform, that those with v ≥ 0.6 and s ≥ 0.4 end in clusters,
all circles at s = 0.4 Gaussian, and that under RMSNorm all cells with v < 0 end uniform, all others in one cluster.
Other cells of the left panel, near a border or slow, change with the draw, and symmetric laws leave more of them
undecided. ``cumulant experiment open-question`` runs the whole of it: four laws, four norms, more particles and layers.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

from cumulant.dynamics import attracting
from cumulant.paper.experiments.outcomes import Cell, run_cell
from cumulant.paper.experiments.phase_diagram import SHADE

VALUES, SCALES = (-0.9, -0.6, -0.2, 0.2, 0.6, 0.9), (0.1, 0.4, 0.7, 1.0)
NORMS = {"full": ("Whitening, d = 2", 2), "rms": ("RMSNorm, d = 4", 4)}
cells = [Cell(norm, v, s, d, 400, 60, ("gamma",)) for norm, (_, d) in NORMS.items() for v in VALUES for s in SCALES]
rows = [run_cell(cell, seed=0)[0] for cell in cells]
ends = {(row["normaliser"], row["v"], row["s"]): row["outcome"] for row in rows}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axis, (norm, (title, _)) in zip(axes, NORMS.items(), strict=True):
        for row in (row for row in rows if row["normaliser"] == norm):
            x, y = VALUES.index(row["v"]), SCALES.index(row["s"])
            axis.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=SHADE[row["outcome"]], ec="white"))
            if norm == "full":
                axis.text(x, y - 0.3, f"{row['w2_end']:.2f}", ha="center", va="center", fontsize=8)
                axis.plot(x, y + 0.1, "o" * attracting(row["v"], row["s"]), color="black", mfc="none", ms=13)
        axis.axvline(2.5, color="black")
        axis.set(title=title, xlabel="v   (below 0 descends G, above 0 is attention)", ylabel="s, logit scale")
        axis.set(xlim=(-0.5, 5.5), ylim=(-0.5, 3.5), xticks=range(6), yticks=range(4))
        axis.set(xticklabels=VALUES, yticklabels=SCALES)
    seen = [Patch(color=SHADE[name], label=name) for name in SHADE if name in ends.values()]
    fig.legend(handles=seen, loc="outside lower center", ncols=len(seen))
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert not {end for (_, v, _), end in ends.items() if v > 0} & {"Gaussian", "uniform"}
assert {end for (_, v, s), end in ends.items() if v >= 0.6 and s >= 0.4} == {"clusters"}
assert {ends["full", v, 0.4] for v in VALUES if attracting(v, 0.4)} == {"Gaussian"}
assert {ends["rms", v, s] for v in VALUES for s in SCALES if v < 0} == {"uniform"}
assert {row["clusters"] for row in rows if row["normaliser"] == "rms" and row["v"] > 0} == {1}
