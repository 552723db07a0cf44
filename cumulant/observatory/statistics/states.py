"""What is remembered of the hidden states at one place of a model: records of fixed size that can be merged.

Beside `Tally` for numbers there are three for vectors: `Spread`, their mean and covariance, `Within`, their scatter
about the means of their sequences, and `Sample`, a random few of the same vectors that depends neither on the order of
the texts nor on how they were divided.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.statistics.tally import Tally

SAMPLE = 512  # vectors that are kept per place


@dataclass(frozen=True, eq=False)
class Spread:
    """count (), mean (D,), and of the scatter Σ (x − mean)(x − mean)ᵀ the upper triangle (D(D+1)/2,), in float64."""

    count: Tensor
    mean: Tensor
    triangle: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Spread:
        """x (n, D). Products are formed in the precision of x, about its own mean.

        >>> import torch
        >>> Spread.of(torch.tensor([[1.0], [3.0]])).covariance
        tensor([[1.]], dtype=torch.float64)
        """
        x = x.detach().cpu()
        mean = x.mean(0, dtype=torch.float64) if len(x) else x.new_zeros(x.shape[1], dtype=torch.float64)
        centred = x - mean.to(x.dtype)
        # the rounded mean is off by a little, which the second term takes out exactly
        off = centred.mean(0, dtype=torch.float64) if len(x) else mean
        row, column = _corner(x.shape[1])
        triangle = (centred.mT @ centred)[row, column].double() - len(x) * off[row] * off[column]
        return cls(torch.tensor(len(x)), mean, triangle)

    def merge(self, other: Spread) -> Spread:
        """Of both sets; no vectors is the identity."""
        count = self.count + other.count
        share = other.count.double() / count.clamp_min(1)
        gap = other.mean - self.mean
        row, column = _corner(len(gap))
        between = (self.count * share) * gap[row] * gap[column]
        return Spread(count, self.mean + share * gap, self.triangle + other.triangle + between)

    @property
    def scatter(self) -> Tensor:
        """(D, D)."""
        return _whole(self.triangle)

    @property
    def covariance(self) -> Tensor:
        """(D, D), about the mean, divided by the count; 0 of nothing."""
        return self.scatter / self.count.clamp_min(1)

    @classmethod
    def of_sequences(cls, within: Within, centred: Centred) -> Spread:
        """What `of` gives for the vectors that ``centred`` was made of: their scatter within and between sequences."""
        mean = (centred.count[:, None] * centred.mean).sum(0) / within.tokens.clamp_min(1)
        gap = centred.mean - mean
        row, column = _corner(len(mean))
        between = ((centred.count[:, None] * gap).mT @ gap)[row, column]
        return cls(within.tokens.clone(), mean, within.triangle + between)


class Centred(NamedTuple):
    """Vectors about the means of their sequences: residual (n, D), index (n,); of sequences count (k,), mean (k, D)."""

    residual: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor

    @classmethod
    def of(cls, x: Tensor, sequence: Tensor) -> Centred:
        """x (n, D) whose sequences have the numbers (n,). Means are in float64, residuals in the precision of x.

        >>> import torch
        >>> Centred.of(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9])).residual[:, 0].tolist()
        [-1.0, 1.0, 0.0]
        """
        x = x.detach().cpu()
        index, count = sequence.unique(return_inverse=True, return_counts=True)[1:]
        mean = _means(x, index, count)
        residual = x - mean.to(x.dtype)[index]
        # the rounded mean is off by a little, which is taken out again
        residual = residual - _means(residual, index, count).to(x.dtype)[index]
        return cls(residual, index, count, mean)

    @property
    def length(self) -> Tensor:
        """Of the sequence of each vector, (n,)."""
        return self.count[self.index]


def _means(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    sums = x.new_zeros(len(count), x.shape[1], dtype=torch.float64).index_add_(0, index, x.double())
    return sums / count[:, None]


@dataclass(frozen=True, eq=False)
class Within:
    """Scatter Σ_s Σ_{i in s} (x_i − x̄_s)(x_i − x̄_s)ᵀ of vectors about the means of their sequences.

    tokens (), sequences (), triangle (D(D+1)/2,) in float64. Of Gaussian vectors with covariance C its law is that of
    Wishart for C with tokens − sequences degrees of freedom, whatever the means are.
    """

    tokens: Tensor
    sequences: Tensor
    triangle: Tensor

    @classmethod
    def of(cls, centred: Centred) -> Within:
        """
        >>> import torch
        >>> Within.of(Centred.of(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9]))).triangle.tolist()
        [2.0]
        """
        row, column = _corner(centred.residual.shape[1])
        triangle = (centred.residual.mT @ centred.residual)[row, column].double()
        return cls(torch.tensor(len(centred.residual)), torch.tensor(len(centred.count)), triangle)

    def merge(self, other: Within) -> Within:
        """Of both sets of sequences, none of which is in both."""
        return Within(self.tokens + other.tokens, self.sequences + other.sequences, self.triangle + other.triangle)

    @property
    def covariance(self) -> Tensor:
        """(D, D), divided by the tokens; 0 of nothing."""
        return _whole(self.triangle) / self.tokens.clamp_min(1)


def _whole(triangle: Tensor) -> Tensor:
    """The symmetric matrix of an upper triangle."""
    d = int((2 * triangle.numel() + 0.25) ** 0.5)
    row, column = _corner(d)
    whole = triangle.new_zeros(d, d)
    whole[row, column] = whole[column, row] = triangle
    return whole


@lru_cache(maxsize=4)
def _corner(d: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle."""
    row, column = torch.triu_indices(d, d)
    return row, column


@dataclass(frozen=True, eq=False)
class Sample:
    """The `SAMPLE` vectors of smallest priority, each about the mean of its sequence.

    priority  (m,) ascending
    state     (m, D) the vector less the mean of its sequence
    sequence  (m,) the number of its sequence
    length    (m,) how many vectors that mean is of; 0 if nothing was subtracted
    """

    priority: Tensor
    state: Tensor
    sequence: Tensor
    length: Tensor

    @classmethod
    def of(cls, x: Tensor, priority: Tensor, sequence: Tensor | None = None, length: Tensor | None = None) -> Sample:
        """x (n, D), priority, sequence and length (n,); without the last two the vectors are taken as they are."""
        order = priority.argsort(stable=True)[:SAMPLE]
        kept = x.detach()[order.to(x.device)].cpu()
        sequence, length = (torch.zeros_like(priority) if names is None else names for names in (sequence, length))
        state = kept if kept.dtype == torch.float64 else kept.float()
        return cls(priority[order], state, sequence[order], length[order])

    def merge(self, other: Sample) -> Sample:
        both = {f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Sample)}
        return Sample.of(both["state"], both["priority"], both["sequence"], both["length"])


Kept = Tally | Spread | Within | Sample
KINDS: dict[str, type[Kept]] = {"tally": Tally, "spread": Spread, "within": Within, "sample": Sample}


def flatten(kept: dict[str, Kept]) -> dict[str, Tensor]:
    """One tensor per field, under `place:kind.field`."""
    kind_of = {kind: name for name, kind in KINDS.items()}
    return {
        f"{place}:{kind_of[type(record)]}.{f.name}": getattr(record, f.name).contiguous()
        for place, record in kept.items()
        for f in fields(record)
    }


def unflatten(state: dict[str, Tensor]) -> dict[str, Kept]:
    """The inverse of `flatten`; in any order of the keys."""
    grouped: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        place, _, rest = key.rpartition(":")
        kind, _, name = rest.partition(".")
        if kind not in KINDS:
            expected, advice = (
                f"keys place:kind.field with kind in {sorted(KINDS)}",
                "Give what LayerWatch.state returned.",
            )
            raise ValueError(sentence("layers.state", expected, repr(key), advice))
        grouped.setdefault((place, kind), {})[name] = tensor
    out = {}
    for (place, kind), parts in grouped.items():
        names = {f.name for f in fields(KINDS[kind])}
        if parts.keys() != names:
            lost = ", ".join(sorted(names ^ parts.keys()))
            raise ValueError(
                sentence("layers.state", f"every field of {place}", f"{lost} amiss", "The record is broken.")
            )
        out[place] = KINDS[kind](**parts)
    return out


def merge_places(one: dict[str, Kept], other: dict[str, Kept]) -> dict[str, Kept]:
    """Both records; a place that only one of them has is taken as it is."""
    both = one | other
    return {p: one[p].merge(other[p]) if p in one and p in other else both[p] for p in both}  # pyright: ignore[reportArgumentType]
