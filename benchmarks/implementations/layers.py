"""Multi-head attention as a layer, ours and torch's on the same parameters; and training with a monitor and without."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from benchmarks.case import Prepare, Run, ours
from benchmarks.inputs import Layered, TrainingBatch


def attended(x: Layered) -> Run:
    """`cumulant.nn.MultiheadAttention`, without gradients."""
    return _forward(_our_layer(x), x)


def torch_attended(x: Layered) -> Run:
    """torch's layer, likewise; in training mode, where it calls its fused attention."""
    return _forward(x.layer, x)


def trained(causal: bool = False) -> Prepare:
    """`cumulant.nn.MultiheadAttention` and the gradients of tokens and parameters."""
    return lambda x: _backward(_our_layer(x), x, causal)


def torch_trained(causal: bool = False) -> Prepare:
    """torch's layer, likewise."""
    return lambda x: _backward(x.layer, x, causal)


def _our_layer(x: Layered) -> nn.Module:
    made = ours("cumulant.nn", "MultiheadAttention")
    return made.of(x.layer)  # pyright: ignore[reportFunctionMemberAccess]


def _forward(layer: nn.Module, x: Layered) -> Run:
    def run():
        with torch.no_grad():
            return {"output": layer(x.tokens, x.tokens, x.tokens, need_weights=False)[0]}

    return run


def _backward(layer: nn.Module, x: Layered, causal: bool) -> Run:
    tokens = x.tokens.clone().requires_grad_()
    inputs = [tokens, *layer.parameters()]
    n = tokens.shape[1]
    mask = {"attn_mask": torch.ones(n, n, dtype=torch.bool).triu(1), "is_causal": True} if causal else {}

    def run():
        out = layer(tokens, tokens, tokens, need_weights=False, **mask)[0]
        gradients = torch.autograd.grad(out, inputs, x.along)
        return {"output": out.detach(), "gradient": gradients[0]}

    return run


def updated(monitored: bool) -> Prepare:
    """One update of a language model that a `Monitor` records, or none; nothing is learned, so that all are alike."""

    def prepare(x: TrainingBatch) -> Run:
        model = deepcopy(x.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        monitor = ours("cumulant.training", "Monitor")(model, every=1) if monitored else None

        def run():
            optimizer.zero_grad(set_to_none=True)
            loss = model.loss(x.windows[:, :-1], x.windows[:, 1:])
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()
            return {"loss": loss.detach()}

        return run

    return prepare
