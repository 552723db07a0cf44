"""
Gibbs and mean iteration
========================

Attention after attention alternates between a query η and a mean, which looks like Gibbs sampling on ::

    p(x, η) ∝ h(dx) e^{⟨η,x⟩ − (ν+1) G(η) + ⟨χ,η⟩}         x | η is the tilt p_η, η | x has the law (χ + x, ν + 1)

A sampler passes draws on, attention means. With a conjugate prior, worth ν observations with sum χ, the mean given x is
linear, E[∇G(η) | x] = (χ + x)/(ν + 1). Means passed on obey m⁺ = (χ + m)/(ν + 1), and so does the average over many
chains, from any start: both reach χ/ν. The means say nothing about the spread of the draws. ν is the contraction that
attention lacks, and the mixing rate of the sampler: draws t sweeps apart have correlation (ν + 1)^−t.

The text claims, for counts (h Poisson) and three keys (p_η softmax), averages over 20000 chains within five standard
errors of the mean iteration at each of ten sweeps, an iteration that is at χ/ν to 1e-5 after 60, and these correlations
to 0.05.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch
from torch.distributions import Poisson

from cumulant import Empirical, from_distribution
from cumulant.samplers import ConjugatePrior, gibbs, mean_iteration

t, generator = torch.zeros(0, dtype=torch.float64).new_tensor, torch.Generator().manual_seed(0)
counts, keys = from_distribution(Poisson(t(1.0))), t([[0.0, 0.0], [1.0, 0.0], [0.5, 0.9]])
priors = {f"ν = {nu:g}": ConjugatePrior(counts, t([3.0 * nu]), nu) for nu in (0.3, 1.0, 4.0)}
priors["three keys, ν = 3"] = ConjugatePrior(Empirical(keys), 3 * t([0.5, 0.4]), 3.0)

# %%
# 20000 chains from one start; averages of ∇G(η) after each sweep, beside the means passed on.

draws, paths, correlation, law = {}, {}, {}, {}
for name, prior in priors.items():
    start = t([12.0]) if prior.measure is counts else keys[0]
    state, kept = gibbs.GibbsState(start.expand(20_000, -1), start.expand(20_000, -1)), []
    for _ in range(10):
        state, info = gibbs.step(state, prior, generator=generator)
        kept.append(info.mean)
    draws[name], paths[name] = torch.stack(kept), mean_iteration(prior, start, 60)  # (sweeps, chains, d), (61, d)
    correlation[name] = torch.corrcoef(gibbs.run(prior, 10, chains=20_000, generator=generator).x[..., 0].T)[0]
    law[name] = (prior.nu + 1) ** -torch.arange(10.0)
off = {n: (d.mean(1) - paths[n][1:11]) / (d.std(1) / 20_000**0.5) for n, d in draws.items()}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13.5, 4.3), layout="constrained")
    for colour, name in enumerate(priors):
        right.plot(correlation[name], "o", color=f"C{colour}", label=name)
        right.plot(law[name], color=f"C{colour}", lw=1)
        if colour < 3:
            left.plot(paths[name][:11], color=f"C{colour}", lw=1.5)
            left.plot(range(1, 11), draws[name].mean(1), "o", color=f"C{colour}", label=name)
    left.plot(range(1, 11), draws["ν = 1"][:, :3, 0], color="C1", lw=0.6, alpha=0.6)
    left.set(title="Counts: average over chains, mean iteration (lines)", xlabel="sweep", ylabel="∇G(η)")
    middle.plot(*draws[name][-1, :2000].T, ".", ms=2, color="C3", alpha=0.5, label="∇G(η) of 2000 chains")
    middle.plot(*keys.T, "k^", ms=9, label="keys")
    middle.plot(*paths[name].T, "o-", color="black", ms=4, label="mean iteration")
    middle.plot(*draws[name].mean(1).T, "x", color="tab:cyan", ms=9, mew=2, label="average over chains")
    middle.set(title=name, aspect="equal")
    right.set(title="Correlation t sweeps apart, lines: (ν + 1)^−t", xlabel="t")
    for axis in (left, middle, right):
        axis.legend(fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert all(o.abs().max() < 5 for o in off.values())
assert all((paths[n][-1] - prior.mean).abs().max() < 1e-5 for n, prior in priors.items())
assert all((correlation[n] - law[n]).abs().max() < 0.05 for n in priors)
