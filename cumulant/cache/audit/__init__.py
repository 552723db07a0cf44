"""An audit of compressed caches: how wrong a cache is, and where, whoever compressed it.

run.py             `audit`: windows, methods, budgets; what is finished is kept
texts.py           documents and their windows
window.py          one window: prefix, compressors, passes, what is kept of them
continuation.py    the pass with the full cache, with the queries of its heads; the pass with a compressed one
head_errors.py     ΔG, missed mass and output errors of every head, exactly
token_errors.py    KL, NLL and agreement of predictions
retrieval.py       facts hidden in a text, and questions
result.py          what was measured on a window, and its file
record.py          the record of all windows, and its directory
summary.py         numbers with intervals, heads by damage, the sentence
"""

from cumulant.cache.audit.record import AuditRecord, AuditSettings
from cumulant.cache.audit.run import audit
from cumulant.cache.audit.summary import DamagedHead, MethodRow
from cumulant.cache.audit.texts import AuditText

__all__ = [
    "AuditRecord",
    "AuditSettings",
    "AuditText",
    "DamagedHead",
    "MethodRow",
    "audit",
]
