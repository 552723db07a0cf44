"""
From a radar's table to a track
===============================

A radar logs time, range in km and azimuth in degrees of an aircraft that flies two turns; a scan of 12 s is missing and
two plots are wild. ``cumulant track --init`` writes a first model from the names and numbers of the columns: two modes
of constant velocity, one quiet and one lively, and the noise of range and azimuth from how far rows lie from their
neighbours. The same steps in Python: the first model, the tracks of the table, filtered and smoothed, and whether the
filter is consistent.

The text claims that both wild plots and nothing else are rejected, that the root mean square error of the filtered
positions is below three quarters, and that of the smoothed ones below half, of that of the plots that are not wild, and
that the guessed deviation of the range is within 35 % of the true 15 m. The verdict is that the filter may be surer.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cumulant.filters import constant_velocity, range_bearing, turn
from cumulant.filters.tracking import filter_tracks, first_model, read_model, read_tracks
from cumulant.filters.tracking.estimates import judge

noise, times = torch.Generator().manual_seed(1), [float(t) for t in range(0, 300, 2) if not 100 < t < 112]
two, motions = torch.tensor([2.0]).double(), (constant_velocity(0.5), turn(0.05, 0.5), turn(-0.04, 0.5))
straight, left, right = (motion.over(two) for motion in motions)
x, flown = torch.tensor([-6000.0, 9000, 90, -40]).double(), []
for k in range(150):
    step = left if 80 <= 2 * k < 110 else right if 190 <= 2 * k < 230 else straight
    flown.append(x)
    x = step.dynamics[0] @ x + torch.linalg.cholesky(step.process_noise[0]) @ torch.randn(4, generator=noise).double()
truth = torch.stack([flown[int(t / 2)] for t in times])

# %%
# The table as the radar writes it, with two wild plots.
radar, sizes = range_bearing(15.0, 0.0035, compass=True), torch.tensor([15.0, 0.0035]).double()
plots = radar(truth) + sizes * torch.randn(len(times), 2, generator=noise).double()
plots[[20, 60], 1] += torch.tensor([0.4, -0.7])
azimuths = plots[:, 1].rad2deg() % 360
rows = [f"{t:g},{r / 1000:.4f},{a:.3f}" for t, r, a in zip(times, plots[:, 0], azimuths, strict=True)]
with TemporaryDirectory() as directory:
    table, path = Path(directory) / "radar.csv", Path(directory) / "radar.toml"
    table.write_text("\n".join(["time_s,range_km,azimuth_deg", *rows]))
    path.write_text(first_model(table).text)
    model = read_model(path)
    tracks = read_tracks(table, model.columns)
(found,) = filter_tracks(model, tracks, smoother="propagation", score=True)
judged = judge(model, [found])
assert found.innovations
assert found.smoothed
rejected = found.innovations.rejected.any(-1)
seen = plots[:, :1] * torch.stack([plots[:, 1].sin(), plots[:, 1].cos()], -1)
ways = {"measured": seen, "filtered": found.filtered.mean[:, :2], "smoothed": found.smoothed.mean[:, :2]}
error = {k: (v - truth[:, :2])[~rejected].square().sum(-1).mean().sqrt().item() for k, v in ways.items()}


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, plane = plt.subplots(figsize=(9, 5), layout="constrained")
    for (name, way), style in zip(ways.items(), (".", "-", "--"), strict=True):
        plane.plot(*way.T, style, ms=4, lw=1.3, label=f"{name}: {error[name]:.0f} m")
    plane.plot(*seen[rejected].T, "xr", label="rejected by the gate")
    plane.set_title(judged.verdict.split(". ")[0], fontsize=9)
    plane.set(xlabel="m east", ylabel="m north", aspect="equal")
    _ = plane.legend(), fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])
assert rejected.nonzero().flatten().tolist() == [20, 60]
assert max(error["filtered"] / 0.75, error["smoothed"] / 0.5) < error["measured"]
assert abs(model.modes[0].noise[0, 0].sqrt() / 15 - 1) < 0.35
assert judged.status == "underconfident"
