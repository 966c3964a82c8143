"""The learner's ranks talking to each other: joining, the plan from rank 0, sums of figures.

Consumes    MASTER_ADDR, MASTER_PORT of the environment when there is more than one rank
Produces    a process group; small control messages over gloo, apart from the gradients' traffic
Waits for   the other ranks, at most rank_timeout_s in any collective
Unblocked by  every rank entering the same call; a dead rank closes its connections, which ends the others' calls with
            an error at once; a stopped one ends them at the timeout
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.schema import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What rank 0 tells all ranks to do next."""

    kind: Literal["idle", "train", "save", "pack", "export", "end"]
    batch: Batch | None = None
    lr: float | None = None
    """of this step, as it is on record"""
    lineage: int = 0


class Ranks:
    """The process group of one learner. One rank needs no network."""

    def __init__(self, *, rank: int, world: int, backend: str, timeout_s: float) -> None:
        self.rank, self.world = rank, world
        timeout = datetime.timedelta(seconds=timeout_s)
        # Made here and not by DeepSpeed, which passes a device_id: with it a second group of NCCL can hang.
        if not dist.is_initialized():
            store = meeting_place(rank, world, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        self._control = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)

    def tell(self, message: Any = None) -> Any:
        """Rank 0's message, on every rank; the others pass nothing."""
        if self.world == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank, in the order of ranks."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self._control)
        return items

    def sum(self, values: Sequence[float] | Tensor) -> Tensor:
        """Elementwise sum over ranks, float64."""
        total = torch.as_tensor(values, dtype=torch.float64).clone()
        if self.world > 1:
            dist.all_reduce(total, group=self._control)
        return total

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self._control)


def meeting_place(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store:
    """Where ranks find each other: at MASTER_ADDR alone, while the server that torch would start listens everywhere."""
    if world == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return dist.TCPStore(address, port, world, False, timeout=timeout)
    listener = socket.create_server((address, port), backlog=world)
    return dist.TCPStore(address, port, world, True, timeout=timeout, master_listen_fd=listener.detach())
