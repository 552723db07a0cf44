"""Every statement of the paper and of this library's theory, as something to run: `cumulant verify`.

`CLAIMS` has the statements, `CHECKS` the numerical comparisons they rest on: the library on one side, an oracle in
NumPy and SciPy that shares no code with it on the other.
"""

try:
    import scipy  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError("The oracles of cumulant.claims need SciPy: install cumulant[cli].") from None

from cumulant.claims import checks
from cumulant.claims.check import CHECKS, Check
from cumulant.claims.claim import Claim, Verdict
from cumulant.claims.evidence import Evidence
from cumulant.claims.run import Outcome, run_check, verify
from cumulant.claims.statements import CLAIMS

__all__ = ["CHECKS", "CLAIMS", "Check", "Claim", "Evidence", "Outcome", "Verdict", "checks", "run_check", "verify"]
