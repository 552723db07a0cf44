"""A switching model in a TOML file: what the columns are, how the modes move, how they switch, where it starts.

    [table]                         what the columns of the file mean: `TableColumns`
    time = "time"                   in any unit; q and rates are in the same
    measured = ["x", "y"]
    track = "track"                 optional: several tracks in one file
    step = 0.1                      optional: a regular grid, missing rows are gaps; without it times may be irregular

    [measurement]
    noise = 0.1                     variance: one for all columns, one for each, or a matrix

    [[mode]]                        at least one
    name = "cruise"
    motion = "constant-velocity"    or constant-acceleration, random-walk, matrices
    q = 0.01                        spectral density of the noise that drives it: one, or one for each column
    # noise = 0.1                   optional: of this mode alone

    [switching]                     not needed for one mode
    transition = [[0.98, 0.02], [0.02, 0.98]]       per step; rows are from, columns are to
    # rates = [[-0.2, 0.2], [0.2, -0.2]]            per unit of time, for any times: e^{rates Δ} over a gap Δ

    [initial]                       the law at the first row (start = "prior") or one step before it ("belief")
    covariance = 1.0                one for all, one for each entry of the state, or a matrix
    # mean, modes, start            0, equal, "prior" where they are left out

A mode with motion = "matrices" has state, a list of names, observation, m rows, and either drift and diffusion (per
unit of time) or dynamics and process_noise (per step). Names tie modes together: the state of the model has every name
of every mode, and a mode that lacks one sets it to 0 as it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import SwitchingLinearGaussian
from cumulant.filters.motion import ORDERS, Chain, Discretized, Drift, Fixed, Motion, halve
from cumulant.filters.tracking.headings import headings
from cumulant.filters.tracking.schema import TABLES, keys_of
from cumulant.filters.tracking.section import Section, load_toml, section, suggestion
from cumulant.filters.tracking.table import TableColumns

MATRICES = "matrices"
ROUNDED = 1e-6  # how far a row may be from its sum
CONVENTION = "Rows are from, columns are to: entry i, j is for going from mode i to mode j."


class Mode(NamedTuple):
    """One mode: the names of its state, how that moves, and observation (m, d_k) and noise (m, m)."""

    name: str
    states: tuple[str, ...]
    motion: Motion
    observation: Tensor
    noise: Tensor


class Switching(NamedTuple):
    """The matrix (M, M), rows from: rates per unit of time if ``timed``, else probabilities of a step."""

    matrix: Tensor
    timed: bool

    def over(self, gaps: Tensor) -> Tensor:
        """Probabilities (T, M, M) of T gaps of time (T,)."""
        if not self.timed:
            return self.matrix.expand(len(gaps), -1, -1)
        halved = halve(self.matrix, gaps)
        p = _rows(torch.matrix_exp(self.matrix * halved.gaps[:, None, None]))
        for again in halved.doublings():
            p = torch.where(again, _rows(p @ p), p)
        return p


class Initial(NamedTuple):
    """mean (d,) and covariance (d, d) of the state, probabilities of the modes (M,), and what they are the law of."""

    mean: Tensor
    covariance: Tensor
    modes: Tensor
    start: str


@dataclass(frozen=True, eq=False)
class TrackModel:
    """A switching linear-Gaussian model in continuous time, or on a grid; `at` makes it one of discrete steps."""

    columns: TableColumns
    modes: tuple[Mode, ...]
    switching: Switching
    initial: Initial

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the common state, those of the largest mode first."""
        return common_states(self.modes)

    def at(self, gaps: Sequence[float]) -> SwitchingLinearGaussian:
        """The model of a track whose rows lie these gaps apart, one gap fewer than rows (none: one row).

        Equal gaps make a model without a time axis.
        """
        step = None if self.columns.step is None else float(self.columns.step)
        if step is not None and any(gap != step for gap in gaps):
            raise ValueError(sentence("TrackModel.at", f"gaps of one step {step:g}", "others", "Fill them with NaN."))
        first = step or (gaps[0] if len(gaps) else 1.0)  # used at the first row by start = "belief" alone
        equal = all(gap == first for gap in gaps)
        lengths = torch.tensor([first] if equal else [first, *gaps], dtype=torch.float64)
        steps = [_discretized(mode, lengths) for mode in self.modes]
        indices = [[self.states.index(name) for name in mode.states] for mode in self.modes]
        when = 0 if equal else slice(None)
        return SwitchingLinearGaussian(
            self.switching.over(lengths)[when],
            [s.dynamics[when] for s in steps],
            [s.process_noise[when] for s in steps],
            [mode.observation for mode in self.modes],
            [mode.noise for mode in self.modes],
            initial_mean=[self.initial.mean[k] for k in indices],
            initial_covariance=[self.initial.covariance[k][:, k] for k in indices],
            initial_modes=self.initial.modes,
            start=self.initial.start,
            embeddings=[torch.eye(len(self.states), dtype=torch.float64)[:, k] for k in indices],
        )


def _discretized(mode: Mode, gaps: Tensor) -> Discretized:
    steps = mode.motion.over(gaps)
    finite = steps.dynamics.isfinite().all(-1).all(-1) & steps.process_noise.isfinite().all(-1).all(-1)
    if not bool(finite.all()):
        got = f"an overflow in mode {mode.name} over a gap of {float(gaps[~finite].min()):g}"
        advice = "Look at the times of the table and at the drift, or use other units."
        raise ValueError(sentence("TrackModel.at", "a motion of finite size over every gap", got, advice))
    return steps


def read_model(path: Path) -> TrackModel:
    """The model that a TOML file describes; docs/tracking.md has its keys.

    >>> from tempfile import TemporaryDirectory
    >>> from cumulant.filters.tracking.example import write_example
    >>> with TemporaryDirectory() as directory:
    ...     model = read_model(write_example(Path(directory) / "demo")[1])
    >>> model.states
    ('x', 'y', 'x_velocity', 'y_velocity', 'x_acceleration', 'y_acceleration')
    """
    whole = section(f"{path},", load_toml(path), tuple(TABLES))
    table = whole.need("table", "Say what the columns are.")
    columns = _columns(section(f"{path}, [table]", table, keys_of("table")))
    measurement = section(f"{path}, [measurement]", whole.values.get("measurement", {}), keys_of("measurement"))
    modes = _modes(path, whole.need("mode", "Write a table [[mode]] for each mode."), columns, measurement)
    switching = _switching(path, whole, columns, modes)
    names = common_states(modes)
    _check_names(path, names, modes, columns)
    advice = "Say how sure the state at the first row is: covariance."
    initial = section(f"{path}, [initial]", whole.need("initial", advice), keys_of("initial"))
    return TrackModel(columns, modes, switching, _initial(initial, names, modes, columns))


def _rows(p: Tensor) -> Tensor:
    """Rows of probabilities again, after rounding."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)


def common_states(modes: Sequence[Mode]) -> tuple[str, ...]:
    """Every name of every mode once, those of the largest mode first."""
    largest_first = sorted(modes, key=lambda mode: -len(mode.states))
    return tuple(dict.fromkeys(name for mode in largest_first for name in mode.states))


def _columns(table: Section) -> TableColumns:
    measured = table.texts("measured", 'List the columns of numbers: ["x", "y"].')
    time = table.text("time", "Name the column of times.")
    track = table.text("track") if table.has("track") else None
    ignore: tuple[str, ...] | str = ()
    if table.has("ignore"):
        ignore = table.values["ignore"]
        if ignore != "others":
            ignore = table.texts("ignore", 'List columns, or write "others".')
    delimiter = table.text("delimiter") if table.has("delimiter") else ","
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError(sentence(table.at("delimiter"), "one character", repr(delimiter), '";" or "\\t", say.'))
    step = None
    if table.has("step"):
        step = Decimal(str(table.number("step", "It is the time between two rows.", positive=True)))
    roles = [time, *([track] if track else []), *measured]
    if len(set(roles)) < len(roles):
        raise ValueError(sentence(table.where, "a column for each role", f"{roles}", "Name each column once."))
    return TableColumns(time, measured, track, step, ignore, delimiter)


def _modes(path: Path, tables: object, columns: TableColumns, measurement: Section) -> tuple[Mode, ...]:
    if not isinstance(tables, list) or not tables:
        raise TypeError(sentence(f"{path}, mode", "tables [[mode]]", type(tables).__name__, "Use double brackets."))
    modes = tuple(_mode(f"{path}, [[mode]] {k + 1}", values, columns, measurement) for k, values in enumerate(tables))
    names = [mode.name for mode in modes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(sentence(f"{path}, [[mode]]", "different names", f"{name} twice", "Set name in each."))
    return modes


def _mode(where: str, values: object, columns: TableColumns, measurement: Section) -> Mode:
    mode = section(where, values, keys_of("mode"))
    own = [key for key in keys_of("mode") if key not in ("name", "motion", "q", "noise")]
    motions = (*ORDERS, MATRICES)
    motion = mode.text("motion", f"Write one of {', '.join(motions)}.")
    if motion not in motions:
        advice = suggestion(motion, motions, "Choose one, or write matrices.")
        raise ValueError(sentence(mode.at("motion"), f"one of {', '.join(motions)}", repr(motion), advice))
    m = len(columns.measured)
    noisy = mode if mode.has("noise") else measurement
    advice = f"A variance, or one for each of {', '.join(columns.measured)}."
    noise = noisy.covariance("noise", m, advice, definite=True)
    name = mode.text("name") if mode.has("name") else motion
    wrong = [key for key in (own if motion in ORDERS else ("q",)) if mode.has(key)]
    if wrong:
        advice = f'Remove it, or write motion = "{MATRICES}".' if motion in ORDERS else "Remove it."
        raise ValueError(sentence(mode.at(wrong[0]), f"none for motion {motion}", "one", advice))
    if motion in ORDERS:
        order = ORDERS[motion]
        density = mode.diagonal("q", m, "The spectral density of the noise, or one for each measured column.")
        if bool((density < 0).any()):
            raise ValueError(sentence(mode.at("q"), "numbers ≥ 0", density.tolist(), "0 is motion without noise."))
        observation = torch.eye(m, order * m, dtype=torch.float64)
        return Mode(name, Chain.states(order, columns.measured), Chain(order, density), observation, noise)
    states = mode.texts("state", "Name the entries of the state.")
    observation = mode.array("observation", (m, len(states)), "A row for each measured column.")
    return Mode(name, states, _explicit(mode, len(states), columns), observation, noise)


def _explicit(mode: Section, d: int, columns: TableColumns) -> Motion:
    pairs = (("drift", "diffusion"), ("dynamics", "process_noise"))
    present = [pair for pair in pairs if any(mode.has(key) for key in pair)]
    if len(present) != 1:
        expected = "drift and diffusion, or dynamics and process_noise"
        raise ValueError(sentence(mode.where, expected, "both" if present else "neither", "Give one of the pairs."))
    matrix_key, noise_key = present[0]
    matrix = mode.array(matrix_key, (d, d), "A row and a column for each name in state.")
    noise = mode.covariance(noise_key, d, "A variance, one for each entry of the state, or a matrix.")
    if matrix_key == "drift":
        return Drift(matrix, noise)
    if columns.step is None:
        advice = "Set step under [table], or give drift and diffusion."
        raise ValueError(sentence(mode.at(matrix_key), "a regular grid for what is per step", "no step", advice))
    return Fixed(matrix, noise)


def _switching(path: Path, whole: Section, columns: TableColumns, modes: Sequence[Mode]) -> Switching:
    table = section(f"{path}, [switching]", whole.values.get("switching", {}), keys_of("switching"))
    if table.has("transition") == table.has("rates"):
        if len(modes) == 1 and not table.values:
            return Switching(torch.ones(1, 1, dtype=torch.float64), timed=False)
        got = "both" if table.values else "neither"
        raise ValueError(sentence(table.where, "transition or rates", got, "Per step, or per unit of time."))
    key = next(iter(table.values))
    matrix = table.array(key, (len(modes), len(modes)), f"A row and a column for each mode. {CONVENTION}")
    target = 1.0 if key == "transition" else 0.0
    sums = matrix.sum(-1)
    size = max(1.0, float(matrix.abs().max()))
    for k, mode in enumerate(modes):
        if abs(float(sums[k]) - target) > ROUNDED * size:
            got = f"row {k + 1}, from {mode.name}, with sum {float(sums[k]):.6g}"
            raise ValueError(sentence(table.at(key), f"rows with sum {target:g}", got, CONVENTION))
    off = matrix if key == "transition" else matrix - torch.diag(matrix.diagonal())
    if bool((off < 0).any()):
        expected = "probabilities" if key == "transition" else "rates ≥ 0 off the diagonal"
        raise ValueError(sentence(table.at(key), expected, f"{float(off.min()):.3g}", CONVENTION))
    if key == "transition" and columns.step is None and len(modes) > 1:
        advice = "Set step under [table], or give rates, which are per unit of time."
        raise ValueError(sentence(table.at(key), "a regular grid for what is per step", "no step", advice))
    return Switching(matrix, timed=key == "rates")


def _initial(initial: Section, names: Sequence[str], modes: Sequence[Mode], columns: TableColumns) -> Initial:
    d, listed = len(names), ", ".join(names)
    mean = torch.zeros(d, dtype=torch.float64)
    if initial.has("mean"):
        mean = initial.array("mean", (d,), f"The state is {listed}.")
    covariance = initial.covariance("covariance", d, f"A variance, or one for each of {listed}.")
    weights = torch.full((len(modes),), 1 / len(modes), dtype=torch.float64)
    if initial.has("modes"):
        weights = initial.array("modes", (len(modes),), "A probability for each mode.")
        if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > ROUNDED:
            raise ValueError(sentence(initial.at("modes"), "probabilities with sum 1", weights.tolist(), "Divide."))
    start = initial.text("start") if initial.has("start") else "prior"
    if start not in ("prior", "belief"):
        advice = '"prior" is the law at the first row, "belief" one step before it.'
        raise ValueError(sentence(initial.at("start"), '"prior" or "belief"', repr(start), advice))
    if start == "belief" and columns.step is None:
        raise ValueError(sentence(initial.at("start"), '"prior" where times are irregular', repr(start), "Set step."))
    return Initial(mean, covariance, weights, start)


def _check_names(path: Path, names: Sequence[str], modes: Sequence[Mode], columns: TableColumns) -> None:
    """The table of estimates must have a column of its own for everything."""
    names_out = headings(names, [mode.name for mode in modes], columns.measured)
    for name in names_out:
        if names_out.count(name) > 1:
            expected = "names that give every column of the estimates its own"
            raise ValueError(sentence(str(path), expected, f"two columns {name}", "Rename a state, mode or column."))
