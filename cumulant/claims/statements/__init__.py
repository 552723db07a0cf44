"""Every statement of the paper and its drafts, and those added by this library, one `Claim` each.

`CLAIMS` has them in the order of the documents: the draft on the theory (S0), the poster (S1), the draft on message
passing (S2), the draft with introduction and related work (S3) and the web page (S4), then what is added here (X). The
words of a claim are the statement that holds; where the source says something else, ``literal`` has it. Ids are unique.
"""

from cumulant.claims.claim import Claim
from cumulant.claims.statements.added import ADDED
from cumulant.claims.statements.messages import MESSAGES
from cumulant.claims.statements.poster import POSTER
from cumulant.claims.statements.related import RELATED
from cumulant.claims.statements.theory import THEORY

CLAIMS: tuple[Claim, ...] = THEORY + POSTER + MESSAGES + RELATED + ADDED

__all__ = ["ADDED", "CLAIMS", "MESSAGES", "POSTER", "RELATED", "THEORY"]
