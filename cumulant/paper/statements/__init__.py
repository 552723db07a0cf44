"""Every statement of the paper and its drafts, and those added by this library, one `Statement` each.

`STATEMENTS` has them in the order of the documents: the draft on the theory (S0), the poster (S1), the draft on message
passing (S2), the draft with introduction and related work (S3) and the web page (S4), then what is added here (X). The
words of each are the statement that holds; where the source says something else, ``literal`` has it. Ids are unique.
"""

from cumulant.paper.statements.added import ADDED
from cumulant.paper.statements.messages import MESSAGES
from cumulant.paper.statements.poster import POSTER
from cumulant.paper.statements.related import RELATED
from cumulant.paper.statements.statement import Statement
from cumulant.paper.statements.theory import THEORY

STATEMENTS: tuple[Statement, ...] = THEORY + POSTER + MESSAGES + RELATED + ADDED

__all__ = ["ADDED", "MESSAGES", "POSTER", "RELATED", "STATEMENTS", "THEORY"]
