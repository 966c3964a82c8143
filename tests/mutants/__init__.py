"""`python -m tests.mutants`: leaves one law out of a copy of the tree at a time, and names the test that notices.

A test that can't fail proves nothing; here each law is broken in the source, in one place, and some test has to fail.
The sentences of the staleness law, one by one, have mutants of their own: tests/test_ledger_mutants.py.
"""
