"""Whether positions of a table show turns, and how fast: from the directions between means of a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = (4, 6, 8, 12, 16, 24)  # rows in a block
CLEAR = 5.0  # deviations by which a direction must change
LEAST = 0.15  # radians, by which it must
HALF = 0.5
UPPER = 0.7  # quantile of rates: where a block is half in a turn its rate is too low
WILD = 6.0  # deviations beyond which a row is left out
NORMAL_MEDIAN = 1.1774  # median of √(χ²_2)


class TurnGuess(NamedTuple):
    """The rate of clear turns, radians per second, and the share of time that they take."""

    rate: float
    share: float


def guess_turns(tracks: Sequence[tuple[np.ndarray, np.ndarray]]) -> TurnGuess | None:
    """Of times (T,) and positions (T, 2) of each track; None where no turn is clear.

    A turn is clear where the direction from block to block of rows changes twice in a row to one side, by more than
    noise does. The smallest blocks are taken that show turns for half as long as any others do: large ones blur them.

    >>> t = np.arange(60.0)
    >>> turn = 100 / 0.05 * np.stack([np.sin(0.05 * t), 1 - np.cos(0.05 * t)], 1)
    >>> round(guess_turns([(t, turn)]).rate, 3), guess_turns([(t, np.stack([100 * t, 5 * t], 1))])
    (0.05, None)
    """
    total = sum(float(times[-1] - times[0]) for times, _ in tracks if len(times))
    cleaned = [(*_tidy(times, positions), _noise(positions)) for times, positions in tracks if len(times) > 8]
    by_size = [[turn for track in cleaned for turn in _turns(*track, size)] for size in BLOCKS]
    lasted = [sum(duration for _, duration in found) for found in by_size]
    if not max(lasted) > 0:
        return None
    k = next(k for k, duration in enumerate(lasted) if duration >= HALF * max(lasted))
    return TurnGuess(float(np.quantile([rate for rate, _ in by_size[k]], UPPER)), lasted[k] / total)


def _off_line(positions: np.ndarray) -> np.ndarray:
    """How far each row lies from the middle of its neighbours."""
    return np.linalg.norm(positions[1:-1] - (positions[:-2] + positions[2:]) / 2, axis=1)


def _noise(positions: np.ndarray) -> float:
    return float(np.median(_off_line(positions))) / NORMAL_MEDIAN / 1.5**0.5


def _tidy(times: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without wild rows."""
    noise = _noise(positions)
    kept = np.ones(len(times), dtype=bool)
    kept[1:-1] = _off_line(positions) <= WILD * 1.5**0.5 * max(noise, 1e-12)
    return times[kept], positions[kept]


def _turns(times: np.ndarray, positions: np.ndarray, noise: float, size: int) -> list[tuple[float, float]]:
    """Rates and durations of clear turns between blocks of so many rows."""
    blocks = len(times) // size
    if blocks < 4:
        return []
    t = times[: blocks * size].reshape(blocks, size).mean(1)
    steps = np.diff(positions[: blocks * size].reshape(blocks, size, 2).mean(1), axis=0)
    far = np.linalg.norm(steps, axis=1)
    a, b = steps[:-1], steps[1:]
    turned = np.arctan2(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0], (a * b).sum(1))
    error = noise * (6 / size) ** 0.5 / np.maximum(np.minimum(far[:-1], far[1:]), 1e-12)
    clear = np.abs(turned) > np.maximum(LEAST, CLEAR * error)
    again = np.zeros_like(clear)
    both = clear[1:] & clear[:-1] & (turned[1:] * turned[:-1] > 0)
    again[1:] |= both
    again[:-1] |= both
    lasted = (t[2:] - t[:-2]) / 2
    return [(abs(float(turned[k] / lasted[k])), float(lasted[k])) for k in np.flatnonzero(again) if lasted[k] > 0]
