"""
Clusters on the sphere
======================

Self-attention in continuous time, kept on the unit sphere as RMSNorm keeps tokens: each particle moves towards its
attention mean, less the radial part ::

    ẋ_i = P m_i,        m_i = Σ_j softmax_j(β⟨x_i,x_j⟩) x_j,        P y = y − ⟨x_i,y⟩ x_i

Left, 40 random tokens draw together into one point; other draws may pause at two on the way. What drives them is in the
middle: the interaction energy E = Σ_ij e^{β⟨x_i,x_j⟩} / 2βn² never falls, and is largest, e^β/2β, when all agree.

Right, n tokens that start orthogonal. By symmetry any two of them have one common cosine, which obeys an equation in
one unknown; for n = 2 and β = 0 it is tanh t. USA is attention without its denominator, with weights e^{β⟨x_i,x_j⟩}/n,
and faster by up to e^β. Dots are the flow of all tokens, lines the equation.

The text claims that E never falls (to 1e-12, relative) and reaches its bound to 1e-8, and that the dots are on the
lines to 1e-8: for n = 4 and β = 1 the cosines at t = 1 and 2 are 0.4794867822 and 0.8771311725.

Run with a file name to save the figure (needs matplotlib). The flow needs torchdiffeq, cumulant[ode].
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant.dynamics import clusters, flow, orthogonal_cosine

x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
times = torch.linspace(0, 20, 101, dtype=torch.float64)
seen = flow(x / x.norm(dim=-1, keepdim=True), times, beta=2.0)

# %%
# Orthogonal tokens: n, β, and whether the weights are normalised.

cases = {"n = 2, β = 0": (2, 0, True), "4, 1": (4, 1, True), "4, 1, USA": (4, 1, False), "8, 4": (8, 4, True)}
ticks, cosines = torch.arange(0, 4.5, 0.5, dtype=torch.float64), {}
for name, (n, beta, normalized) in cases.items():
    states = flow(torch.eye(n, dtype=torch.float64), ticks, beta=beta, normalized=normalized).states
    cosines[name] = (states[:, 0] * states[:, 1]).sum(-1)


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig = plt.figure(figsize=(13, 4.4), layout="constrained")
    ball, middle, right = fig.add_subplot(131, projection="3d"), fig.add_subplot(132), fig.add_subplot(133)
    u, w = torch.meshgrid(torch.linspace(0, math.pi, 13), torch.linspace(0, 2 * math.pi, 25), indexing="ij")
    ball.plot_wireframe(u.sin() * w.cos(), u.sin() * w.sin(), u.cos(), color="lightgray", lw=0.5)
    for way in seen.states.unbind(1):
        ball.plot(*way.T, color="gray", lw=0.8)
    for t, colour in ((0, "tab:blue"), (20, "tab:orange"), (100, "tab:red")):
        ball.scatter(*seen.states[t].T, color=colour, s=12 + t, depthshade=False, label=f"t = {times[t]:g}")
    ball.set_axis_off()
    ball.set_box_aspect((1, 1, 1), zoom=1.5)
    ball.legend(title="40 tokens, β = 2", loc="lower left", fontsize=8)
    middle.plot(times, seen.energy, color="black", label="energy E")
    middle.axhline(math.exp(2) / 4, color="black", ls=":", label="its largest value, e²/4")
    middle.plot([], color="tab:red", label="clusters (right axis)")
    middle.set(title="The energy never falls", xlabel="t")
    middle.legend(fontsize=8, loc="center right")
    middle.twinx().step(times, [clusters(cloud).count for cloud in seen.states], color="tab:red")
    for k, (name, case) in enumerate(cases.items()):
        right.plot(times / 5, orthogonal_cosine(times / 5, *case), color=f"C{k}", label=name)
        right.plot(ticks, cosines[name], "o", color=f"C{k}")
    right.set(title="Orthogonal start: cosine of any two tokens", xlabel="t", ylim=(-0.03, 1.03))
    right.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (seen.energy.diff() >= -1e-12 * seen.energy[:-1]).all()
assert abs(seen.energy[-1] - math.exp(2) / 4) < 1e-8
assert all((cosines[name] - orthogonal_cosine(ticks, *case)).abs().max() < 1e-8 for name, case in cases.items())
assert max(abs(cosines["4, 1"][2] - 0.4794867822), abs(cosines["4, 1"][4] - 0.8771311725)) < 1e-8
