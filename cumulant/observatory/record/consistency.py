"""Whether the parts of a record fit each other: what a file that was cut, mixed up or edited by hand may break."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cumulant.observatory.record.meta import abbreviated, is_count, is_string
from cumulant.observatory.statistics.quantities import CHANCES, DISTANCE_EDGES
from cumulant.observatory.statistics.states import MeanScatter, StateSample, WithinScatter, unflatten
from cumulant.observatory.statistics.tally import BINS, POSITIONS, Tally
from cumulant.observatory.statistics.text_parts import SUMS as PART_SUMS

if TYPE_CHECKING:
    from cumulant.observatory.record.record import AttentionLayer, Record

LINK = {"eta": 1, "mean": 1, "eta_eta": 2, "mean_mean": 2, "eta_mean": 2}  # axes after the heads
KEYS = {"sum": 1, "square": 2}
TARGET_SUMS = {q.name.replace("_chance", "/chance"): () for q in CHANCES}
TARGET_SUMS |= {"distance/count": (), **dict.fromkeys(("distance/mass", "distance/before"), (len(DISTANCE_EDGES),))}
COUNTED = ("count", "tokens", "sequences", "priority", "length")  # of what is kept of vectors


def inconsistency(record: Record) -> str | None:
    """The first part of a record that does not fit the others, in words; None if all do.

    >>> from cumulant.observatory.record.record import Meta, Record
    >>> inconsistency(Record((), {}, {}, {}, {"h/gradientness": torch.zeros(2)}, (), Meta()))
    'weights of h/gradientness of shape (2,) where (-1,) is needed'
    """
    return next(_all(record), None)


def _all(record: Record) -> Iterator[str]:
    yield from _layers(record.modules)
    yield from _tallies(record)
    yield from _sums(record)
    yield from _hidden(record.hidden)
    yield from _excerpts(record)


def _layers(layers: tuple[AttentionLayer, ...]) -> Iterator[str]:
    for layer in layers:
        counts = (layer.heads, layer.key_heads, layer.dim, layer.width)
        if not (is_string(layer.name) and is_string(layer.kind) and all(map(is_count, counts)) and layer.heads):
            yield f"a layer {abbreviated(layer.name)} without a name, a kind and whole numbers of heads and channels"
        if isinstance(layer.scale, bool) or not isinstance(layer.scale, int | float):
            yield f"a layer {abbreviated(layer.name)} whose scale is no number"
    if len({layer.name for layer in layers}) < len(layers):
        yield "two layers of one name"


def _tallies(record: Record) -> Iterator[str]:
    heads = {layer.name: layer.heads for layer in record.modules}
    for key, tally in record.tallies.items():
        cells = heads.get(key.rpartition("/")[0])
        yield from [f"tally {key} of a layer that is not listed"] if cells is None else _tally(key, tally, (cells,))


def _tally(name: str, tally: Tally, cells: tuple[int, ...]) -> Iterator[str]:
    for part in ("count", "histogram", "position_count"):
        values = getattr(tally, part)
        if values.is_floating_point() or bool((values < 0).any()):
            yield f"{part} of {name} with negative or broken numbers"
    ends = {"histogram": (BINS,), "position_count": (POSITIONS,), "position_sum": (POSITIONS,)}
    for part, values in tally.tensors().items():
        yield from _shape(f"{part} of {name}", values, (*cells, *ends.get(part, ())))


def _whole_numbers(what: str, values: Tensor) -> Iterator[str]:
    if values.is_floating_point() or bool((values < 0).any()):
        yield f"{what} with negative or broken numbers"


def _sums(record: Record) -> Iterator[str]:
    heads = {layer.name: layer.heads for layer in record.modules}
    for key, value in record.weights.items():
        yield from _shape(f"weights of {key}", value, (heads.get(key.rpartition("/")[0], -1),))
    named = len(record.meta.parts)
    layer_sums = TARGET_SUMS | (dict.fromkeys(PART_SUMS, (1 + named, named)) if named else {})
    known = {f"{layer.name}/{name}" for layer in record.modules for name in (*_sum_names(), *layer_sums)}
    yield from (f"sums {key} of no layer" for key in record.sums if key not in known)
    for layer in record.modules:
        own = {name: record.sums.get(f"{layer.name}/{name}") for name in _sum_names()}
        present = {name: value for name, value in own.items() if value is not None}
        if present and len(present) < len(own):
            yield f"sums of {layer.name} without {', '.join(sorted(own.keys() - present.keys()))}"
        for name, value in present.items():
            axes = (LINK | KEYS).get(name.partition("/")[2], 0)
            yield from _shape(f"{name} of {layer.name}", value, (layer.heads, *[layer.dim] * axes))
        for name, ends in layer_sums.items():
            value = record.sums.get(f"{layer.name}/{name}")
            if value is not None:
                yield from _shape(f"{name} of {layer.name}", value, (layer.heads, *ends))


def _sum_names() -> tuple[str, ...]:
    parts = [f"link/{name}" for name in ("count", *LINK)] + [f"keys/{name}" for name in ("count", *KEYS)]
    return (*parts, "gauss/left", "gauss/whole")


def _hidden(state: dict[str, Tensor]) -> Iterator[str]:
    vectors: dict[str, list[MeanScatter | WithinScatter | StateSample]] = {}
    for key, statistic in unflatten(state).items():
        if isinstance(statistic, Tally):
            yield from _tally(key, statistic, (1,))
        else:
            yield from _vectors(key, statistic)
            vectors.setdefault(key.rpartition("/")[0], []).append(statistic)
    for cell, parts in vectors.items():
        yield from _cell(cell, parts)


def _vectors(key: str, statistic: MeanScatter | WithinScatter | StateSample) -> Iterator[str]:
    m, d = (statistic.priority.numel() if isinstance(statistic, StateSample) else 0), _channels(statistic)
    scalar, triangle = (), (d * (d + 1) // 2,)
    shapes: dict[type, dict[str, tuple[int, ...]]] = {
        MeanScatter: {"count": scalar, "mean": (d,), "triangle": triangle},
        WithinScatter: {"tokens": scalar, "sequences": scalar, "triangle": triangle},
        StateSample: {"priority": (m,), "state": (m, d), "sequence": (m,), "length": (m,)},
    }
    for part, shape in shapes[type(statistic)].items():
        values = getattr(statistic, part)
        yield from _shape(f"{part} of {key}", values, shape)
        if part in COUNTED:
            yield from _whole_numbers(f"{part} of {key}", values)
        elif values.is_floating_point() == (part == "sequence"):
            yield f"{part} of {key} of type {values.dtype}"


def _channels(statistic: MeanScatter | WithinScatter | StateSample) -> int:
    """D, by the tensor that says it most plainly; that of the largest triangle that fits in for `WithinScatter`."""
    if isinstance(statistic, WithinScatter):
        return (math.isqrt(8 * statistic.triangle.numel() + 1) - 1) // 2
    return (
        statistic.mean.numel()
        if isinstance(statistic, MeanScatter)
        else statistic.state.shape[-1]
        if statistic.state.ndim
        else 0
    )


def _cell(cell: str, parts: list[MeanScatter | WithinScatter | StateSample]) -> Iterator[str]:
    """One stage of the model, whose mean, scatter and sample are of the same vectors."""
    if len({_channels(part) for part in parts}) > 1:
        yield f"vectors of {cell} with {' and '.join(str(_channels(part)) for part in parts)} channels"
    within = next((part for part in parts if isinstance(part, WithinScatter)), None)
    sample = next((part for part in parts if isinstance(part, StateSample)), None)
    if within is not None and bool(within.sequences > within.tokens):
        yield f"more sequences than tokens of {cell}"
    if within is not None and sample is not None and sample.priority.numel() > int(within.tokens):
        yield f"more sampled vectors than tokens of {cell}"


def _excerpts(record: Record) -> Iterator[str]:
    heads = {layer.name: layer.heads for layer in record.modules}
    for excerpt in record.excerpts:
        if not is_string(excerpt.name) or not all(map(is_string, excerpt.tokens)):
            yield f"an excerpt {abbreviated(excerpt.name)} whose name and tokens are no strings"
        for by_layer in excerpt.values.values():
            for name, values in by_layer.items():
                yield from _shape(f"excerpt {excerpt.name}", values, (heads.get(name, -1), len(excerpt.tokens)))


def _shape(what: str, tensor: Tensor, expected: tuple[int, ...]) -> Iterator[str]:
    if tensor.shape != torch.Size([max(n, 0) for n in expected]) or min(expected, default=0) < 0:
        yield f"{what} of shape {tuple(tensor.shape)} where {expected} is needed"
