"""Non-linear modes: linear functions against the linear engine, angles, iterations, refusals."""

from functools import partial

import pytest
import torch

from cumulant.filters import (
    Cubature,
    Extended,
    GaussHermite,
    NonlinearMode,
    SwitchingNonlinear,
    Unscented,
    exact,
    gpb,
    imm,
)
from tests.filters.oracle import NAN, model_of, parameters, same, series, t

RULES = [Extended(), Unscented(), Unscented(1e-2, 2.0, 1.0), Cubature(), GaussHermite(3)]
GAPPY = series(6, batch=(3,)).clone()
GAPPY[0, 0, 1], GAPPY[1, 2], GAPPY[2, 3, 0], GAPPY[2, 1] = NAN, NAN, NAN, NAN


def affine(matrix, offset, x, step):
    return x @ matrix.mT + offset


def as_functions(p, rule, start="prior", linear=()):
    """The linear model of NumPy parameters with maps given as functions; those in ``linear`` keep matrices, no offsets."""
    transition, f, q, h, r, b, c, mean, covariance, first = map(t, p)
    modes = []
    for k in range(len(f)):
        maps = partial(affine, f[k], b[k]), partial(affine, h[k], c[k])
        modes.append(NonlinearMode(maps[0], q[k], maps[1], r[k], rule=rule))
        if k in linear:
            modes[-1] = NonlinearMode(f[k], q[k], h[k], r[k])
    law = {"initial_mean": mean, "initial_covariance": covariance, "initial_modes": first}
    return SwitchingNonlinear(transition, modes, **law, start=start)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_linear_functions_are_the_linear_engine(rule, start):
    p = parameters(modes=2)
    functions, matrices = as_functions(p, rule, start), model_of(p, start)
    for run in (imm, gpb, partial(gpb, order=1), partial(gpb, order=3), partial(exact)):
        same(run(functions, GAPPY), run(matrices, GAPPY), 1e-10)


def test_matrices_and_functions_stand_side_by_side():
    p = list(parameters(modes=3, d=3))
    p[5][1], p[6][1] = 0, 0
    same(imm(as_functions(p, Cubature(), linear=(1,)), GAPPY), imm(model_of(p), GAPPY), 1e-11)


def test_tracks_end_at_their_own_step():
    p = parameters(modes=2)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    same(imm(as_functions(p, Extended()), GAPPY, mask=mask), imm(model_of(p), GAPPY, mask=mask), 1e-11)
