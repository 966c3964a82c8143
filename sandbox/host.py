"""What this host lets a node do: how its shards wall their guests in.

Consumes    the isolation that is asked for; the host's uids and this process's privileges
Produces    a JailPlan per shard
Waits for   nothing
Invariant   no two slots of a host's nodes share a uid where there are enough of them
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandbox.jail import JailPlan
from sandbox.shard import StartRefused

# Guests' uids: far above those of people, a block per node and a part of it per shard, so that no two calls share one.
_ALL_UIDS = 1 << 31
_UID_BASE, _UID_BLOCKS, _UIDS_PER_NODE, _UIDS = 1 << 28, 4096, 1 << 16, 2048
_FEW_UIDS_BASE, _FEW_UIDS = 20_000, 64
_CAP_SYS_ADMIN = 21


def plan(full: bool, index: int) -> JailPlan:
    """How shard `index` walls its guests in: as root with uids of their own, else in a user namespace.

    Raises:
        StartRefused: root without namespaces, and a Python that only root can read.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    can_mount = bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    if os.geteuid() != 0 or (full and not can_mount):
        return JailPlan(full=full, first_uid=0)
    if not full and any(
        path.stat().st_mode & 1 == 0 for path in (Path(sys.base_prefix), *Path(sys.base_prefix).parents)
    ):
        raise StartRefused(
            f"sandbox.isolation = rlimits runs calls as users of their own, and those cannot read Python at "
            f"{sys.base_prefix}: install it elsewhere, or run the node as an ordinary user"
        )
    if int(Path("/proc/self/uid_map").read_text().split()[2]) < _ALL_UIDS:  # a container with few uids
        return JailPlan(full=full, first_uid=_FEW_UIDS_BASE + index * _FEW_UIDS % _FEW_UIDS_BASE, uids=_FEW_UIDS)
    block = os.getpid() % _UID_BLOCKS * _UIDS_PER_NODE + index * _UIDS % _UIDS_PER_NODE
    return JailPlan(full=full, first_uid=_UID_BASE + block, uids=_UIDS)
