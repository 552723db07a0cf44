"""The switching engine against enumeration of mode paths and plain NumPy filters; its invariants; how data may come."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from cumulant.filters import (
    EXACT,
    IMM,
    Slots,
    SwitchingLinearGaussian,
    exact,
    gpb,
    imm,
    init,
    kalman,
    m_projection,
    packed,
    run,
    step,
)
from tests.compare import close
from tests.filters.oracle import (
    NAN,
    Oracle,
    agrees,
    enumerated,
    model_of,
    oracle,
    parameters,
    same,
    series,
    t,
)

REFERENCE_RUNS = Path(__file__).parents[1] / "data" / "filters"

GAPPY = series().clone()
GAPPY[0, 1], GAPPY[2], GAPPY[3, 0] = NAN, NAN, NAN


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("y", [series(), GAPPY], ids=["complete", "gaps"])
def test_exact_is_the_sum_over_mode_paths(start, y):
    p = parameters()
    found = exact(model_of(p, start), y)
    mean, covariance, modes, total = enumerated(p, y.numpy(), start)
    close(found.mean[-1], mean)
    close(found.covariance[-1], covariance)
    close(found.mode_probabilities[-1], modes)
    close(found.total_log_likelihood, total)
    agrees(found, oracle(p, y.numpy(), start, 99, 99))


SLOTS = {"GPB1": Slots.gpb(1), "GPB2": Slots.gpb(2), "GPB3": Slots.gpb(3), "IMM": IMM, "IMM with memory": Slots(2, 2)}


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("y", [series(7), torch.cat([GAPPY, series(2)])], ids=["complete", "gaps"])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=list(SLOTS))
def test_collapse_slots_against_a_dictionary_of_hypotheses(slots, start, y):
    p = parameters()
    agrees(run(model_of(p, start), y, slots), oracle(p, y.numpy(), start, *slots))


@pytest.mark.parametrize("modes", [1, 2, 9])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (3, 1), (2, 4), (9, 2)])
def test_sizes(modes, d, m):
    p, y = parameters(modes, d, m), series(3, m)
    agrees(imm(model_of(p), y), oracle(p, y.numpy(), "prior", 1, 1), 1e-10)
    agrees(gpb(model_of(p), y), oracle(p, y.numpy(), "prior", 2, 1), 1e-10)


def test_the_two_ways_to_predict_agree(monkeypatch):
    model, y = model_of(parameters()), series(6, batch=(3,))
    by_product = gpb(model, y, order=3)
    monkeypatch.setattr(packed, "SQUARED", 0)
    same(by_product, gpb(model, y, order=3))


# ---------------------------------------------------------------------- invariants


def test_an_order_above_the_length_is_exact():
    model, y = model_of(parameters(), "belief"), series(4)
    same(gpb(model, y, order=5), exact(model, y))
    assert (gpb(model, y, order=3).mean - exact(model, y).mean).abs().max() > 1e-6


def test_equal_rows_make_imm_gpb1():
    p = list(parameters())
    p[0] = np.tile(p[0][:1], (3, 1))
    same(imm(model_of(p), series(9)), gpb(model_of(p), series(9), order=1))


def test_a_mode_that_never_changes_is_exact():
    p = list(parameters())
    p[0] = np.eye(3)
    model, y = model_of(p, "belief"), series(6)
    same(imm(model, y), exact(model, y))
    same(gpb(model, y), exact(model, y))


def test_without_observation_imm_is_gpb2():
    model = model_of(parameters(), "belief")
    unseen = torch.full((5, 2), NAN, dtype=torch.float64)
    same(imm(model, unseen), gpb(model, unseen))
    assert (imm(model, unseen).log_likelihood == 0).all()
    blind = model_of(
        [
            *parameters()[:3],
            np.zeros((3, 0, 2)),
            np.zeros((3, 0, 0)),
            parameters()[5],
            np.zeros((3, 0)),
            *parameters()[7:],
        ],
        "belief",
    )
    same(imm(blind, torch.zeros(5, 0, dtype=torch.float64)), imm(model, unseen))
    same(gpb(blind, torch.zeros(5, 0, dtype=torch.float64)), imm(model, unseen))


def test_one_mode_is_kalman():
    p, y = parameters(1), series(8)
    for found in (kalman(model_of(p), y), imm(model_of(p), y), gpb(model_of(p), y, order=1), exact(model_of(p), y)):
        agrees(found, oracle(p, y.numpy(), "prior", 1, 1))


def test_permuting_modes_permutes_answers():
    p, order = parameters(), [2, 0, 1]
    turned = [p[0][np.ix_(order, order)], *(a[order] for a in p[1:])]
    for filter in (imm, gpb, exact):
        a, b = filter(model_of(p), series(5)), filter(model_of(turned), series(5))
        same(a, b, fields=("mean", "covariance", "prior_mean", "prior_covariance", "log_likelihood"))
        torch.testing.assert_close(a.mode_means[:, order], b.mode_means, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a.mode_probabilities[:, order], b.mode_probabilities, rtol=1e-12, atol=1e-12)


def test_a_belief_predicted_by_hand_is_a_prior():
    transition, f, q, h, r, b, c, m0, p0, pi = parameters(1)
    moved = (f @ m0[..., None])[..., 0] + b, f @ p0 @ f.transpose(0, 2, 1) + q
    by_hand = model_of((transition, f, q, h, r, b, c, *moved, pi), "prior")
    same(kalman(by_hand, series()), kalman(model_of(parameters(1), "belief"), series()))


# ---------------------------------------------------------------------- peers and reference files


def test_filterpy_has_the_same_posteriors():
    kalman_module = pytest.importorskip("filterpy.kalman")
    p = list(parameters(2, 3, 2))
    p[5], p[6] = 0 * p[5], 0 * p[6]
    transition, f, q, h, r, _, _, m0, p0, pi = p
    filters = []
    for s in range(2):
        one = kalman_module.KalmanFilter(3, 2)
        one.x, one.P, one.F, one.Q, one.H, one.R = m0[s][:, None].copy(), p0[s].copy(), f[s], q[s], h[s], r[s]
        filters.append(one)
    peer = kalman_module.IMMEstimator(filters, pi.copy(), transition)
    y = series(30)
    found = imm(model_of(p, "belief"), y)
    for k, observation in enumerate(y.numpy()):
        peer.predict()
        peer.update(observation[:, None])
        close(found.mean[k], peer.x[:, 0], 1e-10)
        close(found.covariance[k], peer.P, 1e-10)
        close(found.mode_probabilities[k], peer.mu, 1e-10)


def reference(name):
    return json.loads((REFERENCE_RUNS / name).read_text())


def stored(case, grad=False):
    keys = ("transition", "F", "Q", "H", "R", "m0", "P0", "mu0")
    given = {k: t(case[k]).requires_grad_(grad) for k in keys}
    initial = {"initial_mean": given["m0"], "initial_covariance": given["P0"], "initial_modes": given["mu0"]}
    matrices = [given[k] for k in keys[:5]]
    return SwitchingLinearGaussian(*matrices, **initial, start="belief"), given


NAMES = {
    "mean": "mean",
    "cov": "covariance",
    "mode_probs": "mode_probabilities",
    "mode_means": "mode_means",
    "mode_covs": "mode_covariances",
    "prior_mean": "prior_mean",
    "prior_cov": "prior_covariance",
    "loglik_per_step": "log_likelihood",
    "loglik": "total_log_likelihood",
}


def as_stored(filtered, run):
    for theirs in NAMES.keys() & run.keys():
        close(getattr(filtered, NAMES[theirs]), run[theirs], 1e-9)


def test_reference_runs_of_a_turning_target():
    for case in reference("imm_reference.json")["scenarios"].values():
        model, y = stored(case)[0], t(case["observations"])
        as_stored(imm(model, y), case["filterpy"])
        as_stored(imm(model, y), case["numpy_imm"])
        as_stored(gpb(model, y), case["numpy_gpb2"])
        as_stored(gpb(model, y, order=1), case["numpy_gpb1"])


def test_reference_runs_of_every_order():
    for case in reference("exact_reference.json")["cases"].values():
        model, y = stored(case)[0], t(case["observations"])
        as_stored(exact(model, y), case["exact_filter"])
        as_stored(imm(model, y), case["imm"])
        for order in range(1, 5):
            as_stored(gpb(model, y, order=order), case[f"gpb{order}"])


@pytest.mark.parametrize("name", ["imm", "gpb2"])
def test_reference_gradients(name):
    cases = reference("imm_reference.json")["scenarios"]
    for key, case in reference("gradient_reference.json").items():
        model, given = stored(cases[key], grad=True)
        y = t(cases[key]["observations"])[: case["T"]]
        (imm if name == "imm" else gpb)(model, y).total_log_likelihood.backward()
        for symbol, theirs in case[name]["grad"].items():
            ours, theirs = given[symbol].grad, t(theirs)
            if symbol in ("Q", "R", "P0"):
                ours, theirs = ours + ours.mT, theirs + theirs.mT
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("filter", "start"), [(imm, "prior"), (gpb, "belief"), (exact, "prior")])
def test_gradients_are_difference_quotients(filter, start):
    p, y = parameters(2, 2, 1), series(3, 1)
    y[1] = NAN

    def value(*tensors):
        transition, f, root_q, h, root_r, b, c, m0, root_p, pi = tensors
        covariances = [a @ a.mT + 0.1 * torch.eye(a.shape[-1]).double() for a in (root_q, root_r, root_p)]
        probabilities = [a.softmax(-1) for a in (transition, pi)]
        arrays = (probabilities[0], f, covariances[0], h, covariances[1])
        initial = {"initial_mean": m0, "initial_covariance": covariances[2], "initial_modes": probabilities[1]}
        found = filter(
            SwitchingLinearGaussian(*arrays, state_offset=b, observation_offset=c, start=start, **initial), y
        )
        return found.total_log_likelihood, found.mean[-1], found.covariance[-1], found.prior_mean[1]

    leaves = [t(a).requires_grad_() for a in p]
    assert torch.autograd.gradcheck(value, leaves, atol=1e-7, rtol=1e-6)


def test_gradient_of_each_parameter_as_it_stands():
    """Entry by entry without constraints, as far as the checks of a model let one entry move."""
    p, y, size = parameters(2, 2, 1), series(12, 1), 4e-7
    leaves = [t(a).requires_grad_() for a in p]
    imm(model_of(leaves, "belief"), y).total_log_likelihood.backward()
    for k in (0, 1, 3, 5, 6, 7, 9):
        for index in np.ndindex(*p[k].shape):
            values = []
            for sign in (1, -1):
                moved = [a.copy() for a in p]
                moved[k][index] += sign * size
                values.append(imm(model_of(moved, "belief"), y).total_log_likelihood.item())
            quotient = (values[0] - values[1]) / (2 * size)
            assert abs(leaves[k].grad[index].item() - quotient) <= 1e-6 * max(1, abs(quotient))


def test_gradient_of_a_parameter_that_enters_late():
    """The first step of a prior moves nothing, and many sequences are recorded step by step."""
    p, y = parameters(2), series(3, batch=(600,))
    dynamics = t(p[1]).requires_grad_()
    whole = imm(replace(model_of(p), dynamics=dynamics), y)
    same(whole, imm(model_of(p), y))
    parts = [imm(replace(model_of(p), dynamics=dynamics), y[k::3]).mean.sum() for k in range(3)]
    (ours,) = torch.autograd.grad(whole.mean.sum(), dynamics)
    (theirs,) = torch.autograd.grad(sum(parts), dynamics)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-8)


def test_gradient_in_the_observations():
    model = model_of(parameters(2))
    assert torch.autograd.gradcheck(lambda y: imm(model, y).mean, [series(3).requires_grad_()])


def test_forward_derivatives():
    model, y, direction = model_of(parameters(2)), series(3), series(3, seed=9)
    with dual_level():
        found = unpack_dual(imm(model, make_dual(y, direction)).mean)
    quotient = (imm(model, y + 1e-6 * direction).mean - imm(model, y - 1e-6 * direction).mean) / 2e-6
    torch.testing.assert_close(found.tangent, quotient, rtol=1e-7, atol=1e-7)


def test_answers_without_derivatives_may_meet_one_later():
    found = imm(model_of(parameters(2)), series(3))
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (found.mean * weight).sum().backward()
    torch.testing.assert_close(weight.grad, found.mean.sum(0))
    leaves = [t(a).requires_grad_() for a in parameters(2)]
    with torch.no_grad():
        same(imm(model_of(leaves), series(3)), found)
    with torch.inference_mode():
        same(imm(model_of(parameters(2)), series(3)), found)


# ---------------------------------------------------------------------- missing data, lengths, batches, streams


def test_an_entry_that_is_always_missing_might_not_exist():
    transition, f, q, h, r, b, c, m0, p0, pi = parameters(2, 3, 3)
    y = series(6, 3)
    y[:, 1] = NAN
    keep = [0, 2]
    fewer = (transition, f, q, h[:, keep], r[:, keep][:, :, keep], b, c[:, keep], m0, p0, pi)
    same(gpb(model_of(parameters(2, 3, 3)), y), gpb(model_of(fewer), y[:, keep]))


def test_batches_are_independent_sequences():
    model, y = model_of(parameters()), series(6, batch=(2, 3))
    y[1, 2, 3] = NAN
    found = gpb(model, y)
    assert found.mode_covariances.shape == (2, 3, 6, 3, 2, 2)
    for i, j in itertools.product(range(2), range(3)):
        alone = gpb(model, y[i, j])
        for name in Oracle._fields:
            torch.testing.assert_close(getattr(found, name)[i, j], getattr(alone, name), rtol=1e-12, atol=1e-12)
    other = y.clone()
    other[0] = 1e3
    assert torch.equal(found.mean[1], gpb(model, other).mean[1])


@pytest.mark.parametrize("slots", [IMM, Slots.gpb(1), Slots.gpb(3)])
def test_many_sequences_at_once_as_one_by_one(slots):
    model, y = model_of(parameters(4, 3)), series(3, batch=(700,))
    together, alone = run(model, y, slots), run(model, y[611], slots)
    for name in Oracle._fields:
        torch.testing.assert_close(getattr(together, name)[611], getattr(alone, name), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("slots", [IMM, Slots.gpb(1), Slots.gpb(3), EXACT])
def test_sequences_of_different_lengths(slots, start):
    model, y, lengths = model_of(parameters(), start), series(5, batch=(4,)), [5, 3, 1, 0]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    found = run(model, y, slots, mask=mask)
    for k, length in enumerate(lengths):
        alone = run(model, y[k, :length], slots)
        for name in Oracle._fields:
            torch.testing.assert_close(getattr(found, name)[k, :length], getattr(alone, name), rtol=1e-12, atol=1e-12)
        assert (found.log_likelihood[k, length:] == 0).all()
        last = (
            found.mean[k, length - 1]
            if length
            else m_projection(model.initial_modes, model.initial_mean, model.initial_covariance).mean
        )
        torch.testing.assert_close(found.mean[k, length:], last.expand(5 - length, 2), rtol=1e-12, atol=1e-12)


def test_an_ended_sequence_does_not_run_away():
    eye = torch.eye(1, dtype=torch.float64)
    model = SwitchingLinearGaussian(eye, 1e3 * eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    mask = torch.arange(200) < torch.tensor([200, 2])[:, None]
    y = torch.zeros(2, 200, 1, dtype=torch.float64)
    y.requires_grad_()
    found = kalman(model, y, mask=mask)
    found.mean.sum().backward()
    assert found.mean.isfinite().all()
    assert y.grad.isfinite().all()


@pytest.mark.parametrize("slots", [IMM, Slots.gpb(1), Slots.gpb(2), Slots.gpb(3)])
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_one_observation_at_a_time(slots, start):
    model, y = model_of(parameters(), start), series(6, batch=(2,))
    y[0, 2, 1] = NAN
    whole = run(model, y, slots)
    state = init(model, slots=slots, batch_shape=(2,))
    for k in range(6):
        state, record = step(state, y[:, k])
        for name in Oracle._fields:
            torch.testing.assert_close(getattr(record, name), getattr(whole, name)[:, k], rtol=1e-12, atol=1e-12)
    assert state.t == 6
    assert "t=6" in repr(state)


def test_no_steps_and_no_sequences():
    model = model_of(parameters())
    assert imm(model, torch.zeros(3, 0, 2).double()).mode_covariances.shape == (3, 0, 3, 2, 2)
    assert gpb(model, torch.zeros(0, 4, 2).double()).mean.shape == (0, 4, 2)
    assert imm(model, torch.zeros(0, 2).double()).total_log_likelihood == 0
