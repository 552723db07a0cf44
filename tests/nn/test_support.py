"""The record of which keys a query sees: its parts and counts against the whole table of pairs."""

import pytest
import torch

from cumulant.kernels import moments
from cumulant.nn import MultiheadAttention, Support
from cumulant.observatory.hooks.attention import observe_attention

BATCH, HEADS, Q, N = 3, 4, 5, 7


def normal(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


HIDDEN = normal(BATCH, 1, Q, N) > 0.3
SINKS = normal(1, HEADS)
SUPPORTS = {
    "everything": Support(),
    "causal": Support(causal=True, offset=2),
    "window": Support(causal=True, offset=2, window=3),
    "band": Support(offset=1, window=2),
    "mask for all": Support(mask=torch.arange(N) != 3),
    "mask": Support(mask=~HIDDEN, sink=-1.0),
    "mask and order": Support(mask=~HIDDEN, causal=True, offset=2, sink=SINKS),
    "per key": Support(log_weights=normal(BATCH, 2, N)),
    "per pair": Support(log_weights=normal(1, HEADS, Q, N).masked_fill(HIDDEN[:1], -torch.inf), sink=SINKS[0]),
}
each = pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)


def table(support: Support, eta: torch.Tensor) -> torch.Tensor:
    return support.weigh(eta.new_zeros(BATCH, HEADS, Q, N))


@each
def test_counts_and_mass_are_those_of_the_table(support):
    eta = normal(BATCH, HEADS, Q, 2)
    w = table(support, eta)
    if support.sink is not None:
        sink = torch.as_tensor(support.sink, dtype=w.dtype)[..., None, None].expand(BATCH, HEADS, Q, 1)
        w = torch.cat([w, sink], -1)
    count, log_mass = support.visible_keys(eta, N)
    assert torch.equal(count, (w > -torch.inf).sum(-1).double())
    torch.testing.assert_close(log_mass, torch.logsumexp(w, -1))


@each
def test_the_table_and_the_arguments_say_the_same(support):
    eta, key = normal(BATCH, HEADS, Q, 2), normal(BATCH, 2, N, 2)
    logits = eta @ key.repeat_interleave(2, 1).mT + table(support, eta)
    if support.sink is not None:
        sink = torch.as_tensor(support.sink, dtype=logits.dtype)[..., None, None].expand(BATCH, HEADS, Q, 1)
        logits = torch.cat([logits, sink], -1)
    found = moments(eta, key, statistics=(), **({"offset": 0} | support.arguments())).log_normalizer
    torch.testing.assert_close(found, torch.logsumexp(logits, -1))


@each
def test_parts_are_parts_of_the_table(support):
    eta = normal(BATCH, HEADS, Q, 2)
    w, some = table(support, eta), torch.tensor([2, 0])
    of_sequences = support.of_sequences(some).weigh(eta.new_zeros(2, HEADS, Q, N))
    assert torch.equal(of_sequences, w[some])
    rows = torch.tensor([[1, 4], [0, 2], [3, 3]])
    of_queries = support.of_queries(rows, N).weigh(eta.new_zeros(BATCH, HEADS, 2, N))
    assert torch.equal(of_queries, w.take_along_dim(rows[:, None, :, None], 2))
    assert torch.equal(support.weigh(eta.new_zeros(BATCH, HEADS, 2, N), rows[0]), w[:, :, rows[0]])
    if support.log_weights is None or support.log_weights.shape[1] == HEADS:
        assert torch.equal(support.of_heads([3, 1]).weigh(eta.new_zeros(BATCH, 2, Q, N)), w[:, [3, 1]])


def test_weights_per_key_of_every_sequence_are_observed():
    x, weights = normal(3, 5, 8), normal(3, 5)
    layer, calls = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), []
    with observe_attention(torch.nn.ModuleDict({"layer": layer}), calls.append):
        layer(x, x, x, key_padding_mask=weights, need_weights=False)
    assert torch.equal(calls[0].support.log_weights, weights[:, None, None].float().expand(3, 2, 5, 5))
