"""Innovations and consistency: scores against densities, the gate, bands that hold, verdicts that are right."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest, norm

from cumulant.filters import Slots, SwitchingLinearGaussian, consistency, gpb, imm, innovations, kalman, nees
from cumulant.filters.diagnostics.banded import chi_square_band
from cumulant.filters.diagnostics.chi_square import chi_square_quantile
from tests.compare import close

NAN = float("nan")


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def target(q=1.0, r=1.0, modes=1, stay=0.9, back=None) -> SwitchingLinearGaussian:
    """Constant velocity, measured twice with correlated noise; the second of two modes is 30 times as noisy."""
    f, noise = t([[1, 1], [0, 1]]), t([[1 / 3, 1 / 2], [1 / 2, 1]])
    off = (1 - stay) / max(modes - 1, 1)
    transition = torch.full((modes, modes), off).double().fill_diagonal_(stay if modes > 1 else 1.0)
    if back is not None:
        transition[1] = t([back, 1 - back])
    return SwitchingLinearGaussian(
        transition,
        f,
        torch.stack([q * noise * 30**k for k in range(modes)]),
        t([[1, 0], [1, 0.5]]),
        r * t([[2, 0.5], [0.5, 1]]),
        initial_mean=t([0, 0]),
        initial_covariance=torch.eye(2).double(),
    )


def simulated(model, steps=300, seed=0, batch=()):
    return model.simulate(steps, batch_shape=batch, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("degrees", [1, 2, 7, 150, 20_000])
def test_quantiles_are_those_of_scipy(degrees):
    for p in (0.001, 0.025, 0.5, 0.975, 0.9999):
        np.testing.assert_allclose(chi_square_quantile(p, degrees), chi2.ppf(p, degrees), rtol=1e-7)


# ------------------------------------------------------------------------------------------------------------- scores


def test_scores_of_one_mode_are_whitened_innovations():
    model = target()
    y = simulated(model, 40).observations
    y[3, 0], y[5], y[9, 1] = NAN, NAN, NAN
    found, filtered = innovations(model, y), kalman(model, y)
    for k in range(40):
        present = ~y[k].isnan()
        h, r = model.observation[0][present].numpy(), model.observation_noise[0][present][:, present].numpy()
        nu = y[k][present].numpy() - h @ filtered.prior_mean[k].numpy()
        s = h @ filtered.prior_covariance[k].numpy() @ h.T + r
        np.testing.assert_allclose(found.nis[k], nu @ np.linalg.solve(s, nu) if len(nu) else 0.0, rtol=1e-9, atol=1e-12)
        whitened = np.linalg.solve(np.linalg.cholesky(s), nu) if len(nu) else nu
        np.testing.assert_allclose(found.scores[k][present], whitened, rtol=1e-7, atol=1e-9)
    assert torch.equal(found.measured, (~y.isnan()).sum(-1))


@pytest.mark.parametrize("slots", [Slots(1, 1), Slots.gpb(1), Slots.gpb(2), Slots.gpb(3)], ids=str)
def test_scores_of_a_mixture_have_its_density(slots):
    """p(y) = Π φ(z_i) |∂z/∂y|: the density that the filter itself reports, whatever it keeps."""
    model = target(modes=2)
    y = simulated(model, 6).observations
    run = imm(model, y) if slots == Slots(1, 1) else gpb(model, y, order=slots.before)
    step, jacobian = 1e-5, np.zeros((2, 2))
    for k in range(2):
        moved = [y.clone(), y.clone()]
        moved[0][-1, k] -= step
        moved[1][-1, k] += step
        low, high = (innovations(model, x, slots=slots).scores[-1].numpy() for x in moved)
        jacobian[:, k] = (high - low) / (2 * step)
    z = innovations(model, y, slots=slots).scores[-1].numpy()
    log_density = norm.logpdf(z).sum() + np.log(abs(np.linalg.det(jacobian)))
    np.testing.assert_allclose(log_density, run.log_likelihood[-1], rtol=1e-6)


def test_scores_are_standard_normal_under_a_model_that_switches():
    """Where νᵀS⁻¹ν of the moment-matched prediction is not χ²."""
    model = target(modes=2, q=0.2, stay=0.8)
    y = simulated(model, 200, batch=(8,)).observations
    z = innovations(model, y, slots=Slots.gpb(3)).scores
    assert z.shape == (8, 200, 2)
    assert kstest(z.flatten().numpy(), "norm").pvalue > 0.05
    assert kstest(z.square().sum(-1).flatten().numpy(), "chi2", args=(2,)).pvalue > 0.05


def test_scores_far_out_are_numbers():
    model = target(modes=2)
    y = t([[0.0, 0.0], [1e4, -1e5], [1e30, 0.0]])
    z = innovations(model, y).scores
    assert z.isfinite().all()
    assert z[1, 0] > 1e3
    assert z[1, 1] < -1e4


def test_each_sequence_is_scored_as_if_alone():
    model = target(modes=2)
    y = simulated(model, 20, batch=(3,)).observations
    y[1, 4:7] = NAN
    together = innovations(model, y, gate=0.9, groups=[[0], [1]])
    for k in range(3):
        alone = innovations(model, y[k], gate=0.9, groups=[[0], [1]])
        close(together.scores[k].nan_to_num(7), alone.scores.nan_to_num(7))
        assert torch.equal(together.rejected[k], alone.rejected)
    close(together.mode_predictions.sum(-1), torch.ones(3, 20).double())


# --------------------------------------------------------------------------------------------------------------- gate


def test_a_gate_keeps_outliers_out_of_the_estimate():
    model = target()
    y = simulated(model, 60).observations
    clean = y.clone()
    y[20, 0] += 80
    y[41] -= 80
    clean[20, 0], clean[41] = NAN, NAN
    found = innovations(model, y, gate=0.9999, groups=[[0], [1]])
    assert found.rejected.nonzero().tolist() == [[20, 0], [41, 0], [41, 1]]
    close(kalman(model, found.observations).mean, kalman(model, clean).mean)
    together = innovations(model, y, gate=0.9999)
    assert together.rejected.nonzero().tolist() == [[20, 0], [20, 1], [41, 0], [41, 1]]
    assert not innovations(model, y).rejected.any()
    with pytest.raises(ValueError, match=r"innovations.gate: expected a probability between 0 and 1, got 3"):
        innovations(model, y, gate=3)


def test_a_gate_rejects_as_often_as_it_says():
    """Without process noise; with it, a row that was rejected makes the next one a little more surprising."""
    model = target(0.0)
    y = simulated(model, 500, batch=(8,)).observations
    share = innovations(model, y, gate=0.99).rejected.any(-1).double().mean()
    assert abs(share - 0.01) < 3 * (0.01 * 0.99 / 4000) ** 0.5


# ------------------------------------------------------------------------------------------------------------ verdicts


VERDICTS = {  # of a target with q = 0.05: what q and r are multiplied by, and what is said
    "right": (1, 1, "consistent", "The filter is consistent. NIS is"),
    "process noise too small": (0.01, 1, "overconfident", "lags behind: raise process noise"),
    "measurement noise too small": (1, 0.1, "overconfident", "follows the noise: raise measurement noise"),
    "process noise too large": (60, 1, "underconfident", "follows the noise: lower process noise"),
    "measurement noise too large": (1, 12, "underconfident", "lags behind: lower measurement noise"),
    "both too small": (
        0.2,
        0.2,
        "overconfident",
        "raise process noise (q) and measurement noise, variances by about 4.8",
    ),
    "both too large": (
        5,
        5,
        "underconfident",
        "lower process noise (q) and measurement noise, variances to 0.19",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_names_what_is_wrong(case):
    q, r, status, words = VERDICTS[case]
    y = simulated(target(0.05), 300, batch=(4,)).observations
    found = consistency(innovations(target(0.05 * q, r), y), names=["a", "b"])
    assert found.status == status, found.verdict
    assert words in found.verdict


@pytest.mark.parametrize(("scale", "status"), [(1, "consistent"), (0.1, "overconfident"), (10, "underconfident")])
def test_the_verdict_on_a_model_that_switches(scale, status):
    y = simulated(target(modes=2), 300, batch=(4,)).observations
    assert consistency(innovations(target(scale, scale, 2), y)).status == status


def test_bands_hold_95_times_in_100():
    model = target(modes=2)
    y = simulated(model, 60, batch=(200,)).observations
    found = innovations(model, y, slots=Slots.gpb(2))
    judged = [consistency(type(found)(*(part[k] for part in found))) for k in range(200)]
    for inside in (
        [c.nis.inside for c in judged],
        [c.autocorrelation[0].inside for c in judged],
        [c.modes["0"].inside for c in judged],
    ):
        assert 0.9 <= np.mean(inside) <= 0.99


def test_one_bad_entry_is_named_and_outliers_are_told_from_noise():
    model = target()
    y = simulated(model, 400).observations
    noisy = y + t([0, 3]) * torch.randn(400, 2, generator=torch.Generator().manual_seed(1)).double()
    found = consistency(innovations(model, noisy), names=["range", "bearing"])
    assert found.status == "overconfident"
    assert "Most of it is in bearing" in found.verdict
    spiky = y.clone()
    spiky[::40, 0] += 60
    found = consistency(innovations(model, spiky))
    assert "gate them" in found.verdict
    assert found.outliers >= 10
    gated = consistency(innovations(model, spiky, gate=0.9999))
    assert gated.status == "consistent"
    assert gated.rejected == 20


def test_switching_that_is_wrong_shows_in_the_shares_of_modes():
    """A target that is quiet nine times in ten, under a model that has it quiet half of the time."""
    truth, half = {"modes": 2, "q": 0.01, "stay": 0.98, "back": 0.2}, {"modes": 2, "q": 0.01, "stay": 0.9, "back": 0.1}
    y = simulated(target(**truth), 400, batch=(4,)).observations
    names = ["quiet", "noisy"]
    right, wrong = (consistency(innovations(target(**m), y, slots=Slots.gpb(3)), modes=names) for m in (truth, half))
    assert right.modes["quiet"].inside
    assert not wrong.modes["quiet"].inside
    assert wrong.modes["quiet"].value > wrong.modes["quiet"].high
    close(sum(v.value for v in wrong.modes.values()), 1.0)


def test_few_rows_have_no_verdict_and_the_table_has_every_number():
    model = target(modes=2)
    y = simulated(model, 9).observations
    found = consistency(innovations(model, y))
    assert found.status == "unknown"
    assert "18 measured numbers are too few" in found.verdict
    y = simulated(model, 50).observations
    rows = consistency(innovations(model, y), names=["a", "b"], modes=["c", "d"]).table()
    names = [row["number"] for row in rows]
    assert names[:4] == ["NIS", "NIS of a", "NIS of b", "autocorrelation, lag 1"]
    assert names[-2:] == ["share of c", "share of d"]
    with pytest.raises(ValueError, match=r"consistency.names: expected 2 names, got 3"):
        consistency(innovations(model, y), names=["a", "b", "c"])


# ---------------------------------------------------------------------------------------------------------------- NEES


def test_nees_is_the_quadratic_form_over_what_is_known():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 3))
    p, e = a @ a.T, rng.normal(size=3)
    close(nees(t(e), t(p), t([0, 0, 0])), t(e @ np.linalg.solve(p, e)), 1e-9)
    part = nees(t(e), t(p), t([0, NAN, 0]))
    keep = [0, 2]
    close(part, t(e[keep] @ np.linalg.solve(p[np.ix_(keep, keep)], e[keep])), 1e-9)
    assert nees(t(e), t(p), t([NAN] * 3)).isnan()
    close(nees(t([1.0, 0.0]), torch.diag(t([1.0, 0.0])), t([0.0, 0.0])), t(1.0))  # certain of the second, and right
    with pytest.raises(ValueError, match=r"nees.truth: expected shape \(3\) as mean, got \(2\)"):
        nees(t(e), t(p), t([0, 0]))


@pytest.mark.parametrize(("q", "inside"), [(1.0, True), (0.02, False)])
def test_nees_of_the_right_model_is_inside_its_band(q, inside):
    flown = simulated(target(), 100, batch=(20,))
    filtered = kalman(target(q), flown.observations)
    errors = list(nees(filtered.mean, filtered.covariance, flown.states))
    found = consistency(innovations(target(q), flown.observations), errors=errors, size=2)
    assert found.nees is not None
    assert found.nees.inside == inside
    assert found.nees.count < 2000  # neighbouring rows are not independent
    assert found.table()[-1]["number"] == "NEES"


def test_a_band_of_nothing_holds_everything():
    assert chi_square_band(3.0, 0).inside


def test_a_sensor_that_a_gate_rejects_is_named_rather_than_what_is_left_judged():
    """Two sensors of one walk, the second 50 deviations beside the first: it is described wrongly, not noisy."""
    eye, one = torch.eye(1).double(), torch.ones(2, 1).double()
    model = SwitchingLinearGaussian(
        eye, eye, eye, one, torch.eye(2).double(), initial_mean=0 * eye[0], initial_covariance=eye
    )
    y = model.simulate(200, generator=torch.Generator().manual_seed(0)).observations
    y = torch.cat([y[:, :1], y[:, 1:] + 50], 1)
    judged = consistency(innovations(model, y, gate=0.999, groups=[[0], [1]]), names=["near", "far"])
    assert judged.status == "rejecting"
    assert "something in 200 of 200 rows: these are no outliers" in judged.verdict
    assert "far in 100%. Look at position, unit, convention and noise of far first" in judged.verdict
    fine = consistency(innovations(model, y[:, :1].expand(-1, 2), gate=0.999), names=["near", "far"])
    assert fine.status != "rejecting"
