"""The types of an experiment and their registry.

An experiment is a function of a `Setting` that returns a `Result`; ``@experiment`` adds it to `EXPERIMENTS` under its
name on the command line. Figures are functions, so that a run needs no drawing library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cumulant.checks import sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, float | int | str | bool | None]


class Expectation(NamedTuple):
    """A prediction of the theory, the number that was measured, and whether the two agree."""

    words: str
    measured: str
    holds: bool


class Result(NamedTuple):
    """Tables by name, figures by name as functions that draw them, a verdict in one paragraph, and expectations."""

    tables: dict[str, list[Row]]
    figures: dict[str, Callable[[], Figure]]
    verdict: str
    expectations: tuple[Expectation, ...]

    @property
    def holds(self) -> bool:
        """Whether every expectation does."""
        return all(e.holds for e in self.expectations)


@dataclass(frozen=True)
class Setting:
    """Options of a run.

    seed       of every random number
    full       the long version, where there is one
    progress   called with (done, total, description)
    cache_dir  where parts of a long run are stored, so that it can be resumed; None stores nothing
    """

    seed: int = 0
    full: bool = False
    progress: Callable[[int, int, str], object] = lambda done, total, what: None
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment: its name, its question, the statements it rests on, its duration in words, and its function.

    long      duration of the full version in words, if there is one
    estimate  upper bound of its seconds on this machine
    """

    name: str
    question: str
    rests_on: str
    takes: str
    run: Callable[[Setting], Result]
    long: str = ""
    estimate: Callable[[], float] | None = None


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    name: str,
    question: str,
    *,
    rests_on: str,
    takes: str,
    long: str = "",
    estimate: Callable[[], float] | None = None,
):
    """Register a function as an experiment."""

    def register(run: Callable[[Setting], Result]) -> Callable[[Setting], Result]:
        EXPERIMENTS[name] = Experiment(name, question, rests_on, takes, run, long, estimate)
        return run

    return register


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ValueError(sentence("experiment", f"one of {', '.join(EXPERIMENTS)}", repr(name), "Use --list."))
    return EXPERIMENTS[name]


def expect(words: str, holds: bool, measured: str) -> Expectation:
    """
    >>> expect("volume grows", 0.3 > 0, "log-volume 0.3")
    Expectation(words='volume grows', measured='log-volume 0.3', holds=True)
    """
    return Expectation(words, measured, bool(holds))
