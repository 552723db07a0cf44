"""
A manoeuvring target
====================

A target cruises at constant velocity and manoeuvres twice, with an acceleration that wanders. Its position is measured
every tenth of a second, with an error of 0.3 m in x and in y. The model is the example of ``cumulant track --example``.
The state of a target that cruises has no acceleration: in the common space, zero.

GPB1 keeps one belief for both modes. After every observation the acceleration that a manoeuvre would explain is
averaged with that zero, and the next step starts from there with next to none: the two modes predict the same, and no
observation can tell them apart. IMM keeps a belief for each mode at the same cost, two updates a step.

The text claims, over 100 flights, that the squared error of GPB1 is at least 2.5 times that of IMM, which is within 3 %
of GPB2 and below a third of the error of the measurements. The mean probability of a manoeuvre is with IMM below 0.25
before the manoeuvres and above 0.7 half a second after the first and at the end of the second; with GPB1, in the last
ten seconds and in every flight, it is between 0.45 and 0.65.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.filters import gpb, imm
from cumulant.filters.tracking import read_model
from cumulant.filters.tracking.example import MODEL, fly

model, flown = read_model(MODEL).at(()), fly(100)
y, seconds = flown.observations, torch.arange(flown.modes.shape[-1]) / 10

# %%
# Three filters over all flights at once; probabilities of a manoeuvre, and squared errors of the position.

found = {"GPB1": gpb(model, y, order=1), "IMM": imm(model, y), "GPB2": gpb(model, y, order=2)}
chance = {name: f.mode_probabilities[..., 1] for name, f in found.items()}
guesses = {"measured": y} | {name: f.mean[..., :2] for name, f in found.items()}
error = {name: (g - flown.states[..., :2]).square().sum(-1).mean(0) for name, g in guesses.items()}
total = {name: e.mean().item() for name, e in error.items()}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig = plt.figure(figsize=(12.5, 6), layout="constrained")
    plane, upper, lower = (fig.add_subplot(place) for place in (121, 222, 224))
    part, angle = slice(40, 95), torch.linspace(0, 2 * torch.pi, 60, dtype=torch.float64)
    circle = 6**0.5 * torch.stack([angle.cos(), angle.sin()])  # holds 95 % of a normal law in the plane
    plane.plot(*y[0, part].T, "x", ms=4, color="gray", label="measured")
    plane.plot(*flown.states[0, part, :2].T, color="black", lw=1.5, label="true")
    plane.plot(*guesses["GPB1"][0, part].T, color="tab:green", lw=1.5, ls="--", label="GPB1")
    for k in range(40, 95, 2):
        ring = guesses["IMM"][0, k, :, None] + torch.linalg.cholesky(found["IMM"].covariance[0, k, :2, :2]) @ circle
        plane.fill(*ring, color=plt.colormaps["coolwarm"](chance["IMM"][0, k].item()), alpha=0.4, lw=0)
    plane.set(title="IMM with ellipses that hold 95 %", xlabel="m, blue: cruises, red: manoeuvres", aspect="equal")
    for name, colour in {"measured": "gray", "GPB1": "tab:green", "GPB2": "black", "IMM": "tab:orange"}.items():
        lower.semilogy(seconds, error[name], color=colour, lw=1 + (name == "GPB2"), label=f"{name}: {total[name]:.3f}")
    for name, colour in {"GPB1": "tab:green", "IMM": "tab:orange"}.items():
        upper.plot(seconds, chance[name][0], color=colour, label=name)
    upper.set(title="Probability of a manoeuvre in this flight (shaded: true)", ylim=(0, 1))
    lower.set(title="Squared error of the position, mean of 100 flights, m²", xlabel="seconds")
    for axis in (plane, upper, lower):
        axis.legend(fontsize=8)
    for first, last in ((5, 7), (12, 15)):
        upper.axvspan(first, last, color="gray", alpha=0.25, lw=0)
        lower.axvspan(first, last, color="gray", alpha=0.25, lw=0)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert total["GPB1"] >= 2.5 * total["IMM"]
assert abs(total["IMM"] / total["GPB2"] - 1) <= 0.03
assert total["IMM"] < total["measured"] / 3
assert chance["IMM"][:, [49, 119]].mean(0).max() < 0.25
assert chance["IMM"][:, [74, 149]].mean(0).min() > 0.7
assert (chance["GPB1"][:, 100:] - 0.55).abs().max() < 0.1
