"""Whether a filter is as sure as it may be: NIS, autocorrelation, calibration of modes, NEES, and one sentence on them.

| number          | of                                        | expected | its 95 % band                         |
|-----------------|-------------------------------------------|----------|---------------------------------------|
| NIS             | squared scores z² of all numbers, mean    | 1        | χ² with n degrees of freedom, over n  |
| autocorrelation | products of scores, k measurements apart  | 0        | ± 1.96/√n                             |
| share of a mode | probability after the observation, mean   | before   | ± 1.96 √Σ(after − before)²/n          |
| NEES            | eᵀP⁻¹e/d with e = estimate − truth, mean  | 1        | χ² with d·n degrees, n effective rows |

Scores are those of `innovations`: for a switching filter by the transform of its predicted mixture, so that NIS is χ²
however many modes there are. NEES uses mean and covariance of the mixture. P(s_t = j | y_1 … y_t) less
P(s_t = j | y_1 … y_{t−1}) has mean 0 given the past, whatever the truth was: that is what calibrates modes without one.

What is wrong shows in two signs. Innovations larger than predicted are overconfidence; innovations that agree with
the ones before (positive autocorrelation) say that the estimate lags behind, that process noise is small against
measurement noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.display import one_line
from cumulant.filters.chi_square import chi_square_quantile
from cumulant.filters.innovations import Innovations

LAGS = 10
MIN_SCORES = 20  # scores from which there is a verdict
TOLERATED = 0.1  # a NIS this near 1 is good enough, however narrow its band
TOLERATED_MEMORY = 0.15  # an autocorrelation this near 0 is, where NIS is good
OUTLIER = 4.0  # a score beyond, of which a normal law has 6 in 100 000
SHARE_OF_OUTLIERS = 0.1  # of the scores: more of them are noise, not outliers
SHARE_LEFT = 0.3  # of what NIS is above 1, that may be left without outliers
TOO_SURE = {  # by the sign of the autocorrelation
    1: "The filter is overconfident and lags behind: raise process noise (q).",
    0: "The filter is overconfident: raise process noise (q) and measurement noise, variances by about {:.2g} times.",
    -1: "The filter is overconfident and follows the noise: raise measurement noise.",
}
NOT_SURE = {
    1: "The filter is underconfident and lags behind: lower measurement noise.",
    0: "The filter is underconfident: lower process noise (q) and measurement noise, variances to {:.2g} of theirs.",
    -1: "The filter is underconfident and follows the noise: lower process noise (q).",
}
NORMAL_95 = 1.959963984540054
MOST_REJECTED = 0.1  # of all numbers: more of them are no outliers


class BandedValue(NamedTuple):
    """A number, the band in which it lies 95 times in 100 if the model is right, and how many it is the mean of.

        low ≤ value ≤ high

    >>> BandedValue(1.3, 0.8, 1.2, 100).inside
    False
    """

    value: float
    low: float
    high: float
    count: float

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high


class Consistency(NamedTuple):
    """What `consistency` found: NIS = mean z², ρ_k, shares of modes, NEES, each with its band, and a verdict.

    nis              of all entries; ``entries`` of each by its name
    autocorrelation  for lags 1, 2, …
    modes            share of each mode after the observations, with the band around the share before them
    nees             of the state, over its size; None without truth
    outliers         scores beyond 4
    rejected         entries that a gate rejected
    status           "consistent", "overconfident", "underconfident", "correlated", "rejecting" (a gate
                     rejects more than a tenth) or "unknown" (too few rows)
    verdict          one or two sentences: what is wrong, and what to change
    """

    nis: BandedValue
    entries: dict[str, BandedValue]
    autocorrelation: tuple[BandedValue, ...]
    modes: dict[str, BandedValue]
    nees: BandedValue | None
    outliers: int
    rejected: int
    status: str
    verdict: str

    def __repr__(self) -> str:
        return one_line("Consistency", {"nis": self.nis.value, "status": self.status})

    def table(self) -> list[dict[str, object]]:
        """Rows of number, value, band and whether it is inside."""
        named = [("NIS", self.nis), *((f"NIS of {name}", v) for name, v in self.entries.items())]
        named += [(f"autocorrelation, lag {k}", v) for k, v in enumerate(self.autocorrelation, 1)]
        named += [(f"share of {name}", v) for name, v in self.modes.items()]
        named += [("NEES", self.nees)] if self.nees is not None else []
        return [{"number": name, **v._asdict(), "inside": v.inside} for name, v in named]


def consistency(
    found: Innovations | Sequence[Innovations],
    *,
    names: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    errors: Sequence[Tensor] | None = None,
    size: int = 0,
) -> Consistency:
    """Judge one or several runs of a filter:  NIS = mean z²,  ρ_k = Σ z_t z_{t+k} / Σ z_t².

    found   from `innovations`, for several tracks together or one after the other
    names   of the m entries of y
    modes   names of the modes
    errors  NEES (T,) of each sequence where truth is known, from `nees`, and ``size``, the entries of the state they
            are of

    >>> import torch
    >>> from cumulant.filters import SwitchingLinearGaussian, innovations
    >>> eye, zero = torch.eye(1).double(), torch.zeros(1).double()
    >>> def walk(q):
    ...     return SwitchingLinearGaussian(eye, eye, q * eye, eye, eye, initial_mean=zero, initial_covariance=eye)
    >>> y = walk(1.0).simulate(400, generator=torch.Generator().manual_seed(0)).observations
    >>> print(consistency(innovations(walk(1.0), y)).status)
    consistent
    >>> print(consistency(innovations(walk(0.05), y)).verdict.split(". ")[0])
    The filter is overconfident and lags behind: raise process noise (q)
    """
    sequences = _sequences([found] if isinstance(found, Innovations) else found)
    m = sequences[0].scores.shape[-1]
    names = [str(k) for k in range(m)] if names is None else names
    if len(names) != m:
        raise ValueError(sentence("consistency.names", f"{m} names", len(names), "One for each entry of y."))
    scores = torch.cat([s.scores for s in sequences])
    nis = _nis(scores)
    by_entry = {name: _nis(scores[:, k]) for k, name in enumerate(names) if bool((~scores[:, k].isnan()).any())}
    correlations = _autocorrelation(sequences)
    shares = _shares(sequences, modes)
    of_truth = None if errors is None else _nees_band(errors, size)
    outliers = int((scores.abs() > OUTLIER).sum())
    rejected = int(sum(s.rejected.sum() for s in sequences))
    trimmed = _nis(torch.where(scores.abs() > OUTLIER, torch.nan, scores))
    lost = _rejection(sequences, names)
    status, verdict = lost or _verdict(nis, by_entry, correlations, shares, of_truth, outliers, trimmed)
    return Consistency(nis, by_entry, correlations, shares, of_truth, outliers, rejected, status, verdict)


def nees(mean: Tensor, covariance: Tensor, truth: Tensor) -> Tensor:
    """The normalised squared error of estimates, NEES_t = eᵀ P⁻¹ e with e = mean − truth, over what truth has.

    mean and truth (…, d), covariance (…, d, d); NaN in truth where an entry is unknown, and in the result where all
    are. A singular P, where the filter is certain, counts the directions in which it is not.

    >>> import torch
    >>> nees(torch.tensor([3.0, 0.0]), torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([1.0, float("nan")]))
    tensor(1.)
    """
    if mean.shape != truth.shape:
        raise ValueError(sentence("nees.truth", f"shape {shape(mean)} as mean", shape(truth), "NaN where unknown."))
    unknown = truth.isnan()
    e = torch.where(unknown, 0, mean - truth)
    unit = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    unit = torch.where(unknown | (unit == 0), 1, unit)
    known = ~unknown[..., None] & ~unknown[..., None, :]
    inside = (
        torch.where(known, covariance, torch.eye(mean.shape[-1], dtype=mean.dtype))
        / unit[..., None]
        / unit[..., None, :]
    )
    weighed = torch.linalg.pinv(inside, hermitian=True) @ (e / unit)[..., None]
    total = ((e / unit)[..., None, :] @ weighed)[..., 0, 0]
    return torch.where(unknown.all(-1), torch.nan, total)


def _sequences(found: Sequence[Innovations]) -> list[Innovations]:
    """Each sequence of each batch by itself, (T, …)."""
    out = []
    for record in found:
        flat = [part.reshape(-1, *part.shape[record.nis.ndim - 1 :]) for part in record]
        out += [Innovations(*parts) for parts in zip(*(part.unbind() for part in flat), strict=True)]
    if not out:
        raise ValueError(sentence("consistency.found", "at least one sequence", "none", "Run innovations first."))
    return out


def _nis(scores: Tensor) -> BandedValue:
    z = scores[~scores.isnan()]
    return chi_square_band(float(z.square().mean()) if len(z) else 1.0, len(z))


def chi_square_band(mean: float, degrees: float) -> BandedValue:
    """The mean of so many squares of standard normal numbers, and where it should be.

    >>> chi_square_band(1.3, 100).inside
    False
    """
    if degrees <= 0:
        return BandedValue(mean, 0.0, float("inf"), 0)
    low, high = (chi_square_quantile(p, degrees) / degrees for p in (0.025, 0.975))
    return BandedValue(mean, low, high, degrees)


def _autocorrelation(sequences: Sequence[Innovations]) -> tuple[BandedValue, ...]:
    """Of each entry with itself, rows in which it was not measured left out, over all entries and sequences."""
    series = [z[~z.isnan()] for s in sequences for z in s.scores.unbind(-1)]
    out = []
    for lag in range(1, LAGS + 1):
        pairs = [(z[:-lag], z[lag:]) for z in series if len(z) > lag]
        count = sum(len(a) for a, _ in pairs)
        if count < MIN_SCORES:
            break
        power = sum(float(a.square().sum() + b.square().sum()) for a, b in pairs) / 2
        value = sum(float(a @ b) for a, b in pairs) / power if power > 0 else 0.0
        width = NORMAL_95 / sqrt(count)
        out.append(BandedValue(value, -width, width, count))
    return tuple(out)


def _shares(sequences: Sequence[Innovations], modes: Sequence[str] | None) -> dict[str, BandedValue]:
    measured = torch.cat([s.measured > 0 for s in sequences])
    before = torch.cat([s.mode_predictions for s in sequences])[measured]
    after = torch.cat([s.mode_probabilities for s in sequences])[measured]
    count = after.shape[-1]
    if count < 2 or not len(after):
        return {}
    names = [str(k) for k in range(count)] if modes is None else modes
    width = NORMAL_95 * (after - before).square().sum(0).sqrt() / len(after)
    middle = before.mean(0)
    return {
        name: BandedValue(
            float(after[:, k].mean()), float(middle[k] - width[k]), float(middle[k] + width[k]), len(after)
        )
        for k, name in enumerate(names)
    }


def _nees_band(errors: Sequence[Tensor], size: int) -> BandedValue | None:
    """Errors of neighbouring rows resemble one another: the band is that of the effective number of rows."""
    series = [e[~e.isnan()] / size for e in errors]
    series = [e for e in series if len(e)]
    if not series:
        return None
    effective = sum(_effective(e - 1) for e in series)
    mean = float(torch.cat(series).mean())
    return chi_square_band(mean, size * effective)._replace(count=effective)


def _effective(apart: Tensor) -> float:
    """n / (1 + 2 Σ ρ_k), summed while the autocorrelation is positive."""
    n, power = len(apart), float(apart.square().sum())
    total = 0.0
    for lag in range(1, n // 2):
        rho = float(apart[:-lag] @ apart[lag:]) / power if power > 0 else 0.0
        if rho <= 0.05:
            break
        total += rho
    return max(1.0, n / (1 + 2 * total))


def _rejection(sequences: Sequence[Innovations], names: Sequence[str]) -> tuple[str, str] | None:
    """The verdict where a gate rejects so much that it cannot be outliers: what is left says little."""
    rejected = torch.cat([s.rejected for s in sequences]).sum(0)
    measured = rejected + torch.cat([~s.observations.isnan() for s in sequences]).sum(0)
    if not int(rejected.sum()) > MOST_REJECTED * int(measured.sum()):
        return None
    worst = int((rejected / measured.clamp_min(1)).argmax())
    share = f"{int(rejected[worst]):,} of {int(measured[worst]):,} of {names[worst]}"
    words = (
        f"The gate rejects {int(rejected.sum()):,} of {int(measured.sum()):,} numbers, {share}: these are no outliers"
    )
    advice = "Look at position, unit, convention and noise of that sensor first, then raise process noise (q)"
    return "rejecting", f"{words}. {advice}. Nothing is said of what is left."


def _verdict(
    nis: BandedValue,
    entries: Mapping[str, BandedValue],
    correlations: Sequence[BandedValue],
    shares: Mapping[str, BandedValue],
    of_truth: BandedValue | None,
    outliers: int,
    trimmed: BandedValue,
) -> tuple[str, str]:
    if nis.count < MIN_SCORES:
        return "unknown", f"{nis.count:.0f} measured numbers are too few for a verdict; {MIN_SCORES} are needed."
    first = correlations[0] if correlations else BandedValue(0.0, -1.0, 1.0, 0)
    sign = 0 if first.inside else 1 if first.value > 0 else -1
    numbers = f"NIS is {nis.value:.3g} for each number measured, 1 expected, 95 % band {nis.low:.3g} to {nis.high:.3g}"
    numbers += f"; autocorrelation {first.value:.2f}, 0 expected." if correlations else "."
    if nis.value > nis.high and nis.value > 1 + TOLERATED:
        few = outliers < SHARE_OF_OUTLIERS * nis.count
        if outliers and few and trimmed.value - 1 < SHARE_LEFT * (nis.value - 1):
            words = f"The filter meets outliers, {outliers} scores beyond {OUTLIER:g}, nearly consistent without them"
            return "overconfident", f"{words}: gate them. {numbers}"
        return "overconfident", f"{TOO_SURE[sign].format(nis.value)}{_worst(entries, nis)} {numbers}"
    if nis.value < nis.low and nis.value < 1 - TOLERATED:
        return "underconfident", f"{NOT_SURE[sign].format(nis.value)}{_worst(entries, nis)} {numbers}"
    sign = 0 if abs(first.value) < TOLERATED_MEMORY else sign
    if sign:
        advice = "raise process noise (q), lower measurement noise" if sign > 0 else "lower process noise (q)"
        where = "lags behind" if sign > 0 else "follows the noise"
        return "correlated", f"The filter is about as sure as it may be, but {where}: {advice}. {numbers}"
    words = "The filter is consistent: it is as sure as it may be."
    off = [
        name
        for name, share in shares.items()
        if not share.inside and abs(share.value - (share.low + share.high) / 2) > 0.02
    ]
    if off:
        words += f" But the share of {off[0]} is not what its switching predicts: look at transition or rates."
    if of_truth is not None and not of_truth.inside:
        how = "smaller" if of_truth.value > 1 else "larger"
        words += f" But its covariances are {how} than its errors (NEES {of_truth.value:.3g}, 1 expected)."
    return "consistent", f"{words} {numbers}"


def _worst(entries: Mapping[str, BandedValue], nis: BandedValue) -> str:
    """Which entry is most to blame, where they differ."""
    if len(entries) < 2:
        return ""
    ratio = max if nis.value > 1 else min
    name = ratio(entries, key=lambda n: entries[n].value)
    others = [v.value for n, v in entries.items() if n != name]
    apart = entries[name].value / ratio(others)
    return f" Most of it is in {name}." if not 1 / 1.5 < apart < 1.5 and not entries[name].inside else ""
