"""Benchmarks: `python -m tests.benchmarks.NAME --json`."""
