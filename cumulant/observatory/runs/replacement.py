"""Gaussian approximations of the heads of an attention call: `cumulant.nn.closures` on its queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall
from cumulant.nn.closures import DifferentKeysError, approximate_by_gaussian, approximate_by_mixture


def gaussian_output(call: AttentionCall) -> Tensor:
    """Output of every head if the visible keys are replaced by one Gaussian, (batch, heads, q, e).  S1-C1"""
    _require_linear("gaussian_output", call)
    return approximate_by_gaussian(call.eta, call.key, call.value, **call.support.arguments())


def mixture_output(call: AttentionCall, components: int, seed: int = 0) -> Tensor | None:
    """Output of every head if its keys are replaced by a few Gaussians, from k-means on them.  S1-P2′

    components  how many at most; 1 is `gaussian_output`
    seed        of the first centres; they do not depend on the other sequences of the batch

    None if the queries do not all see the same keys: each would need clusters of its own.
    """
    if components < 1:
        raise ValueError(sentence("mixture_output.components", "at least 1", components, "Use 1 for one Gaussian."))
    _require_linear("mixture_output", call)
    try:
        return approximate_by_mixture(
            call.eta, call.key, call.value, components=components, seed=seed, **call.support.arguments()
        )
    except DifferentKeysError:
        return None


def _require_linear(where: str, call: AttentionCall) -> None:
    if call.capped:
        advice = "A Gaussian approximates exponential families in the query only."
        raise ValueError(sentence(f"{where}({call.name})", "scores linear in the query", "capped ones", advice))
