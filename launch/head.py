"""Ray's head: whether it still listens. Without it no role is found or started again.

Consumes    its address
Produces    a word on it, once it is lost
Waits for   its port to refuse or not to answer for HEAD_PATIENCE_S
Invariant   Ray's processes, the driver's own among them, end themselves a minute after the head: whoever ends in good
            order has done so before that
"""

from __future__ import annotations

import asyncio
import time

HEAD_PATIENCE_S = 15.0
DRAIN_S = 30.0
"""In which a run without a head has ended."""
CHECK_S = 1.0
ANSWER_S = 5.0
MIN_IN_VAIN = 3
"""So many checks must have failed: one alone may have done so because this process got no time meanwhile."""


def address() -> str:
    """HOST:PORT of the head of the cluster that this process has joined."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


async def lost(where: str, *, patience_s: float = HEAD_PATIENCE_S) -> str:
    """Returns, with the reason, when nothing has listened there for `patience_s`."""
    heard_s, in_vain = time.monotonic(), 0
    while in_vain < MIN_IN_VAIN or time.monotonic() - heard_s < patience_s:
        await asyncio.sleep(min(CHECK_S, patience_s / 4))
        if await listens(where):
            heard_s, in_vain = time.monotonic(), 0
        else:
            in_vain += 1
    return f"Ray's head at {where} has not answered for {patience_s:g} s"


async def listens(where: str) -> bool:
    """Something accepts connections there now."""
    host, _, port = where.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:  # a timeout among them
        return False
    writer.close()
    return True
