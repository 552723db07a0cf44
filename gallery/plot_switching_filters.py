"""
Switching filters
=================

A random walk has two speeds, switches between them now and then, and is measured with noise. Given the speeds a Kalman
filter is exact; but they are hidden, and after t steps they may have gone 2^t ways. A filter has to forget, which it
does by putting one Gaussian with the same mean and covariance in the place of several::

    GPB-k     updates M^k hypotheses, the last k modes; then forgets the oldest of them
    IMM       forgets first, then updates M hypotheses
    exact     never forgets

One engine does them all, `run(model, y, Slots(before, after))`: the slots say how many modes to remember before and
after the observation. Two filters coincide where what one of them forgets would have made no difference.

The text claims, for 400 walks of ten steps and against the exact filter, that IMM has less than 0.4 of the error of
GPB1 at the same cost and that each order of GPB divides it by more than 2.5. To 1e-12, equal rows of the transition
make IMM GPB1; speeds that never switch make IMM and GPB2 exact, and so does having nothing observed; GPB11 always is.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.filters import EXACT, IMM, Filtered, Slots, SwitchingLinearGaussian, run

one, speeds = torch.eye(1, dtype=torch.float64), torch.tensor([0.1, 9.0], dtype=torch.float64)[:, None, None]
rows = {"switches": [[0.95, 0.05], [0.2, 0.8]], "equal rows": [[0.7, 0.3]] * 2, "never switches": [[1, 0], [0, 1]]}
start = {"initial_mean": one[0], "initial_covariance": one}
walks = {name: SwitchingLinearGaussian(one.new_tensor(p), one, speeds, one, one, **start) for name, p in rows.items()}
y = walks["switches"].simulate(10, batch_shape=(400,), generator=torch.Generator().manual_seed(0)).observations
filters = {"GPB1": Slots.gpb(1), "IMM": IMM} | {f"GPB{k}": Slots.gpb(k) for k in (2, 3, 4, 11)} | {"exact": EXACT}

# %%
# The mean is off by so many standard deviations of the exact belief, the log-likelihood of a walk by so many nats.

found = {name: run(walks["switches"], y, slots) for name, slots in filters.items()}
truth = found["exact"]
by_step = {n: ((f.mean - truth.mean).square() / truth.covariance[..., 0]).mean((0, 2)).sqrt() for n, f in found.items()}
error = {name: e.square().mean().sqrt().item() for name, e in by_step.items()}
nats = {name: (f.total_log_likelihood - truth.total_log_likelihood).abs().mean() for name, f in found.items()}

# %%
# Which filters coincide? The r.m.s. difference to the exact one, of whatever a filter reports the largest.


def apart(a: Filtered, b: Filtered) -> float:
    return max((p - q).square().mean().sqrt().item() for p, q in zip(a[:-2], b[:-2], strict=True))


cases = {name: (walk, y[:100]) for name, walk in walks.items()}
cases["nothing observed"] = walks["switches"], torch.full_like(y[:1], torch.nan)
runs = {case: {name: run(*given, slots) for name, slots in filters.items()} for case, given in cases.items()}
table = torch.tensor([[apart(r[name], r["exact"]) for name in filters] for r in runs.values()])[:, :-1]


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained", width_ratios=[1, 1, 1.5])
    for k, name in enumerate(["GPB1", "IMM", "GPB2", "GPB3", "GPB4"]):
        late = by_step[name] > 1e-12
        left.semilogy(torch.arange(1, 11)[late], by_step[name][late], "o-", ms=4, color=f"C{k}")
        left.annotate(name, (10, by_step[name][-1]), xytext=(7, -4), textcoords="offset points", color=f"C{k}")
        middle.semilogy(max(1, k), nats[name], "o", ms=9, color=f"C{k}")
        middle.annotate(name, (max(1, k), nats[name]), xytext=(9, -4), textcoords="offset points", color=f"C{k}")
    left.set(title="Error of the mean, in deviations", xlabel="step", xlim=(0.5, 12.3), xticks=range(1, 11))
    middle.set(title="Error of the log-likelihood, nats", xlabel="updates a step", xlim=(0.6, 4.9))
    middle.set_xticks([1, 2, 3, 4], ["2", "4", "8", "16"])
    right.imshow(table.clamp_min(1e-4).log10(), cmap="Reds", aspect="auto", vmin=-4, vmax=3)
    for place, value in enumerate(table.flatten()):
        right.text(place % 6, place // 6, f"{value:.1g}" if value > 1e-12 else "exact", ha="center", va="center")
    right.set(title="Difference to the exact filter")
    right.set_xticks(range(6), list(filters)[:-1])
    right.set_yticks(range(4), list(cases))
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert error["IMM"] < 0.4 * error["GPB1"]
assert all(2.5 * error[f"GPB{k + 1}"] < error[f"GPB{k}"] for k in (1, 2, 3))
assert apart(runs["equal rows"]["IMM"], runs["equal rows"]["GPB1"]) < 1e-12 < table[1, 0]
assert (table[2:, 1:] < 1e-12).all()
assert (table[:, -1] < 1e-12).all()
