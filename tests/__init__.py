"""Tests (test_*.py), commands (audit, chaos, cluster, mutants, benchmarks) and the reference loop; evidence/ keeps runs."""
