"""Why a quantity has no numbers: a record says "not defined here" with a reason, in place of an empty column."""

from __future__ import annotations

from collections.abc import Mapping

POSITIONED = frozenset(
    {"self_mass", "previous_mass", "next_mass", "mean_distance"}
)  # of queries and keys of one sequence
TOKENISED = frozenset({"same_token_mass", "induction_mass", "delimiter_mass"})  # of the ids of keys
ORDERED = frozenset({"previous_mass", "next_mass", "mean_distance"})


def reason_in_words(reasons: Mapping[str, str], modules: int) -> str:
    """One sentence of why a quantity is not defined in some attention modules, or in all ``modules`` of them.

    >>> reason_in_words({"h.0.attn": "it has no heads", "h.1.attn": "it has no heads"}, 2)
    'it has no heads'
    >>> reason_in_words({"h.0.attn": "it has no heads"}, 2)
    'in 1 of 2 attention modules, such as h.0.attn: it has no heads'
    """
    words = dict.fromkeys(reasons.values())
    if len(reasons) == modules and len(words) == 1:
        return next(iter(words))
    parts = []
    for reason in words:
        of = [name for name, other in reasons.items() if other == reason]
        parts.append(f"in {len(of)} of {modules} attention modules, such as {of[0]}: {reason}")
    return "; ".join(parts)


CROSS = "cross-attention: its keys are of another sequence"
NO_ORDER = "its tokens are parts of an image, which have no order"
NO_TOKENS = "the ids of its keys are not known: the model was not called with them, or keys come from a cache"
NO_DELIMITERS = "which tokens separate is not known: pass their ids as delimiters"
NOT_OBSERVED = "hidden states are not observed"
ABSENT = {
    "next_mass": "no query sees the token after it: attention is causal",
    "same_token_mass": "no query sees another occurrence of its token in this text",
    "induction_mass": "no query sees a token that followed an earlier occurrence of its own in this text",
    "delimiter_mass": "no query sees a delimiter in this text",
    "sink_mass": "the model has no learned sink",
    "max_score": "scores are capped: they have no largest value of their own",
}


def target_reason(name: str, *, cross: bool, ordered: bool, tokens: bool, delimiters: bool) -> str | None:
    """Why an attention module has no numbers of a quantity; None where nothing is known of it.

    cross       its keys are of another sequence
    ordered     its tokens have an order
    tokens      the ids of its keys were known
    delimiters  it is known which ids separate

    >>> target_reason("next_mass", cross=False, ordered=True, tokens=True, delimiters=True)
    'no query sees the token after it: attention is causal'
    """
    if name in POSITIONED | TOKENISED and cross:
        return CROSS
    if name in ORDERED and not ordered:
        return NO_ORDER
    if name in TOKENISED and not tokens:
        return NO_TOKENS
    if name == "delimiter_mass" and not delimiters:
        return NO_DELIMITERS
    return ABSENT.get(name)
