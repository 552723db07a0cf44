"""The largest logit of every head since it was last read, recorded by the attention of a layer while somebody asks.

    m_h = max over calls, sequences and visible pairs of scale · ⟨q_hi, k_hj⟩

It is that of the scores alone: no bias, sink or cap is in it. The maximum lies in a tensor (heads,) that is a plain
attribute of the layer: not a buffer, which data parallelism would overwrite with that of the first rank at every pass.
A compiled graph changes it in place like any other input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ATTRIBUTE = "largest_logit"


def start_recording(module: nn.Module, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """From now on ``module`` keeps the largest logit of its heads; returns the tensor (heads,) that holds it."""
    largest = torch.full((heads,), -torch.inf, device=device)
    object.__setattr__(module, ATTRIBUTE, largest)
    return largest


def stop_recording(module: nn.Module) -> None:
    """Nothing is recorded any more; the layer is as it was."""
    module.__dict__.pop(ATTRIBUTE, None)


def is_recording(module: nn.Module) -> bool:
    """Whether this call of the layer is recorded: validation, which has no gradients, is not.

    >>> layer = nn.Identity()
    >>> _ = start_recording(layer, heads=2)
    >>> is_recording(layer), is_recording(nn.Identity())
    (True, False)
    """
    return getattr(module, ATTRIBUTE, None) is not None and torch.is_grad_enabled()


def record_largest_logit(module: nn.Module, max_score: Tensor) -> None:
    """Take the largest scores of one call, (batch, heads, q), −inf where a query sees nothing, into the maximum.

    >>> layer = nn.Identity()
    >>> largest = start_recording(layer, heads=2)
    >>> record_largest_logit(layer, torch.tensor([[[1.0, 5.0], [2.0, -torch.inf]]]))
    >>> record_largest_logit(layer, torch.tensor([[[3.0], [3.0]]]))
    >>> largest
    tensor([5., 3.])
    """
    if not max_score.numel():
        return
    with torch.no_grad():
        largest: Tensor = getattr(module, ATTRIBUTE)
        new = max_score.detach().amax((0, -1)).to(largest)
        largest.copy_(torch.maximum(largest, new))
