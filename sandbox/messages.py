"""Kinds of the messages between a node's front and its supervisors (msgpack lists over a socket pair).

Consumes    nothing
Produces    names
Waits for   nothing
Invariant   the first element of each message is one of these
"""

RUN, GRADE, CANCEL, END = "run", "grade", "cancel", "end"
"""To a supervisor: a program (number, arrival, code, input, four limits, session, first), a batch of (number, answer,
gold), a number to cancel, a session to end."""
READY, REFUSED, WANT, RESULT, VERDICT, LOST, BACK, EVENT = (
    "ready", "refused", "want", "result", "verdict", "lost", "back", "event",
)  # fmt: skip
"""From a supervisor: started (whether cgroups limit memory), cannot start (why), how many more jobs it takes, a result,
verdicts, numbers of lost and of unstarted jobs, a counter and its increment."""
