"""
Energy descending through a block
=================================

An `EnergyBlock` moves its tokens down E = −Σ_h β_h⁻¹ Σ_C log Σ_{B≠C} e^{β_h⟨K_B,Q_C⟩} − ½ Σ relu(ξg)², with g the
LayerNorm of x and x⁺ = x − t ∂E/∂g. LayerNorm is the gradient of a convex function, so the direction always descends.

Left, eight samples of 12 tokens under random weights. Middle, tokens that repel: each heads for the side opposite to
the mean of the others, and with a step of 10 all of them arrive there together. Taken as it is, the step raises the
energy; halved until it does not, it spreads the tokens. Right, a causal block: each token descends an energy of its own
with the tokens before it held still. That energy is concave in g, so that steps of every length descend it.

The text claims that no searched step raises the energy of a sample, that the first fixed step raises it for each sample
whose tokens repel, that no step of length 0.1, 1 or 1000 raises the energy of a causal token by more than rounding,
and that ∂E/∂g, with its two terms, is what autograd finds, to 1e-10.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.nn import EnergyBlock

torch.manual_seed(0)
torch.set_grad_enabled(False)
dim, x = 16, torch.randn(8, 12, 16, dtype=torch.float64)
free = EnergyBlock(dim, 4, steps=25).double()
descent = free.descend(x).trace

# Tokens that repel: keys are the queries turned round
repelled = {}
for search in ("fixed", "backtracking"):
    block = EnergyBlock(dim, 1, memories=0, beta=0.01, steps=25, step_size=10.0, search=search).double()
    block.query.copy_(-2 * torch.eye(dim))
    block.key.copy_(2 * torch.eye(dim))
    repelled[search] = block.descend(x).trace

# Causal: one energy a token, three lengths
causal, own = EnergyBlock(dim, 4, steps=25, causal=True).double(), {}
for causal.step_size in (0.1, 1.0, 1000.0):
    own[causal.step_size] = causal.descend(x[:1]).energies[:, 0]

# E as a function of x has the gradient (∂²L/∂x²) ∂E/∂g
with torch.enable_grad():
    point = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(free.energy(point).sum(), point)
hessian = torch.func.vmap(torch.func.vmap(torch.func.hessian(free.lagrangian)))(x)
gap = ((hessian @ free.gradient(x)[..., None])[..., 0] - expected).abs().max()


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    axes[0].plot(descent, color="C0", lw=1)
    for (name, trace), colour in zip(repelled.items(), ("C3", "C0"), strict=True):
        axes[1].plot(trace, color=colour, lw=1, label=[name] + 7 * ["_"])
    for (length, energies), colour in zip(own.items(), ("C0", "C1", "C2"), strict=True):
        axes[2].plot(energies, color=colour, lw=0.8, label=[f"t = {length:g}"] + 11 * ["_"])
    axes[0].set(title="Energy of eight samples", xlabel="step")
    axes[1].set(title="Tokens that repel, step 10", xlabel="step")
    axes[2].set(title="Energy of twelve causal tokens", xlabel="step")
    [axis.legend(fontsize=8) for axis in axes[1:]]
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

torch.set_grad_enabled(True)
assert max(descent.diff(dim=0).max(), repelled["backtracking"].diff(dim=0).max()) <= 0
assert (repelled["fixed"].diff(dim=0)[0] > 0).all()
assert all((e.diff(dim=0) <= 1e-12 * e[:-1].abs()).all() for e in own.values())
assert gap < 1e-10
