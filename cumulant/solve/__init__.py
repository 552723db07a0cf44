"""Fixed points and roots of batched maps. Knows no measure."""

from cumulant.solve.anderson import Anderson
from cumulant.solve.fixed_point import fixed_point
from cumulant.solve.newton import newton
from cumulant.solve.picard import Damped, Picard
from cumulant.solve.solution import Solution, Status

__all__ = ["Anderson", "Damped", "Picard", "Solution", "Status", "fixed_point", "newton"]
