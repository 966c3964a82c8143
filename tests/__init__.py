"""Tests, commands (audit, chaos, cluster, mutants, benchmarks), the reference loop; evidence/ and recorded/ keep runs."""
