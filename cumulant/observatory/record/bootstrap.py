"""How far the numbers of a record may be off because other documents could have been read: the cluster bootstrap.

Tokens of one document are alike, so an error that counts tokens as independent is too small. Documents are what was
drawn: they are drawn again, with replacement, and a number is computed anew from every draw. Records add up, so a draw
is the sum of one record for each document, as often as it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_integer, sentence
from cumulant.observatory.record.record import Record
from cumulant.observatory.statistics.clusters import student_quantile
from cumulant.observatory.statistics.states import flatten, unflatten
from cumulant.observatory.statistics.tally import Tally


class Interval(NamedTuple):
    """A number, the ends of its interval, and its standard error over the draws."""

    value: float
    low: float
    high: float
    error: float


def cluster_intervals(
    records: Sequence[Record],
    statistic: Callable[[Record], dict[str, float]],
    *,
    replicates: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Percentile intervals of numbers of a record, over draws of its documents with replacement.

    records    one for each document, of the same model: at least two, and a dozen for an interval worth its name
    statistic  record → numbers by name; NaN where a draw does not have one, which is left out

    The interval of t from documents 1 … n holds the middle ``level`` of t(Σ_d c_d · record_d), c ~ Multinomial(n, 1/n).
    A number that grows when a document is read twice, as the R² of a fit with many slopes, has draws that lie above it:
    `cluster_jackknife` draws no document twice.
    Distances of hidden states to a Gaussian and spectra are no sums over tokens, and are not in the records of a draw.

    >>> from cumulant.observatory.record.record import AttentionLayer
    >>> from cumulant.observatory.record.meta import Meta
    >>> layer = AttentionLayer("attention", "self", 1, 1, 4, 4, 0.5)
    >>> documents = [
    ...     Record((layer,), {"attention/entropy": Tally.of(torch.full((1, 9), x))}, {}, {}, {}, (), Meta())
    ...     for x in (1.0, 2.0, 3.0, 4.0)
    ... ]
    >>> mean = lambda record: {"entropy": record.tally("entropy").mean.item()}
    >>> found = cluster_intervals(documents, mean)["entropy"]
    >>> found.value, found.low, found.high
    (2.5, 1.5, 3.5)
    """
    require_integer("cluster_intervals.replicates", replicates, 2)
    if len(records) < 2:
        advice = "Give one record for each document."
        raise ValueError(sentence("cluster_intervals.records", "at least two documents", len(records), advice))
    documents = DocumentRecords(records)
    value = statistic(documents.counted(torch.ones(len(records), dtype=torch.int64)))
    draws: dict[str, list[float]] = {name: [] for name in value}
    for counts in draw_counts(len(records), replicates, seed):
        for name, number in statistic(documents.counted(counts)).items():
            draws.setdefault(name, []).append(number)
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    out = {}
    for name, numbers in draws.items():
        drawn = torch.tensor([x for x in numbers if x == x], dtype=torch.float64)
        low, high = torch.quantile(drawn, tail).tolist() if len(drawn) else (torch.nan, torch.nan)
        error = drawn.std().item() if len(drawn) > 1 else torch.nan
        out[name] = Interval(value.get(name, torch.nan), low, high, error)
    return out


def cluster_jackknife(
    records: Sequence[Record], statistic: Callable[[Record], dict[str, float]], *, level: float = 0.95
) -> dict[str, Interval]:
    """Intervals of numbers of a record from leaving out one document after the other, for numbers that a fit gives.

    se² = (n − 1)/n Σ_d (t_d − t̄)²,  t ± q se;  t_d without document d, q of Student's law with n − 1 degrees.

    No document is read twice, so that a fit has as little to gain as in the whole. For numbers that change smoothly
    with their documents; NaN where a number is not known without one of them.

    >>> from cumulant.observatory.record.record import AttentionLayer
    >>> from cumulant.observatory.record.meta import Meta
    >>> layer = AttentionLayer("attention", "self", 1, 1, 4, 4, 0.5)
    >>> documents = [
    ...     Record((layer,), {"attention/entropy": Tally.of(torch.full((1, 9), x))}, {}, {}, {}, (), Meta())
    ...     for x in (2.0, 4.0, 6.0)
    ... ]
    >>> mean = lambda record: {"entropy": record.tally("entropy").mean.item()}
    >>> found = cluster_jackknife(documents, mean)["entropy"]                 # of a mean: its usual error, 2/√3
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (4.0, -0.968, 8.968)
    """
    if len(records) < 2:
        advice = "Give one record for each document."
        raise ValueError(sentence("cluster_jackknife.records", "at least two documents", len(records), advice))
    documents, n = DocumentRecords(records), len(records)
    value = statistic(documents.counted(torch.ones(n, dtype=torch.int64)))
    without = [statistic(documents.counted(counts)) for counts in 1 - torch.eye(n, dtype=torch.int64)]
    out = {}
    for name, number in value.items():
        numbers = torch.tensor([one.get(name, torch.nan) for one in without], dtype=torch.float64)
        error = ((n - 1) ** 2 / n * numbers.var()).sqrt().item()
        half = student_quantile(n - 1, level) * error
        out[name] = Interval(number, number - half, number + half, error)
    return out


def draw_counts(documents: int, replicates: int, seed: int = 0) -> Tensor:
    """(replicates, documents) how often every document is drawn when as many are drawn as there are.

    >>> draw_counts(5, 2).sum(1).tolist()
    [5, 5]
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(documents, (replicates, documents), generator=generator)
    return torch.zeros(replicates, documents, dtype=torch.int64).scatter_add_(1, drawn, torch.ones_like(drawn))


class DocumentRecords:
    """Records of single documents, stacked, so that sums of them are quick.

    >>> DocumentRecords([])
    Traceback (most recent call last):
    ValueError: DocumentRecords.records: expected records of one model, got none. Observe documents one by one.
    """

    def __init__(self, records: Sequence[Record]):
        if not records or any(record.modules != records[0].modules for record in records):
            got = "of several" if records else "none"
            advice = "Observe documents one by one."
            raise ValueError(sentence("DocumentRecords.records", "records of one model", got, advice))
        self.first = records[0]
        self.tallies = _stacked([record.tallies for record in records])
        hidden = [unflatten(record.hidden) for record in records]
        of_states = [{name: s for name, s in some.items() if isinstance(s, Tally)} for some in hidden]
        self.hidden = _stacked(of_states)
        names = dict.fromkeys(name for record in records for name in record.sums)
        self.sums = {name: _stack([record.sums.get(name) for record in records]) for name in names}
        self.tokens = [record.meta.tokens for record in records]

    def counted(self, counts: Tensor) -> Record:
        """The record of a corpus in which document d is counts[d] times."""
        tokens = sum(int(count) * tokens for count, tokens in zip(counts, self.tokens, strict=True))
        return Record(
            self.first.modules,
            {name: _counted(tally, counts) for name, tally in self.tallies.items()},
            {name: torch.tensordot(counts.to(stack.dtype), stack, 1) for name, stack in self.sums.items()},
            flatten({name: _counted(tally, counts) for name, tally in self.hidden.items()}),
            self.first.weights,
            (),
            replace(self.first.meta, tokens=tokens),
        )


def _stacked(parts: Sequence[dict[str, Tally]]) -> dict[str, Tally]:
    """name → the tallies of all documents, with an axis of documents in front; empty where a document has none."""
    out = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        cells = next(len(part[name].count) for part in parts if name in part)
        tallies = [part.get(name) or Tally.empty(cells) for part in parts]
        out[name] = Tally(**{f.name: torch.stack([getattr(t, f.name) for t in tallies]) for f in fields(Tally)})
    return out


def _stack(tensors: Sequence[Tensor | None]) -> Tensor:
    known = next(tensor for tensor in tensors if tensor is not None)
    return torch.stack([torch.zeros_like(known) if tensor is None else tensor for tensor in tensors])


def _counted(tally: Tally, counts: Tensor) -> Tally:
    """The tally of documents (documents, cells, …), each as often as it is counted."""
    times = counts[:, None]
    number = (times * tally.count).sum(0)
    mean = (times * tally.count * tally.mean).sum(0) / number.clamp_min(1)
    square = (times * (tally.square + tally.count * (tally.mean - mean).square())).sum(0)
    drawn = times > 0
    return Tally(
        number,
        mean,
        square,
        torch.where(drawn, tally.low, torch.inf).amin(0),
        torch.where(drawn, tally.high, -torch.inf).amax(0),
        *(
            (counts[:, None, None] * part).sum(0)
            for part in (tally.histogram, tally.position_count, tally.position_sum)
        ),
    )
