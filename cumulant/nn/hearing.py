"""Layers say what they attended to, to whoever listens.

Every layer of this room calls `tell` once per forward pass with the measure and the queries of its attention. While
nobody listens that is one look at an empty list. The record is the one that `observatory.interface.Call` has for
transformers' models, so that one listener serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence, shape


class Heard(NamedTuple):
    """One call of attention; tensors are detached.

    module   the layer that attended
    eta      (batch, heads, q, d) natural parameters: queries times their scale
    key      (batch, key heads, n, d); fewer heads than eta are shared by groups
    value    (batch, key heads, n, e)
    support  arguments of `moments` that say which keys a query sees and with what weight
    output   (batch, heads, q, e) what attention returned, before any output projection
    scale    the factor in eta, or the mean over heads of a learned one
    rows     (batch, q) True where the query is a token, False where it is padding; None: all are
    """

    module: nn.Module
    eta: Tensor
    key: Tensor
    value: Tensor
    support: dict
    output: Tensor
    scale: float
    rows: Tensor | None


Listener = Callable[[Heard], None]
LISTENERS: list[Listener] = []  # innermost last; all of them hear everything


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """Hand every attention call of this library's layers to ``listener`` while inside.

    >>> import torch
    >>> from cumulant.nn import MultiheadAttention
    >>> heads, x = [], torch.zeros(2, 3, 8)
    >>> with hearing(lambda heard: heads.append(heard.eta.shape)):
    ...     _ = MultiheadAttention(8, 4, batch_first=True)(x, x, x)
    >>> heads
    [torch.Size([2, 4, 3, 2])]
    """
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


def tell(
    module: nn.Module,
    eta: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    scale: float = 1.0,
    rows: Tensor | None = None,
    **support,
) -> None:
    """What ``module`` attended to, in the shapes of `Heard`; arguments of the support that are None are left out."""
    if not LISTENERS:
        return
    parts = {"eta": eta, "key": key, "value": value, "output": output}
    for name, tensor in parts.items():
        if tensor.ndim != 4:
            expected, advice = "four axes (batch, heads, tokens, dim)", "Insert the missing ones with size 1."
            raise ValueError(sentence(f"tell.{name}", expected, shape(tensor), advice))
    found = {name: given.detach() if isinstance(given, Tensor) else given for name, given in support.items()}
    found = {name: given for name, given in found.items() if given is not None}
    still = {name: tensor.detach() for name, tensor in parts.items()}
    with torch.no_grad():
        heard = Heard(module, **still, support=found, scale=scale, rows=rows)
        for listener in tuple(LISTENERS):
            listener(heard)
