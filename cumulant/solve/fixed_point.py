"""Fixed points x = f(x) of a batch of samples that stop one by one, with the implicit gradient of the solution."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cumulant.checks import require_float, sentence
from cumulant.solve.driver import iterate
from cumulant.solve.implicit import ADJOINTS, attach_implicit_gradient
from cumulant.solve.picard import Picard
from cumulant.solve.solution import Solution
from cumulant.typing import Stepper


def fixed_point(
    fn: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    solver: Stepper | None = None,
    max_steps: int = 200,
    tol: float | None = None,
    event_ndim: int = 1,
    adjoint: str = "anderson",
) -> Solution:
    """Solve x = fn(x), sample by sample.

    The last ``event_ndim`` axes of ``x0`` are one sample, all others are independent samples: ``fn`` must not mix them.
    A sample is done when |fn(x) − x| ≤ tol · (1 + |fn(x)|); from then on it no longer moves, so its solution does not
    depend on the other samples. Samples that never get there return their best iterate. The default tol is 1e-10, or 32
    units of rounding where the dtype is coarser.

    solver    `Picard()` (default), `Damped(gate)`, `Anderson(memory)`, or any object with their two methods.
    adjoint   method for the gradient of the solution when something requires grad. At a fixed point
              dx = (I − J)⁻¹ ∂f, so backward solves (I − Jᵀ)g = v: "anderson" for any J, "cg" or "cholesky" when J is
              symmetric (J = ∇²potential) and I − J positive definite; "none" detaches. First order only. A sample for
              which that has no solution is named in a RuntimeWarning.

    >>> import torch
    >>> solution = fixed_point(torch.cos, torch.ones(1, dtype=torch.float64))
    >>> round(solution.value.item(), 8), solution.summary()
    (0.73908513, '1 of 1: converged within the tolerance')
    """
    solver = Picard() if solver is None else solver
    _check_arguments(x0, solver, max_steps, event_ndim, adjoint)
    tol = max(1e-10, 32 * torch.finfo(x0.dtype).eps) if tol is None else tol
    with torch.no_grad():
        solution = iterate(fn, x0.detach(), solver, max_steps=max_steps, tol=tol, event_ndim=event_ndim)
    if adjoint == "none" or not torch.is_grad_enabled():
        return solution
    return replace(solution, value=attach_implicit_gradient(fn, solution.value, event_ndim, adjoint, tol))


def _check_arguments(x0: Tensor, solver: Stepper, max_steps: int, event_ndim: int, adjoint: str) -> None:
    require_float("fixed_point.x0", x0)
    if not isinstance(solver, Stepper) or isinstance(solver, type):
        expected = "Picard(), Damped(gate) or Anderson(memory)"
        raise TypeError(sentence("fixed_point.solver", expected, repr(solver), "Pass an instance."))
    if not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(sentence("fixed_point.max_steps", "a positive integer", max_steps, "Pass at least 1."))
    if not 0 <= event_ndim <= x0.ndim:
        expected, advice = f"0 to x0.ndim = {x0.ndim}", "Count the axes of one sample."
        raise ValueError(sentence("fixed_point.event_ndim", expected, event_ndim, advice))
    if adjoint not in ADJOINTS:
        raise ValueError(sentence("fixed_point.adjoint", f"one of {', '.join(ADJOINTS)}", repr(adjoint), "Pick one."))
