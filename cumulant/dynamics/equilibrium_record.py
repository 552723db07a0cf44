"""What every equilibrium comes with: the solution, why there is one, whether it is the only one, and why."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, require_finite, sentence
from cumulant.measures import Measure
from cumulant.solve import Solution, Status
from cumulant.typing import Flags, PerQuery


class Equilibrium(NamedTuple):
    """A fixed point and what is known about it, per sample.

    solution     value (*batch, q, d), with status, steps and residual (*batch, q)
    exists       why there is a fixed point, or when there is none
    contraction  (*batch, q) Lipschitz bound of the iterated map, +inf where none is known. On a sphere it is the bound
                 at the solution: below 1 the solution attracts its neighbourhood
    unique       (*batch, q) True where there is provably no other
    reason       why, or why not
    """

    solution: Solution
    exists: str
    contraction: PerQuery
    unique: Flags
    reason: str


def banach(contraction: Tensor, otherwise: str) -> tuple[Tensor, str]:
    """Whether a contraction makes the fixed point the only one, and a sentence that says so."""
    unique = contraction < 1
    largest = [f"{contraction[flags].max().item():.4g}" if flags.any() else "" for flags in (unique, ~unique)]
    yes = f"contraction {largest[0]} < 1: every start leads to the same point"
    no = f"contraction {largest[1]} ≥ 1 proves nothing: there may be several, {otherwise}"
    return unique, counted((unique, yes), (~unique, no))


def counted(*cases: tuple[Tensor, str]) -> str:
    """The sentence that holds for all samples, or each with the number of samples it holds for."""
    held = [(int(flags.sum()), said) for flags, said in cases if flags.any()]
    if len(held) == 1:
        return held[0][1]
    return "; ".join(f"{count} of {cases[0][0].numel()}: {said}" for count, said in held)


def where_zero_lies(solution: Solution) -> str:
    """The statuses of `Measure.natural` at mean 0, in words."""
    names = {
        Status.CONVERGED: "0 lies inside the hull of the support",
        Status.BOUNDARY: "0 lies on the boundary of the hull of the support: G has its infimum at infinity",
        Status.OUTSIDE: "0 lies outside the hull of the support: G has no lower bound and no point has mean zero",
    }
    return counted(*((solution.status == code, names.get(code, code.sentence)) for code in Status))


def at_once(value: Tensor) -> Solution:
    """A solution that needed no iteration."""
    residual = torch.zeros_like(value[..., 0])
    return Solution(value, residual.to(torch.int8), residual.to(torch.int64), residual, residual[None])


def side_by_side(value: Tensor, found: list[Solution]) -> Solution:
    """Solutions of single tokens (*batch, 1) as one of (*batch, n); shorter traces repeat their last entry."""
    longest = max(f.trace.shape[0] for f in found)
    traces = [torch.cat([f.trace, f.trace[-1:].expand(longest - len(f.trace), *f.trace.shape[1:])]) for f in found]
    status, steps, residual = (torch.cat([getattr(f, n) for f in found], -1) for n in ("status", "steps", "residual"))
    return Solution(value, status, steps, residual, torch.cat(traces, -1))


def drop_query(found: Equilibrium) -> Equilibrium:
    """A lone (d,) came in: the query axis goes."""
    axis = found.solution.status.ndim - 1
    return found._replace(
        solution=found.solution.select(axis, 0),
        contraction=found.contraction.select(axis, 0),
        unique=found.unique.select(axis, 0),
    )


def rows(where: str, measure: Measure, points: Tensor) -> Tensor:
    """Points as (*batch, q, d) with the batch of the measure."""
    measure.check_queries(points, where.split(".")[0])
    require_finite(where, points)
    rows = points[None] if points.ndim == 1 else points
    own = torch.Size([*measure.batch_shape, measure.query_rows or 1, measure.dim])
    return rows.expand(broadcast(where, own, rows.shape))


def number(where: str, value: object, least: float | None = None) -> float:
    """A finite number, ≥ ``least`` or positive."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not plain or (value <= 0 if least is None else value < least):  # pyright: ignore[reportOperatorIssue]
        expected = "a positive number" if least is None else f"a number ≥ {least:g}"
        raise ValueError(sentence(where, expected, value, "See the equation."))
    return float(value)  # pyright: ignore[reportArgumentType]
