"""See the run: one snapshot for every reader, what limits it, what to turn.

readings    moments of a run, from its directory or from the buffer's status
snapshot    the one typed tree (and its JSON) that screen, page, advisor and tuner read
measure     readings -> snapshot, pure
advisor     snapshot -> capacities, verdict, at most three fixes, pure
text        snapshot and advice -> lines for a terminal
show        a look at a run; the snapshot and its advice as JSON
records     the single records behind the figures; trajectories: one of them to read
drill       drill-downs as lines for a terminal; glossary: what `?` says
sources     where a screen gets a run from: a directory, or the server of a page
desk        keys -> pages of text; app: the screen in a terminal around it; photo: a picture of that
web         `rocstar monitor --web`: the page and the snapshot, on loopback
web_records the single records that drill-downs ask for
trace       `rocstar trace`: what the run recorded, as one time line
metrics     the names of all figures, for Prometheus and people
"""
