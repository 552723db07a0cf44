"""How mean and covariance pass through a function: linearised, or by points with weights.

    x ~ N(m, P), z = g(x):      E[z],  Cov(z),  Cov(x, z)

| rule         | what it does                                                                   | evaluations of g    |
|--------------|--------------------------------------------------------------------------------|---------------------|
| Extended     | g(m) + J (x − m), J the Jacobian at m, by automatic differentiation            | k, with derivatives |
| Unscented    | 2d+1 points m, m ± √(d+λ) L_k with λ = α²(d+κ) − d, P = L Lᵀ                   | 2d+1                |
| Cubature     | 2d points m ± √d L_k of equal weight: third degree, no settings                | 2d                  |
| GaussHermite | orderᵈ points, a grid of Hermite's roots: exact for polynomials of 2·order − 1 | orderᵈ              |

All are exact for linear functions. Points are ξ_s of the unit normal law with weights, x_s = m + L ξ_s, and with the
regression B of z on ξ

    Cov(z) = B Bᵀ + Σ_s w_s r_s r_sᵀ,     r_s = z_s − E[z] − B ξ_s,     Cov(x, z) = L Bᵀ

in which the second term is what no linear function of x explains.

An entry of z that is an angle has its circular mean, c + Σ_s w_s wrap(z_s − c) about the direction c of
Σ_s |w_s| e^{i z_s}, and its differences are wrapped into [−π, π).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import pi, sqrt
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]
from torch.autograd.forward_ad import unpack_dual

from cumulant.checks import require_integer, sentence
from cumulant.filters.batch_last import product, semidefinite_root

GRID = 1 << 16  # points of a Gauss–Hermite grid beyond which it is refused

Function = Callable[[Tensor], Tensor]


class PropagatedMoments(NamedTuple):
    """The joint law of x and z = g(x) up to second moments, k the size of z.

    mean         (…, k)     E[z]
    covariance   (…, k, k)  Cov(z)
    cross        (…, d, k)  Cov(x, z)
    unexplained  (…, k, k) or (k, k): the part of Cov(z) that no linear function of x explains, such as additive noise;
                 None where it is not known. It keeps the digits of an update with a vague prior.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> PropagatedMoments(mean=one[0], covariance=5 * one, cross=2 * one).unexplained is None      # z = 2 x + noise
    True
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    unexplained: Tensor | None = None


class SigmaPoints(NamedTuple):
    """points ξ (s, d) of the unit normal law, and their weights in means (s) and covariances (s).

        E[g(ξ)] ≈ Σ_s w_s g(ξ_s)

    >>> Cubature().unit_points(1).points[:, 0].tolist()
    [1.0, -1.0]
    """

    points: Tensor
    mean_weights: Tensor
    covariance_weights: Tensor


class MomentRule(ABC):
    """A rule by which moments pass through a function, x ~ N(m, P) ↦ E[g(x)], Cov(g(x)), Cov(x, g(x)); one method.

    >>> import torch
    >>> class Frozen(MomentRule):                                # the function at the mean, as if nothing else were
    ...     def transform(self, function, mean, covariance, angles=(), size=None):
    ...         z = function(mean)
    ...         none = z.new_zeros(*z.shape, z.shape[-1])
    ...         return PropagatedMoments(z, none, z.new_zeros(*mean.shape, z.shape[-1]), none)
    >>> Frozen().transform(torch.exp, torch.zeros(1, 1), torch.ones(1, 1, 1)).mean
    tensor([[1.]])
    """

    @abstractmethod
    def transform(
        self,
        function: Function,
        mean: Tensor,
        covariance: Tensor,
        angles: tuple[int, ...] = (),
        size: int | None = None,
    ) -> PropagatedMoments:
        """The moments of z = g(x) for n normal laws of x.

        function    g, (…, d) → (…, k), on every vector by itself
        mean        (n, d), with covariance (n, d, d)
        angles      entries of z that are angles in radians
        size        k where it is known
        """


@final
@dataclass(frozen=True)
class Extended(MomentRule):
    """The function by its tangent at the mean, z ≈ g(m) + J (x − m), as the extended Kalman filter has it.

        E[z] = g(m),     Cov(z) = J P Jᵀ,     Cov(x, z) = P Jᵀ

    >>> import torch
    >>> z = Extended().transform(lambda x: x**2, torch.tensor([[3.0]]), torch.tensor([[[0.5]]]))
    >>> z.mean, z.covariance, z.cross
    (tensor([[9.]]), tensor([[[18.]]]), tensor([[[3.]]]))
    """

    def transform(
        self,
        function: Function,
        mean: Tensor,
        covariance: Tensor,
        angles: tuple[int, ...] = (),
        size: int | None = None,
    ) -> PropagatedMoments:
        size = function(mean[None][:0]).shape[-1] if size is None else size
        value, jacobian = _linearised(function, mean.mT, size)  # (k, n), (k, d, n)
        matrix = covariance.movedim(0, -1)
        cross = product(matrix, jacobian.transpose(0, 1))  # (d, k, n)
        spread = product(jacobian, cross)
        nothing = value.new_zeros(size, size)
        return PropagatedMoments(value.mT, spread.movedim(-1, 0), cross.movedim(-1, 0), nothing)


def _linearised(function: Function, mean: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """g (k, n) and its Jacobian (k, d, n) at points (d, n): one pass forward and back over k copies of the points.

    Reverse mode, because forward mode goes through Python wherever a number meets a tensor.
    """
    d, n = mean.shape
    points = mean[:, None].expand(d, size, n)  # entry of x, entry of z, n
    if peek_interpreter_stack() is None:
        value, rows = _pulled(function, points)
    else:  # inside a transform of torch.func
        value, pull, *_ = torch.func.vjp(function, points.contiguous().movedim(0, -1))
        (rows,) = pull(_one_hot(points))  # (k, n, d): every copy has the derivatives of its own entry
    jacobian = rows.transpose(1, 2)
    jacobian = jacobian if jacobian.stride(-1) == 1 else jacobian.contiguous()  # sums over small axes run along n
    return value[0].mT.contiguous(), jacobian


def _pulled(function: Function, points: Tensor) -> tuple[Tensor, Tensor]:
    """By torch.autograd, which needs no import of a compiler as torch.func does; derivatives of the rows if needed."""
    tracked = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        leaf = points.clone(memory_format=torch.contiguous_format).movedim(0, -1)  # (k, n, d), the entries contiguous
        leaf = leaf if leaf.requires_grad else leaf.requires_grad_()
        value, rows = function(leaf), None
        keep = tracked and (
            points.requires_grad or unpack_dual(value).tangent is not None or _depends_on_more(value, leaf)
        )
        if value.requires_grad:
            (rows,) = torch.autograd.grad(value, leaf, _one_hot(points), create_graph=keep, allow_unused=True)
        rows = torch.zeros_like(leaf) if rows is None else rows
    return value if keep else value.detach(), rows


def _depends_on_more(value: Tensor, leaf: Tensor) -> bool:
    """Whether the function captured something with a derivative: another leaf in its graph."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable is not leaf:
            return True
        pending.extend(other for other, _ in node.next_functions)
    return False


def _one_hot(points: Tensor) -> Tensor:
    """(k, n, k): entry i of copy i."""
    _, k, n = points.shape
    return _eye(k, points.dtype, points.device)[:, None].expand(k, n, k)


@lru_cache(maxsize=64)
def _eye(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(k, dtype=dtype, device=device)


class SigmaPointRule(MomentRule):
    """A rule that evaluates the function at points with weights, E[g(x)] ≈ Σ_s w_s g(m + L ξ_s); one method says which.

    >>> import torch
    >>> class TwoPoints(SigmaPointRule):                                                     # for one entry: ±1
    ...     def unit_points(self, d):
    ...         half = torch.full((2,), 0.5)
    ...         return SigmaPoints(torch.tensor([[1.0], [-1.0]]), half, half)
    >>> TwoPoints().transform(torch.square, torch.tensor([[3.0]]), torch.tensor([[[0.25]]])).mean
    tensor([[9.2500]])
    """

    @abstractmethod
    def unit_points(self, d: int) -> SigmaPoints:
        """Points and weights with Σw = 1 in the mean, and Σ w ξ = 0, Σ w ξξᵀ = I in the covariance."""

    def transform(
        self,
        function: Function,
        mean: Tensor,
        covariance: Tensor,
        angles: tuple[int, ...] = (),
        size: int | None = None,
    ) -> PropagatedMoments:
        points, weights, spread_weights = _points(self, mean.shape[-1], mean.dtype, mean.device)
        root = semidefinite_root(covariance.movedim(0, -1))  # (d, d, n)
        x = mean.mT[:, None] + torch.matmul(points, root)  # (d, s, n)
        z = function(x.movedim(0, -1)).movedim(-1, 0).contiguous()  # (k, s, n)
        centre = _centre(z, weights, angles)
        offsets = wrap(z - centre[:, None], angles)
        expected = torch.matmul(weights, offsets)  # about the centre, lest large weights of both signs round it away
        offsets = wrap(offsets - expected[:, None], angles)
        slopes = torch.matmul(spread_weights * points.mT, offsets)  # (k, d, n)
        rest = offsets - torch.matmul(points, slopes)
        curved = product(rest * spread_weights[:, None], rest.transpose(0, 1))
        covariance = product(slopes, slopes.transpose(0, 1)) + curved
        cross = product(root, slopes.transpose(0, 1))
        last = (covariance.movedim(-1, 0), cross.movedim(-1, 0), curved.movedim(-1, 0))
        return PropagatedMoments((centre + expected).mT, *last)


@lru_cache(maxsize=64)
def _points(rule: SigmaPointRule, d: int, dtype: torch.dtype, device: torch.device) -> SigmaPoints:
    with torch.inference_mode(False):
        return SigmaPoints(*(part.to(dtype=dtype, device=device) for part in rule.unit_points(d)))


def _centre(z: Tensor, weights: Tensor, angles: tuple[int, ...]) -> Tensor:
    """A point (k, n) among the values (k, s, n): the first, or the direction of their sum on the circle."""
    centre = z[:, 0]
    if not angles:
        return centre
    size = weights.abs()
    turns = {k: torch.atan2(size @ z[k].sin(), size @ z[k].cos()) for k in angles}
    return torch.stack([turns.get(k, centre[k]) for k in range(len(centre))])


def wrap(differences: Tensor, angles: tuple[int, ...]) -> Tensor:
    """The entries (k, …) that are angles moved into [−π, π) by whole turns.

    >>> import torch
    >>> wrap(torch.tensor([4.0, 4.0]), (1,))
    tensor([ 4.0000, -2.2832])
    """
    if not angles:
        return differences
    rows = list(differences.unbind())
    for k in angles:
        rows[k] = rows[k] - 2 * pi * torch.floor((rows[k].detach() + pi) / (2 * pi))
    return torch.stack(rows)


@final
@dataclass(frozen=True)
class Unscented(SigmaPointRule):
    """Scaled sigma points (van der Merwe): 2d+1 of them, symmetric about the mean.

        λ = α²(d + κ) − d,    ξ = 0, ±√(d+λ) e_k,    w_0 = λ/(d+λ) in the mean, + 1 − α² + β in the covariance,
        all others 1/(2(d+λ))

    A small α keeps the points near the mean, β = 2 is best for normal laws, κ = 3 − d is Julier's choice with α = 1.
    Weights grow as 1/α²: below 1e-2 single precision is lost.

    >>> import torch
    >>> z = Unscented(alpha=1.0, kappa=2.0).transform(lambda x: x**2, torch.tensor([[3.0]]), torch.tensor([[[0.5]]]))
    >>> z.mean, z.cross                                                                       # 3² + ½, 2 · 3 · ½
    (tensor([[9.5000]]), tensor([[[3.0000]]]))
    """

    alpha: float = 0.1
    beta: float = 2.0
    kappa: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(sentence("Unscented.alpha", "a number in (0, 1]", self.alpha, "0.1 is the default."))

    def unit_points(self, d: int) -> SigmaPoints:
        scale = self.alpha**2 * (d + self.kappa)  # d + λ
        if not scale > 0:
            raise ValueError(sentence("Unscented.kappa", f"more than −d = −{d}", self.kappa, "0 or 3 − d are usual."))
        eye = torch.eye(d, dtype=torch.float64)
        weights = torch.full((2 * d + 1,), 1 / (2 * scale), dtype=torch.float64)
        weights[0] = 1 - d / scale
        spread = weights.clone()
        spread[0] += 1 - self.alpha**2 + self.beta
        return SigmaPoints(sqrt(scale) * torch.cat([0 * eye[:1], eye, -eye]), weights, spread)


@final
@dataclass(frozen=True)
class Cubature(SigmaPointRule):
    """2d points ξ = ±√d e_k of weight 1/(2d), the spherical–radial rule of third degree; no weight is negative.

        E[g(x)] ≈ (1/2d) Σ_k g(m + √d L_k) + g(m − √d L_k)

    >>> import torch
    >>> z = Cubature().transform(lambda x: x**2, torch.tensor([[3.0]]), torch.tensor([[[0.5]]]))
    >>> z.mean, z.cross
    (tensor([[9.5000]]), tensor([[[3.0000]]]))
    """

    def unit_points(self, d: int) -> SigmaPoints:
        eye = sqrt(d) * torch.eye(d, dtype=torch.float64)
        weights = torch.full((2 * d,), 1 / (2 * d), dtype=torch.float64)
        return SigmaPoints(torch.cat([eye, -eye]), weights, weights)


@final
@dataclass(frozen=True)
class GaussHermite(SigmaPointRule):
    """A grid of the ``order`` roots of Hermite's polynomial in every direction, orderᵈ points.

        E[g(x)] ≈ Σ w_{i1} ⋯ w_{id} g(m + L (ξ_{i1}, …, ξ_{id}))      exact for polynomials up to 2·order − 1 in each ξ

    >>> import torch
    >>> z = GaussHermite(order=3).transform(lambda x: x**2, torch.tensor([[3.0]]), torch.tensor([[[0.5]]]))
    >>> z.mean, z.covariance                                                                      # 4 m² P + 2 P²
    (tensor([[9.5000]]), tensor([[[18.5000]]]))
    """

    order: int = 3

    def __post_init__(self) -> None:
        require_integer("GaussHermite.order", self.order, 2, 64)

    def unit_points(self, d: int) -> SigmaPoints:
        if self.order**d > GRID:
            advice = "Use a lower order, Cubature or Unscented."
            raise ValueError(sentence("GaussHermite", f"at most {GRID} points", f"{self.order}^{d}", advice))
        roots, masses = np.polynomial.hermite_e.hermegauss(self.order)
        grid = np.stack(np.meshgrid(*[roots] * d, indexing="ij"), -1).reshape(-1, d)
        weights = np.stack(np.meshgrid(*[masses / masses.sum()] * d, indexing="ij"), -1).reshape(-1, d).prod(-1)
        return SigmaPoints(torch.from_numpy(grid), torch.from_numpy(weights), torch.from_numpy(weights))
