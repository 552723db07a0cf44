"""The manoeuvring target: a model in the package, and tracks simulated from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.files import write
from cumulant.filters import Simulation, SwitchingLinearGaussian
from cumulant.filters.tracking.model_file import read_model

MODEL = Path(__file__).with_name("manoeuvre.toml")
NAMES = ("manoeuvre.csv", "manoeuvre.toml")
STEPS, SEED = 200, 7
MANOEUVRES = ((51, 70), (121, 150))  # first and last step, counted from 1


class Flight(NamedTuple):
    """A track of the example: how long it is, and from where to where nothing, or not x, was measured."""

    name: str
    rows: int
    silent: tuple[int, int] = (0, 0)
    without_x: tuple[int, int] = (0, 0)


FLIGHTS = (Flight("A", 200), Flight("B", 200, silent=(80, 95), without_x=(160, 170)), Flight("C", 140))


def modes() -> Tensor:
    """The true mode of each step, (T,): 0 cruises, 1 manoeuvres."""
    path = torch.zeros(STEPS, dtype=torch.int64)
    for first, last in MANOEUVRES:
        path[first - 1 : last] = 1
    return path


def along(model: SwitchingLinearGaussian, path: Tensor) -> SwitchingLinearGaussian:
    """The model that is certain to go through these modes (T,)."""
    sure = torch.nn.functional.one_hot(path, model.modes).to(model.transition)
    return replace(model, transition=sure[:, None].expand(-1, model.modes, -1), initial_modes=sure[0])


def fly(count: int, seed: int = SEED) -> Simulation:
    """Flights with the modes of `modes`, from starts drawn as the model says.

    >>> fly(2).observations.shape
    torch.Size([2, 200, 2])
    """
    model = along(read_model(MODEL).at(()), modes())
    return model.simulate(STEPS, batch_shape=(count,), generator=torch.Generator().manual_seed(seed))


def write_example(directory: Path, *, force: bool = False) -> tuple[Path, Path]:
    """manoeuvre.csv and manoeuvre.toml, the same bytes every time."""
    if directory.is_file():
        raise ValueError(sentence("--example", "a directory", f"the file {directory}", "Name another one."))
    paths = (directory / NAMES[0], directory / NAMES[1])
    for path in paths:
        if path.exists() and not force:
            raise ValueError(sentence("--example", "a new file", f"{path}", "Name another directory, or pass --force."))
    rows = [*_rows(FLIGHTS, fly(len(FLIGHTS)).observations)]
    directory.mkdir(parents=True, exist_ok=True)
    write(paths[0], "track,time,x,y\n" + "".join(rows))
    write(paths[1], MODEL.read_text(encoding="utf-8"))
    return paths


def _rows(flights: Sequence[Flight], measured: Tensor) -> list[str]:
    """Lines in the order of time, tracks side by side; what is silent has no row at all."""
    rows = []
    for k in range(STEPS):
        for flight, y in zip(flights, measured[:, k].tolist(), strict=True):
            if k < flight.rows and not flight.silent[0] <= k < flight.silent[1]:
                x = "" if flight.without_x[0] <= k < flight.without_x[1] else f"{y[0]:.3f}"
                rows.append(f"{flight.name},{k / 10:.1f},{x},{y[1]:.3f}\n")
    return rows
