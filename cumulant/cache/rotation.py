"""Rotary positions of a model, read off one forward pass: to turn a query back, or on to a later position."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

CLOSE = 1e-3  # of a rotated vector of length 1, what two ways of rotating it may differ by at the last position


class Rotation(NamedTuple):
    """Pairs of coordinates turn by an angle at every token: R_t = factor · diag(turn by t·angle_1, t·angle_2, …).

        R_s R_t = factor · R_(s+t),    so that a query at t is moved to s by R_(s−t) / factor

    angles       (r,) float64, of the first 2r coordinates; those behind are not turned
    interleaved  pairs are (0, 1), (2, 3), …; else (0, r), (1, r+1), …
    factor       length that a turned pair has, of 1

    >>> quarter = Rotation(torch.tensor([torch.pi / 2], dtype=torch.float64), interleaved=True, factor=1.0)
    >>> quarter.turn(torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([1])).round().tolist()
    [[0.0, 1.0, 5.0]]
    """

    angles: Tensor
    interleaved: bool
    factor: float

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """x (…, t, d) moved on by so many positions (t,), without the factor; negative: moved back."""
        angle = by.to(x.device, torch.float64)[:, None] * self.angles.to(x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = self._pairs(x.shape[-1])
        out = x.clone()
        out[..., first] = cos * x[..., first] - sin * x[..., second]
        out[..., second] = sin * x[..., first] + cos * x[..., second]
        return out

    def mean_matrix(self, positions: Tensor, dim: int) -> Tensor:
        """(dim, dim) float64: the mean of R_t / factor over positions (n,)."""
        turned = torch.stack([self.turn(torch.eye(dim, dtype=torch.float64), p.expand(dim)) for p in positions])
        return turned.mean(0).mT

    def _pairs(self, dim: int) -> tuple[slice, slice]:
        turned = 2 * len(self.angles)
        if self.interleaved:
            return slice(0, turned, 2), slice(1, turned, 2)
        return slice(0, turned // 2), slice(turned // 2, turned)


def read_rotation(module: nn.Module, cos: Tensor, sin: Tensor, frequencies: Sequence[Tensor] = ()) -> Rotation | None:
    """The rotation that an attention module of transformers makes of (1, T, 2r) cosines and sines of positions 0 … T−1.

    Which coordinates are pairs is found by rotating a vector with the function of the module's own file; None where it
    has none, or rotates in no way that is known here.

    frequencies  (r,) angles that it may be: half-precision cosines do not say the angle well enough for far positions
    """
    rotate = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    if rotate is None or cos.ndim != 3 or cos.shape[1] < 2 or cos.shape[-1] % 2:
        return None
    close = max(CLOSE, 8 * torch.finfo(cos.dtype).eps)
    cos, sin = cos[:1].detach().double().cpu(), sin[:1].detach().double().cpu()
    factor = float((cos[0, 1, 0] ** 2 + sin[0, 1, 0] ** 2).sqrt())
    factor = 1.0 if abs(factor - 1) < close else factor
    angle = torch.atan2(sin[0, 1], cos[0, 1])
    half = len(angle) // 2
    layouts = [Rotation(angle[:half], False, factor), Rotation(angle[::2], True, factor)]
    layouts += [Rotation(angle[:half], True, factor)]  # cosines as for halves, turned as for neighbours
    known = [f.detach().double().cpu() for f in frequencies if f.shape == (half,)]
    layouts = [Rotation(f, pairs, factor) for f in known for pairs in (False, True)] + layouts
    return next((r for r in layouts if factor and _agrees(r, rotate, cos, sin, close)), None)


def _agrees(rotation: Rotation, rotate: Callable, cos: Tensor, sin: Tensor, close: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    width = cos.shape[-1]
    x = torch.randn(1, 1, 1, width, generator=generator, dtype=torch.float64).expand(1, 1, cos.shape[1], width)
    x = x / x[0, 0, 0].norm()
    try:
        made = rotate(x, x, cos, sin)[0]
    except (TypeError, RuntimeError, ValueError):  # another signature: another way to rotate
        return False
    own = rotation.factor * rotation.turn(x, torch.arange(cos.shape[1]))
    return made.shape == own.shape and bool((made - own).abs().amax() < close * rotation.factor)
