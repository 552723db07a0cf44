"""
Where heads look, and the usual test for induction
==================================================

SmolLM2 reads random tokens twice in a row: 8 sequences of 48 tokens and the same 48 again. A head that looks at what
followed the same token before, an induction head, can be told from all others there, and so can one that looks at the
previous token. Beside it, the second half in another order, so that what followed a token does not follow it again; and
a null, the same model with random weights.

The text claims that the three best induction heads give more than 70 % of their attention to what followed the same
token; that the best of them does so (above 50 %) in another order too, where it is of no use; that with random weights
no head gives 10 %; and that the best previous-token head is in an earlier layer than the best induction head. Counts at
the end say how much a type depends on its threshold: few heads are near that of induction, many near that of sinks.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant.observatory import attach, load

COLUMNS = {"induction": "induction_mass", "previous token": "previous_mass", "first token": "first_mass"}
loaded = load("smollm2")
draw = torch.Generator().manual_seed(0)
half = torch.randint(1000, loaded.model.config.vocab_size, (8, 48), generator=draw)
other = half.gather(1, torch.stack([torch.randperm(48, generator=draw) for _ in half]))


def look(model: torch.nn.Module, second: torch.Tensor):
    """Mean shares of attention by head, of the first half and a second one."""
    with attach(model, ["targets", "first_mass"], hidden_states=False) as recorder, torch.no_grad():
        model(input_ids=torch.cat([half, second], 1))
    return recorder.record(weights=False).heads().select("layer", "head", *COLUMNS.values())


torch.manual_seed(0)
repeated, reordered = look(loaded.model, half), look(loaded.model, other)
null = look(type(loaded.model)(loaded.model.config).eval(), half)
best = {title: repeated.sort(column, descending=True).head(3) for title, column in COLUMNS.items()}
for title, column in COLUMNS.items():
    shown = (f"{row['layer']}.{row['head']} {row[column]:.0%}" for row in best[title].iter_rows(named=True))
    print(f"{title:15} {'   '.join(shown)}   other order {reordered[column].max():.0%}   null {null[column].max():.0%}")
for title, column in COLUMNS.items():
    counts = {share: int((repeated[column] >= share).sum()) for share in (0.3, 0.4, 0.5, 0.6)}
    print(f"{title:15} " + "   ".join(f"{count:3} heads ≥ {share}" for share, count in counts.items()))


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    layers, heads = repeated["layer"].max() + 1, repeated["head"].max() + 1
    fig, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, (title, column) in zip(axes, COLUMNS.items(), strict=True):
        shares = repeated[column].fill_null(0).to_numpy().reshape(layers, heads)
        image = axis.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axis.set(title=title, xlabel="head")
    axes[0].set(ylabel="layer")
    fig.colorbar(image, ax=axes, label="share of attention, random tokens twice")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert best["induction"]["induction_mass"].min() > 0.7
assert reordered["induction_mass"].max() > 0.5
assert null["induction_mass"].max() < 0.1
assert best["previous token"]["layer"][0] < best["induction"]["layer"][0]
