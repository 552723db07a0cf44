"""
Entropy collapse, caught while it happens
=========================================

Attention collapses when training pushes scores so far apart that every query attends to a single key: its entropy goes
to 0, and with it the gradient that could bring it back. A `Monitor` records the statistics of the heads in one pass of
every tenth step, and reports collapses as warnings.

One attention layer learns to repeat the token that stood two places before, at a rate of 0.01 and at 30 times that. The
text claims that the first ends with a loss below 0.1 nats and no warning, and that in the second a fall of entropy is
reported within 30 steps, and the loss stays above 2.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
import warnings
from importlib.util import find_spec

import torch
from torch import nn

from cumulant.nn import MultiheadAttention
from cumulant.training import Monitor, MonitorWarning

TOKENS, LENGTH, WIDTH = 32, 32, 32
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Copier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.place = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.attention, self.readout = MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place
        return self.readout(self.attention(x, x, x, attn_mask=FUTURE, is_causal=True, need_weights=False)[0])


def train(rate: float) -> tuple[Monitor, float]:
    torch.manual_seed(0)
    model = Copier()
    optimizer, monitor, loss = torch.optim.Adam(model.parameters(), rate), Monitor(model, every=10), torch.zeros(())
    for _ in range(201):
        tokens = torch.randint(TOKENS, (16, LENGTH))
        loss = nn.functional.cross_entropy(model(tokens)[:, 2:].flatten(0, 1), tokens[:, :-2].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step()
    return monitor, float(loss.detach())


with warnings.catch_warnings():
    warnings.simplefilter("ignore", MonitorWarning)  # its warnings are printed below
    runs = {rate: train(rate) for rate in (0.01, 0.3)}
print(*(monitor.report() for monitor, _ in runs.values()), sep="\n")


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, (rate, (monitor, loss)) in zip(axes, runs.items(), strict=True):
        heads = torch.stack([check.layers[0].heads.entropy for check in monitor.history])
        axis.plot([check.step for check in monitor.history], heads, color="tab:blue")
        axis.vlines([alarm.step for alarm in monitor.alarms], 0, 2.5, "tab:red", "dotted")
        axis.set(title=f"rate {rate}: loss {loss:.2f}", xlabel="step", ylabel="entropy of each head (nats)")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

(calm, low), (wild, high) = runs.values()
assert low < 0.1 < 2 < high
assert not calm.alarms
assert any(alarm.kind == "entropy" and alarm.step <= 30 for alarm in wild.alarms)
