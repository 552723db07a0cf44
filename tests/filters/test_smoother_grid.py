"""The default smoother beside its filter and sampled mode paths, over the grid of docs/filters.md."""

import pytest
import torch

from cumulant.filters import smooth
from cumulant.samplers import sample_smooth
from tests.filters.smoother_grid import GRID, Cell, measure, target


def agrees_with_the_reference(cell: Cell) -> None:
    """At most the error of the filter, and within 10 % of that of the reference, up to two standard errors."""
    found = measure(cell, {"default": {}})
    for name in ("imm", "gpb2"):
        ratio, spread = found.ratio("default", name)
        assert ratio <= 1 + 2 * spread, name
    ratio, spread = found.ratio("default", "reference")
    assert ratio <= 1.1 + 2 * spread


@pytest.mark.long
@pytest.mark.parametrize("cell", GRID, ids=lambda cell: "-".join(f"{part:g}" for part in cell))
def test_the_default_is_below_the_filter_and_near_the_reference(cell):
    agrees_with_the_reference(cell)


@pytest.mark.parametrize("cell", [Cell(1e-3, 25.0, 2, 0.9), Cell(1e-4, 1.0, 2, 0.9), Cell(1e-4, 25.0, 3, 0.98)])
def test_short_tracks_against_all_mode_paths(cell):
    """Mean deviations of position and speed in standard deviations of the exact law, and of mode probabilities."""
    model = target(cell)
    y = model.simulate(6, batch_shape=(10,), generator=torch.Generator().manual_seed(0)).observations
    truth, found = smooth(model, y, method="exact"), smooth(model, y)
    scale = truth.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((found.mean - truth.mean) / scale).square().mean().sqrt() < 0.12
    assert (found.mode_probabilities - truth.mode_probabilities).abs().mean() < 0.02
    sampled = sample_smooth(model, y, histories=100, futures=800, generator=torch.Generator().manual_seed(0))
    assert ((sampled.mean - truth.mean) / scale).square().mean().sqrt() < 0.05
    assert (sampled.mode_probabilities - truth.mode_probabilities).abs().mean() < 0.02
