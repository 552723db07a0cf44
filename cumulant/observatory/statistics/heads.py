"""What a head does to every token, from one attention call; definitions are in `quantities`."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels import Moments, moments
from cumulant.nn.calls import AttentionCall

FULL = ("mean", "entropy", "effective_atoms", "max_score", "value_trace", "atom_trace")


def head_quantities(call: AttentionCall, wanted: frozenset[str]) -> dict[str, Tensor]:
    """name → (batch, heads, q); NaN where the query is padding or sees no key."""
    cheap = wanted <= {"log_normalizer", "entropy"}
    if cheap and not call.capped:
        found = moments(call.eta, call.key, statistics=("entropy",), **call.support.arguments())
    else:
        found = moments(call.eta, call.key, call.value, statistics=FULL, **call.support.arguments())
    out = {"log_normalizer": found.log_normalizer, "entropy": found.entropy}
    if not cheap:
        out |= _further(call, found)
    blank = found.log_normalizer == -torch.inf
    if call.rows is not None:
        blank = blank | ~call.rows[:, None, :]
    return {name: value.masked_fill(blank, torch.nan) for name, value in out.items() if name in wanted}


def _further(call: AttentionCall, found: Moments) -> dict[str, Tensor]:
    g = found.log_normalizer
    seen, log_mass = call.support.visible_keys(call.eta, call.key.shape[-2])
    score = found.mean_log_weight if call.capped else found.mean_score  # a capped score is carried as a weight
    base = torch.log(seen) if call.capped else log_mass
    kl = score - g + base  # pyright: ignore[reportOptionalOperand]
    out = {
        "effective_atoms": found.effective_atoms,
        "kl_to_base": kl,
        "condensed": (kl > torch.log(seen) - 1).to(g.dtype),
        "first_mass": _first_mass(call, g),
        "collapse_loss": found.value_trace,
        "fisher_trace": call.scale * found.atom_trace,  # pyright: ignore[reportOperatorIssue]
        "max_score": found.max_score if not call.capped else torch.full_like(g, torch.nan),
    }
    if found.sink_mass is not None:
        out["sink_mass"] = found.sink_mass
    return out  # pyright: ignore[reportReturnType]


def _first_mass(call: AttentionCall, g: Tensor) -> Tensor:
    """p of the first key: e^{⟨η,k₀⟩ + w₀ − G}, 0 where it is hidden."""
    group = call.eta.shape[1] // call.key.shape[1]
    first = call.key[:, :, 0].repeat_interleave(group, 1)  # (batch, heads, d)
    logit = (call.eta @ first[..., None])[..., 0] - g
    weights, mask = call.support.log_weights, call.support.mask
    if weights is not None:
        logit = logit + weights[..., 0]
    if mask is not None:
        logit = logit.masked_fill(~mask[..., 0].expand(g.shape), -torch.inf)
    return logit.exp()
