"""
Near the hull
=============

Four atoms at the corners of the unit square, with masses 0.1, 0.2, 0.3 and 0.4. A mean μ moves from the centre to the
right edge and beyond it. Inside, `natural` finds the η whose tilted mean is μ; approaching the edge, η grows like the
logarithm of the distance, log 10 for each factor of ten. On the edge η is infinite (BOUNDARY) while G*(μ) has a limit:
only the two atoms of the edge matter, so ::

    G*(1, ½) = ½ log(½ / 0.2) + ½ log(½ / 0.4) = 0.5697

Beyond the edge nothing has mean μ (OUTSIDE), and G* is +∞.

Run with a file name to save the figure (needs matplotlib).
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant import Empirical, Status

square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
h = Empirical(square, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log())


def along(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, 0.5)], dim=-1)


# %%
# The path in equal steps, and once more on a logarithmic scale towards the edge.

walk = torch.linspace(0.5, 1.2, 141, dtype=torch.float64)
found, dual = h.natural(along(walk)), h.conjugate(along(walk))
gaps = 10.0 ** -torch.arange(1, 9, dtype=torch.float64)
close = h.natural(along(1 - gaps))
growth = close.value[:, 0].diff()

# %%
# On the edge itself.

edge = along(torch.ones((), dtype=torch.float64))
limit = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.4)
value = h.conjugate(edge)


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    left.fill(*square[[0, 1, 3, 2]].T, color="tab:blue", alpha=0.1)
    left.scatter(*square.T, s=800 * h.log_weights.exp(), color="tab:blue", alpha=0.5)
    for status, colour in {"CONVERGED": "tab:green", "BOUNDARY": "black", "OUTSIDE": "tab:red"}.items():
        here = walk[found.status == Status[status]]
        left.plot(here, 0.5 + 0 * here, ".", color=colour, ms=10 if len(here) == 1 else 4, label=status)
    left.set(title="μ walks out of the hull of four atoms", aspect="equal", xlim=(-0.3, 1.5), ylim=(-0.3, 1.5))
    left.legend(loc="upper center", ncols=3, fontsize=7, columnspacing=0.8, handletextpad=0.2)
    middle.semilogx(gaps, close.value[:, 0], "o-", color="tab:green")
    middle.set(title="η₁ grows by log 10 per decade", xlabel="distance to the edge", ylabel="first coordinate of η")
    middle.invert_xaxis()
    right.plot(walk[dual.isfinite()], dual[dual.isfinite()], color="tab:green", label="G*(μ)")
    right.plot(1, value, "o", color="black", label=f"on the edge: {value.item():.4f}")
    right.axvspan(1, 1.2, color="tab:red", alpha=0.12, label="outside: G* = +∞")
    right.set(title="The conjugate", xlabel="first coordinate of μ", xlim=(0.5, 1.2), ylim=(0, 0.65))
    right.legend(loc="upper left", fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert close.converged.all()
assert (growth[2:] - math.log(10)).abs().max() < 1e-2
assert h.natural(edge).status == Status.BOUNDARY
assert dual[walk > 1.001].isposinf().all()
assert abs(value - limit) < 1e-7
