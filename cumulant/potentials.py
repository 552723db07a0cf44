"""Heads and units as one convex potential, whose gradient a layer adds to the stream (X-12, X-13, X-14; S1-A5).

    heads   Φ(η) = Σ_h G_h(W_h η)                 ∇Φ = Σ_h W_hᵀ attention_h(W_h η)     `multihead`: a convolution
    units   Ψ(η) = Σ_k log(1 + e^{⟨w_k,η⟩+b_k})   ∇Ψ = Wᵀ sigmoid(Wη + b)              `Units`: a convolution too
    ReLU    Ψ(η) = ½ Σ_k relu(⟨w_k,η⟩ + b_k)²     ∇Ψ = Wᵀ relu(Wη + b)                 `ReluSquare`: convex, no measure
    block   η + ∇(Φ + Ψ)(η)                       log det(I + ∇²(Φ + Ψ)) ≥ 0           `Block`: heads beside units

The weights are tied: the matrix that reads is the transpose of the one that writes. Trained layers need not be tied;
GELU and SiLU have a potential that is not convex, gated units have none. `least_slope` and `asymmetry` measure that.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.kernels.dense import accumulate
from cumulant.measures import Hull, Measure, convolve, per_query
from cumulant.measures.dual import scale_and_span
from cumulant.measures.transform import add_logs
from cumulant.residual import AscentStep
from cumulant.special import log_det_plus_identity
from cumulant.typing import Draws, Matrices, PerQuery, Queries


@dataclass(frozen=True, eq=False, repr=False)
class _UnitLayer:
    """Weight (*batch, H, d) and bias (*batch, H) of a layer of H units; a bias of −inf switches a unit off."""

    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self):
        name = type(self).__name__
        w = require_float(f"{name}.weight", self.weight)
        if w.ndim < 2:
            advice = "One row per unit, as nn.Linear.weight: weight[None] for one unit."
            raise ValueError(sentence(f"{name}.weight", "shape (*batch, H, d)", shape(w), advice))
        require_finite(f"{name}.weight", w)
        if self.bias is None:
            return
        b = require_float(f"{name}.bias", self.bias)
        require_alike(f"{name}.bias", b, "weight", w)
        if b.ndim < 1 or b.shape[-1] != w.shape[-2]:
            expected = f"shape (*batch, H={w.shape[-2]})"
            raise ValueError(sentence(f"{name}.bias", expected, shape(b), "One number per unit."))
        broadcast(f"{name}.bias", w.shape[:-2], b.shape[:-1])
        if not holds(b < torch.inf):
            advice = "A bias is the logarithm of a mass; -inf switches a unit off."
            raise ValueError(sentence(f"{name}.bias", "values below +inf", "NaN or +inf", advice))

    @property
    def dim(self) -> int:
        return self.weight.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        own = self.weight.shape[:-2]
        return own if self.bias is None else broadcast("batch_shape", own, self.bias.shape[:-1])

    def _drive(self, eta: Tensor) -> Tensor:
        """Wη + b:  (*batch, q, d) → (*batch, q, H)"""
        z = accumulate(eta) @ accumulate(self.weight).mT
        return z if self.bias is None else z + accumulate(self.bias)[..., None, :]

    def _congruence(self, diagonal: Tensor) -> Tensor:
        """Wᵀ diag(a) W:  (*batch, q, H) → (*batch, q, d, d)"""
        w = accumulate(self.weight)[..., None, :, :]
        return w.mT @ (diagonal[..., None] * w)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Units(_UnitLayer, Measure):
    """A layer of sigmoid units: the convolution of two-atom measures {0, w_k} with masses 1 and e^{b_k} (X-13).

        G(η) = Σ_k softplus(⟨w_k,η⟩ + b_k) = log Σ_{s∈{0,1}^H} e^{⟨Wᵀs,η⟩ + ⟨b,s⟩}
        ∇G = Wᵀ sigmoid(Wη + b),      ∇²G = Wᵀ diag(σ(1−σ)) W

    2^H atoms in O(H): the log-marginal of a restricted Boltzmann machine over its H hidden units. With b = 0 the mass
    is 2^H, with H = 0 it is a unit mass at 0.

    weight  (*batch, H, d), finite
    bias    (*batch, H), 0 if None; −inf switches a unit off

    >>> import torch
    >>> h = Units(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    >>> h.mean(torch.zeros(2)), h.log_mass
    (tensor([0.5000, 1.0000]), tensor(1.3863))
    """

    @per_query
    def log_normalizer(self, eta: Queries) -> PerQuery:
        return -logsigmoid(-self._drive(eta)).sum(-1).to(eta.dtype)  # torch's softplus is cut off at 20

    @per_query
    def mean(self, eta: Queries) -> Queries:
        return (torch.sigmoid(self._drive(eta)) @ accumulate(self.weight)).to(eta.dtype)

    def _variances(self, eta: Tensor) -> Tensor:
        z = self._drive(eta)
        return torch.sigmoid(z) * torch.sigmoid(-z)

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        w = accumulate(self.weight)
        return ((self._variances(eta) * (accumulate(v) @ w.mT)) @ w).to(eta.dtype)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        return self._congruence(self._variances(eta)).to(eta.dtype)

    @per_query
    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        """Every unit fires on its own."""
        on = torch.sigmoid(self._drive(eta))[..., None, :].expand(*eta.shape[:-1], n, -1)  # (*batch, q, n, H)
        fired = torch.bernoulli(on, generator=generator)
        return (fired @ accumulate(self.weight)[..., None, :, :]).to(eta.dtype)

    def hull(self) -> Hull:
        """The zonotope of the units that can fire, whatever their biases: bounds of the units add."""
        b = self.weight.new_zeros(self.weight.shape[-2]) if self.bias is None else self.bias
        fires = (b > -torch.inf).expand(*self.batch_shape, -1)
        w = torch.where(fires[..., None], self.weight, 0)
        diameter, span = scale_and_span(w.mT @ w / 4)
        bound = torch.where(fires, (-b).clamp_min(0), 0).sum(-1)
        return Hull(diameter[..., None], span[..., None, :, :], bound[..., None])


def multihead(measures: Sequence[Measure], weights: Sequence[Tensor]) -> Measure:
    """Heads that read and write one stream with tied weights: the convolution of their images (X-12).

        G(η) = Σ_h G_h(W_h η),      ∇G = Σ_h W_hᵀ ∇G_h(W_h η),      ∇²G = Σ_h W_hᵀ ∇²G_h W_h

    measures  one per head, h_h on R^{d_h}
    weights   one per head, W_h (*batch, d_h, d)

    Standard multi-head attention moves along this gradient iff W_{O,h} W_{V,h} = W_{Q,h}ᵀ W_{K,h} for every head. Where
    one head has no atoms the whole convolution has none: G = −inf and mean 0; `Block` leaves such a head out instead.

    >>> import torch
    >>> from cumulant import Empirical
    >>> heads = [Empirical(torch.tensor([[0.0], [1.0]])), Empirical(torch.tensor([[0.0], [2.0]]))]
    >>> multihead(heads, [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])]).mean(torch.zeros(2))
    tensor([1.5000, 1.0000])
    """
    measures, weights = tuple(measures), tuple(weights)
    if not measures or len(measures) != len(weights):
        got = f"{len(measures)} measures and {len(weights)} weights"
        raise ValueError(sentence("multihead.weights", "one weight per measure, and one of each", got, "Pair them."))
    images = []
    for i, (h, w) in enumerate(zip(measures, weights, strict=True)):
        if not isinstance(h, Measure):
            got, advice = type(h).__name__, "Wrap keys in Empirical(...)."
            raise TypeError(sentence(f"multihead.measures[{i}]", "a measure", got, advice))
        where = f"multihead.weights[{i}]"
        if require_float(where, w).ndim < 2 or w.shape[-2] != h.dim:
            raise ValueError(sentence(where, f"shape (*batch, d_h={h.dim}, d)", shape(w), "Rows match the head."))
        images.append(w.mT @ h)
    return convolve(*images)


class Potential(ABC):
    """A convex function of η with its gradient and Hessian. Abstract; `ReluSquare` and `Block` are final.

    η is (*batch, q, d), or (d,) for a single query. A `Measure` has the same under log_normalizer, mean and fisher.
    """

    dim: int

    @abstractmethod
    def value(self, eta: Queries) -> PerQuery:
        """(*batch, q, d) → (*batch, q)"""

    @abstractmethod
    def gradient(self, eta: Queries) -> Queries:
        """(*batch, q, d) → (*batch, q, d): what the layer adds to the stream"""

    @abstractmethod
    def hessian(self, eta: Queries) -> Matrices:
        """(*batch, q, d) → (*batch, q, d, d), positive semidefinite"""

    def step(self, eta: Queries) -> AscentStep:
        """η + ∇(η) and log det(I + ∇²) ≥ 0: one step of ascent on a convex potential expands (X-1, X-14)."""
        volume = log_det_plus_identity(accumulate(self.hessian(eta)))
        return AscentStep(eta + self.gradient(eta), volume.to(eta.dtype))


@final
@dataclass(frozen=True, eq=False)
class ReluSquare(_UnitLayer, Potential):
    """A layer of ReLU units as a gradient: convex, but the log-normalizer of no measure (X-13).

        Ψ(η) = ½ Σ_k relu(⟨w_k,η⟩ + b_k)²,      ∇Ψ = Wᵀ relu(Wη + b),      ∇²Ψ = Wᵀ diag(1[Wη + b > 0]) W

    A log-normalizer is analytic inside its domain, so that one with a second derivative that jumps does not exist: no h
    has Ψ, and there is nothing to sample. On the kink of a unit its part of the Hessian is 0.

    weight (*batch, H, d), finite; bias (*batch, H), 0 if None, −inf switches a unit off.

    >>> import torch
    >>> psi = ReluSquare(torch.tensor([[2.0]]))
    >>> psi.value(torch.tensor([3.0])), psi.gradient(torch.tensor([3.0])), psi.gradient(torch.tensor([-3.0]))
    (tensor(18.), tensor([12.]), tensor([0.]))
    """

    def _active(self, eta: Tensor, method: str) -> Tensor:
        """relu(Wη + b):  (*batch, q, H)"""
        where = f"ReluSquare.{method}"
        require_alike(where, require_float(where, eta), "weight", self.weight)
        if eta.ndim == 0 or eta.shape[-1] != self.dim:
            expected = f"queries of shape (*batch, q, d={self.dim}) or (d={self.dim},)"
            raise ValueError(sentence(where, expected, shape(eta), "Check the last axis."))
        broadcast(where, self.batch_shape, eta.shape[:-2])
        rows = eta[None] if eta.ndim == 1 else eta
        return torch.relu(self._drive(rows))

    def value(self, eta: Queries) -> PerQuery:
        value = (self._active(eta, "value").square().sum(-1) / 2).to(eta.dtype)
        return value[..., 0] if eta.ndim == 1 else value

    def gradient(self, eta: Queries) -> Queries:
        gradient = (self._active(eta, "gradient") @ accumulate(self.weight)).to(eta.dtype)
        return gradient[..., 0, :] if eta.ndim == 1 else gradient

    def hessian(self, eta: Queries) -> Matrices:
        active = self._active(eta, "hessian")
        hessian = self._congruence((active > 0).to(active.dtype)).to(eta.dtype)
        return hessian[..., 0, :, :] if eta.ndim == 1 else hessian


@final
@dataclass(frozen=True, eq=False)
class Block(Potential):
    """Heads and units side by side on one stream: the sum of their potentials (X-14).

        value = Σ_i Φ_i(η),      gradient = Σ_i ∇Φ_i(η),      step = η + gradient

    parts  measures (Φ = G: `multihead`, `Units`, anything) and potentials, all on R^d

    The parallel block is one ascent step. A sequential block, heads first and units after, is two steps on different
    potentials: expansive still, with log-volumes that add, but the gradient of nothing. A part without mass at a query
    (a head to which no key is visible) makes the value −inf and adds nothing to gradient and Hessian.

    >>> import torch
    >>> block = Block((Units(torch.eye(2)), ReluSquare(torch.eye(2))))
    >>> block.step(torch.tensor([0.0, 1.0]))                              # log(1 + ¼) + log(2 + 0.1966)
    AscentStep(eta=tensor([0.5000, 2.7311]), log_volume=tensor(1.0101))
    """

    parts: Sequence[Measure | Potential]

    def __post_init__(self):
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError(sentence("Block.parts", "at least one part", "none", "Pass measures or potentials."))
        for part in self.parts:
            if not isinstance(part, Measure | Potential):
                advice = "Wrap keys in Empirical(...), weights in Units(...)."
                raise TypeError(sentence("Block.parts", "measures and potentials", type(part).__name__, advice))
        dims = [part.dim for part in self.parts]
        if len(set(dims)) > 1:
            advice = "Bring heads to the stream with multihead(...)."
            raise ValueError(sentence("Block.parts", "parts of equal dim", f"dims {dims}", advice))

    @property
    def dim(self) -> int:
        return self.parts[0].dim

    def value(self, eta: Queries) -> PerQuery:
        return add_logs(*(p.log_normalizer(eta) if isinstance(p, Measure) else p.value(eta) for p in self.parts))

    def gradient(self, eta: Queries) -> Queries:
        each = (p.mean(eta) if isinstance(p, Measure) else p.gradient(eta) for p in self.parts)
        return functools.reduce(torch.add, each)

    def hessian(self, eta: Queries) -> Matrices:
        each = (p.fisher(eta) if isinstance(p, Measure) else p.hessian(eta) for p in self.parts)
        return functools.reduce(torch.add, each)


def least_slope(
    activation: Callable[[Tensor], Tensor], low: float = -6.0, high: float = 6.0, points: int = 20_001
) -> float:
    """The smallest derivative min_t f′(t) of a scalar activation f on a grid low ≤ t ≤ high, in float64.

    Wᵀ f(Wη + b) is the gradient of a convex function for every W iff f never falls. GELU (−0.1289) and SiLU (−0.0998)
    do fall, so a layer of them can contract; sigmoid, ReLU and softplus do not (X-13).

    >>> import torch
    >>> round(least_slope(torch.nn.functional.gelu), 4), least_slope(torch.relu)
    (-0.1289, 0.0)
    """
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        got = f"{low} and {high}"
        raise ValueError(sentence("least_slope.low", "finite low < high", got, "Give the range that inputs take."))
    if points < 2:
        raise ValueError(sentence("least_slope.points", "at least 2 grid points", points, "The default is 20001."))
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    slopes = torch.func.vmap(torch.func.grad(activation))(grid)
    if not bool(slopes.isfinite().all()):
        expected, advice = f"finite slopes between {low} and {high}", "Choose a range inside its domain."
        raise ValueError(sentence("least_slope.activation", expected, "NaN or infinity", advice))
    return float(slopes.min())


def asymmetry(field: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """max |J − Jᵀ| of a vector field's Jacobian: 0 around x iff the field is a gradient there (Poincaré).

    field  maps one vector (d,) to one (d,), in torch operations
    x      (*batch, d), the points; the result is (*batch)

    `residual.gradientness` tests the weights of a head; this tests any layer: gated units, untied heads.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0])
    >>> asymmetry(torch.sin, x), asymmetry(lambda x: x.flip(-1) * x[0], x)
    (tensor(0.), tensor(1.))
    """
    require_finite("asymmetry.x", require_float("asymmetry.x", x))
    if x.ndim == 0:
        raise ValueError(sentence("asymmetry.x", "shape (*batch, d)", shape(x), "Add the axis: x[None]."))
    points = x.reshape(-1, x.shape[-1])
    if points.numel() == 0:
        return x.new_zeros(x.shape[:-1])
    out = field(points[0])
    if not isinstance(out, Tensor) or out.shape != points[0].shape:
        got = shape(out) if isinstance(out, Tensor) else type(out).__name__
        expected, advice = f"a map of ({x.shape[-1]},) to the same", "Take one vector at a time."
        raise ValueError(sentence("asymmetry.field", expected, got, advice))
    jacobian = torch.func.vmap(torch.func.jacrev(field))(points)
    return (jacobian - jacobian.mT).abs().amax((-2, -1)).reshape(x.shape[:-1])
