"""The run's truth: tickets, leases, durable turns, groups, batches. What happens to a turn, and where to read it:

client      a role's calls          connection  sent again until answered      wire    kinds of messages, refusals
transport   the ROUTER socket       server      rounds and group commits       parking long polls
service     what each request does  handlers_actor, handlers_group, handlers_learner   its parts
run_state   all that is decided with: ledger and taking (the staleness law), tickets, leases, membership, groups,
            peers                   evaluation  the order of a run             report  what status shows
storage     units of a commit       segments    payload files                  index   SQLite tables
spare, journal      what the index is made anew from, in a copy of the directory or when it is damaged
restore     a run taken up again    metrics_log one line per role and second
dials       settings that are turned while a run goes on
schema, codec, meters, usage, doors records, their coding, clocks and counters, cores, keys: anybody may import these
"""
