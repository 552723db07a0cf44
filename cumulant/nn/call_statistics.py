"""Statistics of attention calls with their gradients, for whoever asks for those of a layer, as penalties do.

A request lies on the layer as a plain attribute, so that a call which gradient checkpointing repeats in the backward
pass computes what the first one did. The receiver tells the two apart by `in_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.kernels.arguments import Support
from cumulant.kernels.moments import Moments

ATTRIBUTE = "statistics_request"


class CallStatistics(NamedTuple):
    """One attention call of a training pass.

    module   the layer
    moments  log_normalizer (batch, heads, q) and what was requested, with gradients
    support  which keys a query sees
    keys     how many there are
    rows     (batch, q) True where the query is a token; None: all are, or only the mask can say
    mask     the mask that a model of transformers passed, from which rows may follow
    """

    module: nn.Module
    moments: Moments
    support: Support
    keys: int
    rows: Tensor | None = None
    mask: Tensor | None = None


class StatisticsRequest(NamedTuple):
    """Names of `moments`, beside the log-normalizer that always comes, and who gets every call."""

    statistics: frozenset[str]
    receive: Callable[[CallStatistics], None]


def request_statistics(module: nn.Module, request: StatisticsRequest | None) -> None:
    """From now on calls of ``module`` with gradients are handed on; None: no longer."""
    if request is None:
        module.__dict__.pop(ATTRIBUTE, None)
    else:
        object.__setattr__(module, ATTRIBUTE, request)


def requested_statistics(module: nn.Module) -> StatisticsRequest | None:
    """The request for this call: validation, which has no gradients, and compiled graphs hand nothing on.

    >>> layer = nn.Identity()
    >>> request_statistics(layer, StatisticsRequest(frozenset({"entropy"}), print))
    >>> sorted(requested_statistics(layer).statistics), requested_statistics(nn.Identity())
    (['entropy'], None)
    """
    request = module.__dict__.get(ATTRIBUTE)
    if request is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return request


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as what gradient checkpointing repeats does.

    >>> in_backward()
    False
    """
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
