"""
The algebra of measures
=======================

Operations act on the measure h, and what becomes of its log-normalizer G follows. Each panel draws 1500 points from the
result of one operation on four weighted atoms and marks their mean.

Adding measures mixes them, a matrix moves every point, a tilt moves mass without moving points, a convolution adds an
independent draw, and a product puts two laws on two axes. The results are measures again, so they nest.

The text claims that G of each result equals the rule in its title to 1e-12, and that the mean of the draws is the mean
∇G(0) within five standard errors.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical, Gaussian, Measure, convolve, product


def t(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


h = Empirical(t([-1.5, -1.0], [1.5, -1.0], [1.0, 1.2], [-1.0, 1.0]), t(0.1, 0.2, 0.3, 0.4).log())
g = Gaussian(t(0.0, 0.2), t([0.25, 0.15], [0.15, 0.25]))
matrix, eta0 = t([0.5, -1.0], [1.0, 0.5]), t(1.2, -0.4)
line, bell = t([1.0, 0.0]) @ h, Gaussian(t(0.0), t([0.3]))

# %%
# Six measures, and the rule for G of each, written with G of the parts.

G, K = h.log_normalizer, g.log_normalizer
panels = {
    "h: four atoms": (h, G),
    "h + g:  log(e^G + e^K)": (h + g, lambda e: torch.logaddexp(G(e), K(e))),
    "A @ h:  G(Aᵀη)": (matrix @ h, lambda e: G(e @ matrix)),
    "h.tilt(η0):  G(η + η0)": (h.tilt(eta0), lambda e: G(e + eta0)),
    "convolve(h, g):  G + K": (convolve(h, g), lambda e: G(e) + K(e)),
    "product(h₁, g₁):  G₁(η₁) + K₁(η₂)": (
        product(line, bell),
        lambda e: line.log_normalizer(e[..., :1]) + bell.log_normalizer(e[..., 1:]),
    ),
}

# %%
# The rules, at twenty queries; the draws, at η = 0.

generator = torch.Generator().manual_seed(0)
queries = torch.randn(20, 2, dtype=torch.float64, generator=generator)
rule_gap = max((m.log_normalizer(queries) - rule(queries)).abs().max() for m, rule in panels.values())
draws = {title: m.sample(t(0.0, 0.0), 1500, generator=generator) for title, (m, _) in panels.items()}
errors = [(draws[k].mean(0) - m.mean(t(0.0, 0.0))) / (draws[k].std(0) / 1500**0.5) for k, (m, _) in panels.items()]


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(10, 6.9), layout="constrained", sharex=True, sharey=True)
    for axis, (title, (measure, _)) in zip(axes.flat, panels.items(), strict=True):
        points, counts = draws[title].unique(dim=0, return_counts=True)
        axis.scatter(*points.T, s=4 + 0.6 * (counts - 1), color="tab:blue", alpha=0.35, lw=0)
        axis.plot(*measure.mean(t(0.0, 0.0)), "P", color="tab:red", ms=9, mec="white", label="mean ∇G(0)")
        axis.set(title=title, aspect="equal", xlim=(-3.4, 3.4), ylim=(-3.2, 3.2))
    axes[0, 0].legend(loc="upper left")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert all(isinstance(m, Measure) for m, _ in panels.values())
assert rule_gap < 1e-12
assert torch.stack(errors).abs().max() < 5
