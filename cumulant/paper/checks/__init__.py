"""Numerical checks of the statements, one file a topic; importing this package registers them all."""

from cumulant.paper.checks import (  # noqa: F401
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
