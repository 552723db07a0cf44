"""The attention calls of training passes, with gradients, from the pass to the loss: what penalties are made of.

They hold the graph of their pass, so they live until `Monitor.penalty` has taken them or the step ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.nn.attention_interface import TokenMasks
from cumulant.nn.call_statistics import CallStatistics, StatisticsRequest, in_backward, request_statistics
from cumulant.nn.wrappers import is_transformers, without_wrappers
from cumulant.observatory.hooks.compiler import without_compiler
from cumulant.observatory.hooks.structure import attention_modules
from cumulant.observatory.monitor.reactions import Reaction, TrainedCall
from cumulant.observatory.monitor.weak_hook import WeakHook


class ObservedLayer(NamedTuple):
    """An attention layer, its number in the order of the model, and its path in the model without wrappers."""

    number: int
    name: str
    module: nn.Module


class TrainedCalls:
    """Takes the calls that the penalties of ``reactions`` ask for, of the layers of ``model``, until `close`."""

    def __init__(self, model: nn.Module, reactions: Sequence[Reaction]):
        inner = without_wrappers(model)
        self.reactions = [reaction for reaction in reactions if reaction.statistics]
        self.waiting: list[tuple[ObservedLayer, CallStatistics, Tensor | None]] = []
        self.asks = False  # whether some penalty asks for the calls of some layer now
        named = [(name, inner.get_submodule(name)) for name in attention_modules(inner)]
        named = [(name, module) for name, module in named if type(module) is not nn.MultiheadAttention]  # reports none
        layers = [ObservedLayer(number, name, module) for number, (name, module) in enumerate(named)]
        self.layers = {layer.module: layer for layer in layers}
        models = {name: m for name, m in inner.named_modules() if not name or is_transformers(m)}
        self._masks = TokenMasks(models)
        self._receive = WeakHook(self, "receive")
        self._finalizer = weakref.finalize(self, _let_go, list(self.layers))
        self.request()

    def request(self) -> None:
        """Ask the layers for what the penalties need now; a layer that none of them penalises is asked for nothing."""
        self.asks = False
        for layer in self.layers.values():
            asking = [reaction for reaction in self.reactions if reaction.penalises(layer.name)]
            self.asks = self.asks or bool(asking)
            names = frozenset(name for reaction in asking for name in reaction.statistics) - {"log_normalizer"}
            request_statistics(layer.module, StatisticsRequest(names, self._receive) if asking else None)

    def enter_pass(self, module: nn.Module, args: tuple, kwargs: dict) -> ExitStack:
        """What to close when the pass that has begun with this call ends: it runs without the compiler, as a compiled
        graph hands no statistics on, and padding is known."""
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                stack.enter_context(without_compiler())
            stack.enter_context(self._masks.hooks(module))
            self._masks.begin(module, args, kwargs)
            return stack.pop_all()

    def take(self) -> Tensor | None:
        """The sum of all penalties over the waiting calls, which are let go; None where none waits."""
        waiting, self.waiting = self.waiting, []
        calls = [_trained_call(*parts) for parts in waiting]
        terms = [r.penalty(call) for call in calls for r in self.reactions if r.penalises(call.name)]
        return torch.stack([term.to(terms[0]) for term in terms]).sum() if terms else None

    def close(self) -> None:
        """Ask no layer for anything, and let go of what waits."""
        self.waiting = []
        self._finalizer()

    def receive(self, call: CallStatistics) -> None:
        """Keep one call, unless it is one that gradient checkpointing repeats, or leads to no parameter."""
        if in_backward() or not call.moments.log_normalizer.requires_grad:
            return
        layer, rows = self.layers.get(call.module), call.rows
        if layer is None:
            return
        if rows is None:
            batch, queries = call.moments.log_normalizer.shape[0], call.moments.log_normalizer.shape[-1]
            rows = self._masks.rows(layer.name, batch, queries, call.mask)
        self.waiting.append((layer, call._replace(mask=None), rows))


def _let_go(modules: list[nn.Module]) -> None:
    for module in modules:
        request_statistics(module, None)


def _trained_call(layer: ObservedLayer, call: CallStatistics, rows: Tensor | None) -> TrainedCall:
    g, m = call.moments.log_normalizer, call.moments
    visible, _ = call.support.detach().visible_keys(g.detach()[..., None], call.keys)
    tokens = torch.ones_like(g, dtype=torch.bool) if rows is None else rows[:, None].expand(g.shape)
    entropy = m.entropy if "mean_score" in m.statistics and "mean_log_weight" in m.statistics else None
    return TrainedCall(layer.number, layer.name, g, entropy, visible, tokens.to(g.device))
