"""Differences of gamma functions and the inverses of expected statistics, against high precision."""

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cumulant.families.gamma_functions import (
    dirichlet_concentration,
    gamma_shape,
    log_minus_digamma,
    log_minus_digamma_slope,
    log_rising,
    trigamma,
)


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SIZES = torch.logspace(-6, 12, 60, dtype=torch.float64)


def high_precision(f) -> Tensor:
    with mpmath.workdps(40):
        return torch.tensor([float(f(mpmath.mpf(a))) for a in SIZES.tolist()], dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b) / b).abs().max())


def test_gamma_functions_against_high_precision():
    gap = high_precision(lambda a: mpmath.log(a) - mpmath.digamma(a))
    assert relative(log_minus_digamma(SIZES), gap) < 5e-14
    assert relative(log_minus_digamma_slope(SIZES), high_precision(lambda a: 1 / a - mpmath.psi(1, a))) < 5e-14
    assert relative(trigamma(SIZES), high_precision(lambda a: mpmath.psi(1, a))) < 1e-15
    assert relative(gamma_shape(gap), SIZES) < 1e-13
    for y in (0.5, 3.0, 1e5):
        rising = high_precision(lambda a, y=y: mpmath.loggamma(a + y) - mpmath.loggamma(a))
        error = (log_rising(SIZES, tensor(y)) - rising).abs() / (1 + rising.abs())
        assert error.max() < 2e-15
    assert (log_rising(SIZES, tensor(0.0)) == 0).all()


@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_concentrations_from_mean_logarithms(k, scale):
    a = scale * torch.randn(200, k, generator=generator(k), dtype=torch.float64).exp()
    total = a.sum(-1, keepdim=True)
    logs = torch.digamma(a) - torch.digamma(total)
    assert ((dirichlet_concentration(logs) - a) / a).abs().max() < 1e-12 * max(1.0, scale)


def test_concentrations_far_apart_and_in_single_precision():
    a = tensor(1e-3, 5.0, 1e4)
    total = a.sum(-1, keepdim=True)
    logs = (a / total).log() - log_minus_digamma(a) + log_minus_digamma(total)
    assert ((dirichlet_concentration(logs) - a) / a).abs().max() < 1e-9
    assert ((dirichlet_concentration(logs.float()).double() - a) / a).abs().max() < 0.02
    extreme = (20 * torch.randn(300, 2, generator=generator(), dtype=torch.float64)).exp().clamp(1e-12, 1e12)
    total = extreme.sum(-1, keepdim=True)
    found = dirichlet_concentration((extreme / total).log() - log_minus_digamma(extreme) + log_minus_digamma(total))
    assert found.isfinite().all()
    assert (found > 0).all()


def test_derivatives_of_the_inverses_to_second_order():
    gap = tensor(0.01, 0.5, 3.0, 200.0).requires_grad_()
    assert gradcheck(gamma_shape, gap)
    assert gradgradcheck(gamma_shape, gap)
    a = tensor([2.0, 3.0, 0.5], [30.0, 2.0, 1.0])
    logs = (torch.digamma(a) - torch.digamma(a.sum(-1, keepdim=True))).requires_grad_()
    assert gradcheck(dirichlet_concentration, logs)
    # given, not drawn: one in twenty draws nearly cancels, and then differences have too few digits to compare with
    outer = torch.linspace(1, 2, 6, dtype=logs.dtype).view(2, 3).requires_grad_()
    assert gradgradcheck(dirichlet_concentration, logs, grad_outputs=outer)
    x, y = tensor(0.5, 20.0).requires_grad_(), tensor(3.0, 0.5)
    assert gradcheck(lambda x: (log_minus_digamma(x), log_rising(x, y)), x)
