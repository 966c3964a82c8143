"""`python -m tests.chaos --minutes M --seed K --json`: a run trains while its roles are killed; then it is audited.

What is done to whom follows from the seed (plan.py). Processes are found by the marks that they carry (victim.py). A
witness reads the buffer's index all the while, as any other reader could, and notes what is durable (witness.py). In
the end the run's own records, the witness's notes and a replay of the recorded batches must agree (verdict.py).
"""
