"""What is remembered of the hidden states at one place of a model: records of fixed size that can be merged.

Beside `Tally` for numbers there are two for vectors: `Spread`, their mean and covariance, and `Sample`, a random few of
them that depends neither on the order of the texts nor on how they were divided.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.tally import Tally

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
        row, column = _corner(len(self.mean))
        whole = self.triangle.new_zeros(len(self.mean), len(self.mean))
        whole[row, column] = whole[column, row] = self.triangle
        return whole

    @property
    def covariance(self) -> Tensor:
        """(D, D), about the mean, divided by the count; 0 of nothing."""
        return self.scatter / self.count.clamp_min(1)


@lru_cache(maxsize=4)
def _corner(d: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle."""
    row, column = torch.triu_indices(d, d)
    return row, column


@dataclass(frozen=True, eq=False)
class Sample:
    """The `SAMPLE` vectors of smallest priority: priority (m,) ascending, state (m, D)."""

    priority: Tensor
    state: Tensor

    @classmethod
    def of(cls, x: Tensor, priority: Tensor) -> Sample:
        """x (n, D), priority (n,)."""
        order = priority.argsort(stable=True)[:SAMPLE]
        kept = x.detach()[order.to(x.device)].cpu()
        return cls(priority[order], kept if kept.dtype == torch.float64 else kept.float())

    def merge(self, other: Sample) -> Sample:
        return Sample.of(torch.cat([self.state, other.state]), torch.cat([self.priority, other.priority]))


Kept = Tally | Spread | Sample
KINDS: dict[str, type[Kept]] = {"tally": Tally, "spread": Spread, "sample": Sample}


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
