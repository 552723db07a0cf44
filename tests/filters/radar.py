"""A target that flies straight or turns at about 3° a second, seen by a radar at the origin in range and bearing."""

from __future__ import annotations

from math import radians

import torch
from torch import Tensor

from cumulant.filters import MomentRule, NonlinearMode, SwitchingNonlinear

RATE = radians(3)


def moved(x: Tensor, rate: Tensor) -> Tensor:
    """One second of a turn; the state is x, ẋ, y, ẏ and the rate."""
    px, vx, py, vy, _ = x.unbind(-1)
    safe = torch.where(rate.abs() < 1e-6, 1e-6, rate)
    s, c = torch.sin(safe), torch.cos(safe)
    a, b = s / safe, (1 - c) / safe
    return torch.stack([px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy, rate], -1)


def straight(x: Tensor, step: int) -> Tensor:
    return moved(x, 0 * x[..., 4])


def turning(x: Tensor, step: int) -> Tensor:
    return moved(x, RATE + 0.8 * (x[..., 4] - RATE))


def range_bearing(x: Tensor, step: int) -> Tensor:
    return torch.stack([(x[..., 0] ** 2 + x[..., 2] ** 2).sqrt(), torch.atan2(x[..., 2], x[..., 0])], -1)


def process_noise(acceleration: float, rate: float) -> Tensor:
    """White accelerations in m/s², rates in degrees."""
    push = torch.tensor([[0.5, 0, 0], [1, 0, 0], [0, 0.5, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    spread = torch.tensor([acceleration, acceleration, radians(rate)], dtype=torch.float64) ** 2
    return push * spread @ push.mT + torch.diag(torch.tensor([1e-6] * 4 + [0.0], dtype=torch.float64))


def radar_model(rule: MomentRule, *, modes: int = 2, stay: float = 0.95) -> SwitchingNonlinear:
    """σ of the range 10 m, of the bearing 0.3°; ranges between 1 and 5 km for 100 steps."""
    noise = torch.diag(torch.tensor([10.0, radians(0.3)], dtype=torch.float64) ** 2)
    options = {"observation": range_bearing, "observation_noise": noise, "rule": rule, "angles": (1,)}
    bank = [
        NonlinearMode(turning, process_noise(1.0, 0.3), **options),
        NonlinearMode(straight, process_noise(0.5, 0.05), **options),
    ][:modes]
    rows = torch.tensor([[stay, 1 - stay], [1 - stay, stay]], dtype=torch.float64)
    return SwitchingNonlinear(
        rows if modes == 2 else torch.ones(1, 1).double(),
        bank,
        initial_mean=torch.tensor([3000.0, -25.0, 1800.0, 15.0, 0.0], dtype=torch.float64),
        initial_covariance=torch.diag(torch.tensor([20.0, 3.0, 20.0, 3.0, radians(0.3)], dtype=torch.float64) ** 2),
    )
