"""The table of layers: one row per block and stage, from the statistics of a `HiddenStateObserver`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.observatory.statistics.gaussianity import (
    Comparison,
    compare_with_gaussian,
    participation_ratio,
    principal_axes,
    reconstructed_vectors,
)
from cumulant.observatory.statistics.states import MeanScatter, StateSample, Statistic, WithinScatter, unflatten
from cumulant.observatory.statistics.tally import Tally
from cumulant.special import effective_rank

Row = dict[str, str | int | float]
Names = Sequence[dict[str, str]]

CLOUD = ("size", "cosine", "pairwise")  # kept under the cell, which neighbouring blocks may share
MOTION = ("growth", "step", "inverse", "contraction")  # kept under the block itself
SHAPE = ("sliced_w2", "skewness", "kurtosis", "lle_error")


def layer_rows(state: dict[str, Tensor], names: Names, *, seed: int = 0) -> list[Row]:
    """Plain numbers per block and stage, in the order of ``names``; NaN where a quantity is not known there.

    block, stage, role      role is "state", "norm", or "front" for the norm that attention reads through
    tokens                  how many
    Q_mean, Q_spread, Q_median, Q_error  for Q in size, cosine, pairwise, growth, step, inverse, contraction;
                            the error is that of the mean as if tokens were independent
    perturbed               tokens behind growth, step and contraction
    variance, effective_rank, participation_ratio, top_share
                            of the covariance: its trace, exp H(λ/Σλ), (Σλ)²/Σλ², λ₁/Σλ; the second and third less what
                            the number of tokens does to them, as if tokens were independent
    channels, whitened, freedom
                            of the states about the means of their sequences: their dimension, the tokens behind the
                            covariance that whitens them, and those less the sequences
    gaussian_rank, mardia_dim, sampled, reconstructed
                            how many directions and tokens the next were computed from
    Q, Q_null, Q_null_low, Q_null_high   for Q in sliced_w2, skewness, kurtosis, lle_error: seen, and the mean and the
                            0.5 % and 99.5 % points of Gaussian clouds of the same size and covariance
    """
    kept, done, drawn, rows = unflatten(state), {}, {}, []
    for name in _checked(names):
        own, cell = f"{name['block']}/{name['stage']}", name["cell"]
        if cell not in done:
            done[cell] = _cloud_columns(kept, cell, seed, drawn)
        row: Row = {"block": name["block"], "stage": name["stage"], "role": name["role"]}
        row |= done[cell]
        for quantity in MOTION:
            row |= _tally_columns(kept.get(f"{own}/{quantity}"), quantity)
        perturbed = kept.get(f"{own}/growth", kept.get(f"{own}/contraction"))
        row["perturbed"] = int(perturbed.count) if isinstance(perturbed, Tally) else 0
        inverse = kept.get(f"{own}/inverse")
        if isinstance(inverse, Tally):
            row["tokens"] = int(inverse.count)
        rows.append(row)
    return rows


def layer_spectra(state: dict[str, Tensor], names: Names) -> dict[str, list[float]]:
    """Eigenvalues of the covariance, descending, under `block/stage`, wherever there is one."""
    kept, out = unflatten(state), {}
    for name in _checked(names):
        spread = _finite(kept.get(f"{name['cell']}/spread"))
        if isinstance(spread, MeanScatter):
            out[f"{name['block']}/{name['stage']}"] = _spectrum(spread).tolist()
    return out


def read_covariance(state: dict[str, Tensor], names: Names, block: str) -> Tensor | None:
    """(D, D) covariance of the states that the attention of a block reads, as `ascent_index` needs it.

    Behind a norm these are the normed states without gain, for the gain is in the weights of the head; otherwise the
    input of the block. None where no covariance was kept.
    """
    kept = unflatten({k: v for k, v in state.items() if ":spread." in k})
    mine = [n for n in _checked(names) if n["block"] == block]
    for name in sorted(mine, key=lambda n: n["role"] != "front"):
        spread = kept.get(f"{name['cell']}/spread")
        if isinstance(spread, MeanScatter) and (name["role"] == "front" or name["stage"] == "in"):
            return spread.covariance
    return None


def _finite(kept: Statistic | None) -> Statistic | None:
    """None for what overflowed, of which nothing can be said."""
    tensors = [getattr(kept, f.name) for f in fields(kept)] if kept is not None else []
    return kept if all(bool(tensor.isfinite().all()) for tensor in tensors) else None


def _checked(names: Names) -> Names:
    for name in names:
        if not {"block", "stage", "cell", "role"} <= name.keys():
            expected = "entries with block, stage, cell and role"
            raise ValueError(
                sentence("layer_rows.names", expected, sorted(name), "Give what HiddenStateObserver.names returned.")
            )
    return names


def _cloud_columns(kept: dict[str, Statistic], cell: str, seed: int, drawn: dict) -> Row:
    row: Row = {"tokens": 0}
    for quantity in CLOUD:
        row |= _tally_columns(kept.get(f"{cell}/{quantity}"), quantity)
    spread, sample = _finite(kept.get(f"{cell}/spread")), _finite(kept.get(f"{cell}/sample"))
    size = kept.get(f"{cell}/size")
    row["tokens"] = int(size.count) if isinstance(size, Tally) else 0
    row |= _spread_columns(spread if isinstance(spread, MeanScatter) else None)
    within, compared = kept.get(f"{cell}/within"), None
    row |= {"channels": 0, "whitened": 0, "freedom": 0, "sampled": 0}
    if isinstance(sample, StateSample):
        row |= {"channels": sample.state.shape[1], "sampled": len(sample.priority)}
    if isinstance(within, WithinScatter) and isinstance(sample, StateSample):
        compared = _compared(within, sample, seed, drawn)
        row |= {"whitened": int(within.tokens), "freedom": int(within.tokens - within.sequences)}
    row["reconstructed"] = 0 if compared is None else reconstructed_vectors(int(row["sampled"]), compared.rank)
    return row | _shape_columns(compared)


def _compared(within: WithinScatter, sample: StateSample, seed: int, drawn: dict) -> Comparison:
    count, sequences = int(within.tokens), int(within.sequences)
    mean = torch.zeros(sample.state.shape[1], dtype=torch.float64)
    along = principal_axes(mean, within.covariance, count - sequences + 1)
    names = {"sequences": sequences, "sequence": sample.sequence, "length": sample.length}
    return compare_with_gaussian(sample.state, along, count, **names, seed=seed, drawn=drawn)


def _tally_columns(tally: Statistic | None, quantity: str) -> Row:
    if not isinstance(tally, Tally) or int(tally.count) == 0:
        return {f"{quantity}_{k}": math.nan for k in ("mean", "spread", "median", "error")}
    median, error = float(tally.quantile(0.5)), float(tally.standard_error)
    columns = {"mean": float(tally.mean), "spread": float(tally.spread), "median": median, "error": error}
    return {f"{quantity}_{k}": v for k, v in columns.items()}


def _spread_columns(spread: MeanScatter | None) -> Row:
    if spread is None or not float(spread.scatter.trace()) > 0:
        return dict.fromkeys(("variance", "effective_rank", "participation_ratio", "top_share"), math.nan)
    value = _spectrum(spread)
    total = float(value.sum())
    rank = float(effective_rank(value, int(spread.count)))
    ratio = min(rank, participation_ratio(value, int(spread.count)))
    return {
        "variance": total,
        "effective_rank": rank,
        "participation_ratio": ratio,
        "top_share": float(value[0]) / total,
    }


def _spectrum(spread: MeanScatter) -> Tensor:
    return torch.linalg.eigvalsh(spread.covariance).flip(0).clamp_min(0)


def _shape_columns(compared: Comparison | None) -> Row:
    if compared is None:
        row: Row = {"gaussian_rank": 0, "mardia_dim": 0}
        return row | {f"{q}{end}": math.nan for q in SHAPE for end in ("", "_null", "_null_low", "_null_high")}
    row = {"gaussian_rank": compared.rank, "mardia_dim": compared.principal}
    for q in SHAPE:
        row[q] = getattr(compared.observed, q)
        row[f"{q}_null"] = getattr(compared.null_mean, q)
        row[f"{q}_null_low"], row[f"{q}_null_high"] = getattr(compared.null_low, q), getattr(compared.null_high, q)
    return row
