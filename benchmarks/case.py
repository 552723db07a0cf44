"""What a row of the tables is: inputs, the methods that run on them, and what is to be reached."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

OURS = "cumulant"
GROWTH = "growth"  # the table whose methods are one function at several sizes
Run = Callable[[], Mapping[str, Tensor]]  # named results: equal names must have equal values on all methods
Prepare = Callable[[Any], Run]  # inputs → what is timed


class Inputs(Protocol):
    """Calling it builds tensors."""

    def __call__(self) -> Any: ...
    def small(self) -> Inputs:
        """A little of the same, to page code in before memory is measured."""
        ...


class Unavailable(Exception):
    """This method cannot run here; the text says why."""


@dataclass(frozen=True)
class Target:
    """``method`` over ``peer`` and the most it may be; without a peer, extra MiB; without a bound, no verdict."""

    peer: str | None
    bound: float | None = None
    quantity: Literal["time", "memory"] = "time"
    method: str = OURS
    faster: bool = False  # printed as its inverse, "≥ 5× faster"
    tracks: int = 1  # how many times the work of the peer is done; printed per track

    @property
    def text(self) -> str:
        """
        >>> within("SDPA", 1.1).text, faster("naive torch", 5).text, memory("plain", 0.04).text, extra(32).text
        ('≤ 1.10×', '≥ 5× faster', '≤ 4 %', '≤ 32 MiB')
        """
        return "" if self.bound is None else ("≥ " if self.faster else "≤ ") + self.format(self.bound)

    def format(self, figure: float) -> str:
        """A figure of this kind in words."""
        if self.peer is None:
            return f"{figure:.3g} MiB"
        if self.faster:
            return f"{self.tracks / figure:.3g}× faster" + (" per track" if self.tracks > 1 else "")
        if self.quantity == "memory" and self.method == OURS:
            return f"{100 * figure:.2g} %" if figure < 0.995 else f"{100 * figure:.0f} %"
        return f"{figure:.2f}×"


def within(peer: str, times: float | None = None) -> Target:
    """At most ``times`` the time of ``peer``; reported only, without ``times``."""
    return Target(peer, times)


def faster(peer: str, times: float | None = None, tracks: int = 1) -> Target:
    """At least ``times`` faster than ``peer``, which does one track of ``tracks``; reported only, without ``times``."""
    return Target(peer, None if times is None else tracks / times, faster=True, tracks=tracks)


def memory(peer: str, share: float | None = None) -> Target:
    """At most this share of the extra memory of ``peer``."""
    return Target(peer, share, "memory")


def extra(mib: float) -> Target:
    """At most this many MiB beyond the inputs."""
    return Target(None, mib, "memory")


@dataclass(frozen=True)
class Case:
    """One row, or a few on the same inputs."""

    name: str
    table: str
    work: str
    inputs: Inputs
    methods: Mapping[str, Prepare]
    targets: tuple[Target, ...]
    threads: int = 1  # 1: CPU time; more, or 0 for all of them: wall time
    busy: int = 0  # other processes that want a core meanwhile
    tolerance: float = 1e-3  # of results, relative to the largest entry: methods sum in float32, in different orders

    def measured(self, quantity: str) -> list[str]:
        """Methods whose ``quantity`` some target mentions, in order."""
        named = {n for t in self.targets if t.quantity == quantity for n in (t.method, t.peer)}
        return [name for name in self.methods if name in named]


def ours(module: str, name: str) -> Callable[..., Any]:
    """A function of this library, by name: a benchmark may be older or newer than what it measures."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise Unavailable(f"{module}.{name} is not available") from None


def peer(module: str) -> Any:
    """A module that need not be installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable("not installed") from None
