"""Tests, commands (audit, chaos, cluster, mutants, benchmarks), the reference loop; evidence/, recorded/ keep runs."""
