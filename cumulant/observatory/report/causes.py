"""What removing the heads that stand out says about them: a rule for each type, a sentence for each head.

A type says what to expect. Heads that should do something are confirmed if the model loses more without them than
without nine in ten heads chosen at random; heads that should rest, if it loses less than without half of those. In both
cases by the whole interval of 95 %, not by its middle alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cumulant.checks import sentence
from cumulant.observatory.record.manifest import CAUSES
from cumulant.observatory.record.record import UNREADABLE

MAX_NUMBER = 1e300  # in causes.json: whole numbers may be larger than any float
MIN_RANDOM = 5  # random heads; with fewer nothing is judged
RANDOM_SHARE = 0.9  # of the random heads, which a head that does something must exceed
CONFIRMED, NOT_CONFIRMED = "confirmed", "not confirmed"
CAUSES_COLUMNS = {  # of causes.parquet
    **{"layer": int, "head": int, "name": str, "type": str, "random": bool, "replacement": str, "measure": str},
    **{"effect": float, "low": float, "high": float, "clusters": int, "count": int, "verdict": str},
}
TEXT = ("loss", "embedding")  # the measure of the text, whichever the model has
REPLACEMENTS = {"removed": "Without it", "uniform": "If it looks at all keys alike,", "gaussian": "As a Gaussian,"}


class EffectMeasure(NamedTuple):
    """A measure of the model: its label and unit on the page, what it is, and how a change is told."""

    label: str
    unit: str
    words: str
    change: str
    sign: int = 1  # of a change for the worse


MEASURES = {
    "loss": EffectMeasure("loss", "nats", "Change of the loss on the text, per token.", "the loss changes by"),
    "embedding": EffectMeasure(
        "embedding",
        "1 − cosine",
        "Distance of the embedding of a window to that of the untouched model.",
        "the embedding moves by",
    ),
    "repeated_loss": EffectMeasure(
        "loss on repeated tokens",
        "nats",
        "Change of the loss on the second copy of random tokens that repeat, per token.",
        "the loss on repeated tokens changes by",
    ),
    "induction_score": EffectMeasure(
        "induction score",
        "share",
        "Change of the attention of the best three induction heads in later layers to what followed the same token.",
        "the induction score of later heads changes by",
        -1,
    ),
}


class TypeExpectation(NamedTuple):
    """What a type of head leads one to expect when it is replaced.

    measures  the first that the head has an effect on decides
    rests     the model should lose little, not much
    """

    replacement: str
    measures: tuple[str, ...]
    rests: bool = False


WORKS = TypeExpectation("removed", TEXT)
EXPECTATIONS = {
    "induction": TypeExpectation("removed", ("repeated_loss", *TEXT)),
    "previous-token": TypeExpectation("removed", ("induction_score", *TEXT)),
    "sink": TypeExpectation("removed", TEXT, rests=True),
    "delimiter": TypeExpectation("removed", TEXT, rests=True),
    "broad": TypeExpectation("uniform", TEXT, rests=True),
}  # all other types: `WORKS`
RULES = (
    "Induction heads: without the head the loss on random tokens that repeat rises.",
    "Previous-token heads: without the head the best induction heads of later layers find less; "
    "where there are none, as for other types.",
    "Sink and delimiter heads rest: removing the head does little harm, or none. Broad heads: looking at all keys "
    "alike does little harm.",
    "Other types: without the head the loss on the text rises, or its embedding moves.",
    f"Something is more than {RANDOM_SHARE:.0%} of the heads chosen at random do, little harm is less than that of the "
    "median random head; the whole interval of 95 % must be. A loss that falls is no harm.",
)


class RandomEffects(NamedTuple):
    """What one replacement of the random heads does to one measure; positive for the worse."""

    least: float
    half: float
    most_of: float
    most: float
    heads: int


class Judgement(NamedTuple):
    """The verdict on a head, and the sentence that says why."""

    layer: int
    head: int
    kind: str
    replacement: str
    measure: str
    verdict: str
    words: str


def random_effects(rows: list[dict], replacement: str, measure: str) -> RandomEffects | None:
    """Of the rows of causes.json; None where there are none.

    >>> rows = [{"random": True, "replacement": "removed", "measure": "loss", "effect": x / 10} for x in range(10)]
    >>> random_effects(rows, "removed", "loss")
    RandomEffects(least=0.0, half=0.45, most_of=0.8, most=0.9, heads=10)
    """
    mine = [r for r in rows if r["random"] and r["replacement"] == replacement and r["measure"] == measure]
    values = sorted(MEASURES[measure].sign * r["effect"] for r in mine if r["effect"] is not None)
    if not values:
        return None
    line = values[ceil(RANDOM_SHARE * len(values)) - 1]
    return RandomEffects(values[0], median(values), line, values[-1], len(values))


def judgements(causes: dict) -> list[Judgement]:
    """The verdict on every head of causes.json that was not chosen at random, in its order."""
    rows = causes["rows"]
    listed = dict.fromkeys((r["layer"], r["head"], r["type"]) for r in rows if not r["random"])
    out = []
    for layer, head, kind in listed:
        mine = [r for r in rows if (r["layer"], r["head"], r["random"]) == (layer, head, False)]
        expected = EXPECTATIONS.get(kind, WORKS)
        row = _decisive(mine, expected)
        if row is not None:
            beside = random_effects(rows, row["replacement"], row["measure"])
            verdict, words = _judge(row, expected, beside)
            out.append(Judgement(layer, head, kind, row["replacement"], row["measure"], verdict, words))
    return out


def _decisive(rows: list[dict], expected: TypeExpectation) -> dict | None:
    """The row that the expectation is about."""
    by_measure = {r["measure"]: r for r in rows if r["replacement"] == expected.replacement}
    return next((by_measure[m] for m in expected.measures if m in by_measure), None)


def _judge(row: dict, expected: TypeExpectation, beside: RandomEffects | None) -> tuple[str, str]:
    measure = MEASURES[row["measure"]]
    effect = row["effect"]
    if effect is None or beside is None:
        return NOT_CONFIRMED, "Not confirmed: there is no number to compare."
    signed = _short if row["measure"] == "embedding" else _signed
    size = f"{signed(effect)} nats" if measure.unit == "nats" else signed(effect)
    ends = [x for x in (row["low"], row["high"]) if x is not None]
    interval = f" ({signed(ends[0])} to {signed(ends[1])})" if len(ends) == 2 else ""
    if expected.rests:
        others = f"the median random head: {signed(beside.half)}"
    else:
        others = _of_random_heads(beside, measure.sign, signed)
    said = f"{REPLACEMENTS[row['replacement']]} {measure.change} {size}{interval}; {others}"
    reason = _doubt([measure.sign * x for x in ends], expected, beside)
    return (
        (CONFIRMED, f"{said}: confirmed.") if reason is None else (NOT_CONFIRMED, f"{said}: not confirmed, {reason}.")
    )


def _of_random_heads(beside: RandomEffects, sign: int, signed: Callable[[float], str]) -> str:
    """What most random heads do, and what the one does that does most.

    >>> _of_random_heads(RandomEffects(0.0, 0.1, 0.4, 4.0, 10), 1, _signed)
    '9 of 10 random heads: at most +0.4, one +4'
    """
    below = ceil(RANDOM_SHARE * beside.heads)
    count = f"{below} of {beside.heads}" if below < beside.heads else f"all {beside.heads}"
    said = f"{count} random heads: {'at most' if sign > 0 else 'not below'} {signed(sign * beside.most_of)}"
    return said if below == beside.heads else f"{said}, one {signed(sign * beside.most)}"


def _doubt(ends: list[float], expected: TypeExpectation, beside: RandomEffects) -> str | None:
    """Why an expectation is not confirmed; None if it is."""
    if beside.heads < MIN_RANDOM:
        return f"with {beside.heads} other heads to compare it with"
    if len(ends) < 2:
        return "one window has no interval"
    low, high = min(ends), max(ends)
    if expected.rests:
        if high < beside.half:
            return None
        return "half of the random heads do less harm" if low >= beside.half else "the interval reaches above that"
    if low > beside.most_of:
        return None
    return "random heads do as much" if high <= beside.most_of else "the interval reaches below that"


def _short(value: float) -> str:
    """Two digits.

    >>> _short(0.01234), _short(-1.96), _short(12.3)
    ('0.012', '−2', '12')
    """
    return f"{value:.2g}".replace("-", "−")


def _signed(value: float) -> str:
    """Two digits and the sign.

    >>> _signed(0.01234), _signed(-1.96), _signed(0.0)
    ('+0.012', '−2', '0')
    """
    return ("+" if value > 0 else "") + _short(value)


def random_heads_confirmed(causes: dict, kind: str) -> tuple[int, int]:
    """How many random heads are confirmed as if they were of a type, each against the others, and of how many.

    What a verdict is worth: a rule that random heads pass as well says little.
    """
    rows = [r for r in causes["rows"] if r["random"]]
    verdicts = []
    for head in dict.fromkeys((r["layer"], r["head"]) for r in rows):
        swapped = [r | {"random": False, "type": kind} if (r["layer"], r["head"]) == head else r for r in rows]
        verdicts += [judged.verdict for judged in judgements(causes | {"rows": swapped})]
    return verdicts.count(CONFIRMED), len(verdicts)


# ---------------------------------------------------------------------- on the page and on the disk


def causes_part(causes: dict | None) -> dict | None:
    """What the page shows of causes.json."""
    if causes is None:
        return None
    rows = causes["rows"]
    judged = {(j.layer, j.head): j for j in judgements(causes)}
    measures = [name for name in MEASURES if any(r["measure"] == name for r in rows)]
    replacements = [name for name in REPLACEMENTS if any(r["replacement"] == name for r in rows)]
    heads: dict[tuple, dict[str, Any]] = {}
    for r in rows:
        key = (r["layer"], r["head"], r["random"])
        empty = {"layer": r["layer"], "head": r["head"], "kind": r["type"], "random": r["random"], "effects": {}}
        cells = heads.setdefault(key, empty)["effects"].setdefault(r["measure"], {})
        cells[r["replacement"]] = [r["effect"], r["low"], r["high"]]
    for (layer, head, random), entry in heads.items():
        verdict = None if random else judged.get((layer, head))
        entry |= {"verdict": verdict.verdict if verdict else None, "words": verdict.words if verdict else None}
        entry |= {"measure": verdict.measure if verdict else None}
    return {
        "heads": list(heads.values()),
        "measures": [_measure_part(causes, n) for n in measures],
        "replacements": replacements,
        "tokens": causes["tokens"],
        "clustered_by": causes["clustered_by"],
        "clusters": max((r["clusters"] for r in rows if r["measure"] in TEXT), default=0),
        "notes": list(causes["notes"]),
        "reason": causes["reason"],
        "rules": list(RULES),
        "confirmed": sum(j.verdict == CONFIRMED for j in judged.values()),
        "by_chance": [
            {"kind": kind, "confirmed": confirmed, "of": of}
            for kind in dict.fromkeys(j.kind for j in judged.values())
            for confirmed, of in [random_heads_confirmed(causes, kind)]
            if of >= MIN_RANDOM
        ],
    }


def _measure_part(causes: dict, name: str) -> dict:
    """A measure as the page shows it; line is what most random heads do not exceed when removed."""
    beside = random_effects(causes["rows"], "removed", name)
    line = None if beside is None else MEASURES[name].sign * beside.most_of
    return MEASURES[name]._asdict() | {"name": name, "baseline": causes["baseline"].get(name), "line": line}


def judgement_by_head(causes: dict | None) -> dict[tuple[int, int], Judgement]:
    """(layer, head) → what happens without it, of the heads that were not chosen at random."""
    return {(j.layer, j.head): j for j in (judgements(causes) if causes is not None else ())}


def read_causes(directory: Path) -> dict | None:
    """What causes.json of a directory holds; None if there is none."""
    path = directory / CAUSES[0]
    if not path.exists():
        return None
    try:
        causes = json.loads(path.read_text(encoding="utf-8"))
        if _is_whole(causes):
            return causes
    except UNREADABLE:
        pass
    raise ValueError(sentence(str(path), "what --causes wrote", "something else", "Delete it, or observe again."))


def _is_whole(causes: dict) -> bool:
    texts = [*causes["notes"], causes["clustered_by"], *(() if causes["reason"] is None else (causes["reason"],))]
    numbers = [*causes["baseline"].values()]
    counts = [causes["tokens"]]
    for r in causes["rows"]:
        texts += [r["name"], *(() if r["random"] else (r["type"],))]
        numbers += [r[name] for name in ("effect", "low", "high")]
        counts += [r[name] for name in ("layer", "head", "clusters", "count")]
        if type(r["random"]) is not bool or r["replacement"] not in REPLACEMENTS or r["measure"] not in MEASURES:
            return False
    finite = all(n is None or (type(n) in (int, float) and abs(n) < MAX_NUMBER) for n in numbers)
    return finite and all(type(n) is int for n in counts) and all(isinstance(t, str) for t in texts)
