"""The free energy of states at a temperature, and its two parts (S3-F1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.kernels.autocast import autocast_float32
from cumulant.kernels.dense import accumulate, normalize
from cumulant.typing import PerQuery


class FreeEnergy(NamedTuple):
    """value F, mean_energy ⟨E⟩ and entropy S, each (...), with F = ⟨E⟩ − T S."""

    value: PerQuery
    mean_energy: PerQuery
    entropy: PerQuery


def free_energy(
    energies: Tensor, *, temperature: float | Tensor = 1.0, log_weights: Tensor | None = None
) -> FreeEnergy:
    """The free energy of states at a temperature, and its two parts (S3-F1).

        F = −T log Σ_n e^{w_n − E_n/T} = ⟨E⟩ − T S,      S = −Σ p log(p/e^w),      p_n ∝ e^{w_n − E_n/T}

    energies     (..., n); +inf forbids a state
    temperature  T > 0, a number or a tensor that broadcasts to (...)
    log_weights  (..., n) or (n,): degeneracies of the states; S is then the entropy relative to them, at most log Σe^w

    With E_n = −⟨q,k_n⟩ and T = 1/β it is −G(βq)/β: attention that ascends G descends F. Differentiable;
    ∂F/∂E = p and ∂F/∂T = −S. Without states F = +inf, ⟨E⟩ = S = 0 and the gradient is 0.

    >>> import torch
    >>> parts = free_energy(torch.tensor([0.0, 1.0], dtype=torch.float64), temperature=2.0)
    >>> [round(x.item(), 12) for x in parts]
    [-0.94815396836, 0.377540668798, 0.662847318579]
    """
    (energies,), (log_weights,) = autocast_float32(energies), autocast_float32(log_weights)
    e = accumulate(require_float("free_energy.energies", energies))
    if e.ndim == 0 or not holds(e > -torch.inf):  # also false for NaN
        got = shape(e) if e.ndim == 0 else "NaN or -inf"
        raise ValueError(sentence("free_energy.energies", "(..., n) values above -inf", got, "+inf forbids a state."))
    t = _temperature(temperature, e)
    w = log_weights_of("free_energy.log_weights", log_weights, energies)
    absent = (e == torch.inf) if w is None else (e == torch.inf) | (w == -torch.inf)
    e = torch.where(absent, 0, e)
    present = torch.where(absent, torch.inf, e)
    floor = present.amin(-1, keepdim=True).detach() if e.shape[-1] else e.sum(-1, keepdim=True)
    floor = torch.where(floor.isfinite(), floor, 0)
    score = (floor - e) / t[..., None]  # ≤ 0, so that small temperatures cost no digits
    g, p = normalize(torch.where(absent, -torch.inf, score if w is None else score + torch.where(absent, 0, w)))
    empty = g == -torch.inf
    g = torch.where(empty, 0, g)
    surprise = torch.where(p > 0, score, 0) - g[..., None]
    value = torch.where(empty, torch.inf, floor[..., 0] - t * g)
    return FreeEnergy(value, (p * e).sum(-1), -(p * surprise).sum(-1))


def _temperature(temperature: float | Tensor, energies: Tensor) -> Tensor:
    t = torch.as_tensor(temperature, dtype=energies.dtype, device=energies.device)
    if not holds((t > 0) & t.isfinite()):
        got = temperature if t.ndim == 0 else f"values from {t.min()} to {t.max()}"
        advice = "The limit T → 0 is energies.min(-1)."
        raise ValueError(sentence("free_energy.temperature", "positive finite numbers", got, advice))
    broadcast("free_energy.temperature", t.shape, energies.shape[:-1])
    return t


def log_weights_of(where: str, log_weights: Tensor | None, table: Tensor) -> Tensor | None:
    """Log weights that broadcast with a table (..., n)."""
    if log_weights is None:
        return None
    require_alike(where, require_float(where, log_weights), "the table they weigh", table)
    if log_weights.ndim == 0 or log_weights.shape[-1] != table.shape[-1] or not holds(log_weights < torch.inf):
        expected = f"shape (..., n={table.shape[-1]}) with values below +inf"
        raise ValueError(sentence(where, expected, shape(log_weights), "log 0 = -inf removes an atom."))
    broadcast(where, log_weights.shape[:-1], table.shape[:-1])
    return accumulate(log_weights)
