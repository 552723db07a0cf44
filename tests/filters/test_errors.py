"""Each refusal of the filters, with the words that help."""

import numpy as np
import pytest
import torch

from cumulant import Gaussian
from cumulant.filters import (
    NonlinearMode,
    Slots,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    exact,
    gpb,
    imm,
    init,
    kalman,
    m_projection,
    m_projection_in,
    run,
    step,
)
from cumulant.samplers import particle_filter
from tests.filters.oracle import NAN, model_of, parameters, series, t


def change(name, value, index=None):
    def build():
        p = dict(zip(ORDER, parameters(2), strict=True))
        p[name] = value
        return model_of(list(p.values()))

    return build


ORDER = (
    "transition",
    "dynamics",
    "process_noise",
    "observation",
    "observation_noise",
    "state_offset",
    "observation_offset",
    "initial_mean",
    "initial_covariance",
    "initial_modes",
)
TWO = torch.eye(2).double()
PLAIN = {"initial_mean": torch.zeros(2).double(), "initial_covariance": TWO}
EMBEDDED = {"initial_mean": [t([0.0]), t([0.0, 0.0])], "initial_covariance": [TWO[:1, :1], TWO]}
SWITCH = t([[0.9, 0.1], [0.2, 0.8]])


def embedded(**given):
    arrays = {
        "dynamics": [TWO[:1, :1], TWO],
        "process_noise": [TWO[:1, :1], TWO],
        "observation": [t([[1.0]]), t([[1.0, 0.0]])],
    }
    arrays |= {"observation_noise": t([[1.0]]), "embeddings": [TWO[:, :1], TWO], **EMBEDDED} | given
    return SwitchingLinearGaussian(SWITCH, **arrays)


BAD = {
    "rows": (change("transition", [[0.9, 0.2], [0.1, 0.8]]), ["row 0 with sum 1.1", "rows are from, columns are to"]),
    "negative": (change("transition", [[1.1, -0.1], [0.1, 0.9]]), ["transition", "smallest entry of -0.1"]),
    "transition shape": (change("transition", [[0.5, 0.5]]), ["(M, M) or (T, M, M)", "(1, 2)"]),
    "transition rank": (change("transition", [0.5, 0.5]), ["(M, M) or (T, M, M)", "(2)"]),
    "transition NaN": (change("transition", [[NAN, 0.5], [0.5, 0.5]]), ["transition", "finite"]),
    "start modes": (change("initial_modes", [0.5, 0.4]), ["initial_modes", "sum 0.9"]),
    "too few modes": (change("initial_modes", [1.0]), ["initial_modes", "(M=2)", "(1)"]),
    "dynamics": (
        change("dynamics", np.zeros((2, 3, 2))),
        ["dynamics", "(2, 2) or (M=2, 2, 2) or (T, M=2, 2, 2)", "(2, 3, 2)"],
    ),
    "dynamics rank": (change("dynamics", np.zeros(2)), ["dynamics", "a matrix for each mode"]),
    "modes": (change("process_noise", np.zeros((3, 2, 2))), ["process_noise", "M=2", "(3, 2, 2)"]),
    "offset": (change("state_offset", np.zeros(3)), ["state_offset", "(2) or (M=2, 2) or (T, M=2, 2)", "(3)"]),
    "mean": (
        change("initial_mean", np.zeros((4, 3, 2))),
        ["initial_mean", "(2) or (M=2, 2) or (*batch, M=2, 2),", "(4, 3, 2)"],
    ),
    "asymmetric": (change("process_noise", [[1.0, 0.5], [0.0, 1.0]]), ["process_noise", "symmetric", "0.5"]),
    "indefinite": (
        change("process_noise", [[1.0, 0.0], [0.0, -1.0]]),
        ["process_noise", "positive semidefinite", "-1"],
    ),
    "indefinite start": (
        change("initial_covariance", [[1.0, 2.0], [2.0, 1.0]]),
        ["initial_covariance", "semidefinite"],
    ),
    "noise-free": (
        change("observation_noise", [[1.0, 0.0], [0.0, 0.0]]),
        ["observation_noise", "positive definite", "small variance"],
    ),
    "infinite": (change("observation", np.full((2, 2), np.inf)), ["observation", "finite", "4 entries"]),
    "start": (lambda: model_of(parameters(2), "now"), ["start", '"prior" or "belief"', "'now'"]),
    "times": (change("process_noise", np.tile(np.eye(2), (5, 2, 1, 1))), []),
    "embedding count": (lambda: embedded(embeddings=[TWO]), ["embeddings", "M=2 matrices (D, d_k)", "(2, 2)"]),
    "embedding rank": (lambda: embedded(embeddings=[t([[0.0], [0.0]]), TWO]), ["full column rank", "mode 0"]),
    "embedding wide": (lambda: embedded(embeddings=[TWO, torch.eye(2, 3).double()]), ["full column rank", "mode 1"]),
    "embedded tensor": (lambda: embedded(dynamics=TWO), ["dynamics", "a sequence of M=2 tensors", "(2, 2)"]),
    "embedded size": (lambda: embedded(dynamics=[TWO, TWO]), ["dynamics", "d_0=1 in mode 0", "(2, 2)"]),
    "stack": (
        lambda: SwitchingLinearGaussian(SWITCH, [TWO, TWO[:1, :1]], TWO, TWO, TWO, **PLAIN),
        ["all of one shape"],
    ),
}


@pytest.mark.parametrize("name", [n for n in BAD if n != "times"])
def test_a_bad_model_is_refused(name):
    build, words = BAD[name]
    with pytest.raises(ValueError, match="SwitchingLinearGaussian") as caught:
        build()
    for word in words:
        assert word in str(caught.value)


def test_times_that_differ_are_refused():
    p = [*parameters(2)]
    p[2], p[1] = np.tile(np.eye(2), (5, 2, 1, 1)), np.tile(np.eye(2), (4, 2, 1, 1))
    with pytest.raises(ValueError, match="dynamics 4, process_noise 5"):
        model_of(p)
    p[1] = np.eye(2)
    with pytest.raises(ValueError, match="at most T=5 steps, got 6"):
        imm(model_of(p), series(6))
    with pytest.raises(ValueError, match="at most T=5"):
        model_of(p).simulate(6)


def test_types_are_refused():
    with pytest.raises(TypeError, match=r"transition: expected a torch.Tensor, got ndarray"):
        SwitchingLinearGaussian(np.eye(2), TWO, TWO, TWO, TWO, **PLAIN)
    with pytest.raises(TypeError, match=r"dynamics: expected a floating dtype"):
        SwitchingLinearGaussian(SWITCH, TWO.long(), TWO, TWO, TWO, **PLAIN)
    with pytest.raises(TypeError, match=r"observation: expected dtype torch.float64 as transition"):
        SwitchingLinearGaussian(SWITCH, TWO, TWO, TWO.float(), TWO, **PLAIN)
    with pytest.raises(TypeError, match=r"filters.model: expected a switching model, got str"):
        imm("model", series())
    with pytest.raises(TypeError, match=r"filters.model: expected a switching model, got str"):
        kalman("model", series())
    with pytest.raises(TypeError, match=r"filters.y: expected a torch.Tensor, got list"):
        imm(model_of(parameters()), [[1.0]])
    with pytest.raises(TypeError, match=r"filters.y: expected dtype torch.float64"):
        imm(model_of(parameters()), series().float())
    with pytest.raises(TypeError, match=r"filters.mask: expected a Boolean tensor, got torch.float64"):
        imm(model_of(parameters()), series(), mask=torch.ones(4).double())
    with pytest.raises(TypeError, match=r"step.y: expected dtype torch.float64"):
        step(init(model_of(parameters())), torch.zeros(2))


def test_calls_that_cannot_be_answered():
    model = model_of(parameters())
    for call, words in (
        (lambda: imm(model, series()[:, 0]), r"filters.y: expected shape \(\*batch, T, m=2\), got \(4\)"),
        (lambda: imm(model, series(4, 3)), r"filters.y: expected shape \(\*batch, T, m=2\), got \(4, 3\)"),
        (
            lambda: imm(model, series() / 0),
            r"filters.y: expected numbers of size at most 1e\+154, or NaN .*, got 8 entries beyond",
        ),
        (lambda: gpb(model, series(), order=0), r"gpb.order: expected an integer ≥ 1, got 0"),
        (lambda: gpb(model, series(), order=True), r"gpb.order: expected an integer ≥ 1, got True"),
        (lambda: exact(model, series(30)), r"at most 65536 hypotheses at a step, got 3\^30"),
        (lambda: exact(model, series(4), limit=80), r"at most 80 hypotheses at a step, got 3\^4"),
        (lambda: run(model, series(), Slots(1, 2)), r"filters.slots: expected 0 ≤ after ≤ before"),
        (lambda: init(model, slots=Slots(0, 0)), r"filters.slots: expected 0 ≤ after ≤ before and before ≥ 1"),
        (lambda: kalman(model, series()), r"kalman.model: expected a model with one mode, got 3"),
        (
            lambda: imm(model, series(), mask=torch.ones(3, dtype=torch.bool)),
            r"filters.mask: expected shape \(4,\), got \(3\)",
        ),
        (
            lambda: imm(model, series(2), mask=torch.tensor([False, True])),
            r"filters.mask: expected True up to the end .* NaN",
        ),
        (lambda: step(init(model, batch_shape=(2,)), series(2)[0]), r"step.y: expected shape \(2, 2\), got \(2\)"),
        (lambda: step(init(model), t([1.0, np.inf])), r"filters.y: expected numbers of size"),
        (lambda: model.simulate(-1), r"simulate: expected a number of steps ≥ 0, got -1"),
        (
            lambda: m_projection(t([0.5, 0.6]), t([[0.0], [1.0]]), torch.ones(2, 1, 1).double()),
            r"m_projection.weights: .* sum 1",
        ),
        (
            lambda: m_projection(t(1.0), t([[0.0]]), t([[[1.0]]])),
            r"m_projection.weights: expected shape \(\*batch, n\)",
        ),
        (
            lambda: m_projection(t([1.0]), t([0.0]), t([[[1.0]]])),
            r"m_projection.means: expected shape \(\*batch, n=1, d\)",
        ),
        (lambda: m_projection(t([1.0]), t([[0.0]]), t([[1.0]])), r"m_projection.covariances: expected shape"),
        (
            lambda: m_projection_in(Gaussian(t([0.0]), t([[1.0]])), t([1.0]), t([0.0])),
            r"m_projection_in.eta: expected shape",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def one_mode(**changes):
    eye = torch.eye(2, dtype=torch.float64)
    parts = {"dynamics": eye, "process_noise": eye, "observation": eye[:1], "observation_noise": eye[:1, :1]} | changes
    mode = NonlinearMode(**parts)
    return SwitchingNonlinear(eye[:1, :1], [mode], initial_mean=eye[0], initial_covariance=eye)


def at_step_two(bad, good):
    return lambda *arguments: bad(*arguments[:-1]) if arguments[-1] == 2 else good(*arguments[:-1])


EYE = torch.eye(2, dtype=torch.float64)
NOISES = {
    "a process noise that is not semidefinite": (
        {"process_noise": at_step_two(lambda: -EYE, lambda: EYE)},
        r"mode_models\[0\]\.dynamics noise, step 2: expected positive semidefinite matrices, got .*-1",
    ),
    "an observation noise that is singular": (
        {"observation_noise": at_step_two(lambda: 0 * EYE[:1, :1], lambda: EYE[:1, :1])},
        r"mode_models\[0\]\.observation noise, step 2: expected positive definite matrices, got .* 0 in units",
    ),
    "a noise of NaN": (
        {"process_noise": at_step_two(lambda: EYE * torch.nan, lambda: EYE)},
        r"mode_models\[0\]\.dynamics noise, step 2: expected finite numbers, got NaN",
    ),
}


@pytest.mark.parametrize("case", NOISES)
def test_noise_that_is_a_function_is_checked_at_every_step(case):
    changes, words = NOISES[case]
    with pytest.raises(ValueError, match=words):
        imm(one_mode(**changes), torch.zeros(4, 1, dtype=torch.float64))


PARTICLES = {
    "NaN of the motion": (
        {"dynamics": at_step_two(lambda x: x * torch.nan, lambda x: x)},
        r"sample_next, step 2: .* NaN",
    ),
    "NaN of the sensor": (
        {"observation": at_step_two(lambda x: x[..., :1] * torch.nan, lambda x: x[..., :1])},
        r"mode_models\[0\]\.log_likelihood, step 2: expected numbers, got NaN",
    ),
    "a wrong shape": (
        {"observation": at_step_two(lambda x: x, lambda x: x[..., :1])},
        r"mode_models\[0\]\.observation, step 2: expected shape \(10, 1, 1\)",
    ),
}


@pytest.mark.parametrize("case", PARTICLES)
def test_functions_that_fail_a_particle_are_named_with_mode_and_step(case):
    changes, words = PARTICLES[case]
    y, generator = torch.zeros(4, 1, dtype=torch.float64), torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=words):
        particle_filter(one_mode(**changes), y, method="bootstrap", particles=10, generator=generator)


def test_a_simulation_names_mode_and_step():
    model = one_mode(dynamics=at_step_two(lambda x: x[..., 0], lambda x: x))
    with pytest.raises(ValueError, match=r"mode_models\[0\]\.dynamics, step 2: expected shape \(1, 2\)"):
        model.simulate(4, generator=torch.Generator())
