"""Statistics of the hidden states at one stage of a model: records of fixed size that can be merged.

Beside `Tally` for numbers there are three for vectors: `MeanScatter`, their mean and covariance, `WithinScatter`, their
scatter about the means of their sequences, and `StateSample`, a random few of the same vectors that depends neither on
the order of the texts nor on how they were divided.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.statistics.tally import Tally

SAMPLE_SIZE = 512  # vectors that are kept per stage
MAX_COVARIANCE_WIDTH = 1024  # states with more channels keep no covariance
FIRST_TOKENS = 16  # of the first text, which are in every sample of tokens


@dataclass(frozen=True, eq=False)
class MeanScatter:
    """count (), mean (D,), and of the scatter Σ (x − mean)(x − mean)ᵀ the upper triangle (D(D+1)/2,), in float64."""

    count: Tensor
    mean: Tensor
    triangle: Tensor

    @classmethod
    def of(cls, x: Tensor) -> MeanScatter:
        """x (n, D). Products are formed in the precision of x, about its own mean.

        >>> import torch
        >>> MeanScatter.of(torch.tensor([[1.0], [3.0]])).covariance
        tensor([[1.]], dtype=torch.float64)
        """
        x = x.detach().cpu()
        mean = x.mean(0, dtype=torch.float64) if len(x) else x.new_zeros(x.shape[1], dtype=torch.float64)
        centred = x - mean.to(x.dtype)
        # the rounded mean is off by a little, which the second term takes out exactly
        off = centred.mean(0, dtype=torch.float64) if len(x) else mean
        row, column = _upper_triangle(x.shape[1])
        triangle = (centred.mT @ centred)[row, column].double() - len(x) * off[row] * off[column]
        return cls(torch.tensor(len(x)), mean, triangle)

    def merge(self, other: MeanScatter) -> MeanScatter:
        """Of both sets; no vectors is the identity."""
        count = self.count + other.count
        share = other.count.double() / count.clamp_min(1)
        gap = other.mean - self.mean
        row, column = _upper_triangle(len(gap))
        between = (self.count * share) * gap[row] * gap[column]
        return MeanScatter(count, self.mean + share * gap, self.triangle + other.triangle + between)

    @property
    def scatter(self) -> Tensor:
        """(D, D)."""
        return _symmetric(self.triangle)

    @property
    def covariance(self) -> Tensor:
        """(D, D), about the mean, divided by the count; 0 of nothing."""
        return self.scatter / self.count.clamp_min(1)

    @classmethod
    def of_sequences(cls, within: WithinScatter, centred: CentredStates) -> MeanScatter:
        """What `of` gives for the vectors that ``centred`` was made of: their scatter within and between sequences."""
        mean = (centred.count[:, None] * centred.mean).sum(0) / within.tokens.clamp_min(1)
        gap = centred.mean - mean
        row, column = _upper_triangle(len(mean))
        between = ((centred.count[:, None] * gap).mT @ gap)[row, column]
        return cls(within.tokens.clone(), mean, within.triangle + between)


class CentredStates(NamedTuple):
    """Vectors about the means of their sequences: residual (n, D), index (n,); of sequences count (k,), mean (k, D)."""

    residual: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor

    @classmethod
    def of(cls, x: Tensor, sequence: Tensor) -> CentredStates:
        """x (n, D) whose sequences have the numbers (n,). Means are in float64, residuals in the precision of x.

        >>> import torch
        >>> CentredStates.of(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9])).residual[:, 0].tolist()
        [-1.0, 1.0, 0.0]
        """
        x = x.detach().cpu()
        index, count = sequence.unique(return_inverse=True, return_counts=True)[1:]
        mean = _sequence_means(x, index, count)
        residual = x - mean.to(x.dtype)[index]
        # the rounded mean is off by a little, which is taken out again
        residual = residual - _sequence_means(residual, index, count).to(x.dtype)[index]
        return cls(residual, index, count, mean)

    @property
    def length(self) -> Tensor:
        """Of the sequence of each vector, (n,)."""
        return self.count[self.index]


def _sequence_means(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    sums = x.new_zeros(len(count), x.shape[1], dtype=torch.float64).index_add_(0, index, x.double())
    return sums / count[:, None]


@dataclass(frozen=True, eq=False)
class WithinScatter:
    """Scatter Σ_s Σ_{i in s} (x_i − x̄_s)(x_i − x̄_s)ᵀ of vectors about the means of their sequences.

    tokens (), sequences (), triangle (D(D+1)/2,) in float64. Of Gaussian vectors with covariance C its law is that of
    Wishart for C with tokens − sequences degrees of freedom, whatever the means are.
    """

    tokens: Tensor
    sequences: Tensor
    triangle: Tensor

    @classmethod
    def of(cls, centred: CentredStates) -> WithinScatter:
        """
        >>> import torch
        >>> centred = CentredStates.of(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9]))
        >>> WithinScatter.of(centred).triangle.tolist()
        [2.0]
        """
        row, column = _upper_triangle(centred.residual.shape[1])
        triangle = (centred.residual.mT @ centred.residual)[row, column].double()
        return cls(torch.tensor(len(centred.residual)), torch.tensor(len(centred.count)), triangle)

    def merge(self, other: WithinScatter) -> WithinScatter:
        """Of both sets of sequences, none of which is in both."""
        return WithinScatter(
            self.tokens + other.tokens, self.sequences + other.sequences, self.triangle + other.triangle
        )

    @property
    def covariance(self) -> Tensor:
        """(D, D), divided by the tokens; 0 of nothing."""
        return _symmetric(self.triangle) / self.tokens.clamp_min(1)


def _symmetric(triangle: Tensor) -> Tensor:
    """The symmetric matrix of an upper triangle."""
    d = int((2 * triangle.numel() + 0.25) ** 0.5)
    row, column = _upper_triangle(d)
    whole = triangle.new_zeros(d, d)
    whole[row, column] = whole[column, row] = triangle
    return whole


@lru_cache(maxsize=4)
def _upper_triangle(d: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle."""
    row, column = torch.triu_indices(d, d)
    return row, column


@dataclass(frozen=True, eq=False)
class StateSample:
    """The `SAMPLE_SIZE` vectors of smallest priority, each about the mean of its sequence.

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
    def of(
        cls, x: Tensor, priority: Tensor, sequence: Tensor | None = None, length: Tensor | None = None
    ) -> StateSample:
        """x (n, D), priority, sequence and length (n,); without the last two the vectors are taken as they are."""
        order = priority.argsort(stable=True)[:SAMPLE_SIZE]
        vectors = x.detach()[order.to(x.device)].cpu()
        sequence, length = (torch.zeros_like(priority) if names is None else names for names in (sequence, length))
        state = vectors if vectors.dtype == torch.float64 else vectors.float()
        return cls(priority[order], state, sequence[order], length[order])

    def merge(self, other: StateSample) -> StateSample:
        both = {f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(StateSample)}
        return StateSample.of(both["state"], both["priority"], both["sequence"], both["length"])


Statistic = Tally | MeanScatter | WithinScatter | StateSample
STATISTIC_TYPES: dict[str, type[Statistic]] = {
    "tally": Tally,
    "spread": MeanScatter,
    "within": WithinScatter,
    "sample": StateSample,
}


class PassTokens(NamedTuple):
    """Tokens of a pass: rows (b, L) where there is one, its position and priority, texts (b,), sampled (k,) of them.

    sampled  the sequences from which directions and covariances are taken
    """

    rows: Tensor
    position: Tensor
    priority: Tensor
    texts: Tensor
    sampled: Tensor

    def one_in(self, number: int) -> tuple[Tensor, Tensor]:
        """Sequence and index of one token in ``number``, by a hash, and of `FIRST_TOKENS` of the first text.

        >>> import torch
        >>> priority = torch.arange(20)[None] * 2**58                          # 0, 1/32, 2/32, … of the largest
        >>> tokens = PassTokens(torch.ones(1, 20, dtype=torch.bool), priority, priority, torch.tensor([7]), priority[0])
        >>> [i.tolist() for i in tokens.one_in(16)], len(tokens._replace(texts=torch.tensor([0])).one_in(16)[0])
        ([[0, 0], [0, 1]], 16)
        """
        drawn = self.priority <= (2**63 - 1) // number
        first = self.priority.masked_fill(~self.rows, torch.iinfo(torch.int64).max).argsort(1).argsort(1) < FIRST_TOKENS
        chosen = (drawn | (first & (self.texts == 0)[:, None])) & self.rows
        return chosen.nonzero(as_tuple=True)  # pyright: ignore[reportReturnType]


def state_statistics(
    x: Tensor, tokens: PassTokens, *, ends: bool, covariance: bool, before: Statistic | None
) -> dict[str, Statistic]:
    """Statistics of states (b, L, D) at one stage: size, cosine, pairwise, and spread; at the ends of a block also
    within and sample.

    before  the sample of earlier passes: what it would not take in is not looked at
    """
    size = torch.linalg.vector_norm(x, dim=-1, dtype=at_least_single(x.dtype)).cpu()
    here = tokens.rows & size.isfinite()
    if not bool(here.any()):
        return {}
    out: dict[str, Statistic] = {"size": tally(size[here] / x.shape[-1] ** 0.5, tokens.position[here])}
    index = tokens.sampled
    x, size, here, position = x[index.to(x.device)], size[index], here[index], tokens.position[index]
    x = x.to(at_least_single(x.dtype))
    if not bool(here.any()):
        return out
    if not bool(size.isfinite().all()):
        x = x.masked_fill(~here[..., None].to(x.device), 0)
    weight = torch.where(here & (size > 0), 1 / size, 0).to(x.device)
    total = torch.einsum("bl,bld->bd", weight, x)  # sum of the unit vectors of a sequence
    length, n = torch.linalg.vector_norm(total, dim=-1), (weight > 0).sum(1)
    cosine = torch.einsum("bld,bd->bl", x, total) * weight / length[:, None]
    out["cosine"] = tally(cosine.cpu()[here], position[here])
    out["pairwise"] = tally((length.square() - n) / (n * (n - 1)))
    vectors, covariance = x[here.to(x.device)], covariance and x.shape[-1] <= MAX_COVARIANCE_WIDTH
    if not ends:
        return out | ({"spread": MeanScatter.of(vectors)} if covariance else {})
    texts = tokens.texts[index, None].expand_as(here)[here]
    centred = CentredStates.of(vectors, texts)
    sample = _new_sample(centred, tokens.priority[index][here], texts, before)
    out |= {} if sample is None else {"sample": sample}
    if covariance:
        out["within"] = within = WithinScatter.of(centred)
        out["spread"] = MeanScatter.of_sequences(within, centred)
    return out


def _new_sample(
    centred: CentredStates, priority: Tensor, texts: Tensor, before: Statistic | None
) -> StateSample | None:
    index = (centred.length > 1).nonzero()[:, 0]  # one token alone is its own mean
    if isinstance(before, StateSample) and len(before.priority) == SAMPLE_SIZE:
        index = index[priority[index] < before.priority[-1]]
    if not len(index):
        return None
    return StateSample.of(centred.residual[index], priority[index], texts[index], centred.length[index])


def tally(values: Tensor, positions: Tensor | None = None) -> Tally:
    """Of numbers (n,), as one cell."""
    return Tally.of(values[None], positions)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The precision in which states of this dtype are summed."""
    return dtype if dtype == torch.float64 else torch.float32


def flatten(statistics: dict[str, Statistic]) -> dict[str, Tensor]:
    """One tensor per field, under `key:type.field`."""
    names = {kind: name for name, kind in STATISTIC_TYPES.items()}
    return {
        f"{key}:{names[type(statistic)]}.{f.name}": getattr(statistic, f.name).contiguous()
        for key, statistic in statistics.items()
        for f in fields(statistic)
    }


def unflatten(state: dict[str, Tensor]) -> dict[str, Statistic]:
    """The inverse of `flatten`; in any order of the keys."""
    grouped: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        key, _, rest = name.rpartition(":")
        kind, _, part = rest.partition(".")
        if kind not in STATISTIC_TYPES:
            expected = f"keys key:type.field with a type in {sorted(STATISTIC_TYPES)}"
            advice = "Give what HiddenStateObserver.state returned."
            raise ValueError(sentence("layers.state", expected, repr(name), advice))
        grouped.setdefault((key, kind), {})[part] = tensor
    out = {}
    for (key, kind), parts in grouped.items():
        names = {f.name for f in fields(STATISTIC_TYPES[kind])}
        if parts.keys() != names:
            lost = ", ".join(sorted(names ^ parts.keys()))
            raise ValueError(
                sentence("layers.state", f"every field of {key}", f"{lost} amiss", "The record is broken.")
            )
        out[key] = STATISTIC_TYPES[kind](**parts)
    return out


def merge_statistics(one: dict[str, Statistic], other: dict[str, Statistic]) -> dict[str, Statistic]:
    """Both, key by key; a key that only one of them has is taken as it is."""
    both = one | other
    return {k: one[k].merge(other[k]) if k in one and k in other else both[k] for k in both}  # pyright: ignore[reportArgumentType]
