"""Resampling: weighted particles to equally weighted ones, without moving any of them.

    ancestors a_1 … a_N  with  E[#{k : a_k = i}] = N p_i,     p = softmax(log_weights)

All three schemes put N points into [0, 1) and read the cumulative weights backwards there; they differ in the points.

| scheme      | points                  | variance of a count, f = N p_i − ⌊N p_i⌋                       |
|-------------|-------------------------|----------------------------------------------------------------|
| multinomial | N independent           | N p_i (1 − p_i)                                                |
| stratified  | one in each [k, k+1)/N  | Σ_k o_k(1 − o_k), o_k the part of stratum k that i covers      |
| systematic  | (k + U)/N with one U    | f (1 − f): every count is ⌊N p_i⌋ or ⌈N p_i⌉                   |
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, require_log_weights, sentence, shape


@runtime_checkable
class Scheme(Protocol):
    """A resampling scheme: log weights (*batch, n) → indices (*batch, count)."""

    def __call__(self, log_weights: Tensor, count: int | None = None, *, generator: torch.Generator) -> Tensor: ...


def systematic(log_weights: Tensor, count: int | None = None, *, generator: torch.Generator) -> Tensor:
    """Ancestors from N equidistant points with one random offset: the fewest random numbers, the smallest variance.

    log_weights (*batch, n), −inf for particles that must not survive; count is N, n by default.
    Returns indices (*batch, N), ascending.

    >>> import torch
    >>> w = torch.tensor([0.5, 0.25, 0.0, 0.25]).log()
    >>> systematic(w, generator=torch.Generator().manual_seed(0))         # counts 2, 1, 0, 1 whatever the seed
    tensor([0, 0, 1, 3])
    """
    return _ancestors("systematic", log_weights, count, generator, _one_offset)


def stratified(log_weights: Tensor, count: int | None = None, *, generator: torch.Generator) -> Tensor:
    """Ancestors (*batch, N) from one random point in each of N equal strata; arguments as in `systematic`.

    >>> import torch
    >>> stratified(torch.zeros(3), generator=torch.Generator().manual_seed(0))      # equal weights: each survives once
    tensor([0, 1, 2])
    """
    return _ancestors("stratified", log_weights, count, generator, _one_per_stratum)


def multinomial(log_weights: Tensor, count: int | None = None, *, generator: torch.Generator) -> Tensor:
    """N independent ancestors (*batch, N); arguments as in `systematic`.

    >>> import torch
    >>> multinomial(torch.tensor([-torch.inf, 0.0]), 3, generator=torch.Generator().manual_seed(0))
    tensor([1, 1, 1])
    """
    return _ancestors("multinomial", log_weights, count, generator, _independent)


def effective_size(log_weights: Tensor) -> Tensor:
    """1/Σp² with p = softmax(log_weights): how many equally weighted particles carry as much;  (*batch, n) → (*batch).

    n for equal weights, 1 where one particle has all the weight, 0 where none has any.

    >>> import torch
    >>> effective_size(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(2.)
    """
    w = _weights("effective_size.log_weights", log_weights)
    top = w.amax(-1, keepdim=True)
    e = torch.exp(w - torch.where(top.isfinite(), top, 0))
    square = e.square().sum(-1)
    return torch.where(square > 0, e.sum(-1).square() / torch.where(square > 0, square, 1), 0)


def require_generator(where: str, generator: object) -> torch.Generator:
    """Randomness is an argument of every sampler; there is no default to fall back on."""
    if not isinstance(generator, torch.Generator):
        got, advice = type(generator).__name__, "Pass torch.Generator().manual_seed(...)."
        raise TypeError(sentence(f"{where}.generator", "a torch.Generator", got, advice))
    return generator


def _one_offset(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return _uniform(like, 1, generator) + torch.arange(count, dtype=like.dtype, device=like.device)


def _one_per_stratum(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return _uniform(like, count, generator) + torch.arange(count, dtype=like.dtype, device=like.device)


def _independent(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return _uniform(like, count, generator).sort(-1).values * count


def _uniform(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(*like.shape[:-1], count, dtype=like.dtype, device=like.device, generator=generator)


def _weights(where: str, log_weights: Tensor) -> Tensor:
    w = require_float(where, log_weights)
    if w.ndim == 0 or w.shape[-1] == 0:
        raise ValueError(sentence(where, "shape (*batch, n ≥ 1)", shape(w), "Particles go on the last axis."))
    require_log_weights(where, w)
    return w


def _ancestors(
    name: str,
    log_weights: Tensor,
    count: int | None,
    generator: torch.Generator,
    points: Callable[[Tensor, int, torch.Generator], Tensor],
) -> Tensor:
    w = _weights(f"{name}.log_weights", log_weights).detach().double()
    count = w.shape[-1] if count is None else count
    if not isinstance(count, int) or count < 1:
        raise ValueError(sentence(f"{name}.count", "a number of ancestors ≥ 1", count, "None keeps the number."))
    require_generator(name, generator)
    top = w.amax(-1, keepdim=True)
    if not holds(top > -torch.inf):
        got, advice = "a row of -inf", "A row without weight has no ancestors to draw."
        raise ValueError(sentence(f"{name}.log_weights", "at least one particle with weight per row", got, advice))
    cumulative = torch.exp(w - top).cumsum(-1)
    cumulative = cumulative * (count / cumulative[..., -1:])  # in units of one ancestor
    ancestors = torch.searchsorted(cumulative, points(w, count, generator).contiguous(), right=True)
    # a point that rounding puts on the end belongs to the last particle with weight
    order = torch.arange(w.shape[-1], device=w.device)
    last = torch.where(w > -torch.inf, order, 0).amax(-1, keepdim=True)
    return torch.minimum(ancestors, last)
