"""Every statement of the paper and of this library's theory, as something to run: `cumulant verify`.

`CLAIMS` has the statements, `CHECKS` the numerical comparisons they rest on: the library on one side, an oracle in
NumPy and SciPy that shares no code with it on the other.
"""

try:
    import scipy  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError("The oracles of cumulant.paper.verify need SciPy: install cumulant[cli].") from None

from cumulant.paper import checks
from cumulant.paper.checks.evidence import Evidence
from cumulant.paper.checks.registry import CHECKS, Check
from cumulant.paper.statements import CLAIMS
from cumulant.paper.statements.statement import Claim, Verdict
from cumulant.paper.verify.run import Outcome, run_check, verify

__all__ = ["CHECKS", "CLAIMS", "Check", "Claim", "Evidence", "Outcome", "Verdict", "checks", "run_check", "verify"]
