"""
Metastability
=============

In the end attention on the sphere brings all tokens to one point, but the end may be far away. Two groups of tokens,
90° apart on a circle, move as in the script on clusters: each towards its attention mean. Within a group tokens attend
to one another and collapse fast. The other group has a share of e^{−β}: at β = 1 all merge at once, at β = 6 after two
clusters have stood still for a while, and at β = 40 there would still be two after 10¹⁵ units of time, of which a layer
is about one. What a deep network shows is then not the limit but a metastable state.

Once collapsed, two groups of one size are as two tokens that start orthogonal, whose angle θ obeys ::

    θ̇ = −2 sin θ / (1 + e^{β(1 − cos θ)}),        which takes about e^β/2β from 90° on

The text claims two clusters at β = 40 from t = 10 to 1000, 90° apart to 0.01°, one cluster at β = 1 by t = 30, and that
for β = 3, 6 and 9 the time until the angle is below 10° is that of two orthogonal tokens to 25 %.

Run with a file name to save the figure (needs matplotlib). The flow needs torchdiffeq, cumulant[ode].
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant.dynamics import clusters, flow, orthogonal_cosine

group = torch.linspace(-25, 25, 12, dtype=torch.float64)
start = torch.deg2rad(torch.cat([group, 90 + group]))
x = torch.stack([start.cos(), start.sin()], -1)
times = torch.logspace(-1, 3, 61, dtype=torch.float64)

# %%
# Angles of the tokens, clusters, and the angle between the groups beside that of two tokens.

degrees, count, apart, two = {}, {}, {}, {}
for beta in (1.0, 3.0, 6.0, 9.0, 40.0):
    states = flow(x, times, beta=beta, rtol=1e-7, atol=1e-9).states
    count[beta] = torch.stack([clusters(cloud).count for cloud in states])
    degrees[beta] = torch.rad2deg(torch.atan2(states[..., 1], states[..., 0]))
    apart[beta] = degrees[beta][:, 12:].mean(-1) - degrees[beta][:, :12].mean(-1)
    two[beta] = torch.rad2deg(orthogonal_cosine(times, 2, beta).acos())


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(10.5, 7.6), layout="constrained")
    for axis, beta in zip(axes.flat, (1.0, 6.0, 40.0), strict=False):
        axis.semilogx(times, degrees[beta][:, :12], color="tab:blue", lw=0.8)
        axis.semilogx(times, degrees[beta][:, 12:], color="tab:orange", lw=0.8)
        title = f"β = {beta:g}, clusters at t = 10, 100, 1000: {count[beta][[30, 45, 60]].tolist()}"
        axis.set(title=title, xlabel="t", ylabel="angle of each token, degrees")
    last = axes[1, 1]
    for beta, colour in ((3.0, "tab:green"), (6.0, "tab:purple"), (9.0, "tab:red")):
        last.semilogx(times, apart[beta], color=colour, lw=2, label=f"β = {beta:g}")
        last.plot(times, two[beta], color="black", lw=1, ls="--")
        last.plot(math.exp(beta) / (2 * beta), 0, "^", color=colour, ms=9, clip_on=False)
    last.plot([], [], color="black", lw=1, ls="--", label="two orthogonal tokens")
    last.plot([], [], "^", color="gray", label="t = e^β/2β")
    last.set(title="How long two clusters last", xlabel="t", ylabel="angle between them, degrees", ylim=(0, 95))
    last.legend(fontsize=8, loc="lower left")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (count[40.0][times >= 10] == 2).all()
assert (apart[40.0][times >= 10] - 90).abs().max() < 0.01
assert (count[1.0][times >= 30] == 1).all()
life = {b: [times[(angle[b] < 10).int().argmax()].item() for angle in (apart, two)] for b in (3.0, 6.0, 9.0)}
assert all(abs(groups / tokens - 1) < 0.25 for groups, tokens in life.values())
