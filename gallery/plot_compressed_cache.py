"""
What a compressed cache expects of itself, and what then happened
=================================================================

SmolLM2 reads 768 tokens of a help page, and `backtest` compresses what its heads hold of them to a quarter of the
bytes. It gives every key head its own number of entries, by the error that it expects of them: that of the same number
of entries at a cut 128 tokens before, on the queries which came after that cut. Then 256 more tokens are read, and the
error on their queries is measured: |W_O(ô − o)|² over |x|² of the residual stream, summed over the heads that share a
key head. The expectation has seen none of these tokens.

The text claims that heads differ by more than tenfold in what they get and that expected and measured errors go
together over heads (correlation of their logarithms above 0.7), so that the budgets are right in kind; and that in the
median head one is within a factor of three of the other. It is an estimate, not a bound: some heads are above it.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from pydoc_data.topics import topics

import torch

from cumulant.cache import Backtest, on_cumulant, prefill
from cumulant.cache.audit.continuation import read_on
from cumulant.cache.audit.head_errors import head_errors, read_full
from cumulant.cache.budget import budget
from cumulant.observatory import load
from cumulant.observatory.hooks.weights import head_outputs

READ, ASKED, KEEP = 768, 256, 0.25
loaded, chosen = load("smollm2"), Backtest(repeat=False)
ids = torch.tensor(loaded.tokenizer(topics["typesseq"])["input_ids"][: READ + ASKED])
with on_cumulant(loaded.model):
    prefix = prefill(loaded.model, ids[:READ])
    allowed = budget(prefix, KEEP, with_mass=True)
    evidence = chosen.evidence(prefix)
    plan, layers = chosen.plan(prefix, allowed, evidence), chosen.compress(prefix, allowed, evidence)
    later = read_on(prefix, ids[READ:], every=4)


def measured_errors() -> torch.Tensor:
    """(layers, key heads) |W_O(ô − o)|² over |x|², of the queries that came after the prefix."""
    rows = []
    for layer, entries, asked in zip(prefix.layers, layers, later.layers, strict=True):
        outputs = head_outputs(loaded.model, layer.name)
        errors = head_errors(layer, entries, read_full(layer, asked), outputs, asked.stream)
        rows.append((errors.written / errors.stream).unflatten(0, (-1, layer.groups)).sum(1))
    return torch.stack(rows)


measured = measured_errors()
entries, expected = (x.view_as(measured) for x in (plan.entries, plan.expected.double()))
part = (entries < READ) & (expected > 0)  # heads that hold every token have no error
logs = torch.stack([expected[part], measured[part]]).log10()
correlation, factor = torch.corrcoef(logs)[0, 1], 10 ** (logs[1] - logs[0])
print(f"entries of a key head: {entries.min()} to {entries.max()} of {READ}, {int((~part).sum())} hold all of them")
print(f"measured over expected: median {factor.median():.2f}, correlation of logarithms {correlation:.2f}")
print(f"sum over heads: expected {expected.sum():.4f}, measured {measured.sum():.4f}")

if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4.6), layout="constrained", width_ratios=[1, 1, 2])
    for axis, numbers, title in ((left, entries, "entries"), (middle, expected.log10(), "log₁₀ expected error")):
        image = axis.imshow(numbers, aspect="auto", interpolation="nearest")
        axis.set(title=title, xlabel="key head", ylabel="layer", xticks=range(entries.shape[1]))
        figure.colorbar(image, ax=axis)
    right.loglog(*10**logs, "o", markersize=4)
    ends = [10 ** float(logs.min()), 10 ** float(logs.max())]
    right.loglog(ends, ends, color="0.6")
    right.set(xlabel="error that the backtest expected", ylabel="error on the queries that then came")
    figure.savefig(sys.argv[1], dpi=120)

assert entries.max() > 10 * entries.min()
assert correlation > 0.7
assert 1 / 3 < factor.median() < 3
