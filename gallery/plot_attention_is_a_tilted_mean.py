"""
Attention is a tilted mean
==========================

Put a unit mass on every key. A query η reweights the keys by e^⟨k,η⟩, and attention with values equal to keys is the
mean of what results, the gradient of the log-normalizer ::

    G(η) = log Σ_n e^⟨k_n,η⟩

As the query grows, the mean leaves the centroid of the keys and ends on the key that points furthest along it. Along
that ray G is convex: it starts at the log of the number of keys, its slope is the mean score ⟨∇G(tη),η⟩, and it nears
the line t · (largest score).

The text claims that `torch.nn.functional.scaled_dot_product_attention` and ∇G at η = q/√d agree to 1e-12; with values
that differ from the keys too, if key and value are one atom and the query is 0 on the values.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from cumulant import Empirical

keys = torch.tensor([[1.6, 0.3], [0.6, 1.4], [-1.0, 1.0], [-1.4, -0.5], [0.2, -1.3], [1.1, -0.9]], dtype=torch.float64)
values = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3).sin()
query = torch.tensor([1.0, 0.45], dtype=torch.float64)

# %%
# One measure, one method. The path of the mean is a batch of queries t·η.

h = Empirical(keys)
times = torch.linspace(0, 12, 200, dtype=torch.float64)
ray = times[:, None] * query
path, heights = h.mean(ray), h.log_normalizer(ray)
slope = path @ query

# %%
# The same against torch's own function, whose scores carry 1/√d, with V = K and with other values.

scale = keys.shape[-1] ** -0.5
joint = Empirical(torch.cat([keys, values], dim=-1))
padded = torch.cat([scale * ray, torch.zeros(len(ray), 3, dtype=torch.float64)], dim=-1)
gap = (h.mean(scale * ray) - scaled_dot_product_attention(ray, keys, keys)).abs().max()
value_gap = (joint.mean(padded)[:, 2:] - scaled_dot_product_attention(ray, keys, values)).abs().max()


def figure(path_to_file: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    weights = torch.softmax(keys @ query, 0)
    left.scatter(*keys.T, s=30 + 900 * weights, color="tab:blue", alpha=0.35, label="keys, area by weight at η")
    left.plot(*path.T, color="tab:red", lw=2, label="∇G(tη), t from 0 to 12")
    left.plot(*path[0], "o", color="black", ms=5, label="t = 0: the centroid")
    left.annotate("", 0.75 * query, (0, 0), arrowprops={"arrowstyle": "->", "color": "tab:green", "lw": 2})
    left.text(0.62, 0.42, "η", color="tab:green", fontsize=13)
    left.set(title="The mean moves from the centroid to one key", aspect="equal", xlim=(-1.9, 2.2), ylim=(-1.8, 2.4))
    left.legend(loc="upper right", fontsize=8)
    tangent = h.log_normalizer(query) + (times - 1) * (h.mean(query) @ query)
    right.plot(times, heights, color="tab:blue", lw=2, label="G(tη)")
    right.plot(times, tangent, color="tab:red", label="tangent at t = 1: slope ⟨∇G(η), η⟩")
    right.plot(times, times * (keys @ query).max(), color="gray", ls=":", label="t · largest score")
    right.set(title="The log-normalizer along the ray", xlabel="t", xlim=(0, 4), ylim=(0, 7.5))
    right.legend(loc="upper left", fontsize=8)
    fig.savefig(path_to_file, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (path[-1] - keys[0]).norm() < 1e-2
assert (slope.diff() > 0).all()
assert max(gap, value_gap) < 1e-12
