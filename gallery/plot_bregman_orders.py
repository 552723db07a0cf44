"""
Which order of arguments is KL
==============================

A Bregman divergence of the log-normalizer is a Kullback–Leibler divergence with its arguments exchanged; that of the
conjugate keeps them. With p_a, p_b the attention weights of queries a and b, and μ the outputs, ::

    B_G(a, b) = G(a) − G(b) − ⟨∇G(b), a − b⟩ = KL(p_b ‖ p_a)
    B_G*(μ_a, μ_b)                           = KL(p_a ‖ p_b)

The poster of the source paper has both the other way round. The slip hides well: for a Gaussian measure the two orders
are equal, and for neighbouring queries they differ only in third order. The text claims that the right order holds to
1e-12 (1e-8 for the conjugate, which is solved for), and that the wrong one misses by more than a nat in a tenth of the
400 random pairs of queries drawn here.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical, Gaussian
from cumulant.geometry import bregman, dual_bregman

draws = torch.randn(812, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
keys, a, b = draws[:12], 1.5 * draws[12:412], 1.5 * draws[412:]
h, bell = Empirical(keys), Gaussian(keys.mean(0), keys.T.cov())

# %%
# KL as a sum over keys, from the weights alone; then the Bregman divergence.

log_a, log_b = torch.log_softmax(a @ keys.T, -1), torch.log_softmax(b @ keys.T, -1)
kl_ab, kl_ba = (log_a.exp() * (log_a - log_b)).sum(-1), (log_b.exp() * (log_b - log_a)).sum(-1)
primal = h.log_normalizer(a) - h.log_normalizer(b) - (h.mean(b) * (a - b)).sum(-1)

# %%
# Neighbours: the difference between the orders falls with the cube of the distance.

steps = torch.logspace(-2, 0.5, 26, dtype=torch.float64)
start, near = b[:1].expand(26, 2), b[0] + steps[:, None] * torch.tensor([0.6, 0.8])
cubic = (bregman(h, near, start) - bregman(h, start, near)).abs()


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    g, x = Empirical(torch.tensor([[0.0], [1.0], [4.0]])), torch.linspace(-3, 2.5, 200)[:, None]
    at, foot = torch.tensor([2.0]), torch.tensor([-0.8])
    base, slope = g.log_normalizer(foot), g.mean(foot)
    left.plot(x, g.log_normalizer(x), color="tab:blue", lw=2, label="G, three keys on a line")
    left.plot(x, base + (x - foot) * slope, "k--", label="tangent at b: attention is its slope")
    left.vlines(at, base + (at - foot) * slope, g.log_normalizer(at), color="tab:green", lw=3)
    left.text(0.65, 5.5, "B(a, b)\n= KL(p_b ‖ p_a)", color="tab:green", ha="right", va="center", fontsize=12)
    left.plot(foot, base, "o", color="black")
    left.set(title="1. The gap at a above the tangent at b", xticks=[-0.8, 2], xticklabels=["b", "a"])
    wrong = f"KL(p_a ‖ p_b), as on the poster: off by up to {(primal - kl_ab).abs().max():.1f}"
    middle.plot(kl_ab, primal, ".", color="tab:red", alpha=0.5, label=wrong)
    middle.plot(kl_ba, primal, ".", color="tab:green", alpha=0.8, label="KL(p_b ‖ p_a)")
    middle.set(title="2. 400 pairs of queries", xlabel="KL, nats", ylabel="B(a, b), nats", ylim=(-2.2, 13.5))
    right.loglog(steps, bregman(h, near, start), color="tab:green", lw=2, label="B(a, b)")
    right.loglog(steps, cubic, color="tab:red", lw=2, label="|B(a, b) − B(b, a)|")
    right.loglog(steps, cubic[0] * (steps / steps[0]) ** 3, "k:", label="cube of the distance")
    right.set(title="3. For neighbours the slip hides", xlabel="distance |a − b|")
    for axis in (left, middle, right):
        axis.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert max((primal - kl_ba).abs().max(), (bregman(h, a, b) - kl_ba).abs().max()) < 1e-12
assert (dual_bregman(h, h.mean(a), h.mean(b)) - kl_ab).abs().max() < 1e-8
assert ((primal - kl_ab).abs() > 1).double().mean() > 0.1
assert (bregman(bell, a, b) - bregman(bell, b, a)).abs().max() < 1e-12
assert abs((cubic[5] / cubic[0]).log10() - 1.5) < 0.05
