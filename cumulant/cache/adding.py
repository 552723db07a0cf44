"""What two caches must agree in to be added, and which positions of a sequence a cache stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumulant.checks import sentence

if TYPE_CHECKING:
    from cumulant.cache.measure_cache import MeasureCache

Spans = tuple[tuple[int, int], ...]


def united(a: Spans, b: Spans) -> Spans:
    """The union of spans of positions (first, one after the last), in order, touching ones joined.

    >>> united(((0, 4), (8, 9)), ((4, 6),))
    ((0, 6), (8, 9))
    """
    out: list[tuple[int, int]] = []
    for first, end in sorted(span for span in (*a, *b) if span[0] < span[1]):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((first, end))
    return tuple(out)


def overlap(a: Spans, b: Spans) -> tuple[int, int] | None:
    """The first positions that both have; None: they are disjoint.

    >>> overlap(((0, 4),), ((2, 9),)), overlap(((0, 4),), ((4, 9),))
    ((2, 4), None)
    """
    common = [(max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b]
    return min((span for span in common if span[0] < span[1]), default=None)


def require_addable(a: MeasureCache, b: MeasureCache) -> None:
    """Refuse caches of different models, batches or dtypes, windows, and positions that both have."""
    where = "MeasureCache.__add__"
    a.identity.require_equal(b.identity.metadata(), "the second cache", where)
    if len(a.compressible) < len(a.layers):
        advice = "A window is not a sum: run the model on both texts after one another."
        raise ValueError(sentence(where, "a model with full attention in every layer", "one with windows", advice))
    for i, (one, two) in enumerate(zip(a.compressible.values(), b.compressible.values(), strict=True)):
        if one.keys is None or two.keys is None:
            raise ValueError(sentence(where, "two caches with tokens", "an empty one", "Run the model with it first."))
        if one.shape != two.shape or one.batch_size != two.batch_size:
            expected = f"{one.batch_size} sequences of {one.shape}"
            got = f"{two.batch_size} of {two.shape} in layer {i}"
            raise ValueError(sentence(where, expected, got, "Add caches of equal batches and dtypes."))
    common = overlap(a.spans, b.spans)
    if common is not None:
        got = f"both with positions {common[0]} to {common[1] - 1}"
        advice = "Begin the second where the first ends: MeasureCache(model, start=n)."
        raise ValueError(sentence(where, "disjoint positions", got, advice))
    loose = max(layer.recent for cache in (a, b) for layer in cache.compressible.values())
    if loose and next(iter(a.compressible.values())).batch_size > 1:
        advice = "Call compress(attention_mask=...) on both before: it leaves padding out."
        raise ValueError(sentence(where, "sequences of entries", f"a batch with {loose} tokens as they are", advice))
