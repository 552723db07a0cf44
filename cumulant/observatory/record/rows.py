"""Rows of the tables, and the one naming scheme of their columns, in heads.parquet, layers.parquet and on the page.

    Q                     the quantity: its mean over tokens, or a number of its own, such as a fit
    Q_std, Q_p05, …       of its law over tokens
    Q_null_NAME           Q of the record of a null, "random" or "shuffled"
    Q_null, …             of a distance to a Gaussian: the same of Gaussian samples

statistics/quantities.py has every column and every ending with its meaning (`cumulant columns`). series.parquet has a
row for each Q, with the columns value, std, count and null in the place of Q, Q_std, Q_count and Q_null. What is not
known is NaN here, and null in the files and on the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import NamedTuple

from cumulant.observatory.statistics.head_types import head_types
from cumulant.observatory.statistics.tally import Tally

PERCENTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Cell = str | int | float | None


class TokenStatistics(NamedTuple):
    """The law of a quantity over tokens."""

    value: float = nan
    std: float = nan
    se: float = nan
    count: int = 0
    p05: float = nan
    p25: float = nan
    p50: float = nan
    p75: float = nan
    p95: float = nan

    @classmethod
    def of(cls, tally: Tally) -> list[TokenStatistics]:
        """Of every cell.

        >>> import torch
        >>> TokenStatistics.of(Tally.of(torch.tensor([[1.0, 3.0]])))[0][:4]
        (2.0, 1.0, 1.0, 2)
        """
        parts = (tally.mean, tally.spread, tally.standard_error, *map(tally.quantile, PERCENTILES))
        numbers = zip(*(map(finite, part.tolist()) for part in parts), strict=True)
        return [
            TokenStatistics(mean, std, se, count, *percentiles) if count else TokenStatistics()
            for count, (mean, std, se, *percentiles) in zip(tally.count.tolist(), numbers, strict=True)
        ]


class NullComparison(NamedTuple):
    """A distance to a Gaussian, and the mean and the band of the same distance of Gaussian samples."""

    value: float = nan
    null: float = nan
    null_low: float = nan
    null_high: float = nan


def columns(name: str, value: object) -> dict[str, Cell]:
    """Under the names of the scheme.

    >>> columns("lle_error", NullComparison(0.5, 0.1))
    {'lle_error': 0.5, 'lle_error_null': 0.1, 'lle_error_null_low': nan, 'lle_error_null_high': nan}
    """
    if isinstance(value, TokenStatistics | NullComparison):
        return {name if part == "value" else f"{name}_{part}": cell for part, cell in value._asdict().items()}
    return {name: value}  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class HeadRow:
    """One head; what its fields mean is in `quantities.HEAD_NAMES`.

    quantities  of its tokens: `quantities.QUANTITIES`
    numbers     of the head: `quantities.FITS`, and `quantities.WEIGHT_NUMBERS` that follow from its weights
    """

    layer: int
    head: int
    name: str = ""
    block: str | None = None
    kind: str = "self"
    hopfield_class: str | None = None
    quantities: dict[str, TokenStatistics] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    link_queries: int | None = None
    link_needed: int | None = None

    def value(self, name: str) -> float:
        """Of a quantity or a number."""
        return self.quantities[name].value if name in self.quantities else self.numbers.get(name, nan)

    def columns(self, nulls: dict[str, HeadRow] | None = None) -> dict[str, Cell]:
        """As a row of heads.parquet, beside the same head of the nulls."""
        names = ("layer", "head", "name", "block", "kind", "hopfield_class", "link_queries", "link_needed")
        row: dict[str, Cell] = {name: getattr(self, name) for name in names}
        row["head_types"] = ", ".join(kind.name for kind in head_types(self)) or None
        for name, value in (self.quantities | self.numbers).items():
            row |= columns(name, value)
        for null, other in (nulls or {}).items():
            row |= {f"{name}_null_{null}": other.value(name) for name in (*other.quantities, *other.numbers)}
        return row


class LayerRow(NamedTuple):
    """The hidden states at one stage of a block.

    Which stage is in `quantities.STAGE_NAMES`, what is measured there in `quantities.STATES`, `LENS`, `ADDED`,
    `COVARIANCES`, `DISTANCES` and `STATE_COUNTS`.
    """

    block: str
    stage: str
    role: str = "state"
    layer: int | None = None
    tokens: int = 0
    perturbed: int = 0
    rms: TokenStatistics = TokenStatistics()
    cosine_to_mean: TokenStatistics = TokenStatistics()
    pairwise_cosine: TokenStatistics = TokenStatistics()
    growth: TokenStatistics = TokenStatistics()
    step: TokenStatistics = TokenStatistics()
    inverse: TokenStatistics = TokenStatistics()
    contraction: TokenStatistics = TokenStatistics()
    lens_entropy: TokenStatistics = TokenStatistics()
    lens_kl: TokenStatistics = TokenStatistics()
    lens_loss: TokenStatistics = TokenStatistics()
    lens_agreement: TokenStatistics = TokenStatistics()
    attention_contribution: TokenStatistics = TokenStatistics()
    attention_contribution_cosine: TokenStatistics = TokenStatistics()
    cross_attention_contribution: TokenStatistics = TokenStatistics()
    cross_attention_contribution_cosine: TokenStatistics = TokenStatistics()
    mlp_contribution: TokenStatistics = TokenStatistics()
    mlp_contribution_cosine: TokenStatistics = TokenStatistics()
    variance: float = nan
    effective_rank: float = nan
    participation_ratio: float = nan
    top_share: float = nan
    channels: int = 0
    whitened: int = 0
    freedom: int = 0
    gaussian_rank: int = 0
    mardia_dim: int = 0
    sampled: int = 0
    reconstructed: int = 0
    sliced_w2: NullComparison = NullComparison()
    skewness: NullComparison = NullComparison()
    kurtosis: NullComparison = NullComparison()
    lle_error: NullComparison = NullComparison()

    def columns(self) -> dict[str, Cell]:
        """As a row of layers.parquet."""
        row: dict[str, Cell] = {}
        for name, value in self._asdict().items():
            row |= columns(name, value)
        return row


def known(values: Iterable[float]) -> list[float]:
    """Those that are."""
    return [value for value in values if isfinite(value)]


def finite(number: float) -> float:
    """NaN for what is infinite: nothing is known of it."""
    return number if isfinite(number) else nan
