"""Terms to add to a loss that keep attention from running away: its log-normalizer small, its entropy above a floor.

Both take what `attend` and `MultiheadAttention.attend` return per query, and are differentiable through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_device, require_float, sentence, shape


def z_loss(log_normalizer: Tensor, weight: float = 1e-4, *, rows: Tensor | None = None) -> Tensor:
    """Draws log-normalizers towards 0, so that scores cannot drift to where softmax saturates.

        weight · mean_i G_i²

    A shift of all scores of a query changes G and not attention: the term takes this freedom away. Queries that see no
    key (G = −∞) are left out, as are those where ``rows`` is False.

    log_normalizer  any shape, one per query
    weight          ≥ 0
    rows            Boolean, broadcastable to it: True where the query is a token

    Returns a scalar, 0 if no query is left.

    >>> import torch
    >>> z_loss(torch.tensor([1.0, 3.0, -torch.inf]), weight=0.1)
    tensor(0.5000)
    """
    g = require_float("z_loss.log_normalizer", log_normalizer)
    _weight("z_loss.weight", weight)
    counted = _rows("z_loss.rows", rows, g) & (g != -torch.inf)
    return weight * _mean(torch.where(counted, g, 0).square(), counted)


def entropy_floor(
    entropy: Tensor, floor: float | Tensor, weight: float = 1e-2, *, rows: Tensor | None = None
) -> Tensor:
    """Costs nothing while a query looks widely enough, and grows with the square of what its entropy lacks.

        weight · mean_i max(0, floor_i − H_i)²

    The entropy of a query that sees N keys is at most log N: a floor above that can never be reached, so give one per
    query (a share of log N) where N varies, and leave out by ``rows`` the queries that see a single key.

    entropy  any shape, in nats, one per query
    floor    ≥ 0, a number or a tensor broadcastable to entropy
    weight   ≥ 0
    rows     Boolean, broadcastable to entropy: True where the query counts

    Returns a scalar, 0 if no query is left.

    >>> import torch
    >>> entropy_floor(torch.tensor([0.5, 2.0]), floor=1.5, weight=0.1)
    tensor(0.0500)
    """
    h = require_float("entropy_floor.entropy", entropy)
    _weight("entropy_floor.weight", weight)
    if isinstance(floor, Tensor):
        require_alike("entropy_floor.floor", require_float("entropy_floor.floor", floor), "entropy", h)
        _broadcasts("entropy_floor.floor", floor, h)
    if not (holds(floor >= 0) if isinstance(floor, Tensor) else floor >= 0):
        raise ValueError(sentence("entropy_floor.floor", "nats, 0 or more", floor, "0 is no floor."))
    counted = _rows("entropy_floor.rows", rows, h)
    return weight * _mean((floor - h).clamp_min(0).square(), counted)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, 0).sum() / counted.sum().clamp_min(1)


def _weight(where: str, weight: float) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError(sentence(where, "a finite number, 0 or more", weight, "0 switches the term off."))


def _rows(where: str, rows: Tensor | None, values: Tensor) -> Tensor:
    if rows is None:
        return torch.ones_like(values, dtype=torch.bool)
    if not isinstance(rows, Tensor) or rows.dtype != torch.bool:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(sentence(where, "a Boolean tensor", got, "True where the query counts."))
    _broadcasts(where, rows, values)
    require_device(where, rows, "the statistics", values)
    return rows.expand(values.shape)


def _broadcasts(where: str, tensor: Tensor, values: Tensor) -> None:
    sizes = zip(reversed(tensor.shape), reversed(values.shape), strict=False)
    if tensor.ndim > values.ndim or any(mine not in (1, theirs) for mine, theirs in sizes):
        expected = f"a shape that broadcasts to {shape(values)}"
        raise ValueError(sentence(where, expected, shape(tensor), "One entry per query, or 1."))
