"""
Expansion and contraction
=========================

A residual step T(η) = η + ∇G(η) pushes queries apart. Its Jacobian is I + C, with C the covariance of the keys under
the weights of the query, so that ‖T(a) − T(b)‖ ≥ ‖a − b‖ and log det(I + C) ≥ 0. Above, a mesh passes five fixed keys.
It grows most in their midst, where attention is diffuse, and less and less outside, where it concentrates on one key.

A norm takes the volume back. Below, six draws of 256 Gaussian tokens pass layers of self-attention, z + v Σ_j a_ij z_j
with logits s⟨z_i,z_j⟩. Red is by how much a step stretches a direction on average, blue by how much at most the norm
does; below 0 their sum says that volume is lost. Under whitening they balance at first, ±log(1 + vs). Then expansion
ceases while the norm still contracts, and tokens gather: under whitening, which has to keep the rank, in d + 1 = 5
clusters, under RMSNorm in one, where each layer contracts by log(1 + v). No norm contracts everywhere: on the way
RMSNorm can stretch single tokens that the step left short.

The text claims that no distance of the mesh shrinks, and of all draws the balance in layer 1 to 0.03, 5 clusters and 1
at layer 150, and that the last layer under RMSNorm expands by 0 and contracts by log 1.5, to 1e-3.

Run with a file name to save the figure (needs matplotlib).
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant.dynamics import Ascend, Layer, RMSNorm, Whiten, clusters, run

turn = torch.arange(5, dtype=torch.float64) * (2 * math.pi / 5) + math.pi / 2
look = Ascend(keys=1.5 * torch.stack([turn.cos(), turn.sin()], -1))
side = torch.linspace(-3, 3, 31, dtype=torch.float64)
mesh = torch.cartesian_prod(side, side)
moved, volume = look(mesh), look.log_volume(mesh)

# %%
# Layers: each reports the log-volume of its step and the norm of its normaliser.

V, S, DIM, layers = 0.5, 0.5, 4, range(1, 61)
tokens = torch.randn(6, 256, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
stretch, shrink, ends = {}, {}, {}
for name, norm in {"full whitening": Whiten(), "RMSNorm": RMSNorm()}.items():
    layer = Layer(ascend=Ascend(step=V, scale=S), renormalize=norm, volume=True)
    seen = run(layer, tokens, 150, readouts=())
    stretch[name], shrink[name] = seen.info["log_volume"] / DIM, seen.info["contraction"].log()
    ends[name] = set(clusters(seen.state).count.tolist())


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(10, 8.4), layout="constrained", height_ratios=[1.3, 1])
    for axis, points, title in zip(axes[0], (mesh, moved), ("Queries η", "After one step η + ∇G(η)"), strict=True):
        x, y = points.reshape(31, 31, 2).unbind(-1)
        shades = axis.pcolormesh(x, y, volume.reshape(31, 31), shading="gouraud", cmap="YlOrRd", vmin=0)
        axis.plot(x, y, x.T, y.T, color="black", lw=0.4, alpha=0.6)
        axis.plot(*look.keys.T, "o", color="tab:blue", mec="white", ms=10)
        axis.set(title=f"{title}   (blue: keys)", aspect="equal", xlim=(-4.7, 4.7), ylim=(-4.7, 4.7))
    fig.colorbar(shades, ax=axes[0], label="growth of volume, log det(I + C)")
    for axis, name in zip(axes[1], ends, strict=True):
        a, b = stretch[name][:60], shrink[name][:60]
        for curve, colour, label in ((a, "C3", "step: log det(I + vsC) / d"), (b, "C0", "norm: log of its norm")):
            axis.plot(layers, curve, color=colour, lw=0.8, label=[label] + 5 * ["_"])
        axis.plot(layers, (a + b).mean(-1), color="black", ls="--", label="sum, mean of the draws")
        axis.axhline(0, color="black", lw=0.5)
        axis.set(title=f"{name}, clusters at layer 150: {max(ends[name])}", xlabel="layer", ylim=(-0.45, 0.3))
    axes[1, 0].set_ylabel("log of the stretch, per direction")
    axes[1, 0].legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (torch.pdist(moved) / torch.pdist(mesh)).min() >= 1 - 1e-12
balance = torch.cat([stretch["full whitening"][0], -shrink["full whitening"][0]]) - math.log(1 + V * S)
assert balance.abs().max() < 0.03
assert ends == {"full whitening": {DIM + 1}, "RMSNorm": {1}}
assert max(stretch["RMSNorm"][-1].max(), (shrink["RMSNorm"][-1] + math.log(1 + V)).abs().max()) < 1e-3
