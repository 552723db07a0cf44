"""
Softmax condenses
=================

N keys drawn from a standard Gaussian. With infinitely many, attention is linear: the tilted law is N(η, I), so that the
output is η. N keys can follow only while there is a key where the tilted law puts its mass, which takes ::

    KL(p_η ‖ h) = ½‖η‖² < log N,        that is        ‖η‖ < √(2 log N)

Beyond, softmax settles on the outermost key and the output stays there. Lengths in units of √(2 log N) bring all N onto
nearly one curve, which approaches min(1, 1/r) slowly: the random energy model of physics. More keys buy little, as
√(2 log N) is 2.9 for 64 keys and 4.6 for 32768.

The text claims that the ratio of the output to η is above 0.93 up to r = 0.4 and between 0.75/r and 1/r from r = 2 on,
for all N shown, and that the curves stay within 0.21 of each other.

`Attended.kl_to_base` shows it for a query: r² log N before the transition, at most log N after it.

Run with a file name to save the figure (needs matplotlib).
"""

import math
import sys
from importlib.util import find_spec

import torch

from cumulant import attend

DIM = 4
r = torch.arange(1, 31, dtype=torch.float64) / 10
direction = torch.full((DIM,), DIM**-0.5, dtype=torch.float64)
generator = torch.Generator().manual_seed(0)

# %%
# For each N, queries r √(2 log N) long; ratio of the output to its value for infinitely many keys, averaged over draws.

sizes = (64, 512, 4096, 32768)
lengths, outputs, divergence = {}, {}, {}
for n in sizes:
    keys = torch.randn(2**18 // n, n, DIM, dtype=torch.float64, generator=generator)
    lengths[n] = r * math.sqrt(2 * math.log(n))
    seen = attend((lengths[n][:, None] * direction).expand(len(keys), -1, -1), keys, scale=1.0)
    outputs[n] = (seen.output @ direction).mean(0)
    divergence[n] = seen.kl_to_base.mean(0) / math.log(n)
ratios = {n: outputs[n] / lengths[n] for n in sizes}
limit = torch.minimum(torch.ones_like(r), 1 / r)


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    for k, n in enumerate(sizes):
        left.plot(lengths[n], outputs[n], color=f"C{k}", lw=2, label=f"N = {n}")
        left.axvline(math.sqrt(2 * math.log(n)), color=f"C{k}", lw=1, ls=":")
        middle.plot(r, ratios[n], color=f"C{k}", lw=2, label=f"N = {n}")
        right.plot(r, divergence[n], color=f"C{k}", lw=2, label=f"N = {n}")
    left.plot([0, 6], [0, 6], color="black", ls="--", label="infinitely many keys")
    left.set(title="Output along the query", xlabel="‖η‖   (dotted: √(2 log N))", xlim=(0, 9), ylim=(0, 6))
    middle.plot(r, limit, color="black", ls="--", label="limit: min(1, 1/r)")
    middle.set(title="Nearly one curve: output / ‖η‖", xlabel="r = ‖η‖ / √(2 log N)", xlim=(0, 3), ylim=(0, 1.1))
    right.plot(r, (r**2).clamp_max(1), color="black", ls="--", label="limit: min(r², 1)")
    right.set(title="KL to the keys / log N", xlabel="r = ‖η‖ / √(2 log N)", xlim=(0, 3), ylim=(0, 1.1))
    for axis, place in ((left, "upper left"), (middle, "lower left"), (right, "lower right")):
        axis.legend(fontsize=8, loc=place)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

curves = torch.stack([ratios[n] for n in sizes])
assert (curves[:, r <= 0.4] > 0.93).all()
assert ((curves * r > 0.75) & (curves * r < 1))[:, r >= 2].all()
assert (curves.amax(0) - curves.amin(0)).max() < 0.21
assert (torch.stack([divergence[n] for n in sizes]) <= 1).all()
