"""Anderson acceleration: the next point is the best affine combination of the last few.

α = argmin |Σ_i α_i (f(x_i) − x_i)|²  subject to  Σ_i α_i = 1,      x⁺ = Σ_i α_i ((1−g) x_i + g f(x_i))

Where a sample is a sequence and f is causal, α may be taken for each token from the residuals up to it: then no iterate
of a token depends on later ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence


class AndersonState(NamedTuple):
    """Ring buffers of the last iterates and their images, and how many slots are filled."""

    x: Tensor  # (samples, memory, features)
    fx: Tensor
    filled: int


@dataclass(frozen=True)
class Anderson:
    """Anderson acceleration, x⁺ = Σ_i α_i ((1−g) x_i + g f(x_i)) with the α of least residual |Σ_i α_i (f(x_i) − x_i)|.

    memory past points, mixing gate g, and a ridge relative to the residuals that keeps α bounded.

    >>> import torch
    >>> from cumulant import Picard, fixed_point
    >>> x = torch.ones(1, dtype=torch.float64)
    >>> [int(fixed_point(torch.cos, x, solver=solver).steps) for solver in (Picard(), Anderson())]
    [55, 11]

    width  features of a token, where features are tokens one after the other and α must not depend on later ones;
           None: one α for the whole sample
    """

    memory: int = 5
    gate: float = 1.0
    ridge: float = 1e-10
    width: int | None = None

    def __post_init__(self):
        if self.memory < 1:
            raise ValueError(sentence("Anderson.memory", "a positive integer", self.memory, "5 is usual."))

    def init(self, x: Tensor) -> AndersonState:
        empty = x.new_zeros(x.shape[0], self.memory, x.shape[1])
        return AndersonState(empty, empty.clone(), 0)

    def step(self, state: AndersonState, x: Tensor, fx: Tensor) -> tuple[AndersonState, Tensor]:
        state = AndersonState(_push(state.x, x), _push(state.fx, fx), min(state.filled + 1, self.memory))
        width = self.width or x.shape[1]
        xs, fxs = (past[:, : state.filled].unflatten(-1, (-1, width)).transpose(1, 2) for past in (state.x, state.fx))
        residuals = fxs - xs  # (samples, tokens, m, width)
        gram = (residuals @ residuals.mT).cumsum(1)
        scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        eye = torch.eye(state.filled, dtype=x.dtype, device=x.device)
        gram = gram / scale[..., None] + self.ridge * eye
        alpha, failed = torch.linalg.solve_ex(gram, torch.ones_like(gram[..., :1]))
        alpha = alpha / alpha.sum(-2, keepdim=True)
        usable = (failed == 0) & alpha.isfinite().all(-2).squeeze(-1)
        mixed = (alpha.mT @ (xs + self.gate * residuals)).squeeze(-2)  # (samples, tokens, width)
        return state, torch.where(usable[..., None], mixed, fx.unflatten(-1, (-1, width))).flatten(1)


def _push(buffer: Tensor, newest: Tensor) -> Tensor:
    return torch.cat([newest[:, None], buffer[:, :-1]], dim=1)
