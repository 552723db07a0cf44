"""
What a model would predict at every depth
=========================================

The logit lens: the final norm and the language head of a model applied to its state after every block. SmolLM2, a
decoder of 30 blocks, reads two sentences, and every token is looked at.

The text claims that the embedding, which is also the head, predicts the token it stands for and is sure of it (entropy
below 1 nat, KL to the final prediction above 50 nats); that the prediction before the last block is surer than the
final one; that the likeliest token is the final one for less than a fifth of the tokens after half of the blocks; and
that the loss falls by more than half over the last third of them.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.observatory import attach, load

loaded = load("smollm2")
text = (
    "The logit lens reads a transformer before it has finished: at every depth it asks what the model would say now. "
    "Most of the words that follow are decided late, and some of them were decided long ago."
)
inputs = loaded.tokenizer(text, return_tensors="pt")
with attach(loaded.model, "depth", exact_depth=True) as recorder, torch.no_grad():
    loaded.model(input_ids=inputs["input_ids"])
table = recorder.record(weights=False).layers()

rows = table.filter(table["stage"] == "out")
first = table.filter(table["stage"] == "in").head(1)
profile = {name: [*first[name], *rows[name]] for name in ("lens_entropy", "lens_kl", "lens_loss", "lens_agreement")}
added = {name: rows[f"{name}_contribution"].to_list() for name in ("attention", "mlp")}
for depth in range(0, 31, 5):
    print(f"after {depth:2} blocks  " + "  ".join(f"{name} {values[depth]:6.2f}" for name, values in profile.items()))


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for name, label in (("lens_entropy", "entropy"), ("lens_loss", "loss of the next token")):
        axes[0].plot(profile[name], label=label)
    axes[0].set(yscale="log", ylabel="nats", xlabel="blocks passed")
    axes[1].plot(profile["lens_agreement"])
    axes[1].set(ylabel="agreement with the final prediction", xlabel="blocks passed")
    for name, values in added.items():
        axes[2].plot(range(1, 31), values, label=name)
    axes[2].set(yscale="log", ylabel="|added| / |stream|", xlabel="block")
    for axis in (axes[0], axes[2]):
        axis.legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

entropy, kl, loss, agreement = profile.values()
assert entropy[0] < 1
assert kl[0] > 50
assert entropy[29] < entropy[30]
assert agreement[15] < 0.2
assert loss[30] < loss[20] / 2
