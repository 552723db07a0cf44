"""The filters that `--method` names, and what goes together with what."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import EXACT, IMM, Filtered, Slots, SwitchingModel, exact, gpb, imm, kalman
from cumulant.filters.smoother import METHODS

GPB = re.compile(r"gpb([1-9]\d{0,2})", re.ASCII)
NAMED = {"imm": imm, "kalman": kalman, "exact": exact}
PARTICLES = "particles"
DEFAULT_PARTICLES = 500
MAX_SEED = (1 << 31) - 1


def smoother_order(method: str) -> int:
    """
    >>> smoother_order("gpb4"), smoother_order("imm"), smoother_order("gpb1")
    (4, 2, 2)
    """
    order = GPB.fullmatch(method)
    return 2 if order is None else max(2, int(order[1]))


def check_method(method: str, smoother: str | None, particles: int | None = None, seed: int | None = None) -> None:
    """Refuse names that are not known, and options that do not go together.

    >>> check_method("imm", "kims")
    Traceback (most recent call last):
    ValueError: --smoother: expected one of propagation, correction, kim, exact, got 'kims'. Choose one.
    """
    if method != PARTICLES:
        slots_of(method)
    if smoother is not None and smoother not in METHODS:
        raise ValueError(sentence("--smoother", f"one of {', '.join(METHODS)}", repr(smoother), "Choose one."))
    if smoother is not None and method == PARTICLES:
        advice = "Particles filter only: smooth with --method imm or gpb3."
        raise ValueError(sentence("--smoother", f"none with --method {PARTICLES}", repr(smoother), advice))
    for name, value, least, most in (("particles", particles, 1, None), ("seed", seed, 0, MAX_SEED)):
        if value is not None and method != PARTICLES:
            expected, advice = f"--method {PARTICLES} with it", "Only particles are drawn."
            raise ValueError(sentence(f"--{name}", expected, repr(method), advice))
        if value is not None and (value < least or (most is not None and value > most)):
            expected = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"
            raise ValueError(sentence(f"--{name}", expected, value, "Leave it out for the default."))


def method_of(name: str) -> Callable[[SwitchingModel, Tensor, Tensor], Filtered]:
    """The filter of this name as a function of model, y and mask; particles are none of them.

    >>> method_of("gbp2")
    Traceback (most recent call last):
    ValueError: --method: expected imm, kalman, exact, particles, or gpb with an order (gpb1, gpb2, …), got 'gbp2'.
    Choose one of them.
    """
    if name in NAMED:
        return lambda model, y, mask: NAMED[name](model, y, mask=mask)
    slots = slots_of(name)
    return lambda model, y, mask: gpb(model, y, order=slots.before, mask=mask)


def slots_of(name: str) -> Slots:
    """When the filter of this name collapses its hypotheses; particles are gated and scored by the laws of IMM.

    >>> slots_of("gpb3"), slots_of("particles")
    (Slots(before=3, after=2), Slots(before=1, after=1))
    """
    if name in NAMED or name == PARTICLES:
        return EXACT if name == "exact" else IMM
    order = GPB.fullmatch(name)
    if order is None:
        expected = "imm, kalman, exact, particles, or gpb with an order (gpb1, gpb2, …)"
        raise ValueError(sentence("--method", expected, repr(name), "Choose one of them."))
    return Slots.gpb(int(order[1]))
