"""Where a gate rejects so much that it cannot be outliers: which entry is at fault, if one is.

A gate rejects the entries of a sensor together, so that counts of what was rejected say nothing of which entry was
wrong. Each entry by itself does: its own normalised innovation w_i = Φ⁻¹(F(y_i | past)) in the rejected rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cumulant.filters.diagnostics.innovations import Innovations
from cumulant.filters.diagnostics.verdict import FilterVerdict

MOST_REJECTED = 0.1  # of all rows: more of them are no outliers
FAR = 3.5  # an entry beyond this by itself is surprising in a rejected row
GUILTY = 0.3  # of the rejected numbers of an entry that are surprising by themselves
ALIKE = 0.5  # of the share of the worst entry, from which another is at fault as well


def rejection(
    sequences: Sequence[Innovations], names: Sequence[str], pairs: Sequence[tuple[str, str]] = ()
) -> FilterVerdict | None:
    """The verdict where a gate rejects more than a tenth of the rows: what is left says little.

    pairs are entries that have to agree: where one of them is surprising, the other may be wrong and trusted more.
    """
    rejected = torch.cat([s.rejected for s in sequences])
    measured = rejected | torch.cat([~s.observations.isnan() for s in sequences])
    rows, all_rows = int(rejected.any(-1).sum()), int(measured.any(-1).sum())
    if not rows > MOST_REJECTED * all_rows:
        return None
    own = torch.cat([s.scores if s.marginal is None else s.marginal for s in sequences])
    counts = rejected.sum(0)
    far = ((own.abs() > FAR) & rejected).sum(0) / counts.clamp_min(1)
    concerned = [k for k in range(len(names)) if int(counts[k])]
    concerned = sorted(concerned, key=lambda k: -float(far[k]))
    least = max(GUILTY, ALIKE * max((float(far[k]) for k in concerned), default=0.0))
    guilty = [names[k] for k in concerned if float(far[k]) >= least]
    listed = ", ".join(f"{names[k]} in {float(far[k]):.0%}" for k in concerned)
    words = f"The gate rejects something in {rows:,} of {all_rows:,} rows: these are no outliers. By itself, of the "
    words += f"numbers rejected with it, each entry is beyond {FAR:g} standard deviations so often: {listed}. "
    advice = _advice(guilty, len(guilty) == len(concerned) > 1, pairs)
    return FilterVerdict("rejecting", f"{words}{advice} Nothing is said of what is left.")


def _advice(guilty: Sequence[str], alike: bool, pairs: Sequence[tuple[str, str]]) -> str:
    motion = "the modes may not follow the motion: raise process noise (q) or add a mode that turns"
    if not guilty:
        return f"No entry is at fault alone: {motion}; else look at the noise of all of them."
    if alike:
        listed = f"unit and convention of {guilty[0]} first, then of {', '.join(guilty[1:])}"
        return f"All of them are, so the track is lost: look at {listed}; if these are right, {motion}."
    partners = [b if a in guilty else a for a, b in pairs if (a in guilty) != (b in guilty)]
    rival = f", and of {', '.join(partners)}, which has to agree with it" if partners else ""
    listed = f"position, unit, convention and noise of {', '.join(guilty)}"
    return f"Look at {listed} first{rival}; if these are right, {motion}."
