"""What a monitor hands its writer: the whole check to a `CheckWriter`, a flat dictionary to any other callable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from cumulant.observatory.monitor.history import Check


class CheckWriter(ABC):
    """A writer that is called with the `Check` itself; subclass it where numbers under names are not enough.

    >>> class Steps(CheckWriter):
    ...     def __call__(self, check):
    ...         print("step", check.step, "with", len(check.alarms), "alarms")
    >>> write_check(Steps(), Check(50, ()))
    step 50 with 0 alarms
    """

    @abstractmethod
    def __call__(self, check: Check) -> None:
        """Write one check."""


Writer = CheckWriter | Callable[[dict[str, float]], object]


def write_check(writer: Writer, check: Check) -> None:
    """Call ``writer`` with the check if it is a `CheckWriter`, else with `Check.scalars` and the step under "step".

    >>> write_check(print, Check(50, ()))
    {'step': 50}
    """
    if isinstance(writer, CheckWriter):
        writer(check)
    else:
        writer({**check.scalars(), "step": check.step})
