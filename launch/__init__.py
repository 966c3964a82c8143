"""Starts, watches and sums up a run.

config, tree, derive, preflight   a recipe becomes one checked tree, before anything is started
cli -> driver -> crew -> roles -> bodies      the command, the run, its Ray actors, what each role does
links, cluster, node, warden      who finds whom; joining Ray; ending everything that carries the run's mark
figures, summary, view, progress, prometheus, status      the run's figures for people and tools
"""
