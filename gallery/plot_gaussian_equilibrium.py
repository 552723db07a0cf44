"""
The Gaussian equilibrium, and how it is left
============================================

Theorem 1 of the paper: let queries be N(Σ⁻¹μ, Σ⁻¹) and keys their images Ση, hence N(μ, Σ). A residual step is then
affine, η + ∇G(η) = (I + Σ)η + μ, and a norm that restores mean and covariance gives the same Gaussian back. If it does
so by a symmetric matrix, that is (I + Σ)⁻¹, and every single particle returns to where it was: top left.

That is balance, not stability. Let a layer be z + v Σ_j a_ij z_j with logits s⟨z_i,z_j⟩, then whitening. It multiplies
the n-th cumulant of a nearly Gaussian law by λ_n = 1 + n v s^(n−1)/(1 + vs), n ≥ 3. At s = ½ every λ_n exceeds 1 for
v = ½, the sign of attention, and lies below for v = −½, the sign of contrastive losses. Top right is the skewness, n =
3, of a law given by quadrature. Below are 600 particles: a Gaussian sample clusters, a skewed one becomes Gaussian.

The text claims that particles return to 1e-10, that the skewness multiplies by 1.3 and 0.5 to 1e-3 over 20 layers, and
of eight draws (the first is shown) that W₂ to a Gaussian ends above 0.8 for all with v = ½, falls for all with v = −½,
and for six of these to 0.055, the average of Gaussian samples; draws with far outliers take more than 40 layers.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical, Gaussian
from cumulant.dynamics import Ascend, Layer, Whiten, cumulant_multiplier, run

random = torch.Generator().manual_seed(0)
mu, sigma = torch.tensor([0.6, 0.2]).double(), torch.tensor([[1.2, 0.7], [0.7, 0.9]]).double()
law = Gaussian(torch.linalg.solve(sigma, mu), torch.linalg.inv(sigma))
x = law.sample(torch.zeros(1, 2).double(), 120, generator=random)[0]
grown = Ascend(keys=Gaussian(mu, sigma))(x)
moments = law.loc + 2 * mu, law.covariance + 2 * torch.eye(2) + sigma  # of the law that the step makes
back = Whiten(mean=law.loc, covariance=law.covariance)(grown, moments=moments)

# The population is a weighted grid, bent to z + ε(z² − 1), which has skewness 6ε.
grid = torch.linspace(-9, 9, 500, dtype=torch.float64)
weight = torch.softmax(-grid.square() / 2, 0)
gamma = -torch.rand(8, 600, 3, generator=random).double().log().sum(-1, keepdim=True)
skewness, paths = {0.5: [], -0.5: []}, {}
for v, cloud in ((0.5, torch.randn(8, 600, 1, generator=random).double()), (-0.5, gamma)):
    step = {"step": abs(v), "sign": 1 if v > 0 else -1, "scale": 0.5}
    z = (grid + 1e-5 * (grid**2 - 1))[:, None]
    for _ in range(21):
        z = Whiten()(z, moments=(weight @ z, (weight @ (z - weight @ z) ** 2)[:, None]))
        skewness[v].append(float(weight @ z[:, 0] ** 3))
        z = Ascend(**step, keys=Empirical(z, weight.log()))(z)
    paths[v] = run(Layer(ascend=Ascend(**step), renormalize=Whiten()), cloud, 40, keep=range(41))
w2 = {v: path.readings["w2_to_gaussian"] for v, path in paths.items()}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, ((cloud, curves), below) = plt.subplots(2, 2, figsize=(10.5, 8.2), layout="constrained")
    for points, style, label in ((x, "o", "before"), (grown, "x", "after the step"), (back, ".", "after the norm")):
        cloud.plot(*points.T, style, mfc="none", ms=9 if style == "o" else 5, label=label)
    for v, axis, colour, what in zip(paths, below, ("C3", "C0"), ("Gaussian", "gamma"), strict=True):
        rate = cumulant_multiplier(3, v, 0.5)
        curves.semilogy(skewness[v], "o", color=colour, ms=5, label=f"v = {v:+g}: measured")
        curves.plot(6e-5 * rate ** torch.arange(21), color=colour, label=f"multiplied by λ₃ = {rate:g} per layer")
        axis.plot(torch.cat(list(paths[v].states.values()), -1)[0, ::3].T, color=colour, lw=0.4)
        axis.set_title(f"v = {v:+g}, a {what} sample\nW₂ to a Gaussian {w2[v][0, 0]:.2f} → {w2[v][-1, 0]:.2f}")
        axis.set(xlabel="layer", ylabel="particles", ylim=(-3.6, 4.8))
    cloud.set(title="Theorem 1: the norm returns every particle", aspect="equal")
    curves.set(title="Skewness of a nearly Gaussian law", xlabel="layer", xticks=range(0, 21, 5))
    cloud.legend(fontsize=8)
    curves.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (back - x).abs().max() < 1e-10
assert all(abs((k[-1] / k[0]) ** (1 / 20) - cumulant_multiplier(3, v, 0.5)) < 1e-3 for v, k in skewness.items())
assert w2[0.5][-1].min() > 0.8
assert [int((w2[-0.5][-1] < bound).sum()) for bound in (w2[-0.5][0], 0.055)] == [8, 6]
