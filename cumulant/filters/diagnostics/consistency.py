"""Whether a filter is consistent: NIS, autocorrelation, calibration of modes, NEES, and one sentence on them.

| number               | of                                                 | expected | its 95 % band                 |
|----------------------|----------------------------------------------------|----------|-------------------------------|
| NIS                  | squared normalised innovations z², mean            | 1        | χ²_n / n                      |
| autocorrelation      | products of z, k measurements apart                | 0        | ± 1.96/√n                     |
| NIS of X             | as NIS, of one entry by itself, given the past     | 1        | χ²_n / n                      |
| mean of X            | the normalised innovations of that entry, mean     | 0        | ± 1.96/√n                     |
| autocorrelation of X | as above, of that entry                            | 0        | ± 1.96/√n                     |
| NIS in a mode        | z², weighted by the predicted probability of it    | 1        | χ²_n / n, n the effective one |
| share of a mode      | probability after the observation, mean            | before   | ± 1.96 √Σ(after − before)²/n  |
| NEES                 | eᵀP⁻¹e/d with e = estimate − truth, mean           | 1        | χ²_dn / dn, n effective rows  |

Normalised innovations are those of `innovations`: for a switching filter by the transform of its predicted mixture, so
that NIS is χ² however many modes there are. NEES uses mean and covariance of the mixture. P(s_t = j | y_1 … y_t) less
P(s_t = j | y_1 … y_{t−1}) has mean 0 given the past, whatever the truth was: that is what calibrates modes without one.

What is wrong shows in several signs. Innovations larger than predicted are overconfidence; innovations that agree with
the ones before (positive autocorrelation) say that the estimate lags behind. Whether that is so throughout, in
stretches, with one sign, or in one entry alone tells causes apart: `verdict` has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.display import one_line
from cumulant.filters.diagnostics.banded import NORMAL_95, BandedValue, Limit, chi_square_band
from cumulant.filters.diagnostics.entry_innovations import (
    EntryInnovations,
    autocorrelation,
    entry_innovations,
    mean_square,
    together,
)
from cumulant.filters.diagnostics.innovations import Innovations
from cumulant.filters.diagnostics.rejection import rejection
from cumulant.filters.diagnostics.verdict import (
    ENTRY_MEAN,
    ENTRY_MEMORY,
    ENTRY_NIS,
    MEMORY_LIMIT,
    NEES_LIMIT,
    NIS_LIMIT,
    OUTLIER,
    SHARE_LIMIT,
    Findings,
    verdict_on,
)

UNLIMITED = Limit(1.0, float("inf"))  # of numbers that are shown, and of which nothing is said


class TrackConsistency(NamedTuple):
    """NIS = mean z² and ρ_1 of one track, each with its band."""

    nis: BandedValue
    autocorrelation: BandedValue | None


class Consistency(NamedTuple):
    """What `consistency` found: NIS = mean z², ρ_k, shares of modes, NEES, each with its band, and a verdict.

    nis              of all entries; ``entries`` of each by its name
    autocorrelation  for lags 1, 2, …
    modes            share of each mode after the observations, with the band around the share before them
    nees             of the state, over its size; None without truth
    outliers         normalised innovations beyond 4
    rejected         entries that a gate rejected, in ``rejected_rows`` rows
    status           "consistent", "overconfident", "underconfident", "correlated", "biased", "contradictory",
                     "manoeuvring", "mixed" (of rules that `verdict` lists), "rejecting" (a gate rejects more than a
                     tenth) or "unknown" (too few rows)
    verdict          one or two sentences: what is wrong, and what to change
    details          of each entry its mean, autocorrelation and more
    mode_nis         NIS where each mode is expected
    tracks           NIS and autocorrelation of each track, where their names were given
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
    rejected_rows: int = 0
    details: dict[str, EntryInnovations] = {}  # noqa: RUF012 a field, not shared state: nothing writes to it
    mode_nis: dict[str, BandedValue] = {}  # noqa: RUF012
    tracks: dict[str, TrackConsistency] = {}  # noqa: RUF012

    def __repr__(self) -> str:
        return one_line("Consistency", {"nis": self.nis.value, "status": self.status})

    def table(self) -> list[dict[str, object]]:
        """Rows of number, value, band, whether it is inside, and its mark.

        A mark is "inside", "slightly outside" (by chance, or by too little to matter) or "outside" (the verdict is not
        "consistent" then, or it says so).
        """
        named = [("NIS", self.nis, NIS_LIMIT)]
        named += [(f"NIS of {name}", v, ENTRY_NIS) for name, v in self.entries.items()]
        limits = (MEMORY_LIMIT, *(UNLIMITED for _ in self.autocorrelation))
        named += [(f"autocorrelation, lag {k}", v, limits[k - 1]) for k, v in enumerate(self.autocorrelation, 1)]
        for name, entry in self.details.items():
            named.append((f"mean of {name}", entry.mean, ENTRY_MEAN))
            if entry.autocorrelation:
                named.append((f"autocorrelation of {name}, lag 1", entry.memory, ENTRY_MEMORY))
        named += [(f"NIS in {name}", v, UNLIMITED) for name, v in self.mode_nis.items()]
        named += [(f"share of {name}", v, SHARE_LIMIT) for name, v in self.modes.items()]
        named += [("NEES", self.nees, NEES_LIMIT)] if self.nees is not None else []
        return [{"number": n, **v._asdict(), "inside": v.inside, "mark": limit.mark(v)} for n, v, limit in named]


def consistency(
    found: Innovations | Sequence[Innovations],
    *,
    names: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    errors: Sequence[Tensor] | None = None,
    size: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
    leading: Sequence[tuple[int, int]] = (),
    tracks: Sequence[str] | None = None,
) -> Consistency:
    """Judge one or several runs of a filter:  NIS = mean z²,  ρ_k = Σ z_t z_{t+k} / Σ z_t².

    found   from `innovations`, for several tracks together or one after the other
    names   of the m entries of y
    modes   names of the modes
    errors  NEES (T,) of each sequence where truth is known, from `nees`, and ``size``, the entries of the state they
            are of
    pairs   indices of entries that a lag moves the same way: a position and its rate, or one position measured twice.
            Where they do not, the verdict says that they contradict each other.
    leading those of them in which the second, a rate, is so exact that a lag shows there first
    tracks  names of the sequences

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
    if tracks is not None and len(tracks) != len(sequences):
        raise ValueError(
            sentence("consistency.tracks", f"{len(sequences)} names", len(tracks), "One for each sequence.")
        )
    scores = torch.cat([s.scores for s in sequences])
    own = [_used_marginals(s) for s in sequences]
    series = {name: [w[:, k] for w in own] for k, name in enumerate(names)}
    details = {name: entry_innovations(w) for name, w in series.items() if any(bool((~x.isnan()).any()) for x in w)}
    agreeing = [(names[a], names[b]) for a, b in pairs]
    measured = Findings(
        mean_square(scores),
        mean_square(torch.where(scores.abs() > OUTLIER, torch.nan, scores)),
        autocorrelation([z for s in sequences for z in s.scores.unbind(-1)]),
        details,
        _shares(sequences, modes),
        _mode_nis(sequences, modes),
        _pairs(series, details, agreeing),
        None if errors is None else _nees_band(errors, size),
        int((scores.abs() > OUTLIER).sum()),
        frozenset((names[a], names[b]) for a, b in leading),
    )
    said = rejection(sequences, names, agreeing) or verdict_on(measured)
    rejected = torch.cat([s.rejected for s in sequences])
    return Consistency(
        measured.nis,
        {name: entry.nis for name, entry in details.items()},
        tuple(measured.autocorrelation),
        dict(measured.shares),
        measured.nees,
        measured.outliers,
        int(rejected.sum()),
        said.status,
        said.words,
        int(rejected.any(-1).sum()),
        details,
        dict(measured.modes),
        {} if tracks is None else {name: _of_track(s) for name, s in zip(tracks, sequences, strict=True)},
    )


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
    """Each sequence of each batch by itself, (T, …), with ``marginal`` in any case."""
    out = []
    for record in found:
        parts = (*record[:-1], record.scores if record.marginal is None else record.marginal)
        flat = [part.reshape(-1, *part.shape[record.nis.ndim - 1 :]) for part in parts]
        out += [Innovations(*parts) for parts in zip(*(part.unbind() for part in flat), strict=True)]
    if not out:
        raise ValueError(sentence("consistency.found", "at least one sequence", "none", "Run innovations first."))
    return out


def _used_marginals(found: Innovations) -> Tensor:
    """w (T, m) of what was used: NaN where the gate rejected, or where a row located the track."""
    assert found.marginal is not None
    return torch.where(found.scores.isnan(), torch.nan, found.marginal)


def _of_track(found: Innovations) -> TrackConsistency:
    memory = autocorrelation(list(found.scores.unbind(-1)))
    return TrackConsistency(mean_square(found.scores), memory[0] if memory else None)


def _pairs(
    series: dict[str, list[Tensor]], details: dict[str, EntryInnovations], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], BandedValue]:
    """The correlation over stretches of entries that a lag moves the same way."""
    found = {pair: together(series[pair[0]], series[pair[1]]) for pair in pairs if set(pair) <= set(details)}
    return {pair: value for pair, value in found.items() if value is not None}


def _mode_nis(sequences: Sequence[Innovations], modes: Sequence[str] | None) -> dict[str, BandedValue]:
    """NIS weighted by the probability of each mode before the observation: 1 under the right model."""
    weights = torch.cat([s.mode_predictions for s in sequences])
    if weights.shape[-1] < 2:
        return {}
    squares, counts = torch.cat([s.nis for s in sequences]), torch.cat([s.measured for s in sequences]).to(weights)
    names = [str(k) for k in range(weights.shape[-1])] if modes is None else modes
    total = (weights * counts[:, None]).sum(0)
    values = ((weights * squares[:, None]).sum(0) / total).tolist()
    effective = (total.square() / (weights.square() * counts[:, None]).sum(0)).tolist()
    return {n: chi_square_band(v, e) for n, v, e in zip(names, values, effective, strict=True) if v == v}


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
