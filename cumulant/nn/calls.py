"""The record of one attention call, and who observes it.

Every attention layer of `cumulant.nn` calls `report_attention` once per forward pass; hooks of the observatory build
the same record for the models of transformers, so that one observer serves both. Without observers a layer pays for one
look at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cumulant import kernels
from cumulant.checks import sentence, shape
from cumulant.kernels import Moments
from cumulant.kernels.arguments import Support
from cumulant.nn.call_statistics import CallStatistics, requested_statistics

EVERYTHING = Support()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention; tensors are detached.

    module   the layer that attended
    eta      (batch, heads, q, d) natural parameters: queries times their scale, after rotation and normalisation
    key      (batch, key heads, n, d); fewer heads than eta are shared by groups
    value    (batch, key heads, n, e)
    support  which keys a query sees, and with what weight
    output   (batch, heads, q, e) what attention returned, before any output projection
    scale    the factor in eta, or the mean over heads of a learned one
    rows     (batch, q) True where the query is a token, False where it is padding; None: all are
    name     path of the module in the observed model; empty where no model is named
    tokens   (batch, n) ids of the tokens that the keys stand for; None where they are not known, as in cross-attention
    capped   scores are c tanh(s/c): no exponential family in the query; eta is 0 and the scores are log weights
    """

    module: nn.Module
    eta: Tensor
    key: Tensor
    value: Tensor
    support: Support
    output: Tensor
    scale: float = 1.0
    rows: Tensor | None = None
    name: str = ""
    capped: bool = False
    tokens: Tensor | None = None


Observer = Callable[[AttentionCall], None]
_observers: list[Observer] = []  # innermost last; each gets every call


def is_observed(module: nn.Module | None = None) -> bool:
    """Whether anyone asked for attention calls, or for the statistics of those of a layer: what is computed only for a
    report can be left out otherwise."""
    return bool(_observers) or (module is not None and requested_statistics(module) is not None)


@contextmanager
def on_attention(observer: Observer) -> Iterator[None]:
    """Hand every attention call of this library's layers to ``observer`` while inside.

    >>> import torch
    >>> from cumulant.nn import MultiheadAttention
    >>> heads, x = [], torch.zeros(2, 3, 8)
    >>> with on_attention(lambda call: heads.append(call.eta.shape)):
    ...     _ = MultiheadAttention(8, 4, batch_first=True)(x, x, x)
    >>> heads
    [torch.Size([2, 4, 3, 2])]
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def report_attention(
    module: nn.Module,
    eta: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    support: Support = EVERYTHING,
    *,
    scale: float = 1.0,
    rows: Tensor | None = None,
    moments: Moments | None = None,
) -> None:
    """Hand one call of ``module`` to all observers, as an `AttentionCall`: what a layer of one's own calls once a pass.

    eta (batch, heads, q, d), key (batch, key heads, n, d), value (batch, key heads, n, e), output (batch, heads, q, e)

    moments  what of the statistics that penalties ask for is there already, with gradients; computed if None

    >>> import torch
    >>> calls, x = [], torch.zeros(1, 2, 3, 4)
    >>> with on_attention(calls.append):
    ...     report_attention(torch.nn.Identity(), x, x, x, x)
    >>> calls[0].eta.shape
    torch.Size([1, 2, 3, 4])
    """
    request = requested_statistics(module)
    if not _observers and request is None:
        return
    parts = {"eta": eta, "key": key, "value": value, "output": output}
    for name, tensor in parts.items():
        if tensor.ndim != 4:
            expected, advice = "four axes (batch, heads, tokens, dim)", "Insert the missing ones with size 1."
            raise ValueError(sentence(f"report_attention.{name}", expected, shape(tensor), advice))
    if request is not None:
        if moments is None:
            moments = kernels.moments(eta, key, statistics=request.statistics, **support.arguments())
        request.receive(CallStatistics(module, moments, support.detach(), key.shape[-2], rows))
    eta, key, value, output = (tensor.detach() for tensor in parts.values())
    with torch.no_grad():
        call = AttentionCall(module, eta, key, value, support.detach(), output, scale, rows)
        for observer in tuple(_observers):
            observer(call)
