"""The checks, one file a topic; importing this package registers them all."""

from cumulant.paper.checks import (
    contrast,
    duality,
    equilibrium,
    expansion,
    family,
    fixed_points,
    geometry,
    hopfield,
    identities,
    messages,
    observation,
    particles,
    propositions,
    stability,
    structure,
    switching,
)

__all__ = [
    "contrast",
    "duality",
    "equilibrium",
    "expansion",
    "family",
    "fixed_points",
    "geometry",
    "hopfield",
    "identities",
    "messages",
    "observation",
    "particles",
    "propositions",
    "stability",
    "structure",
    "switching",
]
