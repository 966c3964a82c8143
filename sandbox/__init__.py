"""Runs code that a model wrote, isolated, and says truthfully what happened; grades answers.

A call's way:  client (balances over nodes, retries) -> server (ROUTER, queue) -> shard -> supervisor (limits, output)
               -> zygote (warm interpreter, forks) -> guest (jailed child: runs the code) -> Result back the same way.

api         Call, Result, Status, Check, Verdict: what the other packages see
settings    the dials of a sandbox node
client      asyncio client of one or several nodes;  server  a node's front
"""
