"""Tests, commands (audit, benchmarks, chaos, cluster, evidence, mutants), the reference loop; recorded/ keeps runs."""
