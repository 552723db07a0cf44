"""
Switching filters
=================

A random walk has two speeds, switches between them now and then, and is measured with noise. Given the speeds a Kalman
filter is exact; but they are hidden, and after t steps they may have gone 2^t ways. A filter has to merge
hypotheses: it replaces several Gaussians by one with the same mean and covariance::

    GPB-k     updates M^k hypotheses, the last k modes; then merges over the oldest of them
    IMM       merges first, then updates M hypotheses

One engine does both, `run(model, y, Slots(before, after))`: the slots say how many modes it keeps before and after
an observation. The text claims, for 400 walks of ten steps and against the filter that never merges, that IMM has less
than 0.4 of the error of GPB1 at the same cost and that each order of GPB divides it by more than 2. To 1e-12, equal
rows of the transition make IMM GPB1; speeds that never switch make IMM and GPB2 exact, and so does having nothing
observed; GPB11 always is.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.filters import EXACT, IMM, Slots, SwitchingLinearGaussian, run

one, speeds = torch.eye(1, dtype=torch.float64), torch.tensor([0.1, 9.0], dtype=torch.float64)[:, None, None]
rows = {"switches": [[0.95, 0.05], [0.2, 0.8]], "equal rows": [[0.7, 0.3]] * 2, "never switches": [[1, 0], [0, 1]]}
known = {"observation": one, "observation_noise": one, "initial_mean": one[0], "initial_covariance": one}
walks = {name: SwitchingLinearGaussian(one.new_tensor(p), one, speeds, **known) for name, p in rows.items()}
y = walks["switches"].simulate(10, batch_shape=(400,), generator=torch.Generator().manual_seed(0)).observations
filters = {"GPB1": Slots.gpb(1), "IMM": IMM} | {f"GPB{k}": Slots.gpb(k) for k in (2, 3, 4, 11)} | {"exact": EXACT}

# %%
# The mean is off by so many standard deviations of the exact belief, the log-likelihood of a walk by so many nats.

found = {name: run(walks["switches"], y, slots) for name, slots in filters.items()}
truth = found["exact"]
error = {n: ((f.mean - truth.mean).square() / truth.covariance[..., 0]).mean().sqrt() for n, f in found.items()}
nats = {n: (f.total_log_likelihood - truth.total_log_likelihood).abs().mean() for n, f in found.items()}

# %%
# Which filters coincide? The r.m.s. difference to the exact one in the variance given a mode times its probability.

cases = {name: (walk, y[:100]) for name, walk in walks.items()}
cases["nothing observed"] = walks["switches"], torch.full_like(y[:1], torch.nan)
runs = {case: [run(*given, slots) for slots in filters.values()] for case, given in cases.items()}
spread = {case: [f.mode_probabilities * f.mode_covariances[..., 0, 0] for f in r] for case, r in runs.items()}
table = torch.tensor([[(t - r[-1]).square().mean().sqrt() for t in r[:-1]] for r in spread.values()])


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained", width_ratios=[1, 1.4])
    for place, name in zip((1, 1, 2, 3, 4), filters, strict=False):
        left.semilogy(place - 0.04, nats[name], "s", ms=8, mfc="white", color="tab:blue")
        left.semilogy(place + 0.04, error[name], "o", ms=8, color="tab:red")
        left.annotate(name, (place, error[name]), xytext=(12, -4), textcoords="offset points")
    left.legend(["log-likelihood of a walk, nats", "mean, standard deviations"])
    left.set(title="Error against the exact filter", xlabel="log₂ of updates a step", xlim=(0.7, 4.6))
    right.set_title("Difference to the exact filter, case by case")
    right.imshow(table.clamp_min(1e-4).log10(), cmap="Reds", aspect="auto", vmin=-4, vmax=3)
    for place, value in enumerate(table.flatten()):
        right.text(place % 6, place // 6, f"{value:.1g}" if value > 1e-12 else "exact", ha="center", va="center")
    right.set_xticks(range(6), list(filters)[:-1])
    right.set_yticks(range(4), list(cases))
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert error["IMM"] < 0.4 * error["GPB1"]
assert all(2 * error[f"GPB{k + 1}"] < error[f"GPB{k}"] for k in (1, 2, 3))
assert (spread["equal rows"][0] - spread["equal rows"][1]).abs().max() < 1e-12 < table[1, 0]
assert (table[2:, 1:] < 1e-12).all()
assert (table[:, -1] < 1e-12).all()
