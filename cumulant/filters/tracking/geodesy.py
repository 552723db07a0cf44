"""Latitudes and longitudes as a plane of metres around one point: east and north of it on the ellipsoid WGS 84.

    (x, y) = east and north part of X(latitude, longitude) − X(origin),  X on the ellipsoid

the projection onto the plane that touches the earth at the origin. Distances are too short by (d/R)²/6 at a distance
d: 4 m in 100 km, 0.5 km in 500 km.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEMI_MAJOR, FLATTENING = 6_378_137.0, 1 / 298.257223563
SQUARED = FLATTENING * (2 - FLATTENING)  # of the eccentricity
FARTHEST = 300_000.0  # metres from the origin beyond which the plane is a poor map
NEWTON = 20


class Origin(NamedTuple):
    """Where the plane touches the earth, in degrees."""

    latitude: float
    longitude: float


def to_plane(latitude: Tensor, longitude: Tensor, origin: Origin) -> Tensor:
    """(…, 2) metres east and north of the origin, from radians (…).

    >>> import math
    >>> one = torch.tensor(math.radians(1.0), dtype=torch.float64)
    >>> to_plane(one, 0 * one, Origin(0.0, 0.0))                                      # a degree of latitude
    tensor([     0.0000, 110568.7748], dtype=torch.float64)
    """
    o = torch.deg2rad(torch.tensor(origin, dtype=torch.float64))
    apart = _on_earth(latitude, longitude) - _on_earth(o[0], o[1])
    return apart @ _axes(o[0], o[1]).mT


def to_degrees(plane: Tensor, origin: Origin) -> Tensor:
    """(…, 2) latitude and longitude in degrees, from metres (…, 2): the inverse, by Newton's method."""
    o = torch.deg2rad(torch.tensor(origin, dtype=torch.float64))
    angles = o.expand_as(plane)
    for _ in range(NEWTON):
        error = plane - to_plane(angles[..., 0], angles[..., 1], origin)
        north = SEMI_MAJOR * (1 - SQUARED)
        east = SEMI_MAJOR * torch.cos(angles[..., 0]).clamp_min(1e-6)
        angles = angles + torch.stack([error[..., 1] / north, error[..., 0] / east], -1)
    degrees = torch.rad2deg(angles)
    return torch.stack([degrees[..., 0], torch.remainder(degrees[..., 1] + 180, 360) - 180], -1)


def _on_earth(latitude: Tensor, longitude: Tensor) -> Tensor:
    """(…, 3) metres from the centre."""
    across = SEMI_MAJOR / torch.sqrt(1 - SQUARED * torch.sin(latitude) ** 2)
    flat = across * torch.cos(latitude)
    up = (1 - SQUARED) * across * torch.sin(latitude)
    return torch.stack([flat * torch.cos(longitude), flat * torch.sin(longitude), up], -1)


def _axes(latitude: Tensor, longitude: Tensor) -> Tensor:
    """(2, 3): east and north at a point."""
    (sin_a, cos_a), (sin_o, cos_o) = ((torch.sin(v), torch.cos(v)) for v in (latitude, longitude))
    east = torch.stack([-sin_o, cos_o, torch.zeros_like(sin_o)])
    return torch.stack([east, torch.stack([-sin_a * cos_o, -sin_a * sin_o, cos_a])])
