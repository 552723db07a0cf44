"""What a head does, by named rules on where it looks; each rule has its threshold written beside it.

A rule looks at means over tokens. It asks for a share of the attention and, where chance alone could give it, for a
multiple of what an even look at the same keys gives. A head may have several types, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple, Protocol

NEAR = ("distance_0", "distance_1", "distance_2", "distance_3_4")
FIXED = ("self_mass", "previous_mass", "next_mass")


class HeadNumbers(Protocol):
    """What a rule needs of a row of heads."""

    @property
    def quantities(self) -> dict: ...
    def value(self, name: str) -> float: ...


class HeadType(NamedTuple):
    """A rule.

    name       of the type
    rule       the rule in words, with its threshold
    quantity   the column that it is about, and that the page shows for it
    threshold  of that number, or of ``number`` if there is one
    times      as many times chance it must be too; 0 where chance is not asked
    looks      what such a head does, to follow "looks"
    number     computes the number where it is no column
    below      the rule holds below the threshold, not above
    """

    name: str
    rule: str
    quantity: str
    threshold: float
    times: float
    looks: str
    number: Callable[[HeadNumbers], float] | None = None
    below: bool = False

    def strength(self, head: HeadNumbers) -> float:
        """The number of the rule; NaN where it is not defined."""
        return head.value(self.quantity) if self.number is None else self.number(head)

    @property
    def is_share(self) -> bool:
        """Whether the number of the rule is a share of the attention."""
        return not self.below and self.number is not _fixed

    def formatted(self, strength: float) -> str:
        """The number of the rule in words."""
        if self.below:
            return f"{strength:.2g} nats"
        return f"{strength:.0%}" if self.is_share else f"{strength:.2f}".replace("-", "−")

    def holds(self, head: HeadNumbers) -> bool:
        strength, chance = self.strength(head), head.value(f"{self.quantity}_chance")
        if not isfinite(strength):
            return False
        enough = strength <= self.threshold if self.below else strength >= self.threshold
        return enough and not (self.times and isfinite(chance) and strength < self.times * chance)


def _near(head: HeadNumbers) -> float:
    return sum(head.value(name) for name in NEAR)


def _fixed(head: HeadNumbers) -> float:
    """The largest share at a fixed distance, less its standard deviation over tokens."""
    known = [head.quantities[name] for name in FIXED if name in head.quantities]
    return max((s.value - s.std for s in known if isfinite(s.value)), default=float("nan"))


HEAD_TYPES = (
    HeadType("previous-token", "share on the previous token ≥ 0.4", "previous_mass", 0.4, 0, "at the previous token"),
    HeadType("next-token", "share on the next token ≥ 0.4", "next_mass", 0.4, 0, "at the next token"),
    HeadType("self", "share on the token itself ≥ 0.5", "self_mass", 0.5, 0, "at the token itself"),
    HeadType("induction", "share on what followed the same token before, in random tokens that repeat, ≥ 0.4", "repeated_induction", 0.4, 0, "at what followed the same token before, in random tokens that repeat"),
    HeadType("induction", "the same share in texts ≥ 0.25 and ≥ 4 × chance", "induction_mass", 0.25, 4, "at what followed the same token earlier"),
    HeadType("duplicate-token", "share on other occurrences of the same token ≥ 0.25 and ≥ 4 × chance", "same_token_mass", 0.25, 4, "at other occurrences of the same token"),
    HeadType("sink", "share on the first token ≥ 0.5", "first_mass", 0.5, 0, "at the first token"),
    HeadType("delimiter", "share on delimiters ≥ 0.6 and ≥ 2 × chance", "delimiter_mass", 0.6, 2, "at delimiters"),
    HeadType("positional", "the largest share on the token itself, the previous or the next one, less its standard deviation over tokens, ≥ 0.3", "previous_mass", 0.3, 0, "at a fixed distance, whatever the token", _fixed),
    HeadType("local", "share on tokens at most 4 away ≥ 0.7", "distance_1", 0.7, 0, "at most four tokens away", _near),
    HeadType("broad", "KL to an even look ≤ 0.25 nats", "kl_to_base", 0.25, 0, "at all keys nearly alike", None, True),
)  # fmt: skip


def head_types(head: HeadNumbers) -> list[HeadType]:
    """The types of a head, in the order of `HEAD_TYPES`; of two rules for one type, the first that holds."""
    found: dict[str, HeadType] = {}
    for kind in HEAD_TYPES:
        if kind.name not in found and kind.holds(head):
            found[kind.name] = kind
    return list(found.values())


def describe(head: HeadNumbers, kind: HeadType, nulls: Mapping[str, HeadNumbers]) -> str:
    """One sentence on a head of a type, with the numbers beside it."""
    strength, chance = kind.strength(head), head.value(f"{kind.quantity}_chance")
    if kind.below:
        said = f"looks {kind.looks}: KL to an even look {kind.formatted(strength)}"
    elif not kind.is_share:
        said = f"looks {kind.looks}: share less its standard deviation {kind.formatted(strength)}"
    else:
        said = f"looks {kind.looks}{',' if ',' in kind.looks else ''} with {kind.formatted(strength)} of its attention"
    beside = [f"chance {chance:.0%}"] if isfinite(chance) and kind.is_share else []
    for name, words in (("random", "random weights"), ("shuffled", "shuffled keys")):
        other = kind.strength(nulls[name]) if name in nulls else float("nan")
        if isfinite(other):
            beside.append(f"{words} {kind.formatted(other).removesuffix(' nats')}")
    entropy = head.value("entropy")
    return (
        said
        + (f" ({', '.join(beside)})" if beside else "")
        + (f"; entropy {entropy:.2g} nats" if isfinite(entropy) else "")
        + "."
    )


NAMED_FIRST = ("previous-token", "induction", "sink")  # types that anyone would ask for


class TypeMember(NamedTuple):
    """A head of a type; strength is the number of the rule in words."""

    layer: int
    head: int
    quantity: str
    strength: str


class HeadsOfType(NamedTuple):
    """All heads of a type, the strongest first, with the rules that they fit."""

    name: str
    rule: str
    heads: list[TypeMember]


def heads_by_type(rows: list) -> list[HeadsOfType]:
    """The heads of every type that occurs, in the order of `HEAD_TYPES`; rows have layer and head."""
    found: dict[str, list[tuple[float, TypeMember]]] = {}
    rules: dict[str, list[str]] = {}
    for kind in HEAD_TYPES:
        rules.setdefault(kind.name, []).append(kind.rule)
        found.setdefault(kind.name, [])
    for row in rows:
        for kind in head_types(row):
            strength = kind.strength(row)
            order = strength if kind.below else -strength
            found[kind.name].append((order, TypeMember(row.layer, row.head, kind.quantity, kind.formatted(strength))))
    ranked = {name: [member for _, member in sorted(members)] for name, members in found.items() if members}
    return [HeadsOfType(name, ", or ".join(rules[name]), members) for name, members in ranked.items()]


class Remarkable(NamedTuple):
    """A head worth a look: its type, a sentence, the quantity to show, and how far it is from chance and nulls."""

    layer: int
    head: int
    kind: str
    quantity: str
    words: str
    score: float


def remarkable_heads(
    rows: list, nulls: Sequence[Mapping[str, HeadNumbers]], most: int = 14, of_each: int = 3
) -> list[Remarkable]:
    """The heads that do most clearly what their type says: the best of every type, then others, strongest first.

    rows   of heads, with layer and head
    nulls  of each, the same head of the nulls

    The score is the share of attention beyond the largest of chance and nulls; for broad heads, which are near chance
    by definition, half of what is left to the threshold, so that they come last.
    """
    found: dict[str, list[Remarkable]] = {}
    for row, others in zip(rows, nulls, strict=True):
        kinds = head_types(row)
        if not kinds:
            continue
        kind = kinds[0]
        strength = kind.strength(row)
        beside = [kind.strength(other) for other in others.values()] + [row.value(f"{kind.quantity}_chance")]
        if kind.below:
            score = 0.5 * (kind.threshold - strength)
        else:
            score = strength - max((x for x in beside if isfinite(x)), default=0.0)
        words = describe(row, kind, others)
        found.setdefault(kind.name, []).append(Remarkable(row.layer, row.head, kind.name, kind.quantity, words, score))
    ranked = [sorted(heads, key=lambda h: -h.score)[:of_each] for heads in found.values()]
    # the best of every type, then the second of every type, …
    order = [
        head for place in range(of_each) for heads in ranked for head in heads[place : place + 1] if head.score > 0
    ]
    return sorted(order[:most], key=lambda h: -h.score)


def heads_to_remove(heads: Sequence[Remarkable], most: int, of_each: int = 2) -> list[Remarkable]:
    """The first of some heads, strongest first, among them the best two of each type in `NAMED_FIRST`, which take the
    place of the weakest others.

    >>> heads = [Remarkable(0, i, kind, "", "", 1 - i / 10) for i, kind in enumerate(["self", "self", "sink"])]
    >>> [head.kind for head in heads_to_remove(heads, 2)]
    ['self', 'sink']
    """
    wanted = [head for kind in NAMED_FIRST for head in [h for h in heads if h.kind == kind][:of_each]][:most]
    others = [head for head in heads if head not in wanted][: most - len(wanted)]
    return sorted((*wanted, *others), key=heads.index)
