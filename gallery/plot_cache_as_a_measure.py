"""
A cache, compressed, seen as a measure
======================================

SmolLM2 reads 256 tokens of a help page. What one of its heads holds of them is a measure of keys and values, and its
queries read G(η) = log Σ e^⟨η,k⟩ and a mean of values. Two measures of a quarter of the entries are put in its place:
the tokens that SnapKV keeps, and means of four neighbours each, with their mass (the first four tokens stay). They are
asked what the next 64 tokens asked the head.

The text claims that both have too little mass at every query: eviction by exactly the logarithm of the attention that
it misses, ΔG = log(1 − missed), and merging by Jensen's inequality; that entries of one token are the cache itself; and
that on this head the output of both is off by more than a tenth. `cumulant audit` says it for all heads.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from pydoc_data.topics import topics

import torch

from cumulant import Empirical
from cumulant.cache import compress_prefix, on_cumulant, prefill
from cumulant.observatory import load

LAYER, KEY_HEAD, READ, ASKED = 12, 1, 256, 64
loaded = load("smollm2")
ids = torch.tensor(loaded.tokenizer(topics["typesseq"])["input_ids"][: READ + ASKED])
with on_cumulant(loaded.model):
    prefix, longer = prefill(loaded.model, ids[:READ]), prefill(loaded.model, ids)
    held = compress_prefix(prefix, "snapkv", 0.25).layers[LAYER][KEY_HEAD]
keys, values = (x[KEY_HEAD].double() for x in (prefix.layers[LAYER].keys, prefix.layers[LAYER].values))
heads = longer.layers[LAYER].queries.unflatten(0, (-1, longer.layers[LAYER].groups))[KEY_HEAD]
queries = heads[:, READ:].flatten(0, 1).double()
eta = torch.cat([queries, torch.zeros(len(queries), values.shape[1])], 1)


def measure(k: torch.Tensor, v: torch.Tensor, mass: torch.Tensor | None = None) -> Empirical:
    """Pairs (k, v): at (η, 0) the log-normalizer is that of the keys, and the mean ends in the output of attention."""
    return Empirical(torch.cat([k, v], 1).double(), None if mass is None else mass.log())


def merged(size: int) -> Empirical:
    """The first four tokens, and means of the others, ``size`` neighbours to an entry."""
    means = (torch.cat([x[:4], x[4:].unflatten(0, (-1, size)).mean(1)]) for x in (keys, values))
    return measure(*means, torch.tensor([1.0] * 4 + [float(size)] * ((READ - 4) // size)).double())


full = measure(keys, values)
missed = 1 - (queries @ keys.T).softmax(-1)[:, held.positions].sum(1)
gaps, errors = {}, {}
for name, small in {"SnapKV": measure(held.keys, held.values), "means of four": merged(4)}.items():
    gaps[name] = small.log_normalizer(eta) - full.log_normalizer(eta)
    outputs = [h.mean(eta)[:, keys.shape[1] :] for h in (full, small)]
    errors[name] = ((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum()).sqrt()
    words = f"{len(small.atoms)} entries of {READ}, ΔG {gaps[name].mean():.2f} on average"
    print(f"{name:14} {words}, {gaps[name].min():.2f} at worst; output off by {errors[name]:.0%}")

if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, gap in gaps.items():
        left.hist(gap.numpy(), bins=40, alpha=0.6, label=f"{name}: output off by {errors[name]:.0%}")
    left.set(xlabel="ΔG of a query", ylabel="queries")
    left.legend()
    right.plot(missed.numpy(), gaps["SnapKV"].numpy(), ".")
    right.set(xlabel="attention on tokens that are not held", ylabel="ΔG of eviction")
    figure.savefig(sys.argv[1])

assert (gaps["SnapKV"] - torch.log1p(-missed)).abs().max() < 1e-9
assert all(gap.max() < 1e-12 for gap in gaps.values())
assert (merged(1).log_normalizer(eta) - full.log_normalizer(eta)).abs().max() < 1e-9
assert min(errors.values()) > 0.1
