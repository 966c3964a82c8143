"""Starts, watches and sums up a run.

config, tree, derive, preflight   a recipe becomes one checked tree, before anything is started
run_directory, lock, pinned, durable    where a run is kept; its problems stay those it began with
copying       a copy of a run that can be resumed; an index made anew
early         signals before the driver listens
cli -> driver -> crew -> roles -> bodies      the command, the run, its Ray actors, what each role does
links, cluster, head, node        who finds whom; joining Ray, and losing it
threads, warden                   calls that block; ending everything that carries the run's mark
figures, summary, view, progress, status      the run's figures for people
reports, prometheus, tensorboard  its figures for tools, each by setting; METRICS.md, grafana.json
monitor/      one snapshot for every reader, what limits the run, what to turn; its time line
reach, turn   a command reaches a run that somebody else drives; a live dial is turned
"""
