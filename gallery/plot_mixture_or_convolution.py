"""
Mixture or convolution
======================

Two ways to give keys a width. Convolving atoms with one Gaussian smears every key alike, and attention gains a linear
term; a sum of Gaussians lets each cluster keep its own covariance, and the widths enter the weights as well::

    convolve(Σ_n c_n δ_{μ_n}, N(0, Σ))      ∇G = Σ_n p_n μ_n + Ση             p_n ∝ c_n e^⟨μ_n,η⟩
    Σ_n c_n N(μ_n, Σ_n)                     ∇G = Σ_n p_n (μ_n + Σ_n η)        p_n ∝ c_n e^(⟨μ_n,η⟩ + ½ηᵀΣ_nη)

With equal Σ_n they agree to 1e-12. As summaries of a cache they do not: 6000 keys in three clusters of different shapes
become three counts, means and covariances, and attention over the summary is compared with attention over the keys. A
covariance for each cluster makes a squared error over a hundred times below that of a shared one, up to a query of
length 3. Every Gaussian summary fails for long queries, which look past the outermost key of a cluster.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical, Gaussian, convolve

generator, zero = torch.Generator().manual_seed(0), torch.zeros(2, dtype=torch.float64)
centres = torch.tensor([[-1.6, -0.6], [1.2, -1.0], [0.2, 1.6]]).to(zero)
shapes = torch.tensor([[[0.30, 0.0], [0.0, 0.05]], [[0.15, 0.12], [0.12, 0.20]], [[0.03, 0.0], [0.0, 0.03]]]).to(zero)
drawn = zip((3000, 2000, 1000), centres, shapes, strict=True)
clusters = [Gaussian(m, s).sample(zero, n, generator=generator) for n, m, s in drawn]
keys = torch.cat(clusters)

# %%
# Four summaries, all from counts and first two moments of the clusters, or of all keys.

counts, means = torch.tensor([3e3, 2e3, 1e3]).double(), torch.stack([c.mean(0) for c in clusters])
covs = torch.stack([c.T.cov(correction=0) for c in clusters])
common = (counts[:, None, None] * covs).sum(0) / counts.sum()
summaries = {
    "one Gaussian": Gaussian(keys.mean(0), keys.T.cov(correction=0)),
    "centroids": Empirical(means, counts.log()),
    "convolution, one Σ": convolve(Empirical(means, counts.log()), Gaussian(zero, common)),
    "mixture, a Σ each": sum(c * Gaussian(m, s) for c, m, s in zip(counts, means, covs, strict=True)),
}
equal = sum(c * Gaussian(m, common) for c, m in zip(counts, means, strict=True))

# %%
# Squared error over all directions, relative to the spread of the exact outputs, at growing query length.

angle, radii = torch.linspace(0, 2 * torch.pi, 65, dtype=torch.float64), torch.logspace(-1, 1, 25, dtype=torch.float64)
queries = radii[:, None, None] * torch.stack([angle.cos(), angle.sin()], -1)
target = Empirical(keys).mean(queries.reshape(-1, 2)).reshape(25, 65, 2)
outputs = {name: h.mean(queries) for name, h in summaries.items()}
errors = {name: (o - target).square().sum((1, 2)) / target.var(1).sum(1) / 64 for name, o in outputs.items()}
one, each = errors["convolution, one Σ"], errors["mixture, a Σ each"]


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    left.scatter(*keys.T, s=2, color="gray", alpha=0.25, lw=0)
    left.plot(*target[17].T, color="black", lw=4, alpha=0.4, label="all 6000 keys")
    for name, o in outputs.items():
        left.plot(*o[17].T, lw=1.5, label=name)
        right.loglog(radii, errors[name], lw=2, label=name)
    left.set(title=f"Outputs for all directions, ‖η‖ = {radii[17]:.1f}", aspect="equal", xlim=(-4, 4), ylim=(-3, 3.4))
    right.axvline(radii[17], color="gray", lw=1)
    right.set(title="Relative squared error (colours as on the left)", xlabel="length of the query ‖η‖")
    left.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (equal.mean(queries) - outputs["convolution, one Σ"]).abs().max() < 1e-12
assert (one / each)[radii < 3].min() > 100
assert each[-1] > 0.05
