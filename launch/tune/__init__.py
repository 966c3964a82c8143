"""What a run would do under other settings: a discrete-event model fitted to what it recorded.

records.py   a run directory -> what was measured
fit.py       that -> a model: pure
machine.py   cores that activities share, engines that batch (simpy)
model.py     the run's way through them, under the buffer's own ledger, leases and RoC
sweep.py     settings to try, the frontier, the recommendation: pure but for the simulation
check.py     whether a fix of the advisor is contradicted by the simulation
show.py      `rocstar tune RUN`: text, and the recommendation as an overlay of a recipe
"""
