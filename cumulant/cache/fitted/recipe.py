"""Entries of key heads from parts: first and recent tokens as they are, atoms with mass for the rest, fitted values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.atoms import Atoms, subset_atoms, tangent_atoms
from cumulant.cache.fitted.mass import expected_mass, shared_sigma_mass, tangent_mass, unit_mass
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings
from cumulant.cache.fitted.values import refitted

SINKS = 4  # first tokens that are always held as they are
FITTED_SHARE = 0.125  # of the tokens, up to which the values of trials are fitted
ATOMS: dict[str, Callable[..., Atoms]] = {"tangent": tangent_atoms, "subset": subset_atoms}
MASSES: dict[str, Callable[..., Tensor]] = {
    "expected": expected_mass,
    "tangent": tangent_mass,
    "sigma": shared_sigma_mass,
    "unit": unit_mass,
}


class EntryRecipe(NamedTuple):
    """How the entries of a key head are made.

    atoms       "tangent" or "subset"
    mass        "expected", "tangent", "sigma" or "unit"
    ridge       of the values' least squares; None: values stay what the atoms have
    iterations  of the clusters of tangent atoms
    """

    atoms: str = "tangent"
    mass: str = "expected"
    ridge: float | None = 1e-2
    iterations: int = 3

    def quick(self, share: float) -> EntryRecipe:
        """The same for trials with a ``share`` of the tokens: clusters are not moved, and the values of large shares,
        which cost most to fit and change least, stay as they are."""
        return self._replace(iterations=0, ridge=self.ridge if share <= FITTED_SHARE else None)


class Fitted(NamedTuple):
    """Entries of key heads, and which token each is, (key heads, m); −1: several."""

    entries: KeyHeads
    positions: Tensor


def fit(
    recipe: EntryRecipe, tokens: KeyHeads, queries: LawQueries, readings: Readings, number: int, recent: int
) -> Fitted:
    """``number`` entries of each key head: the first 4 tokens, the last ``recent``, and atoms for those between.

    Σ_{j<T} δ_(k_j, v_j)  →  Σ_{j<4} δ + Σ_c e^{w_c} δ_(k̂_c, v̂_c) + Σ_{j≥T−recent} δ
    """
    length = tokens.keys.shape[1]
    if number >= length:
        return Fitted(tokens, _positions(tokens, torch.arange(length)))
    first = min(SINKS, number - 1)
    recent = max(0, min(recent, number - first - 1))
    middle = slice(first, length - recent)
    of_middle = KeyHeads(*(x[:, middle] for x in tokens))
    read = readings._replace(**{name: getattr(readings, name)[:, middle] for name in ("mean", "rms", "points")})
    options = (recipe.iterations,) if recipe.atoms == "tangent" else ()
    atoms = ATOMS[recipe.atoms](of_middle, queries, read, number - first - recent, *options)
    log_mass = MASSES[recipe.mass](atoms, of_middle, queries, read)
    exact = torch.cat([torch.arange(first), torch.arange(length - recent, length)])
    entries = KeyHeads(
        torch.cat([tokens.keys[:, exact], atoms.keys], 1),
        torch.cat([tokens.values[:, exact], atoms.values], 1),
        torch.cat([tokens.log_mass[:, exact], log_mass], 1),
    )
    if recipe.ridge is not None:
        entries = refitted(entries, queries, readings.output, recipe.ridge)
    which = torch.full_like(atoms.expected, -1, dtype=torch.int64) if atoms.chosen is None else atoms.chosen + first
    return Fitted(entries, torch.cat([_positions(tokens, exact), which], 1))


def _positions(tokens: KeyHeads, which: Tensor) -> Tensor:
    return which.to(tokens.keys.device).expand(len(tokens.keys), -1)
