"""Tests, commands (audit, chaos, cluster, mutants, benchmarks), the reference loop; evidence/ keeps runs."""
