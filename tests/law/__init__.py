"""The staleness law under random histories: judge, shell, learner, world, and mutants that leave out a sentence."""
