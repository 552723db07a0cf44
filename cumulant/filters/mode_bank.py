"""The moments that all modes of a model give for their beliefs, those that share a rule in one pass.

Event axes come first here and the sequences last: mean (k, *older, M, batch), matrices (k, l, *older, M, batch).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.filters.moment_rules import PropagatedMoments
from cumulant.filters.noisy_map import NoisyMap, WrongResult, constant_noise, joint_moments
from cumulant.filters.nonlinear_modes import GaussianMode, NonlinearMode

Method = Literal["predict", "observe"]
NAME = "SwitchingNonlinear"


class ModeMoments(NamedTuple):
    """Moments of x' or y by every mode; … is (*older, M, batch) or broadcasts with it.

    mean (k, …), covariance (k, k, …), cross with x (d, k, …), and the part of the covariance that x does not explain,
    None where a mode does not say.
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    unexplained: Tensor | None


class Group(NamedTuple):
    """Modes that are evaluated together: their maps and noise if that is constant, or one mode with its own methods."""

    indices: list[int]
    maps: list[NoisyMap]
    mode: GaussianMode | None
    noise: Tensor | None = None


class Predicted(NamedTuple):
    """Of the modes ``indices``, mean (d, *older, G, batch) and covariance (d, d, *older, G, batch) of x_t."""

    indices: list[int]
    mean: Tensor
    covariance: Tensor


class ModeBank:
    """The modes of a model with states of size d and observations of size m; ``full`` is positions(d), flat."""

    def __init__(self, modes: Sequence[GaussianMode], m: int, d: int, full: Tensor):
        self.count, self.d, self.full = len(modes), d, full
        self.sizes = {"predict": d, "observe": m}
        self.groups: dict[Method, list[Group]] = {}
        for method in ("predict", "observe"):
            self.groups[method] = _grouped(modes, method, d)

    def moments(self, method: Method, moments: Tensor, u: Any, t: int) -> ModeMoments:
        """Of x_t or y_t from packed moments (*older, M or 1, q, batch) of x."""
        parts: list[PropagatedMoments | None] = [None] * self.count
        for group in self.groups[method]:
            image = self._image(group, method, moments, u, t)
            if len(group.indices) == self.count:
                return _events_first(image)
            for position, k in enumerate(group.indices):
                parts[k] = _select(image, position)
        return _stacked([part for part in parts if part is not None])

    def predictions(self, moments: Tensor, u: Any, t: int, known: Collection[int]) -> Iterator[Predicted]:
        """What every group but the modes ``known`` gives for x_t; packed moments (*older, M or 1, q, batch) of x."""
        for group in self.groups["predict"]:
            if not set(group.indices) <= set(known):
                mean, covariance, *_ = _events_first(self._image(group, "predict", moments, u, t))
                yield Predicted(group.indices, mean, covariance)

    def _image(self, group: Group, method: Method, moments: Tensor, u: Any, t: int) -> PropagatedMoments:
        """Moments of a group, (*older, G, batch, …)."""
        indices, maps, mode, noise = group
        events = _of_group(moments, indices).movedim(-2, 0)  # (q, *older, G, batch)
        mean = events[1 : self.d + 1].movedim(0, -1)
        covariance = events[self.d + 1 :].index_select(0, self.full).unflatten(0, (self.d, self.d))
        covariance = covariance.movedim((0, 1), (-2, -1))
        try:
            if mode is None:
                image = joint_moments(maps, mean, covariance, u, noise)
            else:
                image = _with_mode_axis(getattr(mode, method)(mean.squeeze(-3), covariance.squeeze(-4), u))
        except WrongResult as wrong:
            raise ValueError(sentence(f"{NAME}.{wrong.name}, step {t}", *wrong.parts)) from None
        self._check(image, mean.shape, method, indices[0], t)
        return image

    def _check(self, image: PropagatedMoments, lead: torch.Size, method: Method, mode: int, t: int) -> None:
        size = self.sizes[method]
        wanted = (*lead[:-1], size), (*lead[:-1], size, size), (*lead[:-1], lead[-1], size)
        for name, want, part in zip(PropagatedMoments._fields, wanted, image, strict=False):
            if part is None or part.shape != want:
                got = "None" if part is None else shape(part)
                where = f"{NAME}.mode_models[{mode}].{method}, step {t}"
                raise ValueError(sentence(where, f"{name} of shape {want}", got, "Keep the leading axes of the mean."))


def _grouped(modes: Sequence[GaussianMode], method: Method, d: int) -> list[Group]:
    groups: dict[Any, Group] = {}
    for k, mode in enumerate(modes):
        if isinstance(mode, NonlinearMode):
            label = f"mode_models[{k}]"
            each = mode.motion(d, f"{label}.dynamics") if method == "predict" else mode.sensor(f"{label}.observation")
            group = groups.setdefault(each.group, Group([], [], None))
            group.indices.append(k)
            group.maps.append(each)
        else:
            groups[k] = Group([k], [], mode)
    return [group._replace(noise=constant_noise(group.maps)) for group in groups.values()]


def _of_group(moments: Tensor, indices: list[int]) -> Tensor:
    """The beliefs of some modes, (*older, M or 1, q, batch) → (*older, G, q, batch), as a view where they adjoin."""
    modes = moments.shape[-3]
    if modes == 1:
        return moments.expand(*moments.shape[:-3], len(indices), *moments.shape[-2:])
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return moments.narrow(-3, indices[0], len(indices))
    return moments.index_select(-3, torch.tensor(indices, device=moments.device))


def _with_mode_axis(image: PropagatedMoments) -> PropagatedMoments:
    mean, covariance, cross, rest = image
    if rest is not None:
        rest = rest[None] if rest.ndim == 2 else rest.unsqueeze(-4)
    return PropagatedMoments(mean.unsqueeze(-3), covariance.unsqueeze(-4), cross.unsqueeze(-4), rest)


def _select(image: PropagatedMoments, position: int) -> PropagatedMoments:
    """One mode of a group."""
    mean, covariance, cross, rest = image
    if rest is not None:
        rest = rest[position] if rest.ndim == 3 else rest.select(-4, position)
    parts = mean.select(-3, position), covariance.select(-4, position), cross.select(-4, position)
    return PropagatedMoments(*parts, rest)


def _stacked(parts: list[PropagatedMoments]) -> ModeMoments:
    """One law of each mode, joined."""
    rests = [part.unexplained for part in parts if part.unexplained is not None]
    rest = None
    if len(rests) == len(parts):
        if all(each.ndim == 2 for each in rests):
            rest = torch.stack(rests)
        else:
            pairs = zip(rests, parts, strict=True)
            rest = torch.stack([each.expand_as(part.covariance) for each, part in pairs], -4)
    mean = torch.stack([part.mean for part in parts], -3)
    covariance = torch.stack([part.covariance for part in parts], -4)
    cross = torch.stack([part.cross for part in parts], -4)
    return _events_first(PropagatedMoments(mean, covariance, cross, rest))


def _events_first(image: PropagatedMoments) -> ModeMoments:
    mean, covariance, cross, rest = image
    if rest is not None:
        rest = rest.movedim((-2, -1), (0, 1))
        rest = rest[..., None] if rest.ndim == 3 else rest  # (k, k, M, 1)
    covariance, cross = (part.movedim((-2, -1), (0, 1)) for part in (covariance, cross))
    return ModeMoments(mean.movedim(-1, 0), covariance, cross, rest)
