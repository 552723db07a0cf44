"""One step of particles that attend to each other: ours, and one call of torch's fused attention of the same shape."""

from __future__ import annotations

from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Run, ours
from benchmarks.inputs import Tensors

SCALE = 0.25


def step(x: Tensors) -> Run:
    """`cumulant.dynamics.Ascend` on the atoms as a cloud: checks, attention, and the sum with the cloud."""
    ascend = ours("cumulant.dynamics", "Ascend")(scale=SCALE)
    return lambda: {"cloud": ascend(x.atoms)}


def fused(x: Tensors) -> Run:
    """The attention alone, added to the cloud."""
    cloud = x.atoms
    return lambda: {"cloud": cloud + scaled_dot_product_attention(cloud, cloud, cloud, scale=SCALE)}
