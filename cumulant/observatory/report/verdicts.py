"""Answers of a record to the questions of the paper, in words, with the numbers and the nulls they rest on.

Every verdict follows from a rule written beside it, so that two observations can be compared and a rule argued with.
"""

from __future__ import annotations

from math import ceil, exp, isfinite, log, sqrt
from statistics import NormalDist, median
from typing import NamedTuple

from cumulant.observatory.record.rows import HeadRow, LayerRow, NullComparison, known
from cumulant.observatory.statistics.gaussianity import TAIL_SHARE, needed_freedom
from cumulant.observatory.statistics.states import MAX_COVARIANCE_WIDTH


class Number(NamedTuple):
    """A figure of a verdict, and the same figure of a null where there is one."""

    label: str
    value: float | None
    null: float | None = None
    unit: str = ""


class Answer(NamedTuple):
    """question, "yes", "no", "partly" or "open", a sentence, and what it rests on."""

    question: str
    answer: str
    words: str
    numbers: tuple[Number, ...]


def verdicts(
    heads: list[HeadRow],
    layers: list[LayerRow],
    null_heads: list[HeadRow],
    dimension: int,
    null_layers: list[LayerRow] | None = None,
    ablation: dict | None = None,
    share: float = 1.0,
) -> list[Answer]:
    """All questions that the record can say something about.

    heads, layers            rows of the observed model
    null_heads, null_layers  of the same model at random initialisation
    dimension  channels of the residual stream: random weights give cosines of ± 1/dimension
    ablation   what replacing heads did, as in ablation.json
    share      of the windows that covariances of hidden states are taken from
    """
    answers = [
        _ascent(heads, dimension),
        _gaussian_heads(heads, null_heads),
        _replaced(ablation),
        _link(heads, null_heads),
        _gaussian_states(layers, share),
        _expansion(layers, null_layers or []),
        _condensation(heads, null_heads),
    ]
    return [answer for answer in answers if answer is not None]


def _ascent(heads: list[HeadRow], dimension: int) -> Answer | None:
    tied = _column(heads, "gradientness")
    if not tied:
        return None
    index = _column(heads, "ascent_index")
    strong = sum(abs(t) > 0.5 for t in tied) / len(tied)
    up = sum(t > 0 for t in tied) / len(tied)
    noise = 1 / dimension
    beyond = sum(abs(t) > 3 * noise for t in tied) / len(tied)
    one_sided = max(up, 1 - up) > 0.75
    answer = "yes" if median(tied) > 0.5 else "partly" if beyond > 0.5 and one_sided and up > 0.5 else "no"
    lean = f"{up:.0%} of the heads lean upward" if up >= 0.5 else f"{1 - up:.0%} of the heads lean downward"
    words = (
        "A head climbs its own log-normalizer if W_O W_V is a positive multiple of W_Qᵀ W_K. The cosine of the two is "
        f"{median(tied):+.2f} in the median head, {lean}, and {strong:.0%} come near ±1."
    )
    numbers = [
        Number("median cosine of W_O W_V and W_Qᵀ W_K", median(tied), 0.0),
        Number("heads beyond three times the noise of random weights", beyond, 0.003, "share"),
        Number("heads with positive cosine", up, 0.5, "share"),
    ]
    if index:
        numbers.append(Number("median ascent index, in whitened states", median(index), 0.0))
    return Answer("Does attention ascend the log-normalizer?", answer, words, tuple(numbers))


def _gaussian_heads(heads: list[HeadRow], nulls: list[HeadRow]) -> Answer | None:
    fit = _column(heads, "gaussian_r2")
    if not fit:
        return None
    base = _column(nulls, "gaussian_r2")
    good = sum(r > 0.5 for r in fit) / len(fit)
    answer = "yes" if good > 0.75 else "partly" if good > 0.25 else "no"
    words = (
        f"Replacing the keys of a head by a Gaussian of the same mean and covariance explains {median(fit):.0%} of its "
        f"output in the median head; {good:.0%} of the heads are explained by more than half."
        + (
            f" At random initialisation the median is {median(base):.0%}: short queries make any head affine."
            if base
            else ""
        )
    )
    numbers = (
        Number("median R² of v̄ + Cov(v,k)η", median(fit), _median(base)),
        Number("heads with R² above ½", good, sum(r > 0.5 for r in base) / len(base) if base else None, "share"),
    )
    return Answer("Are heads local Gaussian approximations?", answer, words, numbers)


def _replaced(ablation: dict | None) -> Answer | None:
    if not ablation:
        return None
    heads, alone, together = (ablation[key] for key in ("heads", "can_go", "together"))
    unit = "of perplexity" if ablation["measure"] == "perplexity" else "of cosine"
    words = (
        f"{alone} of {heads} heads can be replaced one at a time ({ablation['kind']}) for less than "
        f"{ablation['threshold']:g} {unit}, on {ablation['tokens']:,} tokens; {together} of them at once. Replacing "
        f"all {alone} at once does {ablation['all_at_once']:.2g}, as many heads at random {ablation['control']:.2g}."
    )
    answer = "yes" if together > 0.75 * heads else "no" if together < 0.1 * heads else "partly"
    numbers = (
        Number("heads that can go alone", alone / heads, None, "share"),
        Number("heads that can go together", together / heads, None, "share"),
        Number("damage of all that can go alone, at once", ablation["all_at_once"], ablation["control"]),
    )
    return Answer("Can heads be replaced by their Gaussian approximation?", answer, words, numbers)


def _link(heads: list[HeadRow], nulls: list[HeadRow]) -> Answer | None:
    fit, question = _column(heads, "link_r2"), "Do W_Q and W_K approximate the canonical link?"
    if not fit:
        asked = any("link_r2" in row.numbers for row in heads)
        return Answer(question, "open", _more_queries(heads), ()) if asked else None
    error, null_error = (_column(rows, "link_slope_error") for rows in (heads, nulls))
    base = _column(nulls, "link_r2")
    close = sum(e < 0.5 for e in error) / len(error)
    gained = median(fit) - (median(base) if base else 0.0)
    answer = "yes" if median(fit) > 0.9 and close > 0.5 else "partly" if median(fit) > 0.5 and gained > 0.2 else "no"
    words = (
        "The query should be the canonical link of the mean it retrieves, a linear map if the keys are Gaussian. An "
        f"affine map of the mean explains {median(fit):.0%} of the query in the median head; its slope is that of "
        f"Gaussian keys, Cov(K)⁻¹, to within one half in {close:.0%} of the heads."
        + (f" Random weights reach {median(base):.0%}." if base else "")
    )
    numbers = (
        Number("median R² of the linear link", median(fit), _median(base)),
        Number("median relative error of the slope against Cov(K)⁻¹", median(error), _median(null_error)),
    )
    return Answer(question, answer, words, numbers)


def _more_queries(heads: list[HeadRow]) -> str:
    """What a link fit without enough queries needs: all heads of a layer have the same, the neediest layer decides."""
    counts = [(row.link_queries, row.link_needed, row) for row in heads]
    short = [(has, needs, row) for has, needs, row in counts if has is not None and needs is not None and has < needs]
    if not short:
        advice = "read 64 tokens or more for each channel of a head, and a tenth above that."
        return f"The fit needs more sampled queries than twice the width of a head, and one in 32 is sampled: {advice}"
    count, needed, row = max(short, key=lambda one: one[1] / max(1, one[0]))
    tokens = max((statistics.count for statistics in row.quantities.values()), default=0)
    rate = count / tokens if tokens and count else 1 / 32
    return (
        f"The fit of a head needs {needed:,} sampled queries and has {count:,}"
        + (f" from {tokens:,} tokens" if tokens else "")
        + f": read {_tokens_for(needed, rate):,} tokens or more."
    )


def _tokens_for(needed: int, rate: float, grain: float = 1.0) -> int:
    """How many tokens to read so that ``rate`` of them, chosen at random in groups of ``grain``, are enough.

    The least n with r n − 4 √(g r n) ≥ needed, rounded up to hundreds: a chance of 3 in 100 000 is left.

    >>> _tokens_for(129, 1 / 32), _tokens_for(1152, 1.0, 0.0)
    (5900, 1200)
    """
    root = 2 * sqrt(grain) + sqrt(4 * grain + needed)
    return 100 * ceil(root**2 / rate / 100 - 1e-9)


def _gaussian_states(layers: list[LayerRow], share: float) -> Answer | None:
    question = "Does the law of hidden states become Gaussian over the layers?"
    ends = [row for row in layers if row.stage == "out"]
    if len(ends) < 2:
        return None
    reason = _undecided(ends, share)
    laws = [row.sliced_w2 for row in ends if isfinite(row.sliced_w2.value)]
    if reason is not None or len(laws) < 2:
        return Answer(question, "open", reason or "The states do not vary: they have no law to compare.", ())
    ratio = [law.value / law.null for law in laws]
    inside = sum(_inside(law, len(laws)) for law in laws) / len(laws)
    nearest = min(range(len(ratio)), key=ratio.__getitem__)
    answer = "yes" if inside == 1 else "partly" if min(ratio) < 0.6 * ratio[0] else "no"
    words = (
        "The distance of the hidden states, each about the mean of its sequence, to a Gaussian of the same covariance "
        f"is {ratio[0]:.2f} times that of a Gaussian sample after the first block, {ratio[nearest]:.2f} times where it "
        f"is least, after block {nearest}, and {ratio[-1]:.2f} times after the last; {inside:.0%} of the blocks lie "
        "within the band of Gaussian samples."
    )
    numbers = tuple(
        Number(f"sliced W₂ after block {i}", laws[i].value, laws[i].null)
        for i in dict.fromkeys((0, nearest, len(laws) - 1))
    )
    return Answer(question, answer, words, numbers)


def _undecided(ends: list[LayerRow], share: float) -> str | None:
    """Why nothing can be said of the law of the states, and how many tokens would do; None if there are enough."""
    channels = max(row.channels for row in ends)
    if channels > MAX_COVARIANCE_WIDTH:
        limit = f"{MAX_COVARIANCE_WIDTH:,}"
        return f"Of states with more than {limit} channels no covariance is kept, and these have {channels:,}."
    worst = min(ends, key=lambda row: row.freedom)
    freedom, used, needed = worst.freedom, worst.whitened, needed_freedom(channels)
    if not used:
        return "No covariance of the hidden states within their sequences was kept."
    if freedom >= needed:
        return None
    length = used / (used - freedom)  # tokens of a sequence
    more = _tokens_for(needed, share * max(1, freedom) / used, (1 - share) * length)
    return (
        f"Telling states of {channels:,} channels from a Gaussian takes {needed:,} tokens beyond one of every "
        f"sequence. There are {freedom:,}, as {used:,} of the {worst.tokens:,} tokens were used: read "
        f"{more:,} tokens or more."
    )


def _inside(law: NullComparison, blocks: int) -> bool:
    """Whether a block is no further from a Gaussian than chance allows, in one of so many blocks.

    The band holds all but `TAIL_SHARE` of the Gaussian samples on either side of it; it is widened so that all blocks
    of a Gaussian model lie in it that often, with the logarithm of the distance taken as normal.
    """
    normal = NormalDist()
    wider = normal.inv_cdf(1 - TAIL_SHARE / blocks) / normal.inv_cdf(1 - TAIL_SHARE)
    return log(law.value / law.null) <= wider * log(law.null_high / law.null)


def _expansion(layers: list[LayerRow], nulls: list[LayerRow]) -> Answer | None:
    grow, norms = _growth(layers), _shrinkage(layers)
    if not grow:
        return None
    expands = sum(g > 0 for g in grow) / len(grow)
    contracts = sum(c < 0 for c in norms) / len(norms) if norms else 0.0
    answer = "yes" if expands > 0.9 and contracts > 0.9 else "partly" if expands > 0.5 or contracts > 0.5 else "no"
    words = (
        f"A small perturbation grows by a factor {exp(sum(grow) / len(grow)):.2f} in attention with its residual, "
        f"on average; it grows in {expands:.0%} of the blocks."
        + (f" Norms shrink it in {contracts:.0%} of the cases." if norms else "")
    )
    numbers = [Number("mean log-growth by attention and residual", _average(grow), _average(_growth(nulls)), "nats")]
    if norms:
        numbers.append(Number("mean log-growth by norms", _average(norms), _average(_shrinkage(nulls)), "nats"))
    return Answer("Does attention expand and normalisation contract?", answer, words, tuple(numbers))


def _growth(layers: list[LayerRow]) -> list[float]:
    return known(row.step.value for row in layers if row.stage == "attention")


def _shrinkage(layers: list[LayerRow]) -> list[float]:
    return known(row.contraction.value for row in layers if row.role in ("norm", "front"))


def _average(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _condensation(heads: list[HeadRow], nulls: list[HeadRow]) -> Answer | None:
    share, first = _column(heads, "condensed"), _column(heads, "first_mass")
    if not share:
        return None
    most = sum(s > 0.5 for s in share) / len(share)
    words = (
        f"{_average(share):.0%} of all head–token pairs have condensed on a few keys (KL to the base above "
        f"log N − 1). {most:.0%} of the heads do so for most tokens."
        + (f" The first token alone takes {_average(first):.0%} of the attention." if first else "")
    )
    numbers = (
        Number("condensed pairs", _average(share), _average(_column(nulls, "condensed")), "share"),
        Number("attention on the first token", _average(first), _average(_column(nulls, "first_mass")), "share"),
    )
    answer = "yes" if most > 0.75 else "no" if most < 0.1 else "partly"
    return Answer("Does softmax condense, so that formulas for a population of keys fail?", answer, words, numbers)


def _column(rows: list[HeadRow], name: str) -> list[float]:
    return known(row.value(name) for row in rows)
