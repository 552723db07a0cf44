"""What the numbers would be without learning or without content: the nulls that every finding stands beside.

random    the same architecture at random initialisation reads the same texts
shuffled  the trained model, but every query meets keys of other tokens: the law of single keys stays, their fit is gone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.record.record import NULLS


def shuffled(seed: int) -> Callable[[AttentionCall], AttentionCall]:
    """For `attach(alter=...)`: the keys of each call permuted over all tokens of the batch, together for all heads.

    Values stay where they are, and so do masks, biases and sinks.
    """
    generator = torch.Generator().manual_seed(seed)

    def alter(call: AttentionCall) -> AttentionCall:
        key = call.key.movedim(1, 2)  # (batch, n, heads, d)
        places = torch.ones(key.shape[:2], dtype=torch.bool)
        if call.rows is not None and call.rows.shape == places.shape:
            places = call.rows.cpu()
        index = places.flatten().nonzero()[:, 0]
        order = index[torch.randperm(len(index), generator=generator)]
        flat = key.flatten(0, 1).clone()
        flat[index] = key.flatten(0, 1)[order]
        return replace(call, key=flat.reshape(key.shape).movedim(2, 1))

    return alter


def chosen_nulls(names: list[str] | None) -> tuple[str, ...]:
    """Both by default, none for "none"."""
    if not names:
        return NULLS
    for name in names:
        if name not in (*NULLS, "none"):
            raise ValueError(sentence("--null", "random, shuffled or none", repr(name), "Pick from them."))
    if "none" in names:
        others = [name for name in names if name != "none"]
        if others:
            raise ValueError(
                sentence("--null", "none alone", f"{', '.join(others)} beside it", "Leave one of them out.")
            )
        return ()
    return tuple(dict.fromkeys(names))
