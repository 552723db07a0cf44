"""
A contrastive loss is a Fenchel–Young gap
=========================================

InfoNCE asks a query η = q/τ to find its key k⁺ among all. G(η) lies above its supporting line ⟨η,k⁺⟩ − G*(k⁺), and ::

    loss = G(η) − ⟨η,k⁺⟩ = [G(η) + G*(k⁺) − ⟨η,k⁺⟩] − G*(k⁺)

The bracket is the Fenchel–Young gap, zero where attention m returns k⁺. For keys on the outside of the cloud, as unit
vectors, G*(k⁺) = 0: loss and gap are equal. A key inside keeps a loss of −G*(k⁺) > 0. Seen from the positive the keys
are k − k⁺, and the loss is the log-normalizer of that measure, `h.shift(-k⁺)`, with gradient m − k⁺. Training steps
against it, residual attention over those keys along it: one G, and opposite signs.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical
from cumulant.contrastive import info_nce
from cumulant.geometry import fenchel_young

line = torch.tensor([[-1.2], [-0.5], [0.4], [1.0]], dtype=torch.float64)  # keys on a line: 1.0 outermost, 0.4 inside
flat, eta = Empirical(line), torch.linspace(-3, 6, 181, dtype=torch.float64)[:, None]
inner, floor = info_nce(eta, line, positives=torch.full((181,), 2), reduction="none"), -flat.conjugate(line[2])

# %%
# Eight unit keys in the plane; the positive is the first. Loss, gap, and the log-normalizer of the shifted keys.

angle = torch.tensor([0.2, 0.8, 1.9, 2.4, 2.9, 4.0, 4.7, 5.6], dtype=torch.float64)
keys, tau, first = torch.stack([angle.cos(), angle.sin()], -1), 0.5, torch.zeros(64, dtype=torch.long)
h, seen = Empirical(keys), Empirical(keys).shift(-keys[0])
query = (3 * torch.arange(128, dtype=torch.float64).sin()).reshape(64, 2).requires_grad_()
loss = info_nce(query, keys, temperature=tau, positives=first, reduction="none")
gradient, gap = torch.autograd.grad(loss.sum(), query)[0], fenchel_young(h, query.detach() / tau, keys[first])

# %%
# From one start, forty steps against the gradient and forty along it.

sign, trail = torch.tensor([[-1.0], [1.0]]), torch.tensor([-0.6, 1.4], dtype=torch.float64).repeat(41, 2, 1)
for k in range(40):
    trail[k + 1] = trail[k] + sign * seen.mean(trail[k]) / 4


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    left.plot(eta, flat.log_normalizer(eta), color="tab:blue", lw=2, label="G(η), four keys on a line")
    left.plot(eta, eta, "k", label="⟨η,k⁺⟩, k⁺ = 1 the outermost key")
    left.plot(eta, 0.4 * eta + floor, "C1--", label="⟨η,k⟩ − G*(k), k = 0.4 inside")
    left.annotate("", (0, -0.1), (0, 1.48), arrowprops={"arrowstyle": "<->", "color": "tab:red", "lw": 2})
    left.text(0.7, 0.2, "loss = gap", color="tab:red")
    left.set(title="1. G and its supporting lines", xlabel="η", xlim=(-3, 6), ylim=(-1, 6.5))
    plane = torch.stack(torch.meshgrid([torch.linspace(-4.5, 7, 91, dtype=torch.float64)] * 2, indexing="xy"), -1)
    middle.contourf(*plane.movedim(-1, 0), seen.log_normalizer(plane), levels=20, cmap="Blues", alpha=0.8)
    for k, name in enumerate(("training: η − (m − k⁺)/4", "attention: η + (m − k⁺)/4")):
        middle.plot(*trail[:, k].T, ".-", color=f"C{k + 2}", ms=5, label=name)
        right.semilogy(seen.log_normalizer(trail)[:, k], ".-", color=f"C{k + 2}", ms=5, label=name)
    middle.plot(*(keys / tau).T, "o", color="gray", label="unit vectors k/τ")
    middle.plot(*(keys[0] / tau), "*", color="black", ms=14, label="the positive k⁺/τ")
    middle.set(title="2. The loss over the plane of queries", aspect="equal", xlim=(-4.5, 7), ylim=(-4.5, 7))
    right.set(title="3. One function, two directions", xlabel="step", ylabel="loss G(η) − ⟨η,k⁺⟩")
    for axis in (left, middle, right):
        axis.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert torch.allclose(loss, seen.log_normalizer(query / tau), rtol=0, atol=1e-12)
assert torch.allclose(gradient, seen.mean(query.detach() / tau) / tau, rtol=0, atol=1e-12)
assert torch.allclose(loss, gap, rtol=0, atol=1e-6)
assert 0 <= inner.min() - floor < 1e-3
assert (sign[:, 0] * seen.log_normalizer(trail).diff(dim=0) > 0).all()
