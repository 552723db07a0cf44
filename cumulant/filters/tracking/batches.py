"""Tracks of different times and lengths as batches: which run together, padded to one length, and cut apart again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cumulant.filters.tracking.table import Track

BATCH_ROWS = 1 << 16  # rows, padding included, that run as one batch
OWN_ROWS = 1 << 14  # the same where every track has matrices of its own
MANY_ALIKE = 64  # tracks with the same gaps from which they are a batch of their own, which needs no matrices of theirs


def batches(tracks: Sequence[Track]) -> list[list[int]]:
    """Indices of tracks that run together: many with the same gaps, and all others, the longest first.

    >>> track = Track("", (0.0, 1.0), (1.0,), torch.zeros(2, 1))
    >>> batches([track, track._replace(times=(0.0, 2.0), gaps=(2.0,)), track])
    [[1, 0, 2]]
    """
    alike = list(_alike(tracks))
    if len(alike) == 1:
        return alike
    many = [group for group in alike if len(group) >= MANY_ALIKE]
    others = [k for group in alike if len(group) < MANY_ALIKE for k in group]
    others.sort(key=lambda k: -len(tracks[k].times))
    return [*many, *_bounded(others, tracks, OWN_ROWS)]


def padded(tracks: Sequence[Track]) -> tuple[Tensor, Tensor]:
    """y (tracks, T, m) and the mask (tracks, T) that ends each."""
    lengths = torch.tensor([len(track.times) for track in tracks])
    y = tracks[0].y.new_full((len(tracks), int(lengths.max()), tracks[0].y.shape[-1]), torch.nan)
    for index, track in enumerate(tracks):
        y[index, : len(track.times)] = track.y
    return y, torch.arange(y.shape[1]) < lengths[:, None]


def padded_gaps(tracks: Sequence[Track]) -> Tensor:
    """The T−1 gaps that all tracks share, or (tracks, T−1), 0 after the end of a track: it stays where it is."""
    longest = max((track.gaps for track in tracks), key=len)
    if all(track.gaps == longest[: len(track.gaps)] for track in tracks):
        return torch.tensor(longest, dtype=torch.float64)
    gaps = torch.zeros(len(tracks), len(longest), dtype=torch.float64)
    for index, track in enumerate(tracks):
        gaps[index, : len(track.gaps)] = torch.tensor(track.gaps, dtype=torch.float64)
    return gaps


def cut(record: Any, index: int, steps: int) -> Any:
    """One track of a record, up to its end."""
    if record is None:
        return None
    return type(record)(*(part[index, :steps] if isinstance(part, Tensor) else part for part in record))


def _alike(tracks: Sequence[Track]) -> Iterator[list[int]]:
    """Tracks whose gaps begin alike, the longest first."""
    group: list[int] = []
    for k in sorted(range(len(tracks)), key=lambda k: tracks[k].gaps, reverse=True):
        if group and tracks[k].gaps != tracks[group[0]].gaps[: len(tracks[k].gaps)]:
            yield from _bounded(group, tracks, BATCH_ROWS)
            group = []
        group.append(k)
    yield from _bounded(group, tracks, BATCH_ROWS)


def _bounded(group: Sequence[int], tracks: Sequence[Track], rows: int) -> Iterator[list[int]]:
    """A group, the longest track first, in parts of at most so many rows with padding."""
    part: list[int] = []
    for k in group:
        if part and (len(part) + 1) * len(tracks[part[0]].times) > rows:
            yield part
            part = []
        part.append(k)
    if part:
        yield part
