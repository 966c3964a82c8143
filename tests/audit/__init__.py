"""`python -m tests.audit RUN`: recomputes from a run's index and segments what the run claims.

Imports nothing of ours, so that no fault of the program can hide itself here: the standard library, msgpack, numpy.
`audit(run)` returns figures and findings; an empty list of findings means that everything checked is as claimed.
"""

from tests.audit.report import Report, audit

__all__ = ["Report", "audit"]
