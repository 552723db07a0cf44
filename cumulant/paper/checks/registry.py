"""The registry of numerical checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.random_inputs import RandomInputs


class Skipped(Exception):
    """Raised by a check that cannot run here; the message says what it needs."""


Function = Callable[[RandomInputs], Iterator[Evidence]]


class NumericalCheck(NamedTuple):
    """A check: its name, its description, and a function from random inputs to evidence."""

    name: str
    words: str
    function: Function

    def run(self, seed: int = 0) -> list[Evidence]:
        return list(self.function(RandomInputs(self.name, seed)))

    @property
    def location(self) -> str:
        """``cumulant/paper/checks/family.py:42``"""
        path = Path(inspect.getfile(self.function)).resolve()
        package = Path(__file__).resolve().parents[2]
        return f"{path.relative_to(package.parent)}:{inspect.getsourcelines(self.function)[1]}"


CHECKS: dict[str, NumericalCheck] = {}


def check(name: str, words: str) -> Callable[[Function], Function]:
    """Register a check under its name; the function yields evidence, one comparison after another."""

    def register(function: Function) -> Function:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        CHECKS[name] = NumericalCheck(name, words, function)
        return function

    return register
