"""The table of heads: one row per head, with what its tokens, its sampled queries and its weights say."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.hopfield import CLASSES, head_class
from cumulant.observatory.record.record import AttentionLayer, Record
from cumulant.observatory.report.layer_table import block_of_layer
from cumulant.observatory.report.rows import HeadRow, TokenStatistics, finite
from cumulant.observatory.statistics.tally import Tally, bin_edges, first_positions


def head_rows(record: Record) -> list[HeadRow]:
    """One row a head, layer by layer."""
    blocks = [stage.block for stage in record.meta.stages]
    rows = []
    for index, layer in enumerate(record.layers):
        tallies = {quantity: record.tallies.get(f"{layer.name}/{quantity}") for quantity in record.quantities}
        statistics = {name: TokenStatistics.of(tally) for name, tally in tallies.items() if tally is not None}
        numbers = {name: values.tolist() for name, values in layer_fits(record, layer).items()}
        classes = hopfield_classes(tallies.get("k90_share"))
        queries = record.sums.get(f"{layer.name}/link/count")
        for head in range(layer.heads):
            rows.append(
                HeadRow(
                    layer=index,
                    head=head,
                    name=layer.name,
                    block=block_of_layer(layer.name, blocks),
                    kind=layer.kind,
                    hopfield_class=None if classes is None else classes[head],
                    quantities={name: cells[head] for name, cells in statistics.items()},
                    numbers={name: finite(values[head]) for name, values in numbers.items()},
                    link_queries=None if queries is None else int(queries[head]),
                    link_needed=None if queries is None else needed_queries(layer.dim),
                )
            )
    return rows


def by_position(tally: Tally, cell: int) -> list[list[float]]:
    """[position, mean] where something was seen."""
    means = tally.by_position[cell]
    return [[first, float(m)] for first, m in zip(first_positions(), means.tolist(), strict=True) if m == m]


def histogram(tally: Tally, cell: int) -> list[list[float]]:
    """[low, high, count] of the bins that hold something."""
    counts = tally.histogram[cell]
    return [[*bin_edges(i), int(counts[i])] for i in counts.nonzero()[:, 0].tolist()]


def hopfield_classes(tally: Tally | None) -> list[str] | None:
    """Class I–IV of every head, from the median share of the visible keys that have 90 % of the mass."""
    return None if tally is None else [CLASSES[int(c)] for c in head_class(tally.quantile(0.5), 1)]


def layer_fits(record: Record, layer: AttentionLayer) -> dict[str, Tensor]:
    """Link and Gaussian fits of every head, from sums over sampled queries; numbers of the weights as they are."""
    own = f"{layer.name}/"
    sums = {key.removeprefix(own): value for key, value in record.sums.items() if key.startswith(own)}
    out = {key.removeprefix(own): value for key, value in record.weights.items() if key.startswith(own)}
    if "gauss/left" in sums:
        whole = sums["gauss/whole"]
        out["gaussian_r2"] = 1 - sums["gauss/left"] / whole.clamp_min(torch.finfo(whole.dtype).tiny)
        out |= link_from_sums(*(sums[name] for name in LINK_SUMS))
    return out


LINK_SUMS = (
    *("link/count", "link/eta", "link/mean", "link/eta_eta", "link/mean_mean", "link/eta_mean"),
    *("keys/count", "keys/sum", "keys/square"),
)


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
