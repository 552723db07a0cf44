"""A layer is Renormalize ∘ Ascend: expansion, then contraction (S0-C4b, S1-A3, S1-A4).

    post-norm   x⁺ = RN(T(x))                        the state itself is renormalised
    pre-norm    x⁺ = x + (T(RN(x)) − RN(x))          the stream is not: it grows linearly, its angles slow down like 1/t

A layer is a `Stepper`: ``init(state) -> state`` and ``step(state) -> (state, info)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.dynamics.attention_step import Ascend
from cumulant.dynamics.checks import require_cloud
from cumulant.dynamics.renormalize import Renormalize, Unchanged
from cumulant.typing import PerQuery, Queries, Stepper

ORDERS = ("post", "pre")


# init(state) checks a state and puts it where the dynamics lives: particles (*batch, n, d), or a law
Dynamics = Stepper


class LayerInfo(NamedTuple):
    """Diagnostics of one step of a `Layer`; without gradient.

    growth      (*batch)  root mean square norm after the ascent, over that before it (pre-norm: of the stream)
    contraction (*batch)  the largest operator norm bound of the normaliser where it acted: below 1 it contracts
    moved       (*batch)  the largest displacement of a particle
    log_volume  (*batch)  mean of log|det(I ± γ s M C_i)| over the particles, None unless `Layer.volume`
    """

    growth: PerQuery
    contraction: PerQuery
    moved: PerQuery
    log_volume: PerQuery | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer of a transformer, W = I, for a cloud x (*batch, n, d).

    ascend       the residual step
    renormalize  the norm after it ("post") or before it ("pre")
    order        "post" or "pre"
    volume       True: `LayerInfo` carries log_volume, which costs a sweep with d²/2 values per particle

    >>> import torch
    >>> from cumulant.dynamics import Ascend, SphereNorm
    >>> layer = Layer(ascend=Ascend(), renormalize=SphereNorm())
    >>> x, info = layer.step(layer.init(torch.tensor([[2.0, 0.0], [0.0, 3.0]])))
    >>> x, info.growth                                                     # ((1 + a)² + (1 − a)²)^½, a = 1/(1 + e⁻¹)
    (tensor([[0.9881, 0.1535],
            [0.1535, 0.9881]]), tensor(1.7518))
    """

    ascend: Ascend
    renormalize: Renormalize = field(default_factory=Unchanged)
    order: str = "post"
    volume: bool = False

    def __post_init__(self):
        for name, kind in (("ascend", Ascend), ("renormalize", Renormalize)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                advice = f"Pass an instance of {kind.__name__}."
                raise TypeError(sentence(f"Layer.{name}", f"a {kind.__name__}", repr(value), advice))
        if self.order not in ORDERS:
            raise ValueError(sentence("Layer.order", "'post' or 'pre'", repr(self.order), "Pick one."))

    def init(self, state: Queries) -> Queries:
        """The initial state: the cloud itself (pre), or renormalised (post):  (*batch, n, d) → (*batch, n, d)."""
        x = require_cloud("Layer.init", state)
        return self.renormalize(x) if self.order == "post" else x

    def __call__(self, x: Queries) -> Queries:
        """The next cloud alone:  (*batch, n, d) → (*batch, n, d)."""
        return self._apply(x)[-1]

    def step(self, state: Queries) -> tuple[Queries, LayerInfo]:
        """The next cloud and diagnostics of the step; differentiable in the cloud."""
        inputs, grown, following = self._apply(state)
        with torch.no_grad():
            acted = grown if self.order == "post" else state
            bound = self.renormalize.operator_norm(acted.detach())
            info = LayerInfo(
                growth=_ratio(_size(grown), _size(state)),
                contraction=bound if self.renormalize.ensemble else bound.amax(-1),
                moved=torch.linalg.vector_norm(following - state, dim=-1).amax(-1),
                log_volume=self.ascend.log_volume(inputs).mean(-1) if self.volume else None,
            )
        return following, info

    def _apply(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input of the ascent, the cloud after the ascent, and the cloud after the layer."""
        if self.order == "post":
            grown = self.ascend(x)
            return x, grown, self.renormalize(grown)
        inputs = self.renormalize(x)
        grown = x + self.ascend.displacement(inputs)
        return inputs, grown, grown


def _size(x: Tensor) -> Tensor:
    return x.square().sum(-1).mean(-1).sqrt()


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 1 for a cloud that stays at the origin."""
    return torch.where((a == 0) & (b == 0), 1, a / torch.where((a == 0) & (b == 0), 1, b))
