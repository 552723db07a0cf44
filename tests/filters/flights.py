"""Simulated flights with one known fault each, for the rules of a verdict: range, bearing and Doppler every second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cumulant.filters.tracking import Track, read_model
from cumulant.filters.tracking.model import TrackModel

HEAD = """[table]
time = "t"
[[sensor]]
name = "radar"
range = {{ column = "r", std = 15 }}
bearing = {{ column = "a", unit = "deg", std = {bearing} }}
range_rate = {{ column = "d", std = {doppler} }}
"""
CRUISE = '[[mode]]\nname = "{name}"\nmotion = "constant-velocity"\nq = {q}\n'
TURN = '[[mode]]\nname = "{name}"\nmotion = "turn"\nq = 1\nrate = {rate}\nrate_unit = "deg/s"\n'
TAIL = "[initial]\nvelocity_std = 120\n"


def cruising(q: float = 1.0) -> str:
    return CRUISE.format(name="cruise", q=q)


def two_modes(quiet: float, lively: float) -> str:
    modes = CRUISE.format(name="cruise", q=quiet) + CRUISE.format(name="manoeuvre", q=lively)
    return modes + "[switching]\nrates = [[-0.02, 0.02], [0.1, -0.1]]\n"


def turning(rate: float = 3.5) -> str:
    modes = cruising(0.3) + TURN.format(name="left", rate=rate) + TURN.format(name="right", rate=-rate)
    return modes + "[switching]\nrates = [[-0.04, 0.02, 0.02], [0.04, -0.04, 0], [0.04, 0, -0.04]]\n"


def radar_model(path: Path, modes: str, bearing: float = 0.3, doppler: float = 0.8) -> TrackModel:
    path.write_text(HEAD.format(bearing=bearing, doppler=doppler) + modes + TAIL, encoding="utf-8")
    return read_model(path)


def flown(rng: np.random.Generator, tracks: int, rows: int, q: float = 1.0, kind: str = "straight") -> np.ndarray:
    """States (tracks, 2 rows, 4) every half second; "turns" of 3 to 4 degrees a second, or "switch" to 100 q."""
    away, around, course = rng.uniform(2000, 8000, tracks), *rng.uniform(0, 2 * np.pi, (2, tracks))
    speed = rng.uniform(60, 130, tracks)
    x = np.stack([away * np.cos(around), away * np.sin(around), speed * np.cos(course), speed * np.sin(course)], 1)
    rate, left, lively = np.zeros(tracks), rng.exponential(40, tracks), np.zeros(tracks, dtype=bool)
    out, h = [], 0.1
    for k in range(10 * rows):
        if k % 5 == 0:
            out.append(x.copy())
        left -= h
        if kind == "turns":
            for i in np.flatnonzero(left <= 0):
                starts = rate[i] == 0
                rate[i] = rng.choice([-1, 1]) * np.radians(rng.uniform(3, 4)) if starts else 0.0
                left[i] = rng.uniform(20, 35) if starts else rng.exponential(50)
        if kind == "switch":
            lively ^= rng.random(tracks) < np.where(lively, 0.1, 0.02) * h
        density = np.where(lively, 100 * q, q)[:, None]
        kick, moved = np.sqrt(density * h) * rng.normal(size=(tracks, 2)), rng.normal(size=(tracks, 2))
        c, s, v = np.cos(rate * h), np.sin(rate * h), x[:, 2:]
        turned = np.stack([c * v[:, 0] - s * v[:, 1], s * v[:, 0] + c * v[:, 1]], 1)
        shift = h * (v + turned + kick) / 2 + np.sqrt(density * h**3 / 12) * moved
        x = np.concatenate([x[:, :2] + shift, turned + kick], 1)
    return np.array(out).transpose(1, 0, 2)


def observed(
    rng: np.random.Generator, states: np.ndarray, doppler_bias: float = 0.0, doppler_ahead: bool = False
) -> list[Track]:
    """Tracks seen from the origin, with 15 m, 0.3 degrees and 0.8 m/s; Doppler half a second late in truth if ahead."""
    x, later = states[:, ::2], states[:, int(doppler_ahead) :: 2]
    r, b = np.hypot(x[..., 0], x[..., 1]), np.arctan2(x[..., 0], x[..., 1])
    d = (later[..., :2] * later[..., 2:]).sum(-1) / np.hypot(later[..., 0], later[..., 1])
    r, b, d = (v + size * rng.normal(size=r.shape) for v, size in ((r, 15), (b, np.radians(0.3)), (d, 0.8)))
    y = torch.tensor(np.stack([r, b % (2 * np.pi), d + doppler_bias], -1))
    times = tuple(float(k) for k in range(y.shape[1]))
    return [Track(str(k), times, (1.0,) * (len(times) - 1), rows) for k, rows in enumerate(y)]
