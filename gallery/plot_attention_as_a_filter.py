"""
Attention as a filter
=====================

Read tokens as the modes of a switching filter: a key is an old mode i, a query a new one j, and a value is all that is
known about the state in its mode. The softmax weights are P(i | j), and any law π′ of the new modes gives what a filter
asks for::

    σ_i = Σ_j A_ji π′_j         P(j | i) = A_ji π′_j / σ_i

A step of IMM or GPB2 without an observation replaces a mixture by one Gaussian, token by token. Its mean is attention.
Its covariance, which attention does not report, is Cov_{A_j}(value): the trace is the variance that a token loses in
this layer, the more the more keys it attends to. GPB1, with one belief for all, gives every token Σ_i σ_i value_i.

σ is what the filter has to believe about the old modes: the attention that each key receives. The first key here is a
sink, to which all queries attend, and σ is far from uniform. With a doubly stochastic matrix it is uniform, and the
mode weights of a layer are those of the next. The text claims 1e-12 for the equalities, over six times its share for
the sink, and a correlation above 0.6 of the loss with the logarithm of the number of keys that a token attends to.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch

from cumulant import attend
from cumulant.filters import gpb
from cumulant.filters.heads import Head, attention_as_filter, implied_source, sinkhorn_attention

N, D = 32, 8
q, k, v = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
q = q * torch.linspace(0.3, 4, N, dtype=torch.float64)[:, None]  # from vague queries to precise ones
q[:, 0], k[:, 0], k[0, 0] = 4.0, 0.0, 2.5  # the sink

# %%
# The same numbers three times: as attention, as IMM, as GPB2; and GPB1.

head = attention_as_filter(q, k, v)
model = Head(head.source_marginal[None], head.transition[None], v[None])
gpb2, gpb1 = (gpb(model, v.new_zeros(1, 1, 0), order=order).mode_means[0, 0] for order in (2, 1))
seen = torch.special.entr(head.weights).sum(-1).exp()  # how many keys, by entropy
correlation = torch.corrcoef(torch.stack([seen.log(), head.collapse_loss]))[0, 1]
even = sinkhorn_attention(q, k, v)
received = {"softmax": head.source_marginal, "Sinkhorn": implied_source(even.weights)}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(16, 4.2), layout="constrained")
    for axis, name, weights in zip(axes, received, (head.weights, even.weights), strict=False):
        axis.imshow(weights.sqrt(), cmap="magma", vmin=0, vmax=1)
        axis.set(title=f"{name}: √A", xlabel="key", ylabel="query")
    axes[2].bar(torch.arange(N), N * received["softmax"], color="tab:red", label="softmax")
    axes[2].plot(torch.arange(N), N * received["Sinkhorn"], color="black", lw=2, label="Sinkhorn")
    axes[2].set(title="Attention received: σ in units of 1/n", xlabel="key")
    axes[2].legend()
    axes[3].plot(seen, head.collapse_loss, "o", color="tab:red", label="softmax")
    axes[3].axhline(v.var(0, correction=0).sum(), color="gray", ls="--", label="all keys alike")
    axes[3].set(title="Collapse loss of each token", xlabel="keys attended to, exp of the entropy", xlim=(0, N))
    axes[3].legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

usual = attend(q, k, v)
for same in (head.output - usual.output, head.collapse_loss - usual.collapse_loss, gpb2 - usual.output):
    assert same.abs().max() < 1e-12
assert (gpb1 - received["softmax"] @ v).abs().max() < 1e-12
assert (received["Sinkhorn"] - 1 / N).abs().max() < 1e-12
assert received["softmax"][0] > 6 / N
assert correlation > 0.6
