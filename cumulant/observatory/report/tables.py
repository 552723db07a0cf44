"""Rows that can be read: one for every head, one for every block and stage, one for every shown token."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.hopfield import CLASSES, head_class
from cumulant.observatory.record.record import Layer, Record
from cumulant.observatory.statistics.tally import Tally, bin_edges, first_positions

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
FITS = ("link_r2", "link_slope_error", "gaussian_r2")


def head_rows(record: Record) -> list[dict]:
    """One row a head: every quantity with mean, spread, quantiles and count, then what was fitted."""
    rows: list[dict] = []
    for index, layer in enumerate(record.layers):
        fits = layer_fits(record, layer)
        classes = hopfield_classes(record, layer)
        for head in range(layer.heads):
            row: dict = {"layer": index, "head": head, "name": layer.name, "kind": layer.kind}
            for quantity in record.quantities:
                tally = record.tallies.get(f"{layer.name}/{quantity}")
                if tally is not None:
                    row |= {f"{quantity}_{key}": value for key, value in figures(tally, head).items()}
            row["hopfield_class"] = None if classes is None else classes[head]
            row |= _fitted_queries(record, layer, head)
            row |= {name: _number(values[head]) for name, values in fits.items()}
            rows.append(row)
    return rows


def figures(tally: Tally, cell: int) -> dict[str, float | int | None]:
    """The numbers of one cell."""
    out: dict[str, float | int | None] = {
        "mean": _number(tally.mean[cell]) if tally.count[cell] else None,
        "sd": _number(tally.spread[cell]) if tally.count[cell] else None,
        "standard_error": _number(tally.standard_error[cell]),
        "count": int(tally.count[cell]),
    }
    return out | {name: _number(tally.quantile(q)[cell]) for name, q in QUANTILES.items()}


def by_position(tally: Tally, cell: int) -> list[list[float]]:
    """[position, mean] where something was seen."""
    means = tally.by_place[cell]
    return [[first, float(m)] for first, m in zip(first_positions(), means.tolist(), strict=True) if m == m]


def histogram(tally: Tally, cell: int) -> list[list[float]]:
    """[low, high, count] of the bins that hold something."""
    counts = tally.histogram[cell]
    return [[*bin_edges(i), int(counts[i])] for i in counts.nonzero()[:, 0].tolist()]


def hopfield_classes(record: Record, layer: Layer) -> list[str] | None:
    """Class I–IV of every head, from the median share of the keys in sight that make 90 % of the mass."""
    tally = record.tallies.get(f"{layer.name}/k90_share")
    return None if tally is None else [CLASSES[int(c)] for c in head_class(tally.quantile(0.5), 1)]


def layer_fits(record: Record, layer: Layer) -> dict[str, Tensor]:
    """Link and Gaussian fits of every head, from sums over sampled queries; numbers of the weights as they are."""
    own = f"{layer.name}/"
    out = {key.removeprefix(own): value for key, value in record.weights.items() if key.startswith(own)}

    def total(name: str) -> Tensor | None:
        return record.sums.get(f"{layer.name}/{name}")

    left, whole = total("gauss/left"), total("gauss/whole")
    if left is not None and whole is not None:
        out["gaussian_r2"] = 1 - left / whole.clamp_min(torch.finfo(whole.dtype).tiny)
    if total("link/count") is not None:
        parts = {name: total(name) for name in (*LINK, *KEYS)}
        out |= link_from_sums(**{name.split("/")[0] + "_" + name.split("/")[1]: t for name, t in parts.items()})
    return out


LINK = ("link/count", "link/eta", "link/mean", "link/eta_eta", "link/mean_mean", "link/eta_mean")
KEYS = ("keys/count", "keys/sum", "keys/square")


def needed_queries(dim: int) -> int:
    """Of a link fit in ``dim`` channels: fewer queries fit anything.

    >>> needed_queries(64)
    129
    """
    return 2 * dim + 1


def link_from_sums(
    link_count, link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_count, keys_sum, keys_square
) -> dict[str, Tensor]:
    """R² of the affine fit η ≈ A m + b along the directions of the keys, and |A − Cov(K)⁺| / |Cov(K)⁺| (S2-E15).

    NaN for a head whose sums are not finite, as of scores that overflow.
    """
    sums = (link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_sum, keys_square)
    finite = torch.stack([t.isfinite().flatten(1).all(1) for t in sums]).all(0)
    link_eta, link_mean, link_eta_eta, link_mean_mean, link_eta_mean, keys_sum, keys_square = (
        t.nan_to_num(0.0, 0.0, 0.0) for t in sums
    )
    link_count = torch.where(finite, link_count, 0.0)
    n = link_count.clamp_min(1)[:, None]
    eta, mean = link_eta / n, link_mean / n
    c_ee = link_eta_eta / n[..., None] - eta[..., None] * eta[:, None]
    c_mm = link_mean_mean / n[..., None] - mean[..., None] * mean[:, None]
    c_em = link_eta_mean / n[..., None] - eta[..., None] * mean[:, None]
    k = keys_count.clamp_min(1)[:, None]
    centre = keys_sum / k
    spread = keys_square / k[..., None] - centre[..., None] * centre[:, None]
    inverse = torch.linalg.pinv(spread, rtol=1e-10, hermitian=True)
    onto = inverse @ spread  # the projector on what the keys span
    slope = onto @ c_em @ torch.linalg.pinv(c_mm, rtol=1e-10, hermitian=True)
    explained = torch.einsum("hij,hij->h", slope, onto @ c_em)
    whole = torch.einsum("hij,hij->h", onto @ c_ee, onto)
    size = torch.linalg.matrix_norm(inverse)
    enough = link_count >= needed_queries(c_mm.shape[-1])
    r2 = torch.where(enough & (whole > 0), explained / torch.where(whole > 0, whole, 1), torch.nan)
    error = torch.linalg.matrix_norm(slope - inverse) / torch.where(size > 0, size, 1)
    return {"link_r2": r2.clamp(max=1.0), "link_slope_error": torch.where(enough, error, torch.nan)}


def _fitted_queries(record: Record, layer: Layer, head: int) -> dict[str, int]:
    """How many sampled queries the link fit has, and how many it needs."""
    count = record.sums.get(f"{layer.name}/link/count")
    return {} if count is None else {"link_queries": int(count[head]), "link_needed": needed_queries(layer.dim)}


def _number(value: Tensor | float) -> float | None:
    """A float, or None where there is none: JSON and Parquet know no NaN that means "not seen"."""
    number = float(value)
    return number if number == number and abs(number) != float("inf") else None
