"""The rules of a verdict on simulated radars with one known fault each: how often each is named, and false alarms."""

from collections import Counter

import numpy as np
import pytest
import torch

from cumulant.filters import Innovations, consistency
from cumulant.filters.diagnostics.banded import OUTSIDE, BandedValue, Limit
from cumulant.filters.diagnostics.consistency import Consistency
from cumulant.filters.diagnostics.entry_innovations import entry_innovations
from cumulant.filters.tracking import filter_tracks
from cumulant.filters.tracking.estimates import entries_that_agree, exact_rates, judge
from cumulant.filters.tracking.filter import Estimate
from tests.filters.flights import cruising, flown, observed, radar_model, turning, two_modes

ROWS, TOGETHER = 200, 4


def estimates(path, modes, kind="straight", q=1.0, tracks=40, rows=ROWS, seed=0, std=None, **seen) -> list[Estimate]:
    rng = np.random.default_rng(seed)
    model = radar_model(path / "model.toml", modes, **(std or {}))
    return filter_tracks(model, observed(rng, flown(rng, tracks, rows, q, kind), **seen), score=True)


def verdicts(found: list[Estimate], together: int = TOGETHER) -> list[Consistency]:
    """One of each few tracks."""
    parts = [e.innovations for e in found if e.innovations is not None]
    names, pairs = ["range", "bearing", "range_rate"], [(0, 2)]
    groups = [parts[k : k + together] for k in range(0, len(parts), together)]
    return [consistency(group, names=names, pairs=pairs, leading=pairs) for group in groups]


def shares(found: list[Consistency]) -> Counter:
    return Counter({status: n / len(found) for status, n in Counter(c.status for c in found).items()})


RIGHT = {"one mode": (cruising(), "straight"), "two modes": (two_modes(1, 100), "switch")}


@pytest.mark.parametrize("case", RIGHT)
def test_the_right_model_is_called_consistent(case, tmp_path):
    """At most 5 tables in 100 of 800 rows, and of 60 rows, are called anything else."""
    modes, kind = RIGHT[case]
    found = estimates(tmp_path, modes, kind, tracks=100)
    assert shares(verdicts(found))["consistent"] >= 0.95
    assert shares(verdicts(found, 1))["consistent"] >= 0.93


TURNS = {"kind": "turns", "q": 0.3}
CAUSES = {  # modes and flights, what is expected to be said, how often
    "q 30 times too small": ({"modes": cruising(1 / 30)}, "overconfident", "lags behind: raise process noise (q)", 0.9),
    "q 30 times too large": ({"modes": cruising(30)}, "underconfident", "lower process noise (q)", 0.9),
    "std of bearing too small": ({"std": {"bearing": 0.3 / 1.7}}, "overconfident", "raise the std of bearing, to", 0.9),
    "std of bearing too large": ({"std": {"bearing": 0.3 * 1.7}}, "underconfident", "lower the std of bearing", 0.9),
    "std of Doppler too small": ({"std": {"doppler": 0.8 / 1.7}}, "overconfident", "raise the std of range_rate", 0.9),
    "std of Doppler too large": ({"std": {"doppler": 0.8 * 1.7}}, "underconfident", "lower the std of range_rate", 0.9),
    "a turn without a mode, as from --init": (TURNS | {"modes": two_modes(3.6, 360)}, "manoeuvring", "add a mode", 0.9),
    "the same with q times 4": (TURNS | {"modes": two_modes(14.4, 1440)}, "manoeuvring", "rather than raise q", 0.9),
    "a turn under one straight mode": (TURNS | {"modes": cruising(3.6)}, "manoeuvring", "add a mode that turns", 0.9),
    "a bias of Doppler": ({"doppler_bias": 2.0}, "biased", "of the sensor), or range_rate contradicts it", 0.9),
    "Doppler half a step ahead in turns": (
        TURNS | {"modes": turning(), "doppler_ahead": True}, "contradictory", "range and range_rate contradict", 0.6,
    ),
    "the same without turn modes": (
        TURNS | {"modes": two_modes(3.6, 360), "doppler_ahead": True}, "contradictory", "leave out range and then", 0.8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_each_cause_is_named(case, tmp_path):
    options, status, words, power = CAUSES[case]
    found = verdicts(estimates(tmp_path, **({"modes": cruising()} | options)))
    assert shares(found)[status] >= power, shares(found)
    said = [c for c in found if c.status == status]
    assert np.mean([words in c.verdict for c in said]) >= 0.8, said[0].verdict


def test_a_turn_mode_is_what_mends_a_turn(tmp_path):
    """The advice, taken: consistent, with a log-likelihood that four times the q does not reach."""
    before, louder, after = (
        estimates(tmp_path, modes, "turns", 0.3) for modes in (two_modes(3.6, 360), two_modes(14.4, 1440), turning())
    )
    gains = [
        sum(float(e.filtered.log_likelihood.sum()) for e in found) / (40 * ROWS) for found in (before, louder, after)
    ]
    assert gains[1] < gains[0] < gains[2] - 0.3
    assert shares(verdicts(after))["consistent"] >= 0.8


def test_the_sentence_and_the_marks_agree(tmp_path):
    """No number of a consistent filter is marked outside but those that the sentence names."""
    found = verdicts(estimates(tmp_path, two_modes(1, 100), "switch", rows=60), 1)
    found += verdicts(estimates(tmp_path, cruising(4), rows=60), 1)
    for judged in found:
        outside = [str(row["number"]) for row in judged.table() if row["mark"] == OUTSIDE]
        if judged.status == "consistent":
            assert not [name for name in outside if "share" not in name], judged.verdict
        elif judged.status in ("correlated", "overconfident", "underconfident"):
            assert outside, judged.verdict


def test_the_mode_whose_q_is_wrong_is_named(tmp_path):
    found = verdicts(estimates(tmp_path, two_modes(1, 100 / 30), "switch"), 40)
    (judged,) = found
    assert judged.mode_nis["1"].value > 1.5 * judged.mode_nis["0"].value
    right = verdicts(estimates(tmp_path, two_modes(1, 100), "switch"), 40)[0]
    assert all(0.9 < nis.value < 1.1 for nis in right.mode_nis.values())


def test_entries_that_a_lag_moves_together(tmp_path):
    model = radar_model(tmp_path / "model.toml", cruising())
    assert entries_that_agree(model) == exact_rates(model, [1.0, 1.0]) == [(0, 2)]
    assert exact_rates(model, [10.0]) == []
    judged = judge(model, estimates(tmp_path, cruising(), tracks=2, rows=40))
    assert list(judged.tracks) == ["0", "1"]
    assert list(judged.details) == ["range", "bearing", "range_rate"]
    numbers = [row["number"] for row in judged.table()]
    assert "mean of bearing" in numbers
    assert "autocorrelation of range_rate, lag 1" in numbers


def test_a_mean_and_a_stretch_of_one_entry():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(400, generator=generator).double()
    biased, right = entry_innovations([w + 1]), entry_innovations([w])
    assert biased.constant is not None
    assert biased.constant > 0.8
    assert not Limit(1.7, 0.2).side(right.mean)
    turned = w.clone()
    turned[100:140] += 2
    turned[250:280] -= 2
    lagging = entry_innovations([turned])
    assert lagging.typical is not None
    assert lagging.typical < 0.2 < 0.3 < (right.typical or 0)
    assert lagging.persistence.value > 0.1
    assert Limit(1.3, 0.1).side(BandedValue(0.8, 0.9, 1.1, 400)) == -1


def test_names_of_tracks_are_counted():
    found = Innovations(*(torch.zeros(9, 1) for _ in range(7)))
    with pytest.raises(ValueError, match=r"consistency.tracks: expected 1 names, got 2. One for each sequence."):
        consistency(found._replace(nis=torch.zeros(9), measured=torch.zeros(9)), tracks=["a", "b"])


WRONG_SENSORS = {  # what is multiplied in the measurements, and the entries of which one is to be named
    "bearing": ({"bearing": 0.01}, "noise of bearing first; if"),
    "Doppler in knots": ({"unit": 3600 / 1852}, "noise of range_rate first, and of range, which has to agree"),
}


@pytest.mark.parametrize("case", WRONG_SENSORS)
def test_a_gate_that_rejects_much_names_the_entry_by_itself(case, tmp_path):
    """The std of bearings 30 times too small, or Doppler in another unit; some Doppler cells are empty."""
    options, words = WRONG_SENSORS[case]
    rng = np.random.default_rng(0)
    tracks = observed(rng, flown(rng, 4, 150))
    for track in tracks:
        track.y[:, 2] *= options.get("unit", 1.0)
        track.y[::9, 2] = torch.nan
    model = radar_model(tmp_path / "model.toml", two_modes(1, 100), bearing=options.get("bearing", 0.3))
    judged = judge(model, filter_tracks(model, tracks, score=True, gate=0.9999))
    assert judged.status == "rejecting"
    assert words in judged.verdict, judged.verdict


def test_a_gate_that_rejects_turns_blames_the_motion(tmp_path):
    rng = np.random.default_rng(0)
    tracks = observed(rng, flown(rng, 4, 200, 0.3, "turns"))
    model = radar_model(tmp_path / "model.toml", cruising(0.01))
    judged = judge(model, filter_tracks(model, tracks, score=True, gate=0.9999))
    assert judged.status == "rejecting"
    assert "the modes may not follow the motion" in judged.verdict
