"""What a monitor did to a training: one record for every action, and the line that says it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

logger = logging.getLogger("cumulant.monitor")
NAMED = 3  # of the actions of a step, in its line


class Action(NamedTuple):
    """One thing that was done, or could not be done.

    kind           "clip" (the logits of a head were scaled), "unclipped" (they could not be), "finite" (they are not
                   finite, and nothing was done), "stop", "learning rate", or what a reaction of yours calls it
    layer, name    number of the attention layer in the order of the model, and its path
    head           its number, or None where the whole layer is meant
    before, after  what it was and what it is: the largest logit, which is that of the same tokens; the learning rate
    words          the same as a sentence
    """

    kind: str
    step: int
    layer: int
    name: str
    head: int | None
    before: float
    after: float
    words: str


def log_actions(step: int, actions: Sequence[Action]) -> None:
    """One line for all actions of a step, by the logger "cumulant.monitor"."""
    if actions:
        more = f"; and {len(actions) - NAMED} more" if len(actions) > NAMED else ""
        logger.warning("step %d: %s%s", step, "; ".join(a.words for a in actions[:NAMED]), more)
