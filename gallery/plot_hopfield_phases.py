"""
Phases of a Hopfield memory
===========================

Drop the residual and iterate attention: ξ ← ∇G(βξ) retrieves from a modern Hopfield network. Nine patterns lie on a
circle in three groups of three, and a state starts at each of them. The inverse temperature decides what they become:

- hot (small β): one fixed point, the average of all patterns;
- warm: three metastable points, each the average of a group;
- cold (large β): nine fixed points, each beside one pattern.

While β (diameter/2)² < 1 the map is a contraction, and the single fixed point is a theorem. Transformer heads have the
same three regimes: attention to everything, to a group, to one token. The text claims the counts 1, 3 and 9 at β = 0.2,
3 and 80, that the energy never increases, and that cold fixed points lie within 2e(N − 1)M exp(−βΔ) of their patterns.

Run with a file name to save the figure (needs matplotlib).
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant import hopfield

degrees = torch.tensor([c + part for c in (100, 215, 340) for part in (-19, 0, 19)], dtype=torch.float64)
patterns = 2 * torch.stack([torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()], -1)
view = torch.tensor([math.cos(1.2), math.sin(1.2)], dtype=torch.float64)  # all nine differ along this direction

# %%
# A batch of memories, one inverse temperature each; every state runs until it converges.

betas = torch.logspace(-1.3, 2.2, 141, dtype=torch.float64)
ends = hopfield.retrieve(patterns, patterns.expand(141, 9, 2), beta=betas, tol=1e-6, max_steps=1000).state
certain = betas[hopfield.contraction_bound(patterns) * betas < 1].max()

# %%
# Three temperatures, to full precision, and how many different fixed points there are.

phases = {0.2: "hot: one average", 3.0: "warm: three groups", 80.0: "cold: nine patterns"}
runs = {beta: hopfield.retrieve(patterns, patterns, beta=beta) for beta in phases}
counts = [len(torch.unique((1e3 * run.state).round(), dim=0)) for run in runs.values()]
side = torch.linspace(-2.4, 2.4, 15, dtype=torch.float64)
grid = torch.cartesian_prod(side, side)


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplot_mosaic([[*phases], ["tree"] * 3], figsize=(10.5, 8), layout="constrained")
    tree, colours = axes["tree"], [c for c in ("tab:blue", "tab:orange", "tab:purple") for _ in range(3)]
    for beta, title in phases.items():
        move = hopfield.retrieve(grid, patterns, beta=beta, steps=1).state - grid
        axes[beta].quiver(*grid.T, *move.T, color="darkgray", angles="xy", scale_units="xy", scale=5, width=0.004)
        axes[beta].scatter(*patterns.T, color=colours, alpha=0.5, s=90, label="patterns")
        axes[beta].plot(*runs[beta].state.T, "P", color="tab:red", mec="white", ms=11, label="fixed points")
        axes[beta].set(title=f"β = {beta:g}, {title}", aspect="equal", xlim=(-2.6, 2.6), ylim=(-2.9, 2.6))
        tree.axvline(beta, color="tab:red", lw=1, alpha=0.5)
    axes[0.2].legend(loc="lower center", ncols=2, fontsize=8)
    tree.axvspan(betas[0], certain, color="gray", alpha=0.15, label="β (diameter/2)² < 1: provably one fixed point")
    for k, colour in enumerate(colours):
        tree.semilogx(betas, ends[:, k] @ view, ".", color=colour, ms=4)
    tree.scatter(betas[-1].expand(9) * 1.1, patterns @ view, color=colours, alpha=0.5, s=90, clip_on=False, zorder=3)
    tree.set(title="Where the nine states end, seen along one direction", xlim=(betas[0], betas[-1] * 1.1))
    tree.set(xlabel="inverse temperature β (red lines: the maps above)", ylabel="coordinate of the fixed point")
    tree.legend(loc="upper left")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert counts == [1, 3, 9]
assert (ends[betas <= certain] - ends[betas <= certain][:, :1]).abs().max() < 1e-4
assert all((run.energy.diff(dim=0) < 1e-12).all() for run in runs.values())
assert ((runs[80.0].state - patterns).norm(dim=-1) <= hopfield.fixed_point_bound(patterns, beta=80.0)).all()
