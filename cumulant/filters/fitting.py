"""Linear regression from the moments of its variables: the M-step of learning.

    u = A z + b + N(0, V)        z and u random with joint moments, n cases of weight w, one law a mode

The maximum of the expected log-likelihood is a change of the law at the start,

    δA, δb = argmin Σ w E|u − (A + δA) z − (b + δb)|²_{V⁻¹},        V = Σ w E[(u − Az − b)(u − Az − b)ᵀ] / Σ w

with the smallest change where the data leave a choice, so that what they do not determine stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filters.linear_laws import LinearLaw, regression


class Joint(NamedTuple):
    """Cases (n) in each mode (M): weights (n, M), mean (n, M, p+r) and covariance (n, M, p+r, p+r) of (z, u)."""

    weights: Tensor
    mean: Tensor
    covariance: Tensor


class Change(NamedTuple):
    """δA (M, r, p) and δb (M, r), or (1, …) for all modes."""

    coefficient: Tensor
    offset: Tensor


def fit(joint: Joint, law: LinearLaw, free: Collection[str], shared: Collection[str] = ()) -> LinearLaw:
    """The law of greatest expected log-likelihood near a given one.

    law     with leading axis (M), or (n, M) where it differs between cases
    free    names of the fields of `LinearLaw` to fit; the others stay, and so must what differs between cases
    shared  names of those that are one for all modes

    Where one of A and b is shared and the other is not, they are improved in turn.

    >>> import torch
    >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    >>> joint = Joint(torch.ones(4, 1), torch.stack([x, 1 + 2 * x], -1)[:, None], torch.zeros(4, 1, 2, 2))
    >>> law = LinearLaw(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.ones(1, 1, 1))
    >>> fitted = fit(joint, law, ("coefficient", "offset"))
    >>> round(fitted.coefficient.item(), 4), round(fitted.offset.item(), 4), fitted.noise.item()
    (2.0, 1.0, 1.0)
    """
    coefficient, offset, noise = law
    error = _errors(joint, coefficient, offset)
    names = [name for name in ("coefficient", "offset") if name in free]
    alike = len({name in shared for name in names}) == 1
    for block in [names] if alike else [[name] for name in names]:
        change = _change(error, coefficient.shape[-1], noise, block, block[0] in shared)
        error = _errors(error, *change)
        coefficient = coefficient + change.coefficient if "coefficient" in block else coefficient
        offset = offset + change.offset if "offset" in block else offset
    if "noise" in free:
        noise = _spread(error, coefficient.shape[-1], noise, "noise" in shared)
    return LinearLaw(coefficient, offset, noise)


def _errors(joint: Joint, coefficient: Tensor, offset: Tensor) -> Joint:
    """The moments of (z, u − A z − b)."""
    (r, p), k = coefficient.shape[-2:], joint.mean.shape[-1]
    eye = torch.eye(k, dtype=joint.mean.dtype, device=joint.mean.device)
    lower = torch.cat([-coefficient, eye[p:, p:].expand(*coefficient.shape[:-1], r)], -1)
    change = torch.cat([eye[:p].expand(*coefficient.shape[:-2], p, k), lower], -2)
    mean = (change @ joint.mean[..., None])[..., 0]
    mean = torch.cat([mean[..., :p], mean[..., p:] - offset], -1)
    return Joint(joint.weights, mean, change @ joint.covariance @ change.mT)


def _change(error: Joint, p: int, noise: Tensor, block: Collection[str], together: bool) -> Change:
    """The regression of the errors on z, on 1, or on both."""
    weights, modes, r = error.weights[..., None], error.weights.shape[-1], error.mean.shape[-1] - p
    z, e = error.mean[..., :p], error.mean[..., p:]
    width = p if "coefficient" in block else 0
    centre = z.new_zeros(1 if together else modes, width)
    if "offset" in block:  # about the centre slope and offset are least correlated
        total, centre = weights.sum(0), (weights * z[..., :width]).sum(0)
        if together:
            total, centre = total.sum(0, keepdim=True), centre.sum(0, keepdim=True)
        centre = centre / total.clamp_min(torch.finfo(z.dtype).tiny)
        z = torch.cat([z[..., :width] - centre, torch.ones_like(weights)], -1)
    spread = torch.zeros(*z.shape, z.shape[-1], dtype=z.dtype, device=z.device)
    spread[..., :width, :width] = error.covariance[..., :width, :width]
    cross = torch.zeros(*e.shape, z.shape[-1], dtype=z.dtype, device=z.device)
    cross[..., :width] = error.covariance[..., p:, :width]
    weights = weights[..., None]
    spread = weights * (spread + z[..., :, None] * z[..., None, :])
    cross = weights * (cross + e[..., :, None] * z[..., None, :])
    slopes = _solve(spread, cross, noise, together)
    coefficient = slopes[..., :width]
    offset = slopes[..., -1] - (coefficient @ centre[..., None])[..., 0] if "offset" in block else e.new_zeros(1, r)
    return Change(coefficient if width else e.new_zeros(1, r, p), offset)


def _solve(spread: Tensor, cross: Tensor, noise: Tensor, together: bool) -> Tensor:
    """θ (M or 1, r, k) of Σ_n V_n⁻¹ θ S_n = Σ_n V_n⁻¹ C_n, the sum over modes too where they are taken together."""
    if noise.ndim == 3:
        spread, cross = spread.sum(0, keepdim=True), cross.sum(0, keepdim=True)
        if not together:
            return regression(cross[0].mT, spread[0])
    precision = _precision(noise).expand(len(spread), *noise.shape[-3:])
    matrix = torch.einsum("nmab,nmij->maibj", precision, spread)
    target = (precision @ cross).sum(0)
    if together:
        matrix, target = matrix.sum(0, keepdim=True), target.sum(0, keepdim=True)
    size = target.shape[-2] * target.shape[-1]
    matrix = matrix.reshape(-1, size, size)
    return regression(target.reshape(-1, size, 1), (matrix + matrix.mT) / 2).reshape(target.shape)


def _precision(noise: Tensor) -> Tensor:
    """V⁻¹, with large but finite weight on directions without noise."""
    values, vectors = torch.linalg.eigh(noise)
    floor = values.amax(-1, keepdim=True) * torch.finfo(noise.dtype).eps ** 0.5
    values = torch.where(floor > 0, torch.maximum(values, floor), 1)
    return vectors / values[..., None, :] @ vectors.mT


def _spread(error: Joint, p: int, noise: Tensor, together: bool) -> Tensor:
    weights, e = error.weights, error.mean[..., p:]
    second = error.covariance[..., p:, p:] + e[..., :, None] * e[..., None, :]
    total, second = weights.sum(0)[..., None, None], (weights[..., None, None] * second).sum(0)
    if together:
        total, second = total.sum(0, keepdim=True), second.sum(0, keepdim=True)
    known = total > torch.finfo(total.dtype).eps
    second = (second + second.mT) / 2
    return torch.where(known, second / torch.where(known, total, 1), noise)


def completed(states: Joint, y: Tensor, law: LinearLaw) -> Joint:
    """The moments of (x, y) given what was observed of y (n, m), NaN where it was not: missing entries follow the law.

    y_u | x, y_s ~ N(H_u x + c_u + B (y_s − H_s x − c_s), V_uu − B V_su),      B = V_us V_ss⁻¹
    """
    observed = ~y.isnan()
    h, c, v = (part.expand(len(y), *part.shape[-rank - 1 :]) for part, rank in zip(law, (2, 1, 2), strict=True))
    row, column = observed[:, None, :, None], observed[:, None, None, :]
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    inverse = torch.linalg.inv(torch.where(row & column, v, eye))
    pull = torch.where(~row & column, v, 0) @ torch.where(row & column, inverse, 0)  # B, 0 for what was observed
    slope = torch.where(row, 0, h) - pull @ h
    noise = torch.where(~row & ~column, v - pull @ v, 0)
    residual = torch.where(observed, y, 0)[:, None] - c
    constant = torch.where(observed[:, None], y.nan_to_num(0)[:, None], c + (pull @ residual[..., None])[..., 0])
    mean = (slope @ states.mean[..., None])[..., 0] + constant
    cross = slope @ states.covariance
    upper = torch.cat([states.covariance, cross.mT], -1)
    lower = torch.cat([cross, cross @ slope.mT + noise], -1)
    weights = states.weights * observed.any(-1, keepdim=True)
    return Joint(weights, torch.cat([states.mean, mean], -1), torch.cat([upper, lower], -2))
