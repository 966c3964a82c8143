"""Measured runs, each with the commit and command that made it; `python -m tests.evidence` makes them."""
