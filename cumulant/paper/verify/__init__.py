"""`cumulant verify`: runs the numerical checks of every statement of the theory.

`STATEMENTS` has the statements, `CHECKS` the numerical comparisons they rest on: the library on one side, an oracle in
NumPy and SciPy that shares no code with it on the other.
"""

from cumulant.extras import missing_package

try:
    import scipy  # noqa: F401
except ModuleNotFoundError:
    raise missing_package("cumulant.paper.verify", "scipy", "cli") from None

from cumulant.paper import checks
from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.registry import CHECKS, NumericalCheck
from cumulant.paper.statements import STATEMENTS
from cumulant.paper.statements.statement import Statement, Verdict
from cumulant.paper.verify.run import Outcome, run_check, verify

__all__ = [
    "CHECKS",
    "STATEMENTS",
    "Evidence",
    "NumericalCheck",
    "Outcome",
    "Statement",
    "Verdict",
    "checks",
    "run_check",
    "verify",
]
