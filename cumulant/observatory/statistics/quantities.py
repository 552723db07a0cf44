"""The names of what is observed, each with its equation and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cumulant.checks import sentence


class Quantity(NamedTuple):
    """One number per head and token.

    group  "cheap": from the fused kernel; "full": from one streaming pass; "sampled": on a sample of queries
    """

    name: str
    label: str
    equation: str
    words: str
    unit: str
    group: str


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("log_normalizer", "log-normalizer", "G = log Σⱼ exp(⟨η,kⱼ⟩ + wⱼ)", "The potential whose gradient is the head's mean key; the evidence of the keys for the query.", "nats", "cheap"),
    Quantity("entropy", "entropy", "H = −Σⱼ pⱼ log pⱼ", "How widely the head looks: 0 for one key, log N for all alike.", "nats", "cheap"),
    Quantity("effective_atoms", "effective keys", "1/Σⱼ pⱼ²", "How many keys the head averages.", "keys", "full"),
    Quantity("max_score", "largest score", "maxⱼ ⟨η,kⱼ⟩", "The score of the key that fits best.", "nats", "full"),
    Quantity("first_mass", "mass on the first token", "p₀", "Attention to the first token, where sinks form.", "share", "full"),
    Quantity("sink_mass", "mass on the learned sink", "e^s/(e^s + Σⱼ e^{⟨η,kⱼ⟩})", "Probability of the atom with value 0 that some models add.", "share", "full"),
    Quantity("kl_to_base", "KL to base", "KL(p ‖ h) = ⟨η,∇G⟩ − G + log|h|", "How far the query moved the measure of the keys.", "nats", "full"),
    Quantity("condensed", "condensed", "KL(p ‖ h) > log N − 1", "Share of tokens for which softmax has condensed on a few keys (X-9).", "share", "full"),
    Quantity("fisher_trace", "Fisher trace", "s · tr Cov_p(k)", "Expansion rate of the query by the head's own keys.", "", "full"),
    Quantity("collapse_loss", "collapse loss", "tr Cov_p(v)", "What the output forgets of the mixture of values it averages (S2-C9).", "", "full"),
    Quantity("k90", "keys for 90 %", "least k with k largest pⱼ ≥ 0.9", "Hopfield class I–IV by its median: the size of what the head retrieves.", "keys", "sampled"),
    Quantity("k90_share", "share of keys for 90 %", "k/N", "The same as a share of the keys in sight: above 1/2 class I, 1/8 II, 1/32 III, else IV.", "share", "sampled"),
    Quantity("fisher_top", "top Fisher eigenvalue", "s · λ_max(Cov_p(k))", "Above 1 the head can hold several memories.", "", "sampled"),
    Quantity("fisher_volume", "log-volume, keys", "log det(I + s·Cov_p(k))", "Expansion of volume by η + ∇G, the step of the theory (X-1).", "nats", "sampled"),
    Quantity("head_volume", "log-volume, head", "log|det(I + s·Cov_p(v,k)·W_Q W_O)|", "Expansion of volume in the residual stream by this head, keys frozen.", "nats", "sampled"),
    Quantity("received_top", "largest attention received", "maxⱼ Σᵢ pᵢⱼ/N", "Share of all attention that goes to one key: the implied source marginal (S2-C8).", "share", "sampled"),
    Quantity("received_effective", "keys that receive", "1/Σⱼ σⱼ²,  σⱼ = Σᵢ pᵢⱼ/N", "How many keys are attended to by a sequence; N if doubly stochastic.", "keys", "sampled"),
)  # fmt: skip
BY_NAME = {q.name: q for q in QUANTITIES}
DEFAULT = tuple(BY_NAME)


def select_quantities(names: str | Sequence[str] | None) -> frozenset[str]:
    """The wanted names, checked; None is all, a group's name is its members."""
    if names is None:
        return frozenset(DEFAULT)
    names = [names] if isinstance(names, str) else list(names)
    groups = {q.group for q in QUANTITIES}
    for name in names:
        if name not in BY_NAME and name not in groups:
            expected = f"names among {', '.join(BY_NAME)}, or a group: {', '.join(sorted(groups))}"
            raise ValueError(sentence("quantities", expected, repr(name), "Copy one exactly."))
    return frozenset(q.name for q in QUANTITIES if q.name in names or q.group in names)
