"""Three tables as they come from the field, simulated with a fixed seed: a radar, two sensors, ships."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np


def flight(times: np.ndarray, position, velocity, turns=(), rng=None, q: float = 0.0) -> np.ndarray:
    """States (T, 4) of a target that flies straight but for turns (from, to, rate), with white acceleration q."""
    x = np.array([*position, *velocity], dtype=float)
    out, now = [x.copy()], times[0]
    for later in times[1:]:
        steps = max(1, int(np.ceil((later - now) / 0.05)))
        h = (later - now) / steps
        for _ in range(steps):
            rate = sum(rate for first, last, rate in turns if first <= now < last)
            angle = rate * h
            spin = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            x[:2] += h * x[2:]
            x[2:] = spin @ x[2:]
            if rng is not None and q > 0:
                x[2:] += np.sqrt(q * h) * rng.normal(size=2)
            now += h
        out.append(x.copy())
    return np.array(out)


def radar(path: Path, seed: int = 1) -> Path:
    """One aircraft, range in km and azimuth in degrees, every 2 s, rows missing, three wild plots, the truth."""
    rng = np.random.default_rng(seed)
    times = np.arange(0, 300, 2.0)
    times = times[(times < 100) | (times > 112)]
    states = flight(times, (-6000, 9000), (90, -40), [(80, 110, 0.05), (190, 230, -0.04)], rng, 0.5)
    away = np.hypot(*states[:, :2].T) + 15 * rng.normal(size=len(times))
    azimuth = np.degrees(np.arctan2(states[:, 0], states[:, 1])) + 0.2 * rng.normal(size=len(times))
    azimuth[[20, 60, 120]] += [25, -40, 15]
    rows = ["time_s,range_km,azimuth_deg,true_x,true_y"]
    for t, r, a, x in zip(times, away, azimuth % 360, states, strict=True):
        rows.append(f"{t:.1f},{r / 1000:.4f},{a:.3f},{x[0]:.2f},{x[1]:.2f}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def two_sensors(path: Path, seed: int = 2) -> Path:
    """Three targets, a radar with Doppler every 1.5 s, a camera 2 km east of it with bearings at odd times."""
    rng = np.random.default_rng(seed)
    rows = []
    starts = {"T1": ((3000, 2000), (-25, 10)), "T2": ((-2000, 4000), (15, -30)), "T3": ((1000, -3500), (5, 35))}
    for name, (position, velocity) in starts.items():
        scans = np.arange(rng.uniform(0, 1.5), 90, 1.5)
        looks = np.sort(rng.uniform(0, 90, 70))
        times = np.unique(np.concatenate([scans, looks]).round(2))
        states = flight(times, position, velocity, [(40, 55, 0.08)], rng, 0.2)
        for t, x in zip(times, states, strict=True):
            if np.isclose(t, scans, atol=0.006).any():
                r = np.hypot(x[0], x[1])
                doppler = (x[:2] @ x[2:]) / r + 0.5 * rng.normal()
                bearing = np.degrees(np.arctan2(x[0], x[1])) + 0.3 * rng.normal()
                rows.append(
                    (t, name, "radar", f"{r + 10 * rng.normal():.1f}", f"{bearing % 360:.3f}", f"{doppler:.2f}")
                )
            else:
                bearing = np.degrees(np.arctan2(x[0] - 2000, x[1])) + 0.05 * rng.normal()
                rows.append((t, name, "camera", "", f"{bearing % 360:.3f}", ""))
    order = rng.permutation(len(rows))  # the recorder does not sort
    lines = ["time,target,sensor,range_m,bearing_deg,doppler_mps"]
    lines += [",".join([f"{rows[k][0]:.2f}", *rows[k][1:]]) for k in order]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ships(path: Path, seed: int = 3) -> Path:
    """Two ships off Rotterdam as in AIS: ISO times, degrees, knots, irregular reports, columns nobody needs."""
    rng = np.random.default_rng(seed)
    begin = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)
    lines = ["MMSI,BaseDateTime,LAT,LON,SOG,COG,VesselName"]
    rows = []
    for mmsi, name, position, velocity in (
        (244123456, "ANNA", (0, 0), (6.5, 2.0)),
        (211987654, "BEATRIX", (4000, -2500), (-4.0, 5.0)),
    ):
        times = np.cumsum(rng.choice([6.0, 10.0, 10.0, 20.0, 60.0], size=150)).round()
        states = flight(times, position, velocity, [(600, 800, 0.006)], rng, 2e-4)
        for t, x in zip(times, states, strict=True):
            east, north = x[:2] + 8 * rng.normal(size=2)
            latitude = 51.98 + np.degrees(north / 6_365_000)
            longitude = 3.9 + np.degrees(east / (6_391_000 * np.cos(np.radians(51.98))))
            knots = np.hypot(x[2], x[3]) * 3600 / 1852 + 0.1 * rng.normal()
            course = np.degrees(np.arctan2(x[2], x[3])) + 1.0 * rng.normal()
            when = (begin + timedelta(seconds=float(t))).strftime("%Y-%m-%dT%H:%M:%S")
            rows.append((t, f"{mmsi},{when},{latitude:.5f},{longitude:.5f},{knots:.1f},{course % 360:.1f},{name}"))
    lines += [text for _, text in sorted(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
