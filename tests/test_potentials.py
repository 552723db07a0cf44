"""Heads and units as convex potentials: brute force, difference quotients, and layers that are no gradient."""

import itertools

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor
from torch.nn import functional as F

from cumulant import Empirical, Gaussian
from cumulant.attention import attention
from cumulant.potentials import Block, ReluSquare, Units, asymmetry, least_slope, multihead
from cumulant.residual import ascend
from cumulant.solve import Status
from cumulant.testing import check_measure
from tests.cases import FEW, KEYS, LOG_H, t
from tests.compare import close

RNG = np.random.default_rng(1313)
W, B = RNG.normal(size=(6, 3)), RNG.normal(size=6)
STATES = np.array(list(itertools.product([0, 1], repeat=6)))
ETA = t(RNG.normal(size=(5, 3)))
W1, W2 = RNG.normal(size=(3, 4)), RNG.normal(size=(3, 4))
STREAM = t(RNG.normal(size=(5, 4)))
INNER = RNG.normal(size=(8, 4))
LAYERS = t(RNG.normal(size=(2, 6, 3)))
GATE, UP, WQ, WK, WV = (t(RNG.normal(size=s)) for s in [(6, 3), (6, 3), (3, 3), (3, 3), (3, 3)])


def quotient(function, x: Tensor, h: float = 1e-5) -> Tensor:
    """Central differences along the last axis: one more axis at the end."""
    eye = h * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.stack([(function(x + e) - function(x - e)) / (2 * h) for e in eye], -1)


# ---------------------------------------------------------------------- units


def test_units_are_the_sum_over_all_hidden_states():
    """B7 and B8."""
    h = Units(t(W), t(B))
    logits = ETA.numpy() @ (STATES @ W).T + STATES @ B
    p = special.softmax(logits, axis=-1)
    close(h.log_normalizer(ETA), special.logsumexp(logits, axis=-1))
    close(h.mean(ETA), p @ (STATES @ W))
    close(h.mean(ETA), special.expit(ETA.numpy() @ W.T + B) @ W)
    centred = (STATES @ W)[None] - (p @ (STATES @ W))[:, None]
    close(h.fisher(ETA), np.einsum("qn,qni,qnj->qij", p, centred, centred))
    equal = Empirical(t(STATES @ W), t(STATES @ B))
    close(h.kl(ETA, ETA.flip(0)), equal.kl(ETA, ETA.flip(0)), 1e-11)


def test_units_obey_the_laws():
    assert check_measure(Units(t(W), t(B)), ETA)["sample moments match mean and Fisher"] < 4.5
    assert check_measure(Units(t(W[:2])), ETA)["natural inverts mean"] < 1e-8  # two units span a plane in R³


def test_units_without_bias_have_mass_two_to_the_power_of_their_number():
    close(Units(t(W)).log_mass, 6 * np.log(2))
    close(Units(t(W)).log_normalizer(ETA), Units(t(W), t(np.zeros(6))).log_normalizer(ETA), 1e-15)


def test_units_are_exact_where_softplus_is_cut_off():
    h = Units(t([[1.0]]))
    for x in (-800.0, -30.0, 21.0, 30.0, 800.0):
        assert h.log_normalizer(t([x])).item() == pytest.approx(np.logaddexp(0, x), rel=1e-15, abs=0)
    assert h.fisher(t([30.0])).item() == pytest.approx(special.expit(30) * special.expit(-30), rel=1e-14)


def test_units_switched_off_are_absent():
    b = np.where(np.arange(6) % 2, -np.inf, B)
    off, rest = Units(t(W), t(b)), Units(t(W[::2]), t(B[::2]))
    eta = ETA.clone().requires_grad_()
    for name in ("log_normalizer", "mean", "fisher"):
        close(getattr(off, name)(ETA), getattr(rest, name)(ETA), 1e-14)
    close(torch.autograd.grad(off.log_normalizer(eta).sum(), eta)[0], rest.mean(ETA))
    assert off.natural(off.mean(ETA)).converged.all()
    none = Units(t(W), torch.full((6,), -torch.inf, dtype=torch.float64))
    empty = Units(t(W[:0]))
    for point in (none, empty):  # a unit mass at 0
        assert (point.log_normalizer(ETA) == 0).all()
        assert (point.mean(ETA) == 0).all()
        assert (point.sample(ETA, 4) == 0).all()


def test_link_of_units_finds_directions_that_rarely_fire():
    h = Units(t([[1.0, 0.0], [0.0, 1.0]]), t([0.0, -40.0]))
    found = h.natural(t([[0.3, 0.6], [0.3, 1.2], [0.3, 1.0]]))
    close(found.value[0], [special.logit(0.3), special.logit(0.6) + 40], 1e-8)
    assert found.status.tolist() == [int(s) for s in (Status.CONVERGED, Status.OUTSIDE, Status.BOUNDARY)]
    close(h.hull().bound, [40.0])


def test_batches_of_units():
    w, b = LAYERS, t(np.stack([B, -B]))
    h = Units(w, b)
    assert h.batch_shape == (2,)
    for name in ("log_normalizer", "mean", "fisher"):
        for i in range(2):
            close(getattr(h, name)(ETA)[i], getattr(Units(w[i], b[i]), name)(ETA))
    assert Units(w[0], b).batch_shape == (2,)
    assert h.natural(h.mean(ETA)).converged.all()
    assert h.sample(ETA, 7, generator=torch.Generator().manual_seed(0)).shape == (2, 5, 7, 3)
    assert Units(w.half(), b.half()).mean(ETA.half()).dtype == torch.float16


# ---------------------------------------------------------------------- heads


def test_heads_are_one_convolution():
    """B5: 7·3 atoms; B6 and X-12: the gradient is Σ_h W_hᵀ attention_h."""
    h = multihead([Empirical(t(KEYS), t(LOG_H)), Empirical(t(FEW))], [t(W1), t(W2)])
    atoms = np.array([W1.T @ a + W2.T @ b for a in KEYS for b in FEW])
    whole = Empirical(t(atoms), t(np.repeat(LOG_H, 3)))
    close(h.log_normalizer(STREAM), special.logsumexp(STREAM.numpy() @ atoms.T + np.repeat(LOG_H, 3), axis=-1))
    close(h.mean(STREAM), whole.mean(STREAM))
    close(h.fisher(STREAM), whole.fisher(STREAM), 1e-11)
    one = attention(STREAM @ t(W1).mT, t(KEYS), t(KEYS), t(LOG_H)[None].expand(5, -1), scale=1.0) @ t(W1)
    two = attention(STREAM @ t(W2).mT, t(FEW), t(FEW), scale=1.0) @ t(W2)
    close(h.mean(STREAM), one + two)
    close(quotient(h.log_normalizer, STREAM), h.mean(STREAM), 1e-8)


def test_heads_of_different_width_and_a_head_without_keys():
    wide = Gaussian(t(np.zeros(2)), t(np.eye(2)))
    h = multihead([Empirical(t(KEYS)), wide], [t(W1), t(W2[:2])])
    assert h.dim == 4
    close(h.mean(STREAM), Empirical(t(KEYS)).mean(STREAM @ t(W1).mT) @ t(W1) + STREAM @ t(W2[:2]).mT @ t(W2[:2]))
    blind = multihead([Empirical(t(KEYS)), Empirical(t(FEW[:0]))], [t(W1), t(W2)])
    assert (blind.log_normalizer(STREAM) == -torch.inf).all()
    assert (blind.mean(STREAM) == 0).all()


# ---------------------------------------------------------------------- ReLU and blocks


def test_relu_square_is_a_convex_potential():
    psi = ReluSquare(t(W), t(B))
    z = np.maximum(ETA.numpy() @ W.T + B, 0)
    close(psi.value(ETA), (z**2).sum(-1) / 2)
    close(psi.gradient(ETA), z @ W)
    close(quotient(psi.value, ETA), psi.gradient(ETA), 1e-8)
    close(quotient(psi.gradient, ETA), psi.hessian(ETA), 1e-8)
    assert (torch.linalg.eigvalsh(psi.hessian(ETA)) > -1e-12).all()
    assert torch.autograd.gradcheck(psi.value, ETA.clone().requires_grad_())
    close(torch.func.grad(lambda e: psi.value(e).sum())(ETA), psi.gradient(ETA))
    without = ReluSquare(t(W))
    close(without.gradient(ETA), np.maximum(ETA.numpy() @ W.T, 0) @ W)
    off = ReluSquare(t(W), t(np.full(6, -np.inf)))
    assert (off.value(ETA) == 0).all()
    assert (off.gradient(ETA) == 0).all()


def test_relu_square_of_one_query_and_of_batches():
    psi = ReluSquare(t(W), t(B))
    for name in ("value", "gradient", "hessian"):
        close(getattr(psi, name)(ETA[1]), getattr(psi, name)(ETA)[1])
    w = LAYERS
    several = ReluSquare(w, t(B))
    assert several.batch_shape == (2,)
    for name in ("value", "gradient", "hessian"):
        for i in range(2):
            close(getattr(several, name)(ETA)[i], getattr(ReluSquare(w[i], t(B)), name)(ETA))
            close(getattr(several, name)(ETA[0])[i], getattr(ReluSquare(w[i], t(B)), name)(ETA[0]))
    assert ReluSquare(t(W[:0])).value(ETA).tolist() == [0.0] * 5
    assert psi.gradient(ETA).dtype == ReluSquare(t(W).half()).gradient(ETA.half()).double().dtype


def block() -> Block:
    heads = multihead([Empirical(t(KEYS), t(LOG_H)), Empirical(t(FEW))], [t(W1), t(W2)])
    return Block([heads, Units(t(INNER[:5]), t(B[:5])), ReluSquare(t(INNER[5:]))])


def test_a_block_is_one_ascent_step_on_one_potential():
    phi = block()
    assert phi.dim == 4
    close(quotient(phi.value, STREAM), phi.gradient(STREAM), 1e-8)
    close(quotient(phi.gradient, STREAM), phi.hessian(STREAM), 1e-8)
    step = phi.step(STREAM)
    close(step.eta, STREAM + phi.gradient(STREAM), 1e-15)
    jacobian = quotient(lambda x: phi.step(x).eta, STREAM)
    close(step.log_volume, torch.linalg.slogdet(jacobian)[1], 1e-8)
    assert (step.log_volume > 0).all()
    close(phi.step(STREAM[2]).log_volume, step.log_volume[2])
    before, after = torch.cdist(STREAM, STREAM), torch.cdist(step.eta, step.eta)
    assert (after >= before - 1e-12).all()  # distances grow


def test_a_block_of_measures_agrees_with_their_convolution():
    h = multihead([Empirical(t(KEYS)), Empirical(t(FEW))], [t(W1), t(W2)])
    for mine, theirs in zip(Block((h,)).step(STREAM), ascend(h, STREAM), strict=True):
        close(mine, theirs)
    parts = Block((t(W1).mT @ Empirical(t(KEYS)), t(W2).mT @ Empirical(t(FEW))))
    close(parts.value(STREAM), h.log_normalizer(STREAM))
    close(parts.hessian(STREAM), h.fisher(STREAM))


def test_a_sequential_block_adds_log_volumes_and_is_no_gradient():
    first, second = Block(block().parts[:1]), Block(block().parts[1:])

    def both(x: Tensor) -> Tensor:
        return second.step(first.step(x).eta).eta

    total = first.step(STREAM).log_volume + second.step(first.step(STREAM).eta).log_volume
    close(torch.linalg.slogdet(quotient(both, STREAM))[1], total, 1e-7)
    assert asymmetry(both, STREAM).min() > 1e-3
    assert asymmetry(block().gradient, STREAM).max() < 1e-12


def test_a_head_that_sees_nothing_is_left_out_of_a_block():
    seen = Block((Units(t(W), t(B)), Empirical(t(KEYS), t([0.0] * 7))))
    weights = torch.zeros(5, 7, dtype=torch.float64)
    weights[3] = -torch.inf
    partly = Block((Units(t(W), t(B)), Empirical(t(KEYS), weights)))
    kept = [0, 1, 2, 4]
    close(partly.gradient(ETA)[kept], seen.gradient(ETA)[kept])
    assert partly.value(ETA)[3] == -torch.inf
    close(partly.gradient(ETA)[3], Units(t(W), t(B)).mean(ETA)[3])
    close(partly.step(ETA).log_volume[3], Units(t(W), t(B)).log_volume(ETA)[3])


# ---------------------------------------------------------------------- layers that are no gradient


def test_least_slopes():
    """B9."""
    assert least_slope(F.gelu) == pytest.approx(-0.1289, abs=5e-5)
    assert least_slope(F.silu) == pytest.approx(-0.0998, abs=5e-5)
    for activation in (torch.sigmoid, torch.relu, F.softplus, torch.tanh):
        assert least_slope(activation) >= 0
    assert least_slope(lambda x: 3 * x) == 3.0
    assert least_slope(torch.square, low=0.0) == 0.0
    assert least_slope(torch.square, low=1.0, high=2.0, points=2) == 2.0


def test_gelu_layers_are_gradients_but_contract_somewhere():
    """Tied weights make the Jacobian symmetric; a falling activation gives it a negative eigenvalue."""
    gelu = lambda x: F.gelu(x @ t(W).mT + t(B)) @ t(W)  # noqa: E731
    assert asymmetry(gelu, ETA).max() < 1e-12
    one = torch.func.jacrev(lambda x: F.gelu(x))(t([-1.4]))
    assert one < 0


def test_gated_units_and_untied_heads_are_no_gradient_fields():
    keys, small = t(KEYS), ETA / 4

    def swiglu(down: Tensor):
        return lambda x: (F.silu(x @ GATE.mT) * (x @ UP.mT)) @ down

    for down in (LAYERS[0], GATE, UP):  # tying one of its two matrices does not help
        assert asymmetry(swiglu(down), ETA).min() > 1e-2

    def head(value: Tensor):
        return lambda x: attention((x @ WQ.mT)[None], keys @ WK.mT, keys @ value.mT, scale=1.0)[0]

    assert asymmetry(head(WV), small).min() > 1e-2
    assert asymmetry(head(WQ.mT @ WK), small).max() < 1e-12  # W_v = W_qᵀ W_k (S0-C4)


def test_asymmetry_is_the_largest_entry_and_keeps_the_batch():
    turn = t([[0.0, -2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    close(asymmetry(lambda x: turn @ x, ETA.reshape(5, 1, 3)), np.full((5, 1), 3.0))
    assert asymmetry(torch.sin, ETA[:0]).shape == (0,)
    assert asymmetry(torch.sin, ETA[0]).shape == ()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Units(t(B)), ValueError, r"Units.weight: expected shape \(\*batch, H, d\), got \(6\)"),
        (lambda: Units(W), TypeError, r"Units.weight: expected a torch.Tensor, got ndarray"),
        (lambda: Units(t(W) * torch.nan), ValueError, r"Units.weight: expected finite values"),
        (lambda: Units(t(W), t(B[:3])), ValueError, r"Units.bias: expected shape \(\*batch, H=6\), got \(3\)"),
        (lambda: Units(t(W), t(B).float()), TypeError, r"Units.bias: expected dtype torch.float64 as weight"),
        (lambda: Units(t(W), t(B) + torch.inf), ValueError, r"Units.bias: expected values below \+inf"),
        (lambda: Units(t(W).expand(2, 6, 3), t(B).expand(3, 6)), ValueError, r"Units.bias: expected batch axes"),
        (lambda: Units(t(W)).mean(STREAM), ValueError, r"Units.mean: expected queries of shape \(\*batch, q, d=3\)"),
        (lambda: ReluSquare(t(W), t(B[:3])), ValueError, r"ReluSquare.bias: expected shape"),
        (lambda: ReluSquare(t(W)).value(STREAM), ValueError, r"ReluSquare.value: expected queries of shape"),
        (lambda: ReluSquare(t(W)).hessian(ETA.float()), TypeError, r"ReluSquare.hessian: expected dtype"),
        (lambda: ReluSquare(t(W).expand(2, 6, 3)).gradient(ETA.expand(3, 5, 3)), ValueError, r"batch axes"),
        (lambda: multihead([], []), ValueError, r"multihead.weights: expected one weight per measure"),
        (lambda: multihead([Units(t(W))], []), ValueError, r"got 1 measures and 0 weights"),
        (lambda: multihead([t(KEYS)], [t(W1)]), TypeError, r"multihead.measures\[0\]: expected a measure, got Tensor"),
        (lambda: multihead([Units(t(W))], [t(W1).mT]), ValueError, r"multihead.weights\[0\]: expected shape .*d_h=3"),
        (lambda: Block(()), ValueError, r"Block.parts: expected at least one part"),
        (lambda: Block((t(W),)), TypeError, r"Block.parts: expected measures and potentials, got Tensor"),
        (lambda: Block((Units(t(W)), Units(t(W1)))), ValueError, r"Block.parts: expected parts of equal dim"),
        (lambda: least_slope(F.gelu, 1.0, -1.0), ValueError, r"least_slope.low: expected finite low < high"),
        (lambda: least_slope(F.gelu, points=1), ValueError, r"least_slope.points: expected at least 2"),
        (lambda: least_slope(torch.sqrt), ValueError, r"least_slope.activation: expected finite slopes"),
        (lambda: asymmetry(torch.sin, t(1.0)), ValueError, r"asymmetry.x: expected shape \(\*batch, d\)"),
        (lambda: asymmetry(torch.sum, ETA), ValueError, r"asymmetry.field: expected a map of \(3,\) to the same"),
    ],
)  # fmt: skip
def test_refusals(call, error: type, message: str):
    with pytest.raises(error, match=message):
        call()
