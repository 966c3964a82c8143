"""Starts, watches and sums up a run.

config, tree, derive, preflight   a recipe becomes one checked tree, before anything is started
run_directory, lock, pinned, durable    where a run is kept; its problems stay those it began with
early         signals before the driver listens
cli -> driver -> crew -> roles -> bodies      the command, the run, its Ray actors, what each role does
links, cluster, node, warden      who finds whom; joining Ray; ending everything that carries the run's mark
figures, summary, view, progress, prometheus, status      the run's figures for people and tools
"""
