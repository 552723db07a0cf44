"""The registry: a property is a check of one case and a strategy that draws cases.

    @holds_for(cases(), examples=40)
    def test_mean_is_that_of_the_definition(case: Case) -> None:
        assert ...

In the suite every property is tried on ``examples`` derandomised cases; `make fuzz` draws until its time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import strategies as st


@dataclass(frozen=True)
class Property:
    name: str  # module:function
    check: Callable[[Any], None]
    cases: st.SearchStrategy[Any]


PROPERTIES: dict[str, Property] = {}

SUITE = hypothesis.settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def holds_for(cases: st.SearchStrategy[Any], *, examples: int) -> Callable[[Callable[[Any], None]], Callable]:
    """Registers a check for `make fuzz` and makes it a test of ``examples`` derandomised cases."""

    def register(check: Callable[[Any], None]) -> Callable:
        name = f"{check.__module__}:{check.__name__}"
        PROPERTIES[name] = Property(name, check, cases)
        return hypothesis.settings(SUITE, max_examples=examples)(hypothesis.given(case=cases)(check))

    return register
