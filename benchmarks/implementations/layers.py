"""Multi-head attention as a layer, ours and torch's on the same parameters; and training with a monitor and without."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from benchmarks.case import Prepare, Run, ours
from benchmarks.inputs import Layered, TrainingBatch

BOUND = 100.0  # of attention logits


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


def updated(monitored: bool = False, clipped: bool = False) -> Prepare:
    """One update of a language model; nothing is learned, so that all are alike.

    monitored  a `Monitor` records it
    clipped    the largest logit of every head is measured and compared with a threshold, which none reaches
    """

    def prepare(x: TrainingBatch) -> Run:
        model = deepcopy(x.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        monitor = ours("cumulant.training", "Monitor")(model, every=1) if monitored else None
        monitor = _clipper(model) if clipped else monitor

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


def clipped_alone(x: TrainingBatch) -> Run:
    """Reading the maxima of all heads and scaling every one of them, by a factor next to 1."""
    model = deepcopy(x.model)
    monitor = _clipper(model)
    layers = monitor.clipper.layers
    above = torch.nextafter(torch.tensor(BOUND), torch.tensor(torch.inf))

    def run():
        for layer in layers:
            layer.largest.copy_(above)
        monitor.step()
        return {"weights": layers[0].module.in_proj_weight.detach()}

    return run


def _clipper(model: nn.Module) -> Any:
    """A monitor that measures logits and observes nothing but the first step, which is over when this returns."""
    logging.getLogger("cumulant.monitor").setLevel(logging.ERROR)  # the terminal is no part of the cost
    clip = ours("cumulant.training", "QKClip")(BOUND)
    monitor = ours("cumulant.training", "Monitor")(model, every=1 << 40, clip=clip)
    monitor.start(1)
    return monitor
