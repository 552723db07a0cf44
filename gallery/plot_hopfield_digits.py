"""
A Hopfield layer recalls digits of which half is missing
========================================================

A hundred handwritten digits are stored as they are, without any projection. The lower half of each is erased, and
``cumulant.nn.Hopfield`` is asked for the whole: every state descends the energy of the memory until it converges, after
its own number of steps. The inverse temperature β, which sets how sharp retrieval is, is the only parameter.

At β = 10 a state ends in a blurred average of similar digits, and the gradient of the fixed point depends only on the
basin it is in: it lowers β. One step from the start there are no basins yet, and the gradient raises β. So β is learned
through one step, and used until convergence. The text claims: at β = 10 the two gradients have opposite signs and 2 of
100 digits come back; after forty steps of learning β is above 50 and at least 85 come back; no energy rises; a digit
alone gives what it gives among others.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import normalize, pad

from cumulant.nn import Hopfield

images = torch.tensor(load_digits().data)
patterns = normalize(images[:100] - images.mean(0), dim=-1)  # (100, 64), unit vectors around the mean digit
broken = (patterns.unflatten(-1, (8, 8)) * (torch.arange(8) < 4)[:, None].double()).flatten(-2)


def loss(layer: Hopfield) -> torch.Tensor:
    return (layer(broken, patterns) - patterns).square().sum(-1).mean()


def recalled(found: torch.Tensor) -> int:
    return int(((found - patterns).norm(dim=-1) < 0.1).sum())


# %%
# β = 10 at the fixed point and after one step, with the slope of the loss in log β; then forty steps of learning β.

options = {"beta": 10.0, "max_steps": 1000, "tol": 1e-7, "dtype": torch.float64}
resting, layer = Hopfield(64, **options), Hopfield(64, steps=1, **options)
blurred = resting(broken, patterns).detach()
slopes = [torch.autograd.grad(loss(x), x.log_beta)[0].item() for x in (resting, layer)]
optimizer, course = torch.optim.Adam(layer.parameters(), lr=0.1), []
for _ in range(40):
    optimizer.zero_grad()
    loss(layer).backward()
    optimizer.step()
    resting.load_state_dict(layer.state_dict())
    course.append((layer.beta.item(), recalled(resting(broken, patterns))))
recall, alone = resting.retrieve(broken, patterns), resting(broken[:1], patterns)


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplot_mosaic([["digits"] * 2, ["course", "energy"]], figsize=(10.5, 8), layout="constrained")
    rows = [x[:12].unflatten(-1, (8, 8)) for x in (broken, blurred, recall.output.detach(), patterns)]
    rows = [pad(row, (1, 1, 1, 1), value=torch.nan) for row in rows]  # a frame around each
    axes["digits"].imshow(torch.cat([torch.cat([*row], 1) for row in rows]), cmap="gray_r")
    axes["digits"].set_yticks([4.5, 14.5, 24.5, 34.5], ["asked", "β = 10", f"β = {layer.beta.item():.0f}", "stored"])
    axes["digits"].set(xticks=[], title="Twelve of a hundred digits")
    axes["course"].plot(*zip(*course, strict=True), "o-", ms=3, color="tab:blue")
    axes["course"].set(xlabel="inverse temperature β while it learns", ylabel="digits recalled, of 100", ylim=(0, 100))
    axes["energy"].plot(recall.heads.energy[:, 0].detach(), color="tab:orange", lw=0.6, alpha=0.6)
    axes["energy"].set(xlabel="step of retrieval", ylabel="energy of each state", title="No energy ever rises")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert slopes[0] > 0 > slopes[1]
assert (recalled(blurred), recalled(recall.output) >= 85, layer.beta.item() > 50) == (2, True, True)
assert (recall.heads.energy.diff(dim=0) < 1e-12).all()
assert (alone - recall.output[:1]).abs().max() < 1e-6
