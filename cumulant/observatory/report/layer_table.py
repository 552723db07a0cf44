"""The table of layers: one row per block and stage, from the state of a `HiddenStateObserver`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from cumulant.observatory.hooks.hidden_states import StageKey
from cumulant.observatory.record.record import Record
from cumulant.observatory.report.rows import LayerRow, NullComparison, TokenStatistics, finite
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

STATES = {"size": "rms", "cosine": "cosine_to_mean", "pairwise": "pairwise_cosine"}  # under the cell of a stage
PERTURBATIONS = ("growth", "step", "inverse", "contraction")  # under the block and stage themselves
DISTANCES = ("sliced_w2", "skewness", "kurtosis", "lle_error")


def layer_table(record: Record) -> list[LayerRow]:
    """The rows of a record."""
    return layer_rows(record.hidden, record.meta.stages, [layer.name for layer in record.layers])


def layer_rows(
    state: dict[str, Tensor], stages: Sequence[StageKey], layers: Sequence[str] = (), *, seed: int = 0
) -> list[LayerRow]:
    """One row per stage, in their order.

    state, stages  what `HiddenStateObserver.state` and `HiddenStateObserver.names` return
    layers         paths of the attention modules: the layer of a row is the first of them in its block
    """
    statistics, cells, drawn, rows = unflatten(state), {}, {}, []
    blocks = list(dict.fromkeys(stage.block for stage in stages))
    first = {block_of_layer(name, blocks): layer for layer, name in reversed([*enumerate(layers)])}
    for block, stage, cell, role in stages:
        if cell not in cells:
            cells[cell] = _cell_columns(statistics, cell, seed, drawn)
        own = {quantity: statistics.get(f"{block}/{stage}/{quantity}") for quantity in PERTURBATIONS}
        perturbed = own["growth"] if isinstance(own["growth"], Tally) else own["contraction"]
        row = cells[cell] | {quantity: _token_statistics(tally) for quantity, tally in own.items()}
        row["perturbed"] = int(perturbed.count) if isinstance(perturbed, Tally) else 0
        if isinstance(own["inverse"], Tally):
            row["tokens"] = int(own["inverse"].count)
        rows.append(LayerRow(block, stage, role, first.get(block), **row))
    return rows


def block_of_layer(name: str, blocks: Sequence[str]) -> str | None:
    """The block that an attention module is in, by their paths.

    >>> block_of_layer("h.1.attn", ["h.0", "h.1", "h.10"])
    'h.1'
    """
    inside = [block for block in blocks if f"{name}.".startswith(f"{block}.")]
    return max(inside, key=len, default=None)


def layer_spectra(state: dict[str, Tensor], stages: Sequence[StageKey]) -> dict[str, list[float]]:
    """Eigenvalues of the covariance, descending, under `block/stage`, wherever there is one."""
    statistics = unflatten(state)
    spreads = {f"{s.block}/{s.stage}": _finite(statistics.get(f"{s.cell}/spread")) for s in stages}
    return {name: _spectrum(spread).tolist() for name, spread in spreads.items() if isinstance(spread, MeanScatter)}


def read_covariance(state: dict[str, Tensor], stages: Sequence[StageKey], block: str) -> Tensor | None:
    """(D, D) covariance of the states that the attention of a block reads, as `ascent_index` needs it.

    Behind a norm these are the normed states without gain, for the gain is in the weights of the head; otherwise the
    input of the block. None where no covariance was kept.
    """
    spreads = unflatten({k: v for k, v in state.items() if ":spread." in k})
    for stage in sorted((s for s in stages if s.block == block), key=lambda s: s.role != "front"):
        spread = spreads.get(f"{stage.cell}/spread")
        if isinstance(spread, MeanScatter) and (stage.role == "front" or stage.stage == "in"):
            return spread.covariance
    return None


def _finite(statistic: Statistic | None) -> Statistic | None:
    """None for what overflowed, of which nothing can be said."""
    tensors = [getattr(statistic, f.name) for f in fields(statistic)] if statistic is not None else []
    return statistic if all(bool(tensor.isfinite().all()) for tensor in tensors) else None


def _cell_columns(statistics: dict[str, Statistic], cell: str, seed: int, drawn: dict) -> dict:
    row: dict = {name: _token_statistics(statistics.get(f"{cell}/{key}")) for key, name in STATES.items()}
    row["tokens"] = row["rms"].count
    spread, sample = _finite(statistics.get(f"{cell}/spread")), _finite(statistics.get(f"{cell}/sample"))
    within = _finite(statistics.get(f"{cell}/within"))
    if isinstance(spread, MeanScatter):
        row |= _spread_columns(spread)
    if isinstance(sample, StateSample):
        row |= {"channels": sample.state.shape[1], "sampled": len(sample.priority)}
    if isinstance(within, WithinScatter) and isinstance(sample, StateSample):
        row |= {"whitened": int(within.tokens), "freedom": int(within.tokens - within.sequences)}
        row |= _distance_columns(_compared(within, sample, seed, drawn), row["sampled"])
    return row


def _compared(within: WithinScatter, sample: StateSample, seed: int, drawn: dict) -> Comparison:
    count, sequences = int(within.tokens), int(within.sequences)
    mean = torch.zeros(sample.state.shape[1], dtype=torch.float64)
    along = principal_axes(mean, within.covariance, count - sequences + 1)
    names = {"sequences": sequences, "sequence": sample.sequence, "length": sample.length}
    return compare_with_gaussian(sample.state, along, count, **names, seed=seed, drawn=drawn)


def _token_statistics(tally: Statistic | None) -> TokenStatistics:
    return TokenStatistics.of(tally)[0] if isinstance(tally, Tally) else TokenStatistics()


def _spread_columns(spread: MeanScatter) -> dict[str, float]:
    if not float(spread.scatter.trace()) > 0:
        return {}
    value = _spectrum(spread)
    total = float(value.sum())
    rank = float(effective_rank(value, int(spread.count)))
    ratio = min(rank, participation_ratio(value, int(spread.count)))
    top = float(value[0]) / total
    return {"variance": total, "effective_rank": rank, "participation_ratio": ratio, "top_share": top}


def _spectrum(spread: MeanScatter) -> Tensor:
    return torch.linalg.eigvalsh(spread.covariance).flip(0).clamp_min(0)


def _distance_columns(compared: Comparison, sampled: int) -> dict:
    laws = (compared.observed, compared.null_mean, compared.null_low, compared.null_high)
    row = {name: NullComparison(*(finite(getattr(law, name)) for law in laws)) for name in DISTANCES}
    return row | {
        "gaussian_rank": compared.rank,
        "mardia_dim": compared.principal,
        "reconstructed": reconstructed_vectors(sampled, compared.rank),
    }
