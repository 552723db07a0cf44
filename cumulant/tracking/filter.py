"""The engine of `cumulant.filters` over tracks of different lengths and times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import Filtered, Projected, SwitchingLinearGaussian, gpb, imm, kalman, m_projection, smoother
from cumulant.filters.smoother import Smoothed
from cumulant.tracking.model import TrackModel
from cumulant.tracking.table import Track

TOGETHER = 1 << 16  # rows, padding included, that run as one batch


class Estimate(NamedTuple):
    """A track, what a filter knew after each of its T rows, and what a smoother knew in the end.

    filtered  a `Filtered` without batch axes
    smoothed  a `Smoothed` of order 2 without batch axes, or None
    """

    track: Track
    filtered: Filtered
    smoothed: Smoothed | None = None


def filter_tracks(
    model: TrackModel, tracks: Sequence[Track], *, method: str = "imm", smooth: bool = False
) -> list[Estimate]:
    """Filter every track: "imm", "kalman" (one mode), or "gpb1", "gpb2", … (S2-C4, S2-E5).

    Tracks whose rows lie equally far apart run as one batch, shorter ones masked after their end; an answer does not
    depend on the tracks that run beside it. ``smooth`` adds Kim's smoother of order 2, whatever the filter.
    """
    run = method_of(method)
    found: dict[int, Estimate] = {}
    for group in _groups(tracks):
        built = model.at(tracks[group[0]].gaps)
        y, mask = _padded([tracks[k] for k in group])
        filtered = run(built, y, mask)
        smoothed = smoother.smooth(built, y, mask=mask) if smooth else None
        for place, k in enumerate(group):
            own = len(tracks[k].times)
            found[k] = Estimate(tracks[k], _cut(filtered, place, own), _cut(smoothed, place, own))
    return [found[k] for k in range(len(tracks))]


def method_of(name: str) -> Callable[[SwitchingLinearGaussian, Tensor, Tensor], Filtered]:
    """The filter of this name as a function of model, y and mask.

    >>> method_of("gbp2")
    Traceback (most recent call last):
    ValueError: --method: expected imm, kalman, or gpb with an order (gpb1, gpb2, …), got 'gbp2'. Choose one of them.
    """
    if name in ("imm", "kalman"):
        chosen = imm if name == "imm" else kalman
        return lambda model, y, mask: chosen(model, y, mask=mask)
    order = re.fullmatch(r"gpb([1-9]\d{0,2})", name, re.ASCII)
    if order is None:
        expected = "imm, kalman, or gpb with an order (gpb1, gpb2, …)"
        raise ValueError(sentence("--method", expected, repr(name), "Choose one of them."))
    return lambda model, y, mask: gpb(model, y, order=int(order[1]), mask=mask)


def measured_moments(model: TrackModel, record: Filtered | Smoothed) -> Projected:
    """Mean (T, m) and covariance (T, m, m) of H_s x, what is measured without its noise, under the mixture of modes."""
    observation = model.at(()).observation  # (M, m, d)
    means = (observation @ record.mode_means[..., None])[..., 0]
    covariances = observation @ record.mode_covariances @ observation.mT
    return m_projection(record.mode_probabilities, means, covariances)


def _groups(tracks: Sequence[Track]) -> Iterator[list[int]]:
    """Indices of tracks whose gaps begin alike, the longest first, at most `TOGETHER` rows with padding."""
    group: list[int] = []
    for k in sorted(range(len(tracks)), key=lambda k: tracks[k].gaps, reverse=True):
        if group:
            longest = tracks[group[0]]
            alike = tracks[k].gaps == longest.gaps[: len(tracks[k].gaps)]
            if not alike or (len(group) + 1) * len(longest.times) > TOGETHER:
                yield group
                group = []
        group.append(k)
    if group:
        yield group


def _padded(tracks: Sequence[Track]) -> tuple[Tensor, Tensor]:
    """y (tracks, T, m) and the mask (tracks, T) that ends each."""
    lengths = torch.tensor([len(track.times) for track in tracks])
    y = tracks[0].y.new_full((len(tracks), int(lengths.max()), tracks[0].y.shape[-1]), torch.nan)
    for place, track in enumerate(tracks):
        y[place, : len(track.times)] = track.y
    return y, torch.arange(y.shape[1]) < lengths[:, None]


def _cut(record: Any, place: int, steps: int) -> Any:
    """One track of a record, up to its end."""
    if record is None:
        return None
    return type(record)(*(part[place, :steps] if isinstance(part, Tensor) else part for part in record))
