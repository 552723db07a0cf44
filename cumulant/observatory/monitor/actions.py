"""What a monitor did to a training: one record for every action, and the line that says it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

logger = logging.getLogger("cumulant.monitor")
NAMED = 3  # of the actions of a step, in its line
GRAVE = ("stop", "finite", "learning rate")  # kinds that are named before all others


class Action(NamedTuple):
    """One thing that was done, or could not be done.

    kind           "clip" (the logits of a head were scaled), "unclipped" (they could not be), "finite" (they are not
                   finite, and nothing was done), "stop", "learning rate", "entropy floor", "z-loss", or what a reaction
                   of yours calls it
    step           how many steps were done then; the pass that it answers to may have begun one earlier
    layer, name    number of the attention layer in the order of the model, and its path
    head           its number, or None where the whole layer is meant
    before, after  what it was and what it is: the largest logit, which is that of the same tokens; the learning rate;
                   the entropy as a share of log N, and the floor; the log-normalizer, and 0
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
    """One warning for the actions of a step, by the logger "cumulant.monitor", with the gravest; the others as INFO."""
    ordered = sorted(actions, key=lambda a: GRAVE.index(a.kind) if a.kind in GRAVE else len(GRAVE))
    if ordered:
        more = f"; and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
        logger.warning("step %d: %s%s", step, "; ".join(a.words for a in ordered[:NAMED]), more)
    for action in ordered[NAMED:]:
        logger.info("step %d: %s", step, action.words)
